//! Reading one file.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;

use protocol::content::ContentReader;

use super::metadata::Metadata;
use crate::shared::ANSWER_LIMIT;

/// A file's content as it comes from the guest, made by [`super::Files::open`].
///
/// The end is the file's: a guest that stops, or a machine that ends, in the middle is an error.
#[derive(Debug)]
pub struct FileReader {
    content: ContentReader<UnixStream>,
    metadata: Metadata,
}

impl FileReader {
    pub(super) fn new(stream: UnixStream, metadata: Metadata) -> Self {
        // A guest that sends nothing is waited for as long as for any answer. Only a bound of 0 is refused.
        let _ = stream.set_read_timeout(Some(ANSWER_LIMIT));
        Self {
            content: ContentReader::new(stream),
            metadata,
        }
    }

    /// What the file was when it was opened.
    #[must_use]
    pub fn metadata(&self) -> Metadata {
        self.metadata
    }
}

impl Read for FileReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.content.read(buffer)
    }
}
