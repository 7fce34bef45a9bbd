//! The messages themselves. Text that comes from or goes to programs is bytes: an argument, a path
//! or a variable need not be UTF-8.

use serde::{Deserialize, Serialize};

use crate::file::FileRequest;

/// What the host tells the agent, on the control stream. The agent takes them in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ToAgent {
    /// First message of a machine: clock, randomness, name. Nothing runs before it.
    Configure(Configure),
    /// Start a command. Its streams may be dialled before or after; it starts once all are there.
    Spawn(Spawn),
    /// Send a signal to a command's process group.
    Signal {
        /// Which command.
        command_id: u32,
        /// Linux signal number, 1 to 31; others are ignored.
        signal: i32,
    },
    /// Kill everything in a command's cgroup.
    Kill {
        /// Which command.
        command_id: u32,
    },
    /// The terminal of a command has a new size; its foreground processes get `SIGWINCH`.
    Resize {
        /// Which command.
        command_id: u32,
        /// The new size.
        size: TerminalSize,
    },
    /// Start an interpreter that stays and is forked for later commands. It is a command itself: it has an id, streams,
    /// and is answered as one. Its arguments are `-c` and the code that warms it; it counts as exited, with code 0, when
    /// that code has run and the interpreter waits. Later commands of the same program and user are forked from it
    /// where that makes no difference to them.
    WarmUp(Spawn),
    /// Stop all that the agent has started, before the machine is saved. Answered with [`FromAgent::Frozen`] or
    /// [`FromAgent::FreezeFailed`]. No command is started before [`Self::Thaw`] or [`Self::Resume`].
    Freeze {
        /// Whether to close all data streams too, as for a template, which is never thawed. Without, a machine that
        /// goes on keeps them; in a restored one they are broken in any case.
        close_streams: bool,
    },
    /// Let all that was stopped go on: the machine was saved, or was not. Answered with [`FromAgent::Thawed`].
    Thaw,
    /// First message to a restored machine.
    Resume(Resume),
    /// Start the gate ([`crate::gate`]), anew if it runs.
    Gate,
}

/// What has to be new in a machine that was restored, so that no two of one snapshot are alike.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resume {
    /// Nanoseconds since the Unix epoch, read by the host just before sending. The agent adds half of the time that it has waited for this
    /// since it sent [`Restored`].
    pub realtime_ns: u64,
    /// Fresh bytes from the host's generator; the guest's is seeded with them at once.
    pub entropy: [u8; 32],
    /// The guest's host name, as in [`Configure::hostname`].
    pub hostname: String,
    /// What `/etc/machine-id` becomes: fresh random bytes, made a version 4 UUID by the agent.
    pub machine_id: [u8; 16],
    /// What `/proc/sys/kernel/random/boot_id` shows; likewise.
    pub boot_id: [u8; 16],
    /// As [`Configure::max_processes`]; without one, what the saved machine had stays.
    pub max_processes: Option<u32>,
}

/// What the guest cannot know by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configure {
    /// Nanoseconds since the Unix epoch, read by the host just before sending.
    pub realtime_ns: u64,
    /// Fresh bytes from the host's generator, mixed into the guest's.
    pub entropy: [u8; 32],
    /// The guest's host name: 1 to 64 bytes, letters, digits and hyphens.
    pub hostname: String,
    /// Most processes and threads of all commands together, where that is fewer than go with the guest's memory.
    pub max_processes: Option<u32>,
}

/// A command to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spawn {
    /// Chosen by the host, unique within the machine.
    pub command_id: u32,
    /// Program: a path when it has a slash, else looked up in the command's `PATH`.
    pub program: Vec<u8>,
    /// Arguments after the program's name.
    pub args: Vec<Vec<u8>>,
    /// Variables set over the agent's defaults (`PATH`, `HOME`, `USER`, `LOGNAME`, `SHELL`, `LANG`,
    /// and `TERM` with a terminal).
    pub env: Vec<(Vec<u8>, Vec<u8>)>,
    /// Whether it has none of these defaults.
    pub env_clear: bool,
    /// Those of the defaults that it has not.
    pub env_remove: Vec<Vec<u8>>,
    /// Working folder; the user's home when there is none.
    pub cwd: Option<Vec<u8>>,
    /// `USER[:GROUP]`, by name or number; the image's unprivileged user when there is none.
    pub user: Option<String>,
    /// Where the command's input and output go.
    pub stdio: Stdio,
    /// A file that the command's user writes before it starts: most often the script that is run.
    pub file: Option<NewFile>,
}

