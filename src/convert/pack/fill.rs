//! Moves one tensor from the checkpoint into the pack, chunk by chunk, hashing what it writes.

use super::plan::{Item, Work};
use crate::convert::payload::Payload;
use crate::convert::{CanonicalTensor, Checkpoint, Kind};
use crate::dtype::{DType, decode_floats, encode_floats};
use crate::error::{Error, Result};
use crate::iebin::IebinWriter;
use crate::interrupt;
use crate::manifest::{PackedRange, TensorQuant};
use crate::quant::Quantizer;
use crate::scheme::{TILE_ROWS, TileLayout};
use indicatif::ProgressBar;
use std::ops::Range;

/// Elements moved at once. A thread holds at most about 14 bytes for each: stored, f32 and encoded form.
const CHUNK_ELEMENTS: usize = 1 << 20;

/// One thread's buffers.
pub(super) struct Filler<'a> {
    checkpoint: &'a Checkpoint,
    writer: &'a IebinWriter,
    bar: &'a ProgressBar,
    stored: Vec<u8>,
    values: Vec<f32>,
    encoded: Vec<u8>,
}

impl<'a> Filler<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint, writer: &'a IebinWriter, bar: &'a ProgressBar) -> Self {
        Filler { checkpoint, writer, bar, stored: Vec::new(), values: Vec::new(), encoded: Vec::new() }
    }

    /// Writes the payload of tensor number `index`; returns its SHA-256.
    pub(super) fn fill(&mut self, index: usize, item: &Item) -> Result<String> {
        let mut payload = Payload::new(self.writer, self.bar, index);
        let (count, rows, cols) = item.tensor.matrices();
        for matrix in 0..count {
            match &item.work {
                Work::Copy => self.copy(item.tensor, matrix, &mut payload)?,
                Work::Convert(to) => self.convert(item.tensor, matrix, *to, &mut payload)?,
                Work::Mxfp4 => self.permute(item.tensor, matrix, &mut payload)?,
                Work::Quantize(quant) => self.quantize(item.tensor, matrix, *quant, &mut payload)?,
                Work::Packed(spec, range) => {
                    self.take_packed(range, &TileLayout::new(*spec, rows, cols)?, matrix, &mut payload)?;
                }
            }
        }
        Ok(payload.finish())
    }

    fn copy(&mut self, tensor: &CanonicalTensor, matrix: usize, payload: &mut Payload) -> Result<()> {
        for rows in chunks(tensor, 1) {
            self.checkpoint.read_rows(tensor, matrix, rows, &mut self.stored)?;
            payload.append(&self.stored)?;
        }
        Ok(())
    }

    fn convert(&mut self, tensor: &CanonicalTensor, matrix: usize, to: DType, payload: &mut Payload) -> Result<()> {
        for rows in chunks(tensor, 1) {
            self.read_values(tensor, matrix, rows)?;
            refuse_overflow(&self.values, to)?;
            self.encoded.clear();
            encode_floats(to, &self.values, &mut self.encoded)?;
            payload.append(&self.encoded)?;
        }
        Ok(())
    }

    fn permute(&mut self, tensor: &CanonicalTensor, matrix: usize, payload: &mut Payload) -> Result<()> {
        for rows in chunks(tensor, TILE_ROWS) {
            self.checkpoint.read_mxfp4_tiles(tensor, matrix, rows, &mut self.encoded)?;
            payload.append(&self.encoded)?;
        }
        Ok(())
    }

    fn quantize(
        &mut self,
        tensor: &CanonicalTensor,
        matrix: usize,
        quant: TensorQuant,
        payload: &mut Payload,
    ) -> Result<()> {
        let (_, n_rows, cols) = tensor.matrices();
        let mut quantizer = Quantizer::new(quant, n_rows, cols)?;
        if quantizer.needs_observation() {
            for rows in chunks(tensor, TILE_ROWS) {
                interrupt::check()?;
                self.read_values(tensor, matrix, rows)?;
                quantizer.observe(&self.values)?;
            }
        }
        for rows in chunks(tensor, TILE_ROWS) {
            let tiles = rows.len().div_ceil(TILE_ROWS);
            self.read_values(tensor, matrix, rows)?;
            self.encoded.resize(tiles * quantizer.layout().tile_bytes, 0);
            quantizer.encode_tiles(&self.values, &mut self.encoded)?;
            payload.append(&self.encoded)?;
        }
        Ok(())
    }

    fn take_packed(
        &mut self,
        range: &PackedRange,
        layout: &TileLayout,
        matrix: usize,
        payload: &mut Payload,
    ) -> Result<()> {
        for rows in row_chunks(layout.rows, layout.cols, TILE_ROWS) {
            self.encoded.resize(rows.len().div_ceil(TILE_ROWS) * layout.tile_bytes, 0);
            range.read_tiles(layout, matrix, rows, &mut self.encoded)?;
            payload.append(&self.encoded)?;
        }
        Ok(())
    }

    /// Rows as f32 in `self.values`.
    fn read_values(&mut self, tensor: &CanonicalTensor, matrix: usize, rows: Range<usize>) -> Result<()> {
        let (_, _, cols) = tensor.matrices();
        self.values.resize(rows.len() * cols, 0.0);
        match tensor.kind {
            Kind::Float(dtype) => {
                self.checkpoint.read_rows(tensor, matrix, rows, &mut self.stored)?;
                decode_floats(dtype, &self.stored, &mut self.values)
            }
            Kind::Mxfp4 | Kind::Packed(_) => self.checkpoint.read_rows_f32(tensor, matrix, rows, &mut self.values),
        }
    }
}

