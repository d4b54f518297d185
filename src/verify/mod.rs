//! Verification of a pack's outputs against those of its checkpoint or of a recorded trace.
//!
//! `reference` computes the outputs of a checkpoint as Hugging Face `transformers` does, without any code of the
//! runtime. [`trace`] reads the recorded output of another program, and [`compare`] compares two sets of predictions
//! step by step and explains the first difference.

pub mod compare;
mod dtype;
#[cfg(feature = "reference")]
pub mod reference;
pub mod trace;

pub use compare::{Comparison, Mismatch, Rules, Scores, Step};
pub use dtype::RefDtype;
#[cfg(feature = "reference")]
pub use reference::{DecodedMatrices, Reference, ScoredText};
pub use trace::Trace;
