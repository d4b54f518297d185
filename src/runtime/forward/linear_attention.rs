//! Linear attention, gated delta nets and Mamba-2: convolution of the projections, a rule in each head, and the gated
//! norm of the output.
//!
//! With `g_t` the sum of the logarithms of the decays since the last border, and `S` the matrix at the border, the
//! rules of [`GatedDeltaNet`] and [`Mamba2`] become sums over the rows since the border (the chunkwise forms of arXiv
//! 2412.06464 and 2405.21060):
//!
//! ```text
//! u_t = b_t (v_t - exp(g_t) S' k_t - sum over s < t of exp(g_t - g_s) (k_t . k_s) u_s)      delta rule
//! u_t = b_t v_t                                                                            Mamba-2
//! o_t =            exp(g_t) S' q_t + sum over s <= t of exp(g_t - g_s) (k_s . q_t) u_s
//! S   = exp(g_t) S + sum over s of exp(g_t - g_s) k_s u_s'    where t + 1 is a border
//! ```
//!
//! All sums run from the first term to the last, whether one row is computed at a time or many, so a row has the same
//! bits however it was fed. Differences of logarithms are never positive, so no factor overflows.

use super::chunk::{
    CHUNK, Convolve, Correct, DecayKeys, Decayed, Fold, GatedNorm, HeadAnswer, L2Norms, NormGated, ScaleRow, softplus,
};
use super::states::folded::{GroupState, padded};
use super::{Model, Walk, product};
use crate::error::Result;
use crate::model_config::{GatedDeltaNet, Mamba2};
use crate::runtime::cpu::{Cpu, SumType, WeightedSum};
use crate::runtime::layer::{DeltaNet, Mamba};
use crate::runtime::ops::LANES;
use crate::runtime::weights::{Host, Linear};
use std::sync::Mutex;

/// Rows of a chunk that are computed together before those that depend on them.
const TILE: usize = 4;

/// Places of the projections in [`LinearScratch::projected`].
const QUERIES: usize = 0;
const KEYS: usize = 1;
const VALUES: usize = 2;
const GATES: usize = 3;
const DECAYS: usize = 4;
const RATES: usize = 5;

/// Buffers of linear attention.
#[derive(Debug, Default)]
pub(super) struct LinearScratch {
    /// Projections of each row.
    projected: [Vec<f32>; 6],
    /// For each run of rows, the inputs of the convolution before it: `(width - 1, channels)`.
    history: Vec<f32>,
    /// Inputs of the convolution at the last positions of a run: `(positions, channels)`.
    last: Vec<f32>,
    /// Output before the norm: for each run, `(key_heads, tokens, value heads of a key head * value_dim)`.
    mixed: Vec<f32>,
    buffers: Mutex<Vec<Buffers>>,
}

/// Buffers of one thread, for the rows of a chunk.
#[derive(Debug, Default)]
struct Buffers {
    /// Keys, then queries, after convolution and norm: `(2 * rows, key_dim)`.
    keys_queries: Vec<f32>,
    /// Values after the convolution: `(per_key, rows, value_dim)`.
    values: Vec<f32>,
    /// Products of keys, then of queries, with all keys of the chunk: `(2 * rows, CHUNK)`.
    products: Vec<f32>,
    /// The same for one value head, times the decay between the two rows: `(2 * rows, CHUNK)`.
    factors: Vec<f32>,
    /// Products of keys, then of queries, with the matrix of a value head: `(2 * rows, value_dim)`.
    recalled: Vec<f32>,
    /// Sums over earlier rows of the chunk: `(TILE, value_dim)`.
    sums: Vec<f32>,
    /// Keys as columns, times the decay to the border: `(key_dim, CHUNK)`.
    decayed: Vec<f32>,
    /// Products of these keys with the rows: `(key_dim, value_dim)`.
    added: Vec<f32>,
}

