//! How do floats become blocks, and was it good enough?
//!
//! A [`Quantizer`] turns the rows of one matrix into codes as a [`TensorQuant`] orders: plain scales come from the largest
//! magnitude, searched ones from the least squared error. [`block`] says what the bytes mean, [`stream`] quantizes whole
//! tensors and measures them ([`metrics`]), and [`Gate`](crate::manifest::Gate) judges.

pub mod block;
mod gate;
pub mod metrics;
mod observe;
pub mod packed;
mod plain;
mod search;
pub mod stream;

use crate::error::{Error, Result};
use crate::manifest::{Method, TensorQuant};
use crate::scheme::{BLOCK, Granularity, Scheme, TILE_ROWS, TileLayout};
use block::{CodedRow, mxfp4, q4_0, stored_scale, tile};
use observe::Observation;
use plain::{Choice, CodeRange};
use std::sync::OnceLock;

/// Quantizes one matrix, row by row, in any order and from any number of threads with the same result.
#[derive(Debug)]
pub struct Quantizer {
    quant: TensorQuant,
    layout: TileLayout,
    observation: Observation,
    /// Scale and zero point of the whole matrix, from the observation.
    shared: OnceLock<Choice>,
}

/// Buffers of one worker; [`Quantizer::quantize_row`] leaves its result here.
#[derive(Debug)]
pub struct Workspace {
    /// The row, clamped and padded with zeros to whole blocks.
    values: Vec<f32>,
    /// The row quantized.
    pub row: CodedRow,
}

impl Quantizer {
    /// A quantizer for one `rows x cols` matrix.
    ///
    /// # Errors
    /// The combination of scheme, method and parameters is not one that exists.
    pub fn new(quant: TensorQuant, rows: usize, cols: usize) -> Result<Quantizer> {
        quant.validate()?;
        let layout = TileLayout::new(quant.spec, rows, cols)?;
        Ok(Quantizer { quant, layout, observation: Observation::new(&quant), shared: OnceLock::new() })
    }

    /// Where the bytes of the matrix lie.
    pub fn layout(&self) -> &TileLayout {
        &self.layout
    }

    /// True when the scale spans the matrix: all rows must pass through [`Quantizer::observe`] first.
    pub fn needs_observation(&self) -> bool {
        self.quant.spec.granularity == Granularity::Tensor
    }

    /// Takes note of some rows; the order does not matter.
    ///
    /// # Errors
    /// A value is NaN or infinite.
    pub fn observe(&mut self, values: &[f32]) -> Result<()> {
        refuse_non_finite(values, self.layout.cols)?;
        self.shared = OnceLock::new();
        self.observation.add(values, self.quant.clamp);
        Ok(())
    }

    /// Buffers for [`Quantizer::quantize_row`].
    pub fn workspace(&self) -> Workspace {
        Workspace { values: vec![0.0; self.layout.blocks * BLOCK], row: CodedRow::new(&self.layout) }
    }

    /// Quantizes whole rows into tiles: `n * cols` values become `ceil(n / 16)` tiles, a last partial tile padded with
    /// rows of zeros.
    ///
    /// # Errors
    /// A value is NaN or infinite, or a scale does not fit its storage type.
    pub fn encode_tiles(&self, values: &[f32], out: &mut [u8]) -> Result<()> {
        let n_rows = values.len() / self.layout.cols;
        assert_eq!(
            (n_rows * self.layout.cols, n_rows.div_ceil(TILE_ROWS) * self.layout.tile_bytes),
            (values.len(), out.len())
        );
        let mut work = self.workspace();
        let tile_values = values.chunks(TILE_ROWS * self.layout.cols);
        for (tile, values) in out.chunks_exact_mut(self.layout.tile_bytes).zip(tile_values) {
            tile.fill(0);
            let rows = values.len() / self.layout.cols;
            for (r, row) in values.chunks_exact(self.layout.cols).enumerate() {
                self.quantize_row(row, &mut work)?;
                tile::put_row(&self.layout, tile, r, &work.row);
            }
            tile::pad_tile(&self.layout, tile, rows);
        }
        Ok(())
    }

