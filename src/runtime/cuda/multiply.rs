//! The launches of matrix products; `kernels/matmul.cuh` has the rules.

use super::args;
use super::array::{Acts, View};
use super::context::Launch;
use super::ops::{GRID, Grouped, Ops, most_shares};
use super::weights::{DeviceLinear, How};
use crate::error::Result;

/// Rows of x that a block computes where there are few.
pub const FEW: usize = 8;
/// The same where there are many.
const MANY: usize = 64;
/// The same where there are very many.
const MOST: usize = 128;

/// Most rows of a share: few as long as that reads the matrix of an expert once or twice.
pub fn share_rows(pairs: usize, experts: usize) -> usize {
    if pairs <= 6 * experts { FEW } else { MANY }
}

/// Rows of x, and where the products go.
struct Rows<'a> {
    x: &'a Acts,
    /// The first row of `x`.
    first: usize,
    /// `(n, rows)`.
    y: View<f32>,
    n: usize,
}

impl Ops {
    /// `y = x * matrix^T + bias` for `n` rows of `x` from row `first` on.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn matmul(&self, linear: &DeviceLinear, x: &Acts, first: usize, y: View<f32>, n: usize) -> Result<()> {
        assert!(first + n <= x.rows && y.len() >= n * linear.matrix.rows());
        let args = arguments(linear, &Rows { x, first, y, n });
        let rows = linear.matrix.rows();
        let (columns, high) = match linear.how {
            _ if n <= FEW => (FEW, 16),
            How::Float => (MANY, 64),
            How::Tensor { .. } => {
                let enough = rows.div_ceil(MOST) * n.div_ceil(MOST) >= self.multiprocessors() * 3 / 4;
                if n > 32 && enough { (MOST, 128) } else { (MANY, 32) }
            }
        };
        let blocks = rows.div_ceil(high) * n.div_ceil(columns);
        self.multiply(linear, columns, [blocks, 1], &args)
    }

    /// The same for experts: row `i` of the sorted pairs is multiplied with its expert's matrix. Rows of `x` are those of the batch,
    /// to be gathered, or sorted already.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn matmul_experts(
        &self,
        linear: &DeviceLinear,
        x: &Acts,
        gather: bool,
        y: View<f32>,
        grouped: &Grouped,
    ) -> Result<()> {
        let (n, rows) = (grouped.pairs, linear.matrix.rows());
        assert!(y.len() >= n * rows && linear.matrix.count == grouped.experts);
        assert!(x.rows >= if gather { n / grouped.chosen.top_k } else { n });
        let args = args::Matmul {
            inputs: if gather { grouped.inputs.address() } else { 0 },
            shares: grouped.shares.address(),
            count: grouped.count.address(),
            ..arguments(linear, &Rows { x, first: 0, y, n })
        };
        let columns = grouped.share_rows;
        let high = match (columns, linear.how) {
            (FEW, _) => 16,
            (_, How::Float) => 64,
            (_, How::Tensor { .. }) => 32,
        };
        let shares = most_shares(n, grouped.experts, columns);
        assert!(shares <= GRID);
        self.multiply(linear, columns, [rows.div_ceil(high), shares], &args)
    }

    fn multiply(
        &self,
        linear: &DeviceLinear,
        columns: usize,
        [blocks, shares]: [usize; 2],
        args: &args::Matmul,
    ) -> Result<()> {
        let kind = linear.matrix.kind.name();
        let grid = [blocks as u32, shares as u32, 1];
        let (name, block, shared) = match linear.how {
            How::Float => (format!("matmul_f32_{kind}_{columns}"), if columns == FEW { 256 } else { 128 }, 0),
            How::Tensor { passes } => {
                let shared = if columns == FEW { 0 } else { passes * (48 << 10) };
                (format!("matmul_bf16_{kind}_{passes}_{columns}"), 256, shared)
            }
        };
        self.start(&name, Launch { grid, block, shared }, args)
    }
}

/// What kernels are told, but for experts.
fn arguments(linear: &DeviceLinear, rows: &Rows<'_>) -> args::Matmul {
    let (matrix, acts, forms) = (linear.matrix.args(), rows.x.args(), linear.how.forms());
    assert!(linear.matrix.cols() == rows.x.width);
    let at = |wanted: bool, address: u64, stride: u32, size: usize| {
        assert!(!wanted || address != 0, "activations in the form that the product reads");
        if wanted { address + (rows.first * stride as usize * size) as u64 } else { 0 }
    };
    args::Matmul {
        w: matrix,
        bias: linear.bias.as_ref().map_or(0, |bias| bias.view().address()),
        x: at(forms.f32, acts.f32, acts.stride, 4),
        hi: at(forms.hi, acts.hi, acts.half_stride, 2),
        lo: at(forms.lo, acts.lo, acts.half_stride, 2),
        y: rows.y.address(),
        inputs: 0,
        shares: 0,
        count: 0,
        n: rows.n as u32,
        x_stride: acts.stride,
        half_stride: acts.half_stride,
        y_stride: matrix.rows,
    }
}
