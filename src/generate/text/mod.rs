//! Text processing: converts text to tokens and tokens to text.
//!
//! [`tokenizer`] wraps the tokenizer file, [`stream`] decodes ids to text incrementally, [`stop`] searches that text
//! for stop strings, [`chat`] renders a conversation with the model's chat template, [`spelling`] lists the bytes of
//! every token, and [`UnicodeForm`] converts texts to a normal form.

pub mod chat;
mod datetime;
mod filters;
#[cfg(test)]
mod golden_tests;
mod jinja;
mod message;
mod methods;
mod python;
pub mod spelling;
pub mod stop;
pub mod stream;
mod tojson;
pub mod tokenizer;
mod unicode;

pub use chat::{ChatTemplate, Ending, RenderOptions, Variables};
pub use datetime::{strftime, strftime_now};
pub use message::{FunctionCall, Message, ToolCall, arguments_object};
pub use spelling::Spelling;
pub use stop::StopMatcher;
pub use stream::TextStream;
pub use tokenizer::Tokenizer;
pub use unicode::UnicodeForm;
