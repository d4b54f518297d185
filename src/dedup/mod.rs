//! Which bytes are stored twice, or could be stored in less?
//!
//! A pack's payloads are cut into units (a tensor, or a matrix of a stack) and these into frames. Of equal units one is kept;
//! one that is near to another is kept as its differences; and the numbers of a frame are taken apart into planes that take
//! less room (`plane`). [`make`] writes such a store, [`store`] opens it, checks it and gives any bytes back.
//! docs/FORMAT.md is the specification.

mod description;
mod find;
mod frame;
mod lanes;
pub mod make;
mod pattern;
mod plane;
pub mod store;

pub use description::{Codec, FILE_NAMES, JSON_NAME, sealed};
