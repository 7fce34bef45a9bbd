//! Starts a machine's process, with as much of its cell as can be made from outside.

use std::collections::VecDeque;
use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::iter;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{MemfdFlags, Mode, OFlags, fstat, memfd_create, open};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::block_device::BlockDevice;
use crate::cell::{
    Bounds, Cell, CgroupBounds, Ids, Missing, Namespace, Namespaces, Part, Parts, Settings,
};
use crate::cgroup::Cgroup;
use crate::ids::{self, Got};
use crate::limits;
use crate::precedence;
use crate::process::MachineProcess;
use crate::report::{self, Report};
use crate::rlimits;
use crate::spawn::{Birth, Born, Inherited, spawn};

/// The name that a machine's process is started under, its `argv[0]`. 15 bytes: as many as Linux shows of a
/// process's name (`TASK_COMM_LEN`, less its end).
pub const PROCESS_NAME: &str = "sandvmm-machine";
const NAME: &CStr = c"sandvmm-machine";

/// Descriptors for the new process are made from this number on, so that it can lay them out below.
const FIRST_DESCRIPTOR: i32 = 10;

/// Permission of everybody to execute.
const EXECUTABLE_BY_OTHERS: u32 = 0o001;

/// Why a machine's process could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The program could not be opened.
    #[error("The program could not be opened")]
    Program(#[source] io::Error),
    /// The process's pipe or descriptor could not be made.
    #[error("The process's descriptors could not be made")]
    Descriptors(#[source] io::Error),
    /// The system made no process.
    #[error("The system made no process")]
    Spawn(#[source] io::Error),
    /// The process failed before its program began.
    #[error("The process failed in {step}")]
    Begin {
        /// At which step.
        step: &'static str,
        /// How.
        source: io::Error,
    },
    /// It was required.
    #[error("There is no control group for the machine: {why}")]
    Cgroup {
        /// Why not.
        why: String,
    },
    /// The program is none that serves machines, or the host is overloaded.
    #[error("The program did not enter its cell within {} s: it must call the library's `init` first in its `main`", .limit.as_secs_f32())]
    Silent {
        /// How long it was waited for.
        limit: Duration,
    },
    /// What the process said is no report.
    #[error("What the process says of its cell can't be read")]
    Report(#[source] io::Error),
}

/// How the cell shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// What the machine may use.
    pub bounds: Bounds,
    /// What is left out.
    pub leave_out: Parts,
    /// Whether a machine without a control group is refused.
    pub require_cgroup: bool,
    /// The share of the host's processors that its control group lets it have, in hundredths of one; without, that of all its threads. A
    /// machine that has no such group has no such bound.
    pub cpu_quota_percent: Option<u32>,
    /// What the machine's disks lie on, each once: its control group bounds what is asked of them.
    pub devices: Vec<BlockDevice>,
}

impl Options {
    /// The whole cell, as far as the host has it.
    #[must_use]
    pub fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            leave_out: Parts::default(),
            require_cgroup: false,
            cpu_quota_percent: None,
            devices: Vec::new(),
        }
    }
}

/// What is known of a process's cell before it has entered it.
#[derive(Debug)]
pub(crate) struct Entry {
    socket: OwnedFd,
    leave_out: Parts,
    namespaces: Namespaces,
    ids: Planned,
    missing: Vec<Missing>,
}

/// Whose ids a process has, as far as its supervisor knows.
#[derive(Debug, Clone, Copy)]
enum Planned {
    /// Its supervisor's.
    Supervisors,
    /// Of a user namespace: this id is its own, if it got it.
    Mapped(u32, Got),
    /// It is to take this id, and says what it got.
    Taken(u32),
}

