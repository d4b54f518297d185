//! Reads the files of others: checkpoints, GGUF files, the cache of the Hugging Face Hub, and packs of the predecessor.
//!
//! [`layout`] finds the weight files of a checkpoint, and [`shards`] lists their tensors, with one module per format
//! ([`safetensors`], [`pickle`], `older_pack`); [`gguf`] does both for GGUF. [`kind`] says
//! which of them a path needs. Every file is untrusted: its lengths, offsets and shapes are checked where they are read
//! ([`read_at`]).

pub mod checksum;
pub mod foreign;
pub mod gguf;
pub mod hub;
pub mod kind;
pub mod layout;
mod older_pack;
pub mod pickle;
pub mod read_at;
pub mod safetensors;
pub mod shard;
pub mod shards;
pub mod source_tensor;
mod strided;
