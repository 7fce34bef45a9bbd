//! A sandbox's own certificate authority: made with the sandbox, trusted by its guest alone, and only for the hosts of its secrets.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, CidrSubnet, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, KeyPair, KeyUsagePurpose, NameConstraints,
};
use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::PrivatePkcs8KeyDer;

use crate::name::HostName;

/// How long before its making a certificate is good: a guest's clock may be behind.
const BACKDATED: Duration = Duration::from_secs(2 * 24 * 60 * 60);

/// How long after it: longer than a sandbox lives, and no longer than clients take from a server (398 days).
const VALID: Duration = Duration::from_secs(390 * 24 * 60 * 60);

/// What stands in the certificates; programs compare the alternative names alone.
const AUTHORITY_NAME: &str = "sandvmm: this sandbox's authority";
const SERVER_NAME: &str = "sandvmm: this sandbox's host";

/// Most certificates that are kept. Below `*.DOMAIN` a guest chooses names; above, all are made anew.
const MAX_KEPT: usize = 256;

/// A certificate could not be made.
#[derive(Debug, Clone, thiserror::Error)]
#[error("The sandbox's own certificate can't be made: {0}")]
pub struct AuthorityError(String);

/// Makes certificates for the hosts of a sandbox's secrets.
#[derive(Debug)]
pub(super) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    provider: Arc<CryptoProvider>,
    kept: Mutex<HashMap<HostName, Arc<ServerConfig>>>,
}

impl Authority {
    /// One with a key of its own, good for names of these domains and below.
    pub(super) fn new<'a>(
        domains: impl Iterator<Item = &'a HostName>,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Self, AuthorityError> {
        let mut params = params(AUTHORITY_NAME);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.name_constraints = Some(NameConstraints {
            permitted_subtrees: domains
                .map(|domain| GeneralSubtree::DnsName(domain.to_string()))
                .collect(),
            // Names of one kind say nothing of the other: no address at all (RFC 5280 §4.2.1.10).
            excluded_subtrees: vec![
                GeneralSubtree::IpAddress(CidrSubnet::V4([0; 4], [0; 4])),
                GeneralSubtree::IpAddress(CidrSubnet::V6([0; 16], [0; 16])),
            ],
        });
        let key = KeyPair::generate().map_err(failed)?;
        Ok(Self {
            issuer: CertifiedIssuer::self_signed(params, key).map_err(failed)?,
            provider: Arc::clone(provider),
            kept: Mutex::default(),
        })
    }

    /// Its certificate, for the guest.
    pub(super) fn pem(&self) -> String {
        self.issuer.as_ref().pem()
    }

    /// What a server of this name is to the guest that speaks this protocol, as ALPN names it (RFC 7301).
    pub(super) fn server(
        &self,
        name: &HostName,
        protocol: &[u8],
    ) -> Result<Arc<ServerConfig>, AuthorityError> {
        let mut config = ServerConfig::clone(&*self.certified(name)?);
        config.alpn_protocols = vec![protocol.to_vec()];
        Ok(Arc::new(config))
    }

    /// The same before a protocol is chosen, made once.
    fn certified(&self, name: &HostName) -> Result<Arc<ServerConfig>, AuthorityError> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = kept.get(name) {
            return Ok(Arc::clone(known));
        }
        let made = Arc::new(self.make(name)?);
        if kept.len() >= MAX_KEPT {
            kept.clear();
        }
        kept.insert(name.clone(), Arc::clone(&made));
        Ok(made)
    }

    fn make(&self, name: &HostName) -> Result<ServerConfig, AuthorityError> {
        let mut params = params(SERVER_NAME);
        let alternative = name.as_str().try_into().map_err(failed)?;
        params.subject_alt_names = vec![rcgen::SanType::DnsName(alternative)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate().map_err(failed)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(failed)?;
        let chain = vec![
            certificate.der().clone(),
            self.issuer.as_ref().der().clone(),
        ];
        let key = PrivatePkcs8KeyDer::from(key.serialize_der());
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()
            .map_err(failed)?
            .with_no_client_auth()
            .with_single_cert(chain, key.into())
            .map_err(failed)?;
        // Nothing is resumed: each connection is looked into from its first word.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        Ok(config)
    }
}

