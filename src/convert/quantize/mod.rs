//! How is a whole model quantized? [`weights`] reads it, [`select`] decides tensor by tensor, [`candidates`] compares
//! schemes under a budget, [`judge`] measures a tensor and judges it, [`entry`] is what a manifest says of it, [`ptq`]
//! does so with all, [`q4`] also writes the bytes, [`append`] puts them into a pack that exists already.

pub mod append;
pub mod candidates;
pub mod entry;
pub mod judge;
pub mod ptq;
pub mod q4;
pub mod select;
pub mod weights;
