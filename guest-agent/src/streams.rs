//! Data streams before they are somebody's: accepted, their header read, waiting for the command that it
//! names.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use protocol::frame::Decoder;
use protocol::message::{StreamHeader, StreamKind};
use rustix::io::Errno;

use crate::limits::{MAX_HEADER_BYTES, MAX_PENDING_STREAMS, STREAM_WAIT};

/// All that wait.
#[derive(Debug, Default)]
pub struct Pending {
    streams: BTreeMap<u32, Stream>,
    next_id: u32,
}

#[derive(Debug)]
struct Stream {
    descriptor: OwnedFd,
    decoder: Decoder,
    header: Option<StreamHeader>,
    deadline: Instant,
}

/// A stream whose header is complete.
#[derive(Debug)]
pub struct Arrived {
    /// What the header says.
    pub header: StreamHeader,
    /// The stream, non-blocking, behind its header.
    pub descriptor: OwnedFd,
}

impl Pending {
    /// Whether there is no room for another.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.streams.len() >= MAX_PENDING_STREAMS
    }

    /// Takes a new non-blocking stream; returns the name that its events are to have.
    pub fn add(&mut self, descriptor: OwnedFd, now: Instant) -> u32 {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let decoder = Decoder::new(MAX_HEADER_BYTES);
        let deadline = now + STREAM_WAIT;
        self.streams.insert(
            id,
            Stream {
                descriptor,
                decoder,
                header: None,
                deadline,
            },
        );
        id
    }

    /// A stream's descriptor.
    #[must_use]
    pub fn descriptor(&self, id: u32) -> Option<impl AsFd + '_> {
        self.streams.get(&id).map(|stream| &stream.descriptor)
    }

    /// Reads on in a stream's header; returns the stream once it is complete. One that ended or sent anything
    /// else is closed.
    pub fn read(&mut self, id: u32) -> Option<Arrived> {
        let stream = self.streams.get_mut(&id)?;
        match stream.read_header() {
            Ok(None) => None,
            Ok(Some(header)) => {
                let descriptor = self.streams.remove(&id)?.descriptor;
                Some(Arrived { header, descriptor })
            }
            Err(()) => {
                self.streams.remove(&id);
                None
            }
        }
    }

    /// Keeps a stream whose command is not there yet.
    pub fn keep(&mut self, arrived: Arrived, now: Instant) {
        let id = self.add(arrived.descriptor, now);
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.header = Some(arrived.header);
        }
    }

    /// Takes out the streams that name a command.
    pub fn take(&mut self, command_id: u32) -> Vec<Arrived> {
        let named = |stream: &Stream| {
            stream.header.as_ref().is_some_and(|header| {
                header.command_id == command_id
                    && !matches!(header.kind, StreamKind::File(_) | StreamKind::Calls)
            })
        };
        self.streams
            .extract_if(.., |_, stream| named(stream))
            .filter_map(|(_, stream)| {
                let header = stream.header?;
                Some(Arrived {
                    header,
                    descriptor: stream.descriptor,
                })
            })
            .collect()
    }

    /// Closes the streams that waited too long.
    pub fn expire(&mut self, now: Instant) {
        self.streams.retain(|_, stream| stream.deadline > now);
    }

    /// When the next one will have waited too long.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.streams.values().map(|stream| stream.deadline).min()
    }
}

impl Stream {
    /// Reads exactly the header's bytes; what follows belongs to the command.
    fn read_header(&mut self) -> Result<Option<StreamHeader>, ()> {
        let mut buffer = [0; 512];
        loop {
            if let Some(header) = self.decoder.next().map_err(drop)? {
                return Ok(Some(header));
            }
            let wanted = self.decoder.wanted().min(buffer.len());
            let piece = buffer.get_mut(..wanted).unwrap_or_default();
            match rustix::io::read(&self.descriptor, &mut *piece) {
                Ok(0) => return Err(()),
                Ok(count) => self.decoder.push(buffer.get(..count).unwrap_or_default()),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(_) => return Err(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use protocol::frame::{self, MAX_TO_AGENT_BYTES};

    use super::*;

    fn pair() -> (UnixStream, OwnedFd) {
        let (host, agent) = UnixStream::pair().unwrap();
        agent.set_nonblocking(true).unwrap();
        (host, agent.into())
    }

    fn header(command_id: u32) -> StreamHeader {
        StreamHeader {
            command_id,
            kind: StreamKind::Stdin,
        }
    }

    #[test]
    fn a_header_in_pieces_leaves_what_follows_on_the_stream() {
        let mut pending = Pending::default();
        let (mut host, agent) = pair();
        let id = pending.add(agent, Instant::now());
        let mut bytes = frame::encode(&header(300), MAX_TO_AGENT_BYTES).unwrap();
        bytes.extend_from_slice(b"input");

        host.write_all(&bytes[..3]).unwrap();
        assert!(pending.read(id).is_none());
        host.write_all(&bytes[3..]).unwrap();
        let arrived = pending.read(id).unwrap();

        assert_eq!(arrived.header, header(300));
        let mut rest = [0; 5];
        UnixStream::from(arrived.descriptor)
            .read_exact(&mut rest)
            .unwrap();
        assert_eq!(&rest, b"input");
    }

    #[test]
    fn streams_wait_for_their_command_and_not_for_ever() {
        let mut pending = Pending::default();
        let now = Instant::now();
        for id in [1, 2, 1] {
            pending.keep(
                Arrived {
                    header: header(id),
                    descriptor: pair().1,
                },
                now,
            );
        }

        assert_eq!(pending.take(1).len(), 2);
        assert_eq!(pending.take(1).len(), 0);
        assert_eq!(pending.deadline(), Some(now + STREAM_WAIT));
        pending.expire(now + STREAM_WAIT);
        assert_eq!(pending.take(2).len(), 0);
    }

    #[test]
    fn test_read_garbage_or_end_closes_the_stream() {
        let mut pending = Pending::default();
        let (mut host, agent) = pair();
        let id = pending.add(agent, Instant::now());
        host.write_all(&[0xff; 8]).unwrap();

        assert!(pending.read(id).is_none());
        assert!(pending.descriptor(id).is_none());
        let (host, agent) = pair();
        let id = pending.add(agent, Instant::now());
        drop(host);
        assert!(pending.read(id).is_none());
        assert!(pending.descriptor(id).is_none());
    }
}
