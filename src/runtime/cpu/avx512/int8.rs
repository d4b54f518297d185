//! AVX-512: tiles times int8 activations, and the rounding of activations to int8.

use super::super::acts::{GROUP, GROUP_BLOCKS, Q8Group};
use super::super::kernels::{Part, Tiles, kind, with_kind, with_size};
use super::{load, scales, store, zeros};
use crate::scheme::{BLOCK, TileLayout};
use std::arch::x86_64::*;
use std::ops::Range;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn tile_int8(part: &Part<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    with_kind!(tiles.layout, KIND, int8_sized::<KIND>(tiles, out))
}

/// One tile with all columns at once: two tiles would be two streams from memory, and a second walk for further columns unpacks
/// again.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn int8_sized<const KIND: u8>(tiles: Tiles<'_>, out: &mut [f32]) {
    with_size!(
        tiles.part,
        [(1, 1)(1, 2)(1, 3)(1, 4)(1, 5)(1, 6)(1, 7)(1, 8)(1, 9)(1, 10)(1, 11)],
        _ONE,
        C,
        int8::<KIND, C>(tiles, out)
    );
}

/// Integer sums of a run of blocks by `vpdpbusd`: weights made unsigned by an offset, which the starting value takes back.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn int8<const KIND: u8, const C: usize>(tiles: Tiles<'_>, out: &mut [f32]) {
    let (layout, [tile]) = (tiles.layout, tiles.tiles::<1>());
    let mut x = [[].as_slice(); C];
    for c in 0..C {
        x[c] = &tiles.part.x.row_q8(tiles.part.col + c)[..layout.blocks.div_ceil(GROUP_BLOCKS)];
    }
    let mut rows = [_mm512_setzero_ps(); C];
    for group in 0..layout.blocks.div_ceil(GROUP_BLOCKS) {
        let mut groups = [std::ptr::null::<Q8Group>(); C];
        for c in 0..C {
            groups[c] = &x[c][group];
        }
        let mut totals = [_mm512_setzero_ps(); C];
        for (blocks, scale) in tiles.runs(group) {
            // SAFETY: the tile has these blocks, all in this group of scales, and the activations belong to the group.
            let sums = unsafe { run_sums::<KIND, C>(layout, tile, &groups, blocks, scale) };
            // SAFETY: the tile has this group of scales.
            let scale = unsafe { scales(layout, tile, scale) };
            for c in 0..C {
                totals[c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[c]), scale, totals[c]);
            }
        }
        for c in 0..C {
            rows[c] = _mm512_fmadd_ps(totals[c], _mm512_set1_ps(x[c][group].scale), rows[c]);
        }
    }
    for c in 0..C {
        store(out, c, rows[c]);
    }
}

/// Integer dot products of a run of blocks, which lies in one group of scales and in one of activations.
///
/// # Safety
/// * `tile` points to a tile of the layout that has the blocks and the scales.
/// * Each of `x` points to the activations of the group of the blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn run_sums<const KIND: u8, const C: usize>(
    layout: &TileLayout,
    tile: *const u8,
    x: &[*const Q8Group; C],
    blocks: Range<usize>,
    scale: usize,
) -> [__m512i; C] {
    let mut sums = [_mm512_setzero_si512(); C];
    let zero = match KIND {
        // SAFETY: the caller's promise, and the layout is affine.
        kind::AFFINE4 => unsafe { zeros_less_offset(layout, tile, scale) },
        _ => _mm512_setzero_si512(),
    };
    for block in blocks {
        let in_group = block % GROUP_BLOCKS;
        for c in 0..C {
            // SAFETY: the caller's promise.
            let start = _mm512_set1_epi32(unsafe { (&raw const (*x[c]).starts).cast::<i32>().add(in_group).read() });
            sums[c] = _mm512_add_epi32(sums[c], for_offset::<KIND>(start));
        }
        for i in 0..kind::vectors(KIND) {
            // SAFETY: the caller's promise.
            let w = unsigned::<KIND>(unsafe { load::<KIND>(layout, tile, block, i) }, zero);
            for half in 0..8 / kind::vectors(KIND) {
                for c in 0..C {
                    // SAFETY: the caller's promise; four codes from there on lie inside the block.
                    let a = unsafe { broadcast(x[c], in_group, 4 * i + 16 * half) };
                    sums[c] = _mm512_dpbusd_epi32(sums[c], w[half], a);
                }
            }
        }
    }
    sums
}

/// Four codes of a block in every lane, from the `k`-th on.
///
/// # Safety
/// `group` points to activations, `block` is one of its blocks, `k` at most 28.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn broadcast(group: *const Q8Group, block: usize, k: usize) -> __m512i {
    // SAFETY: the caller's promise; the codes come first, and any bytes are an i32.
    _mm512_set1_epi32(unsafe { group.cast::<u8>().add(BLOCK * block + k).cast::<i32>().read_unaligned() })
}

