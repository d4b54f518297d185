//! Draft model: a small model that drafts tokens for a large one. It has a KV cache of its own for every text, reads
//! the accepted tokens of the text before it drafts, and always drafts its own most likely token.

use super::pace::Cost;
use super::{KINDS, Memory, TextSoFar};
use crate::error::Result;
use crate::generate::sampler::argmax;
use crate::runtime::engine::Engine;
use crate::runtime::sequence::{Feed, Want};
use std::time::Instant;

/// A draft model with its engine.
#[derive(Debug)]
pub struct Draft {
    engine: Engine,
    /// Vocabulary size of the large model; vocabularies may be padded to different lengths.
    vocab: usize,
    logits: Vec<f32>,
}

impl Draft {
    /// Creates a draft model from `engine` for a model of `vocab` tokens.
    pub fn new(engine: Engine, vocab: usize) -> Draft {
        Draft { engine, vocab, logits: Vec::new() }
    }

    /// Drafts for each text as many tokens as are expected to save time.
    ///
    /// # Errors
    /// The draft model fails.
    pub fn draft_tokens(&mut self, texts: &mut [TextSoFar<'_>], cost: &mut Cost) -> Result<Vec<Vec<u32>>> {
        let likely = texts.iter_mut().map(|text| self.likely(text)).collect::<Result<Vec<_>>>()?;
        let plan = cost.plan(&likely);
        let mut drafts = vec![Vec::new(); texts.len()];
        for (text, ahead) in texts.iter_mut().zip(&plan) {
            text.memory.idle = if *ahead == 0 { text.memory.idle + 1 } else { 0 };
        }
        for step in 0..plan.iter().copied().max().unwrap_or(0) {
            let begin = Instant::now();
            self.step(texts, &plan, &mut drafts)?;
            // The first step is not representative because it also reads the new tokens of the texts.
            if step > 0 {
                cost.observe_draft(begin.elapsed());
            }
        }
        for (text, draft) in texts.iter_mut().zip(&drafts) {
            text.memory.current = draft.first().map(|first| (KINDS - 1, *first));
        }
        Ok(drafts)
    }

    /// Returns the probability that a draft token of a text is accepted, and the largest number of draft tokens.
    fn likely(&self, text: &mut TextSoFar<'_>) -> Result<(f64, usize)> {
        let Memory { sequence, .. } = text.memory;
        let sequence = match sequence {
            Some(sequence) => sequence,
            None => sequence.insert(self.engine.new_sequence()?),
        };
        // Rejected draft tokens are dropped. The last token is read again because its logits are needed.
        sequence.truncate(text.ids.len() - 1);
        sequence.mark();
        let vocab = self.engine.config().vocab;
        let known = text.ids[sequence.len()..].iter().all(|id| (*id as usize) < vocab);
        let room = (self.engine.context() + 1).saturating_sub(text.ids.len()).min(text.room);
        Ok((text.memory.likely_after_pause(), if known { room } else { 0 }))
    }

    /// Drafts one more token for every text that has fewer than planned.
    fn step(&mut self, texts: &mut [TextSoFar<'_>], plan: &[usize], drafts: &mut [Vec<u32>]) -> Result<()> {
        let (mut feeds, mut open) = (Vec::new(), Vec::new());
        for ((text, ahead), draft) in texts.iter_mut().zip(plan).zip(drafts) {
            let Some(sequence) = text.memory.sequence.as_mut().filter(|_| draft.len() < *ahead) else { continue };
            open.push(draft);
            feeds.push((sequence, text.ids));
        }
        let mut feeds: Vec<Feed<'_>> = feeds
            .into_iter()
            .zip(&open)
            .map(|((sequence, ids), draft)| {
                let tokens = match draft.last() {
                    Some(last) => std::slice::from_ref(last),
                    None => &ids[sequence.len()..],
                };
                Feed { sequence, tokens, want: Want::Last }
            })
            .collect();
        self.engine.forward(&mut feeds, &mut self.logits)?;
        let vocab = self.engine.config().vocab;
        drop(feeds);
        for (draft, row) in open.into_iter().zip(self.logits.chunks_exact(vocab)) {
            draft.push(argmax(&row[..vocab.min(self.vocab)]));
        }
        Ok(())
    }
}
