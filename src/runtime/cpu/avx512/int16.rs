//! AVX-512: tiles times 16-bit activations.
//!
//! Weights become signed 16-bit integers, of which `vpdpwssd` multiplies a pair per row. For many columns four tiles are
//! unpacked once, in the order in which the product reads them: for each block of 32 and each pair a vector per tile. Their
//! scales are floats, a vector per tile for each run of blocks.

use super::super::acts::{GROUP_BLOCKS, Line, Q16Group};
use super::super::kernels::{Part, Tiles, kind, with_kind, with_size};
use super::super::panel::{NextTiles, Panel, PanelKernel, Turn};
use super::{load, scales, store, zeros};
use crate::scheme::{BLOCK, TileLayout};
use std::arch::x86_64::*;
use std::ops::Range;

pub(super) const PANEL: PanelKernel =
    PanelKernel { items: 4, cols: 4, least_cols: 24, weight_bytes: 2, cached: 384 << 10, run };

/// Vectors of pairs in a block of a tile.
const VECTORS: usize = BLOCK / 2;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn tile_int16(part: &Part<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    with_kind!(tiles.layout, KIND, tile_sized::<KIND>(tiles, out))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn tile_sized<const KIND: u8>(tiles: Tiles<'_>, out: &mut [f32]) {
    with_size!(tiles.part, [(1, 1)(1, 2)(1, 3)(1, 4)(1, 5)(1, 6)], T, C, tile::<KIND, T, C>(tiles, out));
}

/// Unpacks in registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn tile<const KIND: u8, const T: usize, const C: usize>(tiles: Tiles<'_>, out: &mut [f32]) {
    let (layout, tile) = (tiles.layout, tiles.tiles::<T>());
    let x = activations::<C>(&tiles.part, layout);
    let mut rows = [[_mm512_setzero_ps(); C]; T];
    for group in 0..layout.blocks.div_ceil(GROUP_BLOCKS) {
        let mut groups = x;
        for c in 0..C {
            // SAFETY: the activations have the group.
            groups[c] = unsafe { x[c].add(group) };
        }
        let mut totals = [[_mm512_setzero_ps(); C]; T];
        for (blocks, scale) in tiles.runs(group) {
            // SAFETY: the tiles have these blocks, all in this group of scales, and the activations have the group.
            let sums = unsafe { run_sums::<KIND, T, C>(layout, &tile, &groups, blocks, scale) };
            for t in 0..T {
                // SAFETY: the tiles have this group of scales.
                add_scaled(&mut totals[t], &sums[t], unsafe { scales(layout, tile[t], scale) });
            }
        }
        // SAFETY: the activations have the group.
        unsafe { add_groups::<T, C>(&mut rows, &totals, &groups) };
    }
    for t in 0..T {
        for c in 0..C {
            store(out, c * T + t, rows[t][c]);
        }
    }
}

