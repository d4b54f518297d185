//! Forward pass through the recurrent mixers of a part.

use super::array::{Array, View};
use super::input::{Section, StepPlan};
use super::ops::Branch;
use super::part::CudaPart;
use super::recurrent::{GatedNorm, Kernel, Linear, LinearHeads};
use super::weights::{DeviceLinear, OnDevice};
use crate::error::Result;
use crate::runtime::layer::{DeltaNet, Mamba, ShortConv};

/// Sizes and weights of linear attention behind its projections.
struct Mixing<'a> {
    heads: LinearHeads,
    kernel: Kernel,
    /// First channels of queries, keys and values in the convolution.
    channels: [usize; 3],
    /// Factors of the logarithms of the decays, and numbers that are added before the softplus.
    decay: [View<f32>; 2],
    /// Whether the rule is the delta rule, with rates.
    is_delta: bool,
    skip: Option<View<f32>>,
    norm: View<f32>,
    output: &'a DeviceLinear,
}

impl CudaPart {
    /// Computes a gated short convolution.
    pub(super) fn short_conv(&self, plan: &StepPlan, index: usize, op: &ShortConv<OnDevice>) -> Result<Branch<'_>> {
        let (s, product) = (&self.scratch, (&op.input, self.scratch.q.view()));
        self.ops.matmul(product.0, &s.normed, 0, product.1, plan.rows)?;
        self.adapt(plan, &[product], &s.normed)?;
        let channels = op.output.matrix.cols();
        let bias = op.bias.as_ref().map(Array::view);
        let kernel = Kernel { factors: op.kernel.view(), bias, channels, width: op.width };
        let (runs, place) = (self.input.view(plan, Section::States), self.pool.states().place(index));
        self.ops.short_conv(product.1, kernel, runs, place, s.attended.of(channels))?;
        self.project(plan, &op.output)
    }

    /// Computes a gated delta net.
    pub(super) fn delta_net(&self, plan: &StepPlan, index: usize, op: &DeltaNet<OnDevice>) -> Result<Branch<'_>> {
        let net = &op.sizes;
        let kernel = Kernel { factors: op.kernel.view(), bias: None, channels: net.channels(), width: net.width };
        let mixing = Mixing {
            heads: LinearHeads {
                key_heads: net.key_heads,
                per_key: net.per_key(),
                key_dim: net.key_dim,
                value_dim: net.value_dim,
                tiled: net.tiled,
            },
            kernel,
            channels: [0, net.keys(), 2 * net.keys()],
            decay: [op.decay.view(), op.decay_bias.view()],
            is_delta: true,
            skip: None,
            norm: op.norm.view(),
            output: &op.output,
        };
        self.project_inputs(plan, &[&op.q, &op.k, &op.v, &op.z, &op.a, &op.b])?;
        self.mix(plan, index, &mixing)
    }

    /// Computes Mamba-2.
    pub(super) fn mamba(&self, plan: &StepPlan, index: usize, op: &Mamba<OnDevice>) -> Result<Branch<'_>> {
        let mamba = &op.sizes;
        let bias = op.bias.as_ref().map(Array::view);
        let kernel = Kernel { factors: op.kernel.view(), bias, channels: mamba.channels(), width: mamba.width };
        let mixing = Mixing {
            heads: LinearHeads {
                key_heads: mamba.groups,
                per_key: mamba.heads / mamba.groups,
                key_dim: mamba.state,
                value_dim: mamba.head_dim,
                tiled: false,
            },
            kernel,
            channels: [mamba.values() + mamba.keys(), mamba.values(), 0],
            decay: [op.decay.view(), op.decay_bias.view()],
            is_delta: false,
            skip: Some(op.skip.view()),
            norm: op.norm.view(),
            output: &op.output,
        };
        self.project_inputs(plan, &[&op.c, &op.b, &op.x, &op.z, &op.dt])?;
        self.mix(plan, index, &mixing)
    }

    /// Projects all rows to queries, keys, values, gates, decays, and perhaps rates.
    fn project_inputs(&self, plan: &StepPlan, linears: &[&DeviceLinear]) -> Result<()> {
        let s = &self.scratch;
        let [decays, rates] = s.decays.each_ref().map(Array::view);
        let outputs = [s.q.view(), s.k.view(), s.v.view(), s.output_gate.view(), decays, rates];
        for (linear, y) in linears.iter().zip(outputs) {
            self.ops.matmul(linear, &s.normed, 0, y, plan.rows)?;
            self.adapt(plan, &[(linear, y)], &s.normed)?;
        }
        Ok(())
    }

    /// Computes the heads from their projections, their norm, and the output projection.
    fn mix(&self, plan: &StepPlan, index: usize, mixing: &Mixing<'_>) -> Result<Branch<'_>> {
        let (s, heads, n) = (&self.scratch, mixing.heads, plan.rows);
        let (runs, place) = (self.input.view(plan, Section::States), self.pool.states().place(index));
        let (keys, of_key) = (heads.key_heads * heads.key_dim, heads.per_key * heads.value_dim);
        let values = heads.key_heads * of_key;
        let qkv = [s.q.view(), s.k.view(), s.v.view()];
        for ((x, first), columns) in qkv.into_iter().zip(mixing.channels).zip([keys, keys, values]) {
            self.ops.convolve(x, mixing.kernel, [first, columns], runs, place)?;
        }
        let [decays, rates] = s.decays.each_ref().map(Array::view);
        let rates = mixing.is_delta.then_some(rates);
        let (decay, skip, out) = (mixing.decay, mixing.skip, s.mixed.view());
        self.ops.linear_attention(&Linear { heads, qkv, decays, rates, decay, skip, out }, runs, place)?;
        self.ops.gated_norm(&GatedNorm {
            x: out,
            gate: s.output_gate.view(),
            weight: mixing.norm,
            out: s.attended.of(values),
            n,
            group: if mixing.is_delta { heads.value_dim } else { of_key },
            gate_first: !mixing.is_delta,
            eps: self.config.norm_eps,
        })?;
        self.project(plan, mixing.output)
    }
}
