//! Working memory of a device: arrays that all layers reuse, and the output head of the model.

use super::args::Share;
use super::array::{Acts, Array, Forms};
use super::best::Best;
use super::context::Context;
use super::multiply;
use super::ops::{self, Chosen, Grouped};
use super::weights::{DeviceLinear, OnDevice, UploadSource, Uploader};
use crate::error::Result;
use crate::runtime::layer::{AttentionShape, LatentAttention, Layer, Mlp, Operation};
use crate::runtime::weights::PerLayerWeights;
use std::sync::Arc;

/// Maximum number of rows whose logits are computed and copied at once.
pub const LOGIT_ROWS: usize = 64;
/// Maximum number of largest logits per row that the device finds.
pub const MOST_BEST: usize = 64;

/// Output head of the model: final norm, output matrix, and memory for logits.
#[derive(Debug)]
pub struct Head {
    pub norm: Array<f32>,
    pub lm_head: DeviceLinear,
    /// Logits: `(LOGIT_ROWS, vocab)`.
    pub logits: Array<f32>,
    pub best: Best,
}

/// Weights of the further inputs of all layers, and memory for these inputs; `n` is the maximum number of rows per
/// step.
#[derive(Debug)]
pub struct Inputs {
    /// Projection of the embedding of the model: `(layers * width, hidden)`.
    pub projection: DeviceLinear,
    /// Factors of the norm of the projection: `(width)`.
    pub norm: Array<f32>,
    /// Result of the projection: `(n, layers * width)`.
    pub projected: Array<f32>,
    /// The inputs: `(layers, rows of the step, width)`.
    pub further: Array<f32>,
}

/// Device memory that all layers reuse; `n` is the maximum number of rows per step.
#[derive(Debug)]
pub struct Scratch {
    /// Inputs of a block: `(n, hidden)`.
    pub normed: Acts,
    /// Input of a router that has its own: `(n, hidden)`.
    pub router_input: Acts,
    /// Queries: `(n, n_heads * head_dim)`.
    pub q: Array<f32>,
    /// Keys: `(n, n_kv_heads * head_dim)`.
    pub k: Array<f32>,
    /// Values: `(n, n_kv_heads * value_dim)`.
    pub v: Array<f32>,
    /// Gate of the attention output: `(n, n_heads * value_dim)`.
    pub output_gate: Array<f32>,
    /// Gate of the output of each head: `(n, n_heads)`.
    pub head_gate: Array<f32>,
    /// Output of attention before the output projection: `(n, n_heads * value_dim)`.
    pub attended: ActsByWidth,
    /// Partial results of attention, see [`Kernels::partial_len`](super::attend::Kernels::partial_len).
    pub partial: Array<f32>,
    pub latent: LatentScratch,
    /// Projections of linear attention to decays and rates: `(n, value heads)` each.
    pub decays: [Array<f32>; 2],
    /// Output of linear attention before its norm: `(n, value heads * value_dim)`.
    pub mixed: Array<f32>,
    /// Output of a block: `(n, hidden)`.
    pub branch: Array<f32>,
    /// Output of an MLP that is added to that of experts: `(n, hidden)`.
    pub beside: Array<f32>,
    /// Gate of this output: `(n)`.
    pub shared_gate: Array<f32>,
    /// Result of gate `(n, intermediate)`, or of gate and up of the chosen experts `(n * top_k, 2 * intermediate)`.
    pub gate: Array<f32>,
    /// Result of up: `(n, intermediate)`.
    pub up: Array<f32>,
    /// Activations of gate and up: `(n, intermediate)`.
    pub middle: ActsByWidth,
    /// Activations of gate and up of the chosen experts: `(n * top_k, intermediate)`.
    pub expert_middle: ActsByWidth,
    pub experts: Option<ExpertScratch>,
}

/// Additional memory for latent attention.
#[derive(Debug)]
pub struct LatentScratch {
    /// Vectors of queries: `(n, q_rank)`.
    pub q: Array<f32>,
    /// Vectors of keys and values, with the rotated part of the keys: `(n, kv_rank + rope)`.
    pub kv: Array<f32>,
    /// One of these vectors after its norm: `(n, rank)`.
    pub normed: ActsByWidth,
    /// Keys and values of all heads before they are divided: `(n, n_heads * (nope + value))`.
    pub expanded: Array<f32>,
}

