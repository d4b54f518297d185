//! Converts quantized weights that `iec q4` has written in advance to tiles, without quantizing again.

use super::block::tile;
use crate::error::{Context, Result};
use crate::files;
use crate::manifest::PackedRange;
use crate::scheme::{Granularity, TileLayout};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

impl PackedRange {
    /// Reads rows of matrix `matrix` of the tensor and permutes them into tiles. `rows` starts at a multiple of 16, and
    /// `out` has the size of the tiles of `rows`.
    ///
    /// # Errors
    /// A file cannot be read or its bytes are invalid.
    pub fn read_tiles(&self, layout: &TileLayout, matrix: usize, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        let (codes, scales, zeros) = layout.canonical_sizes(layout.rows);
        let (bin, scale_bin) = (files::open(&self.bin)?, files::open(&self.scale_bin)?);
        // A tensor-wide scale is stored once per matrix, everything else per row.
        let shared = layout.spec.granularity == Granularity::Tensor;
        let part = |file: &File, path: &Path, start: u64, of_matrix: usize, shared: bool| {
            let per_row = of_matrix / layout.rows;
            let (skip, length) = if shared { (0, of_matrix) } else { (rows.start * per_row, rows.len() * per_row) };
            let mut bytes = vec![0; length];
            file.read_exact_at(&mut bytes, start + (matrix * of_matrix + skip) as u64).at(path).map(|()| bytes)
        };
        let mut codes = part(&bin, &self.bin, self.codes.start, codes, false)?;
        if self.biased {
            // The file stores value + 8, canonical codes are two's complement; they differ in the highest bit of a
            // nibble.
            codes.iter_mut().for_each(|byte| *byte ^= 0x88);
        }
        let scales = part(&scale_bin, &self.scale_bin, self.scales.start, scales, shared)?;
        let zeros = part(&scale_bin, &self.scale_bin, self.zeros.start, zeros, shared)?;
        tile::tiles_from_canonical(layout, &codes, &scales, &zeros, rows.len(), out).at(&self.bin)
    }
}
