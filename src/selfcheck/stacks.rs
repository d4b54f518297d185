//! Products of experts: stacks of matrices, rows of the batch or rows that are sorted already, crowded experts and
//! empty ones.

use super::mixture::{Routed, Router, sorted};
use super::products::{as_read, dot, middle_of, name, ways, widened};
use super::random::{Store, normals, weight};
use super::rig::{Case, Expected, Rig};
use crate::dtype::DType;
use crate::error::Result;
use crate::model_config::{Activation, RouterSoftmax};
use crate::runtime::cuda::multiply::Middle;
use crate::runtime::cuda::weights::{DeviceLinear, DeviceMatrix, How, Uploader};
use crate::runtime::weights::Weight;

const EXPERTS: usize = 5;
const TOP_K: usize = 2;
const ROWS: usize = 70;
const COLS: usize = 48;

/// Matrices here and on the device.
struct Stack {
    store: Store,
    linear: DeviceLinear,
    weights: Vec<Vec<f64>>,
    bias: Vec<f32>,
}

/// What is done with a stack.
#[derive(Debug, Clone, Copy)]
struct Task {
    /// Rows are those of the batch.
    gather: bool,
    /// Rows of gate and up alternate, and are activated.
    middle: bool,
}

/// Checks them.
pub fn check(rig: &mut Rig, uploader: &mut Uploader<'_>, store: Store) -> Result<()> {
    let stack: Vec<Weight> = (0..EXPERTS).map(|_| weight(&mut rig.rng, store, ROWS, COLS)).collect::<Result<_>>()?;
    let bias = normals(&mut rig.rng, EXPERTS * ROWS, 0.5);
    let linear = DeviceLinear {
        matrix: DeviceMatrix::upload(uploader, &stack.iter().collect::<Vec<_>>())?,
        bias: Some(rig.array(&bias)?),
        how: How::Float,
    };
    let weights = stack.iter().map(|weight| widened(weight, COLS)).collect::<Result<Vec<_>>>()?;
    let mut all = Stack { store, linear, weights, bias };
    let router = Router::new(rig, uploader, Store::Plain(DType::F32), EXPERTS, COLS)?;
    let batches: &[usize] = if rig.quick { &[1, 40] } else { &[1, 15, 40, 130] };
    for how in ways(rig, &stack[0]) {
        all.linear.how = how;
        for &n in batches {
            let x = normals(&mut rig.rng, n * COLS, 1.0);
            let acts = rig.acts(How::Float.forms(), &x, n, COLS)?;
            let routed = router.route(rig, &acts, n, TOP_K, RouterSoftmax::Chosen)?;
            for (gather, middle) in [(true, false), (true, true), (false, false)] {
                product(rig, &all, &routed, n, Task { gather, middle })?;
            }
        }
    }
    Ok(())
}

fn product(rig: &mut Rig, stack: &Stack, routed: &Routed, n: usize, task: Task) -> Result<()> {
    let how = stack.linear.how;
    let grouped = routed.grouped();
    let kernel = format!("matmul, {} x {}, experts", stack.linear.matrix.kind.name(), name(how));
    let shape = format!(
        "{ROWS} x {COLS} ({}) times {n} rows, {TOP_K} of {EXPERTS} experts, shares of {}{}{}",
        stack.store.name(),
        grouped.share_rows,
        if task.gather { ", gathered" } else { "" },
        if task.middle { ", activated" } else { "" }
    );
    let case = Case { kernel: &kernel, shape: &shape };
    rig.begin(case.kernel)?;
    let inputs = if task.gather { n } else { grouped.pairs };
    let x = normals(&mut rig.rng, inputs * COLS, 1.0);
    let acts = rig.acts(how.forms(), &x, inputs, COLS)?;
    let y = rig.unwritten(grouped.pairs * ROWS)?;
    let activation = Activation::SwigluOai { alpha: 1.702, limit: 7.0 };
    let out = rig.room(grouped.pairs, ROWS / 2)?;
    let middle = Middle { activation, out: &out, intermediate: ROWS / 2 };
    let middle = task.middle.then_some(&middle);
    rig.ops.matmul_experts((&stack.linear, y.view()), &acts, task.gather, middle, &grouped)?;

    let mut choices = routed.choices()?;
    let (_, row_of) = sorted(&choices, TOP_K);
    choices.sort_unstable();
    let x: Vec<f64> = x.iter().map(|x| as_read(how, *x)).collect();
    let expected = |pair: usize, row: usize| -> Expected {
        let (expert, input) = (choices[pair] as usize, if task.gather { row_of[pair] as usize } else { pair });
        let weights = &stack.weights[expert][row * COLS..][..COLS];
        dot(weights, &x[input * COLS..][..COLS], stack.bias[expert * ROWS + row])
    };
    if !task.middle {
        rig.compare(&case, ROWS, &y.read()?, |i| expected(i / ROWS, i % ROWS));
        return Ok(());
    }
    let found = rig.read_acts(&case, &out, grouped.pairs)?;
    rig.compare(&case, ROWS / 2, &found, |i| {
        let (pair, column) = (i / (ROWS / 2), i % (ROWS / 2));
        middle_of(activation, expected(pair, 2 * column), expected(pair, 2 * column + 1))
    });
    Ok(())
}
