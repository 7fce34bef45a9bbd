//! Everything about sockets that a guest or a peer could make grow, and what happens at the bound.

/// Bounds of one device. [`Limits::DEFAULT`] is what a machine gets; tests take smaller ones to reach them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Connections that hold a descriptor, or a reset that the guest has not yet taken. At the bound a guest's connect is reset
    /// and a host's refused. That includes those that live on for one side alone: bytes that the guest's program has yet
    /// to read after the peer closed, or the other way round. None of these is ended to make room: its reader would take what
    /// it got for the whole. They end when their last holder closes, and with the program.
    pub(super) connections: usize,
    /// Resets owed for port pairs that are not connections. At the bound the next is dropped: it answers a packet that the guest
    /// sent out of the blue. A connect that is answered so ends with the guest's own time-out. The
    /// reset of a connection that existed is kept with the connection, never here, and never dropped.
    pub(super) resets: usize,
    /// Most bytes that the guest may send on a connection and the host has not taken (`buf_alloc`, virtio 1.2 §5.10.6.3):
    /// four of Linux's largest packets, so that one is sent while others are under way.
    pub(super) max_buffer_bytes: u32,
    /// Least of the same, when [`Self::buffer_budget_bytes`] is nearly spent.
    pub(super) min_buffer_bytes: u32,
    /// Bytes promised to all connections together above their minimum. Each gets an eighth of what is left, so that
    /// the first hundreds have room, and the last still work. With the minimum of each connection this bounds
    /// what a guest whose streams nobody reads can make the host hold: 32 MiB.
    pub(super) buffer_budget_bytes: u32,
    /// Most bytes of payload in a packet to the guest: Linux's own bound (`VIRTIO_VSOCK_MAX_PKT_BUF_SIZE`). Its buffers are
    /// 4 KiB each; a guest that offers larger ones gets no more than this for one stream before the next has its turn.
    pub(super) packet_bytes: u64,
    /// Packets to the guest in one go. Then the event loop's other sources have their turn.
    pub(super) packets_per_round: usize,
}

impl Limits {
    /// What a machine gets.
    pub(super) const DEFAULT: Self = Self {
        connections: 1023,
        resets: 1024,
        max_buffer_bytes: 256 << 10,
        min_buffer_bytes: 16 << 10,
        buffer_budget_bytes: 16 << 20,
        packet_bytes: 64 << 10,
        packets_per_round: 256,
    };
}

/// First host port given to a connection that the host opens; the following ones are counted up, so that a port comes again only
/// after a billion connections. Above all ports that services listen on.
pub(super) const FIRST_HOST_PORT: u32 = 1 << 30;

/// Last host port given to a connection that the host opens.
pub(super) const LAST_HOST_PORT: u32 = (1 << 31) - 1;

/// Sockets that are looked at in one turn of the event loop. More stay ready and come with the next.
pub(super) const SOCKETS_PER_TURN: usize = 64;

/// Reads of [`DISCARD_CHUNK_BYTES`] that empty a socket before it is closed: together more than the system's
/// largest default socket buffer (208 KiB). What is beyond makes the peer see ECONNRESET in place of its end of file.
pub(super) const DISCARD_READS: usize = 64;

/// Bytes of one read that empties a socket.
pub(super) const DISCARD_CHUNK_BYTES: usize = 8 << 10;
