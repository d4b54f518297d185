//! Divides the output of a model into reasoning, content and calls while it is generated.
//!
//! The parser is total: it accepts any tokens. A call that is malformed becomes content, as far as it was not reported
//! before, and markers and control tokens never become text. Text that may be the beginning of a marker is held back.

use super::events::{Calls, IdForm, LONG_IDS, OutputEvent, Sink};
use super::harmony::Harmony;
use super::reader::Reader;
use super::reasoning::Reasoning;
use super::style::OutputStyle;
use super::tool::Tool;
use crate::generate::text::Tokenizer;

/// State of an output that is divided.
#[derive(Debug)]
pub struct OutputParser {
    kind: ParserKind,
    calls: Calls,
}

#[derive(Debug)]
enum ParserKind {
    /// Messages between control tokens.
    Harmony(Harmony),
    Tagged(Box<Tagged>),
}

/// Reasoning between tags, then content with calls.
#[derive(Debug)]
struct Tagged {
    reasoning: Reasoning,
    /// State that finds calls; `None` if they are not recognized.
    reader: Option<Reader>,
    /// Special tokens that markers consist of or have within.
    special: Vec<(u32, String)>,
}

impl OutputParser {
    /// Begins the output that follows a prompt. Calls are recognized if there are tools and the style has a format of
    /// calls; reasoning always is. The ids of calls are random numbers from `seed`.
    pub fn new(style: &OutputStyle, tools: &[Tool], tokenizer: &Tokenizer, prompt: &[u32], seed: u64) -> OutputParser {
        let format = style.format.filter(|_| !tools.is_empty());
        let kind = match Harmony::new(tokenizer, prompt, format.is_some()) {
            Some(harmony) => ParserKind::Harmony(harmony),
            None => {
                let notation = format.and_then(|format| format.row().notation);
                let markers = notation.map_or((&[][..], &[][..]), |notation| (notation.openings, notation.others));
                let markers = markers.0.iter().chain(markers.1).copied().chain(style.tags.texts());
                ParserKind::Tagged(Box::new(Tagged {
                    special: special(markers, tokenizer),
                    reasoning: Reasoning::new(style.tags.clone(), style.tags.begins(tokenizer, prompt)),
                    reader: notation.map(Reader::new),
                }))
            }
        };
        let form = format.map_or(LONG_IDS, |format| format.row().ids);
        let earlier = match form {
            IdForm::Numbered(marker) => {
                tokenizer.id(marker).map_or(0, |id| prompt.iter().filter(|token| **token == id).count())
            }
            IdForm::Random(..) => 0,
        };
        OutputParser { kind, calls: Calls::new(seed, form, earlier, tools) }
    }

    /// Returns the parser of an output that is shown when it is complete. Text that comes before a closing tag of
    /// reasoning is then reasoning, although it had no opening tag.
    #[must_use]
    pub fn not_streamed(mut self) -> OutputParser {
        if let ParserKind::Tagged(tagged) = &mut self.kind {
            tagged.reasoning.hold();
        }
        self
    }

    /// Reads the next token with its text, and adds what is now known to `out`. Special tokens may have their text or
    /// none.
    pub fn push(&mut self, id: u32, text: &str, out: &mut Vec<OutputEvent>) {
        let mut sink = Sink::new(out, &mut self.calls);
        match &mut self.kind {
            ParserKind::Harmony(harmony) => harmony.push(id, text, &mut sink),
            ParserKind::Tagged(tagged) => {
                let Tagged { reasoning, reader, special } = &mut **tagged;
                // A special token that is hidden has no text but what was held back before it.
                let marker = special.iter().find(|(token, marker)| *token == id && !text.contains(marker));
                let text = marker.map_or_else(|| text.to_string(), |(_, marker)| format!("{text}{marker}"));
                let content = reasoning.push(&text, &mut sink);
                read(reader, &content, &mut sink);
            }
        }
    }

    /// Ends the output, and adds what was held back to `out`. A call whose end is missing is completed, unless the
    /// output `is_cut` before the model ended it.
    pub fn finish(&mut self, is_cut: bool, out: &mut Vec<OutputEvent>) {
        let mut sink = Sink::new(out, &mut self.calls);
        match &mut self.kind {
            ParserKind::Harmony(harmony) => harmony.finish(&mut sink),
            ParserKind::Tagged(tagged) => {
                let Tagged { reasoning, reader, .. } = &mut **tagged;
                let content = reasoning.finish(&mut sink);
                read(reader, &content, &mut sink);
                if let Some(reader) = reader {
                    reader.finish(is_cut, &mut sink);
                }
            }
        }
    }

    /// Returns the number of calls so far.
    pub fn calls(&self) -> usize {
        self.calls.begun()
    }
}

fn read(reader: &mut Option<Reader>, content: &str, sink: &mut Sink<'_>) {
    match reader {
        Some(reader) => reader.push(content, sink),
        None => sink.content(content),
    }
}

/// Returns the special tokens that markers consist of or have within, such as `<|channel>` of `<|channel>thought`.
fn special<'a>(markers: impl Iterator<Item = &'a str>, tokenizer: &Tokenizer) -> Vec<(u32, String)> {
    let mut found: Vec<(u32, String)> = Vec::new();
    let begins = |text: &str, at: usize| at == 0 || text[at..].starts_with(['<', '[', '◁']);
    for marker in markers {
        let ends = marker.char_indices().map(|(at, c)| (at + c.len_utf8(), c));
        let ends = ends.filter(|(end, c)| *end == marker.len() || matches!(c, '>' | ']' | '▷'));
        for (end, _) in ends {
            for (at, _) in marker[..end].char_indices().filter(|(at, _)| begins(marker, *at)) {
                let part = &marker[at..end];
                let id = tokenizer.id(part).filter(|id| tokenizer.is_special(*id));
                if let Some(id) = id.filter(|id| !found.iter().any(|(known, _)| known == id)) {
                    found.push((id, part.into()));
                }
            }
        }
    }
    found
}
