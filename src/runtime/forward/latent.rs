//! Multi-head latent attention in its absorbed form: the cache keeps the vector from which keys and values of all heads
//! could be computed, and the rotated part of the keys.
//!
//! The score of a query `q` with the key `W c + rotated part` is that of `W^T q` with the vector `c`, and the weighted
//! sum of the values `V c` is `V` times the weighted sum of the vectors. So each query is multiplied by `W^T` of its
//! head, attention reads one key of `kv_rank + rope` numbers for all heads, whose first `kv_rank` numbers are also the
//! value, and the result of each head is multiplied by its `V`. Every position is computed in this way, whether it is
//! part of a prompt or not, so it has the same bits however it was fed.

use super::{Changed, Model, Product, Step, Walk, adapters, product};
use crate::error::Result;
use crate::model_config::RotaryPairs;
use crate::runtime::adapters::HeadMatrix;
use crate::runtime::cpu::Acts;
use crate::runtime::layer::LatentAttention;
use crate::runtime::ops::{RmsNorm, norm_heads};
use crate::runtime::profile::Stage;
use crate::runtime::rope::rotate;
use crate::runtime::weights::{Host, Weight};
use crate::simd::Kernel;
use std::f32::consts::LOG2_E;

/// Buffers of latent attention, besides those of attention.
#[derive(Debug, Default)]
pub(super) struct LatentScratch {
    /// Vectors of queries: `(n, q_rank)`.
    q: Vec<f32>,
    /// Vectors of queries after their norm.
    normed: Acts,
    /// Inputs and results of the matrices of heads: `(n_heads, n, width)`.
    per_head: Acts,
    from_heads: Vec<f32>,
    /// Queries that are multiplied with vectors, before they replace those of attention:
    /// `(n, n_heads * (kv_rank + rope))`.
    absorbed: Vec<f32>,
}

impl Model {
    /// Projects all rows to queries and to the vectors of keys and values, and writes these to the caches.
    pub(super) fn read_latent(&self, index: usize, op: &LatentAttention<Host>, w: &mut Walk<'_>) -> Result<()> {
        let (s, shape, latent) = (&mut *w.scratch, &op.shape, &op.latent);
        let (n, n_heads, head_dim) = (s.normed.n(), shape.n_heads, shape.head_dim);
        let kv_width = latent.kv_rank + latent.rope;
        s.attention.q.resize(n * n_heads * head_dim, 0.0);
        s.attention.k.resize(n * kv_width, 0.0);
        let kv = product(&op.kv_a, &s.normed, &mut s.attention.k, &s.groups);
        match &op.q_a {
            None => {
                let q = product(&op.q, &s.normed, &mut s.attention.q, &s.groups);
                self.compute(vec![q, kv], &mut w.step)?;
            }
            Some((q_a, norm)) => {
                s.latent.q.resize(n * norm.len(), 0.0);
                let q_a = product(q_a, &s.normed, &mut s.latent.q, &s.groups);
                self.compute(vec![q_a, kv], &mut w.step)?;
                self.norm_latent(&s.latent.q, norm, latent.norm_eps, &mut s.latent.normed);
                let q = product(&op.q, &s.latent.normed, &mut s.attention.q, &s.groups);
                self.compute(vec![q], &mut w.step)?;
            }
        }
        self.set_q_factors(shape, &s.runs, &mut s.attention.q_factors);
        let angles = shape.rotary.map_or(&[][..], |kind| &w.step.angles[kind]);
        let queries =
            Tails { head_dim, kept: latent.nope, norm: None, pairs: shape.pairs, angles, scale: shape.scale * LOG2_E };
        self.rotate_tails(&mut s.attention.q, n_heads * head_dim, &queries, &s.attention.q_factors);
        let norm = Some((op.kv_norm.as_slice(), latent.norm_eps));
        let keys = Tails { head_dim: kv_width, kept: latent.kv_rank, norm, scale: 1.0, ..queries };
        self.rotate_tails(&mut s.attention.k, kv_width, &keys, &[]);
        s.attention.v.clear();
        self.write_cache(index, w);
        Ok(())
    }

