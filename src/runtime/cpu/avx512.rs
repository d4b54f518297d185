//! AVX-512 (F, BW, VL, VNNI): one register is one vector of a tile, 16 rows wide.
//!
//! Weights are unpacked in registers, once for all columns of the rectangle; two tiles share each broadcast activation.
//! A rectangle of 2 tiles x 6 columns keeps 24 accumulators in the 32 registers.
#![allow(unsafe_code, clippy::needless_range_loop)]

use super::acts::Q8Block;
use super::kernels::{AHEAD, Kernel, KernelTable, Mix, Part, Tiles, kind, with_size};
use super::level::Level;
use super::{MatrixStore, scalar};
use crate::dtype::DType;
use crate::scheme::{BLOCK, ScaleType, TILE_ROWS, TileLayout};
use std::arch::x86_64::*;

pub(super) const TABLE: KernelTable = KernelTable {
    name: "avx512",
    detected,
    level: Level::AVX512,
    plain: Kernel { items: 4, alone: 4, cols: 6, run: plain },
    tile_float: Kernel { items: 2, alone: 1, cols: 6, run: tile_float },
    mix_f32: mix::<F32>,
    mix_f16: mix::<F16>,
    tile_int8: Kernel { items: 2, alone: 1, cols: 6, run: tile_int8 },
    quantize,
};

fn detected() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Vector `i` of a block of codes.
///
/// # Safety
/// `tile` points to a tile of the layout that has the block.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn load<const KIND: u8>(layout: &TileLayout, tile: *const u8, block: usize, i: usize) -> __m512i {
    // SAFETY: the caller's promise; the load has no alignment demand.
    unsafe { _mm512_loadu_si512(tile.add(layout.codes_offset + 64 * (block * kind::vectors(KIND) + i)).cast()) }
}

/// Asks for the codes (or the next tile's scales) that lie ahead of offset `at` of a tile.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn prefetch(tile: *const u8, at: usize) {
    _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(at + AHEAD).cast());
}

/// The scales of 16 rows; halved for MXFP4, whose codes are doubled.
///
/// # Safety
/// `tile` points to a tile of the layout that has the group.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn scales(layout: &TileLayout, tile: *const u8, group: usize) -> __m512 {
    // SAFETY: the caller's promise: 16 scales of the type are readable. The loads have no alignment demand.
    unsafe {
        match layout.spec.scale_dtype {
            ScaleType::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(tile.add(group * TILE_ROWS * 2).cast())),
            ScaleType::F32 => _mm512_loadu_ps(tile.add(group * TILE_ROWS * 4).cast()),
            ScaleType::E8m0 => half_of_e8m0(bytes_of_rows(tile.add(group * TILE_ROWS))),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn half_of_e8m0(exponents: __m512i) -> __m512 {
    // 2^-127 is not normal.
    let zero = _mm512_testn_epi32_mask(exponents, exponents);
    let bits = _mm512_mask_mov_epi32(_mm512_slli_epi32::<23>(exponents), zero, _mm512_set1_epi32(1 << 22));
    _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0.5))
}

/// One unsigned byte per row.
///
/// # Safety
/// 16 bytes are readable.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn bytes_of_rows(from: *const u8) -> __m512i {
    // SAFETY: the caller's promise; the load has no alignment demand.
    _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(from.cast()) })
}

/// The zero points of 16 rows.
///
/// # Safety
/// `tile` points to a tile of the (affine) layout that has the group.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn zeros(layout: &TileLayout, tile: *const u8, group: usize) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe { bytes_of_rows(tile.add(layout.zeros_offset + group * TILE_ROWS)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn store(out: &mut [f32], at: usize, v: __m512) {
    let to: &mut [f32; 16] = out[at * 16..].first_chunk_mut().expect("room for a tile");
    // SAFETY: 16 writable floats, and the store has no alignment demand.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), v) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn tile_int8(part: &Part<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    match kind::of(tiles.layout) {
        kind::SYMMETRIC4 => int8_sized::<{ kind::SYMMETRIC4 }>(tiles, out),
        kind::AFFINE4 => int8_sized::<{ kind::AFFINE4 }>(tiles, out),
        kind::MXFP4 => int8_sized::<{ kind::MXFP4 }>(tiles, out),
        _ => int8_sized::<{ kind::INT8 }>(tiles, out),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn int8_sized<const KIND: u8>(tiles: Tiles<'_>, out: &mut [f32]) {
    with_size!(
        tiles.part,
        [(1, 1)(1, 2)(1, 3)(1, 4)(1, 5)(1, 6)(2, 1)(2, 2)(2, 3)(2, 4)(2, 5)(2, 6)],
        T,
        C,
        int8::<KIND, T, C>(tiles, out)
    );
}

