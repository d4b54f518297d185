//! How does a Hugging Face checkpoint become an artifact?
//!
//! [`Checkpoint`] reads a directory and gives canonical tensors, whatever the family and spelling ([`arch`]);
//! [`pack`] makes the artifact;
//! [`synth`] makes checkpoints of true shapes without a download.

pub mod arch;
mod checkpoint;
mod json;
pub mod pack;
pub mod safetensors;
pub mod shards;
pub mod synth;

pub use checkpoint::{CanonicalTensor, Checkpoint, Kind};
