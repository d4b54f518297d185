//! Keys: limits per time, and the counters of weighted fair share.
//!
//! Fair share is the virtual token counter of Sheng et al. (OSDI 2024). Each key counts the cost of its requests,
//! divided by its weight, and among equal priorities the key with the smallest counter is served first. A request is
//! charged when it enters the batch: computed prompt tokens, and the expected answer times the measured cost of an
//! output token. The charge is corrected to the actual answer when the request ends. A key without requests saves no
//! credit: when it returns, its counter is raised to the smallest one of the active keys.

use super::{KeyId, Micros, Rejection, Request, SECOND};
use std::collections::{BTreeMap, BTreeSet};

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
    /// Unfinished answers.
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

/// Use of a key, for metrics and to continue after a restart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KeyUsage {
    /// Tokens that the limit per day currently lacks; 0 without such a limit.
    pub day_used: u64,
    /// Unfinished requests.
    pub unfinished: usize,
    /// Tokens of prompts that entered the batch, cached ones included.
    pub prompt_tokens: u64,
    /// Tokens of these prompts whose keys and values came from the prefix cache.
    pub cached_tokens: u64,
    /// Generated tokens.
    pub generated_tokens: u64,
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

    /// Returns the amount left at a time.
    fn left_at(&self, now: Micros) -> f64 {
        let passed = now.saturating_sub(self.at) as f64;
        (self.left + self.limit * passed / self.window).min(self.limit)
    }

    /// Returns the amount that is used and not refilled at a time.
    fn used_at(&self, now: Micros) -> f64 {
        self.limit - self.left_at(now)
    }

    /// Replaces the limit of `bucket`. Used amounts stay used, up to the new limit.
    fn replace(bucket: &mut Option<Bucket>, now: Micros, limit: Option<u64>, window: Micros) {
        let used = bucket.as_ref().map_or(0.0, |bucket| bucket.used_at(now));
        *bucket = Bucket::new(limit, window);
        bucket.iter_mut().for_each(|bucket| bucket.set_used(now, used));
    }

    /// Sets the amount that is used at a time.
    fn set_used(&mut self, now: Micros, used: f64) {
        self.left = (self.limit - used).clamp(0.0, self.limit);
        self.at = now;
    }

    /// Refills the bucket, and tests whether it holds `amount`.
    fn holds(&mut self, now: Micros, amount: f64) -> Result<(), Rejection> {
        self.left = self.left_at(now);
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
    /// False if new requests are refused.
    enabled: bool,
    /// Cost of the requests served, divided by the weight.
    pub counter: f64,
    /// Unfinished requests.
    pub unfinished: usize,
    /// Mean length of recent answers.
    expected: Option<f64>,
    requests: Option<Bucket>,
    /// Tokens per minute and per day.
    tokens: [Option<Bucket>; 2],
    /// Tokens of prompts, of their cached parts, and of answers.
    pub totals: Totals,
}

