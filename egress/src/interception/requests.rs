//! The requests of one connection that was opened: each is checked as plain HTTP is, and in the values of its header fields, and
//! nowhere else, placeholders become secrets.

use std::fmt;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use memchr::memmem;
use zeroize::Zeroizing;

use super::mask::Masks;
use crate::http::{HttpError, HttpGuard, MAX_FIELDS, MAX_HEAD_BYTES, Piece};
use crate::policy::Target;
use crate::secret::Secret;

/// Longest head with secrets in it, in bytes.
const MAX_FILLED_BYTES: usize = MAX_HEAD_BYTES + (64 << 10);

/// The fields that hold credentials in Base64 (RFC 7617): a placeholder in there is found too.
const CREDENTIALS: [&str; 2] = ["authorization", "proxy-authorization"];
const BASIC: &[u8] = b"basic ";

/// What a server would send back compressed, it sends back plain, so that a secret in it is seen.
const ACCEPT_ENCODING: &str = "accept-encoding";
const IDENTITY: &[u8] = b"identity";

/// The requests of one connection.
pub(super) struct Requests {
    guard: HttpGuard,
    /// Those that are for its host.
    secrets: Vec<Arc<Secret>>,
}

impl fmt::Debug for Requests {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Requests")
            .field("guard", &self.guard)
            .field("secrets", &self.secrets)
            .finish()
    }
}

impl Requests {
    /// For a connection to this host.
    pub(super) fn new(target: &Target, port: u16, secrets: Vec<Arc<Secret>>) -> Self {
        Self {
            guard: HttpGuard::opened(target.clone(), port),
            secrets,
        }
    }

    /// Appends to `out` what of these bytes may go on, with secrets in it, and says how many that were; the rest is to be
    /// shown again with what follows it. What must not come back is added to the masks first.
    ///
    /// # Errors
    /// See [`HttpError`]; the connection is of no more use then.
    pub(super) fn take(
        &mut self,
        bytes: &[u8],
        masks: &mut Masks,
        out: &mut Zeroizing<Vec<u8>>,
    ) -> Result<usize, HttpError> {
        let mut rest = bytes;
        while let Some(piece) = self.guard.next(rest)? {
            let (Piece::Head(count) | Piece::Body(count)) = piece;
            let (taken, next) = rest.split_at_checked(count).unwrap_or((rest, &[]));
            match piece {
                Piece::Head(_) => self.fill(taken, masks, out)?,
                Piece::Body(_) => out.extend_from_slice(taken),
            }
            rest = next;
        }
        Ok(bytes.len() - rest.len())
    }

    /// A head that was found good.
    fn fill(
        &self,
        head: &[u8],
        masks: &mut Masks,
        out: &mut Zeroizing<Vec<u8>>,
    ) -> Result<(), HttpError> {
        const ODD: HttpError = HttpError::Malformed("a request line or field is none");
        let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
        let mut request = httparse::Request::new(&mut fields);
        if !matches!(request.parse(head), Ok(httparse::Status::Complete(_))) {
            return Err(ODD);
        }
        let mut filled: Vec<(&str, Zeroizing<Vec<u8>>)> = Vec::new();
        let mut has_secret = false;
        let mut total = 0_usize;
        for field in request.headers.iter() {
            let value = self.value(field, masks)?;
            has_secret |= value.is_some();
            let value = value.unwrap_or_else(|| Zeroizing::new(field.value.to_vec()));
            total += field.name.len() + value.len();
            if total > MAX_FILLED_BYTES {
                return Err(HttpError::TooLong);
            }
            filled.push((field.name, value));
        }
        if !has_secret {
            out.extend_from_slice(head);
            return Ok(());
        }
        let line = memmem::find(head, b"\r\n").ok_or(ODD)?;
        // In one piece: a buffer that grows leaves its bytes behind.
        out.reserve(line + total + filled.len() * 4 + 64);
        out.extend_from_slice(head.get(..line).unwrap_or_default());
        for (name, value) in &filled {
            if !name.eq_ignore_ascii_case(ACCEPT_ENCODING) {
                push_field(out, name, value);
            }
        }
        push_field(out, "Accept-Encoding", IDENTITY);
        out.extend_from_slice(b"\r\n\r\n");
        Ok(())
    }

