//! Speculative decoding: draft tokens that the model verifies in one batch, so that one pass over the weights yields
//! several tokens.
//!
//! A step reads the last token of a text and some draft tokens. The sampler then chooses token after token from the
//! logits, exactly as without draft tokens, until it chooses a token other than the drafted one. Logits have the same
//! bits in any batch, so the text is also the same, greedy or sampled. Draft tokens are copied from the text itself
//! ([`lookup`]) or from earlier texts ([`earlier`]), or a model drafts them ([`model`]). For each text, [`pace`]
//! decides which of these saves more time, and how many tokens are expected to save time, which may be none.

pub mod counts;
pub mod earlier;
mod imitation;
pub mod lookup;
pub mod model;
pub mod pace;

use crate::error::{Cause, Result};
use crate::runtime::engine::Engine;
use crate::runtime::prediction::Predictor;
pub use counts::{DraftCount, DraftCounts, Drafter};
use earlier::EarlierTexts;
use imitation::Imitation;
use lookup::{EarlierPlace, Lookup};
use model::{DraftModel, DraftState};
use pace::{Cost, Estimate, Trust};
use std::time::Duration;

/// The sources of draft tokens and their measured cost on this machine. It serves all texts of an engine, one call
/// after another.
#[derive(Debug)]
pub struct Speculator {
    /// Earlier texts, if passages are copied.
    history: Option<EarlierTexts>,
    model: Option<DraftModel>,
    /// Replaces the drafts, if their acceptance is chosen.
    imitation: Option<Imitation>,
    cost: Cost,
}

impl Speculator {
    /// Creates a speculator that drafts no tokens.
    pub fn off() -> Speculator {
        Speculator { history: None, model: None, imitation: None, cost: Cost::new(0.0) }
    }

    /// Creates a speculator that copies draft tokens from earlier occurrences of the same n-gram, in the text and in
    /// earlier texts of the same owner.
    pub fn ngram() -> Speculator {
        Speculator { history: Some(EarlierTexts::default()), ..Speculator::off() }
    }

    /// Creates a speculator that drafts tokens with `small`, a model with the same vocabulary as `engine`.
    pub fn draft(small: Engine, engine: &Engine) -> Speculator {
        let cost = relative_bytes(small.weight_bytes_per_token(), engine);
        let model = DraftModel::small(small, engine.config().vocab);
        Speculator { model: Some(model), cost: Cost::new(cost), ..Speculator::off() }
    }

    /// Creates a speculator that drafts tokens with `layer`, a layer of multi-token prediction of `engine`.
    ///
    /// # Errors
    /// There is no memory for the rows of the output matrix that drafts are chosen from.
    pub fn layer(layer: Predictor, engine: &Engine) -> Result<Speculator> {
        let layer = layer.for_drafts()?;
        let cost = relative_bytes(layer.bytes_per_draft(), engine);
        Ok(Speculator { model: Some(DraftModel::layer(layer)), cost: Cost::new(cost), ..Speculator::off() })
    }

    /// Adds copies of passages, as [`Speculator::ngram`] drafts them, to the drafts of a model: each text gets those
    /// that are expected to save more time.
    pub fn with_history(self) -> Speculator {
        Speculator { history: Some(EarlierTexts::default()), ..self }
    }

    /// Drafts `ahead` tokens in every step even if that is slower, for measurements and tests.
    pub fn always(self, ahead: usize) -> Speculator {
        Speculator { cost: self.cost.always(ahead), ..self }
    }

    /// Drafts `ahead` tokens in every step, each of which is the right one with probability `acceptance`: `texts` are
    /// the texts that will be generated, prompts included. A model still drafts, so that its time is measured.
    pub fn imitate(&mut self, texts: Vec<Vec<u32>>, acceptance: f64, ahead: usize) {
        self.history = None;
        self.imitation = Some(Imitation::new(texts, acceptance));
        self.cost = std::mem::replace(&mut self.cost, Cost::new(0.0)).always(ahead);
    }

    /// Forgets earlier texts.
    pub fn forget(&mut self) {
        self.history.iter_mut().for_each(|earlier| *earlier = EarlierTexts::default());
    }

    /// Returns true when no tokens are drafted.
    pub fn is_off(&self) -> bool {
        self.history.is_none() && self.model.is_none() && self.imitation.is_none()
    }

