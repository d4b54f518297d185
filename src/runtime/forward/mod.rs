//! CPU device part: computes layers for a chunk of tokens from any number of sequences.
//!
//! Every operation handles one token at a time or is a product with independent columns, so a token's result does not
//! depend on the other tokens of the chunk.

mod chunk;
mod conv;
mod feed;
mod latent;
mod linear_attention;
mod rows;
pub mod states;

use super::adapters::factors::Factors;
use super::adapters::{self, Changed, Group};
use super::attention::{Attend, AttentionKernel, AttentionTask};
use super::cpu::{Acts, Arithmetic, Cpu, Form, Job, Matrix};
use super::device::{Answer, DevicePart, PartInfo, Run, Step};
use super::experts::Experts;
use super::kv::{KvCache, KvLayout};
use super::layer::{Attention, AttentionShape, BlockInput, Layer, Operation};
use super::observe::{ObserverRef, see};
use super::ops::{Scale, SigmoidGate, SoftCap};
use super::per_head::PerHead;
use super::profile::Stage;
use super::state::{Cache, StatePool};
use super::weights::{Held, Host, Linear, Weight, Weights};
use crate::calibration::Site;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::model_config::ModelConfig;
use conv::ConvScratch;
use feed::{GatedScratch, MlpOutput};
use latent::LatentScratch;
use linear_attention::LinearScratch;
use rows::{Heads, Queries, queries};
use states::{CpuCache, CpuPool, States};
use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Layers that are computed on the CPU, with their buffers.
#[derive(Debug)]
pub struct CpuPart {
    model: Model,
    scratch: Scratch,
}

/// Read-only inputs of the forward pass.
#[derive(Debug)]
pub struct Model {
    /// Dimensions and flags.
    pub config: ModelConfig,
    /// Bound tensors.
    pub weights: Arc<Weights>,
    /// Sizes of the caches of these layers.
    pub kv_layout: KvLayout,
    /// Memory of the caches of these layers.
    pub pool: CpuPool,
    /// Threads and matrix kernels.
    pub cpu: Arc<Cpu>,
    /// Implementation of attention.
    pub attention: AttentionKernel,
    /// Arithmetic of matrix products.
    pub arithmetic: Arithmetic,
    /// Forms (number types) of activations that the products read.
    pub forms: Vec<Form>,
    /// Matrices of the heads of these layers, in models with latent attention.
    pub per_head: Vec<PerHead>,
    /// Layers computed by this part.
    pub layers: Range<usize>,
}

/// Buffers that are reused from call to call; each operation has its own. `n` is the number of tokens in a chunk.
#[derive(Debug, Default)]
struct Scratch {
    /// Sequence and position of each row.
    runs: Vec<Run>,
    /// Adapters of the rows that have any.
    groups: Vec<Group>,
    /// Normalized inputs: `(n, hidden)`.
    normed: Acts,
    /// Rows of the normalized inputs that are left in the last layer.
    kept: Acts,
    attention: AttentionScratch,
    latent: LatentScratch,
    conv: ConvScratch,
    linear: LinearScratch,
    gated: GatedScratch,
    experts: Experts,
    /// Further inputs of all layers, in models that have them: `(n, layers * width)`.
    further: Vec<f32>,
    /// Output of the current block before it is added to the residual stream: `(n, hidden)`.
    branch: Vec<f32>,
    /// Output of the MLP beside experts, or of the experts: `(n, hidden)`.
    beside: Vec<f32>,
    /// Gate of the output of the MLP beside experts: `(n)`.
    shared_gate: Vec<f32>,
}

/// Buffers of attention, latent attention included.
#[derive(Debug, Default)]
struct AttentionScratch {
    /// Queries: `(n, n_heads * head_dim)`, or as wide as the keys that are kept.
    q: Vec<f32>,
    /// Keys: `(n, n_kv_heads * head_dim)`, or the vectors that latent attention keeps.
    k: Vec<f32>,
    /// Values: `(n, n_kv_heads * head_dim)`.
    v: Vec<f32>,
    /// Factor of the query of each row, in models whose queries grow with their positions: `(n)`.
    q_factors: Vec<f32>,
    /// Gate of the attention output, in models that have one: `(n, n_heads * head_dim)`.
    output_gate: Vec<f32>,
    attend: Attend,
    /// Attention output: `(n, n_heads * value_dim)`, or as wide as the values that are kept.
    attended: Acts,
}

