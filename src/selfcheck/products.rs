//! Matrix products: every store of weights, every form of activations, few rows and many, alone and together.

use super::elementwise::activated;
use super::random::{Store, normals, weight};
use super::rig::{Case, Expected, Rig, rounding, split};
use super::stacks;
use crate::dtype::DType;
use crate::error::Result;
use crate::model_config::Activation;
use crate::progress::ProgressBar;
use crate::runtime::cpu::Arithmetic;
use crate::runtime::cuda::array::Acts;
use crate::runtime::cuda::multiply::{Middle, Product};
use crate::runtime::cuda::weights::{DeviceLinear, DeviceMatrix, How, Uploader};
use crate::runtime::weights::Weight;
use crate::scheme::{Granularity, QuantSpec, ScaleType, Scheme};
use rayon::prelude::*;

/// Every store; of the kinds that have several the usual one comes first.
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
    stores
}

/// Checks them.
pub fn check(rig: &mut Rig) -> Result<()> {
    let bar = ProgressBar::hidden();
    let mut seen = Vec::new();
    let context = rig.context.clone();
    let mut uploader = Uploader::new(&context, &bar)?;
    for store in stores() {
        let mut task = Task { rig, uploader: &mut uploader, store };
        let mut first = task.matrix(33, 48, Given::Random)?;
        let kind = first.linear.matrix.kind;
        task.products(&mut first, &[1, 2, 8, 9, 65])?;
        if !seen.contains(&kind) {
            seen.push(kind);
            task.thorough()?;
            task.together()?;
            stacks::check(task.rig, task.uploader, store)?;
        } else if !task.rig.quick {
            // The last group is cut short.
            let mut groups = task.matrix(20, 424, Given::No)?;
            task.products(&mut groups, &[1, 17])?;
        }
    }
    Ok(())
}

/// What bias a matrix has.
pub enum Given {
    No,
    Random,
    Bias(Vec<f32>),
}

/// A matrix here and on the device.
pub struct Both {
    pub weight: Weight,
    pub bias: Option<Vec<f32>>,
    pub linear: DeviceLinear,
    cols: usize,
}

impl Both {
    pub fn new(
        rig: &mut Rig,
        uploader: &mut Uploader<'_>,
        store: Store,
        rows: usize,
        cols: usize,
        given: Given,
    ) -> Result<Both> {
        let weight = weight(&mut rig.rng, store, rows, cols)?;
        let bias = match given {
            Given::No => None,
            Given::Random => Some(normals(&mut rig.rng, rows, 0.5)),
            Given::Bias(bias) => Some(bias),
        };
        let linear = DeviceLinear {
            matrix: DeviceMatrix::upload(uploader, &[&weight])?,
            bias: bias.as_ref().map(|bias| rig.array(bias)).transpose()?,
            how: How::Float,
        };
        Ok(Both { weight, bias, linear, cols })
    }

    /// What it gives with rows `x` of activations, as this product reads them.
    fn times(&self, weights: &[f64], x: &[f32]) -> Vec<Expected> {
        let (rows, cols) = (self.weight.rows(), self.cols);
        let x: Vec<f64> = x.iter().map(|x| as_read(self.linear.how, *x)).collect();
        let bias = |row: usize| self.bias.as_ref().map_or(0.0, |bias| bias[row]);
        (0..x.len() / cols * rows)
            .into_par_iter()
            .map(|i| dot(&weights[i % rows * cols..][..cols], &x[i / rows * cols..][..cols], bias(i % rows)))
            .collect()
    }
}

/// The ways in which a device multiplies with a store.
pub fn ways(rig: &Rig, weight: &Weight) -> Vec<How> {
    let tensor_cores = rig.context.info.has_tensor_cores();
    let mut ways: Vec<How> = Vec::new();
    for arithmetic in [Arithmetic::Float, Arithmetic::Int16, Arithmetic::Bf16, Arithmetic::Int8] {
        let how = How::new(weight.store(), arithmetic, tensor_cores);
        if !ways.contains(&how) {
            ways.push(how);
        }
    }
    ways
}

