//! Checks matrix products: every storage format of weights, every form of activations, few rows and many, single
//! and shared launches, and stacks of experts. The rows of experts are gathered from the batch or sorted already;
//! some experts have many rows and some have none.

use super::elementwise::activated;
use super::mixture::{Routed, Rule, sorted};
use super::random::{Store, normals, weight};
use super::rig::{Expected, Rig, rounding, split, sum};
use crate::dtype::DType;
use crate::error::Result;
use crate::model_config::{Activation, RouterSoftmax};
use crate::runtime::cpu::{Arithmetic, MatrixStore};
use crate::runtime::cuda::array::Acts;
use crate::runtime::cuda::multiply::Middle;
use crate::runtime::cuda::weights::{DeviceLinear, DeviceMatrix, How};
use crate::runtime::weights::Weight;
use crate::scheme::{Granularity, QuantSpec, SCHEMES, ScaleType, Scheme};
use rayon::prelude::*;

const SWIGLU: Activation = Activation::SwigluOai { alpha: 1.702, limit: 7.0 };

/// Returns every storage format; of the kinds that have several, the usual one comes first.
fn stores() -> Vec<Store> {
    let mut stores: Vec<Store> = [DType::F32, DType::F16, DType::BF16].map(Store::Plain).to_vec();
    let spec = |scheme, granularity, symmetric, scale_dtype| {
        Store::Tiles(QuantSpec { scheme, granularity, symmetric, scale_dtype })
    };
    let groups = [32, 64, 128, 256].map(Granularity::Group).into_iter().chain([Granularity::Row, Granularity::Tensor]);
    stores.push(Store::Tiles(QuantSpec::Q4_0));
    for symmetric in [true, false] {
        for (i, granularity) in groups.clone().enumerate() {
            let scales = [ScaleType::F32, ScaleType::F16][i % 2];
            stores.push(spec(Scheme::Int4, granularity, symmetric, scales));
        }
    }
    stores.push(spec(Scheme::Int4, Granularity::Group(32), false, ScaleType::F16));
    stores.push(Store::Tiles(QuantSpec::usual(Scheme::Nl4)));
    stores.push(Store::Tiles(QuantSpec::MXFP4));
    for (i, granularity) in [Granularity::Row].into_iter().chain(groups).enumerate() {
        stores.push(spec(Scheme::Int8, granularity, true, [ScaleType::F16, ScaleType::F32][i % 2]));
    }
    for (i, granularity) in [32, 128].map(Granularity::Group).into_iter().chain([Granularity::Row]).enumerate() {
        let scales = [ScaleType::F16, ScaleType::F32, ScaleType::E8m0][i];
        stores.push(spec(Scheme::Int5, granularity, true, [ScaleType::F32, ScaleType::F16][i % 2]));
        stores.push(spec(Scheme::Int6, granularity, true, [ScaleType::F16, ScaleType::F32][i % 2]));
        stores.push(spec(Scheme::Fp8, granularity, true, scales));
    }
    stores.extend(
        SCHEMES
            .iter()
            .flat_map(|info| info.row_scaled.iter().map(|size| (info.scheme, *size)))
            .map(|(scheme, size)| spec(scheme, Granularity::Group(size), true, ScaleType::I8Row)),
    );
    stores.extend(
        SCHEMES
            .iter()
            .filter(|info| info.is_block_format && info.is_source_format)
            .map(|info| info.scheme)
            .map(|scheme| Store::Tiles(QuantSpec::usual(scheme))),
    );
    stores
}

/// Checks all products.
pub fn check(rig: &mut Rig<'_>) -> Result<()> {
    let mut seen = Vec::new();
    for store in stores() {
        let mut first = Operand::new(rig, store, [1, 33, 48], Bias::Random)?;
        let kind = first.linear.matrix.kind;
        products(rig, &mut first, &[1, 2, 8, 9, 65])?;
        if !seen.contains(&kind) {
            seen.push(kind);
            thorough(rig, store)?;
            together(rig, store)?;
            experts(rig, store)?;
        } else if !rig.quick {
            // The last group is shorter than the others.
            let mut groups = Operand::new(rig, store, [1, 20, 424], Bias::None)?;
            products(rig, &mut groups, &[1, 17])?;
        }
    }
    Ok(())
}

/// Bias of a matrix.
pub enum Bias {
    None,
    Random,
    Given(Vec<f32>),
}

