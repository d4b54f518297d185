//! What is multiplied: matrices as they lie in the artifact, and the forms of activations that they are multiplied
//! with.

use super::packed::Packed;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::mapped::Bytes;
use crate::scheme::TileLayout;
use std::sync::{Arc, OnceLock};

/// How the bytes of a [`Matrix`] are to be read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MatrixStore {
    /// Row-major elements: F32, F16 or BF16.
    Plain(DType),
    /// Row-interleaved quantized tiles.
    Tiled(TileLayout),
}

/// A weight matrix: `rows` outputs by `cols` inputs, borrowed from the artifact.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// Output features.
    pub rows: usize,
    /// Input features (K).
    pub cols: usize,
    /// How `data` is to be read.
    pub store: MatrixStore,
    /// The payload.
    pub data: Bytes,
    /// Of bf16 elements, the least magnitude, once it is known.
    pub(super) least_magnitude: OnceLock<u16>,
    /// Then there is no `data`: rows are unpacked as they are needed.
    pub(super) packed: Option<Arc<Packed>>,
}

impl Matrix {
    /// Checks that the payload has the length the store demands.
    ///
    /// # Errors
    /// It has not, or the elements are not floats, or the payload starts at an odd address.
    pub fn new(rows: usize, cols: usize, store: MatrixStore, data: Bytes) -> Result<Matrix> {
        if let MatrixStore::Plain(dtype) = store
            && !matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
        {
            return Err(Error::unsupported(format!("a weight matrix of {dtype}")));
        }
        let matrix = Matrix { rows, cols, store, data, least_magnitude: OnceLock::new(), packed: None };
        if !matrix.is_consistent() || !(matrix.data.as_ptr() as usize).is_multiple_of(4) {
            let (found, store) = (matrix.data.len(), matrix.store);
            return Err(Error::corrupt(format!("{found} bytes do not hold a {rows} x {cols} matrix of {store:?}")));
        }
        Ok(matrix)
    }

    /// True when kernels may walk the payload as the store says; they do so without further checks.
    pub(super) fn is_consistent(&self) -> bool {
        if self.packed.is_some() {
            // Checked when it was made; whatever is computed with is unpacked first.
            return self.store == MatrixStore::Plain(DType::BF16);
        }
        let bytes = match &self.store {
            MatrixStore::Plain(dtype) => self.rows.checked_mul(self.cols).and_then(|n| n.checked_mul(dtype.size())),
            MatrixStore::Tiled(layout) => {
                let expected = TileLayout::new(layout.spec, self.rows, self.cols);
                expected.is_ok_and(|expected| expected == *layout).then(|| layout.nbytes())
            }
        };
        bytes == Some(self.data.len())
    }
}

/// What products are computed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// Weights are widened to f32, activations stay f32.
    Float,
    /// As `Float`, but quantized weights meet activations rounded to 16-bit integers per group of
    /// [`GROUP`](super::GROUP), with integer sums where scales are shared and f32 across.
    Int16,
    /// As `Int16`, but BF16 weights meet activations rounded to BF16; sums are f32.
    Bf16,
    /// Quantized weights meet activations rounded to int8 per group of [`GROUP`](super::GROUP) (W4A8, W8A8), with
    /// integer sums where scales are shared and f32 across; plain weights as `Float`.
    Int8,
}

impl Arithmetic {
    /// What routers are computed in instead. Choosing is a step function: rounding the activations could choose other
    /// experts, and saves nothing in so small a product.
    pub fn for_routers(self) -> Arithmetic {
        if self == Arithmetic::Bf16 { Arithmetic::Int16 } else { self }
    }
}

/// The form in which a product reads its activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Form {
    /// As they are.
    F32,
    /// Rounded to bf16.
    Bf16,
    /// Rounded to 16-bit integers per group.
    Int16,
    /// Rounded to 8-bit integers per group.
    Int8,
}

impl MatrixStore {
    /// What a matrix of this store wants its activations to be.
    pub fn form(&self, arithmetic: Arithmetic) -> Form {
        match (self, arithmetic) {
            (MatrixStore::Plain(DType::BF16), Arithmetic::Bf16) => Form::Bf16,
            (MatrixStore::Plain(_), _) | (MatrixStore::Tiled(_), Arithmetic::Float) => Form::F32,
            (MatrixStore::Tiled(_), Arithmetic::Int8) => Form::Int8,
            (MatrixStore::Tiled(_), Arithmetic::Int16 | Arithmetic::Bf16) => Form::Int16,
        }
    }
}
