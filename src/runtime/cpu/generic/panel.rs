//! Tiles that are unpacked once, times the integer activations of many columns.
//!
//! A panel is all of K of some tiles, in the order in which the product reads them: for each block of 32 a line per tile for each
//! word of activations. Its scales are floats, a line per tile for each run of blocks.

use super::super::acts::{GROUP_BLOCKS, Line};
use super::super::kernels::{Part, Tiles, kind, with_const, with_kind};
use super::super::panel::{Panel, PanelKernel, Turn};
use super::integer::{Runs, Width, broadcast, product, shape};
use super::isa::{Isa, PanelShape, Piece, Routine};
use crate::scheme::TILE_ROWS;
use std::marker::PhantomData;
use std::ops::Range;

/// The kernel for panels of a width, if the instruction set has any.
pub(super) const fn kernel<I: Isa, W: Width>() -> Option<PanelKernel> {
    let Some(shape) = shape::<I, W>().panel else { return None };
    Some(PanelKernel {
        items: shape.tiles,
        cols: shape.cols,
        least_cols: shape.least_cols,
        weight_bytes: W::BITS / 8,
        cached: shape.cached,
        run: run::<I, W>,
    })
}

/// # Safety
/// As [`PanelKernel::run`].
unsafe fn run<I: Isa, W: Width>(part: &Part<'_>, panel: &mut Panel, turn: Turn, out: &mut [f32]) {
    let layout = part.layout();
    if turn == Turn::First {
        let tiles = Tiles::of(part);
        panel.codes.resize(layout.blocks * W::VECTORS * part.items, Line::default());
        panel.scales.resize(layout.blocks.div_ceil(tiles.run_blocks()) * part.items, Line::default());
        // SAFETY: the caller's promises.
        unsafe {
            if const { panel_shape::<I, W>().fused } {
                return with_kind!(layout, KIND, of_kind::<I, W, KIND, true>(part, panel, out));
            }
            let width = PhantomData::<W>;
            with_const!(part.items, [1 2 4], T, T == 1 || T == panel_shape::<I, W>().tiles, {
                with_kind!(layout, KIND, I::enter(Unpack::<W, KIND, T> { tiles, panel, width }));
            });
        }
    }
    // SAFETY: the caller's promises.
    unsafe {
        match W::unpacked_kind(kind::of(layout)) {
            kind::SYMMETRIC4 if const { W::BITS == 8 } => {
                of_kind::<I, W, { kind::SYMMETRIC4 }, false>(part, panel, out);
            }
            kind::MXFP4 if const { W::BITS == 8 } => of_kind::<I, W, { kind::MXFP4 }, false>(part, panel, out),
            _ => of_kind::<I, W, { kind::INT8 }, false>(part, panel, out),
        }
    }
}

/// # Safety
/// As [`PanelKernel::run`].
unsafe fn of_kind<I: Isa, W: Width, const KIND: u8, const FUSED: bool>(
    part: &Part<'_>,
    panel: &mut Panel,
    out: &mut [f32],
) {
    // SAFETY: the caller's promises.
    unsafe {
        match part.layout().group_blocks {
            _ if const { W::BITS != 8 } => sized::<I, W, KIND, FUSED, 0>(part, panel, out),
            1 => sized::<I, W, KIND, FUSED, 1>(part, panel, out),
            2 => sized::<I, W, KIND, FUSED, 2>(part, panel, out),
            _ => sized::<I, W, KIND, FUSED, GROUP_BLOCKS>(part, panel, out),
        }
    }
}

/// # Safety
/// As [`PanelKernel::run`].
unsafe fn sized<I: Isa, W: Width, const KIND: u8, const FUSED: bool, const RUN: usize>(
    part: &Part<'_>,
    panel: &mut Panel,
    out: &mut [f32],
) {
    let pieces = const { TILE_ROWS / I::LANES };
    with_const!(part.items * pieces, [1 2 4], N, is_full::<I, W>(N) || N * I::LANES == TILE_ROWS, {
        with_const!(part.cols, [1 2 3 4 5 6], C, is_piece::<I, W>(C), {
            let width = PhantomData::<W>;
            // SAFETY: the caller's promises.
            unsafe { I::enter(PanelProduct::<W, KIND, FUSED, RUN, N, C> { part, panel, out, width }) }
        })
    })
}

