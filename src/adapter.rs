//! Adapters in terms of the canonical tensors of a model: low-rank changes of its matrices (LoRA, DoRA), independent of
//! the files that they come from. [`crate::convert::adapter`] reads those of the PEFT library.

use crate::dtype::DType;
use crate::mapped::Bytes;
use crate::scheme::TileLayout;
use std::collections::BTreeMap;

/// An adapter for one model.
#[derive(Debug, Clone)]
pub struct Adapter {
    /// SHA-256 digest of the files, in hex.
    pub hash: String,
    /// Changes by the name of the canonical tensor ([`crate::catalogue`]): one for a matrix, one per expert for a stack
    /// of matrices.
    pub changes: BTreeMap<String, Vec<Change>>,
}

/// Change of a matrix `W` of shape `(rows, cols)` and its bias: the product becomes
/// `gain * (W x + scale * B A x) + bias`, where `gain` is one without [`Change::magnitude`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Change {
    /// Low-rank change `scale * B A` of the matrix.
    pub low_rank: Option<LowRank>,
    /// Magnitudes of DoRA: the norm of each row of the changed matrix, `(rows)`, or of each column if the matrix is an
    /// embedding, `(cols)`. The gain is the magnitude divided by the norm that row or column has without it.
    pub magnitude: Option<Vec<f32>>,
    /// Matrix in place of that of the model: `(rows, cols)`.
    pub replaced: Option<Vec<f32>>,
    /// Number added to each row of the product, besides the bias of the model: `(rows)`.
    pub added: Option<Vec<f32>>,
    /// Bias in place of that of the model: `(rows)`.
    pub bias: Option<Vec<f32>>,
}

/// A low-rank matrix `scale * B A`.
#[derive(Debug, Clone, PartialEq)]
pub struct LowRank {
    /// Number of rows of A and of columns of B.
    pub rank: usize,
    /// Factor of the product.
    pub scale: f32,
    /// A: `(rank, cols)`.
    pub a: Vec<f32>,
    /// B: `(rows, rank)`.
    pub b: Vec<f32>,
    /// Type of the factors in the files.
    pub dtype: DType,
    /// A and B in int8 where they are stored so; their numbers are those of `a` and `b`.
    pub int8: [Option<Int8Factor>; 2],
}

/// A factor in int8 with a scale per row, in the tiles of a pack ([`crate::scheme`]).
#[derive(Debug, Clone)]
pub struct Int8Factor {
    /// Layout of `data`.
    pub layout: TileLayout,
    /// The tiles.
    pub data: Bytes,
}

impl PartialEq for Int8Factor {
    fn eq(&self, other: &Int8Factor) -> bool {
        self.layout == other.layout && *self.data == *other.data
    }
}

impl Change {
    /// Changes a row of the matrix, `(cols)`, as the products are changed: in f32, with the factor of the adapter.
    pub fn merge_row(&self, row: usize, factor: f32, values: &mut [f32]) {
        let cols = values.len();
        if let Some(replaced) = &self.replaced {
            values.copy_from_slice(&replaced[row * cols..][..cols]);
        }
        if let Some(LowRank { rank, scale, a, b, .. }) = &self.low_rank {
            let mut change = vec![0f32; cols];
            for (b, a) in b[row * rank..][..*rank].iter().zip(a.chunks_exact(cols)) {
                change.iter_mut().zip(a).for_each(|(sum, a)| *sum = b.mul_add(*a, *sum));
            }
            values.iter_mut().zip(change).for_each(|(value, change)| *value += factor * scale * change);
        }
        if let Some(magnitude) = &self.magnitude {
            let norm = values.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
            let gain = (f64::from(magnitude[row]) / norm) as f32;
            values.iter_mut().for_each(|value| *value *= gain);
        }
    }

    /// Returns true if nothing is changed.
    pub fn is_empty(&self) -> bool {
        *self == Change::default()
    }
}

impl Adapter {
    /// Counts the numbers of all low-rank factors.
    pub fn parameters(&self) -> usize {
        let low_rank = self.changes.values().flatten().filter_map(|change| change.low_rank.as_ref());
        low_rank.map(|factors| factors.a.len() + factors.b.len()).sum()
    }

    /// Returns the largest rank.
    pub fn rank(&self) -> usize {
        let low_rank = self.changes.values().flatten().filter_map(|change| change.low_rank.as_ref());
        low_rank.map(|factors| factors.rank).max().unwrap_or(0)
    }
}

/// Returns the transpose of a matrix `(rows, cols)`.
pub fn transposed(matrix: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols).map(|i| matrix[i % rows * cols + i / rows]).collect()
}