    /// Multiplies the part of the queries that is not rotated by the transposed matrices of the keys.
    pub(super) fn absorb(&self, index: usize, op: &LatentAttention<Host>, w: &mut Walk<'_>) -> Result<()> {
        let (s, latent, n_heads, head_dim) = (&mut *w.scratch, &op.latent, op.shape.n_heads, op.shape.head_dim);
        let (rank, width, nope) = (latent.kv_rank, latent.kv_rank + latent.rope, latent.nope);
        for group in &s.groups {
            for gain in group.set.query_gains(index) {
                let rows =
                    &mut s.attention.q[group.rows.start * n_heads * head_dim..group.rows.end * n_heads * head_dim];
                let heads = rows.chunks_exact_mut(head_dim).zip(gain.chunks_exact(nope).cycle());
                heads.for_each(|(q, gain)| q.iter_mut().zip(gain).for_each(|(q, gain)| *q *= gain));
            }
        }
        let (q, n) = (&s.attention.q, s.attention.q.len() / (n_heads * head_dim));
        self.fill_heads(&mut s.latent.per_head, (n_heads, n, nope), |token, head| {
            &q[(token * n_heads + head) * head_dim..]
        });
        let changed = |head| adapters::of_head(&s.groups, (index, HeadMatrix::Keys, head), n);
        let keys = &self.per_head[index - self.layers.start].keys;
        self.multiply_heads(keys, &s.latent.per_head, &mut s.latent.from_heads, changed, &mut w.step)?;
        s.latent.absorbed.resize(n * n_heads * width, 0.0);
        let absorbed = &s.latent.from_heads;
        self.cpu.for_rows(&mut s.latent.absorbed, n_heads * width, |token, row| {
            for (head, row) in row.chunks_exact_mut(width).enumerate() {
                let (first, rotated) = row.split_at_mut(rank);
                first.copy_from_slice(&absorbed[(head * n + token) * rank..][..rank]);
                rotated.copy_from_slice(&q[(token * n_heads + head) * head_dim + nope..][..latent.rope]);
            }
        });
        std::mem::swap(&mut s.attention.q, &mut s.latent.absorbed);
        Ok(())
    }

    /// Multiplies the weighted sums of vectors by the matrices of the values.
    pub(super) fn read_values(&self, index: usize, op: &LatentAttention<Host>, w: &mut Walk<'_>) -> Result<()> {
        let (s, n_heads) = (&mut *w.scratch, op.shape.n_heads);
        let (rank, value, n, sums) =
            (op.latent.kv_rank, op.latent.value, s.attention.attended.n(), &s.attention.attended);
        self.fill_heads(&mut s.latent.per_head, (n_heads, n, rank), |token, head| &sums.row(token)[head * rank..]);
        let changed = |head| adapters::of_head(&s.groups, (index, HeadMatrix::Values, head), n);
        let matrices = &self.per_head[index - self.layers.start].values;
        self.multiply_heads(matrices, &s.latent.per_head, &mut s.latent.from_heads, changed, &mut w.step)?;
        s.attention.attended.reset(n, n_heads * value);
        let (values, (out, stride)) = (&s.latent.from_heads, s.attention.attended.rows_mut());
        self.cpu.for_rows(out, stride, |token, row| {
            for (head, row) in row[..n_heads * value].chunks_exact_mut(value).enumerate() {
                row.copy_from_slice(&values[(head * n + token) * value..][..value]);
            }
        });
        Ok(())
    }

