//! AVX-512: tiles that are unpacked once, times the int8 activations of many columns.
//!
//! The first product of a panel unpacks it: writing a panel, which is larger than the first-level cache, takes as long as
//! multiplying it by some columns, and the processor does both at once.
//!
//! A panel is all of K of two tiles as unsigned bytes, in the order in which the product reads them: for each block of 32
//! and each four of K a vector per tile. Its scales are floats, a vector per tile for each run of blocks. Of the two pipes
//! that do `vpdpbusd`, multiplications and fused additions, a run of four blocks takes 32 + 2 slots per tile and column, and
//! four runs of one block 32 + 5; all else fits beside them.

use super::super::acts::{GROUP_BLOCKS, Line, Q8Group};
use super::super::kernels::{Part, Tiles, kind, with_kind, with_size};
use super::super::panel::{NextTiles, Panel, PanelKernel, Turn};
use super::int8::{broadcast, for_offset, unsigned, zeros_less_offset};
use super::{load, scales, store};
use crate::scheme::{BLOCK, TileLayout};
use std::arch::x86_64::*;

pub(super) const INT8: PanelKernel =
    PanelKernel { items: 2, cols: 6, least_cols: 12, weight_bytes: 1, cached: 384 << 10, run };

/// Vectors of bytes in a block of a tile.
const VECTORS: usize = BLOCK / 4;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn run(part: &Part<'_>, panel: &mut Panel, turn: Turn, out: &mut [f32]) {
    match (turn, kind::of(part.layout())) {
        (Turn::First, _) => with_kind!(part.layout(), KIND, of_kind::<KIND, true>(part, panel, out)),
        (Turn::Again, kind::SYMMETRIC4) => of_kind::<{ kind::SYMMETRIC4 }, false>(part, panel, out),
        // Unpacked, what has the same offset is the same.
        (Turn::Again, kind::INT8 | kind::NL4) => of_kind::<{ kind::INT8 }, false>(part, panel, out),
        (Turn::Again, _) => of_kind::<{ kind::MXFP4 }, false>(part, panel, out),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn of_kind<const KIND: u8, const FIRST: bool>(part: &Part<'_>, panel: &mut Panel, out: &mut [f32]) {
    match part.layout().group_blocks {
        1 => sized::<KIND, FIRST, 1>(part, panel, out),
        2 => sized::<KIND, FIRST, 2>(part, panel, out),
        _ => sized::<KIND, FIRST, 4>(part, panel, out),
    }
}

/// From `least_cols` on, pieces have no fewer than 4 columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn sized<const KIND: u8, const FIRST: bool, const RUN: usize>(part: &Part<'_>, panel: &mut Panel, out: &mut [f32]) {
    with_size!(part, [(1, 4)(1, 5)(1, 6)(2, 4)(2, 5)(2, 6)], T, C, product::<KIND, FIRST, RUN, T, C>(part, panel, out));
}

/// Runs of `RUN` blocks, the last of a row possibly shorter; `FIRST` unpacks them, too.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn product<const KIND: u8, const FIRST: bool, const RUN: usize, const T: usize, const C: usize>(
    part: &Part<'_>,
    panel: &mut Panel,
    out: &mut [f32],
) {
    let (layout, tiles) = (part.layout(), Tiles::of(part));
    let (blocks, tile) = (layout.blocks, tiles.tiles::<T>());
    let groups = blocks.div_ceil(GROUP_BLOCKS);
    let mut x = [std::ptr::null::<Q8Group>(); C];
    for c in 0..C {
        x[c] = part.x.row_q8(part.col + c)[..groups].as_ptr();
    }
    let mut ahead = NextTiles::of(part);
    if FIRST {
        panel.codes.resize(blocks * VECTORS * T, Line::default());
        panel.scales.resize(blocks.div_ceil(RUN) * T, Line::default());
    }
    let codes: &mut [[Line; T]] = panel.codes[..blocks * VECTORS * T].as_chunks_mut().0;
    let mut all_scales = panel.scales.as_chunks_mut::<T>().0.iter_mut();
    let out = &mut out[..16 * T * C];
    let mut rows = [[_mm512_setzero_ps(); C]; T];
    for group in 0..groups {
        let mut totals = [[_mm512_setzero_ps(); C]; T];
        let until = ((group + 1) * GROUP_BLOCKS).min(blocks);
        for run in 0..GROUP_BLOCKS / RUN {
            let from = group * GROUP_BLOCKS + run * RUN;
            if from >= until {
                break;
            }
            let codes = &mut codes[from * VECTORS..(from + RUN).min(until) * VECTORS];
            let scale_lines = all_scales.next().expect("scales for every run");
            // SAFETY: each row of activations has this group, and the run lies in it and in the tiles.
            let sums = unsafe {
                let starts = starts::<KIND, RUN, T, C>(&x, group, run * RUN);
                if FIRST {
                    let packed = Packed::of::<KIND>(layout, &tile, from, scale_lines);
                    unpacked_sums::<KIND, T, C>(&packed, codes, &x, group, starts, &mut ahead)
                } else {
                    sums::<T, C>(codes, &x, group, run * RUN, starts, &mut ahead)
                }
            };
            for t in 0..T {
                let scale = vector(&scale_lines[t]);
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
                    let before = match group {
                        0 => _mm512_setzero_ps(),
                        // SAFETY: 16 readable floats, and the load has no alignment demand.
                        _ => unsafe { _mm512_loadu_ps(row.as_ptr()) },
                    };
                    store(row, 0, _mm512_fmadd_ps(totals[t][c], scale, before));
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

/// What the sums of a run start with: the offset that its weights were given, taken back.
///
/// # Safety
/// Each of `x` points to activations that have the group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn starts<const KIND: u8, const RUN: usize, const T: usize, const C: usize>(
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
    sums
}

/// Integer dot products of a run that starts with block `first` of the group; `codes` are its vectors.
///
/// # Safety
/// Each of `x` points to activations that have the group; the run takes no more blocks of it than there are.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn sums<const T: usize, const C: usize>(
    codes: &[[Line; T]],
    x: &[*const Q8Group; C],
    group: usize,
    first: usize,
    mut sums: [[__m512i; C]; T],
    ahead: &mut NextTiles,
) -> [[__m512i; C]; T] {
    for (block, codes) in codes.as_chunks::<VECTORS>().0.iter().enumerate() {
        ahead.ask();
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

/// A run of blocks from this one on.
struct Packed<'a, const T: usize> {
    layout: &'a TileLayout,
    tile: [*const u8; T],
    zero: [__m512i; T],
    block: usize,
}

impl<'a, const T: usize> Packed<'a, T> {
    /// Writes the scales of the run to `lines`.
    ///
    /// # Safety
    /// The tiles have the block.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn of<const KIND: u8>(
        layout: &'a TileLayout,
        tile: &[*const u8; T],
        block: usize,
        lines: &mut [Line; T],
    ) -> Packed<'a, T> {
        let mut zero = [_mm512_setzero_si512(); T];
        for t in 0..T {
            // SAFETY: the tiles have the block's group of scales.
            store(&mut lines[t].0, 0, unsafe { scales(layout, tile[t], block / layout.group_blocks) });
            if KIND == kind::AFFINE4 {
                // SAFETY: as above, and the layout is affine.
                zero[t] = unsafe { zeros_less_offset(layout, tile[t], block / layout.group_blocks) };
            }
        }
        Packed { layout, tile: *tile, zero, block }
    }
}

/// [`sums`] of weights that go to `codes` on the way.
///
/// # Safety
/// As there; the tiles have the run.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn unpacked_sums<const KIND: u8, const T: usize, const C: usize>(
    packed: &Packed<'_, T>,
    codes: &mut [[Line; T]],
    x: &[*const Q8Group; C],
    group: usize,
    mut sums: [[__m512i; C]; T],
    ahead: &mut NextTiles,
) -> [[__m512i; C]; T] {
    for (block, codes) in (packed.block..).zip(codes.as_chunks_mut::<VECTORS>().0) {
        ahead.ask();
        for i in 0..kind::vectors(KIND) {
            let mut w = [[_mm512_setzero_si512(); 2]; T];
            for t in 0..T {
                // SAFETY: the caller's promise.
                let packed_codes = unsafe { load::<KIND>(packed.layout, packed.tile[t], block, i) };
                w[t] = unsigned::<KIND>(packed_codes, packed.zero[t]);
            }
            for half in 0..VECTORS / kind::vectors(KIND) {
                for t in 0..T {
                    store(&mut codes[i + 4 * half][t].0, 0, _mm512_castsi512_ps(w[t][half]));
                }
                for c in 0..C {
                    // SAFETY: the caller's promise.
                    let a = unsafe { broadcast(x[c].add(group), block % GROUP_BLOCKS, 4 * (i + 4 * half)) };
                    for t in 0..T {
                        sums[t][c] = _mm512_dpbusd_epi32(sums[t][c], w[t][half], a);
                    }
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
