//! Streams of events.

use crate::errors::of_parts;
use crate::wait::{Owner, SLICE, detached};
use engine::{CancelHandle, Delta, FinishReason, Stream, StreamEvent, StreamNext, TokenInfo};
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time that stands for no limit.
const FOREVER: Duration = Duration::from_secs(1 << 30);
/// Largest number of events of a batch.
const BATCH: usize = 256;

/// A token: id, log-probability, most likely tokens with theirs.
type Token = (u32, Option<f64>, Vec<(u32, f64)>);
/// An event: choice, kind, text, number of a call, id and name of a call, tokens.
pub type Event = (usize, &'static str, String, usize, String, String, Vec<Token>);

/// Stream of the events of a request.
#[pyclass(frozen, module = "iec._iec")]
pub struct NativeStream {
    stream: Mutex<Option<Stream>>,
    cancel: CancelHandle,
    owner: Owner,
}

impl NativeStream {
    /// Takes a stream of the library.
    pub fn new(stream: Stream) -> NativeStream {
        let cancel = stream.cancel_handle();
        NativeStream { stream: Mutex::new(Some(stream)), cancel, owner: Owner::this() }
    }

    /// Waits for events until `until`, at most a slice; returns those that came, and whether the stream has ended. With
    /// `shows`, the first event ends the wait; otherwise events are dropped, and the interpreter is not needed for each.
    fn take(&self, until: Instant, shows: bool) -> engine::Result<(Vec<StreamEvent>, bool)> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(stream) = stream.as_mut() else { return Ok((Vec::new(), true)) };
        let mut events = Vec::new();
        let until = until.min(Instant::now() + SLICE);
        while events.len() < BATCH {
            let time = if events.is_empty() { until.saturating_duration_since(Instant::now()) } else { Duration::ZERO };
            match stream.next_within(time)? {
                StreamNext::Event(event) if shows => events.push(event),
                StreamNext::Event(_) if Instant::now() >= until => break,
                StreamNext::Event(_) => {}
                StreamNext::End => return Ok((events, true)),
                StreamNext::TimedOut => break,
            }
        }
        Ok((events, false))
    }
}

impl NativeStream {
    /// Takes events until there are some, if they are to be shown, the stream ends or `seconds` have passed; returns them,
    /// and whether the stream has ended. A signal cancels the request.
    fn wait_for(&self, py: Python<'_>, seconds: Option<f64>, shows: bool) -> PyResult<(Vec<StreamEvent>, bool)> {
        self.owner.check(py)?;
        let limit = seconds.map_or(FOREVER, |seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default());
        let until = Instant::now() + limit.min(FOREVER);
        loop {
            let (events, is_over) = detached(py, || self.take(until, shows))?;
            if is_over || !events.is_empty() {
                return Ok((events, is_over));
            }
            py.check_signals().inspect_err(|_| self.cancel.cancel())?;
            if Instant::now() >= until {
                return Ok((events, false));
            }
        }
    }
}

impl Drop for NativeStream {
    /// In a forked process, the request is not cancelled: it belongs to the other process.
    fn drop(&mut self) {
        if !self.owner.is_here() {
            std::mem::forget(self.stream.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

#[pymethods]
impl NativeStream {
    /// Waits for the next events, and returns all that are there; an empty list at the end, and None if `seconds` have
    /// passed.
    #[pyo3(signature = (seconds=None))]
    fn next_events(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<Option<Vec<Event>>> {
        let (events, is_over) = self.wait_for(py, seconds, true)?;
        let is_late = events.is_empty() && !is_over;
        Ok((!is_late).then(|| events.into_iter().map(parts).collect()))
    }

    /// Takes events without returning them, until the stream ends or `seconds` have passed; returns whether it has
    /// ended.
    #[pyo3(signature = (seconds=None))]
    fn skip(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<bool> {
        Ok(self.wait_for(py, seconds, false)?.1)
    }

    /// Returns the answer so far as a JSON object, and cancels what has not ended. No further event follows.
    fn answer(&self, py: Python<'_>) -> PyResult<String> {
        self.owner.check(py)?;
        let taken = self.stream.lock().unwrap_or_else(PoisonError::into_inner).take();
        let stream = taken.ok_or_else(|| of_parts(py, 2, "usage", "the answer of this stream was taken", None))?;
        let answer = py.detach(|| stream.into_answer());
        serde_json::to_string(&answer).map_err(|e| of_parts(py, 5, "engine", &e.to_string(), None))
    }

    /// Cancels the request.
    fn cancel(&self) {
        if self.owner.is_here() {
            self.cancel.cancel();
        }
    }
}

fn parts(event: StreamEvent) -> Event {
    let StreamEvent { choice, delta, tokens, .. } = event;
    let tokens = tokens.into_iter().map(|TokenInfo { id, logprob, top, .. }| (id, logprob, top)).collect();
    let none = String::new;
    match delta {
        Delta::Text(text) => (choice, "text", text, 0, none(), none(), tokens),
        Delta::Reasoning(text) => (choice, "reasoning", text, 0, none(), none(), tokens),
        Delta::ToolCall { index, id, name } => (choice, "tool_call", none(), index, id, name, tokens),
        Delta::ToolArguments { index, text } => (choice, "tool_arguments", text, index, none(), none(), tokens),
        Delta::End(reason) => (choice, "end", FinishReason::name(reason).into(), 0, none(), none(), tokens),
        _ => (choice, "other", none(), 0, none(), none(), tokens),
    }
}
