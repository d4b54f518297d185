//! Formats of a quantized row: canonical bytes for exchange, and tiles.
//!
//! [`CodedRow`] is one row with unpacked codes, one byte each, biased as in tiles (see [`crate::scheme`]).
//! [`pack_codes`] and [`unpack_codes`] convert between these and canonical bytes, in the [`CodeOrder`] of the scheme;
//! [`tile`] permutes between canonical bytes and tiles. All code that writes or reads quantized weights uses these
//! functions, so each scheme has a single definition:
//!
//! | scheme | canonical codes of a row | canonical scales |
//! |---|---|---|
//! | `q4_0` | per block of 32, 16 bytes: byte j = element j low, element j + 16 high, biased by 8 | fp16 per block |
//! | `nl4` | byte order of `q4_0`, each code an index into the table | fp16 per block |
//! | `int4` symmetric | byte j = column 2j low, 2j + 1 high, two's complement; odd width padded with 0 | per group |
//! | `int4` affine | byte order of symmetric `int4`, unsigned codes | per group, and a zero point byte per group |
//! | `mxfp4` | per block of 32, 16 bytes: byte j = column 2j low, 2j + 1 high, E2M1 bits | E8M0 byte per block |
//! | `int5`, `int6` | low bits as `int4` symmetric, then high bits: column k at bit k (int5) or 2k (int6) | per group |
//! | `int8` | one byte per column, two's complement | per group |
//! | `t2`, `t3` | per block of 32, the four streams, 2 or 3 bytes each | per group |
//!
//! Schemes that are only kept from GGUF files or published checkpoints have no canonical bytes.
//! Canonical scales and zero points are stored `[row][group]`; a tensor-wide scale is stored once.

pub mod columns;
pub mod iq4_nl;
pub mod mxfp4;
pub mod q4_0;
mod streams;
pub mod tile;

use crate::error::{Error, Result};
use crate::scheme::{BLOCK, CodeOrder, Factors, QuantSpec, ScaleType, TileLayout, Trellis};
use half::f16;

/// One quantized row with unpacked codes.
#[derive(Debug, Clone, PartialEq)]
pub struct CodedRow {
    /// One code per column, biased as in tiles, padded to whole blocks of 32. Codes of a trellis are indices, of which
    /// only the bits that they do not share are written.
    pub codes: Vec<u8>,
    /// One scale per group in its storage type, little-endian.
    pub scales: Vec<u8>,
    /// One zero point or minimum per group; empty for schemes without them.
    pub zeros: Vec<u8>,
    /// The numbers of each super-block: that for its scales, then that for its minimums if there are any.
    pub supers: Vec<u8>,
}

impl CodedRow {
    /// Creates a row whose weights are all zero.
    pub fn new(layout: &TileLayout) -> CodedRow {
        CodedRow {
            codes: vec![layout.spec.code_map().neutral(0); layout.blocks * BLOCK],
            scales: vec![0; layout.groups * layout.spec.scale_dtype.size()],
            zeros: vec![0; layout.groups * layout.zero_bytes],
            supers: vec![0; layout.super_numbers() * layout.spec.scale_dtype.super_size()],
        }
    }

    /// Reports whether runs of so many columns can be moved with their scales.
    pub fn has_movable_runs(layout: &TileLayout, width: usize) -> bool {
        layout.super_numbers() == 0 && width.is_multiple_of(layout.group_blocks * BLOCK)
    }

    /// Returns the row with runs of `width` columns in another order: run `i` is run `order[i]` of this row.
    ///
    /// # Panics
    /// The runs are not [movable](CodedRow::has_movable_runs).
    pub fn with_runs(&self, layout: &TileLayout, width: usize, order: &[usize]) -> CodedRow {
        assert!(CodedRow::has_movable_runs(layout, width), "runs of {width} columns cut groups");
        let moved = |from: &[u8]| -> Vec<u8> {
            // Codes, scales and zero points are divided among the runs alike.
            let run = from.len() / order.len();
            order.iter().flat_map(|number| &from[number * run..][..run]).copied().collect()
        };
        let CodedRow { codes, scales, zeros, supers } = self;
        CodedRow { codes: moved(codes), scales: moved(scales), zeros: moved(zeros), supers: supers.clone() }
    }

    /// Returns the numbers by which a group turns codes into weights.
    fn factors(&self, layout: &TileLayout, group: usize) -> Factors {
        layout.factors_of((&self.scales, &self.zeros, &self.supers), (1, 0), group)
    }

    /// Returns the codes of group `group`, padding included.
    pub(crate) fn group_codes(&mut self, layout: &TileLayout, group: usize) -> &mut [u8] {
        let width = layout.group_blocks * BLOCK;
        let end = ((group + 1) * width).min(self.codes.len());
        &mut self.codes[group * width..end]
    }

