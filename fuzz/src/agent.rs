//! Target `agent`: what the guest's agent reads from the host, and what either side reads of a file's content.
//!
//! Checked: a message that was read is one that can be written and read again; a stream in pieces gives the messages of the whole; what
//! is held is bounded; what follows a stream's header stays on the stream; content is whole or an error.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

use guest_agent::control::{Control, ControlError};
use guest_agent::limits::{MAX_HEADER_BYTES, RELAY_BYTES};
use guest_agent::streams::Pending;
use protocol::call::{Answer, FromBridge, MAX_FRAME_BYTES};
use protocol::content::{self, ContentReader, MAX_PIECE_BYTES};
use protocol::file::{
    FileAnswer, FileDone, FileOperation, FileRequest, FolderItem, TreeItem, WatchItem,
};
use protocol::frame::{self, Decoder, MAX_FROM_AGENT_BYTES, MAX_TO_AGENT_BYTES};
use protocol::message::{
    Configure, ExitStatus, Exited, FromAgent, Hello, NewFile, Restored, Resume, Spawn,
    SpawnFailure, Stdio, StreamHeader, StreamKind, TerminalSize, ToAgent,
};

use crate::input::Input;

/// The most bytes that go to the agent: what a socket takes without a reader.
const BYTES_MAX: usize = 32 << 10;

/// Runs the target.
pub fn run(data: &[u8]) {
    crate::outlive_closed_sockets();
    let mut input = Input::new(data);
    let (part, cut) = (input.below(5), usize::from(input.u8()) + 1);
    let bytes = input.rest();
    let bytes = &bytes[..bytes.len().min(BYTES_MAX)];
    match part {
        0 => control(bytes, cut),
        1 => header(bytes, cut),
        2 => content(bytes),
        3 => decode::<ToAgent>(bytes, cut, MAX_TO_AGENT_BYTES),
        _ => {
            decode::<FromAgent>(bytes, cut, MAX_FROM_AGENT_BYTES);
            decode::<FileAnswer>(bytes, cut, MAX_FROM_AGENT_BYTES);
            decode::<FolderItem>(bytes, cut, MAX_FROM_AGENT_BYTES);
            decode::<TreeItem>(bytes, cut, MAX_FROM_AGENT_BYTES);
            decode::<WatchItem>(bytes, cut, MAX_FROM_AGENT_BYTES);
            decode::<FromBridge>(bytes, cut, MAX_FRAME_BYTES);
            decode::<Answer>(bytes, cut, MAX_FRAME_BYTES);
        }
    }
}

fn pair() -> (UnixStream, OwnedFd) {
    let (host, agent) = UnixStream::pair().expect("descriptors");
    agent.set_nonblocking(true).expect("a socket");
    (host, agent.into())
}

/// The agent's own reader of the control stream, which gets the bytes in pieces of `cut`.
fn control(bytes: &[u8], cut: usize) {
    let (mut host, agent) = pair();
    let mut control = Control::new(agent).expect("a socket");
    let mut buffer = vec![0; RELAY_BYTES];
    let mut messages = Vec::new();
    let mut has_failed = false;
    for piece in bytes.chunks(cut) {
        host.write_all(piece).expect("the agent reads");
        match control.receive(&mut buffer) {
            Ok(more) => messages.extend(more),
            Err(error) => {
                assert!(matches!(error, ControlError::Frame(_)), "{error}");
                has_failed = true;
                break;
            }
        }
    }
    let (whole, is_whole) = decoded::<ToAgent>(bytes, MAX_TO_AGENT_BYTES);
    // What came in the same piece as something that is no message is dropped with it: the agent ends then.
    assert!(whole.starts_with(&messages));
    assert!(has_failed || messages == whole, "pieces give less");
    assert_eq!(has_failed, !is_whole);
    drop(host);
    if !has_failed {
        let end = control.receive(&mut buffer);
        assert!(matches!(end, Err(ControlError::Closed)));
    }
}

