//! Form in which a stored matrix is held: its own mapped bytes, or floats rounded to another type.

use crate::dtype::{DType, decode_floats};
use crate::error::{Error, Result};
use crate::iebin::{Store, stored_bytes};
use crate::mapped::Bytes;
use crate::model_config::Latent;
use crate::runtime::cpu::{Arithmetic, Matrix, MatrixStore};
use crate::scheme::TileLayout;
use half::{bf16, f16};
use rayon::prelude::*;

/// Size of a stored matrix and the form in which it is held.
#[derive(Debug, Clone, Copy)]
pub(in crate::runtime) struct Shape {
    pub rows: usize,
    pub cols: usize,
    /// Form in which the matrix is held in memory.
    pub store: MatrixStore,
    /// Float type in the pack, if the matrix is converted when it is opened.
    pub(super) from: Option<DType>,
}

impl Shape {
    /// Determines the form of a stored matrix. Floats are converted to `convert` if it is given.
    pub(super) fn new(store: Store, rows: usize, cols: usize, convert: Option<DType>) -> Result<Shape> {
        let (store, from) = match store {
            Store::Tiled(spec) => (MatrixStore::Tiled(TileLayout::new(spec, rows, cols)?), None),
            Store::Plain(dtype) => {
                // F32 is no reason to convert narrower floats, because kernels widen them exactly.
                let to = match (convert, dtype) {
                    (Some(DType::F32) | None, DType::F64) => DType::F32,
                    (Some(DType::F32) | None, _) => dtype,
                    (Some(to), _) => to,
                };
                (MatrixStore::Plain(to), Some(dtype).filter(|_| dtype != to))
            }
        };
        Ok(Shape { rows, cols, store, from })
    }

    /// Returns the same shape with another number of rows.
    pub fn with_rows(&self, rows: usize) -> Result<Shape> {
        let store = match self.store {
            MatrixStore::Tiled(layout) => MatrixStore::Tiled(TileLayout::new(layout.spec, rows, self.cols)?),
            plain => plain,
        };
        Ok(Shape { rows, store, ..*self })
    }

    /// Creates the matrix from its stored bytes.
    ///
    /// # Errors
    /// There are too many or too few bytes, the elements are not floats, or they overflow the type they are converted
    /// to.
    pub fn matrix(&self, data: Bytes) -> Result<Matrix> {
        let data = match (self.store, self.from) {
            (MatrixStore::Plain(to), Some(from)) => narrow(from, &data, to)?,
            _ => data,
        };
        Matrix::new(self.rows, self.cols, self.store, data)
    }
}

/// Returns the float type of transposed matrices of heads. It has at least the precision of the codes and of the
/// activations that they are multiplied by.
pub(in crate::runtime) fn transposed_dtype(store: &MatrixStore, arithmetic: Arithmetic) -> DType {
    match (store, arithmetic) {
        (MatrixStore::Plain(dtype), _) => *dtype,
        (MatrixStore::Tiled(_), Arithmetic::Float) => DType::F32,
        (MatrixStore::Tiled(_), Arithmetic::Bf16) => DType::BF16,
        (MatrixStore::Tiled(_), Arithmetic::Int16 | Arithmetic::Int8) => DType::F16,
    }
}

/// Returns the bytes of all [`PerHead`](crate::runtime::per_head::PerHead) matrices of a layer whose matrix `kv_b` is
/// stored in this form.
///
/// # Errors
/// A size overflows.
pub(in crate::runtime) fn per_head_bytes(
    kv_b: &MatrixStore,
    heads: usize,
    latent: &Latent,
    arithmetic: Arithmetic,
) -> Result<u64> {
    let Latent { kv_rank, nope, value, .. } = *latent;
    let floats = |dtype, rows| stored_bytes(Store::Plain(dtype), &[rows, kv_rank]);
    let keys = floats(transposed_dtype(kv_b, arithmetic), nope)?;
    let values = match kv_b {
        MatrixStore::Plain(dtype) => floats(*dtype, value)?,
        MatrixStore::Tiled(layout) => TileLayout::new(layout.spec, value, kv_rank)?.nbytes(),
    };
    Ok(((keys + values) as u64).saturating_mul(heads as u64))
}

/// Number of elements converted by one task.
const CONVERT_CHUNK: usize = 1 << 16;

/// Rounds float elements to another float type, in parallel. Returns an error if a finite number does not stay finite.
pub(in crate::runtime) fn narrow(from: DType, bytes: &[u8], to: DType) -> Result<Bytes> {
    if !from.is_float() {
        return Err(Error::unsupported(format!("found {from} elements, expected floats")));
    }
    let elements = bytes.len() / from.size();
    Bytes::build(elements * to.size(), |out| {
        let sources = bytes.par_chunks(CONVERT_CHUNK * from.size());
        out.par_chunks_mut(CONVERT_CHUNK * to.size()).zip(sources).try_for_each(|(out, source)| {
            let mut values = vec![0.0; source.len() / from.size()];
            decode_floats(from, source, &mut values)?;
            let lost = match to {
                DType::F16 => {
                    round_to(&values, out, |v| f16::from_f32(v).to_le_bytes(), |b| f16::from_le_bytes(b).is_finite())
                }
                DType::BF16 => {
                    round_to(&values, out, |v| bf16::from_f32(v).to_le_bytes(), |b| bf16::from_le_bytes(b).is_finite())
                }
                _ => round_to(&values, out, f32::to_le_bytes, |b| f32::from_le_bytes(b).is_finite()),
            };
            match lost {
                Some(value) => Err(Error::engine(format!("found the weight {value}, which is out of range for {to}"))
                    .help("choose a --precision that holds it: fp16 holds up to 65504, bf16 and fp32 up to 3e38")),
                None => Ok(()),
            }
        })
    })
}

/// Rounds each value into `out`; returns a finite value that did not stay finite, if there is one.
fn round_to<const N: usize>(
    values: &[f32],
    out: &mut [u8],
    round: impl Fn(f32) -> [u8; N],
    finite: impl Fn([u8; N]) -> bool,
) -> Option<f32> {
    let mut lost = None;
    let (slots, _) = out.as_chunks_mut::<N>();
    for (slot, value) in slots.iter_mut().zip(values) {
        *slot = round(*value);
        if !finite(*slot) && value.is_finite() {
            lost = Some(*value);
        }
    }
    lost
}