/// Activations of several widths, one for each width that occurs.
#[derive(Debug, Default)]
pub struct ActsByWidth(Vec<Acts>);

impl ActsByWidth {
    /// Returns the activations of a width.
    ///
    /// # Panics
    /// No layer has this width.
    pub fn of(&self, width: usize) -> &Acts {
        self.0.iter().find(|acts| acts.width == width).expect("allocated for all layers")
    }
}

/// Additional memory for a mixture of experts.
#[derive(Debug)]
pub struct ExpertScratch {
    /// Logits of the router: `(n, experts)`.
    pub logits: Array<f32>,
    /// Experts of each row: `(n, top_k)`.
    pub experts_of: Array<u32>,
    /// Weights of these experts: `(n, top_k)`.
    pub weights: Array<f32>,
    /// See [`Chosen::slots`].
    pub slots: Array<u32>,
    /// See [`Grouped::inputs`].
    pub inputs: Array<u32>,
    /// See [`Grouped::shares`].
    pub shares: Array<Share>,
    /// See [`Grouped::count`].
    pub count: Array<u32>,
    /// Outputs of the experts, sorted by expert: `(n * top_k, hidden)`.
    pub outputs: Array<f32>,
}

impl Head {
    /// Uploads the head to a device.
    ///
    /// # Errors
    /// There is not enough device memory, or the driver reports an error.
    pub fn upload(uploader: &mut Uploader<'_>, source: &UploadSource<'_>) -> Result<Head> {
        let UploadSource { config, weights, arithmetic, .. } = *source;
        let context = uploader.context;
        Ok(Head {
            norm: uploader.vector(&weights.final_norm)?,
            logits: Array::new(context, LOGIT_ROWS * config.vocab)?,
            best: Best::new(context, LOGIT_ROWS, config.vocab, MOST_BEST)?,
            lm_head: DeviceLinear::without_bias(uploader, &[&weights.lm_head], arithmetic)?,
        })
    }
}

impl Inputs {
    /// Uploads the weights to a device.
    ///
    /// # Errors
    /// There is not enough device memory, or the driver reports an error.
    pub fn upload(uploader: &mut Uploader<'_>, weights: &PerLayerWeights, source: &UploadSource<'_>) -> Result<Inputs> {
        let (context, len) = (uploader.context, source.rows * weights.projection.matrix.rows());
        Ok(Inputs {
            projection: DeviceLinear::upload(uploader, &[&weights.projection], source.arithmetic)?,
            norm: uploader.vector(&weights.norm)?,
            projected: Array::new(context, len)?,
            further: Array::new(context, len)?,
        })
    }
}

impl Scratch {
    /// Allocates memory for the steps of these layers.
    ///
    /// # Errors
    /// There is not enough device memory.
    pub fn new(
        source: &UploadSource<'_>,
        context: &Arc<Context>,
        layers: &[Layer<OnDevice>],
        inputs: Option<&Inputs>,
        head: Option<&Head>,
        partial: usize,
    ) -> Result<Scratch> {
        let (rows, hidden) = (source.rows, source.config.hidden);
        let head_gates = source.config.attention.head_gate;
        let mut sizes = Sizes::default();
        layers.iter().flat_map(|layer| &layer.blocks).for_each(|block| sizes.include(&block.operation, rows));
        let projection = inputs.map(|inputs| &inputs.projection);
        let linears = head.map(|head| &head.lm_head).into_iter().chain(projection);
        linears.for_each(|linear| include(&mut sizes.normed, linear));
        let experts = sizes.experts.map(|[experts, top_k]| ExpertScratch::new(context, rows, experts, top_k, hidden));
        let floats = Forms { f32: sizes.has_router_input, ..Forms::default() };
        Ok(Scratch {
            normed: Acts::new(context, sizes.normed, rows, hidden)?,
            router_input: Acts::new(context, floats, rows, hidden)?,
            q: Array::new(context, rows * sizes.q)?,
            k: Array::new(context, rows * sizes.k)?,
            v: Array::new(context, rows * sizes.v)?,
            output_gate: Array::new(context, rows * sizes.output_gate)?,
            head_gate: Array::new(context, if head_gates { rows * source.config.n_heads } else { 0 })?,
            attended: sizes.attended.allocate(context)?,
            partial: Array::new(context, partial)?,
            latent: LatentScratch {
                q: Array::new(context, rows * sizes.latent.q)?,
                kv: Array::new(context, rows * sizes.latent.kv)?,
                normed: sizes.latent.normed.allocate(context)?,
                expanded: Array::new(context, rows * sizes.latent.expanded)?,
            },
            decays: [Array::new(context, rows * sizes.value_heads)?, Array::new(context, rows * sizes.value_heads)?],
            mixed: Array::new(context, rows * sizes.mixed)?,
            branch: Array::new(context, rows * hidden)?,
            beside: Array::new(context, if sizes.has_beside { rows * hidden } else { 0 })?,
            shared_gate: Array::new(context, if sizes.has_beside { rows } else { 0 })?,
            gate: Array::new(context, sizes.gate)?,
            up: Array::new(context, sizes.up)?,
            middle: sizes.middle.allocate(context)?,
            expert_middle: sizes.expert_middle.allocate(context)?,
            experts: experts.transpose()?,
        })
    }
}

