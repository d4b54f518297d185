//! AVX2: tiles times 16-bit activations, a pair of products per row at a time by `vpmaddwd`.

use super::super::acts::{GROUP_BLOCKS, Q16Group};
use super::super::kernels::{Part, Tiles, kind, with_kind, with_size};
use super::{HALF, load, nibbles, scales, store, zeros};
use crate::scheme::{BLOCK, TILE_ROWS, TileLayout};
use std::arch::x86_64::*;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tile_int16(part: &Part<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    with_kind!(tiles.layout, KIND, sized::<KIND>(tiles, out))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn sized<const KIND: u8>(tiles: Tiles<'_>, out: &mut [f32]) {
    with_size!(tiles.part, [(1, 1)(1, 2)(1, 3)(1, 4)], _ONE, C, {
        for half in 0..2 {
            product::<KIND, C>(tiles, half, out);
        }
    });
}

#[target_feature(enable = "avx2,fma,f16c")]
fn product<const KIND: u8, const C: usize>(tiles: Tiles<'_>, half: usize, out: &mut [f32]) {
    let (layout, [tile]) = (tiles.layout, tiles.tiles::<1>());
    let mut x: [&[Q16Group]; C] = [&[]; C];
    for c in 0..C {
        x[c] = &tiles.part.x.row_q16(tiles.part.col + c)[..layout.blocks.div_ceil(GROUP_BLOCKS)];
    }
    let mut rows = [_mm256_setzero_ps(); C];
    for group in 0..layout.blocks.div_ceil(GROUP_BLOCKS) {
        let x = x.map(|x| &x[group]);
        let mut totals = [_mm256_setzero_ps(); C];
        for (blocks, scale) in tiles.runs(group) {
            // SAFETY: the tile has this group of scales.
            let zero = unsafe { zero_pairs::<KIND>(layout, tile, half, scale) };
            let mut sums = [_mm256_setzero_si256(); C];
            for block in blocks {
                for i in 0..4 {
                    // SAFETY: the tile has this block.
                    let w = unsafe { pairs::<KIND>(layout, tile, half, block, i, zero) };
                    for c in 0..C {
                        let codes = x[c].codes[block % GROUP_BLOCKS * BLOCK + 8 * i..][..8].as_ptr();
                        for s in 0..4 {
                            // SAFETY: a pair of codes is readable, and any bytes are an i32.
                            let pair = unsafe { codes.add(2 * s).cast::<i32>().read_unaligned() };
                            let products = _mm256_madd_epi16(w[s], _mm256_set1_epi32(pair));
                            sums[c] = _mm256_add_epi32(sums[c], products);
                        }
                    }
                }
            }
            // SAFETY: the tile has this group of scales.
            let scale = unsafe { scales(layout, tile, half, scale) };
            for c in 0..C {
                totals[c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[c]), scale, totals[c]);
            }
        }
        for c in 0..C {
            rows[c] = _mm256_fmadd_ps(totals[c], _mm256_set1_ps(x[c].scale), rows[c]);
        }
    }
    for c in 0..C {
        store(out, c * TILE_ROWS + HALF * half, rows[c]);
    }
}

/// The zero points of 8 rows, twice in each lane; zero where there are none.
///
/// # Safety
/// `tile` points to a tile of the layout that has the group.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn zero_pairs<const KIND: u8>(layout: &TileLayout, tile: *const u8, half: usize, group: usize) -> __m256i {
    if KIND != kind::AFFINE4 {
        return _mm256_setzero_si256();
    }
    // SAFETY: the caller's promise, and the layout is affine.
    let zeros = _mm256_min_epi32(unsafe { zeros(layout, tile, half, group) }, _mm256_set1_epi32(15));
    _mm256_or_si256(zeros, _mm256_slli_epi32::<16>(zeros))
}

/// The values of quarter `i` of a block as pairs per row, in the order of [`Q16Group`].
///
/// # Safety
/// `tile` points to a tile of the layout that has the block.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn pairs<const KIND: u8>(
    layout: &TileLayout,
    tile: *const u8,
    half: usize,
    block: usize,
    i: usize,
    zero: __m256i,
) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    let v = unsafe { load::<KIND>(layout, tile, half, block, i) };
    match KIND {
        kind::INT8 => {
            // SAFETY: the caller's promise.
            let upper = unsafe { load::<KIND>(layout, tile, half, block, i + 4) };
            let ([a, b], [c, d]) = (signed_bytes(v), signed_bytes(upper));
            [a, b, c, d]
        }
        kind::MXFP4 | kind::NL4 => {
            let values = kind::table(KIND);
            // SAFETY: 16 readable bytes, and the load has no alignment demand.
            let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(values.as_ptr().cast()) });
            let [low, high] = nibbles(v);
            let ([a, b], [c, d]) =
                (signed_bytes(_mm256_shuffle_epi8(table, low)), signed_bytes(_mm256_shuffle_epi8(table, high)));
            [a, b, c, d]
        }
        _ => {
            let zero = if KIND == kind::SYMMETRIC4 { _mm256_set1_epi16(8) } else { zero };
            let mut w = [v, _mm256_srli_epi32::<8>(v), _mm256_srli_epi32::<4>(v), _mm256_srli_epi32::<12>(v)];
            for w in &mut w {
                *w = _mm256_sub_epi16(_mm256_and_si256(*w, _mm256_set1_epi32(0x000F_000F)), zero);
            }
            w
        }
    }
}

/// Bytes 0 and 2 of each lane, and bytes 1 and 3.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn signed_bytes(v: __m256i) -> [__m256i; 2] {
    [_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(v)), _mm256_srai_epi16::<8>(v)]
}
