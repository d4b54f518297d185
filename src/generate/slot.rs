//! Slot of the batch: the state of one text during generation.

use super::constrained::{Constrained, MaskThreads};
use super::sampler::{Sampler, Sampling, candidates};
use super::speculate::{DraftCounts, Memory, Speculator, TextSoFar};
use super::written::Written;
use super::{CachedPrefix, Completion, Event, Finish, Likelihood, Options, Request};
use crate::error::{Error, Result};
use crate::runtime::engine::Engine;
use crate::runtime::kv::PAGE;
use crate::runtime::profile::Stage;
use crate::runtime::sequence::{Feed, Sequence, Want};
use crate::sched::Work;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A text during generation.
pub(super) struct Slot {
    pub(super) index: usize,
    pub(super) sequence: Sequence,
    /// Prompt and generated tokens; those from index `sequence.len()` on are not read yet.
    pub(super) ids: Vec<u32>,
    pub(super) prompt_tokens: usize,
    /// Tokens of the prompt that were not computed; `None` before the first step.
    reused_tokens: Option<usize>,
    max_new: usize,
    logprobs: Option<usize>,
    sampler: Sampler,
    constraint: Option<Constrained>,
    written: Written,
    pub(super) finish: Option<Finish>,
    /// Reason why the text failed.
    error: Option<Error>,
    started: Instant,
    marks: Vec<Instant>,
    memory: Memory,
    drafts: DraftCounts,
    /// Tokens that may be generated; empty = all.
    allowed: Arc<[u32]>,
    /// Logits without those of excluded tokens.
    masked: Vec<f32>,
    /// Number of most likely tokens that are reported with each token of the prompt, if the prompt is scored.
    score: Option<usize>,
    /// Whether the completion returns the sequence.
    keep_prefix: bool,
    /// Owner of the text, as in [`Request::owner`].
    pub(super) owner: Vec<u8>,
    scores: Vec<Likelihood>,
}

