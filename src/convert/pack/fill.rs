//! Moves tensors from the checkpoint into the pack, step by step, hashing what it writes: two at once, as their hashes do not
//! wait for each other ([`crate::sha256`]).

use super::plan::{Item, Work};
use super::work::Packing;
use crate::calibration::Calibration;
use crate::convert::payload::Payload;
use crate::convert::{Checkpoint, Kind};
use crate::dtype::{DType, decode_floats, encode_floats};
use crate::error::{Context, Error, Result};
use crate::interrupt;
use crate::progress::ProgressBar;
use crate::quant::{Quantizer, TensorInputStats};
use crate::quant_spec::TensorQuant;
use crate::scheme::{TILE_ROWS, TileLayout};
use std::ops::Range;

/// Bytes written at once: enough for the page cache to hold them in large pieces, and few enough for two tensors' to stay in
/// the second-level cache until they are hashed.
const STEP_BYTES: usize = 1 << 19;
/// Elements decoded at once; as f32 they leave room in that cache.
const PIECE_ELEMENTS: usize = 1 << 17;

/// What lies between the checkpoint and the bytes of the pack; one thread's.
#[derive(Default)]
pub(super) struct Scratch {
    stored: Vec<u8>,
    values: Vec<f32>,
}

/// A tensor on its way into the pack.
pub(super) struct Filling<'a> {
    checkpoint: &'a Checkpoint,
    item: &'a Item<'a>,
    payload: Payload<'a>,
    calibration: Option<&'a Calibration>,
    /// What is known of the inputs, once it was asked for.
    inputs: Option<TensorInputStats<'a>>,
    /// What is still to be done: matrices and rows.
    steps: Box<dyn Iterator<Item = (usize, Range<usize>)> + 'a>,
    /// Of the present matrix.
    quantizer: Option<Quantizer>,
    /// What the last step wrote.
    bytes: Vec<u8>,
}

