//! Sampling: chooses the next token from logits, either the most likely one (greedy) or a random draw.
//!
//! Every step is a small function over the `pool` of candidates: logit bias and bans (`bans`), `penalties`,
//! `dry`, the stages of `truncation`, and `mirostat`. [`Sampler`] applies them in the [`Order`] of the request;
//! the default order is that of `transformers`. Ties go to the lowest id. Probabilities are computed in f64. The same
//! seed draws the same tokens, alone or in a batch.
//!
//! The state of a sampler (tokens of the text, random numbers, Mirostat's `mu`) changes only when a token is chosen, so
//! draft tokens that are refused leave no trace.

mod bans;
mod dry;
mod fields;
mod mirostat;
mod penalties;
mod pool;
mod settings;
mod stage;
mod truncation;

use crate::error::{Error, Result};
use crate::rng::Rng;
pub use dry::{Breakers, Dry};
pub use fields::SamplingFields;
pub use mirostat::{Mirostat, Version};
use penalties::Occurrences;
use pool::Pool;
pub use settings::{Counted, Sampling, Xtc};
pub use stage::{Order, Stage};

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

/// Sampler that chooses the tokens of one text.
#[derive(Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: Rng,
    /// Tokens of the text, prompt included; empty if no stage needs them.
    text: Vec<u32>,
    /// Number of tokens of the prompt at the beginning of the text.
    prompt: usize,
    occurrences: Occurrences,
    /// Bound of Mirostat on the information content, in bits.
    mu: f64,
    pool: Pool,
}

impl Sampler {
    /// Creates the sampler of text number `index` of a run. Each text has its own random numbers, whatever the batch.
    pub fn new(sampling: Sampling, index: usize) -> Sampler {
        let rng = Rng::new(sampling.seed.wrapping_add(index as u64));
        let mu = sampling.mirostat.map_or(0.0, |mirostat| mirostat.first_mu());
        let (text, occurrences, pool) = (Vec::new(), Occurrences::default(), Pool::default());
        Sampler { sampling, rng, text, prompt: 0, occurrences, mu, pool }
    }

    /// Begins the text that penalties and bans look at with a prompt.
    pub fn observe_prompt(&mut self, ids: &[u32]) {
        self.prompt = ids.len();
        self.observe(ids);
    }

    /// Appends tokens to the text that penalties and bans look at.
    pub fn observe(&mut self, ids: &[u32]) {
        let (penalties, sampling) = (self.sampling.has_penalties(), &self.sampling);
        if penalties || sampling.dry.is_active() || !sampling.banned.is_empty() {
            let known = self.text.len();
            self.text.extend(ids);
            if penalties {
                self.occurrences.update(&self.text, known, sampling.repeat_last_n, self.prompt);
            }
        }
    }

    /// Returns how many of the largest logits are enough to choose a token; `None` when all are needed.
    pub fn suffices(&self) -> Option<usize> {
        let sampling = &self.sampling;
        if sampling.changes_single_logits() {
            return None;
        }
        if sampling.is_greedy() {
            return Some(1);
        }
        let first = sampling.order.stages().iter().find(|stage| sampling.truncates(**stage));
        (first == Some(&Stage::TopK)).then_some(sampling.top_k)
    }

    /// Chooses the next token from the largest logits, sorted in descending order. There must be at least as many as
    /// [`Sampler::suffices`] returns; the token is then the same as with all logits.
    ///
    /// # Errors
    /// The largest logit is NaN or infinite, which only broken weights cause.
    pub fn sample_best(&mut self, best: &[(u32, f32)]) -> Result<u32> {
        best.first().map_or(Ok(()), |(id, logit)| check(*id, *logit))?;
        if self.sampling.is_greedy() {
            return Ok(best.first().map_or(0, |(id, _)| *id));
        }
        let mut kept = best[..self.sampling.top_k.min(best.len())].to_vec();
        kept.sort_unstable_by_key(|(id, _)| *id);
        self.pool.fill(kept.into_iter());
        self.choose(best.len())
    }

    /// Chooses the next token from all logits. Tokens with a logit of -inf are never chosen.
    ///
    /// # Errors
    /// A logit is NaN or infinite, which only broken weights cause, or no token may follow.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        (0u32..).zip(logits).try_for_each(|(id, logit)| check(id, *logit))?;
        if self.sampling.is_greedy() && !self.sampling.changes_single_logits() {
            let best = argmax(logits);
            return if logits[best as usize] > f32::NEG_INFINITY { Ok(best) } else { Err(nothing_left()) };
        }
        self.pool.fill((0u32..).zip(logits.iter().copied()));
        bans::bias_and_bans(&mut self.pool, &self.text, &self.sampling);
        self.choose(logits.len())
    }

    /// Applies the stages to the pool and chooses a token from it. `vocab` is the number of logits.
    fn choose(&mut self, vocab: usize) -> Result<u32> {
        if self.pool.len() == 0 {
            return Err(nothing_left());
        }
        let greedy = self.sampling.is_greedy();
        let order = self.sampling.order.clone();
        order.stages().iter().filter(|stage| !greedy || stage.is_penalty()).for_each(|stage| self.apply(*stage));
        if greedy {
            return self.pool.most_likely().map(|entry| entry.id).ok_or_else(nothing_left);
        }
        if let Some(mirostat) = &self.sampling.mirostat {
            mirostat.keep(&mut self.pool, self.mu, vocab);
        }
        self.pool.normalize();
        let chosen = *self.pool.draw(&mut self.rng).ok_or_else(nothing_left)?;
        if let Some(mirostat) = &self.sampling.mirostat {
            self.mu = mirostat.next_mu(self.mu, &chosen);
        }
        Ok(chosen.id)
    }

    /// Applies one stage; does nothing if its parameters have no effect.
    fn apply(&mut self, stage: Stage) {
        let (pool, sampling) = (&mut self.pool, &self.sampling);
        match stage {
            Stage::Penalties => penalties::penalties(pool, &self.occurrences, sampling),
            Stage::Dry if sampling.dry.is_active() => dry::dry(pool, &self.text, &sampling.dry),
            Stage::Dry => {}
            Stage::Temperature => truncation::temperature(pool, sampling.temperature),
            Stage::TopK => truncation::top_k(pool, sampling.top_k),
            Stage::TopP => truncation::top_p(pool, sampling.top_p),
            Stage::MinP => truncation::min_p(pool, sampling.min_p),
            Stage::Typical => truncation::typical(pool, sampling.typical_p),
            Stage::Xtc => truncation::xtc(pool, &sampling.xtc, &mut self.rng),
        }
    }
}

/// Builds the error for a step in which every token is excluded.
fn nothing_left() -> Error {
    Error::usage("found no token that may follow, expected at least one that is neither banned nor excluded")
        .help("ban fewer tokens (--ban, --logit-bias)")
}

/// Returns an error for a NaN or infinite logit.
fn check(id: u32, logit: f32) -> Result<()> {
    if !logit.is_nan() && logit != f32::INFINITY {
        return Ok(());
    }
    Err(Error::corrupt(format!("found the logit {logit} of token {id}, expected a finite number"))
        .help("check the pack with `iec inspect --stats`, or use --precision fp32"))
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
mod reference_tests;
#[cfg(test)]
mod tests;
