//! NEON: tiles times 16-bit activations.

use super::super::acts::{GROUP_BLOCKS, Q16Group};
use super::super::kernels::{Part, Tiles, kind, with_kind, with_size};
use super::{QUARTER, scales, signed, store, zeros};
use crate::scheme::{BLOCK, TILE_ROWS};
use std::arch::aarch64::*;

#[target_feature(enable = "neon")]
pub(super) fn tile_int16(part: &Part<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    with_kind!(tiles.layout, KIND, int16_sized::<KIND>(tiles, out))
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
