//! Opens the calibration statistics (`--calib`) that the quantization methods of a manifest need, and checks that the
//! manifest was made with them.

use crate::calibration::Calibration;
use crate::error::{Context, Error, Result};
use crate::manifest::Document;
use crate::quant::TensorInputStats;
use crate::quant_spec::Method;
use std::path::Path;

/// Opens the statistics at `path`: those that the manifest was made with, or those that were collected along the model
/// as the manifest quantizes it.
///
/// # Errors
/// The statistics are damaged or others than those the manifest was made with, or the manifest needs statistics and
/// none are given.
pub(super) fn open(document: Option<&Document>, path: Option<&Path>) -> Result<Option<Calibration>> {
    let record = document.and_then(|document| document.calibration.as_ref());
    let Some(path) = path else {
        let entries = document.iter().flat_map(|d| &d.tensors).filter(|(_, entry)| entry.packed.is_none());
        let guided = entries.filter_map(|(name, entry)| Some((name, entry.quant?.method))).find(|e| e.1.needs_inputs());
        return match guided {
            None => Ok(None),
            Some((name, method)) => {
                let texts = record.iter().flat_map(|r| &r.texts).map(|text| text.name.as_str()).collect::<Vec<_>>();
                let found =
                    format!("found method {}, which needs calibration statistics, but none are given", method.name());
                let help = format!(
                    "give --calib STATS, the file of `iec calib` that the manifest was made with (its texts: {})",
                    texts.join(", ")
                );
                Err(Error::usage(found).tensor(name).help(help))
            }
        };
    };
    let calibration = Calibration::open(path)?;
    if let Some(along) = &calibration.description().quantized {
        return match document.is_some_and(|document| document.decisions_hash() == *along) {
            true => Ok(Some(calibration)),
            false => Err(Error::usage("found statistics along a model that another manifest quantizes"))
                .at(path)
                .help("give the manifest of `iec calib --quantized`, or collect the statistics again with this one"),
        };
    }
    match record.filter(|record| record.seal != calibration.seal()) {
        None => Ok(Some(calibration)),
        Some(record) => {
            let found = format!(
                "found statistics with the hash {}, expected {} as in the manifest",
                calibration.seal(),
                record.seal
            );
            Err(Error::usage(found))
                .at(path)
                .help("give the statistics that the manifest was made with, or make the manifest again with these")
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
