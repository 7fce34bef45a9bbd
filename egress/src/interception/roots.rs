//! Whom the host trusts to know servers by.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// Longest file of certificates to trust, in bytes; that of Debian has 220 KB.
pub const MAX_ROOTS_BYTES: usize = 2 << 20;

/// Characters of a line of PEM (RFC 7468 §2).
const LINE: usize = 64;

/// Why servers can't be known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RootsError {
    /// A text with no certificates, or with broken ones.
    #[error("The certificates to trust are no PEM: {0}")]
    NoPem(String),
    /// Too long a text.
    #[error("The certificates to trust take more than {} MiB", MAX_ROOTS_BYTES >> 20)]
    TooLong,
    /// The host trusts nobody.
    #[error(
        "this host trusts no certificate authority: install ca-certificates, or name a file of them"
    )]
    None,
    /// TLS has no version that works.
    #[error("TLS can't be set up: {0}")]
    Tls(String),
}

/// The certificates of a text; none of an empty one.
pub(super) fn parse(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, RootsError> {
    if pem.len() > MAX_ROOTS_BYTES {
        return Err(RootsError::TooLong);
    }
    if pem.is_empty() {
        return Ok(Vec::new());
    }
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|error| RootsError::NoPem(error.to_string()))?;
    if found.is_empty() {
        return Err(RootsError::NoPem("there is no certificate".to_owned()));
    }
    let mut store = RootCertStore::empty();
    for certificate in &found {
        store
            .add(certificate.clone())
            .map_err(|error| RootsError::NoPem(error.to_string()))?;
    }
    Ok(found)
}

/// Those that the host's programs trust; where `SSL_CERT_FILE` or `SSL_CERT_DIR` is set, those of it.
pub(super) fn of_host() -> Vec<CertificateDer<'static>> {
    // What can't be read is missing, which shows where it is needed.
    rustls_native_certs::load_native_certs().certs
}

pub(super) fn store(extra: &[CertificateDer<'static>]) -> Result<RootCertStore, RootsError> {
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(of_host());
    store.add_parsable_certificates(extra.iter().cloned());
    if store.is_empty() {
        return Err(RootsError::None);
    }
    Ok(store)
}

pub(super) fn to_pem(certificates: &[CertificateDer<'static>]) -> String {
    let mut pem = String::new();
    for certificate in certificates {
        pem.push_str("-----BEGIN CERTIFICATE-----\n");
        for (index, character) in STANDARD.encode(certificate).char_indices() {
            if index > 0 && index % LINE == 0 {
                pem.push('\n');
            }
            pem.push(character);
        }
        pem.push_str("\n-----END CERTIFICATE-----\n");
    }
    pem
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_are_read_back_and_what_is_none_is_refused() {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(vec!["a.example".to_owned()]).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap();

        let found = parse(certificate.pem().as_bytes()).unwrap();
        assert_eq!(parse(to_pem(&found).as_bytes()).unwrap(), found);
        assert_eq!(parse(b"").unwrap(), []);
        for text in [
            "no certificate",
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
            "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n",
        ] {
            assert!(
                matches!(parse(text.as_bytes()), Err(RootsError::NoPem(_))),
                "{text}"
            );
        }
        assert_eq!(
            parse(&vec![b'\n'; MAX_ROOTS_BYTES + 1]),
            Err(RootsError::TooLong)
        );
    }
}
