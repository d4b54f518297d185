//! Speculative decoding: draft tokens that the model verifies in one batch, so that one pass over the weights yields
//! several tokens.
//!
//! A step feeds a text its last token and some draft tokens; the sampler then chooses token after token from the
//! logits, exactly as it would without them, until it chooses another token than was drafted. Logits are the same bits
//! in any batch, so the text is the same, too, greedy or sampled. Draft tokens come from the text itself ([`lookup`])
//! or from a small model ([`draft`]); [`pace`] decides how many are worth their time, which may be none.

pub mod draft;
pub mod lookup;
pub mod pace;

use super::engine::{Engine, Sequence};
use crate::error::Result;
use draft::Draft;
use lookup::Lookup;
use pace::{Cost, Trust};
use std::time::Duration;

/// The source of draft tokens, and what they cost on this machine. Serves all texts of an engine, one call after
/// another.
#[derive(Debug)]
pub struct Speculator {
    source: Source,
    cost: Cost,
}

#[derive(Debug)]
enum Source {
    Nothing,
    Lookup,
    Draft(Box<Draft>),
}

impl Speculator {
    /// No draft tokens.
    pub fn off() -> Speculator {
        Speculator { source: Source::Nothing, cost: Cost::new(0.0) }
    }

    /// Prompt lookup: draft tokens from earlier occurrences of the same n-gram.
    pub fn ngram() -> Speculator {
        Speculator { source: Source::Lookup, cost: Cost::new(0.0) }
    }

    /// Draft tokens of `small`, a model with the same vocabulary as `engine`.
    pub fn draft(small: Engine, engine: &Engine) -> Speculator {
        let cost = small.weight_bytes_per_token() as f64 / engine.weight_bytes_per_token().max(1) as f64;
        Speculator { source: Source::Draft(Box::new(Draft::new(small, engine.config().vocab))), cost: Cost::new(cost) }
    }

    /// Drafts so many tokens in every step, whether it pays or not: to measure what that costs, and to test.
    pub fn always(self, ahead: usize) -> Speculator {
        Speculator { cost: self.cost.always(ahead), ..self }
    }

    /// True when no tokens are drafted.
    pub fn is_off(&self) -> bool {
        matches!(self.source, Source::Nothing)
    }

    /// Drafts the next tokens of each text; often none.
    ///
    /// # Errors
    /// The small model fails.
    pub fn draft_tokens(&mut self, texts: &mut [Text<'_>]) -> Result<Vec<Vec<u32>>> {
        match &mut self.source {
            Source::Nothing => Ok(vec![Vec::new(); texts.len()]),
            Source::Lookup => Ok(look_up(texts, &self.cost)),
            Source::Draft(draft) => draft.draft_tokens(texts, &mut self.cost),
        }
    }

    /// A step that read `rows` tokens took so long.
    pub fn observe(&mut self, rows: usize, time: Duration) {
        self.cost.observe(rows, time);
    }
}

/// A text to draft tokens for.
#[derive(Debug)]
pub struct Text<'a> {
    /// Its tokens; the model has read all but the last.
    pub ids: &'a [u32],
    /// Most tokens that can be of use.
    pub room: usize,
    /// What is remembered of it.
    pub memory: &'a mut Memory,
}

/// What speculation remembers of one text.
#[derive(Debug)]
pub struct Memory {
    lookup: Lookup,
    /// What the small model has read.
    pub(super) sequence: Option<Sequence>,
    /// How often draft tokens of each kind are accepted.
    trust: [Trust; KINDS],
    /// The kind of the current draft, and its first token where it was not worth verifying: it is compared with what
    /// comes at no cost.
    current: Option<(usize, u32)>,
    /// Tokens since the small model was last asked, and how many must go by before it gets another chance.
    idle: usize,
    pause: usize,
    /// Draft tokens that were verified.
    pub drafted: usize,
    /// Draft tokens that the sampler chose, too.
    pub accepted: usize,
}

/// Agreements of a look-up are trusted by their length: 2, 3, 4 to 7, 8 and more tokens. The last kind is a small
/// model.
const KINDS: usize = 5;
/// How likely a draft token of each kind is accepted before any was verified.
const PRIORS: [f64; KINDS] = [0.2, 0.3, 0.5, 0.7, SMALL_MODEL];
const SMALL_MODEL: f64 = 0.5;
/// Tokens before a small model that was of no use gets another chance; twice as many each time.
const PAUSES: [usize; 2] = [64, 1024];