/// Starts `program`, an absolute path, as a machine's process whose standard input is `socket`.
///
/// Its environment is empty, its working folder `/`, its standard output null; its standard error is a pipe
/// whose last bytes are kept; it has no other descriptor but a socket that [`fn@crate::enter`] closes. It has a session of its own: what
/// a terminal sends to the supervisor's
/// group (Ctrl-C) does not reach it, the supervisor decides. The *thread* that calls this must live as long as
/// the process shall: see [`fn@crate::enter`].
///
/// A namespace that the host refuses is done without, and [`MachineProcess::entered`] says so.
///
/// # Errors
/// See [`StartError`].
pub fn start(
    program: &Path,
    socket: OwnedFd,
    options: Options,
) -> Result<MachineProcess, StartError> {
    let Options {
        bounds,
        leave_out,
        require_cgroup,
        cpu_quota_percent,
        devices,
    } = options;
    // Root's own processes, which a machine is one of without namespaces, are not counted.
    if !(ids::is_root() && leave_out.contains(Part::Namespaces))
        && let Some(error) = limits::too_few_tasks(rlimits::min_tasks(bounds))
    {
        return Err(StartError::Spawn(error));
    }
    if let Some(error) = limits::too_little_memory(bounds.memory_mib) {
        return Err(StartError::Spawn(error));
    }
    let mut missing = Vec::new();
    let mut cgroup = if require_cgroup || !leave_out.contains(Part::Cgroup) {
        match Cgroup::create(bounds, cpu_quota_percent, &devices) {
            Ok(cgroup) => Some(cgroup),
            Err(why) if require_cgroup => return Err(StartError::Cgroup { why }),
            Err(why) => {
                let part = Part::Cgroup;
                missing.push(Missing { part, why });
                None
            }
        }
    } else {
        None
    };
    let program = open_program(program).map_err(StartError::Program)?;
    let descriptors = Descriptors::make(&program, &socket)
        .map_err(|error| StartError::Descriptors(limits::name_limit(error)))?;
    // The new process has the only copy from now on, so that its end is seen.
    drop(socket);
    let mut failure = None;
    let mut kinds = kinds_to_try(leave_out).peekable();
    while let Some(namespaces) = kinds.peek().copied() {
        let made = descriptors.process(namespaces, cgroup.as_ref(), leave_out, bounds);
        match made {
            Ok((born, ids)) => {
                if let Some(cgroup) = &cgroup {
                    cgroup.sweep_beside();
                }
                if let Some(error) = failure {
                    missing.push(refused(namespaces, error));
                }
                return Ok(MachineProcess {
                    pid: born.pid.unsigned_abs(),
                    pidfd: born.pidfd,
                    stderr: Some(descriptors.stderr),
                    stderr_tail: VecDeque::new(),
                    end: None,
                    entry: Some(Entry {
                        socket: descriptors.supervisors_report,
                        leave_out,
                        namespaces,
                        ids,
                        missing,
                    }),
                    cgroup,
                });
            }
            // The same again, without.
            Err(Failure::Cgroup(error)) => {
                let group = cgroup.take().map(|group| group.path().to_owned());
                let why = not_entered(&group.unwrap_or_default(), &error);
                if require_cgroup {
                    return Err(StartError::Cgroup { why });
                }
                let part = Part::Cgroup;
                missing.push(Missing { part, why });
            }
            // The next attempt, with fewer namespaces, might find room by chance: what a machine has would be a matter of how many live.
            Err(Failure::Process(error))
                if limits::is_full(&error) || limits::is_full_of(namespaces, &error) =>
            {
                return Err(StartError::Spawn(limits::name_limit(error)));
            }
            Err(Failure::Process(error)) => {
                failure.get_or_insert(error);
                kinds.next();
            }
        }
    }
    Err(StartError::Spawn(failure.unwrap_or_else(|| {
        io::Error::from(io::ErrorKind::Unsupported)
    })))
}

/// Why there is no process.
#[derive(Debug)]
enum Failure {
    /// It may not be moved into its control group.
    Cgroup(io::Error),
    /// Anything else.
    Process(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Process(error)
    }
}

/// That a group was made and no process may be put in (`cgroups(7)`, "Delegation containment").
fn not_entered(group: &Path, error: &io::Error) -> String {
    let above = group.parent().unwrap_or(group);
    format!(
        "no process can be moved into {} ({error}): its user needs to write cgroup.procs of {} too",
        group.display(),
        above.display()
    )
}

/// The kinds of namespaces that a process is tried to be made with, the most first.
fn kinds_to_try(leave_out: Parts) -> impl Iterator<Item = Namespaces> {
    let existing = || {
        Namespace::ALL
            .into_iter()
            .filter(|kind| fs::exists(kind.file()).unwrap_or(false) && !limits::forbids(*kind))
            .collect::<Namespaces>()
    };
    let is_wanted = !leave_out.contains(Part::Namespaces);
    let all = iter::once(Namespaces::all());
    let of_this_host = iter::once_with(existing).filter(|kinds| *kinds != Namespaces::all());
    // Whoever is no root can make none but in a user namespace.
    let without_users =
        iter::once_with(move || existing().without(Namespace::User)).filter(|_| ids::is_root());
    all.chain(of_this_host)
        .chain(without_users)
        .filter(move |_| is_wanted)
        .chain(iter::once(Namespaces::default()))
}

