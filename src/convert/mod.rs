//! How does a Hugging Face checkpoint become an artifact?
//!
//! [`Checkpoint`] reads a directory and gives canonical tensors, whatever the family and spelling ([`arch`]);
//! [`pack`] makes the artifact; [`quantize`] decides what of it becomes 4 or 8 bit;
//! [`gguf`] reads and writes the files of llama.cpp; [`synth`] makes checkpoints of true shapes without a download.

pub mod arch;
mod checkpoint;
mod digest;
pub mod gguf;
mod guidance;
pub mod hub;
pub mod json;
pub mod layout;
pub mod merge;
mod older_pack;
pub mod outlook;
pub mod pack;
mod payload;
pub mod pickle;
pub mod quantize;
pub mod read_at;
pub mod safetensors;
pub mod shard;
mod sharding;
pub mod shards;
pub mod source_tensor;
mod strided;
pub mod synth;
pub mod unpack;

pub use checkpoint::{Aids, CanonicalTensor, Checkpoint, Kind};
