//! A mixture of experts: each token goes to the few experts its router chooses.
//!
//! Tokens are sorted by expert, in the rounded form that they have already, so that each chosen expert reads its
//! matrices once per chunk; a token adds its experts' results in the order of choice, so that the sum does not depend
//! on other tokens.

use super::cpu::{Acts, Form};
use super::forward::{Model, Product, product};
use super::layer::Moe;
use super::moe::route;
use super::observe::{ObserverRef, see_experts};
use super::ops::{AddScaled, GatedPairs};
use super::weights::{Host, Linear};
use crate::calibration::{Part, Site};
use crate::error::Result;
use crate::model_config::RouterSoftmax;
use crate::simd::Kernel;
use std::ops::Range;

/// Experts are computed together as long as they have no more rows: what lies between their two products (4 MB of those
/// of gpt-oss) then comes from a cache.
const ROWS: usize = 160;

/// Memory that is reused from call to call: tokens sorted by expert. `n` is the number of tokens in a chunk.
#[derive(Debug, Default)]
pub struct Experts {
    logits: Vec<f32>,
    /// `(n, top_k)`: expert and weight, best first.
    choices: Vec<(u32, f32)>,
    /// `(n, top_k)`: row in the order of experts.
    slots: Vec<u32>,
    /// First row of each expert in that order, and the end.
    starts: Vec<usize>,
    /// `(n * top_k)`: the token of each row.
    tokens: Vec<u32>,
    /// `(n * top_k, hidden)`, sorted by expert.
    inputs: Acts,
    /// `(rows, 2 * intermediate)` of a few experts.
    gate_up: Vec<f32>,
    /// `(rows, intermediate)` of a few experts.
    middle: Acts,
    /// `(n * top_k, hidden)`, sorted by expert.
    outputs: Vec<f32>,
}

/// The experts of a layer.
pub(super) struct Mixture<'a> {
    /// The model they belong to.
    pub model: &'a Model,
    /// The layer.
    pub layer: usize,
    /// Their weights and sizes.
    pub op: &'a Moe<Host>,
}

impl Experts {
    /// Writes the output of the mixture, `(n, hidden)`, to `branch`. `x` is the normed input.
    ///
    /// # Errors
    /// A weight cannot be read.
    pub(super) fn run(
        &mut self,
        mixture: &Mixture<'_>,
        x: &Acts,
        branch: &mut Vec<f32>,
        mut observer: ObserverRef<'_>,
    ) -> Result<()> {
        let Mixture { model, layer, op } = *mixture;
        self.route(model, op, x)?;
        let site = Site { layer, part: Part::Experts };
        let row = |i: usize| &x.row(self.tokens[i] as usize)[..x.k()];
        see_experts(observer.as_deref_mut(), site, 0, &self.starts, row);
        self.inputs.gather(&model.cpu, x, &self.tokens, &forms(model, &op.gate_up));
        self.outputs.resize(self.tokens.len() * model.config.hidden, 0.0);
        let mut first = 0;
        while first + 1 < self.starts.len() {
            let fits = |until: &usize| self.starts[*until] - self.starts[first] <= ROWS;
            let until = (first + 2..self.starts.len()).take_while(fits).last().unwrap_or(first + 1);
            self.compute(mixture, first..until, observer.as_deref_mut())?;
            first = until;
        }
        self.scatter(model, x.n(), branch);
        Ok(())
    }

    /// Chooses experts and numbers the tokens of each.
    fn route(&mut self, model: &Model, op: &Moe<Host>, x: &Acts) -> Result<()> {
        let Moe { experts, top_k, softmax, .. } = *op;
        self.logits.resize(x.n() * experts, 0.0);
        model.multiply(vec![product(&op.router, x, &mut self.logits)], model.arithmetic.for_routers())?;
        self.choices.resize(x.n() * top_k, (0, 0.0));
        for (logits, choices) in self.logits.chunks_exact(experts).zip(self.choices.chunks_exact_mut(top_k)) {
            model.cpu.level().run(Route { logits, softmax, choices });
        }
        self.starts.clear();
        self.starts.resize(experts + 1, 0);
        self.slots.clear();
        for (expert, _) in &self.choices {
            let count = &mut self.starts[*expert as usize + 1];
            self.slots.push(*count as u32);
            *count += 1;
        }
        for expert in 0..experts {
            self.starts[expert + 1] += self.starts[expert];
        }
        self.tokens.resize(self.choices.len(), 0);
        for (i, ((expert, _), slot)) in self.choices.iter().zip(&mut self.slots).enumerate() {
            *slot += self.starts[*expert as usize] as u32;
            self.tokens[*slot as usize] = (i / top_k) as u32;
        }
        Ok(())
    }

