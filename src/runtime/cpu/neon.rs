//! NEON: a tile is four quarters of 4 rows; only instructions that every aarch64 processor has.
#![allow(unsafe_code, clippy::needless_range_loop)]

use super::acts::{GROUP, GROUP_BLOCKS, Q8Group, Q16Group};
use super::kernels::{Kernel, KernelTable, Part, Tiles, kind, with_size};
use super::mix::Mix;
use super::plain::{Product, STRIPE, Sums, run};
use super::region::Sink;
use super::{MatrixStore, scalar};
use crate::dtype::DType;
use crate::scheme::{BLOCK, ScaleType, TILE_ROWS, TileLayout};
use crate::simd::Level;
use std::arch::aarch64::*;
use std::ops::Range;

pub(super) const TABLE: KernelTable = KernelTable {
    name: "neon",
    detected: || std::arch::is_aarch64_feature_detected!("neon"),
    level: Level::BASELINE,
    plain,
    plain_bf16,
    tile_float: Kernel { items: 1, alone: 1, cols: 4, run: tile_float, panel: None },
    tile_int16: Kernel { items: 1, alone: 1, cols: 4, run: tile_int16, panel: None },
    mix_f32: mix::<F32>,
    mix_f16: mix::<F16>,
    mix_bf16: mix::<BF16>,
    tile_int8: Kernel { items: 1, alone: 1, cols: 4, run: tile_int8, panel: None },
    ..scalar::TABLE
};

/// Rows in a register.
const QUARTER: usize = 4;

/// A quarter of vector `i` of a block of codes: four codes (or bytes of nibbles) of each of 4 rows.
///
/// # Safety
/// `tile` points to a tile of the layout that has the block.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn load<const KIND: u8>(
    layout: &TileLayout,
    tile: *const u8,
    quarter: usize,
    block: usize,
    i: usize,
) -> uint8x16_t {
    let at = layout.codes_offset + 64 * (block * kind::vectors(KIND) + i) + 16 * quarter;
    // SAFETY: the caller's promise; the load has no alignment demand.
    unsafe { vld1q_u8(tile.add(at)) }
}

/// Four halves, given as the low bits of each lane, as floats.
#[inline]
#[target_feature(enable = "neon")]
fn halves(bits: uint32x4_t) -> float32x4_t {
    let magnitude = vshlq_n_u32::<13>(vandq_u32(bits, vdupq_n_u32(0x7FFF)));
    let sign = vshlq_n_u32::<16>(vandq_u32(bits, vdupq_n_u32(0x8000)));
    // 2^112 moves the exponent from the bias of a half to that of a float; denormals become normal on the way.
    let finite = vmulq_f32(vreinterpretq_f32_u32(magnitude), vdupq_n_f32(f32::from_bits(239 << 23)));
    let special = vorrq_u32(magnitude, vdupq_n_u32(0x7F80_0000));
    let is_special = vcgeq_u32(magnitude, vdupq_n_u32(0x0F80_0000));
    vreinterpretq_f32_u32(vorrq_u32(vbslq_u32(is_special, special, vreinterpretq_u32_f32(finite)), sign))
}

/// The scales of 4 rows; halved for MXFP4, whose codes are doubled.
///
/// # Safety
/// `tile` points to a tile of the layout that has the group.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn scales(layout: &TileLayout, tile: *const u8, quarter: usize, group: usize) -> float32x4_t {
    let first = group * TILE_ROWS + QUARTER * quarter;
    // SAFETY: the caller's promise: 4 scales of the type are readable. The loads have no alignment demand.
    unsafe {
        match layout.spec.scale_dtype {
            ScaleType::F16 => halves(vmovl_u16(vld1_u16(tile.add(2 * first).cast()))),
            ScaleType::F32 => vld1q_f32(tile.add(4 * first).cast()),
            ScaleType::E8m0 => half_of_e8m0(bytes_of_rows(tile.add(first))),
        }
    }
}

#[inline]
#[target_feature(enable = "neon")]
fn half_of_e8m0(exponents: uint32x4_t) -> float32x4_t {
    // 2^-127 is not normal.
    let zero = vceqzq_u32(exponents);
    let bits = vbslq_u32(zero, vdupq_n_u32(1 << 22), vshlq_n_u32::<23>(exponents));
    vmulq_f32(vreinterpretq_f32_u32(bits), vdupq_n_f32(0.5))
}

