//! Weighted sums of vectors: attention's scores (keys weighted by a query) and its outputs (values weighted by
//! probabilities) are both this.
//!
//! A [`WeightedSum`] has `steps` rows of `vectors` times 16 lanes, and for each of its outputs a weight per step. A
//! step is one number per lane, or a pair of bf16 numbers whose products are added one after the other; either way a
//! weight is one word of 32 bits. Every lane is summed alone, by `mul_add` from zero in the order of the steps.
#![allow(unsafe_code)]

use half::f16;

/// What is stored, and so what a step is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SumType {
    /// f32 times f32.
    F32,
    /// f16 times f32.
    F16,
    /// Pairs of bf16 times pairs of bf16: `sum = even * even + (odd * odd + sum)`, each rounded to f32, as `vdpbf16ps`
    /// does. That instruction takes subnormal numbers for zero, so no number may be smaller than 2^-56 unless it is
    /// zero: then products are multiples of 2^-126, and nothing subnormal can arise.
    Bf16,
}

/// The power of two below which nothing but zero is multiplied as bf16, see [`SumType::Bf16`].
pub const SMALLEST_POWER: i32 = -56;

/// The whole number above the largest score, which probabilities are relative to; finite, so that scores which are not
/// numbers stay so.
#[inline(always)]
pub fn reference(largest: f32) -> f32 {
    largest.ceil().max(f32::MIN)
}

/// The constants of [`SumType`], for const generics.
pub(super) const F32: u8 = SumType::F32 as u8;
pub(super) const F16: u8 = SumType::F16 as u8;
pub(super) const BF16: u8 = SumType::Bf16 as u8;

impl SumType {
    /// Bytes of one step of 16 lanes.
    pub const fn vector_bytes(self) -> usize {
        if matches!(self, SumType::F16) { 32 } else { 64 }
    }
}

/// Vectors and how they are weighted, several times over.
#[derive(Debug, Clone, Copy)]
pub struct WeightedSum<'a> {
    /// Vector `v` of step `i` starts at byte `i * step + v * vector`.
    pub values: &'a [u8],
    /// Bytes from step to step.
    pub step: usize,
    /// Number of steps.
    pub steps: usize,
    /// Bytes from vector to vector.
    pub vector: usize,
    /// Number of vectors.
    pub vectors: usize,
    /// The weight of step `i` for output `r` is word `r * weight_row + i`: an f32, or two bf16 with the even one below.
    pub weights: &'a [u32],
    /// Words from output to output.
    pub weight_row: usize,
    /// Number of outputs.
    pub rows: usize,
    /// What will be needed next: a kernel may ask the memory for it, some lines with every step.
    pub next: &'a [u8],
}

/// Computes output `r` to `out[r * out_row..][..16 * vectors]`.
///
/// # Safety
/// * The CPU has the instruction set of the table the function comes from.
/// * [`WeightedSum::check`] has accepted the arguments for the function's type.
pub(super) type WeightedSumFn = unsafe fn(&WeightedSum<'_>, out: &mut [f32], out_row: usize);

/// What attention makes of the scores of a row, see [`super::Cpu::probabilities`].
///
/// # Safety
/// * The CPU has the instruction set of the table the function comes from.
/// * Scores are whole lanes, and there is a word for each two of them.
pub(super) type ProbabilitiesFn = unsafe fn(scores: &[f32], words: &mut [u32], sum: &mut [f32; 16]) -> f32;

impl WeightedSum<'_> {
    /// # Panics
    /// A step, a weight or an output lies outside its slice.
    pub(super) fn check(&self, kind: SumType, out: &[f32], out_row: usize) {
        let last = |n: usize| n.saturating_sub(1);
        let values = last(self.steps) * self.step + last(self.vectors) * self.vector + kind.vector_bytes();
        assert!(
            self.vectors == 0 || self.values.len() >= values,
            "{} bytes where {values} are summed",
            self.values.len()
        );
        assert!(self.weights.len() >= last(self.rows) * self.weight_row + self.steps, "a weight for each step");
        assert!(out.len() >= last(self.rows) * out_row + 16 * self.vectors, "room for each output");
        assert!(self.vectors == 0 || self.rows < 2 || out_row >= 16 * self.vectors, "outputs do not overlap");
    }
}

/// The definition, which all instruction sets follow.
pub(super) fn scalar<const TYPE: u8>(sum: &WeightedSum<'_>, out: &mut [f32], out_row: usize) {
    for r in 0..sum.rows {
        for lane in 0..16 * sum.vectors {
            let mut total = 0f32;
            for i in 0..sum.steps {
                let at = i * sum.step + lane / 16 * sum.vector;
                let (value, weight) = (&sum.values[at..], sum.weights[r * sum.weight_row + i]);
                let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("4 bytes"));
                total = match TYPE {
                    F32 => f32::from_bits(word(&value[lane % 16 * 4..][..4])).mul_add(f32::from_bits(weight), total),
                    F16 => {
                        let half = f16::from_le_bytes([value[lane % 16 * 2], value[lane % 16 * 2 + 1]]);
                        half.to_f32().mul_add(f32::from_bits(weight), total)
                    }
                    _ => {
                        let value = word(&value[lane % 16 * 4..][..4]);
                        even(value).mul_add(even(weight), odd(value).mul_add(odd(weight), total))
                    }
                };
            }
            out[r * out_row + lane] = total;
        }
    }
}

/// The first of two bf16 numbers.
fn even(pair: u32) -> f32 {
    f32::from_bits(pair << 16)
}

/// The second.
fn odd(pair: u32) -> f32 {
    f32::from_bits(pair & 0xffff_0000)
}
