//! Permutations between canonical bytes, unpacked rows and the row-interleaved tiles of [`crate::scheme`].

use super::{CodedRow, decode, mxfp4, streams, unpack_codes};
use crate::error::{Error, Result};
use crate::scheme::{BLOCK, Granularity, ScaleType, TILE_ROWS, TileLayout, Trellis};
use std::ops::Range;

/// Writes one unpacked row into a tile: row `row` of its 16.
pub(crate) fn put_row(layout: &TileLayout, tile: &mut [u8], row: usize, coded: &CodedRow) {
    let size = layout.spec.scale_dtype.size();
    for (group, scale) in coded.scales.chunks_exact(size).enumerate() {
        tile[(group * TILE_ROWS + row) * size..][..size].copy_from_slice(scale);
    }
    if layout.zero_bytes > 0 {
        for (group, zero) in coded.zeros.chunks_exact(layout.zero_bytes).enumerate() {
            let at = layout.zeros_offset + (group * TILE_ROWS + row) * layout.zero_bytes;
            tile[at..][..layout.zero_bytes].copy_from_slice(zero);
        }
    }
    let size = layout.spec.scale_dtype.super_size();
    for (number, bits) in coded.supers.chunks_exact(size).enumerate() {
        tile[layout.supers_offset + (number * TILE_ROWS + row) * size..][..size].copy_from_slice(bits);
    }
    let blocks = tile[layout.codes_offset..].chunks_exact_mut(layout.block_bytes);
    for (bytes, codes) in blocks.zip(coded.codes.chunks_exact(BLOCK)) {
        if layout.spec.scheme.bits() == 8 {
            let (bytes, codes) = (bytes.as_chunks_mut::<4>().0, codes.as_chunks::<4>().0);
            for i in 0..codes.len() {
                bytes[TILE_ROWS * i + row] = codes[i];
            }
            continue;
        }
        match layout.spec.trellis() {
            Some(trellis) => put_streams(trellis, bytes, row, codes),
            None => put_codes(layout.spec.scheme.bits() as usize, bytes, row, codes),
        }
    }
}

/// Writes the streams of one block of a row: each byte into a vector of its own.
fn put_streams(trellis: &Trellis, bytes: &mut [u8], row: usize, codes: &[u8]) {
    for (j, stream) in streams::of_block(trellis, codes).into_iter().enumerate() {
        for (vector, byte) in bytes.chunks_exact_mut(4 * TILE_ROWS).zip(stream.to_le_bytes()) {
            vector[4 * row + j] = byte;
        }
    }
}

/// Reads the indices of one block of a row.
fn get_streams(trellis: &Trellis, bytes: &[u8], row: usize, codes: &mut [u8]) {
    let mut found = [[0; 4]; 4];
    for (vector, bytes) in bytes.chunks_exact(4 * TILE_ROWS).enumerate() {
        (0..4).for_each(|j| found[j][vector] = bytes[4 * row + j]);
    }
    streams::indices(trellis, found.map(u32::from_le_bytes), codes);
}

/// Writes the codes of one block of a row, of less than 8 bits, to its vectors: four codes at a time, one in each byte
/// of a word.
fn put_codes(bits: usize, bytes: &mut [u8], row: usize, codes: &[u8]) {
    let (vectors, codes) = (bytes.as_chunks_mut::<4>().0, codes.as_chunks::<4>().0);
    let mut next = 0;
    if bits >= 4 {
        for i in 0..4 {
            let (low, high) = (u32::from_le_bytes(codes[i]), u32::from_le_bytes(codes[i + 4]));
            vectors[TILE_ROWS * i + row] = (low & 0x0F0F_0F0F | (high & 0x0F0F_0F0F) << 4).to_le_bytes();
        }
        next = 4;
    }
    for (from, each) in fields(bits) {
        for (field, four) in codes.iter().enumerate() {
            let (vector, bit) = (next + field * each / 8, field * each % 8);
            let word = &mut vectors[TILE_ROWS * vector + row];
            let kept = if bit == 0 { 0 } else { u32::from_le_bytes(*word) };
            *word = (kept | (u32::from_le_bytes(*four) >> from & in_each_byte(each)) << bit).to_le_bytes();
        }
        next += each;
    }
}

