//! Prompt of the next answer: the longest part of a history that leaves room for it.

use super::history::{History, Turn};
use crate::error::{Error, Result};
use crate::generate::text::ChatTemplate;
use crate::session::Encoder;

/// Divisor of the context length; the quotient is the number of tokens kept free for an answer.
const RESERVED_PART: usize = 4;
/// Largest number of tokens that are kept free for an answer.
const MOST_RESERVED: usize = 1024;
/// Largest number of bytes that a template usually adds to a message.
const TEMPLATE_TEXT: usize = 4096;

/// A history that is to become a prompt.
#[derive(Debug, Clone)]
pub(super) struct Dialogue {
    pub template: ChatTemplate,
    pub history: History,
    /// Number of oldest turns that earlier prompts left out.
    pub skipped: usize,
}

impl Dialogue {
    /// Returns the tokens of the longest prompt that leaves room for an answer, and the number of oldest turns that it
    /// leaves out. The last turn is never left out.
    pub(super) fn fitting(&self, encoder: &Encoder<'_>, max_new: Option<usize>) -> Result<(Vec<u32>, usize)> {
        let context = encoder.context();
        let reserved = (context / RESERVED_PART).min(MOST_RESERVED).min(max_new.unwrap_or(usize::MAX));
        let last = self.history.turns.len().saturating_sub(1);
        let fitting = |skipped: usize| {
            let ids = self.without(skipped, encoder)?;
            Ok::<_, Error>(ids.filter(|ids| ids.len() + reserved <= context))
        };
        // The smallest number of turns lies in `low..=high`.
        let (mut low, mut high) = (self.skipped.max(self.first_candidate(encoder)?).min(last), last);
        if low < high
            && let Some(ids) = fitting(low)?
        {
            return Ok((ids, low));
        }
        let mut found = None;
        while low < high {
            let middle = low + (high - low) / 2;
            match fitting(middle)? {
                Some(ids) => (found, high) = (Some(ids), middle),
                None => low = middle + 1,
            }
        }
        match found {
            Some(ids) => Ok((ids, high)),
            None => match self.without(last, encoder)? {
                Some(ids) if ids.len() <= context => Ok((ids, last)),
                Some(ids) => Err(too_long(&format!("{} tokens", ids.len()), context)),
                None => Err(too_long("a longer text", context)),
            },
        }
    }

    /// Counts the tokens of the prompt without a new message; `None` if the next prompt will leave out more turns.
    pub(super) fn tokens(&self, encoder: &Encoder<'_>) -> Result<Option<usize>> {
        if self.history.turns.is_empty() && self.history.system.is_none() {
            return Ok(Some(0));
        }
        if self.skipped < self.first_candidate(encoder)? {
            return Ok(None);
        }
        Ok(self.without(self.skipped, encoder)?.map(|ids| ids.len()))
    }

    /// Returns the number of oldest turns without which the messages could fit the context at all: a message takes at
    /// least one token, and a text of more bytes than the longest prompt has more tokens than the context.
    fn first_candidate(&self, encoder: &Encoder<'_>) -> Result<usize> {
        let context = encoder.context();
        let longest = encoder.tokenizer()?.longest_prompt(context);
        let (mut bytes, mut messages) = (self.history.system.as_ref().map_or(0, String::len), 0);
        let fits = |turn: &&Turn| {
            bytes += turn.message.len() + turn.answer.as_ref().map_or(0, |answer| answer.text.len());
            messages += 1 + usize::from(turn.answer.is_some());
            bytes <= longest && messages <= context
        };
        Ok(self.history.turns.len() - self.history.turns.iter().rev().take_while(fits).count())
    }

    /// Returns the tokens of the prompt without the `skipped` oldest turns; `None` if its text is longer than any
    /// prompt that fits the context.
    fn without(&self, skipped: usize, encoder: &Encoder<'_>) -> Result<Option<Vec<u32>>> {
        let tokenizer = encoder.tokenizer()?;
        let longest = tokenizer.longest_prompt(encoder.context());
        let messages = self.history.messages(skipped);
        let bytes: usize = messages.iter().map(|message| message.content.len()).sum();
        if bytes > longest {
            return Ok(None);
        }
        // The template may add its own text to each message.
        let rendered = longest + TEMPLATE_TEXT * (1 + messages.len());
        let text = encoder.render_chats(&self.template, &[messages], rendered)?.concat();
        if text.len() > longest { Ok(None) } else { tokenizer.encode_plain(&text).map(Some) }
    }
}

fn too_long(found: &str, context: usize) -> Error {
    Error::usage(format!(
        "the message and the system text: found {found}, expected at most {context} tokens of context"
    ))
    .help("shorten the message, or raise --ctx up to the context length of the model")
}
