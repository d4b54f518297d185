//! Slot of the batch: the state of one text during generation.

use super::constrained::{Constrained, MaskThread};
use super::{CachedPrefix, Completion, Event, Finish, Options, Request};
use crate::error::Result;
use crate::runtime::engine::Engine;
use crate::runtime::profile::Stage;
use crate::runtime::sampler::{Sampler, Sampling, candidates};
use crate::runtime::sequence::{Feed, Sequence, Want};
use crate::runtime::speculate::{Memory, Text};
use crate::runtime::text::{StopMatcher, TextStream, Tokenizer};
use std::time::Instant;

/// Number of tokens that another text must be about to add to the prefix cache for a text to wait for them.
const WORTH_WAITING: usize = 32;

/// A text during generation.
pub(super) struct Slot {
    pub(super) index: usize,
    pub(super) sequence: Sequence,
    /// Prompt and generated tokens; those from index `sequence.len()` on are not read yet.
    pub(super) ids: Vec<u32>,
    prompt_tokens: usize,
    reused_tokens: usize,
    /// Divides the prefix cache, see [`Request::salt`].
    salt: Vec<u8>,
    /// True once the prefix cache was searched for the prompt.
    searched: bool,
    max_new: usize,
    logprobs: Option<usize>,
    sampler: Sampler,
    constraint: Option<Constrained>,
    stream: TextStream,
    stop: StopMatcher,
    text: String,
    pub(super) finish: Option<Finish>,
    started: Instant,
    marks: Vec<Instant>,
    memory: Memory,
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
        masks: &mut MaskThread,
    ) -> Result<Slot> {
        let started = Instant::now();
        let prompt_tokens = request.ids.len();
        let mut memory = Memory::default();
        let mut sequence = match request.prefix {
            Some(CachedPrefix { mut sequence, ids, draft }) => {
                memory.sequence = draft;
                let common = ids.iter().zip(&request.ids).take_while(|(a, b)| a == b).count();
                // The last token is read again because its logits are needed.
                let common = common.min(prompt_tokens - 1);
                sequence.truncate(common);
                memory.sequence.iter_mut().for_each(|draft| draft.truncate(common));
                sequence
            }
            None => engine.new_sequence()?,
        };
        sequence.expect(prompt_tokens);
        let mut sampler = match request.seed {
            Some(seed) => Sampler::new(Sampling { seed, ..request.sampling }, 0),
            None => Sampler::new(request.sampling, index),
        };
        sampler.observe(&request.ids);
        let constraint = request.constraint.map(|constraint| masks.begin(&constraint)).transpose()?;
        let most = request.max_new.min(engine.context() + 1 - prompt_tokens);
        let mut ids = request.ids;
        ids.reserve(most);
        Ok(Slot {
            index,
            reused_tokens: sequence.len(),
            salt: request.salt,
            searched: !engine.caches_prefixes(),
            sequence,
            ids,
            prompt_tokens,
            max_new: request.max_new,
            logprobs: request.logprobs,
            sampler,
            constraint,
            stream: TextStream::new(!options.show_special),
            stop: StopMatcher::new(&request.stop),
            text: String::new(),
            finish: None,
            started,
            marks: Vec::with_capacity(most),
            memory,
        })
    }

    /// Returns true before the first token is generated.
    pub(super) fn is_fresh(&self) -> bool {
        self.marks.is_empty()
    }

    /// Returns the tokens that the model has not read yet.
    pub(super) fn unread(&self) -> &[u32] {
        &self.ids[self.sequence.len()..]
    }

    /// Returns how many of the largest logits are needed; `None` when all are.
    pub(super) fn suffices(&self) -> Option<usize> {
        self.sampler.suffices().filter(|_| self.logprobs.is_none() && self.constraint.is_none())
    }

    /// Searches the prefix cache for the prompt, once. Returns false if the text should wait until one of the `earlier`
    /// texts, which are being read, has put a longer beginning of the same prompt into the cache.
    pub(super) fn search(&mut self, engine: &mut Engine, earlier: &[&mut Slot]) -> bool {
        if self.searched {
            return true;
        }
        let known = engine.find_prefix(&self.ids, &self.salt);
        let reused = known.as_ref().map_or(0, Sequence::len).max(self.sequence.len());
        let common = |other: &&mut Slot| match other.salt == self.salt {
            true => other.ids.iter().zip(&self.ids[..self.ids.len() - 1]).take_while(|(a, b)| a == b).count(),
            false => 0,
        };
        if earlier.iter().map(common).max().is_some_and(|common| common >= reused + WORTH_WAITING) {
            return false;
        }
        self.searched = true;
        if let Some(known) = known.filter(|known| known.len() > self.sequence.len()) {
            self.sequence = known;
            self.sequence.expect(self.prompt_tokens);
            self.reused_tokens = self.sequence.len();
        }
        true
    }

    /// Returns true if the prefix cache was not searched for the prompt yet.
    pub(super) fn is_unsearched(&self) -> bool {
        !self.searched
    }

    /// Puts the tokens that were read into the prefix cache, if there is one.
    pub(super) fn keep(&self, engine: &mut Engine) {
        engine.keep_prefix(&self.ids[..self.sequence.len()], &self.salt, &self.sequence);
    }

    /// Returns the next `count` tokens of the prompt with their sequence. Logits are wanted after its end only.
    pub(super) fn feed_prompt(&mut self, count: usize) -> Feed<'_> {
        let read = self.sequence.len();
        let want = if read + count == self.ids.len() { Want::Last } else { Want::Nothing };
        Feed { sequence: &mut self.sequence, tokens: &self.ids[read..read + count], want }
    }

    /// Returns the tokens to read next, the last token and draft tokens, with their sequence.
    pub(super) fn feed(&mut self) -> Feed<'_> {
        let read = self.sequence.len();
        Feed { sequence: &mut self.sequence, tokens: &self.ids[read..], want: Want::All }
    }

    /// Returns the text for the speculator. The number of draft tokens is limited by the number of tokens still to be
    /// generated, by [`Engine::room`] and by the size of a step.
    pub(super) fn text_so_far(&mut self, engine: &Engine) -> Text<'_> {
        let room = engine.room(&self.sequence).min(engine.step_rows()).saturating_sub(1);
        let room = room.min(self.max_new - self.marks.len() - 1);
        Text { ids: &self.ids, room, memory: &mut self.memory }
    }

    /// Takes tokens from `rows` of logits until one differs from the draft, and drops the draft tokens read after it.
    pub(super) fn take_drafted<'a>(
        &mut self,
        rows: impl Iterator<Item = Likely<'a>>,
        draft: &[u32],
        engine: &mut Engine,
        options: &Options<'_>,
        sink: &mut impl FnMut(&Event<'_>) -> Result<()>,
    ) -> Result<()> {
        let known = self.ids.len() - draft.len();
        self.ids.truncate(known);
        for (i, row) in rows.enumerate() {
            self.take_token(row, engine, options, sink)?;
            if self.finish.is_some() || self.ids.last() != draft.get(i) {
                break;
            }
        }
        self.sequence.truncate(self.ids.len() - 1);
        self.memory.learn(draft, &self.ids[known..]);
        Ok(())
    }

    pub(super) fn take_token(
        &mut self,
        likely: Likely<'_>,
        engine: &mut Engine,
        options: &Options<'_>,
        sink: &mut impl FnMut(&Event<'_>) -> Result<()>,
    ) -> Result<()> {
        let id = match (likely, &mut self.constraint) {
            (Likely::All(logits), Some(constraint)) => self.sampler.sample(constraint.mask(logits, options.eos)?)?,
            (Likely::All(logits), None) => self.sampler.sample(logits)?,
            (Likely::Best(best), _) => self.sampler.sample_best(best)?,
        };
        let ends = options.eos.contains(&id);
        let complete = match &mut self.constraint {
            Some(constraint) if !ends => constraint.accept(id)?,
            _ => false,
        };
        self.sampler.observe(&[id]);
        self.ids.push(id);
        self.marks.push(Instant::now());
        engine.lap(Stage::Sampling);
        self.finish = if complete { Some(Finish::Complete) } else { self.finish_of(ends, engine.context()) };
        let shown = self.text.len();
        if let Some(tokenizer) = options.tokenizer {
            self.extend_text(tokenizer, id)?;
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
            text: &self.text[shown..],
            likely: likely.as_ref(),
            finish: self.finish,
        })?;
        engine.lap(Stage::Sink);
        Ok(())
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

    /// Appends the text that can be shown now; with the last token, this includes all text that was held back.
    fn extend_text(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<()> {
        let mut piece = String::new();
        if self.finish != Some(Finish::Eos) {
            piece += &self.stream.push(tokenizer, id)?;
        }
        if self.finish.is_some() {
            piece += &self.stream.finish(tokenizer)?;
        }
        let shown = self.stop.push(&piece);
        self.text += &shown.text;
        if shown.stopped {
            self.finish = Some(Finish::Stop);
        } else if self.finish.is_some() {
            self.text += &self.stop.finish();
        }
        Ok(())
    }

    /// Ends the text where it is. Draft tokens of the step that was interrupted are removed.
    pub(super) fn interrupt(&mut self, options: &Options<'_>) -> Result<()> {
        if self.finish.is_none() {
            self.ids.truncate(self.prompt_tokens + self.marks.len());
            self.sequence.truncate(self.ids.len());
            self.finish = Some(Finish::Interrupted);
            if let Some(tokenizer) = options.tokenizer {
                self.text += &self.stop.push(&self.stream.finish(tokenizer)?).text;
                self.text += &self.stop.finish();
            }
        }
        Ok(())
    }

    pub(super) fn complete(self, keep_prefix: bool) -> Option<Completion> {
        let constraint_met = self.constraint.map(|constraint| match self.finish {
            Some(Finish::Eos | Finish::Complete) => true,
            Some(Finish::Length | Finish::Context) => constraint.may_end(),
            _ => false,
        });
        let generated = self.ids[self.prompt_tokens..].to_vec();
        let mut read = self.ids;
        read.truncate(self.sequence.len());
        let Memory { sequence: mut draft, drafted, accepted, .. } = self.memory;
        draft.iter_mut().for_each(|draft| draft.truncate(read.len()));
        Some(Completion {
            ids: generated,
            text: self.text,
            finish: self.finish?,
            prompt_tokens: self.prompt_tokens,
            reused_tokens: self.reused_tokens,
            started: self.started,
            marks: self.marks,
            drafted_tokens: drafted,
            accepted_tokens: accepted,
            constraint_met,
            prefix: keep_prefix.then_some(CachedPrefix { sequence: self.sequence, ids: read, draft }),
            error: None,
        })
    }
}
