//! NEON: tiles times float activations.

use super::super::kernels::{Part, Tiles, kind, with_kind, with_size};
use super::{QUARTER, scales, signed, store, zeros};
use crate::scheme::{BLOCK, TILE_ROWS};
use std::arch::aarch64::*;

#[target_feature(enable = "neon")]
pub(super) fn tile_float(part: &Part<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    with_kind!(tiles.layout, KIND, float_sized::<KIND>(tiles, out))
}

#[target_feature(enable = "neon")]
fn float_sized<const KIND: u8>(tiles: Tiles<'_>, out: &mut [f32]) {
    with_size!(tiles.part, [(1, 1)(1, 2)(1, 3)(1, 4)], _ONE, C, float::<KIND, C>(tiles, out));
}

#[target_feature(enable = "neon")]
fn float<const KIND: u8, const C: usize>(tiles: Tiles<'_>, out: &mut [f32]) {
    let (layout, [tile]) = (tiles.layout, tiles.tiles::<1>());
    let mut x: [&[[f32; BLOCK]]; C] = [&[]; C];
    for c in 0..C {
        x[c] = &tiles.part.x.row(tiles.part.col + c).as_chunks().0[..layout.blocks];
    }
    let mut rows = [[vdupq_n_f32(0.0); C]; 4];
    for group in 0..layout.groups {
        for quarter in 0..4 {
            // SAFETY: the tile has this group.
            let scale = unsafe { scales(layout, tile, quarter, group) };
            let zero = match KIND {
                // SAFETY: as above, and the layout is affine.
                kind::AFFINE4 => vcvtq_f32_u32(unsafe { zeros(layout, tile, quarter, group) }),
                _ => vdupq_n_f32(0.0),
            };
            for block in tiles.blocks(group) {
                let mut sums = [vdupq_n_f32(0.0); C];
                for chain in 0..4 {
                    // SAFETY: the tile has this block.
                    let w = unsafe { signed::<KIND>(layout, tile, quarter, block, chain) };
                    let mut partial = [vdupq_n_f32(0.0); C];
                    for upper in 0..2 {
                        let mut lanes = vreinterpretq_s32_s8(w[upper]);
                        for j in 0..4 {
                            let mut w = vcvtq_f32_s32(vshrq_n_s32::<24>(vshlq_n_s32::<24>(lanes)));
                            if KIND == kind::AFFINE4 {
                                w = vsubq_f32(w, zero);
                            }
                            lanes = vshrq_n_s32::<8>(lanes);
                            for c in 0..C {
                                partial[c] = vfmaq_n_f32(partial[c], w, x[c][block][16 * upper + 4 * chain + j]);
                            }
                        }
                    }
                    for c in 0..C {
                        sums[c] = if chain == 0 { partial[c] } else { vaddq_f32(sums[c], partial[c]) };
                    }
                }
                for c in 0..C {
                    rows[quarter][c] = vfmaq_f32(rows[quarter][c], sums[c], scale);
                }
            }
        }
    }
    for (quarter, c) in (0..4).flat_map(|quarter| (0..C).map(move |c| (quarter, c))) {
        store(out, c * TILE_ROWS + QUARTER * quarter, rows[quarter][c]);
    }
}
