//! AVX2 with FMA and F16C: a tile is two halves of 8 rows, each walked along all of K.
#![allow(unsafe_code, clippy::needless_range_loop)]

use super::acts::Q8Block;
use super::kernels::{AHEAD, Kernel, KernelTable, Mix, Part, Tiles, kind, with_size};
use super::level::Level;
use super::{MatrixStore, scalar};
use crate::dtype::DType;
use crate::scheme::{BLOCK, ScaleType, TILE_ROWS, TileLayout};
use std::arch::x86_64::*;

pub(super) const TABLE: KernelTable = KernelTable {
    name: "avx2",
    detected: || {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
    },
    level: Level::AVX2,
    plain: Kernel { items: 2, alone: 2, cols: 3, run: plain },
    tile_float: Kernel { items: 1, alone: 1, cols: 4, run: tile_float },
    mix_f32: mix::<F32>,
    mix_f16: mix::<F16>,
    tile_int8: Kernel { items: 1, alone: 1, cols: 4, run: tile_int8 },
    quantize,
};

/// Rows in a register.
const HALF: usize = 8;

/// Half of vector `i` of a block of codes: four codes (or bytes of nibbles) of each of 8 rows.
///
/// # Safety
/// `tile` points to a tile of the layout that has the block.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load<const KIND: u8>(layout: &TileLayout, tile: *const u8, half: usize, block: usize, i: usize) -> __m256i {
    let at = layout.codes_offset + 64 * (block * kind::vectors(KIND) + i) + 4 * HALF * half;
    if half == 0 {
        _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(at + AHEAD).cast());
    }
    // SAFETY: the caller's promise; the load has no alignment demand.
    unsafe { _mm256_loadu_si256(tile.add(at).cast()) }
}

/// The scales of 8 rows; halved for MXFP4, whose codes are doubled.
///
/// # Safety
/// `tile` points to a tile of the layout that has the group.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn scales(layout: &TileLayout, tile: *const u8, half: usize, group: usize) -> __m256 {
    let first = group * TILE_ROWS + HALF * half;
    // SAFETY: the caller's promise: 8 scales of the type are readable. The loads have no alignment demand.
    unsafe {
        match layout.spec.scale_dtype {
            ScaleType::F16 => _mm256_cvtph_ps(_mm_loadu_si128(tile.add(2 * first).cast())),
            ScaleType::F32 => _mm256_loadu_ps(tile.add(4 * first).cast()),
            ScaleType::E8m0 => half_of_e8m0(bytes_of_rows(tile.add(first))),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn half_of_e8m0(exponents: __m256i) -> __m256 {
    // 2^-127 is not normal.
    let zero = _mm256_cmpeq_epi32(exponents, _mm256_setzero_si256());
    let bits = _mm256_blendv_epi8(_mm256_slli_epi32::<23>(exponents), _mm256_set1_epi32(1 << 22), zero);
    _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0.5))
}

/// One unsigned byte per row.
///
/// # Safety
/// 8 bytes are readable.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn bytes_of_rows(from: *const u8) -> __m256i {
    // SAFETY: the caller's promise; the load has no alignment demand.
    _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(from.cast()) })
}

/// The zero points of 8 rows.
///
/// # Safety
/// `tile` points to a tile of the (affine) layout that has the group.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn zeros(layout: &TileLayout, tile: *const u8, half: usize, group: usize) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { bytes_of_rows(tile.add(layout.zeros_offset + group * TILE_ROWS + HALF * half)) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn store(out: &mut [f32], at: usize, v: __m256) {
    let to: &mut [f32; HALF] = out[at..].first_chunk_mut().expect("room for half a tile");
    // SAFETY: 8 writable floats, and the store has no alignment demand.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), v) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn nibbles(v: __m256i) -> [__m256i; 2] {
    let mask = _mm256_set1_epi8(15);
    [_mm256_and_si256(v, mask), _mm256_and_si256(_mm256_srli_epi32::<4>(v), mask)]
}

