//! AVX2: tiles that are unpacked once, times the int8 activations of many columns.
//!
//! A panel is all of K of a tile as unsigned bytes, in the order in which the product reads them: for each four of K a line of
//! 64 bytes, four for each row. Its scales are floats, a line for each run of blocks. Two vectors by six columns keep 12 of the
//! 16 registers, so what is added up beyond a run waits in memory.
//!
//! AVX-VNNI multiplies and adds four bytes by one instruction. Without it pairs are added up as 16-bit integers for as long as
//! they cannot overflow, which takes two instructions for each vector and two more now and then; signed bytes are too large
//! for that and take four.

use super::super::acts::{GROUP, GROUP_BLOCKS, Line, Q8Group};
use super::super::kernels::{Part, Tiles, kind, with_kind, with_size};
use super::super::panel::{NextTiles, Panel, PanelKernel, Turn};
use super::int8::{flipped, unsigned, zeros_less_offset};
use super::{HALF, load, scales, store};
use crate::scheme::{BLOCK, TILE_ROWS, TileLayout};
use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

pub(super) const VNNI: PanelKernel = panel::<Vnni>();

pub(super) const PAIRS: PanelKernel = panel::<Pairs>();

const fn panel<D: Dots>() -> PanelKernel {
    PanelKernel { items: 1, cols: 6, least_cols: 5, weight_bytes: 1, cached: 128 << 10, run: run::<D> }
}

/// Lines of a block.
const LINES: usize = BLOCK / 4;

#[target_feature(enable = "avx2,fma,f16c")]
fn unpack(part: &Part<'_>, panel: &mut Panel) {
    with_kind!(part.layout(), KIND, unpack_sized::<KIND>(part, panel))
}

#[target_feature(enable = "avx2,fma,f16c")]
fn unpack_sized<const KIND: u8>(part: &Part<'_>, panel: &mut Panel) {
    let tiles = Tiles::of(part);
    let (layout, [tile]) = (tiles.layout, tiles.tiles::<1>());
    panel.codes.resize(layout.blocks * LINES, Line::default());
    panel.scales.clear();
    for group in 0..layout.blocks.div_ceil(GROUP_BLOCKS) {
        for (blocks, scale) in tiles.runs(group) {
            let mut line = Line::default();
            let codes = &mut panel.codes[blocks.start * LINES..blocks.end * LINES];
            for half in 0..2 {
                // SAFETY: the tile has this group of scales.
                store(&mut line.0, HALF * half, unsafe { scales(layout, tile, half, scale) });
                // SAFETY: the tile has these blocks, and their scales are in the group.
                unsafe { unpack_run::<KIND>(layout, tile, half, blocks.clone(), scale, codes) };
            }
            panel.scales.push(line);
        }
    }
}

/// Half of the lines of a run.
///
/// # Safety
/// `tile` points to a tile of the layout that has the blocks and the group of scales.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack_run<const KIND: u8>(
    layout: &TileLayout,
    tile: *const u8,
    half: usize,
    blocks: Range<usize>,
    scale: usize,
    codes: &mut [Line],
) {
    let zero = match KIND {
        // SAFETY: the caller's promise, and the layout is affine.
        kind::AFFINE4 => unsafe { zeros_less_offset(layout, tile, half, scale) },
        _ => _mm256_setzero_si256(),
    };
    for (block, lines) in blocks.zip(codes.as_chunks_mut::<LINES>().0) {
        for i in 0..kind::vectors(KIND) {
            // SAFETY: the caller's promise.
            let v = unsafe { load::<KIND>(layout, tile, half, block, i) };
            if KIND == kind::INT8 {
                store(&mut lines[i].0, HALF * half, _mm256_castsi256_ps(flipped(v)));
                continue;
            }
            let [low, high] = unsigned::<KIND>(v, zero);
            store(&mut lines[i].0, HALF * half, _mm256_castsi256_ps(low));
            store(&mut lines[i + 4].0, HALF * half, _mm256_castsi256_ps(high));
        }
    }
}

/// How bytes are multiplied.
trait Dots {
    /// The product of a panel with runs of `RUN` blocks, the last of a row possibly shorter, and `C` columns.
    ///
    /// # Safety
    /// As [`PanelKernel::run`].
    unsafe fn product<const KIND: u8, const RUN: usize, const C: usize>(
        part: &Part<'_>,
        panel: &Panel,
        out: &mut [f32],
    );
}

/// By `vpdpbusd`.
struct Vnni;

/// By `vpmaddubsw` and `vpmaddwd`.
struct Pairs;