/// Integer sums of a block by `vpdpbusd`: weights made unsigned by an offset, which the starting value takes back.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn int8<const KIND: u8, const T: usize, const C: usize>(tiles: Tiles<'_>, out: &mut [f32]) {
    let layout = tiles.layout;
    let tile = tiles.tiles::<T>();
    let mut x = [std::ptr::null::<Q8Block>(); C];
    for c in 0..C {
        x[c] = tiles.part.x.row_q8(tiles.part.col + c)[..layout.blocks].as_ptr();
    }
    let mut rows = [[_mm512_setzero_ps(); C]; T];
    for group in 0..layout.groups {
        let mut scale = [_mm512_setzero_ps(); T];
        let mut offset = [_mm512_setzero_si512(); T];
        for t in 0..T {
            // SAFETY: the tiles have this group.
            (scale[t], offset[t]) =
                unsafe { (scales(layout, tile[t], group), minus_offset::<KIND>(layout, tile[t], group)) };
        }
        for block in tiles.blocks(group) {
            let mut sums = [[_mm512_setzero_si512(); C]; T];
            for c in 0..C {
                // SAFETY: each row of activations has a block for each block of the tiles.
                // The low half of the sum is its exact i16 value, and the high half of an offset is zero.
                let sum = _mm512_set1_epi32(unsafe { (*x[c].add(block)).sum });
                for t in 0..T {
                    sums[t][c] = _mm512_madd_epi16(sum, offset[t]);
                }
            }
            for i in 0..kind::vectors(KIND) {
                let mut w = [[_mm512_setzero_si512(); 2]; T];
                for t in 0..T {
                    prefetch(tile[t], layout.codes_offset + 64 * (block * kind::vectors(KIND) + i));
                    // SAFETY: the tiles have this block.
                    w[t] = unsigned::<KIND>(unsafe { load::<KIND>(layout, tile[t], block, i) });
                }
                for half in 0..32 / kind::vectors(KIND) / 4 {
                    for c in 0..C {
                        // SAFETY: as above; the four codes lie inside the block.
                        let a = unsafe { (*x[c].add(block)).codes.as_ptr().add(4 * i + 16 * half) };
                        // SAFETY: the four codes lie inside the block, and any bytes are an i32.
                        let a = _mm512_set1_epi32(unsafe { a.cast::<i32>().read_unaligned() });
                        for t in 0..T {
                            sums[t][c] = _mm512_dpbusd_epi32(sums[t][c], w[t][half], a);
                        }
                    }
                }
            }
            for c in 0..C {
                // SAFETY: as above.
                let x_scale = _mm512_set1_ps(unsafe { (*x[c].add(block)).scale });
                for t in 0..T {
                    let product = _mm512_mul_ps(scale[t], x_scale);
                    rows[t][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[t][c]), product, rows[t][c]);
                }
            }
        }
    }
    for t in 0..T {
        for c in 0..C {
            store(out, c * T + t, rows[t][c]);
        }
    }
}

/// Minus what [`unsigned`] adds to a code (per row), as an i16 in the low half of each lane.
///
/// # Safety
/// `tile` points to a tile of the layout that has the group.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn minus_offset<const KIND: u8>(layout: &TileLayout, tile: *const u8, group: usize) -> __m512i {
    let offset = match KIND {
        kind::SYMMETRIC4 => _mm512_set1_epi32(8),
        // SAFETY: the caller's promise, and the layout is affine.
        kind::AFFINE4 => unsafe { zeros(layout, tile, group) },
        kind::MXFP4 => _mm512_set1_epi32(12),
        _ => _mm512_set1_epi32(128),
    };
    _mm512_and_si512(_mm512_sub_epi32(_mm512_setzero_si512(), offset), _mm512_set1_epi32(0xFFFF))
}

