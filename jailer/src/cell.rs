//! The parts of a cell: which are wanted, which are on, and how both are said between the two processes.

use std::fmt;

/// A part of the cell that can be left out, each by its name. What is not named here is always on: the empty
/// environment, the closed descriptors, no privileges, no way to gain any, no core dump, limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Part {
    /// Namespaces, the empty root, and ids of its own.
    Namespaces,
    /// The control group with its bounds on processor, memory, tasks, and the disks' devices.
    Cgroup,
    /// Landlock's domain without a rule.
    Landlock,
    /// The filters of system calls.
    Seccomp,
}

impl Part {
    /// All parts.
    pub const ALL: [Self; 4] = [
        Self::Namespaces,
        Self::Cgroup,
        Self::Landlock,
        Self::Seccomp,
    ];

    /// Its name, in lower case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Namespaces => "namespaces",
            Self::Cgroup => "cgroup",
            Self::Landlock => "landlock",
            Self::Seccomp => "seccomp",
        }
    }

    /// What a guest that has broken out of its virtual machine can do where the part is left out.
    #[must_use]
    pub fn risk(self) -> &'static str {
        match self {
            Self::Namespaces => {
                "a guest that breaks out sees the host's processes, network and file tree as its user does"
            }
            Self::Cgroup => {
                "a guest that breaks out can use up the host's memory, processors and disks"
            }
            Self::Landlock => {
                "a guest that breaks out meets one wall less before files, sockets and signals"
            }
            Self::Seccomp => {
                "a guest that breaks out can make every system call, and try them all for a way out"
            }
        }
    }

    fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// Parts of the cell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Parts(u8);

impl Parts {
    /// These, and those that were there.
    #[must_use]
    pub fn with(self, part: Part) -> Self {
        Self(self.0 | part.bit())
    }

    /// Whether it is one of them.
    #[must_use]
    pub fn contains(self, part: Part) -> bool {
        self.0 & part.bit() != 0
    }

    /// One after the other.
    pub fn iter(self) -> impl Iterator<Item = Part> {
        Part::ALL
            .into_iter()
            .filter(move |part| self.contains(*part))
    }
}

impl FromIterator<Part> for Parts {
    fn from_iter<I: IntoIterator<Item = Part>>(parts: I) -> Self {
        parts.into_iter().fold(Self::default(), Self::with)
    }
}

/// A kind of namespace (`namespaces(7)`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Namespace {
    /// Users: privileges in it are none outside.
    User,
    /// Mounts: the process's file tree is its own, and empty.
    Mount,
    /// Processes: it sees and can signal none but itself.
    Pid,
    /// Network: not even a loopback interface that is up, and no abstract sockets of the host.
    Net,
    /// System V objects and POSIX queues.
    Ipc,
    /// Host and domain name.
    Uts,
    /// The view of control groups.
    Cgroup,
}

impl Namespace {
    /// All kinds.
    pub const ALL: [Self; 7] = [
        Self::User,
        Self::Mount,
        Self::Pid,
        Self::Net,
        Self::Ipc,
        Self::Uts,
        Self::Cgroup,
    ];

    /// Its name in `/proc/PID/ns`, but `mount` for `mnt`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Mount => "mount",
            Self::Pid => "pid",
            Self::Net => "net",
            Self::Ipc => "ipc",
            Self::Uts => "uts",
            Self::Cgroup => "cgroup",
        }
    }

    /// Its file in `/proc/self/ns`.
    pub(crate) fn file(self) -> &'static str {
        match self {
            Self::Mount => "/proc/self/ns/mnt",
            Self::User => "/proc/self/ns/user",
            Self::Pid => "/proc/self/ns/pid",
            Self::Net => "/proc/self/ns/net",
            Self::Ipc => "/proc/self/ns/ipc",
            Self::Uts => "/proc/self/ns/uts",
            Self::Cgroup => "/proc/self/ns/cgroup",
        }
    }

    /// The file of how many each user may have (`namespaces(7)`): each user namespace has its own by this name.
    pub(crate) fn limit_file(self) -> &'static str {
        match self {
            Self::Mount => "/proc/sys/user/max_mnt_namespaces",
            Self::User => "/proc/sys/user/max_user_namespaces",
            Self::Pid => "/proc/sys/user/max_pid_namespaces",
            Self::Net => "/proc/sys/user/max_net_namespaces",
            Self::Ipc => "/proc/sys/user/max_ipc_namespaces",
            Self::Uts => "/proc/sys/user/max_uts_namespaces",
            Self::Cgroup => "/proc/sys/user/max_cgroup_namespaces",
        }
    }

    /// Its flag of `clone(2)`.
    pub(crate) fn clone_flag(self) -> u64 {
        let flag = match self {
            Self::User => libc::CLONE_NEWUSER,
            Self::Mount => libc::CLONE_NEWNS,
            Self::Pid => libc::CLONE_NEWPID,
            Self::Net => libc::CLONE_NEWNET,
            Self::Ipc => libc::CLONE_NEWIPC,
            Self::Uts => libc::CLONE_NEWUTS,
            Self::Cgroup => libc::CLONE_NEWCGROUP,
        };
        u64::from(flag.cast_unsigned())
    }

    fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// Kinds of namespaces.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Namespaces(u8);

