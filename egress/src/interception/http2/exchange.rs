//! One request and its answer, each as it comes: either may go on when the other is over.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::Response;

use super::MAX_INFORMATIONAL;
use super::body::{Body, Fault, Way};
use super::fields::Masking;
use super::places::Place;
use super::tasks::{Task, Timer};
use crate::http::HttpError;

/// What has come of a request.
#[derive(Debug)]
pub(super) enum Outcome {
    /// It was answered, or the server has given it up.
    Over,
    /// The guest has taken it back.
    TakenBack,
    /// It must not go on.
    Refused(HttpError),
}

/// A request on its way, and its answer.
pub(super) struct Exchange {
    /// The request's body; none where all of it has gone on, or no more of it is wanted.
    request: Option<Body>,
    answer: Answer,
    masking: Masking,
    timer: Timer,
    _place: Place,
}

enum Answer {
    Awaited {
        response: ResponseFuture,
        respond: SendResponse<Bytes>,
        /// Answers that were none yet.
        informational: usize,
    },
    Body(Body),
    Over,
}

/// The guest no longer wants it.
struct TakenBack(Reason);

impl Exchange {
    pub(super) fn new(
        request: Option<(RecvStream, h2::SendStream<Bytes>)>,
        response: ResponseFuture,
        respond: SendResponse<Bytes>,
        masking: Masking,
        place: Place,
    ) -> Self {
        let body = |(from, to)| Body::new(from, to, Way::Out, Timer::default());
        Self {
            request: request.map(body),
            answer: Answer::Awaited {
                response,
                respond,
                informational: 0,
            },
            masking,
            timer: Timer::default(),
            _place: place,
        }
    }

    /// The request's body. One that the server takes no more of is no failure: it may have answered.
    fn poll_request(&mut self, context: &mut Context<'_>) -> Result<(), Outcome> {
        let Some(body) = &mut self.request else {
            return Ok(());
        };
        match body.poll(context) {
            Poll::Pending => Ok(()),
            Poll::Ready(Ok(()) | Err(Fault::Taker(_))) => {
                self.request = None;
                Ok(())
            }
            Poll::Ready(Err(Fault::Sender(reason))) => Err(self.taken_back(TakenBack(reason))),
            Poll::Ready(Err(Fault::Refused(error))) => Err(Outcome::Refused(error)),
        }
    }

    fn poll_answer(&mut self, context: &mut Context<'_>) -> Result<(), TakenBack> {
        if let Answer::Awaited {
            response,
            respond,
            informational,
        } = &mut self.answer
        {
            if let Poll::Ready(reason) = respond.poll_reset(context) {
                return Err(TakenBack(reason.unwrap_or(Reason::CANCEL)));
            }
            while let Poll::Ready(Some(Ok(early))) = response.poll_informational(context) {
                *informational += 1;
                if *informational > MAX_INFORMATIONAL {
                    respond.send_reset(Reason::ENHANCE_YOUR_CALM);
                    self.answer = Answer::Over;
                    return Ok(());
                }
                // One more may follow in any case.
                let _ = respond.send_informational(masked(early, &self.masking));
            }
            match Pin::new(response).poll(context) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Err(error)) => {
                    respond.send_reset(error.reason().unwrap_or(Reason::INTERNAL_ERROR));
                    self.answer = Answer::Over;
                    return Ok(());
                }
                Poll::Ready(Ok(response)) => {
                    let (head, body) = response.into_parts();
                    let left = length(&head.headers);
                    let head = masked(Response::from_parts(head, ()), &self.masking);
                    let is_whole = body.is_end_stream();
                    let Ok(send) = respond.send_response(head, is_whole) else {
                        return Err(TakenBack(Reason::CANCEL));
                    };
                    if is_whole {
                        self.answer = Answer::Over;
                        return Ok(());
                    }
                    let masks = Box::new(self.masking.masks());
                    let way = Way::Inward(masks, self.masking.clone(), left);
                    self.answer = Answer::Body(Body::new(body, send, way, self.timer.clone()));
                }
            }
        }
        if let Answer::Body(body) = &mut self.answer {
            match body.poll(context) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Err(Fault::Taker(reason))) => return Err(TakenBack(reason)),
                Poll::Ready(Err(Fault::Sender(reason))) => body.reset(reason),
                // Nothing of an answer is refused.
                Poll::Ready(Ok(()) | Err(Fault::Refused(_))) => {}
            }
            self.answer = Answer::Over;
        }
        Ok(())
    }

    /// The server is told, as far as it still listens.
    fn taken_back(&mut self, TakenBack(reason): TakenBack) -> Outcome {
        if let Some(body) = &mut self.request {
            body.reset(reason);
        }
        Outcome::TakenBack
    }
}

impl Task for Exchange {
    type Output = Outcome;

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Outcome> {
        if let Err(outcome) = self.poll_request(context) {
            return Poll::Ready(outcome);
        }
        if let Err(taken_back) = self.poll_answer(context) {
            return Poll::Ready(self.taken_back(taken_back));
        }
        match (&self.request, &self.answer) {
            (None, Answer::Over) => Poll::Ready(Outcome::Over),
            _ => Poll::Pending,
        }
    }

    fn timer(&self) -> &Timer {
        &self.timer
    }
}

fn masked(head: Response<()>, masking: &Masking) -> Response<()> {
    let (mut head, ()) = head.into_parts();
    head.headers = masking.fields(head.headers);
    head.extensions.clear();
    Response::from_parts(head, ())
}

/// The most bytes that can come.
fn length(fields: &http::HeaderMap) -> u64 {
    let length = fields.get(http::header::CONTENT_LENGTH);
    let text = length.and_then(|length| length.to_str().ok());
    text.and_then(|text| text.parse().ok()).unwrap_or(u64::MAX)
}
