//! Unpacks and packs the codes and scales of types with super-blocks of 256 elements, without decoding them.
//!
//! A [`Form`] lists where the bits of a code lie; [`Form::unpack`] and [`Form::pack`] are inverse to each other. The
//! scales and minimums of groups, which files store in 4 or 6 bits, take a byte each in [`CodedRow`]; those of Q2_K
//! share one byte in both.

use crate::quant::block::CodedRow;
use crate::scheme::{SUPER_BLOCK, TileLayout};
use std::ops::Range;

/// Bits of a code that lie together in a byte: those of element `i` are in byte `i / span * stride + i % stride` of the
/// field, beginning at bit `i % span / stride * bits`.
struct Field {
    /// Offset of the field in a super-block.
    offset: usize,
    /// Number of consecutive elements whose bits fill `stride` bytes.
    span: usize,
    /// Number of bytes that the bits of `span` elements take.
    stride: usize,
    /// Number of bits of each code.
    bits: usize,
    /// Place of the lowest of these bits in the code.
    first: usize,
}

impl Field {
    /// Calls `run` for each `stride` consecutive elements, with their first byte and the bit at which they begin.
    #[inline]
    fn runs(&self, mut run: impl FnMut(Range<usize>, Range<usize>, usize)) {
        for (number, element) in (0..SUPER_BLOCK).step_by(self.stride).enumerate() {
            let byte = self.offset + element / self.span * self.stride;
            let bit = number % (self.span / self.stride) * self.bits;
            run(element..element + self.stride, byte..byte + self.stride, bit);
        }
    }
}

/// Moves the bits of a field from place `from` of each byte to place `to` of another. This loops over indices, because
/// iterator adapters are not certain to be inlined, and then the loop is not vectorized.
#[inline]
fn add_bits(out: &mut [u8], bytes: &[u8], field: &Field, (from, to): (usize, usize)) {
    let mask = (1 << field.bits) - 1;
    let bytes = &bytes[..out.len()];
    for i in 0..out.len() {
        out[i] |= (bytes[i] >> from & mask) << to;
    }
}

/// Layout of a super-block (`ggml-common.h`).
pub(super) struct Form {
    /// Bytes of a super-block.
    bytes: usize,
    /// Offset of the fp16 numbers of the super-block.
    supers: usize,
    codes: &'static [Field],
    /// Offset of the packed scales and minimums of its groups.
    scales: usize,
    packing: ScalePacking,
}

/// Packing of the scales and minimums of the groups of a super-block.
enum ScalePacking {
    /// A byte per group as it is.
    Bytes,
    /// 16 scales of 6 bits, stored with 32 added (Q3_K).
    Sixteen,
    /// 8 scales and 8 minimums of 6 bits (Q4_K and Q5_K).
    EightAndMinimums,
    /// 8 scales of 6 bits, stored with 32 added: two bytes of upper bits, four of lower ones (IQ4_XS).
    Eight,
}

const fn field(offset: usize, span: usize, stride: usize, bits: usize, first: usize) -> Field {
    Field { offset, span, stride, bits, first }
}

/// Layout of Q2_K.
pub(super) const Q2_K: Form =
    Form { bytes: 84, supers: 80, codes: &[field(16, 128, 32, 2, 0)], scales: 0, packing: ScalePacking::Bytes };

/// Layout of Q3_K.
pub(super) const Q3_K: Form = Form {
    bytes: 110,
    supers: 108,
    codes: &[field(32, 128, 32, 2, 0), field(0, 256, 32, 1, 2)],
    scales: 96,
    packing: ScalePacking::Sixteen,
};

/// Layout of Q4_K.
pub(super) const Q4_K: Form = Form {
    bytes: 144,
    supers: 0,
    codes: &[field(16, 64, 32, 4, 0)],
    scales: 4,
    packing: ScalePacking::EightAndMinimums,
};

/// Layout of Q5_K.
pub(super) const Q5_K: Form = Form {
    bytes: 176,
    supers: 0,
    codes: &[field(48, 64, 32, 4, 0), field(16, 256, 32, 1, 4)],
    scales: 4,
    packing: ScalePacking::EightAndMinimums,
};

/// Layout of Q6_K.
pub(super) const Q6_K: Form = Form {
    bytes: 210,
    supers: 208,
    codes: &[field(0, 128, 64, 4, 0), field(128, 128, 32, 2, 4)],
    scales: 192,
    packing: ScalePacking::Bytes,
};

/// Layout of IQ4_XS.
pub(super) const IQ4_XS: Form =
    Form { bytes: 136, supers: 0, codes: &[field(8, 32, 16, 4, 0)], scales: 2, packing: ScalePacking::Eight };

