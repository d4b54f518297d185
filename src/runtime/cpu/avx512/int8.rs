//! AVX-512: tiles times int8 activations, and the rounding of activations to int8.

use super::super::acts::Q8Block;
use super::super::kernels::{Part, Tiles, kind, with_size};
use super::{load, scales, store, zeros};
use crate::scheme::{BLOCK, TileLayout};
use std::arch::x86_64::*;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn tile_int8(part: &Part<'_>, out: &mut [f32]) {
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
            // SAFETY: the tiles have this block, and so has each row of activations.
            let sums = unsafe { block_sums::<KIND, T, C>(layout, &tile, &x, block, &offset) };
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

/// Integer dot products of a block.
///
/// # Safety
/// Each of `tile` points to a tile of the layout that has the block, and each of `x` to as many blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn block_sums<const KIND: u8, const T: usize, const C: usize>(
    layout: &TileLayout,
    tile: &[*const u8; T],
    x: &[*const Q8Block; C],
    block: usize,
    offset: &[__m512i; T],
) -> [[__m512i; C]; T] {
    let mut sums = [[_mm512_setzero_si512(); C]; T];
    for c in 0..C {
        // The low half of the sum is its exact i16 value, and the high half of an offset is zero.
        // SAFETY: the caller's promise.
        let sum = _mm512_set1_epi32(unsafe { (*x[c].add(block)).sum });
        for t in 0..T {
            sums[t][c] = _mm512_madd_epi16(sum, offset[t]);
        }
    }
    for i in 0..kind::vectors(KIND) {
        let mut w = [[_mm512_setzero_si512(); 2]; T];
        for t in 0..T {
            // SAFETY: the caller's promise.
            w[t] = unsigned::<KIND>(unsafe { load::<KIND>(layout, tile[t], block, i) });
        }
        for half in 0..8 / kind::vectors(KIND) {
            for c in 0..C {
                // SAFETY: the caller's promise; four codes from there on lie inside the block.
                let a = unsafe { (*x[c].add(block)).codes.as_ptr().add(4 * i + 16 * half) };
                // SAFETY: they are readable, and any bytes are an i32.
                let a = _mm512_set1_epi32(unsafe { a.cast::<i32>().read_unaligned() });
                for t in 0..T {
                    sums[t][c] = _mm512_dpbusd_epi32(sums[t][c], w[t][half], a);
                }
            }
        }
    }
    sums
}

/// Minus what [`unsigned`] adds to a code (per row), as an i16 in the low half of each lane.
///
/// # Safety
/// `tile` points to a tile of the layout that has the group.
#[inline]
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
#[inline]
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
pub(super) fn quantize(values: &[f32], blocks: &mut [Q8Block]) {
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
#[inline]
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
