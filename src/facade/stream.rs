//! Events of an answer while it is generated.

use super::answer::{Answer, Choice, FinishReason, TokenInfo, ToolUse, UsageCounts};
use crate::api::answer::{best_choices, failure};
use crate::api::error::ApiError;
use crate::error::Result;
use crate::host::channel::TimedOut;
use crate::host::model::{Canceller, Ticket};
use crate::host::reply::{Done, Refusal, Reply, Token};
use crate::tools::{OutputEvent, OutputParser};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

/// An event of a stream.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StreamEvent {
    /// Number of the choice.
    pub choice: usize,
    /// Change of the choice.
    pub delta: Delta,
    /// Tokens whose text the event shows.
    pub tokens: Vec<TokenInfo>,
}

/// Change of a choice.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Delta {
    /// New text: whole characters, and nothing that a stop text may begin with.
    Text(String),
    /// New reasoning before the answer to a conversation.
    Reasoning(String),
    /// A call of a tool begins.
    ToolCall {
        /// Number of the call in the choice.
        index: usize,
        /// Id to which the result refers.
        id: String,
        /// Name of the function.
        name: String,
    },
    /// More of the arguments of a call.
    ToolArguments {
        /// Number of the call in the choice.
        index: usize,
        /// Piece of the JSON text.
        text: String,
    },
    /// The choice has ended.
    End(FinishReason),
}

/// Result of a wait for the next event.
#[derive(Debug, Clone, PartialEq)]
pub enum StreamNext {
    /// An event.
    Event(StreamEvent),
    /// The stream has ended.
    End,
    /// No event came in this time.
    TimedOut,
}

/// Stream of the events of a request: an iterator, and by [`Stream::poll_next`] a source for tasks of any asynchronous
/// runtime. When it is dropped, the request is cancelled.
pub struct Stream {
    ticket: Ticket,
    texts: Vec<TextState>,
    events: VecDeque<StreamEvent>,
    /// Choices that have not ended.
    left: usize,
    answer: Answer,
    stop_ids: Vec<u32>,
    /// Number of texts of each prompt that are generated, and that are kept.
    best: (usize, usize),
    is_cancelled: Arc<AtomicBool>,
    is_over: bool,
}

/// State of a choice.
struct TextState {
    /// Divides the text of an answer to a conversation.
    parser: Option<OutputParser>,
    /// Tokens whose text is not shown yet.
    waiting: Vec<TokenInfo>,
}

/// Handle that cancels a request from another thread.
#[derive(Debug, Clone)]
pub struct CancelHandle {
    canceller: Canceller,
    is_cancelled: Arc<AtomicBool>,
}

impl CancelHandle {
    /// Cancels the request. Choices that have not ended end with [`FinishReason::Cancelled`].
    pub fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        self.canceller.cancel();
    }
}

/// Parts of a prepared request that the stream needs.
pub(super) struct Started {
    pub ticket: Ticket,
    /// One parser per text of an answer to a conversation; none for other texts.
    pub parsers: Vec<OutputParser>,
    /// Beginning of each text: that of its prompt with `echo`.
    pub beginnings: Vec<String>,
    pub texts: usize,
    pub prompt_tokens: usize,
    pub stop_ids: Vec<u32>,
    pub best: (usize, usize),
    pub seed: u64,
    pub ignored: Vec<String>,
}

impl Stream {
    pub(super) fn new(started: Started) -> Stream {
        let Started { ticket, parsers, beginnings, texts, prompt_tokens, stop_ids, best, seed, ignored } = started;
        let mut parsers = parsers.into_iter();
        let state = |_| TextState { parser: parsers.next(), waiting: Vec::new() };
        let usage = UsageCounts { prompt_tokens, ..UsageCounts::default() };
        let choices = (0..texts).map(|index| Choice { index, ..Choice::default() }).collect();
        let mut stream = Stream {
            ticket,
            texts: (0..texts).map(state).collect(),
            events: VecDeque::new(),
            left: texts,
            answer: Answer { choices, usage, seed, ignored },
            stop_ids,
            best,
            is_cancelled: Arc::default(),
            is_over: false,
        };
        for (choice, text) in beginnings.into_iter().enumerate() {
            stream.add(choice, Delta::Text(text));
        }
        stream
    }

    /// Returns a handle that cancels the request from another thread.
    pub fn cancel_handle(&self) -> CancelHandle {
        CancelHandle { canceller: self.ticket.canceller(), is_cancelled: self.is_cancelled.clone() }
    }

