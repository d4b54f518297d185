//! What a quantization manifest decides.

use super::short_hash;
use super::subject::describe_spec;
use crate::ptq::budget;
use iec::manifest::{Document, Manifest, QuantFields, Rule, TensorEntry};
use iec::provenance::{Evidence, Quality};
use iec::report::table::Table;
use iec::role::Role;
use iec::units::{decimals, human_count};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

/// Text for people: the rules, then what the tensors add up to; with `tensors`, every tensor.
pub fn text(path: &Path, manifest: &Manifest, tensors: bool) -> String {
    let document = manifest.document();
    let mut text = format!("{}: quantization manifest\n", path.display());
    let mut line = |key: &str, value: String| {
        let _ = writeln!(text, "  {key:<14}{value}");
    };
    if let Some(maker) = &document.created_by {
        line("made by", maker.clone());
    }
    for file in document.source.iter().flat_map(|s| &s.files) {
        line("made from", file.name.clone());
    }
    for file in &document.files {
        line("bytes in", file.name.clone());
    }
    for (key, value) in document.quality().iter().flat_map(quality_lines) {
        line(key, value);
    }
    if let Some(plan) = &document.plan {
        line("plan", budget::in_words(plan));
    }
    for rule in &document.rules {
        line("rule", describe_rule(rule, &document.defaults));
    }
    if !document.tensors.is_empty() {
        let _ = write!(text, "\n{}", parts_table(document));
        if tensors {
            let _ = write!(text, "\n{}", tensor_table(document));
        }
    }
    text
}

/// The same for machines; the document itself is JSON already.
pub fn as_json(path: &Path, manifest: &Manifest, tensors: bool) -> Value {
    let document = manifest.document();
    let mut object = json!({
        "path": path,
        "kind": "quantization manifest",
        "created_by": document.created_by,
        "gate": document.gate,
        "evidence": document.evidence,
        "refused": document.refused,
        "plan": document.plan,
        "rules": document.rules,
        "parts": parts(document).into_iter().map(|((role, scheme), part)| json!({
            "role": role.name(), "stored_as": scheme, "tensors": part.tensors, "parameters": part.parameters,
            "cosine_mean": part.cosine_mean(), "cosine_min": part.cosine_min,
        })).collect::<Vec<_>>(),
    });
    if tensors {
        object["tensors"] = json!(document.tensors);
    }
    object
}

/// What a quantization had to reach and was measured to lose, key by key.
pub fn quality_lines(quality: &Quality) -> Vec<(&'static str, String)> {
    let Quality { gate, refused, evidence } = quality;
    let asked = [
        Some(format!("cosine mean >= {}, min >= {}", threshold(gate.cosine), threshold(gate.cosine_min))),
        gate.kl.map(|most| format!("divergence <= {}", threshold(most))),
        gate.perplexity_rise.map(|most| format!("perplexity <= +{} %", decimals(100.0 * most, 3))),
        gate.top1.map(|least| format!("first choices >= {} %", decimals(100.0 * least, 2))),
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
        lines.push(("first choices", format!("{} % agree", decimals(100.0 * f.top1, 2))));
        lines.extend(promoted.iter().map(|p| ("promoted", format!("{} from {} to {}", p.tensor, p.from, p.to))));
        lines.extend(objections.iter().map(|objection| ("objection", objection.clone())));
    }
    if *refused {
        lines.push(("verdict", "refused, written by force".into()));
    }
    lines
}

/// What a rule does, with everything the defaults add to it.
fn describe_rule(rule: &Rule, defaults: &QuantFields) -> String {
    match (&rule.include, &rule.exclude) {
        (Some(pattern), _) => match rule.fields.resolve(defaults) {
            Ok(quant) => {
                let method = format!("{:?}", quant.method).to_lowercase();
                format!("{pattern}  as {} ({method})", describe_spec(&quant.spec))
            }
            Err(e) => format!("{pattern}  {e}"),
        },
        (None, Some(pattern)) => format!("{pattern}  kept"),
        (None, None) => "matches nothing".into(),
    }
}

/// Tensors of one role that are stored alike.
#[derive(Default)]
struct Part {
    tensors: usize,
    parameters: u64,
    measured: usize,
    cosine_sum: f64,
    cosine_min: Option<f64>,
}

impl Part {
    fn cosine_mean(&self) -> Option<f64> {
        (self.measured > 0).then(|| self.cosine_sum / self.measured as f64)
    }
}

fn parts(document: &Document) -> BTreeMap<(Role, String), Part> {
    let mut parts: BTreeMap<(Role, String), Part> = BTreeMap::new();
    for (name, entry) in &document.tensors {
        let part = parts.entry((Role::of(name), stored_as(entry))).or_default();
        part.tensors += 1;
        let each = (entry.rows as u64).saturating_mul(entry.cols as u64);
        part.parameters = part.parameters.saturating_add(each.saturating_mul(entry.count as u64));
        if let Some(metrics) = &entry.metrics {
            part.measured += 1;
            part.cosine_sum += metrics.cosine_mean;
            part.cosine_min = Some(part.cosine_min.map_or(metrics.cosine_min, |min| min.min(metrics.cosine_min)));
        }
    }
    parts
}

fn stored_as(entry: &TensorEntry) -> String {
    match (&entry.quant, &entry.keep) {
        (Some(quant), _) => describe_spec(&quant.spec),
        (None, Some(keep)) => format!("kept ({})", format!("{keep:?}").to_lowercase()),
        (None, None) => "kept".into(),
    }
}

fn parts_table(document: &Document) -> Table {
    let mut table = Table::new(&["part", "stored as", ">tensors", ">parameters", ">cosine mean", ">cosine min"]);
    for ((role, scheme), part) in parts(document) {
        table.row([
            role.name().to_string(),
            scheme,
            part.tensors.to_string(),
            human_count(part.parameters),
            cosine(part.cosine_mean()),
            cosine(part.cosine_min),
        ]);
    }
    table
}

fn tensor_table(document: &Document) -> Table {
    let mut table =
        Table::new(&["tensor", "stored as", "shape", ">cosine mean", ">cosine min", ">relative rms", "verdict"]);
    for (name, entry) in &document.tensors {
        let stack = if entry.count == 1 { String::new() } else { format!("{} x ", entry.count) };
        let metrics = entry.metrics.as_ref();
        table.row([
            name.clone(),
            stored_as(entry),
            format!("{stack}{} x {}", entry.rows, entry.cols),
            cosine(metrics.map(|m| m.cosine_mean)),
            cosine(metrics.map(|m| m.cosine_min)),
            metrics.map_or("-".into(), |m| decimals(m.relative_rms, 5)),
            entry.verdict.map_or("-".into(), |v| format!("{v:?}").to_lowercase()),
        ]);
    }
    table
}

fn cosine(value: Option<f64>) -> String {
    value.map_or("-".into(), |v| decimals(v, 6))
}

/// As it was given, where that is a number that someone gives.
fn threshold(value: f64) -> String {
    if value == 0.0 || (1e-9..1e9).contains(&value.abs()) { value.to_string() } else { format!("{value:e}") }
}
