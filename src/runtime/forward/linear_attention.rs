//! Gated delta net: convolution of the projections, the delta rule in each head, and the gated norm of the output.
//!
//! With `g_t` the sum of the logarithms of the decays since the last border, and `S` the matrix at the border, the rule
//! of [`crate::model_config::GatedDeltaNet`] becomes sums over the rows since the border (the chunkwise form of
//! arXiv 2412.06464):
//!
//! ```text
//! u_t = b_t (v_t - exp(g_t) S' k_t - sum over s < t of exp(g_t - g_s) (k_t . k_s) u_s)
//! o_t =            exp(g_t) S' q_t + sum over s <= t of exp(g_t - g_s) (k_s . q_t) u_s
//! S   = exp(g_t) S + sum over s of exp(g_t - g_s) k_s u_s'    where t + 1 is a border
//! ```
//!
//! All sums run from the first term to the last, whether one row is computed at a time or many, so a row has the same
//! bits however it was fed. Differences of logarithms are never positive, so no factor overflows.

use super::chunk::{CHUNK, Convolve, Correct, DecayKeys, Decayed, Fold, GatedNorm, HeadAnswer, L2Norms, softplus};
use super::states::folded::{GroupState, padded};
use super::{Model, Walk, product};
use crate::error::Result;
use crate::runtime::cpu::{Cpu, SumType, WeightedSum};
use crate::runtime::layer::DeltaNet;
use crate::runtime::ops::LANES;
use crate::runtime::weights::Host;
use std::sync::Mutex;

/// Rows of a chunk that are computed together before those that depend on them.
const TILE: usize = 4;

/// Buffers of gated delta nets.
#[derive(Debug, Default)]
pub(super) struct DeltaScratch {
    /// Projections of each row: `(n, keys)`, `(n, values)` and `(n, value_heads)`.
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    z: Vec<f32>,
    b: Vec<f32>,
    a: Vec<f32>,
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
    /// Values after the convolution: `(per_group, rows, value_dim)`.
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

impl Model {
    /// Projects all rows, and writes the normalized outputs of the heads to the input of the output projection.
    pub(super) fn delta_net(&self, index: usize, op: &DeltaNet<Host>, w: &mut Walk<'_>) -> Result<()> {
        let (s, net) = (&mut *w.scratch, op.sizes);
        let (n, d) = (s.normed.n(), &mut s.delta);
        let outputs = [&mut d.q, &mut d.k, &mut d.v, &mut d.z, &mut d.b, &mut d.a];
        let products = [&op.q, &op.k, &op.v, &op.z, &op.b, &op.a].into_iter().zip(outputs).map(|(linear, y)| {
            y.resize(n * linear.matrix.rows(), 0.0);
            product(linear, &s.normed, y, &s.groups)
        });
        self.compute(products.collect(), &mut w.step)?;
        let layer = index - self.layers.start;
        let history = (net.width - 1) * net.channels();
        d.history.clear();
        s.runs.iter().for_each(|run| w.states[run.sequence].layer(layer).window.read(&mut d.history));
        d.mixed.resize(n * net.values(), 0.0);
        let projected = [&d.q, &d.k, &d.v, &d.b, &d.a].map(|x| &x[..]);
        let mut mixed = &mut d.mixed[..];
        let mut tasks = Vec::with_capacity(s.runs.len() * net.key_heads);
        // Each text has one run, so its state is lent once.
        let mut states: Vec<_> = w.states.iter_mut().map(|states| Some(&mut **states)).collect();
        for (i, run) in s.runs.iter().enumerate() {
            let state = states[run.sequence].take().expect("one run for each text").layer(layer);
            let folded = state.folded.as_mut().expect("a state with a matrix");
            let width = net.values() / net.key_heads * run.tokens;
            let (own, rest) = mixed.split_at_mut(net.key_heads * width);
            mixed = rest;
            let rows = TextRows {
                op,
                projected,
                history: &d.history[i * history..][..history],
                first: run.first,
                count: run.tokens,
            };
            let groups = folded.read(run.tokens).zip(own.chunks_exact_mut(width)).enumerate();
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
        for run in &s.runs {
            let window = &mut w.states[run.sequence].layer(layer).window;
            d.last.clear();
            for row in run.first + run.tokens - window.needed_of(run.tokens)..run.first + run.tokens {
                for (x, width) in [(&d.q, net.keys()), (&d.k, net.keys()), (&d.v, net.values())] {
                    d.last.extend_from_slice(&x[row * width..][..width]);
                }
            }
            window.push(run.tokens, &d.last);
        }
        self.norm_mixed(op, w);
        Ok(())
    }

    /// Normalizes the output of each head and multiplies it by its gate.
    fn norm_mixed(&self, op: &DeltaNet<Host>, w: &mut Walk<'_>) {
        let (s, net) = (&mut *w.scratch, &op.sizes);
        s.attention.attended.reset(s.normed.n(), net.values());
        let (out, stride) = s.attention.attended.rows_mut();
        let (mixed, gates, runs, eps) = (&s.delta.mixed, &s.delta.z, &s.runs, self.config.norm_eps);
        self.cpu.for_rows(out, stride, |i, out| {
            let run = &runs[runs.partition_point(|run| run.first + run.tokens <= i)];
            let width = net.values() / net.key_heads;
            let of_run = &mixed[run.first * net.values()..][..run.tokens * net.values()];
            for group in 0..net.key_heads {
                let of_group = &of_run[(group * run.tokens + i - run.first) * width..][..width];
                for (head, x) in of_group.chunks_exact(net.value_dim).enumerate() {
                    let at = net.value_head(group, head) * net.value_dim;
                    let gate = &gates[i * net.values() + at..][..net.value_dim];
                    let out = &mut out[at..][..net.value_dim];
                    self.cpu.level().run(GatedNorm { x, gate, weight: &op.norm, eps, out });
                }
            }
        });
    }
}

/// Projections of the rows of one text.
#[derive(Clone, Copy)]
struct TextRows<'a> {
    op: &'a DeltaNet<Host>,
    /// Queries, keys, values, rates and decays of all rows of the step.
    projected: [&'a [f32]; 5],
    /// Inputs of the convolution before the first row: `(width - 1, channels)`.
    history: &'a [f32],
    /// First row of the text in the step.
    first: usize,
    /// Number of rows of the text.
    count: usize,
}

/// One key head of a text, with the value heads that read it.
struct KeyHead<'a> {
    rows: TextRows<'a>,
    group: usize,
    state: GroupState<'a>,
    /// Output of the heads: `(rows, per_group * value_dim)`.
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

