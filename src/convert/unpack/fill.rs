//! Writes one target from the entries of a pack, a band at a time.

use super::plan::{Form, Part, Target};
use crate::dtype::{DType, encode_floats};
use crate::error::{Context, Result};
use crate::iebin::{IebinReader, Store};
use crate::interrupt;
use crate::mapped::Bytes;
use crate::quant::block::tile;
use crate::scheme::TileLayout;
use indicatif::ProgressBar;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Bytes gathered before they are written; memory is this, or a row, times the number of threads.
const BAND_BYTES: usize = 8 << 20;

/// Writes the parts of a target whose data starts at byte `offset` of `file`.
pub(super) fn fill(reader: &IebinReader, target: &Target, file: &File, offset: u64, bar: &ProgressBar) -> Result<()> {
    let mut out = Output { file, at: 0, bar };
    for part in &target.parts {
        let entry = &reader.entries()[part.entry];
        // A vector is one row; shapes were checked when the pack was opened.
        let (_, rows, cols) = entry.matrices().unwrap_or((1, 1, entry.elements()));
        let rows = Rows { payload: reader.payload(entry)?, store: entry.store, rows, cols, part, dtype: target.dtype };
        out.at = offset + (part.first * target.dtype.size()) as u64;
        for matrix in part.matrices.clone() {
            match part.form {
                Form::Rows => rows.straight(matrix, &mut out),
                Form::Transposed => rows.transposed(matrix, &mut out),
                Form::Codes | Form::Scales => rows.mxfp4(matrix, &mut out),
            }
            .tensor(&entry.name)?;
        }
    }
    Ok(())
}

/// Where the next bytes go.
struct Output<'a> {
    file: &'a File,
    at: u64,
    bar: &'a ProgressBar,
}

impl Output<'_> {
    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        interrupt::check()?;
        self.file.write_all_at(bytes, self.at)?;
        self.at += bytes.len() as u64;
        self.bar.inc(bytes.len() as u64);
        Ok(())
    }
}

/// The rows of an entry that a part takes.
struct Rows<'a> {
    payload: Bytes,
    store: Store,
    rows: usize,
    cols: usize,
    part: &'a Part,
    dtype: DType,
}

impl Rows<'_> {
    /// How many rows of each matrix.
    fn count(&self) -> usize {
        self.rows / self.part.step
    }

    /// Appends columns `from..to` of row number `r` to `out`, in the target's type.
    fn row(&self, matrix: usize, r: usize, columns: std::ops::Range<usize>, out: &mut Vec<u8>) -> Result<()> {
        let row = r * self.part.step + self.part.phase;
        match self.store {
            Store::Plain(dtype) => {
                let start = (matrix * self.rows + row) * self.cols;
                let bytes = &self.payload[(start + columns.start) * dtype.size()..(start + columns.end) * dtype.size()];
                out.extend_from_slice(bytes);
                Ok(())
            }
            Store::Tiled(spec) => {
                let layout = TileLayout::new(spec, self.rows, self.cols)?;
                let tiles = &self.payload[matrix * layout.nbytes()..(matrix + 1) * layout.nbytes()];
                let mut values = vec![0.0; self.cols];
                tile::dequantize_rows(&layout, tiles, row..row + 1, &mut values);
                encode_floats(self.dtype, &values[columns], out)
            }
        }
    }

    fn straight(&self, matrix: usize, out: &mut Output) -> Result<()> {
        let band = (BAND_BYTES / (self.cols * self.dtype.size()).max(1)).max(1);
        let mut buffer = Vec::new();
        for first in (0..self.count()).step_by(band) {
            buffer.clear();
            for r in first..self.count().min(first + band) {
                self.row(matrix, r, 0..self.cols, &mut buffer)?;
            }
            out.append(&buffer)?;
        }
        Ok(())
    }

    /// Rows become columns: each band holds some columns of all rows.
    fn transposed(&self, matrix: usize, out: &mut Output) -> Result<()> {
        let (count, size) = (self.count(), self.dtype.size());
        let band = (BAND_BYTES / (count * size).max(1)).max(1);
        let (mut buffer, mut row) = (Vec::new(), Vec::new());
        for first in (0..self.cols).step_by(band) {
            let columns = first..self.cols.min(first + band);
            buffer.resize(columns.len() * count * size, 0);
            for r in 0..count {
                row.clear();
                self.row(matrix, r, columns.clone(), &mut row)?;
                for (c, element) in row.chunks_exact(size).enumerate() {
                    buffer[(c * count + r) * size..][..size].copy_from_slice(element);
                }
            }
            out.append(&buffer)?;
        }
        Ok(())
    }

    /// The codes or the scales of a whole matrix, as checkpoints store them.
    fn mxfp4(&self, matrix: usize, out: &mut Output) -> Result<()> {
        let Store::Tiled(spec) = self.store else { unreachable!("planned for tiles of MXFP4 only") };
        let layout = TileLayout::new(spec, self.rows, self.cols)?;
        let tiles = &self.payload[matrix * layout.nbytes()..(matrix + 1) * layout.nbytes()];
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        tile::canonical_from_tiles(&layout, tiles, &mut codes, &mut scales, &mut Vec::new());
        out.append(if self.part.form == Form::Codes { &codes } else { &scales })
    }
}