/// Returns a word each byte of which has the lowest `bits` bits set.
fn in_each_byte(bits: usize) -> u32 {
    ((1 << bits) - 1) * 0x0101_0101
}

/// Returns the fields of a code outside its nibble: the first bit and the number of bits. Each is stored in vectors of
/// its own.
fn fields(bits: usize) -> impl Iterator<Item = (u32, usize)> {
    let [two, one] = match bits {
        2 => [Some((0, 2)), None],
        3 => [Some((0, 2)), Some((2, 1))],
        5 => [None, Some((4, 1))],
        6 => [Some((4, 2)), None],
        _ => [None, None],
    };
    two.into_iter().chain(one)
}

/// Reads row `row` of the 16 rows of a tile into `coded`.
pub(crate) fn get_row(layout: &TileLayout, tile: &[u8], row: usize, coded: &mut CodedRow) {
    let size = layout.spec.scale_dtype.size();
    for (group, scale) in coded.scales.chunks_exact_mut(size).enumerate() {
        scale.copy_from_slice(&tile[(group * TILE_ROWS + row) * size..][..size]);
    }
    if layout.zero_bytes > 0 {
        for (group, zero) in coded.zeros.chunks_exact_mut(layout.zero_bytes).enumerate() {
            let at = layout.zeros_offset + (group * TILE_ROWS + row) * layout.zero_bytes;
            zero.copy_from_slice(&tile[at..][..layout.zero_bytes]);
        }
    }
    let size = layout.spec.scale_dtype.super_size();
    for (number, bits) in coded.supers.chunks_exact_mut(size).enumerate() {
        bits.copy_from_slice(&tile[layout.supers_offset + (number * TILE_ROWS + row) * size..][..size]);
    }
    for (block, codes) in coded.codes.chunks_exact_mut(BLOCK).enumerate() {
        block_codes(layout, tile, row, block, codes);
    }
}

/// Unpacks the codes of one block of a row into `codes`, which has one byte per column.
fn block_codes(layout: &TileLayout, tile: &[u8], row: usize, block: usize, codes: &mut [u8]) {
    let bytes = &tile[layout.codes_offset + block * layout.block_bytes..][..layout.block_bytes];
    if layout.spec.scheme.bits() == 8 {
        let (bytes, codes) = (bytes.as_chunks::<4>().0, codes.as_chunks_mut::<4>().0);
        for i in 0..codes.len() {
            codes[i] = bytes[TILE_ROWS * i + row];
        }
        return;
    }
    if let Some(trellis) = layout.spec.trellis() {
        return get_streams(trellis, bytes, row, codes);
    }
    let (vectors, bits, mut words) = (bytes.as_chunks::<4>().0, layout.spec.scheme.bits() as usize, [0u32; 8]);
    let word = |vector: usize| u32::from_le_bytes(vectors[TILE_ROWS * vector + row]);
    let mut next = 0;
    if bits >= 4 {
        for i in 0..4 {
            (words[i], words[i + 4]) = (word(i) & 0x0F0F_0F0F, word(i) >> 4 & 0x0F0F_0F0F);
        }
        next = 4;
    }
    for (from, each) in fields(bits) {
        for (field, four) in words.iter_mut().enumerate() {
            *four |= (word(next + field * each / 8) >> (field * each % 8) & in_each_byte(each)) << from;
        }
        next += each;
    }
    for (codes, four) in codes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *codes = four.to_le_bytes();
    }
}

/// Fills the rows of the last tile beyond the matrix with neutral codes and scales of zero.
pub(crate) fn pad_tile(layout: &TileLayout, tile: &mut [u8], from_row: usize) {
    let empty = CodedRow::new(layout);
    for row in from_row..TILE_ROWS {
        put_row(layout, tile, row, &empty);
    }
}

