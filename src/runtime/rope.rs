//! Rotary position embedding (RoPE): frequencies with their long-context variants, and the rotation itself.
//!
//! Frequencies and angles are rounded to f32 at the same points as in
//! `transformers` (`modeling_rope_utils`), so that both agree far into the context.

use crate::model_config::{Rope, RopeScaling, RotaryPairs};
use std::f64::consts::TAU;

/// Frequencies of one kind of rotation.
#[derive(Debug, Clone)]
pub struct Rotary {
    /// Radians per position of each pair: `(rotary_dim / 2)`.
    inv_freq: Vec<f32>,
    /// Radians per position for texts beyond the original context length of [`RopeScaling::LongRope`].
    long_inv_freq: Option<Vec<f32>>,
    /// Factor of cosines and sines.
    attention_factor: f32,
}

impl Rotary {
    /// Computes the frequencies for heads of `head_dim` values.
    pub fn new(rope: &Rope, head_dim: usize) -> Rotary {
        let dim = rope.rotary_dim(head_dim);
        let plain = |i: usize| rope.theta.powf(-((2 * i) as f64 / dim as f64));
        let half = dim / 2;
        let all = |f: &dyn Fn(usize) -> f64| (0..half).map(|i| f(i) as f32).collect::<Vec<f32>>();
        let mut long_inv_freq = None;
        let (inv_freq, factor) = match &rope.scaling {
            RopeScaling::None => (all(&plain), 1.0),
            &RopeScaling::Linear { factor } => (all(&|i| plain(i) / factor), 1.0),
            &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let bands = (low_freq_factor, high_freq_factor, original_max_position as f64);
                (all(&|i| llama3(plain(i), factor, bands)), 1.0)
            }
            &RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position, truncate, attention_factor } => {
                let bound = |rotations: f64| {
                    dim as f64 * (original_max_position as f64 / (rotations * TAU)).ln() / (2.0 * rope.theta.ln())
                };
                let (mut low, mut high) = (bound(beta_fast), bound(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                let yarn = |i: usize| {
                    // Where the ramp is 0, the frequency stays; where it is 1, it is divided by the factor.
                    let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    plain(i) / factor * ramp + plain(i) * (1.0 - ramp)
                };
                (all(&yarn), attention_factor)
            }
            RopeScaling::LongRope { short, long, attention_factor, .. } => {
                long_inv_freq = Some(all(&|i| plain(i) / long[i]));
                (all(&|i| plain(i) / short[i]), *attention_factor)
            }
        };
        let mut rotary = Rotary { inv_freq, long_inv_freq, attention_factor: factor as f32 };
        let still = rope.turning_pairs.map_or(half, |pairs| pairs.min(half));
        for frequencies in [Some(&mut rotary.inv_freq), rotary.long_inv_freq.as_mut()].into_iter().flatten() {
            frequencies[still..].fill(0.0);
        }
        rotary
    }

    /// Returns the number of values of each head that are rotated.
    pub fn dim(&self) -> usize {
        2 * self.inv_freq.len()
    }

    /// Writes the cosines, then the sines of one position: `(rotary_dim)`. `long` is true for a text beyond LongRoPE's
    /// original context length.
    pub fn angles(&self, position: usize, long: bool, out: &mut [f32]) {
        let inv_freq = self.long_inv_freq.as_ref().filter(|_| long).unwrap_or(&self.inv_freq);
        let (cos, sin) = out.split_at_mut(inv_freq.len());
        for ((cos, sin), freq) in cos.iter_mut().zip(sin).zip(inv_freq) {
            let (s, c) = f64::from(position as f32 * freq).sin_cos();
            (*cos, *sin) = (c as f32 * self.attention_factor, s as f32 * self.attention_factor);
        }
    }
}

/// Computes a frequency of Llama 3: wavelengths beyond `original / low` are stretched by `factor`, those below
/// `original / high` stay, and those between are interpolated.
fn llama3(freq: f64, factor: f64, (low, high, original): (f64, f64, f64)) -> f64 {
    let wavelength = TAU / freq;
    if wavelength > original / low {
        freq / factor
    } else if wavelength < original / high {
        freq
    } else {
        let smooth = (original / wavelength - low) / (high - low);
        (1.0 - smooth) * freq / factor + smooth * freq
    }
}

