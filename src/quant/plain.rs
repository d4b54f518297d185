//! Round-to-nearest quantization: the plain scale of a group, and the nearest codes under a given scale.

use super::block::q4_0;
use crate::scheme::{CodeMap, PlainScale, QuantSpec};
use crate::simd::{Kernel, black_box};

/// Range of the codes of a scheme, as integers with the zero point subtracted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CodeRange {
    /// Smallest code.
    pub low: f32,
    /// Largest code.
    pub high: f32,
    /// Value added to a code for storage (see [`crate::scheme`]).
    pub bias: u8,
}

impl CodeRange {
    /// Returns the range of a scheme; only affine codes use `zero`.
    #[inline(always)]
    pub fn of(spec: &QuantSpec, zero: u8) -> CodeRange {
        match spec.code_map() {
            CodeMap::Biased(bias) => CodeRange { low: -f32::from(bias), high: f32::from(bias) - 1.0, bias },
            CodeMap::Affine => CodeRange { low: -f32::from(zero), high: 15.0 - f32::from(zero), bias: zero },
            CodeMap::Table(table) => {
                let [low, .., high] = *table.values();
                CodeRange { low: f32::from(low), high: f32::from(high), bias: 0 }
            }
            CodeMap::Unsigned => CodeRange { low: 0.0, high: ((1u32 << spec.scheme.bits()) - 1) as f32, bias: 0 },
            CodeMap::Bytes => CodeRange { low: -127.0, high: 127.0, bias: 0 },
            CodeMap::E4m3 => unreachable!("no encoder chooses codes of FP8"),
            CodeMap::Trellis(_) => unreachable!("codes of a trellis are chosen together"),
        }
    }
}

/// Returns true for integer codes whose plain encoding is that of GGML's `quantize_row_q4_0_ref`, which computes codes
/// with the scale before it is rounded to fp16.
pub(crate) fn rounds_as_ggml(spec: &QuantSpec) -> bool {
    spec.scheme.info().plain_scale == PlainScale::SignedPeak && !spec.has_table()
}

/// Scale and zero point of a group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Choice {
    /// Scale, possibly negative.
    pub scale: f32,
    /// Zero point; 0 for symmetric schemes.
    pub zero: u8,
}

/// Constant whose addition and subtraction rounds a value below 2^22 to the nearest integer, ties to even.
pub(crate) const ROUND: f32 = 12_582_912.0;

/// Number of independent sums in loops over weights: the f32 lanes of the widest vector (512 bits).
pub(crate) const LANES: usize = 16;

/// Reduces all lanes to one value as a tree.
#[inline(always)]
pub(crate) fn fold(lanes: [f32; LANES], op: impl Fn(f32, f32) -> f32 + Copy) -> f32 {
    let four = halve::<8, 4>(halve::<16, 8>(black_box(lanes), op), op);
    op(op(four[0], four[2]), op(four[1], four[3]))
}

#[inline(always)]
fn halve<const N: usize, const HALF: usize>(values: [f32; N], op: impl Fn(f32, f32) -> f32) -> [f32; HALF] {
    let mut half = [0f32; HALF];
    for i in 0..HALF {
        half[i] = op(values[i], values[i + HALF]);
    }
    half
}

/// Returns the code nearest to `x * inverse`. Uses comparisons instead of `clamp`, because each compiles to one
/// instruction.
#[inline(always)]
pub(crate) fn nearest(x: f32, inverse: f32, range: CodeRange) -> f32 {
    rounded(x, inverse, range) - ROUND
}

/// Returns the nearest code plus [`ROUND`]: an integer in the low bits of the float.
#[inline(always)]
fn rounded(x: f32, inverse: f32, range: CodeRange) -> f32 {
    let code = x * inverse;
    let code = if code < range.low { range.low } else { code };
    let code = if code > range.high { range.high } else { code };
    code + ROUND
}

/// Kernel that writes the stored codes nearest to the values, which are whole blocks, under `scale`.
pub(crate) struct Encode<'a> {
    pub values: &'a [f32],
    pub scale: f32,
    pub range: CodeRange,
    pub codes: &'a mut [u8],
}

