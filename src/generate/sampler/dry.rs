//! DRY ("don't repeat yourself"): a penalty on tokens that would continue a sequence that occurred before.
//!
//! If the last `n` tokens of the text also occur earlier and are followed there by a token, that token loses
//! `multiplier * base^(n - allowed_length)`, provided that `n` is at least `allowed_length`. The longest such `n`
//! counts. Sequences do not reach back over a breaker, such as a line break. Definition: llama.cpp
//! (`llama-sampling.cpp`), which follows the proposal of p-e-w (oobabooga/text-generation-webui, pull request 5677).

use super::pool::Pool;
use crate::error::{Error, Result};
use std::collections::HashMap;
use std::sync::Arc;

/// Largest power of `base`, so that penalties stay in the range of f32.
const LARGEST_LN_POWER: f64 = 88.722_839;

/// Parameters of DRY.
#[derive(Debug, Clone, PartialEq)]
pub struct Dry {
    /// Factor of all penalties; 0 = off.
    pub multiplier: f64,
    /// Base of the power, at least 1.
    pub base: f64,
    /// Longest sequence that may be repeated without a penalty, in tokens.
    pub allowed_length: usize,
    /// Number of last tokens in which sequences are searched; `None` = all.
    pub last_n: Option<usize>,
    /// Tokens over which sequences do not reach.
    pub breakers: Arc<Breakers>,
}

/// Parameters of llama.cpp, off.
impl Default for Dry {
    fn default() -> Dry {
        Dry { multiplier: 0.0, base: 1.75, allowed_length: 2, last_n: None, breakers: Arc::default() }
    }
}

/// Sequences of tokens that end a repeated sequence: the tokens that follow each first token. The list may be empty,
/// which means that the first token is a breaker by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Breakers(HashMap<u32, Vec<Vec<u32>>>);

impl Breakers {
    /// Adds the breaker that consists of `first` and `rest`.
    pub fn add(&mut self, first: u32, rest: Vec<u32>) {
        let rests = self.0.entry(first).or_default();
        if !rests.contains(&rest) {
            rests.push(rest);
        }
    }

    /// Returns true if `id` is a breaker by itself.
    fn is_single(&self, id: u32) -> bool {
        self.0.get(&id).is_some_and(|rests| rests.iter().any(Vec::is_empty))
    }

    /// Returns the number of tokens after the last breaker of `text`, all if there is none.
    fn tokens_since(&self, text: &[u32]) -> usize {
        let after = |i: usize| {
            let rests = self.0.get(&text[i])?.iter().filter(|rest| text[i + 1..].starts_with(rest));
            rests.map(|rest| text.len() - i - 1 - rest.len()).min()
        };
        (0..text.len()).rev().find_map(after).unwrap_or(text.len())
    }
}

impl Dry {
    /// Returns true if the stage can change a logit.
    pub fn is_active(&self) -> bool {
        self.multiplier != 0.0 && self.last_n != Some(0)
    }

    pub(super) fn validate(&self) -> Result<()> {
        let checks = [
            ("dry-multiplier", self.multiplier, self.multiplier >= 0.0, "0 (off) or more"),
            ("dry-base", self.base, self.base >= 1.0, "1 or more"),
        ];
        match checks.iter().find(|(_, value, ok, _)| !(value.is_finite() && *ok)) {
            Some((name, value, _, expected)) => {
                Err(Error::usage(format!("found {value}, expected {expected}")).setting(*name))
            }
            None => Ok(()),
        }
    }
}

/// Lowers the logits of tokens that would continue a repetition in `text`.
pub(super) fn dry(pool: &mut Pool, text: &[u32], dry: &Dry) {
    let text = &text[text.len() - dry.last_n.unwrap_or(text.len()).min(text.len())..];
    let longest = dry.breakers.tokens_since(text);
    let mut repeated: HashMap<u32, usize> = HashMap::new();
    for (next, length) in (1..).zip(repetitions(text)) {
        let length = length.min(longest);
        if length >= dry.allowed_length && !dry.breakers.is_single(text[next]) {
            let known = repeated.entry(text[next]).or_insert(length);
            *known = length.max(*known);
        }
    }
    let largest = if dry.base > 1.0 { LARGEST_LN_POWER / dry.base.ln() } else { f64::INFINITY };
    for (id, length) in repeated {
        let exponent = ((length - dry.allowed_length) as f64).min(largest.floor());
        pool.change(id, |logit| logit - dry.multiplier * dry.base.powf(exponent));
    }
}

/// Returns, for each index `i` from 1 on, how many tokens before `i` equal the last tokens of the text.
///
/// The Z function of the reversed text: linear in its length.
fn repetitions(text: &[u32]) -> Vec<usize> {
    let n = text.len();
    let from_end = |i: usize| text[n - 1 - i];
    let mut equal = vec![0; n];
    // The stretch from `start` to `end` of the reversed text equals its beginning and reaches furthest.
    let (mut start, mut end) = (0, 0);
    for i in 1..n {
        let mut length = if i < end { equal[i - start].min(end - i) } else { 0 };
        while i + length < n && from_end(length) == from_end(i + length) {
            length += 1;
        }
        if i + length > end {
            (start, end) = (i, i + length);
        }
        equal[i] = length;
    }
    // `equal[i]` belongs to the tokens that end at index `n - 1 - i`; `n - i` follows them.
    (1..n).map(|next| equal[n - next]).collect()
}
