//! Decides whether a pack can hold the codes of a coded matrix bit for bit, and reads them as rows of tiles.
//!
//! | codes | scheme of the pack |
//! |---|---|
//! | integers of up to 4 bits without zero points | `int4` |
//! | integers of up to 4 bits with zero points 0 to 15 | `int4` affine |
//! | integers of 5, 6 or up to 8 bits without zero points | `int5`, `int6`, `int8` |
//! | FP4 with a power of two for each 32 columns | `mxfp4` |
//! | FP4 with an FP8 scale for each 16 columns and a float | `nvfp4` |
//! | FP8 (e4m3) | `fp8` |
//!
//! Groups of integers and of FP8 must be 32, 64, 128 or 256 columns, or whole rows; those of FP8 may have several rows.
//! Everything else becomes floats. Scales of fp16 stay so; others become f32, because a bfloat16 scale need not fit
//! fp16. Powers of two of FP8 keep their exponent bytes. Where the float of NVFP4 divides, tiles hold its reciprocal, so
//! weights may differ in the last bit.

use super::coded::{Coded, Grid, Meaning, ScaleValues, Zeros};
use super::decode::RowsToDecode;
use crate::convert::source::shards::Shards;
use crate::dtype::DType;
use crate::error::Result;
use crate::quant::block::CodedRow;
use crate::scheme::{CodeMap, Granularity, QuantSpec, ScaleType, Scheme, TileLayout};
use std::ops::Range;

/// Scheme that holds the codes of a matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Native {
    /// Scheme, group size, zero points and type of scales.
    pub spec: QuantSpec,
    /// Number that is added to the codes and zero points of the source, so that both begin with 0.
    shift: i32,
}

impl Native {
    /// Returns the form of codes that the source stores in this scheme.
    pub(in crate::convert) fn of_scheme(spec: QuantSpec) -> Native {
        Native { spec, shift: 0 }
    }
}

/// Scheme that holds the codes of a matrix, or the reason why there is none.
pub type Kept = std::result::Result<Native, &'static str>;

/// Rows whose zero points are examined at once.
const PIECE_ROWS: usize = 1024;

impl Coded {
    /// Decides whether a pack can hold the codes. Reads the zero points, about 0.5 % of the matrix, if they decide.
    ///
    /// # Errors
    /// Zero points or indices of groups are damaged, or reading fails.
    pub fn native(&self, shards: &Shards) -> Result<Kept> {
        let (_, cols) = self.matrix();
        let is_fp8 = self.codes.meaning == Meaning::E4m3;
        let granularity = match (self.group_width(), self.scales.grid) {
            (Some(width), Grid::Blocks { height: 1, .. } | Grid::Transposed { .. }) if width >= cols => {
                Granularity::Row
            }
            // Blocks that are as wide as the matrix have one scale for several rows, which tiles store for each row.
            (Some(width), Grid::Blocks { .. }) if width >= cols => Granularity::Row,
            (Some(width @ (32 | 64 | 128 | 256)), Grid::Blocks { height: 1, .. } | Grid::Transposed { .. }) => {
                Granularity::Group(width as u32)
            }
            (Some(width @ (32 | 64 | 128 | 256)), Grid::Blocks { .. }) if is_fp8 => Granularity::Group(width as u32),
            _ if self.is_nvfp4() => return Ok(Ok(Native { spec: QuantSpec::usual(Scheme::Nvfp4), shift: 0 })),
            _ => return Ok(Err("no scheme of packs has such groups")),
        };
        if self.is_mxfp4() {
            return Ok(Ok(Native { spec: QuantSpec::MXFP4, shift: 0 }));
        }
        let is_signed = match self.codes.meaning {
            Meaning::Unsigned => false,
            Meaning::Signed => true,
            Meaning::E4m3 => {
                let spec =
                    QuantSpec { scheme: Scheme::Fp8, granularity, symmetric: true, scale_dtype: self.scale_type() };
                return Ok(Ok(Native { spec, shift: 0 }));
            }
            Meaning::E2m1 => return Ok(Err("no scheme of packs has FP4 in such groups")),
            Meaning::Table(_) => return Ok(Err("packs have no scheme for tables of a file")),
        };
        let bits = self.codes.bits;
        let (least, most) = match self.zero_range(shards)? {
            Some(range) => range,
            None => return Ok(Err("offsets that are floats fit no scheme of packs")),
        };
        if !self.is_in_order(shards)? {
            return Ok(Err("the columns of a group are not consecutive (act-order)"));
        }
        let shift = if is_signed { 1 << (bits - 1) } else { 0 };
        let scheme = match bits {
            0..=4 => Scheme::Int4,
            5 => Scheme::Int5,
            6 => Scheme::Int6,
            _ => Scheme::Int8,
        };
        let is_centered = least == most && least + shift == 1 << (bits - 1);
        let symmetric = is_centered || bits == 8 && least == most && least == if is_signed { 0 } else { 128 };
        let spec = QuantSpec { scheme, granularity, symmetric, scale_dtype: self.scale_type() };
        match symmetric || scheme == Scheme::Int4 && least + shift >= 0 && most + shift <= 15 {
            true => Ok(Ok(Native { spec, shift })),
            false if scheme == Scheme::Int4 => Ok(Err("zero point 16 fits no scheme of packs")),
            false => Ok(Err("packs have zero points for 4-bit codes only")),
        }
    }

