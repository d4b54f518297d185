//! Formats the quality gate of a quantization and its evidence as lines of text.

use crate::provenance::{Evidence, Quality, TaskEvidence};
use crate::units::decimals;

/// Returns the thresholds of the gate and the measured evidence as lines of a key and a value.
pub fn quality_lines(quality: &Quality) -> Vec<(&'static str, String)> {
    let Quality { gate, refused, evidence, task_evidence } = quality;
    let mut asked = vec![
        Some(format!("cosine mean >= {}, min >= {}", cosine(gate.cosine), cosine(gate.cosine_min))),
        gate.kl.map(|most| format!("divergence <= {}", threshold(most))),
        gate.perplexity_rise.map(|most| format!("perplexity <= +{} %", decimals(100.0 * most, 3))),
        gate.top1.map(|least| format!("top-1 agreement >= {} %", decimals(100.0 * least, 2))),
    ];
    asked.extend(gate.tasks.iter().map(|task| {
        let drop = decimals(100.0 * task.largest_drop, 2);
        Some(format!("accuracy on {} at most {drop} points lower", task.file))
    }));
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
    lines.extend(task_evidence.iter().flat_map(task_lines));
    if *refused {
        lines.push(("verdict", "refused by the gate".into()));
    }
    lines
}

/// Returns the measurement of a task, and its objection if it has one.
fn task_lines(task: &TaskEvidence) -> Vec<(&'static str, String)> {
    let [accuracy, before, difference, error] =
        [task.accuracy, task.reference_accuracy, task.difference, task.difference_stderr]
            .map(|share| decimals(100.0 * share, 2));
    let sign = if task.difference > 0.0 { "+" } else { "" };
    let measured = format!(
        "{} ({}): {accuracy} % after {before} %, {sign}{difference} ± {error} points, {} questions in {}, sha256 {}",
        task.file.name,
        task.task,
        task.questions,
        task.precision,
        short_hash(&task.file.sha256)
    );
    let objection = task.objection.clone().map(|objection| ("objection", objection));
    [("task", measured)].into_iter().chain(objection).collect()
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
