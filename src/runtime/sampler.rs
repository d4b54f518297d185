//! Sampling: chooses the next token from logits, either the most likely one (greedy) or a random draw.
//!
//! The steps and their order are those of `transformers`: repetition penalty over prompt and generated tokens (also
//! when greedy), then, when drawing, temperature, top-k, top-p and min-p. Ties go to the lowest id. Probabilities are
//! computed in f64. The same seed draws the same tokens, alone or in a batch.

use crate::error::{Error, Result};
use crate::rng::Rng;
use std::cmp::Ordering;
use std::collections::HashSet;

/// Sampling parameters. The default is greedy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 = greedy.
    pub temperature: f64,
    /// Number of most likely tokens to keep; 0 = all.
    pub top_k: usize,
    /// The most likely tokens are kept until their total probability reaches this value; 1 = all.
    pub top_p: f64,
    /// Minimum probability of tokens to keep, as a fraction of that of the most likely one; 0 = all.
    pub min_p: f64,
    /// Divisor of positive and factor of negative logits of tokens seen before; 1 = no penalty.
    pub repeat_penalty: f64,
    /// Seed of the random draws.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repeat_penalty: 1.0, seed: 0 }
    }
}

impl Sampling {
    /// Checks that every parameter is within its range.
    ///
    /// # Errors
    /// A parameter is out of range; the message names it.
    pub fn validate(&self) -> Result<()> {
        let checks = [
            ("temperature", self.temperature, self.temperature >= 0.0, "0 (greedy) or more"),
            ("top-p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "more than 0 and at most 1"),
            ("min-p", self.min_p, (0.0..=1.0).contains(&self.min_p), "0 to 1"),
            ("repeat-penalty", self.repeat_penalty, self.repeat_penalty > 0.0, "more than 0"),
        ];
        match checks.iter().find(|(_, value, ok, _)| !(value.is_finite() && *ok)) {
            Some((name, value, _, expected)) => {
                Err(Error::usage(format!("{name}: found {value}, expected {expected}")))
            }
            None => Ok(()),
        }
    }
}

/// A token with its raw logit and the natural logarithm of its probability before any sampling step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Token id.
    pub id: u32,
    /// Logit as the model computed it.
    pub logit: f32,
    /// Log-softmax over the whole vocabulary, in f64.
    pub logprob: f64,
}

/// A token that may be drawn, with its scaled logit and later its probability.
#[derive(Debug, Clone, Copy)]
struct Weighted {
    id: u32,
    value: f64,
}

/// Sampler that chooses the tokens of one text.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: Rng,
    seen: HashSet<u32>,
    pool: Vec<Weighted>,
}

impl Sampler {
    /// Creates the sampler of text number `index` of a run. Each text has its own random numbers, whatever the batch.
    pub fn new(sampling: Sampling, index: usize) -> Sampler {
        let rng = Rng::new(sampling.seed.wrapping_add(index as u64));
        Sampler { sampling, rng, seen: HashSet::new(), pool: Vec::new() }
    }

    /// Records tokens of the text for the repetition penalty.
    pub fn observe(&mut self, ids: &[u32]) {
        if self.sampling.repeat_penalty != 1.0 {
            self.seen.extend(ids);
        }
    }

    /// Returns how many of the largest logits are enough to choose a token; `None` when all are needed.
    pub fn suffices(&self) -> Option<usize> {
        let Sampling { temperature, top_k, repeat_penalty, .. } = self.sampling;
        match (temperature == 0.0, top_k) {
            _ if repeat_penalty != 1.0 => None,
            (true, _) => Some(1),
            (false, 0) => None,
            (false, k) => Some(k),
        }
    }

    /// Chooses the next token from the largest logits, sorted in descending order. There must be at least as many as
    /// [`Sampler::suffices`] returns; the token is then the same as with all logits.
    ///
    /// # Errors
    /// The largest logit is NaN or infinite, which only broken weights cause.
    pub fn sample_best(&mut self, best: &[(u32, f32)]) -> Result<u32> {
        best.first().map_or(Ok(()), |(id, logit)| check(*id, *logit))?;
        if self.sampling.temperature == 0.0 {
            return Ok(best.first().map_or(0, |(id, _)| *id));
        }
        self.pool.clear();
        let scale = self.sampling.temperature;
        let kept = &best[..self.sampling.top_k.min(best.len())];
        self.pool.extend(kept.iter().map(|(id, logit)| Weighted { id: *id, value: f64::from(*logit) / scale }));
        self.pool.sort_unstable_by_key(|entry| entry.id);
        Ok(self.draw_from_pool())
    }