#[target_feature(enable = "avx2,fma,f16c")]
fn tile_int8(part: &Part<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    match kind::of(tiles.layout) {
        kind::SYMMETRIC4 => int8_sized::<{ kind::SYMMETRIC4 }>(tiles, out),
        kind::AFFINE4 => int8_sized::<{ kind::AFFINE4 }>(tiles, out),
        kind::MXFP4 => int8_sized::<{ kind::MXFP4 }>(tiles, out),
        _ => int8_sized::<{ kind::INT8 }>(tiles, out),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn int8_sized<const KIND: u8>(tiles: Tiles<'_>, out: &mut [f32]) {
    with_size!(tiles.part, [(1, 1)(1, 2)(1, 3)(1, 4)], _ONE, C, {
        for half in 0..2 {
            int8::<KIND, C>(tiles, half, out);
        }
    });
}

/// `vpmaddubsw` never saturates here: nibbles give at most 2 * 24 * 127 per pair; for bytes |w| <= 128 is the unsigned
/// operand and the activation, which is never -128, takes the sign, so that a pair is at most 2 * 128 * 127 = 32512.
#[target_feature(enable = "avx2,fma,f16c")]
fn int8<const KIND: u8, const C: usize>(tiles: Tiles<'_>, half: usize, out: &mut [f32]) {
    let (layout, [tile]) = (tiles.layout, tiles.tiles::<1>());
    let mut x = [std::ptr::null::<Q8Block>(); C];
    for c in 0..C {
        x[c] = tiles.part.x.row_q8(tiles.part.col + c)[..layout.blocks].as_ptr();
    }
    let mut rows = [_mm256_setzero_ps(); C];
    for group in 0..layout.groups {
        // SAFETY: the tile has this group.
        let (scale, offset) =
            unsafe { (scales(layout, tile, half, group), minus_offset::<KIND>(layout, tile, half, group)) };
        for block in tiles.blocks(group) {
            // SAFETY: the tile has this block, and each row of activations has one for it.
            let sums = unsafe { block_sums::<KIND, C>(layout, tile, half, block, &x) };
            for c in 0..C {
                // SAFETY: as above.
                let x = unsafe { &*x[c].add(block) };
                // The low half of the sum is its exact i16 value, and the high half of an offset is zero.
                let start = _mm256_madd_epi16(_mm256_set1_epi32(x.sum), offset);
                let product = _mm256_mul_ps(scale, _mm256_set1_ps(x.scale));
                let sum = _mm256_cvtepi32_ps(_mm256_add_epi32(start, sums[c]));
                rows[c] = _mm256_fmadd_ps(sum, product, rows[c]);
            }
        }
    }
    for c in 0..C {
        store(out, c * TILE_ROWS + HALF * half, rows[c]);
    }
}

/// Minus what is added to a code to make it unsigned (per row), as an i16 in the low half of each lane.
///
/// # Safety
/// `tile` points to a tile of the layout that has the group.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn minus_offset<const KIND: u8>(layout: &TileLayout, tile: *const u8, half: usize, group: usize) -> __m256i {
    let offset = match KIND {
        kind::SYMMETRIC4 => _mm256_set1_epi32(8),
        // SAFETY: the caller's promise, and the layout is affine.
        kind::AFFINE4 => unsafe { zeros(layout, tile, half, group) },
        kind::MXFP4 => _mm256_set1_epi32(12),
        _ => _mm256_setzero_si256(),
    };
    _mm256_and_si256(_mm256_sub_epi32(_mm256_setzero_si256(), offset), _mm256_set1_epi32(0xFFFF))
}

/// Integer dot products of a block with the unsigned codes.
///
/// # Safety
/// `tile` points to a tile of the layout that has the block, and so has each row of activations.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn block_sums<const KIND: u8, const C: usize>(
    layout: &TileLayout,
    tile: *const u8,
    half: usize,
    block: usize,
    x: &[*const Q8Block; C],
) -> [__m256i; C] {
    let ones = _mm256_set1_epi16(1);
    // 2 * E2M1 + 12
    let values = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    let table = _mm256_broadcastsi128_si256(values);
    let mut sums = [_mm256_setzero_si256(); C];
    let mut pairs = [_mm256_setzero_si256(); C];
    for i in 0..kind::vectors(KIND) {
        // SAFETY: the caller's promise.
        let v = unsafe { load::<KIND>(layout, tile, half, block, i) };
        let w = match KIND {
            kind::INT8 => [_mm256_abs_epi8(v), v],
            kind::MXFP4 => {
                let [low, high] = nibbles(v);
                [_mm256_shuffle_epi8(table, low), _mm256_shuffle_epi8(table, high)]
            }
            _ => nibbles(v),
        };
        for c in 0..C {
            // SAFETY: the caller's promise; four codes from 4 i or 16 + 4 i on lie inside the block.
            let a = |k| unsafe { broadcast((*x[c].add(block)).codes.as_ptr().add(k)) };
            if KIND == kind::INT8 {
                let products = _mm256_maddubs_epi16(w[0], _mm256_sign_epi8(a(4 * i), w[1]));
                sums[c] = _mm256_add_epi32(sums[c], _mm256_madd_epi16(products, ones));
            } else {
                pairs[c] = _mm256_add_epi16(pairs[c], _mm256_maddubs_epi16(w[0], a(4 * i)));
                pairs[c] = _mm256_add_epi16(pairs[c], _mm256_maddubs_epi16(w[1], a(16 + 4 * i)));
            }
        }
        // At most 4 * 6096 (MXFP4) or 8 * 3810 per i16.
        if i == 3 && KIND != kind::INT8 || i == 1 && KIND == kind::MXFP4 {
            for c in 0..C {
                sums[c] = _mm256_add_epi32(sums[c], _mm256_madd_epi16(pairs[c], ones));
                pairs[c] = _mm256_setzero_si256();
            }
        }
    }
    sums
}

