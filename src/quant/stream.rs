//! Quantizes a whole tensor in chunks with bounded memory on all cores. The results are in row order for any number
//! of threads.

use super::Quantizer;
use super::block::{self, CodedRow, tile};
use super::input_stats::TensorInputStats;
use super::metrics::RowMetrics;
use crate::error::Result;
use crate::interrupt;
use crate::manifest::Metrics;
use crate::quant_spec::TensorQuant;
use crate::scheme::{Granularity, TILE_ROWS, TileLayout};
use rayon::prelude::*;
use std::ops::Range;

/// Default number of elements of a chunk: 1 MiB as f32, small enough to keep all cores busy on any matrix.
const CHUNK_ELEMENTS: usize = 1 << 18;

/// Function `read(matrix, rows, out)` that reads some rows of one matrix as f32 into `out`, which has exactly their
/// length.
pub type ReadRows<'a> = dyn Fn(usize, Range<usize>, &mut [f32]) -> Result<()> + Sync + 'a;

/// Tensor as a stack of matrices, with a function that reads its rows.
pub struct Stack<'a> {
    /// Number of matrices.
    pub count: usize,
    /// Rows of each matrix.
    pub rows: usize,
    /// Columns of each matrix.
    pub cols: usize,
    /// Function that reads the weights.
    pub read: &'a ReadRows<'a>,
    /// Number of rows read at once; `None` for the default.
    pub chunk_rows: Option<usize>,
    /// Statistics of the inputs, if there are any.
    pub inputs: Option<&'a TensorInputStats<'a>>,
}

/// Canonical bytes of consecutive rows of a matrix, see [`block`].
#[derive(Debug, Default)]
pub struct CanonicalChunk {
    /// Packed codes, one row after the other.
    pub codes: Vec<u8>,
    /// Scales, `[row][group]`; a matrix-wide scale is part of the first chunk of its matrix.
    pub scales: Vec<u8>,
    /// Zero points in the order of the scales; affine schemes only.
    pub zeros: Vec<u8>,
}

/// Result of the quantization of a tensor.
#[derive(Debug, Clone, Copy)]
pub struct Outcome {
    /// Error of the quantized tensor.
    pub metrics: Metrics,
    /// Largest magnitude of a scale.
    pub largest_scale: f32,
}

/// Quantizes all matrices of a tensor and passes the canonical bytes to `sink` in order.
///
/// # Errors
/// Reading fails, a weight is NaN or infinite, a scale does not fit its type, `sink` fails, or the user interrupts.
pub fn quantize(
    quant: TensorQuant,
    stack: &Stack<'_>,
    sink: &mut dyn FnMut(CanonicalChunk) -> Result<()>,
) -> Result<Outcome> {
    let quantizers = quantizers(quant, stack)?;
    let chunks: Vec<(usize, Range<usize>)> =
        (0..stack.count).flat_map(|matrix| stack.chunks().map(move |rows| (matrix, rows))).collect();
    let mut metrics = Vec::with_capacity(stack.count * stack.rows);
    let mut largest_scale = 0f32;
    // This many chunks are in memory at once. The number bounds the memory and does not affect the result.
    let window = rayon::current_num_threads() * (8 * CHUNK_ELEMENTS / (stack.height() * stack.cols)).clamp(1, 8);
    for window in chunks.chunks(window) {
        let results: Vec<Result<QuantizedChunk>> = window
            .par_iter()
            .map(|(matrix, rows)| {
                QuantizedChunk::quantize(&quantizers[matrix % quantizers.len()], stack, *matrix, rows.clone())
            })
            .collect();
        for part in results {
            let part = part?;
            metrics.extend_from_slice(&part.metrics);
            largest_scale = largest_scale.max(part.largest_scale);
            sink(part.bytes)?;
        }
    }
    Ok(Outcome { metrics: RowMetrics::summarize(&metrics), largest_scale })
}

