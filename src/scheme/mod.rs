//! How a quantized tensor is described and laid out, without touching a single weight.
//!
//! [`QuantSpec`] says what a code means (scheme, granularity, zero point, scale type); [`TileLayout`] says where the
//! bytes of a matrix lie in the artifact. Every reader and writer of quantized bytes goes through these two.

mod granularity;
mod spec;
mod table;
mod tile;

pub use granularity::{Granularity, ScaleType};
pub use spec::QuantSpec;
pub use table::Scheme;
pub use tile::{BLOCK, TILE_ALIGN, TILE_ROWS, TileLayout};
