//! Matrices of latent attention head by head: the part of `kv_b` that computes keys, transposed, and the part that
//! computes values.
//!
//! The product of a query with the key `W c` of a vector `c` is that of `W^T q` with `c`, so queries are multiplied by
//! the transposed matrix and keys are never computed. Codes of quantized matrices lie in blocks along `c` and cannot be
//! transposed: the elements, each a code times its scale in f32, are rounded to the float type that products of the
//! precision read (`transposed_dtype`). Floats stay as they are, and the part of the values keeps its bytes.

use super::cpu::{Arithmetic, Form, Matrix, MatrixStore};
use super::weights::{Weight, narrow, read_row, transposed_dtype};
use crate::dtype::DType;
use crate::error::Result;
use crate::mapped::Bytes;
use crate::model_config::Latent;
use crate::scheme::{TILE_ROWS, TileLayout};
use rayon::prelude::*;
use std::ops::Range;

/// Matrices of a layer with latent attention, one of each kind per head.
#[derive(Debug)]
pub struct PerHead {
    /// Transposed matrices of the part of the keys that is not rotated: `(kv_rank, nope)`.
    pub keys: Vec<Weight>,
    /// Matrices of the values: `(value, kv_rank)`.
    pub values: Vec<Weight>,
}

impl PerHead {
    /// Divides the matrix `kv_b`, `(heads * (nope + value), kv_rank)`, which is not read afterwards.
    ///
    /// # Errors
    /// The matrix cannot be read, or a weight is out of range for the float type.
    pub fn new(kv_b: &Weight, latent: &Latent, arithmetic: Arithmetic) -> Result<PerHead> {
        let held = kv_b.hold()?;
        let (matrix, dtype): (&Matrix, _) = (&held, transposed_dtype(&kv_b.store(), arithmetic));
        let Latent { nope, value, .. } = *latent;
        let firsts: Vec<usize> = (0..matrix.rows).step_by(nope + value).collect();
        let split = |first: &usize| {
            let keys = transposed(matrix, *first..first + nope, dtype)?;
            let values = rows(matrix, first + nope..first + nope + value)?;
            Ok((Weight::Here(keys), Weight::Here(values)))
        };
        let (keys, values) = firsts.par_iter().map(split).collect::<Result<Vec<_>>>()?.into_iter().unzip();
        matrix.data.release();
        Ok(PerHead { keys, values })
    }

    /// Returns the forms of activations that products with these matrices read.
    pub fn forms(&self, arithmetic: Arithmetic) -> impl Iterator<Item = Form> {
        [&self.keys, &self.values].into_iter().flatten().map(move |weight| weight.store().form(arithmetic))
    }
}

/// Returns the transposed matrix of a range of rows.
fn transposed(matrix: &Matrix, rows: Range<usize>, dtype: DType) -> Result<Matrix> {
    let (n, cols) = (rows.len(), matrix.cols);
    let (mut row, mut all) = (vec![0f32; cols], vec![0f32; n * cols]);
    for (i, from) in rows.enumerate() {
        read_row(matrix, from, &mut row)?;
        row.iter().enumerate().for_each(|(column, value)| all[column * n + i] = *value);
    }
    let data = narrow(DType::F32, bytemuck::cast_slice(&all), dtype)?;
    Matrix::new(cols, n, MatrixStore::Plain(dtype), data)
}

