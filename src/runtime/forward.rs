//! The walk through the layers: a chunk of tokens from any number of sequences goes in, hidden states come out.
//!
//! Every step works on one token's values at a time or is a product whose columns are independent, so a token's result
//! does not depend on the company it is computed in.

use super::attention::{Attention, LayerShape, Run, Task};
use super::cpu::{Acts, Arithmetic, Cpu, Form, Job, Matrix};
use super::engine::Sequence;
use super::experts::{Experts, Mixture};
use super::kv::KvLayout;
use super::observe::Watch;
use super::ops::{Add, AddNormed, Gated, RmsNorm, SoftCap, norm_heads};
use super::profile::{Profile, Stage};
use super::rope::{Rotary, rotate};
use super::weights::{Held, Layer, Linear, MlpWeights, Weight, Weights};
use crate::calibration::Part;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::model_config::{Activation, Mlp, ModelConfig};
use crate::simd::Kernel;
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// What the walk needs and does not change.
#[derive(Debug)]
pub struct Model {
    /// Dimensions and flags.
    pub config: ModelConfig,
    /// Bound tensors.
    pub weights: Weights,
    /// Rotary frequencies.
    pub rotary: Rotary,
    /// Those of layers with a window, where they differ.
    pub local_rotary: Option<Rotary>,
    /// Sizes of the caches.
    pub kv_layout: KvLayout,
    /// Threads and matrix kernels.
    pub cpu: Cpu,
    /// What products are computed in.
    pub arithmetic: Arithmetic,
    /// In which forms they read activations.
    pub forms: Vec<Form>,
    /// Layers that are computed here, the first ones; GPUs have the others and the output matrix.
    pub own_layers: usize,
}

/// Memory that is reused from call to call. `n` is the number of tokens in a chunk.
#[derive(Debug, Default)]
pub struct Scratch {
    /// Which sequence and position each row has.
    runs: Vec<Run>,
    /// The residual stream: `(n, hidden)`.
    pub(super) x: Vec<f32>,
    /// Normed inputs: `(n, hidden)`.
    normed: Acts,
    /// Cosines and sines: `(n, rotary_dim)`.
    angles: Vec<f32>,
    /// The same for layers with a window, where they differ.
    local_angles: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attention: Attention,
    /// Attention output: `(n, n_heads * head_dim)`.
    attended: Acts,
    gate: Vec<f32>,
    up: Vec<f32>,
    /// Activated: `(n, intermediate)`.
    middle: Acts,
    /// What a block adds to the residual stream: `(n, hidden)`.
    branch: Vec<f32>,
    experts: Experts,
    /// Where the time goes.
    pub profile: Profile,
    /// Who looks on.
    pub(super) watch: Watch,
}

impl Scratch {
    /// What the layers on GPUs go on with: the residual stream, and both kinds of angles.
    pub(super) fn stream(&self) -> [&[f32]; 3] {
        [&self.x, &self.angles, &self.local_angles]
    }

    /// Bytes of the buffers that grow with the chunk.
    pub fn bytes(&self) -> usize {
        let heads = [&self.angles, &self.local_angles, &self.q, &self.k, &self.v];
        let floats = [&self.x, &self.gate, &self.up, &self.branch];
        let acts = [&self.normed, &self.attended, &self.middle];
        4 * heads.iter().chain(&floats).map(|v| v.capacity()).sum::<usize>()
            + acts.map(|a| 4 * a.n() * a.k()).iter().sum::<usize>()
            + self.attention.bytes()
            + self.experts.bytes()
    }
}

/// One chunk: its tokens and the runs they form.
pub struct Chunk<'a> {
    /// Token ids, row by row.
    pub tokens: &'a [u32],
    /// Which sequence and position each row has.
    pub runs: &'a [Run],
    /// Rows whose logits are wanted, ascending.
    pub wanted: &'a [usize],
}

impl Model {
    /// Runs a chunk through its own layers; the caches have already grown. Leaves the residual stream in `scratch.x`: of all rows,
    /// or of the wanted ones if no layer is left.
    ///
    /// # Errors
    /// The user interrupted, or a weight cannot be read; the caller takes the sequences back to where they were.
    pub fn layers(&self, chunk: &Chunk<'_>, sequences: &mut [&mut Sequence], s: &mut Scratch) -> Result<()> {
        self.start(chunk, sequences, s)?;
        self.layers_of(0..self.own_layers, chunk, sequences, s)
    }