/// # Safety
/// As [`PanelKernel::run`].
unsafe fn run<D: Dots>(part: &Part<'_>, panel: &mut Panel, turn: Turn, out: &mut [f32]) {
    let layout = part.layout();
    // SAFETY: the caller's promises.
    unsafe {
        if turn == Turn::First {
            unpack(part, panel);
        }
        match (kind::of(layout), layout.group_blocks) {
            (kind::SYMMETRIC4, 1) => sized::<D, { kind::SYMMETRIC4 }, 1>(part, panel, out),
            (kind::SYMMETRIC4, 2) => sized::<D, { kind::SYMMETRIC4 }, 2>(part, panel, out),
            (kind::SYMMETRIC4, _) => sized::<D, { kind::SYMMETRIC4 }, 4>(part, panel, out),
            // Unpacked, what has the same offset is the same.
            (kind::INT8 | kind::NL4, 1) => sized::<D, { kind::INT8 }, 1>(part, panel, out),
            (kind::INT8 | kind::NL4, 2) => sized::<D, { kind::INT8 }, 2>(part, panel, out),
            (kind::INT8 | kind::NL4, _) => sized::<D, { kind::INT8 }, 4>(part, panel, out),
            (_, 1) => sized::<D, { kind::MXFP4 }, 1>(part, panel, out),
            (_, 2) => sized::<D, { kind::MXFP4 }, 2>(part, panel, out),
            _ => sized::<D, { kind::MXFP4 }, 4>(part, panel, out),
        }
    }
}

/// # Safety
/// As [`PanelKernel::run`].
unsafe fn sized<D: Dots, const KIND: u8, const RUN: usize>(part: &Part<'_>, panel: &Panel, out: &mut [f32]) {
    // SAFETY: the caller's promises.
    unsafe {
        with_size!(part, [(1, 1)(1, 2)(1, 3)(1, 4)(1, 5)(1, 6)], _ONE, C, D::product::<KIND, RUN, C>(part, panel, out));
    }
}

/// Implements [`Dots`] by a function that makes the integer sums of a run.
macro_rules! product {
    ($dots:ty, $features:literal, $sums:ident) => {
        impl Dots for $dots {
            #[target_feature(enable = $features)]
            unsafe fn product<const KIND: u8, const RUN: usize, const C: usize>(
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
                let mut next = NextTiles::of(part);
                let mut scales = panel.scales.iter();
                let rows = out[..TILE_ROWS * C].as_chunks_mut::<TILE_ROWS>().0;
                rows.fill([0.0; TILE_ROWS]);
                for group in 0..groups {
                    let begin = group * GROUP_BLOCKS;
                    let until = (begin + GROUP_BLOCKS).min(blocks);
                    let mut totals = [[0f32; TILE_ROWS]; C];
                    for from in (begin..until).step_by(RUN) {
                        (from..(from + RUN).min(until)).for_each(|_| next.ask());
                        let codes = &panel.codes[from * LINES..(from + RUN).min(until) * LINES];
                        // SAFETY: each row of activations has this group, and the run lies in it.
                        let sums = unsafe { $sums::<KIND, RUN, C>(codes, &x, group, from - begin) };
                        let scale = &scales.next().expect("scales for every run").0;
                        for half in 0..2 {
                            for c in 0..C {
                                let (sum, total) = (_mm256_cvtepi32_ps(sums[half][c]), eight(&totals[c], half));
                                let total = _mm256_fmadd_ps(sum, eight(scale, half), total);
                                store(&mut totals[c], HALF * half, total);
                            }
                        }
                    }
                    for c in 0..C {
                        // SAFETY: each row of activations has this group.
                        let scale = _mm256_set1_ps(unsafe { (*x[c].add(group)).scale });
                        for half in 0..2 {
                            let sum = _mm256_fmadd_ps(eight(&totals[c], half), scale, eight(&rows[c], half));
                            store(&mut rows[c], HALF * half, sum);
                        }
                    }
                }
            }
        }
    };
}

product!(Vnni, "avx2,fma,f16c,avxvnni", sums_of_fours);

product!(Pairs, "avx2,fma,f16c", sums_of_pairs);

/// Integer dot products of a run that starts with this block of the group; `codes` are its lines.
///
/// # Safety
/// Each of `x` points to activations that have the group; the run takes no more blocks of it than there are.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn sums_of_fours<const KIND: u8, const RUN: usize, const C: usize>(
    codes: &[Line],
    x: &[*const Q8Group; C],
    group: usize,
    first: usize,
) -> [[__m256i; C]; 2] {
    let mut sums = [[_mm256_setzero_si256(); C]; 2];
    for c in 0..C {
        // SAFETY: the caller's promise.
        let start = unsafe { start::<RUN>(x[c].add(group), first) };
        let start = match KIND {
            kind::SYMMETRIC4 => start >> 1,
            kind::INT8 => start << 3,
            _ => start,
        };
        (sums[0][c], sums[1][c]) = (_mm256_set1_epi32(start), _mm256_set1_epi32(start));
    }
    for (block, lines) in codes.as_chunks::<LINES>().0.iter().enumerate() {
        for (i, line) in lines.iter().enumerate() {
            let w = [vector(line, 0), vector(line, 1)];
            for c in 0..C {
                // SAFETY: the caller's promise.
                let a = unsafe { broadcast(x[c].add(group), LINES * (first + block) + i) };
                for half in 0..2 {
                    sums[half][c] = _mm256_dpbusd_avx_epi32(sums[half][c], w[half], a);
                }
            }
        }
    }
    sums
}