    /// A field's value with secrets, where it has a placeholder.
    fn value(
        &self,
        field: &httparse::Header<'_>,
        masks: &mut Masks,
    ) -> Result<Option<Zeroizing<Vec<u8>>>, HttpError> {
        if let Some(value) = self.replace(field.value, masks)? {
            return Ok(Some(value));
        }
        let holds_credentials = CREDENTIALS
            .iter()
            .any(|name| field.name.eq_ignore_ascii_case(name));
        let Some((scheme, encoded)) = field.value.split_at_checked(BASIC.len()) else {
            return Ok(None);
        };
        if !holds_credentials || !scheme.eq_ignore_ascii_case(BASIC) {
            return Ok(None);
        }
        let Ok(decoded) = STANDARD.decode(encoded.trim_ascii()) else {
            return Ok(None);
        };
        let Some(plain) = self.replace(&decoded, masks)? else {
            return Ok(None);
        };
        let encoded = Zeroizing::new(STANDARD.encode(plain.as_slice()));
        mask(masks, encoded.as_bytes())?;
        Ok(Some(Zeroizing::new([scheme, encoded.as_bytes()].concat())))
    }

    /// Secrets for placeholders; `None` where there are none.
    fn replace(
        &self,
        text: &[u8],
        masks: &mut Masks,
    ) -> Result<Option<Zeroizing<Vec<u8>>>, HttpError> {
        let mut replaced: Option<Zeroizing<Vec<u8>>> = None;
        for secret in &self.secrets {
            let text = replaced
                .as_ref()
                .map_or(text, |replaced| replaced.as_slice());
            let placeholder = secret.placeholder().as_bytes();
            let count = memmem::find_iter(text, placeholder).count();
            if count == 0 {
                continue;
            }
            let length = text.len() + count * secret.value().len();
            if length > MAX_FILLED_BYTES {
                return Err(HttpError::TooLong);
            }
            mask(masks, secret.value())?;
            let mut next = Zeroizing::new(Vec::with_capacity(length));
            let mut rest = text;
            while let Some(at) = memmem::find(rest, placeholder) {
                next.extend_from_slice(rest.get(..at).unwrap_or_default());
                next.extend_from_slice(secret.value());
                rest = rest.get(at + placeholder.len()..).unwrap_or_default();
            }
            next.extend_from_slice(rest);
            replaced = Some(next);
        }
        Ok(replaced)
    }
}

fn mask(masks: &mut Masks, value: &[u8]) -> Result<(), HttpError> {
    if masks.add(value) {
        Ok(())
    } else {
        Err(HttpError::TooManySecrets)
    }
}

