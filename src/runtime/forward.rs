//! CPU device part: computes layers for a chunk of tokens from any number of sequences.
//!
//! Every operation handles one token at a time or is a product with independent columns, so a token's result does not
//! depend on the other tokens of the chunk.

use super::adapters::factors::Factors;
use super::adapters::{self, Changed, Group, Target};
use super::attention::{Attend, Task};
use super::cpu::{Acts, Arithmetic, Cpu, Form, Job, Matrix};
use super::device::{Answer, Cache, DevicePart, PartCache, PartInfo, Run, Step};
use super::experts::{Experts, Mixture};
use super::kv::{KvCache, KvLayout, PagePool};
use super::layer::{Attention, Layer, Mlp, Operation};
use super::observe::see;
use super::ops::{Add, AddNormed, Gated, RmsNorm, SoftCap, norm_heads};
use super::profile::Stage;
use super::rope::rotate;
use super::weights::{Held, Host, Linear, Weight, Weights};
use crate::calibration::Part;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::model_config::ModelConfig;
use crate::simd::Kernel;
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
    /// Pages of the caches of these layers.
    pub pool: Arc<PagePool>,
    /// Threads and matrix kernels.
    pub cpu: Arc<Cpu>,
    /// Arithmetic of matrix products.
    pub arithmetic: Arithmetic,
    /// Forms (number types) of activations that the products read.
    pub forms: Vec<Form>,
    /// Layers computed by this part.
    pub layers: Range<usize>,
}

/// Buffers that are reused from call to call. `n` is the number of tokens in a chunk.
#[derive(Debug, Default)]
struct Scratch {
    /// Sequence and position of each row.
    runs: Vec<Run>,
    /// Adapters of the rows that have any.
    groups: Vec<Group>,
    /// Normalized inputs: `(n, hidden)`.
    normed: Acts,
    /// Queries: `(n, n_heads * head_dim)`.
    q: Vec<f32>,
    /// Keys: `(n, n_kv_heads * head_dim)`.
    k: Vec<f32>,
    /// Values: `(n, n_kv_heads * head_dim)`.
    v: Vec<f32>,
    attend: Attend,
    /// Attention output: `(n, n_heads * head_dim)`.
    attended: Acts,
    /// Result of the gate projection: `(n, intermediate)`.
    gate: Vec<f32>,
    /// Result of the up projection: `(n, intermediate)`.
    up: Vec<f32>,
    /// Output of the activation function: `(n, intermediate)`.
    middle: Acts,
    /// Output of the current block before it is added to the residual stream: `(n, hidden)`.
    branch: Vec<f32>,
    experts: Experts,
}

/// State of one step while it passes through the layers.
struct Walk<'a> {
    /// The step; its `caches` were moved to the field below.
    step: Step<'a>,
    caches: Vec<&'a mut KvCache>,
    scratch: &'a mut Scratch,
}

impl CpuPart {
    /// Creates the part that computes the layers of `model`.
    pub fn new(model: Model) -> CpuPart {
        CpuPart { model, scratch: Scratch::default() }
    }
}

impl PartCache for KvCache {
    fn truncate(&mut self, len: usize) {
        KvCache::truncate(self, len);
    }

    fn clone_cache(&self) -> Cache {
        Cache::new(self.clone())
    }
}

impl DevicePart for CpuPart {
    fn info(&self) -> PartInfo {
        PartInfo { layers: self.model.layers.clone(), device: None, memory_taken: 0 }
    }

    fn new_cache(&self) -> Result<Cache> {
        Ok(Cache::new(KvCache::new(&self.model.pool)))
    }

    fn owns(&self, cache: &Cache) -> bool {
        cache.get::<KvCache>().is_some_and(|cache| *cache.layout() == self.model.kv_layout)
    }

    fn grow(&self, cache: &mut Cache, positions: Range<usize>) -> Result<()> {
        cache.get_mut::<KvCache>().grow(positions.len())
    }

