//! What the program in the guest says of a run, frame by frame, with every length and count bounded.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::result::{PythonException, Representations};

/// Largest frame: all representations of one value, the bytes among them in base64.
pub(super) const MAX_FRAME_BYTES: usize = 64 << 20;

/// Bytes in front of each: its length and its kind.
pub(super) const HEADER_BYTES: usize = 5;

/// One frame.
#[derive(Debug)]
pub(super) enum Frame {
    /// The code has written to its standard output.
    Output(Vec<u8>),
    /// To its standard error.
    Error(Vec<u8>),
    /// Something was displayed.
    Display(Representations),
    /// The value of the last expression.
    Value(Representations),
    /// It ended by an exception.
    Exception(PythonException),
    /// The run is over, or none has begun yet.
    Over,
    /// Whether the code that was asked about is complete.
    Complete(bool),
}

/// Kind and length of the frame that follows; `None` where it is no frame.
pub(super) fn header(bytes: [u8; HEADER_BYTES]) -> Option<(u8, usize)> {
    let [a, b, c, d, kind] = bytes;
    let length = usize::try_from(u32::from_le_bytes([a, b, c, d])).ok()?;
    (length <= MAX_FRAME_BYTES).then_some((kind, length))
}

/// A representation, as the guest puts it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Said {
    Text(String),
    Bytes { base64: String },
}

impl Frame {
    /// The frame of this kind; `None` where it is none.
    pub(super) fn decode(kind: u8, body: Vec<u8>) -> Option<Self> {
        Some(match kind {
            b'O' => Self::Output(body),
            b'E' => Self::Error(body),
            b'D' => Self::Display(representations(&body)?),
            b'V' => Self::Value(representations(&body)?),
            b'X' => Self::Exception(serde_json::from_slice(&body).ok()?),
            b'.' => Self::Over,
            b'C' => Self::Complete(body == b"1"),
            _ => return None,
        })
    }
}

fn representations(body: &[u8]) -> Option<Representations> {
    let said: BTreeMap<String, Said> = serde_json::from_slice(body).ok()?;
    let mut found = BTreeMap::new();
    for (mime, said) in said {
        let bytes = match said {
            Said::Text(text) => text.into_bytes(),
            Said::Bytes { base64 } => STANDARD.decode(base64).ok()?,
        };
        found.insert(mime, bytes);
    }
    Some(Representations(found))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn representations_are_text_or_bytes() {
        let body = br#"{"text/plain": "x", "image/png": {"base64": "iVBO"}}"#;
        let Some(Frame::Value(found)) = Frame::decode(b'V', body.to_vec()) else {
            panic!("no frame");
        };
        assert_eq!(found.text(), Some("x"));
        assert_eq!(found.get("image/png"), Some(&b"\x89PN"[..]));
        assert_eq!(found.html(), None);
    }

    #[test]
    fn what_is_no_frame_is_none() {
        assert_eq!(header([0xff; HEADER_BYTES]), None);
        for (kind, body) in [
            (b'?', &b""[..]),
            (b'V', b"[]"),
            (b'V', br#"{"a": 1}"#),
            (b'V', br#"{"a": {"base64": "*"}}"#),
            (b'X', b"{}"),
        ] {
            assert!(Frame::decode(kind, body.to_vec()).is_none());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_frame_or_none(kind in any::<u8>(), body in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = Frame::decode(kind, body);
        }
    }
}
