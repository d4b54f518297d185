//! Divides the output of a model into reasoning, content and calls while it is generated.
//!
//! The parser is total: it accepts any tokens. A call that is malformed becomes content, as far as it was not reported
//! before, and markers and control tokens never become text. Text that may be the beginning of a marker is held back.

use super::events::{Calls, LONG_IDS, OutputEvent, Sink};
use super::format::Format;
use super::harmony::Harmony;
use super::reader::Reader;
use super::reasoning::{self, Reasoning};
use crate::runtime::text::Tokenizer;

/// State of an output that is divided.
#[derive(Debug)]
pub struct OutputParser {
    kind: Kind,
    calls: Calls,
}

#[derive(Debug)]
enum Kind {
    /// Messages between control tokens.
    Harmony(Harmony),
    /// Reasoning between tags, then content with calls; `None` if calls are not recognized.
    Tagged { reasoning: Reasoning, reader: Option<Reader>, special: Vec<(u32, &'static str)> },
}

impl OutputParser {
    /// Begins the output that follows a prompt. Calls are recognized if a format is given; reasoning always is. The ids
    /// of calls are random numbers from `seed`.
    pub fn new(format: Option<Format>, tokenizer: &Tokenizer, prompt: &[u32], seed: u64) -> OutputParser {
        let kind = match Harmony::new(tokenizer, prompt, format.is_some()) {
            Some(harmony) => Kind::Harmony(harmony),
            None => Kind::tagged(format, tokenizer, prompt),
        };
        let form = format.map_or(LONG_IDS, |format| format.row().ids);
        OutputParser { kind, calls: Calls::new(seed, form) }
    }

    /// Reads the next token with its text, and adds what is now known to `out`. Special tokens may have their text or
    /// none.
    pub fn push(&mut self, id: u32, text: &str, out: &mut Vec<OutputEvent>) {
        let mut sink = Sink::new(out, &mut self.calls);
        match &mut self.kind {
            Kind::Harmony(harmony) => harmony.push(id, text, &mut sink),
            Kind::Tagged { reasoning, reader, special } => {
                // A special token that is hidden has no text but what was held back before it.
                let marker = special.iter().find(|(token, marker)| *token == id && !text.contains(marker));
                let text = marker.map_or_else(|| text.to_string(), |(_, marker)| format!("{text}{marker}"));
                let content = reasoning.push(&text, &mut sink);
                read(reader, &content, &mut sink);
            }
        }
    }

    /// Ends the output, and adds what was held back to `out`.
    pub fn finish(&mut self, out: &mut Vec<OutputEvent>) {
        let mut sink = Sink::new(out, &mut self.calls);
        match &mut self.kind {
            Kind::Harmony(harmony) => harmony.finish(&mut sink),
            Kind::Tagged { reasoning, reader, .. } => {
                let content = reasoning.finish(&mut sink);
                read(reader, &content, &mut sink);
                if let Some(reader) = reader {
                    reader.finish(&mut sink);
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

impl Kind {
    fn tagged(format: Option<Format>, tokenizer: &Tokenizer, prompt: &[u32]) -> Kind {
        let notation = format.and_then(|format| format.row().notation);
        let markers = notation.map_or((&[][..], &[][..]), |notation| (notation.openings, notation.others));
        let tags = [reasoning::OPENING, reasoning::CLOSING];
        let all = tags.iter().chain(markers.0).chain(markers.1);
        let token = |marker: &&'static str| tokenizer.id(marker).filter(|id| tokenizer.is_special(*id));
        Kind::Tagged {
            special: all.filter_map(|marker| Some((token(marker)?, *marker))).collect(),
            reasoning: Reasoning::new(reasoning::is_open(tokenizer, prompt)),
            reader: notation.map(Reader::new),
        }
    }
}