    /// Computes `count` rows of one chunk from row `done` of the text on.
    fn chunk(&mut self, cpu: &Cpu, done: usize, count: usize, buffers: &mut Buffers) {
        let net = self.rows.op.sizes;
        let per_group = net.per_key();
        self.project(cpu, done, count, buffers);
        let first = self.state.offset;
        for row in 0..count {
            for (column, x) in buffers.keys_queries[row * net.key_dim..][..net.key_dim].iter().enumerate() {
                self.state.keys[column * CHUNK + first + row] = *x;
            }
        }
        buffers.products.resize(2 * count * CHUNK, 0.0);
        buffers.factors.resize(2 * count * CHUNK, 0.0);
        buffers.recalled.resize(2 * count * padded(net.value_dim), 0.0);
        buffers.sums.resize(TILE * padded(net.value_dim), 0.0);
        let columns = (first + count).next_multiple_of(LANES);
        let keys = Matrix { values: self.state.keys, stride: CHUNK, depth: net.key_dim, columns };
        keys.multiply(cpu, &buffers.keys_queries, net.key_dim, &mut buffers.products);
        for head in 0..per_group {
            self.head(cpu, head, done, count, buffers);
        }
    }

    /// Computes queries, keys and values: convolution, SiLU, and the norms of queries and keys.
    fn project(&self, cpu: &Cpu, done: usize, count: usize, buffers: &mut Buffers) {
        let (net, rows) = (self.rows.op.sizes, &self.rows);
        let (key, value) = (net.key_dim, net.value_dim);
        buffers.keys_queries.resize(2 * count * key, 0.0);
        buffers.values.resize(count * net.per_key() * value, 0.0);
        let (keys, queries) = buffers.keys_queries.split_at_mut(count * key);
        let values = buffers.values.chunks_exact_mut(count * value).enumerate();
        let values = values.map(|(head, out)| (2, 2 * net.keys(), net.value_head(self.group, head), value, out));
        let heads = [(0, 0, self.group, key, &mut *queries), (1, net.keys(), self.group, key, &mut *keys)];
        for (part, channel, head, width, out) in heads.into_iter().chain(values) {
            let (column, stride) = (head * width, if part == 2 { net.values() } else { net.keys() });
            cpu.level().run(Convolve {
                net: &net,
                history: rows.history.get(channel + column..).unwrap_or_default(),
                projected: &rows.projected[part][rows.first * stride + column..],
                stride,
                kernel: &rows.op.kernel[channel + column..],
                first: done,
                width,
                out,
            });
        }
        cpu.level().run(L2Norms { heads: keys, width: key, factor: 1.0 });
        cpu.level().run(L2Norms { heads: queries, width: key, factor: 1.0 / (key as f32).sqrt() });
    }