/// One unsigned byte per row.
///
/// # Safety
/// 4 bytes are readable.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn bytes_of_rows(from: *const u8) -> uint32x4_t {
    // SAFETY: the caller's promise, and any bytes are a u32.
    let bytes = vcreate_u8(u64::from(unsafe { from.cast::<u32>().read_unaligned() }));
    vmovl_u16(vget_low_u16(vmovl_u8(bytes)))
}

/// The zero points of 4 rows.
///
/// # Safety
/// `tile` points to a tile of the (affine) layout that has the group.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn zeros(layout: &TileLayout, tile: *const u8, quarter: usize, group: usize) -> uint32x4_t {
    // SAFETY: the caller's promise.
    let zeros = unsafe { bytes_of_rows(tile.add(layout.zeros_offset + group * TILE_ROWS + QUARTER * quarter)) };
    vminq_u32(zeros, vdupq_n_u32(15))
}

/// The codes of vector `i` (and, for nibbles, of k + 16) as signed bytes; affine ones without their zero point.
///
/// # Safety
/// `tile` points to a tile of the layout that has the block.
#[inline]
#[target_feature(enable = "neon")]
unsafe fn signed<const KIND: u8>(
    layout: &TileLayout,
    tile: *const u8,
    quarter: usize,
    block: usize,
    i: usize,
) -> [int8x16_t; 2] {
    // SAFETY: the caller's promise.
    let v = unsafe { load::<KIND>(layout, tile, quarter, block, i) };
    if KIND == kind::INT8 {
        // SAFETY: the caller's promise.
        let upper = unsafe { load::<KIND>(layout, tile, quarter, block, i + 4) };
        return [vreinterpretq_s8_u8(v), vreinterpretq_s8_u8(upper)];
    }
    let (low, high) = (vandq_u8(v, vdupq_n_u8(15)), vshrq_n_u8::<4>(v));
    if KIND == kind::MXFP4 {
        let values = scalar::E2M1_TIMES_2.map(|value| value as i8);
        // SAFETY: 16 readable bytes.
        let table = unsafe { vld1q_s8(values.as_ptr()) };
        return [vqtbl1q_s8(table, low), vqtbl1q_s8(table, high)];
    }
    let offset = vdupq_n_s8(if KIND == kind::SYMMETRIC4 { 8 } else { 0 });
    [vsubq_s8(vreinterpretq_s8_u8(low), offset), vsubq_s8(vreinterpretq_s8_u8(high), offset)]
}

#[inline]
#[target_feature(enable = "neon")]
fn store(out: &mut [f32], at: usize, v: float32x4_t) {
    let to: &mut [f32; QUARTER] = out[at..].first_chunk_mut().expect("room for a quarter of a tile");
    // SAFETY: 4 writable floats.
    unsafe { vst1q_f32(to.as_mut_ptr(), v) }
}

#[target_feature(enable = "neon")]
fn tile_int8(part: &Part<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    match kind::of(tiles.layout) {
        kind::SYMMETRIC4 => int8_sized::<{ kind::SYMMETRIC4 }>(tiles, out),
        kind::AFFINE4 => int8_sized::<{ kind::AFFINE4 }>(tiles, out),
        kind::MXFP4 => int8_sized::<{ kind::MXFP4 }>(tiles, out),
        _ => int8_sized::<{ kind::INT8 }>(tiles, out),
    }
}

#[target_feature(enable = "neon")]
fn int8_sized<const KIND: u8>(tiles: Tiles<'_>, out: &mut [f32]) {
    with_size!(tiles.part, [(1, 1)(1, 2)(1, 3)(1, 4)], _ONE, C, int8::<KIND, C>(tiles, out));
}

