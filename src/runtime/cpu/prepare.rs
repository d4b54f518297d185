//! Rounds activations to the forms that products read, and gathers rows of them, on all threads.

use super::acts::{Acts, GROUP, HalfLine, LeastMagnitude, Q8Group, Q16Group, RoundBf16, RoundInt16};
use super::matrix::{Form, Matrix};
use super::{Cpu, MIN_COST_PER_THREAD};

impl Cpu {
    /// Computes the given form of the activations from their f32 values.
    pub fn prepare(&self, acts: &mut Acts, form: Form) {
        let (level, groups, lines) = (self.level(), acts.k.div_ceil(GROUP), acts.half_lines());
        let from = (bytemuck::cast_slice(&acts.values), acts.stride, acts.n);
        match form {
            Form::F32 => return,
            Form::Bf16 => self.fill(from, &mut acts.halves, (lines, HalfLine::default()), |values, out| {
                level.run(RoundBf16 { values, out });
            }),
            Form::Int16 => self.fill(from, &mut acts.wide_groups, (groups, Q16Group::ZERO), |values, groups| {
                level.run(RoundInt16 { values, groups });
            }),
            Form::Int8 => self.fill(from, &mut acts.groups, (groups, Q8Group::ZERO), |values, groups| {
                self.table.quantize(values, groups);
            }),
        }
        acts.current[form as usize] = true;
    }

    /// Writes a form of `n` rows: `row` computes `per_row` elements of `out`, which are `zero` before, from each row
    /// of `values`. Rows of `values` are `stride` apart.
    fn fill<T: Copy + Send>(
        &self,
        (values, stride, n): (&[f32], usize, usize),
        out: &mut Vec<T>,
        (per_row, zero): (usize, T),
        row: impl Fn(&[f32], &mut [T]) + Sync,
    ) {
        out.resize(n * per_row, zero);
        let rows = (MIN_COST_PER_THREAD / size_of::<f32>()).div_ceil(stride.max(1));
        self.for_chunks(out, rows * per_row.max(1), |i, chunk| {
            for (j, out) in chunk.chunks_exact_mut(per_row).enumerate() {
                row(&values[(i * rows + j) * stride..][..stride], out);
            }
        });
    }

    /// Computes the [`LeastMagnitude`] of a bf16 matrix, at the speed of memory, unless it is known or the matrix is
    /// packed.
    pub(super) fn measure(&self, matrix: &Matrix) {
        if matrix.packed.is_some() {
            return;
        }
        matrix.least_magnitude.get_or_init(|| {
            let elements: &[u16] = bytemuck::cast_slice(&matrix.data);
            let chunk = elements.len().div_ceil(self.threads()).max(MIN_COST_PER_THREAD);
            let mut least = vec![u16::MAX; elements.len().div_ceil(chunk)];
            self.for_chunks(&mut least, 1, |i, least| {
                let elements = &elements[i * chunk..];
                least[0] = self.level().run(LeastMagnitude(&elements[..chunk.min(elements.len())]));
            });
            least.into_iter().min().unwrap_or(u16::MAX)
        });
    }
}

impl Acts {
    /// Replaces the contents by these rows of other activations, in these forms only.
    ///
    /// # Panics
    /// `from` lacks a row or a form.
    pub fn gather(&mut self, cpu: &Cpu, from: &Acts, rows: &[u32], forms: &[Form]) {
        self.shape(rows.len(), from.k);
        self.current = [false; 4];
        for form in forms {
            assert!(from.has(*form), "activations without their {form:?} form");
            match form {
                Form::F32 => copy_rows(cpu, &mut self.values, &from.values, from.n, rows),
                Form::Bf16 => copy_rows(cpu, &mut self.halves, &from.halves, from.n, rows),
                Form::Int16 => copy_rows(cpu, &mut self.wide_groups, &from.wide_groups, from.n, rows),
                Form::Int8 => copy_rows(cpu, &mut self.groups, &from.groups, from.n, rows),
            }
            self.current[*form as usize] = true;
        }
    }
}

/// Copies the listed rows of `n` rows.
fn copy_rows<T: Copy + Send + Sync>(cpu: &Cpu, to: &mut Vec<T>, from: &[T], n: usize, rows: &[u32]) {
    /// Bytes that are worth another thread.
    const BYTES: usize = 64 << 10;
    let width = from.len() / n.max(1);
    if width == 0 {
        return;
    }
    to.resize(rows.len() * width, from[0]);
    let at_once = BYTES.div_ceil(width * size_of::<T>());
    cpu.for_chunks(to, at_once * width, |i, chunk| {
        for (row, to) in rows[i * at_once..].iter().zip(chunk.chunks_exact_mut(width)) {
            to.copy_from_slice(&from[*row as usize * width..][..width]);
        }
    });
}