/// A number as a product reads it.
pub fn as_read(how: How, value: f32) -> f64 {
    let (hi, lo) = split(value);
    match how {
        How::Float => f64::from(value),
        How::Tensor { passes: 1 } => f64::from(hi),
        How::Tensor { .. } => f64::from(hi) + f64::from(lo),
    }
}

/// What a product reads, for people.
pub fn name(how: How) -> &'static str {
    match how {
        How::Float => "f32",
        How::Tensor { passes: 1 } => "bf16",
        How::Tensor { .. } => "bf16 + bf16",
    }
}

/// The rows of a matrix, widened as the CPU's scalar arithmetic reads them.
pub fn widened(weight: &Weight, cols: usize) -> Result<Vec<f64>> {
    let mut values = vec![0f32; weight.rows() * cols];
    values.par_chunks_mut(cols).enumerate().try_for_each(|(row, out)| weight.read_row(row, out))?;
    Ok(values.into_iter().map(f64::from).collect())
}

/// One sum of products.
pub fn dot(weights: &[f64], x: &[f64], bias: f32) -> Expected {
    let bias = f64::from(bias);
    let (mut sum, mut magnitude) = (bias, bias.abs());
    for (w, x) in weights.iter().zip(x) {
        let term = w * x;
        sum += term;
        magnitude += term.abs();
    }
    Expected { value: sum, tolerance: rounding(weights.len()) * magnitude }
}

/// The activation of two results.
pub fn middle_of(activation: Activation, gate: Expected, up: Expected) -> Expected {
    let exact = activated(activation, gate.value, up.value);
    // None of the activations is steeper than this anywhere.
    let spread = 2.0 * (gate.tolerance * (up.value.abs() + 1.0) + up.tolerance * gate.value.abs());
    Expected { value: exact.value, tolerance: exact.tolerance + spread }
}

struct Task<'a, 'b> {
    rig: &'a mut Rig,
    uploader: &'a mut Uploader<'b>,
    store: Store,
}

impl Task<'_, '_> {
    fn matrix(&mut self, rows: usize, cols: usize, given: Given) -> Result<Both> {
        Both::new(self.rig, self.uploader, self.store, rows, cols, given)
    }

    /// Shapes beside the comfortable ones, for one store of each kind.
    fn thorough(&mut self) -> Result<()> {
        let sizes: &[(usize, usize, &[usize])] = match self.rig.quick {
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
            let mut both = self.matrix(rows, cols, Given::No)?;
            self.products(&mut both, batches)?;
        }
        // So many rows that blocks of 128 x 128 keep the device busy, with one column of blocks and with two.
        let multiprocessors = self.rig.context.info.multiprocessors as usize;
        for n in [128usize, 129] {
            let blocks = (multiprocessors * 3).div_ceil(4 * n.div_ceil(128));
            let mut both = self.matrix(blocks * 128 - 5, 80, Given::No)?;
            self.products(&mut both, &[n])?;
        }
        Ok(())
    }

    fn products(&mut self, both: &mut Both, batches: &[usize]) -> Result<()> {
        let weights = widened(&both.weight, both.cols)?;
        for how in ways(self.rig, &both.weight) {
            both.linear.how = how;
            for &n in batches {
                self.product(both, &weights, n)?;
            }
        }
        Ok(())
    }

    fn kernel(&self, linear: &DeviceLinear, what: &str) -> String {
        format!("matmul, {} x {}, {what}", linear.matrix.kind.name(), name(linear.how))
    }

    /// Multiplies rows 1.. of some activations.
    fn product(&mut self, both: &Both, weights: &[f64], n: usize) -> Result<()> {
        let (rows, cols) = (both.weight.rows(), both.cols);
        let kernel = self.kernel(&both.linear, if n <= 8 { "few rows" } else { "many rows" });
        let shape = format!("{rows} x {cols} ({}) times {n} rows", self.store.name());
        let case = Case { kernel: &kernel, shape: &shape };
        let rig = &mut *self.rig;
        rig.begin(case.kernel)?;
        let x = normals(&mut rig.rng, (n + 1) * cols, 1.0);
        let acts = rig.acts(both.linear.how.forms(), &x, n + 1, cols)?;
        let y = rig.unwritten(n * rows)?;
        rig.ops.matmul(&both.linear, &acts, 1, y.view(), n)?;
        let expected = both.times(weights, &x[cols..]);
        rig.compare(&case, rows, &y.read()?, |i| expected[i]);
        Ok(())
    }

