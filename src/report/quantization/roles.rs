//! Summarizes decisions and measurements of a quantization by role.

use crate::catalogue::Role;
use crate::convert::quantize::ptq::Measured;
use crate::error::Result;
use crate::manifest::Verdict;
use crate::report::table::{Column, Table};
use crate::trial::Blame;
use crate::units::human_count;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Summary of the tensors of one role.
#[derive(Debug, Default, Clone, serde::Serialize)]
struct RoleSummary {
    tensors: usize,
    accepted: usize,
    refused: usize,
    kept: usize,
    parameters: u64,
    bits_per_weight: f64,
    cosine_mean: Option<f64>,
    cosine_min: Option<f64>,
    relative_rms: Option<f64>,
    /// Number of tensors by method.
    methods: BTreeMap<&'static str, usize>,
    output_error: Option<f64>,
    #[serde(skip)]
    output: (f64, f64),
    #[serde(skip)]
    bits: f64,
    #[serde(skip)]
    measured: (f64, f64, f64),
}

fn by_role(measured: &Measured) -> Result<BTreeMap<Role, RoleSummary>> {
    let mut roles: BTreeMap<Role, RoleSummary> = BTreeMap::new();
    for tensor in &measured.tensors {
        let entry = &measured.document.tensors[&tensor.name];
        let role = roles.entry(tensor.role).or_default();
        let parameters = tensor.shape.iter().product::<usize>() as f64;
        role.tensors += 1;
        match entry.verdict {
            Some(Verdict::Refused) => role.refused += 1,
            Some(Verdict::Kept) => role.kept += 1,
            _ => role.accepted += 1,
        }
        role.parameters += parameters as u64;
        role.bits += measured.stored_bits(tensor)? * parameters;
        role.bits_per_weight = role.bits / role.parameters as f64;
        let Some(m) = entry.metrics.filter(|_| entry.quant.is_some()) else { continue };
        if let Some(quant) = entry.quant {
            *role.methods.entry(quant.method.name()).or_default() += 1;
        }
        if let Some(error) = m.output_error {
            role.output = (role.output.0 + error.powi(2) * parameters, role.output.1 + parameters);
            role.output_error = Some((role.output.0 / role.output.1).sqrt());
        }
        let (weight, cosine, rms) = role.measured;
        role.measured =
            (weight + parameters, cosine + m.cosine_mean * parameters, rms + m.relative_rms.powi(2) * parameters);
        role.cosine_mean = Some(role.measured.1 / role.measured.0);
        role.relative_rms = Some((role.measured.2 / role.measured.0).sqrt());
        role.cosine_min = Some(role.cosine_min.unwrap_or(1.0).min(m.cosine_min));
    }
    Ok(roles)
}

/// Columns that a narrow table leaves out, in this order; JSON and report have all figures.
const OPTIONAL: [&str; 6] = ["of outputs", "verdict", "tensors", "weights", "method", "rel. error"];

/// Returns a table with a row per role that takes at most `columns` of a terminal.
///
/// # Errors
/// The stored size of a tensor cannot be computed.
pub fn table(measured: &Measured, columns: usize) -> Result<Table> {
    let percent = |x: Option<f64>| x.map_or("-".to_string(), |x| format!("{:.2} %", x * 100.0));
    let number = |x: Option<f64>| x.map_or("-".to_string(), |x| format!("{x:.5}"));
    let all: [Column<'_, (Role, RoleSummary)>; 10] = [
        ("role", &|(role, _)| role.name().to_string()),
        (">tensors", &|(_, s)| s.tensors.to_string()),
        (">weights", &|(_, s)| human_count(s.parameters)),
        (">cosine", &|(_, s)| number(s.cosine_mean)),
        (">worst row", &|(_, s)| number(s.cosine_min)),
        (">rel. error", &|(_, s)| percent(s.relative_rms)),
        (">of outputs", &|(_, s)| percent(s.output_error)),
        ("method", &|(_, s)| counts(s.methods.iter().map(|(name, n)| (*name, *n)))),
        (">bits/weight", &|(_, s)| format!("{:.2}", s.bits_per_weight)),
        ("verdict", &|(_, s)| counts([("accepted", s.accepted), ("kept", s.kept), ("refused", s.refused)])),
    ];
    Ok(Table::of(by_role(measured)?, &all).within(columns, &OPTIONAL))
}

/// Formats counts such as `3 rtn, 1 gptq`; leaves out counts of zero.
fn counts<'a>(counts: impl IntoIterator<Item = (&'a str, usize)>) -> String {
    let counts = counts.into_iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!("{n} {name}"));
    counts.collect::<Vec<_>>().join(", ")
}

/// Returns the summary as JSON.
///
/// # Errors
/// The stored size of a tensor cannot be computed.
pub fn json(measured: &Measured, out: &Path, blame: &[Blame]) -> Result<Value> {
    let roles: BTreeMap<&str, RoleSummary> = by_role(measured)?.into_iter().map(|(r, s)| (r.name(), s)).collect();
    let objections: BTreeMap<_, _> =
        measured.document.tensors.iter().filter(|(_, e)| !e.reasons.is_empty()).map(|(n, e)| (n, &e.reasons)).collect();
    let gate = &measured.document.gate;
    Ok(json!({"manifest": out, "refused": measured.document.refused, "gate": gate, "roles": roles,
        "objections": objections, "plan": measured.document.plan, "evidence": measured.document.evidence,
        "task_evidence": measured.document.task_evidence,
        "blame": blame, "requantized": measured.requantized()}))
}
