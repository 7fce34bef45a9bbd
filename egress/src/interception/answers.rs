//! The answers of one connection that was opened: where each begins and ends (RFC 9112 §6.3), so that what is held because it may be
//! the beginning of a secret is let go with the message, and no later.
//!
//! A head is masked as a whole, a content without the borders of its chunks: a secret that lies across two is found, and chunks are made
//! anew. What can't be understood ends the connection. Trailers, which a recipient may leave out (RFC 9110 §6.5.1), are left out.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use memchr::{memchr, memmem};

use super::mask::Masks;
use super::needle::Needle;

/// Longest head of an answer, in bytes; curl takes 300 KiB, others far less.
pub(super) const MAX_HEAD_BYTES: usize = 128 << 10;

/// Most fields of an answer.
pub(super) const MAX_FIELDS: usize = 256;

/// Longest line with a chunk's size and extensions, and longest trailer field, in bytes.
const MAX_LINE_BYTES: usize = 8 << 10;

/// Most trailer fields.
const MAX_TRAILERS: usize = 64;

/// Longest size of a chunk in digits: 64 bits.
const MAX_SIZE_DIGITS: usize = 16;

/// Most requests that are not answered; more are not taken until some are.
const MAX_ASKED: usize = 256;

const HEAD_END: &[u8] = b"\r\n\r\n";

/// Why an answer is not passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the server's answer is not understood: {0}")]
pub struct AnswerError(&'static str);

const NO_HEAD: AnswerError = AnswerError("its head is none of HTTP/1");

/// The requests that are not answered yet, of which it matters whether their answer has a content.
#[derive(Debug, Default)]
pub struct Asked(VecDeque<bool>);

impl Asked {
    pub(super) fn has_room(&self) -> bool {
        self.0.len() < MAX_ASKED
    }

    /// A request with this method. Methods differ by case (RFC 9110 §9.1); one that is HEAD but for its case is not let through.
    pub fn add(&mut self, method: &str) {
        self.0.push_back(method == "HEAD");
    }
}

/// Where in an answer the stream stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Head,
    /// Bytes of a content of known length that are left.
    Content(u64),
    ChunkSize,
    /// Bytes of a chunk that are left.
    Chunk(u64),
    ChunkEnd,
    /// So many trailers have come.
    Trailers(usize),
    UntilClosed,
}

/// The answers of one connection.
pub struct Answers {
    state: State,
    masks: Masks,
    /// A head or a line that is not whole.
    held: Vec<u8>,
    /// Content that is to be sent on as a chunk.
    chunk: Vec<u8>,
}

impl fmt::Debug for Answers {
    /// Nothing of what is held: it may be a secret's.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = out.debug_struct("Answers");
        shown.field("state", &self.state).finish_non_exhaustive()
    }
}

impl Answers {
    pub(super) fn new(masks: Masks) -> Self {
        Self {
            state: State::Head,
            masks,
            held: Vec::new(),
            chunk: Vec::new(),
        }
    }

    /// With one value made unreadable in them, which is not empty.
    #[must_use]
    pub fn without(value: &[u8]) -> Self {
        Self::new(Masks::new([Arc::new(Needle::new(value))], &Arc::default()))
    }

