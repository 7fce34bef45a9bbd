//! A packet's header and its operations.

use crate::input::Input;

/// Bytes of a packet's header (virtio 1.2 §5.10.6).
pub(super) const HEADER_BYTES: u32 = 44;

/// Operations.
pub(super) const REQUEST: u16 = 1;
pub(super) const RESPONSE: u16 = 2;
pub(super) const RESET: u16 = 3;
pub(super) const SHUTDOWN: u16 = 4;
pub(super) const DATA: u16 = 5;
pub(super) const CREDIT_UPDATE: u16 = 6;
pub(super) const CREDIT_REQUEST: u16 = 7;

/// A packet's header (virtio 1.2 §5.10.6), in this target's own words: not the device's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Header {
    pub(super) src_cid: u64,
    pub(super) dst_cid: u64,
    pub(super) src_port: u32,
    pub(super) dst_port: u32,
    pub(super) len: u32,
    pub(super) kind: u16,
    pub(super) op: u16,
    pub(super) flags: u32,
    pub(super) buf_alloc: u32,
    pub(super) fwd_cnt: u32,
}

impl Header {
    pub(super) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES as usize);
        bytes.extend_from_slice(&self.src_cid.to_le_bytes());
        bytes.extend_from_slice(&self.dst_cid.to_le_bytes());
        bytes.extend_from_slice(&self.src_port.to_le_bytes());
        bytes.extend_from_slice(&self.dst_port.to_le_bytes());
        bytes.extend_from_slice(&self.len.to_le_bytes());
        bytes.extend_from_slice(&self.kind.to_le_bytes());
        bytes.extend_from_slice(&self.op.to_le_bytes());
        bytes.extend_from_slice(&self.flags.to_le_bytes());
        bytes.extend_from_slice(&self.buf_alloc.to_le_bytes());
        bytes.extend_from_slice(&self.fwd_cnt.to_le_bytes());
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        let mut input = Input::new(bytes);
        Self {
            src_cid: input.u64(),
            dst_cid: input.u64(),
            src_port: input.u32(),
            dst_port: input.u32(),
            len: input.u32(),
            kind: input.u16(),
            op: input.u16(),
            flags: input.u32(),
            buf_alloc: input.u32(),
            fwd_cnt: input.u32(),
        }
    }
}
