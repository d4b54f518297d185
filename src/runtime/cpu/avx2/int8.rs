//! AVX2: tiles times int8 activations, and the rounding of activations to int8.

use super::super::acts::{GROUP, GROUP_BLOCKS, Q8Group};
use super::super::kernels::{Part, Tiles, kind, with_kind, with_size};
use super::{HALF, load, nibbles, scales, store, zeros};
use crate::scheme::{BLOCK, TILE_ROWS, TileLayout};
use std::arch::x86_64::*;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tile_int8(part: &Part<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    with_kind!(tiles.layout, KIND, int8_sized::<KIND>(tiles, out))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn int8_sized<const KIND: u8>(tiles: Tiles<'_>, out: &mut [f32]) {
    with_size!(tiles.part, [(1, 1)(1, 2)(1, 3)(1, 4)], _ONE, C, {
        for half in 0..2 {
            int8::<KIND, C>(tiles, half, out);
        }
    });
}

/// `vpmaddubsw` never saturates here: nibbles give at most 2 * 31 * 127 per pair; for bytes |w| <= 128 is the unsigned
/// operand and the activation, which is never -128, takes the sign, so that a pair is at most 2 * 128 * 127 = 32512.
#[target_feature(enable = "avx2,fma,f16c")]
fn int8<const KIND: u8, const C: usize>(tiles: Tiles<'_>, half: usize, out: &mut [f32]) {
    let (layout, [tile]) = (tiles.layout, tiles.tiles::<1>());
    let mut x = [[].as_slice(); C];
    for c in 0..C {
        x[c] = &tiles.part.x.row_q8(tiles.part.col + c)[..layout.blocks.div_ceil(GROUP_BLOCKS)];
    }
    let mut rows = [_mm256_setzero_ps(); C];
    for group in 0..layout.blocks.div_ceil(GROUP_BLOCKS) {
        let mut groups = [std::ptr::null::<Q8Group>(); C];
        for c in 0..C {
            groups[c] = &x[c][group];
        }
        let mut totals = [_mm256_setzero_ps(); C];
        for (blocks, scale) in tiles.runs(group) {
            let mut sums = [_mm256_setzero_si256(); C];
            let zero = match KIND {
                // SAFETY: the tile has this group of scales, and the layout is affine.
                kind::AFFINE4 => unsafe { zeros_less_offset(layout, tile, half, scale) },
                _ => _mm256_setzero_si256(),
            };
            for block in blocks {
                // SAFETY: the tile has this block, and the activations belong to its group.
                unsafe { add_block::<KIND, C>(layout, tile, half, block, &groups, zero, &mut sums) };
            }
            // SAFETY: the tile has this group of scales.
            let scale = unsafe { scales(layout, tile, half, scale) };
            for c in 0..C {
                totals[c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[c]), scale, totals[c]);
            }
        }
        for c in 0..C {
            rows[c] = _mm256_fmadd_ps(totals[c], _mm256_set1_ps(x[c][group].scale), rows[c]);
        }
    }
    for c in 0..C {
        store(out, c * TILE_ROWS + HALF * half, rows[c]);
    }
}

/// The zero points of 8 rows minus 16, in each byte of the row.
///
/// # Safety
/// `tile` points to a tile of the (affine) layout that has the group.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn zeros_less_offset(layout: &TileLayout, tile: *const u8, half: usize, group: usize) -> __m256i {
    // SAFETY: the caller's promise.
    let zeros = unsafe { zeros(layout, tile, half, group) };
    let first = _mm256_setr_epi8(
        0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12, 0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12,
    );
    _mm256_sub_epi8(_mm256_shuffle_epi8(zeros, first), _mm256_set1_epi8(16))
}

/// Adds the integer dot products of a block.
///
/// # Safety
/// `tile` points to a tile of the layout that has the block, and each of `x` to the activations of its group.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn add_block<const KIND: u8, const C: usize>(
    layout: &TileLayout,
    tile: *const u8,
    half: usize,
    block: usize,
    x: &[*const Q8Group; C],
    zero: __m256i,
    sums: &mut [__m256i; C],
) {
    let ones = _mm256_set1_epi16(1);
    let in_group = block % GROUP_BLOCKS;
    let mut pairs = [_mm256_setzero_si256(); C];
    for i in 0..kind::vectors(KIND) {
        // SAFETY: the caller's promise.
        let v = unsafe { load::<KIND>(layout, tile, half, block, i) };
        let w = unsigned::<KIND>(v, zero);
        for c in 0..C {
            // SAFETY: the caller's promise; four codes from 4 i or 16 + 4 i on lie inside the block.
            let a = |k| unsafe { broadcast((*x[c]).codes.as_ptr().add(BLOCK * in_group + k)) };
            if KIND == kind::INT8 {
                let products = _mm256_maddubs_epi16(w[0], _mm256_sign_epi8(a(4 * i), w[1]));
                sums[c] = _mm256_add_epi32(sums[c], _mm256_madd_epi16(products, ones));
            } else if KIND == kind::NL4 {
                for (w, k) in [(flipped(w[0]), 4 * i), (flipped(w[1]), 16 + 4 * i)] {
                    let products = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a(k), w));
                    sums[c] = _mm256_add_epi32(sums[c], _mm256_madd_epi16(products, ones));
                }
            } else {
                pairs[c] = _mm256_add_epi16(pairs[c], _mm256_maddubs_epi16(w[0], a(4 * i)));
                pairs[c] = _mm256_add_epi16(pairs[c], _mm256_maddubs_epi16(w[1], a(16 + 4 * i)));
            }
        }
        // At most 8 * 3810 per i16 for symmetric nibbles, else 4 * 7874.
        if !matches!(KIND, kind::INT8 | kind::NL4) && (i == 3 || i == 1 && KIND != kind::SYMMETRIC4) {
            for c in 0..C {
                sums[c] = _mm256_add_epi32(sums[c], _mm256_madd_epi16(pairs[c], ones));
                pairs[c] = _mm256_setzero_si256();
            }
        }
    }
    for c in 0..C {
        // SAFETY: the caller's promise.
        let start = _mm256_set1_epi32(unsafe { (*x[c]).starts[in_group] });
        match KIND {
            kind::SYMMETRIC4 => sums[c] = _mm256_add_epi32(sums[c], _mm256_srai_epi32::<1>(start)),
            kind::INT8 | kind::NL4 => {}
            _ => sums[c] = _mm256_add_epi32(sums[c], start),
        }
    }
}