/// Four codes in every lane.
///
/// # Safety
/// They are readable.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn broadcast(codes: *const i8) -> __m256i {
    // SAFETY: the caller's promise, and any bytes are an i32.
    _mm256_set1_epi32(unsafe { codes.cast::<i32>().read_unaligned() })
}

#[target_feature(enable = "avx2,fma,f16c")]
fn tile_float(part: &Part<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    match kind::of(tiles.layout) {
        kind::SYMMETRIC4 => float_sized::<{ kind::SYMMETRIC4 }>(tiles, out),
        kind::AFFINE4 => float_sized::<{ kind::AFFINE4 }>(tiles, out),
        kind::MXFP4 => float_sized::<{ kind::MXFP4 }>(tiles, out),
        _ => float_sized::<{ kind::INT8 }>(tiles, out),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn float_sized<const KIND: u8>(tiles: Tiles<'_>, out: &mut [f32]) {
    with_size!(tiles.part, [(1, 1)(1, 2)(1, 3)(1, 4)], _ONE, C, {
        for half in 0..2 {
            float::<KIND, C>(tiles, half, out);
        }
    });
}

#[target_feature(enable = "avx2,fma,f16c")]
fn float<const KIND: u8, const C: usize>(tiles: Tiles<'_>, half: usize, out: &mut [f32]) {
    let (layout, [tile]) = (tiles.layout, tiles.tiles::<1>());
    let mut x = [std::ptr::null::<f32>(); C];
    for c in 0..C {
        x[c] = tiles.part.x.row(tiles.part.col + c)[..layout.blocks * BLOCK].as_ptr();
    }
    let mut rows = [_mm256_setzero_ps(); C];
    for group in 0..layout.groups {
        // SAFETY: the tile has this group.
        let scale = unsafe { scales(layout, tile, half, group) };
        let zero = match KIND {
            // SAFETY: as above, and the layout is affine.
            kind::AFFINE4 => _mm256_cvtepi32_ps(unsafe { zeros(layout, tile, half, group) }),
            _ => _mm256_setzero_ps(),
        };
        for block in tiles.blocks(group) {
            let mut sums = [_mm256_setzero_ps(); C];
            for chain in 0..4 {
                // SAFETY: the tile has this block.
                let halves = unsafe { signed::<KIND>(layout, tile, half, block, chain) };
                let mut partial = [_mm256_setzero_ps(); C];
                for (upper, mut v) in halves.into_iter().enumerate() {
                    for j in 0..4 {
                        let mut w = _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(_mm256_slli_epi32::<24>(v)));
                        if KIND == kind::AFFINE4 {
                            w = _mm256_sub_ps(w, zero);
                        }
                        v = _mm256_srli_epi32::<8>(v);
                        for c in 0..C {
                            // SAFETY: each row of activations has 32 values for each block of the tile.
                            let a = unsafe { *x[c].add(block * BLOCK + 16 * upper + 4 * chain + j) };
                            partial[c] = _mm256_fmadd_ps(w, _mm256_set1_ps(a), partial[c]);
                        }
                    }
                }
                for c in 0..C {
                    sums[c] = if chain == 0 { partial[c] } else { _mm256_add_ps(sums[c], partial[c]) };
                }
            }
            for c in 0..C {
                rows[c] = _mm256_fmadd_ps(sums[c], scale, rows[c]);
            }
        }
    }
    for c in 0..C {
        store(out, c * TILE_ROWS + HALF * half, rows[c]);
    }
}

/// The codes of a chain as signed bytes: k = 4 chain.., then k = 16 + 4 chain..; affine ones without their zero point.
///
/// # Safety
/// `tile` points to a tile of the layout that has the block.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn signed<const KIND: u8>(
    layout: &TileLayout,
    tile: *const u8,
    half: usize,
    block: usize,
    chain: usize,
) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    let v = unsafe { load::<KIND>(layout, tile, half, block, chain) };
    if KIND == kind::INT8 {
        // SAFETY: the caller's promise.
        return [v, unsafe { load::<KIND>(layout, tile, half, block, chain + 4) }];
    }
    let [low, high] = nibbles(v);
    let values = scalar::E2M1_TIMES_2.map(|value| value as i8);
    // SAFETY: 16 readable bytes, and the load has no alignment demand.
    let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(values.as_ptr().cast()) });
    let eight = _mm256_set1_epi8(8);
    match KIND {
        kind::SYMMETRIC4 => [_mm256_sub_epi8(low, eight), _mm256_sub_epi8(high, eight)],
        kind::MXFP4 => [_mm256_shuffle_epi8(table, low), _mm256_shuffle_epi8(table, high)],
        _ => [low, high],
    }
}

