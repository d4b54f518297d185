//! Inference runtime: locates the weights of a pack once, then computes logits for the tokens it is given.
//!
//! [`engine::Engine`] is the entry point: it creates [`Sequence`]s, reads tokens into them, and passes each step
//! through a list of device parts. The interface of a part is in [`device`], that of what it keeps of a text in
//! [`state`]; [`prefix_cache`] keeps the states of earlier texts. [`open`] chooses and builds the parts: [`weights`]
//! binds tensors (finds each one in the pack, checks its shape and assigns it to a layer), [`layer`] describes the
//! layers for all devices, [`residency`] loads weights into memory. Matrices of a deduplicated pack are rebuilt from
//! its store by [`weights::rebuilt`]. [`precision`] selects the number types.
//!
//! Two devices implement the interface. On the CPU, [`forward`] computes the layers and [`experts`] the mixtures of
//! experts, [`attention`], [`ops`] and [`rope`] hold the arithmetic, [`kv`] the KV cache, [`cpu`] the matrix products.
//! `cuda` does all of this on NVIDIA GPUs.
//!
//! [`profile`] measures the time of each stage. [`observe`] passes activations to [`calibrate`], which collects
//! statistics, and to [`shared_activations`], which shares them between models that differ in one layer. Generation is
//! above the engine, in [`crate::generate`].

pub mod adapters;
pub mod attention;
pub mod calibrate;
pub mod cpu;
pub(crate) mod cuda;
pub mod device;
mod embed;
pub mod engine;
pub mod experts;
pub mod forward;
pub mod kv;
pub mod layer;
pub mod layer_look;
pub mod moe;
pub mod needs;
pub mod observe;
pub mod open;
pub mod ops;
pub mod per_head;
pub mod precision;
pub mod prediction;
pub mod prefix_cache;
pub mod profile;
pub mod residency;
pub mod rope;
pub mod sequence;
pub mod shared_activations;
mod shortlist;
pub mod state;
pub mod weights;

pub use attention::AttentionKernel;
pub use engine::Engine;
pub use kv::KvType;
pub use open::EngineOptions;
pub use precision::Precision;
pub use prediction::Predictor;
pub use prefix_cache::{DiskCounts, PrefixCache, Saved, page_content, prefix_cache_bytes};
pub use profile::{Stage, Stages};
pub use residency::Residency;
pub use sequence::{Feed, Output, Sequence, Want};
pub use shared_activations::PrefixActivations;
