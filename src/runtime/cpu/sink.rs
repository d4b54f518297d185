//! Outputs of a product, which threads write in parallel.
#![allow(unsafe_code)]

use crate::scheme::TILE_ROWS;

/// Destination of the results of a product.
pub(super) struct Sink<'a> {
    /// Outputs: `(n, rows)`, row-major.
    pub y: *mut f32,
    pub rows: usize,
    /// Index of the token (column of the product) whose results are the first row of `y`.
    pub first: usize,
    pub bias: Option<&'a [f32]>,
    /// Factor of the results if they are added to the outputs; without it they replace them.
    pub added: Option<f32>,
}

impl<'a> Sink<'a> {
    /// Returns a sink whose row 0 is row `row` of this one.
    ///
    /// # Safety
    /// The row lies inside the outputs.
    pub(super) unsafe fn starting_at(&self, row: usize) -> Sink<'a> {
        // SAFETY: the caller guarantees that the row lies inside the outputs.
        Sink { y: unsafe { self.y.add(row) }, bias: self.bias.map(|bias| &bias[row..]), ..*self }
    }

    /// Stores the results of consecutive rows of the matrix for one token, with the bias or added to the outputs.
    ///
    /// # Safety
    /// These results lie inside the outputs, and no other thread accesses them there.
    #[inline]
    pub(super) unsafe fn put(&self, col: usize, row: usize, sums: &[f32]) {
        // SAFETY: `y` holds n * rows values, borrowed exclusively by the task; the caller guarantees that these results
        // lie inside them and that no other thread accesses them.
        let y = unsafe { std::slice::from_raw_parts_mut(self.y.add((col - self.first) * self.rows + row), sums.len()) };
        match (self.added, self.bias) {
            (Some(factor), _) => {
                for i in 0..y.len() {
                    y[i] += factor * sums[i];
                }
            }
            (None, Some(bias)) => {
                for (i, b) in bias[row..][..y.len()].iter().enumerate() {
                    y[i] = sums[i] + b;
                }
            }
            // This copies chunks of known length, because a call of `memcpy` costs as much as the copy.
            (None, None) => {
                let ((y, last), (sums, rest)) = (y.as_chunks_mut::<TILE_ROWS>(), sums.as_chunks::<TILE_ROWS>());
                for (y, sums) in y.iter_mut().zip(sums) {
                    *y = *sums;
                }
                if !rest.is_empty() {
                    last.copy_from_slice(rest);
                }
            }
        }
    }
}
