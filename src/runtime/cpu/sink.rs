//! The outputs of a product, which the threads write side by side.
#![allow(unsafe_code)]

use crate::scheme::TILE_ROWS;

/// Where the results of a product go.
pub(super) struct Sink<'a> {
    /// `(n, rows)`
    pub y: *mut f32,
    pub rows: usize,
    /// The column that `y` begins with.
    pub first: usize,
    pub bias: Option<&'a [f32]>,
}

impl<'a> Sink<'a> {
    /// Where results go whose rows are counted from `row` on.
    ///
    /// # Safety
    /// The row lies inside the outputs.
    pub(super) unsafe fn starting_at(&self, row: usize) -> Sink<'a> {
        // SAFETY: the caller's promise.
        Sink { y: unsafe { self.y.add(row) }, bias: self.bias.map(|bias| &bias[row..]), ..*self }
    }

    /// Stores the sums of consecutive rows for a column, with their bias.
    ///
    /// # Safety
    /// The place lies inside the outputs, and no other thread touches it.
    #[inline]
    pub(super) unsafe fn put(&self, col: usize, row: usize, sums: &[f32]) {
        // SAFETY: `y` holds n * rows values and is exclusively borrowed by the task; the rest is the caller's promise.
        let y = unsafe { std::slice::from_raw_parts_mut(self.y.add((col - self.first) * self.rows + row), sums.len()) };
        match self.bias {
            Some(bias) => {
                for (i, b) in bias[row..][..y.len()].iter().enumerate() {
                    y[i] = sums[i] + b;
                }
            }
            // By chunks of known length: a call of `memcpy` costs as much as the copy.
            None => {
                let ((y, last), (sums, rest)) = (y.as_chunks_mut::<TILE_ROWS>(), sums.as_chunks::<TILE_ROWS>());
                for i in 0..sums.len() {
                    y[i].copy_from_slice(&sums[i]);
                }
                if !rest.is_empty() {
                    last.copy_from_slice(rest);
                }
            }
        }
    }
}