/// Rotates the first `angles.len()` values of each head of `head_dim`, and multiplies all of them by `scale`.
#[inline(always)]
pub fn rotate(heads: &mut [f32], head_dim: usize, pairs: RotaryPairs, angles: &[f32], scale: f32) {
    let (cos, sin) = angles.split_at(angles.len() / 2);
    for head in heads.chunks_exact_mut(head_dim) {
        let (rotated, kept) = head.split_at_mut(angles.len());
        kept.iter_mut().for_each(|v| *v *= scale);
        if pairs == RotaryPairs::Adjacent {
            let (pairs, _) = rotated.as_chunks_mut::<2>();
            for ([a, b], (cos, sin)) in pairs.iter_mut().zip(cos.iter().zip(sin)) {
                (*a, *b) = ((*a * cos - *b * sin) * scale, (*b * cos + *a * sin) * scale);
            }
            continue;
        }
        let (first, second) = rotated.split_at_mut(cos.len());
        let (sin, second) = (&sin[..cos.len()], &mut second[..cos.len()]);
        for i in 0..cos.len() {
            let (a, b) = (first[i], second[i]);
            (first[i], second[i]) = ((a * cos[i] - b * sin[i]) * scale, (b * cos[i] + a * sin[i]) * scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies(scaling: RopeScaling) -> Vec<f32> {
        Rotary::new(
            &Rope { theta: 10_000.0, rotary_dim: None, pairs: RotaryPairs::Halves, turning_pairs: None, scaling },
            8,
        )
        .inv_freq
    }

    #[test]
    fn linear_scaling_divides_every_frequency() {
        let plain = frequencies(RopeScaling::None);
        assert_eq!(plain, [1.0, 0.1, 0.01, 0.001]);
        let linear = frequencies(RopeScaling::Linear { factor: 4.0 });
        assert_eq!(linear, [0.25, 0.025, 0.0025, 0.00025]);
    }

    #[test]
    fn llama3_keeps_the_fast_stretches_the_slow_and_blends_between() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 128,
        };
        let f = frequencies(scaling);
        assert_eq!((f[0], f[3]), (1.0, 0.001 / 8.0));
        // wavelength 62.8: (128 / 62.8 - 1) / 3 of the way from stretched to kept
        let smooth = (128.0 / 62.831_853 - 1.0) / 3.0;
        assert!((f[1] - ((1.0 - smooth) * 0.1 / 8.0 + smooth * 0.1)).abs() < 1e-6);
    }

    #[test]
    fn yarn_keeps_fractional_bounds_unless_told_to_truncate() {
        let yarn = |truncate| {
            frequencies(RopeScaling::Yarn {
                factor: 8.0,
                beta_fast: 8.0,
                beta_slow: 1.0,
                original_max_position: 256,
                truncate,
                attention_factor: 1.2,
            })
        };
        let (fractional, truncated) = (yarn(false), yarn(true));
        assert_eq!((fractional[0], fractional[3]), (1.0, 0.001 / 8.0));
        assert_ne!(fractional[1], truncated[1]);
    }

    #[test]
    fn longrope_divides_by_the_factors_of_the_texts_length_and_has_a_magnitude() {
        let (short, long) = (vec![1.0, 2.0], vec![4.0, 8.0]);
        let scaling = RopeScaling::LongRope { short, long, original_max_position: 8, attention_factor: 2.0 };
        let rotary = Rotary::new(
            &Rope { theta: 100.0, rotary_dim: None, pairs: RotaryPairs::Halves, turning_pairs: None, scaling },
            4,
        );
        let mut angles = [0.0; 4];
        for (is_long, frequencies) in [(false, [1.0f64, 0.05]), (true, [0.25, 0.0125])] {
            rotary.angles(3, is_long, &mut angles);
            for (i, f) in frequencies.into_iter().enumerate() {
                assert!((f64::from(angles[i]) - 2.0 * (3.0 * f).cos()).abs() < 1e-6);
                assert!((f64::from(angles[2 + i]) - 2.0 * (3.0 * f).sin()).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn rotation_keeps_lengths_and_position_zero_is_only_scaled() {
        let rotary = Rotary::new(
            &Rope {
                theta: 10_000.0,
                rotary_dim: None,
                pairs: RotaryPairs::Halves,
                turning_pairs: None,
                scaling: RopeScaling::None,
            },
            4,
        );
        let mut angles = [0.0; 4];
        rotary.angles(0, false, &mut angles);
        let mut head = [1.0, 2.0, 3.0, 4.0];
        rotate(&mut head, 4, RotaryPairs::Halves, &angles, 0.5);
        assert_eq!(head, [0.5, 1.0, 1.5, 2.0]);
        rotary.angles(7, false, &mut angles);
        rotate(&mut head, 4, RotaryPairs::Halves, &angles, 1.0);
        assert!((head.iter().map(|v| v * v).sum::<f32>() - 7.5).abs() < 1e-5);
        // Pairs of neighbours are rotated like the same pairs half a head apart.
        rotary.angles(7, false, &mut angles);
        let (mut halves, mut adjacent) = ([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]);
        rotate(&mut halves, 4, RotaryPairs::Halves, &angles, 0.5);
        rotate(&mut adjacent, 4, RotaryPairs::Adjacent, &angles, 0.5);
        assert_eq!([halves[0], halves[2], halves[1], halves[3]], adjacent);
        // Only the first values of a wider head are rotated; the others are only scaled.
        let mut wider = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        rotary.angles(0, false, &mut angles);
        rotate(&mut wider, 6, RotaryPairs::Halves, &angles, 0.5);
        assert_eq!(wider, [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]);
    }
}