/// Products of bytes fit i16, and so do sums of two: |w| <= 128, |a| <= 127.
#[target_feature(enable = "neon")]
fn int8<const KIND: u8, const C: usize>(tiles: Tiles<'_>, out: &mut [f32]) {
    let (layout, [tile]) = (tiles.layout, tiles.tiles::<1>());
    let groups = layout.blocks.div_ceil(GROUP_BLOCKS);
    let mut x: [&[Q8Group]; C] = [&[]; C];
    for c in 0..C {
        x[c] = &tiles.part.x.row_q8(tiles.part.col + c)[..groups];
    }
    let mut rows = [[vdupq_n_f32(0.0); C]; 4];
    for (group, quarter) in (0..groups).flat_map(|group| (0..4).map(move |quarter| (group, quarter))) {
        let mut totals = [vdupq_n_f32(0.0); C];
        for (blocks, scale) in tiles.runs(group) {
            let mut sums = [[vdupq_n_s32(0); 2]; C];
            let mut starts = [0; C];
            for block in blocks {
                let in_group = block % GROUP_BLOCKS;
                for i in 0..4 {
                    // SAFETY: the tile has this block.
                    let w = unsafe { signed::<KIND>(layout, tile, quarter, block, i) };
                    for c in 0..C {
                        for upper in 0..2 {
                            let a = broadcast(&x[c][group].codes, BLOCK * in_group + 4 * i + 16 * upper);
                            let (low, high) =
                                (vmull_s8(vget_low_s8(w[upper]), vget_low_s8(a)), vmull_high_s8(w[upper], a));
                            sums[c] = [vpadalq_s16(sums[c][0], low), vpadalq_s16(sums[c][1], high)];
                        }
                    }
                }
                for c in 0..C {
                    starts[c] += x[c][group].starts[in_group];
                }
            }
            let zero = match KIND {
                // SAFETY: the tile has this group of scales, and the layout is affine.
                kind::AFFINE4 => vreinterpretq_s32_u32(unsafe { zeros(layout, tile, quarter, scale) }),
                _ => vdupq_n_s32(0),
            };
            // SAFETY: the tile has this group of scales.
            let scale = unsafe { scales(layout, tile, quarter, scale) };
            for c in 0..C {
                // The start is -16 times the sum of the codes.
                let sum = vmlaq_s32(vpaddq_s32(sums[c][0], sums[c][1]), zero, vdupq_n_s32(starts[c] / 16));
                totals[c] = vfmaq_f32(totals[c], vcvtq_f32_s32(sum), scale);
            }
        }
        for c in 0..C {
            rows[quarter][c] = vfmaq_n_f32(rows[quarter][c], totals[c], x[c][group].scale);
        }
    }
    for (quarter, c) in (0..4).flat_map(|quarter| (0..C).map(move |c| (quarter, c))) {
        store(out, c * TILE_ROWS + QUARTER * quarter, rows[quarter][c]);
    }
}

/// Codes `k..k + 4` in every lane.
#[inline]
#[target_feature(enable = "neon")]
fn broadcast(codes: &[i8; GROUP], k: usize) -> int8x16_t {
    let four: [i8; 4] = codes[k..k + 4].try_into().expect("four codes");
    vreinterpretq_s8_s32(vdupq_n_s32(i32::from_ne_bytes(four.map(|code| code as u8))))
}

#[target_feature(enable = "neon")]
fn tile_float(part: &Part<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    match kind::of(tiles.layout) {
        kind::SYMMETRIC4 => float_sized::<{ kind::SYMMETRIC4 }>(tiles, out),
        kind::AFFINE4 => float_sized::<{ kind::AFFINE4 }>(tiles, out),
        kind::MXFP4 => float_sized::<{ kind::MXFP4 }>(tiles, out),
        _ => float_sized::<{ kind::INT8 }>(tiles, out),
    }
}

#[target_feature(enable = "neon")]
fn float_sized<const KIND: u8>(tiles: Tiles<'_>, out: &mut [f32]) {
    with_size!(tiles.part, [(1, 1)(1, 2)(1, 3)(1, 4)], _ONE, C, float::<KIND, C>(tiles, out));
}

