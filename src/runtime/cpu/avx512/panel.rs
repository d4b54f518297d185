//! AVX-512: tiles that are unpacked once, times the int8 activations of many columns.
//!
//! A panel is all of K of two tiles as unsigned bytes, in the order in which the product reads them: for each block of 32
//! and each four of K a vector per tile. Its scales are floats, a vector per tile for each run of blocks. Of the two pipes
//! that do `vpdpbusd`, multiplications and fused additions, a run of four blocks takes 32 + 2 slots per tile and column, and
//! four runs of one block 32 + 5; all else fits beside them.

use super::super::acts::{GROUP_BLOCKS, Line, Q8Group};
use super::super::kernels::{Part, Tiles, kind, with_size};
use super::super::panel::{NextTiles, Panel, PanelKernel};
use super::int8::{broadcast, for_offset, unsigned, zeros_less_offset};
use super::{load, scales, store};
use crate::scheme::BLOCK;
use std::arch::x86_64::*;

pub(super) const INT8: PanelKernel = PanelKernel { items: 2, cols: 6, least_cols: 12, unpack, run };

/// Vectors of bytes in a block of a tile.
const VECTORS: usize = BLOCK / 4;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn unpack(part: &Part<'_>, panel: &mut Panel) {
    match (kind::of(Tiles::of(part).layout), part.items) {
        (kind::SYMMETRIC4, 1) => unpack_sized::<{ kind::SYMMETRIC4 }, 1>(part, panel),
        (kind::SYMMETRIC4, _) => unpack_sized::<{ kind::SYMMETRIC4 }, 2>(part, panel),
        (kind::AFFINE4, 1) => unpack_sized::<{ kind::AFFINE4 }, 1>(part, panel),
        (kind::AFFINE4, _) => unpack_sized::<{ kind::AFFINE4 }, 2>(part, panel),
        (kind::MXFP4, 1) => unpack_sized::<{ kind::MXFP4 }, 1>(part, panel),
        (kind::MXFP4, _) => unpack_sized::<{ kind::MXFP4 }, 2>(part, panel),
        (_, 1) => unpack_sized::<{ kind::INT8 }, 1>(part, panel),
        _ => unpack_sized::<{ kind::INT8 }, 2>(part, panel),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn unpack_sized<const KIND: u8, const T: usize>(part: &Part<'_>, panel: &mut Panel) {
    let tiles = Tiles::of(part);
    let (layout, tile) = (tiles.layout, tiles.tiles::<T>());
    panel.codes.resize(layout.blocks * VECTORS * T, Line::default());
    panel.scales.clear();
    for group in 0..layout.blocks.div_ceil(GROUP_BLOCKS) {
        for (blocks, scale) in tiles.runs(group) {
            for t in 0..T {
                let mut line = Line::default();
                // SAFETY: the tiles have this group of scales.
                store(&mut line.0, 0, unsafe { scales(layout, tile[t], scale) });
                panel.scales.push(line);
                let zero = match KIND {
                    // SAFETY: as above, and the layout is affine.
                    kind::AFFINE4 => unsafe { zeros_less_offset(layout, tile[t], scale) },
                    _ => _mm512_setzero_si512(),
                };
                for block in blocks.clone() {
                    let to = &mut panel.codes[block * VECTORS * T..][..VECTORS * T];
                    for i in 0..kind::vectors(KIND) {
                        // SAFETY: the tiles have this block.
                        let w = unsigned::<KIND>(unsafe { load::<KIND>(layout, tile[t], block, i) }, zero);
                        for half in 0..VECTORS / kind::vectors(KIND) {
                            store(&mut to[(i + 4 * half) * T + t].0, 0, _mm512_castsi512_ps(w[half]));
                        }
                    }
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn run(part: &Part<'_>, panel: &Panel, out: &mut [f32]) {
    let layout = part.layout();
    match (kind::of(layout), layout.group_blocks) {
        (kind::SYMMETRIC4, 1) => sized::<{ kind::SYMMETRIC4 }, 1>(part, panel, out),
        (kind::SYMMETRIC4, 2) => sized::<{ kind::SYMMETRIC4 }, 2>(part, panel, out),
        (kind::SYMMETRIC4, _) => sized::<{ kind::SYMMETRIC4 }, 4>(part, panel, out),
        (kind::INT8, 1) => sized::<{ kind::INT8 }, 1>(part, panel, out),
        (kind::INT8, 2) => sized::<{ kind::INT8 }, 2>(part, panel, out),
        (kind::INT8, _) => sized::<{ kind::INT8 }, 4>(part, panel, out),
        // The offset is the same as that of affine codes.
        (_, 1) => sized::<{ kind::MXFP4 }, 1>(part, panel, out),
        (_, 2) => sized::<{ kind::MXFP4 }, 2>(part, panel, out),
        _ => sized::<{ kind::MXFP4 }, 4>(part, panel, out),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn sized<const KIND: u8, const RUN: usize>(part: &Part<'_>, panel: &Panel, out: &mut [f32]) {
    with_size!(
        part,
        [(1, 1)(1, 2)(1, 3)(1, 4)(1, 5)(1, 6)(2, 1)(2, 2)(2, 3)(2, 4)(2, 5)(2, 6)],
        T,
        C,
        product::<KIND, RUN, T, C>(part, panel, out)
    );
}

/// Runs of `RUN` blocks, the last of a row possibly shorter.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn product<const KIND: u8, const RUN: usize, const T: usize, const C: usize>(
    part: &Part<'_>,
    panel: &Panel,
    out: &mut [f32],
) {
    let blocks = part.layout().blocks;
    let groups = blocks.div_ceil(GROUP_BLOCKS);
    let mut x = [std::ptr::null::<Q8Group>(); C];
    for c in 0..C {
        x[c] = part.x.row_q8(part.col + c)[..groups].as_ptr();
    }
    let mut ahead = NextTiles::of(part);
    let codes: &[[Line; T]] = panel.codes[..blocks * VECTORS * T].as_chunks().0;
    let mut scales = panel.scales.as_chunks::<T>().0.iter();
    let out = &mut out[..16 * T * C];
    let mut rows = [[_mm512_setzero_ps(); C]; T];
    out.fill(0.0);
    for group in 0..groups {
        ahead.ask();
        let mut totals = [[_mm512_setzero_ps(); C]; T];
        let until = ((group + 1) * GROUP_BLOCKS).min(blocks);
        for run in 0..GROUP_BLOCKS / RUN {
            let from = group * GROUP_BLOCKS + run * RUN;
            if from >= until {
                break;
            }
            let codes = &codes[from * VECTORS..(from + RUN).min(until) * VECTORS];
            // SAFETY: each row of activations has this group, and the run lies in it.
            let sums = unsafe { sums::<KIND, RUN, T, C>(codes, &x, group, run * RUN) };
            let scale = scales.next().expect("scales for every run");
            for t in 0..T {
                let scale = vector(&scale[t]);
                for c in 0..C {
                    totals[t][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[t][c]), scale, totals[t][c]);
                }
            }
        }
        for c in 0..C {
            // SAFETY: each row of activations has this group.
            let scale = _mm512_set1_ps(unsafe { (*x[c].add(group)).scale });
            for t in 0..T {
                if RUN >= GROUP_BLOCKS {
                    rows[t][c] = _mm512_fmadd_ps(totals[t][c], scale, rows[t][c]);
                } else {
                    // Sums, totals and rows together are more than there are registers.
                    let row: &mut [f32] = &mut out[(c * T + t) * 16..][..16];
                    // SAFETY: 16 readable floats, and the load has no alignment demand.
                    let sum = _mm512_fmadd_ps(totals[t][c], scale, unsafe { _mm512_loadu_ps(row.as_ptr()) });
                    store(row, 0, sum);
                }
            }
        }
    }
    if RUN >= GROUP_BLOCKS {
        for c in 0..C {
            for t in 0..T {
                store(out, c * T + t, rows[t][c]);
            }
        }
    }
}

/// Integer dot products of a run that starts with this block of the group; `codes` are its vectors.
///
/// # Safety
/// Each of `x` points to activations that have the group; the run takes no more blocks of it than there are.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn sums<const KIND: u8, const RUN: usize, const T: usize, const C: usize>(
    codes: &[[Line; T]],
    x: &[*const Q8Group; C],
    group: usize,
    first: usize,
) -> [[__m512i; C]; T] {
    let mut sums = [[_mm512_setzero_si512(); C]; T];
    for c in 0..C {
        // SAFETY: the caller's promise.
        let x = unsafe { &*x[c].add(group) };
        let start = match RUN {
            1 => _mm512_set1_epi32(x.starts[first]),
            2 => _mm512_set1_epi32(x.starts[first] + x.starts[first | 1]),
            _ => _mm512_set1_epi32(x.start),
        };
        for t in 0..T {
            sums[t][c] = for_offset::<KIND>(start);
        }
    }
    for (block, codes) in codes.as_chunks::<VECTORS>().0.iter().enumerate() {
        for i in 0..VECTORS {
            for c in 0..C {
                // SAFETY: the caller's promise.
                let a = unsafe { broadcast(x[c].add(group), first + block, 4 * i) };
                for t in 0..T {
                    sums[t][c] = _mm512_dpbusd_epi32(sums[t][c], _mm512_castps_si512(vector(&codes[i][t])), a);
                }
            }
        }
    }
    sums
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn vector(line: &Line) -> __m512 {
    // SAFETY: 16 readable floats, aligned as the load demands.
    unsafe { _mm512_load_ps(line.0.as_ptr()) }
}
