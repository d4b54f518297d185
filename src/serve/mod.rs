//! HTTP server for models: the API of OpenAI and Anthropic over the sessions of this program.
//!
//! One thread per model computes ([`crate::runtime::generate::Batch`]), a few threads encode prompts, and one thread
//! runs all connections. They exchange messages only.

pub mod config;
pub mod keys;
pub mod origin;
mod toml_text;
pub mod usage;
