//! Kernels for tiles that are unpacked once and multiplied by the integer activations of many columns.
//!
//! A panel holds all columns (K) of some tiles, in the order in which the product reads them: for each block of 32 and
//! each word of activations, one line per tile. Its scales are floats, one line per tile for each run of blocks, or for
//! each half of a block where these have their own; the minimums follow, if there are any.

use super::super::acts::{GROUP_BLOCKS, Line};
use super::super::kernels::{Rectangle, Tiles, kind, with_any_rare_kind, with_const, with_kind, with_rare_kind};
use super::super::panel::{Panel, PanelKernel, Turn};
use super::integer::{Codes, Runs, Width, add_minimums, add_sums, broadcast, product, shape};
use super::isa::{Isa, PanelShape, Piece, Routine};
use crate::scheme::TILE_ROWS;
use std::marker::PhantomData;
use std::ops::Range;

/// Returns the kernel for panels of a width, if the instruction set has one.
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
/// Same as [`PanelKernel::run`].
unsafe fn run<I: Isa, W: Width>(part: &Rectangle<'_>, panel: &mut Panel, turn: Turn, out: &mut [f32]) {
    let (layout, kind) = (part.layout(), kind::of(part.layout()));
    if turn == Turn::First {
        let tiles = Tiles::of(part);
        panel.codes.resize(layout.blocks * W::VECTORS * part.items, Line::default());
        let runs = layout.blocks.div_ceil(tiles.run_blocks());
        panel.scales.resize(runs * factors(kind) * part.items, Line::default());
        // SAFETY: `of_kind` requires the same as this function, and `enter` only the instruction set.
        unsafe {
            if const { panel_shape::<I, W>().fused } && !kind::is_rare(kind) {
                return with_kind!(layout, KIND, of_kind::<I, W, KIND, true>(part, panel, out));
            }
            let width = PhantomData::<W>;
            with_const!(part.items * const { TILE_ROWS / I::LANES }, [1 2 4], N, is_panel::<I, W>(N), {
                if kind::is_rare(kind) {
                    with_any_rare_kind!(layout, KIND, I::enter(Unpack::<W, KIND, N> { tiles, panel, width }));
                } else if const { !panel_shape::<I, W>().fused } {
                    with_kind!(layout, KIND, I::enter(Unpack::<W, KIND, N> { tiles, panel, width }));
                }
            });
        }
    }
    // SAFETY: `of_kind` requires the same as this function.
    unsafe {
        match W::unpacked_kind(kind) {
            kind::MINIMUM4 => of_kind::<I, W, { kind::MINIMUM4 }, false>(part, panel, out),
            kind::K2 => of_kind::<I, W, { kind::K2 }, false>(part, panel, out),
            kind::K6 => of_kind::<I, W, { kind::K6 }, false>(part, panel, out),
            kind::SYMMETRIC4 if const { W::BITS == 8 } => {
                of_kind::<I, W, { kind::SYMMETRIC4 }, false>(part, panel, out);
            }
            kind::MXFP4 if const { W::BITS == 8 } => of_kind::<I, W, { kind::MXFP4 }, false>(part, panel, out),
            _ => of_kind::<I, W, { kind::INT8 }, false>(part, panel, out),
        }
    }
}

/// # Safety
/// Same as [`PanelKernel::run`].
unsafe fn of_kind<I: Isa, W: Width, const KIND: u8, const FUSED: bool>(
    part: &Rectangle<'_>,
    panel: &mut Panel,
    out: &mut [f32],
) {
    // SAFETY: `sized` requires the same as this function.
    unsafe {
        match part.layout().group_blocks {
            _ if const { kind::halves(KIND) > 1 || kind::has_minimum(KIND) } => {
                sized::<I, W, KIND, FUSED, 1>(part, panel, out);
            }
            _ if const { W::BITS != 8 } => sized::<I, W, KIND, FUSED, 0>(part, panel, out),
            1 => sized::<I, W, KIND, FUSED, 1>(part, panel, out),
            2 => sized::<I, W, KIND, FUSED, 2>(part, panel, out),
            _ => sized::<I, W, KIND, FUSED, GROUP_BLOCKS>(part, panel, out),
        }
    }
}

