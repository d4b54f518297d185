//! Logits of a step, from which the tokens of its texts are chosen.

use super::slot::{Likely, Slot};
use crate::error::{Error, Result};
use crate::runtime::engine::Engine;
use crate::runtime::sequence::{Feed, Output};
use crate::sched::Work;
use std::collections::HashMap;

/// Largest number of rows of logits that the scoring of a prompt keeps in memory.
const SCORED_ROWS: u32 = 128;

/// Errors of texts of a step, by index.
pub(super) type Errors = HashMap<usize, Error>;

/// Logits after the last token of a prompt, by index of the text in the step.
pub(super) type LastRows = HashMap<usize, Vec<f32>>;

/// Logits from which the tokens of a step are chosen, row by row.
#[derive(Default)]
pub(super) struct Choices {
    /// All logits, `(rows, vocab)`; empty if `best` is used.
    logits: Vec<f32>,
    vocab: usize,
    /// The largest logits of each row, if the device selects them.
    best: Vec<Vec<(u32, f32)>>,
    /// Whether a drafting model reads the output of the final norm.
    follows: bool,
    /// The output of the final norm for all tokens, `(tokens, hidden)`, if it is read.
    hidden: Vec<f32>,
}

impl Choices {
    pub(super) fn clear(&mut self, engine: &Engine) {
        self.best.clear();
        self.hidden.clear();
        self.logits.clear();
        self.vocab = engine.config().vocab;
    }

    /// Runs the engine and adds the rows. For each row it returns only the `suffices` largest logits if it can select
    /// them, else all. More tokens than a step of the engine takes are divided among several.
    pub(super) fn make(
        &mut self,
        engine: &mut Engine,
        mut feeds: &mut [Feed<'_>],
        suffices: Option<usize>,
    ) -> Result<()> {
        let best = suffices.filter(|k| engine.finds_best(*k) && !self.follows);
        while !feeds.is_empty() {
            let mut tokens = 0;
            let fits = |feed: &&Feed<'_>| {
                tokens += feed.tokens.len();
                tokens <= engine.step_rows()
            };
            let count = feeds.iter().take_while(fits).count().max(1);
            let (now, later) = feeds.split_at_mut(count);
            feeds = later;
            match best {
                Some(k) => engine.step(now, Output::Best(k, &mut self.best))?,
                None if self.follows => {
                    engine.step(now, Output::Hidden { logits: &mut self.logits, hidden: &mut self.hidden })?;
                }
                None => engine.step(now, Output::Logits(&mut self.logits))?,
            }
        }
        Ok(())
    }

    /// Begins a step. With `follows`, the engine returns the output of the final norm, too.
    pub(super) fn begin(&mut self, engine: &Engine, follows: bool) {
        self.follows = follows;
        self.clear(engine);
    }

    /// Returns the output of the final norm for all tokens, `(tokens, hidden)`; empty if it is not read.
    pub(super) fn hidden(&self) -> &[f32] {
        &self.hidden
    }

    pub(super) fn rows(&self) -> usize {
        if self.best.is_empty() { self.logits.len() / self.vocab } else { self.best.len() }
    }

    pub(super) fn rows_from(&self, first: usize, count: usize) -> Vec<Likely<'_>> {
        let row = |i: usize| match self.best.is_empty() {
            true => Likely::All(&self.logits[i * self.vocab..][..self.vocab]),
            false => Likely::Best(&self.best[i]),
        };
        (first..first + count).map(row).collect()
    }

    /// Computes the parts of prompts whose tokens are scored, at most [`SCORED_ROWS`] rows of logits at a time. Returns
    /// the errors of texts that fail, and the last row of those that choose a token, both by index.
    pub(super) fn score_prompts(
        &mut self,
        engine: &mut Engine,
        active: &mut [(Work, Slot)],
    ) -> Result<(Errors, LastRows)> {
        let (mut errors, mut last_rows) = (Errors::new(), LastRows::new());
        let vocab = engine.config().vocab;
        for (i, (work, slot)) in active.iter_mut().enumerate().filter(|(_, (work, slot))| slot.scores(work)) {
            let mut left = *work;
            while left.tokens > 0 {
                let part = Work { tokens: left.tokens.min(SCORED_ROWS), ..left };
                self.logits.clear();
                self.hidden.clear();
                match self.make(engine, &mut [slot.feed(&part)], None) {
                    Err(e) if e.is_interrupt() => return Err(e),
                    Err(e) => {
                        _ = errors.insert(i, e);
                        break;
                    }
                    Ok(()) => slot.take_scores(part.start as usize, &self.logits, vocab),
                }
                (left.start, left.tokens) = (left.start + part.tokens, left.tokens - part.tokens);
            }
            if work.samples && !errors.contains_key(&i) {
                let rows = &self.logits;
                last_rows.insert(i, rows[rows.len() - vocab..].to_vec());
            }
        }
        self.clear(engine);
        Ok((errors, last_rows))
    }
}