    /// Queries, keys and values of one launch; gate, up and their activation.
    fn together(&mut self) -> Result<()> {
        let cols = 112;
        let mut three: Vec<Both> = [(70, Given::Random), (17, Given::No), (16, Given::Random)]
            .into_iter()
            .map(|(rows, given)| self.matrix(rows, cols, given))
            .collect::<Result<_>>()?;
        let mut two = [self.matrix(83, cols, Given::No)?, self.matrix(83, cols, Given::Random)?];
        let wide = |list: &[Both]| list.iter().map(|both| widened(&both.weight, cols)).collect::<Result<Vec<_>>>();
        let (weights_of_three, weights_of_two) = (wide(&three)?, wide(&two)?);
        for how in ways(self.rig, &two[0].weight) {
            three.iter_mut().chain(&mut two).for_each(|both| both.linear.how = how);
            for (i, n) in [1, 3, 8, 20].into_iter().enumerate() {
                let x = normals(&mut self.rig.rng, n * cols, 1.0);
                let acts = self.rig.acts(how.forms(), &x, n, cols)?;
                self.share_a_launch(&three, &weights_of_three, (&x, &acts), n)?;
                let activation =
                    [Activation::Silu, Activation::SwigluOai { alpha: 1.702, limit: 7.0 }, Activation::GeluTanh][i % 3];
                self.activate(&two, &weights_of_two, (&x, &acts), n, activation)?;
            }
        }
        Ok(())
    }

    fn share_a_launch(
        &mut self,
        list: &[Both],
        weights: &[Vec<f64>],
        (x, acts): (&[f32], &Acts),
        n: usize,
    ) -> Result<()> {
        let kernel = self.kernel(&list[0].linear, "shared launches");
        let shape = format!("{} products ({}) with {n} rows", list.len(), self.store.name());
        let case = Case { kernel: &kernel, shape: &shape };
        let rig = &mut *self.rig;
        rig.begin(case.kernel)?;
        let results = list.iter().map(|both| rig.unwritten(n * both.weight.rows())).collect::<Result<Vec<_>>>()?;
        let products: Vec<Product<'_>> = list.iter().zip(&results).map(|(both, y)| (&both.linear, y.view())).collect();
        rig.ops.matmuls(&products, acts, n)?;
        for ((both, weights), y) in list.iter().zip(weights).zip(&results) {
            let expected = both.times(weights, x);
            rig.compare(&case, both.weight.rows(), &y.read()?, |i| expected[i]);
        }
        Ok(())
    }

    fn activate(
        &mut self,
        list: &[Both; 2],
        weights: &[Vec<f64>],
        (x, acts): (&[f32], &Acts),
        n: usize,
        activation: Activation,
    ) -> Result<()> {
        let kernel = self.kernel(&list[0].linear, "gate and up");
        let shape = format!("{} with {n} rows, {activation:?}", self.store.name());
        let case = Case { kernel: &kernel, shape: &shape };
        let rig = &mut *self.rig;
        let intermediate = list[0].weight.rows();
        let (gate, up) = (rig.unwritten(n * intermediate)?, rig.unwritten(n * intermediate)?);
        let out = rig.room(n, intermediate)?;
        let products = [(&list[0].linear, gate.view()), (&list[1].linear, up.view())];
        // Tickets are left as they were, so that the next launch finds them.
        for _ in 0..2 {
            rig.begin(case.kernel)?;
            rig.ops.gate_and_up(&products, acts, &Middle { activation, out: &out, intermediate }, n)?;
        }
        let found = rig.read_acts(&case, &out, n)?;
        let (gate, up) = (list[0].times(&weights[0], x), list[1].times(&weights[1], x));
        rig.compare(&case, intermediate, &found, |i| middle_of(activation, gate[i], up[i]));
        Ok(())
    }
}
