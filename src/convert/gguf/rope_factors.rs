//! Converts Llama 3's RoPE scaling between the four numbers of `config.json` and the factors per frequency of GGUF
//! (`rope_freqs.weight`).

use serde_json::{Value, json};
use std::f64::consts::TAU;

/// Parameters of Llama 3's RoPE scaling.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Llama3 {
    pub(super) factor: f64,
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) original: usize,
}

impl Llama3 {
    /// Returns the divisor of each frequency: `(head_dim / 2)`.
    pub(super) fn factors(&self, theta: f64, head_dim: usize) -> Vec<f32> {
        let half = head_dim / 2;
        (0..half).map(|i| self.divisor(theta.powf(-((2 * i) as f64 / head_dim as f64))) as f32).collect()
    }

    fn divisor(&self, frequency: f64) -> f64 {
        let (wavelength, original) = (TAU / frequency, self.original as f64);
        if wavelength > original / self.low {
            self.factor
        } else if wavelength < original / self.high {
            1.0
        } else {
            let smooth = (original / wavelength - self.low) / (self.high - self.low);
            1.0 / ((1.0 - smooth) / self.factor + smooth)
        }
    }
}

/// Returns the `rope_scaling` object for the factors of a file: Llama 3's four numbers when they reproduce these
/// factors, otherwise the type `longrope` with the factors themselves.
pub(super) fn llama3_json(factors: &[f32], theta: f64) -> Value {
    match solve(factors, theta) {
        Some(found) => json!({
            "rope_type": "llama3", "factor": found.factor, "low_freq_factor": found.low,
            "high_freq_factor": found.high, "original_max_position_embeddings": found.original,
        }),
        None => json!({"rope_type": "longrope", "long_factor": factors, "short_factor": factors,
                       "attention_factor": 1.0, "original_max_position_embeddings": 1}),
    }
}

/// Finds the parameters that reproduce `factors`. The candidates for the low and high frequency factors are those of
/// every published model (1 and 4), then (1, 2) and (1, 8); the candidates for the trained context are powers of two.
/// Returns `None` if no candidate does.
fn solve(factors: &[f32], theta: f64) -> Option<Llama3> {
    let factor = f64::from(factors.iter().copied().fold(1.0, f32::max));
    let candidates = [(1.0, 4.0), (1.0, 2.0), (1.0, 8.0)].into_iter().flat_map(|bands| {
        (3..24).rev().map(move |power| Llama3 { factor, low: bands.0, high: bands.1, original: 1 << power })
    });
    let fits = |candidate: &Llama3| {
        let ours = candidate.factors(theta, 2 * factors.len());
        ours.iter().zip(factors).all(|(ours, theirs)| (ours - theirs).abs() <= 4.0 * f32::EPSILON * theirs.abs())
    };
    // The length 8192 is tried first: when a small head has no frequency between the low and the high limit, several
    // context lengths reproduce the factors.
    let usual = Llama3 { factor, low: 1.0, high: 4.0, original: 8192 };
    std::iter::once(usual).chain(candidates).find(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_four_numbers_are_found_again_from_their_factors() {
        for (factor, original, theta, head_dim) in
            [(8.0, 8192, 500_000.0, 128), (32.0, 8192, 500_000.0, 64), (4.0, 64, 10_000.0, 16)]
        {
            let known = Llama3 { factor, low: 1.0, high: 4.0, original };
            assert_eq!(solve(&known.factors(theta, head_dim), theta), Some(known));
        }
    }

    #[test]
    fn factors_of_another_rule_stay_as_they_are() {
        let json = llama3_json(&[1.0, 1.1, 3.0, 2.0], 10_000.0);
        assert_eq!((json["rope_type"].as_str(), json["short_factor"][2].as_f64()), (Some("longrope"), Some(3.0)));
    }
}
