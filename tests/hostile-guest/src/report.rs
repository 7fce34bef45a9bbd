//! What the guest says to the suite, line by line on its console.
//!
//! `FAIL …`: a check did not hold. `DONE`: all did; the machine is to be idle from here on. `NOW`: the next thing ends the machine. `note
//! …`: for whoever reads a failure. `@…`: the suite is to do something.

use core::fmt::{self, Write};

use crate::{boot, port};

struct Console;

impl Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes()
            .for_each(|byte| port::write8(port::SERIAL, byte));
        Ok(())
    }
}

/// Prints a line.
pub(crate) fn line(text: fmt::Arguments<'_>) {
    let _ = Console.write_fmt(text);
    let _ = Console.write_str("\n");
}

/// Ends the case: a check did not hold.
pub(crate) fn fail(text: fmt::Arguments<'_>) -> ! {
    line(format_args!("FAIL {text}"));
    boot::halt()
}

/// Ends the case: all checks held.
pub(crate) fn done() -> ! {
    line(format_args!("DONE"));
    boot::halt()
}

/// Says that the next thing ends the machine.
pub(crate) fn now() {
    line(format_args!("NOW"));
}

/// Prints a line.
#[macro_export]
macro_rules! say {
    ($($text:tt)+) => { $crate::report::line(format_args!($($text)+)) };
}

/// A check: the condition, then what it means where it does not hold.
#[macro_export]
macro_rules! check {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            $crate::report::fail(format_args!($($text)+));
        }
    };
}

/// A check of two values that are to be the same, then what they are.
#[macro_export]
macro_rules! same {
    ($got:expr, $wanted:expr, $($text:tt)+) => {{
        let (got, wanted) = ($got, $wanted);
        if got != wanted {
            $crate::report::fail(format_args!("{}: {got:x?}, not {wanted:x?}", format_args!($($text)+)));
        }
    }};
}
