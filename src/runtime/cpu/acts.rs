//! The inputs of matrix products: rows of floats, padded to whole blocks, and their rounded forms.

use super::kernels::KernelTable;
use super::{Form, scalar};
use crate::scheme::BLOCK;
use crate::simd::Kernel;

/// Activations that share a scale in the int8 form: four blocks. The last group of a row is padded with zeros.
pub const GROUP: usize = GROUP_BLOCKS * BLOCK;
/// Blocks in a group.
pub(super) const GROUP_BLOCKS: usize = 4;

/// 64 bytes of floats; gives rows of activations the alignment that vector loads like.
#[derive(Debug, Default, Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
pub(super) struct Line(pub [f32; 16]);

/// The int8 form of a group of activations, in one piece so that a kernel walks one pointer per row.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Q8Group {
    /// Rounded values, -127..=127; never -128, on which kernels rely.
    pub codes: [i8; GROUP],
    /// For each block, -16 times the sum of its codes: what takes an offset of 16 back that weights were given.
    pub starts: [i32; GROUP_BLOCKS],
    /// Sum of `starts`.
    pub start: i32,
    /// Multiplies the codes.
    pub scale: f32,
}

impl Q8Group {
    pub(super) const ZERO: Q8Group = Q8Group { codes: [0; GROUP], starts: [0; GROUP_BLOCKS], start: 0, scale: 0.0 };
}

/// 32 bf16 values as their bits.
#[derive(Debug, Default, Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
pub(super) struct HalfLine(pub [u16; BLOCK]);

/// A batch of input rows: `n` tokens of `k` values, padded with zeros to whole blocks of 32, with its rounded forms.
#[derive(Debug, Default, Clone)]
pub struct Acts {
    n: usize,
    k: usize,
    stride: usize,
    values: Vec<Line>,
    groups: Vec<Q8Group>,
    quantized: bool,
    /// The bf16 form: for each row its lines, then one whose first element is the row's [`least_magnitude`].
    halves: Vec<HalfLine>,
    rounded: bool,
}

impl Acts {
    /// Copies `n` rows of `k` values; the buffers are reused.
    pub fn set(&mut self, n: usize, k: usize, rows: &[f32]) {
        assert_eq!(rows.len(), n * k);
        self.reset(n, k);
        for i in 0..n {
            self.row_mut(i).copy_from_slice(&rows[i * k..][..k]);
        }
    }

    /// Makes room for `n` rows of `k` values, all of which are to be written through [`Acts::row_mut`] or
    /// [`Acts::rows_mut`]; until then they hold whatever numbers were there. Padding is zero.
    pub fn reset(&mut self, n: usize, k: usize) {
        // An odd number of blocks, so that the rows of a rectangle do not fall into the same sets of the cache.
        let stride = (k.div_ceil(BLOCK) | 1) * BLOCK;
        (self.n, self.k, self.stride, self.quantized, self.rounded) = (n, k, stride, false, false);
        self.values.resize(n * stride / 16, Line::default());
        if stride > k {
            let values: &mut [f32] = bytemuck::cast_slice_mut(&mut self.values);
            values.chunks_exact_mut(stride).for_each(|row| row[k..].fill(0.0));
        }
    }

    /// Rounds every group to int8 as [`super::scalar::quantize_group`] does, on the calling thread;
    /// [`super::Cpu::quantize`] spreads the work.
    pub fn quantize(&mut self) {
        let (values, stride, groups, per_row) = self.start_quantizing();
        for (values, groups) in values.chunks_exact(stride).zip(groups.chunks_exact_mut(per_row.max(1))) {
            KernelTable::best().quantize(values, groups);
        }
    }

    /// All values and their stride, and the groups to be written from them and how many a row has; the caller writes all.
    pub(super) fn start_quantizing(&mut self) -> (&[f32], usize, &mut [Q8Group], usize) {
        let per_row = self.k.div_ceil(GROUP);
        self.groups.resize(self.n * per_row, Q8Group::ZERO);
        self.quantized = true;
        (bytemuck::cast_slice(&self.values), self.stride, &mut self.groups, per_row)
    }

