//! Text of a request as it is generated, and the rules by which it ends.

use super::text::{StopMatcher, TextStream, Tokenizer};
use super::{Ends, Finish, Options, Request};
use crate::error::Result;

/// Text that was generated so far.
pub(super) struct Written {
    /// Text that can be shown.
    pub(super) text: String,
    /// Tokens that end the text.
    pub(super) end_tokens: Vec<u32>,
    /// Number of tokens before which the text does not end.
    pub(super) least: usize,
    /// Stop string that ended the text.
    pub(super) stopped_by: Option<String>,
    stream: TextStream,
    stop: StopMatcher,
    stop_strings: Vec<String>,
    ends: Ends,
    /// Whether the text continues that of the prompt.
    continues: bool,
}

impl Written {
    /// Creates the empty text of a request.
    pub(super) fn new(request: &Request, options: &Options<'_>) -> Result<Written> {
        let hides_special = !(options.show_special || request.show_special);
        let stream = match options.tokenizer.filter(|_| request.continues) {
            Some(tokenizer) => TextStream::after(&request.ids, tokenizer, hides_special)?,
            None => TextStream::new(hides_special),
        };
        Ok(Written {
            text: String::new(),
            end_tokens: request.ends.all(options.eos),
            least: request.ends.min_new,
            stopped_by: None,
            stream,
            stop: StopMatcher::new(&request.stop),
            stop_strings: request.stop.clone(),
            ends: request.ends.clone(),
            continues: request.continues,
        })
    }

    /// Adds token number `count` of the text, and returns the reason if a stop string ends the text. `finish` is the
    /// reason why the text ends with this token; all text that was held back is shown then.
    pub(super) fn push(
        &mut self,
        tokenizer: &Tokenizer,
        id: u32,
        count: usize,
        finish: Option<Finish>,
    ) -> Result<Option<Finish>> {
        let mut piece = String::new();
        if finish != Some(Finish::Eos) || self.ends.include_stop && self.ends.tokens.contains(&id) {
            piece += &self.stream.push(tokenizer, id)?;
        }
        if finish.is_some() {
            piece += &self.stream.finish(tokenizer)?;
        }
        if count < self.least {
            self.text += &piece;
            return Ok(finish);
        }
        if !self.continues && tokenizer.is_special(id) {
            // Text before a control token belongs to another part of an answer than text behind it.
            self.text += &self.stop.finish();
        }
        let shown = self.stop.push(&piece);
        self.text += &shown.text;
        if let Some(stop) = shown.stopped {
            self.stopped_by = self.stop_strings.get(stop).cloned();
            if self.ends.include_stop {
                self.text += self.stopped_by.as_deref().unwrap_or_default();
            }
            return Ok(Some(Finish::Stop));
        }
        if finish.is_some() {
            self.text += &self.stop.finish();
        }
        Ok(finish)
    }

    /// Shows the text that was held back when the text ends early.
    pub(super) fn finish(&mut self, tokenizer: &Tokenizer) -> Result<()> {
        self.text += &self.stop.push(&self.stream.finish(tokenizer)?).text;
        self.text += &self.stop.finish();
        Ok(())
    }
}
