//! The one call that lets a program serve as a machine's process.

use std::env;
use std::error::Error;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use jailer::{Inside, Thread};
use vmm::control::ControlSocket;
use vmm::{Hooks, Served, ThreadKind};

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

/// Keeps all descriptors but standard input, output and error from programs that this process starts: for one that is to go on without
/// it. Does nothing before Linux 5.11.
pub fn keep_descriptors() {
    jailer::keep_descriptors();
}

pub(crate) fn was_called() -> bool {
    CALLED.load(Ordering::Relaxed)
}

fn serve() -> ! {
    let inside = match jailer::enter() {
        Ok(inside) => inside,
        Err(error) => {
            let source = error
                .source()
                .map_or_else(String::new, |source| source.to_string());
            cannot_begin(&format!("{error}: {source}"))
        }
    };
    match control_socket() {
        Ok(socket) => {
            let hooks: Arc<dyn Hooks> = Arc::new(Cell(inside));
            exit(vmm::serve_with(socket, &hooks))
        }
        Err(error) => cannot_begin(&format!("The control socket could not be taken: {error}")),
    }
}

/// Closes the cell of the machine's threads, and ends its process.
#[derive(Debug)]
struct Cell(Inside);

impl Hooks for Cell {
    fn before_serving(&self, kind: ThreadKind) -> io::Result<()> {
        let thread = match kind {
            ThreadKind::Main => Thread::Main,
            ThreadKind::Vcpu => Thread::Vcpu,
        };
        self.0.close(thread).map_err(io::Error::other)
    }

    /// The kernel takes a process down faster than the process itself does, and needs no system call of it for that.
    fn over(&self, served: Served) {
        exit(served)
    }
}

fn exit(served: Served) -> ! {
    jailer::exit(match served {
        Served::Closed | Served::Ended => 0,
        Served::NoStart => CANNOT_BEGIN,
    })
}

#[expect(clippy::print_stderr, reason = "the supervisor reads it")]
fn cannot_begin(why: &str) -> ! {
    eprintln!("{why}");
    jailer::exit(CANNOT_BEGIN)
}

/// Takes the control socket from standard input and leaves nothing there.
fn control_socket() -> io::Result<ControlSocket> {
    let socket: OwnedFd = io::stdin().as_fd().try_clone_to_owned()?;
    // Nothing is there either, and no file could be opened any more.
    rustix::stdio::dup2_stdin(rustix::stdio::stdout())?;
    Ok(ControlSocket::from(socket))
}
