//! Random test data from a seed: numbers, and matrices in every storage format.

use crate::dtype::{DType, encode_floats};
use crate::error::Result;
use crate::mapped::Bytes;
use crate::rng::Rng;
use crate::runtime::cpu::{Matrix, MatrixStore};
use crate::runtime::weights::Weight;
use crate::scheme::{CodeMap, CodeTable, Minimum, QuantSpec, ScaleType, TILE_ROWS, TileLayout};
use half::f16;

/// Returns `len` normally distributed numbers times `scale`.
pub fn normals(rng: &mut Rng, len: usize, scale: f32) -> Vec<f32> {
    (0..len).map(|_| rng.next_normal() as f32 * scale).collect()
}

/// Returns a random number below `end`.
pub fn below(rng: &mut Rng, end: usize) -> usize {
    (rng.next_u64() % end as u64) as usize
}

/// Returns a random matrix: floats are normally distributed, codes are arbitrary bytes, and scales are such that
/// values have about the same magnitude.
pub fn weight(rng: &mut Rng, store: Store, rows: usize, cols: usize) -> Result<Weight> {
    let (store, bytes) = match store {
        Store::Plain(dtype) => {
            let row_bytes = cols * dtype.size();
            let bytes = Bytes::build(rows * row_bytes, |out| {
                out.chunks_exact_mut(row_bytes).try_for_each(|out| {
                    let mut row = Vec::new();
                    encode_floats(dtype, &normals(rng, cols, 0.1), &mut row)?;
                    out.copy_from_slice(&row);
                    Ok(())
                })
            });
            (MatrixStore::Plain(dtype), bytes?)
        }
        Store::Tiles(spec) => {
            let layout = TileLayout::new(spec, rows, cols)?;
            (MatrixStore::Tiled(layout), tiles(rng, &layout)?)
        }
    };
    Ok(Weight::Here(Matrix::new(rows, cols, store, bytes)?))
}

/// Storage format of the elements of a matrix.
#[derive(Debug, Clone, Copy)]
pub enum Store {
    Plain(DType),
    Tiles(QuantSpec),
}

impl Store {
    /// Returns the name for messages.
    pub fn name(self) -> String {
        match self {
            Store::Plain(dtype) => dtype.to_string(),
            Store::Tiles(spec) => {
                let affine = if spec.symmetric { "" } else { " affine" };
                format!("{}{affine}, groups of {}, {:?} scales", spec.scheme.name(), spec.granularity, spec.scale_dtype)
            }
        }
    }
}

fn tiles(rng: &mut Rng, layout: &TileLayout) -> Result<Bytes> {
    Bytes::build(layout.nbytes(), |bytes| {
        let (words, rest) = bytes.as_chunks_mut::<8>();
        words.iter_mut().for_each(|word| *word = rng.next_u64().to_le_bytes());
        rest.fill(0);
        for tile in bytes.chunks_exact_mut(layout.tile_bytes) {
            for i in 0..layout.groups * TILE_ROWS {
                scale(rng, layout, &mut tile[i * layout.spec.scale_dtype.size()..]);
            }
            let supers = &mut tile[layout.supers_offset..layout.codes_offset];
            match layout.spec.scale_dtype {
                ScaleType::E4m3 => supers.as_chunks_mut().0.fill(0.0001f32.to_le_bytes()),
                ScaleType::I8Row => supers.as_chunks_mut().0.fill(0.00003f32.to_le_bytes()),
                _ => supers.as_chunks_mut().0.iter_mut().for_each(|number| *number = number_near(rng, 0.00006)),
            }
            if layout.spec.minimum() == Minimum::F16 {
                let minimums = &mut tile[layout.zeros_offset..layout.supers_offset];
                minimums.as_chunks_mut().0.iter_mut().for_each(|number| *number = number_near(rng, 0.1));
            }
            if !layout.spec.symmetric {
                // A few zero points are larger than any encoder writes; they count as 15.
                let zeros = &mut tile[layout.zeros_offset..][..layout.groups * TILE_ROWS];
                zeros.iter_mut().for_each(|zero| *zero = if *zero > 250 { *zero } else { *zero % 16 });
            }
        }
        Ok(())
    })
}

/// Returns the bytes of an f16 number of about this size, of either sign.
fn number_near(rng: &mut Rng, size: f64) -> [u8; 2] {
    let sign = if rng.next_u64().is_multiple_of(4) { -1.0 } else { 1.0 };
    f16::from_f64(sign * size * (0.25 + rng.next_f64())).to_le_bytes()
}

fn scale(rng: &mut Rng, layout: &TileLayout, at: &mut [u8]) {
    let size = match layout.spec.code_map() {
        CodeMap::Bytes | CodeMap::Table(CodeTable::Iq4Nl) => 0.002,
        // Random codes of FP8 are often large.
        CodeMap::E4m3 => 0.001,
        _ => 0.03,
    };
    match layout.spec.scale_dtype {
        ScaleType::F16 => at[..2].copy_from_slice(&number_near(rng, size)),
        ScaleType::F32 => at[..4].copy_from_slice(&f16::from_le_bytes(number_near(rng, size)).to_f32().to_le_bytes()),
        ScaleType::E8m0 => at[0] = 118 + (rng.next_u64() % 8) as u8,
        ScaleType::I8 | ScaleType::E4m3 | ScaleType::I8Row => at[0] = rng.next_u64() as u8,
    }
}
