//! Reference kernels in plain Rust, which define what every product means and in which order it is summed.
//!
//! * Row-major float weights: lane `l` of 16 sums k = l, l+16, … with `mul_add`; then the upper half of the lanes is
//!   added to the lower half, for 8, 4, 2 and 1 lanes.
//! * BF16 weights, BF16 activations: both are padded with zeros to whole blocks of 32; lane `l` of 16 sums k = 2l+1,
//!   then k = 2l of each block, with `mul_add`; lanes are folded like those of row-major float weights.
//! * Tiles, float activations: inside a block of 32, chain `i` of 4 sums k = 4i..4i+4, then k = 16+4i..16+4i+4, with
//!   `mul_add` on the number of each code; block = ((c0 + c1) + c2) + c3; row = mul_add(block, scale, row), blocks in K
//!   order. Where each half of a block has a scale, this is done for each half. With minimums follows
//!   row = mul_add(sum of the activations in the same order, minimum, row).
//! * Tiles, 16-bit and int8 activations: a group of 128 activations shares a scale. A run consists of the blocks inside
//!   a group that also share a weight scale, and has an exact integer sum; group = mul_add(sum, weight scale, group),
//!   runs in K order from zero; row = mul_add(group, activation scale, row), groups in K order. With minimums,
//!   group = mul_add(sum of the activation codes, minimum, group) follows each run.

use super::acts::{Acts, GROUP, GROUP_BLOCKS, Q8Group, Q16Group};
use super::kernels::{Kernel, KernelTable, Rectangle};
use super::matrix::{Form, MatrixStore};
use super::sink::Sink;
use super::weighted_sum;
use crate::dtype::DType;
use crate::scheme::{BLOCK, CodeMap, Factors, Minimum, TILE_ROWS, TileLayout};
use crate::simd::Level;
use half::{bf16, f16};

/// Kernel table that every CPU can run.
pub(super) const TABLE: KernelTable = KernelTable {
    name: "scalar",
    detected: || true,
    level: Level::BASELINE,
    plain,
    plain_bf16,
    bf16_wants_magnitudes: false,
    tile_float: Kernel { items: 1, alone: 1, cols: 1, run: |part, out| tile(part, out, Form::F32), panel: None },
    tile_int16: Kernel { items: 1, alone: 1, cols: 1, run: |part, out| tile(part, out, Form::Int16), panel: None },
    tile_int8: Kernel { items: 1, alone: 1, cols: 1, run: |part, out| tile(part, out, Form::Int8), panel: None },
    sum_f32: weighted_sum::scalar::<{ weighted_sum::F32 }>,
    sum_f16: weighted_sum::scalar::<{ weighted_sum::F16 }>,
    sum_bf16: weighted_sum::scalar::<{ weighted_sum::BF16 }>,
    probabilities: None,
    wide_probabilities: None,
    nibbles: None,
    pairs: None,
    quantize,
};

/// Computes rows of a plain matrix times f32 activations.
fn plain(part: &Rectangle<'_>, sink: &Sink<'_>) {
    let MatrixStore::Plain(dtype) = part.matrix.store else { unreachable!("tiles have their own kernels") };
    let cols = part.matrix.cols;
    each(part, sink, |row, col| {
        let x = &part.x.row(col)[..cols];
        let w = &part.matrix.data[row * cols * dtype.size()..][..cols * dtype.size()];
        match dtype {
            DType::F32 => dot(x, |k| f32::from_le_bytes(w[4 * k..][..4].try_into().expect("4 bytes"))),
            DType::F16 => dot(x, |k| f16::from_le_bytes([w[2 * k], w[2 * k + 1]]).to_f32()),
            _ => dot(x, |k| bf16::from_le_bytes([w[2 * k], w[2 * k + 1]]).to_f32()),
        }
    });
}

/// Computes rows of a BF16 matrix times BF16 activations.
fn plain_bf16(part: &Rectangle<'_>, sink: &Sink<'_>) {
    let cols = part.matrix.cols;
    each(part, sink, |row, col| {
        let w = part.matrix.data[2 * row * cols..][..2 * cols].as_chunks::<2>().0;
        dot_bf16(part.x.row_bf16(col), |k| w.get(k).map_or(0, |bits| u16::from_le_bytes(*bits)))
    });
}

#[allow(unsafe_code)]
/// Writes `result(row, col)` to the sink for all rows and columns of the part.
fn each(part: &Rectangle<'_>, sink: &Sink<'_>, result: impl Fn(usize, usize) -> f32) {
    for row in part.item..part.item + part.items {
        for col in part.col..part.col + part.cols {
            // SAFETY: the caller of the kernel guarantees that the part lies inside the outputs and that no other
            // thread writes it.
            unsafe { sink.put(col, row, &[result(row, col)]) };
        }
    }
}

/// Computes one tile times one token.
fn tile(part: &Rectangle<'_>, out: &mut [f32], form: Form) {
    let MatrixStore::Tiled(layout) = part.matrix.store else { unreachable!("plain rows have their own kernel") };
    let tile = &part.matrix.data[part.item * layout.tile_bytes..][..layout.tile_bytes];
    out.copy_from_slice(&tile_dot(&layout, tile, part.x, part.col, form));
}