/// Maximum sizes over all operations, and all forms in which products read activations.
#[derive(Debug, Default)]
struct Sizes {
    normed: Forms,
    has_router_input: bool,
    attended: Widths,
    q: usize,
    k: usize,
    v: usize,
    output_gate: usize,
    latent: LatentSizes,
    value_heads: usize,
    mixed: usize,
    has_beside: bool,
    gate: usize,
    up: usize,
    middle: Widths,
    expert_middle: Widths,
    /// Number of experts and number of experts per row.
    experts: Option<[usize; 2]>,
}

/// Sizes of latent attention, as in [`Sizes`].
#[derive(Debug, Default)]
struct LatentSizes {
    q: usize,
    kv: usize,
    normed: Widths,
    expanded: usize,
}

/// Widths of inputs of products, with their forms and numbers of rows.
#[derive(Debug, Default)]
struct Widths(Vec<(usize, Forms, usize)>);

impl Widths {
    /// Includes the input of a product, `(rows, columns of the matrix)`.
    fn include(&mut self, linear: &DeviceLinear, rows: usize) {
        let width = linear.matrix.cols();
        let at = self.0.iter().position(|(own, ..)| *own == width).unwrap_or_else(|| {
            self.0.push((width, Forms::default(), 0));
            self.0.len() - 1
        });
        let (_, forms, most) = &mut self.0[at];
        (*forms, *most) = (forms.and(linear.how.forms()), rows.max(*most));
    }

    fn allocate(&self, context: &Arc<Context>) -> Result<ActsByWidth> {
        let acts = self.0.iter().map(|(width, forms, rows)| Acts::new(context, *forms, *rows, *width));
        acts.collect::<Result<_>>().map(ActsByWidth)
    }
}

/// Includes the forms in which a product reads its input.
fn include(forms: &mut Forms, linear: &DeviceLinear) {
    *forms = forms.and(linear.how.forms());
}

impl Sizes {
    /// Includes the sizes of an operation over `rows` rows.
    fn include(&mut self, operation: &Operation<OnDevice>, rows: usize) {
        match operation {
            Operation::Attention(op) => {
                let linears = [Some(&op.q), op.k.as_ref(), op.v.as_ref(), op.gate.as_ref()];
                linears.into_iter().flatten().for_each(|linear| include(&mut self.normed, linear));
                self.attended.include(&op.o, rows);
                self.include_heads(&op.shape);
                // Gates of heads are spread over their columns.
                let gates = op.gate.as_ref().map_or(0, |_| op.shape.n_heads * op.shape.value_dim);
                self.output_gate = self.output_gate.max(gates);
            }
            Operation::Latent(op) => self.include_latent(op, rows),
            Operation::ShortConv(op) => {
                include(&mut self.normed, &op.input);
                self.attended.include(&op.output, rows);
                self.q = self.q.max(op.input.matrix.rows());
            }
            Operation::DeltaNet(op) => {
                self.include_linear([&op.q, &op.k, &op.v, &op.z, &op.a, &op.b], &op.output, rows);
            }
            Operation::Mamba(op) => {
                self.include_linear([&op.c, &op.b, &op.x, &op.z, &op.dt, &op.dt], &op.output, rows);
            }
            Operation::Mlp(op) => self.include_mlp(op, rows),
            Operation::Input(op) => {
                include(&mut self.normed, &op.gate);
                self.middle.include(&op.projection, rows);
                self.gate = self.gate.max(rows * op.gate.matrix.rows());
            }
            Operation::Moe(op) => {
                let pairs = rows * op.top_k;
                let linears = [Some(&op.router), Some(&op.gate_up), op.shared_gate.as_ref()];
                linears.into_iter().flatten().for_each(|linear| include(&mut self.normed, linear));
                self.expert_middle.include(&op.down, pairs);
                self.gate = self.gate.max(pairs * 2 * op.intermediate);
                let [experts, top_k] = self.experts.unwrap_or_default();
                self.experts = Some([experts.max(op.experts), top_k.max(op.top_k)]);
                op.shared.iter().for_each(|mlp| self.include_mlp(mlp, rows));
                self.has_beside |= op.shared.is_some();
                self.has_router_input |= op.norms.is_some();
            }
        }
    }

