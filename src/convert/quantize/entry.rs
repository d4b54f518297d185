//! What a manifest says of one tensor.

use super::weights::Tensor;
use crate::convert::dry_run::in_words;
use crate::error::{Error, Result};
use crate::iebin::{Store, stored_bytes};
use crate::manifest::{Keep, TensorEntry, Verdict};

/// What a tensor is stored as, in words.
pub fn stored_as(tensor: &Tensor, entry: &TensorEntry) -> String {
    match (&entry.quant, entry.keep) {
        (Some(quant), _) => in_words(&quant.spec),
        (None, Some(Keep::Fp16)) => "fp16".to_string(),
        (None, Some(Keep::Bf16)) => "bf16".to_string(),
        (None, _) => tensor.store.name().to_string(),
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
    match tensor.store {
        Store::Plain(_) => Ok(None),
        Store::Tiled(spec) if spec.scheme.info().is_source_format => {
            let reason = "the checkpoint holds MXFP4 codes; they stay as they are".to_string();
            Ok(Some(kept(blank_entry(tensor)?, Keep::Source, vec![reason])))
        }
        Store::Tiled(spec) => Err(Error::unsupported(format!(
            "is quantized already ({}); its original weights are needed",
            spec.scheme.name()
        ))
        .tensor(&tensor.name)
        .help("use --hf-dir with the checkpoint the pack was made from")),
    }
}

/// Bits per weight of a tensor that is stored as `entry` says.
pub fn stored_bits(tensor: &Tensor, entry: &TensorEntry) -> Result<f64> {
    let store = match (entry.quant, entry.keep.and_then(Keep::dtype)) {
        (Some(quant), _) => Store::Tiled(quant.spec),
        (None, Some(dtype)) => Store::Plain(dtype),
        (None, None) => tensor.store,
    };
    let bytes = stored_bytes(store, &[entry.rows, entry.cols])?;
    Ok(bytes as f64 * 8.0 / (entry.rows * entry.cols) as f64)
}
