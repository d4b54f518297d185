//! Tile layout: the positions of the bytes of a quantized matrix.
//!
//! # The tile
//!
//! A matrix of `rows x cols` (`cols` is the summed dimension K) is divided into tiles of [`TILE_ROWS`] rows. The last
//! tile is padded with rows whose scales are zero. K is padded to a multiple of [`BLOCK`] with the code of zero, or of
//! the smallest magnitude if no code means zero; these codes are multiplied by activations of zero. A tile consists of
//! up to four sections, each starting on a 64-byte boundary:
//!
//! 1. **scales**: for each scale group along K, 16 scales, one per row (`[group][row]`);
//! 2. **zero points** or **minimums** (affine schemes and those with a [`Minimum`] of its own): for each group 16
//!    entries (`[group][row]`);
//! 3. **super-scales** (schemes with two levels of scales): for each super-block of 256 along K, 16 fp16 numbers that
//!    multiply its scales, then 16 that multiply its minimums, if there are any; for scales of rows (NVFP4 and
//!    [`ScaleType::I8Row`]), 16 f32 numbers, one per row, that multiply all its scales;
//! 4. **codes**: for each block of 32 along K:
//!    * 4 bit: 256 bytes as 4 vectors of 64. In vector `i`, bytes `4r..4r+4` belong to row `r`; the low nibble of byte
//!      `j` is k = 4i + j, the high nibble is k = 16 + 4i + j. Symmetric integer codes are stored biased by 8
//!      (`value + 8`); all other codes are stored without a bias.
//!    * 5 and 6 bit: the low four bits as for 4 bit, then 64 or 128 bytes with the b = 1 or 2 high bits of each code.
//!      The high bits of k = 4f + j are in vector `f * b / 8`, byte `4r + j`, starting at bit `f * b % 8`. Codes are
//!      biased by half their range, or have a minimum.
//!    * 2 and 3 bit: 128 bytes with the low two bits of each code in the order of the high bits of 6-bit codes, then,
//!      for 3 bit, 64 bytes in the order of the high bits of 5-bit codes.
//!    * trellises of b = 2 and 3 bits: 64 b bytes as b vectors of 64. Byte `4r + j` of the vectors, first vector first
//!      and low bits first, is the stream of row `r` for k = j, j + 4, …, j + 28 (see [`Trellis`](super::Trellis)).
//!    * 8 bit: 512 bytes as 8 vectors of 64; byte `4r + j` of vector `i` is row `r`, k = 4i + j, two's
//!      complement or E4M3.
//!
//! Each SIMD lane processes one row, and blocks are processed in K order. No kernel needs a horizontal sum, and the
//! order of additions is the same for every instruction set, batch size and number of threads. Tensors of several
//! matrices (experts) store the matrices one after the other.

use super::granularity::{Granularity, ScaleType};
use super::spec::QuantSpec;
use super::table::{CodeOrder, Minimum, e4m3};
use crate::error::{Error, Result};
use half::f16;

