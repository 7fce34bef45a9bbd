//! How a run ended, in the words of the command: exit code, reason, sentence.

use std::time::Duration;

use sandvmm::{
    Crash, CrashKind, ExitStatus, FileError, HostFunctionError, Limit, Outcome, SpawnError,
    StartError, WorkspaceError,
};
use serde::Serialize;
use signal_hook::low_level::signal_name;

use super::copies::CopyError;
use crate::notice::sentence;

/// Exit code of a run that took too long, as of timeout(1).
const TIMED_OUT: u8 = 124;
/// Exit code of sandvmm's own failure, as of docker-run(1).
pub(crate) const FAILED: u8 = 125;
/// Exit code of a program that can't be executed, as of a shell (POSIX.1-2024 XCU §2.8.2).
const NOT_EXECUTABLE: u8 = 126;
/// Exit code of a program that is not there, as of a shell.
const NOT_FOUND: u8 = 127;
/// Exit code of a wrong command line.
pub(crate) const USAGE: u8 = 2;
/// Added to a signal's number for an exit code, as of a shell.
const SIGNAL_BASE: u8 = 128;
/// `SIGPIPE`: a program whose reader left. Its end is no news.
const SIGPIPE: i32 = 13;

/// Why a program that was started has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Reason {
    /// It exited by itself.
    Exited,
    /// A signal ended it.
    Signal,
    /// The time was over.
    Timeout,
    /// The guest's memory was used up.
    Oom,
    /// The machine ended under it.
    VmCrash,
    /// A policy ended it.
    Policy,
}

/// What is said where a workspace's disk failed.
const NOT_KEPT: &str = "Not all that was written is in the workspace: the file system of the data folder is full, or its disk fails. Make \
     room there, and run it again";

/// What kept a program from being run, or its end from being known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Failure {
    /// The command line, or a file that it names, is wrong.
    Usage,
    /// Kernel, initramfs or root image are missing from the data folder.
    ImagesMissing,
    /// This host can't run virtual machines.
    HostUnfit,
    /// The machine could not be started.
    Start,
    /// There is no such program in the guest.
    NotFound,
    /// The program can't be executed.
    NotExecutable,
    /// The program could not be started: its user, its working folder, the script's transfer.
    Spawn,
    /// What the program left in the guest could not be copied out; the reason tells how the program itself ended.
    Download,
    /// Not all that the program wrote is in the workspace; the reason tells how the program itself ended.
    Workspace,
    /// sandvmm's own standard output could not be written.
    Output,
    /// sandvmm's own standard input could not be read.
    Input,
    /// A signal to sandvmm ended the run.
    Interrupted,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Verdict {
    /// What sandvmm exits with.
    pub(crate) exit_code: u8,
    /// Why the program ended; `None` with a [`Failure`] other than [`Failure::Download`] and [`Failure::Workspace`].
    pub(crate) reason: Option<Reason>,
    /// Why there is no reason.
    pub(crate) error: Option<Failure>,
    /// The signal that ended the program.
    pub(crate) signal: Option<i32>,
    /// A sentence for the user; `None` where the exit code says it all.
    pub(crate) message: Option<String>,
}

impl Verdict {
    fn ended(exit_code: u8, reason: Reason) -> Self {
        Self {
            exit_code,
            reason: Some(reason),
            error: None,
            signal: None,
            message: None,
        }
    }

    /// The program did not run.
    pub(crate) fn failed(exit_code: u8, error: Failure, message: String) -> Self {
        Self {
            exit_code,
            reason: None,
            error: Some(error),
            signal: None,
            message: Some(message),
        }
    }

    /// A wrong command line.
    pub(crate) fn usage(error: &dyn std::error::Error) -> Self {
        Self::failed(USAGE, Failure::Usage, sentence(error))
    }

    /// A signal to sandvmm itself.
    pub(crate) fn interrupted(signal: i32) -> Self {
        Self {
            exit_code: signal_code(signal),
            reason: None,
            error: Some(Failure::Interrupted),
            signal: None,
            message: None,
        }
    }

