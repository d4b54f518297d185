//! Separates the reasoning of a model from its answer while the text is generated.
//!
//! Two notations are known. gpt-oss writes channels between control tokens, `<|channel|>final<|message|>…`, of which
//! only `final` is the answer. Qwen3, DeepSeek-R1 and others begin with `<think>…</think>`; some templates write the
//! opening tag at the end of the prompt. The whole output of any other model is the answer.

use crate::runtime::text::Tokenizer;

const OPENING: &str = "<think>";
const CLOSING: &str = "</think>";
/// Number of tokens at the end of a prompt that are searched for an opening tag.
const TAIL: usize = 8;

/// Part of the output that a piece of text belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// Answer for the user.
    Answer,
    /// Reasoning of the model, outside of the answer.
    Reasoning,
    /// Names of roles and channels between control tokens.
    Header,
}

/// State of the search for tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Think {
    /// Nothing but white space was generated.
    Start,
    /// Between the tags.
    Inside,
    /// After the closing tag, before the first character of the answer.
    Behind,
    /// In the answer.
    Answer,
}

/// Divides the output of a model into parts.
#[derive(Debug)]
pub struct Parts {
    start: Option<u32>,
    channel: Option<u32>,
    message: Option<u32>,
    name: String,
    part: Part,
    /// Tokens of the tags.
    tags: [Option<u32>; 2],
    think: Think,
    held: String,
}

impl Parts {
    /// Creates the state for the answer to a prompt.
    pub fn new(tokenizer: &Tokenizer, prompt: &[u32]) -> Parts {
        let [start, channel, message] = ["<|start|>", "<|channel|>", "<|message|>"].map(|token| tokenizer.id(token));
        let tail = tokenizer.decode(&prompt[prompt.len().saturating_sub(TAIL)..], false).unwrap_or_default();
        Parts {
            start,
            channel,
            message,
            name: String::new(),
            part: Part::Answer,
            tags: [OPENING, CLOSING].map(|tag| tokenizer.id(tag)),
            think: if tail.trim_end().ends_with(OPENING) { Think::Inside } else { Think::Start },
            held: String::new(),
        }
    }

    /// Takes the next token with its text, and calls `sink` with the text that can be shown now and its part. Text that
    /// may be the beginning of a tag is held back.
    ///
    /// # Errors
    /// Only those of `sink`.
    pub fn push<E>(&mut self, id: u32, text: &str, mut sink: impl FnMut(Part, &str) -> Result<(), E>) -> Result<(), E> {
        if self.channel.is_some() && self.message.is_some() {
            let part = self.in_channels(id, text);
            return if text.is_empty() { Ok(()) } else { sink(part, text) };
        }
        // A tag that is a hidden special token has no text.
        match self.tags.iter().position(|tag| *tag == Some(id)) {
            Some(0) if !text.contains(OPENING) && self.think == Think::Start => self.held += OPENING,
            Some(1) if !text.contains(CLOSING) && self.think == Think::Inside => self.held += CLOSING,
            _ => {}
        }
        self.held += text;
        self.search(&mut sink)
    }

    /// Calls `sink` with the text that is still held back when generation ends.
    ///
    /// # Errors
    /// Only those of `sink`.
    pub fn finish<E>(&mut self, mut sink: impl FnMut(Part, &str) -> Result<(), E>) -> Result<(), E> {
        let part = if self.think == Think::Inside { Part::Reasoning } else { Part::Answer };
        let held = std::mem::take(&mut self.held);
        if held.is_empty() { Ok(()) } else { sink(part, &held) }
    }

    fn in_channels(&mut self, id: u32, text: &str) -> Part {
        let id = Some(id);
        if id == self.start || id == self.channel {
            self.name.clear();
            self.part = Part::Header;
        } else if id == self.message {
            self.part = if self.name.trim() == "final" { Part::Answer } else { Part::Reasoning };
        } else if self.part == Part::Header {
            self.name.push_str(text);
        }
        self.part
    }

