//! Pieces of the output of a model, and the receiver to which the readers of an output write them.

use super::tool::Tool;
use super::types::Types;
use super::xml::types_of;
use crate::rng::Rng;

/// A piece of the output of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutputEvent {
    /// Text for the user.
    Content(String),
    /// Reasoning of the model, outside of its answer.
    Reasoning(String),
    /// Beginning of a call.
    CallBegin {
        /// Number of the call in the output, from 0.
        index: usize,
        /// Id to which the result of the call refers.
        id: String,
        /// Name of the function.
        name: String,
    },
    /// Arguments of a call: the joined pieces are the JSON text as the model wrote it.
    CallArguments {
        /// Number of the call in the output, from 0.
        index: usize,
        /// Piece of the JSON text.
        text: String,
    },
}

/// Form of the ids of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IdForm {
    /// A prefix, and a number of random letters and digits.
    Random(&'static str, usize),
    /// `functions.NAME:N`, where the calls of a conversation are numbered. The text before each call counts them.
    Numbered(&'static str),
}

/// Form of OpenAI's ids.
pub(super) const LONG_IDS: IdForm = IdForm::Random("call_", 24);

/// Calls of an output.
#[derive(Debug)]
pub(super) struct Calls {
    begun: usize,
    rng: Rng,
    form: IdForm,
    /// Number of calls in the prompt.
    earlier: usize,
    /// Functions that the model may call.
    tools: Vec<Tool>,
}

impl Calls {
    pub(super) fn new(seed: u64, form: IdForm, earlier: usize, tools: &[Tool]) -> Calls {
        Calls { begun: 0, rng: Rng::new(seed), form, earlier, tools: tools.to_vec() }
    }

    /// Returns the number of calls that were begun.
    pub(super) fn begun(&self) -> usize {
        self.begun
    }

    fn id(&mut self, name: &str) -> String {
        const ALPHABET: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
        match self.form {
            IdForm::Random(prefix, count) => {
                let random = (0..count).map(|_| char::from(ALPHABET[(self.rng.next_u64() % 62) as usize]));
                prefix.chars().chain(random).collect()
            }
            IdForm::Numbered(_) => format!("functions.{name}:{}", self.earlier + self.begun),
        }
    }
}

/// Receiver of the parts of an output; it joins neighbouring pieces of the same kind.
pub(super) struct Sink<'a> {
    events: &'a mut Vec<OutputEvent>,
    calls: &'a mut Calls,
}

impl<'a> Sink<'a> {
    pub(super) fn new(events: &'a mut Vec<OutputEvent>, calls: &'a mut Calls) -> Sink<'a> {
        Sink { events, calls }
    }

    pub(super) fn content(&mut self, text: &str) {
        match self.events.last_mut() {
            Some(OutputEvent::Content(last)) => last.push_str(text),
            _ if text.is_empty() => {}
            _ => self.events.push(OutputEvent::Content(text.into())),
        }
    }

    pub(super) fn reasoning(&mut self, text: &str) {
        match self.events.last_mut() {
            Some(OutputEvent::Reasoning(last)) => last.push_str(text),
            _ if text.is_empty() => {}
            _ => self.events.push(OutputEvent::Reasoning(text.into())),
        }
    }

    /// Returns true if there is a function of this name.
    pub(super) fn offers(&self, name: &str) -> bool {
        self.calls.tools.iter().any(|tool| tool.name == name)
    }

    /// Returns true if the name of a function begins with this text and character.
    pub(super) fn offers_beginning(&self, text: &str, c: char) -> bool {
        self.calls.tools.iter().any(|tool| tool.name.strip_prefix(text).is_some_and(|rest| rest.starts_with(c)))
    }

    /// Returns the types that an argument of a function may have.
    pub(super) fn types(&self, name: &str, argument: &str) -> Types {
        let tool = self.calls.tools.iter().find(|tool| tool.name == name);
        types_of(tool.and_then(|tool| tool.parameters.as_ref()), argument)
    }

    /// Begins a call.
    pub(super) fn begin(&mut self, name: &str) {
        let (index, id) = (self.calls.begun, self.calls.id(name));
        self.calls.begun += 1;
        self.events.push(OutputEvent::CallBegin { index, id, name: name.into() });
    }

    /// Adds to the arguments of the call that was begun last.
    pub(super) fn arguments(&mut self, piece: &str) {
        let begun = self.calls.begun.saturating_sub(1);
        if piece.is_empty() {
            return;
        }
        match self.events.last_mut() {
            Some(OutputEvent::CallArguments { index, text }) if *index == begun => text.push_str(piece),
            _ => self.events.push(OutputEvent::CallArguments { index: begun, text: piece.into() }),
        }
    }
}
