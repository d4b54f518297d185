//! Converts tensors of the checkpoint to payloads of the pack, in steps that limit the memory of a thread.

use super::plan::{Encoding, PackItem};
use crate::calibration::Calibration;
use crate::convert::executor::TaskOutput;
use crate::convert::guidance;
use crate::convert::rounding::round_into;
use crate::convert::{CanonicalTensor, Checkpoint};
use crate::error::{Context, Result};
use crate::manifest::Metrics;
use crate::quant::stream::{self, Stack};
use crate::quant_spec::TensorQuant;
use crate::scheme::{TILE_ROWS, TileLayout};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Bytes written at once: enough for large folios of the page cache, and few enough to stay in the second-level cache
/// until they are hashed.
const STEP_BYTES: usize = 1 << 19;
/// Elements that are decoded at once; as f32 they leave space in that cache.
const PIECE_ELEMENTS: usize = 1 << 17;
/// Elements that are decoded at once if the source holds their columns together. Each line of the source is then read
/// in pieces of at least 100 bytes for matrices of 30,000 columns.
const MANY_ELEMENTS: usize = 1 << 21;

/// Result of a written payload.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Filled {
    /// Error of weights that are quantized here and were quantized in the source, relative to their decoded values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requantized: Option<Metrics>,
}

/// Writes the payload of `item`.
///
/// # Errors
/// The tensor cannot be read or stored as planned, or the pack cannot be written.
pub(super) fn fill(
    checkpoint: &Checkpoint,
    calibration: Option<&Calibration>,
    item: &PackItem<'_>,
    out: &mut TaskOutput<'_>,
) -> Result<Filled> {
    let tensor = item.tensor;
    let mut requantized = None;
    let (mut bytes, mut values) = (Vec::new(), Vec::new());
    let (count, rows, cols) = tensor.matrices();
    let row_bytes = out.length(0) as usize / (count * rows).max(1);
    let steps = |per_row: usize, limit: usize, step: usize| {
        let height = height(limit, per_row, step);
        (0..count).flat_map(move |matrix| chunks(rows, height).map(move |rows| (matrix, rows)))
    };
    let piece = if tensor.prefers_many_rows() { MANY_ELEMENTS } else { PIECE_ELEMENTS };
    let copied = if tensor.prefers_many_rows() { MANY_ELEMENTS * 4 } else { STEP_BYTES };
    let mut fill = || -> Result<()> {
        match &item.work {
            Encoding::Copy => {
                for (matrix, rows) in steps(row_bytes, copied, 1) {
                    checkpoint.read_rows(tensor, matrix, rows, &mut bytes)?;
                    out.append(0, &bytes)?;
                }
            }
            Encoding::Convert(to) => {
                for (matrix, rows) in steps(cols, piece, 1) {
                    values.resize(rows.len() * cols, 0.0);
                    checkpoint.read_rows_f32(tensor, matrix, rows, &mut values)?;
                    bytes.clear();
                    round_into(*to, &values, &mut bytes)?;
                    out.append(0, &bytes)?;
                }
            }
            Encoding::Codes(native) => {
                for (matrix, rows) in steps(cols, piece, TILE_ROWS) {
                    checkpoint.read_tiles(tensor, native, matrix, rows, &mut bytes)?;
                    out.append(0, &bytes)?;
                }
            }
            Encoding::Packed(spec, range) => {
                let layout = TileLayout::new(*spec, rows, cols)?;
                for (matrix, rows) in steps(row_bytes, STEP_BYTES, TILE_ROWS) {
                    bytes.resize(rows.len().div_ceil(TILE_ROWS) * layout.tile_bytes, 0);
                    range.read_tiles(&layout, matrix, rows, &mut bytes)?;
                    out.append(0, &bytes)?;
                }
            }
            Encoding::Quantize(quant) => requantized = quantize(checkpoint, calibration, tensor, *quant, out)?,
        }
        Ok(())
    };
    let source = checkpoint.files()[tensor.position().0].path();
    fill().tensor(&tensor.name).at(source)?;
    Ok(Filled { requantized })
}

/// Quantizes a tensor; measures the error if the tensor is quantized in the source.
fn quantize(
    checkpoint: &Checkpoint,
    calibration: Option<&Calibration>,
    tensor: &CanonicalTensor,
    quant: TensorQuant,
    out: &mut TaskOutput<'_>,
) -> Result<Option<Metrics>> {
    let (count, rows, cols) = tensor.matrices();
    let inputs = guidance::inputs(calibration, &tensor.name, (count, cols), quant.method)?;
    let read = |matrix: usize, range: Range<usize>, out: &mut [f32]| {
        let first = range.start;
        checkpoint.read_rows_f32(tensor, matrix, range, out)?;
        calibration.map_or(Ok(()), |calibration| calibration.correct(&tensor.name, [rows, cols], first, out))
    };
    let piece = if tensor.prefers_many_rows() { MANY_ELEMENTS } else { PIECE_ELEMENTS };
    let chunk_rows = Some(piece / cols);
    let stack = Stack { count, rows, cols, read: &read, chunk_rows, inputs: inputs.as_ref() };
    let mut put = |tiles: &[u8]| out.append(0, tiles);
    match tensor.is_coded() {
        true => stream::encode_measured(quant, &stack, &mut put).map(Some),
        false => stream::encode(quant, &stack, &mut put).map(|()| None),
    }
}

/// Returns the number of rows that have about `limit` elements, a multiple of `step`.
fn height(limit: usize, per_row: usize, step: usize) -> usize {
    (limit / per_row.max(1) / step * step).max(step)
}

fn chunks(rows: usize, height: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(height).map(move |start| start..rows.min(start + height))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_all_rows_once_and_start_on_the_step() {
        for (rows, cols, step) in [(1, 1, 1), (17, 3, 16), (100_000, 4096, 16), (5, 1 << 22, 16), (40, 1 << 22, 16)] {
            let mut end = 0;
            for range in chunks(rows, height(PIECE_ELEMENTS, cols, step)) {
                assert_eq!((range.start, range.start % step), (end, 0));
                end = range.end;
            }
            assert_eq!(end, rows);
        }
    }
}
