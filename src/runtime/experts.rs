//! A mixture of experts: each token goes to the few experts its router chooses.
//!
//! Tokens are sorted by expert, so that each chosen expert reads its matrices once per chunk; a token adds its experts'
//! results in the order of choice, so that its company does not show in the sum.

use super::cpu::{Acts, Job};
use super::forward::{Model, job};
use super::moe::route;
use super::ops::{AddScaled, GatedPairs};
use super::weights::Linear;
use crate::model_config::{Mlp, RouterSoftmax};
use crate::simd::Kernel;

/// Memory that is reused from call to call: tokens sorted by expert. `n` is the number of tokens in a chunk.
#[derive(Debug, Default)]
pub struct Experts {
    logits: Vec<f32>,
    /// `(n, top_k)`: expert and weight, best first.
    choices: Vec<(u32, f32)>,
    /// `(n, top_k)`: row of the expert's batch.
    slots: Vec<u32>,
    /// First row of each expert in the sorted order, and the end.
    starts: Vec<usize>,
    /// Per expert: its tokens, `(count, hidden)`.
    inputs: Vec<Acts>,
    /// `(n * top_k, 2 * intermediate)`, sorted by expert.
    gate_up: Vec<f32>,
    /// Per expert: `(count, intermediate)`.
    middles: Vec<Acts>,
    /// `(n * top_k, hidden)`, sorted by expert.
    outputs: Vec<f32>,
}

impl Experts {
    /// Bytes of the buffers that grow with the chunk.
    pub fn bytes(&self) -> usize {
        let floats = [&self.logits, &self.gate_up, &self.outputs];
        let acts = self.inputs.iter().chain(&self.middles);
        4 * floats.map(|v| v.capacity()).iter().sum::<usize>() + acts.map(|a| 4 * a.n() * a.k()).sum::<usize>()
    }

    /// Writes what the mixture adds to the residual stream: `(n, hidden)`. `x` is the normed input.
    pub fn run(&mut self, model: &Model, router: &Linear, mlp: [&[Linear]; 2], x: &Acts, branch: &mut Vec<f32>) {
        self.route(model, router, x);
        self.gather(model, x);
        self.compute(model, mlp);
        self.scatter(model, x.n(), branch);
    }

    /// Chooses experts and numbers the tokens of each.
    fn route(&mut self, model: &Model, router: &Linear, x: &Acts) {
        let Mlp::Moe { experts, top_k, router_softmax: softmax, .. } = model.config.mlp else {
            unreachable!("called for experts only")
        };
        self.logits.resize(x.n() * experts, 0.0);
        model.cpu.matmul(&mut [job(router, x, &mut self.logits)], model.arithmetic.for_routers());
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
    }

    /// Copies each token to the experts it goes to.
    fn gather(&mut self, model: &Model, x: &Acts) {
        let (experts, top_k) = (self.starts.len() - 1, self.choices.len() / x.n());
        self.inputs.resize_with(experts, Acts::default);
        for (input, starts) in self.inputs.iter_mut().zip(self.starts.windows(2)) {
            input.reset(starts[1] - starts[0], x.k());
        }
        for (i, ((expert, _), slot)) in self.choices.iter().zip(&self.slots).enumerate() {
            let token = &x.row(i / top_k)[..x.k()];
            self.inputs[*expert as usize].row_mut(*slot as usize).copy_from_slice(token);
        }
        self.inputs.iter_mut().for_each(|input| model.prepare(input));
    }

    /// Runs every chosen expert once over its tokens.
    fn compute(&mut self, model: &Model, [gate_up, down]: [&[Linear]; 2]) {
        let Mlp::Moe { intermediate, activation, .. } = model.config.mlp else {
            unreachable!("called for experts only")
        };
        let rows = self.choices.len();
        self.gate_up.resize(rows * 2 * intermediate, 0.0);
        products(model, gate_up, &self.inputs, &mut self.gate_up);
        self.middles.resize_with(self.inputs.len(), Acts::default);
        for (expert, middle) in self.middles.iter_mut().enumerate() {
            middle.reset(self.inputs[expert].n(), intermediate);
            let (out, stride) = middle.rows_mut();
            let gate_up = &self.gate_up[self.starts[expert] * 2 * intermediate..];
            model.cpu.for_rows(out, stride, |i, out| {
                let gate_up = &gate_up[i * 2 * intermediate..][..2 * intermediate];
                model.cpu.level().run(GatedPairs { activation, gate_up, out: &mut out[..intermediate] });
            });
            model.prepare(middle);
        }
        self.outputs.resize(rows * model.config.hidden, 0.0);
        products(model, down, &self.middles, &mut self.outputs);
    }

    /// Sums each token's weighted results in the order of choice.
    fn scatter(&self, model: &Model, n: usize, branch: &mut Vec<f32>) {
        let (hidden, top_k) = (model.config.hidden, self.choices.len() / n);
        branch.resize(n * hidden, 0.0);
        model.cpu.for_rows(branch, hidden, |token, x| {
            x.fill(0.0);
            for i in token * top_k..(token + 1) * top_k {
                let (expert, scale) = self.choices[i];
                let row = self.starts[expert as usize] + self.slots[i] as usize;
                model.cpu.level().run(AddScaled { x, y: &self.outputs[row * hidden..][..hidden], scale });
            }
        });
    }
}

/// One product per expert that has tokens, all in one parallel region; `y` is sorted by expert.
fn products(model: &Model, experts: &[Linear], inputs: &[Acts], mut y: &mut [f32]) {
    let mut jobs: Vec<Job<'_>> = Vec::with_capacity(experts.len());
    for (linear, x) in experts.iter().zip(inputs).filter(|(_, x)| x.n() > 0) {
        let (own, rest) = y.split_at_mut(x.n() * linear.matrix.rows);
        jobs.push(job(linear, x, own));
        y = rest;
    }
    model.cpu.matmul(&mut jobs, model.arithmetic);
}

/// [`route`] as a kernel.
struct Route<'a> {
    logits: &'a [f32],
    softmax: RouterSoftmax,
    choices: &'a mut [(u32, f32)],
}

impl Kernel for Route<'_> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        route(self.logits, self.softmax, self.choices);
    }
}