    /// The system refuses what a run needs of it.
    pub(crate) fn system(error: &std::io::Error) -> Self {
        Self::failed(
            FAILED,
            Failure::Start,
            format!("The system refuses a pipe, a thread or the terminal's raw mode: {error}"),
        )
    }

    /// sandvmm's standard input can't be read.
    pub(crate) fn input(error: &std::io::Error) -> Self {
        Self::failed(
            FAILED,
            Failure::Input,
            format!("Standard input can't be read: {error}"),
        )
    }

    /// sandvmm's standard output broke while the program ran; all that it wrote after is lost.
    pub(crate) fn output(error: &std::io::Error) -> Self {
        Self::failed(
            FAILED,
            Failure::Output,
            format!("The program's output can't be written: {error}"),
        )
    }

    /// The reader of sandvmm's output is gone, and the program did not mind.
    pub(crate) fn reader_gone() -> Self {
        Self::from_signal(SIGPIPE)
    }

    /// Whether it is the program's own end, out of memory or not, and no trouble of its machine's: that still runs.
    pub(crate) fn is_programs_own(&self) -> bool {
        matches!(
            self.reason,
            Some(Reason::Exited | Reason::Signal | Reason::Oom)
        )
    }

    fn from_signal(signal: i32) -> Self {
        let name = signal_name(signal).map_or_else(String::new, |name| format!(" ({name})"));
        Self {
            signal: Some(signal),
            message: (signal != SIGPIPE)
                .then(|| format!("The program was ended by signal {signal}{name}")),
            ..Self::ended(signal_code(signal), Reason::Signal)
        }
    }

    /// The time was over.
    pub(crate) fn timed_out(limit: Option<Duration>) -> Self {
        let limit = limit.map_or_else(String::new, |limit| {
            format!(" of {} s", limit.as_secs_f64())
        });
        Self {
            message: Some(format!(
                "The time{limit} is over and everything was ended; --timeout sets another"
            )),
            ..Self::ended(TIMED_OUT, Reason::Timeout)
        }
    }

    /// The machine ended by itself.
    pub(crate) fn crashed(crash: &Crash) -> Self {
        let reason = match crash.kind() {
            CrashKind::ForbiddenCall => Reason::Policy,
            _ => Reason::VmCrash,
        };
        Self {
            message: Some(crash.to_string()),
            ..Self::ended(FAILED, reason)
        }
    }

    /// A ceiling other than time and memory ended it.
    pub(crate) fn limit(limit: Limit) -> Self {
        let option = match limit {
            Limit::CpuTime => "; --cpu-time sets another",
            Limit::OutputBytes => "; --max-output sets another",
            _ => "",
        };
        Self {
            message: Some(format!(
                "The program was ended at its limit of {limit}{option}"
            )),
            ..Self::ended(FAILED, Reason::Policy)
        }
    }

    /// A command ended.
    pub(crate) fn outcome(outcome: &Outcome, limits: Limits) -> Self {
        match outcome {
            Outcome::Exited(code) => Self::ended(exit_code(*code), Reason::Exited),
            Outcome::Signaled(signal) => Self::from_signal(*signal),
            Outcome::TimedOut => Self::timed_out(limits.timeout),
            Outcome::OutOfMemory { status } => {
                let (code, signal) = match status {
                    ExitStatus::Code(code) => (exit_code(*code), None),
                    ExitStatus::Signal(signal) => (signal_code(*signal), Some(*signal)),
                };
                Self {
                    signal,
                    message: Some(format!(
                        "The program ran out of memory: its machine has {} MiB; --memory gives more",
                        limits.memory_mib
                    )),
                    ..Self::ended(code, Reason::Oom)
                }
            }
            Outcome::NotKept { status } => {
                let own = match status {
                    ExitStatus::Code(code) => Self::ended(exit_code(*code), Reason::Exited),
                    ExitStatus::Signal(signal) => Self::from_signal(*signal),
                };
                own.with_trouble(Failure::Workspace, NOT_KEPT)
            }
            Outcome::MachineCrashed(crash) => Self::crashed(crash),
            Outcome::LimitExceeded(limit) => Self::limit(*limit),
            Outcome::Policy(sentence) => Self {
                message: Some(sentence.clone()),
                ..Self::ended(FAILED, Reason::Policy)
            },
            other => Self::failed(
                FAILED,
                Failure::Interrupted,
                format!("The run was ended from outside: {other:?}"),
            ),
        }
    }

