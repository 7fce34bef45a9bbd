//! The requests of one connection that was opened: each is checked as plain HTTP is, and in the values of its header fields, and
//! nowhere else, placeholders become secrets. None asks for an answer in which a secret could not be seen.

use std::sync::Arc;

use memchr::memmem;
use zeroize::Zeroizing;

use super::answers::Asked;
use super::needle::Forms;
use super::placeholders::{MAX_FILLED_BYTES, Placeholders};
use crate::http::{HttpError, HttpGuard, MAX_FIELDS, Piece};
use crate::policy::Target;
use crate::relay::MAX_HELD_BYTES;
use crate::secret::Secret;

/// Fields by which a request asks for an answer that is compressed, or for a part of one: in neither a secret is seen. They are left out
/// of every request, as a server may show on one connection what it was sent on another. gRPC and its kin have their own.
pub(super) const LEFT_OUT: [&str; 6] = [
    "accept-encoding",
    "te",
    "range",
    "if-range",
    "grpc-accept-encoding",
    "connect-accept-encoding",
];
pub(super) const IDENTITY: &str = "identity";

/// The requests of one connection.
#[derive(Debug)]
pub(super) struct Requests {
    guard: HttpGuard,
    /// Those for its host.
    placeholders: Placeholders,
}

impl Requests {
    /// For a connection to this host.
    pub(super) fn new(
        target: &Target,
        port: u16,
        secrets: Vec<Arc<Secret>>,
        forms: &Arc<Forms>,
    ) -> Self {
        Self {
            guard: HttpGuard::opened(target.clone(), port),
            placeholders: Placeholders::new(secrets, forms),
        }
    }