/// State of one step while it passes through the layers.
struct Walk<'a> {
    /// The step; its `caches` were moved to the fields below.
    step: Step<'a>,
    caches: Vec<&'a mut KvCache>,
    /// Memory of recurrent layers.
    states: Vec<&'a mut States>,
    /// Whether all rows are computed in the last layer, not only the wanted ones.
    keeps_all: bool,
    scratch: &'a mut Scratch,
}

impl CpuPart {
    /// Creates the part that computes the layers of `model`.
    pub fn new(model: Model) -> CpuPart {
        CpuPart { model, scratch: Scratch::default() }
    }
}

impl DevicePart for CpuPart {
    fn info(&self) -> PartInfo {
        PartInfo { layers: self.model.layers.clone(), device: None, memory_taken: 0 }
    }

    fn new_cache(&self) -> Result<Cache> {
        Ok(Cache::new(CpuCache::new(&self.model.pool)))
    }

    fn pool(&self) -> Box<dyn StatePool> {
        Box::new(self.model.pool.clone())
    }

    fn owns(&self, cache: &Cache) -> bool {
        cache.get::<CpuCache>().is_some_and(|cache| {
            *cache.kv.layout() == self.model.kv_layout && self.model.pool.states.is_of(&cache.states)
        })
    }

    fn grow(&self, cache: &mut Cache, positions: Range<usize>) -> Result<()> {
        cache.get_mut::<CpuCache>().kv.grow(positions.len())
    }

    fn run(&mut self, mut step: Step<'_>, answer: Answer<'_>) -> Result<()> {
        self.scratch.runs.clear();
        self.scratch.runs.extend_from_slice(step.runs);
        self.scratch.groups.clear();
        self.scratch.groups.extend_from_slice(step.groups);
        let caches = std::mem::take(&mut step.caches).into_iter();
        let (caches, states) = caches
            .map(|cache| {
                let CpuCache { kv, states } = cache.get_mut();
                (kv, states)
            })
            .unzip();
        let layers = self.model.layers.clone();
        let first = step.first_layer.max(layers.start);
        let keeps_all = matches!(answer, Answer::Hidden { .. });
        let mut walk = Walk { step, caches, states, keeps_all, scratch: &mut self.scratch };
        let mut done = match (&self.model.weights.per_layer, &self.model.weights.join) {
            (Some(weights), _) => self.model.set_further(weights, &mut walk),
            (_, Some(weights)) => self.model.join(weights, &mut walk),
            (None, None) => Ok(()),
        };
        done = done.and_then(|()| self.model.walk(first..layers.end, &mut walk));
        if done.is_ok() && layers.end == self.model.config.n_layers {
            done = self.model.answer(&mut walk, answer);
        }
        // Adapters leave memory when no text uses them any more.
        self.scratch.groups.clear();
        done
    }

    fn finds_hidden(&self) -> bool {
        true
    }

    fn most_best(&self) -> usize {
        0
    }

    fn take_busy(&mut self) -> Duration {
        Duration::ZERO
    }
}

/// Passes the residual stream after a block to the observer, and counts the time of its addition.
fn end_block(layer: usize, block: usize, w: &mut Walk<'_>) {
    if let Some(observer) = &mut w.step.observer {
        observer.block(layer, block, w.step.x);
    }
    w.step.profile.lap(Stage::Norms);
}

impl Model {
    /// Computes layers. In the last layer of the model, only the wanted rows are computed after the keys and values.
    fn walk(&self, layers: Range<usize>, w: &mut Walk<'_>) -> Result<()> {
        for index in layers {
            interrupt::check()?;
            if let Some(observer) = &mut w.step.observer {
                observer.stream(index, w.step.x);
                if index >= observer.end() {
                    break;
                }
            }
            let layer = &self.weights.layers[index];
            self.layer(index, layer, w)?;
            if w.step.observer.as_ref().is_some_and(|observer| observer.is_large()) {
                layer.release();
            }
        }
        Ok(())
    }

