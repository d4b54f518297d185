//! Method `exact`: recovers the exact scales and codes of weights that were quantized before. In a checkpoint
//! trained for 4 bits or decoded from 4 bits, each group contains only 16 multiples of a scale. This method recovers
//! that scale and with it every code; a search for the least error would change both.
//!
//! Checkpoints store rounded values. A value matches a multiple if the multiple, rounded to the narrowest type that
//! holds the whole group, equals the stored number: exactly in f32, nearly always in fp16, within half a unit of the
//! last place in bf16. For 32 arbitrary weights this does not happen by chance.

use crate::scheme::QuantSpec;
use half::{bf16, f16};

/// Values of the 16 codes of a scheme, in units of the scale.
pub(super) type Levels = [f32; 16];

/// Returns the levels of a scheme with 16 codes.
pub(super) fn levels(spec: &QuantSpec) -> Levels {
    std::array::from_fn(|code| spec.code_map().value(code as u8, 0) as f32)
}

/// Number of fp16 scales that are tried on either side of each estimate: half a unit of bf16 is at most 8 units of
/// fp16.
const AROUND: u16 = 9;

/// Returns a scale, representable in fp16, with which every value is the scale times one of the levels, and writes the
/// codes of the values; returns `None` if there is no such scale.
pub(super) fn recover(levels: &Levels, values: &[f32], codes: &mut [u8]) -> Option<f32> {
    let peak = values.iter().fold(0f32, |peak, x| if x.abs() > peak.abs() { *x } else { peak });
    if peak == 0.0 {
        return Some(0.0);
    }
    let stored = Stored::of(values);
    // The extreme levels are tried first, because most encoders map the peak to one of them.
    for i in 0..levels.len() {
        let level = if i % 2 == 0 { levels[i / 2] } else { levels[15 - i / 2] };
        let guess = f16::from_f32(peak / level);
        let candidates = (0..=2 * AROUND).map(|step| guess.to_bits().wrapping_add(step).wrapping_sub(AROUND));
        let fits = candidates.filter_map(|bits| {
            let scale = f16::from_bits(bits).to_f32();
            Some((error(levels, values, scale, stored)?, scale))
        });
        if let Some((_, scale)) = fits.min_by(|a, b| a.0.total_cmp(&b.0)) {
            codes.iter_mut().zip(values).for_each(|(code, x)| *code = nearest(levels, x / scale) as u8);
            return Some(scale);
        }
    }
    None
}

/// Returns the squared error of the values if each of them is the scale times one of the levels, apart from the
/// rounding to `stored`; otherwise `None`.
fn error(levels: &Levels, values: &[f32], scale: f32, stored: Stored) -> Option<f64> {
    if !(scale.is_finite() && scale != 0.0) {
        return None;
    }
    let mut total = 0f64;
    for x in values {
        let value = levels[nearest(levels, x / scale)] * scale;
        if stored.round(value) != *x {
            return None;
        }
        total += f64::from(value - x).powi(2);
    }
    Some(total)
}

/// Returns the code of the nearest level.
fn nearest(levels: &Levels, x: f32) -> usize {
    let above = levels.partition_point(|level| *level < x).min(levels.len() - 1);
    let below = above.saturating_sub(1);
    if x - levels[below] < levels[above] - x { below } else { above }
}

/// Narrowest type that holds all values of a group.
#[derive(Debug, Clone, Copy)]
enum Stored {
    Bf16,
    F16,
    F32,
}

impl Stored {
    fn of(values: &[f32]) -> Stored {
        let all = |stored: Stored| values.iter().all(|x| stored.round(*x) == *x);
        [Stored::Bf16, Stored::F16].into_iter().find(|stored| all(*stored)).unwrap_or(Stored::F32)
    }

    fn round(self, value: f32) -> f32 {
        match self {
            Stored::Bf16 => bf16::from_f32(value).to_f32(),
            Stored::F16 => f16::from_f32(value).to_f32(),
            Stored::F32 => value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::scheme::Scheme;

    fn group(levels: &Levels, rng: &mut Rng) -> Vec<f32> {
        let scale = f16::from_f32((rng.next_normal() * 0.01) as f32).to_f32();
        (0..32).map(|_| levels[(rng.next_u64() % 16) as usize] * scale).collect()
    }

    #[test]
    fn codes_of_the_same_numbers_come_back_from_floats_of_every_type() {
        let mut rng = Rng::new(12);
        for scheme in [Scheme::Q4_0, Scheme::Int4, Scheme::Nl4] {
            let levels = levels(&QuantSpec::usual(scheme));
            for i in 0..300 {
                let exact = group(&levels, &mut rng);
                for stored in [Stored::F32, Stored::F16, Stored::Bf16] {
                    let values: Vec<f32> = exact.iter().map(|x| stored.round(*x)).collect();
                    let mut found = vec![0; 32];
                    let recovered = recover(&levels, &values, &mut found).unwrap_or_else(|| panic!("{scheme:?} {i}"));
                    // The recovered scale may differ from the original one: without the code -8, the scale of
                    // opposite sign represents the same numbers.
                    for (code, x) in found.iter().zip(&values) {
                        assert_eq!(
                            stored.round(levels[usize::from(*code)] * recovered),
                            *x,
                            "{scheme:?} {i} {stored:?}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn ordinary_weights_have_no_exact_codes_in_any_type() {
        let mut rng = Rng::new(13);
        let levels = levels(&QuantSpec::Q4_0);
        for _ in 0..200 {
            let values: Vec<f32> = (0..32).map(|_| (rng.next_normal() * 0.02) as f32).collect();
            for stored in [Stored::F32, Stored::F16, Stored::Bf16] {
                let values: Vec<f32> = values.iter().map(|x| stored.round(*x)).collect();
                assert!(recover(&levels, &values, &mut [0; 32]).is_none());
            }
        }
        assert_eq!(recover(&levels, &[0.0; 32], &mut [0; 32]), Some(0.0));
    }
}