    /// Appends to `out` what of these bytes may go on, with secrets in it, and says how many that were; the rest is to be
    /// shown again with what follows it. Takes no more while `out` is full, by [`MAX_HELD_BYTES`], or too many requests are not answered.
    ///
    /// # Errors
    /// See [`HttpError`]; the connection is of no more use then.
    pub(super) fn take(
        &mut self,
        bytes: &[u8],
        asked: &mut Asked,
        out: &mut Zeroizing<Vec<u8>>,
    ) -> Result<usize, HttpError> {
        let mut rest = bytes;
        while out.len() < MAX_HELD_BYTES
            && asked.has_room()
            && let Some(piece) = self.guard.next(rest)?
        {
            let (Piece::Head(count) | Piece::Body(count)) = piece;
            let (taken, next) = rest.split_at_checked(count).unwrap_or((rest, &[]));
            match piece {
                Piece::Head(_) => self.fill(taken, asked, out)?,
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
        asked: &mut Asked,
        out: &mut Zeroizing<Vec<u8>>,
    ) -> Result<(), HttpError> {
        const ODD: HttpError = HttpError::Malformed("a request line or field is none");
        let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
        let mut request = httparse::Request::new(&mut fields);
        if !matches!(request.parse(head), Ok(httparse::Status::Complete(_))) {
            return Err(ODD);
        }
        let mut filled: Vec<(&str, Zeroizing<Vec<u8>>)> = Vec::new();
        let mut total = 0_usize;
        for field in request.headers.iter() {
            if LEFT_OUT
                .iter()
                .any(|name| field.name.eq_ignore_ascii_case(name))
            {
                continue;
            }
            let value = self.placeholders.fill(field.name, field.value)?;
            let value = value.unwrap_or_else(|| Zeroizing::new(field.value.to_vec()));
            total += field.name.len() + value.len();
            if total > MAX_FILLED_BYTES {
                return Err(HttpError::TooLong);
            }
            filled.push((field.name, value));
        }
        let line = memmem::find(head, b"\r\n").ok_or(ODD)?;
        // In one piece: a buffer that grows leaves its bytes behind.
        out.reserve(line + total + filled.len() * 4 + 64);
        out.extend_from_slice(head.get(..line).unwrap_or_default());
        for (name, value) in &filled {
            push_field(out, name, value);
        }
        push_field(out, "Accept-Encoding", IDENTITY.as_bytes());
        out.extend_from_slice(b"\r\n\r\n");
        asked.add(request.method.unwrap_or_default());
        Ok(())
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
        asked: Asked,
    }

    impl Case {
        fn new() -> Self {
            let secret = Secret::new("TOKEN", &["a.example"], VALUE.as_bytes().to_vec()).unwrap();
            Self::with(&Arc::new(secret))
        }

        fn with(secret: &Arc<Secret>) -> Self {
            let target = Target::Name(HostName::parse("a.example").unwrap());
            let secrets = vec![Arc::clone(secret)];
            Self {
                requests: Requests::new(&target, 443, secrets, &Arc::default()),
                secret: Arc::clone(secret),
                asked: Asked::default(),
            }
        }

        /// Text with `{}` for the placeholder, as it goes on.
        fn taken(&mut self, text: &str) -> Result<String, HttpError> {
            let text = text.replace("{}", self.secret.placeholder());
            let mut out = Zeroizing::new(Vec::new());
            let count = self
                .requests
                .take(text.as_bytes(), &mut self.asked, &mut out)?;
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
    fn placeholders_elsewhere_stay() {
        for text in [
            "GET /{}?k={} HTTP/1.1\r\nHost: a.example\r\n\r\n",
            "GET https://a.example/{} HTTP/1.1\r\nHost: a.example\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a.example\r\n{}: x\r\n\r\n",
            "POST / HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n2f\r\n{}\r\n0\r\n\r\n",
        ] {
            let mut case = Case::new();
            let same = text.replace("{}", case.secret.placeholder());
            let same = same.replacen("\r\n\r\n", "\r\nAccept-Encoding: identity\r\n\r\n", 1);
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
                "head / HTTP/1.1\r\nHost: a.example\r\n\r\n",
                HttpError::Malformed("a method that is HEAD but for its case"),
            ),
            (
                "HEAd / HTTP/1.1\r\nHost: a.example\r\n\r\n",
                HttpError::Malformed("a method that is HEAD but for its case"),
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
        let long = vec![b'x'; crate::secret::MAX_SECRET_BYTES];
        let secret = Arc::new(Secret::new("TOKEN", &["a.example"], long).unwrap());
        let mut case = Case::with(&secret);
        let head = format!(
            "GET / HTTP/1.1\r\nHost: a.example\r\nX: {}\r\n\r\n",
            secret.placeholder().repeat(20)
        );
        let mut out = Zeroizing::new(Vec::new());
        let taken = case
            .requests
            .take(head.as_bytes(), &mut case.asked, &mut out);
        assert_eq!(taken, Err(HttpError::TooLong));
        assert!(out.is_empty());
    }

    #[test]
    fn what_asks_for_a_compressed_or_a_partial_answer_is_left_out_of_every_request() {
        let out = Case::new()
            .taken(
                "GET / HTTP/1.1\r\nHost: a.example\r\naccept-encoding: gzip\r\nTE: gzip\r\nRange: bytes=3-\r\n\
                 If-Range: \"x\"\r\nX: y\r\n\r\n",
            )
            .unwrap();
        assert_eq!(
            out,
            "GET / HTTP/1.1\r\nHost: a.example\r\nX: y\r\nAccept-Encoding: identity\r\n\r\n"
        );
    }

    #[test]
    fn no_more_is_taken_than_is_sent_on_and_answered() {
        let one = "GET / HTTP/1.1\r\nHost: a.example\r\nX: {}\r\n\r\n";
        let mut case = Case::new();
        let text = one.replace("{}", case.secret.placeholder()).repeat(2000);
        let mut out = Zeroizing::new(Vec::new());
        let mut taken = 0;
        let mut rounds = 0;
        while taken < text.len() {
            let rest = &text.as_bytes()[taken..];
            let count = case.requests.take(rest, &mut case.asked, &mut out).unwrap();
            assert!(count > 0 && out.len() <= MAX_HELD_BYTES + MAX_FILLED_BYTES);
            assert!(out.len() >= MAX_HELD_BYTES || !case.asked.has_room() || count == rest.len());
            let again = case
                .requests
                .take(&rest[count..], &mut case.asked, &mut out);
            assert_eq!(again, Ok(0));
            taken += count;
            rounds += 1;
            out.clear();
            case.asked = Asked::default();
        }
        assert!(rounds > 4, "{rounds}");
    }

    proptest! {
        #[test]
        fn pieces_make_no_difference(size in 1_usize..80, count in 1_usize..4) {
            let mut case = Case::new();
            let one = "POST /{} HTTP/1.1\r\nHost: a.example\r\nX: {}\r\nContent-Length: 3\r\n\r\nabc";
            let text = one.repeat(count).replace("{}", case.secret.placeholder());
            let whole = Case::with(&case.secret).taken(&text).unwrap();

            let (mut held, mut out) = (Vec::new(), Zeroizing::new(Vec::new()));
            for piece in text.as_bytes().chunks(size) {
                held.extend_from_slice(piece);
                let count = case.requests.take(&held, &mut case.asked, &mut out).unwrap();
                held.drain(..count);
            }
            prop_assert_eq!(out.as_slice(), whole.as_bytes());
            prop_assert_eq!(whole.matches(VALUE).count(), count);
        }
    }
}
