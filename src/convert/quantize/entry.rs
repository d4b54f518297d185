//! Builds the manifest entries of tensors and describes how a tensor is stored.

use super::weights::Tensor;
use crate::convert::dry_run::in_words;
use crate::error::Result;
use crate::iebin::{Store, stored_bytes};
use crate::manifest::{Keep, TensorEntry, Verdict};
use crate::scheme::QuantSpec;

/// Returns the name of the format in which `entry` stores a tensor, such as `int4/64` or `bf16`.
pub fn stored_as(tensor: &Tensor, entry: &TensorEntry) -> String {
    match (&entry.quant, entry.keep) {
        (Some(quant), _) => in_words(&quant.spec),
        (None, Some(Keep::Fp16)) => "fp16".to_string(),
        (None, Some(Keep::Bf16)) => "bf16".to_string(),
        (None, _) => tensor.store.name().to_string(),
    }
}

/// Creates an entry with the shape of a tensor and without any decision.
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

/// Returns the entry of a tensor that is kept in the type `keep`. The metrics of `entry` remain, because they
/// explain the decision.
pub(super) fn kept(entry: TensorEntry, keep: Keep, reasons: Vec<String>) -> TensorEntry {
    TensorEntry { quant: None, keep: Some(keep), verdict: Some(Verdict::Kept), reasons, ..entry }
}

/// Returns an entry that keeps the codes of a tensor if they have no more bits than those of `target`, as quantizing
/// them again could only lose accuracy; `None` for floats and for codes of more bits.
///
/// # Errors
/// The shape is invalid.
pub(super) fn already_quantized(tensor: &Tensor, target: &QuantSpec) -> Result<Option<TensorEntry>> {
    let Store::Tiled(spec) = tensor.store else { return Ok(None) };
    let (scheme, bits) = (spec.scheme, target.scheme.bits());
    if scheme.bits() > bits {
        return Ok(None);
    }
    let reason = match spec {
        QuantSpec::MXFP4 => "the checkpoint holds MXFP4 codes; they stay as they are".to_string(),
        _ => format!("the source holds {} codes of {} bits; they stay as they are", scheme.name(), scheme.bits()),
    };
    Ok(Some(kept(blank_entry(tensor)?, Keep::Source, vec![reason])))
}

/// Returns the bits per weight of a tensor that is stored as `entry` describes.
pub fn stored_bits(tensor: &Tensor, entry: &TensorEntry) -> Result<f64> {
    let store = match (entry.quant, entry.keep.and_then(Keep::dtype)) {
        (Some(quant), _) => Store::Tiled(quant.spec),
        (None, Some(dtype)) => Store::Plain(dtype),
        (None, None) => tensor.store,
    };
    let bytes = stored_bytes(store, &[entry.rows, entry.cols])?;
    Ok(bytes as f64 * 8.0 / (entry.rows * entry.cols) as f64)
}