    /// The machine did not start.
    pub(crate) fn start(error: &StartError) -> Self {
        let failed = |failure| Self::failed(FAILED, failure, sentence(error));
        match error {
            StartError::Images(_) => failed(Failure::ImagesMissing),
            StartError::NoKvm { .. } => failed(Failure::HostUnfit),
            StartError::InvalidOption { .. } => {
                Self::failed(USAGE, Failure::Usage, sentence(error))
            }
            StartError::Crashed(crash) => Self::crashed(crash),
            StartError::LimitExceeded(limit) => Self::limit(*limit),
            StartError::Scratch(error) => Self::workspace(error),
            StartError::TimedOut { .. } => Self {
                message: Some(format!("{} (-v shows what it prints)", sentence(error))),
                ..Self::ended(TIMED_OUT, Reason::Timeout)
            },
            _ => failed(Failure::Start),
        }
    }

    /// The same, with what it may be about added to its sentence.
    pub(crate) fn about(mut self, what: Option<&str>) -> Self {
        if let (Some(message), Some(what)) = (&mut self.message, what) {
            message.push_str(&format!(" ({what})"));
        }
        self
    }

    /// The workspace can't be had.
    pub(crate) fn workspace(error: &WorkspaceError) -> Self {
        match error {
            WorkspaceError::Name { .. } | WorkspaceError::Quota { .. } => {
                Self::failed(USAGE, Failure::Usage, sentence(error))
            }
            _ => Self::failed(FAILED, Failure::Start, sentence(error)),
        }
    }

    /// Something was not copied into the guest, or out of it.
    pub(crate) fn copy(error: &CopyError, limits: Limits) -> Self {
        match error {
            CopyError::Source { .. } | CopyError::Kind(_) => Self::usage(error),
            CopyError::Upload { source, .. } | CopyError::Download { source, .. } => {
                let verdict = Self::file(source, limits);
                match verdict.error {
                    Some(failure) => Self::failed(verdict.exit_code, failure, sentence(error)),
                    None => verdict,
                }
            }
        }
    }

    /// The same, of a program whose files did not come out of the guest: its own end is told as well, and its status is kept unless it
    /// says that all is well. What ended the machine meanwhile says more than the program's end.
    pub(crate) fn without_download(self, error: &CopyError, limits: Limits) -> Self {
        let failed = Self::copy(error, limits);
        let Some(trouble) = failed.message.filter(|_| failed.error.is_some()) else {
            return Self::copy(error, limits);
        };
        self.with_trouble(Failure::Download, &trouble)
    }

    /// The same, of a program that ended, and of which something was lost: its status is kept unless it says that all is well.
    fn with_trouble(self, failure: Failure, trouble: &str) -> Self {
        let message = match self.message {
            Some(own) => format!("{own}; {trouble}"),
            None => trouble.to_owned(),
        };
        Self {
            exit_code: if self.exit_code == 0 {
                FAILED
            } else {
                self.exit_code
            },
            error: Some(failure),
            message: Some(message),
            ..self
        }
    }

    /// The script did not reach the guest.
    pub(crate) fn file(error: &FileError, limits: Limits) -> Self {
        match error {
            FileError::MachineCrashed(crash) => Self::crashed(crash),
            FileError::TimedOut => Self::timed_out(limits.timeout),
            FileError::LimitExceeded(limit) => Self::limit(*limit),
            _ => Self::failed(FAILED, Failure::Spawn, sentence(error)),
        }
    }