    /// Waits for the next event until `time` has passed.
    ///
    /// # Errors
    /// The request was refused or failed. No event follows.
    pub fn next_within(&mut self, time: Duration) -> Result<StreamNext> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(StreamNext::Event(event));
            }
            if self.is_over {
                return Ok(StreamNext::End);
            }
            match self.ticket.inlet.wait_for(time) {
                Ok(reply) => self.take(reply)?,
                Err(TimedOut) => return Ok(StreamNext::TimedOut),
            }
        }
    }

    /// Returns the next event if there is one; otherwise the task of `context` is woken by the next one.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<StreamEvent>>> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            if self.is_over {
                return Poll::Ready(None);
            }
            let reply = ready!(self.ticket.inlet.poll(context));
            if let Err(e) = self.take(reply) {
                return Poll::Ready(Some(Err(e)));
            }
        }
    }

    /// Reads all further events, and returns the whole answer.
    ///
    /// # Errors
    /// The request was refused or failed.
    pub fn finish(mut self) -> Result<Answer> {
        self.by_ref().try_for_each(|event| event.map(drop))?;
        Ok(self.into_answer())
    }

    /// Returns the answer so far, and cancels what has not ended.
    pub fn into_answer(mut self) -> Answer {
        let mut answer = std::mem::replace(
            &mut self.answer,
            Answer { choices: Vec::new(), usage: UsageCounts::default(), seed: 0, ignored: Vec::new() },
        );
        let (generated, kept) = self.best;
        if generated > kept {
            let means: Vec<f64> = answer.choices.iter().map(Choice::mean_logprob).collect();
            let best = best_choices(&means, generated, kept);
            answer.choices = best.into_iter().map(|at| answer.choices[at].clone()).collect();
            answer.choices.iter_mut().enumerate().for_each(|(index, choice)| choice.index = index);
        }
        answer
    }

    fn take(&mut self, reply: Option<Reply>) -> Result<()> {
        let taken = match reply {
            Some(Reply::Queued) => Ok(()),
            Some(Reply::Token(token)) => {
                self.token(token);
                Ok(())
            }
            Some(Reply::Done(done)) => self.done(*done),
            Some(Reply::Refused(refusal)) => Err(ApiError::of_refusal(&refusal).into()),
            None if self.is_cancelled.load(Ordering::Relaxed) => {
                self.cancel_rest();
                Ok(())
            }
            None => {
                let refusal = Refusal::Stopped("the engine ended before the request".into());
                Err(ApiError::of_refusal(&refusal).into())
            }
        };
        self.is_over |= taken.is_err() || self.left == 0;
        taken
    }

    fn token(&mut self, token: Token) {
        let Token { choice, id, text, likely } = token;
        let info = TokenInfo::of(id, likely.as_ref());
        self.answer.usage.completion_tokens += 1;
        self.answer.choices[choice].tokens.push(info.clone());
        let state = &mut self.texts[choice];
        state.waiting.push(info);
        let mut pieces = Vec::new();
        match &mut state.parser {
            Some(parser) => parser.push(id, &text, &mut pieces),
            None if text.is_empty() => {}
            None => pieces.push(OutputEvent::Content(text)),
        }
        pieces.into_iter().for_each(|piece| self.add(choice, delta_of(piece)));
    }

    fn done(&mut self, done: Done) -> Result<()> {
        let Done { choice, completion, .. } = done;
        if let Some(error) = failure(&completion) {
            return Err(error.into());
        }
        let mut pieces = Vec::new();
        if let Some(parser) = &mut self.texts[choice].parser {
            let is_cut = crate::api::answer::finish_reason(completion.finish) == "length";
            parser.finish(is_cut, &mut pieces);
        }
        pieces.into_iter().for_each(|piece| self.add(choice, delta_of(piece)));
        if choice.is_multiple_of(self.best.0) {
            self.answer.usage.cached_tokens += completion.reused_tokens;
        }
        self.answer.choices[choice].end(&completion, &self.stop_ids);
        self.end(choice);
        Ok(())
    }

    /// Adds an event with the change of a choice, and changes the answer in the same way.
    fn add(&mut self, choice: usize, delta: Delta) {
        let text = &mut self.answer.choices[choice];
        match &delta {
            Delta::Text(new) => text.text += new,
            Delta::Reasoning(new) => text.reasoning += new,
            Delta::ToolCall { id, name, .. } => {
                text.tool_calls.push(ToolUse { id: id.clone(), name: name.clone(), arguments: String::new() });
            }
            Delta::ToolArguments { index, text: new } => {
                text.tool_calls.get_mut(*index).into_iter().for_each(|call| call.arguments += new);
            }
            Delta::End(_) => {}
        }
        let tokens = std::mem::take(&mut self.texts[choice].waiting);
        self.events.push_back(StreamEvent { choice, delta, tokens });
    }

    fn end(&mut self, choice: usize) {
        if let Some(reason) = self.answer.choices[choice].finish {
            self.add(choice, Delta::End(reason));
        }
        self.left -= 1;
    }

    fn cancel_rest(&mut self) {
        for choice in 0..self.texts.len() {
            if self.answer.choices[choice].finish.is_none() {
                self.answer.choices[choice].finish = Some(FinishReason::Cancelled);
                self.end(choice);
            }
        }
    }
}

impl Iterator for Stream {
    type Item = Result<StreamEvent>;

    fn next(&mut self) -> Option<Result<StreamEvent>> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Some(Ok(event));
            }
            if self.is_over {
                return None;
            }
            let reply = self.ticket.inlet.wait();
            if let Err(e) = self.take(reply) {
                return Some(Err(e));
            }
        }
    }
}

fn delta_of(piece: OutputEvent) -> Delta {
    match piece {
        OutputEvent::Content(text) => Delta::Text(text),
        OutputEvent::Reasoning(text) => Delta::Reasoning(text),
        OutputEvent::CallBegin { index, id, name } => Delta::ToolCall { index, id, name },
        OutputEvent::CallArguments { index, text } => Delta::ToolArguments { index, text },
    }
}
