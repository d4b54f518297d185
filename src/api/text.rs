//! Text of an answer to a conversation, divided into content, reasoning and calls of tools.

pub use crate::tools::OutputEvent as Piece;
use crate::tools::OutputParser;
use serde_json::{Value, json};

/// A call of a tool.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Call {
    /// Id to which the result refers.
    pub id: String,
    /// Name of the function.
    pub name: String,
    /// Arguments as JSON text.
    pub arguments: String,
}

impl Call {
    /// Returns the object of OpenAI's API.
    pub fn to_json(&self) -> Value {
        let function = json!({"name": self.name, "arguments": self.arguments});
        json!({"id": self.id, "type": "function", "function": function})
    }
}

/// The answer so far.
pub struct ChatText {
    parser: OutputParser,
    /// Text for the user.
    pub content: String,
    /// Reasoning before it.
    pub reasoning: String,
    /// Calls of tools.
    pub calls: Vec<Call>,
}

impl ChatText {
    /// Creates an empty answer.
    pub fn new(parser: OutputParser) -> ChatText {
        ChatText { parser, content: String::new(), reasoning: String::new(), calls: Vec::new() }
    }

    /// Takes a token with its text, and returns what it adds to the answer.
    pub fn push(&mut self, id: u32, text: &str) -> Vec<Piece> {
        let mut pieces = Vec::new();
        self.parser.push(id, text, &mut pieces);
        self.add(&pieces);
        pieces
    }

    /// Ends the answer, and returns what was held back. `is_cut` if the model did not end it.
    pub fn finish(&mut self, is_cut: bool) -> Vec<Piece> {
        let mut pieces = Vec::new();
        self.parser.finish(is_cut, &mut pieces);
        self.add(&pieces);
        pieces
    }

    /// Returns the content; null for an answer that consists of calls.
    pub fn content_or_null(&self) -> Value {
        if self.content.is_empty() && !self.calls.is_empty() { Value::Null } else { json!(self.content) }
    }

    fn add(&mut self, pieces: &[Piece]) {
        for piece in pieces {
            match piece {
                Piece::Content(text) => self.content += text,
                Piece::Reasoning(text) => self.reasoning += text,
                Piece::CallBegin { id, name, .. } => {
                    self.calls.push(Call { id: id.clone(), name: name.clone(), arguments: String::new() });
                }
                Piece::CallArguments { index, text } => {
                    self.calls.get_mut(*index).into_iter().for_each(|call| call.arguments += text);
                }
            }
        }
    }
}
