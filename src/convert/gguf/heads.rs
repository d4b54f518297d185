//! Writes matrices of attention heads, some of which GGUF stores transposed.
//!
//! Latent attention computes keys and values of all heads with one matrix. GGUF has two: that of the values with the
//! same rows, and that of the keys with rows and columns of each head exchanged. Columns have no codes of their own, so
//! transposed matrices are always floats.

use crate::convert::rounding::round_into;
use crate::convert::rows::{Put, RowSource};
use crate::dtype::DType;
use crate::error::Result;
use std::ops::Range;

/// Rows of a source that become a block of rows of each head of the target.
pub(super) struct HeadBlock {
    /// Index of the source.
    pub(super) source: usize,
    /// Number of rows of a head in the source.
    pub(super) head: usize,
    /// Number of rows of each head that are read, the first ones.
    pub(super) rows: usize,
    /// True when the rows become columns.
    pub(super) transposed: bool,
}

/// Passes these heads, each of which consists of `blocks`, to `put` as floats.
pub(super) fn fill_heads(
    sources: &mut [RowSource<'_>],
    heads: Range<usize>,
    blocks: &[HeadBlock],
    dtype: DType,
    put: &mut Put<'_>,
) -> Result<()> {
    let mut encoded = Vec::new();
    for head in heads {
        for block in blocks {
            let start = head * block.head;
            let floats = sources[block.source].floats(start..start + block.rows)?;
            let floats = if block.transposed { transpose(&floats, block.rows) } else { floats };
            encoded.clear();
            round_into(dtype, &floats, &mut encoded)?;
            put(&encoded)?;
        }
    }
    Ok(())
}

/// Returns the transpose of a matrix of `rows` rows.
fn transpose(matrix: &[f32], rows: usize) -> Vec<f32> {
    let cols = matrix.len() / rows;
    (0..cols).flat_map(|col| (0..rows).map(move |row| matrix[row * cols + col])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_become_columns() {
        assert_eq!(transpose(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2), [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
    }
}
