//! Every bound that the agent keeps, in one place. What happens at the bound stands beside it.

use std::time::Duration;

/// Commands alive or waiting for their streams at one time; one more is answered with
/// [`protocol::message::SpawnFailure::Exhausted`].
pub const MAX_COMMANDS: usize = 256;

/// Data streams whose header is not complete, or whose command has not been named yet. While there are
/// that many, no further stream is accepted: they wait in the listener's queue.
pub const MAX_PENDING_STREAMS: usize = 64;

/// Streams that the kernel holds for the agent before it takes them; a dial above is refused.
pub const LISTEN_BACKLOG: i32 = 128;

/// How long a stream may wait for its header or its command, and a command for its streams. Then the
/// stream is closed, and the command is answered with [`protocol::message::SpawnFailure::Invalid`].
pub const STREAM_WAIT: Duration = Duration::from_secs(10);

/// How long a process of the warm interpreter may take to become a command. Then it is ended, and the command is started anew.
pub const WARM_START_WAIT: Duration = Duration::from_secs(10);

/// How long a stage may take to become a command's program. Then it is ended, and the command is answered with
/// [`protocol::message::SpawnFailure::Exhausted`]. With [`STREAM_WAIT`], [`WARM_START_WAIT`] and [`END_WAIT`] for both this is well below
/// the minute after which the host takes an agent that has not answered for broken.
pub const START_WAIT: Duration = Duration::from_secs(20);

/// How long it may take until a process that was killed is gone. Then it is waited for no longer.
pub const END_WAIT: Duration = Duration::from_secs(1);

/// Longest stream header, in bytes: two paths of `PATH_MAX` (4096) and a user fit well. A longer one closes
/// its stream.
pub const MAX_HEADER_BYTES: usize = 12 << 10;

/// Files being read or written at one time; one more is answered with an error.
pub const MAX_FILE_STAGES: usize = 32;

/// How long a stage that works on a file may take to end once the host has closed its stream. Then it is ended; what it was writing stays beside
/// its place.
pub const FILE_END_WAIT: Duration = Duration::from_secs(10);

/// Programs connected to the socket for calls of the host's functions at one time; others wait in the listener's queue. Each holds
/// one call at most ([`protocol::call::MAX_CALL_BYTES`]), or its answer.
pub const MAX_CALL_CONNECTIONS: usize = 64;

/// Stack of the thread that serves one such connection: it calls nothing deep.
pub const CALL_THREAD_STACK_BYTES: usize = 64 << 10;

/// Bytes of a call that is too long that are read to no end, so that the program comes to read its answer. Behind that, its
/// connection is closed.
pub const MAX_DISCARDED_CALL_BYTES: u64 = 64 << 20;

/// Bytes that move in one system call of a relay, and the most that one direction of a relay holds. When
/// it holds something it reads nothing: the program waits on its full pipe, the host on its credit.
pub const RELAY_BYTES: usize = 64 << 10;

/// Turns of [`RELAY_BYTES`] that one relay gets before the others are looked at.
pub const RELAY_TURNS: usize = 8;

/// How long the output of a command that ended may stay open with nothing in it: someone outside the
/// command's cgroup holds the other end. Then it is closed.
pub const DRAIN_IDLE: Duration = Duration::from_secs(2);

/// Messages that wait for a host that does not read its control stream, in bytes. Above, the host counts
/// as gone.
pub const MAX_CONTROL_BACKLOG_BYTES: usize = 1 << 20;

/// Tries to dial the control stream: 20 waits, a second in all. After the last the machine ends.
pub const CONTROL_DIALS: u32 = 20;

/// Wait behind the first failed try to dial the control stream; each further one is twice as long.
pub const CONTROL_DIAL_FIRST_WAIT: Duration = Duration::from_millis(1);

/// Longest wait between two tries to dial the control stream.
pub const CONTROL_DIAL_WAIT: Duration = Duration::from_millis(64);

/// How long it may take until all that runs in the guest stands still; the kernel needs a moment for each process,
/// and a command that is being started is let start first. Then the host is told, and everything goes on.
pub const FREEZE_WAIT: Duration = Duration::from_secs(10);

