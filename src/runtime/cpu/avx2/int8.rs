//! AVX2: tiles times int8 activations, and the rounding of activations to int8.

use super::super::acts::Q8Block;
use super::super::kernels::{Part, Tiles, kind, with_size};
use super::{HALF, load, nibbles, scales, store, zeros};
use crate::scheme::{BLOCK, TILE_ROWS, TileLayout};
use std::arch::x86_64::*;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tile_int8(part: &Part<'_>, out: &mut [f32]) {
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
#[inline]
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
#[inline]
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
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn broadcast(codes: *const i8) -> __m256i {
    // SAFETY: the caller's promise, and any bytes are an i32.
    _mm256_set1_epi32(unsafe { codes.cast::<i32>().read_unaligned() })
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn quantize(values: &[f32], blocks: &mut [Q8Block]) {
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
#[inline]
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