impl Namespaces {
    /// All of them.
    #[must_use]
    pub fn all() -> Self {
        Namespace::ALL.into_iter().collect()
    }

    /// Whether it is one of them.
    #[must_use]
    pub fn contains(self, kind: Namespace) -> bool {
        self.0 & kind.bit() != 0
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// One after the other.
    pub fn iter(self) -> impl Iterator<Item = Namespace> {
        Namespace::ALL
            .into_iter()
            .filter(move |kind| self.contains(*kind))
    }

    pub(crate) fn without(self, kind: Namespace) -> Self {
        Self(self.0 & !kind.bit())
    }
}

impl FromIterator<Namespace> for Namespaces {
    fn from_iter<I: IntoIterator<Item = Namespace>>(kinds: I) -> Self {
        Self(kinds.into_iter().fold(0, |bits, kind| bits | kind.bit()))
    }
}

/// Whose ids the process runs under.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ids {
    /// A user and group id that no other machine has whose supervisor is in the same namespace of process numbers, and nobody else.
    Own(u32),
    /// Those of the user who owns nothing, and of all other machines of this kind: the supervisor is root of a container that has
    /// no ids for machines.
    Nobodys,
    /// Those of the supervisor, or one of them: it is no root, or one that may give others no ids.
    Supervisors,
}

/// The control group's bounds that are in force.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CgroupBounds {
    /// The files that were written, for example `memory.max`.
    pub files: Vec<&'static str>,
}

/// What is on of a cell.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cell {
    /// The namespaces that are its own.
    pub namespaces: Namespaces,
    /// Whether its file tree is empty and read-only.
    pub empty_root: bool,
    /// Its ids on the host.
    pub ids: Ids,
    /// Its control group's bounds; `None` where it is in its supervisor's.
    pub cgroup: Option<CgroupBounds>,
    /// The version of Landlock that holds it.
    pub landlock_abi: Option<u32>,
    /// Whether its system calls are filtered.
    pub seccomp: bool,
    /// What was wanted and is not on, and why.
    pub missing: Vec<Missing>,
    /// What was not wanted.
    pub left_out: Parts,
}

/// A part of the cell that was wanted and is not on.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Missing {
    /// Which part.
    pub part: Part,
    /// Why, in one sentence without its end.
    pub why: String,
}

impl fmt::Display for Missing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.part.name(), self.why)
    }
}

/// What a machine may use, from which its limits follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Guest memory in MiB.
    pub memory_mib: u32,
    /// Virtual processors: one thread each.
    pub vcpus: u8,
    /// Largest file that it may write to, in bytes: its writable disks and its console; 0 where it has none.
    pub max_file_bytes: u64,
}

/// What the new process has to know before it can close its cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) leave_out: Parts,
    pub(crate) namespaces: Namespaces,
    /// The ids to take at the end, or the best that the host lets it, where no user namespace has given them to it.
    pub(crate) take_ids: Option<u32>,
    pub(crate) bounds: Bounds,
}

impl Settings {
    /// Numbers with colons in between.
    pub(crate) fn to_words(self) -> String {
        format!(
            "{}:{}:{}:{}:{}:{}",
            self.leave_out.0,
            self.namespaces.0,
            self.take_ids.unwrap_or(0),
            self.bounds.memory_mib,
            self.bounds.vcpus,
            self.bounds.max_file_bytes
        )
    }

    pub(crate) fn from_words(words: &str) -> Option<Self> {
        let mut numbers = words.split(':');
        let settings = Self {
            leave_out: Parts(numbers.next()?.parse().ok()?),
            namespaces: Namespaces(numbers.next()?.parse().ok()?),
            take_ids: Some(numbers.next()?.parse().ok()?).filter(|id| *id != 0),
            bounds: Bounds {
                memory_mib: numbers.next()?.parse().ok()?,
                vcpus: numbers.next()?.parse().ok()?,
                max_file_bytes: numbers.next()?.parse().ok()?,
            },
        };
        numbers.next().is_none().then_some(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_as_they_were_written() {
        let settings = Settings {
            leave_out: Parts::default().with(Part::Seccomp).with(Part::Cgroup),
            namespaces: Namespaces::all().without(Namespace::User),
            take_ids: Some(1_879_048_200),
            bounds: Bounds {
                memory_mib: 256,
                vcpus: 32,
                max_file_bytes: u64::MAX,
            },
        };

        let read = Settings::from_words(&settings.to_words());

        assert_eq!(read, Some(settings));
    }

    #[test]
    fn what_are_no_settings_is_none() {
        for words in [
            "",
            "1",
            "1:2:3:4:5",
            "1:2:3:4:5:6:7",
            "256:0:0:0:0:0",
            "a:0:0:0:0:0",
        ] {
            assert_eq!(Settings::from_words(words), None, "{words}");
        }
    }

    #[test]
    fn parts_and_kinds_are_told_apart() {
        let parts: Parts = [Part::Landlock].into_iter().collect();
        let kinds = Namespaces::all().without(Namespace::Net);

        assert!(parts.contains(Part::Landlock) && !parts.contains(Part::Seccomp));
        assert!(kinds.contains(Namespace::User) && !kinds.contains(Namespace::Net));
        assert_eq!(kinds.iter().count(), Namespace::ALL.len() - 1);
        assert!(Namespaces::default().is_empty() && !kinds.is_empty());
    }
}