fn failed(error: impl std::fmt::Display) -> AuthorityError {
    AuthorityError(error.to_string())
}

/// A name and times.
fn params(name: &str) -> CertificateParams {
    let now = SystemTime::now();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.not_before = (now - BACKDATED).into();
    params.not_after = (now + VALID).into();
    params
}

#[cfg(test)]
mod tests {
    use rustls::client::danger::ServerCertVerifier;
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, ServerName};
    use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConnection};

    use super::*;

    fn provider() -> Arc<CryptoProvider> {
        Arc::new(rustls::crypto::ring::default_provider())
    }

    fn name(text: &str) -> HostName {
        HostName::parse(text).unwrap()
    }

    /// Whether a client that trusts the authority alone takes its certificate for this name.
    fn is_taken(authority: &Authority, host: &str) -> Result<(), rustls::Error> {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap())
            .unwrap();
        let config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let server_name = ServerName::try_from(host.to_owned()).unwrap();
        let mut client = ClientConnection::new(Arc::new(config), server_name).unwrap();
        let mut server = ServerConnection::new(authority.certified(&name(host)).unwrap()).unwrap();
        while client.is_handshaking() || server.is_handshaking() {
            let mut wire = Vec::new();
            client.write_tls(&mut wire).unwrap();
            server.read_tls(&mut wire.as_slice()).unwrap();
            server.process_new_packets()?;
            let mut wire = Vec::new();
            server.write_tls(&mut wire).unwrap();
            client.read_tls(&mut wire.as_slice()).unwrap();
            client.process_new_packets()?;
        }
        Ok(())
    }

    #[test]
    fn a_certificate_is_good_for_hosts_of_the_secrets_and_for_no_other() {
        let domains = [name("api.example"), name("b.example")];
        let authority = Authority::new(domains.iter(), &provider()).unwrap();

        for host in ["api.example", "x.b.example"] {
            is_taken(&authority, host).unwrap();
        }
        is_taken(&authority, "other.example").unwrap_err();
    }

    #[test]
    fn the_authority_is_good_for_no_address() {
        let domain = name("b.example");
        let authority = Authority::new([&domain].into_iter(), &provider()).unwrap();
        for address in ["192.0.2.1", "2001:db8::1"] {
            let mut params = params(SERVER_NAME);
            let address: std::net::IpAddr = address.parse().unwrap();
            params.subject_alt_names = vec![rcgen::SanType::IpAddress(address)];
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
            let key = KeyPair::generate().unwrap();
            let certificate = params.signed_by(&key, &authority.issuer).unwrap();

            let mut roots = RootCertStore::empty();
            roots.add(authority.issuer.as_ref().der().clone()).unwrap();
            let verifier = rustls::client::WebPkiServerVerifier::builder_with_provider(
                Arc::new(roots),
                provider(),
            );
            let taken = verifier.build().unwrap().verify_server_cert(
                certificate.der(),
                &[],
                &ServerName::IpAddress(address.into()),
                &[],
                rustls::pki_types::UnixTime::now(),
            );
            let error = taken.unwrap_err().to_string();
            assert!(error.contains("NameConstraint"), "{error}");
        }
    }

    #[test]
    fn certificates_are_kept_up_to_a_bound() {
        let domain = name("b.example");
        let authority = Authority::new([&domain].into_iter(), &provider()).unwrap();
        let first = authority.certified(&name("a.b.example")).unwrap();

        assert!(Arc::ptr_eq(
            &first,
            &authority.certified(&name("a.b.example")).unwrap()
        ));
        for number in 0..MAX_KEPT {
            authority
                .certified(&name(&format!("a{number}.b.example")))
                .unwrap();
        }
        assert!(authority.kept.lock().unwrap().len() <= MAX_KEPT);
    }

    #[test]
    fn certificates_are_good_for_clocks_a_day_behind_and_a_year_on() {
        let params = params("x");
        let day = Duration::from_secs(24 * 60 * 60);
        assert!(params.not_before < SystemTime::now() - day);
        assert!(params.not_after > SystemTime::now() + 365 * day);
    }
}
