//! Rounds activations to the forms that products read, and gathers rows of them, on all threads.

use super::acts::{Acts, LeastMagnitude, RoundBf16, RoundInt16};
use super::matrix::{Form, Matrix};
use super::{Cpu, MIN_COST_PER_THREAD};

impl Cpu {
    /// Brings a form of the activations up to date.
    pub fn prepare(&self, acts: &mut Acts, form: Form) {
        let level = self.level();
        match form {
            Form::F32 => {}
            Form::Bf16 => self.fill(acts.start_bf16(), |values, out| level.run(RoundBf16 { values, out })),
            Form::Int16 => self.fill(acts.start_int16(), |values, groups| level.run(RoundInt16 { values, groups })),
            Form::Int8 => self.fill(acts.start_int8(), |values, groups| self.table.quantize(values, groups)),
        }
    }

    /// Writes a form of all rows: from the values and their stride, so many elements per row.
    fn fill<T: Send>(
        &self,
        (values, stride, out, per_row): (&[f32], usize, &mut [T], usize),
        row: impl Fn(&[f32], &mut [T]) + Sync,
    ) {
        let rows = (MIN_COST_PER_THREAD / size_of::<f32>()).div_ceil(stride.max(1));
        self.for_chunks(out, rows * per_row.max(1), |i, chunk| {
            for (j, out) in chunk.chunks_exact_mut(per_row).enumerate() {
                row(&values[(i * rows + j) * stride..][..stride], out);
            }
        });
    }

    /// Finds the [`LeastMagnitude`] of a bf16 matrix, at the speed of memory, unless it is known or the matrix is packed.
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
    /// Becomes these rows of other activations, in these forms only.
    ///
    /// # Panics
    /// The others lack a row or a form.
    pub fn gather(&mut self, cpu: &Cpu, from: &Acts, rows: &[u32], forms: &[Form]) {
        self.shape(rows.len(), from.k);
        self.bare = true;
        for form in forms {
            assert!(from.has(*form), "activations without their {form:?} form");
            match form {
                Form::F32 => self.bare = !copy_rows(cpu, &mut self.values, &from.values, from.n, rows),
                Form::Bf16 => self.rounded = copy_rows(cpu, &mut self.halves, &from.halves, from.n, rows),
                Form::Int16 => {
                    self.quantized_wide = copy_rows(cpu, &mut self.wide_groups, &from.wide_groups, from.n, rows);
                }
                Form::Int8 => self.quantized = copy_rows(cpu, &mut self.groups, &from.groups, from.n, rows),
            }
        }
    }
}

/// Copies these of `n` rows; true, for they are there now.
fn copy_rows<T: Copy + Send + Sync>(cpu: &Cpu, to: &mut Vec<T>, from: &[T], n: usize, rows: &[u32]) -> bool {
    /// Worth another thread.
    const BYTES: usize = 64 << 10;
    let width = from.len() / n.max(1);
    if width == 0 {
        return true;
    }
    to.resize(rows.len() * width, from[0]);
    let at_once = BYTES.div_ceil(width * size_of::<T>());
    cpu.for_chunks(to, at_once * width, |i, chunk| {
        for (row, to) in rows[i * at_once..].iter().zip(chunk.chunks_exact_mut(width)) {
            to.copy_from_slice(&from[*row as usize * width..][..width]);
        }
    });
    true
}