/// Integer dot products of a run of blocks, which lies in one group of scales and in one of activations. Sums are exact, so
/// that few of them may be cut into chains which need not wait for each other.
///
/// # Safety
/// * Each of `tile` points to a tile of the layout that has the blocks and the scales.
/// * Each of `x` points to the activations of the group of the blocks.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn run_sums<const KIND: u8, const T: usize, const C: usize>(
    layout: &TileLayout,
    tile: &[*const u8; T],
    x: &[*const Q16Group; C],
    blocks: Range<usize>,
    scale: usize,
) -> [[__m512i; C]; T] {
    let chains = if T * C < 4 { 4 } else { 1 };
    let mut sums = [[[_mm512_setzero_si512(); 4]; C]; T];
    let mut zero = [_mm512_setzero_si512(); T];
    for t in 0..T {
        // SAFETY: the caller's promise.
        zero[t] = unsafe { zero_pairs::<KIND>(layout, tile[t], scale) };
    }
    for block in blocks {
        for i in 0..4 {
            let mut w = [[_mm512_setzero_si512(); 4]; T];
            for t in 0..T {
                // SAFETY: the caller's promise.
                w[t] = unsafe { pairs::<KIND>(layout, tile[t], block, i, zero[t]) };
            }
            for s in 0..4 {
                for c in 0..C {
                    // SAFETY: the caller's promise.
                    let a = unsafe { broadcast(x[c], block % GROUP_BLOCKS * VECTORS + 4 * i + s) };
                    for t in 0..T {
                        let sum = &mut sums[t][c][s % chains];
                        *sum = _mm512_dpwssd_epi32(*sum, w[t][s], a);
                    }
                }
            }
        }
    }
    let mut whole = [[_mm512_setzero_si512(); C]; T];
    for t in 0..T {
        for c in 0..C {
            let [a, b, c_, d] = sums[t][c];
            whole[t][c] =
                if chains == 1 { a } else { _mm512_add_epi32(_mm512_add_epi32(a, b), _mm512_add_epi32(c_, d)) };
        }
    }
    whole
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn unpack(part: &Part<'_>, panel: &mut Panel) {
    with_kind!(part.layout(), KIND, unpack_sized::<KIND>(part, panel))
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn unpack_sized<const KIND: u8>(part: &Part<'_>, panel: &mut Panel) {
    let (layout, items) = (part.layout(), part.items);
    panel.codes.resize(layout.blocks * VECTORS * items, Line::default());
    panel.scales.clear();
    let tiles = Tiles::of(part);
    for group in 0..layout.blocks.div_ceil(GROUP_BLOCKS) {
        for (blocks, scale) in tiles.runs(group) {
            for t in 0..items {
                let tile = tiles.tile(t);
                let mut line = Line::default();
                // SAFETY: the tile has this group of scales.
                store(&mut line.0, 0, unsafe { scales(layout, tile, scale) });
                panel.scales.push(line);
                // SAFETY: as above.
                let zero = unsafe { zero_pairs::<KIND>(layout, tile, scale) };
                for block in blocks.clone() {
                    let to = &mut panel.codes[block * VECTORS * items..][..VECTORS * items];
                    for i in 0..4 {
                        // SAFETY: the tile has this block.
                        let w = unsafe { pairs::<KIND>(layout, tile, block, i, zero) };
                        for s in 0..4 {
                            store(&mut to[(4 * i + s) * items + t].0, 0, _mm512_castsi512_ps(w[s]));
                        }
                    }
                }
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn run(part: &Part<'_>, panel: &mut Panel, turn: Turn, out: &mut [f32]) {
    if turn == Turn::First {
        unpack(part, panel);
    }
    with_size!(part, [(1, 1)(1, 2)(1, 3)(1, 4)(4, 1)(4, 2)(4, 3)(4, 4)], T, C, product::<T, C>(part, panel, out));
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn product<const T: usize, const C: usize>(part: &Part<'_>, panel: &Panel, out: &mut [f32]) {
    let layout = part.layout();
    let x = activations::<C>(part, layout);
    let codes: &[[Line; T]] = panel.codes[..layout.blocks * VECTORS * T].as_chunks().0;
    let mut scales = panel.scales.as_chunks::<T>().0.iter();
    let tiles = Tiles::of(part);
    let mut ahead = NextTiles::of(part);
    let mut rows = [[_mm512_setzero_ps(); C]; T];
    for group in 0..layout.blocks.div_ceil(GROUP_BLOCKS) {
        let mut groups = x;
        for c in 0..C {
            // SAFETY: the activations have the group.
            groups[c] = unsafe { x[c].add(group) };
        }
        let mut totals = [[_mm512_setzero_ps(); C]; T];
        for (blocks, _) in tiles.runs(group) {
            let from = blocks.start % GROUP_BLOCKS * VECTORS;
            let mut sums = [[_mm512_setzero_si512(); C]; T];
            blocks.clone().for_each(|_| ahead.ask());
            for (v, lines) in codes[blocks.start * VECTORS..blocks.end * VECTORS].iter().enumerate() {
                let mut w = [_mm512_setzero_si512(); T];
                for t in 0..T {
                    w[t] = _mm512_castps_si512(vector(&lines[t]));
                }
                for c in 0..C {
                    // SAFETY: the activations have the group, and the run lies in it.
                    let a = unsafe { broadcast(groups[c], from + v) };
                    for t in 0..T {
                        sums[t][c] = _mm512_dpwssd_epi32(sums[t][c], w[t], a);
                    }
                }
            }
            let scale = scales.next().expect("scales for every run");
            for t in 0..T {
                add_scaled(&mut totals[t], &sums[t], vector(&scale[t]));
            }
        }
        // SAFETY: the activations have the group.
        unsafe { add_groups::<T, C>(&mut rows, &totals, &groups) };
    }
    for t in 0..T {
        for c in 0..C {
            store(out, c * T + t, rows[t][c]);
        }
    }
}

/// Where the activations of each column start; they have every group of the layout.
#[inline]
fn activations<const C: usize>(part: &Part<'_>, layout: &TileLayout) -> [*const Q16Group; C] {
    let mut x = [std::ptr::null(); C];
    for c in 0..C {
        x[c] = part.x.row_q16(part.col + c)[..layout.blocks.div_ceil(GROUP_BLOCKS)].as_ptr();
    }
    x
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn add_scaled<const C: usize>(totals: &mut [__m512; C], sums: &[__m512i; C], scale: __m512) {
    for c in 0..C {
        totals[c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[c]), scale, totals[c]);
    }
}

/// # Safety
/// Each of `x` points to a group of activations.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn add_groups<const T: usize, const C: usize>(
    rows: &mut [[__m512; C]; T],
    totals: &[[__m512; C]; T],
    x: &[*const Q16Group; C],
) {
    for c in 0..C {
        // SAFETY: the caller's promise.
        let scale = _mm512_set1_ps(unsafe { (*x[c]).scale });
        for t in 0..T {
            rows[t][c] = _mm512_fmadd_ps(totals[t][c], scale, rows[t][c]);
        }
    }
}

/// Pair `p` of the codes in every lane.
///
/// # Safety
/// `x` points to a group of activations, which has that pair.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn broadcast(x: *const Q16Group, p: usize) -> __m512i {
    // SAFETY: the caller's promise; the codes come first, aligned as an i32 is, and any bytes are one.
    _mm512_set1_epi32(unsafe { x.cast::<i32>().add(p).read() })
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn vector(line: &Line) -> __m512 {
    // SAFETY: 16 readable floats, aligned as the load demands.
    unsafe { _mm512_load_ps(line.0.as_ptr()) }
}

/// The zero points of 16 rows, twice in each lane; zero where there are none.
///
/// # Safety
/// `tile` points to a tile of the layout that has the group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn zero_pairs<const KIND: u8>(layout: &TileLayout, tile: *const u8, group: usize) -> __m512i {
    if KIND != kind::AFFINE4 {
        return _mm512_setzero_si512();
    }
    // SAFETY: the caller's promise, and the layout is affine.
    let zeros = _mm512_min_epi32(unsafe { zeros(layout, tile, group) }, _mm512_set1_epi32(15));
    _mm512_or_si512(zeros, _mm512_slli_epi32::<16>(zeros))
}

/// The values of quarter `i` of a block as pairs per row: k = 4i and 4i + 2, k = 4i + 1 and 4i + 3, then the same from
/// k = 16 + 4i on; the order of [`Q16Group`].
///
/// # Safety
/// `tile` points to a tile of the layout that has the block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn pairs<const KIND: u8>(
    layout: &TileLayout,
    tile: *const u8,
    block: usize,
    i: usize,
    zero: __m512i,
) -> [__m512i; 4] {
    // SAFETY: the caller's promise.
    let v = unsafe { load::<KIND>(layout, tile, block, i) };
    match KIND {
        kind::INT8 => {
            // SAFETY: the caller's promise.
            let upper = unsafe { load::<KIND>(layout, tile, block, i + 4) };
            let ([a, b], [c, d]) = (signed_bytes(v), signed_bytes(upper));
            [a, b, c, d]
        }
        kind::MXFP4 | kind::NL4 => {
            let values = kind::table(KIND);
            // SAFETY: 16 readable bytes, and the load has no alignment demand.
            let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(values.as_ptr().cast()) });
            let mask = _mm512_set1_epi8(15);
            let (low, high) = (_mm512_and_si512(v, mask), _mm512_and_si512(_mm512_srli_epi32::<4>(v), mask));
            let ([a, b], [c, d]) =
                (signed_bytes(_mm512_shuffle_epi8(table, low)), signed_bytes(_mm512_shuffle_epi8(table, high)));
            [a, b, c, d]
        }
        _ => {
            let zero = if KIND == kind::SYMMETRIC4 { _mm512_set1_epi16(8) } else { zero };
            let mut w = [v, _mm512_srli_epi32::<8>(v), _mm512_srli_epi32::<4>(v), _mm512_srli_epi32::<12>(v)];
            for w in &mut w {
                *w = _mm512_sub_epi16(_mm512_and_si512(*w, _mm512_set1_epi32(0x000F_000F)), zero);
            }
            w
        }
    }
}

/// Bytes 0 and 2 of each lane, and bytes 1 and 3.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
fn signed_bytes(v: __m512i) -> [__m512i; 2] {
    [_mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(v)), _mm512_srai_epi16::<8>(v)]
}
