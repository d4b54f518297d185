//! Quantization schemes: the description of a quantized tensor and its byte layout, without access to the weights.
//!
//! [`SCHEMES`] is the table of schemes. [`QuantSpec`] defines the meaning of the codes of a tensor (scheme,
//! granularity, zero point, scale type). [`TileLayout`] defines the order of the bytes of a matrix in a pack.
//! Every reader and writer of quantized bytes uses these three.
//!
//! To add a scheme, add its entry to [`SCHEMES`]. If its codes need a new [`CodeMap`], add an arm to every `match` on
//! it; the compiler reports these places: the codecs of [`crate::quant::block`], the kernels of [`crate::runtime`], the
//! GGML types and the lossless coder.

mod granularity;
mod spec;
mod table;
mod tile;
mod trellis;

pub use granularity::{Granularity, ScaleType};
pub use spec::QuantSpec;
pub use table::{CodeMap, CodeOrder, CodeTable, Minimum, PlainScale, SCHEMES, Scheme, SchemeInfo, e4m3};
pub use tile::{BLOCK, Factors, SUPER_BLOCK, TILE_ALIGN, TILE_ROWS, TileLayout};
pub use trellis::{INDEX_BITS, STEPS, T2, T3, Trellis};