/// # Safety
/// Same as [`PanelKernel::run`].
unsafe fn sized<I: Isa, W: Width, const KIND: u8, const FUSED: bool, const RUN: usize>(
    part: &Rectangle<'_>,
    panel: &mut Panel,
    out: &mut [f32],
) {
    with_const!(part.items * const { TILE_ROWS / I::LANES }, [1 2 4], N, is_panel::<I, W>(N), {
        with_const!(part.cols, [1 2 3 4 5 6], C, is_piece::<I, W>(C), {
            let width = PhantomData::<W>;
            // SAFETY: the caller guarantees the instruction set, the part, and a panel unpacked from it unless `FUSED`.
            unsafe { I::enter(PanelProduct::<W, KIND, FUSED, RUN, N, C> { part, panel, out, width }) }
        })
    })
}

/// Returns the number of lines that a run of a tile has for its scales and minimums.
const fn factors(kind: u8) -> usize {
    kind::halves(kind) * if kind::has_minimum(kind) { 2 } else { 1 }
}

const fn panel_shape<I: Isa, W: Width>() -> PanelShape {
    shape::<I, W>().panel.expect("there are panels")
}

/// Returns true when this many vectors hold the rows of a panel.
const fn is_panel<I: Isa, W: Width>(vectors: usize) -> bool {
    vectors * I::LANES == panel_shape::<I, W>().tiles * TILE_ROWS
}

/// Returns true when a product can have this many columns.
const fn is_piece<I: Isa, W: Width>(cols: usize) -> bool {
    let shape = panel_shape::<I, W>();
    shape.fewest_cols() <= cols && cols <= shape.cols
}

/// Routine that unpacks all of a panel of `N` vectors of rows.
struct Unpack<'a, W, const KIND: u8, const N: usize> {
    tiles: Tiles<'a>,
    panel: &'a mut Panel,
    width: PhantomData<W>,
}

impl<W: Width, const KIND: u8, const N: usize> Routine for Unpack<'_, W, KIND, N> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Unpack { tiles, panel, .. } = self;
        let (layout, run, lines) = (tiles.layout, tiles.run_blocks(), N * I::LANES / TILE_ROWS);
        // This loops over indices, because iterator adapters are not certain to be inlined into code for an
        // instruction set.
        for i in 0..layout.blocks.div_ceil(run) {
            let scales = &mut panel.scales[i * factors(KIND) * lines..][..factors(KIND) * lines];
            // SAFETY: the tiles have these blocks, and their scales; there are lines for the factors of each tile.
            unsafe {
                let group = i * run / layout.group_blocks * kind::halves(KIND);
                let packed = Packed::<I, N>::of::<W, KIND>(isa, &tiles, group, scales);
                packed.further::<KIND>(isa, group, W::SUM_UNIT, scales);
                for block in i * run..((i + 1) * run).min(layout.blocks) {
                    let codes = &mut panel.codes[block * W::VECTORS * lines..][..W::VECTORS * lines];
                    for quarter in 0..4 {
                        packed.quarter::<W, KIND>(isa, block, quarter, codes);
                    }
                }
            }
        }
    }
}

/// Product of a panel of `N` vectors of rows with `C` columns, in runs of `RUN` blocks; `FUSED` unpacks the panel in
/// the same pass.
struct PanelProduct<'a, W, const KIND: u8, const FUSED: bool, const RUN: usize, const N: usize, const C: usize> {
    part: &'a Rectangle<'a>,
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
        let next = NextTiles::of(part, tiles.layout.blocks);
        let runs = Unpacked::<KIND, FUSED, RUN, N> { tiles, panel, run: 0, next };
        let rows = product::<I, W, _, RUN, N, C>(isa, &tiles, runs);
        for c in 0..C {
            for n in 0..N {
                let to: &mut [f32] = &mut out[(c * N + n) * I::LANES..][..I::LANES];
                // SAFETY: `to` is a whole vector.
                unsafe { isa.store(to.as_mut_ptr(), rows[n][c]) };
            }
        }
    }
}

