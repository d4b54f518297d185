//! How does text become tokens and tokens text again?
//!
//! [`tokenizer`] wraps the tokenizer file, [`stream`] turns ids into text as they come, [`stop`] watches that text for
//! stop strings, [`chat`] renders a conversation through the model's own template.

pub mod chat;
mod datetime;
pub mod stop;
pub mod stream;
pub mod tokenizer;

pub use chat::{ChatTemplate, Message};
pub use datetime::strftime_now;
pub use stop::StopMatcher;
pub use stream::TextStream;
pub use tokenizer::Tokenizer;
