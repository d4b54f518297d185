//! Operations on rows: norms, rotation of heads, sums, and the choice of the rows that are left in the last layer.

use super::{Group, Model, Walk};
use crate::error::Result;
use crate::model_config::{NormKind, RotaryPairs};
use crate::runtime::cpu::{Acts, Form};
use crate::runtime::device::Run;
use crate::runtime::layer::{AttentionShape, Operation};
use crate::runtime::ops::{Add, AddNormed, AddScaled, LayerNorm, RmsNorm, norm_heads};
use crate::runtime::rope::rotate;
use crate::runtime::weights::{Host, Linear};
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

    pub(super) fn norm(&self, x: &[f32], weight: &[f32], out: &mut [f32]) {
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
        self.copy_rows_of(x, self.config.hidden, copy);
    }

    /// Copies rows of this width, and prepares them.
    pub(super) fn copy_rows_of(&self, x: &[f32], width: usize, copy: &mut Acts) {
        copy.reset(x.len() / width, width);
        let (out, stride) = copy.rows_mut();
        self.cpu.for_rows(out, stride, |i, out| out[..width].copy_from_slice(&x[i * width..][..width]));
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

impl Model {
    /// Computes a recurrent mixer and writes its projected output to `branch`; in the last layer, that of the wanted
    /// rows. Returns false if there are none.
    ///
    /// # Errors
    /// A weight cannot be read.
    pub(super) fn recur(&self, index: usize, operation: &Operation<Host>, w: &mut Walk<'_>) -> Result<bool> {
        let output = match operation {
            Operation::ShortConv(op) => {
                self.convolve(index, op, w)?;
                &op.output
            }
            Operation::DeltaNet(op) => {
                self.delta_net(index, op, w)?;
                &op.output
            }
            Operation::Mamba(op) => {
                self.mamba(index, op, w)?;
                &op.output
            }
            _ => unreachable!("only recurrent mixers are passed"),
        };
        if index + 1 == self.config.n_layers {
            self.keep_wanted_mixed(w);
        }
        match w.scratch.runs.is_empty() {
            true => Ok(false),
            false => self.project(output, w).map(|()| true),
        }
    }

    /// Drops all rows except the wanted ones, and those of the output of a recurrent mixer.
    fn keep_wanted_mixed(&self, w: &mut Walk<'_>) {
        if !w.keeps_all && w.step.wanted.len() < w.scratch.attention.attended.n() {
            let wanted: Vec<u32> = w.step.wanted.iter().map(|row| *row as u32).collect();
            w.scratch.kept.gather(&self.cpu, &w.scratch.attention.attended, &wanted, &[Form::F32]);
            std::mem::swap(&mut w.scratch.attention.attended, &mut w.scratch.kept);
        }
        self.keep_wanted(Queries::default(), w);
    }

    /// Drops all rows except the wanted ones: after the keys and values of the last layer, the others are not used.
    pub(super) fn keep_wanted(&self, Queries { width, gate }: Queries, w: &mut Walk<'_>) {
        let rows: usize = w.step.runs.iter().map(|run| run.tokens).sum();
        if w.keeps_all || w.step.wanted.len() == rows {
            return;
        }
        let s = &mut *w.scratch;
        let mut buffers = vec![(&mut *w.step.x, self.config.hidden), (&mut s.attention.q, width)];
        if gate > 0 {
            buffers.push((&mut s.attention.output_gate, gate));
        }
        if let Some(weights) = &self.weights.per_layer {
            buffers.push((&mut s.further, weights.projection.matrix.rows()));
        }
        s.runs.clear();
        for (i, row) in w.step.wanted.iter().enumerate() {
            let run = w.step.runs[w.step.runs.partition_point(|run| run.first + run.tokens <= *row)];
            s.runs.push(Run { first: i, tokens: 1, position: run.position + row - run.first, ..run });
            for (buffer, width) in &mut buffers {
                buffer.copy_within(row * *width..(row + 1) * *width, i * *width);
            }
        }
        buffers.into_iter().for_each(|(buffer, width)| buffer.truncate(w.step.wanted.len() * width));
        if self.config.parallel {
            // The MLP reads the same rows.
            self.gather(w.step.wanted, &mut s.normed, &mut s.kept);
        }
        keep_groups(w.step.wanted, &mut s.groups);
    }

    /// Drops all rows of the input of the output matrix except the wanted ones.
    pub(super) fn keep_wanted_output(&self, w: &mut Walk<'_>) {
        let s = &mut *w.scratch;
        if w.step.wanted.len() < s.normed.n() {
            self.gather(w.step.wanted, &mut s.normed, &mut s.kept);
            keep_groups(w.step.wanted, &mut s.groups);
        }
    }

    /// Drops all rows of `acts` except the wanted ones, in all forms; `kept` is a buffer.
    fn gather(&self, wanted: &[usize], acts: &mut Acts, kept: &mut Acts) {
        let forms: Vec<Form> = Form::ALL.into_iter().filter(|form| acts.has(*form)).collect();
        let wanted: Vec<u32> = wanted.iter().map(|row| *row as u32).collect();
        kept.gather(&self.cpu, acts, &wanted, &forms);
        std::mem::swap(acts, kept);
    }
}

/// Limits groups of rows with adapters to the wanted rows.
fn keep_groups(wanted: &[usize], groups: &mut Vec<Group>) {
    for group in &mut *groups {
        let kept = |row: usize| wanted.partition_point(|wanted| *wanted < row);
        group.rows = kept(group.rows.start)..kept(group.rows.end);
    }
    groups.retain(|group| !group.rows.is_empty());
}

/// Queries whose rows are kept where only the wanted rows are computed on.
#[derive(Default)]
pub(super) struct Queries {
    /// Width of the queries of a row.
    width: usize,
    /// Width of the gates of the outputs of attention; 0 without gates.
    gate: usize,
}

pub(super) fn queries(shape: &AttentionShape, gate: Option<&Linear>) -> Queries {
    Queries { width: shape.n_heads * shape.head_dim, gate: gate.map_or(0, |gate| gate.matrix.rows()) }
}
