//! Function calls: definitions of tools, the formats in which models write calls, and the output of a model divided
//! into reasoning, content and calls.
//!
//! A model writes a call as text, in a format that it was trained with and that its chat template describes. The known
//! formats are rows of a table in `format.rs`: adding one takes a row there, with data of a notation that is known
//! (`reader.rs`) and a grammar. [`OutputStyle`] tells how a model writes. [`constraint`] makes it write calls that its
//! tools accept, and an answer that follows a constraint behind its reasoning; [`OutputParser`] divides its output.

mod call;
mod constrain;
mod events;
mod format;
mod functionary;
mod harmony;
mod hermes;
mod lists;
mod literal;
mod literals;
mod llama3;
mod members;
mod mistral;
mod named;
mod object;
mod parser;
mod quoted;
mod reader;
mod reasoning;
mod row;
mod rules;
mod sections;
mod style;
mod tagged;
mod tool;
mod types;
mod xml;

pub use constrain::{CallConstraint, Enforced, Wanted, answer_constraint, constraint};
pub use events::OutputEvent;
pub use format::Format;
pub use parser::OutputParser;
pub use style::OutputStyle;
pub use tool::{Tool, ToolChoice, parse_tools};

#[cfg(test)]
mod list_tests;
#[cfg(test)]
mod notation_tests;
#[cfg(test)]
mod tests;