impl Default for Memory {
    fn default() -> Memory {
        Memory {
            lookup: Lookup::default(),
            sequence: None,
            trust: PRIORS.map(Trust::new),
            current: None,
            idle: 0,
            pause: PAUSES[0],
            drafted: 0,
            accepted: 0,
        }
    }
}

impl Memory {
    /// Learns from the tokens that were chosen, `taken`, when `draft` was verified.
    pub fn learn(&mut self, draft: &[u32], taken: &[u32]) {
        let right = draft.iter().zip(taken).take_while(|(a, b)| a == b).count();
        self.drafted += draft.len();
        self.accepted += right;
        let Some((kind, first)) = self.current.take() else { return };
        let trust = &mut self.trust[kind];
        match draft {
            [] => trust.observe(1, usize::from(taken.first() == Some(&first))),
            // A text may end before all draft tokens were compared.
            _ => trust.observe(draft.len().min(taken.len()), right),
        }
        if !draft.is_empty() && trust.likely() > 0.5 {
            self.pause = PAUSES[0];
        }
    }

    /// How likely the small model is right. One that was given up is believed anew after a pause: texts change.
    fn likely_after_pause(&mut self) -> f64 {
        if self.idle >= self.pause {
            self.idle = 0;
            self.pause = (2 * self.pause).min(PAUSES[1]);
            self.trust[KINDS - 1] = Trust::new(SMALL_MODEL);
        }
        self.trust[KINDS - 1].likely()
    }
}

fn look_up(texts: &mut [Text<'_>], cost: &Cost) -> Vec<Vec<u32>> {
    let places: Vec<_> = texts.iter_mut().map(|text| text.memory.lookup.find(text.ids)).collect();
    let kind = |agreement: usize| match agreement {
        ..=2 => 0,
        3 => 1,
        4..=7 => 2,
        _ => 3,
    };
    let likely = places.iter().zip(&*texts).map(|(place, text)| match place {
        Some(place) => (text.memory.trust[kind(place.agreement)].likely(), text.room),
        None => (0.0, 0),
    });
    let plan = cost.plan(&likely.collect::<Vec<_>>());
    let copies = texts.iter_mut().zip(places).zip(plan).map(|((text, place), count)| {
        let Some(place) = place else { return Vec::new() };
        text.memory.current = Some((kind(place.agreement), text.ids[place.start]));
        place.copy(text.ids, count)
    });
    copies.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates 2000 tokens with draft tokens that are accepted so often in ten; a token more costs a tenth of a step,
    /// a draft token a twentieth. Returns the tokens per step's time, and how many were drafted.
    fn played(right_in_ten: usize, kind: usize) -> (f64, usize) {
        let (mut memory, mut cost) = (Memory::default(), Cost::new(0.05));
        let (mut tokens, mut time) = (0, 0.0);
        while tokens < 2000 {
            let likely = if kind == KINDS - 1 { memory.likely_after_pause() } else { memory.trust[kind].likely() };
            let ahead = cost.plan(&[(likely, 40)])[0];
            memory.idle = if ahead == 0 { memory.idle + 1 } else { 0 };
            memory.current = Some((kind, 1)).filter(|_| kind < KINDS - 1 || ahead > 0);
            let right = (0..ahead).take_while(|i| (7 * (tokens + i)) % 10 < right_in_ten).count();
            let next = u32::from(ahead == 0 && (7 * tokens) % 10 < right_in_ten);
            let taken = [vec![1; right], vec![next]].concat();
            memory.learn(&vec![1; ahead], &taken);
            let step = 1.0 + 0.1 * ahead as f64;
            cost.observe(1 + ahead, Duration::from_secs_f64(0.01 * step));
            time += step + if kind == KINDS - 1 { 0.05 * ahead as f64 } else { 0.0 };
            tokens += taken.len();
        }
        (tokens as f64 / time, memory.drafted)
    }

    #[test]
    fn a_useless_draft_is_abandoned() {
        for kind in 0..KINDS {
            let (speed, drafted) = played(0, kind);
            assert!(speed > 0.97 && drafted < 60, "kind {kind}: {speed} of the speed, {drafted} drafted");
        }
    }

    #[test]
    fn a_good_draft_is_followed() {
        for kind in 0..KINDS {
            let (speed, drafted) = played(9, kind);
            assert!(speed > 2.0 && drafted > 1500, "kind {kind}: {speed} of the speed, {drafted} drafted");
        }
    }
}