    /// Computes the rows of one value head of the group.
    fn head(&mut self, cpu: &Cpu, head: usize, done: usize, count: usize, buffers: &mut Buffers) {
        let (net, first) = (self.rows.op.sizes, self.state.offset);
        let (key, value, per_group) = (net.key_dim, net.value_dim, net.per_key());
        let wide = padded(value);
        let number = net.value_head(self.group, head);
        let values = &self.state.matrix.get()[head * key * wide..][..key * wide];
        let matrix = Matrix { values, stride: wide, depth: key, columns: wide };
        matrix.multiply(cpu, &buffers.keys_queries, key, &mut buffers.recalled);
        let decays = &mut self.state.decays[head * CHUNK..][..CHUNK];
        let rows = &mut self.state.values[head * CHUNK * wide..][..CHUNK * wide];
        let [.., rates, logs] = self.rows.projected;
        let op = self.rows.op;
        for row in first..first + count {
            let at = (self.rows.first + done + row - first) * net.value_heads + number;
            let log = op.decay[number] * softplus(logs[at] + op.decay_bias[number]);
            decays[row] = log + if row == 0 { 0.0 } else { decays[row - 1] };
        }
        for row in 0..2 * count {
            let own = first + row % count;
            let products = &buffers.products[row * CHUNK..][..=own];
            let out = &mut buffers.factors[row * CHUNK..][..=own];
            cpu.level().run(Decayed { products, decays: &decays[..=own], own: decays[own], out });
        }
        let (key_factors, query_factors) = buffers.factors.split_at(count * CHUNK);
        let (by_key, by_query) = buffers.recalled.split_at(count * wide);
        for tile in (0..count).step_by(TILE) {
            let (tile_rows, known) = (TILE.min(count - tile), first + tile);
            let sums = &mut buffers.sums[..tile_rows * wide];
            let sum = |factors: &[f32], sums: &mut [f32], rows: &[f32]| {
                let matrix = Matrix { values: rows, stride: wide, depth: known, columns: wide };
                matrix.multiply(cpu, &factors[tile * CHUNK..][..tile_rows * CHUNK], CHUNK, sums);
            };
            sum(key_factors, sums, rows);
            for row in tile..tile + tile_rows {
                let at = (self.rows.first + done + row) * net.value_heads + number;
                let (earlier, own) = rows.split_at_mut((first + row) * wide);
                cpu.level().run(Correct {
                    values: &buffers.values[(head * count + row) * value..][..value],
                    recalled: &by_key[row * wide..][..value],
                    decay: decays[first + row],
                    rate: rates[at],
                    factors: &key_factors[row * CHUNK + known..row * CHUNK + first + row],
                    rows: &earlier[known * wide..],
                    sum: &mut sums[(row - tile) * wide..][..wide],
                    out: &mut own[..value],
                });
            }
            sum(query_factors, sums, rows);
            for row in tile..tile + tile_rows {
                cpu.level().run(HeadAnswer {
                    recalled: &by_query[row * wide..][..value],
                    decay: decays[first + row],
                    factors: &query_factors[row * CHUNK + known..][..first + row + 1 - known],
                    rows: &rows[known * wide..],
                    sum: &mut sums[(row - tile) * wide..][..wide],
                    out: &mut self.out[((done + row) * per_group + head) * value..][..value],
                });
            }
        }
    }

    /// Folds the rows of the chunk, which is full, into the matrices.
    fn fold(&mut self, cpu: &Cpu, buffers: &mut Buffers) {
        let net = self.rows.op.sizes;
        let (key, wide) = (net.key_dim, padded(net.value_dim));
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