    /// Returns how many numbers that the model computes for each token [`Speculator::follow`] takes; 0 for none.
    pub fn width(&self) -> usize {
        self.model.as_ref().map_or(0, DraftModel::width)
    }

    /// Drafts the next tokens of each text; often there are none.
    ///
    /// # Errors
    /// The drafting model fails for another reason than missing memory.
    pub fn draft_tokens(&mut self, texts: &mut [TextSoFar<'_>]) -> Result<Vec<Vec<u32>>> {
        let chosen = texts.iter_mut().map(|text| self.choose(text)).collect::<Result<Vec<_>>>()?;
        let (estimates, places): (Vec<Estimate>, Vec<Option<Place>>) = chosen.into_iter().unzip();
        let Speculator { history, model, imitation, cost } = self;
        let plan = cost.plan(&estimates);
        let mut drafts = match model {
            Some(model) => {
                let of_model: Vec<usize> =
                    plan.iter().zip(&estimates).map(|(n, estimate)| if estimate.is_free { 0 } else { *n }).collect();
                for (text, ahead) in texts.iter_mut().zip(&of_model) {
                    text.memory.idle = if *ahead == 0 { text.memory.idle + 1 } else { 0 };
                }
                let drafts = model.draft_tokens(texts, &of_model, cost);
                without_memory(drafts, texts)?.unwrap_or_else(|| vec![Vec::new(); texts.len()])
            }
            None => vec![Vec::new(); texts.len()],
        };
        for (((text, place), count), draft) in texts.iter_mut().zip(places).zip(plan).zip(&mut drafts) {
            if let Some(imitation) = imitation {
                *draft = imitation.draft(text, count);
            }
            text.memory.current = match (place, history.as_ref()) {
                (Some(place), Some(earlier)) => {
                    *draft = place.copy(text, earlier, count);
                    place.copy(text, earlier, 1).first().map(|first| (Drafter::History, place.kind(), *first))
                }
                _ => {
                    let drafter = model.as_ref().map_or(Drafter::History, DraftModel::drafter);
                    draft.first().map(|first| (drafter, KINDS - 1, *first))
                }
            };
        }
        Ok(drafts)
    }

    /// Returns the better draft of a text: its estimate, and the place to copy from unless a model drafts.
    fn choose(&self, text: &mut TextSoFar<'_>) -> Result<(Estimate, Option<Place>)> {
        let place = self.history.as_ref().and_then(|earlier| Place::find(text, earlier));
        let likely = place.map_or(0.0, |place| text.memory.trust[place.kind()].likely());
        let has_copy = place.is_some() || self.imitation.is_some();
        let copied = Estimate { likely, room: if has_copy { text.room } else { 0 }, is_free: true };
        let Some(model) = &self.model else { return Ok((copied, place)) };
        let better = self.cost.better(copied, model.estimate(text)?);
        Ok((better, place.filter(|_| better.is_free)))
    }

    /// Records the time of a step that read `rows` tokens.
    pub fn observe(&mut self, rows: usize, time: Duration) {
        self.cost.observe(rows, time);
    }

    /// Takes what the model computed for the tokens of a text from position `first` on, [`Speculator::width`] numbers
    /// for each.
    ///
    /// # Errors
    /// The drafting model fails for another reason than missing memory.
    pub fn follow(&mut self, mut text: TextSoFar<'_>, first: usize, computed: &[f32]) -> Result<()> {
        let Some(model) = &mut self.model else { return Ok(()) };
        let done = model.follow(&mut text, first, computed);
        without_memory(done, &mut [text]).map(|_| ())
    }

    /// Keeps a text that has ended, to copy passages of it into later texts of the same owner.
    pub fn keep(&mut self, owner: &[u8], ids: &[u32]) {
        self.history.iter_mut().for_each(|earlier| earlier.add(owner, ids));
    }
}

/// Returns the bytes of weights that a token of a drafting model reads, relative to those of a token of the model.
fn relative_bytes(bytes: u64, engine: &Engine) -> f64 {
    bytes as f64 / engine.weight_bytes_per_token().max(1) as f64
}

/// Turns a lack of memory in the drafting model into `None`, and drops what it keeps of these texts: they go on without
/// its drafts.
fn without_memory<T>(result: Result<T>, texts: &mut [TextSoFar<'_>]) -> Result<Option<T>> {
    match result {
        Err(e) if matches!(e.cause(), Cause::OutOfMemory(_)) => {
            texts.iter_mut().for_each(|text| text.memory.state = None);
            Ok(None)
        }
        result => result.map(Some),
    }
}

/// Passage to copy.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// In the text itself.
    Own(EarlierPlace),
    /// In an earlier text.
    Earlier(EarlierPlace),
}

impl Place {
    /// Returns the place that agrees with the end of the text over the most tokens; of equal ones, that in the text.
    fn find(text: &mut TextSoFar<'_>, earlier: &EarlierTexts) -> Option<Place> {
        let own = text.memory.lookup.find(text.ids);
        let other = earlier.find(text.owner, text.ids);
        match (own, other) {
            (own, Some(other)) if own.is_none_or(|own| other.agreement > own.agreement) => Some(Place::Earlier(other)),
            (own, _) => own.map(Place::Own),
        }
    }

