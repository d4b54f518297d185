//! Encoder of contexts and continuations whose likelihood is asked for.

use crate::error::{Cause, Error, Result};
use crate::eval::Request;
use crate::eval::windows::leading_tokens;
use crate::generate::text::{Tokenizer, tokenizer};
use crate::model_config::ModelConfig;

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

    pub(super) fn tokenizer(&self) -> Result<&'a Tokenizer> {
        self.tokenizer.ok_or_else(|| {
            Error::new(Cause::Model(format!("the pack has no {}", tokenizer::FILE_NAME)))
                .help("name one with --tokenizer FILE")
        })
    }

    /// Returns the tokens before a text without context.
    pub(super) fn first(&self) -> Result<&[u32]> {
        match self.first.is_empty() {
            true => Err(Error::usage("found an empty context, and the model has no token that begins or ends a text")
                .help("add a context to this line of the file")),
            false => Ok(&self.first),
        }
    }

    /// Encodes both texts together, so that tokens merge as in running text, and splits the tokens where the context
    /// alone ends. Trailing spaces of the context become part of the continuation.
    pub(super) fn request(&self, context: &str, continuation: &str) -> Result<Request> {
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