fn quantize(values: &[[f32; GROUP]], groups: &mut [Q8Group]) {
    for (values, group) in values.iter().zip(groups) {
        *group = quantize_group(values);
    }
}

/// Returns the dot product of `x` with `weight(k)`, summed in the order of 16 lanes.
pub fn dot(x: &[f32], weight: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0f32; 16];
    for (k, x) in x.iter().enumerate() {
        lanes[k % 16] = weight(k).mul_add(*x, lanes[k % 16]);
    }
    fold(lanes)
}

/// Returns the dot product of whole blocks of bf16 activations with `weight(k)`, both given as bits, summed in the
/// order of pairs.
pub fn dot_bf16(x: &[u16], weight: impl Fn(usize) -> u16) -> f32 {
    let float = |bits| bf16::from_bits(bits).to_f32();
    let mut lanes = [0f32; 16];
    for from in (0..x.len()).step_by(BLOCK) {
        for (l, lane) in lanes.iter_mut().enumerate() {
            for k in [from + 2 * l + 1, from + 2 * l] {
                *lane = float(weight(k)).mul_add(float(x[k]), *lane);
            }
        }
    }
    fold(lanes)
}

/// Returns the bits of the nearest bf16, ties to even.
#[inline(always)]
pub fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let nearest = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    (if value.is_nan() { quiet } else { nearest }) as u16
}

