//! Virtio-vsock (virtio 1.2 §5.10): stream sockets between the guest and descriptors on the host.
//!
//! A connection is one end of a unix socket pair, and nothing here knows what it is for. When the guest connects, the device makes a
//! pair, keeps one end and hands the other to [`Incoming`]; when the host connects, [`Vsock::connect`] takes one
//! end. Back-pressure, half-close and a closed reader pass through in both directions as they do on a local socket:
//!
//! | the peer on the host | the guest |
//! | --- | --- |
//! | shuts its write half | reads all, then end of file |
//! | closes | reads all, then end of file; its writes fail with EPIPE at once |
//! | reads slowly | blocks, at a bound |
//! | reads end of file, after all bytes | shuts its write half, closes, or is reset |
//! | gets EPIPE | shuts its read half, or closes |
//!
//! * [`device`] serves the three queues on the event loop.
//! * `muxer` finds the connection for a packet, and whose turn it is.
//! * `connection` is one of them as a state machine; `credit` and `backlog` are its arithmetic and its buffer.
//! * `packet` is the layout, `watched` a socket in an epoll set, `limits` all bounds.
//!
//! A write to a closed socket raises SIGPIPE: the process must ignore it, as Rust's runtime has every program do.

mod backlog;
mod connection;
mod credit;
pub mod device;
mod limits;
mod muxer;
mod packet;
#[cfg(test)]
mod tests;
mod watched;

pub use device::{ConnectError, Incoming, Refused, Vsock, VsockState};