    /// Stores the scale of a group, which must be exactly representable in the storage type.
    pub(crate) fn set_scale(&mut self, spec: &QuantSpec, group: usize, scale: f32) {
        match spec.scale_dtype {
            ScaleType::F16 => self.scales[2 * group..][..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes()),
            ScaleType::F32 => self.scales[4 * group..][..4].copy_from_slice(&scale.to_le_bytes()),
            ScaleType::E8m0 => self.scales[group] = (scale.to_bits() >> 23) as u8,
            ScaleType::I8Row => {
                let step = f32::from_le_bytes(self.supers[..4].try_into().expect("the number of the row"));
                self.scales[group] = (scale / step).round() as i8 as u8;
            }
            ScaleType::I8 | ScaleType::E4m3 => unreachable!("no encoder chooses these scales"),
        }
    }

    /// Stores the scale and the zero point of a group; see [`CodedRow::set_scale`].
    pub(crate) fn set_choice(&mut self, spec: &QuantSpec, group: usize, scale: f32, zero: u8) {
        self.set_scale(spec, group, scale);
        if let Some(stored) = self.zeros.get_mut(group) {
            *stored = zero;
        }
    }

    /// Returns the largest magnitude among the scales.
    pub(crate) fn largest_scale(&self, layout: &TileLayout) -> f32 {
        (0..layout.groups).fold(0.0, |m, group| m.max(self.factors(layout, group).scale.abs()))
    }

    /// Dequantizes the row; `out` holds `layout.cols` elements.
    pub fn dequantize(&self, layout: &TileLayout, out: &mut [f32]) {
        let width = BLOCK / layout.block_groups;
        for (part, values) in out.chunks_mut(width).enumerate() {
            let group = layout.group_of(part / layout.block_groups, part % layout.block_groups);
            decode(&layout.spec, &self.codes[part * width..][..width], self.factors(layout, group), values);
        }
    }
}

/// Writes the values of the first `out.len()` codes of a group.
pub(crate) fn decode(spec: &QuantSpec, codes: &[u8], factors: Factors, out: &mut [f32]) {
    let map = spec.code_map();
    let codes = &codes[..out.len()];
    for i in 0..out.len() {
        out[i] = factors.weight(map.number(codes[i], factors.zero));
    }
}

/// Packs the codes of one row into canonical bytes; `out` has the length that [`TileLayout::canonical_sizes`] returns
/// for one row.
pub fn pack_codes(layout: &TileLayout, row: &CodedRow, out: &mut [u8]) {
    let (info, codes) = (layout.spec.scheme.info(), &row.codes[..layout.canonical_codes()]);
    match info.order {
        CodeOrder::Halves => q4_0::pack(codes, out),
        CodeOrder::Columns => columns::pack(info.bits, layout.spec.bias().unwrap_or(0), codes, out),
        CodeOrder::Streams => streams::pack(trellis_of(layout), codes, out),
    }
}

/// Unpacks the canonical codes of one row; scales and zero points of `row` must be set already.
pub fn unpack_codes(layout: &TileLayout, packed: &[u8], row: &mut CodedRow) {
    let (info, codes) = (layout.spec.scheme.info(), &mut row.codes[..layout.canonical_codes()]);
    match info.order {
        CodeOrder::Halves => q4_0::unpack(packed, codes),
        CodeOrder::Columns => columns::unpack(info.bits, layout.spec.bias().unwrap_or(0), packed, codes),
        CodeOrder::Streams => streams::unpack(trellis_of(layout), packed, codes),
    }
    // Indices of a trellis share bits with those of padding columns.
    if info.order != CodeOrder::Streams {
        let last_zero = row.zeros.last().copied().unwrap_or(0);
        row.codes[layout.cols..].fill(layout.spec.code_map().neutral(last_zero));
    }
}

fn trellis_of(layout: &TileLayout) -> &'static Trellis {
    layout.spec.trellis().expect("streams belong to a trellis")
}

/// Rounds a scale to its storage type.
///
/// # Errors
/// The scale overflows fp16. A scale below the range of fp16 is no error: it becomes zero or subnormal. Weights that
/// small (below 8 * 2^-25 for 4 bits) are negligible next to any others, and the metrics include the loss.
pub fn stored_scale(dtype: ScaleType, scale: f32) -> Result<f32> {
    let stored = match dtype {
        ScaleType::F16 => f16::from_f32(scale).to_f32(),
        ScaleType::F32 | ScaleType::E8m0 | ScaleType::I8 | ScaleType::E4m3 | ScaleType::I8Row => scale,
    };
    if stored.is_finite() {
        return Ok(stored);
    }
    Err(Error::unsupported(format!("found a scale of {scale:e}, expected at most 65504 for fp16")).help(
        "give this tensor the scheme int4 or int8 with \"scale_dtype\": \"f32\" in the manifest, or leave it \
             unquantized with `iec ptq --exclude`",
    ))
}

#[cfg(test)]
mod tests;