/// Wait between two looks whether all stands still.
pub const FREEZE_LOOK_WAIT: Duration = Duration::from_millis(1);

/// How long the agent waits for the host to end the machine after it has said
/// [`protocol::message::FromAgent::Fatal`]. Then it ends the machine itself.
pub const FATAL_WAIT: Duration = Duration::from_secs(5);

/// Tries to find the root disk, one every [`DISK_WAIT`].
pub const DISK_TRIES: u32 = 50;

/// Wait between two looks for the root disk.
pub const DISK_WAIT: Duration = Duration::from_millis(10);

/// Of the memory that is free when the guest has booted, what no command may use, in bytes: room for the
/// kernel, the agent and the streams' packets. Commands get the rest as one `memory.max`; reaching it kills one of their processes.
pub const MEMORY_RESERVE_BYTES: u64 = 16 << 20;

/// The smallest share that commands get when memory is scarcer than [`MEMORY_RESERVE_BYTES`] allows for.
pub const MIN_WORKLOAD_BYTES: u64 = 16 << 20;

/// Most processes and threads of all commands together (`pids.max`): above, `fork` fails with `EAGAIN`. The host may ask for fewer.
pub const MAX_PROCESSES: u64 = 4096;

/// Free memory for each process that commands may have: half as many as the kernel itself allows for
/// (`threads-max`: an eighth of the memory in stacks of 16 KiB, `set_max_threads`), so that a fork bomb leaves
/// room for the agent's stages.
pub const MEMORY_BYTES_PER_PROCESS: u64 = 256 << 10;

/// Descriptors that the agent may hold: three streams and their three other ends for each command, the
/// stages' sockets and what is pending. Above, an accept or a spawn fails and the next one may succeed.
pub const MAX_AGENT_DESCRIPTORS: u64 = 4096;

/// Soft bound of a command's descriptors (`RLIMIT_NOFILE`), Linux's customary one: programs that use
/// `select` rely on it.
pub const COMMAND_DESCRIPTORS_SOFT: u64 = 1024;

/// Hard bound of a command's descriptors; a program may raise its own up to it. Programs that close every
/// possible descriptor one by one still finish within milliseconds.
pub const COMMAND_DESCRIPTORS_HARD: u64 = 65_536;

/// Bytes of `/etc/passwd` and of `/etc/group` that are read; accounts beyond are not seen.
pub const MAX_ACCOUNT_FILE_BYTES: u64 = 1 << 20;

/// Supplementary groups of a command; the kernel takes up to 65,536 (`NGROUPS_MAX`). Further ones are left
/// out.
pub const MAX_GROUPS: usize = 1024;

/// Bytes of a cgroup's statistics file that are read.
pub const MAX_CGROUP_FILE_BYTES: u64 = 16 << 10;

/// Bytes of a small file of the image (`/etc/hosts`, `/etc/machine-id`) that are read.
pub const MAX_SMALL_FILE_BYTES: u64 = 64 << 10;

/// Longest report of a stage, in bytes.
pub const MAX_REPORT_BYTES: usize = 16 << 10;

/// Longest part of a path or name that a message repeats, in bytes.
pub const MAX_QUOTED_BYTES: usize = 1024;

/// Longest path, in bytes (`PATH_MAX` with its NUL).
pub const MAX_PATH_BYTES: usize = 4095;

/// Longest order to a warm interpreter, in bytes: one message of a local socket takes it. A command whose arguments and
/// variables are longer is started anew.
pub const MAX_WARM_ORDER_BYTES: usize = 64 << 10;

/// Signals that are kept for a command that is still being started; further ones are dropped.
pub const MAX_EARLY_SIGNALS: usize = 16;

/// Wait between two tries to remove the cgroup of a command that ended.
pub const CGROUP_REMOVE_WAIT: Duration = Duration::from_millis(20);

/// Tries to remove such a cgroup: 10 s. Then it stays, empty or not, until the machine ends.
pub const CGROUP_REMOVE_TRIES: u32 = 500;

/// Events taken from the kernel in one call.
pub const MAX_EVENTS: usize = 64;