/// The rows of one matrix in chunks of about [`CHUNK_ELEMENTS`], each starting on a multiple of `step`.
fn chunks(tensor: &CanonicalTensor, step: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let (_, rows, cols) = tensor.matrices();
    row_chunks(rows, cols, step)
}

fn row_chunks(rows: usize, cols: usize, step: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let height = (CHUNK_ELEMENTS / cols.max(1) / step * step).max(step);
    (0..rows).step_by(height).map(move |start| start..rows.min(start + height))
}

/// Rounding may lose precision, but a finite weight must not become infinite.
pub(in crate::convert) fn refuse_overflow(values: &[f32], to: DType) -> Result<()> {
    let limit = match to {
        // 65504 is the largest half; from 65520 on, rounding gives infinity.
        DType::F16 => 65_520.0,
        // Above the largest bfloat16 by half a step.
        DType::BF16 => f32::from_bits(0x7f7f_8000),
        _ => return Ok(()),
    };
    match values.iter().find(|x| x.is_finite() && x.abs() >= limit) {
        Some(x) => Err(Error::unsupported(format!("weight {x} does not fit {to}")).help("choose another --dtype")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::encode_floats;

    #[test]
    fn chunks_cover_all_rows_once_and_start_on_the_step() {
        for (rows, cols, step) in [(1, 1, 1), (17, 3, 16), (100_000, 4096, 16), (5, 1 << 22, 16), (40, 1 << 22, 16)] {
            let mut end = 0;
            for range in row_chunks(rows, cols, step) {
                assert_eq!((range.start, range.start % step), (end, 0));
                end = range.end;
            }
            assert_eq!(end, rows);
        }
    }

    #[test]
    fn exactly_the_weights_that_would_become_infinite_are_refused() {
        for (value, to) in [
            (65_519.996, DType::F16),
            (65_520.0, DType::F16),
            (f32::from_bits(0x7f7f_7fff), DType::BF16),
            (f32::from_bits(0x7f7f_8000), DType::BF16),
            (f32::MAX, DType::F32),
        ] {
            let mut bytes = Vec::new();
            encode_floats(to, &[-value], &mut bytes).unwrap();
            let mut back = [0.0];
            decode_floats(to, &bytes, &mut back).unwrap();
            assert_eq!(refuse_overflow(&[-value], to).is_err(), back[0].is_infinite(), "{value} as {to}");
        }
        assert!(refuse_overflow(&[f32::INFINITY], DType::F16).is_ok());
    }
}
