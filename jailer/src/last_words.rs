//! What a machine's process says when it ends in an unforeseen way: a forbidden system call, a fault, a panic, a signal that
//! asks it to end. All of it goes to its standard error, whose end the supervisor keeps.

use std::fmt::Write as _;
use std::io;
use std::panic::PanicHookInfo;

/// Exit status of a process that made a forbidden system call: what a shell says of `SIGSYS`.
const FORBIDDEN: libc::c_int = 128 + libc::SIGSYS;

/// Exit status of a process that was asked to end by `SIGTERM`, as a shell says it.
const TERMINATED: libc::c_int = 128 + libc::SIGTERM;

/// Exit status of a process that has panicked, as Rust's own.
const PANICKED: libc::c_int = 101;

/// What stands before the number of a forbidden system call.
const FORBIDDEN_CALL: &[u8] = b"Forbidden system call ";

/// What a process is ended by whose instructions do what can't be done. Rust's own handler of the first two makes calls that the filters
/// forbid: what it does would be told in place of what happened.
const FAULTS: [(libc::c_int, &[u8]); 4] = [
    (libc::SIGSEGV, b"SIGSEGV"),
    (libc::SIGBUS, b"SIGBUS"),
    (libc::SIGILL, b"SIGILL"),
    (libc::SIGFPE, b"SIGFPE"),
];

/// Where a fault's context has the address of the instruction (`REG_RIP`, `ucontext.h`).
const RIP: usize = 16;

/// Most return addresses that are shown of a panic.
const MAX_FRAMES: usize = 48;

/// Where the kernel puts the number of the system call in the information of `SIGSYS`: after three
/// integers, padding, and the call's address (`_sigsys` of `siginfo_t`, `include/uapi/asm-generic/siginfo.h`).
const CALL_OFFSET: usize = 24;

/// Handles `SIGSYS`, `SIGTERM`, faults and panics in the whole process.
///
/// # Errors
/// The system's.
pub(crate) fn install() -> io::Result<()> {
    handle(libc::SIGSYS, forbidden as *const () as libc::sighandler_t)?;
    // The first process of a namespace is not ended by a signal that it does not handle (`pid_namespaces(7)`).
    handle(libc::SIGTERM, terminated as *const () as libc::sighandler_t)?;
    for (signal, _) in FAULTS {
        handle(signal, faulted as *const () as libc::sighandler_t)?;
    }
    // A write above the largest file's size is an error like others.
    handle(libc::SIGXFSZ, libc::SIG_IGN)?;
    std::panic::set_hook(Box::new(panicked));
    Ok(())
}

/// Ends this process at once: nothing of it runs any more, and what it holds is the kernel's to take.
#[expect(unsafe_code, reason = "std's way runs what is left to run first")]
pub fn exit(status: i32) -> ! {
    // SAFETY: it ends the process and touches no memory.
    unsafe { libc::_exit(status) }
}

/// The forbidden system call that ended a process with this exit status and these last words.
pub(crate) fn forbidden_call(exit_status: i32, stderr_tail: &[u8]) -> Option<u32> {
    if exit_status != FORBIDDEN {
        return None;
    }
    let line = stderr_tail
        .strip_suffix(b"\n")?
        .rsplit(|byte| *byte == b'\n')
        .next()?;
    let number = std::str::from_utf8(line.strip_prefix(FORBIDDEN_CALL)?).ok()?;
    number.parse().ok()
}

#[expect(unsafe_code, reason = "handlers of signals are set by a raw call")]
fn handle(signal: libc::c_int, handler: libc::sighandler_t) -> io::Result<()> {
    // SAFETY: zeros are valid for the structure; `handler` is `SIG_IGN` or one of the functions below, which have the signature
    // that SA_SIGINFO asks for and do only what is allowed in a handler. Pointers are to values that live here.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        // On the stack that Rust gives each thread for this: the usual one may be at its end.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut())
    };
    if result == 0 {
        return Ok(());
    }
    Err(io::Error::last_os_error())
}