/// As [`sums_of_fours`].
///
/// # Safety
/// As there.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sums_of_pairs<const KIND: u8, const RUN: usize, const C: usize>(
    codes: &[Line],
    x: &[*const Q8Group; C],
    group: usize,
    first: usize,
) -> [[__m256i; C]; 2] {
    if KIND == kind::INT8 {
        // SAFETY: the caller's promises.
        return unsafe { sums_of_signed(codes, x, group, first) };
    }
    let mut sums = [[_mm256_setzero_si256(); C]; 2];
    for c in 0..C {
        // SAFETY: the caller's promise.
        let start = unsafe { start::<RUN>(x[c].add(group), first) };
        let start = _mm256_set1_epi32(if KIND == kind::SYMMETRIC4 { start >> 1 } else { start });
        (sums[0][c], sums[1][c]) = (start, start);
    }
    // At most 8 * 2 * 15 * 127 per i16 for symmetric nibbles, else 4 * 2 * 31 * 127.
    let most = if KIND == kind::SYMMETRIC4 { LINES } else { LINES / 2 };
    for (block, lines) in codes.as_chunks::<LINES>().0.iter().enumerate() {
        for from in (0..LINES).step_by(most) {
            let mut pairs = [[_mm256_setzero_si256(); C]; 2];
            for i in from..from + most {
                let w = [vector(&lines[i], 0), vector(&lines[i], 1)];
                for c in 0..C {
                    // SAFETY: the caller's promise.
                    let a = unsafe { broadcast(x[c].add(group), LINES * (first + block) + i) };
                    for half in 0..2 {
                        let sum = _mm256_add_epi16(pairs[half][c], _mm256_maddubs_epi16(w[half], a));
                        pairs[half][c] = in_order(sum);
                    }
                }
            }
            for half in 0..2 {
                for c in 0..C {
                    let fours = _mm256_madd_epi16(pairs[half][c], _mm256_set1_epi16(1));
                    sums[half][c] = _mm256_add_epi32(sums[half][c], fours);
                }
            }
        }
    }
    sums
}

/// Keeps the compiler from adding in another order, for which there are not enough registers; costs nothing.
#[inline]
#[target_feature(enable = "avx2")]
fn in_order(mut v: __m256i) -> __m256i {
    // SAFETY: no instruction at all.
    unsafe { asm!("/* {} */", inout(ymm_reg) v, options(pure, nomem, nostack, preserves_flags)) };
    v
}

/// As [`sums_of_fours`]: |w| <= 128 is the unsigned operand and the activation, which is never -128, takes the sign, so that a
/// pair is at most 2 * 128 * 127 = 32512.
///
/// # Safety
/// As there.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn sums_of_signed<const C: usize>(
    codes: &[Line],
    x: &[*const Q8Group; C],
    group: usize,
    first: usize,
) -> [[__m256i; C]; 2] {
    let mut sums = [[_mm256_setzero_si256(); C]; 2];
    for half in 0..2 {
        for (i, line) in codes.iter().enumerate() {
            let w = flipped(vector(line, half));
            let magnitude = _mm256_abs_epi8(w);
            for c in 0..C {
                // SAFETY: the caller's promise.
                let a = unsafe { broadcast(x[c].add(group), LINES * first + i) };
                let pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(a, w));
                let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
                sums[half][c] = _mm256_add_epi32(sums[half][c], fours);
            }
        }
    }
    sums
}

/// What takes an offset of 16 back that the weights of a run were given.
///
/// # Safety
/// `x` points to a group of activations which has the block.
#[inline(always)]
unsafe fn start<const RUN: usize>(x: *const Q8Group, first: usize) -> i32 {
    // SAFETY: the caller's promise.
    let x = unsafe { &*x };
    match RUN {
        1 => x.starts[first],
        2 => x.starts[first] + x.starts[first | 1],
        _ => x.start,
    }
}

/// Codes `4 i..4 i + 4` of a group in every lane.
///
/// # Safety
/// `x` points to a group of activations which has them.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn broadcast(x: *const Q8Group, i: usize) -> __m256i {
    debug_assert!(4 * i + 4 <= GROUP);
    // SAFETY: the caller's promise; the codes come first, and any bytes are an i32.
    _mm256_set1_epi32(unsafe { x.cast::<i32>().add(i).read() })
}

/// Half of a line of bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn vector(line: &Line, half: usize) -> __m256i {
    _mm256_castps_si256(eight(&line.0, half))
}

/// The lower or the upper eight of 16 floats.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn eight(floats: &[f32; 16], half: usize) -> __m256 {
    // SAFETY: 8 readable floats, and the load has no alignment demand.
    unsafe { _mm256_loadu_ps(floats.as_chunks::<HALF>().0[half].as_ptr()) }
}
