//! Feed-forward parts of layers: dense MLPs, experts with the MLP beside them, and further inputs of layers.

use super::{Model, Product, Walk, product};
use crate::error::Result;
use crate::model_config::Activation;
use crate::runtime::cpu::Acts;
use crate::runtime::experts::Mixture;
use crate::runtime::layer::{Mlp, Moe, TokenInput};
use crate::runtime::ops::{Gated, SigmoidGate, norm_heads};
use crate::runtime::weights::{Host, JoinWeights, Linear, PerLayerWeights};
use crate::simd::Kernel;

/// Destination of the output of an MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MlpOutput {
    /// The output is written to `branch`.
    Written,
    /// The output is added to that of the experts, which is in `branch`; if it is gated, the sigmoids of `shared_gate`
    /// are its factors.
    Added { is_gated: bool },
}

/// Buffers of an MLP and of the further input of a layer.
#[derive(Debug, Default)]
pub(super) struct GatedScratch {
    /// Result of the gate projection: `(n, intermediate)`.
    gate: Vec<f32>,
    /// Result of the up projection: `(n, intermediate)`.
    up: Vec<f32>,
    /// Output of the activation function: `(n, intermediate)`.
    middle: Acts,
}

impl Model {
    /// Computes the experts of a layer and the MLP beside them, if there is one, and writes the sum of their outputs to
    /// `branch`.
    pub(super) fn mixture(&self, index: usize, op: &Moe<Host>, w: &mut Walk<'_>) -> Result<()> {
        let mixture = Mixture { model: self, layer: index, op };
        let Some(norms) = &op.norms else {
            match &op.latent {
                Some([down, up]) => self.latent_experts(&mixture, down, up, w)?,
                None => {
                    let (s, observer) = (&mut *w.scratch, w.step.observer.as_deref_mut());
                    s.experts.run(&mixture, [&s.normed; 2], &s.groups, &mut s.branch, observer)?;
                }
            }
            let s = &mut *w.scratch;
            if let Some(gate) = &op.shared_gate {
                s.shared_gate.resize(s.normed.n(), 0.0);
                let gate = product(gate, &s.normed, &mut s.shared_gate, &s.groups);
                self.compute(vec![gate], &mut w.step)?;
            }
            let added = MlpOutput::Added { is_gated: op.shared_gate.is_some() };
            return op.shared.as_ref().map_or(Ok(()), |mlp| self.mlp(mlp, added, w));
        };
        if let Some(mlp) = &op.shared {
            self.mlp(mlp, MlpOutput::Written, w)?;
        }
        let (s, observer) = (&mut *w.scratch, w.step.observer.as_deref_mut());
        self.norm_in_place(&mut s.branch, &norms.mlp_output);
        self.norm_rows(w.step.x, &norms.expert_input, &mut s.normed);
        self.norm_rows(w.step.x, &norms.router_input, &mut s.kept);
        s.experts.run(&mixture, [&s.normed, &s.kept], &s.groups, &mut s.beside, observer)?;
        self.norm_in_place(&mut s.beside, &norms.expert_output);
        self.add_rows(&mut s.branch, &s.beside);
        Ok(())
    }

    /// Computes experts that read and write narrower vectors, and writes the projection of their output to `branch`.
    fn latent_experts(&self, mixture: &Mixture<'_>, down: &Linear, up: &Linear, w: &mut Walk<'_>) -> Result<()> {
        let s = &mut *w.scratch;
        let (n, width) = (s.normed.n(), down.matrix.rows());
        s.beside.resize(n * width, 0.0);
        self.compute(vec![product(down, &s.normed, &mut s.beside, &s.groups)], &mut w.step)?;
        self.copy_rows_of(&s.beside, width, &mut s.kept);
        let observer = w.step.observer.as_deref_mut();
        s.experts.run(mixture, [&s.kept, &s.normed], &s.groups, &mut s.beside, observer)?;
        self.copy_rows_of(&s.beside, width, &mut s.kept);
        s.branch.resize(n * self.config.hidden, 0.0);
        self.compute(vec![product(up, &s.kept, &mut s.branch, &s.groups)], &mut w.step)
    }

    /// Adds what the token alone says to a layer.
    pub(super) fn token_input(&self, index: usize, op: &TokenInput<Host>, w: &mut Walk<'_>) -> Result<()> {
        let s = &mut *w.scratch;
        let (n, width) = (s.normed.n(), op.gate.matrix.rows());
        s.gated.gate.resize(n * width, 0.0);
        let gate = product(&op.gate, &s.normed, &mut s.gated.gate, &s.groups);
        self.compute(vec![gate], &mut w.step)?;
        s.gated.middle.reset(n, width);
        let (out, stride) = s.gated.middle.rows_mut();
        let (gate, further, all) = (&s.gated.gate, &s.further, self.config.n_layers * width);
        self.cpu.for_rows(out, stride, |i, out| {
            let (gate, up) = (&gate[i * width..][..width], &further[i * all + index * width..][..width]);
            self.cpu.level().run(Gated { activation: Activation::GeluTanh, gate, up, out: &mut out[..width] });
        });
        self.prepare(&mut s.gated.middle);
        s.branch.resize(n * self.config.hidden, 0.0);
        let projection = product(&op.projection, &s.gated.middle, &mut s.branch, &s.groups);
        self.compute(vec![projection], &mut w.step)
    }