/// Low and high nibbles (or all bytes, for 8-bit codes) as unsigned bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn unsigned<const KIND: u8>(v: __m512i) -> [__m512i; 2] {
    if KIND == kind::INT8 {
        return [_mm512_xor_si512(v, _mm512_set1_epi8(-128)), v];
    }
    let mask = _mm512_set1_epi8(15);
    let (low, high) = (_mm512_and_si512(v, mask), _mm512_and_si512(_mm512_srli_epi32::<4>(v), mask));
    if KIND == kind::MXFP4 {
        // 2 * E2M1 + 12
        let values = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
        let table = _mm512_broadcast_i32x4(values);
        return [_mm512_shuffle_epi8(table, low), _mm512_shuffle_epi8(table, high)];
    }
    [low, high]
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn tile_float(part: &Part<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    match kind::of(tiles.layout) {
        kind::SYMMETRIC4 => float_sized::<{ kind::SYMMETRIC4 }>(tiles, out),
        kind::AFFINE4 => float_sized::<{ kind::AFFINE4 }>(tiles, out),
        kind::MXFP4 => float_sized::<{ kind::MXFP4 }>(tiles, out),
        _ => float_sized::<{ kind::INT8 }>(tiles, out),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn float_sized<const KIND: u8>(tiles: Tiles<'_>, out: &mut [f32]) {
    with_size!(
        tiles.part,
        [(1, 1)(1, 2)(1, 3)(1, 4)(1, 5)(1, 6)(2, 1)(2, 2)(2, 3)(2, 4)(2, 5)(2, 6)],
        T,
        C,
        float::<KIND, T, C>(tiles, out)
    );
}

/// Nibbles become floats by one table lookup, which reads only the low four bits of each lane and so needs no mask.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn float<const KIND: u8, const T: usize, const C: usize>(tiles: Tiles<'_>, out: &mut [f32]) {
    let layout = tiles.layout;
    let tile = tiles.tiles::<T>();
    let mut x = [std::ptr::null::<f32>(); C];
    for c in 0..C {
        x[c] = tiles.part.x.row(tiles.part.col + c)[..layout.blocks * BLOCK].as_ptr();
    }
    let table = values::<KIND>();
    let mut rows = [[_mm512_setzero_ps(); C]; T];
    for group in 0..layout.groups {
        let mut scale = [_mm512_setzero_ps(); T];
        let mut zero = [_mm512_setzero_ps(); T];
        for t in 0..T {
            // SAFETY: the tiles have this group.
            scale[t] = unsafe { scales(layout, tile[t], group) };
            if KIND == kind::AFFINE4 {
                // SAFETY: as above, and the layout is affine.
                zero[t] = _mm512_cvtepi32_ps(unsafe { zeros(layout, tile[t], group) });
            }
        }
        for block in tiles.blocks(group) {
            let mut sums = [[_mm512_setzero_ps(); C]; T];
            for chain in 0..4 {
                let mut partial = [[_mm512_setzero_ps(); C]; T];
                let mut v = [_mm512_setzero_si512(); T];
                for half in 0..2 {
                    for t in 0..T {
                        if KIND == kind::INT8 || half == 0 {
                            prefetch(
                                tile[t],
                                layout.codes_offset + 64 * (block * kind::vectors(KIND) + chain + 4 * half),
                            );
                        }
                        // SAFETY: the tiles have this block.
                        v[t] = match (KIND, half) {
                            (kind::INT8, _) => unsafe { load::<KIND>(layout, tile[t], block, chain + 4 * half) },
                            (_, 0) => unsafe { load::<KIND>(layout, tile[t], block, chain) },
                            _ => _mm512_srli_epi32::<4>(unsafe { load::<KIND>(layout, tile[t], block, chain) }),
                        };
                    }
                    for j in 0..4 {
                        let mut w = [_mm512_setzero_ps(); T];
                        for t in 0..T {
                            w[t] = match KIND {
                                kind::INT8 => {
                                    _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(v[t])))
                                }
                                kind::AFFINE4 => _mm512_sub_ps(_mm512_permutexvar_ps(v[t], table), zero[t]),
                                _ => _mm512_permutexvar_ps(v[t], table),
                            };
                            v[t] = _mm512_srli_epi32::<8>(v[t]);
                        }
                        for c in 0..C {
                            // SAFETY: each row of activations has 32 values for each block of the tiles.
                            let a = _mm512_set1_ps(unsafe { *x[c].add(block * BLOCK + 16 * half + 4 * chain + j) });
                            for t in 0..T {
                                partial[t][c] = _mm512_fmadd_ps(w[t], a, partial[t][c]);
                            }
                        }
                    }
                }
                for c in 0..C {
                    for t in 0..T {
                        sums[t][c] = if chain == 0 { partial[t][c] } else { _mm512_add_ps(sums[t][c], partial[t][c]) };
                    }
                }
            }
            for c in 0..C {
                for t in 0..T {
                    rows[t][c] = _mm512_fmadd_ps(sums[t][c], scale[t], rows[t][c]);
                }
            }
        }
    }
    for t in 0..T {
        for c in 0..C {
            store(out, c * T + t, rows[t][c]);
        }
    }
}

