//! Checks mixtures of experts: the router's product, the choice of experts, their weights, and the order of the pairs
//! of a row and one of its experts.

use super::products::{Bias, Operand};
use super::random::{Store, normals};
use super::rig::{Case, EPS, Expected, Rig, UNWRITTEN};
use crate::dtype::DType;
use crate::error::Result;
use crate::model_config::{ExpertGroups, RouterSoftmax, Selection};
use crate::runtime::cuda::args::Share;
use crate::runtime::cuda::array::{Acts, Array};
use crate::runtime::cuda::ops::{ExpertChoice, Grouped};
use crate::runtime::cuda::scratch::ExpertScratch;
use crate::runtime::cuda::weights::How;
use crate::runtime::moe::select;
use crate::scheme::QuantSpec;

/// Device memory with the results of routing.
pub struct Routed {
    memory: ExpertScratch,
    rows: usize,
    experts: usize,
    top_k: usize,
}

/// Way in which experts are chosen.
pub struct Rule {
    softmax: RouterSoftmax,
    selection: Selection,
    /// Numbers added to the scores for the choice.
    bias: Option<Vec<f32>>,
    /// Factors of the weights.
    factors: Option<Vec<f32>>,
}

impl Rule {
    /// Returns the choice of the largest logits.
    pub fn plain(softmax: RouterSoftmax) -> Rule {
        Rule { softmax, selection: Selection::default(), bias: None, factors: None }
    }

    /// Returns the arguments of launches, with the numbers on the device.
    fn choice<'a>(&self, bias: Option<&'a Array<f32>>, factors: Option<&'a Array<f32>>) -> ExpertChoice<'a> {
        ExpertChoice { softmax: self.softmax, selection: self.selection, bias, factors }
    }
}

impl Operand {
    /// Creates a router with which many rows choose the same expert, and no row chooses the last one.
    pub fn router(rig: &mut Rig<'_>, store: Store, experts: usize, cols: usize) -> Result<Operand> {
        let mut bias = normals(&mut rig.rng, experts, 0.5);
        bias[experts / 2] += 4.0;
        bias[experts - 1] = -200.0;
        if experts > 20 {
            bias[3] = f32::NAN;
        }
        Operand::new(rig, store, [1, experts, cols], Bias::Given(bias))
    }
}

impl Routed {
    /// Routes the rows of `x`.
    pub fn new(rig: &Rig<'_>, router: &Operand, x: &Acts, top_k: usize, rule: &Rule) -> Result<Routed> {
        let (rows, experts) = (x.rows, router.linear.matrix.rows());
        let memory = ExpertScratch::new(rig.context, rows, experts, top_k, 0)?;
        let ExpertScratch { logits, experts_of, weights, slots, inputs, shares, count, .. } = &memory;
        let written = [logits.buffer(), experts_of.buffer(), weights.buffer(), slots.buffer(), inputs.buffer()];
        written.into_iter().chain([shares.buffer(), count.buffer()]).try_for_each(|buffer| buffer.fill(UNWRITTEN))?;
        let routed = Routed { memory, rows, experts, top_k };
        let product = (&router.linear, routed.memory.logits.view());
        let on_device = |numbers: &Option<Vec<f32>>| numbers.as_ref().map(|numbers| rig.array(numbers)).transpose();
        let (bias, factors) = (on_device(&rule.bias)?, on_device(&rule.factors)?);
        let choice = rule.choice(bias.as_ref(), factors.as_ref());
        rig.ops.route(product, x, &routed.grouped(), &choice, None)?;
        rig.context.synchronize()?;
        Ok(routed)
    }

    /// Returns the arguments of launches for these choices.
    pub fn grouped(&self) -> Grouped {
        self.memory.grouped(self.rows, self.experts, self.top_k)
    }

    /// Returns the chosen experts of all rows, row by row.
    pub fn choices(&self) -> Result<Vec<u32>> {
        self.memory.experts_of.read()
    }

    /// Compares everything that follows from the logits with what the CPU computes from them.
    fn compare(&self, rig: &mut Rig<'_>, case: &Case, rule: &Rule) -> Result<()> {
        let logits = self.memory.logits.read()?;
        let mut choices = vec![(0, 0.0); self.rows * self.top_k];
        let mut scores = vec![0.0; self.experts];
        for (logits, choices) in logits.chunks_exact(self.experts).zip(choices.chunks_exact_mut(self.top_k)) {
            select(logits, rule.softmax, &rule.selection, rule.bias.as_deref(), &mut scores, choices);
            let factors = rule.factors.iter();
            factors.for_each(|all| choices.iter_mut().for_each(|(expert, weight)| *weight *= all[*expert as usize]));
        }
        let chosen: Vec<u32> = choices.iter().map(|(expert, _)| *expert).collect();
        rig.same(case, "choice", &self.memory.experts_of.read()?, &chosen);
        let weights = self.memory.weights.read()?;
        rig.compare(case, self.top_k, &weights, |i| {
            let value = f64::from(choices[i].1);
            // The tolerance covers two exponentials and a sum of positive numbers.
            Expected { value, tolerance: 32.0 * EPS * value.abs() + 1e-36 }
        });
        let (slots, rows) = sorted(&chosen, self.top_k);
        rig.same(case, "slot", &self.memory.slots.read()?, &slots);
        rig.same(case, "row of a sorted pair", &self.memory.inputs.read()?, &rows);
        let shares = shares(&chosen, self.experts, self.grouped().share_rows);
        let count = self.memory.count.read()?[0] as usize;
        let plain = |share: &Share| [share.expert, share.first, share.count];
        let found: Vec<[u32; 3]> = self.memory.shares.read()?.iter().take(count).map(plain).collect();
        rig.same(case, "share", &found, &shares);
        Ok(())
    }
}

