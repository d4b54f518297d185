//! Writes one target from the entries of a pack, a band at a time. The pack is read by position, so memory does not grow
//! with it.

use super::plan::{PartForm, TargetPart, UnpackedTensor};
use crate::convert::executor::{OnlyBytes, TaskOutput};
use crate::dtype::{DType, encode_floats};
use crate::error::{Context, Result};
use crate::iebin::{Entry, IebinReader, Store};
use crate::quant::block::tile;
use crate::scheme::{QuantSpec, TILE_ROWS, TileLayout};
use std::ops::Range;

/// Bytes gathered before they are written. A thread holds this about twice: as stored and as written.
const BAND_BYTES: usize = 8 << 20;

/// Writes the parts of a target, each into its section.
pub(super) fn fill(reader: &IebinReader, target: &UnpackedTensor, out: &mut TaskOutput<'_>) -> Result<OnlyBytes> {
    for (section, part) in target.parts.iter().enumerate() {
        let entry = &reader.entries()[part.entry];
        // A vector is one row; shapes were checked when the pack was opened.
        let (_, rows, cols) = entry.matrices().unwrap_or((1, 1, entry.elements()));
        let rows = EntryRows { reader, entry, rows, cols, part, dtype: target.dtype };
        let mut out = SectionOutput { out: &mut *out, section };
        for matrix in part.matrices.clone() {
            match part.form {
                PartForm::Rows => rows.straight(matrix, &mut out),
                PartForm::Transposed => rows.transposed(matrix, &mut out),
                PartForm::Codes | PartForm::Scales => rows.mxfp4(matrix, &mut out),
            }
            .tensor(&entry.name)?;
        }
    }
    Ok(OnlyBytes {})
}

/// One section of a task.
struct SectionOutput<'a, 'b> {
    out: &'a mut TaskOutput<'b>,
    section: usize,
}

impl SectionOutput<'_, '_> {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.append(self.section, bytes)
    }
}

/// The rows of an entry that a part takes.
struct EntryRows<'a> {
    reader: &'a IebinReader,
    entry: &'a Entry,
    rows: usize,
    cols: usize,
    part: &'a TargetPart,
    dtype: DType,
}

impl EntryRows<'_> {
    /// How many rows the part takes of each matrix.
    fn count(&self) -> usize {
        self.rows / self.part.step
    }

    /// Rows in bands of about [`BAND_BYTES`], each starting on a multiple of `step`.
    fn bands(&self, step: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let count = self.count();
        let height =
            (BAND_BYTES / (self.cols * self.part.step * self.dtype.size()).max(1)).max(1).next_multiple_of(step);
        (0..count).step_by(height).map(move |first| first..count.min(first + height))
    }

    fn straight(&self, matrix: usize, out: &mut SectionOutput<'_, '_>) -> Result<()> {
        let mut buffer = Vec::new();
        for band in self.bands(1) {
            self.read(matrix, band, &mut buffer)?;
            out.append(&buffer)?;
        }
        Ok(())
    }

    /// Rows become columns: what is written at once holds some columns of all rows.
    fn transposed(&self, matrix: usize, out: &mut SectionOutput<'_, '_>) -> Result<()> {
        let (count, size) = (self.count(), self.dtype.size());
        let width = (2 * BAND_BYTES / (count * size).max(1)).max(1);
        let (mut columns, mut rows) = (Vec::new(), Vec::new());
        for first in (0..self.cols).step_by(width) {
            let taken = first..self.cols.min(first + width);
            columns.resize(taken.len() * count * size, 0);
            for band in self.bands(1) {
                self.read(matrix, band.clone(), &mut rows)?;
                for (r, row) in band.zip(rows.chunks_exact(self.cols * size)) {
                    for (c, element) in row[taken.start * size..taken.end * size].chunks_exact(size).enumerate() {
                        columns[(c * count + r) * size..][..size].copy_from_slice(element);
                    }
                }
            }
            out.append(&columns)?;
        }
        Ok(())
    }

    /// The codes or the scales of a matrix, as checkpoints store them.
    fn mxfp4(&self, matrix: usize, out: &mut SectionOutput<'_, '_>) -> Result<()> {
        let Store::Tiled(spec) = self.entry.store else { unreachable!("planned for tiles of MXFP4 only") };
        let mut tiles = Vec::new();
        for band in self.bands(TILE_ROWS) {
            let layout = self.read_tiles(spec, matrix, band, &mut tiles)?;
            let (mut codes, mut scales) = (Vec::new(), Vec::new());
            tile::canonical_from_tiles(&layout, &tiles, &mut codes, &mut scales, &mut Vec::new());
            out.append(if self.part.form == PartForm::Codes { &codes } else { &scales })?;
        }
        Ok(())
    }

    /// Rows of the part in the target's type; `out` gets the exact length.
    fn read(&self, matrix: usize, rows: Range<usize>, out: &mut Vec<u8>) -> Result<()> {
        let TargetPart { phase, step, .. } = *self.part;
        // Rows of the entry from the first to the last that is taken.
        let whole = rows.start * step + phase..(rows.end - 1) * step + phase + 1;
        match self.entry.store {
            Store::Plain(dtype) => {
                let row_bytes = self.cols * dtype.size();
                out.resize(whole.len() * row_bytes, 0);
                self.read_at((matrix * self.rows + whole.start) * row_bytes, out)?;
                if step > 1 {
                    for r in 1..rows.len() {
                        out.copy_within(r * step * row_bytes..(r * step + 1) * row_bytes, r * row_bytes);
                    }
                    out.truncate(rows.len() * row_bytes);
                }
                Ok(())
            }
            Store::Tiled(spec) => {
                let first = whole.start / TILE_ROWS * TILE_ROWS;
                let mut tiles = Vec::new();
                let layout = self.read_tiles(spec, matrix, first..whole.end, &mut tiles)?;
                let mut values = vec![0.0; self.cols];
                out.clear();
                for row in whole.step_by(step) {
                    tile::dequantize_rows(&layout, &tiles, row - first..row - first + 1, &mut values);
                    encode_floats(self.dtype, &values, out)?;
                }
                Ok(())
            }
        }
    }

    /// The tiles of rows that start on a tile; returns the layout of just these rows.
    fn read_tiles(&self, spec: QuantSpec, matrix: usize, rows: Range<usize>, out: &mut Vec<u8>) -> Result<TileLayout> {
        let all = TileLayout::new(spec, self.rows, self.cols)?;
        let layout = TileLayout::new(spec, rows.len(), self.cols)?;
        out.resize(layout.nbytes(), 0);
        self.read_at(matrix * all.nbytes() + rows.start / TILE_ROWS * all.tile_bytes, out)?;
        Ok(layout)
    }

    fn read_at(&self, at: usize, out: &mut [u8]) -> Result<()> {
        self.reader.read(self.entry, at, out)
    }
}