/// The agent's own reader of a data stream's header.
fn header(bytes: &[u8], cut: usize) {
    let (mut host, agent) = pair();
    let mut pending = Pending::default();
    let id = pending.add(agent, Instant::now());
    for (index, piece) in bytes.chunks(cut).enumerate() {
        host.write_all(piece).expect("the stream takes it");
        let Some(arrived) = pending.read(id) else {
            if pending.descriptor(id).is_none() {
                let (headers, is_whole) = decoded::<StreamHeader>(bytes, MAX_HEADER_BYTES);
                assert!(headers.is_empty() && !is_whole, "a good header was refused");
                return;
            }
            continue;
        };
        let frame = frame::encode(&arrived.header, MAX_HEADER_BYTES);
        assert!(frame.is_ok(), "a header beyond its bound");
        // What follows is the command's: it must be there to the last byte.
        let mut length = [0; 4];
        length.copy_from_slice(&bytes[..4]);
        let taken = 4 + u32::from_le_bytes(length) as usize;
        let sent = ((index + 1) * cut).min(bytes.len());
        drop(host);
        let mut rest = Vec::new();
        let mut stream = UnixStream::from(arrived.descriptor);
        stream.set_nonblocking(false).expect("a socket");
        stream.read_to_end(&mut rest).expect("a socket");
        assert_eq!(rest, bytes[taken..sent]);
        return;
    }
}

/// A reader of content.
fn content(bytes: &[u8]) {
    let mut stream = bytes;
    let mut read = Vec::new();
    let result = ContentReader::new(&mut stream).read_to_end(&mut read);
    assert!(read.len() <= bytes.len());
    if result.is_ok() {
        // Written anew, in pieces of the greatest length, it reads the same.
        let mut again = Vec::new();
        for piece in read.chunks(MAX_PIECE_BYTES) {
            again.extend_from_slice(&content::header(piece.len()));
            again.extend_from_slice(piece);
        }
        again.extend_from_slice(&content::header(0));
        let mut second = Vec::new();
        ContentReader::new(again.as_slice())
            .read_to_end(&mut second)
            .expect("what was written is whole");
        assert_eq!(read, second);
    }
}

/// A decoder that gets pieces, beside one that gets all.
fn decode<T>(bytes: &[u8], cut: usize, bound: usize)
where
    T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug,
{
    let mut decoder = Decoder::new(bound);
    let mut messages: Vec<T> = Vec::new();
    'all: for piece in bytes.chunks(cut) {
        decoder.push(piece);
        loop {
            match decoder.next() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(_) => break 'all,
            }
        }
        assert!((1..=bound + 4).contains(&decoder.wanted()));
    }
    assert_eq!(messages, decoded::<T>(bytes, bound).0);
    for message in messages {
        let mut again = Decoder::new(bound);
        again.push(&frame::encode(&message, bound).expect("it is within the bound"));
        assert_eq!(again.next::<T>().expect("it is a message"), Some(message));
        assert!(again.is_empty());
    }
}

/// The messages in the bytes, and whether there is nothing else in them.
fn decoded<T: serde::de::DeserializeOwned>(bytes: &[u8], bound: usize) -> (Vec<T>, bool) {
    let mut decoder = Decoder::new(bound);
    decoder.push(bytes);
    let mut messages = Vec::new();
    loop {
        match decoder.next() {
            Ok(Some(message)) => messages.push(message),
            Ok(None) => return (messages, true),
            Err(_) => return (messages, false),
        }
    }
}

