//! Mixture of experts: computes for each token the few experts that its router chooses.
//!
//! Tokens are sorted by expert in their prepared form (such as int8), so that the matrices of each chosen expert are
//! read once per chunk. The results of a token's experts are added in the order of choice, so that the sum does not
//! depend on other tokens.

use super::adapters::{Changed, Group};
use super::cpu::{Acts, Form};
use super::forward::{Model, Product, product};
use super::layer::Moe;
use super::moe::select;
use super::observe::{ObserverRef, see_experts};
use super::ops::{AddScaled, Gated, GatedPairs};
use super::weights::{Host, Linear};
use crate::calibration::Site;
use crate::catalogue::LayerInput;
use crate::error::Result;
use crate::model_config::{RouterSoftmax, Selection};
use crate::simd::Kernel;
use std::ops::Range;

/// Consecutive experts are computed together up to this number of rows in total. The values between their two products
/// (4 MB for gpt-oss) then stay in the CPU cache.
const ROWS: usize = 160;

/// Buffers that are reused from call to call, with tokens sorted by expert. `n` is the number of tokens in a chunk.
#[derive(Debug, Default)]
pub struct Experts {
    logits: Vec<f32>,
    /// Scores of the experts of a token.
    scores: Vec<f32>,
    /// Chosen experts with their weights, best first: `(n, top_k)`.
    choices: Vec<(u32, f32)>,
    /// Row of each choice in the order of experts: `(n, top_k)`.
    slots: Vec<u32>,
    /// First row of each expert in that order, and the total number of rows at the end.
    starts: Vec<usize>,
    /// Token of each row: `(n * top_k)`.
    tokens: Vec<u32>,
    /// Inputs sorted by expert: `(n * top_k, hidden)`, or narrower.
    inputs: Acts,
    /// Outputs of the first product for a few experts: `(rows, 2 * intermediate)`, or half of it without gates.
    gate_up: Vec<f32>,
    /// Inputs of the second product for a few experts: `(rows, intermediate)`.
    middle: Acts,
    /// Outputs sorted by expert, as wide as the inputs.
    outputs: Vec<f32>,
}

/// The experts of a layer.
pub(super) struct Mixture<'a> {
    /// The model of the layer.
    pub model: &'a Model,
    /// Index of the layer.
    pub layer: usize,
    /// Weights and sizes of the experts.
    pub op: &'a Moe<Host>,
}

impl Experts {
    /// Writes the output of the mixture to `branch`, whose rows are as wide as those of `x`, the normalized input of
    /// the experts; `router_input` is that of the router.
    ///
    /// # Errors
    /// A weight cannot be read.
    pub(super) fn run(
        &mut self,
        mixture: &Mixture<'_>,
        [x, router_input]: [&Acts; 2],
        groups: &[Group],
        branch: &mut Vec<f32>,
        mut observer: ObserverRef<'_>,
    ) -> Result<()> {
        let Mixture { model, layer, op } = *mixture;
        self.route(mixture, router_input, groups)?;
        let site = Site { layer, part: LayerInput::Experts };
        let row = |i: usize| &x.row(self.tokens[i] as usize)[..x.k()];
        see_experts(observer.as_deref_mut(), site, 0, &self.starts, row);
        let mut needed = forms(model, &op.gate_up);
        if !groups.is_empty() && !needed.contains(&Form::F32) {
            // Factors of adapters are multiplied by f32.
            needed.push(Form::F32);
        }
        self.inputs.gather(&model.cpu, x, &self.tokens, &needed);
        self.outputs.resize(self.tokens.len() * x.k(), 0.0);
        let mut first = 0;
        while first + 1 < self.starts.len() {
            let fits = |until: &usize| self.starts[*until] - self.starts[first] <= ROWS;
            let until = (first + 2..self.starts.len()).take_while(fits).last().unwrap_or(first + 1);
            self.compute(mixture, first..until, groups, observer.as_deref_mut())?;
            first = until;
        }
        self.scatter(model, x, branch);
        Ok(())
    }

