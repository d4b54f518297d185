//! Formats the quality gate of a quantization and its evidence as lines of text.

use crate::provenance::{Evidence, Quality};
use crate::units::decimals;

/// Returns the thresholds of the gate and the measured evidence as lines of a key and a value.
pub fn quality_lines(quality: &Quality) -> Vec<(&'static str, String)> {
    let Quality { gate, refused, evidence } = quality;
    let asked = [
        Some(format!("cosine mean >= {}, min >= {}", cosine(gate.cosine), cosine(gate.cosine_min))),
        gate.kl.map(|most| format!("divergence <= {}", threshold(most))),
        gate.perplexity_rise.map(|most| format!("perplexity <= +{} %", decimals(100.0 * most, 3))),
        gate.top1.map(|least| format!("top-1 agreement >= {} %", decimals(100.0 * least, 2))),
    ];
    let mut lines = vec![("gate", asked.into_iter().flatten().collect::<Vec<_>>().join(", "))];
    if let Some(evidence) = evidence {
        let Evidence { text, scored, figures: f, precision, bits_per_weight, promoted, objections, .. } = evidence;
        lines.push((
            "measured",
            format!(
                "{scored} tokens of {} in {precision} at {} bits per weight, sha256 {}",
                text.name,
                decimals(*bits_per_weight, 3),
                short_hash(&text.sha256)
            ),
        ));
        let [kl, error] = [f.kl, f.kl_stderr].map(|nats| decimals(nats, 5));
        lines.push(("divergence", format!("{kl} ± {error} nats, 99 of 100 below {}", decimals(f.kl_p99, 4))));
        let sign = if f.perplexity_ratio < 1.0 { "" } else { "+" };
        let [rise, error] = [f.perplexity_ratio - 1.0, f.perplexity_ratio_stderr].map(|x| decimals(100.0 * x, 2));
        lines.push(("perplexity", format!("{}, {sign}{rise} ± {error} %", decimals(f.perplexity, 4))));
        lines.push((
            "top-1",
            format!("the same most likely token at {} % of positions", decimals(100.0 * f.top1_agreement, 2)),
        ));
        lines.extend(promoted.iter().map(|p| ("promoted", format!("{} from {} to {}", p.tensor, p.from, p.to))));
        lines.extend(objections.iter().map(|objection| ("objection", objection.clone())));
    }
    if *refused {
        lines.push(("verdict", "refused by the gate".into()));
    }
    lines
}

/// Returns the first 12 hex digits of a hash, enough to compare by eye.
pub fn short_hash(hash: &str) -> String {
    hash.chars().take(12).collect()
}

/// Formats a bound on cosines; without one, that of the bits of each tensor applies.
fn cosine(least: Option<f64>) -> String {
    least.map_or("default".into(), threshold)
}

/// Formats a threshold as the user wrote it; very large and very small numbers have an exponent.
fn threshold(value: f64) -> String {
    if value == 0.0 || (1e-9..1e9).contains(&value.abs()) { value.to_string() } else { format!("{value:e}") }
}
