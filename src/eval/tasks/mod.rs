//! Evaluation tasks with known answers, read from files of JSON lines, and requests for log-probabilities.
//!
//! [`multiple_choice`] scores the choices of each question, [`exact_match()`] generates answers and compares them with
//! the expected ones, and [`loglikelihoods`] answers requests of lm-evaluation-harness.

mod choices;
mod exact_match;
mod lines;
mod requests;

pub use choices::{Accuracy, multiple_choice};
pub use exact_match::{Answers, ExactMatch, exact_match};
pub use requests::{Answer, Answered, loglikelihoods};

use super::Request;
use super::windows::leading_tokens;
use crate::error::{Cause, Error, Result};
use crate::files::{self, TEXT_LIMIT};
use crate::generate::text::{Tokenizer, tokenizer};
use crate::model_config::ModelConfig;
use crate::output::Target;
use std::path::PathBuf;

/// Options of all tasks with questions.
#[derive(Debug, Clone, Default)]
pub struct TaskOptions {
    /// File with the text that precedes every question, such as worked examples.
    pub few_shot: Option<PathBuf>,
    /// Largest number of questions, taken from the beginning of the file.
    pub limit: Option<usize>,
    /// Output file with one JSON line per question.
    pub details: Option<Target>,
}

impl TaskOptions {
    /// Returns the text that precedes every question.
    fn shots(&self) -> Result<String> {
        self.few_shot.as_deref().map_or_else(|| Ok(String::new()), |path| files::read_text(path, TEXT_LIMIT))
    }
}

/// Encoder of a context and its continuation.
#[derive(Debug)]
pub struct Encoder<'a> {
    tokenizer: Option<&'a Tokenizer>,
    /// Tokens before every context, if the tokenizer adds some.
    prefix: Vec<u32>,
    /// Tokens before a text without context: those that the tokenizer adds, otherwise BOS or an end-of-text token.
    first: Vec<u32>,
}

impl<'a> Encoder<'a> {
    /// Creates an encoder for a model. Without a tokenizer it only supports requests that consist of token ids. If
    /// `bos` is true, the tokens that the tokenizer adds precede every context.
    ///
    /// # Errors
    /// The tokenizer cannot encode an empty text.
    pub fn new(config: &ModelConfig, tokenizer: Option<&'a Tokenizer>, bos: bool) -> Result<Encoder<'a>> {
        let leading = tokenizer.map(leading_tokens).transpose()?.unwrap_or_default();
        let first = match leading.is_empty() {
            true => Vec::from_iter(config.bos.or(config.eos.first().copied())),
            false => leading.clone(),
        };
        Ok(Encoder { tokenizer, prefix: if bos { leading } else { Vec::new() }, first })
    }

    fn tokenizer(&self) -> Result<&'a Tokenizer> {
        self.tokenizer.ok_or_else(|| {
            Error::new(Cause::Model(format!("the pack has no {}", tokenizer::FILE_NAME)))
                .help("name one with --tokenizer FILE")
        })
    }

    /// Returns the tokens before a text without context.
    fn first(&self) -> Result<&[u32]> {
        match self.first.is_empty() {
            true => Err(Error::usage("found an empty context, and the model has no token that begins or ends a text")
                .help("add a context to this line of the file")),
            false => Ok(&self.first),
        }
    }

    /// Encodes both texts together, so that tokens merge as in running text, and splits the tokens where the context
    /// alone ends. Trailing spaces of the context become part of the continuation.
    fn request(&self, context: &str, continuation: &str) -> Result<Request> {
        let kept = context.trim_end();
        let continuation = format!("{}{continuation}", &context[kept.len()..]);
        let tokenizer = self.tokenizer()?;
        let before = tokenizer.encode_plain(kept)?;
        let whole = tokenizer.encode_plain(&format!("{kept}{continuation}"))?;
        // If the end of the context merges with the continuation, the continuation keeps at least one token.
        let cut = before.len().min(whole.len().saturating_sub(1));
        let mut ids = self.prefix.clone();
        ids.extend(&whole[..cut]);
        if ids.is_empty() {
            ids.extend(self.first()?);
        }
        Ok(Request { context: ids, continuation: whole[cut..].to_vec() })
    }
}