/// The value of each nibble.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn values<const KIND: u8>() -> __m512 {
    let mut values = [0f32; 16];
    for (code, value) in values.iter_mut().enumerate() {
        *value = match KIND {
            kind::SYMMETRIC4 => code as f32 - 8.0,
            kind::MXFP4 => scalar::E2M1_TIMES_2[code] as f32,
            _ => code as f32,
        };
    }
    // SAFETY: 16 readable floats, and the load has no alignment demand.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

const F32: u8 = 0;
const F16: u8 = 1;
const BF16: u8 = 2;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn plain(part: &Part<'_>, out: &mut [f32]) {
    match part.matrix.store {
        MatrixStore::Plain(DType::F32) => plain_sized::<F32>(part, out),
        MatrixStore::Plain(DType::F16) => plain_sized::<F16>(part, out),
        MatrixStore::Plain(_) => plain_sized::<BF16>(part, out),
        MatrixStore::Tiled(_) => unreachable!("tiles have their own kernels"),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn plain_sized<const TYPE: u8>(part: &Part<'_>, out: &mut [f32]) {
    with_size!(
        part,
        [(1, 1)(1, 2)(1, 3)(1, 4)(1, 5)(1, 6)(2, 1)(2, 2)(2, 3)(2, 4)(2, 5)(2, 6)(3, 1)(3, 2)(3, 3)(3, 4)(3, 5)(3, 6)(
            4, 1
        )(4, 2)(4, 3)(4, 4)(4, 5)(4, 6)],
        R,
        C,
        rows::<TYPE, R, C>(part, out)
    );
}

/// `R` rows times `C` tokens, 16 elements of K at a time; what is left of a row is masked, and its lanes are left alone.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn rows<const TYPE: u8, const R: usize, const C: usize>(part: &Part<'_>, out: &mut [f32]) {
    let cols = part.matrix.cols;
    let size = if TYPE == F32 { 4 } else { 2 };
    let w = part.matrix.data[part.item * cols * size..][..R * cols * size].as_ptr();
    let mut x = [std::ptr::null(); C];
    for c in 0..C {
        x[c] = part.x.row(part.col + c)[..cols].as_ptr();
    }
    let mut sums = [[_mm512_setzero_ps(); C]; R];
    let whole = cols / 16 * 16;
    for k in (0..whole).step_by(16) {
        let mut a = [_mm512_setzero_ps(); C];
        for c in 0..C {
            // SAFETY: 16 elements from k on lie inside the row of activations.
            a[c] = unsafe { _mm512_loadu_ps(x[c].add(k)) };
        }
        for r in 0..R {
            if R > 1 && k * size % 64 == 0 {
                _mm_prefetch::<_MM_HINT_T1>(w.wrapping_add(((r + R) * cols + k) * size).cast());
            }
            // SAFETY: 16 elements from k on lie inside row r of the weights.
            let w = unsafe { widened::<TYPE>(w.add((r * cols + k) * size), !0) };
            for c in 0..C {
                sums[r][c] = _mm512_fmadd_ps(w, a[c], sums[r][c]);
            }
        }
    }
    if whole < cols {
        let mask = (1 << (cols - whole)) - 1;
        for c in 0..C {
            // SAFETY: only the elements of the mask are read, which lie inside the row.
            let a = unsafe { _mm512_maskz_loadu_ps(mask, x[c].add(whole)) };
            for r in 0..R {
                // SAFETY: as above, for row r of the weights.
                let w = unsafe { widened::<TYPE>(w.add((r * cols + whole) * size), mask) };
                sums[r][c] = _mm512_mask3_fmadd_ps(w, a, sums[r][c], mask);
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            out[c * R + r] = fold(sums[r][c]);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn mix<const TYPE: u8>(mix: &Mix<'_>, out: &mut [[f32; 16]]) {
    for (weights, out) in mix.weights.chunks(8).zip(out.chunks_mut(8)) {
        let values = mix.values;
        match weights.len() {
            1 => mix_sized::<TYPE, 1>(values, mix.stride, weights, out),
            2 => mix_sized::<TYPE, 2>(values, mix.stride, weights, out),
            3 => mix_sized::<TYPE, 3>(values, mix.stride, weights, out),
            4 => mix_sized::<TYPE, 4>(values, mix.stride, weights, out),
            5 => mix_sized::<TYPE, 5>(values, mix.stride, weights, out),
            6 => mix_sized::<TYPE, 6>(values, mix.stride, weights, out),
            7 => mix_sized::<TYPE, 7>(values, mix.stride, weights, out),
            _ => mix_sized::<TYPE, 8>(values, mix.stride, weights, out),
        }
    }
}

/// `R` outputs, all in registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn mix_sized<const TYPE: u8, const R: usize>(values: &[u8], stride: usize, weights: &[&[f32]], out: &mut [[f32; 16]]) {
    let size = if TYPE == F32 { 4 } else { 2 };
    let count = weights[0].len();
    let mut w = [std::ptr::null::<f32>(); R];
    for r in 0..R {
        w[r] = weights[r][..count].as_ptr();
    }
    let mut sums = [_mm512_setzero_ps(); R];
    for i in 0..count {
        // SAFETY: the values have 16 elements for each weight.
        let v = unsafe { widened::<TYPE>(values.as_ptr().add(i * stride * size), !0) };
        for r in 0..R {
            // SAFETY: there are `count` weights for each output.
            sums[r] = _mm512_fmadd_ps(v, _mm512_set1_ps(unsafe { *w[r].add(i) }), sums[r]);
        }
    }
    for r in 0..R {
        store(&mut out[r], 0, sums[r]);
    }
}

/// The elements of the mask as floats.
///
/// # Safety
/// They are readable at `from`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn widened<const TYPE: u8>(from: *const u8, mask: __mmask16) -> __m512 {
    if TYPE == F32 {
        // SAFETY: the caller's promise.
        return unsafe { _mm512_maskz_loadu_ps(mask, from.cast()) };
    }
    // SAFETY: the caller's promise.
    let half = unsafe { _mm256_maskz_loadu_epi16(mask, from.cast()) };
    if TYPE == F16 {
        return _mm512_cvtph_ps(half);
    }
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
}

/// Folds 16 lanes: 8, 4, 2, 1.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn fold(v: __m512) -> f32 {
    let upper = _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(v)));
    let eight = _mm256_add_ps(_mm512_castps512_ps256(v), upper);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn quantize(values: &[f32], blocks: &mut [Q8Block]) {
    for (values, block) in values.chunks_exact(BLOCK).zip(blocks) {
        // SAFETY: 32 readable floats, and the loads have no alignment demand.
        let (low, high) = unsafe { (_mm512_loadu_ps(values.as_ptr()), _mm512_loadu_ps(values.as_ptr().add(16))) };
        // max returns its second operand for NaN, so NaN is skipped.
        let max = _mm512_max_ps(_mm512_abs_ps(low), _mm512_setzero_ps());
        let absmax = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(high), max));
        let scale = absmax / 127.0;
        let inverse = _mm512_set1_ps(if scale > 0.0 { 1.0 / scale } else { 0.0 });
        let (low, high) = (rounded(_mm512_mul_ps(low, inverse)), rounded(_mm512_mul_ps(high, inverse)));
        // SAFETY: 32 writable bytes, and the stores have no alignment demand.
        unsafe {
            let to = block.codes.as_mut_ptr();
            _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(low));
            _mm_storeu_si128(to.add(16).cast(), _mm512_cvtepi32_epi8(high));
        }
        block.scale = scale;
        block.sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
    }
}

/// Nearest integer, ties away from zero, clamped to -127..=127; zero for NaN.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn rounded(v: __m512) -> __m512i {
    let v = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(v, v), v);
    let v = _mm512_max_ps(_mm512_min_ps(v, _mm512_set1_ps(127.0)), _mm512_set1_ps(-127.0));
    let whole = _mm512_roundscale_ps::<{ _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC }>(v);
    let rest = _mm512_abs_ps(_mm512_sub_ps(v, whole));
    let away = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(rest, _mm512_set1_ps(0.5));
    let codes = _mm512_cvttps_epi32(whole);
    let sign = _mm512_or_si512(_mm512_srai_epi32::<31>(_mm512_castps_si512(v)), _mm512_set1_epi32(1));
    _mm512_mask_add_epi32(codes, away, codes, sign)
}
