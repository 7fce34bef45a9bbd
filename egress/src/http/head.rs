//! What a request's head says, apart from its host: its lines, its fields, and what follows it.

use super::{HttpError, State};

/// All values of a field.
pub(super) fn fields<'a>(
    request: &'a httparse::Request<'_, '_>,
    name: &'a str,
) -> impl Iterator<Item = &'a [u8]> {
    request
        .headers
        .iter()
        .filter(move |field| field.name.eq_ignore_ascii_case(name))
        .map(|field| field.value)
}

/// Lines end in `CRLF`, and there are no other control characters but tabs. The first `from` bytes were found so before.
pub(super) fn check_lines(head: &[u8], from: usize) -> Result<(), HttpError> {
    if matches!(head.first(), Some(b'\r' | b'\n' | b' ' | b'\t')) {
        return Err(HttpError::Malformed("a request begins with its method"));
    }
    let before = |count: usize| {
        let at = from.checked_sub(count);
        at.and_then(|at| head.get(at)).copied().unwrap_or(0)
    };
    let mut previous = [before(2), before(1)];
    for byte in head.get(from..).unwrap_or_default() {
        let is_in_place = match (previous, *byte) {
            ([_, b'\r'], byte) => byte == b'\n',
            (_, b'\n') => false,
            // A field that goes on in the next line (RFC 9112 §5.2).
            ([b'\r', b'\n'], b' ' | b'\t') => {
                return Err(HttpError::Malformed("a field goes on in the next line"));
            }
            (_, b'\r' | b'\t') => true,
            (_, byte) => byte >= 0x20 && byte != 0x7f,
        };
        if !is_in_place {
            return Err(HttpError::Malformed(
                "a control character, or a line that does not end in CRLF",
            ));
        }
        previous = [previous[1], *byte];
    }
    Ok(())
}

/// What follows a head.
pub(super) fn body(request: &httparse::Request<'_, '_>) -> Result<State, HttpError> {
    let codings: Vec<&[u8]> = fields(request, "transfer-encoding").collect();
    let lengths: Vec<&[u8]> = fields(request, "content-length").collect();
    match (codings.as_slice(), lengths.as_slice()) {
        ([], []) => Ok(State::Head),
        ([], [length]) => {
            let digits = !length.is_empty() && length.iter().all(u8::is_ascii_digit);
            let number = std::str::from_utf8(length)
                .ok()
                .filter(|_| digits)
                .and_then(|text| text.parse().ok());
            match number {
                Some(0) => Ok(State::Head),
                Some(length) => Ok(State::Body(length)),
                None => Err(HttpError::Length("Content-Length is no number")),
            }
        }
        ([coding], []) if request.version == Some(1) && coding.eq_ignore_ascii_case(b"chunked") => {
            Ok(State::ChunkSize)
        }
        ([], _) => Err(HttpError::Length("more than one Content-Length")),
        (_, []) => Err(HttpError::Length(
            "a Transfer-Encoding that is not chunked alone, or in HTTP/1.0",
        )),
        _ => Err(HttpError::Length("Content-Length beside Transfer-Encoding")),
    }
}
