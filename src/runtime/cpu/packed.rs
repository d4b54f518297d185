//! BF16 matrices that are computed with as they are stored, in 11 bits per weight: a few rows are unpacked into a near
//! cache, and the ordinary kernels multiply them there. So the bits are those of the unpacked matrix.

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

/// Rows whose least magnitude is remembered together.
const ROWS: usize = 4;
/// Unpacked rows that a few columns meet.
const NEAR_BYTES: usize = 128 << 10;
/// So many columns are few: one rectangle of the widest kernels.
const FEW: usize = 6;
/// What is not known yet; magnitudes have 16 bits.
const UNKNOWN: u32 = u32::MAX;

/// The numbers of such a matrix, and what was learnt of them.
#[derive(Debug)]
pub(super) struct Packed {
    numbers: Windowed,
    /// For each [`ROWS`] rows.
    least_magnitudes: Vec<AtomicU32>,
    broken: AtomicBool,
}

impl Matrix {
    /// A matrix of numbers that are unpacked when they are computed with.
    ///
    /// # Errors
    /// There are more or fewer numbers.
    pub fn windowed(rows: usize, cols: usize, numbers: Windowed) -> Result<Matrix> {
        if rows.checked_mul(cols) != Some(numbers.len()) {
            return Err(Error::corrupt(format!("{} numbers do not hold a {rows} x {cols} matrix", numbers.len())));
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

    /// Bytes that a product reads.
    pub fn nbytes(&self) -> usize {
        self.packed.as_ref().map_or(self.data.len(), |packed| packed.numbers.stored_bytes())
    }

    /// Row `row` in memory, of a matrix that is packed.
    ///
    /// # Errors
    /// What is stored there is impossible.
    pub fn unpacked_row(&self, row: usize) -> Option<Result<Bytes>> {
        let packed = self.packed.as_ref()?;
        let unpack = |out: &mut [u8]| {
            let numbers = row * self.cols..(row + 1) * self.cols;
            packed.numbers.unpack(numbers, bytemuck::cast_slice_mut(out)).then_some(()).ok_or_else(broken)
        };
        Some(Bytes::build(2 * self.cols, unpack))
    }

    /// Fails if impossible numbers were met: then results are worth nothing.
    ///
    /// # Errors
    /// They were.
    pub fn check(&self) -> Result<()> {
        let met = self.packed.as_ref().is_some_and(|packed| packed.broken.load(Ordering::Relaxed));
        if met { Err(broken()) } else { Ok(()) }
    }
}

fn broken() -> Error {
    Error::corrupt("a block of weights has not the exceptions that its header says")
        .help("restore the files model.dedup.* from a backup; `iec dedup --verify` finds every changed byte")
}

impl Packed {
    /// Rows to unpack at once for so many columns: [`NEAR_BYTES`] for a few, `far_bytes` for many; a multiple of 4,
    /// better of 16, which more often ends with a block (a block that two panels share is unpacked twice).
    pub fn panel_rows(cols: usize, tokens: usize, far_bytes: usize) -> usize {
        let wanted = if tokens <= FEW { NEAR_BYTES } else { far_bytes };
        let rows = (wanted / (2 * cols).max(1)).max(1);
        [16, 8, 4].into_iter().find(|step| *step <= rows).map_or(ROWS, |step| rows / step * step)
    }
}

/// Where a thread unpacks rows.
#[derive(Debug)]
pub(super) struct Rows(Matrix);

impl Default for Rows {
    fn default() -> Rows {
        let store = MatrixStore::Plain(DType::BF16);
        let matrix = Matrix::new(0, 0, store, Bytes::copied(&[])).expect("nothing is a matrix of nothing");
        Rows(matrix)
    }
}

impl Rows {
    /// A matrix of `rows` rows of `matrix` from `first` on, which is a multiple of four.
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
            // Threads that share these rows find the same.
            let least = Level::detect().run(LeastMagnitude(group));
            known.store(u32::from(least), Ordering::Relaxed);
            least
        });
        self.0.least_magnitude = least.min().unwrap_or(u16::MAX).into();
        &self.0
    }
}
