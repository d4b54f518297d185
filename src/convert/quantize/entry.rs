//! What a manifest says of one tensor.

use super::weights::{Form, Tensor};
use crate::convert::outlook::in_words;
use crate::error::{Error, Result};
use crate::manifest::{Keep, TensorEntry, Verdict};
use crate::scheme::{QuantSpec, TileLayout};

/// What a tensor is stored as, in words.
pub fn stored_as(tensor: &Tensor, entry: &TensorEntry) -> String {
    match (&entry.quant, entry.keep) {
        (Some(quant), _) => in_words(&quant.spec),
        (None, Some(Keep::Fp16)) => "fp16".to_string(),
        (None, Some(Keep::Bf16)) => "bf16".to_string(),
        (None, _) => tensor.form.name().to_string(),
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
pub(super) fn kept(entry: TensorEntry, keep: Keep, reasons: Vec<String>) -> TensorEntry {
    TensorEntry { quant: None, keep: Some(keep), verdict: Some(Verdict::Kept), reasons, ..entry }
}

/// An entry that leaves the codes of a checkpoint alone: computing them again from their values could only lose.
pub(super) fn already_quantized(tensor: &Tensor) -> Result<Option<TensorEntry>> {
    match tensor.form {
        Form::Float(_) => Ok(None),
        Form::Quantized(scheme) if scheme.info().is_source_format => {
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

/// Bits per weight of a tensor that is stored as `entry` says.
pub fn stored_bits(tensor: &Tensor, entry: &TensorEntry) -> Result<f64> {
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
