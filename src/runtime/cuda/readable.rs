//! Forms in which the kernels of GPUs read matrices whose codes they do not read as stored.
//!
//! Codes of 5 and 6 bits with one level of scales become int8 tiles: integers and scales stay the same, so every
//! product has the bits of an int8 tensor with these integers. Formats with two levels of scales or with minimums,
//! and FP8, become f32 numbers. Both cost memory, but no accuracy.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::mapped::Bytes;
use crate::runtime::cpu::{Matrix, MatrixStore};
use crate::runtime::weights::{Weight, read_row};
use crate::scheme::{CodeMap, Minimum, QuantSpec, Scheme, TILE_ALIGN, TileLayout};
use rayon::prelude::*;
use std::borrow::Cow;

/// 64 bytes of a block: for each of the 16 rows of a tile, four bytes of codes one after the other.
type Vector = [u8; TILE_ALIGN];

/// Number of vectors in a block that hold the low four bits of its codes.
const NIBBLES: usize = 4;
/// Number of vectors in a block of int8 codes.
const BYTES: usize = 8;

/// Returns true for formats that kernels read as f32 numbers only.
pub(super) fn becomes_floats(store: MatrixStore) -> bool {
    matches!(store, MatrixStore::Tiled(TileLayout { spec, .. })
        if spec.has_two_levels() || spec.minimum() != Minimum::None || spec.code_map() == CodeMap::E4m3)
}

/// Returns the storage format in which kernels read matrices of `store`.
///
/// # Errors
/// The size of the matrix overflows.
fn readable_store(store: MatrixStore) -> Result<MatrixStore> {
    let MatrixStore::Tiled(layout) = store else { return Ok(store) };
    let spec = layout.spec;
    Ok(match spec.code_map() {
        _ if becomes_floats(store) => MatrixStore::Plain(DType::F32),
        CodeMap::Biased(16 | 32) => {
            let wide = QuantSpec { scheme: Scheme::Int8, ..spec };
            MatrixStore::Tiled(TileLayout::new(wide, layout.rows, layout.cols)?)
        }
        _ => store,
    })
}

/// Returns the bytes that a matrix takes on a device.
pub(super) fn device_bytes(weight: &Weight) -> u64 {
    match readable_store(weight.store()) {
        Ok(MatrixStore::Tiled(layout)) => layout.nbytes() as u64,
        Ok(store @ MatrixStore::Plain(dtype)) if store != weight.store() => {
            (weight.rows() as u64).saturating_mul(weight.cols() as u64).saturating_mul(dtype.size() as u64)
        }
        _ => weight.nbytes() as u64,
    }
}

/// Returns a matrix as kernels read it.
///
/// # Errors
/// A weight cannot be read, or there is not enough memory.
pub(super) fn readable(matrix: &Matrix) -> Result<Cow<'_, Matrix>> {
    let store = readable_store(matrix.store)?;
    let data = match (matrix.store, store) {
        (from, to) if from == to => return Ok(Cow::Borrowed(matrix)),
        (MatrixStore::Tiled(from), MatrixStore::Tiled(to)) => widen(&from, &matrix.data, &to)?,
        _ => Bytes::build(matrix.rows * matrix.cols * size_of::<f32>(), |out| {
            let rows = out.par_chunks_exact_mut(matrix.cols * size_of::<f32>()).enumerate();
            rows.try_for_each_init(
                || vec![0.0; matrix.cols],
                |values, (row, out)| {
                    read_row(matrix, row, values)?;
                    out.copy_from_slice(bytemuck::cast_slice(values));
                    Ok(())
                },
            )
        })?,
    };
    Matrix::new(matrix.rows, matrix.cols, store, data).map(Cow::Owned)
}

/// Converts the tiles of `from` to the int8 tiles of `to`, which has the same rows and columns.
///
/// # Errors
/// The number of bytes is wrong, or there is not enough memory.
fn widen(from: &TileLayout, tiles: &[u8], to: &TileLayout) -> Result<Bytes> {
    if tiles.len() != from.nbytes() {
        let (found, expected) = (tiles.len(), from.nbytes());
        return Err(Error::corrupt(format!("found {found} bytes of tiles, expected {expected}")));
    }
    Bytes::build(to.nbytes(), |out| {
        let tiles = tiles.par_chunks_exact(from.tile_bytes);
        out.par_chunks_exact_mut(to.tile_bytes).zip(tiles).for_each(|(out, tile)| {
            // Scales have the same offset and type in both layouts.
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

/// Converts one block of 16 rows by 32 columns. Vector `f` of the 8 vectors of int8 codes holds columns `4f..4f + 4`.
/// In `codes`, the low four bits of the codes of these columns are the low nibbles (`f < 4`) or the high nibbles
/// (`f >= 4`) of vector `f % 4`. The high bits of all codes follow after the 4 vectors of nibbles.
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
                let narrow = TileLayout::new(spec, 35, 77).unwrap();
                let MatrixStore::Tiled(wide) = readable_store(MatrixStore::Tiled(narrow)).unwrap() else {
                    panic!("{spec:?} becomes floats");
                };
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
