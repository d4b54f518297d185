//! Kernel for tiles times float activations.

use super::super::kernels::{Kernel, Rectangle, Tiles, kind, with_const, with_kind};
use super::isa::{Isa, Piece, Routine};
use crate::scheme::{BLOCK, TILE_ROWS};

/// Returns the kernel. For a single column it reads one tile after the other, as one stream from memory.
pub(super) const fn kernel<I: Isa>() -> Kernel {
    let (items, cols) = I::FLOAT;
    Kernel { items, alone: 1, cols, run: tile::<I>, panel: None }
}

/// # Safety
/// Same as [`super::super::kernels::PartFn`].
unsafe fn tile<I: Isa>(part: &Rectangle<'_>, out: &mut [f32]) {
    let tiles = Tiles::of(part);
    with_kind!(tiles.layout, KIND, {
        with_const!(part.items, [1 2], T, T <= I::FLOAT.0, {
            with_const!(part.cols, [1 2 3 4 5 6], C, C <= I::FLOAT.1, {
                // SAFETY: the caller guarantees the instruction set, and a part inside the matrix and the activations.
                unsafe { I::enter(FloatProduct::<KIND, T, C> { tiles, out }) }
            })
        })
    })
}

/// Product of `T` tiles with `C` columns.
struct FloatProduct<'a, const KIND: u8, const T: usize, const C: usize> {
    tiles: Tiles<'a>,
    out: &'a mut [f32],
}

impl<const KIND: u8, const T: usize, const C: usize> Routine for FloatProduct<'_, KIND, T, C> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let layout = self.tiles.layout;
        for row in (0..TILE_ROWS).step_by(I::LANES) {
            let mut pieces = [Piece::new(layout, self.tiles.tile(0), row); T];
            for t in 1..T {
                pieces[t] = Piece::new(layout, self.tiles.tile(t), row);
            }
            let rows = product::<I, KIND, T, C>(isa, &self.tiles, &pieces);
            for c in 0..C {
                for t in 0..T {
                    let to: &mut [f32] = &mut self.out[TILE_ROWS * (c * T + t) + row..][..I::LANES];
                    // SAFETY: `to` is a whole vector.
                    unsafe { isa.store(to.as_mut_ptr(), rows[t][c]) };
                }
            }
        }
    }
}

#[inline(always)]
fn product<I: Isa, const KIND: u8, const T: usize, const C: usize>(
    isa: I,
    tiles: &Tiles<'_>,
    pieces: &[Piece<'_>; T],
) -> [[I::Float; C]; T] {
    let mut x = [[].as_slice(); C];
    for c in 0..C {
        x[c] = &tiles.part.x.row(tiles.part.col + c).as_chunks::<BLOCK>().0[..tiles.layout.blocks];
    }
    let table = isa.float_table::<KIND>();
    let mut rows = [[isa.splat_f32(0.0); C]; T];
    for group in 0..tiles.layout.groups {
        let (mut scales, mut zeros) = ([isa.splat_f32(0.0); T], [isa.splat_f32(0.0); T]);
        for t in 0..T {
            // SAFETY: the tiles have this group.
            scales[t] = unsafe { pieces[t].scales::<I, KIND, false>(isa, group) };
            if KIND == kind::AFFINE4 {
                // SAFETY: the tiles have this group, and the layout is affine.
                zeros[t] = isa.to_f32(unsafe { pieces[t].zeros(isa, group) });
            }
        }
        for block in tiles.blocks(group) {
            let mut a = [&x[0][block]; C];
            for c in 1..C {
                a[c] = &x[c][block];
            }
            let mut sums = [[isa.splat_f32(0.0); C]; T];
            for i in 0..4 {
                // SAFETY: the tiles have this block.
                let chain = unsafe { chain::<I, KIND, T, C>(isa, pieces, &a, block, i, table, &zeros) };
                for c in 0..C {
                    for t in 0..T {
                        sums[t][c] = if i == 0 { chain[t][c] } else { isa.add_f32(sums[t][c], chain[t][c]) };
                    }
                }
            }
            for c in 0..C {
                for t in 0..T {
                    rows[t][c] = isa.fma(sums[t][c], scales[t], rows[t][c]);
                }
            }
        }
    }
    rows
}

/// Computes the sum of chain `i` of a block: k = 4i..4i + 4, then k = 16 + 4i..16 + 4i + 4.
///
/// # Safety
/// The tiles have the block.
#[inline(always)]
unsafe fn chain<I: Isa, const KIND: u8, const T: usize, const C: usize>(
    isa: I,
    pieces: &[Piece<'_>; T],
    x: &[&[f32; BLOCK]; C],
    block: usize,
    i: usize,
    table: I::Float,
    zeros: &[I::Float; T],
) -> [[I::Float; C]; T] {
    let mut sums = [[isa.splat_f32(0.0); C]; T];
    let mut codes = [[isa.splat(0); 2]; T];
    for t in 0..T {
        // SAFETY: the caller guarantees the block, which has 8 vectors of bytes or 4 of nibbles.
        codes[t] = unsafe {
            let v = pieces[t].codes::<I, KIND>(isa, block, i);
            let upper = if KIND == kind::INT8 { pieces[t].codes::<I, KIND>(isa, block, i + 4) } else { v };
            isa.float_codes::<KIND>(v, upper)
        };
    }
    for half in 0..2 {
        for j in 0..4 {
            let mut w = [isa.splat_f32(0.0); T];
            for t in 0..T {
                let v = &mut codes[t][half];
                w[t] = isa.code_value::<KIND>(*v, table);
                if KIND == kind::AFFINE4 {
                    w[t] = isa.sub_f32(w[t], zeros[t]);
                }
                *v = isa.shr::<8>(*v);
            }
            for c in 0..C {
                let a = isa.splat_f32(x[c][16 * half + 4 * i + j]);
                for t in 0..T {
                    sums[t][c] = isa.fma(w[t], a, sums[t][c]);
                }
            }
        }
    }
    sums
}