    /// Returns the type in which tiles store the scales of integers and of FP8.
    fn scale_type(&self) -> ScaleType {
        let is_fp8 = self.codes.meaning == Meaning::E4m3;
        match &self.scales.values {
            _ if self.scales.factor != 1.0 => ScaleType::F32,
            ScaleValues::Floats(tensor) if tensor.dtype == DType::F16 => ScaleType::F16,
            ScaleValues::E8m0(_) if is_fp8 => ScaleType::E8m0,
            _ => ScaleType::F32,
        }
    }

    /// Returns the least and the largest zero point; `None` if offsets are floats.
    fn zero_range(&self, shards: &Shards) -> Result<Option<(i32, i32)>> {
        match self.zeros {
            Zeros::Constant(zero) => return Ok(Some((zero, zero))),
            Zeros::Offsets(_) => return Ok(None),
            Zeros::Packed { .. } | Zeros::Bytes { .. } => {}
        }
        let (n_rows, _) = self.matrix();
        let matrices = self.shape.iter().product::<usize>() / self.matrix().0.max(1) / self.matrix().1.max(1);
        let (mut least, mut most) = (i32::MAX, i32::MIN);
        for matrix in 0..matrices {
            for start in (0..n_rows).step_by(PIECE_ROWS) {
                let range = start..n_rows.min(start + PIECE_ROWS);
                for zero in (RowsToDecode { coded: self, shards, matrix, range }).zeros()? {
                    (least, most) = (least.min(zero), most.max(zero));
                }
            }
        }
        Ok(Some((least, most)))
    }

    /// Returns true if each group has consecutive columns.
    fn is_in_order(&self, shards: &Shards) -> Result<bool> {
        let index = RowsToDecode { coded: self, shards, matrix: 0, range: 0..0 }.index()?;
        let width = self.group_width().unwrap_or(1);
        Ok(index.is_none_or(|index| index.iter().enumerate().all(|(col, group)| col / width == *group)))
    }

