//! A vCPU: a thread that runs guest code and takes its exits to the buses.
//!
//! ```text
//!            spawn            resume             stop, or the guest's end
//!  (created) ─────► Paused ─────────► Running ───────────────────────────► Stopped
//!                     ▲                  │                                    ▲
//!                     └───── pause ──────┘                                    │
//!                     └──────────────────────── stop ─────────────────────────┘
//! ```
//!
//! What a thread shall do is kept under a lock; a change is followed by a *kick*. A kick is race-free since it does two
//! things, in this order: it sets `immediate_exit` in the vCPU's shared page, so that a `KVM_RUN` that is about to begin returns at
//! once, and it sends the thread a signal, so that one that has begun does. The thread clears the flag before it reads what is
//! wanted, never after. The signal's handler does nothing.

mod start_line;

use std::io;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use devices::bus::Bus;
use kvm_bindings::kvm_run;
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use crate::control::EndReason;
use crate::end::EndSignal;
use crate::serve::{Hooks, ThreadKind};
use crate::snapshot;
use crate::snapshot::state::VcpuState;
use crate::snapshot::vcpu::SaveVcpuError;
pub use start_line::StartLine;

/// Stack of each of a machine's threads, in bytes. With the usual 2 MiB, the host's kernel gives a thread a huge page for the first byte of
/// it that is used, and has to clear all of that.
pub(crate) const THREAD_STACK_BYTES: usize = 512 << 10;

/// How often the first entry into the guest may fail for want of memory, and how long to wait in between: under load the host may
/// need a moment to find pages.
const MAX_ENTRY_RETRIES: u32 = 50;
const ENTRY_RETRY_DELAY: Duration = Duration::from_millis(2);

/// Why a vCPU's thread could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VcpuError {
    /// The handler of the kick's signal.
    #[error("The signal handler for vCPU threads could not be installed")]
    SignalHandler(#[source] io::Error),
    /// The thread itself.
    #[error(
        "The host started no thread for vCPU {id}, as where a control group has no room for it (`pids.max`)"
    )]
    Thread {
        /// Which vCPU.
        id: u8,
        /// The system's failure.
        source: io::Error,
    },
}

/// What port I/O and memory-mapped I/O reach.
#[derive(Debug, Clone)]
pub struct Buses {
    /// By port.
    pub ports: Arc<Bus>,
    /// By guest physical address.
    pub mmio: Arc<Bus>,
}

/// What a vCPU's thread shall do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Pause,
    Run,
    Stop,
}

/// What a vCPU's thread does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It waits outside the guest.
    Paused,
    /// It is in the guest, or handles an exit.
    Running,
    /// Its thread has ended or is about to: it touches neither guest memory nor devices any more.
    Stopped,
}

#[derive(Debug)]
struct Shared {
    status: Mutex<Status>,
    changed: Condvar,
    kick: Mutex<Option<ImmediateExit>>,
    /// The thread's number; 0 until it has told it.
    thread: AtomicI32,
}

#[derive(Debug)]
struct Status {
    wanted: Wanted,
    /// Whether it was ever to run: from then on it comes to the start line, paused again or not, since others wait for it there.
    is_called: bool,
    state: State,
    /// The paused thread is to save its processor: with these model-specific registers.
    save: Option<Arc<[u32]>>,
    /// What came of it.
    saved: Option<Result<VcpuState, SaveVcpuError>>,
}

/// The `immediate_exit` byte of a vCPU's shared page.
#[derive(Debug)]
struct ImmediateExit(*const AtomicU8);

// SAFETY: the pointer is only used to store into an atomic, which any thread may do while the page is mapped. That it is
// mapped is seen to by its place in `Shared::kick`: it is taken out, under that lock, before the page goes.
unsafe impl Send for ImmediateExit {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A vCPU's thread. Dropping it stops the vCPU and waits for the thread.
#[derive(Debug)]
pub struct Vcpu {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// This process's number.
    process: u32,
}

impl Vcpu {
    /// Starts the thread of vCPU `id`, paused. It enters the guest once all threads of `start_line` are closed in.
    ///
    /// # Errors
    /// See [`VcpuError`].
    pub fn spawn(
        id: u8,
        mut fd: VcpuFd,
        buses: Buses,
        end: Arc<EndSignal>,
        hooks: &Arc<dyn Hooks>,
        start_line: &Arc<StartLine>,
    ) -> Result<Self, VcpuError> {
        install_signal_handler().map_err(VcpuError::SignalHandler)?;
        let immediate_exit = &raw const fd.get_kvm_run().immediate_exit;
        let shared = Arc::new(Shared {
            status: Mutex::new(Status {
                wanted: Wanted::Pause,
                is_called: false,
                state: State::Paused,
                save: None,
                saved: None,
            }),
            changed: Condvar::new(),
            kick: Mutex::new(Some(ImmediateExit(immediate_exit.cast()))),
            thread: AtomicI32::new(0),
        });
        let runner = Runner {
            retire: Retire {
                shared: Arc::clone(&shared),
                start_line: Arc::clone(start_line),
            },
            fd,
            id,
            buses,
            end,
            hooks: Arc::clone(hooks),
        };
        let thread = thread::Builder::new()
            .name(format!("vcpu{id}"))
            .stack_size(THREAD_STACK_BYTES)
            .spawn(move || runner.run())
            .map_err(|source| VcpuError::Thread { id, source })?;
        Ok(Self {
            shared,
            thread: Some(thread),
            process: std::process::id(),
        })
    }

