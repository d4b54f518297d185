//! Writes one tensor of the checkpoint from the entries of a pack, in bands of rows. The pack is read by position, so
//! memory does not grow with its size.

use super::merged;
use super::plan::{PartForm, TargetPart, UnpackedTensor};
use crate::adapter::Adapter;
use crate::convert::executor::{OnlyBytes, TaskOutput};
use crate::convert::rows::{Form, Put, RowSource, RowStack, RowTarget};
use crate::error::{Context, Result};
use crate::iebin::{IebinReader, Store};
use crate::quant::block::tile;
use crate::scheme::{QuantSpec, TILE_ROWS, TileLayout};
use std::ops::Range;

/// Bytes that are collected before they are written. A thread needs about twice this memory: for the stored and the
/// written form.
const BAND_BYTES: usize = 8 << 20;

/// Writes a tensor of the checkpoint: each of its parts, the rows of one entry of the pack, into its section.
pub(in crate::convert) fn fill(
    reader: &IebinReader,
    adapters: &[(Adapter, f32)],
    target: &UnpackedTensor,
    out: &mut TaskOutput<'_>,
) -> Result<OnlyBytes> {
    for (section, part) in target.content.iter().enumerate() {
        let entry = &reader.entries()[part.entry];
        // A vector is one row; shapes were checked when the pack was opened.
        let (count, rows, cols) = entry.matrices().unwrap_or((1, 1, entry.elements()));
        let read = |at: usize, out: &mut [u8]| reader.read(entry, at, out);
        let source = RowSource::new(&entry.name, entry.store.into(), RowStack { count, rows, cols }, read)?;
        let mut source = source.merge(merged::of(adapters, &entry.name));
        let form = Form::Plain(target.dtype);
        let to = RowTarget { form, matrices: part.matrices.clone(), rows: part.rows, cols, add: 0.0, columns: None };
        let put: &mut Put<'_> = &mut |bytes| out.append(section, bytes);
        match (part.form, entry.store) {
            (PartForm::Rows, _) => {
                to.fill(std::slice::from_mut(&mut source), |row| (0, row * part.step + part.phase), put)
            }
            (PartForm::Transposed { stacks }, _) => transposed(&to, target.dtype.size(), stacks, &mut source, put),
            (PartForm::Codes | PartForm::Scales, Store::Tiled(spec)) => mxfp4(&to, spec, part, &mut source, put),
            (PartForm::Codes | PartForm::Scales, _) => unreachable!("planned for tiles of MXFP4 only"),
        }
        .tensor(&entry.name)?;
    }
    Ok(OnlyBytes {})
}

/// Divides rows into bands of about [`BAND_BYTES`], each starting on a multiple of `step`.
fn bands(rows: usize, row_bytes: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    let height = (BAND_BYTES / row_bytes.max(1)).max(1).next_multiple_of(step);
    (0..rows).step_by(height).map(move |first| first..rows.min(first + height))
}

/// Writes rows as columns of elements of `size` bytes; each write has some columns of all rows. Rows of `stacks` stacks
/// alternate, and the columns of one stack follow those of the one before.
fn transposed(to: &RowTarget, size: usize, stacks: usize, source: &mut RowSource, put: &mut Put<'_>) -> Result<()> {
    let width = (2 * BAND_BYTES / (to.rows * size).max(1)).max(1);
    let height = to.rows / stacks;
    let in_stacks = || {
        let of_stack = move |stack| bands(height, to.cols * stacks * size, 1).map(move |band| (stack, band));
        (0..stacks).flat_map(of_stack)
    };
    let (mut columns, mut rows) = (Vec::new(), Vec::new());
    for matrix in to.matrices.clone() {
        for first in (0..to.cols).step_by(width) {
            let taken = first..to.cols.min(first + width);
            columns.resize(taken.len() * to.rows * size, 0);
            for (stack, band) in in_stacks() {
                source.load(matrix, band.start * stacks + stack..(band.end - 1) * stacks + stack + 1)?;
                rows.clear();
                band.clone().try_for_each(|row| to.append(source, row * stacks + stack, &mut rows))?;
                for (r, row) in band.zip(rows.chunks_exact(to.cols * size)) {
                    let column = stack * height + r;
                    for (c, element) in row[taken.start * size..taken.end * size].chunks_exact(size).enumerate() {
                        columns[(c * to.rows + column) * size..][..size].copy_from_slice(element);
                    }
                }
            }
            put(&columns)?;
        }
    }
    Ok(())
}

/// Writes the codes or the scales of MXFP4 matrices in the layout of checkpoints.
fn mxfp4(to: &RowTarget, spec: QuantSpec, part: &TargetPart, source: &mut RowSource, put: &mut Put<'_>) -> Result<()> {
    for matrix in to.matrices.clone() {
        for band in bands(to.rows, to.cols, TILE_ROWS) {
            let layout = TileLayout::new(spec, band.len(), to.cols)?;
            source.load(matrix, band)?;
            let (mut codes, mut scales) = (Vec::new(), Vec::new());
            tile::canonical_from_tiles(&layout, &source.bytes, &mut codes, &mut scales, &mut Vec::new());
            put(if part.form == PartForm::Codes { &codes } else { &scales })?;
        }
    }
    Ok(())
}