/// Sizes and weights of a mixer, apart from its projections.
#[derive(Clone, Copy)]
struct LinearMixer<'a> {
    sizes: HeadSizes,
    /// First channel of queries, keys and values in the convolution.
    channels: [usize; 3],
    /// Factors of the convolution: `(width, channels)`.
    kernel: &'a [f32],
    /// Bias of the convolution, if any: `(channels)`.
    bias: Option<&'a [f32]>,
    /// Factors of the logarithms of the decays: `(value heads)`.
    decay: &'a [f32],
    /// Added to the projection to the decays, before the softplus: `(value heads)`.
    decay_bias: &'a [f32],
    rule: Rule<'a>,
    /// Factors of the norm of the output.
    norm: &'a [f32],
}

/// Numbers and widths of heads.
#[derive(Clone, Copy)]
struct HeadSizes {
    key_heads: usize,
    /// Value heads that read one key head.
    per_key: usize,
    key_dim: usize,
    value_dim: usize,
    /// Whether value heads that read one key head are `key_heads` apart.
    tiled: bool,
    /// Positions that the convolution reads, including the present one.
    width: usize,
}

/// Rule by which a row is added to the state.
#[derive(Clone, Copy)]
enum Rule<'a> {
    /// The delta rule, with queries and keys of length 1.
    Delta,
    /// The row is the value times its step; the output has a share of the value for each head.
    Add { skip: &'a [f32] },
}

impl HeadSizes {
    fn of_delta_net(net: &GatedDeltaNet) -> HeadSizes {
        let GatedDeltaNet { key_heads, key_dim, value_dim, tiled, width, .. } = *net;
        HeadSizes { key_heads, per_key: net.per_key(), key_dim, value_dim, tiled, width }
    }

    fn of_mamba(mamba: &Mamba2) -> HeadSizes {
        let Mamba2 { groups, state, head_dim, width, .. } = *mamba;
        HeadSizes {
            key_heads: groups,
            per_key: mamba.heads / groups,
            key_dim: state,
            value_dim: head_dim,
            tiled: false,
            width,
        }
    }

    fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    fn value_heads(&self) -> usize {
        self.key_heads * self.per_key
    }

    fn values(&self) -> usize {
        self.value_heads() * self.value_dim
    }

    fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Returns the width of the value heads that read one key head.
    fn values_of_key(&self) -> usize {
        self.per_key * self.value_dim
    }

    /// Returns the value head number `index` of those that read a key head.
    fn value_head(&self, key_head: usize, index: usize) -> usize {
        if self.tiled { index * self.key_heads + key_head } else { key_head * self.per_key + index }
    }
}

impl Model {
    /// Writes the normalized outputs of the heads of a gated delta net to the input of its output projection.
    pub(super) fn delta_net(&self, index: usize, op: &DeltaNet<Host>, w: &mut Walk<'_>) -> Result<()> {
        self.project_inputs(&[&op.q, &op.k, &op.v, &op.z, &op.a, &op.b], w)?;
        let sizes = HeadSizes::of_delta_net(&op.sizes);
        let plan = LinearMixer {
            sizes,
            channels: [0, sizes.keys(), 2 * sizes.keys()],
            kernel: &op.kernel,
            bias: None,
            decay: &op.decay,
            decay_bias: &op.decay_bias,
            rule: Rule::Delta,
            norm: &op.norm,
        };
        self.mix(index, &plan, w);
        Ok(())
    }

    /// Writes the normalized outputs of the heads of Mamba-2 to the input of its output projection.
    pub(super) fn mamba(&self, index: usize, op: &Mamba<Host>, w: &mut Walk<'_>) -> Result<()> {
        self.project_inputs(&[&op.c, &op.b, &op.x, &op.z, &op.dt], w)?;
        let sizes = HeadSizes::of_mamba(&op.sizes);
        let plan = LinearMixer {
            sizes,
            channels: [sizes.values() + sizes.keys(), sizes.values(), 0],
            kernel: &op.kernel,
            bias: op.bias.as_deref(),
            decay: &op.decay,
            decay_bias: &op.decay_bias,
            rule: Rule::Add { skip: &op.skip },
            norm: &op.norm,
        };
        self.mix(index, &plan, w);
        Ok(())
    }

