//! Pool of candidates: the tokens that may still be chosen, with their logits and probabilities.
//!
//! Stages change logits or remove candidates. Between stages the pool is sorted by id, so that results do not depend on
//! the order in which candidates came, and tokens are found by binary search.

use crate::rng::Rng;
use std::cmp::Ordering;

/// A token that may be chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Entry {
    /// Token id.
    pub id: u32,
    /// Logit after the stages so far; finite.
    pub logit: f64,
    /// Probability, valid after [`Pool::normalize`].
    pub p: f64,
}

/// Candidates, sorted by id.
#[derive(Debug, Clone, Default)]
pub(super) struct Pool {
    entries: Vec<Entry>,
    /// Whether each `p` is proportional to the probability that the logits give.
    weighed: bool,
}

impl Pool {
    /// Replaces the candidates by tokens with these logits, sorted by id. Tokens with a logit of -inf are left out.
    pub fn fill(&mut self, logits: impl Iterator<Item = (u32, f32)>) {
        self.weighed = false;
        self.entries.clear();
        let possible = logits.filter(|(_, logit)| *logit > f32::NEG_INFINITY);
        self.entries.extend(possible.map(|(id, logit)| Entry { id, logit: f64::from(logit), p: 0.0 }));
    }

    /// Returns the candidates, sorted by id.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns the number of candidates.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Replaces the logit of each candidate by `change(logit)`.
    pub fn change_all(&mut self, change: impl Fn(f64) -> f64) {
        self.weighed = false;
        self.entries.iter_mut().for_each(|entry| entry.logit = finite(change(entry.logit)));
    }

    /// Replaces the logit of a token, if it is a candidate, by `change(logit)`.
    pub fn change(&mut self, id: u32, change: impl FnOnce(f64) -> f64) {
        if let Some(i) = self.position(id) {
            self.weighed = false;
            self.entries[i].logit = finite(change(self.entries[i].logit));
        }
    }

    /// Keeps only candidates for which `keep` returns true.
    pub fn retain(&mut self, keep: impl FnMut(&Entry) -> bool) {
        self.entries.retain(keep);
    }

    /// Keeps the first `count` candidates in the order of `compare`, at least one.
    pub fn keep_first(&mut self, count: usize, compare: impl Fn(&Entry, &Entry) -> Ordering) {
        let count = count.max(1);
        if count < self.entries.len() {
            self.entries.select_nth_unstable_by(count - 1, compare);
            self.entries.truncate(count);
            self.sort_by_id();
        }
    }

    /// Lets `work` reorder and shorten the candidates, then sorts them by id again.
    pub fn reorder<T>(&mut self, work: impl FnOnce(&mut Vec<Entry>) -> T) -> T {
        let result = work(&mut self.entries);
        self.sort_by_id();
        result
    }

    /// Computes the probabilities of the candidates (softmax); their sum is 1.
    pub fn normalize(&mut self) {
        let mut total = if self.weighed { self.total() } else { 0.0 };
        // What is left after likely candidates were removed can be too small to be exact.
        if total < f64::EPSILON {
            let highest = self.highest_logit();
            self.entries.iter_mut().for_each(|entry| entry.p = (entry.logit - highest).exp());
            self.weighed = true;
            total = self.total();
        }
        self.entries.iter_mut().for_each(|entry| entry.p /= total);
    }

    /// Returns the candidate with the largest logit, the lowest id if several are equal.
    pub fn most_likely(&self) -> Option<&Entry> {
        self.entries.iter().min_by(|a, b| most_likely_first(a, b))
    }

    /// Draws a candidate by the probabilities of [`Pool::normalize`].
    pub fn draw(&self, rng: &mut Rng) -> Option<&Entry> {
        let mut left = rng.next_f64() * self.total();
        for entry in &self.entries {
            left -= entry.p;
            if left < 0.0 {
                return Some(entry);
            }
        }
        // Rounding can leave a remainder: then take the last token with a probability above 0.
        self.entries.iter().rev().find(|entry| entry.p > 0.0)
    }

    fn highest_logit(&self) -> f64 {
        self.entries.iter().map(|entry| entry.logit).fold(f64::MIN, f64::max)
    }

    fn total(&self) -> f64 {
        self.entries.iter().map(|entry| entry.p).sum()
    }

    /// Returns the place of a token. While no candidate was removed, it is the id.
    fn position(&self, id: u32) -> Option<usize> {
        match self.entries.get(id as usize) {
            Some(entry) if entry.id == id => Some(id as usize),
            _ => self.entries.binary_search_by_key(&id, |entry| entry.id).ok(),
        }
    }

    fn sort_by_id(&mut self) {
        self.entries.sort_unstable_by_key(|entry| entry.id);
    }
}

/// Bounds a logit so that no difference of two logits is NaN.
fn finite(logit: f64) -> f64 {
    logit.clamp(f64::MIN, f64::MAX)
}

/// Compares by descending logit, then by id.
pub(super) fn most_likely_first(a: &Entry, b: &Entry) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}
