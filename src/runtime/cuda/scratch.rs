//! Working memory of a device: arrays that all layers reuse, and the output head of the model.

use super::args::Share;
use super::array::{Acts, Array, Forms};
use super::best::Best;
use super::context::Context;
use super::multiply;
use super::ops::{self, Chosen, Grouped};
use super::weights::{DeviceLinear, OnDevice, Source, Uploader};
use crate::error::Result;
use crate::runtime::layer::{Layer, Operation};
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

/// Device memory that all layers reuse; `n` is the maximum number of rows per step.
#[derive(Debug)]
pub struct Scratch {
    /// Normalized inputs of a block: `(n, hidden)`.
    pub normed: Acts,
    /// Queries: `(n, n_heads * head_dim)`.
    pub q: Array<f32>,
    /// Keys: `(n, n_kv_heads * head_dim)`.
    pub k: Array<f32>,
    /// Values: `(n, n_kv_heads * head_dim)`.
    pub v: Array<f32>,
    /// Output of attention before the output projection: `(n, n_heads * head_dim)`.
    pub attended: Acts,
    /// Partial results of attention, see [`Kernels::partial_len`](super::attend::Kernels::partial_len).
    pub partial: Array<f32>,
    /// Output of a block: `(n, hidden)`.
    pub branch: Array<f32>,
    /// Result of gate `(n, intermediate)`, or of gate and up of the chosen experts `(n * top_k, 2 * intermediate)`.
    pub gate: Array<f32>,
    /// Result of up: `(n, intermediate)`.
    pub up: Array<f32>,
    /// Activations of gate and up: `(n, intermediate)`.
    pub middle: Acts,
    /// Activations of gate and up of the chosen experts: `(n * top_k, intermediate)`.
    pub expert_middle: Acts,
    pub experts: Option<ExpertScratch>,
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
    pub fn upload(uploader: &mut Uploader<'_>, source: &Source<'_>) -> Result<Head> {
        let Source { config, weights, arithmetic, .. } = *source;
        let context = uploader.context;
        Ok(Head {
            norm: uploader.vector(&weights.final_norm)?,
            logits: Array::new(context, LOGIT_ROWS * config.vocab)?,
            best: Best::new(context, LOGIT_ROWS, config.vocab, MOST_BEST)?,
            lm_head: DeviceLinear::without_bias(uploader, &[&weights.lm_head], arithmetic)?,
        })
    }
}

impl Scratch {
    /// Allocates memory for the steps of these layers.
    ///
    /// # Errors
    /// There is not enough device memory.
    pub fn new(
        source: &Source<'_>,
        context: &Arc<Context>,
        layers: &[Layer<OnDevice>],
        head: Option<&Head>,
        partial: usize,
    ) -> Result<Scratch> {
        let (rows, hidden) = (source.rows, source.config.hidden);
        let mut sizes = Sizes::default();
        layers.iter().flat_map(|layer| &layer.blocks).for_each(|block| sizes.include(&block.operation, rows));
        if let Some(head) = head {
            sizes.normed = sizes.normed.and(head.lm_head.how.forms());
        }
        let experts = sizes.experts.map(|[experts, top_k]| ExpertScratch::new(context, rows, experts, top_k, hidden));
        Ok(Scratch {
            normed: Acts::new(context, sizes.normed, rows, hidden)?,
            q: Array::new(context, rows * sizes.q)?,
            k: Array::new(context, rows * sizes.kv)?,
            v: Array::new(context, rows * sizes.kv)?,
            attended: Acts::new(context, sizes.attended, rows, sizes.q)?,
            partial: Array::new(context, partial)?,
            branch: Array::new(context, rows * hidden)?,
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
    attended: Forms,
    q: usize,
    kv: usize,
    gate: usize,
    up: usize,
    middle: MiddleSize,
    expert_middle: MiddleSize,
    /// Number of experts and number of experts per row.
    experts: Option<[usize; 2]>,
}

/// Size of the activations of gate and up.
#[derive(Debug, Default)]
struct MiddleSize {
    forms: Forms,
    rows: usize,
    width: usize,
}

impl MiddleSize {
    /// Includes the input of a down projection.
    fn include(&mut self, down: &DeviceLinear, rows: usize, width: usize) {
        self.forms = self.forms.and(down.how.forms());
        (self.rows, self.width) = (self.rows.max(rows), self.width.max(width));
    }

    fn allocate(&self, context: &Arc<Context>) -> Result<Acts> {
        Acts::new(context, self.forms, self.rows, self.width)
    }
}

impl Sizes {
    /// Includes the sizes of an operation over `rows` rows.
    fn include(&mut self, operation: &Operation<OnDevice>, rows: usize) {
        let include = |forms: &mut Forms, linears: &[&DeviceLinear]| {
            *forms = linears.iter().fold(*forms, |forms, linear| forms.and(linear.how.forms()));
        };
        let larger = |[a, b]: [usize; 2], [c, d]: [usize; 2]| [a.max(c), b.max(d)];
        match operation {
            Operation::Attention(op) => {
                let linears: Vec<&DeviceLinear> =
                    [Some(&op.q), op.k.as_ref(), op.v.as_ref()].into_iter().flatten().collect();
                include(&mut self.normed, &linears);
                include(&mut self.attended, &[&op.o]);
                self.q = self.q.max(op.shape.n_heads * op.shape.head_dim);
                self.kv = self.kv.max(op.shape.n_kv_heads * op.shape.head_dim);
            }
            Operation::Mlp(op) => {
                include(&mut self.normed, &[&op.gate, &op.up]);
                self.middle.include(&op.down, rows, op.intermediate);
                self.gate = self.gate.max(rows * op.intermediate);
                self.up = self.up.max(rows * op.intermediate);
            }
            Operation::Latent(_) | Operation::Input(_) => unreachable!("see `ops::check`"),
            Operation::Moe(op) => {
                let pairs = rows * op.top_k;
                include(&mut self.normed, &[&op.router, &op.gate_up]);
                self.expert_middle.include(&op.down, pairs, op.intermediate);
                self.gate = self.gate.max(pairs * 2 * op.intermediate);
                self.experts = Some(larger(self.experts.unwrap_or_default(), [op.experts, op.top_k]));
            }
        }
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