    /// Runs each of these experts once over its tokens.
    fn compute(&mut self, mixture: &Mixture<'_>, experts: Range<usize>, observer: ObserverRef<'_>) -> Result<()> {
        let Mixture { model, layer, op } = *mixture;
        let Moe { intermediate, activation, .. } = *op;
        let starts = &self.starts[experts.start..=experts.end];
        let (first, until) = (starts[0], starts[experts.len()]);
        self.gate_up.resize((until - first) * 2 * intermediate, 0.0);
        products(model, &op.gate_up[experts.clone()], &self.inputs, starts, 0, &mut self.gate_up)?;
        self.middle.reset(until - first, intermediate);
        let (out, stride) = self.middle.rows_mut();
        let gate_up = &self.gate_up;
        model.cpu.for_rows(out, stride, |i, out| {
            let gate_up = &gate_up[i * 2 * intermediate..][..2 * intermediate];
            model.cpu.level().run(GatedPairs { activation, gate_up, out: &mut out[..intermediate] });
        });
        let site = Site { layer, part: Part::ExpertsMiddle };
        see_experts(observer, site, experts.start, starts, |i| &self.middle.row(i - first)[..intermediate]);
        let down = &op.down[experts];
        forms(model, down).into_iter().for_each(|form| model.cpu.prepare(&mut self.middle, form));
        let outputs = &mut self.outputs[first * model.config.hidden..until * model.config.hidden];
        products(model, down, &self.middle, starts, first, outputs)
    }

    /// Sums each token's weighted results in the order of choice.
    fn scatter(&self, model: &Model, n: usize, branch: &mut Vec<f32>) {
        let (hidden, top_k) = (model.config.hidden, self.choices.len() / n);
        branch.resize(n * hidden, 0.0);
        model.cpu.for_rows(branch, hidden, |token, x| {
            x.fill(0.0);
            for i in token * top_k..(token + 1) * top_k {
                let (row, scale) = (self.slots[i] as usize, self.choices[i].1);
                model.cpu.level().run(AddScaled { x, y: &self.outputs[row * hidden..][..hidden], scale });
            }
        });
    }
}

/// One product per expert that has tokens, all in one parallel region; `y` is sorted by expert. Rows `starts[i] -
/// first` to `starts[i + 1] - first` of `x` are for the `i`-th.
fn products(
    model: &Model,
    experts: &[Linear],
    x: &Acts,
    starts: &[usize],
    first: usize,
    mut y: &mut [f32],
) -> Result<()> {
    let mut list: Vec<Product<'_>> = Vec::with_capacity(experts.len());
    for (linear, rows) in experts.iter().zip(starts.windows(2)).filter(|(_, rows)| rows[0] < rows[1]) {
        let (own, rest) = y.split_at_mut((rows[1] - rows[0]) * linear.matrix.rows());
        list.push(Product { tokens: rows[0] - first..rows[1] - first, ..product(linear, x, own) });
        y = rest;
    }
    model.multiply(list, model.arithmetic)
}

/// The forms in which these products read their inputs.
fn forms(model: &Model, linears: &[Linear]) -> Vec<Form> {
    let mut forms: Vec<Form> = linears.iter().map(|linear| linear.matrix.store().form(model.arithmetic)).collect();
    forms.sort_unstable();
    forms.dedup();
    forms
}

/// [`route`] as a kernel.
struct Route<'a> {
    logits: &'a [f32],
    softmax: RouterSoftmax,
    choices: &'a mut [(u32, f32)],
}

impl Kernel for Route<'_> {
    #[inline(always)]
    fn run(self) {
        route(self.logits, self.softmax, self.choices);
    }
}