    /// Chooses the next token from all logits.
    ///
    /// # Errors
    /// A logit is NaN or infinite, which only broken weights cause.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        (0u32..).zip(logits).try_for_each(|(id, logit)| check(id, *logit))?;
        if self.seen.is_empty() && self.sampling.temperature == 0.0 {
            return Ok(argmax(logits));
        }
        self.fill_pool(logits);
        if self.sampling.temperature == 0.0 {
            return Ok(self.pool.iter().min_by(|a, b| most_likely_first(a, b)).map_or(0, |best| best.id));
        }
        self.keep_top_k();
        Ok(self.draw_from_pool())
    }

    /// Draws a token from the scaled logits in the pool.
    fn draw_from_pool(&mut self) -> u32 {
        self.softmax();
        self.keep_top_p();
        self.keep_min_p();
        self.draw()
    }

    /// Fills the pool with the penalised logits, divided by the temperature when drawing.
    fn fill_pool(&mut self, logits: &[f32]) {
        let penalty = self.sampling.repeat_penalty;
        let scale = if self.sampling.temperature > 0.0 { self.sampling.temperature } else { 1.0 };
        self.pool.clear();
        self.pool.extend((0u32..).zip(logits).map(|(id, logit)| Weighted { id, value: f64::from(*logit) / scale }));
        for id in &self.seen {
            if let Some(entry) = self.pool.get_mut(*id as usize) {
                entry.value = if entry.value < 0.0 { entry.value * penalty } else { entry.value / penalty };
            }
        }
    }

    fn keep_top_k(&mut self) {
        let k = self.sampling.top_k;
        if k > 0 && k < self.pool.len() {
            self.pool.select_nth_unstable_by(k - 1, most_likely_first);
            self.pool.truncate(k);
            // The selection leaves an arbitrary order; sorting by id makes the draw independent of it.
            self.pool.sort_unstable_by_key(|entry| entry.id);
        }
    }

    fn softmax(&mut self) {
        let highest = self.pool.iter().map(|entry| entry.value).fold(f64::NEG_INFINITY, f64::max);
        self.pool.iter_mut().for_each(|entry| entry.value = (entry.value - highest).exp());
        let total: f64 = self.pool.iter().map(|entry| entry.value).sum();
        self.pool.iter_mut().for_each(|entry| entry.value /= total);
    }

    /// Removes the least likely tokens as long as the total probability of the removed ones is at most `1 - top_p`,
    /// but never all tokens.
    fn keep_top_p(&mut self) {
        let budget = 1.0 - self.sampling.top_p;
        if self.sampling.top_p >= 1.0 {
            return;
        }
        // Even together, tokens below this probability stay within the budget, so they are removed without sorting.
        let negligible = budget / self.pool.len() as f64;
        let mut removed = 0.0;
        self.pool.retain(|entry| {
            let keep = entry.value >= negligible;
            removed += if keep { 0.0 } else { entry.value };
            keep
        });
        self.pool.sort_unstable_by(most_likely_first);
        while self.pool.len() > 1 {
            removed += self.pool[self.pool.len() - 1].value;
            if removed > budget {
                break;
            }
            self.pool.pop();
        }
        self.pool.sort_unstable_by_key(|entry| entry.id);
    }

    fn keep_min_p(&mut self) {
        let highest = self.pool.iter().map(|entry| entry.value).fold(0.0, f64::max);
        let least = self.sampling.min_p * highest;
        self.pool.retain(|entry| entry.value >= least);
    }

    fn draw(&mut self) -> u32 {
        let total: f64 = self.pool.iter().map(|entry| entry.value).sum();
        let mut left = self.rng.next_f64() * total;
        for entry in &self.pool {
            left -= entry.value;
            if left < 0.0 {
                return entry.id;
            }
        }
        // Rounding can leave a remainder: then take the last token with a probability above 0.
        self.pool.iter().rev().find(|entry| entry.value > 0.0).map_or(0, |entry| entry.id)
    }
}