/// Says which system call was forbidden, and ends the process. The call was not made.
#[expect(
    unsafe_code,
    reason = "a handler may make system calls and little else"
)]
extern "C" fn forbidden(
    _signal: libc::c_int,
    information: *const libc::siginfo_t,
    _context: *const libc::c_void,
) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO a pointer to 128 bytes of information, aligned to 8; for
    // `SIGSYS` the number lies at this offset.
    let number = unsafe {
        information
            .cast::<u8>()
            .add(CALL_OFFSET)
            .cast::<u32>()
            .read()
    };
    let mut line = Line::default();
    line.push(FORBIDDEN_CALL);
    line.push_number(number.into(), 10);
    line.say_last(FORBIDDEN)
}

/// Says what fault it was, and where, and ends the process with the status that a shell would give it.
#[expect(unsafe_code, reason = "what the kernel gives a handler is pointers")]
extern "C" fn faulted(
    signal: libc::c_int,
    information: *const libc::siginfo_t,
    context: *const libc::c_void,
) {
    // SAFETY: the kernel gives a handler with SA_SIGINFO pointers to both structures. A fault's information has an address; any other's
    // has something else there, which is read as a number, and not told.
    let (code, address, instruction) = unsafe {
        let context = context.cast::<libc::ucontext_t>();
        (
            (*information).si_code,
            (*information).si_addr().addr(),
            (*context).uc_mcontext.gregs.get(RIP).copied().unwrap_or(0),
        )
    };
    let name = FAULTS
        .iter()
        .find(|(fault, _)| *fault == signal)
        .map_or(b"".as_slice(), |(_, name)| name);
    let mut line = Line::default();
    line.push(b"Fault: ");
    line.push(name);
    // What is not the kernel's own was sent by somebody (`sigaction(2)`, `si_code`).
    if code > 0 {
        line.push(b" at address 0x");
        line.push_number(address as u64, 16);
    } else {
        line.push(b", which was sent to it,");
    }
    line.push(b" in instruction 0x");
    let instruction = usize::try_from(instruction).unwrap_or(usize::MAX);
    line.push_number(offset_in_program(instruction) as u64, 16);
    line.say_last(128 + signal)
}

/// The digits of numbers in a line.
const DIGITS: &[u8] = b"0123456789abcdef";

/// A line that is put together without memory of the heap, and cut where it is too long.
struct Line {
    bytes: [u8; 96],
    length: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self {
            bytes: [0; 96],
            length: 0,
        }
    }
}

impl Line {
    fn push(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if let Some(place) = self.bytes.get_mut(self.length) {
                *place = *byte;
                self.length = self.length.wrapping_add(1);
            }
        }
    }

    /// With digits of this base, at most 16.
    fn push_number(&mut self, number: u64, base: u64) {
        let mut power = 1_u64;
        while number / power >= base {
            power = power.wrapping_mul(base);
        }
        while power > 0 {
            let digit = usize::try_from(number / power % base).unwrap_or(usize::MAX);
            self.push(
                DIGITS
                    .get(digit..)
                    .and_then(|from| from.get(..1))
                    .unwrap_or(b"?"),
            );
            power /= base;
        }
    }

    /// Writes the line, and ends the process.
    #[expect(
        unsafe_code,
        reason = "a handler may make system calls and little else"
    )]
    fn say_last(mut self, status: libc::c_int) -> ! {
        self.push(b"\n");
        // SAFETY: both calls may be made in a handler (`signal-safety(7)`); `length` bytes of the line were written.
        unsafe {
            libc::write(libc::STDERR_FILENO, self.bytes.as_ptr().cast(), self.length);
            libc::_exit(status)
        }
    }
}

/// Ends the process.
#[expect(unsafe_code, reason = "the one way to end from a handler")]
extern "C" fn terminated(
    _signal: libc::c_int,
    _information: *const libc::siginfo_t,
    _context: *const libc::c_void,
) {
    // SAFETY: it may be called in a handler.
    unsafe { libc::_exit(TERMINATED) }
}