    /// Lets the vCPU run.
    pub fn resume(&self) {
        self.want(Wanted::Run);
    }

    /// Takes the vCPU out of the guest and waits until it is. Nothing to do where it has stopped.
    pub fn pause(&self) {
        self.want(Wanted::Pause);
        let mut status = lock(&self.shared.status);
        while status.state == State::Running {
            status = self
                .shared
                .changed
                .wait(status)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Has a paused vCPU's thread save it, and waits for that. `msrs` are the model-specific registers that KVM has.
    ///
    /// # Errors
    /// See [`SaveVcpuError`].
    pub(crate) fn save(&self, msrs: &Arc<[u32]>) -> Result<VcpuState, SaveVcpuError> {
        let mut status = lock(&self.shared.status);
        if status.state != State::Paused || status.wanted != Wanted::Pause {
            return Err(SaveVcpuError::NotPaused);
        }
        status.save = Some(Arc::clone(msrs));
        self.shared.changed.notify_all();
        loop {
            if let Some(saved) = status.saved.take() {
                return saved;
            }
            if status.state == State::Stopped {
                return Err(SaveVcpuError::NotPaused);
            }
            status = self
                .shared
                .changed
                .wait(status)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// What the thread does.
    #[must_use]
    pub fn state(&self) -> State {
        lock(&self.shared.status).state
    }

    fn want(&self, wanted: Wanted) {
        let mut status = lock(&self.shared.status);
        status.wanted = wanted;
        status.is_called |= wanted == Wanted::Run;
        drop(status);
        self.shared.changed.notify_all();
        if wanted == Wanted::Run {
            // A thread that is to be kicked for this is in the guest already.
            return;
        }
        if let Some(ImmediateExit(flag)) = &*lock(&self.shared.kick) {
            // SAFETY: the page is mapped while the option is `Some` (see `Retire`). KVM and the vCPU's thread
            // access the byte concurrently; the store is atomic, and the thread's is too.
            unsafe { &**flag }.store(1, Ordering::SeqCst);
            // Under the lock: the thread has not ended, and its number is nobody else's.
            self.interrupt();
        }
    }

    /// Sends the thread its signal. One that has not told its number yet has not looked at what is wanted either. The C library's own
    /// way would take three system calls, in a process that may make few.
    fn interrupt(&self) {
        let thread = self.shared.thread.load(Ordering::SeqCst);
        if thread != 0 {
            // SAFETY: the call takes numbers, and the signal's handler does nothing.
            unsafe { libc::syscall(libc::SYS_tgkill, self.process, thread, SIGRTMIN()) };
        }
    }
}

impl Drop for Vcpu {
    fn drop(&mut self) {
        self.want(Wanted::Stop);
        if let Some(thread) = self.thread.take() {
            // A thread that has panicked has reported it already, when it unwound through `Retire`.
            let _ = thread.join();
        }
    }
}

/// Whatever way the thread ends: takes the page from those who kick, and tells those who wait.
#[derive(Debug)]
struct Retire {
    shared: Arc<Shared>,
    start_line: Arc<StartLine>,
}

impl Retire {
    fn retire(&self) {
        self.start_line.give_up();
        *lock(&self.shared.kick) = None;
        lock(&self.shared.status).state = State::Stopped;
        self.shared.changed.notify_all();
    }

    /// Retires at once and returns when the thread is told to stop: ending takes system calls that a thread which has
    /// served may not make any more, in a process that is about to end as a whole.
    fn wait_for_stop(&self) {
        self.retire();
        let mut status = lock(&self.shared.status);
        while status.wanted != Wanted::Stop {
            status = self
                .shared
                .changed
                .wait(status)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Retire {
    fn drop(&mut self) {
        self.retire();
    }
}

/// The thread's side. `retire` is the first field, so that it is dropped before `fd` and its page.
#[derive(Debug)]
struct Runner {
    retire: Retire,
    fd: VcpuFd,
    id: u8,
    buses: Buses,
    end: Arc<EndSignal>,
    hooks: Arc<dyn Hooks>,
}

/// What an exit means for the thread.
enum Next {
    Enter,
    /// See what is wanted.
    Look,
    End(EndReason),
}

impl Runner {
    fn run(mut self) {
        // A panic here must end the machine, not leave it with a processor less.
        let alarm = PanicAlarm(Arc::clone(&self.end));
        let number = rustix::thread::gettid().as_raw_nonzero().get();
        self.retire.shared.thread.store(number, Ordering::SeqCst);
        let mut entry_retries = 0;
        // Not before: a machine that could not be built to its end takes its threads down again.
        if !self.wait_until_called() {
            std::mem::forget(alarm);
            return;
        }
        if let Err(error) = self.hooks.before_serving(ThreadKind::Vcpu) {
            std::mem::forget(alarm);
            self.end.raise(EndReason::HostFailed(format!(
                "vCPU {}'s thread could not be closed in: {error}",
                self.id
            )));
            return;
        }
        if !self.retire.start_line.pass() {
            // Another one could not be closed in, or the machine is taken down: it tells why.
            std::mem::forget(alarm);
            self.retire.wait_for_stop();
            return;
        }
        let mut has_served = false;
        while self.wait_until_wanted() {
            if has_served {
                // The guest's watchdogs are not to take a long pause for a processor that hangs. Refused where the guest
                // has no paravirtual clock.
                let _ = self.fd.kvmclock_ctrl();
            }
            has_served = true;
            loop {
                match self.enter(&mut entry_retries) {
                    Next::Enter => {}
                    Next::Look => break,
                    Next::End(reason) => {
                        std::mem::forget(alarm);
                        self.end.raise(reason);
                        self.retire.wait_for_stop();
                        return;
                    }
                }
            }
        }
        std::mem::forget(alarm);
    }

    /// Waits until the vCPU is to run for the first time, and saves it if that is wanted before; false when the thread shall end. As long as it is
    /// at the start line it is paused to everybody: who wants to pause it again does not wait for others that come there.
    fn wait_until_called(&self) -> bool {
        let mut status = lock(&self.retire.shared.status);
        loop {
            status = self.save_if_wanted(status);
            if status.wanted == Wanted::Stop {
                return false;
            }
            if status.is_called {
                return true;
            }
            status = self.wait_for_change(status);
        }
    }

    fn save_if_wanted<'a>(&'a self, mut status: MutexGuard<'a, Status>) -> MutexGuard<'a, Status> {
        if let (Wanted::Pause, Some(msrs)) = (status.wanted, status.save.take()) {
            drop(status);
            let saved = snapshot::vcpu::save(&self.fd, &msrs);
            status = lock(&self.retire.shared.status);
            status.saved = Some(saved);
            self.retire.shared.changed.notify_all();
        }
        status
    }

    fn wait_for_change<'a>(&'a self, status: MutexGuard<'a, Status>) -> MutexGuard<'a, Status> {
        let changed = &self.retire.shared.changed;
        changed.wait(status).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits outside the guest while a pause is wanted, and saves the vCPU if that is wanted too; false when the thread shall end.
    ///
    /// What the last exit asked for is complete here: whoever leaves the inner loop of [`Self::run`] was sent back by `KVM_RUN`
    /// after it was entered again, which it does not do before it has taken the result of an access.
    fn wait_until_wanted(&mut self) -> bool {
        self.clear_immediate_exit();
        let shared = &self.retire.shared;
        let mut status = lock(&shared.status);
        loop {
            status = self.save_if_wanted(status);
            match status.wanted {
                Wanted::Run => {
                    status.state = State::Running;
                    return true;
                }
                Wanted::Stop => return false,
                Wanted::Pause => {
                    status.state = State::Paused;
                    shared.changed.notify_all();
                    status = self.wait_for_change(status);
                }
            }
        }
    }

    fn clear_immediate_exit(&mut self) {
        let flag = (&raw mut self.fd.get_kvm_run().immediate_exit).cast::<u8>();
        // SAFETY: the byte is in the page that `self.fd` has mapped, and is only accessed atomically.
        unsafe { AtomicU8::from_ptr(flag) }.store(0, Ordering::SeqCst);
    }

    fn enter(&mut self, entry_retries: &mut u32) -> Next {
        let failed = |sentence| Next::End(EndReason::VcpuFailed(sentence));
        let id = self.id;
        match self.fd.run() {
            Ok(VcpuExit::IoIn(..)) => self.port_io(Direction::In),
            Ok(VcpuExit::IoOut(..)) => self.port_io(Direction::Out),
            Ok(VcpuExit::MmioRead(address, data)) => {
                self.buses.mmio.read(address, data);
                Next::Enter
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                self.buses.mmio.write(address, data);
                Next::Enter
            }
            Ok(VcpuExit::Intr | VcpuExit::IrqWindowOpen) => Next::Look,
            Ok(VcpuExit::Shutdown) => Next::End(EndReason::TripleFault),
            // The interrupt controller is in KVM, which waits there for interrupts; where KVM reports a halt all the same, going on is right.
            Ok(VcpuExit::Hlt) => Next::Look,
            Ok(VcpuExit::FailEntry(reason, cpu)) => failed(format!(
                "vCPU {id} could not enter the guest: hardware reason {reason:#x} on processor {cpu}"
            )),
            Ok(VcpuExit::InternalError) => failed(self.internal_error()),
            Ok(VcpuExit::MemoryFault { gpa, .. }) => failed(format!(
                "vCPU {id} touched guest address {gpa:#x}, which the host can't provide"
            )),
            Ok(exit) => failed(format!(
                "vCPU {id} left the guest for an unknown reason: {exit:?}"
            )),
            Err(error) => match error.errno() {
                libc::EINTR | libc::EAGAIN => Next::Look,
                libc::ENOMEM if *entry_retries < MAX_ENTRY_RETRIES => {
                    *entry_retries += 1;
                    self.pass(ENTRY_RETRY_DELAY);
                    Next::Look
                }
                _ => failed(format!("vCPU {id} could not run: {error}")),
            },
        }
    }

    /// Lets time pass, or less where something else is wanted. Not by sleeping: a thread that has served makes few system calls.
    fn pass(&self, delay: Duration) {
        let shared = &self.retire.shared;
        let status = lock(&shared.status);
        // Woken early or not, the next entry tells.
        let _ = shared.changed.wait_timeout(status, delay);
    }

    /// Serves the exit `KVM_EXIT_IO`. A string instruction comes as one exit with many elements; each goes to the port by itself.
    fn port_io(&mut self, direction: Direction) -> Next {
        let run: *mut kvm_run = self.fd.get_kvm_run();
        // SAFETY: called for `KVM_EXIT_IO` only, for which `io` is the member of the union that KVM has filled.
        let io = unsafe { (*run).__bindgen_anon_1.io };
        let element_bytes = usize::from(io.size).max(1);
        let Some((offset, total)) = usize::try_from(io.data_offset)
            .ok()
            .zip(element_bytes.checked_mul(io.count as usize))
        else {
            return Next::Look;
        };
        // SAFETY: KVM puts `count` × `size` bytes at `data_offset` bytes from the start of the page that it shares (KVM API,
        // 5, "kvm_run"), inside the mapping of `self.fd`, which is borrowed mutably here; and it does not touch them before the next
        // `KVM_RUN` of this vCPU, which this thread alone makes.
        let data = unsafe { std::slice::from_raw_parts_mut(run.cast::<u8>().add(offset), total) };
        for element in data.chunks_mut(element_bytes) {
            match direction {
                Direction::In => self.buses.ports.read(u64::from(io.port), element),
                Direction::Out => self.buses.ports.write(u64::from(io.port), element),
            };
        }
        Next::Enter
    }

    fn internal_error(&mut self) -> String {
        let rip = self.fd.get_regs().map_or_else(
            |_| String::from("an unknown address"),
            |regs| format!("{:#x}", regs.rip),
        );
        // SAFETY: called for `KVM_EXIT_INTERNAL_ERROR` only, for which `internal` is the member of the union that KVM
        // has filled.
        let suberror = unsafe { self.fd.get_kvm_run().__bindgen_anon_1.internal.suberror };
        let id = self.id;
        // KVM API, 5: KVM_INTERNAL_ERROR_EMULATION is 1.
        if suberror == 1 {
            format!("vCPU {id} can't go on: KVM could not emulate the instruction at {rip}")
        } else {
            format!("vCPU {id} can't go on at {rip}: KVM internal error {suberror}")
        }
    }
}

/// Of port I/O, as the guest sees it.
#[derive(Debug, Clone, Copy)]
enum Direction {
    In,
    Out,
}

/// Ends the machine when it is dropped, which happens only in a panic.
struct PanicAlarm(Arc<EndSignal>);

impl Drop for PanicAlarm {
    fn drop(&mut self) {
        self.0
            .raise(EndReason::HostFailed("A vCPU's thread panicked".into()));
    }
}

/// Lets the kick's signal interrupt system calls without any other effect, in the whole process.
fn install_signal_handler() -> io::Result<()> {
    /// Generic, so that the signal information's type needs no name.
    extern "C" fn nothing<T>(_: libc::c_int, _: *mut T, _: *mut libc::c_void) {}

    static INSTALLED: OnceLock<Result<(), vmm_sys_util::errno::Error>> = OnceLock::new();
    INSTALLED
        .get_or_init(|| register_signal_handler(SIGRTMIN(), nothing))
        .map_err(io::Error::from)
}

#[cfg(test)]
mod tests;
