//! Launches of matrix products; `kernels/matmul.cuh` specifies the choice of the kernel.
//!
//! Products of few rows of the activations `x` take microseconds, so products that read the same rows share a launch,
//! which also computes the activation of gate and up.

use super::args;
use super::array::{Acts, View};
use super::context::Launch;
use super::kind::Kind;
use super::ops::{GRID, Grouped, Ops, gated, most_shares};
use super::weights::{DeviceLinear, How};
use crate::error::Result;
use crate::model_config::Activation;

/// Maximum number of rows of x in the kernels for few rows.
pub const FEW: usize = 8;
/// Number of rows of x per thread block in the kernels for many rows.
const MANY: usize = 64;
/// Number of rows of x per thread block in the kernels for very many rows.
const MOST: usize = 128;
/// Maximum number of products in a launch.
const TOGETHER: usize = 3;
/// Number of matrix rows per tile.
const TILE: usize = 16;

/// Returns the maximum number of rows per share (the rows of one expert are cut into shares, and each share reads the
/// expert's matrix once): [`FEW`] if the experts have so few rows that each matrix is then read only once or twice,
/// otherwise [`MANY`].
pub fn share_rows(pairs: usize, experts: usize) -> usize {
    if pairs <= 6 * experts { FEW } else { MANY }
}

/// A product: the matrix, and the destination of the result `(n, rows)`.
pub type Product<'a> = (&'a DeviceLinear, View<f32>);

/// Arguments of `middle = activation(gate) * up`, computed from the results of two products.
pub struct Middle<'a> {
    pub activation: Activation,
    /// Destination: `(n, intermediate)`.
    pub out: &'a Acts,
    pub intermediate: usize,
}

impl Ops {
    /// Computes `y = x * matrix^T + bias` for `n` rows of `x` from row `first` on.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn matmul(&self, linear: &DeviceLinear, x: &Acts, first: usize, y: View<f32>, n: usize) -> Result<()> {
        let args = arguments(linear, x, first, y, n);
        if n <= FEW {
            return self.few(&[linear], &[args], 1, None);
        }
        let (rows, kind) = (linear.matrix.rows(), linear.matrix.kind);
        let (columns, high) = match linear.how {
            How::Float => (MANY, rows_of_many(linear)),
            How::Tensor { .. } => {
                let blocks = rows.div_ceil(MOST) * n.div_ceil(MOST);
                let most = n > 32 && kind != Kind::F16 && blocks >= self.multiprocessors() * 3 / 4;
                if most { (MOST, 128) } else { (MANY, rows_of_many(linear)) }
            }
        };
        self.many(linear, columns, [rows.div_ceil(high) * n.div_ceil(columns), 1], &args)
    }

    /// Computes several products with the same rows.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn matmuls(&self, products: &[Product<'_>], x: &Acts, n: usize) -> Result<()> {
        if n > FEW || !share_a_kernel(products) {
            return products.iter().try_for_each(|(linear, y)| self.matmul(linear, x, 0, *y, n));
        }
        let args: Vec<args::Matmul> = products.iter().map(|(linear, y)| arguments(linear, x, 0, *y, n)).collect();
        self.few(&products.iter().map(|(linear, _)| *linear).collect::<Vec<_>>(), &args, 1, None)
    }

    /// Computes the products with gate and up, and the activation of both.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn gate_and_up(&self, products: &[Product<'_>; 2], x: &Acts, middle: &Middle<'_>, n: usize) -> Result<()> {
        let [(gate, gates), (up, ups)] = *products;
        let then = gated(middle, gates, Some(ups), n);
        if n > FEW || !share_a_kernel(products) {
            self.matmuls(products, x, n)?;
            return self.gated(&then);
        }
        let args = [arguments(gate, x, 0, gates, n), arguments(up, x, 0, ups, n)];
        self.few(&[gate, up], &args, 1, Some(&then))
    }

    /// Computes the products of experts: row `i` of the sorted pairs is multiplied with the matrix of its expert.
    /// With `gather`, the rows of `x` are those of the batch; otherwise they are sorted already. With `middle`,
    /// rows of gate and up alternate in the matrix, and their activation follows.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn matmul_experts(
        &self,
        (linear, y): Product<'_>,
        x: &Acts,
        gather: bool,
        middle: Option<&Middle<'_>>,
        grouped: &Grouped,
    ) -> Result<()> {
        let (n, rows) = (grouped.pairs, linear.matrix.rows());
        assert!(y.len() >= n * rows && linear.matrix.count == grouped.experts);
        assert!(x.rows >= if gather { n / grouped.chosen.top_k } else { n });
        let args = args::Matmul {
            inputs: if gather { grouped.inputs.address() } else { 0 },
            shares: grouped.shares.address(),
            count: grouped.count.address(),
            n: n as u32,
            ..arguments(linear, x, 0, y, 0)
        };
        let then = middle.map(|middle| gated(middle, y, None, n));
        let columns = grouped.share_rows;
        let shares = most_shares(n, grouped.experts, columns);
        assert!(shares <= GRID);
        if columns == FEW {
            return self.few(&[linear], &[args], shares, then.as_ref());
        }
        self.many(linear, columns, [rows.div_ceil(rows_of_many(linear)), shares], &args)?;
        then.map_or(Ok(()), |then| self.gated(&then))
    }

    /// Computes products of few rows with one kernel.
    fn few(
        &self,
        linears: &[&DeviceLinear],
        products: &[args::Matmul],
        shares: usize,
        then: Option<&args::Gated>,
    ) -> Result<()> {
        assert!(!products.is_empty() && products.len() <= TOGETHER);
        let tiles = linears.iter().map(|linear| linear.matrix.rows().div_ceil(TILE)).max().unwrap_or(0);
        // There is one ticket for each 16 rows of gate and up.
        assert!(then.is_none() || tiles <= self.tickets().len());
        let mut of = [args::Matmul::default(); TOGETHER];
        of[..products.len()].copy_from_slice(products);
        let args = args::Few { of, then: then.copied().unwrap_or_default(), tickets: self.tickets().address() };
        let grid = [tiles, shares, products.len()];
        let threads = self.few_threads(grid.iter().product());
        self.start(&name(linears[0], FEW), Launch { grid: grid.map(|n| n as u32), block: threads, shared: 0 }, &args)
    }

    /// Returns the number of threads per thread block in the kernels for few rows of x, which is larger if the launch
    /// has fewer thread blocks.
    fn few_threads(&self, blocks: usize) -> u32 {
        let fits = |threads: &usize| blocks * threads <= 1024 * self.multiprocessors();
        [512, 256].into_iter().find(fits).unwrap_or(128) as u32
    }

    /// Computes a product of many rows of x, or of the shares of experts.
    fn many(
        &self,
        linear: &DeviceLinear,
        columns: usize,
        [blocks, shares]: [usize; 2],
        args: &args::Matmul,
    ) -> Result<()> {
        let (block, shared) = match linear.how {
            How::Float => (128, 0),
            // Threads and shared memory are those that `kernels/matmul.cuh` lists for these kernels.
            How::Tensor { passes } if columns == MANY && linear.matrix.kind.is_tiles() => {
                (384, if passes == 1 { 81_408 } else { 87_040 })
            }
            How::Tensor { passes } => (256, passes * (48 << 10)),
        };
        let grid = [blocks as u32, shares as u32, 1];
        self.start(&name(linear, columns), Launch { grid, block, shared }, args)
    }
}