/// Says what a panic says, and where it was; then the process ends. Return addresses are shown relative to the program,
/// as `addr2line` takes them: there is no file here from which their names could be read.
#[expect(unsafe_code, reason = "the process ends without running anything more")]
fn panicked(information: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("unnamed");
    let mut words = format!("thread '{name}' {information}\nbacktrace:");
    for address in backtrace() {
        // Writing to a string does not fail.
        let _ = write!(words, " {address:#x}");
    }
    words.push('\n');
    let _ = rustix::io::write(rustix::stdio::stderr(), words.as_bytes());
    // SAFETY: it ends the process and touches no memory.
    unsafe { libc::_exit(PANICKED) }
}

/// An address as an offset into the program, as `addr2line` takes it.
#[expect(unsafe_code, reason = "the linker's symbols are foreign")]
fn offset_in_program(address: usize) -> usize {
    unsafe extern "C" {
        /// The program's first byte, set by the linker.
        static __executable_start: u8;
    }
    address.wrapping_sub((&raw const __executable_start).addr())
}

/// The return addresses of this thread, innermost first, as offsets into the program.
#[expect(unsafe_code, reason = "std shows no addresses")]
fn backtrace() -> Vec<usize> {
    #[repr(C)]
    struct Context {
        _private: [u8; 0],
    }

    #[expect(unsafe_code, reason = "the unwinder that std itself links")]
    unsafe extern "C-unwind" {
        fn _Unwind_Backtrace(
            frame: extern "C-unwind" fn(*mut Context, *mut libc::c_void) -> libc::c_int,
            argument: *mut libc::c_void,
        ) -> libc::c_int;
        fn _Unwind_GetIP(context: *mut Context) -> usize;
    }

    extern "C-unwind" fn frame(context: *mut Context, argument: *mut libc::c_void) -> libc::c_int {
        // SAFETY: `argument` is the vector that `backtrace` gives, borrowed by nobody else meanwhile; the context is
        // the unwinder's own, valid during this call.
        let (frames, address) =
            unsafe { (&mut *argument.cast::<Vec<usize>>(), _Unwind_GetIP(context)) };
        frames.push(offset_in_program(address));
        // 0 goes on (_URC_NO_REASON), anything else ends the walk (Itanium C++ ABI: Exception Handling, 1.6).
        libc::c_int::from(frames.len() >= MAX_FRAMES)
    }

    let mut frames = Vec::with_capacity(MAX_FRAMES);
    // SAFETY: the function only calls `frame` with a context of its own and the argument, which lives here.
    unsafe {
        _Unwind_Backtrace(frame, (&raw mut frames).cast());
    }
    frames
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_a_forbidden_call_is_read_from_the_last_line() {
        let of = |words: &[u8]| forbidden_call(159, words);

        assert_eq!(of(b"Forbidden system call 257\n"), Some(257));
        assert_eq!(of(b"noise\nForbidden system call 0\n"), Some(0));
        assert_eq!(of(b"Forbidden system call 1\nnoise\n"), None);
        assert_eq!(of(b"Forbidden system call x\n"), None);
        assert_eq!(of(b""), None);
        assert_eq!(forbidden_call(1, b"Forbidden system call 257\n"), None);
    }

    #[test]
    fn numbers_are_written_with_digits_of_their_base() {
        let written = |number, base| {
            let mut line = Line::default();
            line.push_number(number, base);
            String::from_utf8(line.bytes[..line.length].to_vec()).unwrap()
        };

        for number in [0, 1, 9, 10, 257, u64::from(u32::MAX), u64::MAX] {
            assert_eq!(written(number, 10), format!("{number}"));
            assert_eq!(written(number, 16), format!("{number:x}"));
        }
    }

    #[test]
    fn a_line_that_is_too_long_is_cut() {
        let mut line = Line::default();

        line.push(&[b'x'; 200]);

        assert_eq!(line.length, line.bytes.len());
    }

    #[test]
    fn a_backtrace_has_addresses_in_this_program() {
        let frames = backtrace();

        assert!((2..=MAX_FRAMES).contains(&frames.len()), "{frames:x?}");
        assert!(
            frames.iter().any(|address| *address < 1 << 30),
            "{frames:x?}"
        );
    }
}
