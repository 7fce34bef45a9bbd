//! HTTP/2 within TLS that was opened, where program and server have chosen it: the program speaks with a server here, and a client here
//! with the server, so that no window, table, setting or frame of one is the other's. A request goes on when its head was found good, and
//! its answer comes back masked.
//!
//! What is held is bounded by the windows that are given out and by the number of streams; who asks for more is waited for, or sent away.

mod body;
mod exchange;
mod fields;
mod places;
mod side;
mod tasks;

use std::fmt;
use std::future::Future;
use std::io;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::SendRequest;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::Request;
use rustls::{ClientConnection, ServerConnection};

use super::answers;
use super::session::{guest_failure, server_failure};
use crate::guard::GuardError;
use crate::http::{HttpError, MAX_FIELDS, MAX_HEAD_BYTES};
use crate::relay::{Count, End, IDLE_LIMIT, wait};
use exchange::{Exchange, Outcome};
use side::{Side, Words};
use tasks::{Flag, Tasks};

pub(super) use fields::Masking;
pub use fields::Requests;
pub(super) use places::Places;

/// Most streams of one connection at a time; the least that is recommended (RFC 9113 §6.5.2). More are refused, and may be tried again.
const MAX_STREAMS: u32 = 100;

/// Most streams of all connections of a sandbox at a time, each with its windows.
const MAX_SANDBOX_STREAMS: usize = 512;

/// Bytes of a request that the guest may send before some have gone on: the way from the guest is short.
const GUEST_WINDOW_BYTES: u32 = 64 << 10;

/// Bytes of an answer that the server may send before the guest has taken some: the way to the server may be long.
const SERVER_WINDOW_BYTES: u32 = 256 << 10;

/// Bytes of a stream that wait for TLS to take them.
const SEND_BYTES: usize = 32 << 10;

/// What a field takes in a list of them beside its bytes (RFC 9113 §6.5.2).
const FIELD_BYTES: usize = 32;

/// Largest lists of fields, as HTTP/2 counts them.
const MAX_REQUEST_LIST_BYTES: usize = MAX_HEAD_BYTES + MAX_FIELDS * FIELD_BYTES;
const MAX_ANSWER_LIST_BYTES: usize = answers::MAX_HEAD_BYTES + answers::MAX_FIELDS * FIELD_BYTES;

/// Most requests at once that a guest takes back, or that are refused as there are too many; one more in each period, over all.
const MAX_TAKEN_BACK: u32 = 100;
const TAKEN_BACK_PERIOD: Duration = Duration::from_millis(100);

/// Most streams that are reset for what one side does in them against the protocol, or above their number, for each of the sides, in all.
const MAX_RESETS: usize = 1000;

/// Most reset streams that are remembered, as more may come in them.
const MAX_REMEMBERED: usize = 100;

/// Most answers to one request that are none yet (1xx).
const MAX_INFORMATIONAL: usize = 16;

/// Most bytes of the guest in which no stream has anything: settings, pings, windows. What it has sent into streams that are over already
/// is among them.
const MAX_IDLE_BYTES: usize = MAX_STREAMS as usize * GUEST_WINDOW_BYTES as usize + (1 << 20);

/// One connection.
pub(super) struct Relay<'a> {
    guest: Side<'a, UnixStream>,
    server: Side<'a, TcpStream>,
    downstream: Downstream,
    /// None when it is over.
    upstream: Option<h2::client::Connection<Words, Bytes>>,
    send: SendRequest<Bytes>,
    requests: Requests,
    masking: Masking,
    places: &'a Places,
    exchanges: Tasks<Exchange>,
    /// Set when one of the two connections has to be polled.
    flag: Arc<Flag>,
    /// When all requests that were taken back are past, each of which counts for its period.
    taken_back_until: Instant,
    idle_bytes: usize,
    /// How it ends, where that is known before it does.
    end: Option<End>,
    /// The guest is told that it ends.
    is_closing: bool,
}

/// The connection with the guest.
enum Downstream {
    /// It has not said that it speaks HTTP/2.
    Greeting(Pin<Box<h2::server::Handshake<Words, Bytes>>>),
    Open(Box<h2::server::Connection<Words, Bytes>>),
    Over,
}

impl fmt::Debug for Relay<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Relay").finish_non_exhaustive()
    }
}

