//! Perplexity: the mean negative log-likelihood of a text's tokens, computed over windows.

use crate::error::{Error, Result};
use crate::runtime::engine::Engine;
use crate::runtime::sequence::{Feed, Want};

/// Tokens scored per call of the engine; bounds the memory of the logits.
const STEP: usize = 128;

/// Score of a text.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Score {
    /// Sum of `-ln p(id | ids before it in its window)`.
    pub nll_sum: f64,
    /// Number of tokens scored.
    pub scored: usize,
}

impl Score {
    /// Returns the mean negative log-likelihood in nats; NaN when nothing was scored.
    pub fn nll_mean(&self) -> f64 {
        self.nll_sum / self.scored as f64
    }

    /// Returns the perplexity, `exp(nll_mean)`.
    pub fn perplexity(&self) -> f64 {
        self.nll_mean().exp()
    }

    /// Returns the score of both texts together.
    pub fn plus(self, other: Score) -> Score {
        Score { nll_sum: self.nll_sum + other.nll_sum, scored: self.scored + other.scored }
    }
}

/// Scores all tokens of one window except the first.
///
/// # Errors
/// The window has fewer than two ids or does not fit the context; see [`Engine::forward`].
pub fn score_window(engine: &mut Engine, ids: &[u32]) -> Result<Score> {
    if ids.len() < 2 {
        return Err(Error::usage(format!("found a window of {} ids, expected at least 2", ids.len())));
    }
    let vocab = engine.config().vocab;
    let (inputs, targets) = (&ids[..ids.len() - 1], &ids[1..]);
    let (mut sequence, mut logits) = (engine.new_sequence()?, Vec::new());
    let mut score = Score::default();
    for (tokens, targets) in inputs.chunks(STEP).zip(targets.chunks(STEP)) {
        engine.forward(&mut [Feed { sequence: &mut sequence, tokens, want: Want::All }], &mut logits)?;
        for (row, target) in logits.chunks_exact(vocab).zip(targets) {
            let logit = row
                .get(*target as usize)
                .ok_or_else(|| Error::usage(format!("token {target} is outside the vocabulary of {vocab}")))?;
            score.nll_sum += log_sum_exp(row) - f64::from(*logit);
            score.scored += 1;
        }
    }
    Ok(score)
}

/// Scores a text. Its ids are cut into consecutive pieces, and each piece with `prefix` (usually the
/// beginning-of-sequence token) in front is a window of `window` ids. A shorter rest is dropped.
///
/// # Errors
/// The prefix fills the window, or the text is shorter than one piece.
pub fn score_text(engine: &mut Engine, ids: &[u32], prefix: &[u32], window: usize) -> Result<Score> {
    let Some(piece) = window.checked_sub(prefix.len()).filter(|piece| *piece > 0 && ids.len() >= *piece) else {
        let (shortest, longest) = (prefix.len() + 1, prefix.len() + ids.len());
        let found = format!("found a window of {window} ids, expected {shortest} to {longest}");
        return Err(Error::usage(found));
    };
    let mut total = Score::default();
    for piece in ids.chunks_exact(piece) {
        total = total.plus(score_window(engine, &[prefix, piece].concat())?);
    }
    Ok(total)
}

/// Returns `ln(sum(exp(logits)))`, computed in f64.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().fold(f64::NEG_INFINITY, |m, v| m.max(f64::from(*v)));
    max + logits.iter().map(|v| (f64::from(*v) - max).exp()).sum::<f64>().ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_sum_exp_survives_large_logits() {
        assert!((log_sum_exp(&[1000.0, 1000.0]) - (1000.0 + 2f64.ln())).abs() < 1e-9);
    }
}