fn refused(made: Namespaces, error: io::Error) -> Missing {
    let lacking: Vec<&str> = Namespace::ALL
        .into_iter()
        .filter(|kind| !made.contains(*kind))
        .map(Namespace::name)
        .collect();
    Missing {
        part: Part::Namespaces,
        why: format!(
            "the host refuses namespaces of these kinds: {} ({})",
            lacking.join(", "),
            limits::name_limit(error)
        ),
    }
}

/// Opens the program so that any user may execute it: where its file's permissions forbid that, a copy in memory is.
fn open_program(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::CLOEXEC | OFlags::PATH;
    let program = open(path, flags, Mode::empty())?;
    let needs_copy = ids::is_root() && fstat(&program)?.st_mode & EXECUTABLE_BY_OTHERS == 0;
    if !needs_copy {
        return Ok(program);
    }
    let copy = memfd_create(NAME, MemfdFlags::CLOEXEC)?;
    io::copy(&mut File::open(path)?, &mut File::from(copy.try_clone()?))?;
    // A program that is open for writing can't be executed.
    Ok(open(
        format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&copy)),
        OFlags::CLOEXEC | OFlags::RDONLY,
        Mode::empty(),
    )?)
}

/// All descriptors that the two processes have in common for a moment.
struct Descriptors {
    control: OwnedFd,
    null: OwnedFd,
    stderr: OwnedFd,
    childs_stderr: OwnedFd,
    supervisors_report: OwnedFd,
    report: OwnedFd,
    program: OwnedFd,
}

impl Descriptors {
    fn make(program: &OwnedFd, control: &OwnedFd) -> io::Result<Self> {
        let (stderr, childs_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::fs::fcntl_setfl(&stderr, OFlags::NONBLOCK)?;
        let (supervisors_report, report) = report::pair()?;
        let null = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self {
            control: high(control)?,
            null: high(&null)?,
            stderr,
            childs_stderr: high(&childs_stderr)?,
            supervisors_report: high(&supervisors_report)?,
            report: high(&report)?,
            program: high(program)?,
        })
    }

    /// Makes the process with these namespaces, gives it its ids, and lets it go on to its program.
    fn process(
        &self,
        namespaces: Namespaces,
        cgroup: Option<&Cgroup>,
        leave_out: Parts,
        bounds: Bounds,
    ) -> Result<(Born, Planned), Failure> {
        let has_users = namespaces.contains(Namespace::User);
        let born = spawn(&Birth {
            inherited: Inherited {
                control: self.control.as_fd(),
                null: self.null.as_fd(),
                stderr: self.childs_stderr.as_fd(),
                report: self.report.as_fd(),
                supervisors_report: self.supervisors_report.as_fd(),
                program: self.program.as_fd(),
                name: NAME,
            },
            namespaces,
            cgroup: cgroup.map(Cgroup::folder),
            takes_mapped_ids: has_users && ids::is_root(),
        })?;
        let begun = self.begin(&born, namespaces, cgroup, leave_out, bounds);
        if begun.is_err() {
            // It waits for a byte that never comes. Reaped at once: it has executed nothing.
            let _ = rustix::process::pidfd_send_signal(&born.pidfd, rustix::process::Signal::KILL);
            let _ = rustix::process::waitid(
                rustix::process::WaitId::PidFd(born.pidfd.as_fd()),
                rustix::process::WaitIdOptions::EXITED,
            );
        }
        begun.map(|ids| (born, ids))
    }