/// Longest content of a file that comes with a command, in bytes: with it, the request still is one of those that a warm interpreter takes.
pub const MAX_NEW_FILE_BYTES: usize = 32 << 10;

/// A file that comes with a command. Where it can't be written, the command is not started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewFile {
    /// Where: a path from the user's home on. Folders that are missing are made; a file that is there is replaced.
    pub path: Vec<u8>,
    /// Permission bits.
    pub mode: u32,
    /// What is in it; more than [`MAX_NEW_FILE_BYTES`] is refused.
    pub content: Vec<u8>,
}

/// A command's input and output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Stdio {
    /// Pipes, each relayed over a data stream of its own: [`StreamKind::Stdout`],
    /// [`StreamKind::Stderr`], and [`StreamKind::Stdin`] if `stdin`, else `/dev/null`.
    Pipes {
        /// Whether a stream for standard input will be dialled.
        stdin: bool,
    },
    /// A pseudo-terminal, relayed over one data stream: [`StreamKind::Terminal`].
    Terminal(TerminalSize),
}

/// A terminal's size in character cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Width.
    pub columns: u16,
    /// Height.
    pub rows: u16,
}

/// First frame on a data stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamHeader {
    /// The command that the stream belongs to; of no meaning for [`StreamKind::File`] and
    /// [`StreamKind::Calls`].
    pub command_id: u32,
    /// What the stream carries.
    pub kind: StreamKind,
}

/// What a data stream carries.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum StreamKind {
    /// Host to guest; the host's half-close is the command's end of file.
    Stdin,
    /// Guest to host; ends when no process holds the command's standard output any more, or soon
    /// after the command ended. If the host closes, the command gets `SIGPIPE` as on a closed pipe.
    Stdout,
    /// Like [`Self::Stdout`].
    Stderr,
    /// Both ways: what is typed and what is shown.
    Terminal,
    /// Something to do with a file, and what is read or written: see [`crate::file`].
    File(FileRequest),
    /// Calls of the host's functions, and what came of them: see [`crate::call`]. The newest one counts.
    Calls,
}

/// What the agent tells the host, on the control stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FromAgent {
    /// First message: the root file system stands, data streams are taken.
    Hello(Hello),
    /// Last message, in place of [`Self::Hello`] or behind it: the guest can't be used, for example since
    /// no root could be mounted. The host ends the machine.
    Fatal {
        /// A sentence for the user.
        message: String,
    },
    /// The command runs.
    Spawned {
        /// Which command.
        command_id: u32,
        /// Whether it was forked from a warm interpreter ([`ToAgent::WarmUp`]).
        warm: bool,
    },
    /// The command could not be started; nothing of it ran.
    SpawnFailed {
        /// Which command.
        command_id: u32,
        /// What kind of failure.
        kind: SpawnFailure,
        /// A sentence for the user.
        message: String,
    },
    /// The command ended, and with it all that it started.
    Exited(Exited),
    /// Everything that the agent started stands still. Until [`ToAgent::Thaw`] the agent sends nothing more, and it
    /// takes the end of its control stream for a restore.
    Frozen,
    /// It could not be stopped in time, and goes on.
    FreezeFailed {
        /// A sentence for the user.
        message: String,
    },
    /// Everything goes on.
    Thawed,
    /// First message of a restored machine, on a new control stream.
    Restored(Restored),
    /// All of [`Resume`] is applied: from here on what was frozen runs, and commands are taken.
    Resumed,
}

/// The agent's first words in a restored machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restored {
    /// [`crate::VERSION`] of the agent.
    pub version: u32,
    /// `CLOCK_BOOTTIME` of the guest when the agent saw that its control stream was broken, in nanoseconds.
    pub noticed_ns: u64,
    /// The same clock when this message was written.
    pub sent_ns: u64,
}

/// The agent's first words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`crate::VERSION`] of the agent.
    pub version: u32,
    /// `CLOCK_BOOTTIME` of the guest when the agent's `main` began, in nanoseconds.
    pub init_started_ns: u64,
    /// The same clock when this message was written: the difference is the agent's share of boot.
    pub sent_ns: u64,
}

