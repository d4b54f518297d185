//! Operations on rows: norms, rotation of heads, and sums.

use super::Model;
use crate::model_config::{NormKind, RotaryPairs};
use crate::runtime::cpu::Acts;
use crate::runtime::ops::{Add, AddNormed, AddScaled, LayerNorm, RmsNorm, norm_heads};
use crate::runtime::rope::rotate;
use crate::simd::Kernel;

impl Model {
    /// Adds rows of the width of the residual stream.
    pub(super) fn add_rows(&self, to: &mut [f32], rows: &[f32]) {
        let hidden = self.config.hidden;
        self.cpu.for_rows(to, hidden, |i, x| self.cpu.level().run(Add { x, y: &rows[i * hidden..][..hidden] }));
    }

    /// Normalizes rows of the width of the residual stream.
    pub(super) fn norm_in_place(&self, rows: &mut [f32], weight: &[f32]) {
        let eps = self.config.norm_eps;
        self.cpu.for_rows(rows, weight.len(), |_, heads| {
            let how = Heads {
                norm: Some(weight),
                head_dim: weight.len(),
                pairs: RotaryPairs::Halves,
                angles: &[],
                scale: 1.0,
            };
            self.cpu.level().run(Rotate { heads, eps, how });
        });
    }

    fn norm(&self, x: &[f32], weight: &[f32], out: &mut [f32]) {
        let eps = self.config.norm_eps;
        match self.config.norm_kind {
            NormKind::Rms => self.cpu.level().run(RmsNorm { x, weight, eps, out }),
            NormKind::Layer => self.cpu.level().run(LayerNorm { x, weight, eps, out }),
        }
    }

    pub(super) fn norm_rows(&self, x: &[f32], weight: &[f32], normed: &mut Acts) {
        let hidden = weight.len();
        normed.reset(x.len() / hidden, hidden);
        let (out, stride) = normed.rows_mut();
        self.cpu.for_rows(out, stride, |i, out| self.norm(&x[i * hidden..][..hidden], weight, &mut out[..hidden]));
        self.prepare(normed);
    }

    pub(super) fn copy_rows(&self, x: &[f32], copy: &mut Acts) {
        let hidden = self.config.hidden;
        copy.reset(x.len() / hidden, hidden);
        let (out, stride) = copy.rows_mut();
        self.cpu.for_rows(out, stride, |i, out| out[..hidden].copy_from_slice(&x[i * hidden..][..hidden]));
        self.prepare(copy);
    }

    /// Normalizes, rotates and scales the heads of rows. `factors` are further factors of each row, if there are any.
    pub(super) fn rotate_rows(&self, rows: &mut [f32], width: usize, how: &Heads<'_>, factors: &[f32]) {
        let eps = self.config.norm_eps;
        let rotated = how.angles.len() / (rows.len() / width);
        self.cpu.for_rows(rows, width, |i, heads| {
            let angles = &how.angles[i * rotated..][..rotated];
            let scale = factors.get(i).map_or(how.scale, |factor| how.scale * factor);
            self.cpu.level().run(Rotate { heads, eps, how: Heads { angles, scale, ..*how } });
        });
    }

    /// Adds the output of a block to the residual stream, after the post norm if the model has one.
    pub(super) fn add_branch(&self, x: &mut [f32], branch: &[f32], norm: Option<&[f32]>) {
        let (hidden, scale) = (self.config.hidden, self.config.residual_scale);
        let eps = self.config.post_norm_eps.unwrap_or(self.config.norm_eps);
        self.cpu.for_rows(x, hidden, |i, x| {
            let y = &branch[i * hidden..][..hidden];
            match norm {
                Some(weight) => self.cpu.level().run(AddNormed { x, y, weight, eps }),
                None if scale != 1.0 => self.cpu.level().run(AddScaled { x, y, scale }),
                None => self.cpu.level().run(Add { x, y }),
            }
        });
    }
}

/// Normalization, rotation and scaling of the heads of queries or keys.
#[derive(Clone, Copy)]
pub(super) struct Heads<'a> {
    /// Factors of the norm, if there is one: `(head_dim)`, or the width of all heads if they are normalized together.
    pub norm: Option<&'a [f32]>,
    pub head_dim: usize,
    pub pairs: RotaryPairs,
    /// Cosines and sines of each row: `(n, rotary_dim)`; empty without rotation.
    pub angles: &'a [f32],
    /// Factor of the rotated heads.
    pub scale: f32,
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
        let Heads { norm, head_dim, pairs, angles, scale } = self.how;
        if let Some(weight) = norm {
            norm_heads(self.heads, weight, self.eps);
        }
        rotate(self.heads, head_dim, pairs, angles, scale);
    }
}