impl<'a> Relay<'a> {
    /// Between two ends of TLS, of which the server's is there already.
    ///
    /// # Errors
    /// Where TLS takes nothing.
    pub(super) fn new(
        (guest, downstream): (&'a UnixStream, ServerConnection),
        (server, upstream): (&'a TcpStream, ClientConnection),
        requests: Requests,
        masking: Masking,
        places: &'a Places,
    ) -> io::Result<Self> {
        let guest = Side::new(guest, downstream);
        let server = Side::new(server, upstream);
        let mut greeting = pin!(to_server().handshake(server.words()));
        let Poll::Ready(Ok((send, upstream))) = greeting
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
        else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        let downstream = Box::pin(to_guest().handshake(guest.words()));
        Ok(Self {
            guest,
            server,
            downstream: Downstream::Greeting(downstream),
            upstream: Some(upstream),
            send,
            requests,
            masking,
            places,
            exchanges: Tasks::default(),
            flag: Arc::default(),
            taken_back_until: Instant::now(),
            idle_bytes: 0,
            end: None,
            is_closing: false,
        })
    }

    /// Carries until one side has ended or is at fault; `first` are the guest's first bytes.
    pub(super) fn run(mut self, first: &[u8], count: &mut Count<'_>) -> io::Result<End> {
        if let Err(error) = self.guest.take(first) {
            return Ok(guest_failure(error));
        }
        let mut moved_at = Instant::now();
        loop {
            self.turn();
            let is_over = matches!(self.downstream, Downstream::Over);
            if is_over && !self.guest.holds() {
                break;
            }
            let idle_at = moved_at + IDLE_LIMIT;
            let until = self
                .exchanges
                .next_at()
                .map_or(idle_at, |at| at.min(idle_at));
            let of_guest = self.guest.wanted();
            let mut of_server = self.server.wanted();
            if is_over {
                // What the guest was told last is still written.
                of_server = rustix::event::PollFlags::empty();
            }
            let ready = wait(
                (self.guest.socket(), of_guest),
                (self.server.socket(), of_server),
                until.saturating_duration_since(Instant::now()),
            )?;
            let Some((guest_is, server_is)) = ready else {
                if Instant::now() >= idle_at {
                    return Ok(End::Idle);
                }
                continue;
            };
            if guest_is.is_empty() && server_is.is_empty() {
                break;
            }
            moved_at = Instant::now();
            let moved = match self.guest.serve(guest_is, of_guest) {
                Ok(moved) => moved,
                Err(error) => return Ok(guest_failure(error)),
            };
            count.out += moved as u64;
            self.idle_bytes += moved;
            if !count.take(moved) {
                return Ok(End::Budget);
            }
            let moved = match self.server.serve(server_is, of_server) {
                Ok(moved) => moved,
                Err(error) => return Ok(server_failure(&error)),
            };
            count.inward += moved as u64;
            if !count.take(moved) {
                return Ok(End::Budget);
            }
        }
        self.guest.close(UnixStream::shutdown);
        self.server.close(TcpStream::shutdown);
        Ok(self.end.unwrap_or(End::Closed))
    }

    /// Goes on until nothing goes on without more from a socket.
    fn turn(&mut self) {
        let waker = Waker::from(Arc::clone(&self.flag));
        let mut context = Context::from_waker(&waker);
        let mut outcomes = Vec::new();
        loop {
            self.flag.take();
            self.poll_downstream(&mut context);
            self.poll_upstream(&mut context);
            let has_run = self.exchanges.run(&mut outcomes);
            if has_run {
                self.idle_bytes = 0;
            }
            for outcome in outcomes.drain(..) {
                self.note(outcome);
            }
            if self.idle_bytes > MAX_IDLE_BYTES {
                self.idle_bytes = 0;
                self.refuse(HttpError::Flood("frames that belong to no request"));
            }
            if !has_run && !self.flag.take() {
                return;
            }
        }
    }

    fn poll_downstream(&mut self, context: &mut Context<'_>) {
        loop {
            match &mut self.downstream {
                Downstream::Over => return,
                Downstream::Greeting(greeting) => match greeting.as_mut().poll(context) {
                    Poll::Pending => return,
                    Poll::Ready(Ok(open)) => self.downstream = Downstream::Open(Box::new(open)),
                    Poll::Ready(Err(error)) => return self.guest_is_over(Some(&error)),
                },
                Downstream::Open(open) => match open.poll_accept(context) {
                    Poll::Ready(Some(Ok((request, respond)))) => {
                        if let Err(error) = self.exchange(request, respond) {
                            self.refuse(error);
                        }
                    }
                    Poll::Ready(Some(Err(error))) => return self.guest_is_over(Some(&error)),
                    Poll::Ready(None) => return self.guest_is_over(None),
                    Poll::Pending => {
                        let is_served = self.exchanges.is_empty() && !open.has_streams();
                        if self.upstream.is_some() || !is_served || self.is_closing {
                            return;
                        }
                        // Nobody is there for another request.
                        self.is_closing = true;
                        open.abrupt_shutdown(Reason::NO_ERROR);
                    }
                },
            }
        }
    }

    fn poll_upstream(&mut self, context: &mut Context<'_>) {
        let Some(upstream) = &mut self.upstream else {
            return;
        };
        let Poll::Ready(end) = Pin::new(upstream).poll(context) else {
            return;
        };
        self.upstream = None;
        self.flag.set();
        // What the server says beside may be a secret.
        let reason = end.err().and_then(|error| error.reason());
        if let Some(reason) = reason.filter(|reason| *reason != Reason::NO_ERROR) {
            let end = End::Broken(format!(
                "HTTP/2 with the server fails: {}",
                reason.description()
            ));
            self.end.get_or_insert(end);
        }
    }

    /// Sends a request on, if it is good.
    fn exchange(
        &mut self,
        request: Request<RecvStream>,
        mut respond: SendResponse<Bytes>,
    ) -> Result<(), HttpError> {
        if self.end.is_some() {
            return Ok(());
        }
        let (head, body) = request.into_parts();
        let request = self.requests.take(&head)?;
        let is_whole = body.is_end_stream();
        let place = self.places.take().filter(|_| self.upstream.is_some());
        let sent = place.and_then(|place| {
            // Each with a handle of its own: one waits for the last that it has sent.
            let sent = self.send.clone().send_request(request, is_whole);
            sent.ok().map(|sent| (sent, place))
        });
        let Some(((response, upload), place)) = sent else {
            respond.send_reset(Reason::REFUSED_STREAM);
            self.note(Outcome::TakenBack);
            return Ok(());
        };
        let request = (!is_whole).then_some((body, upload));
        let masking = self.masking.clone();
        self.exchanges
            .add(Exchange::new(request, response, respond, masking, place));
        Ok(())
    }

    fn note(&mut self, outcome: Outcome) {
        // Both have to hear of a reset, or of the end of a stream.
        self.flag.set();
        match outcome {
            Outcome::Over => {}
            Outcome::Refused(error) => self.refuse(error),
            Outcome::TakenBack => {
                let now = Instant::now();
                self.taken_back_until = self.taken_back_until.max(now) + TAKEN_BACK_PERIOD;
                if self.taken_back_until > now + TAKEN_BACK_PERIOD * MAX_TAKEN_BACK {
                    self.refuse(HttpError::Flood("requests that it takes back"));
                }
            }
        }
    }

    /// Ends the connection: nothing more goes to the server, and the guest is told.
    fn refuse(&mut self, error: HttpError) {
        self.end
            .get_or_insert(End::Refused(GuardError::Http(error)));
        self.exchanges.clear();
        self.upstream = None;
        self.is_closing = true;
        self.flag.set();
        match &mut self.downstream {
            Downstream::Open(open) => open.abrupt_shutdown(Reason::PROTOCOL_ERROR),
            other => *other = Downstream::Over,
        }
    }

    fn guest_is_over(&mut self, error: Option<&h2::Error>) {
        self.downstream = Downstream::Over;
        self.exchanges.clear();
        let Some(error) = error.filter(|error| error.is_library()) else {
            return;
        };
        let error = match error.reason() {
            Some(Reason::ENHANCE_YOUR_CALM) => {
                HttpError::Flood("more heads, resets or frames than a connection has")
            }
            Some(reason) => HttpError::Protocol(reason.description().to_owned()),
            None => return,
        };
        self.end
            .get_or_insert(End::Refused(GuardError::Http(error)));
    }
}

/// What the guest is told, and held to.
fn to_guest() -> h2::server::Builder {
    let mut builder = h2::server::Builder::new();
    builder
        .max_concurrent_streams(MAX_STREAMS)
        .initial_window_size(GUEST_WINDOW_BYTES)
        .initial_connection_window_size(MAX_STREAMS * GUEST_WINDOW_BYTES)
        .max_header_list_size(bytes(MAX_REQUEST_LIST_BYTES))
        .max_send_buffer_size(SEND_BYTES)
        .max_pending_accept_reset_streams(MAX_REMEMBERED)
        .max_concurrent_reset_streams(MAX_REMEMBERED)
        .max_local_error_reset_streams(Some(MAX_RESETS));
    builder
}

/// What the server is told, and held to.
fn to_server() -> h2::client::Builder {
    let mut builder = h2::client::Builder::new();
    builder
        .enable_push(false)
        .initial_window_size(SERVER_WINDOW_BYTES)
        .initial_connection_window_size(MAX_STREAMS * SERVER_WINDOW_BYTES)
        .max_header_list_size(bytes(MAX_ANSWER_LIST_BYTES))
        .max_send_buffer_size(SEND_BYTES)
        .max_concurrent_reset_streams(MAX_REMEMBERED)
        .max_local_error_reset_streams(Some(MAX_RESETS));
    builder
}

fn bytes(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
