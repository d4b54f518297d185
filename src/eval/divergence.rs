//! Kullback-Leibler divergence between the predictions of a model and of its reference. Both process the same windows
//! side by side, so no logits are stored; llama.cpp's tool writes 16 bits per token and vocabulary entry to disk
//! instead.

use super::perplexity::{Perplexity, WindowReader, check, walk};
use super::stats::{Mean, Spread};
use super::windows::Windows;
use crate::error::{Error, Result};
use crate::files;
use crate::generate::text::{Tokenizer, tokenizer};
use crate::iebin::IebinReader;
use crate::iebin::reader::NAME_A_PACK;
use crate::runtime::{Engine, EngineOptions, Precision, PrefixActivations};
use rayon::prelude::*;
use serde::Serialize;
use std::ops::Range;
use std::path::Path;

/// Comparison of two models on the same text. Probabilities are between 0 and 1, divergences in nats.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Divergence {
    /// Perplexity of the model.
    pub model: Perplexity,
    /// Perplexity of the reference.
    pub reference: Perplexity,
    /// Ratio of the model's perplexity and the reference's. Its standard error is based on the difference per token,
    /// so errors common to both cancel.
    pub perplexity_ratio: Mean,
    /// 95 % interval of this ratio.
    pub perplexity_ratio_ci95: [f64; 2],
    /// Kullback-Leibler divergence of the model from the reference, `sum p_ref * ln(p_ref / p)`, per token.
    pub kl: Mean,
    /// Percentiles of the divergence over tokens.
    pub kl_spread: Spread,
    /// Share of tokens for which both models have the same most likely token.
    pub top1_agreement: Mean,
    /// Mean difference of the probability of the text's next token, that of the model minus that of the reference.
    pub delta_p: Mean,
    /// Root mean square of this difference.
    pub rms_delta_p: Mean,
}

/// Comparison at one scored token.
#[derive(Debug, Clone, Copy)]
struct Token {
    nll: f64,
    reference_nll: f64,
    kl: f64,
    same_top: bool,
}

impl Token {
    fn delta_p(&self) -> f64 {
        (-self.nll).exp() - (-self.reference_nll).exp()
    }
}

/// Opens the pack in `dir` as the reference for a model with this tokenizer. Packs of floats run in fp32 unless
/// `options` specifies a precision.
///
/// # Errors
/// There is no valid pack, its tokens differ from the model's, or it cannot run with `options`.
pub fn open_reference(dir: &Path, tokenizer: &Tokenizer, options: EngineOptions) -> Result<Engine> {
    let reader = IebinReader::open(dir).map_err(|e| e.help(NAME_A_PACK).while_opening_model())?;
    let path = dir.join(tokenizer::FILE_NAME);
    if files::exists(&path)? && !Tokenizer::open(&path)?.has_tokens_of(tokenizer) {
        let found = "found other tokens than those of the model, whose probabilities cannot be compared";
        return Err(Error::usage(found).at(&path).help("compare two packs of the same checkpoint"));
    }
    let precision = options.precision.or_else(|| Precision::resolve(Some(Precision::Fp32), &reader).ok());
    Engine::open(&reader, &EngineOptions { precision, ..options }).map_err(Error::while_opening_model)
}

/// Measures `engine` against `reference`.
///
/// # Errors
/// The vocabularies differ; otherwise the same as for [`super::perplexity()`].
pub fn divergence(engine: &mut Engine, reference: &mut Engine, windows: &Windows) -> Result<Divergence> {
    let vocab = engine.config().vocab;
    if reference.config().vocab != vocab {
        let found = format!("found a vocabulary of {vocab}, expected {} as in the reference", reference.config().vocab);
        return Err(Error::usage(found).help("compare models that have the same tokens"));
    }
    windows.check(vocab)?;
    let mut tokens: Vec<Token> = Vec::with_capacity(windows.scored());
    let (mut model, mut reference) = (WindowReader::new(engine), WindowReader::new(reference));
    let mut nll = 0.0;
    walk(windows, |window, pieces| {
        model.begin(&window[..pieces[0].start])?;
        reference.begin(&window[..pieces[0].start])?;
        let before = tokens.len();
        for piece in pieces {
            let logits = model.read(&window[piece.clone()])?.par_chunks_exact(vocab);
            let theirs = reference.read(&window[piece.clone()])?.par_chunks_exact(vocab);
            let rows = logits.zip(theirs).zip(&window[piece.start + 1..]);
            tokens.par_extend(rows.map(|((row, theirs), next)| compare(row, theirs, *next as usize)));
        }
        check(tokens.last().map(|token| token.kl + token.nll))?;
        nll += tokens[before..].iter().map(|token| token.nll).sum::<f64>();
        Ok(nll / tokens.len() as f64)
    })?;
    Ok(sum_up(&tokens))
}

/// Reference predictions for one window, kept for comparison with many models.
pub struct Remembered {
    window: Vec<u32>,
    /// Positions in the window whose logits predict a scored token.
    scored: Range<usize>,
    vocab: usize,
    /// Logits of the reference: `(scored, vocab)`.
    logits: Vec<f32>,
}

impl Remembered {
    /// Computes the reference predictions for a window of `windows`.
    ///
    /// # Errors
    /// The same as for [`divergence()`].
    pub fn of(reference: &mut Engine, windows: &Windows, window: Vec<u32>) -> Result<Remembered> {
        let (scored, vocab) = (windows.scored_positions(), reference.config().vocab);
        windows.check(vocab)?;
        let mut reader = WindowReader::new(reference);
        reader.begin(&window[..scored.start])?;
        let logits = reader.read(&window[scored.clone()])?.to_vec();
        Ok(Remembered { window, scored, vocab, logits })
    }