    /// A function of the host can't be called.
    pub(crate) fn host_function(error: &HostFunctionError, limits: Limits) -> Self {
        match error {
            HostFunctionError::Name(_)
            | HostFunctionError::Taken(_)
            | HostFunctionError::TooMany => Self::usage(error),
            HostFunctionError::MachineCrashed(crash) => Self::crashed(crash),
            HostFunctionError::TimedOut => Self::timed_out(limits.timeout),
            HostFunctionError::LimitExceeded(limit) => Self::limit(*limit),
            _ => Self::failed(FAILED, Failure::Spawn, sentence(error)),
        }
    }

    /// The command was not started.
    pub(crate) fn spawn(error: &SpawnError, limits: Limits) -> Self {
        let failed = |code, failure| Self::failed(code, failure, sentence(error));
        match error {
            SpawnError::NotFound(_) => failed(NOT_FOUND, Failure::NotFound),
            SpawnError::NotExecutable(_) => failed(NOT_EXECUTABLE, Failure::NotExecutable),
            SpawnError::MachineCrashed(crash) => Self::crashed(crash),
            SpawnError::TimedOut => Self::timed_out(limits.timeout),
            SpawnError::LimitExceeded(limit) => Self::limit(*limit),
            _ => failed(FAILED, Failure::Spawn),
        }
    }
}

/// The bounds of a run, for its messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// The time of all of it.
    pub(crate) timeout: Option<Duration>,
    /// The machine's memory.
    pub(crate) memory_mib: u32,
}

fn signal_code(signal: i32) -> u8 {
    u8::try_from(signal).map_or(FAILED, |signal| SIGNAL_BASE.saturating_add(signal))
}

