//! What a guest that has broken out would try: the hostile payload that a machine's process runs here once its cell is closed. It is in no
//! program but this test.

mod call;
mod files;
mod kernel;
mod memory;
mod processes;
mod sockets;

use std::fmt::Write as _;

pub(crate) use call::error_name;
pub(crate) use processes::{make_key, make_segment, remove_segment};
pub(crate) use sockets::{abstract_name, socket_path};

/// What the supervisor has that an attempt may aim at. All of it is harmless where it is hit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Target {
    /// Its process.
    pub(crate) pid: i32,
    /// A TCP port of the loopback interface that it listens on, and a UDP port.
    pub(crate) tcp_port: u16,
    pub(crate) udp_port: u16,
    /// A key in its session keyring; 0 where the kernel has none.
    pub(crate) key: i32,
    /// A System V segment.
    pub(crate) segment: i32,
    /// Whether an attempt is made as it stands, to see what stops it first; else what would end or change this process is done
    /// in one that it forks.
    pub(crate) is_direct: bool,
}

/// One attempt, and the layers of the cell that are to stop it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attempt {
    pub(crate) name: &'static str,
    /// Makes it. Where it goes through, the result is not negative; else it is an error number, negative.
    make: fn(&Target) -> i64,
    /// What of the part `namespaces` stops it.
    pub(crate) namespaces: Option<&'static str>,
    /// Whether Landlock stops it, from which version on.
    pub(crate) landlock: Option<u32>,
    /// What stops it that is always on.
    pub(crate) always: Option<&'static str>,
    /// Where the filters alone are certain to stop it: what is gained by it.
    pub(crate) gain: Option<&'static str>,
}

impl Attempt {
    const fn new(name: &'static str, make: fn(&Target) -> i64) -> Self {
        Self {
            name,
            make,
            namespaces: None,
            landlock: None,
            always: None,
            gain: None,
        }
    }

    const fn namespaces(mut self, what: &'static str) -> Self {
        self.namespaces = Some(what);
        self
    }

    const fn landlock(mut self, from_version: u32) -> Self {
        self.landlock = Some(from_version);
        self
    }

    const fn always(mut self, what: &'static str) -> Self {
        self.always = Some(what);
        self
    }

    const fn gain(mut self, what: &'static str) -> Self {
        self.gain = Some(what);
        self
    }
}

/// All attempts. The last ones use up what the process may have.
pub(crate) fn all() -> Vec<Attempt> {
    [
        files::ATTEMPTS,
        sockets::ATTEMPTS,
        processes::ATTEMPTS,
        kernel::ATTEMPTS,
        memory::ATTEMPTS,
    ]
    .concat()
}

/// Makes all attempts, or the one with this number; says how each ended, and ends the process.
pub(crate) fn make(only: Option<usize>, target: &Target) -> ! {
    for (number, attempt) in all().into_iter().enumerate() {
        if only.is_none_or(|only| only == number) {
            let mut line = String::with_capacity(32);
            let result = (attempt.make)(target);
            let _ = writeln!(line, "{number} {result}");
            let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
        }
    }
    jailer::exit(0)
}

/// The results in what the process said, by number.
pub(crate) fn results(said: &str) -> impl Iterator<Item = (usize, i64)> {
    said.lines().filter_map(|line| {
        let (number, result) = line.split_once(' ')?;
        Some((number.parse().ok()?, result.parse().ok()?))
    })
}
