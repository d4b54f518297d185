//! Weight of a linear layer, read row by row from the matrices of the pack that form it, in pieces of bounded size.

use super::plan::Module;
use crate::convert::rows::{RowSource, RowStack};
use crate::convert::unpack::plan::TargetPart;
use crate::error::{Context, Result};
use crate::iebin::IebinReader;
use crate::quant::block::CodedRow;
use crate::scheme::TILE_ROWS;

/// Number of elements that are read at once.
const CHUNK_ELEMENTS: usize = 1 << 20;

/// Source of some rows: every `step`-th row of a matrix from row `phase` on, `rows` in number.
struct MatrixPart<'a> {
    source: RowSource<'a>,
    matrix: usize,
    phase: usize,
    step: usize,
    rows: usize,
}

/// Weight of a linear layer.
pub(super) struct ExportedMatrix<'a> {
    parts: Vec<MatrixPart<'a>>,
    cols: usize,
}

impl<'a> ExportedMatrix<'a> {
    /// Opens the weight of `module`.
    ///
    /// # Errors
    /// A matrix is too large for this machine.
    pub(super) fn open(reader: &'a IebinReader, module: &Module) -> Result<ExportedMatrix<'a>> {
        let part = |part: &TargetPart| {
            let entry = &reader.entries()[part.entry];
            let stack = RowStack::new(&entry.shape, false);
            let read = |at: usize, out: &mut [u8]| reader.read(entry, at, out);
            let source = RowSource::new(&entry.name, entry.store.into(), stack, read).tensor(&entry.name)?;
            let (matrix, rows) = (part.matrices.start, stack.rows / part.step);
            Ok(MatrixPart { source, matrix, phase: part.phase, step: part.step, rows })
        };
        Ok(ExportedMatrix { parts: module.parts.iter().map(part).collect::<Result<_>>()?, cols: module.cols })
    }

    /// Calls `visit` with each row of codes: its number in the weight and the row.
    pub(super) fn codes(&mut self, mut visit: impl FnMut(usize, &CodedRow) -> Result<()>) -> Result<()> {
        self.loaded(|source, row, number| {
            let (_, coded) = source.coded(row).expect("only codes are visited as codes");
            visit(number, coded)
        })
    }

    /// Calls `visit` with each decoded row: its number in the weight and its values.
    pub(super) fn values(&mut self, mut visit: impl FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        self.loaded(|source, row, number| visit(number, source.values(row)?))
    }

    /// Loads all rows; the arguments of `visit` are the source, the row in it, and the row in the weight.
    fn loaded(&mut self, mut visit: impl FnMut(&mut RowSource<'a>, usize, usize) -> Result<()>) -> Result<()> {
        let height = (CHUNK_ELEMENTS / self.cols.max(1) / TILE_ROWS * TILE_ROWS).max(TILE_ROWS);
        let mut above = 0;
        for MatrixPart { source, matrix, phase, step, rows } in &mut self.parts {
            let row_of = |row: usize| row * *step + *phase;
            for first in (0..*rows).step_by(height) {
                let band = first..(*rows).min(first + height);
                source.load(*matrix, row_of(band.start)..row_of(band.end - 1) + 1)?;
                band.into_iter().try_for_each(|row| visit(source, row_of(row), above + row))?;
            }
            above += *rows;
        }
        Ok(())
    }
}
