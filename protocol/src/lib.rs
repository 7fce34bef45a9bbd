//! The words that the `sandvmm` library (on the host) and the guest agent (PID 1 in the guest)
//! exchange. Both sides depend on this crate, it on neither.
//!
//! Everything travels over vsock streams, and there are two kinds of them:
//!
//! * **The control stream**, one per machine. The agent dials [`port::CONTROL`] on the host as soon
//!   as the root file system stands, from a source port that only a privileged process can bind,
//!   and says [`message::Hello`]. From then on the host sends [`message::ToAgent`] frames and the
//!   agent [`message::FromAgent`] frames. That the dial comes *from* the guest is what tells the
//!   host that it is ready: nobody polls, and nobody is refused for being early.
//! * **Data streams**, as many as are needed. The host dials [`port::STREAMS`] in the guest and sends
//!   one [`message::StreamHeader`] frame; what follows is bytes with no framing, so that
//!   back-pressure, half-close and throughput are those of the stream itself. One stream carries one
//!   thing: a command's standard input, a file's content.
//!
//! Neither side trusts the other's lengths: see [`frame`].
#![forbid(unsafe_code)]

pub mod content;
pub mod frame;
pub mod message;
pub mod port;

/// Version of everything in this crate. The agent says its own in [`message::Hello`]; a host that
/// reads another one ends the machine, since host and initramfs are built together.
pub const VERSION: u32 = 1;