const fn panel_shape<I: Isa, W: Width>() -> PanelShape {
    shape::<I, W>().panel.expect("there are panels")
}

/// True when so many vectors hold the rows of a full panel.
const fn is_full<I: Isa, W: Width>(vectors: usize) -> bool {
    vectors * I::LANES == panel_shape::<I, W>().tiles * TILE_ROWS
}

/// True when products have so many columns.
const fn is_piece<I: Isa, W: Width>(cols: usize) -> bool {
    let shape = panel_shape::<I, W>();
    shape.fewest_cols() <= cols && cols <= shape.cols
}

/// Unpacks all of a panel.
struct Unpack<'a, W, const KIND: u8, const T: usize> {
    tiles: Tiles<'a>,
    panel: &'a mut Panel,
    width: PhantomData<W>,
}

impl<W: Width, const KIND: u8, const T: usize> Routine for Unpack<'_, W, KIND, T> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Unpack { tiles, panel, .. } = self;
        let (layout, run) = (tiles.layout, tiles.run_blocks());
        let scales = panel.scales.as_chunks_mut::<T>().0;
        for ((scales, codes), i) in scales.iter_mut().zip(panel.codes.chunks_mut(run * W::VECTORS * T)).zip(0..) {
            let blocks = i * run..((i + 1) * run).min(layout.blocks);
            let scale = blocks.start / layout.group_blocks;
            // SAFETY: the tiles have these blocks, and their scales.
            unsafe { unpack::<I, W, KIND>(isa, &tiles, blocks, scale, codes, scales) };
        }
    }
}

/// The product of a panel of `N` vectors of rows with `C` columns, in runs of `RUN` blocks; `FUSED` unpacks it on the way.
struct PanelProduct<'a, W, const KIND: u8, const FUSED: bool, const RUN: usize, const N: usize, const C: usize> {
    part: &'a Part<'a>,
    panel: &'a mut Panel,
    out: &'a mut [f32],
    width: PhantomData<W>,
}

impl<W: Width, const KIND: u8, const FUSED: bool, const RUN: usize, const N: usize, const C: usize> Routine
    for PanelProduct<'_, W, KIND, FUSED, RUN, N, C>
{
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let PanelProduct { part, panel, out, .. } = self;
        let tiles = Tiles::of(part);
        let next = NextTiles::of(part);
        let runs = Unpacked::<KIND, FUSED, RUN, N> { tiles, panel, run: 0, next };
        let rows = product::<I, W, RUN, N, C>(isa, &tiles, runs);
        for c in 0..C {
            for n in 0..N {
                let to: &mut [f32] = &mut out[(c * N + n) * I::LANES..][..I::LANES];
                // SAFETY: a vector is writable.
                unsafe { isa.store(to.as_mut_ptr(), rows[n][c]) };
            }
        }
    }
}

/// The runs of a panel.
struct Unpacked<'a, const KIND: u8, const FUSED: bool, const RUN: usize, const N: usize> {
    tiles: Tiles<'a>,
    panel: &'a mut Panel,
    /// Index of the next run.
    run: usize,
    next: NextTiles,
}