#[target_feature(enable = "neon")]
fn float<const KIND: u8, const C: usize>(tiles: Tiles<'_>, out: &mut [f32]) {
    let (layout, [tile]) = (tiles.layout, tiles.tiles::<1>());
    let mut x: [&[[f32; BLOCK]]; C] = [&[]; C];
    for c in 0..C {
        x[c] = &tiles.part.x.row(tiles.part.col + c).as_chunks().0[..layout.blocks];
    }
    let mut rows = [[vdupq_n_f32(0.0); C]; 4];
    for group in 0..layout.groups {
        for quarter in 0..4 {
            // SAFETY: the tile has this group.
            let scale = unsafe { scales(layout, tile, quarter, group) };
            let zero = match KIND {
                // SAFETY: as above, and the layout is affine.
                kind::AFFINE4 => vcvtq_f32_u32(unsafe { zeros(layout, tile, quarter, group) }),
                _ => vdupq_n_f32(0.0),
            };
            for block in tiles.blocks(group) {
                let mut sums = [vdupq_n_f32(0.0); C];
                for chain in 0..4 {
                    // SAFETY: the tile has this block.
                    let w = unsafe { signed::<KIND>(layout, tile, quarter, block, chain) };
                    let mut partial = [vdupq_n_f32(0.0); C];
                    for upper in 0..2 {
                        let mut lanes = vreinterpretq_s32_s8(w[upper]);
                        for j in 0..4 {
                            let mut w = vcvtq_f32_s32(vshrq_n_s32::<24>(vshlq_n_s32::<24>(lanes)));
                            if KIND == kind::AFFINE4 {
                                w = vsubq_f32(w, zero);
                            }
                            lanes = vshrq_n_s32::<8>(lanes);
                            for c in 0..C {
                                partial[c] = vfmaq_n_f32(partial[c], w, x[c][block][16 * upper + 4 * chain + j]);
                            }
                        }
                    }
                    for c in 0..C {
                        sums[c] = if chain == 0 { partial[c] } else { vaddq_f32(sums[c], partial[c]) };
                    }
                }
                for c in 0..C {
                    rows[quarter][c] = vfmaq_f32(rows[quarter][c], sums[c], scale);
                }
            }
        }
    }
    for (quarter, c) in (0..4).flat_map(|quarter| (0..C).map(move |c| (quarter, c))) {
        store(out, c * TILE_ROWS + QUARTER * quarter, rows[quarter][c]);
    }
}

#[target_feature(enable = "neon")]
fn tile_int16(part: &Part<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    match kind::of(tiles.layout) {
        kind::SYMMETRIC4 => int16_sized::<{ kind::SYMMETRIC4 }>(tiles, out),
        kind::AFFINE4 => int16_sized::<{ kind::AFFINE4 }>(tiles, out),
        kind::MXFP4 => int16_sized::<{ kind::MXFP4 }>(tiles, out),
        _ => int16_sized::<{ kind::INT8 }>(tiles, out),
    }
}

#[target_feature(enable = "neon")]
fn int16_sized<const KIND: u8>(tiles: Tiles<'_>, out: &mut [f32]) {
    with_size!(tiles.part, [(1, 1)(1, 2)(1, 3)(1, 4)], _ONE, C, {
        for quarter in 0..4 {
            int16::<KIND, C>(tiles, quarter, out);
        }
    });
}

/// Products of pairs stay apart until the end of a run.
#[target_feature(enable = "neon")]
fn int16<const KIND: u8, const C: usize>(tiles: Tiles<'_>, quarter: usize, out: &mut [f32]) {
    let (layout, [tile]) = (tiles.layout, tiles.tiles::<1>());
    let mut x: [&[Q16Group]; C] = [&[]; C];
    for c in 0..C {
        x[c] = &tiles.part.x.row_q16(tiles.part.col + c)[..layout.blocks.div_ceil(GROUP_BLOCKS)];
    }
    let mut rows = [vdupq_n_f32(0.0); C];
    for group in 0..layout.blocks.div_ceil(GROUP_BLOCKS) {
        let x = x.map(|x| &x[group]);
        let mut totals = [vdupq_n_f32(0.0); C];
        for (blocks, scale) in tiles.runs(group) {
            let zero = match KIND {
                // SAFETY: the tile has this group of scales, and the layout is affine.
                kind::AFFINE4 => vminq_u32(unsafe { zeros(layout, tile, quarter, scale) }, vdupq_n_u32(15)),
                _ => vdupq_n_u32(0),
            };
            let zero = vreinterpretq_s16_u32(vorrq_u32(zero, vshlq_n_u32::<16>(zero)));
            let mut sums = [[vdupq_n_s32(0); 2]; C];
            for (block, i) in blocks.flat_map(|block| (0..4).map(move |i| (block, i))) {
                // SAFETY: the tile has this block.
                let [low, high] = unsafe { signed::<KIND>(layout, tile, quarter, block, i) };
                let ([a, b], [e, f]) = (bytes_as_pairs(low), bytes_as_pairs(high));
                for c in 0..C {
                    let codes = &x[c].codes[block % GROUP_BLOCKS * BLOCK + 8 * i..][..8];
                    for (w, pair) in [a, b, e, f].into_iter().zip(codes.as_chunks::<2>().0) {
                        let a = vreinterpretq_s16_s32(vdupq_n_s32(bytemuck::cast(*pair)));
                        let w = vsubq_s16(w, zero);
                        sums[c][0] = vmlal_s16(sums[c][0], vget_low_s16(w), vget_low_s16(a));
                        sums[c][1] = vmlal_high_s16(sums[c][1], w, a);
                    }
                }
            }
            // SAFETY: the tile has this group of scales.
            let scale = unsafe { scales(layout, tile, quarter, scale) };
            for c in 0..C {
                totals[c] = vfmaq_f32(totals[c], vcvtq_f32_s32(vpaddq_s32(sums[c][0], sums[c][1])), scale);
            }
        }
        for c in 0..C {
            rows[c] = vfmaq_n_f32(rows[c], totals[c], x[c].scale);
        }
    }
    for c in 0..C {
        store(out, c * TILE_ROWS + QUARTER * quarter, rows[c]);
    }
}

