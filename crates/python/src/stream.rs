//! Streams of events.

use crate::errors::{detached, of_parts};
use engine::{CancelHandle, Delta, FinishReason, Stream, StreamEvent, TokenInfo};
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Longest time between two looks for signals.
const SLICE: Duration = Duration::from_millis(50);
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
}

impl NativeStream {
    /// Takes a stream of the library.
    pub fn new(stream: Stream) -> NativeStream {
        let cancel = stream.cancel_handle();
        NativeStream { stream: Mutex::new(Some(stream)), cancel }
    }

    /// Waits for events until `until`, at most a slice; returns those that came, and whether the stream has ended.
    fn take(&self, until: Instant) -> engine::Result<(Vec<StreamEvent>, bool)> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(stream) = stream.as_mut() else { return Ok((Vec::new(), true)) };
        let mut events = Vec::new();
        let mut time = SLICE.min(until.saturating_duration_since(Instant::now()));
        while events.len() < BATCH {
            match stream.next_within(time)? {
                Some(Some(event)) => events.push(event),
                Some(None) => return Ok((events, true)),
                None => break,
            }
            time = Duration::ZERO;
        }
        Ok((events, false))
    }
}

#[pymethods]
impl NativeStream {
    /// Waits for the next events, and returns all that are there; an empty list at the end, and None if `seconds` have
    /// passed.
    #[pyo3(signature = (seconds=None))]
    fn next_events(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<Option<Vec<Event>>> {
        let begin = Instant::now();
        let limit = seconds.map(|seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default());
        loop {
            let until = limit.map_or(begin + Duration::from_secs(1 << 30), |limit| begin + limit);
            let (events, is_over) = detached(py, || self.take(until))?;
            if !events.is_empty() || is_over {
                return Ok(Some(events.into_iter().map(parts).collect()));
            }
            py.check_signals().inspect_err(|_| self.cancel.cancel())?;
            if Instant::now() >= until {
                return Ok(None);
            }
        }
    }

    /// Returns the answer so far as a JSON object, and cancels what has not ended. No further event follows.
    fn answer(&self, py: Python<'_>) -> PyResult<String> {
        let taken = self.stream.lock().unwrap_or_else(PoisonError::into_inner).take();
        let stream = taken.ok_or_else(|| of_parts(py, 2, "usage", "the answer of this stream was taken", None))?;
        let answer = py.detach(|| stream.into_answer());
        serde_json::to_string(&answer).map_err(|e| of_parts(py, 5, "engine", &e.to_string(), None))
    }

    /// Cancels the request.
    fn cancel(&self) {
        self.cancel.cancel();
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