/// A matrix or a stack of matrices, on the host and on the device.
pub struct Operand {
    pub linear: DeviceLinear,
    store: Store,
    /// Storage format on the CPU, which decides how a device multiplies.
    held: MatrixStore,
    /// Rows of all matrices, widened as the CPU's scalar arithmetic reads them.
    weights: Vec<f64>,
    /// Bias of each row; zero without a bias.
    bias: Vec<f32>,
}

impl Operand {
    /// Creates `count` random matrices of one storage format and shape.
    pub fn new(rig: &mut Rig<'_>, store: Store, [count, rows, cols]: [usize; 3], bias: Bias) -> Result<Operand> {
        let stack = (0..count).map(|_| weight(&mut rig.rng, store, rows, cols)).collect::<Result<Vec<Weight>>>()?;
        let bias = match bias {
            Bias::None => None,
            Bias::Random => Some(normals(&mut rig.rng, count * rows, 0.5)),
            Bias::Given(bias) => Some(bias),
        };
        let matrix = DeviceMatrix::upload(&mut rig.uploader, &stack.iter().collect::<Vec<_>>())?;
        let device_bias = bias.as_ref().map(|bias| rig.array(bias)).transpose()?;
        let mut weights = vec![0f32; count * rows * cols];
        let widened = weights.par_chunks_mut(cols).enumerate();
        widened.try_for_each(|(row, out)| stack[row / rows].read_row(row % rows, out))?;
        Ok(Operand {
            linear: DeviceLinear { matrix, bias: device_bias, how: How::Float, target: None },
            store,
            held: stack[0].store(),
            weights: weights.into_iter().map(f64::from).collect(),
            bias: bias.unwrap_or_else(|| vec![0.0; count * rows]),
        })
    }

    /// Returns the arithmetics in which a device multiplies with the operand.
    fn ways(&self, rig: &Rig<'_>) -> Vec<How> {
        let tensor_cores = rig.context.info.has_tensor_cores();
        let mut ways: Vec<How> = Vec::new();
        for arithmetic in [Arithmetic::Float, Arithmetic::Int16, Arithmetic::Bf16, Arithmetic::Int8] {
            let how = How::new(self.held, arithmetic, tensor_cores);
            if !ways.contains(&how) {
                ways.push(how);
            }
        }
        ways
    }

    /// Returns the name of a kernel for reports.
    fn kernel(&self, what: &str) -> String {
        let reads = match self.linear.how {
            How::Float => "f32",
            How::Tensor { passes: 1 } => "bf16",
            How::Tensor { .. } => "bf16 + bf16",
        };
        format!("matmul, {} x {reads}, {what}", self.linear.matrix.kind.name())
    }

    /// Returns activations as this product reads them.
    fn as_read(&self, x: &[f32]) -> Vec<f64> {
        let read = |value: &f32| {
            let (hi, lo) = split(*value);
            match self.linear.how {
                How::Float => f64::from(*value),
                How::Tensor { passes: 1 } => f64::from(hi),
                How::Tensor { .. } => f64::from(hi) + f64::from(lo),
            }
        };
        x.iter().map(read).collect()
    }

    /// Returns the expected product of a row, counted over all matrices, with an input.
    pub fn dot(&self, row: usize, x: &[f64]) -> Expected {
        let terms = self.weights[row * x.len()..][..x.len()].iter().zip(x).map(|(w, x)| w * x);
        let (value, magnitude) = sum([f64::from(self.bias[row])].into_iter().chain(terms));
        Expected { value, tolerance: rounding(x.len()) * magnitude }
    }

    /// Returns the expected products of a single matrix with rows of activations.
    fn times(&self, x: &[f32]) -> Vec<Expected> {
        let (rows, cols) = (self.linear.matrix.rows(), self.linear.matrix.cols());
        let x = self.as_read(x);
        let all = (0..x.len() / cols * rows).into_par_iter();
        all.map(|i| self.dot(i % rows, &x[i / rows * cols..][..cols])).collect()
    }
}

/// Returns the expected activation of two results.
fn middle_of(activation: Activation, gate: Expected, up: Expected) -> Expected {
    let exact = activated(activation, gate.value, up.value);
    // The factor 2 is above the slope of every activation.
    let spread = 2.0 * (gate.tolerance * (up.value.abs() + 1.0) + up.tolerance * gate.value.abs());
    Expected { value: exact.value, tolerance: exact.tolerance + spread }
}

