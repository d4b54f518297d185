//! Multi-head latent attention: expands the vectors of keys and values before they are kept.

use super::{Model, Walk, product};
use crate::calibration::Part;
use crate::error::Result;
use crate::model_config::RotaryPairs;
use crate::runtime::adapters::Target;
use crate::runtime::cpu::Acts;
use crate::runtime::layer::LatentAttention;
use crate::runtime::observe::see;
use crate::runtime::ops::RmsNorm;
use crate::runtime::profile::Stage;
use crate::runtime::rope::rotate;
use crate::runtime::weights::Host;
use crate::simd::Kernel;
use std::f32::consts::LOG2_E;

impl Model {
    /// Projects all rows to queries and to the vectors of keys and values, expands these, and writes the keys and
    /// values to the caches.
    pub(super) fn read_latent(&self, index: usize, op: &LatentAttention<Host>, w: &mut Walk<'_>) -> Result<()> {
        let (s, shape, latent) = (&mut *w.scratch, &op.shape, &op.latent);
        see(w.step.observer.as_deref_mut(), index, Part::Attention, &s.normed);
        let (n, n_heads, head_dim) = (s.normed.n(), shape.n_heads, shape.head_dim);
        let (kv_width, expanded) = (latent.kv_rank + latent.rope, latent.nope + latent.value);
        s.q.resize(n * n_heads * head_dim, 0.0);
        s.kv_latent.resize(n * kv_width, 0.0);
        match &op.q_a {
            None => {
                let q = product(&op.q, &s.normed, &mut s.q).changed_by(&s.groups, index, Target::Q);
                self.multiply(vec![q, product(&op.kv_a, &s.normed, &mut s.kv_latent)], self.arithmetic)?;
            }
            Some((q_a, norm)) => {
                let rank = norm.len();
                s.q_latent.resize(n * rank, 0.0);
                let products =
                    vec![product(q_a, &s.normed, &mut s.q_latent), product(&op.kv_a, &s.normed, &mut s.kv_latent)];
                self.multiply(products, self.arithmetic)?;
                self.norm_latent(&s.q_latent, rank, norm, latent.norm_eps, &mut s.latent);
                let q = product(&op.q, &s.latent, &mut s.q).changed_by(&s.groups, index, Target::Q);
                self.multiply(vec![q], self.arithmetic)?;
            }
        }
        self.norm_latent(&s.kv_latent, kv_width, &op.kv_norm, latent.norm_eps, &mut s.latent);
        s.expanded.resize(n * n_heads * expanded, 0.0);
        self.multiply(vec![product(&op.kv_b, &s.latent, &mut s.expanded)], self.arithmetic)?;
        w.step.profile.lap(Stage::Projections);
        self.set_q_factors(shape, &s.runs, &mut s.q_factors);
        let angles = shape.rotary.map_or(&[][..], |kind| &w.step.angles[kind]);
        let whole = Tails { head_dim, kept: latent.nope, pairs: shape.pairs, angles, scale: shape.scale * LOG2_E };
        self.rotate_tails(&mut s.q, n_heads * head_dim, &whole, &s.q_factors);
        let shared = Tails { head_dim: kv_width, kept: latent.kv_rank, scale: 1.0, ..whole };
        self.rotate_tails(&mut s.kv_latent, kv_width, &shared, &[]);
        s.k.resize(n * n_heads * head_dim, 0.0);
        s.v.resize(n * n_heads * latent.value, 0.0);
        for row in 0..n {
            let rotated = &s.kv_latent[row * kv_width + latent.kv_rank..][..latent.rope];
            for head in row * n_heads..(row + 1) * n_heads {
                let (key, value) = s.expanded[head * expanded..][..expanded].split_at(latent.nope);
                let to = &mut s.k[head * head_dim..][..head_dim];
                to[..latent.nope].copy_from_slice(key);
                to[latent.nope..].copy_from_slice(rotated);
                s.v[head * latent.value..][..latent.value].copy_from_slice(value);
            }
        }
        self.write_cache(index, w);
        w.step.profile.lap(Stage::Attention);
        Ok(())
    }

    /// Normalizes the first values of rows of `width`, as many as there are factors.
    fn norm_latent(&self, rows: &[f32], width: usize, weight: &[f32], eps: f32, normed: &mut Acts) {
        let rank = weight.len();
        normed.reset(rows.len() / width, rank);
        let (out, stride) = normed.rows_mut();
        self.cpu.for_rows(out, stride, |i, out| {
            let x = &rows[i * width..][..rank];
            self.cpu.level().run(RmsNorm { x, weight, eps, out: &mut out[..rank] });
        });
        self.prepare(normed);
    }

    /// Rotates the ends of the heads of rows and scales the heads. `factors` are further factors of each row, if there
    /// are any.
    fn rotate_tails(&self, rows: &mut [f32], width: usize, how: &Tails<'_>, factors: &[f32]) {
        let rotated = how.angles.len() / (rows.len() / width);
        self.cpu.for_rows(rows, width, |i, heads| {
            let angles = &how.angles[i * rotated..][..rotated];
            let scale = factors.get(i).map_or(how.scale, |factor| how.scale * factor);
            self.cpu.level().run(RotateTails { heads, how: Tails { angles, scale, ..*how } });
        });
    }
}

/// Rotation of the ends of heads, and scaling of the heads.
#[derive(Clone, Copy)]
struct Tails<'a> {
    head_dim: usize,
    /// Values at the start of a head that are not rotated.
    kept: usize,
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
        let Tails { head_dim, kept, pairs, angles, scale } = self.how;
        for head in self.heads.chunks_exact_mut(head_dim) {
            let (kept, rotated) = head.split_at_mut(kept);
            kept.iter_mut().for_each(|x| *x *= scale);
            rotate(rotated, rotated.len(), pairs, angles, scale);
        }
    }
}
