//! AVX-512: tiles times float activations.

use super::super::kernels::{Part, Tiles, kind, with_kind, with_size};
use super::{load, scales, store, zeros};
use crate::scheme::{BLOCK, TileLayout};
use std::arch::x86_64::*;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn tile_float(part: &Part<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    with_kind!(tiles.layout, KIND, float_sized::<KIND>(tiles, out))
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
            for i in 0..4 {
                // SAFETY: the tiles have this block, and so have the activations.
                let chain = unsafe { chain::<KIND, T, C>(layout, &tile, &x, block, i, table, &zero) };
                for c in 0..C {
                    for t in 0..T {
                        sums[t][c] = if i == 0 { chain[t][c] } else { _mm512_add_ps(sums[t][c], chain[t][c]) };
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

/// Chain `i` of a block: k = 4 i.., then k = 16 + 4 i...
///
/// # Safety
/// Each of `tile` points to a tile of the layout that has the block, and each of `x` to as many activations.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn chain<const KIND: u8, const T: usize, const C: usize>(
    layout: &TileLayout,
    tile: &[*const u8; T],
    x: &[*const f32; C],
    block: usize,
    i: usize,
    table: __m512,
    zero: &[__m512; T],
) -> [[__m512; C]; T] {
    let mut sums = [[_mm512_setzero_ps(); C]; T];
    let mut codes = [[_mm512_setzero_si512(); 2]; T];
    for t in 0..T {
        // SAFETY: the caller's promise.
        let v = unsafe { load::<KIND>(layout, tile[t], block, i) };
        codes[t] = match KIND {
            // SAFETY: the caller's promise.
            kind::INT8 => [v, unsafe { load::<KIND>(layout, tile[t], block, i + 4) }],
            _ => [v, _mm512_srli_epi32::<4>(v)],
        };
    }
    for half in 0..2 {
        for j in 0..4 {
            let mut w = [_mm512_setzero_ps(); T];
            for t in 0..T {
                let v = &mut codes[t][half];
                w[t] = match KIND {
                    kind::INT8 => _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(_mm512_slli_epi32::<24>(*v))),
                    kind::AFFINE4 => _mm512_sub_ps(_mm512_permutexvar_ps(*v, table), zero[t]),
                    _ => _mm512_permutexvar_ps(*v, table),
                };
                *v = _mm512_srli_epi32::<8>(*v);
            }
            for c in 0..C {
                // SAFETY: the caller's promise: 32 values for each block.
                let a = _mm512_set1_ps(unsafe { *x[c].add(block * BLOCK + 16 * half + 4 * i + j) });
                for t in 0..T {
                    sums[t][c] = _mm512_fmadd_ps(w[t], a, sums[t][c]);
                }
            }
        }
    }
    sums
}

/// The value of each nibble.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn values<const KIND: u8>() -> __m512 {
    let mut values = [0f32; 16];
    for (code, value) in values.iter_mut().enumerate() {
        *value = match KIND {
            kind::SYMMETRIC4 => code as f32 - 8.0,
            kind::MXFP4 | kind::NL4 => f32::from(kind::table(KIND)[code]),
            _ => code as f32,
        };
    }
    // SAFETY: 16 readable floats, and the load has no alignment demand.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}