    /// Projects all rows to queries, keys, values, gates, decays, and perhaps rates.
    fn project_inputs(&self, linears: &[&Linear], w: &mut Walk<'_>) -> Result<()> {
        let s = &mut *w.scratch;
        let products = linears.iter().zip(&mut s.linear.projected).map(|(linear, y)| {
            y.resize(s.normed.n() * linear.matrix.rows(), 0.0);
            product(linear, &s.normed, y, &s.groups)
        });
        self.compute(products.collect(), &mut w.step)
    }

    /// Computes the heads of all rows from their projections, and changes the states of the texts.
    fn mix(&self, index: usize, plan: &LinearMixer<'_>, w: &mut Walk<'_>) {
        let (s, sizes, layer) = (&mut *w.scratch, plan.sizes, index - self.layers.start);
        let d = &mut s.linear;
        let history = (sizes.width - 1) * sizes.channels();
        d.history.clear();
        s.runs.iter().for_each(|run| w.states[run.sequence].layer(layer).window.read(&mut d.history));
        d.mixed.resize(s.normed.n() * sizes.values(), 0.0);
        let mut mixed = &mut d.mixed[..];
        let mut tasks = Vec::with_capacity(s.runs.len() * sizes.key_heads);
        // Each text has one run, so its state is lent once.
        let mut states: Vec<_> = w.states.iter_mut().map(|states| Some(&mut **states)).collect();
        for (i, run) in s.runs.iter().enumerate() {
            let state = states[run.sequence].take().expect("one run for each text").layer(layer);
            let folded = state.folded.as_mut().expect("a state with a matrix");
            let (own, rest) = mixed.split_at_mut(sizes.values() * run.tokens);
            mixed = rest;
            let history = &d.history[i * history..][..history];
            let rows = TextRows { plan, projected: &d.projected, history, first: run.first, count: run.tokens };
            let outputs = own.chunks_exact_mut(sizes.values_of_key() * run.tokens);
            let groups = folded.read(run.tokens).zip(outputs).enumerate();
            tasks.extend(groups.map(|(group, (state, out))| KeyHead { rows, group, state, out }));
        }
        let (cpu, buffers) = (&*self.cpu, &d.buffers);
        self.cpu.for_chunks(&mut tasks, 1, |_, tasks| {
            let take = || buffers.lock().ok()?.pop();
            let mut own = take().unwrap_or_default();
            tasks.iter_mut().for_each(|task| task.run(cpu, &mut own));
            buffers.lock().iter_mut().for_each(|free| free.push(std::mem::take(&mut own)));
        });
        drop(tasks);
        let mut parts = [QUERIES, KEYS, VALUES];
        parts.sort_by_key(|part| plan.channels[*part]);
        for run in &s.runs {
            let window = &mut w.states[run.sequence].layer(layer).window;
            d.last.clear();
            for row in run.first + run.tokens - window.needed_of(run.tokens)..run.first + run.tokens {
                for part in parts {
                    let width = if part == VALUES { sizes.values() } else { sizes.keys() };
                    d.last.extend_from_slice(&d.projected[part][row * width..][..width]);
                }
            }
            window.push(run.tokens, &d.last);
        }
        self.norm_mixed(plan, w);
    }

    /// Normalizes the output of heads and multiplies it by its gate, in the order of the rule.
    fn norm_mixed(&self, plan: &LinearMixer<'_>, w: &mut Walk<'_>) {
        let (s, sizes, level) = (&mut *w.scratch, plan.sizes, self.cpu.level());
        s.attention.attended.reset(s.normed.n(), sizes.values());
        let (out, stride) = s.attention.attended.rows_mut();
        let (mixed, gates, runs, eps) = (&s.linear.mixed, &s.linear.projected[GATES], &s.runs, self.config.norm_eps);
        self.cpu.for_rows(out, stride, |i, out| {
            let run = &runs[runs.partition_point(|run| run.first + run.tokens <= i)];
            let width = sizes.values_of_key();
            let of_run = &mixed[run.first * sizes.values()..][..run.tokens * sizes.values()];
            let gates = &gates[i * sizes.values()..][..sizes.values()];
            for group in 0..sizes.key_heads {
                let x = &of_run[(group * run.tokens + i - run.first) * width..][..width];
                if let Rule::Add { .. } = plan.rule {
                    let at = group * width;
                    let (gate, weight, out) =
                        (&gates[at..][..width], &plan.norm[at..][..width], &mut out[at..][..width]);
                    level.run(NormGated { x, gate, weight, eps, out });
                    continue;
                }
                for (head, x) in x.chunks_exact(sizes.value_dim).enumerate() {
                    let at = sizes.value_head(group, head) * sizes.value_dim;
                    let (gate, out) = (&gates[at..][..sizes.value_dim], &mut out[at..][..sizes.value_dim]);
                    level.run(GatedNorm { x, gate, weight: plan.norm, eps, out });
                }
            }
        });
    }
}

