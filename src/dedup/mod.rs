//! Which bytes are stored twice, or could be stored in less?
//!
//! A pack's payloads are cut into units (a tensor, or a matrix of a stack) and these into frames. Of equal units one is
//! kept; one that is near to another is kept as its differences; and the numbers of a frame are taken apart into planes
//! that take less room (`plane`). [`make`] writes such a store, `store` opens it and gives any bytes back once `check`
//! has looked at every number. docs/FORMAT.md is the specification.

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
