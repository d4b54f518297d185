//! Kernel for tiles times float activations.

use super::super::kernels::{
    Kernel, Rectangle, Tiles, kind, with_any_rare_kind, with_const, with_float_kind, with_kind, with_rare_kind,
};
use super::integer::byte_quarter;
use super::isa::{Isa, Piece, Routine, e4m3};
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
    if kind::is_rare(kind::of(tiles.layout)) {
        // SAFETY: the caller guarantees the same.
        return unsafe { rare::<I>(part, out) };
    }
    with_float_kind!(tiles.layout, KIND, {
        with_const!(part.items, [1 2], T, T <= I::FLOAT.0, {
            with_const!(part.cols, [1 2 3 4 5 6], C, C <= I::FLOAT.1, {
                // SAFETY: the caller guarantees the instruction set, and a part inside the matrix and the activations.
                unsafe { I::enter(FloatProduct::<KIND, T, C> { tiles, out }) }
            })
        })
    })
}

/// Computes a rectangle of a rare kind, tile by tile, in pieces of 4 and 1 columns.
///
/// # Safety
/// Same as [`super::super::kernels::PartFn`].
unsafe fn rare<I: Isa>(part: &Rectangle<'_>, out: &mut [f32]) {
    for t in 0..part.items {
        let mut done = 0;
        while done < part.cols {
            let cols = if part.cols - done >= 4 { 4 } else { 1 };
            let piece = Rectangle { item: part.item + t, items: 1, col: part.col + done, cols, ..*part };
            let mut of_piece = [0.0; 4 * TILE_ROWS];
            let results = &mut of_piece[..cols * TILE_ROWS];
            let tiles = Tiles::of(&piece);
            with_any_rare_kind!(tiles.layout, KIND, {
                with_const!(cols, [1 4], C, C <= 4, {
                    // SAFETY: the caller guarantees the instruction set, and a part inside matrix and activations.
                    unsafe { I::enter(RareProduct::<KIND, C> { tiles, out: &mut *results }) }
                })
            });
            for (c, results) in results.chunks_exact(TILE_ROWS).enumerate() {
                out[TILE_ROWS * ((done + c) * part.items + t)..][..TILE_ROWS].copy_from_slice(results);
            }
            done += cols;
        }
    }
}

/// Product of a tile of a rare kind with `C` columns.
struct RareProduct<'a, const KIND: u8, const C: usize> {
    tiles: Tiles<'a>,
    out: &'a mut [f32],
}

impl<const KIND: u8, const C: usize> Routine for RareProduct<'_, KIND, C> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let RareProduct { tiles, out } = self;
        let mut x = [[].as_slice(); C];
        for c in 0..C {
            x[c] = &tiles.part.x.row(tiles.part.col + c).as_chunks::<BLOCK>().0[..tiles.layout.blocks];
        }
        for row in (0..TILE_ROWS).step_by(I::LANES) {
            let piece = Piece::new(tiles.layout, tiles.tile(0), row);
            let mut rows = [isa.splat_f32(0.0); C];
            for block in 0..tiles.layout.blocks {
                let mut a = [&x[0][block]; C];
                for c in 1..C {
                    a[c] = &x[c][block];
                }
                let group = block / tiles.layout.group_blocks * kind::halves(KIND);
                // SAFETY: the tile has this block and its groups.
                unsafe { rare_block::<I, KIND, C>(isa, &piece, (block, group), &a, &mut rows) };
            }
            for c in 0..C {
                let to: &mut [f32] = &mut out[TILE_ROWS * c + row..][..I::LANES];
                // SAFETY: `to` is a whole vector.
                unsafe { isa.store(to.as_mut_ptr(), rows[c]) };
            }
        }
    }
}

/// Adds the products of a block, whose groups begin with `group`.
///
/// # Safety
/// The tile has the block and its groups.
#[inline(always)]
unsafe fn rare_block<I: Isa, const KIND: u8, const C: usize>(
    isa: I,
    piece: &Piece<'_>,
    (block, group): (usize, usize),
    x: &[&[f32; BLOCK]; C],
    rows: &mut [I::Float; C],
) {
    let mut codes = [[isa.splat(0); 2]; 4];
    for i in 0..4 {
        // SAFETY: the caller guarantees the block.
        codes[i] = unsafe { byte_quarter::<I, KIND>(isa, 0, piece, (block, i), isa.splat(0)) };
    }
    let parts = kind::halves(KIND);
    for part in 0..parts {
        let (mut sums, mut totals) = ([isa.splat_f32(0.0); C], [isa.splat_f32(0.0); C]);
        for i in 0..4 {
            let (mut chains, mut plain) = ([isa.splat_f32(0.0); C], [isa.splat_f32(0.0); C]);
            for half in if parts == 1 { 0..2 } else { part..part + 1 } {
                let mut v = codes[i][half];
                for j in 0..4 {
                    let w = isa.to_f32(isa.sra::<24>(isa.shl::<24>(v)));
                    v = isa.shr::<8>(v);
                    for c in 0..C {
                        let a = isa.splat_f32(x[c][16 * half + 4 * i + j]);
                        chains[c] = isa.fma(w, a, chains[c]);
                        if const { kind::has_minimum(KIND) } {
                            plain[c] = isa.add_f32(plain[c], a);
                        }
                    }
                }
            }
            for c in 0..C {
                sums[c] = if i == 0 { chains[c] } else { isa.add_f32(sums[c], chains[c]) };
                totals[c] = if i == 0 { plain[c] } else { isa.add_f32(totals[c], plain[c]) };
            }
        }
        // SAFETY: the caller guarantees the groups of the block.
        unsafe {
            let scales = piece.scales::<I, KIND, false>(isa, group + part);
            for c in 0..C {
                rows[c] = isa.fma(sums[c], scales, rows[c]);
            }
            if const { kind::has_minimum(KIND) } {
                let minimums = piece.minimums::<I, KIND>(isa, group + part, 1.0);
                for c in 0..C {
                    rows[c] = isa.fma(totals[c], minimums, rows[c]);
                }
            }
        }
    }
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
            let upper = if kind::vectors(KIND) == 8 { pieces[t].codes::<I, KIND>(isa, block, i + 4) } else { v };
            if KIND == kind::E4M3 { [v, upper] } else { isa.float_codes::<KIND>(v, upper) }
        };
    }
    for half in 0..2 {
        for j in 0..4 {
            let mut w = [isa.splat_f32(0.0); T];
            for t in 0..T {
                let v = &mut codes[t][half];
                w[t] = if KIND == kind::E4M3 { e4m3(isa, *v) } else { isa.code_value::<KIND>(*v, table) };
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
