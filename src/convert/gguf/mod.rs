//! GGUF, the model files of llama.cpp, both ways.
//!
//! [`reader`] opens files from strangers, [`mod@import`] makes packs of them, [`mod@export`] writes packs as files that
//! llama.cpp loads. What differs between the two worlds is kept apart: names and order of rows ([`names`]),
//! hyper-parameters ([`config`], [`config_out`]), tokenizers ([`tokenizer_in`], [`tokenizer_out`]), and the meaning of
//! blocks ([`blocks`]).

pub mod blocks;
pub mod config;
pub mod config_out;
pub mod export;
pub mod family;
pub mod header;
pub mod import;
pub mod names;
mod pre;
pub mod reader;
mod rope_factors;
pub mod tokenizer_in;
pub mod tokenizer_out;
pub mod types;
pub mod value;
pub mod writer;

#[cfg(test)]
mod tests;

pub use export::{Dequantize, ExportOptions, ExportSummary, export};
pub use import::{ImportOptions, ImportSummary, import};
pub use reader::{Gguf, GgufTensor};
