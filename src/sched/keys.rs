//! Keys: limits per time, and the counters of weighted fair share.
//!
//! Fair share is the virtual token counter of Sheng et al. (OSDI 2024). Each key counts the cost of its requests,
//! divided by its weight, and among equal priorities the key with the smallest counter is served first. A request is
//! charged when it enters the batch: computed prompt tokens, and the expected answer times the measured cost of an
//! output token. The charge is corrected to the actual answer when the request ends. A key without requests saves no
//! credit: when it returns, its counter is raised to the smallest one of the active keys.

use super::{KeyId, Micros, Rejection, Request, SECOND};
use std::collections::BTreeSet;

/// Window of limits per minute.
const MINUTE: Micros = 60 * SECOND;
/// Window of limits per day.
const DAY: Micros = 24 * 60 * MINUTE;

/// Limits of a key. The default has no limit, weight 1, and 0 as its most urgent priority.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyLimits {
    /// Share of the key in relation to the others; positive.
    pub weight: f64,
    /// Requests per minute.
    pub rpm: Option<u64>,
    /// Tokens per minute, prompt and answer. The largest answer counts until the actual one is known.
    pub tpm: Option<u64>,
    /// Tokens per day, counted in the same way.
    pub tokens_per_day: Option<u64>,
    /// Unfinished requests.
    pub concurrent: Option<usize>,
    /// Tokens of an answer.
    pub max_tokens: Option<u32>,
    /// Most urgent priority: requests with a lower value get this one.
    pub max_priority: i32,
}

impl Default for KeyLimits {
    fn default() -> KeyLimits {
        let (rpm, tpm, tokens_per_day, concurrent, max_tokens) = (None, None, None, None, None);
        KeyLimits { weight: 1.0, rpm, tpm, tokens_per_day, concurrent, max_tokens, max_priority: 0 }
    }
}

/// Amount left of a limit per window, which refills continuously.
#[derive(Debug, Clone)]
struct Bucket {
    limit: f64,
    window: f64,
    left: f64,
    at: Micros,
}

impl Bucket {
    fn new(limit: Option<u64>, window: Micros) -> Option<Bucket> {
        let limit = limit? as f64;
        Some(Bucket { limit, window: window as f64, left: limit, at: 0 })
    }

    /// Refills the bucket, and tests whether it holds `amount`.
    fn holds(&mut self, now: Micros, amount: f64) -> Result<(), Rejection> {
        let passed = now.saturating_sub(self.at) as f64;
        self.left = (self.left + self.limit * passed / self.window).min(self.limit);
        self.at = now;
        let wait = ((amount - self.left) / self.limit * self.window).ceil();
        match amount <= self.left {
            true => Ok(()),
            false => Err(Rejection::Rate((amount <= self.limit).then_some(wait as Micros))),
        }
    }
}

/// Key with its state.
#[derive(Debug)]
pub struct Key {
    pub limits: KeyLimits,
    /// Cost of the requests served, divided by the weight.
    pub counter: f64,
    /// Unfinished requests.
    pub unfinished: usize,
    /// Mean length of recent answers.
    expected: Option<f64>,
    requests: Option<Bucket>,
    /// Tokens per minute and per day.
    tokens: [Option<Bucket>; 2],
}

/// All keys.
#[derive(Debug, Default)]
pub struct Keys {
    pub all: Vec<Key>,
    active: BTreeSet<KeyId>,
    /// Smallest counter of the active keys when it was last computed; the counter of a key that returns when no other
    /// is active.
    floor: f64,
    /// Most urgent priority of all keys.
    pub most_urgent: i32,
}

impl Keys {
    /// Adds a key and returns its number.
    pub fn add(&mut self, limits: KeyLimits) -> KeyId {
        assert!(limits.weight > 0.0 && limits.weight.is_finite(), "the weight of a key is positive");
        self.most_urgent = self.most_urgent.min(limits.max_priority);
        let requests = Bucket::new(limits.rpm, MINUTE);
        let tokens = [Bucket::new(limits.tpm, MINUTE), Bucket::new(limits.tokens_per_day, DAY)];
        self.all.push(Key { limits, counter: 0.0, unfinished: 0, expected: None, requests, tokens });
        self.all.len() - 1
    }

    /// Tests the limits of the request's key, and counts the request if they allow it.
    pub fn enter(&mut self, now: Micros, request: &Request) -> Result<(), Rejection> {
        let key = self.all.get_mut(request.key).ok_or(Rejection::UnknownKey)?;
        if key.limits.max_tokens.is_some_and(|most| request.max_tokens > most) {
            return Err(Rejection::MaxTokens);
        }
        if key.limits.concurrent.is_some_and(|most| key.unfinished >= most) {
            return Err(Rejection::Concurrent);
        }
        let amount = f64::from(request.prompt) + f64::from(request.max_tokens);
        key.requests.iter_mut().try_for_each(|bucket| bucket.holds(now, 1.0))?;
        key.tokens.iter_mut().flatten().try_for_each(|bucket| bucket.holds(now, amount))?;
        key.requests.iter_mut().for_each(|bucket| bucket.left -= 1.0);
        key.tokens.iter_mut().flatten().for_each(|bucket| bucket.left -= amount);
        key.unfinished += 1;
        if self.active.insert(request.key) {
            self.lift(request.key);
        }
        Ok(())
    }

    /// Raises the counter of a key that has become active.
    fn lift(&mut self, key: KeyId) {
        let others = self.active.iter().filter(|other| **other != key).map(|other| self.all[*other].counter);
        self.floor = others.reduce(f64::min).unwrap_or(self.floor);
        let counter = &mut self.all[key].counter;
        *counter = counter.max(self.floor);
    }

    /// Counts the end of a request: returns `unused` tokens to the limits per time, and moves the counter by
    /// `correction`.
    pub fn leave(&mut self, key: KeyId, unused: u32, correction: f64) {
        let state = &mut self.all[key];
        let give_back = |bucket: &mut Bucket| bucket.left = (bucket.left + f64::from(unused)).min(bucket.limit);
        state.tokens.iter_mut().flatten().for_each(give_back);
        state.counter += correction / state.limits.weight;
        state.unfinished -= 1;
        if state.unfinished == 0 {
            self.active.remove(&key);
            self.floor = self.floor.max(state.counter);
        }
    }

    /// Charges a key for a request that enters the batch.
    pub fn charge(&mut self, key: KeyId, cost: f64) {
        let key = &mut self.all[key];
        key.counter += cost / key.limits.weight;
    }

    /// Returns the expected length of an answer of at most `max_tokens` tokens.
    pub fn expected(&self, key: KeyId, max_tokens: u32) -> f64 {
        let most = f64::from(max_tokens);
        self.all[key].expected.map_or(most, |mean| mean.min(most))
    }

    /// Learns from the length of a complete answer.
    pub fn observe(&mut self, key: KeyId, tokens: u32) {
        let (expected, new) = (&mut self.all[key].expected, f64::from(tokens));
        *expected = Some(expected.map_or(new, |mean| mean * 0.9 + new * 0.1));
    }
}