    /// Computes the further inputs of all layers from the embeddings of the step.
    pub(super) fn set_further(&self, weights: &PerLayerWeights, w: &mut Walk<'_>) -> Result<()> {
        let (s, hidden) = (&mut *w.scratch, self.config.hidden);
        self.copy_rows(w.step.x, &mut s.normed);
        s.further.resize(w.step.further.len(), 0.0);
        let changed = s.groups.iter().flat_map(|group| group.set.of_further(&group.rows)).collect();
        let projection = Product { changed, ..product(&weights.projection, &s.normed, &mut s.further, &[]) };
        self.compute(vec![projection], &mut w.step)?;
        let (all, scale, eps) =
            (weights.projection.matrix.rows(), (hidden as f32).sqrt().recip(), self.config.norm_eps);
        self.cpu.for_rows(&mut s.further, all, |i, further| {
            let embedded = &w.step.further[i * all..][..all];
            self.cpu.level().run(Further { further, embedded, norm: &weights.norm, scale, eps });
        });
        Ok(())
    }

    /// Replaces the residual stream, which holds embeddings, by the input of a layer of multi-token prediction: the
    /// projection of their norm and of the norm of what the model computed for the tokens before.
    pub(super) fn join(&self, weights: &JoinWeights, w: &mut Walk<'_>) -> Result<()> {
        let (s, hidden) = (&mut *w.scratch, self.config.hidden);
        s.normed.reset(w.step.x.len() / hidden, 2 * hidden);
        let (out, stride) = s.normed.rows_mut();
        let (embedded, previous) = (&*w.step.x, w.step.previous);
        self.cpu.for_rows(out, stride, |i, out| {
            let row = i * hidden..(i + 1) * hidden;
            let (first, second) = out[..2 * hidden].split_at_mut(hidden);
            self.norm(&embedded[row.clone()], &weights.embedding_norm, first);
            self.norm(&previous[row], &weights.hidden_norm, second);
        });
        self.prepare(&mut s.normed);
        let projection = product(&weights.projection, &s.normed, w.step.x, &[]);
        let products = vec![projection];
        self.multiply(products, self.arithmetic, None)
    }

    /// Computes an MLP and writes its output to `branch`, or adds it.
    pub(super) fn mlp(&self, op: &Mlp<Host>, output: MlpOutput, w: &mut Walk<'_>) -> Result<()> {
        let (s, width) = (&mut *w.scratch, op.intermediate);
        let n = s.normed.n();
        s.gated.up.resize(n * width, 0.0);
        let mut products = Vec::with_capacity(2);
        if let Some(gate) = &op.gate {
            s.gated.gate.resize(n * width, 0.0);
            products.push(product(gate, &s.normed, &mut s.gated.gate, &s.groups));
        }
        products.push(product(&op.up, &s.normed, &mut s.gated.up, &s.groups));
        self.compute(products, &mut w.step)?;
        s.gated.middle.reset(n, width);
        let (out, stride) = s.gated.middle.rows_mut();
        let (activation, up) = (op.activation, &s.gated.up);
        let gate = if op.gate.is_some() { &s.gated.gate } else { up };
        self.cpu.for_rows(out, stride, |i, out| {
            let row = i * width..(i + 1) * width;
            let out = &mut out[..width];
            self.cpu.level().run(Gated { activation, gate: &gate[row.clone()], up: &up[row], out });
        });
        self.prepare(&mut s.gated.middle);
        let out = if output == MlpOutput::Written { &mut s.branch } else { &mut s.beside };
        out.resize(n * self.config.hidden, 0.0);
        let product = product(&op.down, &s.gated.middle, out, &s.groups);
        self.compute(vec![product], &mut w.step)?;
        if let MlpOutput::Added { is_gated } = output {
            if is_gated {
                self.cpu.for_rows(&mut s.beside, self.config.hidden, |i, x| {
                    self.cpu.level().run(SigmoidGate { x, gate: &s.shared_gate[i..=i] });
                });
            }
            self.add_rows(&mut s.branch, &s.beside);
        }
        Ok(())
    }
}

/// Further inputs of the layers for one token: the mean, times the square root of 2, of the normalized projection and
/// the embedding.
struct Further<'a> {
    /// The projection, which is replaced: `(layers * width)`.
    further: &'a mut [f32],
    embedded: &'a [f32],
    /// Factors of the norm of each layer's projection: `(width)`.
    norm: &'a [f32],
    /// Factor of the projection.
    scale: f32,
    eps: f32,
}

impl Kernel for Further<'_> {
    #[inline(always)]
    fn run(self) {
        self.further.iter_mut().for_each(|x| *x *= self.scale);
        norm_heads(self.further, self.norm, self.eps);
        for (x, embedded) in self.further.iter_mut().zip(self.embedded) {
            *x = (*x + embedded) * std::f32::consts::FRAC_1_SQRT_2;
        }
    }
}