    fn layer(&self, index: usize, layer: &Layer<Host>, w: &mut Walk<'_>) -> Result<()> {
        if index + 1 == self.config.n_layers && self.config.layer(index).mixer.is_none() {
            // Nothing of the last layer reads other rows.
            self.keep_wanted(Queries::default(), w);
            if w.scratch.runs.is_empty() {
                return Ok(());
            }
        }
        for (number, block) in layer.blocks.iter().enumerate() {
            match &block.input {
                BlockInput::Normed(weight) => self.norm_rows(w.step.x, weight, &mut w.scratch.normed),
                BlockInput::Stream => self.copy_rows(w.step.x, &mut w.scratch.normed),
                BlockInput::Previous => {}
            }
            w.step.profile.lap(Stage::Norms);
            match &block.operation {
                Operation::Attention(op) => {
                    self.read(index, op, w)?;
                    if index + 1 == self.config.n_layers {
                        self.keep_wanted(queries(&op.shape, op.gate.as_ref()), w);
                    }
                    if w.scratch.runs.is_empty() {
                        return Ok(());
                    }
                    self.attend(index, &op.shape, op.sinks.as_deref(), w);
                    if let Some(gate) = &op.gate {
                        self.gate_output(&op.shape, gate.matrix.rows(), w);
                    }
                    self.project(&op.o, w)?;
                }
                Operation::Latent(op) => {
                    self.read_latent(index, op, w)?;
                    if index + 1 == self.config.n_layers {
                        self.keep_wanted(queries(&op.shape, None), w);
                    }
                    if w.scratch.runs.is_empty() {
                        return Ok(());
                    }
                    self.absorb(index, op, w)?;
                    self.attend(index, &op.shape, None, w);
                    self.read_values(index, op, w)?;
                    self.project(&op.o, w)?;
                }
                Operation::ShortConv(_) | Operation::DeltaNet(_) | Operation::Mamba(_) => {
                    if !self.recur(index, &block.operation, w)? {
                        return Ok(());
                    }
                }
                Operation::Mlp(op) => self.mlp(op, MlpOutput::Written, w)?,
                Operation::Moe(op) => self.mixture(index, op, w)?,
                Operation::Input(op) => self.token_input(index, op, w)?,
            }
            w.step.profile.lap(block.operation.last_stage());
            self.add_branch(w.step.x, &w.scratch.branch, block.post_norm.as_deref());
            end_block(index, number, w);
        }
        if let Some(factor) = layer.scalar {
            self.cpu.for_rows(w.step.x, self.config.hidden, |_, x| self.cpu.level().run(Scale { x, factor }));
        }
        Ok(())
    }

    /// Computes the answer for the rows that are left in the residual stream.
    fn answer(&self, w: &mut Walk<'_>, answer: Answer<'_>) -> Result<()> {
        let layers = self.config.n_layers;
        if let Some(observer) = &mut w.step.observer {
            observer.stream(layers, w.step.x);
            if layers >= observer.end() {
                return Ok(());
            }
        }
        let (logits, hidden) = match answer {
            Answer::Logits(logits) => (logits, None),
            Answer::Hidden { logits, hidden } => (logits, Some(hidden)),
            Answer::Nothing => (&mut [][..], None),
            Answer::Best(..) => unreachable!("see `most_best`"),
        };
        if logits.is_empty() && hidden.is_none() && w.step.observer.is_none() {
            return Ok(());
        }
        let s = &mut *w.scratch;
        self.norm_rows(w.step.x, &self.weights.final_norm, &mut s.normed);
        see(w.step.observer.as_deref_mut(), Site::lm_head(layers), &s.normed);
        w.step.profile.lap(Stage::Norms);
        if let Some(hidden) = hidden {
            let rows = hidden.chunks_exact_mut(self.config.hidden).enumerate();
            rows.for_each(|(i, out)| out.copy_from_slice(&s.normed.row(i)[..self.config.hidden]));
            self.keep_wanted_output(w);
        }
        if logits.is_empty() {
            return Ok(());
        }
        let s = &mut *w.scratch;
        let tokens = 0..s.normed.n();
        let changed = s.groups.iter().flat_map(|group| group.set.of_lm_head(&group.rows)).collect();
        let (weight, x, y) = (&self.weights.lm_head, &s.normed, &mut *logits);
        let product = Product { weight, bias: None, x, tokens, y, changed, site: None, stage: Stage::LmHead };
        self.compute(vec![product], &mut w.step)?;
        if self.config.logit_scale != 1.0 {
            let factor = self.config.logit_scale;
            self.cpu.for_rows(logits, self.config.vocab, |_, x| self.cpu.level().run(Scale { x, factor }));
        }
        if let Some(cap) = self.config.logit_softcap {
            self.cpu.for_rows(logits, self.config.vocab, |_, x| self.cpu.level().run(SoftCap { x, cap }));
        }
        w.step.profile.lap(Stage::LmHead);
        Ok(())
    }

