//! A small model that drafts tokens for a large one. It reads every text itself, some tokens behind, and always drafts
//! the token that it finds most likely.

use super::pace::Cost;
use super::{KINDS, Memory, Text};
use crate::error::Result;
use crate::runtime::engine::{Engine, Feed, Want};
use crate::runtime::sampler::argmax;
use std::time::Instant;

/// The small model.
#[derive(Debug)]
pub struct Draft {
    engine: Engine,
    /// Tokens of the large model; vocabularies may be padded to different lengths.
    vocab: usize,
    logits: Vec<f32>,
}

impl Draft {
    /// `engine` drafts for a model of `vocab` tokens.
    pub fn new(engine: Engine, vocab: usize) -> Draft {
        Draft { engine, vocab, logits: Vec::new() }
    }

    /// Drafts as many tokens for each text as are worth their time.
    ///
    /// # Errors
    /// The model fails.
    pub fn draft_tokens(&mut self, texts: &mut [Text<'_>], cost: &mut Cost) -> Result<Vec<Vec<u32>>> {
        let likely = texts.iter_mut().map(|text| self.likely(text)).collect::<Result<Vec<_>>>()?;
        let plan = cost.plan(&likely);
        let mut drafts = vec![Vec::new(); texts.len()];
        for (text, ahead) in texts.iter_mut().zip(&plan) {
            text.memory.idle = if *ahead == 0 { text.memory.idle + 1 } else { 0 };
        }
        for step in 0..plan.iter().copied().max().unwrap_or(0) {
            let begin = Instant::now();
            self.step(texts, &plan, &mut drafts)?;
            // The first step also reads what the texts have gained.
            if step > 0 {
                cost.observe_draft(begin.elapsed());
            }
        }
        for (text, draft) in texts.iter_mut().zip(&drafts) {
            text.memory.current = draft.first().map(|first| (KINDS - 1, *first));
        }
        Ok(drafts)
    }

    /// How likely the sampler chooses a draft token of a text, and how many of them there can be.
    fn likely(&self, text: &mut Text<'_>) -> Result<(f64, usize)> {
        let Memory { sequence, .. } = text.memory;
        let sequence = match sequence {
            Some(sequence) => sequence,
            None => sequence.insert(self.engine.new_sequence()?),
        };
        // Draft tokens that the sampler did not choose are forgotten; the last token is read again, as its logits are
        // wanted.
        sequence.truncate(text.ids.len() - 1);
        let vocab = self.engine.config().vocab;
        let known = text.ids[sequence.len()..].iter().all(|id| (*id as usize) < vocab);
        let room = (self.engine.context() + 1).saturating_sub(text.ids.len()).min(text.room);
        Ok((text.memory.likely_after_pause(), if known { room } else { 0 }))
    }

    /// Drafts one token more for every text that does not have as many as planned.
    fn step(&mut self, texts: &mut [Text<'_>], plan: &[usize], drafts: &mut [Vec<u32>]) -> Result<()> {
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
                Feed { sequence, tokens }
            })
            .collect();
        self.engine.forward(&mut feeds, Want::Last, &mut self.logits)?;
        let vocab = self.engine.config().vocab;
        drop(feeds);
        for (draft, row) in open.into_iter().zip(self.logits.chunks_exact(vocab)) {
            draft.push(argmax(&row[..vocab.min(self.vocab)]));
        }
        Ok(())
    }
}
