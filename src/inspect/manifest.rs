//! Describes a quantization manifest: its rules, its gate and evidence, and sums over its tensors by role.

use super::container::describe_spec;
use crate::catalogue::Role;
use crate::manifest::{Document, Manifest, Rule, TensorEntry};
use crate::quant_spec::QuantFields;
use crate::report::plan;
use crate::report::quality::quality_lines;
use crate::report::table::{Column, Table};
use crate::units::{decimals, human_count};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

/// Returns a text with the rules, the sums over tensors and, with `tensors`, every tensor.
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
        line("plan", plan::describe(plan));
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

/// Returns the description as JSON.
pub fn as_json(path: &Path, manifest: &Manifest, tensors: bool) -> Value {
    let document = manifest.document();
    let mut object = json!({
        "schema_version": 1,
        "path": path,
        "kind": "quantization manifest",
        "created_by": document.created_by,
        "gate": document.gate,
        "evidence": document.evidence,
        "task_evidence": document.task_evidence,
        "refused": document.refused,
        "plan": document.plan,
        "rules": document.rules,
        "parts": parts(document).into_iter().map(|((role, scheme), part)| json!({
            "role": role.name(), "stored_as": scheme, "tensors": part.tensors, "weights": part.parameters,
            "cosine_mean": part.cosine_mean(), "cosine_min": part.cosine_min,
        })).collect::<Vec<_>>(),
    });
    if tensors {
        object["tensors"] = json!(document.tensors);
    }
    object
}

/// Describes the effect of a rule combined with the defaults.
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

/// Sums over tensors of one role with the same format.
#[derive(Default)]
struct PartSum {
    tensors: usize,
    parameters: u64,
    measured: usize,
    cosine_sum: f64,
    cosine_min: Option<f64>,
}

impl PartSum {
    fn cosine_mean(&self) -> Option<f64> {
        (self.measured > 0).then(|| self.cosine_sum / self.measured as f64)
    }
}

fn parts(document: &Document) -> BTreeMap<(Role, String), PartSum> {
    let mut parts: BTreeMap<(Role, String), PartSum> = BTreeMap::new();
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
    let columns: [Column<'_, ((Role, String), PartSum)>; 6] = [
        ("part", &|((role, _), _)| role.name().to_string()),
        ("stored as", &|((_, scheme), _)| scheme.clone()),
        (">tensors", &|(_, part)| part.tensors.to_string()),
        (">parameters", &|(_, part)| human_count(part.parameters)),
        (">cosine mean", &|(_, part)| cosine(part.cosine_mean())),
        (">cosine min", &|(_, part)| cosine(part.cosine_min)),
    ];
    Table::of(parts(document), &columns)
}

fn tensor_table(document: &Document) -> Table {
    let stack = |entry: &TensorEntry| if entry.count == 1 { String::new() } else { format!("{} x ", entry.count) };
    let columns: [Column<'_, (&String, &TensorEntry)>; 7] = [
        ("tensor", &|(name, _)| name.to_string()),
        ("stored as", &|(_, entry)| stored_as(entry)),
        ("shape", &|(_, entry)| format!("{}{} x {}", stack(entry), entry.rows, entry.cols)),
        (">cosine mean", &|(_, entry)| cosine(entry.metrics.map(|m| m.cosine_mean))),
        (">cosine min", &|(_, entry)| cosine(entry.metrics.map(|m| m.cosine_min))),
        (">relative rms", &|(_, entry)| entry.metrics.map_or("-".into(), |m| decimals(m.relative_rms, 5))),
        ("verdict", &|(_, entry)| entry.verdict.map_or("-".into(), |v| format!("{v:?}").to_lowercase())),
    ];
    Table::of(&document.tensors, &columns)
}

fn cosine(value: Option<f64>) -> String {
    value.map_or("-".into(), |v| decimals(v, 6))
}