/// Returns the number of matrix rows per thread block in the kernels for many rows of x.
fn rows_of_many(linear: &DeviceLinear) -> usize {
    if linear.how != How::Float && !linear.matrix.kind.is_tiles() { 32 } else { 64 }
}

/// Returns the name of the kernel that computes up to `columns` rows of x per thread block.
fn name(linear: &DeviceLinear, columns: usize) -> String {
    let kind = linear.matrix.kind;
    let own = match linear.how {
        How::Tensor { passes: 1 } if columns == MOST => matches!(kind, Kind::Int4 | Kind::Mxfp4),
        How::Float if kind.is_coded() => false,
        _ => columns == FEW,
    };
    let kind = if own { kind.name() } else { kind.store_name() };
    match linear.how {
        How::Float => format!("matmul_f32_{kind}_{columns}"),
        How::Tensor { passes } => format!("matmul_bf16_{kind}_{passes}_{columns}"),
    }
}

/// Returns true when one kernel can compute all of these products for few rows.
fn share_a_kernel(products: &[Product<'_>]) -> bool {
    let like = |(linear, _): &Product<'_>| (linear.matrix.kind, linear.how);
    products.windows(2).all(|pair| like(&pair[0]) == like(&pair[1]))
}

/// Returns the arguments of a product, without those for experts.
pub(super) fn arguments(linear: &DeviceLinear, x: &Acts, first: usize, y: View<f32>, n: usize) -> args::Matmul {
    let (matrix, acts, forms) = (linear.matrix.args, x.args(), linear.how.forms());
    assert!(linear.matrix.cols() == x.width && first + n <= x.rows && y.len() >= n * linear.matrix.rows());
    let at = |wanted: bool, address: u64, stride: u32, size: usize| {
        assert!(!wanted || address != 0, "activations in the form that the product reads");
        if wanted { address + (first * stride as usize * size) as u64 } else { 0 }
    };
    args::Matmul {
        w: matrix,
        bias: linear.bias.as_ref().map_or(0, |bias| bias.view().address()),
        x: at(forms.f32, acts.f32, acts.stride, 4),
        hi: at(forms.hi, acts.hi, acts.half_stride, 2),
        lo: at(forms.lo, acts.lo, acts.half_stride, 2),
        y: y.address(),
        n: n as u32,
        x_stride: acts.stride,
        half_stride: acts.half_stride,
        y_stride: matrix.rows,
        ..args::Matmul::default()
    }
}