/// Inputs to begin with.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let size = TerminalSize {
        columns: 80,
        rows: 24,
    };
    let spawn = Spawn {
        command_id: 1,
        program: b"python3".to_vec(),
        args: vec![b"-c".to_vec(), b"1".to_vec()],
        env: vec![(b"A".to_vec(), b"b".to_vec())],
        env_clear: false,
        env_remove: vec![b"LANG".to_vec()],
        cwd: Some(b"/".to_vec()),
        user: Some("0:0".into()),
        stdio: Stdio::Pipes { stdin: true },
        file: Some(NewFile {
            path: b"f".to_vec(),
            mode: 0o755,
            content: b"1".to_vec(),
        }),
    };
    let to_agent = [
        ToAgent::Configure(Configure {
            realtime_ns: 1,
            entropy: [7; 32],
            hostname: "guest".into(),
            max_processes: Some(64),
        }),
        ToAgent::Spawn(spawn.clone()),
        ToAgent::Spawn(Spawn {
            stdio: Stdio::Terminal(size),
            ..spawn.clone()
        }),
        ToAgent::Signal {
            command_id: 1,
            signal: 15,
        },
        ToAgent::Kill { command_id: 1 },
        ToAgent::Resize {
            command_id: 1,
            size,
        },
        ToAgent::WarmUp(spawn),
        ToAgent::Freeze {
            close_streams: true,
        },
        ToAgent::Thaw,
        ToAgent::Resume(Resume {
            realtime_ns: 1,
            entropy: [7; 32],
            hostname: "guest".into(),
            machine_id: [8; 16],
            boot_id: [9; 16],
            max_processes: None,
        }),
    ];
    let file = StreamHeader {
        command_id: 0,
        kind: StreamKind::File(FileRequest {
            path: b"a/b".to_vec(),
            user: None,
            operation: FileOperation::Write { mode: 0o644 },
        }),
    };
    let stdin = StreamHeader {
        command_id: 1,
        kind: StreamKind::Stdin,
    };
    let begin = |part: u8, cut: u8, bytes: &[u8]| [&[part, cut], bytes].concat();
    let to_agent = frames(&to_agent);
    let pieces = [&[3, 0, 0, 0], b"abc".as_slice(), &[0, 0, 0, 0]].concat();
    vec![
        ("control", begin(0, 9, &to_agent)),
        ("control_at_once", begin(0, 255, &to_agent)),
        ("file_header", begin(1, 3, &frames(&[file]))),
        (
            "header_and_input",
            begin(1, 30, &[frames(&[stdin]), b"input".to_vec()].concat()),
        ),
        ("content", begin(2, 0, &pieces)),
        ("to_agent", begin(3, 4, &to_agent)),
        ("from_agent", begin(4, 4, &frames(&from_agent()))),
        (
            "file_written",
            begin(
                4,
                4,
                &frames(&[FileAnswer {
                    result: Ok(FileDone::At(b"/a".to_vec())),
                }]),
            ),
        ),
    ]
}

/// One of each message of the agent.
pub(crate) fn from_agent() -> Vec<FromAgent> {
    vec![
        FromAgent::Hello(Hello {
            version: protocol::VERSION,
            init_started_ns: 1,
            sent_ns: 2,
        }),
        FromAgent::Spawned {
            command_id: 1,
            warm: false,
        },
        FromAgent::Exited(Exited {
            command_id: 1,
            status: ExitStatus::Code(0),
            oom_kills: 0,
            peak_memory_bytes: 4096,
            cpu_time_us: 10,
            process_limit_hits: 11,
            peak_processes: 14,
            disk_used_bytes: 12,
            disk_free_bytes: 13,
            is_kept: false,
        }),
        FromAgent::SpawnFailed {
            command_id: 2,
            kind: SpawnFailure::NotFound,
            message: "no".into(),
        },
        FromAgent::Fatal {
            message: "gone".into(),
        },
        FromAgent::Restored(Restored {
            version: protocol::VERSION,
            noticed_ns: 1,
            sent_ns: 2,
        }),
        FromAgent::Resumed,
        FromAgent::Frozen,
        FromAgent::FreezeFailed {
            message: "no".into(),
        },
        FromAgent::Thawed,
    ]
}

/// These as frames, one after another.
pub(crate) fn frames<T: serde::Serialize>(messages: &[T]) -> Vec<u8> {
    messages
        .iter()
        .flat_map(|message| frame::encode(message, MAX_TO_AGENT_BYTES).expect("short"))
        .collect()
}