    /// Computes products of a step as [`Model::multiply`] does, and counts their time as that of their stage, and the
    /// time before them as that of the arithmetic which prepared their inputs.
    ///
    /// # Errors
    /// A weight cannot be read.
    fn compute(&self, products: Vec<Product<'_>>, step: &mut Step<'_>) -> Result<()> {
        let stage = products[0].stage;
        step.profile.lap(stage.before());
        self.multiply(products, self.arithmetic, step.observer.as_deref_mut())?;
        step.profile.lap(stage);
        Ok(())
    }

    /// Shows the inputs of products to the observer, and computes them in one parallel region, or one after the other
    /// if not all weights may be in memory at once.
    ///
    /// # Errors
    /// A weight cannot be read.
    pub(super) fn multiply(
        &self,
        mut products: Vec<Product<'_>>,
        arithmetic: Arithmetic,
        mut observer: ObserverRef<'_>,
    ) -> Result<()> {
        for (i, product) in products.iter().enumerate() {
            // Matrices of one site read the same rows.
            if let Some(site) = product.site.filter(|site| products[..i].iter().all(|p| p.site != Some(*site))) {
                see(observer.as_deref_mut(), site, product.x);
            }
        }
        let at_once =
            if self.weights.cache.as_ref().is_some_and(|cache| cache.is_bounded()) { 1 } else { products.len() };
        for products in products.chunks_mut(at_once.max(1)) {
            let held = products.iter().map(|product| product.weight.hold()).collect::<Result<Vec<Held<'_>>>>()?;
            let mut factors = Factors::of(products.iter().map(|product| &product.changed[..]));
            let inputs: Vec<&Acts> = products.iter().map(|product| product.x).collect();
            let mut jobs = factors.begin(&self.cpu, arithmetic, &inputs);
            jobs.extend(products.iter_mut().zip(&held).map(|(product, matrix)| product.job(matrix)));
            self.cpu.matmul(&mut jobs, arithmetic);
            drop(jobs);
            held.iter().try_for_each(|matrix| matrix.check()).map_err(Error::while_opening_model)?;
            let products = products.iter_mut().map(|product| (product.x, product.tokens.start, &mut *product.y));
            factors.finish(&self.cpu, arithmetic, products);
        }
        Ok(())
    }

    /// Projects all rows to queries, keys and values, and writes the keys and values to the caches.
    fn read(&self, index: usize, op: &Attention<Host>, w: &mut Walk<'_>) -> Result<()> {
        let (s, shape) = (&mut *w.scratch, &op.shape);
        let (q_width, kv_width) = (shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim);
        let n = s.normed.n();
        s.attention.q.resize(n * q_width, 0.0);
        let mut products = vec![product(&op.q, &s.normed, &mut s.attention.q, &s.groups)];
        for (linear, buffer) in [(&op.k, &mut s.attention.k), (&op.v, &mut s.attention.v)] {
            if let Some(linear) = linear {
                buffer.resize(n * kv_width, 0.0);
                products.push(product(linear, &s.normed, buffer, &s.groups));
            }
        }
        if let Some(gate) = &op.gate {
            s.attention.output_gate.resize(s.normed.n() * gate.matrix.rows(), 0.0);
            products.push(product(gate, &s.normed, &mut s.attention.output_gate, &s.groups));
        }
        self.compute(products, &mut w.step)?;
        self.set_q_factors(shape, &s.runs, &mut s.attention.q_factors);
        let angles = shape.rotary.map_or(&[][..], |kind| &w.step.angles[kind]);
        let [q_norm, k_norm] = [0, 1].map(|i| op.head_norms.as_ref().map(|norms| norms[i].as_slice()));
        let keys = Heads { norm: k_norm, head_dim: shape.head_dim, pairs: shape.pairs, angles, scale: 1.0 };
        let queries = Heads { norm: q_norm, scale: shape.scale * LOG2_E, ..keys };
        self.rotate_rows(&mut s.attention.q, q_width, &queries, &s.attention.q_factors);
        if op.k.is_some() {
            if op.v.is_none() {
                s.attention.v.clone_from(&s.attention.k);
            }
            if let Some(ones) = &op.value_norm {
                let values = Heads { norm: Some(ones), head_dim: shape.value_dim, angles: &[], ..keys };
                self.rotate_rows(&mut s.attention.v, kv_width, &values, &[]);
            }
            self.rotate_rows(&mut s.attention.k, kv_width, &keys, &[]);
            self.write_cache(index, w);
        }
        Ok(())
    }