/// Signed bytes plus 128, or back.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn flipped(v: __m256i) -> __m256i {
    _mm256_xor_si256(v, _mm256_set1_epi8(-128))
}

/// Low and high nibbles as unsigned bytes: their values plus 8 for symmetric ones, 128 for nl4, 16 otherwise. For 8-bit codes their
/// magnitudes, and the codes themselves for the signs.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn unsigned<const KIND: u8>(v: __m256i, zero: __m256i) -> [__m256i; 2] {
    if KIND == kind::INT8 {
        return [_mm256_abs_epi8(v), v];
    }
    let [low, high] = nibbles(v);
    match KIND {
        kind::AFFINE4 => [_mm256_sub_epi8(low, zero), _mm256_sub_epi8(high, zero)],
        kind::MXFP4 | kind::NL4 => {
            let offset = if KIND == kind::MXFP4 { 16 } else { -128 };
            let values = kind::table(KIND).map(|value| value.wrapping_add(offset));
            // SAFETY: 16 readable bytes, and the load has no alignment demand.
            let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(values.as_ptr().cast()) });
            [_mm256_shuffle_epi8(table, low), _mm256_shuffle_epi8(table, high)]
        }
        _ => [low, high],
    }
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
pub(super) fn quantize(values: &[f32], groups: &mut [Q8Group]) {
    for (values, group) in values.as_chunks::<GROUP>().0.iter().zip(groups) {
        let mut max = _mm256_setzero_ps();
        for i in 0..GROUP / 8 {
            // max returns its second operand for NaN, so NaN is skipped.
            max = _mm256_max_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0), eight(values, i)), max);
        }
        let four = _mm_max_ps(_mm256_castps256_ps128(max), _mm256_extractf128_ps::<1>(max));
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        group.scale = _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two))) / 127.0;
        let inverse = _mm256_set1_ps(if group.scale > 0.0 { 1.0 / group.scale } else { 0.0 });
        for block in 0..GROUP_BLOCKS {
            let mut codes = [_mm256_setzero_si256(); 4];
            let mut sums = _mm256_setzero_si256();
            for i in 0..4 {
                codes[i] = rounded(_mm256_mul_ps(eight(values, 4 * block + i), inverse));
                sums = _mm256_add_epi32(sums, codes[i]);
            }
            let words = [_mm256_packs_epi32(codes[0], codes[1]), _mm256_packs_epi32(codes[2], codes[3])];
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]), order);
            let to: &mut [i8; BLOCK] = group.codes[BLOCK * block..].first_chunk_mut().expect("room for a block");
            // SAFETY: 32 writable bytes, and the store has no alignment demand.
            unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), bytes) };
            let four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
            let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
            let one = _mm_add_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two));
            group.starts[block] = -16 * _mm_cvtsi128_si32(one);
        }
        group.start = group.starts.iter().sum();
    }
}

/// Values `8 i..8 i + 8`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn eight(values: &[f32; GROUP], i: usize) -> __m256 {
    // SAFETY: 8 readable floats, and the load has no alignment demand.
    unsafe { _mm256_loadu_ps(values.as_chunks::<8>().0[i].as_ptr()) }
}

/// Nearest integer, ties away from zero, clamped to -127..=127; zero for NaN.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn rounded(v: __m256) -> __m256i {
    let v = _mm256_and_ps(v, _mm256_cmp_ps::<_CMP_ORD_Q>(v, v));
    let v = _mm256_max_ps(_mm256_min_ps(v, _mm256_set1_ps(127.0)), _mm256_set1_ps(-127.0));
    // The largest float below a half, with the sign of the value: added, it carries exactly the halves over.
    let half = _mm256_or_ps(_mm256_and_ps(v, _mm256_set1_ps(-0.0)), _mm256_set1_ps(0.5f32.next_down()));
    _mm256_cvttps_epi32(_mm256_add_ps(v, half))
}
