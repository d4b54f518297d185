//! Candidates for the quantization of each tensor, with their errors and sizes. A plan for a size budget chooses among
//! them.

use super::entry::{already_quantized, blank_entry};
use super::weights::{Tensor, Weights};
use crate::calibration::Calibration;
use crate::error::{Cause, Context, Result};
use crate::iebin::{Store, stored_bytes};
use crate::manifest::{CalibrationRecord, Document, TensorEntry};
use crate::quant::TensorInputStats;
use crate::quant::metrics::nine_digits;
use crate::quant::stream::Stack;
use crate::quant::trial::{FITTED, Judge};
use crate::quant_spec::{Method, QuantFields, TensorQuant};
use crate::scheme::{Granularity, QuantSpec, SCHEMES};
use serde::{Deserialize, Serialize};

/// Scheme with which the effect of a single quantized tensor on the model is measured, where the tensor can have it.
const MEASURED: QuantSpec = QuantSpec::Q4_0;

/// One way to store a tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// Quantization; `None` leaves the tensor as it is.
    pub quant: Option<TensorQuant>,
    /// Mean squared error divided by the mean square: of the outputs on calibration windows that no method was fitted
    /// on, or of the weights if there are no such windows.
    pub error: f64,
}

impl Candidate {
    /// Returns the representation of the tensor in a pack.
    pub fn store(&self, tensor: &Tensor) -> Store {
        self.quant.map_or(tensor.store, |quant| Store::Tiled(quant.spec))
    }

    /// Returns the number of bytes in a pack.
    ///
    /// # Errors
    /// The shape is invalid.
    pub fn bytes(&self, tensor: &Tensor) -> Result<u64> {
        stored_bytes(self.store(tensor), &tensor.shape).map(|bytes| bytes as u64).tensor(&tensor.name)
    }
}

/// A tensor and its candidates; the last one leaves it as it is.
#[derive(Debug)]
pub struct Subject {
    /// The tensor.
    pub tensor: Tensor,
    /// Its candidates.
    pub candidates: Vec<Candidate>,
}

impl Subject {
    /// Returns the candidate with which the tensor is measured alone; `None` if it can only be left as it is.
    pub fn measured(&self) -> Option<&Candidate> {
        let quantized = || self.candidates.iter().filter(|c| c.quant.is_some());
        quantized().find(|c| c.quant.is_some_and(|q| q.spec == MEASURED)).or_else(|| quantized().next())
    }
}

/// Candidate that leaves a tensor as it is.
pub const AS_IT_IS: Candidate = Candidate { quant: None, error: 0.0 };

/// Returns the candidates of a tensor without reading it; their errors are not known. The last one leaves it as it is.
///
/// # Errors
/// Its shape is invalid.
pub fn possible(tensor: &Tensor) -> Result<Vec<Candidate>> {
    let quantized = choices_for(tensor)?.into_iter();
    let quantized = quantized.map(|quant| Candidate { quant: Some(quant), error: 0.0 });
    Ok(quantized.chain([AS_IT_IS]).collect())
}

