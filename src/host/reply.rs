//! Messages from the thread that computes to the reader of a request: a thread, or a task of a server.

use super::channel::{self, Receiver, Sender, TimedOut};
use crate::generate::{Completion, Likelihood};
use crate::sched::Rejection;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

/// Number of messages that may wait for a slow reader before its text pauses.
const MOST_EVENTS: usize = 256;
/// Number of bytes of text that may wait for a slow reader before its text pauses.
const MOST_BYTES: usize = 1 << 20;

/// Message about a request. A request has one or several choices, each of which is a text that is generated.
#[derive(Debug)]
pub enum Reply {
    /// The request is refused. No message follows.
    Refused(Refusal),
    /// All choices are queued.
    Queued,
    /// A token of a choice.
    Token(Token),
    /// A choice has ended. No message about it follows.
    Done(Box<Done>),
}

/// Reason why a request is refused.
#[derive(Debug, Clone)]
pub enum Refusal {
    /// A limit of the queue, of the key or of memory; with the seconds after which the request may fit, if known.
    Limit(Rejection, Option<u64>),
    /// The server is shutting down.
    Draining,
    /// The engine stopped or failed.
    Stopped(String),
}

/// A token that was generated.
#[derive(Debug)]
pub struct Token {
    /// Number of the choice.
    pub choice: usize,
    /// Id of the token.
    pub id: u32,
    /// Text that no later token can change.
    pub text: String,
    /// The token's probability and the most likely tokens, if requested.
    pub likely: Option<Likelihood>,
}

/// End of a choice.
#[derive(Debug)]
pub struct Done {
    /// Number of the choice.
    pub choice: usize,
    /// The whole text, its counts and times.
    pub completion: Completion,
    /// Time at which its request came.
    #[cfg(feature = "otel")]
    pub arrived: std::time::Instant,
    /// Time at which the choice first entered the batch.
    #[cfg(feature = "otel")]
    pub admitted: Option<std::time::Instant>,
}

/// Amount of messages that were sent and not received.
#[derive(Debug, Default)]
struct Backlog {
    events: AtomicUsize,
    bytes: AtomicUsize,
}

/// Sending half of the channel of a request.
#[derive(Debug, Clone)]
pub struct Outlet {
    sender: Sender<Reply>,
    backlog: Arc<Backlog>,
}

/// Receiving half of the channel of a request.
#[derive(Debug)]
pub struct Inlet {
    receiver: Receiver<Reply>,
    backlog: Arc<Backlog>,
}

/// Creates the channel of a request.
pub fn channel() -> (Outlet, Inlet) {
    let (sender, receiver) = channel::channel();
    let backlog = Arc::<Backlog>::default();
    (Outlet { sender, backlog: backlog.clone() }, Inlet { receiver, backlog })
}

/// Returns the number of bytes that a message counts for.
fn bytes_of(reply: &Reply) -> usize {
    match reply {
        Reply::Token(token) => token.text.len() + token.likely.as_ref().map_or(0, |(_, top)| size_of_val(&top[..])),
        _ => 0,
    }
}

impl Outlet {
    /// Sends a message. It is dropped if the reader has left.
    pub fn send(&self, reply: Reply) {
        self.backlog.events.fetch_add(1, Ordering::Relaxed);
        self.backlog.bytes.fetch_add(bytes_of(&reply), Ordering::Relaxed);
        self.sender.send(reply);
    }

    /// Returns true if so many messages wait that the text must pause.
    pub fn is_full(&self) -> bool {
        self.backlog.events.load(Ordering::Relaxed) >= MOST_EVENTS
            || self.backlog.bytes.load(Ordering::Relaxed) >= MOST_BYTES
    }

    /// Returns true if so few messages wait that a paused text may go on.
    pub fn is_drained(&self) -> bool {
        self.backlog.events.load(Ordering::Relaxed) <= MOST_EVENTS / 2
            && self.backlog.bytes.load(Ordering::Relaxed) <= MOST_BYTES / 2
    }
}

impl Inlet {
    /// Waits for the next message in a task; `None` if the sender is gone.
    pub async fn receive(&mut self) -> Option<Reply> {
        let reply = self.receiver.receive().await;
        self.count(reply.as_ref());
        reply
    }

    /// Waits for the next message on this thread; `None` if the sender is gone.
    pub fn wait(&mut self) -> Option<Reply> {
        let reply = self.receiver.wait();
        self.count(reply.as_ref());
        reply
    }

    /// Waits for the next message until `time` has passed.
    ///
    /// # Errors
    /// No message came in this time.
    pub fn wait_for(&mut self, time: Duration) -> Result<Option<Reply>, TimedOut> {
        let reply = self.receiver.wait_for(time)?;
        self.count(reply.as_ref());
        Ok(reply)
    }

    /// Takes the next message if there is one.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Reply>> {
        let polled = self.receiver.poll(context);
        if let Poll::Ready(reply) = &polled {
            self.count(reply.as_ref());
        }
        polled
    }

    fn count(&self, reply: Option<&Reply>) {
        if let Some(reply) = reply {
            self.backlog.events.fetch_sub(1, Ordering::Relaxed);
            self.backlog.bytes.fetch_sub(bytes_of(reply), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(bytes: usize) -> Reply {
        Reply::Token(Token { choice: 0, id: 1, text: "x".repeat(bytes), likely: None })
    }

    #[test]
    fn a_reader_that_takes_nothing_fills_the_channel_and_drains_it_later() {
        for (count, bytes) in [(MOST_EVENTS, 1), (2, MOST_BYTES / 2)] {
            let (outlet, mut inlet) = channel();
            (1..count).for_each(|_| outlet.send(token(bytes)));
            assert!(!outlet.is_full());
            outlet.send(token(bytes));
            assert!(outlet.is_full() && !outlet.is_drained());
            let mut context = Context::from_waker(std::task::Waker::noop());
            for _ in 0..count.div_ceil(2) {
                assert!(matches!(inlet.poll(&mut context), Poll::Ready(Some(Reply::Token(_)))));
            }
            assert!(outlet.is_drained() && !outlet.is_full());
        }
    }

    #[test]
    fn messages_to_a_reader_that_left_are_dropped() {
        let (outlet, inlet) = channel();
        drop(inlet);
        outlet.send(Reply::Queued);
    }
}
