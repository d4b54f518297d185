//! Activations: the inputs of matrix products, as rows of f32 values padded to whole blocks, and their rounded forms.

use super::matrix::Form;
use super::scalar;
use crate::scheme::BLOCK;
use crate::simd::Kernel;

/// Number of activations that share a scale in the integer forms: four blocks. The last group of a row is padded with
/// zeros.
pub const GROUP: usize = GROUP_BLOCKS * BLOCK;
/// Blocks in a group.
pub(super) const GROUP_BLOCKS: usize = 4;

/// 64 bytes of floats, which align rows of activations for vector loads.
#[derive(Debug, Default, Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
pub(super) struct Line(pub [f32; 16]);

/// Int8 form of a group of activations, stored contiguously so that a kernel advances one pointer per row.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C, align(64))]
pub struct Q8Group {
    /// Rounded values, -127..=127; kernels rely on the absence of -128.
    pub codes: [i8; GROUP],
    /// For each block, -8 times the sum of its codes. Kernels that add an offset of 8 to the weights, so that their
    /// codes become unsigned, add this number to the sum of products, which cancels the offset.
    pub starts: [i32; GROUP_BLOCKS],
    /// The same for an offset of 128: kernels that load these numbers instead of shifting `starts` take 4 % less time.
    pub wide_starts: [i32; GROUP_BLOCKS],
    /// Sum of `starts`.
    pub start: i32,
    /// Scale that multiplies the codes.
    pub scale: f32,
    /// Both parts of `starts`: that of the first two codes of each word of four, and that of the last two.
    pub pair_starts: [[i16; 2]; GROUP_BLOCKS],
    /// Part of `starts` of the first half of each block.
    pub half_starts: [i16; GROUP_BLOCKS],
}

impl Q8Group {
    pub(super) const ZERO: Q8Group = Q8Group {
        codes: [0; GROUP],
        starts: [0; GROUP_BLOCKS],
        wide_starts: [0; GROUP_BLOCKS],
        start: 0,
        scale: 0.0,
        pair_starts: [[0; 2]; GROUP_BLOCKS],
        half_starts: [0; GROUP_BLOCKS],
    };

    /// Returns the part of `starts` of a half of a block.
    #[inline(always)]
    pub(super) fn half_start(&self, block: usize, half: usize) -> i32 {
        let first = i32::from(self.half_starts[block]);
        if half == 0 { first } else { self.starts[block] - first }
    }
}

/// 16-bit form of a group of activations.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C, align(4))]
pub struct Q16Group {
    /// Rounded values, in the order in which kernels unpack nibbles: see [`Q16Group::place`].
    pub codes: [i16; GROUP],
    /// Scale that multiplies the codes.
    pub scale: f32,
    /// Sums of the codes of both halves of each block.
    pub half_sums: [[i32; 2]; GROUP_BLOCKS],
}

impl Q16Group {
    pub(super) const ZERO: Q16Group = Q16Group { codes: [0; GROUP], scale: 0.0, half_sums: [[0; 2]; GROUP_BLOCKS] };

    /// Returns the index of the element of the group whose code is at place `p`. The places of a block hold, for each
    /// i = 0, 1, 2, 3, the elements 4i, 4i + 2, 4i + 1, 4i + 3, and then the same elements plus 16.
    pub fn place(p: usize) -> usize {
        let (block, i, half, odd, second) = (p / BLOCK, p / 8 % 4, p / 4 % 2, p / 2 % 2, p % 2);
        block * BLOCK + 16 * half + 4 * i + 2 * second + odd
    }

    /// Reorders codes as [`Q16Group::place`] says, four at a time.
    #[inline(always)]
    pub(super) fn in_place(codes: [i16; GROUP]) -> [i16; GROUP] {
        let fours: [u64; GROUP / 4] = bytemuck::cast(codes);
        let mut placed = [0; GROUP / 4];
        for block in 0..GROUP / BLOCK {
            for (i, half) in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)] {
                let four = fours[8 * block + 4 * half + i];
                // Swaps the middle two codes.
                let (up, down) = (four << 16 & 0xFFFF_0000_0000, four >> 16 & 0xFFFF_0000);
                placed[8 * block + 2 * i + half] = four & 0xFFFF_0000_0000_FFFF | up | down;
            }
        }
        bytemuck::cast(placed)
    }
}

/// 32 bf16 values as their bits.
#[derive(Debug, Default, Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
pub(super) struct HalfLine(pub [u16; BLOCK]);

/// A batch of input rows: `n` tokens of `k` values, padded with zeros to whole blocks of 32, with its rounded forms.
#[derive(Debug, Default, Clone)]
pub struct Acts {
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) stride: usize,
    pub(super) values: Vec<Line>,
    pub(super) groups: Vec<Q8Group>,
    pub(super) wide_groups: Vec<Q16Group>,
    /// Bf16 form: for each row its lines, then one whose first element is the least [`magnitude`] of the row.
    pub(super) halves: Vec<HalfLine>,
    /// Flags of the forms that are up to date, in the order of [`Form`].
    pub(super) current: [bool; 4],
}

impl Acts {
    /// Replaces the contents by `n` rows of `k` values each, `rows`, and reuses the buffers.
    pub fn set(&mut self, n: usize, k: usize, rows: &[f32]) {
        assert_eq!(rows.len(), n * k);
        self.reset(n, k);
        for i in 0..n {
            self.row_mut(i).copy_from_slice(&rows[i * k..][..k]);
        }
    }

