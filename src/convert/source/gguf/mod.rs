//! Reads GGUF, the model file format of llama.cpp: the tensors of a file ([`reader`]) and the numbers of their blocks
//! ([`blocks`]).

pub mod blocks;
mod foreign;
mod group_size;
pub mod header;
pub mod reader;
pub mod types;
pub mod value;

pub use reader::{Gguf, GgufTensor};
