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
//! **A machine that is saved** is frozen first: the host sends [`message::ToAgent::Freeze`], the agent stops all that it
//! started and answers [`message::FromAgent::Frozen`]. In a machine that goes on, [`message::ToAgent::Thaw`] undoes it. In
//! one that was restored, the control stream is broken; the agent dials anew and says [`message::FromAgent::Restored`], the
//! host answers with [`message::ToAgent::Resume`], and only after the agent has applied that and said
//! [`message::FromAgent::Resumed`] does anything run again.
//!
//! **Connections that leave or enter** are the gate's, another process of the guest: see [`gate`].
//!
//! Neither side trusts the other's lengths: see [`frame`].
#![forbid(unsafe_code)]

pub mod call;
pub mod content;
pub mod file;
pub mod frame;
pub mod gate;
pub mod message;
pub mod port;

/// Version of everything in this crate. The agent says its own in [`message::Hello`] and [`message::Restored`]; a host
/// that reads another one ends the machine, since host and initramfs are built together, and a template is built anew
/// when either changes.
pub const VERSION: u32 = 10;
