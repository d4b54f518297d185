//! Text processing: converts text to tokens and tokens to text.
//!
//! [`tokenizer`] wraps the tokenizer file, [`stream`] decodes ids to text incrementally, [`stop`] searches that text
//! for stop strings, [`chat`] renders a conversation with the model's chat template, and [`spelling`] lists the bytes
//! of every token.

pub mod chat;
mod datetime;
pub mod spelling;
pub mod stop;
pub mod stream;
pub mod tokenizer;

pub use chat::{ChatTemplate, Message};
pub use datetime::{strftime, strftime_now};
pub use spelling::Spelling;
pub use stop::StopMatcher;
pub use stream::TextStream;
pub use tokenizer::Tokenizer;