    /// Takes what came next, and appends to `out` what may pass.
    ///
    /// # Errors
    /// [`AnswerError`]; the connection is of no more use then.
    pub fn take(
        &mut self,
        bytes: &[u8],
        asked: &mut Asked,
        out: &mut Vec<u8>,
    ) -> Result<(), AnswerError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            rest = match self.state {
                State::Head => self.head(rest, asked, out)?,
                State::Content(left) => self.content(rest, left, out),
                State::Chunk(left) => self.in_chunk(rest, left),
                State::ChunkSize | State::ChunkEnd | State::Trailers(_) => self.line(rest, out)?,
                State::UntilClosed => {
                    self.masks.take(rest, u64::MAX, out);
                    &[]
                }
            };
        }
        self.flush(out);
        Ok(())
    }

    /// Whether something is held that a pause lets through.
    pub(super) fn waits(&self) -> bool {
        self.masks.waits()
    }

    /// Nothing came for as long as a beginning is held.
    pub fn pause(&mut self, out: &mut Vec<u8>) {
        if self.is_chunked() {
            self.masks.pause(&mut self.chunk);
            self.flush(out);
        } else {
            self.masks.pause(out);
        }
    }

    /// Nothing will come: what has no other end has it here.
    pub fn end(&mut self, out: &mut Vec<u8>) {
        if self.is_chunked() {
            self.masks.end(&mut self.chunk);
            self.flush(out);
        } else {
            self.masks.end(out);
        }
    }

    fn is_chunked(&self) -> bool {
        !matches!(
            self.state,
            State::Head | State::Content(_) | State::UntilClosed
        )
    }

    /// Sends on what was let go of a content in chunks.
    fn flush(&mut self, out: &mut Vec<u8>) {
        if self.chunk.is_empty() {
            return;
        }
        out.extend_from_slice(format!("{:x}\r\n", self.chunk.len()).as_bytes());
        out.append(&mut self.chunk);
        out.extend_from_slice(b"\r\n");
    }

    fn head<'a>(
        &mut self,
        bytes: &'a [u8],
        asked: &mut Asked,
        out: &mut Vec<u8>,
    ) -> Result<&'a [u8], AnswerError> {
        // What was looked through has no end, but may have the beginning of one.
        let from = self.held.len().saturating_sub(HEAD_END.len() - 1);
        let before = self.held.len();
        self.held.extend_from_slice(bytes);
        let found = memmem::find(self.held.get(from..).unwrap_or_default(), HEAD_END);
        let length = found.map(|at| from + at + HEAD_END.len());
        if length.unwrap_or(self.held.len()) > MAX_HEAD_BYTES {
            return Err(AnswerError("its head is too long"));
        }
        let Some(length) = length else {
            // A head whose lines end otherwise has no end to wait for.
            if memmem::find(self.held.get(from..).unwrap_or_default(), b"\n\n").is_some() {
                return Err(NO_HEAD);
            }
            return Ok(&[]);
        };
        self.held.truncate(length);
        self.state = after_head(&self.held, asked)?;
        let head = std::mem::take(&mut self.held);
        self.masks.take(&head, 0, out);
        self.masks.end(out);
        Ok(bytes.get(length - before..).unwrap_or_default())
    }

    fn content<'a>(&mut self, bytes: &'a [u8], left: u64, out: &mut Vec<u8>) -> &'a [u8] {
        let (now, rest, left) = split(bytes, left);
        self.masks.take(now, left, out);
        self.state = State::Content(left);
        if left == 0 {
            self.masks.end(out);
            self.state = State::Head;
        }
        rest
    }

    fn in_chunk<'a>(&mut self, bytes: &'a [u8], left: u64) -> &'a [u8] {
        let (now, rest, left) = split(bytes, left);
        self.masks.take(now, u64::MAX, &mut self.chunk);
        self.state = if left == 0 {
            State::ChunkEnd
        } else {
            State::Chunk(left)
        };
        rest
    }

    /// What is between contents: sizes, ends and trailers.
    fn line<'a>(&mut self, bytes: &'a [u8], out: &mut Vec<u8>) -> Result<&'a [u8], AnswerError> {
        let end = memchr(b'\n', bytes);
        let (now, rest) = bytes.split_at(end.map_or(bytes.len(), |at| at + 1));
        self.held.extend_from_slice(now);
        if self.held.len() > MAX_LINE_BYTES {
            return Err(AnswerError("a line between its chunks is too long"));
        }
        if end.is_none() {
            return Ok(&[]);
        }
        let line = std::mem::take(&mut self.held);
        let Some(line) = line.strip_suffix(b"\r\n") else {
            return Err(AnswerError(
                "a line between its chunks does not end in CRLF",
            ));
        };
        self.state = match (self.state, line) {
            (State::ChunkEnd, []) => State::ChunkSize,
            (State::ChunkEnd, _) => return Err(AnswerError("a chunk is longer than its size")),
            (State::Trailers(_), []) => {
                self.masks.end(&mut self.chunk);
                self.flush(out);
                out.extend_from_slice(b"0\r\n\r\n");
                State::Head
            }
            (State::Trailers(count), _) if count < MAX_TRAILERS => State::Trailers(count + 1),
            (State::Trailers(_), _) => return Err(AnswerError("it has too many trailers")),
            _ => match chunk_size(line)? {
                0 => State::Trailers(0),
                size => State::Chunk(size),
            },
        };
        Ok(rest)
    }
}

/// The bytes that belong to a content of which so many are left, those behind it, and how many are left then.
fn split(bytes: &[u8], left: u64) -> (&[u8], &[u8], u64) {
    let count = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
    let (now, rest) = bytes.split_at_checked(count).unwrap_or((bytes, &[]));
    let taken = u64::try_from(now.len()).unwrap_or(u64::MAX);
    (now, rest, left.saturating_sub(taken))
}

