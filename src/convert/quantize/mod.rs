//! Quantizes whole models.
//!
//! [`weights`] reads a model, [`select`] chooses the tensors and their schemes, and [`candidates`] compares schemes
//! for a size budget. [`judge`] measures one tensor and compares it with the gate, [`entry`] builds its manifest
//! entry, and [`ptq`] does this for all selected tensors. [`q4`] also writes the quantized bytes, and [`append`]
//! writes them into an existing pack.

pub mod append;
pub mod candidates;
pub mod entry;
pub mod judge;
pub mod ptq;
pub mod q4;
pub mod select;
pub mod weights;
