//! How does an artifact answer? Weights are bound once, then tokens go in and logits come out.
//!
//! [`engine::Engine`] is the door: it hands out [`engine::Sequence`]s, feeds them tokens, and passes each step through
//! a list of device parts ([`device`] is the seam). [`open`] chooses and builds the parts: [`weights`] binds tensors,
//! [`layer`] describes what every device follows, [`residency`] brings weights into memory. Two devices implement the
//! seam. The CPU: [`forward`] walks the layers, [`experts`] computes mixtures, [`attention`], [`ops`] and [`rope`] hold
//! the arithmetic, [`kv`] the keys and values, [`cpu`] the matrix products. NVIDIA GPUs: `cuda`. In front of the
//! engine, [`text`] turns text into tokens and back, [`generate`] decodes prompts together, [`speculate`] drafts tokens
//! and [`sampler`] chooses them; [`profile`] measures stages, [`observe`] shows activations to [`calibrate`], which
//! collects statistics, and to [`prefix`], which lets models that differ in one layer share what they have in common.

pub mod attention;
pub mod cache;
pub mod calibrate;
pub mod cpu;
pub(crate) mod cuda;
pub mod device;
mod embed;
pub mod engine;
pub mod experts;
pub mod forward;
pub mod generate;
pub mod kv;
pub mod layer;
pub mod moe;
pub mod observe;
pub mod open;
pub mod ops;
pub mod precision;
pub mod prefix;
pub mod profile;
pub mod rebuilt;
pub mod residency;
pub mod rope;
pub mod sampler;
pub mod score;
pub mod speculate;
pub mod text;
pub mod weights;

pub use engine::{Engine, Feed, Sequence, Want};
pub use kv::KvType;
pub use open::EngineOptions;
pub use precision::Precision;
pub use prefix::PrefixActivations;
pub use profile::{Stage, Stages};
pub use residency::Residency;