impl<I: Isa, W: Width, const KIND: u8, const FUSED: bool, const RUN: usize, const N: usize, const C: usize>
    Runs<I, W, N, C> for Unpacked<'_, KIND, FUSED, RUN, N>
{
    #[inline(always)]
    unsafe fn next(
        &mut self,
        isa: I,
        x: &[&W::Group; C],
        blocks: Range<usize>,
        scale: usize,
    ) -> ([[I::Int; C]; N], [I::Float; N]) {
        let (lines, first) = (N * I::LANES / TILE_ROWS, blocks.start % GROUP_BLOCKS);
        let codes = &mut self.panel.codes[blocks.start * W::VECTORS * lines..blocks.end * W::VECTORS * lines];
        let scales = &mut self.panel.scales[self.run * lines..][..lines];
        self.run += 1;
        if FUSED {
            // SAFETY: the caller's promise.
            unsafe { unpack::<I, W, KIND>(isa, &self.tiles, blocks.clone(), scale, codes, scales) };
        }
        let mut sums = [[W::zero(isa); C]; N];
        for c in 0..C {
            let start = W::start::<I, KIND, RUN>(isa, W::zero(isa), x[c], first);
            for n in 0..N {
                sums[n][c] = start;
            }
        }
        for (block, codes) in codes.chunks_exact(W::VECTORS * lines).enumerate() {
            self.next.ask(isa);
            let codes: *const u8 = codes.as_ptr().cast();
            let at_once = W::VECTORS.min(W::widen_after::<I>(KIND));
            for from in (0..W::VECTORS).step_by(at_once) {
                for v in from..from + at_once {
                    let mut w = [isa.splat(0); N];
                    for n in 0..N {
                        // SAFETY: a block has as many lines per tile, which are the vectors of its pieces.
                        w[n] = unsafe { isa.load(codes.add(4 * I::LANES * (v * N + n))) };
                    }
                    for c in 0..C {
                        // SAFETY: each block of a group has as many words as vectors.
                        let a = unsafe { broadcast::<I, W>(isa, x[c], (first + block) * W::VECTORS + v) };
                        for n in 0..N {
                            sums[n][c] = W::dot::<I, KIND>(isa, sums[n][c], w[n], a);
                        }
                    }
                }
                for n in 0..N {
                    for c in 0..C {
                        sums[n][c] = W::widen(isa, sums[n][c]);
                    }
                }
            }
        }
        let mut whole = [[isa.splat(0); C]; N];
        let mut scale = [isa.splat_f32(0.0); N];
        for n in 0..N {
            for c in 0..C {
                whole[n][c] = W::finish(isa, sums[n][c]);
            }
            // SAFETY: the lines of the scales are the vectors of the pieces.
            scale[n] = isa.as_f32(unsafe { isa.load(scales.as_ptr().cast::<u8>().add(4 * I::LANES * n)) });
        }
        (whole, scale)
    }
}

/// Unpacks the codes and the scales of a run.
///
/// # Safety
/// The tiles have the blocks and the group of scales, and there are as many lines of each.
#[inline(always)]
unsafe fn unpack<I: Isa, W: Width, const KIND: u8>(
    isa: I,
    tiles: &Tiles<'_>,
    blocks: Range<usize>,
    scale: usize,
    codes: &mut [Line],
    scales: &mut [Line],
) {
    let lines = scales.len();
    debug_assert_eq!(codes.len(), blocks.len() * W::VECTORS * lines);
    let (codes, scales) = (codes.as_mut_ptr().cast::<f32>(), scales.as_mut_ptr().cast::<f32>());
    for t in 0..lines {
        for row in (0..TILE_ROWS).step_by(I::LANES) {
            let piece = Piece { layout: tiles.layout, tile: tiles.tile(t), row };
            // SAFETY: the caller's promises: a line is 16 floats, and a block has `VECTORS` lines per tile.
            unsafe {
                isa.store(scales.add(TILE_ROWS * t + row), piece.scales(isa, scale));
                let zeros = W::zeros::<I, KIND>(isa, &piece, scale);
                for block in blocks.clone() {
                    let first = (block - blocks.start) * W::VECTORS;
                    for i in 0..4 {
                        let quarter = W::quarter::<I, KIND>(isa, &piece, block, i, zeros);
                        let quarter = quarter.as_ref();
                        for s in 0..W::VECTORS / 4 {
                            let line = (first + W::word(i, s)) * lines + t;
                            isa.store(codes.add(TILE_ROWS * line + row), isa.as_f32(quarter[s]));
                        }
                    }
                }
            }
        }
    }
}

/// Walks through [`Part::next`], so that it is on its way into the second-level cache while others are multiplied.
struct NextTiles {
    next: *const u8,
    until: *const u8,
    /// Bytes to ask for in each block.
    step: usize,
}

impl NextTiles {
    #[inline(always)]
    fn of(part: &Part<'_>) -> NextTiles {
        let step = part.next.len().div_ceil(part.layout().blocks.max(1)).next_multiple_of(64);
        let next = part.next.as_ptr_range();
        NextTiles { next: next.start, until: next.end, step }
    }

    /// Asks for what one block is worth.
    #[inline(always)]
    fn ask<I: Isa>(&mut self, isa: I) {
        let until = self.next.wrapping_add(self.step);
        while self.next < until.min(self.until) {
            isa.prefetch(self.next);
            self.next = self.next.wrapping_add(64);
        }
    }
}
