//! Kernel for integer products whose weights are unpacked in registers, once for all columns of a rectangle.

use super::super::acts::GROUP_BLOCKS;
use super::super::kernels::{
    Kernel, MAX_OUT, Rectangle, Tiles, kind, with_const, with_kind, with_rare_kind, with_trellis_kind,
};
use super::integer::{Runs, Width, add_minimums, add_sums, broadcast, product, shape};
use super::isa::{Isa, Piece, Routine};
use super::panel;
use crate::scheme::TILE_ROWS;
use std::marker::PhantomData;
use std::ops::Range;

/// Returns the kernel for a width.
pub(in super::super) const fn kernel<I: Isa, W: Width>() -> Kernel {
    // With few columns, one call computes several tiles, because selecting a function for each tile would take 3 % of
    // the time or more.
    Kernel {
        items: 1,
        alone: MAX_OUT / TILE_ROWS,
        cols: shape::<I, W>().cols,
        run: tile::<I, W>,
        panel: panel::kernel::<I, W>(),
    }
}

/// # Safety
/// Same as [`super::super::kernels::PartFn`].
unsafe fn tile<I: Isa, W: Width>(part: &Rectangle<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    let kind = kind::of(tiles.layout);
    // SAFETY: the caller guarantees the same.
    unsafe {
        if kind::is_trellis(kind) {
            return trellis::<I, W>(part, out);
        }
        if kind::is_rare(kind) {
            return rare::<I, W>(part, out);
        }
    }
    with_kind!(tiles.layout, KIND, {
        with_const!(part.cols, [1 2 3 4 5 6 7 8 9 10 11], C, C <= shape::<I, W>().cols, {
            // The fewer instructions a block takes, the more blocks the processor can load ahead. With both cases in
            // one function, decoding with groups of 128 takes 1.2 times as long.
            //
            // SAFETY: the caller guarantees the instruction set, and a part inside the matrix and the activations.
            unsafe {
                if const { C == 1 || C <= 4 && W::BITS == 8 } && tiles.layout.group_blocks == 1 {
                    I::enter(TileProduct::<W, KIND, 1, C> { tiles, out, width: PhantomData })
                } else {
                    I::enter(TileProduct::<W, KIND, 0, C> { tiles, out, width: PhantomData })
                }
            }
        })
    })
}

/// Computes a rectangle of a rare kind.
///
/// # Safety
/// Same as [`super::super::kernels::PartFn`].
unsafe fn rare<I: Isa, W: Width>(part: &Rectangle<'_>, out: &mut [f32]) {
    in_pieces::<I, W>(part, out, |tiles, out| {
        with_rare_kind!(tiles.layout, KIND, {
            with_const!(tiles.part.cols, [1 2 4], C, C <= shape::<I, W>().cols, {
                // SAFETY: the caller guarantees the instruction set, and a part inside the matrix and the activations.
                unsafe {
                    if const { matches!(KIND, kind::INT5 | kind::INT6) } {
                        I::enter(TileProduct::<W, KIND, 0, C> { tiles, out, width: PhantomData });
                    } else {
                        I::enter(TileProduct::<W, KIND, 1, C> { tiles, out, width: PhantomData });
                    }
                }
            })
        });
    });
}

/// Computes a rectangle of a trellis.
///
/// # Safety
/// Same as [`super::super::kernels::PartFn`].
unsafe fn trellis<I: Isa, W: Width>(part: &Rectangle<'_>, out: &mut [f32]) {
    in_pieces::<I, W>(part, out, |tiles, out| {
        with_trellis_kind!(tiles.layout, KIND, {
            with_const!(tiles.part.cols, [1 2 4], C, C <= shape::<I, W>().cols, {
                // SAFETY: the caller guarantees the instruction set, and a part inside the matrix and the activations.
                unsafe { I::enter(TileProduct::<W, KIND, 0, C> { tiles, out, width: PhantomData }) }
            })
        });
    });
}

/// Computes a rectangle in pieces of 4, 2 and 1 columns.
fn in_pieces<I: Isa, W: Width>(part: &Rectangle<'_>, out: &mut [f32], compute: impl Fn(Tiles<'_>, &mut [f32])) {
    let mut out = out;
    let mut done = 0;
    while done < part.cols {
        let cols = [4, 2, 1].into_iter().find(|n| *n <= (part.cols - done).min(shape::<I, W>().cols)).unwrap_or(1);
        let piece = Rectangle { col: part.col + done, cols, ..*part };
        let (of_piece, rest) = out.split_at_mut(cols * part.items * TILE_ROWS);
        compute(Tiles::of(&piece), of_piece);
        (out, done) = (rest, done + cols);
    }
}