/// Projections of the rows of one text.
#[derive(Clone, Copy)]
struct TextRows<'a> {
    plan: &'a LinearMixer<'a>,
    /// Projections of all rows of the step.
    projected: &'a [Vec<f32>; 6],
    /// Inputs of the convolution before the first row: `(width - 1, channels)`.
    history: &'a [f32],
    /// First row of the text in the step.
    first: usize,
    /// Number of rows of the text.
    count: usize,
}

impl TextRows<'_> {
    /// Returns the place of a value head of a row of the text in projections to numbers of heads.
    fn place(&self, row: usize, head: usize) -> usize {
        (self.first + row) * self.plan.sizes.value_heads() + head
    }

    /// Returns the step of a value head in a row of the text, by which its memory decays.
    fn step(&self, row: usize, head: usize) -> f32 {
        softplus(self.projected[DECAYS][self.place(row, head)] + self.plan.decay_bias[head])
    }
}

/// One key head of a text, with the value heads that read it.
struct KeyHead<'a> {
    rows: TextRows<'a>,
    group: usize,
    state: GroupState<'a>,
    /// Output of the heads: `(rows, per_key * value_dim)`.
    out: &'a mut [f32],
}

impl KeyHead<'_> {
    /// Computes all rows, chunk by chunk.
    fn run(&mut self, cpu: &Cpu, buffers: &mut Buffers) {
        let mut done = 0;
        while done < self.rows.count {
            let count = (CHUNK - self.state.offset).min(self.rows.count - done);
            self.chunk(cpu, done, count, buffers);
            done += count;
            self.state.offset += count;
            if self.state.offset == CHUNK {
                self.fold(cpu, buffers);
                self.state.offset = 0;
            }
        }
    }

    /// Returns the first row of the buffers of keys and queries that is used: that of keys, or of queries.
    fn first_used(&self, count: usize) -> usize {
        match self.rows.plan.rule {
            Rule::Delta => 0,
            Rule::Add { .. } => count,
        }
    }

    /// Computes `count` rows of one chunk from row `done` of the text on.
    fn chunk(&mut self, cpu: &Cpu, done: usize, count: usize, buffers: &mut Buffers) {
        let HeadSizes { key_dim, value_dim, per_key, .. } = self.rows.plan.sizes;
        self.project(cpu, done, count, buffers);
        let first = self.state.offset;
        for row in 0..count {
            for (column, x) in buffers.keys_queries[row * key_dim..][..key_dim].iter().enumerate() {
                self.state.keys[column * CHUNK + first + row] = *x;
            }
        }
        buffers.products.resize(2 * count * CHUNK, 0.0);
        buffers.factors.resize(2 * count * CHUNK, 0.0);
        buffers.recalled.resize(2 * count * padded(value_dim), 0.0);
        buffers.sums.resize(TILE * padded(value_dim), 0.0);
        let columns = (first + count).next_multiple_of(LANES);
        let keys = Matrix { values: self.state.keys, stride: CHUNK, depth: key_dim, columns };
        let used = self.first_used(count);
        let products = &mut buffers.products[used * CHUNK..];
        keys.multiply(cpu, &buffers.keys_queries[used * key_dim..], key_dim, products);
        for head in 0..per_key {
            self.head(cpu, head, done, count, buffers);
        }
    }

    /// Computes queries, keys and values: convolution, SiLU, and the norms of queries and keys.
    fn project(&self, cpu: &Cpu, done: usize, count: usize, buffers: &mut Buffers) {
        let (rows, plan) = (&self.rows, self.rows.plan);
        let sizes = plan.sizes;
        let (key, value) = (sizes.key_dim, sizes.value_dim);
        buffers.keys_queries.resize(2 * count * key, 0.0);
        buffers.values.resize(count * sizes.values_of_key(), 0.0);
        let (keys, queries) = buffers.keys_queries.split_at_mut(count * key);
        let values = buffers.values.chunks_exact_mut(count * value).enumerate();
        let values = values.map(|(head, out)| (VALUES, sizes.value_head(self.group, head), value, out));
        let heads = [(QUERIES, self.group, key, &mut *queries), (KEYS, self.group, key, &mut *keys)];
        for (part, head, width, out) in heads.into_iter().chain(values) {
            let stride = if part == VALUES { sizes.values() } else { sizes.keys() };
            let (column, channel) = (head * width, plan.channels[part] + head * width);
            cpu.level().run(Convolve {
                taps: sizes.width,
                channels: sizes.channels(),
                history: rows.history.get(channel..).unwrap_or_default(),
                projected: &rows.projected[part][rows.first * stride + column..],
                stride,
                kernel: &plan.kernel[channel..],
                bias: plan.bias.map(|bias| &bias[channel..][..width]),
                first: done,
                width,
                out,
            });
        }
        if let Rule::Delta = plan.rule {
            cpu.level().run(L2Norms { heads: keys, width: key, factor: 1.0 });
            cpu.level().run(L2Norms { heads: queries, width: key, factor: 1.0 / (key as f32).sqrt() });
        }
    }

    /// Computes the rows of one value head of the group.
    fn head(&mut self, cpu: &Cpu, head: usize, done: usize, count: usize, buffers: &mut Buffers) {
        let (plan, first) = (self.rows.plan, self.state.offset);
        let sizes = plan.sizes;
        let (key, wide) = (sizes.key_dim, padded(sizes.value_dim));
        let number = sizes.value_head(self.group, head);
        let used = self.first_used(count);
        let values = &self.state.matrix.get()[head * key * wide..][..key * wide];
        let matrix = Matrix { values, stride: wide, depth: key, columns: wide };
        matrix.multiply(cpu, &buffers.keys_queries[used * key..], key, &mut buffers.recalled[used * wide..]);
        let decays = &mut self.state.decays[head * CHUNK..][..CHUNK];
        for row in 0..count {
            let before = if first + row == 0 { 0.0 } else { decays[first + row - 1] };
            decays[first + row] = plan.decay[number] * self.rows.step(done + row, number) + before;
        }
        for row in used..2 * count {
            let own = first + row % count;
            let products = &buffers.products[row * CHUNK..][..=own];
            let out = &mut buffers.factors[row * CHUNK..][..=own];
            cpu.level().run(Decayed { products, decays: &decays[..=own], own: decays[own], out });
        }
        self.rows_of_head(cpu, head, done, count, buffers);
    }

    /// Computes the rows of one value head that are added to the state, and its output, from the products with the
    /// matrix and the factors of the rows of the chunk.
    fn rows_of_head(&mut self, cpu: &Cpu, head: usize, done: usize, count: usize, buffers: &mut Buffers) {
        let (plan, first) = (self.rows.plan, self.state.offset);
        let sizes = plan.sizes;
        let (value, wide) = (sizes.value_dim, padded(sizes.value_dim));
        let number = sizes.value_head(self.group, head);
        let decays = &self.state.decays[head * CHUNK..][..CHUNK];
        let rows = &mut self.state.values[head * CHUNK * wide..][..CHUNK * wide];
        let texts = &self.rows;
        let (key_factors, query_factors) = buffers.factors.split_at(count * CHUNK);
        let (by_key, by_query) = buffers.recalled.split_at(count * wide);
        for tile in (0..count).step_by(TILE) {
            let (tile_rows, known) = (TILE.min(count - tile), first + tile);
            let sums = &mut buffers.sums[..tile_rows * wide];
            let sum = |factors: &[f32], sums: &mut [f32], rows: &[f32]| {
                let matrix = Matrix { values: rows, stride: wide, depth: known, columns: wide };
                matrix.multiply(cpu, &factors[tile * CHUNK..][..tile_rows * CHUNK], CHUNK, sums);
            };
            if let Rule::Delta = plan.rule {
                sum(key_factors, sums, rows);
            }
            for row in tile..tile + tile_rows {
                let (earlier, own) = rows.split_at_mut((first + row) * wide);
                let values = &buffers.values[(head * count + row) * value..][..value];
                match plan.rule {
                    Rule::Add { .. } => cpu.level().run(ScaleRow {
                        values,
                        factor: texts.step(done + row, number),
                        out: &mut own[..value],
                    }),
                    Rule::Delta => cpu.level().run(Correct {
                        values,
                        recalled: &by_key[row * wide..][..value],
                        decay: decays[first + row],
                        rate: texts.projected[RATES][texts.place(done + row, number)],
                        factors: &key_factors[row * CHUNK + known..row * CHUNK + first + row],
                        rows: &earlier[known * wide..],
                        sum: &mut sums[(row - tile) * wide..][..wide],
                        out: &mut own[..value],
                    }),
                }
            }
            sum(query_factors, sums, rows);
            for row in tile..tile + tile_rows {
                let skip = match plan.rule {
                    Rule::Delta => None,
                    Rule::Add { skip } => Some(skip[number]),
                };
                cpu.level().run(HeadAnswer {
                    recalled: &by_query[row * wide..][..value],
                    decay: decays[first + row],
                    factors: &query_factors[row * CHUNK + known..][..first + row + 1 - known],
                    rows: &rows[known * wide..],
                    sum: &mut sums[(row - tile) * wide..][..wide],
                    skip,
                    values: &buffers.values[(head * count + row) * value..][..value],
                    out: &mut self.out[((done + row) * sizes.per_key + head) * value..][..value],
                });
            }
        }
    }

    /// Folds the rows of the chunk, which is full, into the matrices.
    fn fold(&mut self, cpu: &Cpu, buffers: &mut Buffers) {
        let HeadSizes { key_dim: key, value_dim, .. } = self.rows.plan.sizes;
        let wide = padded(value_dim);
        buffers.decayed.resize(key * CHUNK, 0.0);
        buffers.added.resize(key * wide, 0.0);
        let matrices = self.state.matrix.get_mut().chunks_exact_mut(key * wide);
        let rows = self.state.values.chunks_exact(CHUNK * wide);
        for ((matrix, rows), decays) in matrices.zip(rows).zip(self.state.decays.chunks_exact(CHUNK)) {
            cpu.level().run(DecayKeys { keys: self.state.keys, decays, out: &mut buffers.decayed });
            let rows = Matrix { values: rows, stride: wide, depth: CHUNK, columns: wide };
            rows.multiply(cpu, &buffers.decayed, CHUNK, &mut buffers.added);
            cpu.level().run(Fold { decay: decays[CHUNK - 1], added: &buffers.added, matrix });
        }
    }
}

/// Matrix of whole vectors: `depth` rows of `columns` values, `stride` apart.
struct Matrix<'a> {
    values: &'a [f32],
    stride: usize,
    depth: usize,
    columns: usize,
}

impl Matrix<'_> {
    /// Computes `out = x m` for rows of `x`, `x_stride` apart; the rows of `out` are as far apart as those of the
    /// matrix. Each sum begins with the first row of the matrix.
    fn multiply(&self, cpu: &Cpu, x: &[f32], x_stride: usize, out: &mut [f32]) {
        let sum = WeightedSum {
            values: bytemuck::cast_slice(self.values),
            step: self.stride * size_of::<f32>(),
            steps: self.depth,
            vector: LANES * size_of::<f32>(),
            vectors: self.columns / LANES,
            weights: bytemuck::cast_slice(x),
            weight_row: x_stride,
            rows: out.len() / self.stride,
            next: &[],
        };
        cpu.weighted_sum(SumType::F32, &sum, out, self.stride);
    }
}
