//! What a client says before it encrypts: the ClientHello (RFC 8446 §4.1.2), and the name in it (RFC 6066 §3).
//!
//! Only enough is read to know which server the client asks for, and everything that two readers could read
//! differently is refused.

use crate::name::HostName;

/// Longest hello that is read, in bytes of records; a hello with post-quantum keys has about 2,000.
pub const MAX_HELLO_BYTES: usize = 32 << 10;

/// Bytes of a record's header.
const RECORD_HEADER_BYTES: usize = 5;
/// Longest plaintext of a record (RFC 8446 §5.1).
const MAX_RECORD_BYTES: usize = 1 << 14;
/// Types of records.
const CHANGE_CIPHER_SPEC: u8 = 20;
const HANDSHAKE: u8 = 22;
/// Types of handshake messages.
const CLIENT_HELLO: u8 = 1;
const SERVER_HELLO: u8 = 2;
/// Extensions.
const SERVER_NAME: u16 = 0;
const ENCRYPTED_CLIENT_HELLO: u16 = 0xfe0d;
/// Its predecessor, of which servers are left.
const ENCRYPTED_SERVER_NAME: u16 = 0xffce;
/// `SHA-256("HelloRetryRequest")`, which a server's random is when it wants another hello (RFC 8446 §4.1.3).
const RETRY_RANDOM: [u8; 32] = [
    0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91,
    0xc2, 0xa2, 0x11, 0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
];
/// Bytes of a server's first record up to the end of its random.
pub const SERVER_RANDOM_END: usize = RECORD_HEADER_BYTES + 4 + 2 + 32;

/// Why a client's first words are refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// Another protocol.
    #[error("not TLS")]
    NotTls,
    /// It begins as TLS does and goes on otherwise.
    #[error("a TLS hello that is malformed")]
    Malformed,
    /// It does not end within [`MAX_HELLO_BYTES`].
    #[error("a TLS hello of more than {MAX_HELLO_BYTES} bytes")]
    TooLong,
    /// It does not say which server it is for.
    #[error("no SNI: the TLS hello names no host")]
    NoName,
    /// It names another host.
    #[error("another SNI: the TLS hello names '{0}'")]
    OtherName(String),
    /// It hides which server it is for.
    #[error("ECH: the TLS hello hides the host's name")]
    Hidden,
}

/// A hello that came whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The name in it, as it stands there.
    pub name: Option<String>,
    /// Whether it hides another hello.
    pub is_hidden: bool,
    /// Bytes of the stream that it took.
    pub length: usize,
}

impl Hello {
    /// Checks that it is for this host and no other. A client that connects to an address (`None`) names no host.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn check(&self, expected: Option<&HostName>) -> Result<(), TlsError> {
        if self.is_hidden {
            return Err(TlsError::Hidden);
        }
        match (&self.name, expected) {
            (None, None) => Ok(()),
            (None, Some(_)) => Err(TlsError::NoName),
            (Some(name), Some(expected))
                // RFC 6066 has no dot at the end.
                if !name.ends_with('.') && HostName::parse(name).as_ref() == Ok(expected) =>
            {
                Ok(())
            }
            (Some(name), _) => Err(TlsError::OtherName(name.clone())),
        }
    }
}

/// Reads the hello at the beginning of a stream: `None` while it is not whole.
///
/// # Errors
/// See [`TlsError`].
pub fn client_hello(stream: &[u8]) -> Result<Option<Hello>, TlsError> {
    let mut message = Vec::new();
    let mut rest = stream;
    loop {
        let Some(fragment) = record(rest, HANDSHAKE)? else {
            if stream.len() > MAX_HELLO_BYTES {
                return Err(TlsError::TooLong);
            }
            return Ok(None);
        };
        rest = rest
            .get(RECORD_HEADER_BYTES + fragment.len()..)
            .unwrap_or_default();
        message.extend_from_slice(fragment);
        if message.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
            return Err(TlsError::NotTls);
        }
        let mut reader = Reader(&message);
        if let (Some(_), Some(length)) = (reader.byte(), reader.number(3)) {
            if length > MAX_HELLO_BYTES {
                return Err(TlsError::TooLong);
            }
            if reader.0.len() > length {
                // Something behind it in the same record: no client sends that.
                return Err(TlsError::Malformed);
            }
            if reader.0.len() == length {
                let (name, is_hidden) = body(reader).ok_or(TlsError::Malformed)?;
                let length = stream.len() - rest.len();
                return Ok(Some(Hello {
                    name,
                    is_hidden,
                    length,
                }));
            }
        }
    }
}