/// The guest's word for it: a code outside 0 to 255 is none that a process can have.
fn exit_code(code: i32) -> u8 {
    u8::try_from(code).unwrap_or(FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        timeout: Some(Duration::from_millis(1500)),
        memory_mib: 256,
    };

    fn outcome(outcome: &Outcome) -> (u8, Option<Reason>) {
        let verdict = Verdict::outcome(outcome, LIMITS);
        assert_eq!(verdict.reason.is_none(), verdict.error.is_some());
        (verdict.exit_code, verdict.reason)
    }

    #[test]
    fn every_outcome_has_its_code_and_reason() {
        assert_eq!(outcome(&Outcome::Exited(0)), (0, Some(Reason::Exited)));
        assert_eq!(outcome(&Outcome::Exited(255)), (255, Some(Reason::Exited)));
        assert_eq!(outcome(&Outcome::Signaled(9)), (137, Some(Reason::Signal)));
        assert_eq!(outcome(&Outcome::TimedOut), (124, Some(Reason::Timeout)));
        let killed = ExitStatus::Signal(9);
        // Its machine lives: what it wrote is still to come, and what it left can be copied.
        assert!(
            Verdict::outcome(&Outcome::OutOfMemory { status: killed }, LIMITS).is_programs_own()
        );
        assert!(!Verdict::outcome(&Outcome::TimedOut, LIMITS).is_programs_own());
        assert_eq!(
            outcome(&Outcome::OutOfMemory { status: killed }),
            (137, Some(Reason::Oom))
        );
        assert_eq!(
            outcome(&Outcome::Policy("No.".into())),
            (125, Some(Reason::Policy))
        );
        assert_eq!(outcome(&Outcome::SandboxEnded), (125, None));
    }

    #[test]
    fn what_was_not_kept_leaves_no_exit_code_of_success() {
        for (status, exit_code, reason) in [
            (ExitStatus::Code(0), FAILED, Reason::Exited),
            (ExitStatus::Code(3), 3, Reason::Exited),
            (ExitStatus::Signal(15), 143, Reason::Signal),
        ] {
            let verdict = Verdict::outcome(&Outcome::NotKept { status }, LIMITS);

            assert_eq!(verdict.exit_code, exit_code);
            assert_eq!(verdict.reason, Some(reason));
            assert_eq!(verdict.error, Some(Failure::Workspace));
            assert!(verdict.message.unwrap().contains(NOT_KEPT));
        }
    }

    #[test]
    fn a_code_that_no_process_has_is_never_success() {
        assert_eq!(outcome(&Outcome::Exited(256)).0, 125);
        assert_eq!(outcome(&Outcome::Exited(-1)).0, 125);
        assert_eq!(outcome(&Outcome::Signaled(-128)).0, 125);
    }

    #[test]
    fn a_signal_is_named_unless_it_is_sigpipe() {
        let message = |signal| Verdict::outcome(&Outcome::Signaled(signal), LIMITS).message;

        assert_eq!(
            message(11).unwrap(),
            "The program was ended by signal 11 (SIGSEGV)"
        );
        assert_eq!(message(13), None);
    }

    #[test]
    fn what_did_not_run_has_its_code_and_sentence() {
        let gone = Verdict::spawn(&SpawnError::NotFound("No x in PATH".into()), LIMITS);
        let denied = Verdict::spawn(&SpawnError::NotExecutable("x is a text".into()), LIMITS);
        let user = Verdict::spawn(&SpawnError::Invalid("No user x".into()), LIMITS);

        assert_eq!((gone.exit_code, gone.error), (127, Some(Failure::NotFound)));
        assert_eq!(gone.message.unwrap(), "No x in PATH");
        assert_eq!(denied.exit_code, 126);
        assert_eq!((user.exit_code, user.error), (125, Some(Failure::Spawn)));
    }

    #[test]
    fn a_download_that_failed_does_not_hide_how_the_program_ended() {
        let error = CopyError::Download {
            from: "plots".into(),
            source: FileError::NotFound("There is no file plots".into()),
        };
        let ended = |own| Verdict::outcome(&own, LIMITS).without_download(&error, LIMITS);

        let [well, badly] = [0, 3].map(|code| ended(Outcome::Exited(code)));
        let killed = ended(Outcome::Signaled(9));

        assert_eq!(
            (well.exit_code, badly.exit_code, killed.exit_code),
            (125, 3, 137)
        );
        for verdict in [&well, &badly, &killed] {
            assert_eq!(verdict.error, Some(Failure::Download));
            assert!(
                verdict
                    .message
                    .as_ref()
                    .unwrap()
                    .contains("'plots' was not copied out")
            );
        }
        assert_eq!(
            (well.reason, killed.reason),
            (Some(Reason::Exited), Some(Reason::Signal))
        );
        assert_eq!(killed.signal, Some(9));
        let late = CopyError::Download {
            from: "plots".into(),
            source: FileError::TimedOut,
        };
        let late = Verdict::outcome(&Outcome::Exited(0), LIMITS).without_download(&late, LIMITS);
        assert_eq!((late.exit_code, late.reason), (124, Some(Reason::Timeout)));
    }

    #[test]
    fn a_start_that_failed_is_told_by_kind() {
        let option = StartError::InvalidOption {
            sentence: "Memory of 0 MiB".into(),
        };
        let kvm = StartError::NoKvm {
            sentence: "No KVM".into(),
        };
        let slow = StartError::TimedOut {
            limit: Duration::from_millis(1500),
        };

        assert_eq!(Verdict::start(&option).exit_code, 2);
        let kvm = Verdict::start(&kvm);
        assert_eq!((kvm.exit_code, kvm.error), (125, Some(Failure::HostUnfit)));
        let slow = Verdict::start(&slow);
        assert_eq!((slow.exit_code, slow.reason), (124, Some(Reason::Timeout)));
        assert!(slow.message.unwrap().contains("1.5 s"));
    }

    #[test]
    fn signals_to_sandvmm_have_the_shells_codes() {
        for (signal, code) in [(1, 129), (2, 130), (15, 143)] {
            assert_eq!(Verdict::interrupted(signal).exit_code, code);
        }
    }
}
