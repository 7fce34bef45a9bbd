//! What the machine's process does: one thing that it is told.

use std::os::fd::AsFd;

use sandvmm_jailer::{Inside, Thread, enter, exit};

/// What it can be told, by its first byte; a number may follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Close the main thread's cell and wait.
    Wait,
    /// Panic in a closed cell.
    Panic,
    /// Do what ends a process by a fault, in a closed cell, as the main thread or a processor's.
    Fault(Thread, Fault),
    /// Make a system call with this number and these arguments, as the main thread or a processor's, in a closed cell. Exits with the
    /// error number.
    Call(Thread, i64, [u64; 4]),
}

/// A way to end by a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Write to an address that is nobody's: [`NOWHERE`].
    Write,
    /// Use up the stack.
    Stack,
    /// Execute what is no instruction.
    Instruction,
}

impl Fault {
    pub(crate) const ALL: [Self; 3] = [Self::Write, Self::Stack, Self::Instruction];
}

/// An address in the first page, which is never mapped.
pub(crate) const NOWHERE: usize = 0x18;

impl Order {
    pub(crate) fn to_words(self) -> String {
        match self {
            Self::Wait => "wait".to_owned(),
            Self::Panic => "panic".to_owned(),
            Self::Fault(thread, fault) => {
                let thread = u8::from(thread == Thread::Vcpu);
                format!("fault {thread} {}", fault as u8)
            }
            Self::Call(thread, number, [a, b, c, d]) => {
                let thread = u8::from(thread == Thread::Vcpu);
                format!("call {thread} {number} {a} {b} {c} {d}")
            }
        }
    }

    fn from_words(words: &str) -> Option<Self> {
        let mut words = words.split(' ');
        match words.next()? {
            "wait" => Some(Self::Wait),
            "panic" => Some(Self::Panic),
            "fault" => {
                let thread = thread_of(words.next()?);
                let fault = words.next()?.parse::<usize>().ok()?;
                Some(Self::Fault(thread, *Fault::ALL.get(fault)?))
            }
            "call" => {
                let thread = thread_of(words.next()?);
                let mut number = || words.next()?.parse::<u64>().ok();
                let call = i64::try_from(number()?).ok()?;
                Some(Self::Call(
                    thread,
                    call,
                    [number()?, number()?, number()?, number()?],
                ))
            }
            _ => None,
        }
    }
}

fn thread_of(word: &str) -> Thread {
    if word == "1" {
        Thread::Vcpu
    } else {
        Thread::Main
    }
}

/// Stands for a pointer to a path, as an argument of [`Order::Call`].
pub(crate) const PATH: u64 = u64::MAX;

/// Exit status of a process that did not understand, or whose cell did not close.
const FAILED: i32 = 99;

pub(crate) fn serve() -> ! {
    let inside = match enter() {
        Ok(inside) => inside,
        Err(error) => {
            eprintln!("{error}: {:?}", std::error::Error::source(&error));
            exit(FAILED);
        }
    };
    let mut words = [0; 256];
    let order = match rustix::io::read(std::io::stdin().as_fd(), &mut words) {
        Ok(0) => exit(0),
        Ok(count) => std::str::from_utf8(&words[..count])
            .ok()
            .and_then(Order::from_words),
        Err(_) => None,
    };
    match order {
        Some(order) => obey(inside, order),
        None => exit(FAILED),
    }
}

fn obey(inside: Inside, order: Order) -> ! {
    match order {
        Order::Wait => {
            close(inside, Thread::Main);
            let mut byte = [0];
            // Ends when the supervisor closes its end.
            let _ = rustix::io::read(std::io::stdin().as_fd(), &mut byte);
            exit(0)
        }
        Order::Panic => {
            close(inside, Thread::Main);
            panic!("of all things")
        }
        Order::Fault(thread, fault) => {
            close(inside, thread);
            do_wrong(fault);
            exit(0)
        }
        Order::Call(thread, number, [a, b, c, d]) => {
            close(inside, thread);
            exit(call(number, [a, b, c, d]))
        }
    }
}

fn close(inside: Inside, thread: Thread) {
    if inside.close(thread).is_err() {
        exit(FAILED);
    }
}

#[expect(unsafe_code, reason = "no safe code does it")]
fn do_wrong(fault: Fault) {
    match fault {
        // SAFETY: it is not; the kernel ends the process for it.
        Fault::Write => unsafe {
            std::arch::asm!("mov byte ptr [{}], 1", in(reg) NOWHERE);
        },
        Fault::Stack => {
            std::hint::black_box(deeper(1));
        }
        // SAFETY: as above.
        Fault::Instruction => unsafe {
            std::arch::asm!("ud2");
        },
    }
}

fn deeper(depth: u64) -> u64 {
    let room = std::hint::black_box([depth; 64]);
    if depth == u64::MAX {
        return depth;
    }
    deeper(depth + 1) + room[0]
}

/// The error number of a system call; 0 where it succeeds.
#[expect(unsafe_code, reason = "system calls are what is tested")]
fn call(number: i64, arguments: [u64; 4]) -> i32 {
    let path = c"/etc/passwd".as_ptr().addr() as u64;
    let [a, b, c, d] = arguments.map(|argument| if argument == PATH { path } else { argument });
    // SAFETY: it is not: the tests choose calls that write to no memory of this process or that fail before; and the process ends
    // right after.
    let result = unsafe { libc::syscall(number, a, b, c, d, 0, 0) };
    if result >= 0 {
        return 0;
    }
    std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(FAILED)
}
