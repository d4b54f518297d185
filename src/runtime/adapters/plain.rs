//! Changes of bound adapters as plain numbers, row by row, for devices other than the CPU.

use super::{BoundAdapter, BoundChange, Factor};
use crate::adapter::transposed;
use crate::catalogue::Target;
use crate::dtype::DType;
use crate::runtime::cpu::Matrix;
use crate::runtime::weights::read_row;

/// Change of a matrix `(rows, cols)`: `y = gain * (y + scale * B (A x)) + add`.
pub(in crate::runtime) struct PlainChange<'a> {
    pub factors: Option<PlainFactors>,
    /// Factors of the outputs: `(rows)`.
    pub gain: Option<&'a [f32]>,
    /// Numbers added to the outputs: `(rows)`.
    pub add: Option<&'a [f32]>,
    /// Whether the factor of the adapter multiplies `add`.
    pub add_scales: bool,
    /// Matrix in place of that of the model.
    pub replaced: Option<&'a Matrix>,
}

/// Low-rank factors, each with the type that holds its numbers exactly.
pub(in crate::runtime) struct PlainFactors {
    pub rank: usize,
    pub scale: f32,
    /// A: `(rank, cols)`.
    pub a: (Vec<f32>, DType),
    /// B transposed: `(rank, rows)`.
    pub b: (Vec<f32>, DType),
}

impl BoundAdapter {
    /// Returns the change of a target in a layer.
    pub(in crate::runtime) fn of_target(&self, layer: usize, target: Target) -> Option<&BoundChange> {
        self.layers[layer].targets[target as usize].as_ref()
    }

    /// Returns the changes of the first or second matrix of each expert; none if no expert is changed.
    pub(in crate::runtime) fn of_experts(&self, layer: usize, matrix: usize) -> &[Option<BoundChange>] {
        &self.layers[layer].experts[matrix]
    }
}

impl BoundChange {
    /// Returns the change as plain numbers.
    pub(in crate::runtime) fn plain(&self) -> PlainChange<'_> {
        let factors = self.low_rank.as_ref().map(|low_rank| PlainFactors {
            rank: self.rank(),
            scale: low_rank.scale,
            a: match &low_rank.a {
                Factor::Floats(a) => a.values(),
                Factor::Int8(a) => (values(a), DType::F32),
            },
            b: match &low_rank.b {
                Factor::Floats(b) => b.transposed(),
                Factor::Int8(b) => (transposed(&values(b), b.rows, b.cols), DType::F32),
            },
        });
        PlainChange {
            factors,
            gain: self.gain.as_deref(),
            add: self.add.as_deref(),
            add_scales: self.add_scales,
            replaced: self.replaced.as_ref(),
        }
    }
}

/// Returns the numbers of a matrix row by row.
fn values(matrix: &Matrix) -> Vec<f32> {
    let mut values = vec![0.0; matrix.rows * matrix.cols];
    for (row, values) in values.chunks_exact_mut(matrix.cols).enumerate() {
        read_row(matrix, row, values).expect("a matrix in memory");
    }
    values
}
