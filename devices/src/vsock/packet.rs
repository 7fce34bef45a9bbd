//! Packets as they lie in guest memory (virtio 1.2 §5.10.6).
//!
//! The crate virtio-vsock knows the layout too, but wants all of a packet's payload in one descriptor; Linux spreads it over
//! several (Firecracker issue 5475: a 40 MB upload was corrupted). The tests check this layout against that crate.

use vm_memory::{GuestMemoryMmap, VolatileSlice};

use crate::virtio::{BufferError, Buffers};

/// The host's context identifier (virtio 1.2 §5.10.4).
pub(super) const HOST_CID: u64 = 2;

/// Bytes of a header.
pub(super) const HEADER_BYTES: u32 = 44;

/// The same as an array's length.
pub(super) const HEADER_LEN: usize = HEADER_BYTES as usize;

/// The same as the offset of the payload in a packet's buffers.
pub(super) const PAYLOAD_OFFSET: u64 = HEADER_BYTES as u64;

/// `VIRTIO_VSOCK_TYPE_STREAM`: the one type that is offered.
pub(super) const TYPE_STREAM: u16 = 1;

/// `VIRTIO_VSOCK_SHUTDOWN_F_RECEIVE`: the sender takes no more data.
pub(super) const SHUTDOWN_RECEIVE: u32 = 1;

/// `VIRTIO_VSOCK_SHUTDOWN_F_SEND`: the sender sends no more data.
pub(super) const SHUTDOWN_SEND: u32 = 2;

/// What a packet is for (virtio 1.2 §5.10.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Op {
    Request = 1,
    Response = 2,
    Reset = 3,
    Shutdown = 4,
    Data = 5,
    CreditUpdate = 6,
    CreditRequest = 7,
}

impl Op {
    fn from_wire(value: u16) -> Option<Self> {
        Some(match value {
            1 => Self::Request,
            2 => Self::Response,
            3 => Self::Reset,
            4 => Self::Shutdown,
            5 => Self::Data,
            6 => Self::CreditUpdate,
            7 => Self::CreditRequest,
            _ => return None,
        })
    }
}

/// Names a connection. There is one guest and one host, so the ports are enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ports {
    pub(super) host: u32,
    pub(super) guest: u32,
}

/// A header, in either direction. Nothing of it is checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) src_cid: u64,
    pub(super) dst_cid: u64,
    pub(super) src_port: u32,
    pub(super) dst_port: u32,
    pub(super) len: u32,
    pub(super) socket_type: u16,
    pub(super) op: u16,
    pub(super) flags: u32,
    pub(super) buf_alloc: u32,
    pub(super) fwd_cnt: u32,
}

impl Header {
    pub(super) fn from_bytes(bytes: [u8; HEADER_LEN]) -> Self {
        let mut at = bytes.as_slice();
        Self {
            src_cid: u64::from_le_bytes(take(&mut at)),
            dst_cid: u64::from_le_bytes(take(&mut at)),
            src_port: u32::from_le_bytes(take(&mut at)),
            dst_port: u32::from_le_bytes(take(&mut at)),
            len: u32::from_le_bytes(take(&mut at)),
            socket_type: u16::from_le_bytes(take(&mut at)),
            op: u16::from_le_bytes(take(&mut at)),
            flags: u32::from_le_bytes(take(&mut at)),
            buf_alloc: u32::from_le_bytes(take(&mut at)),
            fwd_cnt: u32::from_le_bytes(take(&mut at)),
        }
    }

    pub(super) fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let mut at = bytes.as_mut_slice();
        put(&mut at, self.src_cid.to_le_bytes());
        put(&mut at, self.dst_cid.to_le_bytes());
        put(&mut at, self.src_port.to_le_bytes());
        put(&mut at, self.dst_port.to_le_bytes());
        put(&mut at, self.len.to_le_bytes());
        put(&mut at, self.socket_type.to_le_bytes());
        put(&mut at, self.op.to_le_bytes());
        put(&mut at, self.flags.to_le_bytes());
        put(&mut at, self.buf_alloc.to_le_bytes());
        put(&mut at, self.fwd_cnt.to_le_bytes());
        bytes
    }

    /// What the packet is for; `None` where the operation is unknown, or carries flags or a payload that it has no use for.
    pub(super) fn operation(&self) -> Option<Op> {
        let op = Op::from_wire(self.op)?;
        let sound = match op {
            Op::Data => self.flags == 0,
            Op::Shutdown => self.len == 0 && self.flags & !(SHUTDOWN_RECEIVE | SHUTDOWN_SEND) == 0,
            // A reset is final, whatever else is written on it.
            Op::Reset => true,
            Op::Request | Op::Response | Op::CreditUpdate | Op::CreditRequest => {
                self.len == 0 && self.flags == 0
            }
        };
        sound.then_some(op)
    }

    /// The connection that a packet from the guest belongs to.
    pub(super) fn ports_from_guest(&self) -> Ports {
        Ports {
            host: self.dst_port,
            guest: self.src_port,
        }
    }

    /// The reset that answers this packet where there is no connection: addresses swapped, same type, so that the guest finds the
    /// socket that it belongs to.
    pub(super) fn reset_in_answer(&self) -> Self {
        Self {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            socket_type: self.socket_type,
            op: Op::Reset as u16,
            ..Self::default()
        }
    }
}

/// A packet that the guest sent: its header, read once, and where its payload is.
#[derive(Debug)]
pub(super) struct GuestPacket<'m> {
    pub(super) header: Header,
    /// `None` where the header promises more than the descriptors hold, or they name what is not memory.
    pub(super) payload: Option<Vec<VolatileSlice<'m>>>,
}

impl<'m> GuestPacket<'m> {
    /// Reads the header.
    ///
    /// # Errors
    ///
    /// [`BufferError`] where there is none: nobody to answer.
    pub(super) fn read(
        memory: &'m GuestMemoryMmap,
        readable: &Buffers,
    ) -> Result<Self, BufferError> {
        let mut bytes = [0; HEADER_LEN];
        readable.read_at(memory, 0, &mut bytes)?;
        let header = Header::from_bytes(bytes);
        let payload = readable
            .slices(memory, PAYLOAD_OFFSET, u64::from(header.len))
            .ok();
        Ok(Self { header, payload })
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let (field, tail) = rest.split_first_chunk().unwrap_or((&[0; N], &[]));
    *rest = tail;
    *field
}

fn put<const N: usize>(rest: &mut &mut [u8], field: [u8; N]) {
    if let Some((slot, tail)) = std::mem::take(rest).split_first_chunk_mut() {
        *slot = field;
        *rest = tail;
    }
}
