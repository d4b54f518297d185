//! Body of a streamed answer: events, built when the connection can take them.

use crate::api::error::ApiError;
use crate::api::form::{Events, Form};
use crate::host::model::Ticket;
use crate::host::reply::{Refusal, Reply};
use crate::serve::log::Record;
use axum::body::Bytes;
use http_body::Frame;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::{Instant, Sleep};

/// Time without an event after which a comment shows that the connection is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Bytes of events from which a piece of the body is sent.
const PIECE: usize = 16 << 10;

/// Body of a streamed answer. When it is dropped, the request is cancelled unless it has ended.
pub struct StreamBody {
    ticket: Ticket,
    form: Box<dyn Form>,
    /// Number of texts that have not ended.
    texts: usize,
    events: Events,
    record: Record,
    timer: Pin<Box<Sleep>>,
    is_over: bool,
}

impl StreamBody {
    /// Creates the body of an answer of `texts` texts.
    pub fn new(ticket: Ticket, form: Box<dyn Form>, texts: usize, record: Record) -> StreamBody {
        let timer = Box::pin(tokio::time::sleep(KEEP_ALIVE));
        let mut body = StreamBody { ticket, form, texts, events: Events::new(true), record, timer, is_over: false };
        if texts == 0 {
            body.end();
        }
        body
    }

    fn take(&mut self, reply: Option<Reply>) {
        let stopped = || Refusal::Stopped("the engine ended before the request".into());
        let failure = match reply {
            Some(Reply::Queued) => None,
            Some(Reply::Token(token)) => {
                self.form.token(token, &mut self.events);
                None
            }
            Some(Reply::Done(done)) => {
                self.texts -= 1;
                self.record.choice(&done);
                self.form.done(*done, &mut self.events).err()
            }
            Some(Reply::Refused(refusal)) => Some(ApiError::of_refusal(&refusal)),
            None => Some(ApiError::of_refusal(&stopped())),
        };
        match failure {
            Some(error) => {
                self.form.fail(&error, &mut self.events);
                self.record.fail(&error);
                self.is_over = true;
            }
            None if self.texts == 0 => self.end(),
            None => {}
        }
    }

    fn end(&mut self) {
        self.form.end(&mut self.events);
        self.record.finish(self.form.usage(), self.form.finish());
        self.is_over = true;
    }
}

impl http_body::Body for StreamBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let body = &mut *self;
        let mut text = body.events.take();
        while !body.is_over && text.len() < PIECE {
            match body.ticket.inlet.poll(context) {
                Poll::Ready(reply) => {
                    body.take(reply);
                    text += &body.events.take();
                }
                Poll::Pending => break,
            }
        }
        if !text.is_empty() {
            body.timer.as_mut().reset(Instant::now() + KEEP_ALIVE);
            return Poll::Ready(Some(Ok(Frame::data(text.into()))));
        }
        if body.is_over {
            return Poll::Ready(None);
        }
        let Some(comment) = body.form.framing().keep_alive() else { return Poll::Pending };
        ready!(body.timer.as_mut().poll(context));
        body.timer.as_mut().reset(Instant::now() + KEEP_ALIVE);
        Poll::Ready(Some(Ok(Frame::data(comment.into()))))
    }
}