/// Returns the kernel of `Base` with products of trellises by `I`, an instruction set that looks up more bits at once.
#[cfg(target_arch = "x86_64")]
pub(in super::super) const fn with_trellis<I: Isa, Base: Isa, W: Width>() -> Kernel {
    Kernel { run: tile_or_trellis::<I, Base, W>, ..kernel::<Base, W>() }
}

/// # Safety
/// Same as [`super::super::kernels::PartFn`].
#[cfg(target_arch = "x86_64")]
unsafe fn tile_or_trellis<I: Isa, Base: Isa, W: Width>(part: &Rectangle<'_>, out: &mut [f32]) {
    // SAFETY: the caller guarantees the same.
    unsafe {
        match kind::is_trellis(kind::of(part.layout())) {
            true => trellis::<I, W>(part, out),
            false => tile::<Base, W>(part, out),
        }
    }
}

/// Product of tiles with `C` columns in runs of `RUN` blocks, or as long as the layout says if it is 0: tile after
/// tile, with all columns at once. Two tiles in parallel would be two streams from memory, and a second pass for
/// further columns would unpack again.
struct TileProduct<'a, W, const KIND: u8, const RUN: usize, const C: usize> {
    tiles: Tiles<'a>,
    out: &'a mut [f32],
    width: PhantomData<W>,
}

impl<W: Width, const KIND: u8, const RUN: usize, const C: usize> Routine for TileProduct<'_, W, KIND, RUN, C> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        // One or two columns wait for memory, so all rows of a tile are computed together, which reads each cache line
        // once. The 16 registers of AVX2 hold the sums of so many rows for few columns only: with three, or with four
        // of 16 bits, it is slower.
        match I::LANES {
            8 if C <= 2 || (C == 4 && W::BITS == 8) => self.rows::<I, 2>(isa),
            4 if C == 1 => self.rows::<I, 4>(isa),
            _ => self.rows::<I, 1>(isa),
        }
    }
}

impl<W: Width, const KIND: u8, const RUN: usize, const C: usize> TileProduct<'_, W, KIND, RUN, C> {
    /// Computes `N` pieces of a tile at once.
    #[inline(always)]
    fn rows<I: Isa, const N: usize>(self, isa: I) {
        let (layout, items) = (self.tiles.layout, self.tiles.part.items);
        // With more columns or 16-bit activations, arithmetic takes the time.
        let in_place = C <= 4 && W::BITS == 8;
        for (t, row) in (0..items).flat_map(|t| (0..TILE_ROWS).step_by(N * I::LANES).map(move |row| (t, row))) {
            let mut pieces = [Piece::new(layout, self.tiles.tile(t), row).in_place(in_place); N];
            for n in 1..N {
                pieces[n] = Piece::new(layout, self.tiles.tile(t), row + n * I::LANES).in_place(in_place);
            }
            let common = RUN == 1 && W::BITS == 8 && layout.spec.scale_dtype == kind::common_scale(KIND);
            let rows = if common {
                product::<I, W, _, RUN, N, C>(isa, &self.tiles, Unpacked::<KIND, true, N> { pieces })
            } else {
                product::<I, W, _, RUN, N, C>(isa, &self.tiles, Unpacked::<KIND, false, N> { pieces })
            };
            for n in 0..N {
                for c in 0..C {
                    let to: &mut [f32] = &mut self.out[TILE_ROWS * (c * items + t) + row + n * I::LANES..][..I::LANES];
                    // SAFETY: `to` is a whole vector.
                    unsafe { isa.store(to.as_mut_ptr(), rows[n][c]) };
                }
            }
        }
    }
}

/// Runs of `N` pieces, whose codes are unpacked in registers, with scales of the common type if `COMMON`.
struct Unpacked<'a, const KIND: u8, const COMMON: bool, const N: usize> {
    pieces: [Piece<'a>; N],
}

/// Unfinished sums of each piece and column, in up to four chains.
type Sums<I, W, const N: usize, const C: usize> = [[[<W as Width>::Sum<I>; 4]; C]; N];