impl Kernel for Encode<'_> {
    #[inline(always)]
    fn run(self) {
        let inverse = inverse(self.scale);
        let codes = self.codes.as_chunks_mut::<LANES>().0;
        for (codes, values) in codes.iter_mut().zip(self.values.as_chunks::<LANES>().0) {
            let mut nearest = [0f32; LANES];
            for lane in 0..LANES {
                nearest[lane] = rounded(values[lane], inverse, self.range);
            }
            for lane in 0..LANES {
                codes[lane] = (nearest[lane].to_bits() as u8).wrapping_add(self.range.bias);
            }
        }
    }
}

/// Returns 1 / scale, or 0 where that overflows. The values of such a group are all zero or too small for any scale.
#[inline(always)]
pub(crate) fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// Computes the plain scale (not yet rounded to its storage type) and zero point of a group of an integer scheme from
/// its extremes. The scale is the largest magnitude divided by 7, 15, 31 or 127 for symmetric schemes, and
/// (max - min)/15 for affine ones. The affine range always includes zero, so zero has an exact code.
#[inline(always)]
pub(crate) fn choose(spec: &QuantSpec, min: f32, max: f32) -> Choice {
    let peak = max.max(-min).max(0.0);
    if spec.symmetric {
        return Choice { scale: peak / CodeRange::of(spec, 0).high, zero: 0 };
    }
    let (min, max) = (min.min(0.0), max.max(0.0));
    // Both are halved first, so that the difference of two huge values does not overflow.
    let scale = (max * 0.5 - min * 0.5) / 7.5;
    Choice { scale, zero: (-min * inverse(scale)).round().clamp(0.0, 15.0) as u8 }
}

/// Kernel that returns the smallest and the largest value of whole blocks.
pub(crate) struct Extremes<'a>(pub &'a [f32]);

impl Kernel<(f32, f32)> for Extremes<'_> {
    #[inline(always)]
    fn run(self) -> (f32, f32) {
        extremes(self.0)
    }
}

/// Returns the smallest and the largest value of whole blocks; [`Extremes`] for use inside another kernel.
#[inline(always)]
pub(crate) fn extremes(values: &[f32]) -> (f32, f32) {
    let (mut min, mut max) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
    for values in values.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            min[lane] = smaller(values[lane], min[lane]);
            max[lane] = larger(values[lane], max[lane]);
        }
    }
    (fold(min, smaller), fold(max, larger))
}

/// Returns the smaller value. Uses a comparison, which is one instruction, instead of `min`, which also handles NaN.
#[inline(always)]
fn smaller(a: f32, b: f32) -> f32 {
    if a < b { a } else { b }
}

#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// Computes scale and zero point as [`choose`] does, from the p-th percentile of the magnitudes instead of the
/// extremes; affine schemes use the two-sided percentiles (nearest rank).
pub(crate) fn choose_by_percentile(spec: &QuantSpec, values: &[f32], p: f32) -> Choice {
    let rank = rank(p, values.len());
    if rounds_as_ggml(spec) {
        let mut sorted = values.to_vec();
        sorted.sort_by(|a, b| a.abs().total_cmp(&b.abs()));
        return Choice { scale: q4_0::scale(sorted[rank]), zero: 0 };
    }
    if spec.symmetric {
        let mut magnitudes: Vec<f32> = values.iter().map(|x| x.abs()).collect();
        let peak = ranked(&mut magnitudes, rank);
        return choose(spec, -peak, peak);
    }
    let mut sorted = values.to_vec();
    let max = ranked(&mut sorted, rank);
    choose(spec, ranked(&mut sorted, values.len() - 1 - rank), max)
}

/// Returns the index of the p-th percentile among `n` sorted values (nearest rank).
pub(crate) fn rank(p: f32, n: usize) -> usize {
    ((f64::from(p) / 100.0 * n as f64).ceil() as usize).clamp(1, n) - 1
}

fn ranked(values: &mut [f32], index: usize) -> f32 {
    *values.select_nth_unstable_by(index, f32::total_cmp).1
}
