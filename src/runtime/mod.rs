//! How does an artifact answer? Weights are bound once, then tokens go in and logits come out.
//!
//! [`engine::Engine`] is the door: it opens an artifact, hands out [`engine::Sequence`]s and feeds them tokens.
//! Behind it, [`weights`] binds tensors, [`forward`] walks the layers, [`experts`] runs those of a mixture, [`attention`], [`ops`] and [`rope`] hold the
//! arithmetic, [`kv`] the memory of what was read, [`residency`] brings weights into memory, and [`cpu`] the matrix products.
//! In front of it, [`text`] makes tokens of text and text of tokens, [`generate`]
//! decodes prompts together, [`speculate`] guesses ahead and [`sampler`] chooses the tokens; [`profile`] tells where the time
//! went, [`calibrate`] gathers what the matrices read, and [`mod@trail`] spares models that differ in one layer what they have in common.

pub mod attention;
pub mod cache;
pub mod calibrate;
pub mod cpu;
pub mod cuda;
pub mod engine;
pub mod experts;
pub mod forward;
pub mod generate;
pub mod kv;
pub mod moe;
mod observe;
pub mod ops;
pub mod precision;
pub mod profile;
pub mod rebuilt;
pub mod residency;
pub mod rope;
pub mod sampler;
pub mod score;
pub mod speculate;
pub mod text;
pub mod trail;
pub mod weights;

pub use engine::{Engine, EngineOptions, Feed, Sequence, Want};
pub use kv::KvType;
pub use precision::Precision;
pub use profile::{Stage, Stages};
pub use residency::Residency;
pub use trail::Trail;