    /// What comes before the first layer.
    ///
    /// # Errors
    /// As [`Model::layers`].
    pub fn start(&self, chunk: &Chunk<'_>, sequences: &mut [&mut Sequence], s: &mut Scratch) -> Result<()> {
        s.runs.clear();
        s.runs.extend_from_slice(chunk.runs);
        s.profile.lap(Stage::Other, &self.cpu);
        self.embed(chunk.tokens, s)?;
        s.profile.lap(Stage::Embedding, &self.cpu);
        self.angles(chunk, sequences, s);
        Ok(())
    }

    /// Some of the layers, which follow on what was computed last.
    ///
    /// # Errors
    /// As [`Model::layers`].
    pub fn layers_of(
        &self,
        range: Range<usize>,
        chunk: &Chunk<'_>,
        sequences: &mut [&mut Sequence],
        s: &mut Scratch,
    ) -> Result<()> {
        for (index, layer) in self.weights.layers.iter().enumerate().take(range.end).skip(range.start) {
            interrupt::check()?;
            if s.watch.is_over(index) {
                break;
            }
            self.read(index, layer, sequences, s)?;
            if index + 1 == self.config.n_layers {
                self.keep(chunk, s);
            }
            if !s.runs.is_empty() {
                self.attend(index, layer, sequences, s)?;
                self.mlp_block(index, layer, s)?;
            }
            if s.watch.is_large() {
                layer.release();
            }
        }
        Ok(())
    }

    /// Starts the residual stream with the embeddings of the tokens.
    fn embed(&self, tokens: &[u32], s: &mut Scratch) -> Result<()> {
        let c = &self.config;
        s.x.resize(tokens.len() * c.hidden, 0.0);
        for (token, row) in tokens.iter().zip(s.x.chunks_exact_mut(c.hidden)) {
            self.weights.embedding.read_row(*token as usize, row)?;
            row.iter_mut().for_each(|x| *x *= c.embedding_scale);
        }
        Ok(())
    }

    /// Cosines and sines of each row's position.
    fn angles(&self, chunk: &Chunk<'_>, sequences: &[&mut Sequence], s: &mut Scratch) {
        for (rotary, angles) in [(Some(&self.rotary), &mut s.angles), (self.local_rotary.as_ref(), &mut s.local_angles)]
        {
            let Some(rotary) = rotary else { continue };
            angles.resize(chunk.tokens.len() * rotary.dim(), 0.0);
            let mut rows = angles.chunks_exact_mut(rotary.dim());
            for run in chunk.runs {
                let long = sequences[run.sequence].long;
                for (position, row) in (run.position..run.position + run.tokens).zip(&mut rows) {
                    rotary.angles(position, long, row);
                }
            }
        }
    }

    /// Logits of the rows in `scratch.x`: `logits` is `(rows, vocab)`.
    ///
    /// # Errors
    /// A weight cannot be read.
    pub fn logits(&self, s: &mut Scratch, logits: &mut [f32]) -> Result<()> {
        self.norm_rows(&s.x, &self.weights.final_norm, &mut s.normed);
        s.profile.lap(Stage::Norms, &self.cpu);
        let tokens = 0..s.normed.n();
        let product = Product { weight: &self.weights.lm_head, bias: None, x: &s.normed, tokens, y: &mut *logits };
        self.multiply(vec![product], self.arithmetic)?;
        if let Some(cap) = self.config.logit_softcap {
            self.cpu.for_rows(logits, self.config.vocab, |_, x| self.cpu.level().run(SoftCap { x, cap }));
        }
        s.profile.lap(Stage::LmHead, &self.cpu);
        Ok(())
    }

    /// Computes products in one parallel region, or one after the other where not all weights may be in memory at once.
    ///
    /// # Errors
    /// A weight cannot be read.
    pub(super) fn multiply(&self, mut products: Vec<Product<'_>>, arithmetic: Arithmetic) -> Result<()> {
        let at_once =
            if self.weights.cache.as_ref().is_some_and(|cache| cache.is_bounded()) { 1 } else { products.len() };
        for products in products.chunks_mut(at_once.max(1)) {
            let held = products.iter().map(|product| product.weight.hold()).collect::<Result<Vec<Held<'_>>>>()?;
            let jobs = products.iter_mut().zip(&held).map(|(product, matrix)| product.job(matrix));
            self.cpu.matmul(&mut jobs.collect::<Vec<_>>(), arithmetic);
            held.iter().try_for_each(|matrix| matrix.check()).map_err(Error::while_opening_model)?;
        }
        Ok(())
    }

    /// Shows the observer what the output matrix would read of the rows in `scratch.x`.
    pub fn show_head(&self, s: &mut Scratch) {
        self.norm_rows(&s.x, &self.weights.final_norm, &mut s.normed);
        s.watch.see(self.config.n_layers, Part::LmHead, &s.normed);
    }