/// Adds up 16 lanes: the upper half is added to the lower half, for 8, 4, 2, then 1 lane.
pub fn fold(mut lanes: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

/// Returns the 16 dot products of a tile with one token.
pub fn tile_dot(layout: &TileLayout, tile: &[u8], x: &Acts, token: usize, form: Form) -> [f32; TILE_ROWS] {
    let mut sums = [0f32; TILE_ROWS];
    for (row, sum) in sums.iter_mut().enumerate() {
        match form {
            Form::Int8 => {
                for (group, x) in x.row_q8(token).iter().enumerate() {
                    let codes = x.codes.map(i32::from);
                    *sum = group_dot(layout, tile, row, group, &codes).mul_add(x.scale, *sum);
                }
            }
            Form::Int16 => {
                for (group, x) in x.row_q16(token).iter().enumerate() {
                    let mut codes = [0; GROUP];
                    (0..GROUP).for_each(|p| codes[Q16Group::place(p)] = i32::from(x.codes[p]));
                    *sum = group_dot(layout, tile, row, group, &codes).mul_add(x.scale, *sum);
                }
            }
            Form::F32 | Form::Bf16 => {
                for (block, x) in x.row(token).as_chunks().0.iter().enumerate().take(layout.blocks) {
                    let (codes, factors) = tile_block(layout, tile, row, block);
                    for (half, factors) in factors.iter().enumerate().take(layout.block_groups) {
                        *sum = block_dot(layout, half, |k| codes[k], x).mul_add(factors.scale, *sum);
                        if layout.spec.minimum() != Minimum::None {
                            *sum = block_dot(layout, half, |_| 1.0, x).mul_add(factors.minimum, *sum);
                        }
                    }
                }
            }
        }
    }
    sums
}

/// Returns the sum of products of a row of weights with the codes of a group of activations, scaled by the weight
/// scales but not by the activation scale.
fn group_dot(layout: &TileLayout, tile: &[u8], row: usize, group: usize, x: &[i32; GROUP]) -> f32 {
    let blocks = group * GROUP_BLOCKS..((group + 1) * GROUP_BLOCKS).min(layout.blocks);
    let (mut total, mut sum, width) = (0f32, 0, BLOCK / layout.block_groups);
    for (block, x) in blocks.clone().zip(x.as_chunks::<BLOCK>().0) {
        let (codes, factors) = tile_block(layout, tile, row, block);
        let ends = block + 1 == blocks.end || (block + 1) % layout.group_blocks == 0;
        for ((codes, x), factors) in codes.chunks(width).zip(x.chunks(width)).zip(factors) {
            sum += codes.iter().zip(x).map(|(w, a)| *w as i32 * a).sum::<i32>();
            if ends {
                total = (sum as f32).mul_add(factors.scale, total);
                sum = 0;
            }
            if layout.spec.minimum() != Minimum::None {
                total = (x.iter().sum::<i32>() as f32).mul_add(factors.minimum, total);
            }
        }
    }
    total
}

/// Returns the dot product of a block of activations with `weight(k)`; if a block has two groups, only with those of
/// group `half`.
fn block_dot(layout: &TileLayout, half: usize, weight: impl Fn(usize) -> f32, x: &[f32; BLOCK]) -> f32 {
    let halves = if layout.block_groups == 1 { 0..2 } else { half..half + 1 };
    let mut chains = [0f32; 4];
    for (i, chain) in chains.iter_mut().enumerate() {
        for k in halves.clone().flat_map(|half| 16 * half + 4 * i..16 * half + 4 * i + 4) {
            *chain = weight(k).mul_add(x[k], *chain);
        }
    }
    ((chains[0] + chains[1]) + chains[2]) + chains[3]
}

/// Returns the numbers of the codes of a block of a row (zero point subtracted), and the factors that make them
/// weights: those of the group of the block, or of its two groups.
pub fn tile_block(layout: &TileLayout, tile: &[u8], row: usize, block: usize) -> ([f32; BLOCK], [Factors; 2]) {
    let factors = [0, layout.block_groups - 1].map(|half| layout.factors(tile, row, layout.group_of(block, half)));
    let (map, bits) = (layout.spec.code_map(), layout.spec.scheme.bits());
    let codes = &tile[layout.codes_offset + block * layout.block_bytes..][..layout.block_bytes];
    let mut values = [0.0; BLOCK];
    for (k, value) in values.iter_mut().enumerate() {
        let code = match bits {
            _ if let CodeMap::Trellis(trellis) = map => {
                let byte = |vector: usize| u32::from(codes[64 * vector + 4 * row + k % 4]) << (8 * vector);
                trellis.index((0..bits as usize).map(byte).sum(), k / 4)
            }
            8 => codes[64 * (k / 4) + 4 * row + k % 4],
            2 => field(codes, 2, row, k),
            3 => field(codes, 2, row, k) | field(&codes[128..], 1, row, k) << 2,
            _ => {
                let byte = codes[64 * (k % 16 / 4) + 4 * row + k % 4];
                let nibble = if k < 16 { byte & 15 } else { byte >> 4 };
                let high = if bits == 4 { 0 } else { field(&codes[256..], bits as usize - 4, row, k) };
                nibble | high << 4
            }
        };
        *value = map.number(code, factors[0].zero);
    }
    (values, factors)
}

/// Returns the part of code `k` that is stored in vectors with `each` bits of each code.
fn field(vectors: &[u8], each: usize, row: usize, k: usize) -> u8 {
    let at = k / 4 * each;
    vectors[at / 8 * 64 + 4 * row + k % 4] >> (at % 8) & ((1 << each) - 1)
}

/// Rounds a group of activations to 16-bit integers: the largest magnitude becomes 32767, halves are rounded to even,
/// NaN becomes 0.
#[inline(always)]
pub fn quantize_group_wide(values: &[f32; GROUP]) -> Q16Group {
    // Magnitudes have the same order as their bits, so their maximum is found with vectorized integer operations. The
    // codes are vectorized, too: adding 1.5 * 2^23 leaves no bits for a fraction, and the low bits of the sum are the
    // integer.
    let mut largest = [0u32; 16];
    for values in values.as_chunks::<16>().0 {
        for i in 0..16 {
            let bits = values[i].to_bits() & 0x7FFF_FFFF;
            largest[i] = largest[i].max(if bits > 0x7F80_0000 { 0 } else { bits });
        }
    }
    let mut most = 0;
    for bits in largest {
        most = most.max(bits);
    }
    let scale = f32::from_bits(most) / 32767.0;
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    let mut codes = [0; GROUP];
    for i in 0..GROUP {
        let scaled = values[i] * inverse;
        let scaled = if scaled.is_nan() { 0.0 } else { scaled.clamp(-32767.0, 32767.0) };
        codes[i] = (scaled + 12_582_912.0).to_bits() as i16;
    }
    let mut half_sums = [[0; 2]; GROUP_BLOCKS];
    for (half, codes) in codes.as_chunks::<16>().0.iter().enumerate() {
        for code in codes {
            half_sums[half / 2][half % 2] += i32::from(*code);
        }
    }
    Q16Group { codes: Q16Group::in_place(codes), scale, half_sums }
}

/// Rounds a group of activations to int8: the largest magnitude becomes 127, halves are rounded away from zero, NaN
/// becomes 0.
pub fn quantize_group(values: &[f32; GROUP]) -> Q8Group {
    let absmax = values.iter().fold(0f32, |m, v| m.max(v.abs()));
    let scale = absmax / 127.0;
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    let codes = values.map(|value| (value * inverse).round().clamp(-127.0, 127.0) as i8);
    let mut pair_starts = [[0; 2]; GROUP_BLOCKS];
    for (starts, block) in pair_starts.iter_mut().zip(codes.as_chunks::<BLOCK>().0) {
        for (i, code) in block.iter().enumerate() {
            starts[i / 2 % 2] -= 8 * i16::from(*code);
        }
    }
    let mut half_starts = [0; GROUP_BLOCKS];
    for (half, codes) in codes.as_chunks::<16>().0.iter().enumerate() {
        if half % 2 == 0 {
            half_starts[half / 2] = codes.iter().map(|code| -8 * i16::from(*code)).sum();
        }
    }
    let starts = pair_starts.map(|[first, last]| i32::from(first) + i32::from(last));
    let wide_starts = starts.map(|start| 16 * start);
    Q8Group { codes, starts, wide_starts, start: starts.iter().sum(), scale, pair_starts, half_starts }
}
