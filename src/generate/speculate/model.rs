//! Models that draft tokens: a small model with the same vocabulary, or a layer of multi-token prediction of the model
//! itself. Each text has a sequence of its own in such a model, which always drafts its most likely token.

use super::pace::{Cost, Estimate};
use super::{Drafter, TextSoFar};
use crate::error::Result;
use crate::generate::sampler::argmax;
use crate::runtime::engine::Engine;
use crate::runtime::prediction::Predictor;
use crate::runtime::sequence::{Feed, Sequence, Want};
use std::time::Instant;

/// Number of tokens that a layer reads at once when it catches up with a text that it drafts nothing for.
const BEHIND: usize = 32;

/// A model that drafts tokens.
#[derive(Debug)]
pub struct DraftModel {
    source: Source,
    /// Vocabulary size of the large model; vocabularies may be padded to different lengths.
    vocab: usize,
    logits: Vec<f32>,
    hidden: Vec<f32>,
}

#[derive(Debug)]
enum Source {
    /// A small model, which reads the tokens of a text.
    Small(Box<Engine>),
    /// A layer of multi-token prediction, which reads each token with what the model computed for the one before.
    Layer(Box<Predictor>),
}

/// State of a text in a model that drafts tokens for it.
#[derive(Debug, Clone)]
pub struct DraftState {
    sequence: Sequence,
    /// Position in the text of the first token that the sequence has read.
    first: usize,
    /// Number of tokens of the sequence that a layer has read with what the model computed, not with its own output.
    read: usize,
    /// Output of the model for the tokens before the next ones that a layer reads, `(tokens, hidden)`; after the first
    /// draft token, the output of the layer for it, `(1, hidden)`.
    previous: Vec<f32>,
}

impl DraftModel {
    /// Creates a drafter from a small model for a model of `vocab` tokens.
    pub fn small(engine: Engine, vocab: usize) -> DraftModel {
        DraftModel { source: Source::Small(Box::new(engine)), vocab, logits: Vec::new(), hidden: Vec::new() }
    }

    /// Creates a drafter from a layer of multi-token prediction.
    pub fn layer(layer: Predictor) -> DraftModel {
        let vocab = layer.config().vocab;
        DraftModel { source: Source::Layer(Box::new(layer)), vocab, logits: Vec::new(), hidden: Vec::new() }
    }

    /// Returns the drafter that tokens of this model count for.
    pub fn drafter(&self) -> Drafter {
        match self.source {
            Source::Small(_) => Drafter::Small,
            Source::Layer(_) => Drafter::Layer,
        }
    }

    /// Returns the numbers that the model computes for each token and a layer reads; 0 for a small model.
    pub fn width(&self) -> usize {
        match &self.source {
            Source::Small(_) => 0,
            Source::Layer(layer) => layer.config().hidden,
        }
    }

    /// Returns the largest number of tokens that one step reads.
    fn step_rows(&self) -> usize {
        match &self.source {
            Source::Small(_) => usize::MAX,
            Source::Layer(layer) => layer.step_rows(),
        }
    }

    /// Returns the probability that a draft token of a text is accepted, and the largest number of draft tokens.
    ///
    /// # Errors
    /// A page of the sequence does not fit the address space.
    pub fn estimate(&self, text: &mut TextSoFar<'_>) -> Result<Estimate> {
        let (ids, width) = (text.ids, self.width());
        let room = match (&self.source, &mut text.memory.state) {
            (Source::Small(engine), state) => {
                let state = match state {
                    Some(state) => state,
                    None => state.insert(DraftState::new(engine.new_sequence()?, 0)),
                };
                // Rejected draft tokens are dropped. The last token is read again because its logits are needed.
                state.sequence.truncate(ids.len() - 1);
                state.sequence.mark();
                let vocab = engine.config().vocab;
                let known = ids[state.sequence.len()..].iter().all(|id| (*id as usize) < vocab);
                if known { (engine.context() + 1).saturating_sub(ids.len()) } else { 0 }
            }
            (Source::Layer(layer), Some(state)) => {
                state.drop_drafts();
                let is_next = !state.previous.is_empty() && state.end(width) == ids.len();
                if is_next { (layer.context() + 1).saturating_sub(ids.len() - state.first) } else { 0 }
            }
            (Source::Layer(_), None) => 0,
        };
        let likely = text.memory.likely_after_pause();
        Ok(Estimate { likely, room: room.min(text.room), is_free: false })
    }

