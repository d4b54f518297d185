//! Tasks with known answers, read from files of JSON lines, and requests for log-probabilities.
//!
//! [`multiple_choice`] scores choices, [`exact_match`] generates answers, [`loglikelihoods`] serves
//! lm-evaluation-harness.

mod choices;
mod exact_match;
mod lines;
mod requests;

pub use choices::{Accuracy, multiple_choice};
pub use exact_match::{Answers, ExactMatch, exact_match};
pub use requests::{Answer, Answered, loglikelihoods};

use super::Request;
use super::windows::leading_token;
use crate::error::{Cause, Context, Error, Result};
use crate::model_config::ModelConfig;
use crate::output::Target;
use crate::runtime::text::{Tokenizer, tokenizer};
use std::path::{Path, PathBuf};

/// What all tasks with questions have in common.
#[derive(Debug, Clone, Default)]
pub struct TaskOptions {
    /// A file whose text stands before every question: worked examples.
    pub few_shot: Option<PathBuf>,
    /// Only so many questions from the beginning of the file.
    pub limit: Option<usize>,
    /// A file to write, with a JSON line per question.
    pub details: Option<Target>,
}

impl TaskOptions {
    /// The text before every question.
    fn shots(&self) -> Result<String> {
        self.few_shot.as_deref().map_or_else(|| Ok(String::new()), read_text)
    }
}

/// Encodes a context and its continuation.
#[derive(Debug)]
pub struct Encoder<'a> {
    tokenizer: Option<&'a Tokenizer>,
    /// Token before every context, if the tokenizer puts one there.
    bos: Option<u32>,
    /// Token before a text without context: BOS, else a token that ends a text.
    first: Option<u32>,
}

impl<'a> Encoder<'a> {
    /// An encoder for a model; without a tokenizer it serves requests that are token ids already. `bos` puts the
    /// tokenizer's BOS before every context.
    ///
    /// # Errors
    /// The tokenizer cannot encode an empty text.
    pub fn new(config: &ModelConfig, tokenizer: Option<&'a Tokenizer>, bos: bool) -> Result<Encoder<'a>> {
        let leading = tokenizer.map(leading_token).transpose()?.flatten();
        let first = leading.or(config.bos).or(config.eos.first().copied());
        Ok(Encoder { tokenizer, bos: leading.filter(|_| bos), first })
    }

    fn tokenizer(&self) -> Result<&'a Tokenizer> {
        self.tokenizer.ok_or_else(|| {
            Error::new(Cause::Model(format!("the pack has no {}", tokenizer::FILE_NAME)))
                .help("name one with --tokenizer FILE")
        })
    }

    /// The token before a text without context.
    fn first(&self) -> Result<u32> {
        self.first.ok_or_else(|| Error::usage("no context, and the model has no token that begins or ends a text"))
    }

    /// Encodes both texts in one piece, so that tokens join as they do in a text, and cuts where the context alone
    /// ends. Spaces at the end of a context belong to the continuation.
    fn request(&self, context: &str, continuation: &str) -> Result<Request> {
        let kept = context.trim_end();
        let continuation = format!("{}{continuation}", &context[kept.len()..]);
        let tokenizer = self.tokenizer()?;
        let before = tokenizer.encode_plain(kept)?;
        let whole = tokenizer.encode_plain(&format!("{kept}{continuation}"))?;
        // Where the end of the context joins what follows, the continuation keeps at least one token.
        let cut = before.len().min(whole.len().saturating_sub(1));
        let mut ids = Vec::from_iter(self.bos);
        ids.extend(&whole[..cut]);
        if ids.is_empty() {
            ids.push(self.first()?);
        }
        Ok(Request { context: ids, continuation: whole[cut..].to_vec() })
    }
}

/// Reads a file as text.
///
/// # Errors
/// It cannot be read, or is not UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).at(path)?;
    String::from_utf8(bytes)
        .map_err(|e| Error::corrupt(format!("byte {} is not UTF-8", e.utf8_error().valid_up_to())).at(path))
}