/// Bytes 0 and 2 of each row, and bytes 1 and 3.
#[inline]
#[target_feature(enable = "neon")]
fn bytes_as_pairs(bytes: int8x16_t) -> [int16x8_t; 2] {
    let words = vreinterpretq_s16_s8(bytes);
    [vshrq_n_s16::<8>(vshlq_n_s16::<8>(words)), vshrq_n_s16::<8>(words)]
}

const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

/// F32, F16 and BF16 rows times f32 activations.
///
/// # Safety
/// As [`super::kernels::PlainFn`].
unsafe fn plain(part: &Part<'_>, sink: &Sink<'_>) {
    // SAFETY: the caller's promises.
    unsafe {
        match part.matrix.store {
            MatrixStore::Plain(DType::F32) => run::<Wide<F32>>(part, sink, &mut Sums::new()),
            MatrixStore::Plain(DType::F16) => run::<Wide<F16>>(part, sink, &mut Sums::new()),
            MatrixStore::Plain(_) => run::<Wide<BF16>>(part, sink, &mut Sums::new()),
            MatrixStore::Tiled(_) => unreachable!("tiles have their own kernels"),
        }
    }
}

/// BF16 rows times BF16 activations.
///
/// # Safety
/// As [`super::kernels::PlainFn`].
unsafe fn plain_bf16(part: &Part<'_>, sink: &Sink<'_>) {
    // SAFETY: the caller's promises.
    unsafe { run::<Pairs>(part, sink, &mut Sums::new()) }
}

/// Weights widened to f32 times f32 activations.
struct Wide<const TYPE: u8>;

/// BF16 pairs by two fused multiply-adds.
struct Pairs;

impl<const TYPE: u8> Product for Wide<TYPE> {
    const ROWS: usize = 2;
    const COLS: usize = 3;
    const DEPTH: usize = 2048;

    unsafe fn rectangle(part: &Part<'_>, k: Range<usize>, sums: &mut [[f32; 16]]) {
        // SAFETY: the caller's promises.
        unsafe { with_size!(part, [(1, 1)(1, 2)(1, 3)(2, 1)(2, 2)(2, 3)], R, C, wide::<TYPE, R, C>(part, k, sums)) }
    }
}

impl Product for Pairs {
    const ROWS: usize = 2;
    const COLS: usize = 3;
    const DEPTH: usize = 4096;

    unsafe fn rectangle(part: &Part<'_>, k: Range<usize>, sums: &mut [[f32; 16]]) {
        // SAFETY: the caller's promises.
        unsafe { with_size!(part, [(1, 1)(1, 2)(1, 3)(2, 1)(2, 2)(2, 3)], R, C, pairs::<R, C>(part, k, sums)) }
    }
}

