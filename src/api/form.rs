//! Forms of answers: each endpoint builds the events of a stream and the body of a whole answer from the same state.

use super::answer::Usage;
use super::error::{ApiError, ApiResult};
use crate::host::reply::{Done, Token};
use serde_json::Value;

/// Way in which the events of a stream follow one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// Server-sent events.
    Events,
    /// Lines of JSON.
    Lines,
}

impl Framing {
    /// Returns the media type of a stream.
    pub fn media_type(self) -> &'static str {
        match self {
            Framing::Events => "text/event-stream; charset=utf-8",
            Framing::Lines => "application/x-ndjson",
        }
    }

    /// Returns the text that keeps a connection alive on which nothing happens; `None` if readers would take any text
    /// for an event.
    pub fn keep_alive(self) -> Option<&'static str> {
        match self {
            Framing::Events => Some(": keep-alive\n\n"),
            Framing::Lines => None,
        }
    }
}

/// Events of a stream, as text.
#[derive(Debug)]
pub struct Events {
    text: String,
    /// Whether the answer is streamed; events are not built otherwise.
    is_stream: bool,
}

impl Events {
    /// Creates a stream without events. Events of an answer that is not streamed are dropped.
    pub fn new(is_stream: bool) -> Events {
        Events { text: String::new(), is_stream }
    }

    /// Adds an event with a JSON object.
    pub fn data(&mut self, value: impl FnOnce() -> Value) {
        if self.is_stream {
            self.text += &format!("data: {}\n\n", value());
        }
    }

    /// Adds a line with a JSON object.
    pub fn line(&mut self, value: impl FnOnce() -> Value) {
        if self.is_stream {
            self.text += &format!("{}\n", value());
        }
    }

    /// Adds an event with a name and a JSON object.
    pub fn named(&mut self, name: &str, value: impl FnOnce() -> Value) {
        if self.is_stream {
            self.text += &format!("event: {name}\ndata: {}\n\n", value());
        }
    }

    /// Adds the event that ends the streams of OpenAI.
    pub fn done(&mut self) {
        if self.is_stream {
            self.text += "data: [DONE]\n\n";
        }
    }

    /// Takes the text of the events.
    pub fn take(&mut self) -> String {
        std::mem::take(&mut self.text)
    }
}

/// Form of the answer of an endpoint.
pub trait Form: Send {
    /// Returns the way in which the events of the stream follow one another.
    fn framing(&self) -> Framing {
        Framing::Events
    }

    /// Takes a token.
    fn token(&mut self, token: Token, events: &mut Events);

    /// Takes the end of a text.
    ///
    /// # Errors
    /// The text did not reach its end.
    fn done(&mut self, done: Done, events: &mut Events) -> ApiResult<()>;

    /// Ends the stream after all texts have ended.
    fn end(&mut self, events: &mut Events);

    /// Ends the stream with an error.
    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        events.data(|| error.to_json());
        events.done();
    }

    /// Returns the whole answer.
    fn body(&mut self) -> Value;

    /// Returns the number of tokens so far.
    fn usage(&self) -> Usage;

    /// Returns the reason why the first text ended, for the log.
    fn finish(&self) -> &'static str;
}
