//! How a quantized tensor is described and laid out, without touching a single weight.
//!
//! [`SCHEMES`] is the table of schemes; [`QuantSpec`] says what the codes of a tensor mean (scheme, granularity, zero
//! point, scale type); [`TileLayout`] says where the bytes of a matrix lie in the artifact. Every reader and writer of
//! quantized bytes goes through these three.
//!
//! To add a scheme, write its row. One whose codes need a [`CodeMap`] that does not exist yet has an arm in each place
//! that matches on it, which the compiler names: the codecs of [`crate::quant::block`], the kernels of
//! [`crate::runtime`], the GGML types and the lossless coder.

mod granularity;
mod spec;
mod table;
mod tile;

pub use granularity::{Granularity, ScaleType};
pub use spec::QuantSpec;
pub use table::{CodeMap, CodeOrder, CodeTable, PlainScale, SCHEMES, Scheme, SchemeInfo};
pub use tile::{BLOCK, TILE_ALIGN, TILE_ROWS, TileLayout};