    fn search<E>(&mut self, sink: &mut impl FnMut(Part, &str) -> Result<(), E>) -> Result<(), E> {
        if self.think == Think::Start {
            let text = self.held.trim_start();
            if OPENING.starts_with(text) {
                if text != OPENING {
                    return Ok(());
                }
                (self.think, self.held) = (Think::Inside, String::new());
            } else if let Some(rest) = text.strip_prefix(OPENING) {
                (self.think, self.held) = (Think::Inside, rest.to_string());
            } else {
                self.think = Think::Answer;
            }
        }
        if self.think == Think::Inside {
            let closed = self.held.find(CLOSING);
            let end = closed.unwrap_or(self.held.len() - open_end(&self.held));
            let rest = self.held[closed.map_or(end, |at| at + CLOSING.len())..].to_string();
            self.held.truncate(end);
            let inside = std::mem::replace(&mut self.held, rest);
            if !inside.is_empty() {
                sink(Part::Reasoning, &inside)?;
            }
            match closed {
                Some(_) => self.think = Think::Behind,
                None => return Ok(()),
            }
        }
        if self.think == Think::Behind {
            self.held.drain(..self.held.len() - self.held.trim_start().len());
            if !self.held.is_empty() {
                self.think = Think::Answer;
            }
        }
        let text = std::mem::take(&mut self.held);
        if text.is_empty() { Ok(()) } else { sink(Part::Answer, &text) }
    }
}

/// Returns the length of the longest end of `text` with which the closing tag may begin.
fn open_end(text: &str) -> usize {
    (1..CLOSING.len()).rev().find(|n| text.ends_with(&CLOSING[..*n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ANSWERS: Parts = Parts {
        start: None,
        channel: None,
        message: None,
        name: String::new(),
        part: Part::Answer,
        tags: [None, None],
        think: Think::Start,
        held: String::new(),
    };

    /// Returns the reasoning and the answer of an output in pieces.
    fn divided(mut parts: Parts, pieces: &[(u32, &str)]) -> (String, String) {
        let (mut reasoning, mut answer) = (String::new(), String::new());
        let mut sink = |part, text: &str| {
            match part {
                Part::Reasoning => reasoning.push_str(text),
                Part::Answer => answer.push_str(text),
                Part::Header => {}
            }
            Ok::<(), ()>(())
        };
        for (id, text) in pieces {
            parts.push(*id, text, &mut sink).unwrap();
        }
        parts.finish(&mut sink).unwrap();
        (reasoning, answer)
    }

    #[test]
    fn only_the_final_channel_is_the_answer() {
        let parts = Parts { start: Some(1), channel: Some(2), message: Some(3), ..ANSWERS };
        let pieces = [
            (2, ""),
            (9, "ana"),
            (9, "lysis"),
            (3, ""),
            (9, "hm"),
            (1, ""),
            (9, "assistant"),
            (2, ""),
            (9, "final"),
            (3, ""),
            (9, "Hello <think>"),
        ];
        assert_eq!(divided(parts, &pieces), ("hm".into(), "Hello <think>".into()));
    }

    #[test]
    fn tags_divide_reasoning_from_the_answer_whatever_the_pieces() {
        let cases = [
            ("<think>\nhm\n</think>\n\nYes", ("\nhm\n", "Yes")),
            (" \n<think>a</thin</think>b</think>", ("a</thin", "b</think>")),
            ("No <think>x</think>", ("", "No <think>x</think>")),
            ("<thin", ("", "<thin")),
            ("<think>never ends </th", ("never ends </th", "")),
            ("<think></think>", ("", "")),
            ("", ("", "")),
        ];
        for (text, (reasoning, answer)) in cases {
            for size in 1..=text.len().max(1) {
                let pieces: Vec<(u32, &str)> =
                    text.as_bytes().chunks(size).map(|c| (0, std::str::from_utf8(c).unwrap())).collect();
                assert_eq!(divided(ANSWERS, &pieces), (reasoning.into(), answer.into()), "{text} in pieces of {size}");
            }
        }
    }

    #[test]
    fn tags_may_be_hidden_tokens_or_stand_in_the_prompt() {
        let hidden = || Parts { tags: [Some(5), Some(6)], ..ANSWERS };
        let expected = ("hm".to_string(), "Yes".to_string());
        assert_eq!(divided(hidden(), &[(5, ""), (9, "hm"), (6, ""), (9, "Yes")]), expected);
        assert_eq!(divided(hidden(), &[(5, "<think>"), (9, "hm"), (6, "</think>"), (9, "Yes")]), expected);
        let opened = Parts { think: Think::Inside, ..ANSWERS };
        assert_eq!(divided(opened, &[(9, "hm</think>"), (9, "\n\nYes")]), expected);
    }

    proptest! {
        #[test]
        fn no_text_is_lost_but_tags_and_the_space_around_them(text in "[<>/think a]{0,40}") {
            let (reasoning, answer) = divided(ANSWERS, &[(0, &text)]);
            let plain = |text: &str| text.replace([' ', '\n'], "");
            let found = plain(&format!("{reasoning}{answer}"));
            let without = plain(&text).replacen(OPENING, "", 1).replacen(CLOSING, "", 1);
            prop_assert!(found == plain(&text) || found == without || plain(&text).starts_with(OPENING));
        }
    }
}
