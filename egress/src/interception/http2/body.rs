//! One body on its way, from the side that sends it to the side that takes it, with its trailers: as fast as it is taken, and never more
//! of it held than a window has.

use std::fmt;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use h2::{Reason, RecvStream, SendStream};
use http::HeaderMap;

use super::super::mask::{Masks, PAUSE};
use super::fields::{Masking, trailers};
use super::tasks::Timer;
use crate::http::HttpError;

/// Why a body does not come whole.
#[derive(Debug)]
pub(super) enum Fault {
    /// The side that sends it has given up, for this reason.
    Sender(Reason),
    /// The side that takes it takes no more, for this reason.
    Taker(Reason),
    /// It has what it must not have.
    Refused(HttpError),
}

/// What becomes of a body's bytes.
pub(super) enum Way {
    /// From the guest: they go on as they are.
    Out,
    /// From the server: secrets in them are masked. So many can still come.
    Inward(Box<Masks>, Masking, u64),
}

/// One body.
pub(super) struct Body {
    from: RecvStream,
    to: SendStream<Bytes>,
    way: Way,
    timer: Timer,
    /// What may be sent on.
    held: Vec<u8>,
    /// Bytes that came and for which the sender has no new window yet.
    owed: usize,
    /// All has come; with these trailers, or with none.
    end: Option<Option<HeaderMap>>,
}

impl fmt::Debug for Body {
    /// Nothing of what is held.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Body").finish_non_exhaustive()
    }
}

impl Body {
    pub(super) fn new(from: RecvStream, to: SendStream<Bytes>, way: Way, timer: Timer) -> Self {
        Self {
            from,
            to,
            way,
            timer,
            held: Vec::new(),
            owed: 0,
            end: None,
        }
    }

    /// Tells the side that takes it that the rest does not come.
    pub(super) fn reset(&mut self, reason: Reason) {
        self.to.send_reset(reason);
    }

    /// Carries it as far as it goes now; ready when it is over.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        self.read(context)?;
        if self.send(context)?.is_ready() {
            self.timer.set(None);
            return Poll::Ready(Ok(()));
        }
        // Also while there is nothing to send.
        if let Poll::Ready(end) = self.to.poll_reset(context) {
            return Poll::Ready(Err(Fault::Taker(end.unwrap_or(Reason::CANCEL))));
        }
        Poll::Pending
    }

    /// Takes all that has come: what is left with the protocol is kept frame by frame, which may be many and small.
    fn read(&mut self, context: &mut Context<'_>) -> Result<(), Fault> {
        while self.end.is_none() {
            match self.from.poll_data(context) {
                Poll::Pending => break,
                Poll::Ready(Some(Ok(bytes))) => {
                    self.owed += bytes.len();
                    match &mut self.way {
                        Way::Out => self.held.extend_from_slice(&bytes),
                        Way::Inward(masks, _, left) => {
                            let count = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
                            *left = left.saturating_sub(count);
                            masks.take(&bytes, *left, &mut self.held);
                            self.timer.set(None);
                        }
                    }
                }
                Poll::Ready(Some(Err(error))) => return Err(sender(&error)),
                Poll::Ready(None) => match self.from.poll_trailers(context) {
                    Poll::Pending => break,
                    Poll::Ready(Ok(found)) => self.finish(found)?,
                    Poll::Ready(Err(error)) => return Err(sender(&error)),
                },
            }
        }
        let is_due = self.timer.at().is_some_and(|at| at <= Instant::now());
        if let (Way::Inward(masks, ..), true) = (&mut self.way, is_due) {
            masks.pause(&mut self.held);
            self.timer.set(None);
        }
        Ok(())
    }

    fn finish(&mut self, found: Option<HeaderMap>) -> Result<(), Fault> {
        let found = match &mut self.way {
            Way::Out => found.map(trailers).transpose().map_err(Fault::Refused)?,
            Way::Inward(masks, masking, _) => {
                masks.end(&mut self.held);
                found.map(|found| masking.fields(found))
            }
        };
        self.end = Some(found);
        Ok(())
    }

    /// Sends what is taken; ready when that was all.
    fn send(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Fault>> {
        let failed = |error: h2::Error| Fault::Taker(error.reason().unwrap_or(Reason::CANCEL));
        while !self.held.is_empty() {
            self.to.reserve_capacity(self.held.len());
            let count = self.to.capacity().min(self.held.len());
            if count == 0 {
                match ready!(self.to.poll_capacity(context)) {
                    Some(Ok(_)) => continue,
                    Some(Err(error)) => return Poll::Ready(Err(failed(error))),
                    None => return Poll::Ready(Err(Fault::Taker(Reason::CANCEL))),
                }
            }
            let bytes = Bytes::copy_from_slice(self.held.get(..count).unwrap_or_default());
            self.held.drain(..count);
            let is_last = self.held.is_empty() && matches!(self.end, Some(None));
            self.to.send_data(bytes, is_last).map_err(failed)?;
            self.release(count.min(self.owed));
            if is_last {
                return Poll::Ready(Ok(()));
            }
        }
        // What is kept back as the beginning of a secret needs more to come.
        self.release(self.owed);
        match &mut self.end {
            None => {
                self.wait_for_rest();
                Poll::Pending
            }
            Some(None) => Poll::Ready(self.to.send_data(Bytes::new(), true).map_err(failed)),
            Some(Some(trailers)) => {
                let trailers = std::mem::take(trailers);
                Poll::Ready(self.to.send_trailers(trailers).map_err(failed))
            }
        }
    }

    /// Where all that may pass was sent, and something is kept back that a pause lets through, the pause has begun.
    fn wait_for_rest(&mut self) {
        if let Way::Inward(masks, ..) = &self.way
            && masks.waits()
            && self.timer.at().is_none()
        {
            self.timer.set(Some(Instant::now() + PAUSE));
        }
    }

    /// Lets the sender send so many bytes more.
    fn release(&mut self, count: usize) {
        self.owed -= count;
        // A stream that is over needs no window.
        let _ = self.from.flow_control().release_capacity(count);
    }
}

fn sender(error: &h2::Error) -> Fault {
    Fault::Sender(error.reason().unwrap_or(Reason::INTERNAL_ERROR))
}
