//! Statistics of the inputs of a matrix, prepared for a quantizer: the importance of each column (`imatrix`), and the
//! correlations that allow columns to compensate the errors of others (`gptq`).

use super::gptq::Correlations;
use crate::calibration::{Calibration, Half, InputMeans};
use crate::error::{Error, Result};
use crate::quant_spec::Method;
use crate::scheme::BLOCK;
use std::sync::Arc;

/// Statistics of the inputs of one matrix, prepared for a method.
#[derive(Debug, Clone)]
pub struct InputStats {
    /// Mean squares of the input channels, normalized to a mean of 1, padded with zeros to whole blocks.
    importance: Vec<f32>,
    correlations: Option<Arc<Correlations>>,
}

impl InputStats {
    /// Prepares the statistics that `method` needs.
    ///
    /// # Errors
    /// The statistics lack data that the method needs, or no damping makes their products invertible.
    pub fn new(inputs: &InputMeans, method: Method) -> Result<InputStats> {
        let correlations = match (method.needs_products(), &inputs.products) {
            (false, _) => None,
            (true, Some(products)) => Some(Arc::new(Correlations::new(products, inputs.squares.len())?)),
            (true, None) => {
                let found = format!("method {} needs the products of input channels", method.name());
                return Err(Error::usage(found).help("collect the statistics with `iec calib --hessian`"));
            }
        };
        Ok(InputStats { importance: importance(&inputs.squares), correlations })
    }

    /// Returns the importance of columns; the range consists of whole blocks.
    pub(super) fn importance(&self, columns: std::ops::Range<usize>) -> &[f32] {
        &self.importance[columns]
    }

    pub(super) fn correlations(&self) -> Option<&Correlations> {
        self.correlations.as_deref()
    }
}

fn importance(squares: &[f32]) -> Vec<f32> {
    let mean = squares.iter().map(|x| f64::from(*x)).sum::<f64>() / squares.len() as f64;
    let mut importance = vec![0f32; squares.len().next_multiple_of(BLOCK)];
    for (to, square) in importance.iter_mut().zip(squares) {
        // A channel that is zero in the calibration text may be used by other texts, so it gets a small importance.
        *to = if mean > 0.0 { (f64::from(*square) / mean).max(1e-6) as f32 } else { 1.0 };
    }
    importance
}

/// Statistics of the inputs of the matrices of one tensor.
#[derive(Debug)]
pub struct TensorInputStats<'a> {
    calibration: &'a Calibration,
    tensor: &'a str,
    shape: (usize, usize),
    half: Option<Half>,
    /// Statistics of the first matrix; experts share its correlations.
    first: InputStats,
}

impl<'a> TensorInputStats<'a> {
    /// Creates the statistics of a tensor of `shape` = (number of matrices, columns) from the windows of one
    /// [`Half`], or of both if `half` is `None`; returns `None` if the calibration has no statistics of its inputs.
    ///
    /// # Errors
    /// The statistics have another shape, or lack data that the method needs.
    pub fn new(
        calibration: &'a Calibration,
        tensor: &'a str,
        shape: (usize, usize),
        half: Option<Half>,
        method: Method,
    ) -> Result<Option<TensorInputStats<'a>>> {
        let Some(inputs) = calibration.inputs(tensor, shape, 0, half, method.needs_products())? else {
            return Ok(None);
        };
        let first = InputStats::new(&inputs, method)?;
        Ok(Some(TensorInputStats { calibration, tensor, shape, half, first }))
    }

    /// Returns the statistics of one matrix.
    ///
    /// # Errors
    /// The statistics of that matrix are damaged.
    pub fn of(&self, matrix: usize) -> Result<InputStats> {
        if matrix == 0 {
            return Ok(self.first.clone());
        }
        let inputs = self.calibration.inputs(self.tensor, self.shape, matrix, self.half, false)?;
        let squares = inputs.map(|inputs| inputs.squares).unwrap_or_default();
        Ok(InputStats { importance: importance(&squares), correlations: self.first.correlations.clone() })
    }
}
