//! Function calls: definitions of tools, the formats in which models write calls, and the output of a model divided
//! into reasoning, content and calls.
//!
//! A model writes a call as text, in a format that it was trained with and that its chat template describes. The known
//! formats are rows of a table in `format.rs`: adding one takes a row there and a file with its details. [`constraint`]
//! makes a model write calls that its tools accept; [`OutputParser`] finds the calls in its output.

mod call;
mod constrain;
mod events;
mod format;
mod harmony;
mod hermes;
mod llama3;
mod mistral;
mod object;
mod parser;
mod reader;
mod reasoning;
mod row;
mod rules;
mod tool;

pub use constrain::{CallConstraint, Enforced, constraint};
pub use events::OutputEvent;
pub use format::Format;
pub use parser::OutputParser;
pub use tool::{Tool, ToolChoice, parse_tools};

#[cfg(test)]
mod list_tests;
#[cfg(test)]
mod tests;