    /// Chooses experts and sorts the tokens by expert.
    fn route(&mut self, mixture: &Mixture<'_>, x: &Acts, groups: &[Group]) -> Result<()> {
        let Mixture { model, op, .. } = *mixture;
        let Moe { experts, top_k, softmax, selection, .. } = *op;
        self.logits.resize(x.n() * experts, 0.0);
        let product = product(&op.router, x, &mut self.logits, groups);
        model.multiply(vec![product], model.arithmetic.for_routers(), None)?;
        self.choices.resize(x.n() * top_k, (0, 0.0));
        self.scores.resize(experts, 0.0);
        for (logits, choices) in self.logits.chunks_exact(experts).zip(self.choices.chunks_exact_mut(top_k)) {
            let (selection, bias, scores) = (&selection, op.selection_bias.as_deref(), &mut self.scores[..]);
            model.cpu.level().run(Select { logits, softmax, selection, bias, scores, choices });
            if let Some(factors) = &op.factors {
                choices.iter_mut().for_each(|(expert, weight)| *weight *= factors[*expert as usize]);
            }
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

    /// Computes each of these experts once for all its tokens.
    fn compute(
        &mut self,
        mixture: &Mixture<'_>,
        experts: Range<usize>,
        groups: &[Group],
        observer: ObserverRef<'_>,
    ) -> Result<()> {
        let Mixture { model, layer, op } = *mixture;
        let Moe { intermediate, activation, .. } = *op;
        let starts = &self.starts[experts.start..=experts.end];
        let (first, until) = (starts[0], starts[experts.len()]);
        let width = if activation.is_gated() { 2 * intermediate } else { intermediate };
        self.gate_up.resize((until - first) * width, 0.0);
        let rows = ExpertRows { starts, tokens: &self.tokens, experts: experts.clone(), layer, groups };
        products(model, &op.gate_up[experts.clone()], &self.inputs, &rows, (0, 0), &mut self.gate_up)?;
        self.middle.reset(until - first, intermediate);
        let (out, stride) = self.middle.rows_mut();
        let gate_up = &self.gate_up;
        model.cpu.for_rows(out, stride, |i, out| {
            let (gate_up, out) = (&gate_up[i * width..][..width], &mut out[..intermediate]);
            match activation.is_gated() {
                true => model.cpu.level().run(GatedPairs { activation, gate_up, out }),
                false => model.cpu.level().run(Gated { activation, gate: gate_up, up: gate_up, out }),
            }
        });
        let site = Site { layer, part: LayerInput::ExpertsMiddle };
        see_experts(observer, site, experts.start, starts, |i| &self.middle.row(i - first)[..intermediate]);
        let down = &op.down[experts];
        forms(model, down).into_iter().for_each(|form| model.cpu.prepare(&mut self.middle, form));
        let outer = self.inputs.k();
        let outputs = &mut self.outputs[first * outer..until * outer];
        products(model, down, &self.middle, &rows, (1, first), outputs)
    }

    /// Writes the weighted sum of each token's results, added in the order of choice.
    fn scatter(&self, model: &Model, inputs: &Acts, branch: &mut Vec<f32>) {
        let (n, outer) = (inputs.n(), inputs.k());
        let top_k = self.choices.len() / n;
        branch.resize(n * outer, 0.0);
        model.cpu.for_rows(branch, outer, |token, x| {
            x.fill(0.0);
            for i in token * top_k..(token + 1) * top_k {
                let (row, scale) = (self.slots[i] as usize, self.choices[i].1);
                model.cpu.level().run(AddScaled { x, y: &self.outputs[row * outer..][..outer], scale });
            }
        });
    }
}

/// Rows of some experts, sorted by expert and then by token.
struct ExpertRows<'a> {
    /// First row of each expert, and the end of the last.
    starts: &'a [usize],
    /// Token of each row.
    tokens: &'a [u32],
    experts: Range<usize>,
    layer: usize,
    groups: &'a [Group],
}

impl<'a> ExpertRows<'a> {
    /// Returns the changes of an expert's first or second matrix by the adapters of its rows, whose numbers are counted
    /// from `first`. Tokens with the same adapters follow one another, so their rows do as well.
    fn changed(&self, matrix: usize, expert: usize, rows: &Range<usize>, first: usize) -> Vec<Changed<'a>> {
        let tokens = &self.tokens[rows.clone()];
        let changes = self.groups.iter().flat_map(|group| {
            let before = |token: usize| rows.start - first + tokens.partition_point(|t| (*t as usize) < token);
            let own = before(group.rows.start)..before(group.rows.end);
            let changes = group.set.of_expert(self.layer, matrix, expert, &own);
            changes.into_iter().filter(|changed| !changed.rows.is_empty())
        });
        changes.collect()
    }
}

/// Computes one product per expert that has tokens, all in one parallel region: with its first or second `matrix`. Row
/// `i` of the experts is row `i - first` of `x`; `y` is sorted by expert.
fn products(
    model: &Model,
    experts: &[Linear],
    x: &Acts,
    rows: &ExpertRows<'_>,
    (matrix, first): (usize, usize),
    mut y: &mut [f32],
) -> Result<()> {
    let mut list: Vec<Product<'_>> = Vec::with_capacity(experts.len());
    let own = experts.iter().zip(rows.experts.clone()).zip(rows.starts.windows(2).map(|ends| ends[0]..ends[1]));
    for ((linear, expert), range) in own.filter(|(_, range)| !range.is_empty()) {
        let (own, rest) = y.split_at_mut(range.len() * linear.matrix.rows());
        let changed = rows.changed(matrix, expert, &range, first);
        let tokens = range.start - first..range.end - first;
        list.push(Product { tokens, changed, site: None, ..product(linear, x, own, &[]) });
        y = rest;
    }
    model.multiply(list, model.arithmetic, None)
}

/// Returns the forms in which these products read their inputs.
fn forms(model: &Model, linears: &[Linear]) -> Vec<Form> {
    let mut forms: Vec<Form> = linears.iter().map(|linear| linear.matrix.store().form(model.arithmetic)).collect();
    forms.sort_unstable();
    forms.dedup();
    forms
}

/// [`select`] as a kernel.
struct Select<'a> {
    logits: &'a [f32],
    softmax: RouterSoftmax,
    selection: &'a Selection,
    bias: Option<&'a [f32]>,
    scores: &'a mut [f32],
    choices: &'a mut [(u32, f32)],
}

impl Kernel for Select<'_> {
    #[inline(always)]
    fn run(self) {
        select(self.logits, self.softmax, self.selection, self.bias, self.scores, self.choices);
    }
}