/// Runs of a panel, in order.
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
    const KIND: u8 = KIND;

    #[inline(always)]
    unsafe fn add(
        &mut self,
        isa: I,
        x: &[&W::Group; C],
        blocks: Range<usize>,
        scale: usize,
        totals: &mut [[I::Float; C]; N],
    ) {
        let (lines, first) = (N * I::LANES / TILE_ROWS, blocks.start % GROUP_BLOCKS);
        let scales = &mut self.panel.scales[self.run * factors(KIND) * lines..][..factors(KIND) * lines];
        self.run += 1;
        let mut packed = None;
        if FUSED {
            // SAFETY: the caller guarantees the blocks and their group of scales; each tile has a line in `scales`.
            packed = Some(unsafe { Packed::<I, N>::of::<W, KIND>(isa, &self.tiles, scale, scales) });
        }
        if const { kind::halves(KIND) > 1 } {
            let codes = &self.panel.codes[blocks.start * W::VECTORS * lines..][..W::VECTORS * lines];
            self.next.ask(isa);
            // SAFETY: the lines are those of the block, and the activations those of its group.
            return unsafe { add_halves::<I, W, KIND, N, C>(isa, x, first, codes, scales, totals) };
        }
        let mut sums = [[W::zero(isa); C]; N];
        for c in 0..C {
            let start = W::start::<I, KIND, RUN>(isa, W::zero(isa), x[c], first);
            for n in 0..N {
                sums[n][c] = start;
            }
        }
        for block in blocks {
            let codes = &mut self.panel.codes[block * W::VECTORS * lines..][..W::VECTORS * lines];
            self.next.ask(isa);
            for c in 0..C {
                for n in 0..N {
                    sums[n][c] = W::begin::<I, KIND>(isa, sums[n][c], x[c], block % GROUP_BLOCKS);
                }
            }
            // SAFETY: the caller guarantees that the tiles have the block; the lines are those of the block.
            unsafe {
                match &packed {
                    Some(packed) => packed.add_block::<W, KIND, C>(isa, &mut sums, x, block, codes),
                    None => add_block::<I, W, KIND, N, C>(isa, &mut sums, x, block, codes),
                }
            }
            for c in 0..C {
                for n in 0..N {
                    sums[n][c] = W::end::<I, KIND>(isa, sums[n][c]);
                }
            }
        }
        add_sums(isa, totals, &finished::<I, W, N, C>(isa, &sums), &vectors(isa, scales, 0));
        if const { kind::has_minimum(KIND) } {
            add_minimums::<I, W, N, C>(isa, totals, x, (first, None), &vectors(isa, scales, 1));
        }
    }
}

/// Returns the finished sums of all vectors and columns.
#[inline(always)]
fn finished<I: Isa, W: Width, const N: usize, const C: usize>(isa: I, sums: &[[W::Sum<I>; C]; N]) -> [[I::Int; C]; N] {
    let mut finished = [[isa.splat(0); C]; N];
    for n in 0..N {
        for c in 0..C {
            finished[n][c] = W::finish(isa, sums[n][c]);
        }
    }
    finished
}

/// Returns set `index` of the factors of a run: those of all pieces.
#[inline(always)]
fn vectors<I: Isa, const N: usize>(isa: I, lines: &[Line], index: usize) -> [I::Float; N] {
    let mut all = [isa.splat_f32(0.0); N];
    let of_set = &bytemuck::cast_slice::<Line, f32>(lines)[index * N * I::LANES..][..N * I::LANES];
    for n in 0..N {
        // SAFETY: a set has a vector for each piece.
        all[n] = isa.as_f32(unsafe { isa.load(of_set.as_ptr().add(n * I::LANES).cast()) });
    }
    all
}

/// Adds the products of both halves of a block that was unpacked before, one after the other, because the registers
/// hold the sums of one half only.
///
/// # Safety
/// The lines are those of the block and of its factors, and the activations are those of its group.
#[inline(always)]
unsafe fn add_halves<I: Isa, W: Width, const KIND: u8, const N: usize, const C: usize>(
    isa: I,
    x: &[&W::Group; C],
    block: usize,
    codes: &[Line],
    factors: &[Line],
    totals: &mut [[I::Float; C]; N],
) {
    for half in 0..2 {
        let mut sums = [[W::zero(isa); C]; N];
        for c in 0..C {
            let start = W::start_half::<I, KIND>(isa, W::zero(isa), x[c], (block, half));
            for n in 0..N {
                sums[n][c] = start;
            }
        }
        for at in 0..W::VECTORS / 2 {
            let word = W::word_of_half(half, at);
            let mut w = [isa.splat(0); N];
            for n in 0..N {
                // SAFETY: a block has a line per word and tile, and these lines are the vectors of its pieces.
                w[n] = unsafe { isa.load(codes.as_ptr().cast::<u8>().add(4 * I::LANES * (word * N + n))) };
            }
            // SAFETY: the caller guarantees that the activations are those of the block's group.
            unsafe { add_word::<I, W, KIND, N, C>(isa, &mut sums, x, block * W::VECTORS + word, w) };
        }
        add_sums(isa, totals, &finished::<I, W, N, C>(isa, &sums), &vectors(isa, factors, half));
        if const { kind::has_minimum(KIND) } {
            add_minimums::<I, W, N, C>(isa, totals, x, (block, Some(half)), &vectors(isa, factors, 2 + half));
        }
    }
}

