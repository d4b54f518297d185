//! Speculative decoding: draft tokens that the model verifies in one batch, so that one pass over the weights yields
//! several tokens.
//!
//! A step reads the last token of a text and some draft tokens. The sampler then chooses token after token from the
//! logits, exactly as without draft tokens, until it chooses a token other than the drafted one. Logits have the same
//! bits in any batch, so the text is also the same, greedy or sampled. Draft tokens come from the text itself
//! ([`lookup`]) or from a small model ([`draft`]). [`pace`] decides how many tokens are expected to save time, which
//! may be none.

pub mod draft;
pub mod lookup;
pub mod pace;

use crate::error::Result;
use crate::runtime::engine::Engine;
use crate::runtime::sequence::Sequence;
use draft::Draft;
use lookup::Lookup;
use pace::{Cost, Trust};
use std::time::Duration;

/// The source of draft tokens and their measured cost on this machine. It serves all texts of an engine, one call after
/// another.
#[derive(Debug)]
pub struct Speculator {
    source: DraftSource,
    cost: Cost,
}

#[derive(Debug)]
enum DraftSource {
    Nothing,
    Lookup,
    Draft(Box<Draft>),
}

impl Speculator {
    /// Creates a speculator that drafts no tokens.
    pub fn off() -> Speculator {
        Speculator { source: DraftSource::Nothing, cost: Cost::new(0.0) }
    }

    /// Creates a speculator that drafts tokens by prompt lookup, from earlier occurrences of the same n-gram.
    pub fn ngram() -> Speculator {
        Speculator { source: DraftSource::Lookup, cost: Cost::new(0.0) }
    }

    /// Creates a speculator that drafts tokens with `small`, a model with the same vocabulary as `engine`.
    pub fn draft(small: Engine, engine: &Engine) -> Speculator {
        let cost = small.weight_bytes_per_token() as f64 / engine.weight_bytes_per_token().max(1) as f64;
        Speculator {
            source: DraftSource::Draft(Box::new(Draft::new(small, engine.config().vocab))),
            cost: Cost::new(cost),
        }
    }

    /// Drafts `ahead` tokens in every step even if that is slower, for measurements and tests.
    pub fn always(self, ahead: usize) -> Speculator {
        Speculator { cost: self.cost.always(ahead), ..self }
    }

    /// Returns true when no tokens are drafted.
    pub fn is_off(&self) -> bool {
        matches!(self.source, DraftSource::Nothing)
    }

    /// Drafts the next tokens of each text; often there are none.
    ///
    /// # Errors
    /// The draft model fails.
    pub fn draft_tokens(&mut self, texts: &mut [TextSoFar<'_>]) -> Result<Vec<Vec<u32>>> {
        match &mut self.source {
            DraftSource::Nothing => Ok(vec![Vec::new(); texts.len()]),
            DraftSource::Lookup => Ok(look_up(texts, &self.cost)),
            DraftSource::Draft(draft) => draft.draft_tokens(texts, &mut self.cost),
        }
    }

    /// Records the time of a step that read `rows` tokens.
    pub fn observe(&mut self, rows: usize, time: Duration) {
        self.cost.observe(rows, time);
    }
}

/// A text to draft tokens for.
#[derive(Debug)]
pub struct TextSoFar<'a> {
    /// Tokens of the text; the model has read all but the last.
    pub ids: &'a [u32],
    /// Largest number of draft tokens that can be used.
    pub room: usize,
    /// State of speculation for this text.
    pub memory: &'a mut Memory,
}

/// State of speculation for one text.
#[derive(Debug)]
pub struct Memory {
    lookup: Lookup,
    /// Sequence of the draft model.
    pub(super) sequence: Option<Sequence>,
    /// Acceptance rate of draft tokens of each kind.
    trust: [Trust; KINDS],
    /// Kind of the current draft and its first token. If the draft is not verified, its first token is still compared
    /// with the next token of the text, at no cost.
    current: Option<(usize, u32)>,
    /// Number of steps since the draft model was last used.
    idle: usize,
    /// Value of `idle` at which the draft model is tried again.
    pause: usize,
    /// Number of draft tokens that were verified.
    pub drafted: usize,
    /// Number of draft tokens that were accepted.
    pub accepted: usize,
}

/// Number of kinds of draft tokens with separate acceptance rates: prompt lookups with 2, 3, 4 to 7, and 8 or more
/// agreeing tokens, and a draft model as the last kind.
const KINDS: usize = 5;
/// Assumed acceptance rate of each kind before any draft token was verified.
const PRIORS: [f64; KINDS] = [0.2, 0.3, 0.5, 0.7, SMALL_MODEL];
/// Assumed acceptance rate of a draft model before any of its tokens was verified, and again after a pause.
const SMALL_MODEL: f64 = 0.5;
/// First and longest pause in steps after which a draft model that saved no time is tried again; each pause is twice
/// as long as the last.
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
    /// Updates the acceptance rates with the tokens that the sampler chose, `taken`, when `draft` was verified.
    pub fn learn(&mut self, draft: &[u32], taken: &[u32]) {
        let right = draft.iter().zip(taken).take_while(|(a, b)| a == b).count();
        self.drafted += draft.len();
        self.accepted += right;
        let Some((kind, first)) = self.current.take() else { return };
        let trust = &mut self.trust[kind];
        match draft {
            [] => trust.observe(1, usize::from(taken.first() == Some(&first))),
            // A text may end before all draft tokens are compared.
            _ => trust.observe(draft.len().min(taken.len()), right),
        }
        if !draft.is_empty() && trust.likely() > 0.5 {
            self.pause = PAUSES[0];
        }
    }

    /// Returns the acceptance rate of the draft model. After a pause without drafts, the rate is reset, because texts
    /// change.
    fn likely_after_pause(&mut self) -> f64 {
        if self.idle >= self.pause {
            self.idle = 0;
            self.pause = (2 * self.pause).min(PAUSES[1]);
            self.trust[KINDS - 1] = Trust::new(SMALL_MODEL);
        }
        self.trust[KINDS - 1].likely()
    }
}

/// Drafts tokens for each text by prompt lookup, as many as are expected to save time.
fn look_up(texts: &mut [TextSoFar<'_>], cost: &Cost) -> Vec<Vec<u32>> {
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

    /// Simulates 2000 tokens of which `right_in_ten` of ten are drafted correctly. Each further token costs a tenth of
    /// a step, each draft token a twentieth. Returns the tokens generated in the time of one step without draft tokens,
    /// and the total number of draft tokens.
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
