//! Codes of 5 and 6 bits as int8 tiles: the same integers under the same scales, so that the kernels of int8 serve them
//! and every product has the bits of an int8 tensor with these codes. It costs memory, 8 bits for each code, and no
//! accuracy.

use crate::error::{Error, Result};
use crate::mapped::Bytes;
use crate::scheme::{CodeMap, QuantSpec, Scheme, TILE_ALIGN, TileLayout};
use rayon::prelude::*;

/// A row of all 16 lanes in a block.
type Vector = [u8; TILE_ALIGN];

/// Vectors of a block with the low four bits of its codes.
const NIBBLES: usize = 4;
/// Vectors of a block of int8.
const BYTES: usize = 8;

/// What tensors of `spec` are held as.
pub(super) fn held_as(spec: QuantSpec) -> QuantSpec {
    match spec.code_map() {
        CodeMap::Biased(16 | 32) => QuantSpec { scheme: Scheme::Int8, ..spec },
        _ => spec,
    }
}

/// Rewrites the tiles of `from`, whose rows and columns are those of `to`, as the int8 tiles of `to`.
///
/// # Errors
/// There are more or fewer of them, or there is no memory.
pub(super) fn widen(from: &TileLayout, tiles: &[u8], to: &TileLayout) -> Result<Bytes> {
    if tiles.len() != from.nbytes() {
        let (found, expected) = (tiles.len(), from.nbytes());
        return Err(Error::corrupt(format!("{found} bytes of tiles, expected {expected}")));
    }
    Bytes::build(to.nbytes(), |out| {
        let tiles = tiles.par_chunks_exact(from.tile_bytes);
        out.par_chunks_exact_mut(to.tile_bytes).zip(tiles).for_each(|(out, tile)| {
            // Scales have the same place and type.
            let (head, codes) = tile.split_at(from.codes_offset);
            let (out_head, out) = out.split_at_mut(to.codes_offset);
            out_head.copy_from_slice(head);
            let bias = from.spec.bias().unwrap_or(0);
            let blocks = codes.chunks_exact(from.block_bytes).zip(out.chunks_exact_mut(to.block_bytes));
            blocks.for_each(|(codes, out)| widen_block(codes.as_chunks().0, bias, out.as_chunks_mut().0));
        });
        Ok(())
    })
}

/// Columns 4f..4f + 4 of int8 are vector f; their nibbles are the low or high ones of vector f % 4, and their high bits
/// lie behind.
fn widen_block(codes: &[Vector], bias: u8, out: &mut [Vector]) {
    let (nibbles, high) = codes.split_at(NIBBLES);
    let each = high.len();
    let mask = (1 << each) - 1;
    for (f, out) in out.iter_mut().enumerate().take(BYTES) {
        let (low, low_shift) = (&nibbles[f % NIBBLES], 4 * (f / NIBBLES));
        let (high, high_shift) = (&high[f * each / 8], f * each % 8);
        for ((out, low), high) in out.iter_mut().zip(low).zip(high) {
            *out = (low >> low_shift & 15 | (high >> high_shift & mask) << 4).wrapping_sub(bias);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::block::CodedRow;
    use crate::quant::block::tile::put_row;
    use crate::rng::Rng;
    use crate::scheme::{Granularity, TILE_ROWS};

    #[test]
    fn widened_tiles_are_the_int8_tiles_of_the_same_integers_and_scales() {
        let mut rng = Rng::new(11);
        for (scheme, half) in [(Scheme::Int5, 16i8), (Scheme::Int6, 32)] {
            for granularity in [Granularity::Group(32), Granularity::Group(64), Granularity::Row] {
                let spec = QuantSpec { granularity, ..QuantSpec::usual(scheme) };
                let [narrow, wide] = [spec, held_as(spec)].map(|spec| TileLayout::new(spec, 35, 77).unwrap());
                let mut tiles = [narrow, wide].map(|layout| vec![0u8; layout.nbytes()]);
                for row in 0..narrow.tiles * TILE_ROWS {
                    let (mut a, mut b) = (CodedRow::new(&narrow), CodedRow::new(&wide));
                    a.scales.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
                    b.scales.copy_from_slice(&a.scales);
                    for (a, b) in a.codes.iter_mut().zip(&mut b.codes) {
                        let integer = (rng.next_u64() % (2 * half as u64)) as i8 - half;
                        (*a, *b) = ((integer + half) as u8, integer as u8);
                    }
                    for (i, (layout, coded)) in [(&narrow, &a), (&wide, &b)].into_iter().enumerate() {
                        let tile = &mut tiles[i][row / TILE_ROWS * layout.tile_bytes..][..layout.tile_bytes];
                        put_row(layout, tile, row % TILE_ROWS, coded);
                    }
                }
                assert_eq!(widen(&narrow, &tiles[0], &wide).unwrap()[..], tiles[1][..], "{spec:?}");
            }
        }
    }
}