    /// Writes the keys and values of all rows to the caches of layer `index`.
    fn write_cache(&self, index: usize, w: &mut Walk<'_>) {
        let (s, layer) = (&mut *w.scratch, index - self.layers.start);
        let rows: usize = s.runs.iter().map(|run| run.tokens).sum();
        let [k_width, v_width] = [s.attention.k.len(), s.attention.v.len()].map(|len| len / rows.max(1));
        for run in &s.runs {
            let rows = run.first..run.first + run.tokens;
            let [k, v] = [(&s.attention.k, k_width), (&s.attention.v, v_width)]
                .map(|(x, width)| &x[rows.start * width..rows.end * width]);
            w.caches[run.sequence].write(&self.cpu, layer, run.position, k, v);
        }
    }

    /// Computes the factor of the query of each row, in models whose queries grow with their positions.
    fn set_q_factors(&self, shape: &AttentionShape, runs: &[Run], factors: &mut Vec<f32>) {
        factors.clear();
        if let Some(growth) = shape.position_scale {
            let positions = runs.iter().flat_map(|run| run.position..run.position + run.tokens);
            factors.extend(positions.map(|position| growth.at(position)));
        }
    }

    /// Computes attention for the queries of all rows over the keys and values that are kept.
    fn attend(&self, index: usize, shape: &AttentionShape, sinks: Option<&[f32]>, w: &mut Walk<'_>) {
        let s = &mut *w.scratch;
        let layer = &self.kv_layout.layers()[shape.kv_from.unwrap_or(index) - self.layers.start];
        let (runs, caches, queries) = (&s.runs[..], &w.caches[..], &s.attention.q[..]);
        let task = AttentionTask { kernel: self.attention, cpu: &self.cpu, layer, shape, sinks, runs, caches, queries };
        s.attention.attended.reset(w.step.x.len() / self.config.hidden, shape.n_heads * layer.heads.value);
        let (out, stride) = s.attention.attended.rows_mut();
        s.attention.attend.run(&task, out, stride);
    }

    /// Multiplies the results of attention by the sigmoid of their gates.
    fn gate_output(&self, shape: &AttentionShape, gates: usize, w: &mut Walk<'_>) {
        let (s, width) = (&mut *w.scratch, shape.n_heads * shape.head_dim);
        let (out, stride) = s.attention.attended.rows_mut();
        self.cpu.for_rows(out, stride, |i, out| {
            let gate = &s.attention.output_gate[i * gates..][..gates];
            self.cpu.level().run(SigmoidGate { x: &mut out[..width], gate });
        });
    }

    /// Writes the projected results of attention to `branch`.
    fn project(&self, o: &Linear, w: &mut Walk<'_>) -> Result<()> {
        let s = &mut *w.scratch;
        self.prepare(&mut s.attention.attended);
        s.branch.resize(s.attention.attended.n() * self.config.hidden, 0.0);
        let product = product(o, &s.attention.attended, &mut s.branch, &s.groups);
        self.compute(vec![product], &mut w.step)
    }

    /// Converts activations to the forms that the products read.
    pub(super) fn prepare(&self, acts: &mut Acts) {
        self.forms.iter().for_each(|form| self.cpu.prepare(acts, *form));
    }
}

/// A matrix product, `y = x * weight^T + bias`, whose weights may still have to be rebuilt; otherwise like [`Job`].
pub(super) struct Product<'a> {
    pub weight: &'a Weight,
    /// Bias, if any: `(rows)`.
    pub bias: Option<&'a [f32]>,
    pub x: &'a Acts,
    /// Rows of `x` that are multiplied.
    pub tokens: Range<usize>,
    /// Output: `(tokens, rows)`.
    pub y: &'a mut [f32],
    /// Rows of `x` whose results adapters change.
    pub changed: Vec<Changed<'a>>,
    /// Site of `x`, if the observer is shown all rows of it before the product.
    pub site: Option<Site>,
    /// Stage that counts its time.
    pub stage: Stage,
}

impl Product<'_> {
    fn job<'a>(&'a mut self, matrix: &'a Matrix) -> Job<'a> {
        Job { matrix, bias: self.bias, x: self.x, tokens: self.tokens.clone(), y: self.y, added: None }
    }
}

/// Returns the product of all rows of `x` with a linear layer, and with the changes of the adapters of the rows.
pub(super) fn product<'a>(linear: &'a Linear, x: &'a Acts, y: &'a mut [f32], groups: &'a [Group]) -> Product<'a> {
    let changed = linear.target().map_or_else(Vec::new, |(layer, target)| adapters::changes(groups, layer, target));
    Product {
        weight: &linear.matrix,
        bias: linear.bias.as_deref(),
        x,
        tokens: 0..x.n(),
        y,
        changed,
        site: linear.site(),
        stage: linear.stage(),
    }
}