    /// Makes room for `n` rows of `k` values, all of which must then be written through [`Acts::row_mut`] or
    /// [`Acts::rows_mut`]; until then their values are unspecified. Padding is zero.
    pub fn reset(&mut self, n: usize, k: usize) {
        self.shape(n, k);
        let stride = self.stride;
        self.values.resize(n * stride / 16, Line::default());
        if stride > k {
            let values: &mut [f32] = bytemuck::cast_slice_mut(&mut self.values);
            values.chunks_exact_mut(stride).for_each(|row| row[k..].fill(0.0));
        }
    }

    /// Sets the sizes and marks the rounded forms as out of date, without touching the buffers.
    pub(super) fn shape(&mut self, n: usize, k: usize) {
        // The number of blocks is odd, so that rows that are read together do not map to the same cache sets.
        (self.n, self.k, self.stride) = (n, k, (k.div_ceil(BLOCK) | 1) * BLOCK);
        self.forget_forms();
    }

    /// Returns the number of lines of a row of the bf16 form; it is odd for the same reason as the stride of the
    /// values.
    pub(super) fn half_lines(&self) -> usize {
        (self.stride / BLOCK + 1) | 1
    }

    fn forget_forms(&mut self) {
        self.current = [Form::F32, Form::Bf16, Form::Int16, Form::Int8].map(|form| form == Form::F32);
    }

    /// Returns the number of rows (tokens).
    #[inline]
    pub fn n(&self) -> usize {
        self.n
    }

    /// Returns the number of values per row without padding.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Returns row `i`, padded to whole blocks.
    #[inline]
    pub fn row(&self, i: usize) -> &[f32] {
        &bytemuck::cast_slice(&self.values)[i * self.stride..][..self.stride]
    }

    /// Returns row `i` without padding, to be written; the rounded forms are dropped.
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        self.forget_forms();
        &mut bytemuck::cast_slice_mut(&mut self.values)[i * self.stride..][..self.k]
    }

    /// Returns all rows and their stride, to be written in parallel; the padding of each row must stay zero. The
    /// rounded forms are dropped.
    pub fn rows_mut(&mut self) -> (&mut [f32], usize) {
        self.forget_forms();
        (bytemuck::cast_slice_mut(&mut self.values), self.stride)
    }

    /// Returns true when this form is up to date.
    pub fn has(&self, form: Form) -> bool {
        self.current[form as usize]
    }

    /// Returns the bf16 form of row `i`, padded to whole blocks.
    #[inline]
    pub(super) fn row_bf16(&self, i: usize) -> &[u16] {
        let row = &self.halves[i * self.half_lines()..][..self.stride / BLOCK];
        bytemuck::cast_slice(row)
    }

    /// Returns the least [`magnitude`] in the bf16 form of row `i`.
    pub(super) fn least_magnitude(&self, i: usize) -> u16 {
        self.halves[i * self.half_lines() + self.stride / BLOCK].0[0]
    }

    /// Returns the 16-bit form of row `i`.
    #[inline]
    pub fn row_q16(&self, i: usize) -> &[Q16Group] {
        let groups = self.k.div_ceil(GROUP);
        &self.wide_groups[i * groups..][..groups]
    }

    /// Returns the int8 form of row `i`.
    #[inline]
    pub fn row_q8(&self, i: usize) -> &[Q8Group] {
        let groups = self.k.div_ceil(GROUP);
        &self.groups[i * groups..][..groups]
    }
}

/// Loop that rounds a row to 16-bit integers.
pub(super) struct RoundInt16<'a> {
    pub values: &'a [f32],
    pub groups: &'a mut [Q16Group],
}

impl Kernel for RoundInt16<'_> {
    #[inline(always)]
    fn run(self) {
        for (group, values) in self.groups.iter_mut().zip(self.values.chunks(GROUP)) {
            let mut padded = [0.0; GROUP];
            padded[..values.len()].copy_from_slice(values);
            *group = scalar::quantize_group_wide(&padded);
        }
    }
}

/// Loop that rounds a row to bf16.
pub(super) struct RoundBf16<'a> {
    pub values: &'a [f32],
    pub out: &'a mut [HalfLine],
}

impl Kernel for RoundBf16<'_> {
    #[inline(always)]
    fn run(self) {
        let mut least = [u16::MAX; BLOCK];
        let values = self.values.as_chunks::<BLOCK>().0;
        for (values, line) in values.iter().zip(self.out.iter_mut()) {
            for i in 0..BLOCK {
                line.0[i] = scalar::to_bf16(values[i]);
                least[i] = least[i].min(magnitude(line.0[i]));
            }
        }
        self.out[self.values.len() / BLOCK].0[0] = least.into_iter().fold(u16::MAX, u16::min);
    }
}

/// Maps bf16 bits to a number by which they are ordered by magnitude. Zeros come last, so that they do not count when
/// the least magnitude is sought. `(magnitude + 1) >> 8` is the biased exponent.
#[inline(always)]
fn magnitude(bits: u16) -> u16 {
    (bits << 1).wrapping_sub(1)
}

/// Loop that finds the least [`magnitude`] among bf16 values, given as their bits.
pub(super) struct LeastMagnitude<'a>(pub &'a [u16]);

impl Kernel<u16> for LeastMagnitude<'_> {
    #[inline(always)]
    fn run(self) -> u16 {
        let (chunks, rest) = self.0.as_chunks::<128>();
        let mut least = [u16::MAX; 128];
        for chunk in chunks {
            for i in 0..chunk.len() {
                least[i] = least[i].min(magnitude(chunk[i]));
            }
        }
        let rest = rest.iter().map(|bits| magnitude(*bits));
        least.into_iter().chain(rest).fold(u16::MAX, u16::min)
    }
}
