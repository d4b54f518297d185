//! Results of a simulation.

use super::measure::{Histogram, Series};
use super::run::{Live, is_complete};
use crate::sched::{Event, Finish, KeyId, Micros, Rejection};
use std::collections::BTreeMap;

/// Results of one key.
#[derive(Debug, Clone, Default)]
pub struct KeyResults {
    /// Requests that arrived.
    pub requests: u64,
    /// Requests that got their whole answer.
    pub completed: u64,
    /// Requests that were refused at arrival.
    pub refused: u64,
    /// Tokens of prompts and answers of admitted requests, without cached ones.
    pub tokens: u64,
    /// Times from arrival to admission.
    pub wait: Histogram,
    /// Times from arrival to the first token.
    pub first_token: Histogram,
}

/// Names of the series of [`Results::series`].
pub const SERIES: [&str; 5] = ["waiting", "running", "free pages", "used pages", "cached pages"];

/// Results of a simulation.
#[derive(Debug, Clone)]
pub struct Results {
    /// Requests that arrived.
    pub requests: u64,
    /// Numbers of requests by reason of their end: `stop`, `length`, `cancelled`, `deadline`, `queue_timeout`, or the
    /// reason of the refusal.
    pub ends: BTreeMap<&'static str, u64>,
    /// Simulated seconds until the last request ended.
    pub seconds: f64,
    /// Simulated seconds in which a step was computed.
    pub busy: f64,
    /// Steps.
    pub steps: u64,
    /// Preemptions.
    pub preemptions: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Prompt tokens that came from the prefix cache.
    pub cached: u64,
    /// Prompt tokens that were computed, including those computed again before the first token.
    pub computed: u64,
    /// Tokens of answers.
    pub generated: u64,
    /// Largest number of waiting requests.
    pub most_waiting: usize,
    /// Times from arrival to admission.
    pub wait: Histogram,
    /// Times from arrival to the first token.
    pub first_token: Histogram,
    /// Times between tokens of an answer.
    pub gap: Histogram,
    /// Times from arrival to the end of complete answers.
    pub latency: Histogram,
    /// Means over time of the quantities in [`SERIES`].
    pub series: Series<5>,
    /// Results by key.
    pub keys: Vec<KeyResults>,
    /// Hash of all events with their times: equal for equal traces.
    pub trace: u64,
}

impl Results {
    /// Creates empty results.
    pub(super) fn new(keys: usize) -> Results {
        Results {
            requests: 0,
            ends: BTreeMap::new(),
            seconds: 0.0,
            busy: 0.0,
            steps: 0,
            preemptions: 0,
            prompt_tokens: 0,
            cached: 0,
            computed: 0,
            generated: 0,
            most_waiting: 0,
            wait: Histogram::default(),
            first_token: Histogram::default(),
            gap: Histogram::default(),
            latency: Histogram::default(),
            series: Series::new(),
            keys: vec![KeyResults::default(); keys],
            trace: 0xCBF2_9CE4_8422_2325,
        }
    }

    /// Counts the requests that got their whole answer.
    pub fn completed(&self) -> u64 {
        ["stop", "length"].iter().filter_map(|end| self.ends.get(end)).sum()
    }

    fn hash(&mut self, values: [u64; 3]) {
        for value in values {
            self.trace = (self.trace ^ value).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(29);
        }
    }

    /// Adds an event to the hash of the trace.
    pub(super) fn mix(&mut self, now: Micros, event: Event) {
        self.hash(match event {
            Event::Admitted { id, cached } => [now, id, u64::from(cached) << 8],
            Event::Reused { id, cached } => [now, id, u64::from(cached) << 8 | 0xFE],
            Event::Preempted(id) => [now, id, 1],
            Event::Ended { id, finish } => [now, id, 2 + finish as u64],
        });
    }

    pub(super) fn refuse(&mut self, now: Micros, key: KeyId, rejection: Rejection) {
        let name = match rejection {
            Rejection::QueueFull => "queue_full",
            Rejection::QueueTokens => "queue_tokens",
            Rejection::Context => "context",
            Rejection::UnknownKey => "unknown_key",
            Rejection::MaxTokens => "max_tokens",
            Rejection::Concurrent => "concurrent",
            Rejection::Rate(_) => "rate",
        };
        *self.ends.entry(name).or_default() += 1;
        self.keys[key].refused += 1;
        self.hash([now, key as u64, 0xFF]);
    }

    pub(super) fn admit(&mut self, now: Micros, live: &mut Live, cached: u32) {
        live.cached = cached;
        if std::mem::replace(&mut live.admitted, true) {
            return;
        }
        let (time, request) = (now - live.arrival.time, &live.arrival.request);
        self.wait.add(time);
        self.prompt_tokens += u64::from(request.prompt);
        self.cached += u64::from(cached);
        let key = &mut self.keys[request.key];
        key.wait.add(time);
        key.tokens += u64::from(request.prompt - cached.min(request.prompt));
    }

    /// Replaces the number of cached tokens of a request by `cached`.
    pub(super) fn reuse(&mut self, live: &mut Live, cached: u32) {
        let more = cached - std::mem::replace(&mut live.cached, cached);
        if live.generated == 0 {
            self.cached += u64::from(more);
            let key = &mut self.keys[live.arrival.request.key];
            key.tokens = key.tokens.saturating_sub(u64::from(more));
        }
    }

    pub(super) fn token(&mut self, now: Micros, live: &mut Live, tokens: u32) {
        let key = &mut self.keys[live.arrival.request.key];
        if live.generated == 0 {
            self.first_token.add(now - live.arrival.time);
            key.first_token.add(now - live.arrival.time);
        } else {
            self.gap.add(now - live.last);
        }
        live.last = now;
        live.generated += tokens;
        self.generated += u64::from(tokens);
        key.tokens += u64::from(tokens);
    }

    pub(super) fn end(&mut self, now: Micros, live: &Live, finish: Finish) {
        let name = match finish {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Cancelled => "cancelled",
            Finish::Deadline => "deadline",
            Finish::QueueTimeout => "queue_timeout",
            Finish::Failed => "failed",
        };
        *self.ends.entry(name).or_default() += 1;
        if is_complete(finish) {
            self.latency.add(now - live.arrival.time);
            self.keys[live.arrival.request.key].completed += 1;
        }
    }
}