/// Returns an error for a NaN or infinite logit.
fn check(id: u32, logit: f32) -> Result<()> {
    if !logit.is_nan() && logit != f32::INFINITY {
        return Ok(());
    }
    Err(Error::corrupt(format!("found the logit {logit} of token {id}, expected a finite number"))
        .help("check the pack with `iec inspect --stats`, or use --precision fp32"))
}

fn most_likely_first(a: &Weighted, b: &Weighted) -> Ordering {
    b.value.total_cmp(&a.value).then(a.id.cmp(&b.id))
}

/// Returns the id of the largest value, the lowest id if several are equal.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best as u32
}

/// Returns the `chosen` token and the `k` most likely ones, most likely first.
pub fn candidates(logits: &[f32], chosen: u32, k: usize) -> (Candidate, Vec<Candidate>) {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits.iter().map(|l| (f64::from(*l) - f64::from(highest)).exp()).sum();
    let log_total = f64::from(highest) + total.ln();
    let candidate = |id: u32| {
        let logit = logits[id as usize];
        Candidate { id, logit, logprob: f64::from(logit) - log_total }
    };
    let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    if k > 0 && k < ids.len() {
        ids.select_nth_unstable_by(k - 1, by_logit);
    }
    ids.truncate(k);
    ids.sort_unstable_by(by_logit);
    (candidate(chosen), ids.into_iter().map(candidate).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LOGITS: [f32; 5] = [1.0, 3.0, 2.0, 3.0, -4.0];

    fn drawn(sampling: Sampling, logits: &[f32], draws: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(sampling, 0);
        let mut counts = vec![0; logits.len()];
        for _ in 0..draws {
            counts[sampler.sample(logits).unwrap() as usize] += 1;
        }
        counts
    }

    fn warm() -> Sampling {
        Sampling { temperature: 1.0, ..Sampling::default() }
    }

    #[test]
    fn greedy_takes_the_largest_and_of_equals_the_lowest_id() {
        assert_eq!(Sampler::new(Sampling::default(), 0).sample(&LOGITS).unwrap(), 1);
        assert_eq!(drawn(Sampling { top_k: 1, ..warm() }, &LOGITS, 50)[1], 50);
    }

    #[test]
    fn draws_follow_the_softmax_of_the_scaled_logits() {
        let temperature = 1.7;
        let draws = 40_000;
        let counts = drawn(Sampling { temperature, ..warm() }, &LOGITS, draws);
        let weights: Vec<f64> = LOGITS.iter().map(|l| (f64::from(*l) / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        for (count, weight) in counts.iter().zip(&weights) {
            let p = weight / total;
            let deviation = (draws as f64 * p * (1.0 - p)).sqrt();
            assert!((*count as f64 - draws as f64 * p).abs() < 5.0 * deviation, "{counts:?}");
        }
    }

    #[test]
    fn filters_keep_what_transformers_keeps() {
        // Probabilities 0.5, 0.25, 0.125, 0.125.
        let logits = [8f32, 4.0, 2.0, 2.0].map(f32::ln);
        struct Case {
            sampling: Sampling,
            kept: &'static [usize],
        }
        let cases = [
            Case { sampling: Sampling { top_k: 2, ..warm() }, kept: &[0, 1] },
            Case { sampling: Sampling { top_k: 3, ..warm() }, kept: &[0, 1, 2] },
            Case { sampling: Sampling { top_p: 0.7, ..warm() }, kept: &[0, 1] },
            Case { sampling: Sampling { top_p: 0.8, ..warm() }, kept: &[0, 1, 2] },
            Case { sampling: Sampling { top_p: 0.1, ..warm() }, kept: &[0] },
            Case { sampling: Sampling { min_p: 0.4, ..warm() }, kept: &[0, 1] },
            Case { sampling: Sampling { min_p: 1.0, ..warm() }, kept: &[0] },
            // After top-k the rest is 2/3 and 1/3: top-p 0.6 keeps one.
            Case { sampling: Sampling { top_k: 2, top_p: 0.6, ..warm() }, kept: &[0] },
        ];
        for case in cases {
            let counts = drawn(case.sampling, &logits, 3000);
            let kept: Vec<usize> = (0..4).filter(|i| counts[*i] > 0).collect();
            assert_eq!(kept, case.kept, "{:?}", case.sampling);
        }
    }

    #[test]
    fn the_repetition_penalty_lowers_what_was_seen_also_when_greedy() {
        let penalised = Sampling { repeat_penalty: 2.0, ..Sampling::default() };
        let mut sampler = Sampler::new(penalised, 0);
        sampler.observe(&[1, 3, 999_999]);
        assert_eq!(sampler.sample(&LOGITS).unwrap(), 2);
        let mut sampler = Sampler::new(penalised, 0);
        sampler.observe(&[1]);
        // Negative logits are multiplied: -1 becomes -2.
        assert_eq!(sampler.sample(&[-1.5, -1.0]).unwrap(), 0);
    }

    #[test]
    fn the_same_seed_draws_the_same_and_another_index_differs() {
        let draw = |seed, index| {
            let mut sampler = Sampler::new(Sampling { seed, ..warm() }, index);
            (0..64).map(|_| sampler.sample(&LOGITS).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draw(5, 1), draw(5, 1));
        assert_ne!(draw(5, 1), draw(5, 2));
    }

    #[test]
    fn logprobs_are_the_log_softmax_most_likely_first() {
        let (chosen, top) = candidates(&LOGITS, 0, 3);
        let total: f64 = LOGITS.iter().map(|l| f64::from(*l).exp()).sum();
        assert!((chosen.logprob - (1.0 - total.ln())).abs() < 1e-12);
        assert_eq!(top.iter().map(|c| c.id).collect::<Vec<_>>(), [1, 3, 2]);
        assert_eq!(candidates(&LOGITS, 0, 99).1.len(), 5);
        assert!(candidates(&LOGITS, 0, 0).1.is_empty());
    }

    #[test]
    fn logits_that_are_no_numbers_are_an_error() {
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(Sampler::new(warm(), 0).sample(&[0.0, bad]).unwrap_err().to_string().contains("token 1"));
        }
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        let cases = [
            (Sampling { temperature: -1.0, ..warm() }, "temperature"),
            (Sampling { temperature: f64::NAN, ..warm() }, "temperature"),
            (Sampling { top_p: 0.0, ..warm() }, "top-p"),
            (Sampling { min_p: 1.5, ..warm() }, "min-p"),
            (Sampling { repeat_penalty: 0.0, ..warm() }, "repeat-penalty"),
        ];
        for (sampling, name) in cases {
            assert!(sampling.validate().unwrap_err().to_string().contains(name));
        }
    }

    proptest! {
        #[test]
        fn top_k_of_one_is_greedy(logits in prop::collection::vec(-30f32..30.0, 1..50), seed: u64, temperature in 0.01f64..5.0) {
            let sampling = Sampling { top_k: 1, temperature, seed, ..Sampling::default() };
            prop_assert_eq!(Sampler::new(sampling, 0).sample(&logits).unwrap(), argmax(&logits));
        }

        #[test]
        fn top_p_keeps_the_smallest_set_that_holds_p(logits in prop::collection::vec(-9f32..9.0, 1..40), top_p in 0.05f64..0.99) {
            let mut sampler = Sampler::new(Sampling { top_p, ..warm() }, 0);
            sampler.fill_pool(&logits);
            sampler.softmax();
            let mut all: Vec<f64> = sampler.pool.iter().map(|entry| entry.value).collect();
            sampler.keep_top_p();
            all.sort_by(|a, b| b.total_cmp(a));
            let kept = sampler.pool.len();
            let mass: f64 = all[..kept].iter().sum();
            prop_assert!(mass > top_p - 1e-9);
            prop_assert!(kept == 1 || mass - all[kept - 1] < top_p + 1e-9);
        }

        #[test]
        fn a_drawn_token_always_has_probability(
            logits in prop::collection::vec(prop_oneof![-500f32..500.0, Just(f32::NEG_INFINITY)], 1..40),
            seed: u64, top_p in 0.05f64..=1.0, min_p in 0f64..=1.0, top_k in 0usize..50,
        ) {
            prop_assume!(logits.iter().any(|l| l.is_finite()));
            let sampling = Sampling { top_k, top_p, min_p, seed, ..warm() };
            let id = Sampler::new(sampling, 0).sample(&logits).unwrap();
            prop_assert!(logits[id as usize].is_finite());
        }
    }
}
