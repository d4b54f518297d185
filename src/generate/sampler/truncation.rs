//! Stages that remove candidates or scale all logits: temperature, top-k, top-p, min-p, locally typical, and XTC.
//!
//! Each stage is a function of the pool. It keeps at least one candidate and renormalizes: a later stage sees
//! probabilities that add up to 1. Definitions: the classes of the same names in `transformers`
//! (`generation/logits_process.py`); for XTC, llama.cpp (`llama-sampling.cpp`).

use super::pool::{Entry, Pool, most_likely_first};
use super::settings::Xtc;
use crate::rng::Rng;

/// Number of candidates that [`typical`] selects at first.
const SELECTED: usize = 64;

/// Divides all logits by `temperature`, which is above 0.
pub(super) fn temperature(pool: &mut Pool, temperature: f64) {
    if temperature != 1.0 {
        pool.change_all(|logit| logit / temperature);
    }
}

/// Keeps the `k` most likely candidates; 0 keeps all. Of equal candidates, those with the lowest ids are kept.
pub(super) fn top_k(pool: &mut Pool, k: usize) {
    if k > 0 {
        pool.keep_first(k, most_likely_first);
    }
}

/// Removes the least likely candidates as long as the total probability of the removed ones is at most `1 - p`, but
/// never all of them (nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751).
pub(super) fn top_p(pool: &mut Pool, p: f64) {
    if p >= 1.0 {
        return;
    }
    pool.normalize();
    let budget = 1.0 - p;
    // Even together, candidates below this probability stay within the budget, so they are removed without sorting.
    let negligible = budget / pool.len() as f64;
    let mut removed = 0.0;
    pool.retain(|entry| {
        let keep = entry.p >= negligible;
        removed += if keep { 0.0 } else { entry.p };
        keep
    });
    pool.reorder(|entries| {
        entries.sort_unstable_by(most_likely_first);
        while entries.len() > 1 {
            removed += entries[entries.len() - 1].p;
            if removed > budget {
                break;
            }
            entries.pop();
        }
    });
}

/// Keeps candidates that are at least `p` times as likely as the most likely one (Nguyen et al. 2024,
/// arXiv:2407.01082).
pub(super) fn min_p(pool: &mut Pool, p: f64) {
    if p <= 0.0 {
        return;
    }
    pool.normalize();
    let least = p * pool.entries().iter().map(|entry| entry.p).fold(0.0, f64::max);
    pool.retain(|entry| entry.p >= least);
}

/// Keeps the candidates whose information content `-ln p` is nearest to the entropy, until their total probability
/// reaches `mass` (Meister et al. 2022, arXiv:2202.00666). All candidates at the last distance are kept.
pub(super) fn typical(pool: &mut Pool, mass: f64) {
    if mass >= 1.0 {
        return;
    }
    pool.normalize();
    let information = |entry: &Entry| if entry.p > 0.0 { -entry.p.ln() } else { f64::INFINITY };
    let expected = |entry: &Entry| if entry.p > 0.0 { entry.p * information(entry) } else { 0.0 };
    let entropy: f64 = pool.entries().iter().map(expected).sum();
    let distance = |entry: &Entry| (information(entry) - entropy).abs();
    let mut nearest: Vec<(f64, f64)> = pool.entries().iter().map(|entry| (distance(entry), entry.p)).collect();
    let by_distance = |a: &(f64, f64), b: &(f64, f64)| a.0.total_cmp(&b.0).then(b.1.total_cmp(&a.1));
    // A few candidates usually suffice; selecting them is faster than sorting all.
    let mut count = SELECTED;
    while count < nearest.len() {
        nearest.select_nth_unstable_by(count, by_distance);
        if nearest[..count].iter().map(|(_, p)| p).sum::<f64>() >= mass {
            break;
        }
        count *= 8;
    }
    nearest.truncate(count);
    nearest.sort_unstable_by(by_distance);
    let mut total = 0.0;
    let last = nearest.iter().find(|(_, p)| {
        total += p;
        total >= mass
    });
    if let Some((farthest, _)) = last {
        pool.retain(|entry| distance(entry) <= *farthest);
    }
}

/// Removes, with probability `xtc.probability`, all candidates that are at least as likely as the threshold, except the
/// least likely of them. A threshold above 0.5 has no effect, since two candidates cannot both reach it.
///
/// One random number is taken per token while the stage is in effect, whatever the logits are.
pub(super) fn xtc(pool: &mut Pool, xtc: &Xtc, rng: &mut Rng) {
    if !xtc.is_active() || rng.next_f64() >= xtc.probability {
        return;
    }
    pool.normalize();
    let likely = pool.entries().iter().filter(|entry| entry.p >= xtc.threshold);
    if let Some(last) = likely.max_by(|a, b| most_likely_first(a, b)).copied() {
        pool.retain(|entry| most_likely_first(&last, entry).is_le());
    }
}
