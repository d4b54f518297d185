//! Tile layout: the positions of the bytes of a quantized matrix.
//!
//! # The tile
//!
//! A matrix of `rows x cols` (`cols` is the summed dimension K) is divided into tiles of [`TILE_ROWS`] rows. The last
//! tile is padded with rows whose scales are zero. K is padded to a multiple of [`BLOCK`] with the code of zero, or of
//! the smallest magnitude if no code means zero; these codes are multiplied by activations of zero. A tile consists of
//! three sections, each starting on a 64-byte boundary:
//!
//! 1. **scales**: for each scale group along K, 16 scales, one per row (`[group][row]`);
//! 2. **zero points** (affine schemes only): for each group 16 bytes (`[group][row]`);
//! 3. **codes**: for each block of 32 along K:
//!    * 4 bit: 256 bytes as 4 vectors of 64. In vector `i`, bytes `4r..4r+4` belong to row `r`; the low nibble of byte
//!      `j` is k = 4i + j, the high nibble is k = 16 + 4i + j. Symmetric integer codes are stored biased by 8
//!      (`value + 8`); affine codes and table codes (nl4, MXFP4) are stored without a bias.
//!    * 5 and 6 bit: the low four bits as for 4 bit, then 64 or 128 bytes with the b = 1 or 2 high bits of each code.
//!      The high bits of k = 4f + j are in vector `f * b / 8`, byte `4r + j`, starting at bit `f * b % 8`. Codes are
//!      biased by 16 or 32.
//!    * 8 bit: 512 bytes as 8 vectors of 64; byte `4r + j` of vector `i` is row `r`, k = 4i + j, two's complement.
//!
//! Each SIMD lane processes one row, and blocks are processed in K order. No kernel needs a horizontal sum, and the
//! order of additions is the same for every instruction set, batch size and number of threads. Tensors of several
//! matrices (experts) store the matrices one after the other.

use super::granularity::Granularity;
use super::spec::QuantSpec;
use crate::error::{Error, Result};

/// Number of rows that are interleaved in one tile.
pub const TILE_ROWS: usize = 16;
/// Number of elements along K in one block; every group size is a multiple of it.
pub const BLOCK: usize = 32;
/// Alignment of every section and every tile, in bytes.
pub const TILE_ALIGN: usize = 64;

/// Byte layout of one `rows x cols` matrix stored as tiles. The module documentation describes the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileLayout {
    /// Meaning of codes and scales.
    pub spec: QuantSpec,
    /// Rows of the matrix (output features), without padding.
    pub rows: usize,
    /// Columns of the matrix (input features, K), without padding.
    pub cols: usize,
    /// Number of blocks of 32 along K, padding included.
    pub blocks: usize,
    /// Number of scale groups along K.
    pub groups: usize,
    /// Number of blocks that share a scale; the last group may be shorter.
    pub group_blocks: usize,
    /// Offset of the zero points within a tile (equals `codes_offset` when there are none).
    pub zeros_offset: usize,
    /// Offset of the codes within a tile.
    pub codes_offset: usize,
    /// Bytes of one block of codes: 64 per bit of a code.
    pub block_bytes: usize,
    /// Bytes of one tile.
    pub tile_bytes: usize,
    /// Bytes of a tile divided by its number of blocks, which includes a share of the scales. Prefetching moves on by
    /// this distance per block, so that it covers codes and scales.
    pub block_step: usize,
    /// Number of tiles.
    pub tiles: usize,
}

impl TileLayout {
    /// Computes the layout with checked arithmetic.
    ///
    /// # Errors
    /// The spec is unsupported, a dimension is zero, or a size overflows.
    pub fn new(spec: QuantSpec, rows: usize, cols: usize) -> Result<TileLayout> {
        spec.validate()?;
        if rows == 0 || cols == 0 {
            return Err(Error::corrupt(format!("found an empty quantized matrix of {rows} x {cols}")));
        }
        Self::checked(spec, rows, cols)
            .ok_or_else(|| Error::corrupt(format!("found a quantized matrix of {rows} x {cols}, whose size overflows")))
    }