impl Form {
    /// Unpacks a row of super-blocks.
    pub(super) fn unpack(&self, raw: &[u8], row: &mut CodedRow) {
        let blocks = raw.len() / self.bytes;
        let (groups, zeros) = (row.scales.len() / blocks, row.zeros.len() / blocks);
        let numbers = row.supers.len() / blocks;
        for (i, raw) in raw.chunks_exact(self.bytes).enumerate() {
            let codes = &mut row.codes[i * SUPER_BLOCK..][..SUPER_BLOCK];
            codes.fill(0);
            for field in self.codes {
                field.runs(|elements, bytes, bit| {
                    add_bits(&mut codes[elements], &raw[bytes], field, (bit, field.first))
                });
            }
            row.supers[i * numbers..][..numbers].copy_from_slice(&raw[self.supers..][..numbers]);
            let scales = &mut row.scales[i * groups..][..groups];
            self.packing.unpack(&raw[self.scales..], scales, &mut row.zeros[i * zeros..][..zeros]);
        }
    }

    /// Packs a row of super-blocks; the inverse of [`Form::unpack`].
    pub(super) fn pack(&self, layout: &TileLayout, row: &CodedRow, out: &mut [u8]) {
        out.fill(0);
        let (groups, zeros) = (layout.groups / layout.super_blocks, row.zeros.len() / layout.super_blocks);
        let numbers = row.supers.len() / layout.super_blocks;
        for (i, out) in out.chunks_exact_mut(self.bytes).enumerate() {
            let codes = &row.codes[i * SUPER_BLOCK..][..SUPER_BLOCK];
            for field in self.codes {
                field.runs(|elements, bytes, bit| {
                    add_bits(&mut out[bytes], &codes[elements], field, (field.first, bit))
                });
            }
            out[self.supers..][..numbers].copy_from_slice(&row.supers[i * numbers..][..numbers]);
            let scales = &row.scales[i * groups..][..groups];
            self.packing.pack(scales, &row.zeros[i * zeros..][..zeros], &mut out[self.scales..]);
        }
    }
}

impl ScalePacking {
    fn unpack(&self, packed: &[u8], scales: &mut [u8], minimums: &mut [u8]) {
        match self {
            ScalePacking::Bytes => scales.copy_from_slice(&packed[..scales.len()]),
            ScalePacking::Sixteen => scales.iter_mut().enumerate().for_each(|(s, scale)| {
                let low = packed[s % 8] >> (s / 8 * 4) & 15;
                *scale = (low | (packed[8 + s % 4] >> (s / 4 * 2) & 3) << 4).wrapping_sub(32);
            }),
            ScalePacking::Eight => scales.iter_mut().enumerate().for_each(|(s, scale)| {
                let low = packed[2 + s / 2] >> (s % 2 * 4) & 15;
                *scale = (low | (packed[s / 4] >> (s % 4 * 2) & 3) << 4).wrapping_sub(32);
            }),
            ScalePacking::EightAndMinimums => {
                for s in 0..4 {
                    (scales[s], minimums[s]) = (packed[s] & 63, packed[s + 4] & 63);
                    scales[s + 4] = packed[s + 8] & 15 | packed[s] >> 6 << 4;
                    minimums[s + 4] = packed[s + 8] >> 4 | packed[s + 4] >> 6 << 4;
                }
            }
        }
    }

    fn pack(&self, scales: &[u8], minimums: &[u8], packed: &mut [u8]) {
        match self {
            ScalePacking::Bytes => packed[..scales.len()].copy_from_slice(scales),
            ScalePacking::Sixteen => scales.iter().enumerate().for_each(|(s, scale)| {
                let code = scale.wrapping_add(32);
                packed[s % 8] |= (code & 15) << (s / 8 * 4);
                packed[8 + s % 4] |= code >> 4 << (s / 4 * 2);
            }),
            ScalePacking::Eight => scales.iter().enumerate().for_each(|(s, scale)| {
                let code = scale.wrapping_add(32);
                packed[2 + s / 2] |= (code & 15) << (s % 2 * 4);
                packed[s / 4] |= code >> 4 << (s % 4 * 2);
            }),
            ScalePacking::EightAndMinimums => {
                for s in 0..4 {
                    packed[s] = scales[s] | scales[s + 4] >> 4 << 6;
                    packed[s + 4] = minimums[s] | minimums[s + 4] >> 4 << 6;
                    packed[s + 8] = scales[s + 4] & 15 | minimums[s + 4] << 4;
                }
            }
        }
    }
}
