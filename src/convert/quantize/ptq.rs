//! Decides and proves a quantization: every selected tensor is quantized, measured and judged; the result is a manifest.

use super::select::Selection;
use super::weights::{Form, Tensor, Weights};
use crate::error::{Cause, Context, Error, Result};
use crate::manifest::{Document, Gate, Keep, Metrics, QuantFields, TensorEntry, TensorQuant, VERSION, Verdict};
use crate::progress;
use crate::quant::stream::{self, Outcome, Stack};
use crate::scheme::{QuantSpec, ScaleType, Scheme, TileLayout};
use indicatif::ProgressBar;
use std::collections::BTreeMap;

/// What happens to a tensor that the gate refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// The whole manifest is refused.
    Refuse,
    /// It is kept in this form.
    Keep(Keep),
    /// It is quantized to int8 per row instead, if that passes; else kept as it is.
    Int8,
}

/// The manifest and what the table needs beside it.
#[derive(Debug)]
pub struct Measured {
    /// The expanded manifest.
    pub document: Document,
    /// Every tensor that was selected, in the order of the model.
    pub tensors: Vec<Tensor>,
}

/// Quantizes and judges every selected tensor.
///
/// # Errors
/// Nothing is selected, a tensor cannot be read or holds NaN, or is quantized already (MXFP4 is kept as it is).
pub fn measure(weights: &Weights, selection: &Selection, gate: Gate, on_failure: OnFailure) -> Result<Measured> {
    let work = selected(weights, selection)?;
    let total = work.iter().map(|(t, _)| t.shape.iter().product::<usize>() as u64).sum();
    let bar = progress::bytes("quantizing", total);
    let (source, measured) = rayon::join(
        || weights.source(None),
        || work.iter().map(|(t, q)| measure_one(weights, t, *q, &gate, on_failure, &bar)).collect::<Result<Vec<_>>>(),
    );
    bar.finish_and_clear();
    let tensors: Vec<Tensor> = work.into_iter().map(|(t, _)| t).collect();
    let mut entries: BTreeMap<String, TensorEntry> = selection.kept_entries().collect();
    entries.extend(tensors.iter().map(|t| t.name.clone()).zip(measured?));
    for (tensor, metrics) in tensors.iter().filter_map(|t| Some((t, entries[&t.name].metrics?))) {
        let (mean, worst) = (metrics.cosine_mean, metrics.cosine_min);
        progress::detail(2, || format!("{}: cosine {mean:.5}, worst row {worst:.5}", tensor.name));
    }
    let (defaults, rules) = selection.document_rules();
    let document = Document {
        version: VERSION,
        created_by: Some(created_by()),
        source: source?,
        defaults,
        rules,
        gate: Some(gate),
        refused: entries.values().any(|e| e.verdict == Some(Verdict::Refused)),
        files: vec![],
        tensors: entries,
    };
    Ok(Measured { document, tensors })
}

/// The program that made a manifest.
pub(super) fn created_by() -> String {
    format!("iec {}", env!("CARGO_PKG_VERSION"))
}

/// The tensors that are quantized, in the order of the model.
pub(super) fn selected(weights: &Weights, selection: &Selection) -> Result<Vec<(Tensor, TensorQuant)>> {
    let mut work = Vec::new();
    let tensors = weights.tensors();
    selection.refuse_strangers(&tensors)?;
    for tensor in tensors {
        if let Some(quant) = selection.decide(&tensor)? {
            work.push((tensor, quant));
        }
    }
    if work.is_empty() {
        return Err(Error::usage("no tensor is selected")
            .help("compare the patterns with the names that `iec inspect --tensors` prints"));
    }
    Ok(work)
}

fn measure_one(
    weights: &Weights,
    tensor: &Tensor,
    quant: TensorQuant,
    gate: &Gate,
    on_failure: OnFailure,
    bar: &ProgressBar,
) -> Result<TensorEntry> {
    if let Some(kept) = already_quantized(tensor)? {
        return Ok(kept);
    }
    let (quant, metrics) = quantize_with_fitting_scales(weights, tensor, quant, bar).tensor(&tensor.name)?;
    let measured = TensorEntry { quant: Some(quant), metrics: Some(metrics), ..blank_entry(tensor)? };
    let reasons = gate.objections(&metrics);
    if reasons.is_empty() {
        return Ok(TensorEntry { verdict: Some(Verdict::Accepted), ..measured });
    }
    match on_failure {
        OnFailure::Refuse => Ok(TensorEntry { verdict: Some(Verdict::Refused), reasons, ..measured }),
        OnFailure::Keep(keep) => Ok(kept(measured, keep, reasons)),
        OnFailure::Int8 => {
            let int8 = QuantFields { scheme: Some(Scheme::Int8), ..QuantFields::default() };
            let int8 = int8.resolve(&QuantFields::default())?;
            let (int8, metrics) = quantize_with_fitting_scales(weights, tensor, int8, bar).tensor(&tensor.name)?;
            let measured = TensorEntry { quant: Some(int8), metrics: Some(metrics), ..measured };
            match gate.objections(&metrics) {
                none if none.is_empty() => Ok(TensorEntry { verdict: Some(Verdict::Accepted), reasons, ..measured }),
                still => Ok(kept(measured, Keep::Source, still)),
            }
        }
    }
}