    fn begin(
        &self,
        born: &Born,
        namespaces: Namespaces,
        cgroup: Option<&Cgroup>,
        leave_out: Parts,
        bounds: Bounds,
    ) -> Result<Planned, Failure> {
        if let Some(cgroup) = cgroup
            && !born.is_in_cgroup
        {
            cgroup.take(born.pid).map_err(|error| match error.kind() {
                io::ErrorKind::PermissionDenied => Failure::Cgroup(error),
                _ => Failure::Process(error),
            })?;
        }
        // While it is the supervisor's to write: its ids, and its file tree, are soon others.
        precedence::expose_to_oom_killer(born.pid)?;
        let leaves_namespaces = leave_out.contains(Part::Namespaces);
        let mut take_ids = None;
        let own = ids::own(born.pid);
        let ids = if namespaces.contains(Namespace::User) {
            ids::map(born.pid)?.map_or(Planned::Supervisors, |got| Planned::Mapped(own, got))
        } else if ids::is_root() && !leaves_namespaces {
            take_ids = Some(own);
            Planned::Taken(own)
        } else {
            Planned::Supervisors
        };
        let settings = Settings {
            leave_out,
            namespaces,
            take_ids,
            bounds,
        };
        report::begin(self.supervisors_report.as_fd(), settings)?;
        Ok(ids)
    }
}

/// The same descriptor under a number that the new process does not need for another.
fn high(descriptor: &OwnedFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(
        descriptor,
        FIRST_DESCRIPTOR,
    )?)
}

impl Entry {
    /// Waits at most `limit` for the process's report and puts it together with what is known.
    pub(crate) fn finish(
        self,
        limit: Duration,
        cgroup: Option<&CgroupBounds>,
    ) -> Result<Option<Cell>, StartError> {
        let entered = match report::receive(&self.socket, limit) {
            Ok(Some(Report::Entered(entered))) => entered,
            Ok(Some(Report::Failed(step, errno))) => {
                return Err(StartError::Begin {
                    step,
                    source: io::Error::from_raw_os_error(errno),
                });
            }
            Ok(None) => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                return Err(StartError::Silent { limit });
            }
            Err(error) => return Err(StartError::Report(error)),
        };
        let mut missing = self.missing;
        if entered.root_errno > 0 {
            let error = io::Error::from_raw_os_error(entered.root_errno);
            missing.push(Missing {
                part: Part::Namespaces,
                why: format!("the host refuses the process a file tree of its own ({error})"),
            });
        }
        let (ids, lacking) = match self.ids {
            Planned::Supervisors => (Ids::Supervisors, None),
            Planned::Mapped(own, got) => (got.ids(own), got.lacking(entered.has_groups)),
            Planned::Taken(own) => {
                let got = entered
                    .got
                    .ok_or_else(|| StartError::Report(io::ErrorKind::InvalidData.into()))?;
                (got.ids(own), got.lacking(entered.has_groups))
            }
        };
        missing.extend(lacking.map(|why| Missing {
            part: Part::Namespaces,
            why,
        }));
        if entered.keeps_bounding_set && !self.leave_out.contains(Part::Namespaces) {
            missing.push(Missing {
                part: Part::Namespaces,
                why: "without a user namespace the process may not empty its bounding set of capabilities: that it has none \
                      and gains none is `no_new_privs` alone"
                    .to_owned(),
            });
        }
        if entered.lacks_secure_bits && !self.leave_out.contains(Part::Namespaces) {
            missing.push(Missing {
                part: Part::Namespaces,
                why: "the supervisor's secure bits are locked as they are: that no program gains a capability is `no_new_privs` alone"
                    .to_owned(),
            });
        }
        if entered.keyring_errno != 0 && !self.leave_out.contains(Part::Namespaces) {
            let error = io::Error::from_raw_os_error(entered.keyring_errno.into());
            missing.push(Missing {
                part: Part::Namespaces,
                why: format!(
                    "the process keeps its supervisor's session keyring ({error}): make room in the user's keys (kernel.keys.maxkeys, \
                     sysctl), or end other machines"
                ),
            });
        }
        let landlock_abi = Some(entered.landlock_abi).filter(|abi| *abi != 0);
        if landlock_abi.is_none() && !self.leave_out.contains(Part::Landlock) {
            missing.push(Missing {
                part: Part::Landlock,
                why: "the kernel has no Landlock, or it is switched off".to_owned(),
            });
        }
        Ok(Some(Cell {
            namespaces: self.namespaces,
            empty_root: entered.root_errno == 0,
            ids,
            cgroup: cgroup.cloned(),
            landlock_abi,
            seccomp: !self.leave_out.contains(Part::Seccomp),
            missing,
            left_out: self.leave_out,
        }))
    }
}