/// Returns a copy of a range of rows.
fn rows(matrix: &Matrix, rows: Range<usize>) -> Result<Matrix> {
    let (store, data) = match matrix.store {
        MatrixStore::Plain(dtype) => {
            let width = matrix.cols * dtype.size();
            let copy = |out: &mut [u8]| {
                out.chunks_exact_mut(width).zip(rows.clone()).try_for_each(|(out, row)| {
                    match matrix.unpacked_row(row) {
                        Some(unpacked) => out.copy_from_slice(&unpacked?),
                        None => out.copy_from_slice(&matrix.data[row * width..][..width]),
                    }
                    Ok(())
                })
            };
            (matrix.store, Bytes::build(rows.len() * width, copy)?)
        }
        MatrixStore::Tiled(from) => {
            let to = TileLayout::new(from.spec, rows.len(), matrix.cols)?;
            let copy = |out: &mut [u8]| {
                for (i, row) in rows.clone().enumerate() {
                    let tile = &matrix.data[row / TILE_ROWS * from.tile_bytes..][..from.tile_bytes];
                    let out = &mut out[i / TILE_ROWS * to.tile_bytes..][..to.tile_bytes];
                    to.copy_row((tile, row % TILE_ROWS), (out, i % TILE_ROWS));
                }
                Ok(())
            };
            (MatrixStore::Tiled(to), Bytes::build(to.nbytes(), copy)?)
        }
    };
    Matrix::new(rows.len(), matrix.cols, store, data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::block::CodedRow;
    use crate::quant::block::tile::put_row;
    use crate::rng::Rng;
    use crate::runtime::weights::per_head_bytes;
    use crate::scheme::{Granularity, QuantSpec, Scheme};
    use half::{bf16, f16};

    const HEADS: usize = 3;
    /// Numbers of rows that are no multiples of those of a tile, and columns that do not fill a block.
    const LATENT: Latent = Latent { q_rank: None, kv_rank: 72, nope: 24, rope: 16, value: 20, norm_eps: 1e-6 };

    /// Returns a matrix of random codes.
    fn coded(spec: QuantSpec) -> Matrix {
        let layout = TileLayout::new(spec, HEADS * (LATENT.nope + LATENT.value), LATENT.kv_rank).unwrap();
        let (mut rng, mut tiles) = (Rng::new(5), vec![0; layout.nbytes()]);
        for row in 0..layout.rows {
            let mut coded = CodedRow::new(&layout);
            let mask = ((1u32 << spec.scheme.bits()) - 1) as u8;
            // -128 is not a code of 8 bits.
            coded.codes.fill_with(|| Some(rng.next_u64() as u8 & mask).filter(|code| *code != 0x80).unwrap_or(0));
            coded.zeros.iter_mut().for_each(|zero| *zero = (rng.next_u64() % 16) as u8);
            let scales = (0..layout.groups).map(|_| f16::from_f64(0.01 + 0.01 * rng.next_f64()).to_le_bytes());
            if layout.spec.scale_dtype.size() == 2 {
                coded.scales.copy_from_slice(&scales.flatten().collect::<Vec<u8>>());
            } else {
                coded.scales.iter_mut().for_each(|scale| *scale = 118 + (rng.next_u64() % 4) as u8);
            }
            put_row(
                &layout,
                &mut tiles[row / TILE_ROWS * layout.tile_bytes..][..layout.tile_bytes],
                row % TILE_ROWS,
                &coded,
            );
        }
        Matrix::new(layout.rows, layout.cols, MatrixStore::Tiled(layout), Bytes::copied(&tiles)).unwrap()
    }

    fn floats(dtype: DType) -> Matrix {
        let (mut rng, rows) = (Rng::new(6), HEADS * (LATENT.nope + LATENT.value));
        let values: Vec<f32> = (0..rows * LATENT.kv_rank).map(|_| rng.next_normal() as f32).collect();
        let data = narrow(DType::F32, bytemuck::cast_slice(&values), dtype).unwrap();
        Matrix::new(rows, LATENT.kv_rank, MatrixStore::Plain(dtype), data).unwrap()
    }

    fn row(matrix: &Matrix, row: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; matrix.cols];
        read_row(matrix, row, &mut out).unwrap();
        out
    }

    /// Checks all elements of the matrices of heads, and the bytes that they take.
    fn check(matrix: &Matrix, arithmetic: Arithmetic, round: fn(f32) -> f32) {
        let heads = PerHead::new(&Weight::Here(matrix.clone()), &LATENT, arithmetic).unwrap();
        let bytes: usize = heads.keys.iter().chain(&heads.values).map(Weight::nbytes).sum();
        let planned = per_head_bytes(&matrix.store, HEADS, &LATENT, arithmetic).unwrap();
        assert_eq!((heads.keys.len(), bytes as u64), (HEADS, planned), "{:?}", matrix.store);
        for head in 0..HEADS {
            let first = head * (LATENT.nope + LATENT.value);
            let (keys, values) = (heads.keys[head].hold().unwrap(), heads.values[head].hold().unwrap());
            for i in 0..LATENT.nope {
                let transposed: Vec<f32> = (0..LATENT.kv_rank).map(|column| row(&keys, column)[i]).collect();
                let expected: Vec<f32> = row(matrix, first + i).into_iter().map(round).collect();
                assert_eq!(transposed, expected, "{:?}: key {i} of head {head}", matrix.store);
            }
            for i in 0..LATENT.value {
                let expected = row(matrix, first + LATENT.nope + i);
                assert_eq!(row(&values, i), expected, "{:?}: value {i} of head {head}", matrix.store);
            }
        }
    }

    #[test]
    fn matrices_of_heads_have_the_elements_of_the_whole_matrix() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            [Arithmetic::Float, Arithmetic::Bf16, Arithmetic::Int8].into_iter().for_each(|arithmetic| {
                check(&floats(dtype), arithmetic, |value| value);
            });
        }
        let affine = QuantSpec { symmetric: false, ..QuantSpec::usual(Scheme::Int4) };
        let by_row = QuantSpec { granularity: Granularity::Row, ..QuantSpec::usual(Scheme::Int8) };
        let usual = [Scheme::Q4_0, Scheme::Int4, Scheme::Nl4, Scheme::Mxfp4, Scheme::Int5, Scheme::Int6, Scheme::Int8];
        for spec in usual.map(QuantSpec::usual).into_iter().chain([affine, by_row]) {
            let matrix = coded(spec);
            check(&matrix, Arithmetic::Float, |value| value);
            check(&matrix, Arithmetic::Bf16, |value| bf16::from_f32(value).to_f32());
            check(&matrix, Arithmetic::Int16, |value| f16::from_f32(value).to_f32());
            check(&matrix, Arithmetic::Int8, |value| f16::from_f32(value).to_f32());
        }
    }

    #[test]
    fn a_weight_beyond_the_range_of_the_float_type_is_refused() {
        let spec = QuantSpec { scale_dtype: crate::scheme::ScaleType::F32, ..QuantSpec::usual(Scheme::Int8) };
        let layout = TileLayout::new(spec, HEADS * (LATENT.nope + LATENT.value), LATENT.kv_rank).unwrap();
        let mut tiles = vec![0; layout.nbytes()];
        let mut coded = CodedRow::new(&layout);
        coded.codes.fill(100);
        coded.scales.copy_from_slice(&1e4f32.to_le_bytes().repeat(layout.groups));
        put_row(&layout, &mut tiles[..layout.tile_bytes], 0, &coded);
        let matrix = Matrix::new(layout.rows, layout.cols, MatrixStore::Tiled(layout), Bytes::copied(&tiles)).unwrap();
        let weight = Weight::Here(matrix);
        assert!(PerHead::new(&weight, &LATENT, Arithmetic::Float).is_ok());
        let error = PerHead::new(&weight, &LATENT, Arithmetic::Int8).unwrap_err();
        assert!(error.to_string().contains("found the weight 1000000, which is out of range for F16"), "{error}");
    }
}
