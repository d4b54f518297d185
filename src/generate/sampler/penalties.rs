//! Penalties on tokens that occurred before: repetition, presence and frequency, over all tokens or the last ones.

use super::pool::Pool;
use super::settings::Sampling;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Number of occurrences of each token among the last tokens of a text.
#[derive(Debug, Default)]
pub(super) struct Occurrences {
    counts: HashMap<u32, Count>,
    /// Index of the first token that is counted.
    first: usize,
}

/// Number of occurrences of a token.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    /// In prompt and answer.
    text: u32,
    /// In the answer.
    answer: u32,
}

impl Occurrences {
    /// Counts the tokens of `text` from index `known` on, and no longer those before the last `window`; `None` counts
    /// all. The first `prompt` tokens are those of the prompt. Window and prompt are the same in all calls.
    pub fn update(&mut self, text: &[u32], known: usize, window: Option<usize>, prompt: usize) {
        let first = text.len() - window.unwrap_or(text.len()).min(text.len());
        let is_answer = |at: usize| u32::from(at >= prompt);
        for at in self.first..first.min(known) {
            if let Entry::Occupied(mut count) = self.counts.entry(text[at]) {
                count.get_mut().text -= 1;
                count.get_mut().answer -= is_answer(at);
                if count.get().text == 0 {
                    count.remove();
                }
            }
        }
        for at in known.max(first)..text.len() {
            let count = self.counts.entry(text[at]).or_default();
            count.text += 1;
            count.answer += is_answer(at);
        }
        self.first = first;
    }
}

/// Lowers the logits of tokens that occurred. The repetition penalty divides positive logits and multiplies negative
/// ones (Keskar et al. 2019, arXiv:1909.05858; `RepetitionPenaltyLogitsProcessor` of `transformers`). Then the
/// presence penalty and the number of occurrences times the frequency penalty are subtracted; these two count the
/// tokens that [`Sampling::counted`] names.
pub(super) fn penalties(pool: &mut Pool, occurrences: &Occurrences, sampling: &Sampling) {
    let Sampling { repeat_penalty, presence_penalty, frequency_penalty, counted, .. } = *sampling;
    for (id, count) in &occurrences.counts {
        pool.change(*id, |logit| {
            let repeated = if logit < 0.0 { logit * repeat_penalty } else { logit / repeat_penalty };
            match counted.of(count.text, count.answer) {
                0 => repeated,
                times => repeated - presence_penalty - f64::from(times) * frequency_penalty,
            }
        });
    }
}