/// Checks shapes that are not multiples of a block or a tile, and such that take the kernels for very many rows; called
/// for one storage format of each kind.
fn thorough(rig: &mut Rig<'_>, store: Store) -> Result<()> {
    let sizes: &[(usize, usize, &[usize])] = match rig.quick {
        true => &[(7, 6, &[1, 9]), (50, 2880, &[1, 33])],
        false => &[
            (7, 6, &[1, 9]),
            (16, 32, &[7, 128]),
            (100, 80, &[5, 64, 130]),
            (50, 2880, &[1, 8, 33]),
            (1003, 64, &[1, 129]),
        ],
    };
    for &(rows, cols, batches) in sizes {
        let mut operand = Operand::new(rig, store, [1, rows, cols], Bias::None)?;
        products(rig, &mut operand, batches)?;
    }
    // There are so many rows that blocks of 128 x 128 keep the device busy, with one column of blocks and with two.
    let multiprocessors = rig.context.info.multiprocessors as usize;
    for n in [128usize, 129] {
        let blocks = (multiprocessors * 3).div_ceil(4 * n.div_ceil(128));
        let mut operand = Operand::new(rig, store, [1, blocks * 128 - 5, 80], Bias::None)?;
        products(rig, &mut operand, &[n])?;
    }
    Ok(())
}

/// Checks the product of `operand` with random activations, in every arithmetic and for each number of rows in
/// `batches`. The activations have one row more, before the others, which must not be read.
fn products(rig: &mut Rig<'_>, operand: &mut Operand, batches: &[usize]) -> Result<()> {
    let (rows, cols) = (operand.linear.matrix.rows(), operand.linear.matrix.cols());
    for how in operand.ways(rig) {
        operand.linear.how = how;
        for &n in batches {
            let shape = format!("{rows} x {cols} ({}) times {n} rows", operand.store.name());
            let case = rig.begin(operand.kernel(if n <= 8 { "few rows" } else { "many rows" }), shape)?;
            let x = normals(&mut rig.rng, (n + 1) * cols, 1.0);
            let acts = rig.acts(how.forms(), &x, cols)?;
            let y = rig.unwritten(n * rows)?;
            rig.ops.matmul(&operand.linear, &acts, 1, y.view(), n)?;
            let expected = operand.times(&x[cols..]);
            rig.compare(&case, rows, &y.read()?, |i| expected[i]);
        }
    }
    Ok(())
}

/// Checks shared launches: three products, like queries, keys and values; and gate, up and their activation.
fn together(rig: &mut Rig<'_>, store: Store) -> Result<()> {
    let cols = 112;
    let mut operand = |rows, bias| Operand::new(rig, store, [1, rows, cols], bias);
    let mut three = [operand(70, Bias::Random)?, operand(17, Bias::None)?, operand(16, Bias::Random)?];
    let mut two = [operand(83, Bias::None)?, operand(83, Bias::Random)?];
    for how in two[0].ways(rig) {
        three.iter_mut().chain(&mut two).for_each(|operand| operand.linear.how = how);
        for (i, n) in [1, 3, 8, 20].into_iter().enumerate() {
            let x = normals(&mut rig.rng, n * cols, 1.0);
            let acts = rig.acts(how.forms(), &x, cols)?;
            share_a_launch(rig, &three, &x, &acts)?;
            activate(rig, &two, &x, &acts, [Activation::Silu, SWIGLU, Activation::GeluTanh][i % 3])?;
        }
    }
    Ok(())
}

fn share_a_launch(rig: &mut Rig<'_>, operands: &[Operand; 3], x: &[f32], acts: &Acts) -> Result<()> {
    let n = acts.rows;
    let shape = format!("{} products ({}) with {n} rows", operands.len(), operands[0].store.name());
    let case = rig.begin(operands[0].kernel("shared launches"), shape)?;
    let room = |operand: &Operand| rig.unwritten(n * operand.linear.matrix.rows());
    let results = operands.iter().map(room).collect::<Result<Vec<_>>>()?;
    let products: Vec<_> = operands.iter().zip(&results).map(|(operand, y)| (&operand.linear, y.view())).collect();
    rig.ops.matmuls(&products, acts, n)?;
    for (operand, y) in operands.iter().zip(&results) {
        let expected = operand.times(x);
        rig.compare(&case, operand.linear.matrix.rows(), &y.read()?, |i| expected[i]);
    }
    Ok(())
}

