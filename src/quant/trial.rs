//! Compares quantization methods for a tensor. Each method is fitted on one half of the calibration windows, applied
//! to some rows, and evaluated by the error of the outputs on the other half.

use super::Quantizer;
use super::gptq::Hessian;
use super::stream::Stack;
use crate::calibration::{Calibration, Half};
use crate::error::{Error, Result};
use crate::quant_spec::TensorQuant;
use crate::scheme::TILE_ROWS;
use crate::simd::Level;
use rayon::prelude::*;
use std::sync::OnceLock;

/// Approximate number of rows of a matrix that are quantized.
const ROWS: usize = 128;
/// Approximate number of matrices of a stack that are quantized.
const MATRICES: usize = 8;

/// Rows of a matrix, `[column][row]`.
type Columns = Vec<[f32; TILE_ROWS]>;

/// Half of the calibration windows that methods are fitted on.
pub const FITTED: Half = Half::First;
/// Half of the calibration windows that the error of the outputs is measured on.
const JUDGED: Half = Half::Second;

/// Statistics of the inputs of a tensor, from which the error of its outputs is computed.
pub struct Judge {
    /// Matrices that are quantized, each as `(index, mean squares of its inputs)`.
    matrices: Vec<(usize, Vec<f32>)>,
    /// Products of the inputs of the first matrix, if the calibration has them; they are used for all matrices.
    hessian: Option<Hessian>,
    /// Mean square of the outputs, summed over the rows that are tried, once it has been computed.
    output: OnceLock<f64>,
}

/// Error that a quantization causes in the outputs of a tensor.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct OutputError {
    /// Mean square of the error of an output.
    pub error: f64,
    /// Mean square of an output.
    pub output: f64,
}

impl OutputError {
    /// Returns the root of the ratio of error and output.
    pub fn relative(self) -> f64 {
        if self.output > 0.0 { (self.error / self.output).sqrt() } else { 0.0 }
    }
}

impl Judge {
    /// Creates a judge for a tensor of `shape` = (number of matrices, columns); returns `None` if the calibration has
    /// no statistics of its inputs.
    ///
    /// # Errors
    /// The statistics have another shape.
    pub fn new(calibration: &Calibration, tensor: &str, shape: (usize, usize)) -> Result<Option<Judge>> {
        let mut judge = Judge { matrices: Vec::new(), hessian: None, output: OnceLock::new() };
        for matrix in (0..shape.0).step_by(shape.0.div_ceil(MATRICES)) {
            let Some(inputs) = calibration.inputs(tensor, shape, matrix, Some(JUDGED), matrix == 0)? else {
                return Ok(None);
            };
            if let Some(products) = &inputs.products {
                judge.hessian = Some(Hessian::new(products, shape.1, 0.0));
            }
            judge.matrices.push((matrix, inputs.squares));
        }
        Ok(Some(judge))
    }

    /// Creates a judge without statistics: all inputs have the same weight, so it measures the error of the weights.
    pub fn of_weights((count, cols): (usize, usize)) -> Judge {
        let matrices = (0..count).step_by(count.div_ceil(MATRICES)).map(|matrix| (matrix, vec![1.0; cols]));
        Judge { matrices: matrices.collect(), hessian: None, output: OnceLock::new() }
    }

    /// Returns true when the judge has products of the inputs in addition to their squares.
    pub fn knows_products(&self) -> bool {
        self.hessian.is_some()
    }

    /// Quantizes some rows and measures the error of their outputs. Each call must be with the same tensor.
    ///
    /// # Errors
    /// Reading or quantizing fails.
    pub fn measure(&self, quant: TensorQuant, stack: &Stack<'_>) -> Result<OutputError> {
        let tiles = stack.rows.div_ceil(TILE_ROWS);
        let each = tiles.div_ceil(ROWS / TILE_ROWS);
        let mut total = OutputError::default();
        let (known, mut rows) = (self.output.get(), 0);
        for (matrix, squares) in &self.matrices {
            let mut quantizer = Quantizer::new(quant, stack.rows, stack.cols)?;
            if let Some(inputs) = stack.inputs {
                quantizer = quantizer.with_inputs(Some(inputs.of(*matrix)?));
            }
            let starts: Vec<usize> = (0..tiles).step_by(each).map(|tile| tile * TILE_ROWS).collect();
            let tried = starts.into_par_iter().map(|start| {
                let range = start..stack.rows.min(start + TILE_ROWS);
                let mut values = vec![0f32; range.len() * stack.cols];
                (stack.read)(*matrix, range, &mut values)?;
                let (original, error) = self.errors(&quantizer, &values)?;
                let output = if known.is_some() { 0.0 } else { self.energy(&original, squares) };
                Ok((self.energy(&error, squares), output, values.len() / stack.cols))
            });
            for (error, output, n) in tried.collect::<Result<Vec<_>>>()? {
                total.error += error;
                total.output += output;
                rows += n;
            }
        }
        total.output = *self.output.get_or_init(|| total.output);
        let rows = rows.max(1) as f64;
        if !(total.error.is_finite() && total.output.is_finite()) {
            return Err(Error::corrupt("found an error of the outputs that is not a finite number")
                .help("the statistics or the weights are damaged; collect the statistics again with `iec calib`"));
        }
        Ok(OutputError { error: total.error / rows, output: total.output / rows })
    }

    /// Returns the rows of a tile and their quantization errors, both `[column][row]`.
    fn errors(&self, quantizer: &Quantizer, values: &[f32]) -> Result<(Columns, Columns)> {
        let (cols, decoded) = (quantizer.layout().cols, quantizer.round_trip(values)?);
        let zeros = vec![[0f32; TILE_ROWS]; cols];
        let (mut original, mut error) = (zeros.clone(), zeros);
        for (r, (row, decoded)) in values.chunks_exact(cols).zip(decoded.chunks_exact(cols)).enumerate() {
            for (column, (x, y)) in row.iter().zip(decoded).enumerate() {
                (original[column][r], error[column][r]) = (*x, x - y);
            }
        }
        Ok((original, error))
    }

    /// Returns the mean square of the outputs of these weights, summed over the rows.
    fn energy(&self, weights: &[[f32; TILE_ROWS]], squares: &[f32]) -> f64 {
        if let Some(hessian) = &self.hessian {
            return hessian.energy(Level::detect(), weights);
        }
        let column = |(weights, square): (&[f32; TILE_ROWS], &f32)| {
            f64::from(*square) * weights.iter().map(|w| f64::from(*w) * f64::from(*w)).sum::<f64>()
        };
        weights.iter().zip(squares).map(column).sum()
    }
}
