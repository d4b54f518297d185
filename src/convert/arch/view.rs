//! How is a canonical tensor put together from tensors of the source? Plain data that can be read both ways: `pack`
//! reads rows through it, `unpack` finds in it where each row of a canonical tensor goes.

use crate::scheme::BLOCK;

/// How a canonical tensor is seen in the source.
#[derive(Debug, Clone, PartialEq)]
pub enum View {
    /// Entries `first..first + shape[0]` along the first axis of a source tensor that has `of` of them.
    Rows {
        /// Name in the source.
        source: String,
        /// First entry taken.
        first: usize,
        /// Length of the source's first axis.
        of: usize,
    },
    /// The source has the last two axes swapped.
    Transposed {
        /// Name in the source.
        source: String,
    },
    /// MXFP4: code blocks `(.., in / 32, 16)` and block scales `(.., in / 32)`.
    Mxfp4 {
        /// Name of the codes.
        blocks: String,
        /// Name of the scales.
        scales: String,
    },
    /// Entry `m` of the first axis is the `m`-th view, of shape `shape[1..]`: experts that lie in tensors of their own.
    Stacked(Vec<View>),
    /// Of `n` stacks of shape `(shape[0], shape[1] / n, shape[2])`, row `r` of each matrix is row `r / n` of stack `r %
    /// n`: gate and up in turns. Floats only.
    Interleaved(Vec<View>),
}

impl View {
    /// Names of the source tensors.
    pub fn sources(&self) -> Vec<&str> {
        match self {
            View::Rows { source, .. } | View::Transposed { source } => vec![source],
            View::Mxfp4 { blocks, scales } => vec![blocks, scales],
            View::Stacked(parts) | View::Interleaved(parts) => parts.iter().flat_map(View::sources).collect(),
        }
    }

    /// The shape that each source tensor must have, for a canonical tensor of `shape`.
    ///
    /// # Panics
    /// MXFP4 columns do not divide into blocks; whoever chooses that view has checked.
    pub fn source_shapes(&self, shape: &[usize]) -> Vec<(&str, Vec<usize>)> {
        match self {
            View::Rows { source, of, .. } => vec![(source, [&[*of], &shape[1..]].concat())],
            View::Transposed { source } => {
                let mut swapped = shape.to_vec();
                swapped.swap(shape.len() - 1, shape.len() - 2);
                vec![(source, swapped)]
            }
            View::Mxfp4 { blocks, scales } => {
                let (cols, rows) = shape.split_last().expect("a matrix has columns");
                assert!(cols.is_multiple_of(BLOCK), "{blocks}: {cols} columns");
                let with = |tail: &[usize]| [rows, tail].concat();
                vec![(blocks, with(&[cols / BLOCK, BLOCK / 2])), (scales, with(&[cols / BLOCK]))]
            }
            View::Stacked(parts) => parts.iter().flat_map(|part| part.source_shapes(&shape[1..])).collect(),
            View::Interleaved(parts) => {
                let part = [shape[0], shape[1] / parts.len(), shape[2]];
                parts.iter().flat_map(|view| view.source_shapes(&part)).collect()
            }
        }
    }
}
