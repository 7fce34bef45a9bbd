//! The one call that lets a program serve as a machine's process.

use std::env;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};

use vmm::Served;
use vmm::control::ControlSocket;

/// Exit status of a machine's process that could not begin; why is on its standard error.
const CANNOT_BEGIN: i32 = 70;

/// Whether this program called [`init`], so that it can be started again as a machine's process.
static CALLED: AtomicBool = AtomicBool::new(false);

/// First call in `main` of any program that uses this crate: when this process was started as a machine's
/// process, it serves that machine and never returns; otherwise it returns at once.
///
/// It must come before threads are started or files are opened: a machine's process closes all that it may
/// have inherited.
pub fn init() {
    CALLED.store(true, Ordering::Relaxed);
    let is_machine = env::args_os()
        .next()
        .is_some_and(|name| name.as_bytes() == jailer::PROCESS_NAME.as_bytes());
    if is_machine {
        serve();
    }
}

pub(crate) fn was_called() -> bool {
    CALLED.load(Ordering::Relaxed)
}

#[expect(
    clippy::exit,
    reason = "this process is a machine's and has nothing else to do"
)]
#[expect(clippy::print_stderr, reason = "the supervisor reads it")]
fn serve() -> ! {
    if let Err(error) = jailer::enter() {
        eprintln!(
            "{error}: {}",
            std::error::Error::source(&error).map_or_else(String::new, ToString::to_string)
        );
        process::exit(CANNOT_BEGIN);
    }
    match control_socket() {
        Ok(socket) => {
            let served = vmm::serve(socket);
            process::exit(match served {
                Served::Closed | Served::Ended => 0,
                Served::NoStart => CANNOT_BEGIN,
            })
        }
        Err(error) => {
            eprintln!("The control socket could not be taken: {error}");
            process::exit(CANNOT_BEGIN)
        }
    }
}

/// Takes the control socket from standard input and leaves nothing there.
fn control_socket() -> io::Result<ControlSocket> {
    let socket: OwnedFd = io::stdin().as_fd().try_clone_to_owned()?;
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    Ok(ControlSocket::from(socket))
}
