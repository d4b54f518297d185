//! Views, which describe how a canonical tensor is made from tensors of the source. They are plain data and
//! work in both directions: `pack` reads rows through a view, `unpack` finds the source position of each
//! row of a canonical tensor.

/// A canonical tensor as a part or combination of source tensors.
#[derive(Debug, Clone, PartialEq)]
pub enum View {
    /// Entries `first..first + shape[0]` along the first axis of a source tensor with `of` entries.
    Rows {
        /// Name in the source.
        source: String,
        /// Index of the first entry.
        first: usize,
        /// Length of the source's first axis.
        of: usize,
    },
    /// Rows `first..first + shape[1]` of each matrix of a source tensor `(shape[0], of, shape[2])`.
    Slices {
        /// Name in the source.
        source: String,
        /// First row of each matrix.
        first: usize,
        /// Rows of each matrix of the source.
        of: usize,
    },
    /// A source tensor with the last two axes swapped. Its columns are `stacks` equal groups, one for each stack of
    /// rows that alternate: row `r` of a matrix with `n` rows is column `r % stacks * (n / stacks) + r / stacks`.
    Transposed {
        /// Name in the source.
        source: String,
        /// Number of groups of columns; 1 when the columns have the order of the rows.
        stacks: usize,
    },
    /// A quantized tensor of the canonical shape, where floats under the same name have another layout.
    Coded {
        /// Name that the tensor has without quantization.
        source: String,
    },
    /// Experts in separate tensors: entry `m` of the first axis is the `m`-th view, of shape `shape[1..]`.
    Stacked(Vec<View>),
    /// Equal ranges of the rows of a matrix: row `r` is row `r % n` of view `r / n`, each of shape `(n, shape[1])`.
    Joined(Vec<View>),
    /// Alternating rows, such as gate and up: row `r` of each matrix is row `r / n` of stack `r % n`, where the views
    /// are `n` stacks of shape `(shape[0], shape[1] / n, shape[2])`. Only floats are supported.
    Interleaved(Vec<View>),
}

impl View {
    /// Returns the names of the source tensors.
    pub fn sources(&self) -> Vec<&str> {
        match self {
            View::Rows { source, .. }
            | View::Slices { source, .. }
            | View::Transposed { source, .. }
            | View::Coded { source } => vec![source],
            View::Stacked(parts) | View::Joined(parts) | View::Interleaved(parts) => {
                parts.iter().flat_map(View::sources).collect()
            }
        }
    }

    /// Returns the view with other names of the source tensors.
    pub(super) fn renamed(self, name: &dyn Fn(&str) -> String) -> View {
        let all = |views: Vec<View>| views.into_iter().map(|view| view.renamed(name)).collect();
        match self {
            View::Rows { source, first, of } => View::Rows { source: name(&source), first, of },
            View::Slices { source, first, of } => View::Slices { source: name(&source), first, of },
            View::Transposed { source, stacks } => View::Transposed { source: name(&source), stacks },
            View::Coded { source } => View::Coded { source: name(&source) },
            View::Stacked(views) => View::Stacked(all(views)),
            View::Joined(views) => View::Joined(all(views)),
            View::Interleaved(views) => View::Interleaved(all(views)),
        }
    }

    /// Returns the shape that each source tensor must have, for a canonical tensor of `shape`. A quantized tensor has
    /// the shape that it has without quantization.
    pub fn source_shapes(&self, shape: &[usize]) -> Vec<(&str, Vec<usize>)> {
        match self {
            View::Rows { source, of, .. } => vec![(source, [&[*of], &shape[1..]].concat())],
            View::Slices { source, of, .. } => vec![(source, vec![shape[0], *of, shape[2]])],
            View::Transposed { source, .. } => {
                let mut swapped = shape.to_vec();
                swapped.swap(shape.len() - 1, shape.len() - 2);
                vec![(source, swapped)]
            }
            View::Coded { source } => vec![(source, shape.to_vec())],
            View::Stacked(parts) => parts.iter().flat_map(|part| part.source_shapes(&shape[1..])).collect(),
            View::Joined(parts) => {
                let part = [shape[0] / parts.len(), shape[1]];
                parts.iter().flat_map(|view| view.source_shapes(&part)).collect()
            }
            View::Interleaved(parts) => {
                let part = [shape[0], shape[1] / parts.len(), shape[2]];
                parts.iter().flat_map(|view| view.source_shapes(&part)).collect()
            }
        }
    }
}

/// Returns the view of a source tensor that has the shape of the canonical tensor; `of` is the
/// length of its first axis.
pub(super) fn whole(source: impl Into<String>, of: usize) -> View {
    View::Rows { source: source.into(), first: 0, of }
}
