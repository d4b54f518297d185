//! Reads rows of canonical tensors in any arrangement of the source.

use super::{BoundView, CanonicalTensor, Checkpoint, rows_of_parts};
use crate::convert::source::shards::Shards;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dtype::{DType, decode_floats};
use crate::error::{Context, Error, Result};
use crate::iebin::Store;
use std::ops::Range;

impl Checkpoint {
    /// Reads rows of matrix number `matrix` of a float tensor as stored, `(rows, cols)` in the element type of its
    /// [`Store`]. `out` is resized to the exact length.
    ///
    /// # Errors
    /// The tensor does not hold floats, or reading fails.
    pub fn read_rows(
        &self,
        tensor: &CanonicalTensor,
        matrix: usize,
        rows: Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let (count, n_rows, cols) = tensor.matrices();
        assert!(matrix < count && rows.start <= rows.end && rows.end <= n_rows, "rows outside {}", tensor.name);
        let Store::Plain(dtype) = tensor.store else {
            return Err(Error::unsupported("found quantized codes, expected floats").tensor(&tensor.name));
        };
        out.resize(rows.len() * cols * dtype.size(), 0);
        if out.is_empty() {
            return Ok(());
        }
        Reader { shards: &self.shards, element: dtype.size() }.read(&tensor.source, &tensor.shape, matrix, rows, out)
    }

    /// Reads rows of matrix number `matrix` as f32; `out` holds `rows.len() * cols` values. Codes are decoded.
    pub fn read_rows_f32(
        &self,
        tensor: &CanonicalTensor,
        matrix: usize,
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        let mut bytes = Vec::new();
        match (tensor.store, tensor.packed()) {
            (Store::Plain(dtype), _) => {
                self.read_rows(tensor, matrix, rows, &mut bytes)?;
                decode_floats(dtype, &bytes, out).tensor(&tensor.name)
            }
            (Store::Tiled(_), None) => {
                let size = DType::F32.size();
                bytes.resize(out.len() * size, 0);
                let reader = Reader { shards: &self.shards, element: size };
                reader.read(&tensor.source, &tensor.shape, matrix, rows, &mut bytes)?;
                decode_floats(DType::F32, &bytes, out).tensor(&tensor.name)
            }
            (Store::Tiled(_), Some(_)) => {
                Err(Error::unsupported("found codes that are already packed, expected floats")
                    .tensor(&tensor.name)
                    .help("use the original checkpoint, which has float weights"))
            }
        }
    }
}

/// Reads float elements of `element` bytes.
struct Reader<'a> {
    shards: &'a Shards,
    element: usize,
}

