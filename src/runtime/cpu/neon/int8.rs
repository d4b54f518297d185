//! NEON: tiles times int8 activations.

use super::super::acts::{GROUP, GROUP_BLOCKS, Q8Group};
use super::super::kernels::{Part, Tiles, kind, with_kind, with_size};
use super::{QUARTER, scales, signed, store, zeros};
use crate::scheme::{BLOCK, TILE_ROWS};
use std::arch::aarch64::*;

#[target_feature(enable = "neon")]
pub(super) fn tile_int8(part: &Part<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    with_kind!(tiles.layout, KIND, int8_sized::<KIND>(tiles, out))
}

#[target_feature(enable = "neon")]
fn int8_sized<const KIND: u8>(tiles: Tiles<'_>, out: &mut [f32]) {
    with_size!(tiles.part, [(1, 1)(1, 2)(1, 3)(1, 4)], _ONE, C, int8::<KIND, C>(tiles, out));
}

/// Products of bytes fit i16, and so do sums of two: |w| <= 128, |a| <= 127.
#[target_feature(enable = "neon")]
fn int8<const KIND: u8, const C: usize>(tiles: Tiles<'_>, out: &mut [f32]) {
    let (layout, [tile]) = (tiles.layout, tiles.tiles::<1>());
    let groups = layout.blocks.div_ceil(GROUP_BLOCKS);
    let mut x: [&[Q8Group]; C] = [&[]; C];
    for c in 0..C {
        x[c] = &tiles.part.x.row_q8(tiles.part.col + c)[..groups];
    }
    let mut rows = [[vdupq_n_f32(0.0); C]; 4];
    for (group, quarter) in (0..groups).flat_map(|group| (0..4).map(move |quarter| (group, quarter))) {
        let mut totals = [vdupq_n_f32(0.0); C];
        for (blocks, scale) in tiles.runs(group) {
            let mut sums = [[vdupq_n_s32(0); 2]; C];
            let mut starts = [0; C];
            for block in blocks {
                let in_group = block % GROUP_BLOCKS;
                for i in 0..4 {
                    // SAFETY: the tile has this block.
                    let w = unsafe { signed::<KIND>(layout, tile, quarter, block, i) };
                    for c in 0..C {
                        for upper in 0..2 {
                            let a = broadcast(&x[c][group].codes, BLOCK * in_group + 4 * i + 16 * upper);
                            let (low, high) =
                                (vmull_s8(vget_low_s8(w[upper]), vget_low_s8(a)), vmull_high_s8(w[upper], a));
                            sums[c] = [vpadalq_s16(sums[c][0], low), vpadalq_s16(sums[c][1], high)];
                        }
                    }
                }
                for c in 0..C {
                    starts[c] += x[c][group].starts[in_group];
                }
            }
            let zero = match KIND {
                // SAFETY: the tile has this group of scales, and the layout is affine.
                kind::AFFINE4 => vreinterpretq_s32_u32(unsafe { zeros(layout, tile, quarter, scale) }),
                _ => vdupq_n_s32(0),
            };
            // SAFETY: the tile has this group of scales.
            let scale = unsafe { scales(layout, tile, quarter, scale) };
            for c in 0..C {
                // The start is -16 times the sum of the codes.
                let sum = vmlaq_s32(vpaddq_s32(sums[c][0], sums[c][1]), zero, vdupq_n_s32(starts[c] / 16));
                totals[c] = vfmaq_f32(totals[c], vcvtq_f32_s32(sum), scale);
            }
        }
        for c in 0..C {
            rows[quarter][c] = vfmaq_n_f32(rows[quarter][c], totals[c], x[c][group].scale);
        }
    }
    for (quarter, c) in (0..4).flat_map(|quarter| (0..C).map(move |c| (quarter, c))) {
        store(out, c * TILE_ROWS + QUARTER * quarter, rows[quarter][c]);
    }
}

/// Codes `k..k + 4` in every lane.
#[inline]
#[target_feature(enable = "neon")]
fn broadcast(codes: &[i8; GROUP], k: usize) -> int8x16_t {
    let four: [i8; 4] = codes[k..k + 4].try_into().expect("four codes");
    vreinterpretq_s8_s32(vdupq_n_s32(i32::from_ne_bytes(four.map(|code| code as u8))))
}