/// Sorts the pairs of a row and one of its experts by expert; pairs of the same expert keep their order. `choices`
/// holds the expert of each pair. Returns the new index of each pair, and the row of each sorted pair.
pub fn sorted(choices: &[u32], top_k: usize) -> (Vec<u32>, Vec<u32>) {
    let mut order: Vec<usize> = (0..choices.len()).collect();
    order.sort_by_key(|pair| choices[*pair]);
    let mut slots = vec![0; choices.len()];
    order.iter().enumerate().for_each(|(slot, pair)| slots[*pair] = slot as u32);
    (slots, order.iter().map(|pair| (pair / top_k) as u32).collect())
}

/// Cuts the rows of each expert into shares: expert, first, count.
fn shares(choices: &[u32], experts: usize, share_rows: usize) -> Vec<[u32; 3]> {
    let mut counts = vec![0; experts];
    choices.iter().for_each(|choice| counts[*choice as usize] += 1);
    let mut shares = Vec::new();
    let mut first = 0;
    for (expert, mut left) in counts.into_iter().enumerate() {
        while left > 0 {
            let count = share_rows.min(left);
            shares.push([expert as u32, first as u32, count as u32]);
            (first, left) = (first + count, left - count);
        }
    }
    shares
}

/// Checks routing.
pub fn check(rig: &mut Rig<'_>) -> Result<()> {
    let [f32, f16, bf16] = [DType::F32, DType::F16, DType::BF16].map(Store::Plain);
    let shapes = [
        (f32, 4, 48, 2),
        (f16, 8, 54, 1),
        (bf16, 8, 2880, 8),
        (bf16, 32, 2880, 4),
        (Store::Tiles(QuantSpec::Q4_0), 128, 80, 8),
        (bf16, 1000, 45, 32),
        (f32, 1024, 32, 3),
    ];
    let rows: &[usize] = if rig.quick { &[1, 33] } else { &[1, 2, 8, 9, 33, 130, 509] };
    for (i, (store, experts, cols, top_k)) in shapes.into_iter().enumerate() {
        let router = Operand::router(rig, store, experts, cols)?;
        for (j, &n) in rows.iter().enumerate().filter(|(_, n)| **n * cols <= 300_000) {
            let softmax = [RouterSoftmax::Chosen, RouterSoftmax::All][(i + j) % 2];
            let kernel = if n <= 8 && matches!(store, Store::Plain(_)) { "router" } else { "route and group" };
            let shape = format!("{} of {experts} x {cols}, {n} rows, {top_k} experts each, {softmax:?}", store.name());
            let case = rig.begin(kernel, shape)?;
            choose(rig, &case, &router, n, top_k, &Rule::plain(softmax))?;
        }
    }
    by_scores(rig)
}

/// Checks the choice by scores.
fn by_scores(rig: &mut Rig<'_>) -> Result<()> {
    let plain = Selection::default();
    let groups = |count, chosen, best| Some(ExpertGroups { count, chosen, best });
    let [all, chosen] = [RouterSoftmax::All, RouterSoftmax::Chosen];
    let cases = [
        (8, 3, chosen, Selection { sigmoid: true, bias: true, scale: 2.5, ..plain }),
        (8, 3, chosen, Selection { sigmoid: true, bias: true, groups: groups(4, 2, 2), ..plain }),
        (256, 8, chosen, Selection { sigmoid: true, bias: true, groups: groups(8, 4, 2), scale: 2.5, ..plain }),
        (64, 6, all, Selection { groups: groups(8, 3, 1), scale: 16.0, ..plain }),
        (160, 6, all, Selection { scale: 0.5, factors: true, ..plain }),
        (128, 8, chosen, Selection { factors: true, ..plain }),
        (256, 16, chosen, Selection { bias: true, groups: groups(32, 5, 1), ..plain }),
    ];
    for (experts, top_k, softmax, selection) in cases {
        let bias = normals(&mut rig.rng, experts, 0.5);
        let router = Operand::new(rig, Store::Plain(DType::F32), [1, experts, 48], Bias::Given(bias))?;
        let numbers = |rig: &mut Rig<'_>, scale| Some(normals(&mut rig.rng, experts, scale));
        let rule = Rule {
            softmax,
            selection,
            bias: if selection.bias { numbers(rig, 0.3) } else { None },
            factors: if selection.factors { numbers(rig, 1.0) } else { None },
        };
        for n in [2, 33] {
            let shape = format!("{experts} experts, {n} rows, {top_k} experts each, {softmax:?}, {selection:?}");
            let case = rig.begin(if n <= 8 { "router, by scores" } else { "route, by scores" }, shape)?;
            choose(rig, &case, &router, n, top_k, &rule)?;
        }
    }
    Ok(())
}

fn choose(rig: &mut Rig<'_>, case: &Case, router: &Operand, n: usize, top_k: usize, rule: &Rule) -> Result<()> {
    let (experts, cols) = (router.linear.matrix.rows(), router.linear.matrix.cols());
    let mut x = normals(&mut rig.rng, n * cols, 1.0);
    if n > 2 {
        // In one row the logits are the biases of the experts, and one row is NaN.
        x[cols..2 * cols].fill(0.0);
        x[2 * cols] = f32::NAN;
    }
    let acts = rig.acts(How::Float.forms(), &x, cols)?;
    let routed = Routed::new(rig, router, &acts, top_k, rule)?;
    let x: Vec<f64> = x.into_iter().map(f64::from).collect();
    let found = routed.memory.logits.read()?;
    rig.compare(case, experts, &found, |i| router.dot(i % experts, &x[i / experts * cols..][..cols]));
    routed.compare(rig, case, rule)
}