const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

#[target_feature(enable = "avx2,fma,f16c")]
fn plain(part: &Part<'_>, out: &mut [f32]) {
    match part.matrix.store {
        MatrixStore::Plain(DType::F32) => plain_sized::<F32>(part, out),
        MatrixStore::Plain(DType::F16) => plain_sized::<F16>(part, out),
        MatrixStore::Plain(_) => plain_sized::<BF16>(part, out),
        MatrixStore::Tiled(_) => unreachable!("tiles have their own kernels"),
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn plain_sized<const TYPE: u8>(part: &Part<'_>, out: &mut [f32]) {
    with_size!(part, [(1, 1)(1, 2)(1, 3)(2, 1)(2, 2)(2, 3)], R, C, rows::<TYPE, R, C>(part, out));
}

/// `R` rows times `C` tokens, 16 elements of K at a time in two registers.
#[target_feature(enable = "avx2,fma,f16c")]
fn rows<const TYPE: u8, const R: usize, const C: usize>(part: &Part<'_>, out: &mut [f32]) {
    let cols = part.matrix.cols;
    let size = if TYPE == F32 { 4 } else { 2 };
    let w = part.matrix.data[part.item * cols * size..][..R * cols * size].as_ptr();
    let (whole, rest) = (cols / 16 * 16, cols % 16);
    let mut x = [std::ptr::null::<f32>(); C];
    for c in 0..C {
        // Rows of activations are padded to blocks, so 16 values are readable from `whole` on.
        x[c] = part.x.row(part.col + c)[..cols.next_multiple_of(16)].as_ptr();
    }
    let mut sums = [[[_mm256_setzero_ps(); 2]; C]; R];
    for k in (0..whole).step_by(16) {
        for r in 0..R {
            // SAFETY: 16 elements from k on lie inside row r of the weights.
            let w = unsafe { widened::<TYPE>(w.add((r * cols + k) * size)) };
            for c in 0..C {
                for h in 0..2 {
                    // SAFETY: 16 values from k on lie inside the row of activations.
                    let a = unsafe { _mm256_loadu_ps(x[c].add(k + 8 * h)) };
                    sums[r][c][h] = _mm256_fmadd_ps(w[h], a, sums[r][c][h]);
                }
            }
        }
    }
    if rest > 0 {
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        for r in 0..R {
            let mut padded = [0u8; 64];
            // SAFETY: the rest of row r is readable.
            let left = unsafe { std::slice::from_raw_parts(w.add((r * cols + whole) * size), rest * size) };
            padded[..rest * size].copy_from_slice(left);
            // SAFETY: 16 elements are readable.
            let w = unsafe { widened::<TYPE>(padded.as_ptr()) };
            for (c, h) in (0..C).flat_map(|c| [(c, 0), (c, 1)]) {
                // SAFETY: 16 values are readable, the padding included.
                let a = unsafe { _mm256_loadu_ps(x[c].add(whole + 8 * h)) };
                // Lanes without an element are left alone: adding zero would turn -0 into +0.
                let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(rest as i32 - 8 * h as i32), lanes);
                let sum = _mm256_fmadd_ps(w[h], a, sums[r][c][h]);
                sums[r][c][h] = _mm256_blendv_ps(sums[r][c][h], sum, _mm256_castsi256_ps(mask));
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            out[c * R + r] = fold(sums[r][c]);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn mix<const TYPE: u8>(mix: &Mix<'_>, out: &mut [[f32; 16]]) {
    for (weights, out) in mix.weights.chunks(4).zip(out.chunks_mut(4)) {
        let values = mix.values;
        match weights.len() {
            1 => mix_sized::<TYPE, 1>(values, mix.stride, weights, out),
            2 => mix_sized::<TYPE, 2>(values, mix.stride, weights, out),
            3 => mix_sized::<TYPE, 3>(values, mix.stride, weights, out),
            _ => mix_sized::<TYPE, 4>(values, mix.stride, weights, out),
        }
    }
}

/// `R` outputs, all in registers.
#[target_feature(enable = "avx2,fma,f16c")]
fn mix_sized<const TYPE: u8, const R: usize>(values: &[u8], stride: usize, weights: &[&[f32]], out: &mut [[f32; 16]]) {
    let size = if TYPE == F32 { 4 } else { 2 };
    let count = weights[0].len();
    let mut w = [std::ptr::null::<f32>(); R];
    for r in 0..R {
        w[r] = weights[r][..count].as_ptr();
    }
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    for i in 0..count {
        // SAFETY: the values have 16 elements for each weight.
        let v = unsafe { widened::<TYPE>(values.as_ptr().add(i * stride * size)) };
        for r in 0..R {
            // SAFETY: there are `count` weights for each output.
            let w = _mm256_set1_ps(unsafe { *w[r].add(i) });
            sums[r] = [_mm256_fmadd_ps(v[0], w, sums[r][0]), _mm256_fmadd_ps(v[1], w, sums[r][1])];
        }
    }
    for r in 0..R {
        store(&mut out[r], 0, sums[r][0]);
        store(&mut out[r], HALF, sums[r][1]);
    }
}

/// 16 elements as floats.
///
/// # Safety
/// They are readable at `from`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widened<const TYPE: u8>(from: *const u8) -> [__m256; 2] {
    let mut wide = [_mm256_setzero_ps(); 2];
    for h in 0..2 {
        // SAFETY: the caller's promise; the loads have no alignment demand.
        wide[h] = unsafe {
            match TYPE {
                F32 => _mm256_loadu_ps(from.add(32 * h).cast()),
                F16 => _mm256_cvtph_ps(_mm_loadu_si128(from.add(16 * h).cast())),
                _ => {
                    let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(16 * h).cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
                }
            }
        };
    }
    wide
}

/// Folds 16 lanes: 8, 4, 2, 1.
#[target_feature(enable = "avx2,fma,f16c")]
fn fold(v: [__m256; 2]) -> f32 {
    let eight = _mm256_add_ps(v[0], v[1]);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn quantize(values: &[f32], blocks: &mut [Q8Block]) {
    for (values, block) in values.chunks_exact(BLOCK).zip(blocks) {
        let mut v = [_mm256_setzero_ps(); 4];
        let mut max = _mm256_setzero_ps();
        for i in 0..4 {
            // SAFETY: 32 readable floats, and the load has no alignment demand.
            v[i] = unsafe { _mm256_loadu_ps(values.as_ptr().add(8 * i)) };
            // max returns its second operand for NaN, so NaN is skipped.
            max = _mm256_max_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0), v[i]), max);
        }
        let four = _mm_max_ps(_mm256_castps256_ps128(max), _mm256_extractf128_ps::<1>(max));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        let absmax = _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
        let scale = absmax / 127.0;
        let inverse = _mm256_set1_ps(if scale > 0.0 { 1.0 / scale } else { 0.0 });
        let mut codes = [_mm256_setzero_si256(); 4];
        let mut sums = _mm256_setzero_si256();
        for i in 0..4 {
            codes[i] = rounded(_mm256_mul_ps(v[i], inverse));
            sums = _mm256_add_epi32(sums, codes[i]);
        }
        let words = [_mm256_packs_epi32(codes[0], codes[1]), _mm256_packs_epi32(codes[2], codes[3])];
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]), order);
        // SAFETY: 32 writable bytes, and the store has no alignment demand.
        unsafe { _mm256_storeu_si256(block.codes.as_mut_ptr().cast(), bytes) };
        let four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
        let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
        block.sum = _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two)));
        block.scale = scale;
    }
}

/// Nearest integer, ties away from zero, clamped to -127..=127; zero for NaN.
#[target_feature(enable = "avx2,fma,f16c")]
fn rounded(v: __m256) -> __m256i {
    let v = _mm256_and_ps(v, _mm256_cmp_ps::<_CMP_ORD_Q>(v, v));
    let v = _mm256_max_ps(_mm256_min_ps(v, _mm256_set1_ps(127.0)), _mm256_set1_ps(-127.0));
    let whole = _mm256_round_ps::<{ _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC }>(v);
    let rest = _mm256_andnot_ps(_mm256_set1_ps(-0.0), _mm256_sub_ps(v, whole));
    let away = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GE_OQ>(rest, _mm256_set1_ps(0.5)));
    let sign = _mm256_or_si256(_mm256_srai_epi32::<31>(_mm256_castps_si256(v)), _mm256_set1_epi32(1));
    _mm256_add_epi32(_mm256_cvttps_epi32(whole), _mm256_and_si256(away, sign))
}
