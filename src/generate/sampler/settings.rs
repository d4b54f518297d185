//! Parameters of sampling, and their ranges.

use super::dry::Dry;
use super::mirostat::Mirostat;
use super::stage::{Order, Stage};
use crate::error::{Error, Result};
use std::sync::Arc;

/// Sampling parameters. The default is greedy, and no stage has an effect.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 = greedy, which only bias, bans and penalties can change.
    pub temperature: f64,
    /// Number of most likely tokens to keep; 0 = all.
    pub top_k: usize,
    /// The most likely tokens are kept until their total probability reaches this value; 1 = all.
    pub top_p: f64,
    /// Minimum probability of tokens to keep, as a fraction of that of the most likely one; 0 = all.
    pub min_p: f64,
    /// The tokens with the most typical information content are kept until their total probability reaches this value;
    /// 1 = all.
    pub typical_p: f64,
    /// Parameters of XTC.
    pub xtc: Xtc,
    /// Divisor of positive and factor of negative logits of tokens seen before; 1 = no penalty.
    pub repeat_penalty: f64,
    /// Value subtracted from the logits of tokens that [`Sampling::counted`] names; 0 = no penalty.
    pub presence_penalty: f64,
    /// Value subtracted from a logit for each occurrence that [`Sampling::counted`] names; 0 = no penalty.
    pub frequency_penalty: f64,
    /// Tokens that the presence and the frequency penalty count. The repetition penalty counts prompt and answer.
    pub counted: Counted,
    /// Number of last tokens that the three penalties consider, prompt included; `None` = all.
    pub repeat_last_n: Option<usize>,
    /// Parameters of DRY.
    pub dry: Dry,
    /// Mirostat, if it decides how many tokens to keep.
    pub mirostat: Option<Mirostat>,
    /// Tokens with a value that is added to their logit; -inf bans the token.
    pub logit_bias: Arc<[(u32, f64)]>,
    /// Sequences of tokens that must not appear.
    pub banned: Arc<[Vec<u32>]>,
    /// Order of the stages.
    pub order: Order,
    /// Seed of the random draws.
    pub seed: u64,
}

/// Tokens that the presence and the frequency penalty count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Counted {
    /// Tokens of prompt and answer, as llama.cpp counts.
    #[default]
    Text,
    /// Tokens of the answer, as the API of OpenAI counts.
    Answer,
}

impl Counted {
    /// Returns the number of occurrences that count, of those in prompt and answer and of those in the answer.
    pub(super) fn of(self, text: u32, answer: u32) -> u32 {
        match self {
            Counted::Text => text,
            Counted::Answer => answer,
        }
    }
}

/// Parameters of XTC ("exclude top choices").
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Xtc {
    /// Probability with which the stage is applied to a token; 0 = never.
    pub probability: f64,
    /// Probability from which a candidate counts as likely; above 0.5 the stage has no effect.
    pub threshold: f64,
}

impl Xtc {
    /// Returns true if the stage can remove a candidate.
    pub fn is_active(&self) -> bool {
        self.probability > 0.0 && self.threshold <= 0.5
    }
}

/// Threshold of llama.cpp, off.
impl Default for Xtc {
    fn default() -> Xtc {
        Xtc { probability: 0.0, threshold: 0.1 }
    }
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            xtc: Xtc::default(),
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            counted: Counted::default(),
            repeat_last_n: None,
            dry: Dry::default(),
            mirostat: None,
            logit_bias: Arc::default(),
            banned: Arc::default(),
            order: Order::default(),
            seed: 0,
        }
    }
}

impl Sampling {
    /// Checks that every parameter is within its range and that none is without effect because of another.
    ///
    /// # Errors
    /// A parameter is out of range, its stage is not part of the order, or Mirostat replaces it; the message names it.
    pub fn validate(&self) -> Result<()> {
        let probability = |value: f64| (0.0..=1.0).contains(&value);
        let share = |value: f64| value > 0.0 && value <= 1.0;
        let checks = [
            ("temperature", self.temperature, self.temperature >= 0.0, "0 (greedy) or more"),
            ("top-p", self.top_p, share(self.top_p), "more than 0 and at most 1"),
            ("min-p", self.min_p, probability(self.min_p), "0 to 1"),
            ("typical", self.typical_p, share(self.typical_p), "more than 0 and at most 1"),
            ("xtc-probability", self.xtc.probability, probability(self.xtc.probability), "0 to 1"),
            ("xtc-threshold", self.xtc.threshold, probability(self.xtc.threshold), "0 to 1"),
            ("repeat-penalty", self.repeat_penalty, self.repeat_penalty > 0.0, "more than 0"),
            ("presence-penalty", self.presence_penalty, true, "a finite number"),
            ("frequency-penalty", self.frequency_penalty, true, "a finite number"),
        ];
        if let Some((name, value, _, expected)) = checks.iter().find(|(_, value, ok, _)| !(value.is_finite() && *ok)) {
            return Err(Error::usage(format!("found {value}, expected {expected}")).setting(*name));
        }
        self.dry.validate()?;
        self.mirostat.as_ref().map_or(Ok(()), Mirostat::validate)?;
        self.check_bias_and_bans()?;
        self.check_order()
    }