    /// Quantizes one row of `cols` values into `work.row`.
    ///
    /// # Errors
    /// As [`Quantizer::encode_tiles`].
    pub fn quantize_row(&self, values: &[f32], work: &mut Workspace) -> Result<()> {
        refuse_non_finite(values, self.layout.cols)?;
        let padded = &mut work.values[..values.len()];
        match self.quant.clamp {
            None => padded.copy_from_slice(values),
            Some(limit) => padded.iter_mut().zip(values).for_each(|(p, x)| *p = x.clamp(-limit, limit)),
        }
        let width = self.layout.group_blocks * BLOCK;
        for group in 0..self.layout.groups {
            let start = group * width;
            let padded = &work.values[start..(start + width).min(self.layout.blocks * BLOCK)];
            let real = (self.layout.cols - start).min(padded.len());
            self.quantize_group(padded, real, group, &mut work.row)?;
        }
        // Padding must decode to zero whatever the zero point of the last group is.
        let zero = work.row.zeros.last().copied().unwrap_or(0);
        work.row.codes[self.layout.cols..].fill(block::neutral_code(&self.quant.spec, zero));
        Ok(())
    }

    /// Quantizes one group: `values` is padded with zeros to whole blocks, `real` of them belong to the matrix.
    fn quantize_group(&self, values: &[f32], real: usize, group: usize, row: &mut CodedRow) -> Result<()> {
        let spec = &self.quant.spec;
        let codes = row.group_codes(&self.layout, group);
        let choice = match spec.scheme {
            Scheme::Mxfp4 => Choice { scale: mxfp4::e8m0(mxfp4::encode_block(values, codes)), zero: 0 },
            Scheme::Q4_0 => self.quantize_q4_0(values, real, codes)?,
            Scheme::Int4 | Scheme::Int8 => self.quantize_integers(values, real, codes)?,
        };
        row.set_scale(spec, group, choice.scale);
        if let Some(stored) = row.zeros.get_mut(group) {
            *stored = choice.zero;
        }
        Ok(())
    }

    fn quantize_q4_0(&self, values: &[f32], real: usize, codes: &mut [u8]) -> Result<Choice> {
        let spec = &self.quant.spec;
        let peak = plain::q4_0_peak(&values[..real], self.quant.percentile);
        let scale = q4_0::encode_block(values, peak, codes);
        let plain = Choice { scale: stored_scale(spec.scale_dtype, scale)?, zero: 0 };
        if self.quant.method == Method::Rtn {
            return Ok(plain);
        }
        // The plain codes were chosen under the unrounded scale, so their error is measured as they are.
        let mut decoded = [0f32; BLOCK];
        block::decode_block(spec, codes, 0, plain.scale, &mut decoded);
        let error = values.iter().zip(&decoded).map(|(x, y)| f64::from(x - y).powi(2)).sum();
        match search::fit(values, spec, plain, error) {
            Some(better) => {
                plain::encode(values, better.scale, CodeRange::of(spec, 0), codes);
                Ok(better)
            }
            None => Ok(plain),
        }
    }

    fn quantize_integers(&self, values: &[f32], real: usize, codes: &mut [u8]) -> Result<Choice> {
        let spec = &self.quant.spec;
        let mut choice = if self.needs_observation() {
            *self.shared.get_or_init(|| self.observation.choose(&self.quant))
        } else {
            let (min, max) = plain::extremes(&values[..real], spec.symmetric, self.quant.percentile);
            plain::choose(spec, min, max)
        };
        choice.scale = stored_scale(spec.scale_dtype, choice.scale)?;
        if self.quant.method == Method::Search && !self.needs_observation() {
            let error = search::error(values, spec, choice);
            choice = search::fit(values, spec, choice, error).unwrap_or(choice);
        }
        plain::encode(values, choice.scale, CodeRange::of(spec, choice.zero), codes);
        Ok(choice)
    }
}

/// Names the first value that is no number.
fn refuse_non_finite(values: &[f32], cols: usize) -> Result<()> {
    // Summing zeros times the values keeps the loop free of branches: anything not finite makes NaN.
    if values.iter().map(|x| x * 0.0).sum::<f32>() == 0.0 {
        return Ok(());
    }
    let at = values.iter().position(|x| !x.is_finite()).unwrap_or(0);
    let (value, column) = (values[at], at % cols);
    Err(Error::corrupt(format!("a weight is {value} (column {column}); NaN and infinity cannot be quantized"))
        .help("the checkpoint is damaged or its training diverged; get it again or exclude the tensor"))
}