/// Quantizes the first rows of the first matrix and discards the result, to detect errors early.
///
/// # Errors
/// The same as for [`quantize`].
pub fn try_rows(quant: TensorQuant, stack: &Stack<'_>) -> Result<()> {
    let quantizer = Quantizer::new(quant, stack.rows, stack.cols)?;
    let mut values = Vec::new();
    stack.read_rows(0, &(0..stack.rows.min(TILE_ROWS)), &mut values)?;
    quantizer.encode_tiles(&values, &mut vec![0; quantizer.layout().tile_bytes])
}

/// Quantizes all matrices of a tensor on the calling thread and passes the bytes of its tiles to `sink` in order.
/// `stack.chunk_rows` affects only the length of the pieces.
///
/// # Errors
/// The same as for [`quantize`].
pub fn encode(quant: TensorQuant, stack: &Stack<'_>, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
    encode_pieces(quant, stack, &mut |_, _, tiles| sink(tiles))
}

/// Quantizes matrix number `matrix` on all cores and returns the values that its codes stand for, `(rows, cols)`. They
/// are those of [`encode`].
///
/// # Errors
/// The same as for [`quantize`].
pub fn round_trip(quant: TensorQuant, stack: &Stack<'_>, matrix: usize) -> Result<Vec<f32>> {
    let quantizer = quantizer(quant, stack, matrix)?;
    let mut decoded = vec![0f32; stack.rows * stack.cols];
    decoded.par_chunks_mut(TILE_ROWS * stack.cols).enumerate().try_for_each(|(i, decoded)| -> Result<()> {
        let rows = i * TILE_ROWS..stack.rows.min((i + 1) * TILE_ROWS);
        let mut values = Vec::new();
        stack.read_rows(matrix, &rows, &mut values)?;
        decoded.copy_from_slice(&quantizer.round_trip(&values)?);
        Ok(())
    })?;
    Ok(decoded)
}

/// Quantizes like [`encode`] and returns the error of the quantized tensor.
///
/// # Errors
/// The same as for [`quantize`].
pub fn encode_measured(
    quant: TensorQuant,
    stack: &Stack<'_>,
    sink: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<Metrics> {
    let mut metrics = Vec::with_capacity(stack.count * stack.rows);
    let mut decoded = vec![0f32; stack.cols];
    encode_pieces(quant, stack, &mut |layout, values, tiles| {
        let mut coded = CodedRow::new(layout);
        for (i, row) in values.chunks_exact(stack.cols).enumerate() {
            tile::get_row(layout, &tiles[i / TILE_ROWS * layout.tile_bytes..], i % TILE_ROWS, &mut coded);
            coded.dequantize(layout, &mut decoded);
            metrics.push(RowMetrics::of(row, &decoded));
        }
        sink(tiles)
    })?;
    Ok(RowMetrics::summarize(&metrics))
}

/// Receives the layout of a matrix, and the weights and tiles of some of its rows.
type Piece<'a> = dyn FnMut(&TileLayout, &[f32], &[u8]) -> Result<()> + 'a;

/// Quantizes all matrices of a tensor on the calling thread, piece by piece.
fn encode_pieces(quant: TensorQuant, stack: &Stack<'_>, put: &mut Piece<'_>) -> Result<()> {
    let (mut values, mut tiles) = (Vec::new(), Vec::new());
    let height = stack.height().next_multiple_of(TILE_ROWS);
    for matrix in 0..stack.count {
        let quantizer = quantizer(quant, stack, matrix)?;
        for start in (0..stack.rows).step_by(height) {
            let rows = start..stack.rows.min(start + height);
            stack.read_rows(matrix, &rows, &mut values)?;
            tiles.resize(rows.len().div_ceil(TILE_ROWS) * quantizer.layout().tile_bytes, 0);
            quantizer.encode_tiles(&values, &mut tiles)?;
            put(quantizer.layout(), &values, &tiles)?;
        }
    }
    Ok(())
}

/// Returns one quantizer for all matrices, or one per matrix if each matrix has its own matrix-wide scale or its own
/// input statistics.
pub(super) fn quantizers(quant: TensorQuant, stack: &Stack<'_>) -> Result<Vec<Quantizer>> {
    let first = Quantizer::new(quant, stack.rows, stack.cols)?;
    let with_inputs = stack.inputs.is_some() && quant.method.needs_inputs();
    if !with_inputs && !first.needs_observation() {
        return Ok(vec![first]);
    }
    (0..stack.count).into_par_iter().map(|matrix| quantizer(quant, stack, matrix)).collect()
}

/// Returns the quantizer of one matrix, after it has observed all rows if the scale spans the matrix.
fn quantizer(quant: TensorQuant, stack: &Stack<'_>, matrix: usize) -> Result<Quantizer> {
    let inputs = stack.inputs.filter(|_| quant.method.needs_inputs());
    let inputs = inputs.map(|inputs| inputs.of(matrix)).transpose()?;
    let mut quantizer = Quantizer::new(quant, stack.rows, stack.cols)?.with_inputs(inputs);
    if quantizer.needs_observation() {
        let mut values = Vec::new();
        for rows in stack.chunks() {
            stack.read_rows(matrix, &rows, &mut values)?;
            quantizer.observe(&values)?;
        }
    }
    Ok(quantizer)
}

impl Stack<'_> {
    /// Returns the number of rows of a chunk.
    fn height(&self) -> usize {
        self.chunk_rows.unwrap_or(CHUNK_ELEMENTS / self.cols).clamp(1, self.rows)
    }

    fn chunks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (rows, height) = (self.rows, self.height());
        (0..rows).step_by(height).map(move |start| start..rows.min(start + height))
    }

    fn read_rows(&self, matrix: usize, rows: &Range<usize>, values: &mut Vec<f32>) -> Result<()> {
        interrupt::check()?;
        values.resize(rows.len() * self.cols, 0.0);
        (self.read)(matrix, rows.clone(), values)
    }
}

