//! Is the answer the one that Hugging Face gives?
//!
//! `reference` computes what a checkpoint says, with no code of the runtime; [`trace`] reads what another program said;
//! [`compare`] holds two opinions against each other, step by step, and explains where they part.

pub mod compare;
#[cfg(feature = "reference")]
pub mod reference;
pub mod trace;

pub use compare::{Comparison, Mismatch, Rules, Scores, Step};
#[cfg(feature = "reference")]
pub use reference::{Reference, Text};
pub use trace::Trace;

/// What the reference rounds numbers to on the way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum RefDtype {
    /// Nothing is rounded beyond f32.
    #[default]
    F32,
    /// Weights and the results of each operation are rounded to bf16, as `torch_dtype=bfloat16` does.
    Bf16,
}