    /// Includes the projections of linear attention to queries, keys, values, gates, decays and rates.
    fn include_linear(&mut self, projections: [&DeviceLinear; 6], output: &DeviceLinear, rows: usize) {
        projections.iter().for_each(|linear| include(&mut self.normed, linear));
        self.attended.include(output, rows);
        let [q, k, v, z, decays, _] = projections.map(|linear| linear.matrix.rows());
        (self.q, self.k, self.v) = (self.q.max(q), self.k.max(k), self.v.max(v));
        (self.output_gate, self.mixed) = (self.output_gate.max(z), self.mixed.max(v));
        self.value_heads = self.value_heads.max(decays);
    }

    fn include_heads(&mut self, shape: &AttentionShape) {
        self.q = self.q.max(shape.n_heads * shape.head_dim);
        self.k = self.k.max(shape.n_kv_heads * shape.head_dim);
        self.v = self.v.max(shape.n_kv_heads * shape.value_dim);
    }

    fn include_latent(&mut self, op: &LatentAttention<OnDevice>, rows: usize) {
        let q_a = op.q_a.as_ref().map(|(q_a, _)| q_a);
        include(&mut self.normed, &op.kv_a);
        include(&mut self.normed, q_a.unwrap_or(&op.q));
        if let Some(q_a) = q_a {
            self.latent.normed.include(&op.q, rows);
            self.latent.q = self.latent.q.max(q_a.matrix.rows());
        }
        self.latent.normed.include(&op.kv_b, rows);
        self.latent.kv = self.latent.kv.max(op.kv_a.matrix.rows());
        self.latent.expanded = self.latent.expanded.max(op.kv_b.matrix.rows());
        self.attended.include(&op.o, rows);
        self.include_heads(&op.shape);
    }

    fn include_mlp(&mut self, op: &Mlp<OnDevice>, rows: usize) {
        [op.gate.as_ref(), Some(&op.up)].into_iter().flatten().for_each(|linear| include(&mut self.normed, linear));
        self.middle.include(&op.down, rows);
        self.gate = self.gate.max(rows * op.intermediate);
        self.up = self.up.max(rows * op.intermediate);
    }
}

impl ExpertScratch {
    /// Allocates memory for `rows` rows, each of which chooses `top_k` experts.
    ///
    /// # Errors
    /// There is not enough device memory.
    pub fn new(
        context: &Arc<Context>,
        rows: usize,
        experts: usize,
        top_k: usize,
        hidden: usize,
    ) -> Result<ExpertScratch> {
        let pairs = rows * top_k;
        Ok(ExpertScratch {
            logits: Array::new(context, rows * experts)?,
            experts_of: Array::new(context, pairs)?,
            weights: Array::new(context, pairs)?,
            slots: Array::new(context, pairs)?,
            inputs: Array::new(context, pairs)?,
            shares: Array::new(context, ops::most_shares(pairs, experts, multiply::FEW))?,
            count: Array::new(context, 1)?,
            outputs: Array::new(context, pairs * hidden)?,
        })
    }

    /// Returns the arguments of launches for the choices of `rows` rows.
    pub fn grouped(&self, rows: usize, experts: usize, top_k: usize) -> Grouped {
        let pairs = rows * top_k;
        Grouped {
            experts_of: self.experts_of.view(),
            chosen: Chosen { slots: self.slots.view(), weights: self.weights.view(), top_k },
            inputs: self.inputs.view(),
            shares: self.shares.view(),
            count: self.count.view(),
            pairs,
            experts,
            share_rows: multiply::share_rows(pairs, experts),
        }
    }
}
