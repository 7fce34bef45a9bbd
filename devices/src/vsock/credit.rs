//! Credit: how many bytes may be under way (virtio 1.2 §5.10.6.3).
//!
//! Both sides count bytes in `u32`s that wrap, and a difference of two counts is what is in flight. Here each
//! difference is kept within its bounds as the counts come in, so that no later subtraction can underflow (Linux CVE-2026-23069).

/// The guest's view is out of step with what was sent to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("The guest breaks the rules of credit")]
pub(super) struct CreditViolation;

/// What the guest may send: the room that was promised to it.
#[derive(Debug)]
pub(super) struct Promise {
    buf_alloc: u32,
    /// Bytes that came. Wraps.
    received: u32,
    /// Bytes that left for the host's socket. Wraps; never ahead of `received`.
    forwarded: u32,
    /// `forwarded` as the guest was last told. Wraps; never ahead of `forwarded`.
    told: u32,
}

impl Promise {
    pub(super) fn new(buf_alloc: u32) -> Self {
        Self {
            buf_alloc,
            received: 0,
            forwarded: 0,
            told: 0,
        }
    }

    /// The room that was promised, in bytes.
    pub(super) fn buf_alloc(&self) -> u32 {
        self.buf_alloc
    }

    /// The guest sent `len` bytes.
    pub(super) fn receive(&mut self, len: u32) -> Result<(), CreditViolation> {
        let held = self.received.wrapping_sub(self.forwarded);
        // Judged by what the guest was told, not by what is free: room of which it does not know is not its to use.
        let in_flight = self.received.wrapping_sub(self.told);
        debug_assert!(held <= in_flight && in_flight <= self.buf_alloc);
        match in_flight.checked_add(len) {
            Some(total) if total <= self.buf_alloc => {
                self.received = self.received.wrapping_add(len);
                Ok(())
            }
            _ => Err(CreditViolation),
        }
    }

    /// `len` of the received bytes have left.
    pub(super) fn forward(&mut self, len: u32) {
        debug_assert!(len <= self.received.wrapping_sub(self.forwarded));
        self.forwarded = self.forwarded.wrapping_add(len);
    }

    /// Whether enough room has come free that the guest should be told by a packet of its own.
    ///
    /// A quarter of the whole: when everything has left, the guest knows of three quarters or is told, so it never waits for ever.
    pub(super) fn is_news(&self) -> bool {
        self.forwarded.wrapping_sub(self.told) >= (self.buf_alloc / 4).max(1)
    }

    /// The count to write into a packet for the guest, which is thereby told.
    pub(super) fn tell(&mut self) -> u32 {
        self.told = self.forwarded;
        self.forwarded
    }
}

/// What may be sent to the guest: the room that it promised.
#[derive(Debug, Default)]
pub(super) struct Allowance {
    /// Bytes that were sent. Wraps.
    sent: u32,
    /// The guest's promise. It may change at any time, to anything.
    peer_buf_alloc: u32,
    /// Bytes that the guest's program took. Wraps; never ahead of `sent`.
    peer_forwarded: u32,
}

impl Allowance {
    /// Takes the counts of any packet of the guest.
    ///
    /// # Errors
    ///
    /// [`CreditViolation`] where the guest claims to have taken more than it was sent.
    pub(super) fn update(&mut self, buf_alloc: u32, fwd_cnt: u32) -> Result<(), CreditViolation> {
        let step = fwd_cnt.wrapping_sub(self.peer_forwarded);
        if step <= self.in_flight() {
            self.peer_forwarded = fwd_cnt;
            self.peer_buf_alloc = buf_alloc;
            return Ok(());
        }
        // A count that is behind is stale, not wrong: two of the guest's processors may queue their packets in another order
        // than they counted in.
        if step > u32::MAX / 2 {
            return Ok(());
        }
        Err(CreditViolation)
    }

    /// Bytes that may be sent now. Zero also where the guest shrank its promise below what is in flight.
    pub(super) fn available(&self) -> u32 {
        self.peer_buf_alloc.saturating_sub(self.in_flight())
    }

    /// `len` bytes were sent, at most [`Self::available`].
    pub(super) fn send(&mut self, len: u32) {
        debug_assert!(len <= self.available());
        self.sent = self.sent.wrapping_add(len);
    }

    fn in_flight(&self) -> u32 {
        self.sent.wrapping_sub(self.peer_forwarded)
    }
}
