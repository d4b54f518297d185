//! A small model that guesses what a large one will say. It reads every text itself, some tokens behind, and always says
//! what it finds most likely.

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
    /// `engine` guesses for a model of `vocab` tokens.
    pub fn new(engine: Engine, vocab: usize) -> Draft {
        Draft { engine, vocab, logits: Vec::new() }
    }

    /// Guesses as many tokens for each text as are worth it.
    ///
    /// # Errors
    /// The model fails.
    pub fn guess(&mut self, texts: &mut [Text<'_>], cost: &mut Cost) -> Result<Vec<Vec<u32>>> {
        let likely = texts.iter_mut().map(|text| self.likely(text)).collect::<Result<Vec<_>>>()?;
        let plan = cost.plan(&likely);
        let mut guesses = vec![Vec::new(); texts.len()];
        for (text, ahead) in texts.iter_mut().zip(&plan) {
            text.memory.idle = if *ahead == 0 { text.memory.idle + 1 } else { 0 };
        }
        for step in 0..plan.iter().copied().max().unwrap_or(0) {
            let begin = Instant::now();
            self.step(texts, &plan, &mut guesses)?;
            // The first step also reads what the texts have gained.
            if step > 0 {
                cost.observe_guess(begin.elapsed());
            }
        }
        for (text, guess) in texts.iter_mut().zip(&guesses) {
            text.memory.current = guess.first().map(|first| (KINDS - 1, *first));
        }
        Ok(guesses)
    }

    /// How likely guesses for a text are right, and how many there can be.
    fn likely(&self, text: &mut Text<'_>) -> Result<(f64, usize)> {
        let Memory { sequence, .. } = text.memory;
        let sequence = match sequence {
            Some(sequence) => sequence,
            None => sequence.insert(self.engine.new_sequence()?),
        };
        // What was guessed wrong is forgotten; the last token is read again, as its logits are wanted.
        sequence.truncate(text.ids.len() - 1);
        let vocab = self.engine.config().vocab;
        let known = text.ids[sequence.len()..].iter().all(|id| (*id as usize) < vocab);
        let room = (self.engine.context() + 1).saturating_sub(text.ids.len()).min(text.room);
        Ok((text.memory.likely_after_pause(), if known { room } else { 0 }))
    }

    /// One token more for every text whose guess is not yet as long as planned.
    fn step(&mut self, texts: &mut [Text<'_>], plan: &[usize], guesses: &mut [Vec<u32>]) -> Result<()> {
        let (mut feeds, mut open) = (Vec::new(), Vec::new());
        for ((text, ahead), guess) in texts.iter_mut().zip(plan).zip(guesses) {
            let Some(sequence) = text.memory.sequence.as_mut().filter(|_| guess.len() < *ahead) else { continue };
            open.push(guess);
            feeds.push((sequence, text.ids));
        }
        let mut feeds: Vec<Feed<'_>> = feeds
            .into_iter()
            .zip(&open)
            .map(|((sequence, ids), guess)| {
                let tokens = match guess.last() {
                    Some(last) => std::slice::from_ref(last),
                    None => &ids[sequence.len()..],
                };
                Feed { sequence, tokens }
            })
            .collect();
        self.engine.forward(&mut feeds, Want::Last, &mut self.logits)?;
        let vocab = self.engine.config().vocab;
        drop(feeds);
        for (guess, row) in open.into_iter().zip(self.logits.chunks_exact(vocab)) {
            guess.push(argmax(&row[..vocab.min(self.vocab)]));
        }
        Ok(())
    }
}