    fn run(&mut self, mut step: Step<'_>, answer: Answer<'_>) -> Result<()> {
        self.scratch.runs.clear();
        self.scratch.runs.extend_from_slice(step.runs);
        self.scratch.groups.clear();
        self.scratch.groups.extend_from_slice(step.groups);
        let caches = std::mem::take(&mut step.caches).into_iter().map(Cache::get_mut).collect();
        let layers = self.model.layers.clone();
        let first = step.first_layer.max(layers.start);
        let mut walk = Walk { step, caches, scratch: &mut self.scratch };
        let mut done = self.model.walk(first..layers.end, &mut walk);
        if done.is_ok() && layers.end == self.model.config.n_layers {
            done = self.model.answer(&mut walk, answer);
        }
        // Adapters leave memory when no text uses them any more.
        self.scratch.groups.clear();
        done
    }

    fn most_best(&self) -> usize {
        0
    }

    fn take_busy(&mut self) -> Duration {
        Duration::ZERO
    }
}

impl Model {
    /// Computes layers. In the last layer of the model, only the wanted rows are computed after the keys and values.
    fn walk(&self, layers: Range<usize>, w: &mut Walk<'_>) -> Result<()> {
        for index in layers {
            interrupt::check()?;
            if let Some(observer) = &mut w.step.observer {
                if index >= observer.end() {
                    break;
                }
                observer.stream(index, w.step.x);
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
        for block in &layer.blocks {
            self.norm_rows(w.step.x, &block.norm, &mut w.scratch.normed);
            w.step.profile.lap(Stage::Norms);
            match &block.operation {
                Operation::Attention(op) => {
                    self.read(index, op, w)?;
                    if index + 1 == self.config.n_layers {
                        self.keep_wanted(op, w);
                    }
                    if w.scratch.runs.is_empty() {
                        return Ok(());
                    }
                    self.attend(index, op, w)?;
                    w.step.profile.lap(Stage::Projections);
                }
                Operation::Mlp(op) => {
                    self.mlp(index, op, w)?;
                    w.step.profile.lap(Stage::Mlp);
                }
                Operation::Moe(op) => {
                    let mixture = Mixture { model: self, layer: index, op };
                    let s = &mut *w.scratch;
                    s.experts.run(&mixture, &s.normed, &s.groups, &mut s.branch, w.step.observer.as_deref_mut())?;
                    w.step.profile.lap(Stage::Mlp);
                }
            }
            self.add_branch(w.step.x, &w.scratch.branch, block.post_norm.as_deref());
            w.step.profile.lap(Stage::Norms);
        }
        Ok(())
    }

    /// Computes the answer for the rows that are left in the residual stream.
    fn answer(&self, w: &mut Walk<'_>, answer: Answer<'_>) -> Result<()> {
        let layers = self.config.n_layers;
        if let Some(observer) = &mut w.step.observer {
            if layers >= observer.end() {
                return Ok(());
            }
            observer.stream(layers, w.step.x);
        }
        let logits = match answer {
            Answer::Logits(logits) => logits,
            Answer::Nothing => &mut [],
            Answer::Best(..) => unreachable!("see `most_best`"),
        };
        if logits.is_empty() && w.step.observer.is_none() {
            return Ok(());
        }
        let s = &mut *w.scratch;
        self.norm_rows(w.step.x, &self.weights.final_norm, &mut s.normed);
        see(w.step.observer.as_deref_mut(), layers, Part::LmHead, &s.normed);
        w.step.profile.lap(Stage::Norms);
        if logits.is_empty() {
            return Ok(());
        }
        let tokens = 0..s.normed.n();
        let changed = s.groups.iter().flat_map(|group| group.set.of_lm_head(&group.rows)).collect();
        let product =
            Product { weight: &self.weights.lm_head, bias: None, x: &s.normed, tokens, y: &mut *logits, changed };
        self.multiply(vec![product], self.arithmetic)?;
        if let Some(cap) = self.config.logit_softcap {
            self.cpu.for_rows(logits, self.config.vocab, |_, x| self.cpu.level().run(SoftCap { x, cap }));
        }
        w.step.profile.lap(Stage::LmHead);
        Ok(())
    }

    /// Computes products in one parallel region, or one after the other if not all weights may be in memory at once.
    ///
    /// # Errors
    /// A weight cannot be read.
    pub(super) fn multiply(&self, mut products: Vec<Product<'_>>, arithmetic: Arithmetic) -> Result<()> {
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
        see(w.step.observer.as_deref_mut(), index, Part::Attention, &s.normed);
        let (q_width, kv_width) = (shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim);
        for (buffer, width) in [(&mut s.q, q_width), (&mut s.k, kv_width), (&mut s.v, kv_width)] {
            buffer.resize(s.normed.n() * width, 0.0);
        }
        let products = vec![
            product(&op.q, &s.normed, &mut s.q).changed_by(&s.groups, index, Target::Q),
            product(&op.k, &s.normed, &mut s.k).changed_by(&s.groups, index, Target::K),
            product(&op.v, &s.normed, &mut s.v).changed_by(&s.groups, index, Target::V),
        ];
        self.multiply(products, self.arithmetic)?;
        w.step.profile.lap(Stage::Projections);
        let angles = &w.step.angles[shape.rotary];
        let [q_norm, k_norm] = [0, 1].map(|i| op.head_norms.as_ref().map(|norms| norms[i].as_slice()));
        let head_dim = shape.head_dim;
        self.rotate_rows(&mut s.q, q_width, &Heads { norm: q_norm, head_dim, angles, scale: shape.scale * LOG2_E });
        self.rotate_rows(&mut s.k, kv_width, &Heads { norm: k_norm, head_dim, angles, scale: 1.0 });
        for run in &s.runs {
            let rows = run.first * kv_width..(run.first + run.tokens) * kv_width;
            let layer = index - self.layers.start;
            w.caches[run.sequence].write(&self.cpu, layer, run.position, &s.k[rows.clone()], &s.v[rows]);
        }
        w.step.profile.lap(Stage::Attention);
        Ok(())
    }

    /// Drops all rows except the wanted ones: after the keys and values of the last layer, the others are not used.
    fn keep_wanted(&self, op: &Attention<Host>, w: &mut Walk<'_>) {
        let rows: usize = w.step.runs.iter().map(|run| run.tokens).sum();
        if w.step.wanted.len() == rows {
            return;
        }
        let s = &mut *w.scratch;
        let mut buffers = [(&mut *w.step.x, self.config.hidden), (&mut s.q, op.shape.n_heads * op.shape.head_dim)];
        s.runs.clear();
        for (i, row) in w.step.wanted.iter().enumerate() {
            let run = w.step.runs[w.step.runs.partition_point(|run| run.first + run.tokens <= *row)];
            s.runs.push(Run { first: i, tokens: 1, position: run.position + row - run.first, ..run });
            for (buffer, width) in &mut buffers {
                buffer.copy_within(row * *width..(row + 1) * *width, i * *width);
            }
        }
        buffers.into_iter().for_each(|(buffer, width)| buffer.truncate(w.step.wanted.len() * width));
        for group in &mut s.groups {
            let kept = |row: usize| w.step.wanted.partition_point(|wanted| *wanted < row);
            group.rows = kept(group.rows.start)..kept(group.rows.end);
        }
        s.groups.retain(|group| !group.rows.is_empty());
    }

    /// Computes attention for the queries of all rows and writes the projected result to `branch`.
    fn attend(&self, index: usize, op: &Attention<Host>, w: &mut Walk<'_>) -> Result<()> {
        let (s, shape) = (&mut *w.scratch, &op.shape);
        let n = w.step.x.len() / self.config.hidden;
        let task = Task {
            cpu: &self.cpu,
            layer: &self.kv_layout.layers()[index - self.layers.start],
            shape,
            sinks: op.sinks.as_deref(),
            runs: &s.runs,
            caches: &w.caches,
            queries: &s.q,
        };
        s.attended.reset(n, shape.n_heads * shape.head_dim);
        let (out, stride) = s.attended.rows_mut();
        s.attend.run(&task, out, stride);
        see(w.step.observer.as_deref_mut(), index, Part::AttentionOutput, &s.attended);
        self.prepare(&mut s.attended);
        w.step.profile.lap(Stage::Attention);
        s.branch.resize(n * self.config.hidden, 0.0);
        let product = product(&op.o, &s.attended, &mut s.branch).changed_by(&s.groups, index, Target::O);
        self.multiply(vec![product], self.arithmetic)
    }

    fn mlp(&self, index: usize, op: &Mlp<Host>, w: &mut Walk<'_>) -> Result<()> {
        let (s, width) = (&mut *w.scratch, op.intermediate);
        see(w.step.observer.as_deref_mut(), index, Part::Mlp, &s.normed);
        let n = s.normed.n();
        s.gate.resize(n * width, 0.0);
        s.up.resize(n * width, 0.0);
        let products = vec![
            product(&op.gate, &s.normed, &mut s.gate).changed_by(&s.groups, index, Target::Gate),
            product(&op.up, &s.normed, &mut s.up).changed_by(&s.groups, index, Target::Up),
        ];
        self.multiply(products, self.arithmetic)?;
        s.middle.reset(n, width);
        let (out, stride) = s.middle.rows_mut();
        let (activation, gate, up) = (op.activation, &s.gate, &s.up);
        self.cpu.for_rows(out, stride, |i, out| {
            let row = i * width..(i + 1) * width;
            let out = &mut out[..width];
            self.cpu.level().run(Gated { activation, gate: &gate[row.clone()], up: &up[row], out });
        });
        see(w.step.observer.as_deref_mut(), index, Part::MlpMiddle, &s.middle);
        self.prepare(&mut s.middle);
        s.branch.resize(n * self.config.hidden, 0.0);
        let product = product(&op.down, &s.middle, &mut s.branch).changed_by(&s.groups, index, Target::Down);
        self.multiply(vec![product], self.arithmetic)
    }

    fn norm(&self, x: &[f32], weight: &[f32], out: &mut [f32]) {
        self.cpu.level().run(RmsNorm { x, weight, eps: self.config.norm_eps, out });
    }

    fn norm_rows(&self, x: &[f32], weight: &[f32], normed: &mut Acts) {
        let hidden = weight.len();
        normed.reset(x.len() / hidden, hidden);
        let (out, stride) = normed.rows_mut();
        self.cpu.for_rows(out, stride, |i, out| self.norm(&x[i * hidden..][..hidden], weight, &mut out[..hidden]));
        self.prepare(normed);
    }

    fn rotate_rows(&self, rows: &mut [f32], width: usize, how: &Heads<'_>) {
        let eps = self.config.norm_eps;
        let rotated = how.angles.len() / (rows.len() / width);
        self.cpu.for_rows(rows, width, |i, heads| {
            let angles = &how.angles[i * rotated..][..rotated];
            self.cpu.level().run(Rotate { heads, eps, how: Heads { angles, ..*how } });
        });
    }

    /// Adds the output of a block to the residual stream, after the post norm if the model has one.
    fn add_branch(&self, x: &mut [f32], branch: &[f32], norm: Option<&[f32]>) {
        let (hidden, eps) = (self.config.hidden, self.config.norm_eps);
        self.cpu.for_rows(x, hidden, |i, x| {
            let y = &branch[i * hidden..][..hidden];
            match norm {
                Some(weight) => self.cpu.level().run(AddNormed { x, y, weight, eps }),
                None => self.cpu.level().run(Add { x, y }),
            }
        });
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
}

impl<'p> Product<'p> {
    /// Adds the changes of a target of a layer.
    pub fn changed_by(mut self, groups: &'p [Group], layer: usize, target: Target) -> Product<'p> {
        self.changed = adapters::changes(groups, layer, target);
        self
    }

    fn job<'a>(&'a mut self, matrix: &'a Matrix) -> Job<'a> {
        Job { matrix, bias: self.bias, x: self.x, tokens: self.tokens.clone(), y: self.y, added: None }
    }
}

/// Returns the product of all rows of `x` with a linear layer.
pub(super) fn product<'a>(linear: &'a Linear, x: &'a Acts, y: &'a mut [f32]) -> Product<'a> {
    Product { weight: &linear.matrix, bias: linear.bias.as_deref(), x, tokens: 0..x.n(), y, changed: Vec::new() }
}

/// Normalization, rotation and scaling of the heads of queries or keys.
struct Heads<'a> {
    /// Factors of the norm, if there is one: `(head_dim)`.
    norm: Option<&'a [f32]>,
    head_dim: usize,
    /// Cosines and sines of each row: `(n, rotary_dim)`.
    angles: &'a [f32],
    /// Factor of the rotated heads.
    scale: f32,
}

/// [`norm_heads`] and [`rotate`] of one token as a kernel.
struct Rotate<'a> {
    heads: &'a mut [f32],
    eps: f32,
    how: Heads<'a>,
}

impl Kernel for Rotate<'_> {
    #[inline(always)]
    fn run(self) {
        let Heads { norm, head_dim, angles, scale } = self.how;
        if let Some(weight) = norm {
            norm_heads(self.heads, weight, self.eps);
        }
        rotate(self.heads, head_dim, angles, scale);
    }
}
