//! The user's terminal: its size, and raw mode that is given back whatever happens.
//!
//! The settings from before are kept in one place for the whole process, so that every way out can restore
//! them: the end of the run, a signal, a panic.

use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::stdio::stdin;
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};

/// Size that a program gets when the terminal itself does not know: that of a VT100.
const FALLBACK_SIZE: Size = Size {
    columns: 80,
    rows: 24,
};

static STATE: Mutex<State> = Mutex::new(State::Untouched);

enum State {
    /// As the user left it.
    Untouched,
    /// Raw; the settings from before.
    Raw(Box<Termios>),
    /// Given back, for good.
    Restored,
}

/// A terminal's size in character cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    /// Width.
    pub(crate) columns: u16,
    /// Height.
    pub(crate) rows: u16,
}

/// Whether standard input is a terminal.
pub(crate) fn is_input_terminal() -> bool {
    isatty(stdin())
}

/// The size of the terminal at standard input.
pub(crate) fn size() -> Size {
    match tcgetwinsize(stdin()) {
        Ok(size) if size.ws_col > 0 && size.ws_row > 0 => Size {
            columns: size.ws_col,
            rows: size.ws_row,
        },
        _ => FALLBACK_SIZE,
    }
}

/// Puts the terminal at standard input into raw mode: every key is a byte for the guest. Does nothing once
/// [`restore`] was called.
///
/// # Errors
/// What the system says.
pub(crate) fn make_raw() -> std::io::Result<()> {
    let mut state = state();
    if matches!(*state, State::Untouched) {
        let before = tcgetattr(stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        // From here on a panic restores, too.
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            hook(panic);
        }));
        tcsetattr(stdin(), OptionalActions::Now, &raw)?;
        *state = State::Raw(Box::new(before));
    }
    Ok(())
}

/// Whether the terminal is in raw mode now.
pub(crate) fn is_raw() -> bool {
    matches!(*state(), State::Raw(_))
}

/// Gives the terminal back as it was, if it was changed, and keeps it so.
pub(crate) fn restore() {
    let mut state = state();
    if let State::Raw(before) = &*state {
        // A terminal that is gone needs no restoring.
        let _ = tcsetattr(stdin(), OptionalActions::Now, before);
    }
    *state = State::Restored;
}

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}
