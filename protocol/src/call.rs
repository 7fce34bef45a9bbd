//! Calls of functions that the host has registered, by programs of the guest.
//!
//! The host opens one data stream of the kind [`crate::message::StreamKind::Calls`] when its first function is registered. In
//! the guest, a process of its own (the *bridge*) says [`FromBridge::Ready`] on it, listens on [`SOCKET`], and hands on what
//! programs write there: it reads no more of a call than where it ends. Without that stream nothing listens.
//!
//! On the socket, a call is one line of JSON, `{"call": NAME, "args": ANY}`, and its answer another, `{"ok": ANY}` or
//! `{"error": {"kind": KIND, "message": TEXT}}`. Calls of one connection are answered in order; connections do not wait for
//! each other.

use serde::{Deserialize, Serialize};

/// Longest call in bytes, without the end of its line. The bridge answers a longer one itself.
pub const MAX_CALL_BYTES: usize = 1 << 20;

/// Longest answer in bytes, likewise. The host sends an error in place of a longer one.
pub const MAX_ANSWER_BYTES: usize = 1 << 20;

/// Largest frame on the stream, either way: a call or an answer with its number.
pub const MAX_FRAME_BYTES: usize = MAX_CALL_BYTES + 64;

/// Longest name of a function in bytes.
pub const MAX_NAME_BYTES: usize = 64;

/// The folder of all that a program in the guest needs for calls.
pub const FOLDER: &str = "/run/sandvmm";

/// The socket that programs in the guest connect to, a `SOCK_STREAM` of the local family.
pub const SOCKET: &str = "/run/sandvmm/host.sock";

/// What the bridge sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromBridge {
    /// First frame: programs may call.
    Ready,
    /// A program has called.
    Call {
        /// Chosen by the bridge; another call may have it once this one was answered.
        id: u32,
        /// The line as the program wrote it, [`MAX_CALL_BYTES`] at most.
        line: Vec<u8>,
    },
}

/// What the host sends: the answer to one call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// The call's number.
    pub id: u32,
    /// The line that the program gets, [`MAX_ANSWER_BYTES`] at most; no line feed in it.
    pub line: Vec<u8>,
}

/// Whether functions can be called so: an ASCII letter or `_`, then letters, digits and `_`, as names in Python are.
#[must_use]
pub fn is_name(name: &str) -> bool {
    let is_first = |byte: &u8| byte.is_ascii_alphabetic() || *byte == b'_';
    name.len() <= MAX_NAME_BYTES
        && name.as_bytes().first().is_some_and(is_first)
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_python_and_not_too_long() {
        let long = "x".repeat(MAX_NAME_BYTES);
        for name in ["lookup", "_", "a1_B", &long] {
            assert!(is_name(name), "{name}");
        }
        let longer = format!("{long}x");
        for name in ["", "1a", "a-b", "a.b", "ä", "a\n", " a", &longer] {
            assert!(!is_name(name), "{name}");
        }
    }

    #[test]
    fn the_longest_call_and_answer_fit_a_frame() {
        let call = FromBridge::Call {
            id: u32::MAX,
            line: vec![b'x'; MAX_CALL_BYTES],
        };
        let answer = Answer {
            id: u32::MAX,
            line: vec![b'x'; MAX_ANSWER_BYTES],
        };

        crate::frame::encode(&call, MAX_FRAME_BYTES).unwrap();
        crate::frame::encode(&answer, MAX_FRAME_BYTES).unwrap();
    }
}