fn push_field(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::name::HostName;

    const VALUE: &str = "s3cr3t-value";

    struct Case {
        requests: Requests,
        secret: Arc<Secret>,
        masks: Masks,
    }

    impl Case {
        fn new() -> Self {
            let target = Target::Name(HostName::parse("a.example").unwrap());
            let secret = Secret::new("TOKEN", &["a.example"], VALUE.as_bytes().to_vec()).unwrap();
            let secret = Arc::new(secret);
            Self {
                requests: Requests::new(&target, 443, vec![Arc::clone(&secret)]),
                secret,
                masks: Masks::default(),
            }
        }

        /// Text with `{}` for the placeholder, as it goes on.
        fn taken(&mut self, text: &str) -> Result<String, HttpError> {
            let text = text.replace("{}", self.secret.placeholder());
            let mut out = Zeroizing::new(Vec::new());
            let count = self
                .requests
                .take(text.as_bytes(), &mut self.masks, &mut out)?;
            assert_eq!(count, text.len());
            Ok(String::from_utf8(out.to_vec()).unwrap())
        }
    }

    #[test]
    fn placeholders_in_fields_become_the_secret() {
        let out = Case::new()
            .taken(
                "GET /x HTTP/1.1\r\nHost: a.example\r\nAuthorization: Bearer {}\r\nAccept-Encoding: gzip\r\nx-two: {},{}\r\n\r\n",
            )
            .unwrap();
        assert_eq!(
            out,
            "GET /x HTTP/1.1\r\nHost: a.example\r\nAuthorization: Bearer s3cr3t-value\r\nx-two: s3cr3t-value,s3cr3t-value\r\n\
             Accept-Encoding: identity\r\n\r\n"
        );
    }

    #[test]
    fn basic_credentials_are_looked_into() {
        let mut case = Case::new();
        let encoded = STANDARD.encode(format!("me:{}", case.secret.placeholder()));
        let out = case
            .taken(&format!(
                "GET / HTTP/1.1\r\nHost: a.example\r\nAuthorization: Basic {encoded}\r\n\r\n"
            ))
            .unwrap();
        let expected = STANDARD.encode(format!("me:{VALUE}"));
        assert!(
            out.contains(&format!("Authorization: Basic {expected}\r\n")),
            "{out}"
        );

        let mut back = Vec::new();
        case.masks
            .take(format!("[{expected}][{VALUE}]").as_bytes(), &mut back);
        assert!(back.iter().all(|byte| b"[]*".contains(byte)));
    }

    #[test]
    fn placeholders_elsewhere_stay() {
        for text in [
            "GET /{}?k={} HTTP/1.1\r\nHost: a.example\r\n\r\n",
            "GET https://a.example/{} HTTP/1.1\r\nHost: a.example\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a.example\r\n{}: x\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n2f\r\n{}\r\n0\r\n\r\n",
        ] {
            let mut case = Case::new();
            let same = text.replace("{}", case.secret.placeholder());
            assert_eq!(case.taken(text).unwrap(), same);
        }
        let mut case = Case::new();
        let body = format!("x: {}\r\n\r\n", case.secret.placeholder());
        let text = format!(
            "POST / HTTP/1.1\r\nHost: a.example\r\nX: {{}}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        assert!(case.taken(&text).unwrap().ends_with(&body));
    }

    #[test]
    fn requests_that_are_not_the_hosts_or_are_ambiguous_are_refused() {
        for (text, error) in [
            (
                "GET / HTTP/1.1\r\nHost: b.example\r\nX: {}\r\n\r\n",
                HttpError::OtherHost("b.example".to_owned()),
            ),
            (
                "GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n",
                HttpError::Malformed(
                    "the request's target is neither a path nor a URI of this scheme",
                ),
            ),
            (
                "TRACE / HTTP/1.1\r\nHost: a.example\r\nX: {}\r\n\r\n",
                HttpError::Trace,
            ),
            (
                "CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n",
                HttpError::Connect,
            ),
            (
                "GET / HTTP/1.1\r\nHost: a.example\r\nUpgrade: websocket\r\n\r\n",
                HttpError::Upgrade,
            ),
            (
                "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
                HttpError::Length("Content-Length beside Transfer-Encoding"),
            ),
        ] {
            assert_eq!(Case::new().taken(text), Err(error), "{text}");
        }
        let mut case = Case::new();
        let host = case.secret.placeholder().to_owned();
        assert_eq!(
            case.taken("GET / HTTP/1.1\r\nHost: {}\r\n\r\n"),
            Err(HttpError::OtherHost(host))
        );
    }

    #[test]
    fn what_secrets_make_of_a_head_is_bounded() {
        let target = Target::Name(HostName::parse("a.example").unwrap());
        let long = vec![b'x'; crate::secret::MAX_SECRET_BYTES];
        let secret = Arc::new(Secret::new("TOKEN", &["a.example"], long).unwrap());
        let mut requests = Requests::new(&target, 443, vec![Arc::clone(&secret)]);
        let head = format!(
            "GET / HTTP/1.1\r\nHost: a.example\r\nX: {}\r\n\r\n",
            secret.placeholder().repeat(20)
        );
        let (mut masks, mut out) = (Masks::default(), Zeroizing::new(Vec::new()));
        let taken = requests.take(head.as_bytes(), &mut masks, &mut out);
        assert_eq!(taken, Err(HttpError::TooLong));
        assert!(out.is_empty());
    }

    #[test]
    fn credentials_without_end_are_refused() {
        let mut case = Case::new();
        let mut end = Ok(String::new());
        for number in 0..200 {
            let encoded = STANDARD.encode(format!("{number}:{}", case.secret.placeholder()));
            end = case.taken(&format!(
                "GET / HTTP/1.1\r\nHost: a.example\r\nAuthorization: Basic {encoded}\r\n\r\n"
            ));
            if end.is_err() {
                break;
            }
        }
        assert_eq!(end, Err(HttpError::TooManySecrets));
    }

    proptest! {
        #[test]
        fn pieces_make_no_difference(size in 1_usize..80, count in 1_usize..4) {
            let mut case = Case::new();
            let one = "POST /{} HTTP/1.1\r\nHost: a.example\r\nX: {}\r\nContent-Length: 3\r\n\r\nabc";
            let text = one.repeat(count).replace("{}", case.secret.placeholder());
            let whole = Case { secret: Arc::clone(&case.secret), requests: Requests::new(
                &Target::Name(HostName::parse("a.example").unwrap()), 443, vec![Arc::clone(&case.secret)]), masks: Masks::default() }
                .taken(&text).unwrap();

            let (mut held, mut out) = (Vec::new(), Zeroizing::new(Vec::new()));
            for piece in text.as_bytes().chunks(size) {
                held.extend_from_slice(piece);
                let count = case.requests.take(&held, &mut case.masks, &mut out).unwrap();
                held.drain(..count);
            }
            prop_assert_eq!(out.as_slice(), whole.as_bytes());
            prop_assert_eq!(whole.matches(VALUE).count(), count);
        }
    }
}
