//! Numbers that an engine computes besides texts: logits, hidden states, embeddings and log-probabilities.

use super::answer::TokenInfo;
use super::engine::Engine;
use super::request::Request;
use crate::error::{Cause, Error, Result};
use crate::resources;
use crate::runtime;
use crate::runtime::adapters::AdapterSet;
use crate::runtime::{Feed, Output, Sequence, Want};
use crate::{interrupt, progress};

/// Tokens that are computed at a time while other requests may compute between them.
const PIECE: usize = 128;

/// A matrix of rows of equal length.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    columns: usize,
    values: Vec<f32>,
}

impl Matrix {
    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.values.len() / self.columns
    }

    /// Returns the number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns a row.
    ///
    /// # Panics
    /// There is no such row.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.columns..][..self.columns]
    }

    /// Returns all rows, one behind the other.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Returns the memory of all rows.
    pub fn into_values(self) -> Vec<f32> {
        self.values
    }
}

/// Way in which the hidden states of a text become one vector.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pooling {
    /// The hidden state of the last token.
    #[default]
    Last,
    /// The mean of the hidden states of all tokens.
    Mean,
}

impl std::str::FromStr for Pooling {
    type Err = Error;

    fn from_str(text: &str) -> Result<Pooling> {
        match text {
            "last" => Ok(Pooling::Last),
            "mean" => Ok(Pooling::Mean),
            _ => Err(Error::usage(format!("pooling: found `{text}`, expected last or mean"))),
        }
    }
}

/// Kind of the rows that are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RowKind {
    Logits,
    Hidden,
}

impl Engine {
    /// Computes the logits behind each of the tokens: `(tokens, vocabulary)`.
    ///
    /// ```
    /// let engine = iec::Engine::open_embedded(&iec::OpenOptions::default())?;
    /// let ids = engine.tokenize("Once upon", true)?;
    /// let logits = engine.logits(&ids)?;
    /// assert_eq!((logits.rows(), logits.columns()), (ids.len(), 512));
    /// # Ok::<(), iec::Error>(())
    /// ```
    ///
    /// # Errors
    /// There is no token, a token is outside the vocabulary, the tokens do not fit the context or their logits the
    /// memory.
    pub fn logits(&self, ids: &[u32]) -> Result<Matrix> {
        self.rows(ids, RowKind::Logits)
    }

    /// Computes the output of the final norm for each of the tokens: `(tokens, hidden size)`.
    ///
    /// # Errors
    /// The same as those of [`Engine::logits`]; also if the last layers are on a GPU.
    pub fn hidden_states(&self, ids: &[u32]) -> Result<Matrix> {
        self.rows(ids, RowKind::Hidden)
    }

    /// Computes a vector of length 1 for a text from its hidden states. A model that was not trained for embeddings
    /// gives vectors of limited use.
    ///
    /// # Errors
    /// The same as those of [`Engine::hidden_states`] and [`Engine::tokenize`].
    pub fn embed(&self, text: &str, pooling: Pooling) -> Result<Vec<f32>> {
        let states = self.hidden_states(&self.tokenize(text, true)?)?;
        let mut vector = match pooling {
            Pooling::Last => states.row(states.rows() - 1).to_vec(),
            Pooling::Mean => mean(&states),
        };
        let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        if length > 0.0 {
            vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
        }
        Ok(vector)
    }

    /// Computes the log-probability of each token behind those before it, for all tokens but the first, and the `top`
    /// most likely tokens at its place.
    ///
    /// # Errors
    /// The same as those of [`Engine::generate`].
    pub fn score(&self, ids: &[u32], top: usize) -> Result<Vec<TokenInfo>> {
        let request = Request::ids(ids).max_tokens(0).logprobs(top).field("echo", true);
        let mut answer = self.generate(&request)?;
        Ok(answer.choices.pop().map(|choice| choice.prompt_tokens).unwrap_or_default())
    }

    fn rows(&self, ids: &[u32], wanted: RowKind) -> Result<Matrix> {
        if ids.is_empty() {
            return Err(Error::usage("found no token, expected at least one"));
        }
        let ended = || Error::engine("the engine ended before the computation");
        let tokens = ids.len();
        let (mut sequence, columns, at_once) = self
            .host()
            .model
            .compute(move |engine| -> Result<_> {
                let columns = match wanted {
                    RowKind::Logits => engine.config().vocab,
                    RowKind::Hidden => engine.config().hidden,
                };
                // With a budget for pages, other requests must not take those that the rest needs.
                let at_once = if engine.most_pages().is_some() { tokens } else { PIECE };
                let mut sequence = engine.new_sequence()?;
                sequence.adapt(AdapterSet::default());
                sequence.expect(tokens);
                Ok((sequence, columns, at_once))
            })
            .ok_or_else(ended)??;
        let bytes = tokens.saturating_mul(columns).saturating_mul(size_of::<f32>());
        let mut values = Vec::new();
        resources::try_reserve(&mut values, tokens.saturating_mul(columns))
            .map_err(|_| Error::new(Cause::OutOfMemory(format!("{tokens} rows need {bytes} bytes"))))?;
        let bar = progress::items("tokens", tokens as u64);
        for piece in ids.chunks(at_once) {
            interrupt::check()?;
            let piece = piece.to_vec();
            let computed = self.host().model.compute(move |engine| {
                let computed = rows_of(engine, &mut sequence, &piece, wanted);
                computed.map(|rows| (rows, sequence))
            });
            let (rows, next) = computed.ok_or_else(ended)??;
            values.extend_from_slice(&rows);
            bar.inc((rows.len() / columns) as u64);
            sequence = next;
        }
        Ok(Matrix { columns, values })
    }
}

/// Passes the next tokens of a sequence through the model.
fn rows_of(engine: &mut runtime::Engine, sequence: &mut Sequence, ids: &[u32], wanted: RowKind) -> Result<Vec<f32>> {
    let (mut logits, mut hidden) = (Vec::new(), Vec::new());
    for tokens in ids.chunks(engine.step_rows()) {
        let want = if wanted == RowKind::Logits { Want::All } else { Want::Nothing };
        let feed = Feed { sequence: &mut *sequence, tokens, want };
        let output = match wanted {
            RowKind::Logits => Output::Logits(&mut logits),
            RowKind::Hidden => Output::Hidden { logits: &mut logits, hidden: &mut hidden },
        };
        engine.step(&mut [feed], output)?;
    }
    Ok(if wanted == RowKind::Logits { logits } else { hidden })
}

/// Returns the mean of all rows, summed in f64 in their order.
fn mean(states: &Matrix) -> Vec<f32> {
    let mut sums = vec![0.0f64; states.columns()];
    for row in 0..states.rows() {
        sums.iter_mut().zip(states.row(row)).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    sums.into_iter().map(|sum| (sum / states.rows() as f64) as f32).collect()
}