    fn check_bias_and_bans(&self) -> Result<()> {
        if let Some((id, bias)) = self.logit_bias.iter().find(|(_, bias)| bias.is_nan() || *bias == f64::INFINITY) {
            let found = format!("token {id}: found {bias}, expected a number or -inf");
            return Err(Error::usage(found).setting("logit-bias"));
        }
        match self.banned.iter().any(Vec::is_empty) {
            true => Err(Error::usage("found an empty sequence of tokens, expected at least one token").setting("ban")),
            false => Ok(()),
        }
    }

    /// Checks that every stage with an effect is part of the order, and that Mirostat replaces none of them.
    fn check_order(&self) -> Result<()> {
        if let Some(stage) = self.excluded().first() {
            let name = stage.name();
            if !self.order.stages().contains(stage) {
                return Err(Error::usage(format!(
                    "found a value for the sampler `{name}`, which --samplers leaves out"
                ))
                .help(format!("add {name} to --samplers, or leave its option out"))
                .setting("samplers"));
            }
            return Err(Error::usage(format!("found --mirostat together with the sampler `{name}`, expected one"))
                .help("Mirostat decides how many tokens to keep; leave the other option out")
                .setting("mirostat"));
        }
        Ok(())
    }

    /// Adds the tokens that other parameters exclude, and their banned sequences.
    pub fn add_bans(&mut self, other: &Sampling) {
        let is_new = |bias: &&(u32, f64)| bias.1 == f64::NEG_INFINITY && !self.logit_bias.contains(bias);
        let biases: Vec<_> = other.logit_bias.iter().filter(is_new).copied().collect();
        let banned: Vec<_> = other.banned.iter().filter(|ids| !self.banned.contains(ids)).cloned().collect();
        if !biases.is_empty() {
            self.logit_bias = self.logit_bias.iter().copied().chain(biases).collect();
        }
        if !banned.is_empty() {
            self.banned = self.banned.iter().cloned().chain(banned).collect();
        }
    }

    /// Returns the stages with an effect that the order leaves out or that Mirostat replaces; there must be none.
    pub fn excluded(&self) -> Vec<Stage> {
        let is_out = |stage: &Stage| {
            self.has_effect(*stage)
                && (!self.order.stages().contains(stage) || self.mirostat.is_some() && self.truncates(*stage))
        };
        Order::default().stages().iter().copied().filter(is_out).collect()
    }

    /// Gives the parameters of a stage values without effect.
    pub fn turn_off(&mut self, stage: Stage) {
        match stage {
            Stage::Penalties => (self.repeat_penalty, self.presence_penalty, self.frequency_penalty) = (1.0, 0.0, 0.0),
            Stage::Dry => self.dry.multiplier = 0.0,
            Stage::Temperature => self.temperature = if self.is_greedy() { 0.0 } else { 1.0 },
            Stage::TopK => self.top_k = 0,
            Stage::TopP => self.top_p = 1.0,
            Stage::MinP => self.min_p = 0.0,
            Stage::Typical => self.typical_p = 1.0,
            Stage::Xtc => self.xtc = Xtc::default(),
        }
    }

    /// Returns true if the most likely token is always chosen.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Returns true if tokens that occurred before are penalised.
    pub(super) fn has_penalties(&self) -> bool {
        let neutral = self.repeat_penalty == 1.0 && self.presence_penalty == 0.0 && self.frequency_penalty == 0.0;
        !neutral && self.repeat_last_n != Some(0)
    }

    /// Returns true if logits may change by token, so that the order of tokens may change.
    pub(super) fn changes_single_logits(&self) -> bool {
        self.has_penalties() || self.dry.is_active() || !self.logit_bias.is_empty() || !self.banned.is_empty()
    }

    /// Returns true if a stage removes candidates, or Mirostat does so in its place.
    pub(super) fn truncates(&self, stage: Stage) -> bool {
        match stage {
            Stage::Penalties | Stage::Dry | Stage::Temperature => false,
            _ => self.has_effect(stage),
        }
    }

    fn has_effect(&self, stage: Stage) -> bool {
        match stage {
            Stage::Penalties => self.has_penalties(),
            Stage::Dry => self.dry.is_active(),
            Stage::Temperature => self.temperature != 0.0 && self.temperature != 1.0,
            Stage::TopK => self.top_k > 0,
            Stage::TopP => self.top_p < 1.0,
            Stage::MinP => self.min_p > 0.0,
            Stage::Typical => self.typical_p < 1.0,
            Stage::Xtc => self.xtc.is_active(),
        }
    }
}