/// Number of rows that are interleaved in one tile.
pub const TILE_ROWS: usize = 16;
/// Number of elements along K in one block; a group is some blocks or half a block.
pub const BLOCK: usize = 32;
/// Number of elements along K in one super-block, whose groups share fp16 numbers.
pub const SUPER_BLOCK: usize = 256;
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
    /// Number of blocks that share a scale; the last group may be shorter. Where a block has two groups this is 1.
    pub group_blocks: usize,
    /// Number of groups in a block: 2 for groups of 16, otherwise 1.
    pub block_groups: usize,
    /// Number of super-blocks along K whose groups share numbers, 1 for whole rows; 0 in schemes with one level of
    /// scales.
    pub super_blocks: usize,
    /// Offset of the zero points or minimums within a tile (equals `supers_offset` when there are none).
    pub zeros_offset: usize,
    /// Bytes of a zero point or minimum; 0 when there are none.
    pub zero_bytes: usize,
    /// Offset of the super-scales within a tile (equals `codes_offset` when there are none).
    pub supers_offset: usize,
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
        let (group_blocks, block_groups) = match spec.granularity {
            Granularity::Group(n) => ((n as usize / BLOCK).max(1), (BLOCK / n as usize).max(1)),
            Granularity::Row | Granularity::Tensor => (blocks, 1),
        };
        let groups = if block_groups > 1 { blocks.checked_mul(block_groups)? } else { spec.groups(cols) };
        let super_blocks = match spec.scale_dtype {
            ScaleType::I8 => cols.div_ceil(SUPER_BLOCK),
            ScaleType::E4m3 | ScaleType::I8Row => 1,
            ScaleType::F16 | ScaleType::F32 | ScaleType::E8m0 => 0,
        };
        let scales = groups.checked_mul(TILE_ROWS * spec.scale_dtype.size())?;
        let zeros_offset = scales.checked_next_multiple_of(TILE_ALIGN)?;
        let zero_bytes = if spec.symmetric { spec.minimum().size() } else { 1 };
        let zeros = groups.checked_mul(TILE_ROWS * zero_bytes)?;
        let supers_offset = zeros_offset.checked_add(zeros)?.checked_next_multiple_of(TILE_ALIGN)?;
        let super_bytes = spec.scale_dtype.super_size() * TILE_ROWS;
        let supers = super_blocks.checked_mul(spec.minimum().supers() * super_bytes)?;
        let codes_offset = supers_offset.checked_add(supers)?.checked_next_multiple_of(TILE_ALIGN)?;
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
            block_groups,
            super_blocks,
            zeros_offset,
            zero_bytes,
            supers_offset,
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
            copy(self.zeros_offset + group * TILE_ROWS * self.zero_bytes, self.zero_bytes);
        }
        let size = self.spec.scale_dtype.super_size();
        for number in 0..self.super_numbers() {
            copy(self.supers_offset + number * TILE_ROWS * size, size);
        }
        (self.codes_offset..self.tile_bytes)
            .step_by(TILE_ALIGN)
            .for_each(|vector| copy(vector, TILE_ALIGN / TILE_ROWS));
    }

    /// Returns the number of numbers that the super-blocks of a row have.
    pub fn super_numbers(&self) -> usize {
        self.super_blocks * self.spec.minimum().supers()
    }

    /// Returns the index of the group of a block; `half` selects one of the two groups that a block may have.
    #[inline(always)]
    pub fn group_of(&self, block: usize, half: usize) -> usize {
        block / self.group_blocks * self.block_groups + half
    }

    /// Returns the numbers by which a group of row `row` of a tile turns codes into weights.
    #[inline]
    pub fn factors(&self, tile: &[u8], row: usize, group: usize) -> Factors {
        let sections = (tile, &tile[self.zeros_offset..], &tile[self.supers_offset..]);
        self.factors_of(sections, (TILE_ROWS, row), group)
    }

    /// Returns the factors of a group from the sections of scales, zero points or minimums, and super-scales, in which
    /// the entries of `lanes` rows alternate; `lane` is the place of the row among them.
    pub fn factors_of(
        &self,
        (scales, zeros, supers): (&[u8], &[u8], &[u8]),
        (lanes, lane): (usize, usize),
        group: usize,
    ) -> Factors {
        let half = |bytes: &[u8], index: usize| f16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f32();
        let single =
            |bytes: &[u8], index: usize| f32::from_le_bytes(bytes[4 * index..][..4].try_into().expect("4 bytes"));
        let (index, minimum) = (group * lanes + lane, self.spec.minimum());
        let numbers = group * BLOCK / self.block_groups / SUPER_BLOCK * minimum.supers();
        let of_super = |number: usize| half(supers, (numbers + number) * lanes + lane);
        let scale = match self.spec.scale_dtype {
            ScaleType::F16 => half(scales, index),
            ScaleType::F32 => single(scales, index),
            ScaleType::E8m0 => e8m0(scales[index]),
            ScaleType::E4m3 => e4m3(scales[index]) * single(supers, lane),
            ScaleType::I8Row => f32::from(scales[index] as i8) * single(supers, lane),
            ScaleType::I8 if minimum == Minimum::Nibble => of_super(0) * f32::from(scales[index] & 15),
            ScaleType::I8 if minimum == Minimum::U8 => of_super(0) * f32::from(scales[index]),
            ScaleType::I8 => of_super(0) * f32::from(scales[index] as i8),
        };
        let minimum = match minimum {
            Minimum::None => 0.0,
            Minimum::F16 => half(zeros, index),
            Minimum::U8 => -(of_super(1) * f32::from(zeros[index])),
            Minimum::Nibble => -(of_super(1) * f32::from(scales[index] >> 4)),
        };
        // The encoders of `iec` write only zero points of at most 15; larger ones in other files are read as 15.
        let zero = if self.spec.symmetric { 0 } else { zeros[index].min(15) };
        Factors { scale: scale * self.spec.code_map().unit(), zero, minimum }
    }

    /// Refuses scales of two levels for files of canonical bytes, which have no place for the numbers of rows.
    ///
    /// # Errors
    /// Scales are multiplied by numbers that many groups share.
    pub fn refuse_two_levels(&self) -> Result<()> {
        match self.spec.has_two_levels() {
            false => Ok(()),
            true => Err(Error::unsupported("found scales of two levels, which files of `iec q4` have no place for")
                .help("quantize with f16 scales, or give the manifest to `iec pack --q4-map`")),
        }
    }

    /// Returns the number of canonical codes of a row: one per column, padded to whole blocks for block formats and
    /// trellises.
    pub fn canonical_codes(&self) -> usize {
        let info = self.spec.scheme.info();
        if info.is_block_format || info.order == CodeOrder::Streams { self.blocks * BLOCK } else { self.cols }
    }

    /// Returns the lengths in bytes of the canonical codes, scales and zero points (see [`crate::quant::block`]) of
    /// `rows` rows. Schemes without an encoder have no canonical bytes.
    pub fn canonical_sizes(&self, rows: usize) -> (usize, usize, usize) {
        let bits = self.spec.scheme.bits() as usize;
        let codes = self.canonical_codes();
        let per_row = match bits {
            8 => codes,
            2 | 3 => codes * bits / 8,
            _ => codes.div_ceil(2) + (codes * (bits - 4)).div_ceil(8),
        };
        let groups = match self.spec.granularity {
            Granularity::Tensor => 1,
            _ => rows * self.groups,
        };
        (rows * per_row, groups * self.spec.scale_dtype.size(), groups * self.zero_bytes)
    }
}

/// Numbers by which a group turns codes into weights: `number of the code, less the zero point, * scale + minimum`.
/// The product is exact where both have few bits, so a weight is rounded once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factors {
    /// Scale, times [`CodeMap::unit`](super::CodeMap::unit).
    pub scale: f32,
    /// Zero point of an affine group, otherwise 0.
    pub zero: u8,
    /// Minimum of the group, with its sign, otherwise 0.
    pub minimum: f32,
}

impl Factors {
    /// Returns the weight of this number of a code (zero point subtracted).
    #[inline]
    pub fn weight(&self, number: f32) -> f32 {
        let product = number * self.scale;
        // Adding zero would change the sign of zeros.
        if self.minimum == 0.0 { product } else { product + self.minimum }
    }
}

/// Returns 2^(s - 127), exactly.
pub fn e8m0(s: u8) -> f32 {
    if s == 0 { f32::from_bits(1 << 22) } else { f32::from_bits(u32::from(s) << 23) }
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
