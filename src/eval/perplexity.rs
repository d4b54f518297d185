//! Perplexity of a model on a text, and the loop over windows that all measurements in this module share.

use super::stats::Mean;
use super::windows::Windows;
use crate::error::{Error, Result};
use crate::generate::score::log_sum_exp;
use crate::progress;
use crate::runtime::{Engine, Feed, Sequence, Want};
use rayon::prelude::*;
use serde::Serialize;

/// Largest number of positions whose logits, `(positions, vocab)`, are held at once.
pub(super) const STEP: usize = 128;

/// Perplexity of a model on a text.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Perplexity {
    /// `exp` of the mean negative log-likelihood, with its standard error.
    #[serde(flatten)]
    pub perplexity: Mean,
    /// 95 % confidence interval of the perplexity.
    pub ci95: [f64; 2],
    /// Negative log-likelihood per token in nats.
    pub nll: Mean,
}

impl Perplexity {
    /// Computes the perplexity from the negative log-likelihoods of all scored tokens.
    pub fn of(nll: impl Iterator<Item = f64> + Clone) -> Perplexity {
        let nll = Mean::of(nll);
        let bound = |side: f64| (nll.value + side * 1.96 * nll.stderr).exp();
        Perplexity { perplexity: nll.exp(), ci95: [bound(-1.0), bound(1.0)], nll }
    }
}

/// Measures the perplexity of a text.
///
/// # Errors
/// A window does not fit the context, a token is not in the vocabulary, or logits are NaN; see [`Engine::forward`].
pub fn perplexity(engine: &mut Engine, windows: &Windows) -> Result<Perplexity> {
    let mut nll: Vec<f64> = Vec::with_capacity(windows.scored());
    let vocab = engine.config().vocab;
    windows.check(vocab)?;
    let mut reader = WindowReader::new(engine);
    walk(windows, |window, pieces| {
        reader.begin(&window[..pieces[0].start])?;
        for piece in pieces {
            let logits = reader.read(&window[piece.clone()])?;
            let rows = logits.par_chunks_exact(vocab).zip(&window[piece.start + 1..]);
            nll.par_extend(rows.map(|(row, next)| log_sum_exp(row) - f64::from(row[*next as usize])));
        }
        check(nll.last().copied())?;
        Ok(nll.iter().sum::<f64>() / nll.len() as f64)
    })?;
    Ok(Perplexity::of(nll.into_iter()))
}

/// Calls `each` with every window and its scored positions, which are cut into pieces of [`STEP`]. `each` returns the
/// mean negative log-likelihood so far, from which the progress bar shows the perplexity.
pub(super) fn walk(
    windows: &Windows,
    mut each: impl FnMut(&[u32], &[std::ops::Range<usize>]) -> Result<f64>,
) -> Result<()> {
    let scored = windows.scored_positions();
    let pieces: Vec<_> = scored.clone().step_by(STEP).map(|begin| begin..(begin + STEP).min(scored.end)).collect();
    let bar = progress::items("windows", windows.count() as u64);
    for window in windows.iter() {
        let nll = each(&window, &pieces)?;
        bar.set_message(format!("perplexity {:.4}", nll.exp()));
        bar.inc(1);
    }
    Ok(())
}

/// Returns an error if `nll`, a negative log-likelihood, is NaN, because NaN logits make every figure worthless.
pub(super) fn check(nll: Option<f64>) -> Result<()> {
    match nll {
        Some(nll) if nll.is_nan() => Err(Error::corrupt("found logits that are NaN, expected numbers").help(
            "`iec inspect --stats PACK` counts weights that are NaN; if there are none, choose another --precision",
        )),
        _ => Ok(()),
    }
}

/// Reader that feeds one window after the other to an engine.
pub(super) struct WindowReader<'a> {
    engine: &'a mut Engine,
    sequence: Option<Sequence>,
    logits: Vec<f32>,
}

impl<'a> WindowReader<'a> {
    pub(super) fn new(engine: &'a mut Engine) -> WindowReader<'a> {
        WindowReader { engine, sequence: None, logits: Vec::new() }
    }

    /// Starts a new sequence and feeds the part of a window that is not scored.
    pub(super) fn begin(&mut self, tokens: &[u32]) -> Result<()> {
        let sequence = self.sequence.insert(self.engine.new_sequence()?);
        self.engine.forward(&mut [Feed { sequence, tokens, want: Want::Nothing }], &mut self.logits)
    }

    /// Feeds the next tokens and returns the logits after each of them: `(tokens, vocab)`.
    pub(super) fn read(&mut self, tokens: &[u32]) -> Result<&[f32]> {
        let sequence = self.sequence.as_mut().ok_or_else(|| Error::usage("no window was begun"))?;
        self.engine.forward(&mut [Feed { sequence, tokens, want: Want::All }], &mut self.logits)?;
        Ok(&self.logits)
    }
}