impl Reader<'_> {
    /// Reads rows of matrix number `matrix` of the view `source`, whose shape is `shape`, into `out`.
    fn read(
        &self,
        source: &BoundView,
        shape: &[usize],
        matrix: usize,
        rows: Range<usize>,
        out: &mut [u8],
    ) -> Result<()> {
        let cols = shape[shape.len() - 1];
        let n_rows = if shape.len() > 1 { shape[shape.len() - 2] } else { 1 };
        let row_bytes = cols * self.element;
        match source {
            BoundView::Straight { tensor, skip } => {
                self.shards.read(tensor, skip + (matrix * n_rows + rows.start) * row_bytes, out)
            }
            BoundView::Slices { tensor, first, of } => {
                self.shards.read(tensor, (matrix * of + first + rows.start) * row_bytes, out)
            }
            BoundView::Transposed { tensor: source, first, of } => {
                let slab = Slab { source, first: matrix * cols * of + first, width: *of, height: cols };
                match self.element {
                    2 => self.read_transposed::<2>(&slab, rows, out),
                    4 => self.read_transposed::<4>(&slab, rows, out),
                    _ => self.read_transposed::<8>(&slab, rows, out),
                }
            }
            BoundView::Stacked(parts) => self.read(&parts[matrix], &shape[1..], 0, rows, out),
            BoundView::Joined { parts, rows: height } => {
                for (part, rows, before) in rows_of_parts(*height, rows) {
                    let out = &mut out[before * row_bytes..][..rows.len() * row_bytes];
                    self.read(&parts[part], &[*height, cols], 0, rows, out)?;
                }
                Ok(())
            }
            BoundView::Interleaved(parts) => {
                self.read_interleaved(parts, [n_rows, cols], (shape[0], matrix, rows), out)
            }
            BoundView::Coded { coded, first, of } => {
                let (matrix, rows) = coded.place(matrix * of + first + rows.start, rows.len());
                put_floats(rows.len() * cols, out, |values| coded.read_rows(self.shards, matrix, rows, values))
            }
            BoundView::Stored { model, item } => model.read_floats(*item, (matrix, rows), out),
            BoundView::Widened { view, from } => {
                let mut bytes = vec![0; rows.len() * cols * from.size()];
                let reader = Reader { shards: self.shards, element: from.size() };
                reader.read(view, shape, matrix, rows.clone(), &mut bytes)?;
                put_floats(rows.len() * cols, out, |values| decode_floats(*from, &bytes, values))
            }
            BoundView::Packed(_) => unreachable!("finished codes are no floats"),
        }
    }

    /// Reads rows of matrix number `matrix` of `count` matrices whose rows alternate among the parts.
    fn read_interleaved(
        &self,
        parts: &[BoundView],
        [n_rows, cols]: [usize; 2],
        (count, matrix, rows): (usize, usize, Range<usize>),
        out: &mut [u8],
    ) -> Result<()> {
        let n = parts.len();
        let (shape, row_bytes) = ([count, n_rows / n, cols], cols * self.element);
        let mut gathered = vec![0; rows.len().div_ceil(n) * row_bytes];
        for (i, part) in parts.iter().enumerate() {
            // Row `n * r + i` of the matrix is row `r` of this part.
            let own = |row: usize| (row + n - 1 - i) / n;
            let of_part = own(rows.start)..own(rows.end);
            if of_part.is_empty() {
                continue;
            }
            let lines = &mut gathered[..of_part.len() * row_bytes];
            self.read(part, &shape, matrix, of_part.clone(), lines)?;
            for (row, line) in of_part.zip(lines.chunks_exact(row_bytes)) {
                out[(n * row + i - rows.start) * row_bytes..][..row_bytes].copy_from_slice(line);
            }
        }
        Ok(())
    }

    /// Reads columns `rows` of the source matrix `slab`, `(height, width)`, and writes them to `out` as rows. `N` is
    /// the size of an element in bytes.
    fn read_transposed<const N: usize>(&self, slab: &Slab, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        // Lines of the source are gathered in groups, so that several consecutive elements of an output row are written
        // at a time.
        const GROUP: usize = 64;
        let line_bytes = rows.len() * N;
        let mut lines = vec![0; GROUP * line_bytes];
        let (out, _) = out.as_chunks_mut::<N>();
        for group in (0..slab.height).step_by(GROUP) {
            let n = GROUP.min(slab.height - group);
            for (i, line) in lines.chunks_exact_mut(line_bytes).take(n).enumerate() {
                let element = slab.first + (group + i) * slab.width + rows.start;
                self.shards.read(slab.source, element * N, line)?;
            }
            let (elements, _) = lines.as_chunks::<N>();
            for (r, row) in out.chunks_exact_mut(slab.height).enumerate() {
                for (i, value) in row[group..group + n].iter_mut().enumerate() {
                    *value = elements[i * rows.len() + r];
                }
            }
        }
        Ok(())
    }
}

/// Writes `count` floats, which `read` returns, as the bytes of F32 elements.
fn put_floats(count: usize, out: &mut [u8], read: impl FnOnce(&mut [f32]) -> Result<()>) -> Result<()> {
    let mut values = vec![0.0; count];
    read(&mut values)?;
    out.as_chunks_mut::<4>().0.iter_mut().zip(&values).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
    Ok(())
}

/// One matrix within a source tensor, `(height, width)`, starting at element `first`.
struct Slab<'a> {
    source: &'a SourceTensor,
    first: usize,
    width: usize,
    height: usize,
}
