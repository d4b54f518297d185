//! Mirostat (Basu et al. 2020, arXiv:2007.14966): keeps the information content of the text near a target.
//!
//! A variable `mu` bounds the candidates: version 1 estimates from it how many candidates to keep, assuming that
//! probabilities follow Zipf's law; version 2 keeps those with an information content of at most `mu` bits. After each
//! token, `mu` is lowered by `eta` times the difference between the token's information content and the target `tau`.
//! Constants and start value are those of the paper and of llama.cpp.

use super::pool::{Entry, Pool, most_likely_first};
use crate::error::{Error, Result};

/// Number of most likely candidates from which version 1 estimates the exponent of Zipf's law.
const ESTIMATED: usize = 100;

/// Parameters of Mirostat.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mirostat {
    /// Version of the algorithm.
    pub version: Version,
    /// Target of the information content per token, in bits.
    pub tau: f64,
    /// Learning rate of `mu`.
    pub eta: f64,
}

/// Version of the algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// The algorithm of the paper: an estimated top-k.
    One,
    /// A bound on the information content of each candidate.
    Two,
}

impl Mirostat {
    /// Default of [`Mirostat::tau`], in bits.
    pub const TAU: f64 = 5.0;
    /// Default of [`Mirostat::eta`].
    pub const ETA: f64 = 0.1;

    /// Returns the value of `mu` before the first token, in bits.
    pub(super) fn first_mu(&self) -> f64 {
        2.0 * self.tau
    }

    /// Keeps the candidates that `mu` admits, at least the most likely one. `vocab` is the size of the vocabulary.
    pub(super) fn keep(&self, pool: &mut Pool, mu: f64, vocab: usize) {
        match self.version {
            Version::One => {
                let k = kept_by_estimate(pool, mu, vocab);
                pool.keep_first(k, most_likely_first);
            }
            Version::Two => {
                pool.normalize();
                let most_likely = pool.most_likely().map(|entry| entry.id);
                pool.retain(|entry| bits(entry) <= mu || Some(entry.id) == most_likely);
            }
        }
    }

    /// Returns `mu` after `chosen`, whose probability is relative to the candidates that were kept.
    pub(super) fn next_mu(&self, mu: f64, chosen: &Entry) -> f64 {
        mu - self.eta * (bits(chosen) - self.tau)
    }

    pub(super) fn validate(&self) -> Result<()> {
        for (name, value) in [("mirostat-tau", self.tau), ("mirostat-eta", self.eta)] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(Error::usage(format!("found {value}, expected 0 or more")).setting(name));
            }
        }
        Ok(())
    }
}

/// Returns the information content of a candidate in bits.
fn bits(entry: &Entry) -> f64 {
    // A probability that was rounded to 0 is counted as the smallest number, so that `mu` stays finite.
    -entry.p.max(f64::MIN_POSITIVE).log2()
}

/// Returns the number of candidates that version 1 keeps: `k` of equation 9 of the paper, with the exponent `s` of
/// Zipf's law estimated by least squares as in equation 8.
fn kept_by_estimate(pool: &Pool, mu: f64, vocab: usize) -> usize {
    let mut best = pool.clone();
    best.keep_first(ESTIMATED, most_likely_first);
    let mut logits: Vec<f64> = best.entries().iter().map(|entry| entry.logit).collect();
    logits.sort_unstable_by(|a, b| b.total_cmp(a));
    let (mut products, mut squares) = (0.0, 0.0);
    for (rank, pair) in (1..).map(f64::from).zip(logits.windows(2)) {
        let t = ((rank + 1.0) / rank).ln();
        // The difference of logits is the logarithm of the ratio of probabilities.
        products += t * (pair[0] - pair[1]);
        squares += t * t;
    }
    let s = products / squares;
    let epsilon = s - 1.0;
    let ratio = match epsilon == 0.0 {
        // Limit of the quotient below.
        true => 2f64.powf(mu) / (vocab as f64).ln(),
        false => epsilon * 2f64.powf(mu) / (1.0 - (vocab as f64).powf(-epsilon)),
    };
    // The conversion bounds large numbers and makes 0 of a number that is not defined, as for a single candidate.
    ratio.powf(1.0 / s) as usize
}
