//! Reads the codes of quantized matrices as tiles, for packs that hold them bit for bit.

use super::{BoundView, CanonicalTensor, Checkpoint, rows_of_parts};
use crate::convert::dry_run::in_words;
use crate::convert::published::{Kept, MatrixForm, Native};
use crate::convert::rows::Form;
use crate::convert::source::shards::Shards;
use crate::error::{Context, Result};
use crate::quant::block::CodedRow;
use crate::quant::block::tile::{pad_tile, put_row};
use crate::scheme::{TILE_ROWS, TileLayout};
use rayon::prelude::*;
use std::ops::Range;

impl Checkpoint {
    /// Decides whether a pack can hold the codes of a tensor; `None` for floats.
    ///
    /// # Errors
    /// Zero points or indices of groups are damaged, or reading fails.
    pub fn native(&self, tensor: &CanonicalTensor) -> Result<Option<Kept>> {
        native(&tensor.source, &self.shards).tensor(&tensor.name)
    }

    /// Returns what a pack holds of every matrix that is quantized in the checkpoint.
    ///
    /// # Errors
    /// Zero points or indices of groups are damaged, or reading fails.
    pub fn forms(&self) -> Result<Vec<MatrixForm>> {
        let form = |tensor: &CanonicalTensor| {
            let kept = self.native(tensor)?;
            Ok(MatrixForm {
                tensor: tensor.name.clone(),
                format: tensor.store_name().to_string(),
                kept_as: kept.and_then(|kept| kept.ok().map(|native| in_words(&native.spec))),
                because: kept.and_then(Kept::err),
            })
        };
        self.tensors().par_iter().filter(|tensor| tensor.is_coded()).map(form).collect()
    }

    /// Reads rows of matrix number `matrix`, beginning with the first row of a tile, as tiles of `native`, in which a
    /// pack can hold the tensor; `out` is resized to the exact length.
    ///
    /// # Errors
    /// Codes, scales or zero points are damaged, or reading fails.
    pub fn read_tiles(
        &self,
        tensor: &CanonicalTensor,
        native: &Native,
        matrix: usize,
        rows: Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let (_, _, cols) = tensor.matrices();
        if let BoundView::Stored { model, item } = &tensor.source {
            out.clear();
            return model.read(*item, Form::Tiles(native.spec), (matrix, rows), &mut |bytes| {
                out.extend_from_slice(bytes);
                Ok(())
            });
        }
        let layout = TileLayout::new(native.spec, rows.len(), cols).tensor(&tensor.name)?;
        out.clear();
        out.resize(layout.nbytes(), 0);
        let mut put = |row: usize, coded: &CodedRow| {
            put_row(
                &layout,
                &mut out[row / TILE_ROWS * layout.tile_bytes..][..layout.tile_bytes],
                row % TILE_ROWS,
                coded,
            );
        };
        let reader = CodeReader { shards: &self.shards, native };
        reader.read(&tensor.source, (matrix, rows.clone()), &mut put)?;
        let last = rows.len() / TILE_ROWS * layout.tile_bytes;
        if !rows.len().is_multiple_of(TILE_ROWS) {
            pad_tile(&layout, &mut out[last..], rows.len() % TILE_ROWS);
        }
        Ok(())
    }
}

/// Decides about a view; its parts must have one scheme. `None` for floats.
fn native(source: &BoundView, shards: &Shards) -> Result<Option<Kept>> {
    let parts = match source {
        BoundView::Stored { model, item } => return Ok(model.scheme(*item).map(|spec| Ok(Native::of_scheme(spec)))),
        BoundView::Coded { coded, .. } => return coded.native(shards).map(Some),
        BoundView::Stacked(parts) | BoundView::Joined { parts, .. } | BoundView::Interleaved(parts) => parts,
        _ => return Ok(None),
    };
    if parts.iter().all(|part| part.coded().is_empty()) {
        return Ok(None);
    }
    let mut common: Option<Native> = None;
    for part in parts {
        let own = match native(part, shards)? {
            Some(Ok(own)) => own,
            Some(Err(why)) => return Ok(Some(Err(why))),
            None => return Ok(Some(Err("some of its matrices are floats"))),
        };
        common = match common.map_or(Some(own), |common| common.merged(&own)) {
            Some(merged) => Some(merged),
            None => return Ok(Some(Err("its matrices are quantized in different ways"))),
        };
    }
    Ok(common.map(Ok))
}

struct CodeReader<'a> {
    shards: &'a Shards,
    native: &'a Native,
}

impl CodeReader<'_> {
    /// Reads rows of a matrix of a view, and calls `put` with the number of each within these rows.
    fn read(
        &self,
        source: &BoundView,
        (matrix, rows): (usize, Range<usize>),
        put: &mut dyn FnMut(usize, &CodedRow),
    ) -> Result<()> {
        match source {
            BoundView::Coded { coded, first, of } => {
                let place = coded.place(matrix * of + first + rows.start, rows.len());
                coded.read_codes(self.native, self.shards, place, put)
            }
            BoundView::Stacked(parts) => self.read(&parts[matrix], (0, rows), put),
            BoundView::Joined { parts, rows: height } => {
                for (part, rows, before) in rows_of_parts(*height, rows) {
                    self.read(&parts[part], (0, rows), &mut |row, coded| put(before + row, coded))?;
                }
                Ok(())
            }
            BoundView::Interleaved(parts) => {
                let n = parts.len();
                for (i, part) in parts.iter().enumerate() {
                    // Row `n * r + i` of the matrix is row `r` of this part.
                    let own = |row: usize| (row + n - 1 - i) / n;
                    let of_part = own(rows.start)..own(rows.end);
                    let start = of_part.start;
                    self.read(part, (matrix, of_part), &mut |row, coded| {
                        put(n * (start + row) + i - rows.start, coded);
                    })?;
                }
                Ok(())
            }
            _ => unreachable!("only codes have a scheme"),
        }
    }
}