/// Tokens of the requests of a key.
#[derive(Debug, Default)]
pub struct Totals {
    pub prompt: u64,
    pub cached: u64,
    pub generated: u64,
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
        check_weight(&limits);
        let requests = Bucket::new(limits.rpm, MINUTE);
        let tokens = [Bucket::new(limits.tpm, MINUTE), Bucket::new(limits.tokens_per_day, DAY)];
        let totals = Totals::default();
        let (enabled, counter, unfinished, expected) = (true, 0.0, 0, None);
        self.most_urgent = self.most_urgent.min(limits.max_priority);
        self.all.push(Key { limits, enabled, counter, unfinished, expected, requests, tokens, totals });
        self.all.len() - 1
    }

    /// Replaces the limits of a key and enables it. What it has used of its limits per time stays used.
    pub fn set(&mut self, now: Micros, key: KeyId, limits: KeyLimits) {
        check_weight(&limits);
        let state = &mut self.all[key];
        Bucket::replace(&mut state.requests, now, limits.rpm, MINUTE);
        let [minute, day] = &mut state.tokens;
        Bucket::replace(minute, now, limits.tpm, MINUTE);
        Bucket::replace(day, now, limits.tokens_per_day, DAY);
        let (before, after) = (state.limits.max_priority, limits.max_priority);
        (state.limits, state.enabled) = (limits, true);
        if after <= self.most_urgent {
            self.most_urgent = after;
        } else if before == self.most_urgent {
            self.most_urgent = self.find_most_urgent();
        }
    }

    /// Refuses new requests of a key.
    pub fn disable(&mut self, key: KeyId) {
        self.all[key].enabled = false;
        self.forget_priority(key);
    }

    /// Finds the most urgent priority again if it was that of a key that has become unable to make requests.
    fn forget_priority(&mut self, key: KeyId) {
        if self.all[key].limits.max_priority == self.most_urgent {
            self.most_urgent = self.find_most_urgent();
        }
    }

    /// Returns the most urgent priority of the keys that are enabled or have unfinished requests; at most 0.
    fn find_most_urgent(&self) -> i32 {
        let counts = |key: &&Key| key.enabled || key.unfinished > 0;
        self.all.iter().filter(counts).map(|key| key.limits.max_priority).fold(0, i32::min)
    }

    /// Returns the use of a key.
    pub fn usage(&self, now: Micros, key: KeyId) -> Option<KeyUsage> {
        let key = self.all.get(key)?;
        let day_used = key.tokens[1].as_ref().map_or(0.0, |day| day.used_at(now));
        let Totals { prompt, cached, generated } = key.totals;
        Some(KeyUsage {
            day_used: day_used.ceil() as u64,
            unfinished: key.unfinished,
            prompt_tokens: prompt,
            cached_tokens: cached,
            generated_tokens: generated,
        })
    }

    /// Adds an earlier use of a key.
    pub fn restore(&mut self, now: Micros, key: KeyId, usage: &KeyUsage) {
        let key = &mut self.all[key];
        if let Some(day) = &mut key.tokens[1] {
            let used = day.used_at(now) + usage.day_used as f64;
            day.set_used(now, used);
        }
        let totals = &mut key.totals;
        totals.prompt = totals.prompt.saturating_add(usage.prompt_tokens);
        totals.cached = totals.cached.saturating_add(usage.cached_tokens);
        totals.generated = totals.generated.saturating_add(usage.generated_tokens);
    }

    /// Tests that counts and limits are possible ones; `unfinished` are the unfinished requests by key.
    pub fn check(&self, unfinished: &BTreeMap<KeyId, usize>) -> Result<(), String> {
        let most_urgent = self.find_most_urgent();
        if self.most_urgent != most_urgent {
            return Err(format!("the most urgent priority is {most_urgent}, not {}", self.most_urgent));
        }
        for (id, key) in self.all.iter().enumerate() {
            let (count, expected) = (key.unfinished, unfinished.get(&id).copied().unwrap_or(0));
            if count != expected || self.active.contains(&id) != (count > 0) {
                return Err(format!("key {id}: counts {count} unfinished requests, has {expected}"));
            }
            let limits = [key.limits.rpm, key.limits.tpm, key.limits.tokens_per_day];
            for (bucket, limit) in key.requests.iter().chain(key.tokens.iter().flatten()).zip(limits.iter().flatten()) {
                if bucket.limit != *limit as f64 || !(0.0..=bucket.limit).contains(&bucket.left) {
                    return Err(format!("key {id}: {} left of the limit {limit}", bucket.left));
                }
            }
            if !key.counter.is_finite() || key.totals.cached > key.totals.prompt {
                return Err(format!("key {id}: counter {}, {:?}", key.counter, key.totals));
            }
        }
        Ok(())
    }

    /// Tests the limits of the request's key, and counts the request if they allow it.
    pub fn enter(&mut self, now: Micros, request: &Request) -> Result<(), Rejection> {
        let key = self.all.get_mut(request.key).filter(|key| key.enabled).ok_or(Rejection::UnknownKey)?;
        if key.limits.max_tokens.is_some_and(|most| request.max_tokens > most) {
            return Err(Rejection::MaxTokens);
        }
        if key.limits.concurrent.is_some_and(|most| key.unfinished >= most) {
            return Err(Rejection::Concurrent);
        }
        let amount = f64::from(request.prompt) + f64::from(request.max_tokens);
        let requests = if request.further { 0.0 } else { 1.0 };
        key.requests.iter_mut().try_for_each(|bucket| bucket.holds(now, requests))?;
        key.tokens.iter_mut().flatten().try_for_each(|bucket| bucket.holds(now, amount))?;
        key.requests.iter_mut().for_each(|bucket| bucket.left -= requests);
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
    /// `correction`, a cost divided by the weight.
    pub fn leave(&mut self, key: KeyId, unused: u32, correction: f64) {
        let state = &mut self.all[key];
        let give_back = |bucket: &mut Bucket| bucket.left = (bucket.left + f64::from(unused)).min(bucket.limit);
        state.tokens.iter_mut().flatten().for_each(give_back);
        state.counter += correction;
        state.unfinished -= 1;
        if state.unfinished == 0 {
            self.active.remove(&key);
            self.floor = self.floor.max(state.counter);
            if !state.enabled {
                self.forget_priority(key);
            }
        }
    }

    /// Charges a key for a request that enters the batch, and returns the weight by which the cost was divided.
    pub fn charge(&mut self, key: KeyId, cost: f64) -> f64 {
        let key = &mut self.all[key];
        key.counter += cost / key.limits.weight;
        key.limits.weight
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

/// Tests the weight of a key.
///
/// # Panics
/// It is not positive and finite.
fn check_weight(limits: &KeyLimits) {
    assert!(limits.weight > 0.0 && limits.weight.is_finite(), "the weight of a key is positive");
}
