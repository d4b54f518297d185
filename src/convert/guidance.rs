//! Opens the calibration statistics that the methods of a manifest need, and checks that the manifest was made with
//! them.

use crate::calibration::Calibration;
use crate::error::{Context, Error, Result};
use crate::manifest::Document;
use crate::quant::TensorInputStats;
use crate::quant_spec::Method;
use std::path::Path;

/// Opens the statistics at `path`.
///
/// # Errors
/// They are damaged, the manifest was made with others, or it needs some and none are given.
pub(super) fn open(document: Option<&Document>, path: Option<&Path>) -> Result<Option<Calibration>> {
    let record = document.and_then(|document| document.calibration.as_ref());
    let Some(path) = path else {
        let entries = document.iter().flat_map(|d| &d.tensors).filter(|(_, entry)| entry.packed.is_none());
        let guided = entries.filter_map(|(name, entry)| Some((name, entry.quant?.method))).find(|e| e.1.needs_inputs());
        return match guided {
            None => Ok(None),
            Some((name, method)) => {
                let texts = record.iter().flat_map(|r| &r.texts).map(|text| text.name.as_str()).collect::<Vec<_>>();
                let found = format!("method {} needs the statistics of the model's inputs", method.name());
                let help = format!(
                    "name the file of `iec calib` that the manifest was made with (text: {}) with --calib",
                    texts.join(", ")
                );
                Err(Error::usage(found).tensor(name).help(help))
            }
        };
    };
    let calibration = Calibration::open(path)?;
    match record.filter(|record| record.seal != calibration.seal()) {
        None => Ok(Some(calibration)),
        Some(record) => {
            let found = format!("has seal {}, the manifest was made with {}", calibration.seal(), record.seal);
            Err(Error::usage(found)).at(path).help("name those statistics, or make the manifest again with these")
        }
    }
}

/// Returns the statistics of the inputs of a tensor of `(count, cols)`, prepared for `method`; `None` if the method
/// needs none or the tensor has none.
///
/// # Errors
/// The statistics have another shape, or lack data that the method needs.
pub(super) fn inputs<'a>(
    calibration: Option<&'a Calibration>,
    tensor: &'a str,
    shape: (usize, usize),
    method: Method,
) -> Result<Option<TensorInputStats<'a>>> {
    let calibration = calibration.filter(|_| method.needs_inputs());
    Ok(calibration.map(|c| TensorInputStats::new(c, tensor, shape, None, method)).transpose()?.flatten())
}