fn activate(
    rig: &mut Rig<'_>,
    [gate, up]: &[Operand; 2],
    x: &[f32],
    acts: &Acts,
    activation: Activation,
) -> Result<()> {
    let (n, intermediate) = (acts.rows, gate.linear.matrix.rows());
    let case = rig.begin(gate.kernel("gate and up"), format!("{} with {n} rows, {activation:?}", gate.store.name()))?;
    let (gates, ups) = (rig.unwritten(n * intermediate)?, rig.unwritten(n * intermediate)?);
    let out = rig.room(n, intermediate)?;
    let products = [(&gate.linear, gates.view()), (&up.linear, ups.view())];
    let middle = Middle { activation, out: &out, intermediate };
    rig.ops.gate_and_up(&products, acts, &middle, n)?;
    // A second launch works only if the first one has reset the tickets.
    rig.count(&case)?;
    rig.ops.gate_and_up(&products, acts, &middle, n)?;
    let found = rig.read_acts(&case, &out, n)?;
    let (gate, up) = (gate.times(x), up.times(x));
    rig.compare(&case, intermediate, &found, |i| middle_of(activation, gate[i], up[i]));
    Ok(())
}

const EXPERTS: usize = 5;
const TOP_K: usize = 2;
const ROWS: usize = 70;
const COLS: usize = 48;

/// Variant of a product of experts.
#[derive(Debug, Clone, Copy)]
struct Task {
    /// True if the rows are those of the batch, to be gathered.
    gather: bool,
    /// True if rows of gate and up alternate and are activated.
    middle: bool,
}

fn experts(rig: &mut Rig<'_>, store: Store) -> Result<()> {
    let mut stack = Operand::new(rig, store, [EXPERTS, ROWS, COLS], Bias::Random)?;
    let router = Operand::router(rig, Store::Plain(DType::F32), EXPERTS, COLS)?;
    let batches: &[usize] = if rig.quick { &[1, 40] } else { &[1, 15, 40, 130] };
    for how in stack.ways(rig) {
        stack.linear.how = how;
        for &n in batches {
            let x = normals(&mut rig.rng, n * COLS, 1.0);
            let acts = rig.acts(How::Float.forms(), &x, COLS)?;
            let routed = Routed::new(rig, &router, &acts, TOP_K, &Rule::plain(RouterSoftmax::Chosen))?;
            for (gather, middle) in [(true, false), (true, true), (false, false)] {
                chosen_products(rig, &stack, &routed, n, Task { gather, middle })?;
            }
        }
    }
    Ok(())
}

fn chosen_products(rig: &mut Rig<'_>, stack: &Operand, routed: &Routed, n: usize, task: Task) -> Result<()> {
    let grouped = routed.grouped();
    let shape = format!(
        "{ROWS} x {COLS} ({}) times {n} rows, {TOP_K} of {EXPERTS} experts, shares of {}{}{}",
        stack.store.name(),
        grouped.share_rows,
        if task.gather { ", gathered" } else { "" },
        if task.middle { ", activated" } else { "" }
    );
    let case = rig.begin(stack.kernel("experts"), shape)?;
    let inputs = if task.gather { n } else { grouped.pairs };
    let x = normals(&mut rig.rng, inputs * COLS, 1.0);
    let acts = rig.acts(stack.linear.how.forms(), &x, COLS)?;
    let y = rig.unwritten(grouped.pairs * ROWS)?;
    let out = rig.room(grouped.pairs, ROWS / 2)?;
    let middle = Middle { activation: SWIGLU, out: &out, intermediate: ROWS / 2 };
    let middle = task.middle.then_some(&middle);
    rig.ops.matmul_experts((&stack.linear, y.view()), &acts, task.gather, middle, &grouped)?;

    let mut choices = routed.choices()?;
    let (_, row_of) = sorted(&choices, TOP_K);
    choices.sort_unstable();
    let x = stack.as_read(&x);
    let expected = |pair: usize, row: usize| -> Expected {
        let input = if task.gather { row_of[pair] as usize } else { pair };
        stack.dot(choices[pair] as usize * ROWS + row, &x[input * COLS..][..COLS])
    };
    if !task.middle {
        rig.compare(&case, ROWS, &y.read()?, |i| expected(i / ROWS, i % ROWS));
        return Ok(());
    }
    let found = rig.read_acts(&case, &out, grouped.pairs)?;
    rig.compare(&case, ROWS / 2, &found, |i| {
        let (pair, column) = (i / (ROWS / 2), i % (ROWS / 2));
        middle_of(SWIGLU, expected(pair, 2 * column), expected(pair, 2 * column + 1))
    });
    Ok(())
}
