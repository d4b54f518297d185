//! Separates reasoning between tags from the text behind it. Qwen3, DeepSeek-R1 and others begin their output with
//! `<think>…</think>`; some templates write the opening tag at the end of the prompt.

use super::events::Sink;
use crate::runtime::text::Tokenizer;

/// Tag before reasoning.
pub(super) const OPENING: &str = "<think>";
/// Tag behind reasoning.
pub(super) const CLOSING: &str = "</think>";
/// Number of tokens at the end of a prompt that are searched for a tag. Small vocabularies spell a tag in single bytes.
const TAIL: usize = 16;

/// Returns true if a prompt ends within reasoning.
pub(super) fn is_open(tokenizer: &Tokenizer, prompt: &[u32]) -> bool {
    ends_with(tokenizer, prompt, OPENING)
}

/// Returns true if a prompt ends behind reasoning, so that the answer follows at once. Templates write empty reasoning
/// where a request switches it off.
pub(super) fn is_over(tokenizer: &Tokenizer, prompt: &[u32]) -> bool {
    ends_with(tokenizer, prompt, CLOSING)
}

fn ends_with(tokenizer: &Tokenizer, prompt: &[u32], tag: &str) -> bool {
    let tail = tokenizer.decode(&prompt[prompt.len().saturating_sub(TAIL)..], false).unwrap_or_default();
    tail.trim_end().ends_with(tag)
}

/// State of the search for tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// Nothing but white space was generated.
    Start,
    /// Between the tags.
    Inside,
    /// Behind the closing tag, before the first character of the content.
    Behind,
    /// In the content.
    Content,
}

/// Divides a text into reasoning and content.
#[derive(Debug)]
pub(super) struct Reasoning {
    at: At,
    /// Text that may be the beginning of a tag.
    held: String,
}

impl Reasoning {
    /// Begins an output; `is_open` if the prompt ends within reasoning.
    pub(super) fn new(is_open: bool) -> Reasoning {
        Reasoning { at: if is_open { At::Inside } else { At::Start }, held: String::new() }
    }

    /// Reads a piece of text, writes its reasoning to `sink` and returns its content.
    pub(super) fn push(&mut self, text: &str, sink: &mut Sink<'_>) -> String {
        self.held += text;
        if self.at == At::Start {
            let text = self.held.trim_start();
            if OPENING.starts_with(text) {
                if text != OPENING {
                    return String::new();
                }
                (self.at, self.held) = (At::Inside, String::new());
            } else if let Some(rest) = text.strip_prefix(OPENING) {
                (self.at, self.held) = (At::Inside, rest.to_string());
            } else {
                self.at = At::Content;
            }
        }
        if self.at == At::Inside {
            let closed = self.held.find(CLOSING);
            let end = closed.unwrap_or(self.held.len() - begun(&self.held, CLOSING));
            let rest = self.held[closed.map_or(end, |at| at + CLOSING.len())..].to_string();
            self.held.truncate(end);
            sink.reasoning(&std::mem::replace(&mut self.held, rest));
            match closed {
                Some(_) => self.at = At::Behind,
                None => return String::new(),
            }
        }
        if self.at == At::Behind {
            self.held.drain(..self.held.len() - self.held.trim_start().len());
            if !self.held.is_empty() {
                self.at = At::Content;
            }
        }
        std::mem::take(&mut self.held)
    }

    /// Ends the output: writes the rest of the reasoning to `sink`, or returns the rest of the content.
    pub(super) fn finish(&mut self, sink: &mut Sink<'_>) -> String {
        let held = std::mem::take(&mut self.held);
        if self.at != At::Inside {
            return held;
        }
        sink.reasoning(&held);
        String::new()
    }
}

/// Returns the length of the longest end of `text` that is a proper beginning of `mark`.
pub(super) fn begun(text: &str, mark: &str) -> usize {
    let most = mark.len().min(text.len() + 1);
    (1..most).rev().find(|n| mark.is_char_boundary(*n) && text.ends_with(&mark[..*n])).unwrap_or(0)
}
