//! Lossless deduplication and compression of packs.
//!
//! A pack's payloads are divided into units (a tensor, or a matrix of a stack), and units into frames. Equal units are
//! stored once; a unit that is similar to another is stored as differences from it; the numbers of a frame are split
//! into planes that compress better (`plane`). [`make`] writes such a store. `store` opens a store and rebuilds any
//! range of bytes after `check` has validated the description. docs/FORMAT.md is the specification.

mod artifact;
mod check;
mod description;
pub mod family;
mod find;
mod fingerprint;
mod frame;
mod index;
mod lanes;
mod layout;
pub mod make;
mod measure;
mod pattern;
mod plane;
mod report;
mod restore;
mod slices;
pub mod source;
mod store;

pub use artifact::Artifact;
pub use description::{Codec, FILE_NAMES, JSON_NAME, sealed};
pub use measure::{Measured, measure};
pub use report::{EncodingBytes, Shared, Summary};
pub use restore::{is_reduced, remove_original, restore, verify, verify_as};
