//! Quantizes a whole tensor in chunks: bounded memory, all cores, results in row order whatever their number.

use super::Quantizer;
use super::block::{self, CodedRow, tile};
use super::input_stats::TensorInputStats;
use super::metrics::RowMetrics;
use crate::error::Result;
use crate::interrupt;
use crate::manifest::Metrics;
use crate::quant_spec::TensorQuant;
use crate::scheme::{Granularity, TILE_ROWS};
use rayon::prelude::*;
use std::ops::Range;

/// Elements of a chunk when the caller has no wish: 1 MiB as f32, small enough to keep all cores busy on any matrix.
const CHUNK_ELEMENTS: usize = 1 << 18;

/// Reads some rows of one matrix as f32 into a slice of the exact length.
pub type ReadRows<'a> = dyn Fn(usize, Range<usize>, &mut [f32]) -> Result<()> + Sync + 'a;

/// A tensor as a stack of matrices, and how its rows are read.
pub struct Stack<'a> {
    /// Number of matrices.
    pub count: usize,
    /// Rows of each.
    pub rows: usize,
    /// Columns of each.
    pub cols: usize,
    /// Where the weights come from.
    pub read: &'a ReadRows<'a>,
    /// Rows read at once, for callers who know better.
    pub chunk_rows: Option<usize>,
    /// What is known of the inputs.
    pub inputs: Option<&'a TensorInputStats<'a>>,
}

/// Some rows in canonical form.
#[derive(Debug, Default)]
pub struct CanonicalChunk {
    /// Codes, `[row]`.
    pub codes: Vec<u8>,
    /// Scales, `[row][group]`; a matrix-wide scale comes with the first rows of its matrix.
    pub scales: Vec<u8>,
    /// Zero points in the order of the scales; affine only.
    pub zeros: Vec<u8>,
}

/// What is known when all rows have passed.
#[derive(Debug, Clone, Copy)]
pub struct Outcome {
    /// How far the result is from the original.
    pub metrics: Metrics,
    /// Largest magnitude of a scale.
    pub largest_scale: f32,
}

/// Quantizes all matrices of a tensor and hands the canonical bytes to `sink` in order.
///
/// # Errors
/// Reading fails, a weight is NaN or infinite, a scale does not fit its type, the sink fails, or the user interrupts.
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
    // A window of chunks is in memory at once; its size bounds memory and does not show in the result.
    let window = rayon::current_num_threads() * (8 * CHUNK_ELEMENTS / (stack.height() * stack.cols)).clamp(1, 8);
    for window in chunks.chunks(window) {
        let results: Vec<Result<Part>> = window
            .par_iter()
            .map(|(matrix, rows)| Part::quantize(&quantizers[matrix % quantizers.len()], stack, *matrix, rows.clone()))
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

/// Quantizes the first rows of the first matrix and forgets the result.
///
/// # Errors
/// As [`quantize`].
pub fn try_rows(quant: TensorQuant, stack: &Stack<'_>) -> Result<()> {
    let quantizer = Quantizer::new(quant, stack.rows, stack.cols)?;
    let mut values = Vec::new();
    stack.read_rows(0, &(0..stack.rows.min(TILE_ROWS)), &mut values)?;
    quantizer.encode_tiles(&values, &mut vec![0; quantizer.layout().tile_bytes])
}

/// Quantizes all matrices of a tensor on the calling thread and hands the bytes of its tiles to `sink` in order.
/// `stack.chunk_rows` shows in the length of the pieces only.
///
/// # Errors
/// As [`quantize`].
pub fn encode(quant: TensorQuant, stack: &Stack<'_>, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let (mut values, mut tiles) = (Vec::new(), Vec::new());
    let height = stack.height().next_multiple_of(TILE_ROWS);
    for matrix in 0..stack.count {
        let quantizer = quantizer(quant, stack, matrix)?;
        for start in (0..stack.rows).step_by(height) {
            let rows = start..stack.rows.min(start + height);
            stack.read_rows(matrix, &rows, &mut values)?;
            tiles.resize(rows.len().div_ceil(TILE_ROWS) * quantizer.layout().tile_bytes, 0);
            quantizer.encode_tiles(&values, &mut tiles)?;
            sink(&tiles)?;
        }
    }
    Ok(())
}

/// One quantizer for all matrices, or one per matrix when each has a scale of its own to find first or inputs of its
/// own.
pub(super) fn quantizers(quant: TensorQuant, stack: &Stack<'_>) -> Result<Vec<Quantizer>> {
    let first = Quantizer::new(quant, stack.rows, stack.cols)?;
    let with_inputs = stack.inputs.is_some() && quant.method.needs_inputs();
    if !with_inputs && !first.needs_observation() {
        return Ok(vec![first]);
    }
    (0..stack.count).into_par_iter().map(|matrix| quantizer(quant, stack, matrix)).collect()
}

/// The quantizer of one matrix, which has seen all of it where its scale spans the matrix.
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
    /// Rows of a chunk.
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

/// One chunk, quantized and compared.
struct Part {
    bytes: CanonicalChunk,
    metrics: Vec<RowMetrics>,
    largest_scale: f32,
}

impl Part {
    fn quantize(quantizer: &Quantizer, stack: &Stack<'_>, matrix: usize, rows: Range<usize>) -> Result<Part> {
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
        Ok(Part { bytes, metrics, largest_scale })
    }
}