    /// Reads rows of matrix number `matrix` as rows of tiles, and calls `put` with the number of each within `range`.
    ///
    /// # Errors
    /// Codes, scales or zero points do not fit the scheme, or reading fails.
    pub fn read_codes(
        &self,
        native: &Native,
        shards: &Shards,
        (matrix, range): (usize, Range<usize>),
        mut put: impl FnMut(usize, &CodedRow),
    ) -> Result<()> {
        let (_, cols) = self.matrix();
        let rows = RowsToDecode { coded: self, shards, matrix, range };
        let layout = TileLayout::new(native.spec, rows.range.len().max(1), cols)?;
        if native.spec.scale_dtype == ScaleType::E4m3 {
            return rows.nvfp4_rows(&layout, put);
        }
        let (codes, scales, zeros) = (rows.codes()?, rows.scales()?, rows.zeros()?);
        rows.refuse_nan_codes(&codes)?;
        rows.refuse_zero_scales(&codes, &scales, &zeros, rows.index()?.as_deref())?;
        let groups = rows.groups();
        let mut coded = CodedRow::new(&layout);
        for number in 0..rows.range.len() {
            let zeros = &zeros[number * groups..][..groups];
            for group in 0..layout.groups {
                let scale = scales[number * groups + group] * self.scales.factor;
                let zero = if native.spec.symmetric { 0 } else { zeros[group] + native.shift };
                coded.set_choice(&native.spec, group, scale, zero as u8);
            }
            native.put_codes(&codes[number * cols..][..cols], zeros[0], &mut coded.codes[..cols]);
            let last = coded.zeros.last().copied().unwrap_or(0);
            coded.codes[cols..].fill(native.spec.code_map().neutral(last));
            put(number, &coded);
        }
        Ok(())
    }
}

impl RowsToDecode<'_> {
    /// Calls `put` with each row of an NVFP4 matrix.
    fn nvfp4_rows(&self, layout: &TileLayout, mut put: impl FnMut(usize, &CodedRow)) -> Result<()> {
        // The products of scales are read, too, because they must be finite, and zero only where codes are.
        let (codes, scales, products) = (self.codes()?, self.scale_codes()?, self.scales()?);
        self.refuse_zero_scales(&codes, &products, &[], None)?;
        let (groups, mut coded) = (self.groups(), CodedRow::new(layout));
        coded.supers.copy_from_slice(&self.tensor_scale()?.to_le_bytes());
        for (number, (codes, scales)) in codes.chunks_exact(layout.cols).zip(scales.chunks_exact(groups)).enumerate() {
            coded.scales[..groups].copy_from_slice(scales);
            coded.codes[..layout.cols].copy_from_slice(codes);
            put(number, &coded);
        }
        Ok(())
    }
}

impl Native {
    /// Returns the scheme that holds both these codes and `other` ones; `None` if there is none.
    pub fn merged(&self, other: &Native) -> Option<Native> {
        let wide = |a: ScaleType, b: ScaleType| if a == b { a } else { ScaleType::F32 };
        let spec = QuantSpec {
            symmetric: self.spec.symmetric && other.spec.symmetric,
            scale_dtype: wide(self.spec.scale_dtype, other.spec.scale_dtype),
            ..self.spec
        };
        let same = QuantSpec { symmetric: spec.symmetric, scale_dtype: spec.scale_dtype, ..other.spec } == spec;
        (same && self.shift == other.shift).then_some(Native { spec, ..*self })
    }

    /// Writes codes of the source as codes of tiles. `zero` is the zero point of all groups of a symmetric matrix.
    fn put_codes(&self, codes: &[u8], zero: i32, out: &mut [u8]) {
        let map = self.spec.code_map();
        // Codes of fewer bits than the scheme has lie in the middle of its range.
        let add = match map {
            CodeMap::Table(_) | CodeMap::Trellis(_) | CodeMap::Unsigned | CodeMap::E4m3 => 0,
            CodeMap::Affine => self.shift,
            CodeMap::Biased(bias) => i32::from(bias) - zero,
            CodeMap::Bytes => -zero,
        } as u8;
        // Arithmetic of bytes wraps to the same result, whether codes are signed or not.
        let mask = ((1u16 << self.spec.scheme.bits()) - 1) as u8;
        codes.iter().zip(out).for_each(|(code, out)| *out = code.wrapping_add(add) & mask);
    }
}
