//! What xtask and its agent in the emulated host say to each other, over one virtio-serial port.
//!
//! A frame is a kind (one byte), a length (four bytes, little-endian) and that many bytes. All output of the command comes
//! before its exit status, in one stream: who has read the status has read everything.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Bytes of a frame with the command's input or output.
pub(crate) const DATA_BYTES_MAX: usize = 64 * 1024;
/// Bytes of any frame. The largest describes the command; Linux itself bounds arguments and environment at about 6 MB
/// (`MAX_ARG_STRLEN` and a quarter of the stack limit), which is up to four times as long in JSON.
const FRAME_BYTES_MAX: usize = 32 * 1024 * 1024;

/// The command to run, and what it is to see.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Start {
    /// Program and arguments.
    pub(crate) command: Vec<OsString>,
    /// The whole environment.
    pub(crate) environment: Vec<(OsString, OsString)>,
    /// The working folder.
    pub(crate) folder: PathBuf,
    /// Folders that are shared for writing; the one at index N has the 9p tag of [`share_tag`].
    pub(crate) shares: Vec<PathBuf>,
    /// Files that are to be copied into memory first.
    pub(crate) resident: Vec<PathBuf>,
    /// Nanoseconds since 1970: the emulated host's clock has whole seconds at its start.
    pub(crate) clock_ns: u64,
}

/// The 9p tag of the shared folder at `index`.
pub(crate) fn share_tag(index: usize) -> String {
    format!("share{index}")
}

/// One frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// To the agent, first: what to run.
    Start(Start),
    /// To the agent: standard input; an empty frame is its end.
    Stdin(Vec<u8>),
    /// From the agent: standard output.
    Stdout(Vec<u8>),
    /// From the agent: standard error.
    Stderr(Vec<u8>),
    /// From the agent, last: the exit code, 128 + N for signal N.
    Exit(u8),
    /// From the agent, last: the command was not run; the exit code that says so, and why.
    Failed(u8, String),
    /// From the agent, first: it is there.
    Ready,
}

/// Why the conversation ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    /// The stream ended or failed.
    #[error("The connection with the emulated host failed")]
    Io(#[from] io::Error),
    /// A frame that nobody sends.
    #[error("The connection with the emulated host carried a frame that is not one: {0}")]
    Malformed(String),
}

impl Frame {
    /// Writes the frame whole.
    pub(crate) fn write(&self, to: &mut impl Write) -> Result<(), WireError> {
        let (kind, payload) = match self {
            Self::Start(start) => (0, serde_json::to_vec(start).map_err(io::Error::from)?),
            Self::Stdin(data) => (1, data.clone()),
            Self::Stdout(data) => (2, data.clone()),
            Self::Stderr(data) => (3, data.clone()),
            Self::Exit(code) => (4, vec![*code]),
            Self::Failed(code, reason) => (5, [&[*code], reason.as_bytes()].concat()),
            Self::Ready => (6, Vec::new()),
        };
        let len = u32::try_from(payload.len())
            .ok()
            .filter(|_| payload.len() <= FRAME_BYTES_MAX)
            .ok_or_else(|| WireError::Malformed(format!("{} bytes", payload.len())))?;
        let mut bytes = Vec::with_capacity(5 + payload.len());
        bytes.push(kind);
        bytes.extend_from_slice(&len.to_le_bytes());
        bytes.extend_from_slice(&payload);
        to.write_all(&bytes)?;
        Ok(())
    }

    /// Reads one frame; an end of the stream before or inside it is an error.
    pub(crate) fn read(from: &mut impl Read) -> Result<Self, WireError> {
        let mut kind = [0; 1];
        from.read_exact(&mut kind)?;
        let mut len = [0; 4];
        from.read_exact(&mut len)?;
        let len = usize::try_from(u32::from_le_bytes(len)).unwrap_or(usize::MAX);
        if len > FRAME_BYTES_MAX {
            return Err(WireError::Malformed(format!("{len} bytes")));
        }
        let mut payload = vec![0; len];
        from.read_exact(&mut payload)?;
        match (kind, payload.as_slice()) {
            ([0], json) => Ok(Self::Start(
                serde_json::from_slice(json).map_err(io::Error::from)?,
            )),
            ([1], _) => Ok(Self::Stdin(payload)),
            ([2], _) => Ok(Self::Stdout(payload)),
            ([3], _) => Ok(Self::Stderr(payload)),
            ([4], [code]) => Ok(Self::Exit(*code)),
            ([5], [code, reason @ ..]) => Ok(Self::Failed(
                *code,
                String::from_utf8_lossy(reason).into_owned(),
            )),
            ([6], []) => Ok(Self::Ready),
            ([kind], _) => Err(WireError::Malformed(format!("kind {kind}, {len} bytes"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt;

    #[test]
    fn every_frame_is_read_as_it_was_written() {
        let start = Start {
            command: vec![OsString::from_vec(vec![b'a', 0xff])],
            environment: vec![("A".into(), OsString::from_vec(vec![0xfe]))],
            folder: "/here".into(),
            shares: vec!["/share".into()],
            resident: vec!["/file".into()],
            clock_ns: 7,
        };
        let frames = [
            Frame::Start(start),
            Frame::Stdin(vec![]),
            Frame::Stdout(vec![0, 255]),
            Frame::Stderr(vec![1; DATA_BYTES_MAX]),
            Frame::Failed(127, "reason".into()),
            Frame::Ready,
            Frame::Exit(255),
        ];
        let mut bytes = Vec::new();
        for frame in &frames {
            frame.write(&mut bytes).unwrap();
        }

        let mut from = bytes.as_slice();
        let read: Vec<_> = frames
            .iter()
            .map(|_| Frame::read(&mut from).unwrap())
            .collect();

        assert_eq!(read, frames);
        assert!(from.is_empty());
    }

    #[test]
    fn test_read_invalid_frames_returns_errors() {
        for bytes in [
            &b""[..],
            b"\x02",
            b"\x02\x05\0\0\0ab",
            b"\x09\0\0\0\0",
            b"\x04\0\0\0\0",
            b"\x02\xff\xff\xff\xff",
        ] {
            assert!(Frame::read(&mut &bytes[..]).is_err(), "{bytes:?}");
        }
    }
}