/// What follows a whole head.
fn after_head(head: &[u8], asked: &mut Asked) -> Result<State, AnswerError> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let mut answer = httparse::Response::new(&mut fields);
    match answer.parse(head) {
        Ok(httparse::Status::Complete(count)) if count == head.len() => {}
        Err(httparse::Error::TooManyHeaders) => return Err(AnswerError("it has too many fields")),
        _ => return Err(NO_HEAD),
    }
    let status = answer.code.unwrap_or_default();
    if status == 101 {
        return Err(AnswerError("it goes on in another protocol"));
    }
    if (100..200).contains(&status) {
        // Another answer to the same request follows.
        return Ok(State::Head);
    }
    let is_to_head = asked.0.pop_front().unwrap_or(false);
    let framing = framing(&answer)?;
    if is_to_head || matches!(status, 204 | 304) {
        return Ok(State::Head);
    }
    Ok(framing)
}

fn framing(answer: &httparse::Response<'_, '_>) -> Result<State, AnswerError> {
    let values = |name: &'static str| {
        let fields = answer.headers.iter();
        let named = fields.filter(move |field| field.name.eq_ignore_ascii_case(name));
        named.map(|field| field.value).collect::<Vec<_>>()
    };
    let (codings, lengths) = (values("transfer-encoding"), values("content-length"));
    match (codings.as_slice(), lengths.as_slice()) {
        ([], []) => Ok(State::UntilClosed),
        ([], [length]) => match number(length, 10) {
            Some(0) => Ok(State::Head),
            Some(length) => Ok(State::Content(length)),
            None => Err(AnswerError("its Content-Length is no number")),
        },
        ([coding], []) if answer.version == Some(1) && coding.eq_ignore_ascii_case(b"chunked") => {
            Ok(State::ChunkSize)
        }
        (_, []) => Err(AnswerError(
            "its Transfer-Encoding is not chunked alone, or it is of HTTP/1.0",
        )),
        _ => Err(AnswerError("its length is ambiguous")),
    }
}

/// A chunk's size; what is behind it, extensions, is left out with it.
fn chunk_size(line: &[u8]) -> Result<u64, AnswerError> {
    let digits = line
        .split(|byte| matches!(byte, b';' | b' ' | b'\t'))
        .next();
    digits
        .filter(|digits| digits.len() <= MAX_SIZE_DIGITS)
        .and_then(|digits| number(digits, 16))
        .ok_or(AnswerError("a chunk's size is no hexadecimal number"))
}

