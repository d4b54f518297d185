//! Packed BF16 matrices of deduplicated packs: each weight stays compressed to 11 bits (an exponent window, see
//! [`crate::windowed`]). A few rows at a time are unpacked into a buffer that fits the first-level or second-level
//! cache, and the ordinary kernels multiply them there. So results have the same bits as those of the unpacked matrix.

use super::acts::LeastMagnitude;
use super::matrix::{Matrix, MatrixStore};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::mapped::Bytes;
use crate::simd::Level;
use crate::windowed::Windowed;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Number of rows that share one remembered [`LeastMagnitude`].
const ROWS: usize = 4;
/// Bytes of rows that are unpacked at once for a few columns (tokens).
const NEAR_BYTES: usize = 128 << 10;
/// Largest number of columns that counts as a few: that of one call of the kernels with the most columns.
const FEW: usize = 6;
/// Marks a least magnitude that has not been computed yet; magnitudes have 16 bits.
const UNKNOWN: u32 = u32::MAX;

/// Elements of a packed matrix, and what earlier products found: least magnitudes, and whether bytes were corrupt.
#[derive(Debug)]
pub(super) struct Packed {
    numbers: Windowed,
    /// [`LeastMagnitude`] of each [`ROWS`] rows, or [`UNKNOWN`].
    least_magnitudes: Vec<AtomicU32>,
    broken: AtomicBool,
}

impl Matrix {
    /// Makes a BF16 matrix whose elements are unpacked when products read them.
    ///
    /// # Errors
    /// `numbers` does not have `rows * cols` elements.
    pub fn windowed(rows: usize, cols: usize, numbers: Windowed) -> Result<Matrix> {
        if rows.checked_mul(cols) != Some(numbers.len()) {
            return Err(Error::corrupt(format!("found {} numbers, expected a {rows} x {cols} matrix", numbers.len())));
        }
        let least_magnitudes = (0..rows.div_ceil(ROWS)).map(|_| AtomicU32::new(UNKNOWN)).collect();
        let packed = Packed { numbers, least_magnitudes, broken: AtomicBool::new(false) };
        Ok(Matrix {
            rows,
            cols,
            store: MatrixStore::Plain(DType::BF16),
            data: Bytes::copied(&[]),
            least_magnitude: OnceLock::new(),
            packed: Some(Arc::new(packed)),
        })
    }

    /// Returns the number of bytes that a product reads.
    pub fn nbytes(&self) -> usize {
        self.packed.as_ref().map_or(self.data.len(), |packed| packed.numbers.stored_bytes())
    }

    /// Unpacks row `row`; returns `None` if the matrix is not packed.
    ///
    /// # Errors
    /// The stored bytes are corrupt.
    pub fn unpacked_row(&self, row: usize) -> Option<Result<Bytes>> {
        let packed = self.packed.as_ref()?;
        let unpack = |out: &mut [u8]| {
            let numbers = row * self.cols..(row + 1) * self.cols;
            packed.numbers.unpack(numbers, bytemuck::cast_slice_mut(out)).then_some(()).ok_or_else(broken)
        };
        Some(Bytes::build(2 * self.cols, unpack))
    }

    /// Returns an error if a product has read corrupt packed bytes, so that its results are wrong.
    ///
    /// # Errors
    /// Packed bytes were corrupt.
    pub fn check(&self) -> Result<()> {
        let met = self.packed.as_ref().is_some_and(|packed| packed.broken.load(Ordering::Relaxed));
        if met { Err(broken()) } else { Ok(()) }
    }
}

fn broken() -> Error {
    Error::corrupt("found a block of weights whose number of exceptions differs from its header").help(
        "copy the files model.dedup.* of the pack, and of the base pack if it has one, from a backup, or make the \
             pack again; `iec dedup --model-dir PACK --verify` finds every damaged tensor",
    )
}

impl Packed {
    /// Returns the number of rows to unpack at once for so many tokens: rows of about [`NEAR_BYTES`] bytes in total for
    /// a few tokens, of `far_bytes` for many. It is a multiple of 4, preferably of 16, because the rows then more often
    /// end where a block of the compressed form ends; a block that continues in the next rows is unpacked twice.
    pub fn panel_rows(cols: usize, tokens: usize, far_bytes: usize) -> usize {
        let wanted = if tokens <= FEW { NEAR_BYTES } else { far_bytes };
        let rows = (wanted / (2 * cols).max(1)).max(1);
        [16, 8, 4].into_iter().find(|step| *step <= rows).map_or(ROWS, |step| rows / step * step)
    }
}

/// Buffer into which a thread unpacks rows.
#[derive(Debug)]
pub(super) struct Rows(Matrix);

impl Default for Rows {
    fn default() -> Rows {
        let store = MatrixStore::Plain(DType::BF16);
        let matrix = Matrix::new(0, 0, store, Bytes::copied(&[])).expect("0 bytes are a 0 x 0 matrix");
        Rows(matrix)
    }
}

impl Rows {
    /// Unpacks `rows` rows of `matrix`, starting with row `first`, which is a multiple of 4. Corrupt rows become zero
    /// and are reported by [`Matrix::check`].
    pub fn unpack(&mut self, matrix: &Matrix, packed: &Packed, first: usize, rows: usize) -> &Matrix {
        let numbers = first * matrix.cols..(first + rows) * matrix.cols;
        (self.0.rows, self.0.cols) = (rows, matrix.cols);
        let bytes = self.0.data.reuse(2 * numbers.len());
        let out: &mut [u16] = bytemuck::cast_slice_mut(bytes);
        if !packed.numbers.unpack(numbers, out) {
            packed.broken.store(true, Ordering::Relaxed);
            out.fill(0);
        }
        let groups = out.chunks(ROWS * matrix.cols.max(1)).zip(&packed.least_magnitudes[first / ROWS..]);
        let least = groups.map(|(group, known)| {
            let least = known.load(Ordering::Relaxed);
            if least != UNKNOWN {
                return least as u16;
            }
            // Several threads may compute this for the same rows; they find the same value.
            let least = Level::detect().run(LeastMagnitude(group));
            known.store(u32::from(least), Ordering::Relaxed);
            least
        });
        self.0.least_magnitude = least.min().unwrap_or(u16::MAX).into();
        &self.0
    }
}