/// Whether a server's first words ask for another hello: `None` while that is open.
#[must_use]
pub fn wants_retry(server: &[u8]) -> Option<bool> {
    match (server.first(), server.get(RECORD_HEADER_BYTES)) {
        (None, _) | (Some(&HANDSHAKE), None) => None,
        (Some(&HANDSHAKE), Some(&SERVER_HELLO)) => server
            .get(SERVER_RANDOM_END - RETRY_RANDOM.len()..SERVER_RANDOM_END)
            .map(|random| random == RETRY_RANDOM),
        _ => Some(false),
    }
}

/// Bytes of the record at the beginning that only says that encryption begins, which clients send in front of a second
/// hello (RFC 8446 §D.4): 0 where there is none, `None` while that is open.
#[must_use]
pub fn change_cipher_spec(stream: &[u8]) -> Option<usize> {
    const RECORD: [u8; 6] = [CHANGE_CIPHER_SPEC, 3, 3, 0, 1, 1];
    let common = stream.iter().zip(RECORD).take_while(|(a, b)| **a == *b);
    match common.count() {
        6 => Some(RECORD.len()),
        count if count == stream.len() => None,
        _ => Some(0),
    }
}

/// The plaintext of the record at the beginning: `None` while it is not whole.
fn record(stream: &[u8], kind: u8) -> Result<Option<&[u8]>, TlsError> {
    let mut reader = Reader(stream);
    match reader.byte() {
        None => return Ok(None),
        Some(found) if found != kind => return Err(TlsError::NotTls),
        Some(_) => {}
    }
    match reader.byte() {
        None => return Ok(None),
        Some(3) => {}
        Some(_) => return Err(TlsError::NotTls),
    }
    let (Some(_minor), Some(length)) = (reader.byte(), reader.number(2)) else {
        return Ok(None);
    };
    if length == 0 || length > MAX_RECORD_BYTES {
        return Err(TlsError::Malformed);
    }
    Ok(reader.take(length))
}

/// Name and whether there is another one hidden; `None` where the message is malformed.
fn body(mut message: Reader<'_>) -> Option<(Option<String>, bool)> {
    message.number(2)?; // legacy_version
    message.take(32)?; // random
    message.vector(1)?; // legacy_session_id
    message.vector(2)?; // cipher_suites
    message.vector(1)?; // legacy_compression_methods
    if message.0.is_empty() {
        return Some((None, false));
    }
    let mut extensions = message.vector(2)?;
    if !message.0.is_empty() {
        return None;
    }
    let (mut name, mut is_hidden) = (None, false);
    let mut seen = Vec::new();
    while !extensions.0.is_empty() {
        let kind = u16::try_from(extensions.number(2)?).ok()?;
        let content = extensions.vector(2)?;
        if seen.contains(&kind) {
            return None;
        }
        seen.push(kind);
        match kind {
            SERVER_NAME => name = Some(server_name(content)?),
            ENCRYPTED_CLIENT_HELLO | ENCRYPTED_SERVER_NAME => is_hidden = true,
            _ => {}
        }
    }
    Some((name, is_hidden))
}

/// A list of exactly one name, of the only kind that there is.
fn server_name(mut content: Reader<'_>) -> Option<String> {
    let mut list = content.vector(2)?;
    let kind = list.byte()?;
    let name = list.vector(2)?;
    if kind != 0 || !list.0.is_empty() || !content.0.is_empty() || name.0.is_empty() {
        return None;
    }
    let text = std::str::from_utf8(name.0).ok()?;
    text.is_ascii().then(|| text.to_owned())
}

