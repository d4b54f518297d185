//! Moves rows from the pack to the file, chunk by chunk, by all threads.

use super::super::blocks;
use super::super::names::{Order, Rows, is_vector};
use super::super::types::GgmlType;
use super::super::writer::Layout;
use super::plan::{From, Pack, Planned};
use crate::convert::pack::refuse_overflow;
use crate::dtype::{DType, decode_floats, encode_floats};
use crate::error::{Context, Result};
use crate::iebin::{Entry, Store};
use crate::output::{AtomicFile, require_space, reserve};
use crate::quant::block::CodedRow;
use crate::quant::block::tile::get_row;
use crate::scheme::{BLOCK, TILE_ROWS, TileLayout};
use crate::{interrupt, progress};
use rayon::prelude::*;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Elements moved at once by a thread.
const CHUNK_ELEMENTS: usize = 1 << 20;

impl Pack<'_> {
    /// Writes the file `out`.
    pub(super) fn write(&self, planned: &[Planned], layout: &Layout, out: &Path) -> Result<()> {
        require_space(out, layout.total, 0)?;
        let out = AtomicFile::create(out)?;
        reserve(out.file(), layout.total, std::iter::once(0..layout.total)).at(out.path())?;
        out.file().write_all_at(&layout.header, 0).at(out.path())?;
        let bar = progress::bytes("exporting", planned.iter().map(|p| p.tensor.nbytes).sum());
        let one = |buffers: &mut Buffers, (planned, start): (&Planned, &u64)| {
            self.write_one(buffers, planned, |at, bytes| {
                interrupt::check()?;
                bar.inc(bytes.len() as u64);
                out.file().write_all_at(bytes, start + at).at(out.path())
            })
            .tensor(&planned.tensor.name)
        };
        planned.par_iter().zip(&layout.starts).map_init(Buffers::default, one).collect::<Result<()>>()?;
        bar.finish_and_clear();
        interrupt::check()?;
        out.commit()
    }

    /// Writes one tensor: `put` takes the position within it and bytes.
    fn write_one(
        &self,
        buffers: &mut Buffers,
        planned: &Planned,
        put: impl Fn(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let (entries, order, plus_one) = match &planned.from {
            From::Values(values) => {
                buffers.encoded.clear();
                encode_floats(DType::F32, values, &mut buffers.encoded)?;
                return put(0, &buffers.encoded);
            }
            From::Entries { entries, order, plus_one } => (entries, order, *plus_one),
        };
        let Rows { count, rows, cols } = planned.rows;
        let kind = planned.tensor.kind;
        let height = (CHUNK_ELEMENTS / cols).max(1);
        let mut at = 0;
        for matrix in 0..count {
            for start in (0..rows).step_by(height) {
                let range = start..rows.min(start + height);
                buffers.encoded.clear();
                let spans = Spans::read(self, entries, order, matrix, &range, planned.rows)?;
                for row in range {
                    let (part, row) = order.canonical_row(row);
                    spans.encode(part, row, kind, plus_one, buffers)?;
                }
                put(at, &buffers.encoded)?;
                at += buffers.encoded.len() as u64;
            }
        }
        Ok(())
    }
}

/// One thread's buffers.
#[derive(Default)]
struct Buffers {
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
        pack: &'a Pack<'a>,
        entries: &[usize],
        order: &Order,
        matrix: usize,
        range: &Range<usize>,
        rows: Rows,
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
        refuse_overflow(values, to)?;
        encode_floats(to, values, encoded)
    }
}

impl<'a> Piece<'a> {
    fn read(pack: &Pack, entry: &'a Entry, matrix: usize, rows: Range<usize>) -> Result<Piece<'a>> {
        let layout = entry.layout().transpose()?;
        let view = Rows::new(&entry.shape, is_vector(&entry.name, &entry.shape));
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
        pack.payloads.read(entry, start, &mut bytes)?;
        Ok(Piece { entry, layout, first, bytes })
    }
}