    fn checked(spec: QuantSpec, rows: usize, cols: usize) -> Option<TileLayout> {
        let blocks = cols.div_ceil(BLOCK);
        let groups = spec.groups(cols);
        let group_blocks = match spec.granularity {
            Granularity::Group(n) => n as usize / BLOCK,
            Granularity::Row | Granularity::Tensor => blocks,
        };
        let scales = groups.checked_mul(TILE_ROWS * spec.scale_dtype.size())?;
        let zeros_offset = scales.checked_next_multiple_of(TILE_ALIGN)?;
        let zeros = if spec.symmetric { 0 } else { groups.checked_mul(TILE_ROWS)? };
        let codes_offset = zeros_offset.checked_add(zeros)?.checked_next_multiple_of(TILE_ALIGN)?;
        let block_bytes = TILE_ROWS * BLOCK * spec.scheme.bits() as usize / 8;
        let tile_bytes = codes_offset.checked_add(blocks.checked_mul(block_bytes)?)?;
        let tiles = rows.div_ceil(TILE_ROWS);
        tiles.checked_mul(tile_bytes)?;
        rows.checked_mul(cols)?;
        Some(TileLayout {
            spec,
            rows,
            cols,
            blocks,
            groups,
            group_blocks,
            zeros_offset,
            codes_offset,
            block_bytes,
            tile_bytes,
            block_step: tile_bytes / blocks,
            tiles,
        })
    }

    /// Returns the number of bytes of the whole matrix.
    pub fn nbytes(&self) -> usize {
        self.tiles * self.tile_bytes
    }

    /// Copies a row of a tile, its place in the tile given by the number, to a row of another tile.
    pub fn copy_row(&self, (from, from_row): (&[u8], usize), (to, to_row): (&mut [u8], usize)) {
        let mut copy = |start: usize, bytes: usize| {
            to[start + to_row * bytes..][..bytes].copy_from_slice(&from[start + from_row * bytes..][..bytes]);
        };
        let scale_bytes = self.spec.scale_dtype.size();
        for group in 0..self.groups {
            copy(group * TILE_ROWS * scale_bytes, scale_bytes);
            if !self.spec.symmetric {
                copy(self.zeros_offset + group * TILE_ROWS, 1);
            }
        }
        (self.codes_offset..self.tile_bytes)
            .step_by(TILE_ALIGN)
            .for_each(|vector| copy(vector, TILE_ALIGN / TILE_ROWS));
    }

    /// Returns the number of canonical codes of a row: one per column, padded to whole blocks for block formats.
    pub fn canonical_codes(&self) -> usize {
        if self.spec.scheme.info().is_block_format { self.blocks * BLOCK } else { self.cols }
    }

    /// Returns the lengths in bytes of the canonical codes, scales and zero points (see [`crate::quant::block`]) of
    /// `rows` rows.
    pub fn canonical_sizes(&self, rows: usize) -> (usize, usize, usize) {
        let bits = self.spec.scheme.bits() as usize;
        let codes = self.canonical_codes();
        let per_row = if bits == 8 { codes } else { codes.div_ceil(2) + (codes * (bits - 4)).div_ceil(8) };
        let groups = match self.spec.granularity {
            Granularity::Tensor => 1,
            _ => rows * self.groups,
        };
        let zeros = if self.spec.symmetric { 0 } else { groups };
        (rows * per_row, groups * self.spec.scale_dtype.size(), zeros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_adds_up_for_odd_shapes() {
        let l = TileLayout::new(QuantSpec::Q4_0, 17, 80).unwrap();
        assert_eq!((l.tiles, l.blocks, l.groups, l.group_blocks), (2, 3, 3, 1));
        assert_eq!((l.zeros_offset, l.codes_offset, l.tile_bytes), (128, 128, 128 + 3 * 256));
        assert_eq!(l.nbytes(), 2 * l.tile_bytes);
    }

    #[test]
    fn absurd_shapes_are_refused_not_wrapped() {
        assert!(TileLayout::new(QuantSpec::Q4_0, usize::MAX, 64).is_err());
        assert!(TileLayout::new(QuantSpec::Q4_0, 1 << 40, 1 << 40).is_err());
        assert!(TileLayout::new(QuantSpec::Q4_0, 0, 64).is_err());
    }
}
