//! Conversions: a checkpoint to a pack and back, to quantized files and checkpoints, and from and to GGUF.
//!
//! [`Checkpoint`] reads a directory, a pack or a GGUF file and returns canonical tensors for every family and naming
//! ([`arch`]), so that the conversions take all three ([`source::kind`]). [`pack`], [`quantize`], [`gguf`], [`unpack`]
//! and [`export_hf`] plan their output and pass the plan to the executor, which writes it in parallel, continues
//! interrupted work and divides it among machines. [`synth`] creates checkpoints with the shapes of real models without
//! a download.
//!
//! A tensor has one type at each stage:
//!
//! | type | what it is | made by |
//! |---|---|---|
//! | [`source::source_tensor::SourceTensor`] | name, type, shape and position in a weight file | [`source::shard::list`] |
//! | [`source::gguf::GgufTensor`] | the same in a GGUF file | [`source::gguf::reader`] |
//! | [`arch::ExpectedTensor`] | canonical name and shape that the configuration demands | [`arch::expected_tensors`] |
//! | [`arch::View`] | where the numbers of a canonical tensor lie in the source, by names | the family in [`arch`] |
//! | [`published::Coded`] | where the codes and scales of a quantized matrix lie | the format in [`published`] |
//! | [`CanonicalTensor`] | an expected tensor bound to the tensors that hold its numbers | [`Checkpoint`] |
//! | `MappedTensor` | a tensor of GGUF and the canonical ones whose rows it holds | [`gguf::names`] |
//! | [`quantize::weights::Tensor`] | a tensor of a model that may be quantized | [`quantize::weights`] |
//! | `PackItem`, `ImportedTensor`, `ExportedTensor`, `UnpackedTensor` | a tensor of an output and how it is made | the plan of the command |
//! | [`crate::iebin::PlannedTensor`], then [`crate::iebin::Entry`] | a tensor of a pack before and after its offset is fixed | these plans, [`crate::iebin::writer`] |
//! | [`crate::manifest::TensorEntry`] | the decision about a tensor and what was measured | [`quantize`] |

pub mod adapter;
pub mod arch;
pub mod assess;
mod checkpoint;
mod companions;
mod digest;
mod disk;
pub mod dry_run;
mod executor;
pub mod export_hf;
pub mod gguf;
mod guidance;
pub mod json;
pub mod merge;
mod merges;
mod new_checkpoint;
pub mod pack;
mod pack_input;
mod pack_output;
pub mod published;
pub mod quantize;
pub mod requantized;
mod rounding;
mod rows;
mod sharding;
pub mod source;
pub mod synth;
pub mod tokenizer_files;
mod tokenizer_json;
pub mod unpack;

pub use checkpoint::{CanonicalTensor, Checkpoint, CheckpointOptions, LeftOutPart};