/// Logits from which a token is chosen.
#[derive(Clone, Copy)]
pub(super) enum Likely<'a> {
    /// All logits of the vocabulary.
    All(&'a [f32]),
    /// The largest logits with their tokens, in descending order.
    Best(&'a [(u32, f32)]),
}

impl Slot {
    pub(super) fn new(
        engine: &Engine,
        index: usize,
        request: Request,
        options: &Options<'_>,
        masks: &mut MaskThreads,
    ) -> Result<Slot> {
        let started = Instant::now();
        let prompt_tokens = request.ids.len();
        let written = Written::new(&request, options)?;
        let mut memory = Memory::default();
        let known = request.known(engine);
        let (adapters, owner) = (request.adapters(engine).clone(), request.owner(engine));
        let mut sequence = match request.prefix {
            Some(CachedPrefix { mut sequence, draft, .. }) => {
                memory.state = draft;
                sequence.truncate(known);
                memory.state.iter_mut().for_each(|draft| draft.truncate(known));
                sequence
            }
            None => engine.new_sequence()?,
        };
        if known == 0 {
            sequence.adapt(adapters);
        }
        let mut sampler = match request.seed {
            Some(seed) => Sampler::new(Sampling { seed, ..request.sampling }, 0),
            None => Sampler::new(request.sampling, index),
        };
        sampler.observe_prompt(&request.ids);
        let constraint = request.constraint.map(|constraint| masks.begin(&constraint)).transpose()?;
        let most = request.max_new.min(engine.context() + 1 - prompt_tokens);
        let mut ids = request.ids;
        ids.reserve(most);
        Ok(Slot {
            index,
            reused_tokens: None,
            sequence,
            ids,
            prompt_tokens,
            max_new: request.max_new,
            logprobs: request.logprobs,
            sampler,
            constraint,
            written,
            finish: None,
            error: None,
            started,
            marks: Vec::with_capacity(most),
            memory,
            drafts: DraftCounts::default(),
            allowed: request.allowed,
            masked: Vec::new(),
            score: request.score,
            keep_prefix: request.keep_prefix,
            owner,
            scores: Vec::new(),
        })
    }

    /// Returns the tokens that the model has not read yet.
    pub(super) fn unread(&self) -> &[u32] {
        &self.ids[self.sequence.len()..]
    }

    /// Returns how many of the largest logits are needed; `None` when all are.
    pub(super) fn suffices(&self) -> Option<usize> {
        let all = self.logprobs.is_some() || self.is_masked() || self.excludes();
        self.sampler.suffices().filter(|_| !all)
    }

    /// Returns true if some tokens may not be the next one, besides those that a constraint excludes.
    fn excludes(&self) -> bool {
        !self.allowed.is_empty() || self.marks.len() < self.written.least && !self.written.end_tokens.is_empty()
    }

    /// Returns true if the constraint does not allow every token, so that all logits are needed.
    fn is_masked(&self) -> bool {
        self.constraint.as_ref().is_some_and(|constraint| !constraint.is_free())
    }

    /// Returns true if the next token needs a mask for which a step does not wait.
    pub(super) fn waits_for_mask(&mut self) -> bool {
        self.constraint.as_mut().is_some_and(Constrained::is_waiting)
    }

    /// Waits for the mask of the next token.
    pub(super) fn wait_for_mask(&mut self) {
        self.constraint.iter_mut().for_each(Constrained::wait);
    }

    /// Returns the time that masks have taken since the last call.
    pub(super) fn take_mask_time(&mut self) -> Duration {
        self.constraint.as_mut().map_or(Duration::ZERO, Constrained::take_spent)
    }

    /// Continues the text with another sequence, which has read a beginning of it with the same adapters.
    pub(super) fn replace(&mut self, sequence: Sequence) {
        let adapters = std::mem::take(&mut self.sequence.adapters);
        self.sequence = sequence;
        self.sequence.adapters = adapters;
    }

    /// Prepares the sequence for the next tokens of the text, and counts those of the prompt that it had read at first.
    pub(super) fn begin(&mut self) {
        self.sequence.expect(self.ids.len());
        self.reused_tokens.get_or_insert(self.sequence.len());
    }

    /// Drops what a step that failed has read.
    pub(super) fn rewind(&mut self, work: &Work) {
        self.sequence.truncate(work.start as usize);
        self.begin();
    }

    /// Returns the tokens of a work item with their sequence: a part of the prompt, or the last token and draft tokens.
    pub(super) fn feed(&mut self, work: &Work) -> Feed<'_> {
        let unread = &self.ids[self.sequence.len()..];
        let (tokens, want) = match (work.decodes, work.samples) {
            (true, _) => (unread, Want::All),
            (false, _) if self.score.is_some() => (&unread[..work.tokens as usize], Want::All),
            (false, true) => (&unread[..work.tokens as usize], Want::Last),
            (false, false) => (&unread[..work.tokens as usize], Want::Nothing),
        };
        Feed { sequence: &mut self.sequence, tokens, want }
    }

    /// Returns the number of rows of logits that a work item gets.
    pub(super) fn rows(&self, work: &Work, drafts: usize) -> usize {
        if work.decodes { 1 + drafts } else { usize::from(work.samples) }
    }

    /// Returns true if each token of the work item is scored.
    pub(super) fn scores(&self, work: &Work) -> bool {
        self.score.is_some() && !work.decodes
    }

    /// Takes the rows of a part of the prompt that begins at position `start`, one for each of its tokens, and keeps
    /// the probabilities of the tokens that follow them in the prompt.
    pub(super) fn take_scores(&mut self, start: usize, rows: &[f32], vocab: usize) {
        let Some(k) = self.score else { return };
        for (row, at) in rows.chunks_exact(vocab).zip(start + 1..self.prompt_tokens) {
            // A text that was preempted is computed again.
            if at > self.scores.len() {
                self.scores.push(candidates(row, self.ids[at], k));
            }
        }
    }

    /// Returns the tokens that the sequence has read.
    pub(super) fn read_ids(&self) -> &[u32] {
        &self.ids[..self.sequence.len()]
    }

    /// Returns true if a work item has filled a page, or has completed the prompt or the text.
    pub(super) fn fills_pages(&self, work: &Work) -> bool {
        let filled = self.sequence.len() / PAGE > work.start as usize / PAGE;
        self.error.is_none() && (filled || self.finish.is_some() || !work.decodes && work.samples)
    }

    /// Returns the number of generated tokens.
    pub(super) fn generated(&self) -> usize {
        self.marks.len()
    }

    /// Returns the text for the speculator, which may draft at most `most` tokens. The number of draft tokens is also
    /// limited by the number of tokens still to be generated, by [`Engine::room`] and by the size of a step.
    pub(super) fn text_so_far(&mut self, engine: &Engine, most: usize) -> TextSoFar<'_> {
        let room = engine.room(&self.sequence).min(engine.step_rows()).saturating_sub(1);
        let room = room.min(self.max_new - self.marks.len() - 1).min(most);
        TextSoFar { ids: &self.ids, room, owner: &self.owner, memory: &mut self.memory }
    }

    /// Takes tokens from `rows` of logits until one differs from the draft, and drops the draft tokens read after it.
    pub(super) fn take_drafted<'a>(
        &mut self,
        rows: impl Iterator<Item = Likely<'a>>,
        draft: &[u32],
        engine: &mut Engine,
        options: &Options<'_>,
        sink: &mut dyn FnMut(&Event<'_>) -> Result<()>,
    ) -> Result<()> {
        let known = self.ids.len() - draft.len();
        self.ids.truncate(known);
        for (i, row) in rows.enumerate() {
            // A token before has begun a constrained part of the text.
            if matches!(row, Likely::Best(_)) && self.is_masked() || i > 0 && self.waits_for_mask() {
                break;
            }
            self.take_token(row, engine, options, sink)?;
            if self.finish.is_some() || self.ids.last() != draft.get(i) {
                break;
            }
        }
        self.sequence.truncate(self.ids.len() - 1);
        self.memory.learn(draft, &self.ids[known..]);
        Ok(())
    }

    /// Passes what the model computed for the tokens from position `first` on to the drafting model, unless the text
    /// has ended. Tokens of rejected drafts are left out.
    pub(super) fn follow(&mut self, speculator: &mut Speculator, first: usize, computed: &[f32]) -> Result<()> {
        if self.finish.is_some() || self.score.is_some() {
            return Ok(());
        }
        let computed = &computed[..(self.sequence.len() - first) * speculator.width()];
        let text = TextSoFar { ids: &self.ids, room: 0, owner: &self.owner, memory: &mut self.memory };
        speculator.follow(text, first, computed)
    }

    /// Returns the numbers of draft tokens since the last call, and adds them to those of the text.
    pub(super) fn take_drafts(&mut self) -> DraftCounts {
        let new = std::mem::take(&mut self.memory.counts);
        self.drafts.add(&new);
        new
    }

    pub(super) fn take_token(
        &mut self,
        likely: Likely<'_>,
        engine: &mut Engine,
        options: &Options<'_>,
        sink: &mut dyn FnMut(&Event<'_>) -> Result<()>,
    ) -> Result<()> {
        let id = self.choose(likely)?;
        let ends = self.written.end_tokens.contains(&id);
        let complete = match &mut self.constraint {
            Some(constraint) if !ends => constraint.accept(id)?,
            _ => false,
        };
        self.sampler.observe(&[id]);
        self.ids.push(id);
        self.marks.push(Instant::now());
        engine.lap(Stage::Sampling);
        self.finish = if complete { Some(Finish::Complete) } else { self.finish_of(ends, engine.context()) };
        let shown = self.written.text.len();
        if let Some(tokenizer) = options.tokenizer {
            self.finish = self.written.push(tokenizer, id, self.marks.len(), self.finish)?;
        }
        engine.lap(Stage::Tokenizer);
        let likely = match likely {
            Likely::All(logits) => self.logprobs.map(|k| candidates(logits, id, k)),
            Likely::Best(_) => None,
        };
        sink(&Event {
            request: self.index,
            step: self.marks.len() - 1,
            id,
            text: &self.written.text[shown..],
            likely: likely.as_ref(),
            finish: self.finish,
        })?;
        engine.lap(Stage::Sink);
        Ok(())
    }

    /// Chooses the next token.
    fn choose(&mut self, likely: Likely<'_>) -> Result<u32> {
        let excludes = self.excludes();
        let mut logits = match likely {
            Likely::All(logits) => logits,
            Likely::Best(best) => return self.sampler.sample_best(best),
        };
        if let Some(constraint) = &mut self.constraint {
            logits = constraint.mask(logits, &self.written.end_tokens)?;
        }
        if !excludes {
            return self.sampler.sample(logits);
        }
        self.masked.clear();
        if self.allowed.is_empty() {
            self.masked.extend_from_slice(logits);
        } else {
            self.masked.resize(logits.len(), f32::NEG_INFINITY);
            self.allowed.iter().for_each(|id| self.masked[*id as usize] = logits[*id as usize]);
        }
        if self.marks.len() < self.written.least {
            let ends = self.written.end_tokens.iter();
            ends.for_each(|id| self.masked.get_mut(*id as usize).into_iter().for_each(|x| *x = f32::NEG_INFINITY));
        }
        self.sampler.sample(&self.masked)
    }

    fn finish_of(&self, ends: bool, context: usize) -> Option<Finish> {
        if ends {
            Some(Finish::Eos)
        } else if self.marks.len() >= self.max_new {
            Some(Finish::Length)
        } else if self.ids.len() > context {
            Some(Finish::Context)
        } else {
            None
        }
    }

    /// Ends the text because it cannot be computed. `drafts` draft tokens have been added.
    pub(super) fn fail(&mut self, drafts: usize, error: Error) {
        self.ids.truncate(self.ids.len() - drafts);
        self.sequence.truncate(self.ids.len());
        (self.finish, self.error) = (Some(Finish::Failed), Some(error));
    }

    /// Returns the completion of the text, which ends where it is unless it has ended. Draft tokens of a step that was
    /// interrupted are removed.
    pub(super) fn complete(mut self, options: &Options<'_>, finish: Finish) -> Result<Completion> {
        if self.finish.is_none() {
            self.ids.truncate(self.prompt_tokens + self.marks.len());
            self.sequence.truncate(self.ids.len());
            if let Some(tokenizer) = options.tokenizer {
                self.written.finish(tokenizer)?;
            }
        }
        let finish = self.finish.unwrap_or(finish);
        let constraint_met = self.constraint.map(|constraint| match finish {
            Finish::Eos | Finish::Complete => true,
            Finish::Length | Finish::Context => constraint.may_end(),
            _ => false,
        });
        let generated = self.ids[self.prompt_tokens..].to_vec();
        let mut read = self.ids;
        read.truncate(self.sequence.len());
        let Memory { state: mut draft, .. } = self.memory;
        draft.iter_mut().for_each(|draft| draft.truncate(read.len()));
        Ok(Completion {
            index: self.index,
            ids: generated,
            text: self.written.text,
            finish,
            prompt_tokens: self.prompt_tokens,
            reused_tokens: self.reused_tokens.unwrap_or(0),
            started: self.started,
            marks: self.marks,
            drafts: self.drafts,
            constraint_met,
            stopped_by: self.written.stopped_by,
            scores: self.scores,
            prefix: self.keep_prefix.then_some(CachedPrefix { sequence: self.sequence, ids: read, draft }),
            error: self.error,
        })
    }
}