/// Returns a candidate for every scheme, with the error that the best method for the scheme has on some rows of a
/// tensor. A tensor of codes has only candidates of fewer bits, and that of staying as it is.
///
/// # Errors
/// The tensor cannot be read or holds NaN; the statistics are of another model.
pub fn compare(weights: &Weights, tensor: &Tensor, calibration: Option<&Calibration>) -> Result<Vec<Candidate>> {
    let choices = choices_for(tensor)?;
    if choices.is_empty() {
        return Ok(vec![AS_IT_IS]);
    }
    let (count, rows, cols) = tensor.matrices()?;
    let known = calibration.map(|c| Judge::new(c, &tensor.name, (count, cols))).transpose()?.flatten();
    let calibrated = calibration.filter(|_| known.is_some());
    let judge = known.unwrap_or_else(|| Judge::of_weights((count, cols)));
    let read = weights.rows(tensor);
    let mut best: Vec<Option<Candidate>> = vec![None; choices.len()];
    // Methods are the outer loop, because preparing a method takes longer than trying a scheme. The one that is most
    // often the best comes first; the others are tried with all schemes only if they are better with one.
    let probe = choices.iter().position(|quant| quant.spec == MEASURED).unwrap_or(0);
    for method in [None, Some(Method::Gptq), Some(Method::Imatrix), Some(Method::Search)] {
        let lacks_products = method.is_some_and(Method::needs_products) && !judge.knows_products();
        if method.is_some() != calibrated.is_some() || lacks_products {
            continue;
        }
        let prepared = calibrated.zip(method.filter(|m| m.needs_inputs()));
        let inputs = prepared
            .map(|(c, m)| TensorInputStats::new(c, &tensor.name, (count, cols), Some(FITTED), m))
            .transpose()?;
        let inputs = inputs.flatten();
        let stack = Stack { count, rows, cols, read: &read, chunk_rows: None, inputs: inputs.as_ref() };
        let order = [probe].into_iter().chain((0..choices.len()).filter(|i| *i != probe));
        for i in order {
            let (quant, best) = (choices[i], &mut best[i]);
            let quant = TensorQuant { method: method.unwrap_or(quant.method), ..quant };
            let error = match judge.measure(quant, &stack) {
                Ok(found) => nine_digits(found.relative().powi(2)),
                // A scale does not fit its type, so this scheme is not a candidate.
                Err(e) if matches!(e.cause(), Cause::Unsupported(_)) => continue,
                Err(e) => return Err(e).tensor(&tensor.name),
            };
            if best.as_ref().is_none_or(|best| error < best.error) {
                *best = Some(Candidate { quant: Some(quant), error });
            } else if i == probe {
                break;
            }
        }
    }
    Ok(best.into_iter().flatten().chain([AS_IT_IS]).collect())
}

/// Returns the manifest that gives each subject the candidate with which it is measured alone; it has no
/// measurements.
///
/// # Errors
/// A shape is invalid.
pub fn document(subjects: &[Subject], calibration: Option<&Calibration>) -> Result<Document> {
    let entry = |subject: &Subject| -> Option<Result<(String, TensorEntry)>> {
        let quant = subject.measured()?.quant;
        let name = subject.tensor.name.clone();
        Some(blank_entry(&subject.tensor).map(|entry| (name, TensorEntry { quant, ..entry })))
    };
    let calibration = calibration.map(CalibrationRecord::of);
    let tensors = subjects.iter().filter_map(entry).collect::<Result<_>>()?;
    Ok(Document { calibration, tensors, ..Document::default() })
}

/// Returns the choices for a tensor: all for floats, those of fewer bits for codes.
fn choices_for(tensor: &Tensor) -> Result<Vec<TensorQuant>> {
    let is_allowed = |quant: &TensorQuant| Ok(already_quantized(tensor, &quant.spec)?.is_none());
    choices().filter_map(|quant| is_allowed(&quant).map(|allowed| allowed.then_some(quant)).transpose()).collect()
}

/// Returns the schemes that a plan for a size budget may choose besides leaving a tensor as it is, by increasing bits
/// per weight, each with its method for quantizing without calibration.
pub fn choices() -> impl Iterator<Item = TensorQuant> {
    let mut fields: Vec<_> = SCHEMES.iter().flat_map(|row| row.budget.iter().map(move |shape| (row, *shape))).collect();
    fields.sort_by_key(|(row, (group, symmetric, scales))| {
        let of_group = 8 * scales.size() as u32 + if *symmetric { 0 } else { 8 };
        row.bits * 256 + of_group * 256 / group
    });
    fields.into_iter().map(|(row, (group, symmetric, scales))| {
        let fields = QuantFields {
            scheme: Some(row.scheme),
            group_size: Some(Granularity::Group(group)),
            symmetric: Some(symmetric),
            scale_dtype: Some(scales),
            ..QuantFields::default()
        };
        fields.resolve(&QuantFields::default()).expect("every scheme of the table exists")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::convert::dry_run::in_words;

    #[test]
    fn a_budget_has_these_choices_and_one_of_them_is_measured_alone() {
        let names: Vec<String> = choices().map(|quant| in_words(&quant.spec)).collect();
        let low = ["t2/128 i8_row", "t2/32 i8_row", "t3/128 i8_row", "t3/32 i8_row"];
        let four = ["int4/128", "int4/64", "nl4 i8_row", "int4/64 affine", "q4_0", "int4/32 affine"];
        assert_eq!(names, [&low[..], &four, &["int5/32 i8_row", "int6/32 i8_row", "int8/32"]].concat());
        assert!(choices().any(|quant| quant.spec == MEASURED));
    }
}