/// Takes things from the front of some bytes; `None` where there are not enough.
#[derive(Debug, Clone, Copy)]
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    /// A number of `bytes` bytes, big-endian; 3 at most.
    fn number(&mut self, bytes: usize) -> Option<usize> {
        let taken = self.take(bytes)?;
        Some(
            taken
                .iter()
                .fold(0, |number, byte| number << 8 | usize::from(*byte)),
        )
    }

    /// What follows a length of `bytes` bytes.
    fn vector(&mut self, bytes: usize) -> Option<Self> {
        let length = self.number(bytes)?;
        self.take(length).map(Self)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    fn vector(bytes: usize, content: &[u8]) -> Vec<u8> {
        let length = u32::try_from(content.len()).unwrap().to_be_bytes();
        [&length[4 - bytes..], content].concat()
    }

    fn extension(kind: u16, content: &[u8]) -> Vec<u8> {
        [&kind.to_be_bytes()[..], &vector(2, content)].concat()
    }

    pub(crate) fn sni(name: &str) -> Vec<u8> {
        let entry = [&[0][..], &vector(2, name.as_bytes())].concat();
        extension(SERVER_NAME, &vector(2, &entry))
    }

    fn message(extensions: &[Vec<u8>]) -> Vec<u8> {
        let body = [
            &[3, 3][..],
            &[7; 32],
            &vector(1, &[1; 32]),
            &vector(2, &[0x13, 1]),
            &vector(1, &[0]),
            &vector(2, &extensions.concat()),
        ]
        .concat();
        [&[CLIENT_HELLO][..], &vector(3, &body)].concat()
    }

    fn records(message: &[u8], size: usize) -> Vec<u8> {
        message
            .chunks(size)
            .flat_map(|piece| [&[HANDSHAKE, 3, 1][..], &vector(2, piece)].concat())
            .collect()
    }

    /// A hello with these extensions, in one record.
    pub(crate) fn hello(extensions: &[Vec<u8>]) -> Vec<u8> {
        records(&message(extensions), MAX_RECORD_BYTES)
    }

    fn checked(stream: &[u8]) -> Result<(), TlsError> {
        let hello = client_hello(stream)?.expect("a whole hello");
        hello.check(Some(&HostName::parse("pypi.org").unwrap()))
    }

    #[test]
    fn a_hello_for_the_host_passes() {
        let others = [
            extension(43, &[2, 3, 4]),
            sni("PyPI.org"),
            extension(10, &[0, 2, 0, 29]),
        ];
        checked(&hello(&others)).unwrap();
        for size in [1, 2, 5, 40] {
            checked(&records(&message(&others), size)).unwrap();
        }
    }

    #[test]
    fn a_hello_for_another_host_or_for_none_is_refused() {
        assert_eq!(checked(&hello(&[])), Err(TlsError::NoName));
        for other in [
            "evil.net",
            "pypi.org.",
            "pypi.org.evil.net",
            "xpypi.org",
            "1.2.3.4",
            "pypi.org\0",
            "*.org",
        ] {
            assert_eq!(
                checked(&hello(&[sni(other)])),
                Err(TlsError::OtherName(other.to_owned()))
            );
        }
    }

    #[test]
    fn a_hidden_hello_is_refused() {
        for kind in [ENCRYPTED_CLIENT_HELLO, ENCRYPTED_SERVER_NAME] {
            assert_eq!(
                checked(&hello(&[sni("pypi.org"), extension(kind, &[0])])),
                Err(TlsError::Hidden)
            );
        }
    }

    #[test]
    fn two_names_are_refused_however_they_are_put() {
        let entry = |name: &str| [&[0][..], &vector(2, name.as_bytes())].concat();
        let list = [entry("pypi.org"), entry("evil.net")].concat();
        for extensions in [
            vec![sni("pypi.org"), sni("evil.net")],
            vec![sni("pypi.org"), sni("pypi.org")],
            vec![extension(SERVER_NAME, &vector(2, &list))],
            vec![extension(
                SERVER_NAME,
                &[&vector(2, &entry("pypi.org"))[..], b"x"].concat(),
            )],
            vec![extension(
                SERVER_NAME,
                &vector(2, &[&[1][..], &vector(2, b"pypi.org")].concat()),
            )],
            vec![extension(SERVER_NAME, &[])],
        ] {
            assert_eq!(checked(&hello(&extensions)), Err(TlsError::Malformed));
        }
    }

    #[test]
    fn other_protocols_are_not_tls() {
        for bytes in [
            &b"GET / HTTP/1.1\r\n"[..],
            b"SSH-2.0-x\r\n",
            b"\x80\x2e\x01\x03\x01",
            b"\x16\x02\x01",
            b"\x17\x03\x03",
        ] {
            assert_eq!(client_hello(bytes), Err(TlsError::NotTls));
        }
        // A handshake message, but none that a client begins with.
        assert_eq!(
            client_hello(&records(&[SERVER_HELLO, 0, 0, 1, 0], 9)),
            Err(TlsError::NotTls)
        );
    }

    #[test]
    fn lengths_that_do_not_agree_are_malformed() {
        let whole = message(&[sni("pypi.org")]);
        let behind = [&whole[..], b"x"].concat();
        assert_eq!(
            client_hello(&records(&behind, 9999)),
            Err(TlsError::Malformed)
        );
        let mut longer = whole.clone();
        longer.push(0);
        longer[3] += 1;
        assert_eq!(
            client_hello(&records(&longer, 9999)),
            Err(TlsError::Malformed)
        );
        assert_eq!(
            client_hello(&[HANDSHAKE, 3, 1, 0, 0]),
            Err(TlsError::Malformed)
        );
        assert_eq!(
            client_hello(&[HANDSHAKE, 3, 1, 0xff, 0xff]),
            Err(TlsError::Malformed)
        );
        assert_eq!(
            client_hello(&records(&[CLIENT_HELLO, 0xff, 0, 0], 9)),
            Err(TlsError::TooLong)
        );
    }

    #[test]
    fn a_hello_in_endless_pieces_is_too_long() {
        let stream = records(&message(&[extension(21, &[0; 60_000])]), 1);
        assert_eq!(client_hello(&stream), Err(TlsError::TooLong));
    }

    #[test]
    fn a_client_of_an_address_names_no_host() {
        let hello = |extensions: &[Vec<u8>]| {
            client_hello(&super::tests::hello(extensions))
                .unwrap()
                .unwrap()
        };
        hello(&[]).check(None).unwrap();
        hello(&[sni("a.example")]).check(None).unwrap_err();
    }

    #[test]
    fn a_retry_is_known_by_its_random() {
        let mut server = vec![HANDSHAKE, 3, 3, 0, 60, SERVER_HELLO, 0, 0, 56, 3, 3];
        assert_eq!(wants_retry(&server), None);
        server.extend_from_slice(&RETRY_RANDOM);
        assert_eq!(wants_retry(&server), Some(true));
        server[20] ^= 1;
        assert_eq!(wants_retry(&server), Some(false));
        assert_eq!(wants_retry(&[]), None);
        assert_eq!(wants_retry(&[21, 3, 3]), Some(false));
    }

    #[test]
    fn the_record_in_front_of_a_second_hello_is_skipped() {
        assert_eq!(change_cipher_spec(&[20, 3, 3, 0, 1, 1, 22]), Some(6));
        assert_eq!(change_cipher_spec(&[20, 3, 3]), None);
        assert_eq!(change_cipher_spec(&[22, 3]), Some(0));
        assert_eq!(change_cipher_spec(&[20, 3, 3, 0, 1, 2]), Some(0));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_harm(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = client_hello(&bytes);
            let _ = (wants_retry(&bytes), change_cipher_spec(&bytes));
        }

        #[test]
        fn a_changed_hello_never_passes_with_another_name(
            position in any::<proptest::sample::Index>(), value in any::<u8>(), size in 1_usize..200,
        ) {
            let mut stream = records(&message(&[sni("evil.net"), extension(43, &[2, 3, 4])]), size);
            let at = position.index(stream.len());
            stream[at] = value;
            if let Ok(Some(hello)) = client_hello(&stream) {
                prop_assert!(hello.check(Some(&HostName::parse("pypi.org").unwrap())).is_err());
            }
        }

        #[test]
        fn a_cut_hello_is_no_hello(cut in any::<proptest::sample::Index>(), size in 1_usize..200) {
            let stream = records(&message(&[sni("pypi.org")]), size);
            prop_assert_eq!(client_hello(&stream[..cut.index(stream.len())]), Ok(None));
            let more = [&stream[..], b"what follows"].concat();
            prop_assert_eq!(client_hello(&more).unwrap().unwrap().length, stream.len());
        }
    }
}