/// An entry with the shape of a tensor and nothing decided.
pub(super) fn blank_entry(tensor: &Tensor) -> Result<TensorEntry> {
    let (count, rows, cols) = tensor.matrices()?;
    Ok(TensorEntry {
        rows,
        cols,
        count,
        quant: None,
        keep: None,
        metrics: None,
        verdict: None,
        reasons: vec![],
        packed: None,
    })
}

/// The entry of a tensor that is not quantized after all; its metrics say why.
fn kept(entry: TensorEntry, keep: Keep, reasons: Vec<String>) -> TensorEntry {
    TensorEntry { quant: None, keep: Some(keep), verdict: Some(Verdict::Kept), reasons, ..entry }
}

/// An entry that leaves the codes of a checkpoint alone: computing them again from their values could only lose.
pub(super) fn already_quantized(tensor: &Tensor) -> Result<Option<TensorEntry>> {
    match tensor.form {
        Form::Float(_) => Ok(None),
        Form::Quantized(Scheme::Mxfp4) => {
            let reason = "the checkpoint holds MXFP4 codes; they stay as they are".to_string();
            Ok(Some(kept(blank_entry(tensor)?, Keep::Source, vec![reason])))
        }
        Form::Quantized(scheme) => Err(Error::unsupported(format!(
            "is quantized already ({}); its original weights are needed",
            scheme.name()
        ))
        .tensor(&tensor.name)
        .help("use --hf-dir with the checkpoint the pack was made from")),
    }
}

/// Quantizes with fp16 scales and, where they over- or underflow, again with f32 scales (q4_0 has fp16 only).
fn quantize_with_fitting_scales(
    weights: &Weights,
    tensor: &Tensor,
    quant: TensorQuant,
    bar: &ProgressBar,
) -> Result<(TensorQuant, Metrics)> {
    let first = run(weights, tensor, quant, bar);
    let narrow = quant.spec.scale_dtype == ScaleType::F16 && quant.spec.scheme != Scheme::Q4_0;
    let unfit = match &first {
        // Below 2^-14 halves lose precision; that matters when even the largest scale lies there.
        Ok(o) => o.metrics.relative_rms > 0.0 && o.largest_scale < half::f16::MIN_POSITIVE.to_f32(),
        Err(e) => matches!(e.cause(), Cause::Unsupported(_)),
    };
    if !(narrow && unfit) {
        return first.map(|outcome| (quant, outcome.metrics));
    }
    let mut wide = quant;
    wide.spec.scale_dtype = ScaleType::F32;
    run(weights, tensor, wide, bar).map(|outcome| (wide, outcome.metrics))
}

/// One pass over a tensor.
fn run(weights: &Weights, tensor: &Tensor, quant: TensorQuant, bar: &ProgressBar) -> Result<Outcome> {
    let (count, rows, cols) = tensor.matrices()?;
    let read = |matrix: usize, rows: std::ops::Range<usize>, out: &mut [f32]| {
        bar.inc(out.len() as u64);
        weights.read_rows_f32(tensor, matrix, rows, out)
    };
    stream::quantize(quant, &Stack { count, rows, cols, read: &read, chunk_rows: None }, &mut |_| Ok(()))
}

impl Measured {
    /// What the gate said about a tensor.
    pub fn verdict(&self, tensor: &Tensor) -> Option<Verdict> {
        self.document.tensors[&tensor.name].verdict
    }

    /// Mean row cosine of a tensor; 1 where nothing was measured.
    pub fn cosine(&self, tensor: &Tensor) -> f64 {
        self.document.tensors[&tensor.name].metrics.map_or(1.0, |m| m.cosine_mean)
    }

    /// Bits per weight of a tensor as it will be stored.
    pub fn stored_bits(&self, tensor: &Tensor) -> Result<f64> {
        let entry = &self.document.tensors[&tensor.name];
        let tiled = |spec| -> Result<f64> {
            let layout = TileLayout::new(spec, entry.rows, entry.cols)?;
            Ok(layout.nbytes() as f64 * 8.0 / (entry.rows * entry.cols) as f64)
        };
        match (entry.quant, entry.keep, tensor.form) {
            (Some(quant), _, _) => tiled(quant.spec),
            (None, Some(Keep::Fp16 | Keep::Bf16), _) => Ok(16.0),
            (None, _, Form::Float(dtype)) => Ok(dtype.size() as f64 * 8.0),
            // The only codes that are kept.
            (None, _, Form::Quantized(_)) => tiled(QuantSpec::MXFP4),
        }
    }
}
