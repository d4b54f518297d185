//! Weighted sums of vectors, with which attention computes both its scores (keys weighted by a query) and its outputs
//! (values weighted by probabilities).
//!
//! A [`WeightedSum`] has `steps` rows of `vectors` times 16 lanes, and for each of its outputs a weight per step. A
//! step is one number per lane, or a pair of bf16 numbers whose products are added one after the other; either way a
//! weight is one word of 32 bits. Every lane is summed by itself, with `mul_add`, from zero, in the order of the
//! steps.
#![allow(unsafe_code)]

use half::f16;

/// Element types of the values and the weights, which also determine what a step is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SumType {
    /// f32 values times f32 weights.
    F32,
    /// f16 values times f32 weights.
    F16,
    /// Pairs of bf16 values times pairs of bf16 weights: `sum = even * even + (odd * odd + sum)`, each rounded to
    /// f32, as `vdpbf16ps` does. That instruction treats subnormal numbers as zero, so no number may have a magnitude
    /// below 2^-56 unless it is zero: then products are multiples of 2^-126, and nothing subnormal can arise.
    Bf16,
}

/// Binary exponent of the smallest nonzero magnitude that may be multiplied as bf16; smaller numbers must be set to
/// zero first, see [`SumType::Bf16`].
pub const SMALLEST_POWER: i32 = -56;

/// Returns the score that probabilities are relative to: the largest score, rounded up to a whole number, but at
/// least `f32::MIN`. So it is finite even if no score is a number, and scores that are NaN stay NaN.
#[inline(always)]
pub fn reference(largest: f32) -> f32 {
    largest.ceil().max(f32::MIN)
}

/// Values of [`SumType`] for const generics.
pub(super) const F32: u8 = SumType::F32 as u8;
pub(super) const F16: u8 = SumType::F16 as u8;
pub(super) const BF16: u8 = SumType::Bf16 as u8;

impl SumType {
    /// Returns the bytes of one step of 16 lanes.
    pub const fn vector_bytes(self) -> usize {
        if matches!(self, SumType::F16) { 32 } else { 64 }
    }
}

/// Vectors, and the weights of several weighted sums of them.
#[derive(Debug, Clone, Copy)]
pub struct WeightedSum<'a> {
    /// Vector `v` of step `i` starts at byte `i * step + v * vector`.
    pub values: &'a [u8],
    /// Bytes from one step to the next.
    pub step: usize,
    /// Number of steps.
    pub steps: usize,
    /// Bytes from one vector to the next.
    pub vector: usize,
    /// Number of vectors.
    pub vectors: usize,
    /// Weights: that of step `i` for output `r` is word `r * weight_row + i`, an f32, or two bf16 with the even one
    /// in the lower half.
    pub weights: &'a [u32],
    /// Words from the weights of one output to those of the next.
    pub weight_row: usize,
    /// Number of outputs.
    pub rows: usize,
    /// Memory that will be needed next; a kernel may prefetch some of its cache lines with every step.
    pub next: &'a [u8],
}

/// Function that computes weighted sums and writes output `r` to `out[r * out_row..][..16 * vectors]`.
///
/// # Safety
/// * The CPU has the instruction set of the table the function comes from.
/// * [`WeightedSum::check`] has accepted the arguments for the function's type.
pub(super) type WeightedSumFn = unsafe fn(&WeightedSum<'_>, out: &mut [f32], out_row: usize);

/// Function that turns the attention scores of a row into probabilities, see [`super::Cpu::probabilities`].
///
/// # Safety
/// * The CPU has the instruction set of the table the function comes from.
/// * The number of scores is a multiple of 16, and there is a word for each two of them.
pub(super) type ProbabilitiesFn = unsafe fn(scores: &[f32], words: &mut [u32], sum: &mut [f32; 16]) -> f32;

impl WeightedSum<'_> {
    /// Checks that all values, weights and outputs lie inside their slices.
    ///
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

/// Computes weighted sums in plain Rust; the kernels of all instruction sets return the same bits.
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

/// Returns the first of two bf16 numbers.
fn even(pair: u32) -> f32 {
    f32::from_bits(pair << 16)
}

/// Returns the second of two bf16 numbers.
fn odd(pair: u32) -> f32 {
    f32::from_bits(pair & 0xffff_0000)
}