    /// All values and their stride, and the lines of the bf16 form and their stride; the caller rounds every row.
    pub(super) fn start_rounding(&mut self) -> (&[f32], usize, &mut [HalfLine], usize) {
        let lines = self.half_lines();
        self.halves.resize(self.n * lines, HalfLine::default());
        self.rounded = true;
        (bytemuck::cast_slice(&self.values), self.stride, &mut self.halves, lines)
    }

    /// Lines of a row of the bf16 form: odd for the same reason as the stride of the values.
    fn half_lines(&self) -> usize {
        (self.stride / BLOCK + 1) | 1
    }

    /// Number of rows (tokens).
    pub fn n(&self) -> usize {
        self.n
    }

    /// Values per row without padding.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Row `i`, padded to whole blocks.
    pub fn row(&self, i: usize) -> &[f32] {
        &bytemuck::cast_slice(&self.values)[i * self.stride..][..self.stride]
    }

    /// Row `i` without padding, to be written; the rounded forms are dropped.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        (self.quantized, self.rounded) = (false, false);
        &mut bytemuck::cast_slice_mut(&mut self.values)[i * self.stride..][..self.k]
    }

    /// All rows and their stride, to be written in parallel; the padding of each row must stay zero.
    /// The rounded forms are dropped.
    pub fn rows_mut(&mut self) -> (&mut [f32], usize) {
        (self.quantized, self.rounded) = (false, false);
        (bytemuck::cast_slice_mut(&mut self.values), self.stride)
    }

    /// True when this form is up to date.
    pub fn has(&self, form: Form) -> bool {
        match form {
            Form::F32 => true,
            Form::Bf16 => self.rounded,
            Form::Int8 => self.quantized,
        }
    }

    /// The bf16 form of row `i`, padded to whole blocks.
    pub(super) fn row_bf16(&self, i: usize) -> &[u16] {
        let row = &self.halves[i * self.half_lines()..][..self.stride / BLOCK];
        bytemuck::cast_slice(row)
    }

    /// The [`least_magnitude`] of the bf16 form of row `i`.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn least_magnitude(&self, i: usize) -> u16 {
        self.halves[i * self.half_lines() + self.stride / BLOCK].0[0]
    }

    /// Int8 form of row `i`.
    pub fn row_q8(&self, i: usize) -> &[Q8Group] {
        let groups = self.k.div_ceil(GROUP);
        &self.groups[i * groups..][..groups]
    }
}

/// Rounds a row to bf16.
pub(super) struct RoundRow<'a> {
    pub values: &'a [f32],
    pub out: &'a mut [HalfLine],
}

impl Kernel for RoundRow<'_> {
    type Output = ();
    #[inline(always)]
    fn run(self) {
        let mut least = [u16::MAX; BLOCK];
        for (values, line) in self.values.as_chunks::<BLOCK>().0.iter().zip(self.out.iter_mut()) {
            for ((value, out), least) in values.iter().zip(&mut line.0).zip(&mut least) {
                *out = scalar::to_bf16(*value);
                *least = (*least).min(magnitude(*out));
            }
        }
        self.out[self.values.len() / BLOCK].0[0] = least.into_iter().fold(u16::MAX, u16::min);
    }
}

/// Orders bf16 values by their magnitude, with the zeros at the end; the exponent lies in the upper byte of its successor.
#[inline(always)]
fn magnitude(bits: u16) -> u16 {
    (bits << 1).wrapping_sub(1)
}

/// The least [`magnitude`] among bf16 values, given as their bits.
pub(super) struct LeastMagnitude<'a>(pub &'a [u16]);

impl Kernel for LeastMagnitude<'_> {
    type Output = u16;
    #[inline(always)]
    fn run(self) -> u16 {
        let (chunks, rest) = self.0.as_chunks::<128>();
        let mut least = [u16::MAX; 128];
        for chunk in chunks {
            least.iter_mut().zip(chunk).for_each(|(least, bits)| *least = (*least).min(magnitude(*bits)));
        }
        let rest = rest.iter().map(|bits| magnitude(*bits));
        least.into_iter().chain(rest).fold(u16::MAX, u16::min)
    }
}