    /// Projects all rows to queries, keys and values, and adds the latter two to the caches.
    fn read(&self, index: usize, layer: &Layer, sequences: &mut [&mut Sequence], s: &mut Scratch) -> Result<()> {
        let c = &self.config;
        let n = s.x.len() / c.hidden;
        let (q_width, kv_width) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
        self.norm_rows(&s.x, &layer.attention_norm, &mut s.normed);
        s.watch.see(index, Part::Attention, &s.normed);
        s.profile.lap(Stage::Norms, &self.cpu);
        for (buffer, width) in [(&mut s.q, q_width), (&mut s.k, kv_width), (&mut s.v, kv_width)] {
            buffer.resize(n * width, 0.0);
        }
        let products = vec![
            product(&layer.q, &s.normed, &mut s.q),
            product(&layer.k, &s.normed, &mut s.k),
            product(&layer.v, &s.normed, &mut s.v),
        ];
        self.multiply(products, self.arithmetic)?;
        s.profile.lap(Stage::Projections, &self.cpu);
        let local = self.local_rotary.is_some() && c.window(index).is_some();
        let angles = if local { &s.local_angles } else { &s.angles };
        let norms = layer.head_norms.as_ref();
        let query = Heads { norm: norms.map(|n| n.q.as_slice()), angles, scale: c.attention.scale * LOG2_E };
        let key = Heads { norm: norms.map(|n| n.k.as_slice()), angles, scale: 1.0 };
        self.rotate_rows(&mut s.q, q_width, &query);
        self.rotate_rows(&mut s.k, kv_width, &key);
        for run in &s.runs {
            let rows = run.first * kv_width..(run.first + run.tokens) * kv_width;
            let cache = &mut sequences[run.sequence].cache;
            cache.write(&self.cpu, index, run.position, &s.k[rows.clone()], &s.v[rows]);
        }
        s.profile.lap(Stage::Attention, &self.cpu);
        Ok(())
    }

    /// Drops all rows but the wanted: once the last layer has its keys and values, nobody needs the others.
    fn keep(&self, chunk: &Chunk<'_>, s: &mut Scratch) {
        if chunk.wanted.len() == chunk.tokens.len() {
            return;
        }
        let widths = [self.config.hidden, self.config.n_heads * self.config.head_dim];
        s.runs.clear();
        for (i, row) in chunk.wanted.iter().enumerate() {
            let run = chunk.runs[chunk.runs.partition_point(|run| run.first + run.tokens <= *row)];
            s.runs.push(Run { first: i, tokens: 1, position: run.position + row - run.first, ..run });
            for (buffer, width) in [&mut s.x, &mut s.q].into_iter().zip(widths) {
                buffer.copy_within(row * width..(row + 1) * width, i * width);
            }
        }
        for (buffer, width) in [&mut s.x, &mut s.q].into_iter().zip(widths) {
            buffer.truncate(chunk.wanted.len() * width);
        }
    }

    /// Attends with the queries of all rows and adds the result to the residual stream.
    fn attend(&self, index: usize, layer: &Layer, sequences: &[&mut Sequence], s: &mut Scratch) -> Result<()> {
        let c = &self.config;
        let n = s.x.len() / c.hidden;
        let task = Task {
            cpu: &self.cpu,
            layout: &self.kv_layout,
            n_heads: c.n_heads,
            shape: LayerShape {
                layer: index,
                window: c.window(index),
                softcap: c.attention.softcap,
                sinks: layer.sinks.as_deref(),
            },
            runs: &s.runs,
            sequences,
            queries: &s.q,
        };
        s.attended.reset(n, c.n_heads * c.head_dim);
        let (out, stride) = s.attended.rows_mut();
        s.attention.run(&task, out, stride);
        s.watch.see(index, Part::AttentionOutput, &s.attended);
        self.prepare(&mut s.attended);
        s.profile.lap(Stage::Attention, &self.cpu);
        s.branch.resize(n * c.hidden, 0.0);
        self.multiply(vec![product(&layer.o, &s.attended, &mut s.branch)], self.arithmetic)?;
        s.profile.lap(Stage::Projections, &self.cpu);
        self.add_branch(&mut s.x, &s.branch, layer.attention_post_norm.as_deref());
        s.profile.lap(Stage::Norms, &self.cpu);
        Ok(())
    }