/// Decodes rows of a tiled matrix. `tiles` holds the whole matrix, `out` `rows.len() * layout.cols` values.
///
/// # Panics
/// `rows` extends beyond the matrix, or a length does not match the layout. Both are checked when a pack is opened.
pub fn dequantize_rows(layout: &TileLayout, tiles: &[u8], rows: Range<usize>, out: &mut [f32]) {
    assert!(rows.end <= layout.rows && tiles.len() == layout.nbytes() && out.len() == rows.len() * layout.cols);
    let mut codes = [0u8; BLOCK];
    for (row, out) in rows.zip(out.chunks_exact_mut(layout.cols)) {
        let tile = &tiles[row / TILE_ROWS * layout.tile_bytes..][..layout.tile_bytes];
        let row = row % TILE_ROWS;
        for (block, values) in out.chunks_mut(BLOCK).enumerate() {
            block_codes(layout, tile, row, block, &mut codes);
            let width = BLOCK / layout.block_groups;
            for (half, values) in values.chunks_mut(width).enumerate() {
                let factors = layout.factors(tile, row, layout.group_of(block, half));
                decode(&layout.spec, &codes[half * width..], factors, values);
            }
        }
    }
}

/// Permutes `n_rows` canonical rows into tiles; `n_rows` is a multiple of 16 except at the end of the matrix. The
/// lengths of the slices are those of [`TileLayout::canonical_sizes`], which match a checkpoint's MXFP4 `*_blocks`
/// and `*_scales`; `out` holds `ceil(n_rows / 16)` tiles.
///
/// # Errors
/// A length is wrong, a zero point is not a 4-bit code, or an MXFP4 scale is NaN.
pub fn tiles_from_canonical(
    layout: &TileLayout,
    codes: &[u8],
    scales: &[u8],
    zeros: &[u8],
    n_rows: usize,
    out: &mut [u8],
) -> Result<()> {
    let found = (codes.len(), scales.len(), zeros.len());
    let expected = layout.canonical_sizes(n_rows);
    if found != expected || out.len() != n_rows.div_ceil(TILE_ROWS) * layout.tile_bytes {
        return Err(Error::corrupt(format!(
            "{n_rows} rows of {} {} weights: found codes, scales and zero points of {found:?} bytes, expected \
             {expected:?}",
            layout.cols,
            layout.spec.scheme.name()
        )));
    }
    if let Some(zero) = zeros.iter().find(|z| **z > 15) {
        return Err(Error::corrupt(format!("found zero point {zero} of a 4-bit code, expected 0 to 15")));
    }
    if layout.spec.scale_dtype == ScaleType::E8m0 {
        mxfp4::check_scales(scales)?;
    }
    let mut coded = CodedRow::new(layout);
    let per_row = codes.len() / n_rows.max(1);
    for (t, tile) in out.chunks_exact_mut(layout.tile_bytes).enumerate() {
        tile.fill(0);
        let rows = TILE_ROWS.min(n_rows - t * TILE_ROWS);
        for r in 0..rows {
            let row = t * TILE_ROWS + r;
            take_groups(layout, scales, row, &mut coded.scales);
            take_groups(layout, zeros, row, &mut coded.zeros);
            unpack_codes(layout, &codes[row * per_row..][..per_row], &mut coded);
            put_row(layout, tile, r, &coded);
        }
        pad_tile(layout, tile, rows);
    }
    Ok(())
}

/// Copies the entries of one row from a `[row][group]` array; a tensor-wide entry applies to every row.
fn take_groups(layout: &TileLayout, array: &[u8], row: usize, to: &mut [u8]) {
    let start = if layout.spec.granularity == Granularity::Tensor { 0 } else { row * to.len() };
    to.copy_from_slice(&array[start..start + to.len()]);
}

/// Appends the canonical codes, scales and zero points of the whole matrix; the inverse of [`tiles_from_canonical`].
pub fn canonical_from_tiles(
    layout: &TileLayout,
    tiles: &[u8],
    codes: &mut Vec<u8>,
    scales: &mut Vec<u8>,
    zeros: &mut Vec<u8>,
) {
    let mut coded = CodedRow::new(layout);
    let (per_row, _, _) = layout.canonical_sizes(1);
    for row in 0..layout.rows {
        get_row(layout, &tiles[row / TILE_ROWS * layout.tile_bytes..], row % TILE_ROWS, &mut coded);
        let start = codes.len();
        codes.resize(start + per_row, 0);
        super::pack_codes(layout, &coded, &mut codes[start..]);
        if row == 0 || layout.spec.granularity != Granularity::Tensor {
            scales.extend_from_slice(&coded.scales);
            zeros.extend_from_slice(&coded.zeros);
        }
    }
}
