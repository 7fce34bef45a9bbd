//! A file's content on a data stream: pieces, each a little-endian `u32` length and that many bytes, and a length of
//! 0 at the end.
//!
//! The end is said and not taken from the stream's, since a stream that breaks ends too, and half a file is no file.

use std::io::{self, Read};

/// Largest piece in bytes.
pub const MAX_PIECE_BYTES: usize = 64 << 10;

/// Bytes of the length in front of each piece.
pub const LENGTH_BYTES: usize = 4;

/// What goes in front of a piece of `length` bytes; 0 is the end of the content.
#[must_use]
pub fn header(length: usize) -> [u8; LENGTH_BYTES] {
    // A length beyond the type is beyond the bound too, and is refused by the reader.
    u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes()
}

/// Reads content from a stream: ends where the content was said to end, and fails where the stream ends before.
#[derive(Debug)]
pub struct ContentReader<R> {
    stream: R,
    left: usize,
    ended: bool,
}

impl<R: Read> ContentReader<R> {
    /// The content that begins here.
    pub fn new(stream: R) -> Self {
        Self {
            stream,
            left: 0,
            ended: false,
        }
    }
}

impl<R: Read> Read for ContentReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 && !self.ended {
            let mut length = [0; LENGTH_BYTES];
            self.stream.read_exact(&mut length)?;
            self.left = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
            self.ended = self.left == 0;
            if self.left > MAX_PIECE_BYTES {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "A piece of the content is above its bound",
                ));
            }
        }
        if self.ended || buffer.is_empty() {
            return Ok(0);
        }
        let wanted = buffer.len().min(self.left);
        match self
            .stream
            .read(buffer.get_mut(..wanted).unwrap_or_default())?
        {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                self.left -= count.min(self.left);
                Ok(count)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sent(pieces: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for piece in pieces {
            bytes.extend_from_slice(&header(piece.len()));
            bytes.extend_from_slice(piece);
        }
        bytes.extend_from_slice(&header(0));
        bytes
    }

    #[test]
    fn a_piece_above_the_bound_is_an_error() {
        let bytes = header(MAX_PIECE_BYTES + 1);
        let error = ContentReader::new(bytes.as_slice())
            .read(&mut [0; 8])
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn nothing_is_read_behind_the_end() {
        let mut bytes = sent(&[b"abc".to_vec()]);
        bytes.extend_from_slice(b"more");
        let mut stream = bytes.as_slice();
        let mut reader = ContentReader::new(&mut stream);

        let mut content = Vec::new();
        reader.read_to_end(&mut content).unwrap();
        assert_eq!(reader.read(&mut [0; 8]).unwrap(), 0);

        assert_eq!((content.as_slice(), stream), (&b"abc"[..], &b"more"[..]));
    }

    proptest! {
        #[test]
        fn content_arrives_whole_or_not_at_all(
            pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..100), 0..8),
            cut in any::<proptest::sample::Index>(),
        ) {
            let bytes = sent(&pieces);
            let mut whole = Vec::new();
            ContentReader::new(bytes.as_slice()).read_to_end(&mut whole).unwrap();
            let broken = &bytes[..cut.index(bytes.len())];

            prop_assert_eq!(whole, pieces.concat());
            prop_assert!(ContentReader::new(broken).read_to_end(&mut Vec::new()).is_err());
        }
    }
}
