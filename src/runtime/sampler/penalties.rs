//! Penalties on tokens that occurred before: repetition, presence and frequency, over all tokens or the last ones.

use super::pool::Pool;
use super::settings::Sampling;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Number of occurrences of each token among the last tokens of a text, prompt included.
#[derive(Debug, Default)]
pub(super) struct Occurrences {
    counts: HashMap<u32, u32>,
    /// Index of the first token that is counted.
    first: usize,
}

impl Occurrences {
    /// Counts the tokens of `text` from index `known` on, and no longer those before the last `window`; `None` counts
    /// all. The window is the same in all calls.
    pub fn update(&mut self, text: &[u32], known: usize, window: Option<usize>) {
        let first = text.len() - window.unwrap_or(text.len()).min(text.len());
        for id in &text[self.first..first.min(known)] {
            if let Entry::Occupied(mut count) = self.counts.entry(*id) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
        for id in &text[known.max(first)..] {
            *self.counts.entry(*id).or_default() += 1;
        }
        self.first = first;
    }
}

/// Lowers the logits of tokens that occurred. The repetition penalty divides positive logits and multiplies negative
/// ones (Keskar et al. 2019, arXiv:1909.05858; `RepetitionPenaltyLogitsProcessor` of `transformers`). Then the
/// presence penalty and the number of occurrences times the frequency penalty are subtracted (llama.cpp).
pub(super) fn penalties(pool: &mut Pool, occurrences: &Occurrences, sampling: &Sampling) {
    let Sampling { repeat_penalty, presence_penalty, frequency_penalty, .. } = *sampling;
    for (id, count) in &occurrences.counts {
        pool.change(*id, |logit| {
            let repeated = if logit < 0.0 { logit * repeat_penalty } else { logit / repeat_penalty };
            repeated - presence_penalty - f64::from(*count) * frequency_penalty
        });
    }
}
