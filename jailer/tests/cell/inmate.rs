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
    /// Make a system call with this number and these arguments, as the main thread or a processor's, in a closed cell. Exits with the
    /// error number.
    Call(Thread, i64, [u64; 4]),
}

impl Order {
    pub(crate) fn to_words(self) -> String {
        match self {
            Self::Wait => "wait".to_owned(),
            Self::Panic => "panic".to_owned(),
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
            "call" => {
                let mut number = || words.next()?.parse::<u64>().ok();
                let thread = if number()? == 1 {
                    Thread::Vcpu
                } else {
                    Thread::Main
                };
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