    /// Returns the next tokens, at most `count`, under the assumption that the text continues as it did at this place.
    fn copy(self, text: &TextSoFar<'_>, earlier: &EarlierTexts, count: usize) -> Vec<u32> {
        match self {
            Place::Own(place) => place.copy(text.ids, count),
            Place::Earlier(place) => earlier.copy(text.owner, place, count),
        }
    }

    /// Returns the kind of draft tokens from this place, by the number of agreeing tokens.
    fn kind(self) -> usize {
        let (Place::Own(place) | Place::Earlier(place)) = self;
        match place.agreement {
            ..=2 => 0,
            3 => 1,
            4..=7 => 2,
            _ => 3,
        }
    }
}

/// A text to draft tokens for.
#[derive(Debug)]
pub struct TextSoFar<'a> {
    /// Tokens of the text; the model has read all but the last.
    pub ids: &'a [u32],
    /// Largest number of draft tokens that can be used.
    pub room: usize,
    /// Owner of the earlier texts that may be copied from.
    pub owner: &'a [u8],
    /// State of speculation for this text.
    pub memory: &'a mut Memory,
}

/// State of speculation for one text.
#[derive(Debug)]
pub struct Memory {
    lookup: Lookup,
    /// State in the model that drafts.
    pub(super) state: Option<DraftState>,
    /// Acceptance rate of draft tokens of each kind.
    trust: [Trust; KINDS],
    /// Drafter and kind of the current draft, and its first token. If the draft is not verified, its first token is
    /// still compared with the next token of the text, at no cost.
    current: Option<(Drafter, usize, u32)>,
    /// Number of steps since the draft model was last used.
    idle: usize,
    /// Value of `idle` at which the draft model is tried again.
    pause: usize,
    /// Numbers of draft tokens since they were last taken.
    pub counts: DraftCounts,
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
            state: None,
            trust: PRIORS.map(Trust::new),
            current: None,
            idle: 0,
            pause: PAUSES[0],
            counts: DraftCounts::default(),
        }
    }
}

impl Memory {
    /// Updates the acceptance rates with the tokens that the sampler chose, `taken`, when `draft` was verified.
    pub fn learn(&mut self, draft: &[u32], taken: &[u32]) {
        let right = draft.iter().zip(taken).take_while(|(a, b)| a == b).count();
        let Some((drafter, kind, first)) = self.current.take() else { return };
        self.counts.count(drafter, draft.len(), right);
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
            let is_free = kind < KINDS - 1;
            let ahead = cost.plan(&[Estimate { likely, room: 40, is_free }])[0];
            memory.idle = if ahead == 0 { memory.idle + 1 } else { 0 };
            memory.current = Some((Drafter::History, kind, 1)).filter(|_| is_free || ahead > 0);
            let right = (0..ahead).take_while(|i| (7 * (tokens + i)) % 10 < right_in_ten).count();
            let next = u32::from(ahead == 0 && (7 * tokens) % 10 < right_in_ten);
            let taken = [vec![1; right], vec![next]].concat();
            memory.learn(&vec![1; ahead], &taken);
            let step = 1.0 + 0.1 * ahead as f64;
            cost.observe(1 + ahead, Duration::from_secs_f64(0.01 * step));
            time += step + if is_free { 0.0 } else { 0.05 * ahead as f64 };
            tokens += taken.len();
        }
        (tokens as f64 / time, memory.counts.total().tokens)
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
