//! Weight matrices as they are stored in the pack, and the forms of activations that they are multiplied by.

use super::packed::Packed;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::mapped::Bytes;
use crate::scheme::{CodeMap, TileLayout};
use std::sync::{Arc, OnceLock};

/// Storage layout of the bytes of a [`Matrix`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MatrixStore {
    /// Row-major elements: F32, F16 or BF16.
    Plain(DType),
    /// Row-interleaved quantized tiles.
    Tiled(TileLayout),
}

/// A weight matrix: `rows` outputs by `cols` inputs, borrowed from the pack.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// Output features.
    pub rows: usize,
    /// Input features (K).
    pub cols: usize,
    /// Storage layout of `data`.
    pub store: MatrixStore,
    /// Stored bytes.
    pub data: Bytes,
    /// Least magnitude of the elements of a bf16 matrix, once it has been computed.
    pub(super) least_magnitude: OnceLock<u16>,
    /// Packed elements. If they are present, `data` is empty and rows are unpacked when they are needed.
    pub(super) packed: Option<Arc<Packed>>,
}

impl Matrix {
    /// Makes a matrix, and checks that the payload has the length that the store needs.
    ///
    /// # Errors
    /// The length is wrong, the elements are not floats, or the address of the payload is not a multiple of 4.
    pub fn new(rows: usize, cols: usize, store: MatrixStore, data: Bytes) -> Result<Matrix> {
        if let MatrixStore::Plain(dtype) = store
            && !matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
        {
            return Err(Error::unsupported(format!("found a weight matrix of {dtype}, expected f32, f16 or bf16")));
        }
        let matrix = Matrix { rows, cols, store, data, least_magnitude: OnceLock::new(), packed: None };
        if !matrix.is_consistent() || !(matrix.data.as_ptr() as usize).is_multiple_of(4) {
            let (found, expected) = (matrix.data.len(), matrix.payload_bytes().unwrap_or(0));
            return Err(Error::corrupt(format!(
                "found {found} bytes at the address {:p} for a {rows} x {cols} matrix, expected {expected} bytes at a \
                 multiple of 4",
                matrix.data.as_ptr()
            )));
        }
        Ok(matrix)
    }

    /// Returns true when the payload has the length and layout that `store` requires; kernels rely on that without
    /// further checks.
    pub(super) fn is_consistent(&self) -> bool {
        if self.packed.is_some() {
            // The length was checked when the matrix was made; products read rows that were unpacked first.
            return self.store == MatrixStore::Plain(DType::BF16);
        }
        self.payload_bytes() == Some(self.data.len())
    }

    /// Returns the length of the payload that `store` requires; `None` if `store` does not fit the shape.
    fn payload_bytes(&self) -> Option<usize> {
        match &self.store {
            MatrixStore::Plain(dtype) => self.rows.checked_mul(self.cols)?.checked_mul(dtype.size()),
            MatrixStore::Tiled(layout) => {
                let expected = TileLayout::new(layout.spec, self.rows, self.cols);
                expected.is_ok_and(|expected| expected == *layout).then(|| layout.nbytes())
            }
        }
    }
}

/// Arithmetic in which products are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// Weights are widened to f32, activations stay f32.
    Float,
    /// Like `Float`, but quantized weights are multiplied by activations rounded to 16-bit integers per group of
    /// [`GROUP`](super::GROUP), with integer sums where scales are shared and f32 sums across.
    Int16,
    /// Like `Int16`, but BF16 weights are multiplied by activations rounded to BF16; sums are f32.
    Bf16,
    /// Quantized weights are multiplied by activations rounded to int8 per group of [`GROUP`](super::GROUP) (W4A8,
    /// W8A8), with integer sums where scales are shared and f32 sums across. Plain weights are multiplied as with
    /// `Float`.
    Int8,
}

impl Arithmetic {
    /// Returns the arithmetic for the routers of experts, which is `Int16` instead of `Bf16`, so that their
    /// activations are not rounded. Selecting experts is a step function: rounding could select other experts, and
    /// saves nothing in so small a product.
    pub fn for_routers(self) -> Arithmetic {
        if self == Arithmetic::Bf16 { Arithmetic::Int16 } else { self }
    }
}

/// Form in which a product reads its activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Form {
    /// f32 without rounding.
    F32,
    /// Rounded to bf16.
    Bf16,
    /// Rounded to 16-bit integers per group.
    Int16,
    /// Rounded to 8-bit integers per group.
    Int8,
}

impl Form {
    /// All forms.
    pub const ALL: [Form; 4] = [Form::F32, Form::Bf16, Form::Int16, Form::Int8];
}

impl MatrixStore {
    /// Returns the form of activations that a matrix of this store is multiplied by.
    pub fn form(&self, arithmetic: Arithmetic) -> Form {
        match (self, arithmetic) {
            (MatrixStore::Plain(DType::BF16), Arithmetic::Bf16) => Form::Bf16,
            (MatrixStore::Plain(_), _) | (MatrixStore::Tiled(_), Arithmetic::Float) => Form::F32,
            // Codes that are floats themselves have no integer products.
            (MatrixStore::Tiled(layout), _) if layout.spec.code_map() == CodeMap::E4m3 => Form::F32,
            (MatrixStore::Tiled(_), Arithmetic::Int8) => Form::Int8,
            (MatrixStore::Tiled(_), Arithmetic::Int16 | Arithmetic::Bf16) => Form::Int16,
        }
    }
}