    /// Returns the mean divergence of a model with the same vocabulary over the scored tokens, in nats.
    ///
    /// # Errors
    /// The same as for [`divergence()`].
    pub fn kl(&self, engine: &mut Engine) -> Result<f64> {
        let mut reader = WindowReader::new(engine);
        reader.begin(&self.window[..self.scored.start])?;
        self.kl_of(reader.read(&self.window[self.scored.clone()])?)
    }

    /// Returns the same as [`Remembered::kl`], but takes the activations before `layer` from `prefix` if it holds them,
    /// and stores them there otherwise. All models that share a `prefix` must be equal before the layer.
    ///
    /// # Errors
    /// The same as for [`divergence()`].
    pub fn kl_reusing(&self, engine: &mut Engine, layer: usize, prefix: &mut PrefixActivations) -> Result<f64> {
        self.kl_of(&engine.logits_reusing(&self.window[..self.scored.end], self.scored.start, layer, prefix)?)
    }

    fn kl_of(&self, logits: &[f32]) -> Result<f64> {
        let logits = logits.par_chunks_exact(self.vocab);
        let rows = logits.zip(self.logits.par_chunks_exact(self.vocab)).zip(&self.window[self.scored.start + 1..]);
        let kl: Vec<f64> = rows.map(|((row, theirs), next)| compare(row, theirs, *next as usize).kl).collect();
        let mean = kl.iter().sum::<f64>() / kl.len().max(1) as f64;
        check(Some(mean))?;
        Ok(mean)
    }
}

/// Returns the natural logarithm of the sum of the exponentials of the logits, and the index of the largest logit.
fn softmax(row: &[f32]) -> (f64, usize) {
    let top = (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best });
    let max = f64::from(row[top]);
    (max + row.iter().map(|v| (f64::from(*v) - max).exp()).sum::<f64>().ln(), top)
}

/// Compares the logits of a model at one position with those of the reference; `next` is the token that follows in the
/// text.
fn compare(row: &[f32], reference: &[f32], next: usize) -> Token {
    let ((sum, top), (reference_sum, reference_top)) = (softmax(row), softmax(reference));
    let kl: f64 = row
        .iter()
        .zip(reference)
        .map(|(model, reference)| {
            let (ln_p, ln_ref) = (f64::from(*model) - sum, f64::from(*reference) - reference_sum);
            let p_ref = ln_ref.exp();
            // A token whose reference probability is zero contributes nothing.
            if p_ref == 0.0 { 0.0 } else { p_ref * (ln_ref - ln_p) }
        })
        .sum();
    Token {
        nll: sum - f64::from(row[next]),
        reference_nll: reference_sum - f64::from(reference[next]),
        // Rounding may make the sum slightly negative; NaN is kept.
        kl: if kl < 0.0 { 0.0 } else { kl },
        same_top: top == reference_top,
    }
}

fn sum_up(tokens: &[Token]) -> Divergence {
    let of = |f: fn(&Token) -> f64| Mean::of(tokens.iter().map(f));
    let squares = of(|token| token.delta_p().powi(2));
    let rms = squares.value.sqrt();
    let log_ratio = of(|token| token.nll - token.reference_nll);
    Divergence {
        model: Perplexity::of(tokens.iter().map(|token| token.nll)),
        reference: Perplexity::of(tokens.iter().map(|token| token.reference_nll)),
        perplexity_ratio: log_ratio.exp(),
        perplexity_ratio_ci95: [-1.96, 1.96].map(|z| (log_ratio.value + z * log_ratio.stderr).exp()),
        kl: of(|token| token.kl),
        kl_spread: Spread::of(tokens.iter().map(|token| token.kl)),
        top1_agreement: Mean::share(tokens.iter().map(|token| token.same_top)),
        delta_p: of(Token::delta_p),
        rms_delta_p: squares.map(f64::sqrt, if rms > 0.0 { 0.5 / rms } else { 0.0 }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_compared_by_its_distributions() {
        // Probabilities (1/2, 1/4, 1/4) of the reference against (1/4, 1/2, 1/4); the logits are shifted by
        // constants, which must not affect the result.
        let ln2 = std::f32::consts::LN_2;
        let token = compare(&[3.0, 3.0 + ln2, 3.0], &[-7.0 + ln2, -7.0, -7.0], 0);
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-6, "{a} {b}");
        close(token.nll, 4f64.ln());
        close(token.reference_nll, 2f64.ln());
        close(token.kl, 0.25 * 2f64.ln());
        close(token.delta_p(), -0.25);
        assert!(!token.same_top);
        let same = compare(&[1.0, 2.0], &[1.0, 2.0], 1);
        assert!(same.kl == 0.0 && same.same_top && same.delta_p() == 0.0);
        assert!(compare(&[f32::NAN, 1.0], &[0.0, 1.0], 1).kl.is_nan());
    }

    #[test]
    fn errors_common_to_both_models_cancel_in_the_ratio() {
        let token = |nll: f64, more: f64| Token { nll: nll + more, reference_nll: nll, kl: 0.1, same_top: true };
        let tokens: Vec<Token> = (0..100).map(|i| token(f64::from(i % 7), 0.01)).collect();
        let sum = sum_up(&tokens);
        assert!((sum.perplexity_ratio.value - 0.01f64.exp()).abs() < 1e-12);
        assert!(sum.perplexity_ratio_ci95.iter().all(|bound| (bound / sum.perplexity_ratio.value - 1.0).abs() < 1e-12));
        assert!(sum.perplexity_ratio.stderr < 1e-12 && sum.model.perplexity.stderr > 1.0);
        assert_eq!((sum.kl_spread.max, sum.top1_agreement.value), (0.1, 1.0));
    }
}
