//! Converts GGUF, the model file format of llama.cpp, to packs and back.
//!
//! [`super::source::gguf`] opens untrusted files, [`mod@import`] converts them to packs, and [`mod@export`] writes
//! packs as files that llama.cpp loads. Each difference between the two formats has its own module: tensor names and
//! row order ([`names`]), hyper-parameters ([`config`], [`config_out`]), and tokenizers ([`tokenizer_in`],
//! [`tokenizer_out`]).

mod check;
pub mod config;
mod config_families;
pub mod config_out;
pub mod export;
pub mod family;
mod heads;
pub mod import;
pub mod names;
pub(super) mod pre;
mod rope_factors;
pub mod tokenizer_in;
pub mod tokenizer_out;
pub mod writer;

#[cfg(test)]
mod tests;

pub use export::{Dequantize, ExportOptions, ExportSummary, export};
pub use import::{ImportOptions, ImportSummary, import};
