//! Frames: a little-endian `u32` length, then that many bytes of postcard.
//!
//! A length above the stated bound is an error before a byte of the body is read or a byte of memory
//! is taken; a body with bytes left over is an error too. After any error the stream is of no more
//! use and must be closed.

use std::io::{self, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Largest frame that the host sends, in bytes without the length: a command's arguments and
/// environment, which Linux itself bounds to 2 MiB each way by default (`execve(2)`), fit well.
pub const MAX_TO_AGENT_BYTES: usize = 4 << 20;

/// Largest frame that the agent sends, in bytes without the length. The host holds at most this much
/// for a guest that never finishes a frame.
pub const MAX_FROM_AGENT_BYTES: usize = 64 << 10;

/// Bytes of the length in front of each frame.
const LENGTH_BYTES: usize = 4;

/// Why a frame could not be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The stream ended between two frames: the peer is gone, in good order.
    #[error("The stream ended")]
    Ended,
    /// The peer names a length above the bound of its direction.
    #[error("A frame of {length} bytes is above the bound of {bound} bytes")]
    TooLong {
        /// Length that was named or would be sent.
        length: usize,
        /// The bound that holds on this stream.
        bound: usize,
    },
    /// The body is not a message of the expected type.
    #[error("A frame's body is not a message of this protocol")]
    Malformed(#[source] postcard::Error),
    /// The stream failed, or ended inside a frame.
    #[error("The stream failed")]
    Stream(#[source] io::Error),
}

/// Encodes `message` as one frame.
///
/// # Errors
/// [`FrameError::TooLong`] when the body is above `bound` bytes.
pub fn encode<T: Serialize>(message: &T, bound: usize) -> Result<Vec<u8>, FrameError> {
    let mut frame =
        postcard::to_extend(message, vec![0; LENGTH_BYTES]).map_err(FrameError::Malformed)?;
    let length = frame.len() - LENGTH_BYTES;
    let too_long = FrameError::TooLong { length, bound };
    match u32::try_from(length) {
        Ok(prefix) if length <= bound => {
            for (slot, byte) in frame.iter_mut().zip(prefix.to_le_bytes()) {
                *slot = byte;
            }
            Ok(frame)
        }
        _ => Err(too_long),
    }
}

/// Writes `message` as one frame with one `write_all`.
///
/// # Errors
/// See [`FrameError`].
pub fn write<T: Serialize>(
    stream: &mut impl Write,
    message: &T,
    bound: usize,
) -> Result<(), FrameError> {
    let frame = encode(message, bound)?;
    stream.write_all(&frame).map_err(FrameError::Stream)
}

/// Reads one frame from a blocking stream, and not a byte more: what follows a
/// [`crate::message::StreamHeader`] stays on the stream.
///
/// # Errors
/// See [`FrameError`]; [`FrameError::Ended`] only at a frame's start.
pub fn read<T: DeserializeOwned>(stream: &mut impl Read, bound: usize) -> Result<T, FrameError> {
    let mut decoder = Decoder::new(bound);
    loop {
        if let Some(message) = decoder.next()? {
            return Ok(message);
        }
        let wanted = decoder.wanted();
        let mut chunk = vec![0; wanted];
        stream.read_exact(&mut chunk).map_err(|error| {
            if decoder.is_empty() && error.kind() == io::ErrorKind::UnexpectedEof {
                FrameError::Ended
            } else {
                FrameError::Stream(error)
            }
        })?;
        decoder.push(&chunk);
    }
}

/// Puts frames together from whatever pieces a non-blocking stream gives.
///
/// Holds at most one bound plus one pushed piece.
#[derive(Debug)]
pub struct Decoder {
    bound: usize,
    held: Vec<u8>,
}

impl Decoder {
    /// A decoder for frames of at most `bound` bytes.
    #[must_use]
    pub fn new(bound: usize) -> Self {
        Self {
            bound,
            held: Vec::new(),
        }
    }

    /// Adds what was read. Call [`Self::next`] until it has no more before the next push.
    pub fn push(&mut self, bytes: &[u8]) {
        self.held.extend_from_slice(bytes);
    }

    /// Whether the stream stands between two frames.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// How many bytes are missing before [`Self::next`] can say more; at least 1. A length above the
    /// bound counts as none: `next` reports it.
    #[must_use]
    pub fn wanted(&self) -> usize {
        let total = match self.length() {
            None => LENGTH_BYTES,
            Some(length) => LENGTH_BYTES + length.min(self.bound),
        };
        total.saturating_sub(self.held.len()).max(1)
    }

    /// The next whole message, or `None` when more bytes are needed.
    ///
    /// # Errors
    /// [`FrameError::TooLong`] or [`FrameError::Malformed`].
    #[expect(clippy::should_implement_trait, reason = "it is generic and fallible")]
    pub fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let Some(length) = self.length() else {
            return Ok(None);
        };
        if length > self.bound {
            return Err(FrameError::TooLong {
                length,
                bound: self.bound,
            });
        }
        let Some(body) = self.held.get(LENGTH_BYTES..LENGTH_BYTES + length) else {
            return Ok(None);
        };
        let (message, rest) = postcard::take_from_bytes(body).map_err(FrameError::Malformed)?;
        if !rest.is_empty() {
            return Err(FrameError::Malformed(
                postcard::Error::DeserializeBadEncoding,
            ));
        }
        self.held.drain(..LENGTH_BYTES + length);
        Ok(Some(message))
    }

    fn length(&self) -> Option<usize> {
        let prefix = self.held.first_chunk::<LENGTH_BYTES>()?;
        usize::try_from(u32::from_le_bytes(*prefix)).ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::message::{FromAgent, Hello, StreamHeader, StreamKind};

    fn hello() -> FromAgent {
        FromAgent::Hello(Hello {
            version: crate::VERSION,
            init_started_ns: 1,
            sent_ns: 2,
        })
    }

    #[test]
    fn what_follows_a_header_stays_on_the_stream() {
        let header = StreamHeader {
            command_id: 7,
            kind: StreamKind::Stdin,
        };
        let mut bytes = encode(&header, MAX_TO_AGENT_BYTES).unwrap();
        bytes.extend_from_slice(b"raw");
        let mut stream = bytes.as_slice();

        let read_header: StreamHeader = read(&mut stream, MAX_TO_AGENT_BYTES).unwrap();

        assert_eq!(read_header, header);
        assert_eq!(stream, b"raw");
    }

    #[test]
    fn a_length_above_the_bound_is_refused_before_its_body_comes() {
        let mut decoder = Decoder::new(16);
        decoder.push(&u32::MAX.to_le_bytes());

        let error = decoder.next::<FromAgent>().unwrap_err();

        assert!(matches!(error, FrameError::TooLong { bound: 16, .. }));
    }

    #[test]
    fn a_message_above_the_bound_is_not_sent() {
        assert!(matches!(
            encode(&vec![0u8; 32], 16).unwrap_err(),
            FrameError::TooLong { .. }
        ));
    }

    #[test]
    fn bytes_left_over_in_a_body_are_an_error() {
        let mut frame = encode(&hello(), 1024).unwrap();
        frame.push(0);
        frame[0] += 1;
        let mut decoder = Decoder::new(1024);
        decoder.push(&frame);

        assert!(matches!(
            decoder.next::<FromAgent>().unwrap_err(),
            FrameError::Malformed(_)
        ));
    }

    #[test]
    fn a_stream_that_ends_inside_a_frame_is_not_a_good_end() {
        let frame = encode(&hello(), 1024).unwrap();

        let inside = read::<FromAgent>(&mut &frame[..frame.len() - 1], 1024).unwrap_err();
        let between = read::<FromAgent>(&mut &frame[..0], 1024).unwrap_err();

        assert!(matches!(inside, FrameError::Stream(_)));
        assert!(matches!(between, FrameError::Ended));
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting(cuts in proptest::collection::vec(1usize..40, 1..20)) {
            let sent: Vec<FromAgent> = (0..5).map(|_| hello()).collect();
            let bytes: Vec<u8> = sent.iter().flat_map(|m| encode(m, 1024).unwrap()).collect();
            let mut decoder = Decoder::new(1024);
            let mut received = Vec::new();
            let mut rest = bytes.as_slice();
            for cut in cuts.iter().cycle() {
                let (piece, tail) = rest.split_at((*cut).min(rest.len()));
                decoder.push(piece);
                while let Some(message) = decoder.next::<FromAgent>().unwrap() {
                    received.push(message);
                }
                rest = tail;
                if rest.is_empty() { break; }
            }
            prop_assert_eq!(received, sent);
            prop_assert!(decoder.is_empty());
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = Decoder::new(128);
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.next::<crate::message::ToAgent>() {}
            prop_assert!(decoder.wanted() >= 1 && decoder.wanted() <= 132);
        }
    }
}