    /// Fills rows for the matrices of heads: `(heads, tokens, width)`. `source` returns numbers that begin with the row
    /// of a token and a head.
    fn fill_heads<'a>(
        &self,
        rows: &mut Acts,
        (heads, tokens, width): (usize, usize, usize),
        source: impl Fn(usize, usize) -> &'a [f32] + Sync,
    ) {
        rows.reset(heads * tokens, width);
        let (out, stride) = rows.rows_mut();
        self.cpu.for_rows(out, stride, |i, row| {
            row[..width].copy_from_slice(&source(i % tokens, i / tokens)[..width]);
        });
        self.prepare(rows);
    }

    /// Multiplies the rows of each head by its matrix, which adapters change by `changed`: `y` is
    /// `(heads, tokens, rows of a matrix)`.
    fn multiply_heads<'a>(
        &self,
        matrices: &[Weight],
        x: &Acts,
        y: &mut Vec<f32>,
        changed: impl Fn(usize) -> Vec<Changed<'a>>,
        step: &mut Step<'_>,
    ) -> Result<()> {
        let (tokens, rows) = (x.n() / matrices.len(), matrices[0].rows());
        y.resize(x.n() * rows, 0.0);
        let products = matrices.iter().zip(y.chunks_exact_mut(tokens * rows)).enumerate();
        let product = |(head, (weight, y))| {
            let tokens = head * tokens..(head + 1) * tokens;
            let stage = Stage::Projections;
            Product { weight, bias: None, x, tokens, y, changed: changed(head), site: None, stage }
        };
        self.compute(products.map(product).collect(), step)
    }

    /// Normalizes rows of as many values as there are factors.
    fn norm_latent(&self, rows: &[f32], weight: &[f32], eps: f32, normed: &mut Acts) {
        let rank = weight.len();
        normed.reset(rows.len() / rank, rank);
        let (out, stride) = normed.rows_mut();
        self.cpu.for_rows(out, stride, |i, out| {
            let x = &rows[i * rank..][..rank];
            self.cpu.level().run(RmsNorm { x, weight, eps, out: &mut out[..rank] });
        });
        self.prepare(normed);
    }

    /// Normalizes the starts of the heads of rows, rotates their ends and scales the heads. `factors` are further
    /// factors of each row, if there are any.
    fn rotate_tails(&self, rows: &mut [f32], width: usize, how: &Tails<'_>, factors: &[f32]) {
        let rotated = how.angles.len() / (rows.len() / width);
        self.cpu.for_rows(rows, width, |i, heads| {
            let angles = &how.angles[i * rotated..][..rotated];
            let scale = factors.get(i).map_or(how.scale, |factor| how.scale * factor);
            self.cpu.level().run(RotateTails { heads, how: Tails { angles, scale, ..*how } });
        });
    }
}

/// Norm of the starts of heads, rotation of their ends, and scaling of the heads.
#[derive(Clone, Copy)]
struct Tails<'a> {
    head_dim: usize,
    /// Values at the start of a head that are not rotated.
    kept: usize,
    /// Factors, `(kept)`, and epsilon of the norm of these values, if there is one.
    norm: Option<(&'a [f32], f32)>,
    pairs: RotaryPairs,
    /// Cosines and sines of each row: `(n, head_dim - kept)`.
    angles: &'a [f32],
    /// Factor of the heads.
    scale: f32,
}

/// [`Tails`] of one token as a kernel.
struct RotateTails<'a> {
    heads: &'a mut [f32],
    how: Tails<'a>,
}

impl Kernel for RotateTails<'_> {
    #[inline(always)]
    fn run(self) {
        let Tails { head_dim, kept, norm, pairs, angles, scale } = self.how;
        for head in self.heads.chunks_exact_mut(head_dim) {
            let (kept, rotated) = head.split_at_mut(kept);
            if let Some((weight, eps)) = norm {
                norm_heads(kept, weight, eps);
            }
            kept.iter_mut().for_each(|x| *x *= scale);
            rotate(rotated, rotated.len(), pairs, angles, scale);
        }
    }
}
