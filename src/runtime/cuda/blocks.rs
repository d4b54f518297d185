//! Forward pass through the layers of a part, block by block.

use super::adapters::AdaptedProduct;
use super::args;
use super::array::{Acts, Array, View};
use super::attend::Attend;
use super::heads::{LatentRope, Rope, TokenInputs};
use super::input::{ANGLES, Section, StepPlan, TILES};
use super::low_rank::{LowRank, Rows};
use super::multiply::{Middle, Product};
use super::ops::{self, Branch, ExpertChoice, Norm};
use super::part::CudaPart;
use super::scratch::Inputs;
use super::weights::{DeviceLinear, OnDevice};
use crate::error::Result;
use crate::model_config::{Activation, QkNorm};
use crate::runtime::kv::{KvType, PAGE};
use crate::runtime::layer::{
    Attention, AttentionShape, BlockInput, LatentAttention, MixtureNorms, Mlp, Moe, Operation, TokenInput,
};
use std::f32::consts::LOG2_E;

impl CudaPart {
    /// Starts the work of all layers of this part. The residual stream is updated in the memory of the input. If this
    /// part has the output matrix, the wanted rows after the final norm are written to `normed`.
    pub(super) fn walk(&self, plan: &StepPlan) -> Result<()> {
        if let Some(inputs) = &self.inputs {
            self.set_further(plan, inputs)?;
        }
        // The output of a block is added to the residual stream by the norm before the next block.
        let mut branch: Option<Branch<'_>> = None;
        for (index, layer) in self.weights.iter().enumerate() {
            for (number, block) in layer.blocks.iter().enumerate() {
                self.enter(plan, branch, &block.input)?;
                let output = match &block.operation {
                    Operation::Attention(op) => self.attention(plan, index, op)?,
                    Operation::Latent(op) => self.latent_attention(plan, index, op)?,
                    Operation::ShortConv(op) => self.short_conv(plan, index, op)?,
                    Operation::DeltaNet(op) => self.delta_net(plan, index, op)?,
                    Operation::Mamba(op) => self.mamba(plan, index, op)?,
                    Operation::Mlp(op) => Branch::of(self.mlp(plan, op, &self.scratch.branch)?),
                    Operation::Moe(op) => self.mixture(plan, index, op)?,
                    Operation::Input(op) => self.token_input(plan, index, op)?,
                };
                let scalar = layer.scalar.filter(|_| number + 1 == layer.blocks.len());
                branch = Some(Branch {
                    post: block.post_norm.as_ref(),
                    scale: self.config.residual_scale,
                    x_scale: scalar.unwrap_or(1.0),
                    ..output
                });
            }
        }
        let last = Norm { branch, ..self.norm_of(plan) };
        match &self.head {
            None => self.ops.norm(&last),
            Some(_) if plan.wanted == 0 => Ok(()),
            Some(head) => self.ops.norm(&Norm {
                weight: Some(head.norm.view()),
                rows: Some(self.input.view(plan, Section::Wanted)),
                out: Some(&self.scratch.normed),
                n: plan.wanted,
                ..last
            }),
        }
    }