/// Adds the products of a block that was unpacked before. This is one loop over all words: if it is divided into
/// quarters, as where blocks are unpacked, products with 16-bit activations take 1.2 times as long.
///
/// # Safety
/// The lines are those of the block, and the activations are those of its group.
#[inline(always)]
unsafe fn add_block<I: Isa, W: Width, const KIND: u8, const N: usize, const C: usize>(
    isa: I,
    sums: &mut [[W::Sum<I>; C]; N],
    x: &[&W::Group; C],
    block: usize,
    codes: &[Line],
) {
    let codes: *const u8 = codes.as_ptr().cast();
    for word in 0..W::VECTORS {
        let mut w = [isa.splat(0); N];
        for n in 0..N {
            // SAFETY: a block has a line per word and tile, and these lines are the vectors of its pieces.
            w[n] = unsafe { isa.load(codes.add(4 * I::LANES * (word * N + n))) };
        }
        // SAFETY: the caller guarantees that the activations are those of the block's group.
        unsafe { add_word::<I, W, KIND, N, C>(isa, sums, x, block % GROUP_BLOCKS * W::VECTORS + word, w) };
    }
}

/// Adds the products of a vector of each piece with this word of the activations.
///
/// # Safety
/// The groups have the word.
#[inline(always)]
unsafe fn add_word<I: Isa, W: Width, const KIND: u8, const N: usize, const C: usize>(
    isa: I,
    sums: &mut [[W::Sum<I>; C]; N],
    x: &[&W::Group; C],
    word: usize,
    w: [I::Int; N],
) {
    for c in 0..C {
        // SAFETY: the caller guarantees that the group has the word.
        let a = unsafe { broadcast::<I, W>(isa, x[c], word) };
        for n in 0..N {
            sums[n][c] = W::dot::<I, KIND>(isa, sums[n][c], w[n], a);
        }
    }
}

