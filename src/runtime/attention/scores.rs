//! Conversion of attention scores to probabilities (softmax in base 2).
//!
//! Scores are exponents of 2: `s = q . k * log2(e)`, with a softcap if the model has one. For the scores of a row in a
//! page, the result is the largest score rounded up to an integer `m`, the probabilities `2^(s - m)`, and their sum in
//! 16 lanes, one per position modulo 16.

use crate::runtime::cpu::{Cpu, SumType, reference};
use crate::runtime::kv::probabilities;
use crate::runtime::ops::{LANES, max, softcap};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// Applies the softcap to the scores in `slots` and sets the others to minus infinity. `scores` begin at slot `from`.
#[inline(always)]
pub(super) fn mask(scores: &mut [f32], from: usize, slots: &Range<usize>, cap: Option<f32>) {
    let seen = slots.start.saturating_sub(from).min(scores.len())..slots.end.saturating_sub(from);
    if let Some(cap) = cap {
        for score in &mut scores[seen.clone()] {
            *score = softcap(*score, cap * LOG2_E);
        }
    }
    scores[..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..].fill(f32::NEG_INFINITY);
}

/// Writes the probabilities of the scores of a row to `words`, as weights of a
/// [`WeightedSum`](crate::runtime::cpu::WeightedSum), and returns their reference `m` and the lanes of their sum.
#[inline(always)]
pub(super) fn row_probabilities(
    cpu: &Cpu,
    sum_type: SumType,
    scores: &[f32],
    words: &mut [u32],
) -> (f32, [f32; LANES]) {
    if let Some(done) = cpu.probabilities(sum_type, scores, words) {
        return done;
    }
    let m = reference(max(&peaks(scores)));
    (m, probabilities(sum_type, scores, m, words))
}

/// Returns the largest score of each lane, ignoring NaN.
#[inline(always)]
fn peaks(scores: &[f32]) -> [f32; LANES] {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in scores.as_chunks::<LANES>().0 {
        for l in 0..LANES {
            lanes[l] = if chunk[l] > lanes[l] { chunk[l] } else { lanes[l] };
        }
    }
    lanes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::runtime::kv::PAGE;

    #[test]
    fn probabilities_of_every_instruction_set_equal_the_scalar_ones() {
        let mut rng = Rng::new(9);
        for isa in Cpu::isas() {
            let cpu = Cpu::with_isa(1, Some(isa)).unwrap();
            for case in 0..200 {
                let spread = [0.01, 1.0, 20.0, 300.0][case % 4];
                let len = LANES * (1 + case % (PAGE / LANES));
                let mut scores: Vec<f32> = (0..len).map(|_| rng.next_normal() as f32 * spread).collect();
                match case % 7 {
                    0 => scores[len / 2..].fill(f32::NEG_INFINITY),
                    1 => scores.fill(f32::NEG_INFINITY),
                    2 => scores[len - 1] = f32::NAN,
                    3 => scores[len / 3] = f32::INFINITY,
                    4 => scores.iter_mut().for_each(|score| *score = score.round() - 0.0),
                    _ => {}
                }
                let (mut ours, mut scalar) = ([1u32; PAGE / 2], [1u32; PAGE / 2]);
                let (m, sum) = row_probabilities(&cpu, SumType::Bf16, &scores, &mut ours);
                let reference = reference(max(&peaks(&scores)));
                let lanes = probabilities(SumType::Bf16, &scores, reference, &mut scalar);
                let half = |bits: u32| if f32::from_bits(bits).is_nan() { u32::MAX } else { bits };
                let halves =
                    |words: &[u32]| words.iter().flat_map(|w| [half(w << 16), half(w >> 16 << 16)]).collect::<Vec<_>>();
                assert_eq!(m, reference, "{isa}, case {case}");
                assert_eq!(sum.map(|s| half(s.to_bits())), lanes.map(|s| half(s.to_bits())), "{isa}, case {case}");
                assert_eq!(halves(&ours), halves(&scalar), "{isa}, case {case}");
                let (mut ours, mut scalar) = ([1u32; PAGE], [1u32; PAGE]);
                let (m, sum) = row_probabilities(&cpu, SumType::F32, &scores, &mut ours);
                let lanes = probabilities(SumType::F32, &scores, reference, &mut scalar);
                assert_eq!(m, reference, "{isa}, case {case}");
                assert_eq!(sum.map(|s| half(s.to_bits())), lanes.map(|s| half(s.to_bits())), "{isa}, case {case}");
                assert_eq!(ours.map(half), scalar.map(half), "{isa}, case {case}");
            }
        }
    }
}
