//! Encodes texts and compiles constraints for a model without its engine, so that other threads can do so while the
//! engine computes.

use super::adapters::Adapters;
use super::sampling::dry_breakers;
use super::template::Renderer;
use crate::error::{Cause, Error, Result};
use crate::generate::constraint::{Constraint, ConstraintSource, Vocabulary};
use crate::generate::sampler::Breakers;
use crate::generate::text::{ChatTemplate, Message, RenderOptions, Tokenizer, tokenizer};
use crate::generate::{self, Request};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// The tokenizer of a session and the limits of its model.
#[derive(Debug, Clone, Copy)]
pub struct Encoder<'a> {
    pub(super) tokenizer: Option<&'a Tokenizer>,
    pub(super) renderer: Option<&'a Renderer>,
    /// Tokens of the model, prepared for constraints when the first one is compiled.
    pub(super) vocabulary: &'a OnceLock<Arc<Vocabulary>>,
    pub(super) adapters: &'a Adapters,
    /// Directory of the pack.
    pub(super) dir: &'a Path,
    /// Largest number of tokens of a sequence.
    pub(super) context: usize,
    /// Number of tokens of the model's vocabulary.
    pub(super) vocab: usize,
}

impl<'a> Encoder<'a> {
    /// Returns the tokenizer.
    ///
    /// # Errors
    /// The pack has no tokenizer.
    pub fn tokenizer(&self) -> Result<&'a Tokenizer> {
        self.tokenizer.ok_or_else(|| {
            Error::new(Cause::Model(format!("the pack has no {}", tokenizer::FILE_NAME)))
                .at(self.dir)
                .help("name one with --tokenizer FILE")
        })
    }

    /// Returns the adapters that requests may name.
    pub fn adapters(&self) -> &'a Adapters {
        self.adapters
    }

    /// Returns the tokens of DRY's sequence breakers for the model; `None` = the usual ones.
    ///
    /// # Errors
    /// A breaker is empty or too long, or the pack has no tokenizer.
    pub fn breakers(&self, texts: Option<&[String]>) -> Result<Arc<Breakers>> {
        dry_breakers(texts, || self.tokenizer(), self.vocab)
    }

    /// Returns the largest number of tokens of a sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Returns the number of tokens of the model's vocabulary.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Checks a request as [`Session::generate`](super::Session::generate) does before it computes anything.
    ///
    /// # Errors
    /// The prompt is empty or longer than the context, a token is not in the vocabulary, or a parameter is out of
    /// range.
    pub fn check(&self, request: &Request) -> Result<()> {
        generate::check_within(request, self.context, self.vocab)
    }

    /// Encodes conversations as prompts for their next assistant turn; returns the token ids of each prompt.
    ///
    /// # Errors
    /// The template fails, refuses a conversation, or exceeds the limits of memory and time for templates.
    pub fn encode_chats(&self, template: &ChatTemplate, conversations: &[Vec<Message>]) -> Result<Vec<Vec<u32>>> {
        let tokenizer = self.tokenizer()?;
        let texts = self.render_chats(template, conversations, tokenizer.longest_prompt(self.context))?;
        texts.iter().map(|text| tokenizer.encode_plain(text)).collect()
    }

    /// Renders conversations as prompts of at most `longest` bytes each.
    ///
    /// # Errors
    /// The template fails, refuses a conversation, or exceeds the limits of memory and time for templates.
    pub fn render_chats(
        &self,
        template: &ChatTemplate,
        conversations: &[Vec<Message>],
        longest: usize,
    ) -> Result<Vec<String>> {
        self.render_all(template, conversations, &RenderOptions::default(), longest)
    }

    /// Renders and encodes one conversation, with tools, variables and the ending of `options`; returns its token ids.
    ///
    /// # Errors
    /// The template fails, refuses the conversation or has no place for tools; a variable has another source; the
    /// message to continue is not in the prompt; or the prompt exceeds the limits of length, memory and time.
    pub fn encode_chat(
        &self,
        template: &ChatTemplate,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<Vec<u32>> {
        self.tokenizer()?.encode_plain(&self.render_chat(template, messages, options)?)
    }

    /// Renders one conversation as the text that [`Encoder::encode_chat`] encodes.
    ///
    /// # Errors
    /// The same as those of [`Encoder::encode_chat`].
    pub fn render_chat(
        &self,
        template: &ChatTemplate,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<String> {
        let longest = self.tokenizer()?.longest_prompt(self.context);
        let conversations = [messages.to_vec()];
        self.render_all(template, &conversations, options, longest).map(|texts| texts.concat())
    }

    fn render_all(
        &self,
        template: &ChatTemplate,
        conversations: &[Vec<Message>],
        options: &RenderOptions,
        longest: usize,
    ) -> Result<Vec<String>> {
        match self.renderer {
            Some(renderer) => renderer.render(template, conversations, options, longest),
            None => conversations.iter().map(|some| template.render_with(some, options, longest)).collect(),
        }
    }

    /// Encodes a prompt, with or without the special tokens that the tokenizer adds.
    ///
    /// # Errors
    /// The pack has no tokenizer, or the text is so long that it has more tokens than the context.
    pub fn encode(&self, prompt: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        let (tokenizer, context) = (self.tokenizer()?, self.context);
        let longest = tokenizer.longest_prompt(context);
        if prompt.len() > longest {
            let found = format!(
                "found a prompt of {} bytes, expected at most {longest} for the context of {context} tokens",
                prompt.len()
            );
            return Err(Error::usage(found)
                .help("shorten the prompt, or raise --ctx if it is below the context length of the model"));
        }
        if add_special_tokens { tokenizer.encode(prompt) } else { tokenizer.encode_plain(prompt) }
    }

    /// Compiles a constraint for requests to the model. The first call prepares the vocabulary, which takes up to half
    /// a second for 200 000 tokens.
    ///
    /// # Errors
    /// The constraint is not valid, not supported or too large, or the tokenizer is of a kind that has no fixed bytes
    /// for its tokens.
    pub fn constraint(&self, source: &ConstraintSource) -> Result<Arc<Constraint>> {
        let vocabulary = match self.vocabulary.get() {
            Some(vocabulary) => vocabulary,
            None => {
                let built = Vocabulary::new(self.tokenizer()?.spelling(self.vocab)?)?;
                self.vocabulary.get_or_init(|| Arc::new(built))
            }
        };
        Constraint::compile(source, vocabulary).map(Arc::new)
    }
}
