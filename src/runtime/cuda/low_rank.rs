//! Launches of the changes of products by adapters, `kernels/low_rank.cuh`.

use super::adapters::ChangePlan;
use super::args;
use super::array::{Acts, View};
use super::context::Launch;
use super::multiply::Product;
use super::ops::{GRID, Grouped, Ops, most_shares};
use crate::error::Result;
use std::ops::Range;

/// Number of rows of x per thread block, `LOW_RANK_ROWS` in `low_rank.cuh`.
const ROWS: usize = 8;
/// Number of rows of A per thread block, `LOW_RANK_LANES`.
const LANES: usize = 4;
/// Number of outputs per thread block, `LOW_RANK_COLUMNS`.
const OUTPUTS: usize = 128;
/// Maximum number of products in a launch, `LOW_RANK_PRODUCTS`.
const PRODUCTS: usize = 3;

/// Changes of products that have multiplied the same rows.
pub struct LowRank<'a> {
    pub plan: ChangePlan,
    /// Rows with adapters: `(slots)`.
    pub adapted: View<args::Adapted>,
    /// Index of the change of the first product in the tables of adapters; the others follow it.
    pub index: usize,
    pub products: &'a [Product<'a>],
    /// Inputs of the products.
    pub x: &'a Acts,
    pub rows: Rows<'a>,
    /// Memory for the results of A.
    pub results: View<f32>,
}

/// Rows of products.
#[derive(Clone)]
pub enum Rows<'a> {
    /// Range of rows of the inputs; the first is row 0 of the outputs.
    Batch(Range<usize>),
    /// Row-expert pairs, sorted by expert; with `true`, the inputs are rows of the batch, otherwise they are sorted
    /// as well.
    Pairs(&'a Grouped, bool),
}

impl Ops {
    /// Changes the outputs of products by adapters.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn low_rank(&self, task: &LowRank<'_>) -> Result<()> {
        let LowRank { plan, results, .. } = task;
        let mut args = arguments(task);
        (args.h, args.h_stride) = (results.address(), plan.rank as u32);
        args.part_stride = u64::from(args.n) * plan.rank as u64;
        assert!(results.len() >= task.products.len() * plan.parts * args.n as usize * plan.rank);
        if plan.rank > 0 {
            self.low_rank_input(task, &args, plan.rank)?;
        }
        let widest = task.products.iter().map(|(linear, _)| linear.matrix.rows()).max().unwrap_or(0);
        let grid = [widest.div_ceil(OUTPUTS) as u32, blocks(task), (task.products.len() * plan.slots) as u32];
        self.start("low_rank", Launch { grid, block: OUTPUTS as u32, shared: 0 }, &args)
    }

    /// Computes one product with the matrices that adapters have in place of that of the model.
    ///
    /// # Errors
    /// The driver reports an error.
    pub fn replace(&self, task: &LowRank<'_>) -> Result<()> {
        let [(linear, y)] = task.products else { unreachable!("one product") };
        let mut args = arguments(task);
        (args.h, args.h_stride, args.part_stride) = (y.address(), linear.matrix.args.rows, 0);
        self.low_rank_input(task, &args, linear.matrix.rows())
    }

    fn low_rank_input(&self, task: &LowRank<'_>, args: &args::LowRank, rank: usize) -> Result<()> {
        let slots = (task.products.len() * task.plan.slots) as u32;
        let grid = [rank.div_ceil(LANES) as u32, blocks(task), slots];
        self.start("low_rank_input", Launch { grid, block: 256, shared: 0 }, args)
    }
}

/// Returns the number of thread blocks for the rows of a task.
fn blocks(task: &LowRank<'_>) -> u32 {
    let blocks = match &task.rows {
        Rows::Batch(rows) => rows.len().div_ceil(ROWS),
        Rows::Pairs(grouped, _) => most_shares(grouped.pairs, grouped.experts, grouped.share_rows),
    };
    assert!(blocks <= GRID);
    blocks as u32
}

/// Returns the arguments of a task, without those for the results of A.
fn arguments(task: &LowRank<'_>) -> args::LowRank {
    let LowRank { plan, adapted, index, products, x, rows, .. } = task;
    let (n, from, inputs) = match rows {
        Rows::Batch(rows) => (rows.len(), rows.start, rows.end),
        Rows::Pairs(grouped, true) => (grouped.pairs, 0, grouped.pairs / grouped.chosen.top_k),
        Rows::Pairs(grouped, false) => (grouped.pairs, 0, grouped.pairs),
    };
    assert!(products.len() <= PRODUCTS && products.len() * plan.slots <= GRID && adapted.len() >= plan.slots);
    assert!(inputs <= x.rows && (x.f32.is_some() || x.hi.is_some()), "activations in a form that can be read");
    let mut args = args::LowRank {
        adapted: adapted.address(),
        x: x.args(),
        inputs: 0,
        shares: 0,
        count: 0,
        h: 0,
        y: [0; PRODUCTS],
        part_stride: 0,
        widths: [0; PRODUCTS],
        index: *index as u32,
        slots: plan.slots as u32,
        parts: plan.parts as u32,
        n: n as u32,
        from: from as u32,
        cols: x.width as u32,
        h_stride: 0,
        gather: 0,
        unused: 0,
    };
    for (i, (linear, y)) in products.iter().enumerate() {
        assert!(linear.matrix.cols() == x.width && y.len() >= n * linear.matrix.rows());
        (args.y[i], args.widths[i]) = (y.address(), linear.matrix.args.rows);
    }
    if let Rows::Pairs(grouped, gather) = rows {
        (args.inputs, args.shares) = (grouped.inputs.address(), grouped.shares.address());
        (args.count, args.gather) = (grouped.count.address(), u32::from(*gather));
    }
    args
}