impl<const KIND: u8, const COMMON: bool, const N: usize> Unpacked<'_, KIND, COMMON, N> {
    /// Returns the number of chains of each sum.
    #[inline(always)]
    fn chains<W: Width, const C: usize>() -> usize {
        match kind::halves(KIND) {
            1 if C < 4 => W::CHAINS.div_ceil(N),
            halves => halves,
        }
    }

    /// Returns the chain to which the products of vector `s` of a quarter are added: any of them, or that of the half
    /// of the block.
    #[inline(always)]
    fn chain<W: Width, const C: usize>(s: usize) -> usize {
        if kind::halves(KIND) == 1 { s % Self::chains::<W, C>() } else { s / (W::VECTORS / 8) }
    }

    /// Adds the products of quarter `i` of a block. The four calls for a block are written out rather than a loop,
    /// which the compiler would not unroll.
    ///
    /// # Safety
    /// The tile has the block, which lies in the groups `x`.
    #[inline(always)]
    unsafe fn quarter<I: Isa, W: Width, const C: usize>(
        &self,
        isa: I,
        x: &[&W::Group; C],
        (block, i): (usize, usize),
        zeros: &[I::Int; N],
        sums: &mut Sums<I, W, N, C>,
    ) {
        let pieces = &self.pieces;
        let first = block % GROUP_BLOCKS * W::VECTORS;
        for n in 0..N {
            // SAFETY: the caller guarantees the block.
            let quarter = unsafe { W::quarter::<I, KIND>(isa, &pieces[n], block, i, zeros[n]) };
            let quarter = quarter.as_ref();
            for s in 0..W::VECTORS / 4 {
                for c in 0..C {
                    // SAFETY: each block of a group has as many words as vectors.
                    let a = unsafe { broadcast::<I, W>(isa, x[c], first + W::word(i, s)) };
                    let sum = &mut sums[n][c][Self::chain::<W, C>(s)];
                    *sum = W::dot::<I, KIND>(isa, *sum, quarter[s], a);
                }
            }
            if i == 3 {
                for c in 0..C {
                    sums[n][c][0] = W::end::<I, KIND>(isa, sums[n][c][0]);
                }
            }
        }
    }
}

impl<I: Isa, W: Width, const KIND: u8, const COMMON: bool, const N: usize, const C: usize> Runs<I, W, N, C>
    for Unpacked<'_, KIND, COMMON, N>
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
        let first = blocks.start;
        let pieces = &self.pieces;
        let mut zeros = [isa.splat(0); N];
        for n in 0..N {
            // SAFETY: the caller guarantees the blocks, and with them their group of scales.
            zeros[n] = unsafe { W::zeros::<I, KIND>(isa, &pieces[n], scale) };
        }
        let mut sums = [[[W::zero(isa); 4]; C]; N];
        for block in blocks {
            for n in 0..N {
                for c in 0..C {
                    if const { kind::halves(KIND) > 1 } {
                        for half in 0..2 {
                            sums[n][c][half] =
                                W::start_half::<I, KIND>(isa, sums[n][c][half], x[c], (block % GROUP_BLOCKS, half));
                        }
                        continue;
                    }
                    let sum = W::start::<I, KIND, 1>(isa, sums[n][c][0], x[c], block % GROUP_BLOCKS);
                    sums[n][c][0] = W::begin::<I, KIND>(isa, sum, x[c], block % GROUP_BLOCKS);
                }
            }
            // SAFETY: the caller guarantees the blocks, and the groups they lie in.
            unsafe {
                self.quarter::<I, W, C>(isa, x, (block, 0), &zeros, &mut sums);
                self.quarter::<I, W, C>(isa, x, (block, 1), &zeros, &mut sums);
                self.quarter::<I, W, C>(isa, x, (block, 2), &zeros, &mut sums);
                self.quarter::<I, W, C>(isa, x, (block, 3), &zeros, &mut sums);
            }
        }
        for half in 0..kind::halves(KIND) {
            let (mut whole, mut scales) = ([[isa.splat(0); C]; N], [isa.splat_f32(0.0); N]);
            for n in 0..N {
                for c in 0..C {
                    whole[n][c] = W::finish(isa, sums[n][c][half]);
                    if const { kind::halves(KIND) == 1 } && Self::chains::<W, C>() > 1 {
                        for chain in 1..4 {
                            whole[n][c] = isa.add(whole[n][c], W::finish(isa, sums[n][c][chain]));
                        }
                    }
                }
                // SAFETY: the caller guarantees the blocks, and with them their groups of scales.
                scales[n] = unsafe { pieces[n].scales::<I, KIND, COMMON>(isa, scale + half) };
            }
            add_sums(isa, totals, &whole, &scales);
            if const { kind::has_minimum(KIND) } {
                let mut minimums = scales;
                for n in 0..N {
                    // SAFETY: the caller guarantees the blocks, and with them their groups of scales.
                    minimums[n] = unsafe { pieces[n].minimums::<I, KIND>(isa, scale + half, W::SUM_UNIT) };
                }
                let part = if const { kind::halves(KIND) > 1 } { Some(half) } else { None };
                add_minimums::<I, W, N, C>(isa, totals, x, (first, part), &minimums);
            }
        }
    }
}