    fn mlp_block(&self, index: usize, layer: &Layer, s: &mut Scratch) -> Result<()> {
        self.norm_rows(&s.x, &layer.mlp_norm, &mut s.normed);
        s.profile.lap(Stage::Norms, &self.cpu);
        match (&layer.mlp, &self.config.mlp) {
            (MlpWeights::Dense { gate, up, down }, Mlp::Dense { intermediate, activation, .. }) => {
                s.watch.see(index, Part::Mlp, &s.normed);
                self.dense(index, *intermediate, *activation, [gate, up, down], s)?;
            }
            (MlpWeights::Moe { router, gate_up, down }, Mlp::Moe { .. }) => {
                let mixture = Mixture { model: self, layer: index, router, gate_up, down };
                s.experts.run(&mixture, &s.normed, &mut s.branch, &mut s.watch)?;
            }
            _ => unreachable!("weights are bound from the same configuration"),
        }
        s.profile.lap(Stage::Mlp, &self.cpu);
        self.add_branch(&mut s.x, &s.branch, layer.mlp_post_norm.as_deref());
        s.profile.lap(Stage::Norms, &self.cpu);
        Ok(())
    }

    fn dense(
        &self,
        index: usize,
        width: usize,
        activation: Activation,
        [gate, up, down]: [&Linear; 3],
        s: &mut Scratch,
    ) -> Result<()> {
        let n = s.x.len() / self.config.hidden;
        s.gate.resize(n * width, 0.0);
        s.up.resize(n * width, 0.0);
        let products = vec![product(gate, &s.normed, &mut s.gate), product(up, &s.normed, &mut s.up)];
        self.multiply(products, self.arithmetic)?;
        s.middle.reset(n, width);
        let (out, stride) = s.middle.rows_mut();
        let (gate, up) = (&s.gate, &s.up);
        self.cpu.for_rows(out, stride, |i, out| {
            let row = i * width..(i + 1) * width;
            let out = &mut out[..width];
            self.cpu.level().run(Gated { activation, gate: &gate[row.clone()], up: &up[row], out });
        });
        s.watch.see(index, Part::MlpMiddle, &s.middle);
        self.prepare(&mut s.middle);
        s.branch.resize(n * self.config.hidden, 0.0);
        self.multiply(vec![product(down, &s.middle, &mut s.branch)], self.arithmetic)
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
        let (head_dim, eps) = (self.config.head_dim, self.config.norm_eps);
        let rotated = how.angles.len() / (rows.len() / width);
        self.cpu.for_rows(rows, width, |i, heads| {
            let angles = &how.angles[i * rotated..][..rotated];
            self.cpu.level().run(Rotate { heads, head_dim, norm: how.norm, eps, angles, scale: how.scale });
        });
    }

    /// Adds what a block computed to the residual stream, normed if the model does so.
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

    /// Gives activations the forms that products read.
    pub(super) fn prepare(&self, acts: &mut Acts) {
        self.forms.iter().for_each(|form| self.cpu.prepare(acts, *form));
    }
}

/// A [`Job`] whose weights may still have to be rebuilt.
pub(super) struct Product<'a> {
    pub weight: &'a Weight,
    /// `(rows)`
    pub bias: Option<&'a [f32]>,
    pub x: &'a Acts,
    /// Rows of `x` that take part.
    pub tokens: Range<usize>,
    /// `(tokens, rows)`
    pub y: &'a mut [f32],
}

impl Product<'_> {
    fn job<'a>(&'a mut self, matrix: &'a Matrix) -> Job<'a> {
        Job { matrix, bias: self.bias, x: self.x, tokens: self.tokens.clone(), y: self.y }
    }
}

/// The product of all inputs with a bound weight.
pub(super) fn product<'a>(linear: &'a Linear, x: &'a Acts, y: &'a mut [f32]) -> Product<'a> {
    Product { weight: &linear.matrix, bias: linear.bias.as_deref(), x, tokens: 0..x.n(), y }
}

/// What happens to the heads of queries or keys.
struct Heads<'a> {
    /// `(head_dim)`: weights of the norm, if there is one.
    norm: Option<&'a [f32]>,
    /// `(n, rotary_dim)`.
    angles: &'a [f32],
    /// Multiplies them.
    scale: f32,
}

/// [`norm_heads`] and [`rotate`] as a kernel, for one token.
struct Rotate<'a> {
    heads: &'a mut [f32],
    head_dim: usize,
    norm: Option<&'a [f32]>,
    eps: f32,
    angles: &'a [f32],
    scale: f32,
}

impl Kernel for Rotate<'_> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        if let Some(weight) = self.norm {
            norm_heads(self.heads, weight, self.eps);
        }
        rotate(self.heads, self.head_dim, self.angles, self.scale);
    }
}
