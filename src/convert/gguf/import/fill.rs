//! Gathers the rows of a canonical tensor from the tensors of the file, chunk by chunk.

use super::super::blocks;
use super::super::names::{MappedTensor, RowStack};
use super::super::reader::GgufTensor;
use super::plan::{GgufModel, ImportedTensor};
use crate::convert::executor::{OnlyBytes, TaskOutput};
use crate::convert::rounding::round_into;
use crate::error::{Context, Error, Result};
use crate::iebin::Store;
use crate::quant::block::CodedRow;
use crate::quant::block::tile::{pad_tile, put_row};
use crate::scheme::{TILE_ROWS, TileLayout};
use std::ops::Range;

/// Elements gathered at once by a thread.
const CHUNK_ELEMENTS: usize = 1 << 20;

/// Buffers between the file and the pack.
#[derive(Default)]
struct Buffers {
    spans: Vec<Vec<u8>>,
    values: Vec<f32>,
    encoded: Vec<u8>,
}

/// Writes the payload of `item`.
pub(super) fn fill(model: &GgufModel, item: &ImportedTensor, out: &mut TaskOutput<'_>) -> Result<OnlyBytes> {
    let mut buffers = Buffers::default();
    let RowStack { count, rows, cols } = item.rows;
    let height = (CHUNK_ELEMENTS / cols / TILE_ROWS * TILE_ROWS).max(TILE_ROWS);
    let mut fill = || -> Result<()> {
        for matrix in 0..count {
            for start in (0..rows).step_by(height) {
                let places = buffers.read(model, item, matrix, start..rows.min(start + height))?;
                buffers.encode(item, &places)?;
                out.append(0, &buffers.encoded)?;
            }
        }
        Ok(())
    };
    fill().tensor(&item.planned.name)?;
    Ok(OnlyBytes {})
}

/// Where one canonical row lies: number of the span, and range of its bytes.
type Place = (usize, Range<usize>);

impl Buffers {
    /// Reads all rows that make up a range of canonical rows, each source in one piece.
    fn read(
        &mut self,
        model: &GgufModel,
        item: &ImportedTensor,
        matrix: usize,
        range: Range<usize>,
    ) -> Result<Vec<Place>> {
        self.spans.resize_with(item.sources.len(), Vec::new);
        let mut found: Vec<(usize, usize)> = vec![(0, 0); range.len()];
        let mut firsts = Vec::new();
        for (s, (number, part)) in item.sources.iter().enumerate() {
            let (mut first, mut last) = (usize::MAX, 0);
            for row in range.clone() {
                if let Some(there) = model.mapped[*number].order.gguf_row(*part, row) {
                    (first, last) = (first.min(there), last.max(there));
                    found[row - range.start] = (s, there);
                }
            }
            firsts.push(first);
            if first <= last {
                let tensor = model.tensors[*number];
                let (rows, bytes) = row_layout(tensor, &model.mapped[*number], item)?;
                self.spans[s].resize((last + 1 - first) * bytes, 0);
                model.gguf.read(tensor, ((matrix * rows + first) * bytes) as u64, &mut self.spans[s])?;
            }
        }
        let place = |(s, there): (usize, usize)| {
            let number = item.sources[s].0;
            let (_, bytes) = row_layout(model.tensors[number], &model.mapped[number], item)?;
            let at = (there - firsts[s]) * bytes;
            Ok((s, at..at + bytes))
        };
        found.into_iter().map(place).collect()
    }

    fn encode(&mut self, item: &ImportedTensor, places: &[Place]) -> Result<()> {
        self.encoded.clear();
        match item.planned.store {
            Store::Tiled(spec) => {
                let layout = TileLayout::new(spec, item.rows.rows, item.rows.cols)?;
                self.encoded.resize(places.len().div_ceil(TILE_ROWS) * layout.tile_bytes, 0);
                let mut coded = CodedRow::new(&layout);
                for (tile, places) in self.encoded.chunks_exact_mut(layout.tile_bytes).zip(places.chunks(TILE_ROWS)) {
                    for (row, (s, bytes)) in places.iter().enumerate() {
                        blocks::to_row(item.kinds[*s], &self.spans[*s][bytes.clone()], &mut coded)?;
                        put_row(&layout, tile, row, &coded);
                    }
                    pad_tile(&layout, tile, places.len());
                }
                Ok(())
            }
            Store::Plain(dtype) => {
                let same = |s: usize| blocks::plain(item.kinds[s]) == Some(dtype) && !item.plus_one;
                self.values.resize(item.rows.cols, 0.0);
                for (s, bytes) in places {
                    let raw = &self.spans[*s][bytes.clone()];
                    if same(*s) {
                        self.encoded.extend_from_slice(raw);
                        continue;
                    }
                    blocks::dequantize(item.kinds[*s], raw, &mut self.values)?;
                    if item.plus_one {
                        // Exact from 0.5 on, where every norm of a trained model lies.
                        self.values.iter_mut().for_each(|x| *x -= 1.0);
                    }
                    round_into(dtype, &self.values, &mut self.encoded)?;
                }
                Ok(())
            }
        }
    }
}

/// Rows of one matrix of a source and bytes of a row.
fn row_layout(tensor: &GgufTensor, mapped: &MappedTensor, item: &ImportedTensor) -> Result<(usize, usize)> {
    let rows = RowStack::new(&mapped.shape, item.vector).rows;
    let bytes = tensor.kind.row_bytes(item.rows.cols).ok_or_else(|| {
        Error::unsupported(format!("{} where the model needs floats", tensor.kind)).tensor(&mapped.name)
    })?;
    Ok((rows, bytes))
}