/// Pieces of a panel and their zero points, for a run of blocks that share scales.
pub(in super::super) struct Packed<'a, I: Isa, const N: usize> {
    pieces: [(Piece<'a>, I::Int); N],
}

impl<'a, I: Isa, const N: usize> Packed<'a, I, N> {
    /// Loads the zero points of group `scale`, and writes the scales of that group to `lines`, one line for each
    /// tile.
    ///
    /// # Safety
    /// The tiles have the group of scales, and `lines` has one line for each tile.
    #[inline(always)]
    pub unsafe fn of<W: Codes, const KIND: u8>(
        isa: I,
        tiles: &Tiles<'a>,
        scale: usize,
        lines: &mut [Line],
    ) -> Packed<'a, I, N> {
        debug_assert!(lines.len() * TILE_ROWS >= N * I::LANES);
        let mut pieces = [(Piece::new(tiles.layout, tiles.tile(0), 0), isa.splat(0)); N];
        for n in 0..N {
            let (piece, zeros) = &mut pieces[n];
            *piece = Piece::new(tiles.layout, tiles.tile(I::LANES * n / TILE_ROWS), I::LANES * n % TILE_ROWS);
            // SAFETY: the caller guarantees the group of scales and a line, which is 16 floats, for each tile.
            unsafe {
                isa.store(
                    lines.as_mut_ptr().cast::<f32>().add(I::LANES * n),
                    piece.scales::<I, KIND, false>(isa, scale),
                );
                *zeros = W::zeros::<I, KIND>(isa, piece, scale);
            }
        }
        Packed { pieces }
    }

    /// Writes the factors of a run that follow the scales of its first group: the scales of the second half of a block,
    /// and the minimums, which are multiplied by `unit`.
    ///
    /// # Safety
    /// The tiles have the groups of scales, and `lines` has lines for all factors of each tile.
    #[inline(always)]
    unsafe fn further<const KIND: u8>(&self, isa: I, group: usize, unit: f32, lines: &mut [Line]) {
        let halves = kind::halves(KIND);
        debug_assert_eq!(lines.len() * TILE_ROWS, factors(KIND) * N * I::LANES);
        for n in 0..N {
            for half in 0..halves {
                let at = |set: usize| (set * N + n) * I::LANES;
                let lines = lines.as_mut_ptr().cast::<f32>();
                let piece = &self.pieces[n].0;
                // SAFETY: the caller guarantees the groups, and a line, which is 16 floats, for each factor.
                unsafe {
                    if half > 0 {
                        isa.store(lines.add(at(half)), piece.scales::<I, KIND, false>(isa, group + half));
                    }
                    if const { kind::has_minimum(KIND) } {
                        let minimums = piece.minimums::<I, KIND>(isa, group + half, unit);
                        isa.store(lines.add(at(halves + half)), minimums);
                    }
                }
            }
        }
    }

    /// Unpacks a block to its lines, and adds its products directly from the registers.
    ///
    /// # Safety
    /// The tiles have the block, the lines are those of all its vectors, and the activations are those of its group.
    #[inline(always)]
    unsafe fn add_block<W: Width, const KIND: u8, const C: usize>(
        &self,
        isa: I,
        sums: &mut [[W::Sum<I>; C]; N],
        x: &[&W::Group; C],
        block: usize,
        codes: &mut [Line],
    ) {
        for i in 0..4 {
            // SAFETY: the caller guarantees that the tiles have the block and that `codes` has all its lines.
            let quarter = unsafe { self.quarter::<W, KIND>(isa, block, i, codes) };
            for s in 0..W::VECTORS / 4 {
                let mut w = [isa.splat(0); N];
                for n in 0..N {
                    w[n] = quarter[n][s];
                }
                let word = block % GROUP_BLOCKS * W::VECTORS + W::word(i, s);
                // SAFETY: each block of a group has as many words as vectors.
                unsafe { add_word::<I, W, KIND, N, C>(isa, sums, x, word, w) };
            }
        }
    }

    /// Unpacks a quarter of a block to its lines, and also returns its vectors.
    ///
    /// # Safety
    /// The tiles have the block, and the lines are those of all its vectors.
    #[inline(always)]
    pub unsafe fn quarter<W: Codes, const KIND: u8>(
        &self,
        isa: I,
        block: usize,
        i: usize,
        lines: &mut [Line],
    ) -> [[I::Int; 4]; N] {
        debug_assert_eq!(lines.len() * TILE_ROWS, W::VECTORS * N * I::LANES);
        let lines = lines.as_mut_ptr().cast::<f32>();
        let mut vectors = [[isa.splat(0); 4]; N];
        for n in 0..N {
            let (piece, zeros) = &self.pieces[n];
            // SAFETY: the caller guarantees that the tiles have the block and that `lines` has all its lines.
            unsafe {
                let quarter = W::quarter::<I, KIND>(isa, piece, block, i, *zeros);
                for s in 0..W::VECTORS / 4 {
                    vectors[n][s] = quarter.as_ref()[s];
                    isa.store(lines.add(I::LANES * (W::word(i, s) * N + n)), isa.as_f32(vectors[n][s]));
                }
            }
        }
        vectors
    }
}

/// Position in [`Rectangle::next`], which is prefetched into the second-level cache while other tiles are multiplied.
pub(in super::super) struct NextTiles {
    next: *const u8,
    until: *const u8,
    /// Bytes to prefetch at a time.
    step: usize,
}

impl NextTiles {
    /// Divides the weights into this many equal shares.
    #[inline(always)]
    pub fn of(part: &Rectangle<'_>, shares: usize) -> NextTiles {
        let step = part.next.len().div_ceil(shares.max(1)).next_multiple_of(64);
        let next = part.next.as_ptr_range();
        NextTiles { next: next.start, until: next.end, step }
    }

    /// Prefetches the next share.
    #[inline(always)]
    pub fn ask<I: Isa>(&mut self, isa: I) {
        let until = self.next.wrapping_add(self.step);
        while self.next < until.min(self.until) {
            isa.prefetch(self.next);
            self.next = self.next.wrapping_add(64);
        }
    }
}
