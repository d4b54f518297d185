//! Weights of weighted sums: the forms of numbers that [`WeightedSum`](super::WeightedSum) reads.
//!
//! Loops run over indices of fixed arrays because closures of iterators are not always compiled with the caller's
//! instruction set.

use super::weighted_sum::{SMALLEST_POWER, SumType};
use crate::simd::Kernel;

/// Returns the number of elements in one step of a weighted sum: 2 where elements are multiplied in pairs, otherwise 1.
pub const fn pair(sum_type: SumType) -> usize {
    if matches!(sum_type, SumType::Bf16) { 2 } else { 1 }
}

/// Writes floats to `words` in the form in which a weighted sum of this [`SumType`] reads its weights, one word per
/// step: an f32, or two bf16.
#[inline(always)]
pub fn weights(sum_type: SumType, values: &[f32], words: &mut [u32]) {
    if pair(sum_type) == 1 {
        for i in 0..values.len() {
            words[i] = values[i].to_bits();
        }
        return;
    }
    pack(values, rounded, words);
}

/// Packs the upper halves of `bits(value)` in pairs into words. Each short chunk takes two loops, one for the bits and
/// one for the pairs, so that both vectorize.
#[inline(always)]
fn pack<T: Copy>(values: &[T], bits: impl Fn(T) -> u32, words: &mut [u32]) {
    for start in (0..values.len()).step_by(128) {
        let values = &values[start..values.len().min(start + 128)];
        let words = &mut words[start / 2..][..values.len().div_ceil(2)];
        let mut wide = [0u64; 64];
        let halves: &mut [u32; 128] = bytemuck::cast_mut(&mut wide);
        for i in 0..values.len() {
            halves[i] = bits(values[i]);
        }
        for i in 0..words.len() {
            words[i] = joined(wide[i]);
        }
    }
}

/// Joins the upper halves of two words, the first in the low half of the result. The pair is one wide word, which
/// vector instructions can shift.
#[inline(always)]
pub fn joined(pair: u64) -> u32 {
    (pair >> 16 & 0xffff | pair >> 32 & 0xffff_0000) as u32
}

/// Returns the bits of the nearest bf16 (ties to even) as an f32; magnitudes below 2^-56 become zero, see
/// [`SumType::Bf16`].
#[inline(always)]
pub fn rounded(value: f32) -> u32 {
    const SMALLEST: u32 = ((127 + SMALLEST_POWER) as u32) << 23;
    let bits = value.to_bits();
    let abs = bits & 0x7fff_ffff;
    let near = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    let near = if abs < SMALLEST { 0 } else { near };
    // Rounding up must not turn a NaN into zero.
    if abs > 0x7f80_0000 { 0x7fc0_0000 } else { near }
}

/// Converts f32 numbers to weights of sums of bf16.
pub(super) struct Pairs<'a> {
    pub from: &'a [f32],
    pub to: &'a mut [u32],
}

impl Kernel for Pairs<'_> {
    #[inline(always)]
    fn run(self) {
        weights(SumType::Bf16, self.from, self.to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_odd_number_of_weights_ends_in_half_a_pair() {
        let mut words = [u32::MAX; 2];
        weights(SumType::Bf16, &[1.0, -2.0, 0.5], &mut words);
        assert_eq!(words, [0xc000_3f80, 0x3f00]);
    }

    #[test]
    fn every_instruction_set_rounds_the_same_numbers_to_the_same_pairs() {
        let mut rng = crate::rng::Rng::new(5);
        let edges = [0.0, -0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-40, 2f32.powi(-56), 1.3e-17];
        let random = (0..3000).map(|_| f32::from_bits(rng.next_u64() as u32));
        let values: Vec<f32> = edges.into_iter().chain(random).collect();
        for isa in crate::runtime::cpu::Cpu::isas() {
            let cpu = crate::runtime::cpu::Cpu::with_isa(1, Some(isa)).unwrap();
            for len in (0..100).chain([values.len()]) {
                let (mut found, mut expected) = (vec![7; len.div_ceil(2) + 1], vec![7; len.div_ceil(2) + 1]);
                let values = &values[values.len() - len..];
                cpu.bf16_pairs(values, &mut found);
                weights(SumType::Bf16, values, &mut expected);
                assert_eq!(found, expected, "{isa}, {len}");
            }
        }
    }
}