/// 16 elements of K at a time in four registers.
#[target_feature(enable = "neon")]
fn wide<const TYPE: u8, const R: usize, const C: usize>(part: &Part<'_>, k: Range<usize>, sums: &mut [[f32; 16]]) {
    let (cols, size) = (part.matrix.cols, if TYPE == F32 { 4 } else { 2 });
    let w = &part.matrix.data[part.item * cols * size..][..R * cols * size];
    let mut x: [&[[f32; 4]]; C] = [&[]; C];
    for c in 0..C {
        // Rows of activations are padded to blocks, so 16 values are readable from any multiple of 16 on.
        x[c] = part.x.row(part.col + c).as_chunks().0;
    }
    let mut acc = load_sums::<R, C>(sums, k.start);
    let (whole, rest) = (k.start + (k.end - k.start) / 16 * 16, (k.end - k.start) % 16);
    for k in (k.start..whole).step_by(16) {
        for r in 0..R {
            let w = widened::<TYPE>(&w[(r * cols + k) * size..][..16 * size]);
            for c in 0..C {
                for (q, x) in x[c][k / 4..][..4].iter().enumerate() {
                    // SAFETY: 4 readable floats.
                    acc[r][c][q] = vfmaq_f32(acc[r][c][q], w[q], unsafe { vld1q_f32(x.as_ptr()) });
                }
            }
        }
    }
    if rest > 0 {
        for r in 0..R {
            let mut padded = [0u8; 64];
            padded[..rest * size].copy_from_slice(&w[(r * cols + whole) * size..][..rest * size]);
            let w = widened::<TYPE>(&padded);
            for c in 0..C {
                for (q, x) in x[c][whole / 4..][..4].iter().enumerate() {
                    // SAFETY: 4 readable floats.
                    let sum = vfmaq_f32(acc[r][c][q], w[q], unsafe { vld1q_f32(x.as_ptr()) });
                    // Lanes without an element are left alone: adding zero would turn -0 into +0.
                    let mask: [u32; 4] = std::array::from_fn(|l| if 4 * q + l < rest { u32::MAX } else { 0 });
                    // SAFETY: 4 readable lanes.
                    acc[r][c][q] = vbslq_f32(unsafe { vld1q_u32(mask.as_ptr()) }, sum, acc[r][c][q]);
                }
            }
        }
    }
    store_sums(&acc, sums);
}

/// 32 elements of K at a time; what is left of a row is padded with zeros.
#[target_feature(enable = "neon")]
fn pairs<const R: usize, const C: usize>(part: &Part<'_>, k: Range<usize>, sums: &mut [[f32; 16]]) {
    let cols = part.matrix.cols;
    let w = &part.matrix.data[2 * part.item * cols..][..2 * R * cols];
    let mut acc = load_sums::<R, C>(sums, k.start);
    for k in k.step_by(32) {
        let left = 2 * 32.min(cols - k);
        for r in 0..R {
            let mut padded = [0u8; 64];
            padded[..left].copy_from_slice(&w[2 * (r * cols + k)..][..left]);
            for c in 0..C {
                let x: &[u8] = bytemuck::cast_slice(&part.x.row_bf16(part.col + c)[k..][..32]);
                for (q, (w, x)) in padded.as_chunks().0.iter().zip(x.as_chunks().0).enumerate() {
                    let (w, x) = (upper_and_lower(w), upper_and_lower(x));
                    acc[r][c][q] = vfmaq_f32(vfmaq_f32(acc[r][c][q], w[0], x[0]), w[1], x[1]);
                }
            }
        }
    }
    store_sums(&acc, sums);
}

/// The upper and the lower element of each of four pairs as floats.
#[inline]
#[target_feature(enable = "neon")]
fn upper_and_lower(pairs: &[u8; 16]) -> [float32x4_t; 2] {
    // SAFETY: 16 readable bytes.
    let pairs = vreinterpretq_u32_u8(unsafe { vld1q_u8(pairs.as_ptr()) });
    let upper = vandq_u32(pairs, vdupq_n_u32(0xFFFF_0000));
    [vreinterpretq_f32_u32(upper), vreinterpretq_f32_u32(vshlq_n_u32::<16>(pairs))]
}

#[inline]
#[target_feature(enable = "neon")]
fn load_sums<const R: usize, const C: usize>(sums: &[[f32; 16]], start: usize) -> [[[float32x4_t; 4]; C]; R] {
    let mut acc = [[[vdupq_n_f32(0.0); 4]; C]; R];
    if start == 0 {
        return acc;
    }
    for (r, c) in (0..R).flat_map(|r| (0..C).map(move |c| (r, c))) {
        for (acc, sum) in acc[r][c].iter_mut().zip(sums[c * STRIPE + r].as_chunks::<4>().0) {
            // SAFETY: 4 readable floats.
            *acc = unsafe { vld1q_f32(sum.as_ptr()) };
        }
    }
    acc
}