    /// Returns a norm of the residual stream, without branch, factors and output.
    fn norm_of(&self, plan: &StepPlan) -> Norm<'_> {
        let c = &self.config;
        Norm {
            kind: Some(c.norm_kind),
            post_eps: c.post_norm_eps.unwrap_or(c.norm_eps),
            ..Norm::of(self.input.view(plan, Section::X), plan.rows, c.hidden, c.norm_eps)
        }
    }

    /// Adds the output of the block before to the residual stream, and writes the input of a block to `normed`.
    fn enter(&self, plan: &StepPlan, branch: Option<Branch<'_>>, input: &BlockInput<Array<f32>>) -> Result<()> {
        let norm = Norm { branch, ..self.norm_of(plan) };
        let out = Some(&self.scratch.normed);
        match input {
            BlockInput::Normed(weight) => self.ops.norm(&Norm { weight: Some(weight.view()), out, ..norm }),
            BlockInput::Stream => self.ops.norm(&Norm { kind: None, out, ..norm }),
            BlockInput::Previous => self.ops.norm(&norm),
        }
    }

    /// Computes the further inputs of all layers from the embeddings of the step.
    fn set_further(&self, plan: &StepPlan, inputs: &Inputs) -> Result<()> {
        self.enter(plan, None, &BlockInput::Stream)?;
        let product = (&inputs.projection, inputs.projected.view());
        self.ops.matmul(product.0, &self.scratch.normed, 0, product.1, plan.rows)?;
        self.adapt_at(plan, AdaptedProduct::Further, &[product], &self.scratch.normed)?;
        self.ops.token_inputs(&TokenInputs {
            projected: product.1,
            embedded: self.input.view(plan, Section::Further),
            norm: inputs.norm.view(),
            out: inputs.further.view(),
            n: plan.rows,
            layers: self.config.n_layers,
            scale: (self.config.hidden as f32).sqrt().recip(),
            eps: self.config.norm_eps,
        })
    }

    /// Computes what the token alone says to a layer.
    fn token_input(&self, plan: &StepPlan, index: usize, op: &TokenInput<OnDevice>) -> Result<Branch<'_>> {
        let (s, n, width) = (&self.scratch, plan.rows, op.gate.matrix.rows());
        let further = self.inputs.as_ref().expect("uploaded with such layers").further.view();
        let further = further.part((self.layers.start + index) * n * width, n * width);
        let middle = Middle { activation: Activation::GeluTanh, out: s.middle.of(width), intermediate: width };
        let (gate, projection) = ((&op.gate, s.gate.view()), (&op.projection, s.branch.view()));
        self.ops.matmul(gate.0, &s.normed, 0, gate.1, n)?;
        self.adapt(plan, &[gate], &s.normed)?;
        self.ops.gated(&ops::gated(&middle, gate.1, Some(further), n))?;
        self.ops.matmul(projection.0, middle.out, 0, projection.1, n)?;
        self.adapt(plan, &[projection], middle.out)?;
        Ok(Branch::of(projection.1))
    }

    /// Computes an attention block, including its projections. `index` counts the layers of this part.
    fn attention(&self, plan: &StepPlan, index: usize, op: &Attention<OnDevice>) -> Result<Branch<'_>> {
        let (s, shape, n) = (&self.scratch, &op.shape, plan.rows);
        let mut products = vec![(&op.q, s.q.view())];
        products.extend(op.k.as_ref().map(|k| (k, s.k.view())));
        products.extend(op.v.as_ref().map(|v| (v, s.v.view())));
        self.ops.matmuls(&products, &s.normed, n)?;
        self.adapt(plan, &products, &s.normed)?;
        if let Some(gate) = &op.gate {
            let of_heads = self.config.attention.head_gate;
            let product = (gate, if of_heads { s.head_gate.view() } else { s.output_gate.view() });
            self.ops.matmul(gate, &s.normed, 0, product.1, n)?;
            self.adapt(plan, &[product], &s.normed)?;
            if of_heads {
                self.ops.spread_heads(product.1, s.output_gate.view(), n, [shape.n_heads, shape.value_dim])?;
            }
        }
        let kv = match &op.k {
            Some(_) => Some([s.k.view(), self.values(plan, op)?]),
            None => None,
        };
        self.ops.rope(&Rope {
            q: s.q.view(),
            kv,
            angles: self.angles(plan, shape),
            pairs: shape.pairs,
            head_norms: self.head_norms(plan, op)?,
            value_norm: op.value_norm.as_ref().map(Array::view),
            rows: self.input.view(plan, Section::Rows),
            cache: self.cache(plan, index, shape),
            n,
            n_heads: shape.n_heads,
            eps: self.config.norm_eps,
            q_scale: shape.scale * LOG2_E,
        })?;
        let gate = op.gate.as_ref().map(|_| s.output_gate.view());
        self.attend(plan, index, shape, op.sinks.as_ref(), gate)?;
        self.project(plan, &op.o)
    }

    /// Returns the values of a layer that has keys of its own. Values that are the projected keys share their memory,
    /// unless the keys are changed in place for a cache of int8.
    fn values(&self, plan: &StepPlan, op: &Attention<OnDevice>) -> Result<View<f32>> {
        let (s, width) = (&self.scratch, op.shape.n_kv_heads * op.shape.head_dim);
        if op.v.is_some() {
            return Ok(s.v.view());
        }
        if self.pool.layout().kind != KvType::Int8 {
            return Ok(s.k.view());
        }
        self.ops.copy_rows(s.k.view(), s.v.view(), plan.rows, width)?;
        Ok(s.v.view())
    }

    /// Returns the factors of the norms of single heads. Norms of all heads together are computed here.
    fn head_norms(&self, plan: &StepPlan, op: &Attention<OnDevice>) -> Result<Option<[View<f32>; 2]>> {
        let Some(norms) = op.head_norms.as_ref().map(|[q, k]| [q.view(), k.view()]) else { return Ok(None) };
        if self.config.attention.qk_norm != QkNorm::All {
            return Ok(Some(norms));
        }
        let (s, eps) = (&self.scratch, self.config.norm_eps);
        for (x, weight) in [s.q.view(), s.k.view()].into_iter().zip(norms).filter(|(_, weight)| weight.len() > 0) {
            self.ops.norm_in_place(&Norm { weight: Some(weight), ..Norm::of(x, plan.rows, weight.len(), eps) })?;
        }
        Ok(None)
    }

    /// Computes a block of latent attention, whose keys and values are expanded before they are cached.
    fn latent_attention(&self, plan: &StepPlan, index: usize, op: &LatentAttention<OnDevice>) -> Result<Branch<'_>> {
        let (s, shape, latent, n) = (&self.scratch, &op.shape, &op.latent, plan.rows);
        let (kv, kv_width) = (s.latent.kv.view(), latent.kv_rank + latent.rope);
        let norm = |x: View<f32>, x_stride: usize, weight: &Array<f32>| -> Result<&Acts> {
            let (weight, width) = (Some(weight.view()), weight.view().len());
            let out = s.latent.normed.of(width);
            let norm = Norm::of(x, n, width, latent.norm_eps);
            self.ops.norm(&Norm { x_stride, weight, out: Some(out), ..norm })?;
            Ok(out)
        };
        let (q, kv_a) = ((&op.q, s.q.view()), (&op.kv_a, kv));
        let x = match &op.q_a {
            None => {
                self.ops.matmuls(&[q, kv_a], &s.normed, n)?;
                self.adapt(plan, &[kv_a], &s.normed)?;
                &s.normed
            }
            Some((q_a, weight)) => {
                let both = [(q_a, s.latent.q.view()), kv_a];
                self.ops.matmuls(&both, &s.normed, n)?;
                self.adapt(plan, &both, &s.normed)?;
                let x = norm(s.latent.q.view(), q_a.matrix.rows(), weight)?;
                self.ops.matmul(q.0, x, 0, q.1, n)?;
                x
            }
        };
        self.adapt(plan, &[q], x)?;
        let normed = norm(kv, kv_width, &op.kv_norm)?;
        let kv_b = (&op.kv_b, s.latent.expanded.view());
        self.ops.matmul(kv_b.0, normed, 0, kv_b.1, n)?;
        self.adapt(plan, &[kv_b], normed)?;
        self.ops.latent_rope(&LatentRope {
            sizes: *latent,
            q: s.q.view(),
            k: s.k.view(),
            latent: kv,
            expanded: kv_b.1,
            angles: self.angles(plan, shape),
            pairs: shape.pairs,
            rows: self.input.view(plan, Section::Rows),
            cache: self.cache(plan, index, shape),
            n,
            n_heads: shape.n_heads,
            q_scale: shape.scale * LOG2_E,
        })?;
        self.attend(plan, index, shape, None, None)?;
        self.project(plan, &op.o)
    }

    /// Returns the cosines and sines of each row for a layer; none if it does not rotate.
    fn angles(&self, plan: &StepPlan, shape: &AttentionShape) -> View<f32> {
        let angles = self.input.view(plan, ANGLES[shape.rotary.unwrap_or(0)]);
        if shape.rotary.is_some() { angles } else { angles.part(0, 0) }
    }

    /// Returns the cache whose keys and values a layer reads: its own, or that of an earlier layer.
    fn cache(&self, plan: &StepPlan, index: usize, shape: &AttentionShape) -> args::Cache {
        let owner = shape.kv_from.map_or(index, |owner| owner - self.layers.start);
        self.pool.cache(owner, self.input.view::<u64>(plan, Section::Tables).address(), plan.table_stride)
    }

    /// Computes attention for the queries of all rows.
    fn attend(
        &self,
        plan: &StepPlan,
        index: usize,
        shape: &AttentionShape,
        sinks: Option<&Array<f32>>,
        gate: Option<View<f32>>,
    ) -> Result<()> {
        let (s, kernels) = (&self.scratch, &self.kernels[index]);
        let attend = Attend {
            q: s.q.view(),
            rows: self.input.view(plan, Section::Rows),
            tiles: self.input.view(plan, TILES[kernels.tiles(plan.tile_rows)]),
            sinks: sinks.map(Array::view),
            gate,
            partial: s.partial.view(),
            out: s.attended.of(shape.n_heads * shape.value_dim),
            cache: self.cache(plan, index, shape),
            n: plan.rows,
            window: shape.window,
            softcap: shape.softcap.map(|cap| cap * LOG2_E),
            longest: plan.table_stride * PAGE,
        };
        self.ops.attend(kernels, &attend)
    }

    /// Computes the output projection of attention.
    pub(super) fn project(&self, plan: &StepPlan, o: &DeviceLinear) -> Result<Branch<'_>> {
        let (s, product) = (&self.scratch, (o, self.scratch.branch.view()));
        let attended = s.attended.of(o.matrix.cols());
        self.ops.matmul(o, attended, 0, product.1, plan.rows)?;
        self.adapt(plan, &[product], attended)?;
        Ok(Branch::of(product.1))
    }

    /// Changes the results of products of all rows of `x` by adapters, if they may change the first one; the targets of
    /// the others follow its target.
    pub(super) fn adapt(&self, plan: &StepPlan, products: &[Product<'_>], x: &Acts) -> Result<()> {
        self.place(products[0].0).map_or(Ok(()), |first| self.adapt_at(plan, first, products, x))
    }

    /// Does the same from a given place on.
    fn adapt_at(&self, plan: &StepPlan, first: AdaptedProduct, products: &[Product<'_>], x: &Acts) -> Result<()> {
        let changes = self.changes(plan, first, products, x, Rows::Batch(0..plan.rows));
        changes.map_or(Ok(()), |changes| self.ops.low_rank(&changes))
    }

    /// Returns the place of the changes of a matrix of a layer.
    fn place(&self, linear: &DeviceLinear) -> Option<AdaptedProduct> {
        linear.target.map(|(layer, target)| AdaptedProduct::Target(layer - self.layers.start, target))
    }

    /// Returns the changes of products by adapters, if there are any; the places of the products follow `first`.
    pub(super) fn changes<'a>(
        &self,
        plan: &StepPlan,
        first: AdaptedProduct,
        products: &'a [Product<'a>],
        x: &'a Acts,
        rows: Rows<'a>,
    ) -> Option<LowRank<'a>> {
        let (changes, index) = (plan.changes, self.adapters.index(first));
        let all = self.input.view(plan, Section::Adapted);
        let section = match first {
            AdaptedProduct::Target(..) | AdaptedProduct::Experts(..) | AdaptedProduct::Further => 0,
            AdaptedProduct::Head => 1,
            AdaptedProduct::Replaced => 2,
        };
        let task = || LowRank {
            plan: changes,
            adapted: all.part(section * changes.slots, changes.slots),
            index,
            products,
            x,
            rows,
            results: self.adapters.results(),
        };
        changes.has(first, products.len()).then(task)
    }

    /// Computes an MLP and writes its output to `to`.
    fn mlp(&self, plan: &StepPlan, op: &Mlp<OnDevice>, to: &Array<f32>) -> Result<View<f32>> {
        let (s, n) = (&self.scratch, plan.rows);
        let out = s.middle.of(op.intermediate);
        let middle = Middle { activation: op.activation, out, intermediate: op.intermediate };
        let (gates, ups) = (s.gate.view(), s.up.view());
        let Some(gate) = &op.gate else {
            self.ops.matmul(&op.up, &s.normed, 0, ups, n)?;
            self.adapt(plan, &[(&op.up, ups)], &s.normed)?;
            self.ops.gated(&ops::gated(&middle, ups, Some(ups), n))?;
            return self.down(plan, op, to);
        };
        let products = [(gate, gates), (&op.up, ups)];
        if self.place(gate).is_some_and(|first| plan.changes.has(first, products.len())) {
            self.ops.matmuls(&products, &s.normed, n)?;
            self.adapt(plan, &products, &s.normed)?;
            self.ops.gated(&ops::gated(&middle, gates, Some(ups), n))?;
        } else {
            self.ops.gate_and_up(&products, &s.normed, &middle, n)?;
        }
        self.down(plan, op, to)
    }

    /// Computes the down projection of an MLP, and writes its output to `to`.
    fn down(&self, plan: &StepPlan, op: &Mlp<OnDevice>, to: &Array<f32>) -> Result<View<f32>> {
        let out = self.scratch.middle.of(op.intermediate);
        self.ops.matmul(&op.down, out, 0, to.view(), plan.rows)?;
        self.adapt(plan, &[(&op.down, to.view())], out)?;
        Ok(to.view())
    }

    /// Computes a mixture of experts and the MLP beside them, if there is one.
    fn mixture(&self, plan: &StepPlan, index: usize, op: &Moe<OnDevice>) -> Result<Branch<'_>> {
        let s = &self.scratch;
        let shared = op.shared.as_ref().map(|mlp| self.mlp(plan, mlp, &s.beside)).transpose()?;
        if let (Some(shared), Some(gate)) = (shared, &op.shared_gate) {
            let product = (gate, s.shared_gate.view());
            self.ops.matmul(gate, &s.normed, 0, product.1, plan.rows)?;
            self.adapt(plan, &[product], &s.normed)?;
            self.ops.gate_rows(shared, product.1, plan.rows, self.config.hidden)?;
        }
        match &op.norms {
            None => Ok(Branch { beside: shared, ..self.experts(plan, index, op, &s.normed)? }),
            Some(norms) => self.normed_mixture(plan, index, op, norms),
        }
    }

    /// Computes experts that have norms of their own, and adds their output to that of the MLP beside them, which has
    /// been computed.
    fn normed_mixture(
        &self,
        plan: &StepPlan,
        index: usize,
        op: &Moe<OnDevice>,
        norms: &MixtureNorms<Array<f32>>,
    ) -> Result<Branch<'_>> {
        let (s, x) = (&self.scratch, self.norm_of(plan));
        self.ops.norm(&Norm { weight: Some(norms.expert_input.view()), out: Some(&s.normed), ..x })?;
        self.ops.norm(&Norm { weight: Some(norms.router_input.view()), out: Some(&s.router_input), ..x })?;
        let experts = self.experts(plan, index, op, &s.router_input)?;
        let beside = Norm::of(s.beside.view(), plan.rows, self.config.hidden, self.config.norm_eps);
        self.ops.norm_in_place(&Norm { weight: Some(norms.mlp_output.view()), ..beside })?;
        let branch = Some(Branch { post: Some(&norms.expert_output), ..experts });
        self.ops.norm(&Norm { branch, ..beside })?;
        Ok(Branch::of(s.beside.view()))
    }

    /// Computes experts, whose router reads `router_input`. Returns the outputs of the chosen experts, sorted by
    /// expert, and the choices.
    fn experts(&self, plan: &StepPlan, index: usize, op: &Moe<OnDevice>, router_input: &Acts) -> Result<Branch<'_>> {
        let s = &self.scratch;
        let Moe { activation, intermediate, experts, top_k, softmax, selection, .. } = *op;
        let e = s.experts.as_ref().expect("made for a mixture");
        let grouped = e.grouped(plan.rows, experts, top_k);
        let choice =
            ExpertChoice { softmax, selection, bias: op.selection_bias.as_ref(), factors: op.factors.as_ref() };
        let router = [(&op.router, e.logits.view())];
        let rows = Rows::Batch(0..plan.rows);
        let changes = self.place(&op.router).and_then(|place| self.changes(plan, place, &router, router_input, rows));
        self.ops.route(router[0], router_input, &grouped, &choice, changes.as_ref())?;
        let out = s.expert_middle.of(intermediate);
        let middle = Middle { activation, out, intermediate };
        let gate_up = [(&op.gate_up, s.gate.view())];
        let up = (!activation.is_gated()).then_some(gate_up[0].1);
        match self.changes(plan, AdaptedProduct::Experts(index, 0), &gate_up, &s.normed, Rows::Pairs(&grouped, true)) {
            None if up.is_none() => self.ops.matmul_experts(gate_up[0], &s.normed, true, Some(&middle), &grouped)?,
            changes => {
                self.ops.matmul_experts(gate_up[0], &s.normed, true, None, &grouped)?;
                changes.map_or(Ok(()), |changes| self.ops.low_rank(&changes))?;
                self.ops.gated(&ops::gated(&middle, s.gate.view(), up, grouped.pairs))?;
            }
        }
        let down = [(&op.down, e.outputs.view())];
        self.ops.matmul_experts(down[0], out, false, None, &grouped)?;
        let rows = Rows::Pairs(&grouped, false);
        if let Some(changes) = self.changes(plan, AdaptedProduct::Experts(index, 1), &down, out, rows) {
            self.ops.low_rank(&changes)?;
        }
        Ok(Branch { chosen: Some(grouped.chosen), ..Branch::of(e.outputs.view()) })
    }
}