/// Why a command was not started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SpawnFailure {
    /// No such program, or its interpreter is missing: 127 for a shell.
    NotFound,
    /// It is there but can't be executed: 126 for a shell.
    NotExecutable,
    /// The request itself can't be met: user, working folder, arguments too long.
    Invalid,
    /// The guest has no more room: processes, memory, descriptors.
    Exhausted,
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exited {
    /// Which command.
    pub command_id: u32,
    /// Of its first process.
    pub status: ExitStatus,
    /// How often the guest killed a process of the command for lack of memory.
    pub oom_kills: u32,
    /// Most memory that the command held at one time, in bytes, page cache included.
    pub peak_memory_bytes: u64,
    /// Processor time of all its processes, in microseconds.
    pub cpu_time_us: u64,
    /// How often a process could not be started while the command ran, since the guest had as many as it may.
    pub process_limit_hits: u32,
    /// Most processes and threads that the command had at one time. The kernel counts one that could not be started, too.
    pub peak_processes: u32,
    /// Bytes that all that was written takes, in the writable layer of the root, and bytes that are left there.
    pub disk_used_bytes: u64,
    /// See `disk_used_bytes`.
    pub disk_free_bytes: u64,
    /// Whether all that was written is on the workspace's disk, if there is one: not where that failed.
    pub is_kept: bool,
}

/// The status of a process that ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitStatus {
    /// It exited with this code, 0 to 255.
    Code(i32),
    /// A signal of this number ended it.
    Signal(i32),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes<T: Serialize>(message: &T) -> Vec<u8> {
        postcard::to_extend(message, Vec::new()).unwrap()
    }

    /// Both sides of a snapshot may be built apart: whoever changes a message on purpose raises [`crate::VERSION`] and
    /// this table.
    #[test]
    fn the_words_have_the_bytes_that_version_10_gives_them() {
        assert_eq!(crate::VERSION, 10);
        assert_eq!(bytes(&ToAgent::Gate), [9]);
        assert_eq!(
            bytes(&ToAgent::Freeze {
                close_streams: true
            }),
            [6, 1]
        );
        assert_eq!(bytes(&ToAgent::Thaw), [7]);
        assert_eq!(bytes(&FromAgent::Frozen), [5]);
        assert_eq!(bytes(&FromAgent::Thawed), [7]);
        assert_eq!(bytes(&FromAgent::Resumed), [9]);
        let restored = FromAgent::Restored(Restored {
            version: 4,
            noticed_ns: 5,
            sent_ns: 6,
        });
        assert_eq!(bytes(&restored), [8, 4, 5, 6]);
        let resume = ToAgent::Resume(Resume {
            realtime_ns: 1,
            entropy: [2; 32],
            hostname: "a".to_owned(),
            machine_id: [3; 16],
            boot_id: [4; 16],
            max_processes: Some(7),
        });
        let expected = [
            &[8, 1][..],
            &[2; 32],
            &[1, b'a'],
            &[3; 16],
            &[4; 16],
            &[1, 7],
        ]
        .concat();
        assert_eq!(bytes(&resume), expected);
        let configure = ToAgent::Configure(Configure {
            realtime_ns: 1,
            entropy: [2; 32],
            hostname: "a".to_owned(),
            max_processes: None,
        });
        let expected = [&[0, 1][..], &[2; 32], &[1, b'a', 0]].concat();
        assert_eq!(bytes(&configure), expected);
        let spawn = ToAgent::Spawn(Spawn {
            command_id: 1,
            program: b"p".to_vec(),
            args: vec![b"a".to_vec()],
            env: vec![(b"K".to_vec(), b"v".to_vec())],
            env_clear: true,
            env_remove: vec![b"R".to_vec()],
            cwd: None,
            user: None,
            stdio: Stdio::Pipes { stdin: true },
            file: None,
        });
        let expected = [
            &[1, 1, 1, b'p', 1, 1, b'a', 1, 1, b'K', 1, b'v'][..],
            &[1, 1, 1, b'R', 0, 0, 0, 1, 0],
        ]
        .concat();
        assert_eq!(bytes(&spawn), expected);
        let exited = FromAgent::Exited(Exited {
            command_id: 1,
            status: ExitStatus::Code(1),
            oom_kills: 2,
            peak_memory_bytes: 3,
            cpu_time_us: 4,
            process_limit_hits: 5,
            peak_processes: 6,
            disk_used_bytes: 7,
            disk_free_bytes: 8,
            is_kept: true,
        });
        // A signed number is in zigzag.
        assert_eq!(bytes(&exited), [4, 1, 0, 2, 2, 3, 4, 5, 6, 7, 8, 1]);
    }

    #[test]
    fn a_resume_that_is_cut_anywhere_is_no_message() {
        let whole = bytes(&ToAgent::Resume(Resume {
            realtime_ns: u64::MAX,
            entropy: [0xff; 32],
            hostname: "sandbox-1".to_owned(),
            machine_id: [0; 16],
            boot_id: [0; 16],
            max_processes: Some(u32::MAX),
        }));
        for length in 0..whole.len() {
            postcard::from_bytes::<ToAgent>(&whole[..length]).unwrap_err();
        }
    }
}