impl<'a> Filling<'a> {
    /// Nothing of `item`, tensor number `index`, is written yet.
    pub fn new(packing: &Packing<'a>, bar: &'a ProgressBar, index: usize) -> Filling<'a> {
        let Packing { checkpoint, items, writer, calibration, .. } = *packing;
        let item = &items[index];
        let (count, rows, _) = item.tensor.matrices();
        let per_row = writer.entries()[index].nbytes / (count * rows).max(1);
        let tiled = matches!(item.work, Work::Mxfp4 | Work::Quantize(_) | Work::Packed(..));
        let height = height(STEP_BYTES, per_row, if tiled { TILE_ROWS } else { 1 });
        let steps = (0..count).flat_map(move |matrix| chunks(0..rows, height).map(move |rows| (matrix, rows)));
        let payload = Payload::new(writer, bar, index);
        let steps = Box::new(steps);
        Filling { checkpoint, item, payload, calibration, inputs: None, steps, quantizer: None, bytes: Vec::new() }
    }

    /// Makes and writes the next bytes, which are to be hashed then; false when there are none.
    ///
    /// # Errors
    /// The tensor cannot be read or stored as planned, or the pack cannot be written.
    pub fn step(&mut self, scratch: &mut Scratch) -> Result<bool> {
        let Some((matrix, rows)) = self.steps.next() else { return Ok(false) };
        let tensor = self.item.tensor;
        let source = self.checkpoint.shards().files()[tensor.position().0].path();
        self.make(matrix, rows, scratch)
            .and_then(|()| self.payload.write(&self.bytes))
            .tensor(&tensor.name)
            .at(source)?;
        Ok(true)
    }

    /// The bytes of some rows.
    fn make(&mut self, matrix: usize, rows: Range<usize>, scratch: &mut Scratch) -> Result<()> {
        let (tensor, bytes) = (self.item.tensor, &mut self.bytes);
        match &self.item.work {
            Work::Copy => self.checkpoint.read_rows(tensor, matrix, rows, bytes)?,
            Work::Mxfp4 => self.checkpoint.read_mxfp4_tiles(tensor, matrix, rows, bytes).map(|_| ())?,
            Work::Packed(spec, range) => {
                let (_, n_rows, cols) = tensor.matrices();
                let layout = TileLayout::new(*spec, n_rows, cols)?;
                bytes.resize(rows.len().div_ceil(TILE_ROWS) * layout.tile_bytes, 0);
                range.read_tiles(&layout, matrix, rows, bytes)?;
            }
            Work::Convert(to) => self.convert(matrix, rows, *to, scratch)?,
            Work::Quantize(quant) => self.quantize(matrix, rows, *quant, scratch)?,
        }
        Ok(())
    }

    /// Hashes what the last steps wrote, two tensors at once.
    pub fn hash(fillings: &mut [Filling<'_>]) {
        let (pairs, rest) = fillings.as_chunks_mut::<2>();
        for [one, other] in pairs {
            one.payload.hash_both(&one.bytes, &mut other.payload, &other.bytes);
        }
        rest.iter_mut().for_each(|one| one.payload.hash(&one.bytes));
    }

    /// The SHA-256 of the whole tensor.
    pub fn finish(self) -> String {
        self.payload.finish()
    }

    fn convert(&mut self, matrix: usize, rows: Range<usize>, to: DType, scratch: &mut Scratch) -> Result<()> {
        self.bytes.clear();
        for rows in self.pieces(rows, 1) {
            self.read_values(matrix, rows, scratch)?;
            refuse_overflow(&scratch.values, to)?;
            encode_floats(to, &scratch.values, &mut self.bytes)?;
        }
        Ok(())
    }

    fn quantize(&mut self, matrix: usize, rows: Range<usize>, quant: TensorQuant, scratch: &mut Scratch) -> Result<()> {
        let quantizer = match self.quantizer.take() {
            Some(quantizer) if rows.start > 0 => quantizer,
            _ => self.quantizer(matrix, quant, scratch)?,
        };
        let tile_bytes = quantizer.layout().tile_bytes;
        let mut at = 0;
        self.bytes.resize(rows.len().div_ceil(TILE_ROWS) * tile_bytes, 0);
        for rows in self.pieces(rows, TILE_ROWS) {
            let end = at + rows.len().div_ceil(TILE_ROWS) * tile_bytes;
            self.read_values(matrix, rows, scratch)?;
            quantizer.encode_tiles(&scratch.values, &mut self.bytes[at..end])?;
            at = end;
        }
        self.quantizer = Some(quantizer);
        Ok(())
    }

    /// The quantizer of a matrix, which has seen all of it if it must.
    fn quantizer(&mut self, matrix: usize, quant: TensorQuant, scratch: &mut Scratch) -> Result<Quantizer> {
        let (count, rows, cols) = self.item.tensor.matrices();
        let mut quantizer = Quantizer::new(quant, rows, cols)?;
        if quant.method.needs_inputs()
            && let Some(calibration) = self.calibration
        {
            if self.inputs.is_none() {
                self.inputs =
                    TensorInputStats::new(calibration, &self.item.tensor.name, (count, cols), None, quant.method)?;
            }
            quantizer = quantizer.with_inputs(self.inputs.as_ref().map(|inputs| inputs.of(matrix)).transpose()?);
        }
        if quantizer.needs_observation() {
            for rows in self.pieces(0..rows, TILE_ROWS) {
                interrupt::check()?;
                self.read_values(matrix, rows, scratch)?;
                quantizer.observe(&scratch.values)?;
            }
        }
        Ok(quantizer)
    }

    /// Rows in pieces that are decoded at once.
    fn pieces(&self, rows: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (_, _, cols) = self.item.tensor.matrices();
        chunks(rows, height(PIECE_ELEMENTS, cols, step))
    }

    /// Rows as f32 in `scratch.values`.
    fn read_values(&self, matrix: usize, rows: Range<usize>, scratch: &mut Scratch) -> Result<()> {
        let tensor = self.item.tensor;
        let (_, _, cols) = tensor.matrices();
        let Scratch { stored, values } = scratch;
        values.resize(rows.len() * cols, 0.0);
        match tensor.kind {
            Kind::Float(dtype) => {
                self.checkpoint.read_rows(tensor, matrix, rows, stored)?;
                decode_floats(dtype, stored, values)
            }
            Kind::Mxfp4 | Kind::Packed(_) => self.checkpoint.read_rows_f32(tensor, matrix, rows, values),
        }
    }
}

/// How many rows reach about `limit`, in steps of `step`.
fn height(limit: usize, per_row: usize, step: usize) -> usize {
    (limit / per_row.max(1) / step * step).max(step)
}

fn chunks(rows: Range<usize>, height: usize) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(height).map(move |start| start..end.min(start + height))
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
            for range in chunks(0..rows, height(PIECE_ELEMENTS, cols, step)) {
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
