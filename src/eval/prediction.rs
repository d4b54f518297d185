//! Measures how well layers of multi-token prediction predict a text: the first draft after each token of it.

use super::perplexity::{Perplexity, check, walk};
use super::stats::Mean;
use super::windows::Windows;
use crate::error::{Error, Result};
use crate::generate::score::log_sum_exp;
use crate::runtime::{Engine, Feed, Output, Predictor, Want};
use rayon::prelude::*;
use serde::Serialize;

/// Measurement of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DraftQuality {
    /// Perplexity of the text by this layer, which reads the model's output for all tokens but the last.
    #[serde(flatten)]
    pub perplexity: Perplexity,
    /// Share of tokens that the layer finds most likely and the model, too, once it has read one token more: drafts
    /// that a greedy model accepts.
    pub accepted: Mean,
}

/// Prediction of the model, or of a layer, at one scored token: the negative log-likelihood of the next token, and the
/// most likely token.
type Said = (f64, usize);

/// Measures the perplexity of a text by the model, and by each of its layers of multi-token prediction.
///
/// # Errors
/// The same as for [`super::perplexity()`]; also if the last layers are on a GPU.
pub fn draft_quality(
    engine: &mut Engine,
    predictors: &mut [Predictor],
    windows: &Windows,
) -> Result<(Perplexity, Vec<DraftQuality>)> {
    let (vocab, width) = (engine.config().vocab, engine.config().hidden);
    windows.check(vocab)?;
    let mut own: Vec<Said> = Vec::with_capacity(windows.scored());
    let mut theirs: Vec<Vec<Said>> = vec![Vec::new(); predictors.len()];
    walk(windows, |window, pieces| {
        let mut sequence = engine.new_sequence()?;
        let mut sequences = predictors.iter().map(Predictor::new_sequence).collect::<Result<Vec<_>>>()?;
        let (mut logits, mut hidden, mut last) = (Vec::new(), Vec::new(), Vec::new());
        let most = engine.step_rows().min(super::perplexity::STEP);
        let first = pieces[0].start;
        let unscored = (0..first).step_by(most).map(|begin| (begin..(begin + most).min(first), Want::Nothing));
        let scored = pieces.iter().flat_map(|piece| {
            let end = piece.end;
            piece.clone().step_by(most).map(move |begin| (begin..(begin + most).min(end), Want::All))
        });
        for (piece, want) in unscored.chain(scored) {
            let tokens = &window[piece.clone()];
            logits.clear();
            hidden.clear();
            let feed = Feed { sequence: &mut sequence, tokens, want };
            engine.step(&mut [feed], Output::Hidden { logits: &mut logits, hidden: &mut hidden })?;
            own.par_extend(said(&logits, vocab, &window[piece.start + 1..]));
            // The layer reads each token with what was computed for the token before.
            let skipped = usize::from(piece.start == 0);
            let mut previous = std::mem::take(&mut last);
            last.extend_from_slice(&hidden[hidden.len() - width..]);
            previous.extend_from_slice(&hidden[..hidden.len() - width]);
            for ((predictor, sequence), theirs) in predictors.iter_mut().zip(&mut sequences).zip(&mut theirs) {
                let tokens = &tokens[skipped..];
                if tokens.is_empty() {
                    continue;
                }
                logits.clear();
                let feed = Feed { sequence, tokens, want };
                predictor.step(&mut [feed], &previous, [&mut logits, &mut Vec::new()])?;
                theirs.par_extend(said(&logits, vocab, &window[piece.start + 1..]));
            }
        }
        for said in std::iter::once(&own).chain(&theirs) {
            check(said.last().map(|(nll, _)| *nll))?;
        }
        Ok(own.iter().map(|(nll, _)| nll).sum::<f64>() / own.len() as f64)
    })?;
    let perplexity = |said: &[Said]| Perplexity::of(said.iter().map(|(nll, _)| *nll));
    let of_layer = |theirs: &Vec<Said>| match theirs.len() == own.len() {
        true => Ok(DraftQuality {
            perplexity: perplexity(theirs),
            accepted: Mean::share(own.iter().zip(theirs).map(|(own, theirs)| own.1 == theirs.1)),
        }),
        false => Err(Error::usage("found windows too short to measure multi-token prediction")
            .help("choose a longer text, or more tokens with --ctx")),
    };
    Ok((perplexity(&own), theirs.iter().map(of_layer).collect::<Result<_>>()?))
}

/// Returns the negative log-likelihoods of the tokens that follow, and the most likely tokens.
fn said<'a>(logits: &'a [f32], vocab: usize, next: &'a [u32]) -> impl IndexedParallelIterator<Item = Said> + 'a {
    logits.par_chunks_exact(vocab).zip(next).map(|(row, next)| {
        let best = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]).then(b.cmp(a)));
        (log_sum_exp(row) - f64::from(row[*next as usize]), best.unwrap_or(0))
    })
}
