//! Context identifiers and ports of the vsock services.
//!
//! All ports are below 1024: Linux lets only a process with `CAP_NET_BIND_SERVICE` bind those
//! (`LAST_RESERVED_PORT` in `net/vmw_vsock/af_vsock.c`), so that an unprivileged program in the guest
//! can neither listen in the agent's place nor pass for the agent when it dials.

/// The host's context identifier (virtio 1.2 §5.10.4, `VMADDR_CID_HOST`).
pub const HOST_CID: u32 = 2;

/// The guest's context identifier. Every machine has the same one: a machine's process serves one
/// guest, and no stream leaves it by address.
pub const GUEST_CID: u32 = 3;

/// Host port of the control stream; the agent dials it from the source port of the same number.
pub const CONTROL: u32 = 1;

/// Guest port on which the agent takes data streams.
pub const STREAMS: u32 = 2;

/// Host port of the gate's control stream; the gate dials it from the source port of the same number.
pub const GATE_CONTROL: u32 = 3;

/// Host port on which the host takes connections that leave, dialled from a port of [`GATE_SOURCES`]; guest port on which
/// the gate takes those that enter.
pub const GATE: u32 = 4;

/// Source ports of connections that leave.
pub const GATE_SOURCES: std::ops::RangeInclusive<u32> = 64..=LAST_PRIVILEGED;

/// The last port that only a privileged process may bind.
pub const LAST_PRIVILEGED: u32 = 1023;