/// Digits alone: no sign.
fn number(digits: &[u8], radix: u32) -> Option<u64> {
    let text = std::str::from_utf8(digits).ok()?;
    let is_plain = text.chars().all(|digit| digit.is_digit(radix));
    u64::from_str_radix(text, radix).ok().filter(|_| is_plain)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const VALUE: &str = "s3cr3t-value";
    const STARS: &str = "************";

    /// What comes of these bytes in pieces of this size, without an end of the connection.
    fn passed(methods: &[&str], bytes: &str, size: usize) -> Result<String, AnswerError> {
        let (mut answers, mut asked, mut out) = (
            Answers::without(VALUE.as_bytes()),
            Asked::default(),
            Vec::new(),
        );
        for method in methods {
            asked.add(method);
        }
        for piece in bytes.as_bytes().chunks(size) {
            answers.take(piece, &mut asked, &mut out)?;
        }
        Ok(String::from_utf8_lossy(&out).into_owned())
    }

    /// Content that was sent in chunks.
    fn content(mut chunks: &str) -> String {
        let mut content = String::new();
        loop {
            let (size, rest) = chunks.split_once("\r\n").unwrap();
            let size = usize::from_str_radix(size, 16).unwrap();
            if size == 0 {
                assert_eq!(rest, "\r\n");
                return content;
            }
            content.push_str(&rest[..size]);
            chunks = rest[size..].strip_prefix("\r\n").unwrap();
        }
    }

    #[test]
    fn an_answer_of_known_length_is_whole_at_its_end_whatever_it_ends_in() {
        for end in ["s3c", "s3cr3t-v", "s3cr3t-valu"] {
            let one = format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{end}",
                end.len()
            );
            let two = format!("{one}{one}");
            for size in [1, 3, 1000] {
                assert_eq!(passed(&["GET", "GET"], &two, size).unwrap(), two, "{end}");
            }
        }
    }

    #[test]
    fn an_answer_in_chunks_is_whole_at_its_end_and_a_value_across_chunks_is_masked() {
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let body =
            "3\r\n[s3\r\n4 ;x=y\r\ncr3t\r\nc\r\n-value]s3cr3\r\n0\r\nT: s3cr3t-value\r\n\r\n";
        for size in 1..90 {
            let out = passed(&["GET"], &format!("{head}{body}"), size).unwrap();
            let chunks = out.strip_prefix(head).unwrap();
            assert_eq!(content(chunks), format!("[{STARS}]s3cr3"), "{size}");
        }
    }

    #[test]
    fn answers_without_a_content_end_with_their_heads() {
        for (method, head) in [
            ("HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"),
            (
                "HEAD",
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            ),
            ("GET", "HTTP/1.1 204 No Content\r\n\r\n"),
            (
                "GET",
                "HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
            ),
            ("GET", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
            (
                "POST",
                "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
            ),
        ] {
            let next = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\ns3c";
            let all = format!("{head}{next}");
            for size in [1, 7, 1000] {
                assert_eq!(passed(&[method, "GET"], &all, size).unwrap(), all, "{head}");
            }
        }
    }

    #[test]
    fn values_in_heads_and_contents_are_masked() {
        for head in ["Content-Length: 14\r\n", ""] {
            let text =
                |value: &str| format!("HTTP/1.1 200 OK\r\nX: {value}\r\n{head}\r\n[{value}]");
            for size in 1..80 {
                let out = passed(&["GET"], &text(VALUE), size).unwrap();
                assert_eq!(out, text(STARS), "{size}");
            }
        }
    }

    #[test]
    fn what_can_no_longer_be_whole_before_the_end_of_an_answer_is_not_held() {
        for (left, is_held) in [(3, false), (4, true)] {
            let text = format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\ns3cr3t-v",
                8 + left
            );
            let out = passed(&["GET"], &text, 1000).unwrap();
            assert_eq!(out.ends_with("\r\n\r\n"), is_held, "{out}");
        }
    }

    #[test]
    fn an_answer_without_a_length_ends_with_the_connection() {
        let (mut answers, mut out) = (Answers::without(VALUE.as_bytes()), Vec::new());
        let text = b"HTTP/1.0 200 OK\r\n\r\nit ends in s3cr3t-valu";
        answers.take(text, &mut Asked::default(), &mut out).unwrap();
        assert!(out.ends_with(b"ends in "));
        answers.end(&mut out);
        assert_eq!(out, text);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        for text in [
            "no HTTP\r\n\r\n".to_owned(),
            "HTTP/1.1 200 OK\nContent-Length: 0\n\n".to_owned(),
            "HTTP/2 200\r\n\r\n".to_owned(),
            "HTTP/1.1 101 Switching Protocols\r\n\r\n".to_owned(),
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n".to_owned(),
            "HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\n".to_owned(),
            "HTTP/1.1 200 OK\r\nContent-Length: 1, 1\r\n\r\n".to_owned(),
            "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned(),
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n".to_owned(),
            "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned(),
            format!("{chunked}x\r\n"),
            format!("{chunked}-1\r\n"),
            format!("{chunked}1\n"),
            format!("{chunked}1\r\nab\r\n"),
            format!("{chunked}{}\r\n", "0".repeat(17)),
            format!("{chunked}1;{}", "x".repeat(MAX_LINE_BYTES)),
            format!("{chunked}0\r\n{}", "T: x\r\n".repeat(MAX_TRAILERS + 1)),
            format!("HTTP/1.1 200 OK\r\nX: {}", "x".repeat(MAX_HEAD_BYTES)),
            format!(
                "HTTP/1.1 200 OK\r\n{}\r\n",
                "X: x\r\n".repeat(MAX_FIELDS + 1)
            ),
        ] {
            passed(&["GET"], &text, 4096).expect_err(&text);
        }
    }

    proptest! {
        #[test]
        fn what_a_server_says_is_taken_without_a_panic_in_any_pieces(
            parts in proptest::collection::vec(prop_oneof![
                Just("HTTP/1.1 200 OK\r\n".to_owned()), Just("Transfer-Encoding: chunked\r\n\r\n".to_owned()),
                Just("Content-Length: 5\r\n\r\n".to_owned()), Just("\r\n".to_owned()), "[0-9a-f]{1,2}\r\n", ".{0,9}",
            ], 0..12),
            size in 1_usize..30,
        ) {
            let text = parts.concat();
            let whole = passed(&["GET"], &text, usize::MAX);
            let pieces = passed(&["GET"], &text, size);
            prop_assert_eq!(whole.is_ok(), pieces.is_ok());
        }
    }
}
