//! Logit bias and banned sequences, which come before all other stages.

use super::pool::Pool;
use super::settings::Sampling;

/// Adds the bias of each token to its logit, removes tokens with a bias of -inf, and removes each token that would
/// complete a banned sequence of tokens after `text` (`NoBadWordsLogitsProcessor` of `transformers`).
pub(super) fn bias_and_bans(pool: &mut Pool, text: &[u32], sampling: &Sampling) {
    let mut banned: Vec<u32> = Vec::new();
    for (id, bias) in sampling.logit_bias.iter() {
        if *bias == f64::NEG_INFINITY {
            banned.push(*id);
        } else {
            pool.change(*id, |logit| logit + bias);
        }
    }
    for sequence in sampling.banned.iter() {
        if let Some((last, before)) = sequence.split_last()
            && text.ends_with(before)
        {
            banned.push(*last);
        }
    }
    if !banned.is_empty() {
        banned.sort_unstable();
        pool.retain(|entry| banned.binary_search(&entry.id).is_err());
    }
}