    /// Drafts for each text as many tokens as planned.
    ///
    /// # Errors
    /// The model fails.
    pub fn draft_tokens(
        &mut self,
        texts: &mut [TextSoFar<'_>],
        plan: &[usize],
        cost: &mut Cost,
    ) -> Result<Vec<Vec<u32>>> {
        let mut drafts = vec![Vec::new(); texts.len()];
        for step in 0..plan.iter().copied().max().unwrap_or(0) {
            let begin = Instant::now();
            self.step(texts, plan, &mut drafts)?;
            // The first step is not representative because it also reads the new tokens of the texts.
            if step > 0 {
                cost.observe_draft(begin.elapsed());
            }
        }
        Ok(drafts)
    }

    /// Drafts one more token for every text that has fewer than planned.
    fn step(&mut self, texts: &mut [TextSoFar<'_>], plan: &[usize], drafts: &mut [Vec<u32>]) -> Result<()> {
        let (mut feeds, mut previous) = (Vec::new(), Vec::new());
        let (mut open, mut outputs) = (Vec::new(), Vec::new());
        let mut left = self.step_rows();
        for ((text, ahead), draft) in texts.iter_mut().zip(plan).zip(drafts) {
            let Some(state) = text.memory.state.as_mut().filter(|_| draft.len() < *ahead) else { continue };
            let DraftState { sequence, first, read, previous: rows } = state;
            let tokens = match draft.last() {
                Some(last) => vec![*last],
                None => text.ids[*first + sequence.len()..].to_vec(),
            };
            match left.checked_sub(tokens.len()) {
                Some(rest) => left = rest,
                None => continue,
            }
            if draft.is_empty() {
                *read = sequence.len() + tokens.len();
            }
            previous.append(rows);
            feeds.push((sequence, tokens));
            open.push(draft);
            outputs.push(rows);
        }
        if feeds.is_empty() {
            return Ok(());
        }
        let mut feeds: Vec<Feed<'_>> =
            feeds.iter_mut().map(|(sequence, tokens)| Feed { sequence, tokens, want: Want::Last }).collect();
        let best: Vec<u32> = match &mut self.source {
            Source::Small(engine) => {
                engine.forward(&mut feeds, &mut self.logits)?;
                let vocab = engine.config().vocab;
                self.logits.chunks_exact(vocab).map(|row| argmax(&row[..vocab.min(self.vocab)])).collect()
            }
            Source::Layer(layer) => {
                self.hidden.clear();
                let best = layer.draft(&mut feeds, &previous, &mut self.hidden)?;
                let (width, mut end) = (layer.config().hidden, 0);
                for (feed, rows) in feeds.iter().zip(outputs) {
                    end += feed.tokens.len() * width;
                    rows.extend_from_slice(&self.hidden[end - width..end]);
                }
                best
            }
        };
        open.into_iter().zip(best).for_each(|(draft, token)| draft.push(token));
        Ok(())
    }

    /// Takes what the model computed for the tokens of a text from position `first` on, `(tokens, hidden)`. A layer
    /// that is far behind reads tokens.
    ///
    /// # Errors
    /// The layer fails.
    pub fn follow(&mut self, text: &mut TextSoFar<'_>, first: usize, computed: &[f32]) -> Result<()> {
        let width = self.width();
        let Source::Layer(layer) = &mut self.source else { return Ok(()) };
        let state = match &mut text.memory.state {
            Some(state) => state,
            None => text.memory.state.insert(DraftState::new(layer.new_sequence()?, first + 1)),
        };
        let end = first + computed.len() / width;
        layer.count(&text.ids[first..end])?;
        state.follow(first, computed, width);
        while state.previous.len() >= BEHIND.min(layer.step_rows() + 1) * width {
            let start = state.first + state.read;
            // One is left for the next draft, which needs its logits.
            let rows = state.previous.len() / width - 1;
            let count = rows.min(text.ids.len() - start).min(layer.step_rows());
            if count == 0 {
                break;
            }
            let tokens = &text.ids[start..start + count];
            let feed = Feed { sequence: &mut state.sequence, tokens, want: Want::Nothing };
            self.hidden.clear();
            layer.step(&mut [feed], &state.previous[..count * width], [&mut self.logits, &mut self.hidden])?;
            state.read += count;
            state.previous.drain(..count * width);
        }
        Ok(())
    }
}

impl DraftState {
    fn new(sequence: Sequence, first: usize) -> DraftState {
        DraftState { sequence, first, read: 0, previous: Vec::new() }
    }

    /// Drops what does not belong to the first `len` tokens of the text.
    pub fn truncate(&mut self, len: usize) {
        self.sequence.truncate(len.saturating_sub(self.first));
        if self.read > self.sequence.len() {
            self.read = self.sequence.len();
            self.previous.clear();
        }
    }

    /// Drops the tokens that a layer has read with its own output.
    fn drop_drafts(&mut self) {
        if self.sequence.len() > self.read {
            self.sequence.truncate(self.read);
            self.previous.clear();
        }
    }

    /// Returns the position behind the last token that a layer can read.
    fn end(&self, width: usize) -> usize {
        self.first + self.read + self.previous.len() / width
    }

    /// Adds what the model computed for the tokens from position `first` on. If some before are missing, the layer
    /// skips the tokens after these: its distances become too short, and its drafts perhaps worse.
    fn follow(&mut self, first: usize, computed: &[f32], width: usize) {
        self.drop_drafts();
        if self.end(width) != first + 1 {
            self.previous.clear();
            self.read = self.read.min((first + 1).saturating_sub(self.first));
            self.sequence.truncate(self.read);
            self.first = first + 1 - self.read;
        }
        self.previous.extend_from_slice(computed);
    }
}
