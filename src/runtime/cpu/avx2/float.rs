//! AVX2: tiles times float activations.

use super::super::kernels::{Part, Tiles, kind, with_kind, with_size};
use super::{HALF, load, nibbles, scales, store, zeros};
use crate::scheme::{BLOCK, TILE_ROWS, TileLayout};
use std::arch::x86_64::*;

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tile_float(part: &Part<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    with_kind!(tiles.layout, KIND, float_sized::<KIND>(tiles, out))
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
#[inline]
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
    let values = kind::table(KIND);
    // SAFETY: 16 readable bytes, and the load has no alignment demand.
    let table = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(values.as_ptr().cast()) });
    let eight = _mm256_set1_epi8(8);
    match KIND {
        kind::SYMMETRIC4 => [_mm256_sub_epi8(low, eight), _mm256_sub_epi8(high, eight)],
        kind::MXFP4 | kind::NL4 => [_mm256_shuffle_epi8(table, low), _mm256_shuffle_epi8(table, high)],
        _ => [low, high],
    }
}
