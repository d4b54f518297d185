//! Output of a model as a list of parts (reasoning, text, calls of tools) in the order in which they were generated,
//! for APIs whose answers are such lists.

use super::text::Piece;
use crate::tools::OutputParser;

/// Kind of a part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PartKind {
    /// Reasoning.
    Reasoning,
    /// Text for the user.
    Text,
    /// Call of a tool.
    Call {
        /// Id to which the result refers.
        id: String,
        /// Name of the function.
        name: String,
    },
}

/// A part of an output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputPart {
    /// Kind.
    pub kind: PartKind,
    /// Text so far; of a call, the arguments as JSON text.
    pub text: String,
}

/// Change of the list of parts. Parts are named by their index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A part begins; no other one is open.
    Begin(usize),
    /// A text is added to the open part.
    Add(usize, String),
    /// The open part ends.
    End(usize),
}

/// Output of a model, divided into parts while it is generated.
#[derive(Debug)]
pub struct Parts {
    /// State that divides the output; without one, everything is text.
    parser: Option<OutputParser>,
    list: Vec<OutputPart>,
    /// Part of each call.
    calls: Vec<usize>,
    open: Option<usize>,
    reasoning_tokens: usize,
    /// Number of tokens since the last piece, whose text is held back.
    held_tokens: usize,
}

impl Parts {
    /// Creates an empty output.
    pub fn new(parser: Option<OutputParser>) -> Parts {
        Parts { parser, list: Vec::new(), calls: Vec::new(), open: None, reasoning_tokens: 0, held_tokens: 0 }
    }

    /// Returns the parts.
    pub fn list(&self) -> &[OutputPart] {
        &self.list
    }

    /// Returns true if there is a call.
    pub fn has_calls(&self) -> bool {
        !self.calls.is_empty()
    }

    /// Returns the number of tokens of the reasoning.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// Takes a token with its text.
    pub fn push(&mut self, id: u32, text: &str) -> Vec<Change> {
        let mut pieces = Vec::new();
        match &mut self.parser {
            Some(parser) => parser.push(id, text, &mut pieces),
            None => pieces.push(Piece::Content(text.into())),
        }
        self.held_tokens += 1;
        self.apply(pieces)
    }

    /// Ends the output. `is_cut` if the model did not end it.
    pub fn finish(&mut self, is_cut: bool) -> Vec<Change> {
        let mut pieces = Vec::new();
        if let Some(parser) = &mut self.parser {
            parser.finish(is_cut, &mut pieces);
        }
        let mut changes = self.apply(pieces);
        self.close(&mut changes);
        changes
    }

    /// Takes pieces of the output.
    pub fn apply(&mut self, pieces: Vec<Piece>) -> Vec<Change> {
        if let Some(first) = pieces.first() {
            let tokens = std::mem::take(&mut self.held_tokens);
            self.reasoning_tokens += if matches!(first, Piece::Reasoning(_)) { tokens } else { 0 };
        }
        let mut changes = Vec::new();
        for piece in pieces {
            match piece {
                Piece::Content(text) => self.add(PartKind::Text, text, &mut changes),
                Piece::Reasoning(text) => self.add(PartKind::Reasoning, text, &mut changes),
                Piece::CallBegin { id, name, .. } => {
                    self.calls.push(self.list.len());
                    self.begin(PartKind::Call { id, name }, &mut changes);
                }
                // The parser adds to the last call only, and to none that another part follows.
                Piece::CallArguments { index, text } => {
                    if let Some(part) = self.calls.get(index).copied().filter(|part| self.open == Some(*part)) {
                        self.extend(part, text, &mut changes);
                    }
                }
            }
        }
        changes
    }

    fn add(&mut self, kind: PartKind, text: String, changes: &mut Vec<Change>) {
        if text.is_empty() {
            return;
        }
        let open = self.open.filter(|open| self.list[*open].kind == kind);
        let part = open.unwrap_or_else(|| self.begin(kind, changes));
        self.extend(part, text, changes);
    }

    fn begin(&mut self, kind: PartKind, changes: &mut Vec<Change>) -> usize {
        self.close(changes);
        let part = self.list.len();
        self.list.push(OutputPart { kind, text: String::new() });
        self.open = Some(part);
        changes.push(Change::Begin(part));
        part
    }

    fn extend(&mut self, part: usize, text: String, changes: &mut Vec<Change>) {
        self.list[part].text += &text;
        changes.push(Change::Add(part, text));
    }

    fn close(&mut self, changes: &mut Vec<Change>) {
        changes.extend(self.open.take().map(Change::End));
    }
}

#[cfg(test)]
#[path = "parts_tests.rs"]
pub(super) mod tests;