#[inline]
#[target_feature(enable = "neon")]
fn store_sums<const R: usize, const C: usize>(acc: &[[[float32x4_t; 4]; C]; R], sums: &mut [[f32; 16]]) {
    for (r, c) in (0..R).flat_map(|r| (0..C).map(move |c| (r, c))) {
        for q in 0..4 {
            store(&mut sums[c * STRIPE + r], QUARTER * q, acc[r][c][q]);
        }
    }
}

#[target_feature(enable = "neon")]
fn mix<const TYPE: u8>(mix: &Mix<'_>, out: &mut [f32], out_row: usize) {
    for vector in 0..mix.vectors {
        for row in (0..mix.rows).step_by(4) {
            let out = &mut out[row * out_row + 16 * vector..];
            match mix.rows - row {
                1 => mix_sized::<TYPE, 1>(mix, row, vector, out, out_row),
                2 => mix_sized::<TYPE, 2>(mix, row, vector, out, out_row),
                3 => mix_sized::<TYPE, 3>(mix, row, vector, out, out_row),
                _ => mix_sized::<TYPE, 4>(mix, row, vector, out, out_row),
            }
        }
    }
}

/// `R` outputs of one vector, all in registers; a pair of bf16 is multiplied in two steps, the odd one first.
#[target_feature(enable = "neon")]
fn mix_sized<const TYPE: u8, const R: usize>(
    mix: &Mix<'_>,
    row: usize,
    vector: usize,
    out: &mut [f32],
    out_row: usize,
) {
    let mut w: [&[u32]; R] = [&[]; R];
    for r in 0..R {
        w[r] = &mix.weights[(row + r) * mix.weight_row..][..mix.steps];
    }
    let mut sums = [[vdupq_n_f32(0.0); 4]; R];
    for i in 0..mix.steps {
        let values = &mix.values[i * mix.step + vector * mix.vector..];
        if TYPE == BF16 {
            let words = widened::<F32>(values).map(|v| vreinterpretq_u32_f32(v));
            for r in 0..R {
                let (odd, even) = (f32::from_bits(w[r][i] & 0xffff_0000), f32::from_bits(w[r][i] << 16));
                for q in 0..4 {
                    let odds = vreinterpretq_f32_u32(vandq_u32(words[q], vdupq_n_u32(0xffff_0000)));
                    let evens = vreinterpretq_f32_u32(vshlq_n_u32::<16>(words[q]));
                    sums[r][q] = vfmaq_n_f32(vfmaq_n_f32(sums[r][q], odds, odd), evens, even);
                }
            }
            continue;
        }
        let v = widened::<TYPE>(values);
        for r in 0..R {
            for q in 0..4 {
                sums[r][q] = vfmaq_n_f32(sums[r][q], v[q], f32::from_bits(w[r][i]));
            }
        }
    }
    for r in 0..R {
        for q in 0..4 {
            store(&mut out[r * out_row..], QUARTER * q, sums[r][q]);
        }
    }
}

/// The first 16 elements as floats.
#[inline]
#[target_feature(enable = "neon")]
fn widened<const TYPE: u8>(from: &[u8]) -> [float32x4_t; 4] {
    let mut wide = [vdupq_n_f32(0.0); 4];
    for q in 0..4 {
        if TYPE == F32 {
            let four: &[u8; 16] = from[16 * q..].first_chunk().expect("four floats");
            // SAFETY: 16 readable bytes.
            wide[q] = vreinterpretq_f32_u8(unsafe { vld1q_u8(four.as_ptr()) });
            continue;
        }
        let four: &[u8; 8] = from[8 * q..].first_chunk().expect("four halves");
        // SAFETY: 8 readable bytes.
        let bits = vmovl_u16(vreinterpret_u16_u8(unsafe { vld1_u8(four.as_ptr()) }));
        wide[q] = if TYPE == F16 { halves(bits) } else { vreinterpretq_f32_u32(vshlq_n_u32::<16>(bits)) };
    }
    wide
}
