//! Reads GGUF, the model file format of llama.cpp: the tensors of a file ([`reader`]) and the numbers of their blocks
//! ([`blocks`]).

pub mod blocks;
mod files;
mod foreign;
mod group_size;
pub mod header;
pub mod reader;
pub mod types;
pub mod value;

pub use files::{files_in, parts_of};
pub use reader::{Gguf, GgufTensor};