/// One quantized chunk with its metrics.
struct QuantizedChunk {
    bytes: CanonicalChunk,
    metrics: Vec<RowMetrics>,
    largest_scale: f32,
}

impl QuantizedChunk {
    fn quantize(quantizer: &Quantizer, stack: &Stack<'_>, matrix: usize, rows: Range<usize>) -> Result<QuantizedChunk> {
        let layout = quantizer.layout();
        let mut values = Vec::new();
        stack.read_rows(matrix, &rows, &mut values)?;
        let mut tiles = vec![0; rows.len().div_ceil(TILE_ROWS) * layout.tile_bytes];
        quantizer.encode_tiles(&values, &mut tiles)?;
        let per_row = layout.canonical_sizes(1).0;
        let mut bytes = CanonicalChunk { codes: vec![0; rows.len() * per_row], ..CanonicalChunk::default() };
        let mut metrics = Vec::with_capacity(rows.len());
        let mut largest_scale = 0f32;
        let mut coded = CodedRow::new(layout);
        let mut decoded = vec![0f32; stack.cols];
        for (i, row) in rows.enumerate() {
            tile::get_row(layout, &tiles[i / TILE_ROWS * layout.tile_bytes..], i % TILE_ROWS, &mut coded);
            coded.dequantize(layout, &mut decoded);
            metrics.push(RowMetrics::of(&values[i * stack.cols..][..stack.cols], &decoded));
            largest_scale = largest_scale.max(coded.largest_scale(layout));
            block::pack_codes(layout, &coded, &mut bytes.codes[i * per_row..][..per_row]);
            if row == 0 || layout.spec.granularity != Granularity::Tensor {
                bytes.scales.extend_from_slice(&coded.scales);
                bytes.zeros.extend_from_slice(&coded.zeros);
            }
        }
        Ok(QuantizedChunk { bytes, metrics, largest_scale })
    }
}