/// What takes the offset of [`unsigned`] back, from what would take 16 back.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn for_offset<const KIND: u8>(start: __m512i) -> __m512i {
    match KIND {
        kind::SYMMETRIC4 => _mm512_srai_epi32::<1>(start),
        kind::INT8 | kind::NL4 => _mm512_slli_epi32::<3>(start),
        _ => start,
    }
}

/// The zero points of 16 rows minus 16, in each byte of the row.
///
/// # Safety
/// `tile` points to a tile of the (affine) layout that has the group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn zeros_less_offset(layout: &TileLayout, tile: *const u8, group: usize) -> __m512i {
    // SAFETY: the caller's promise.
    let zeros = unsafe { zeros(layout, tile, group) };
    let pairs = _mm512_or_si512(zeros, _mm512_slli_epi32::<8>(zeros));
    let bytes = _mm512_or_si512(pairs, _mm512_slli_epi32::<16>(pairs));
    _mm512_sub_epi8(bytes, _mm512_set1_epi8(16))
}

/// Low and high nibbles (or all bytes, for 8-bit codes) as unsigned bytes: their values plus 8 for symmetric nibbles,
/// 128 for bytes and nl4, 16 otherwise.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn unsigned<const KIND: u8>(v: __m512i, zero: __m512i) -> [__m512i; 2] {
    if KIND == kind::INT8 {
        return [_mm512_xor_si512(v, _mm512_set1_epi8(-128)), v];
    }
    let mask = _mm512_set1_epi8(15);
    let (low, high) = (_mm512_and_si512(v, mask), _mm512_and_si512(_mm512_srli_epi32::<4>(v), mask));
    match KIND {
        kind::AFFINE4 => [_mm512_sub_epi8(low, zero), _mm512_sub_epi8(high, zero)],
        kind::MXFP4 | kind::NL4 => {
            let offset = if KIND == kind::MXFP4 { 16 } else { -128 };
            let values = kind::table(KIND).map(|value| value.wrapping_add(offset));
            // SAFETY: 16 readable bytes, and the load has no alignment demand.
            let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(values.as_ptr().cast()) });
            [_mm512_shuffle_epi8(table, low), _mm512_shuffle_epi8(table, high)]
        }
        _ => [low, high],
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn quantize(values: &[f32], groups: &mut [Q8Group]) {
    for (values, group) in values.as_chunks::<GROUP>().0.iter().zip(groups) {
        let mut v = [_mm512_setzero_ps(); GROUP / 16];
        let mut max = _mm512_setzero_ps();
        for (v, values) in v.iter_mut().zip(values.as_chunks::<16>().0) {
            // SAFETY: 16 readable floats, and the load has no alignment demand.
            *v = unsafe { _mm512_loadu_ps(values.as_ptr()) };
            // max returns its second operand for NaN, so NaN is skipped.
            max = _mm512_max_ps(_mm512_abs_ps(*v), max);
        }
        group.scale = _mm512_reduce_max_ps(max) / 127.0;
        let inverse = _mm512_set1_ps(if group.scale > 0.0 { 1.0 / group.scale } else { 0.0 });
        for block in 0..GROUP_BLOCKS {
            let mut sum = _mm512_setzero_si512();
            for half in [2 * block, 2 * block + 1] {
                let codes = rounded(_mm512_mul_ps(v[half], inverse));
                sum = _mm512_add_epi32(sum, codes);
                let to: &mut [i8; 16] = group.codes[16 * half..].first_chunk_mut().expect("room for 16 codes");
                // SAFETY: 16 writable bytes, and the store has no alignment demand.
                unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(codes)) };
            }
            group.starts[block] = -16 * _mm512_reduce_add_epi32(sum);
        }
        // `Iterator::sum` is a call in builds without link-time optimization.
        let [a, b, c, d] = group.starts;
        group.start = a + b + c + d;
    }
}

/// Nearest integer, ties away from zero, clamped to -127..=127; zero for NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn rounded(v: __m512) -> __m512i {
    let v = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_ORD_Q>(v, v), v);
    let v = _mm512_max_ps(_mm512_min_ps(v, _mm512_set1_ps(127.0)), _mm512_set1_ps(-127.0));
    // The largest float below a half, with the sign of the value: added, it carries exactly the halves over.
    let sign = _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(i32::MIN));
    let half = _mm512_or_si512(sign, _mm512_castps_si512(_mm512_set1_ps(0.5f32.next_down())));
    _mm512_cvttps_epi32(_mm512_add_ps(v, _mm512_castsi512_ps(half)))
}
