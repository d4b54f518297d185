//! Moves the rows of a tensor from the pack to the file, chunk by chunk.

use super::super::blocks;
use super::super::names::{RowOrder, RowStack, is_vector};
use super::super::types::GgmlType;
use super::plan::{ExportSource, ExportedTensor, RowOrigin};
use crate::convert::executor::{OnlyBytes, TaskOutput};
use crate::convert::rounding::round_into;
use crate::dtype::{DType, decode_floats, encode_floats};
use crate::error::{Context, Result};
use crate::iebin::{Entry, Store};
use crate::quant::block::CodedRow;
use crate::quant::block::tile::get_row;
use crate::scheme::{BLOCK, TILE_ROWS, TileLayout};
use std::ops::Range;

/// Elements moved at once by a thread.
const CHUNK_ELEMENTS: usize = 1 << 20;

impl ExportSource<'_> {
    /// Writes one tensor.
    pub(super) fn fill(
        &self,
        planned: &ExportedTensor,
        buffers: &mut Buffers,
        out: &mut TaskOutput<'_>,
    ) -> Result<OnlyBytes> {
        self.write(planned, buffers, out).tensor(&planned.tensor.name)?;
        Ok(OnlyBytes {})
    }

    fn write(&self, planned: &ExportedTensor, buffers: &mut Buffers, out: &mut TaskOutput<'_>) -> Result<()> {
        let (entries, order, plus_one) = match &planned.from {
            RowOrigin::Values(values) => {
                buffers.encoded.clear();
                encode_floats(DType::F32, values, &mut buffers.encoded)?;
                return out.append(0, &buffers.encoded);
            }
            RowOrigin::Entries { entries, order, plus_one } => (entries, order, *plus_one),
        };
        let RowStack { count, rows, cols } = planned.rows;
        let kind = planned.tensor.kind;
        let height = (CHUNK_ELEMENTS / cols).max(1);
        for matrix in 0..count {
            for start in (0..rows).step_by(height) {
                let range = start..rows.min(start + height);
                buffers.encoded.clear();
                let spans = Spans::read(self, entries, order, matrix, &range, planned.rows)?;
                for row in range {
                    let (part, row) = order.canonical_row(row);
                    spans.encode(part, row, kind, plus_one, buffers)?;
                }
                out.append(0, &buffers.encoded)?;
            }
        }
        Ok(())
    }
}

/// One thread's buffers.
#[derive(Default)]
pub(super) struct Buffers {
    values: Vec<f32>,
    encoded: Vec<u8>,
}

/// The rows of the pack that a chunk needs: of each entry one piece.
struct Spans<'a> {
    pieces: Vec<Option<Piece<'a>>>,
    cols: usize,
}

struct Piece<'a> {
    entry: &'a Entry,
    layout: Option<TileLayout>,
    /// First row (a multiple of 16 for tiles).
    first: usize,
    bytes: Vec<u8>,
}

impl<'a> Spans<'a> {
    fn read(
        pack: &'a ExportSource<'a>,
        entries: &[usize],
        order: &RowOrder,
        matrix: usize,
        range: &Range<usize>,
        rows: RowStack,
    ) -> Result<Spans<'a>> {
        let mut needed: Vec<Option<Range<usize>>> = vec![None; entries.len()];
        for row in range.clone() {
            let (part, row) = order.canonical_row(row);
            let grown = needed[part].take().map_or(row..row + 1, |r| r.start.min(row)..r.end.max(row + 1));
            needed[part] = Some(grown);
        }
        let read = |(i, needed): (&usize, Option<Range<usize>>)| {
            let entry = &pack.reader.entries()[*i];
            needed.map(|rows| Piece::read(pack, entry, matrix, rows)).transpose().tensor(&entry.name)
        };
        let pieces = entries.iter().zip(needed).map(read).collect::<Result<_>>()?;
        Ok(Spans { pieces, cols: rows.cols })
    }

    /// Appends one canonical row in the wanted type.
    fn encode(&self, part: usize, row: usize, kind: GgmlType, plus_one: bool, buffers: &mut Buffers) -> Result<()> {
        let piece = self.pieces[part].as_ref().expect("every needed row was read");
        let row = row - piece.first;
        let Buffers { values, encoded } = buffers;
        let to = blocks::plain(kind);
        match (piece.entry.store, &piece.layout) {
            (Store::Plain(dtype), _) => {
                let bytes = &piece.bytes[row * self.cols * dtype.size()..][..self.cols * dtype.size()];
                if to == Some(dtype) && !plus_one {
                    encoded.extend_from_slice(bytes);
                    return Ok(());
                }
                values.resize(self.cols, 0.0);
                decode_floats(dtype, bytes, values)?;
                if plus_one {
                    values.iter_mut().for_each(|x| *x += 1.0);
                }
            }
            (Store::Tiled(_), Some(layout)) => {
                let mut coded = CodedRow::new(layout);
                get_row(layout, &piece.bytes[row / TILE_ROWS * layout.tile_bytes..], row % TILE_ROWS, &mut coded);
                if to.is_none() {
                    let start = encoded.len();
                    encoded.resize(start + self.cols / BLOCK * kind.block_bytes(), 0);
                    blocks::from_row(kind, layout, &coded, &mut encoded[start..]);
                    return Ok(());
                }
                values.resize(self.cols, 0.0);
                coded.dequantize(layout, values);
            }
            (Store::Tiled(_), None) => unreachable!("tiles have a layout"),
        }
        let to = to.expect("quantized types were written above");
        round_into(to, values, encoded)
    }
}

impl<'a> Piece<'a> {
    fn read(pack: &ExportSource, entry: &'a Entry, matrix: usize, rows: Range<usize>) -> Result<Piece<'a>> {
        let layout = entry.layout().transpose()?;
        let view = RowStack::new(&entry.shape, is_vector(&entry.name, &entry.shape));
        let (first, start, length) = match (entry.store, &layout) {
            (Store::Tiled(_), Some(layout)) => {
                let tiles = rows.start / TILE_ROWS..rows.end.div_ceil(TILE_ROWS);
                let start = matrix * layout.nbytes() + tiles.start * layout.tile_bytes;
                (tiles.start * TILE_ROWS, start, tiles.len() * layout.tile_bytes)
            }
            (Store::Plain(dtype), _) => {
                let row = view.cols * dtype.size();
                (rows.start, (matrix * view.rows + rows.start) * row, rows.len() * row)
            }
            (Store::Tiled(_), None) => unreachable!("tiles have a layout"),
        };
        let mut bytes = vec![0; length];
        pack.reader.read(entry, start, &mut bytes)?;
        Ok(Piece { entry, layout, first, bytes })
    }
}
