//! Converts the rows of a tensor from one format to another in chunks: from GGUF to a pack, and from a pack to GGUF
//! or safetensors.
//!
//! All conversions work alike: the rows that a chunk needs are read from each source in one piece, and each row is
//! written in the form of the target, as codes if both forms have the same codes, otherwise as floats.

use super::rounding::round_into;
use super::source::gguf::blocks;
use super::source::gguf::types::GgmlType;
use crate::adapter::Change;
use crate::dtype::{DType, decode_floats};
use crate::error::{Context, Error, Result};
use crate::iebin::Store;
use crate::quant::block::CodedRow;
use crate::quant::block::tile::{get_row, pad_tile, put_row};
use crate::scheme::{QuantSpec, TILE_ROWS, TileLayout};
use std::ops::Range;

/// Number of elements that a thread converts at once.
const CHUNK_ELEMENTS: usize = 1 << 20;

/// Tensor as a stack of matrices whose rows can be converted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowStack {
    /// Number of matrices.
    pub count: usize,
    /// Rows of each matrix.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
}

impl RowStack {
    /// Returns a tensor of `shape` as a stack of matrices. `vector` is true for a vector or a stack of vectors, each of
    /// which becomes a matrix of one column.
    pub fn new(shape: &[usize], vector: bool) -> RowStack {
        match (shape, vector) {
            ([lead @ .., rows], true) => RowStack { count: lead.iter().product(), rows: *rows, cols: 1 },
            ([lead @ .., rows, cols], false) => RowStack { count: lead.iter().product(), rows: *rows, cols: *cols },
            (_, _) => RowStack { count: 1, rows: shape.iter().product(), cols: 1 },
        }
    }
}

/// Stored form of the rows of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Form {
    /// Floats, row by row.
    Plain(DType),
    /// Blocks of GGML, row by row.
    Blocks(GgmlType),
    /// Tiles of a pack.
    Tiles(QuantSpec),
}

impl From<GgmlType> for Form {
    fn from(kind: GgmlType) -> Form {
        blocks::plain(kind).map_or(Form::Blocks(kind), Form::Plain)
    }
}

impl From<Store> for Form {
    fn from(store: Store) -> Form {
        match store {
            Store::Plain(dtype) => Form::Plain(dtype),
            Store::Tiled(spec) => Form::Tiles(spec),
        }
    }
}

/// Fills a buffer with the bytes of a tensor from a position on.
type Read<'a> = dyn Fn(usize, &mut [u8]) -> Result<()> + 'a;

/// Receives the next bytes of a tensor that is written.
pub(super) type Put<'a> = dyn FnMut(&[u8]) -> Result<()> + 'a;

/// Tensor from which rows are read.
pub(super) struct RowSource<'a> {
    name: &'a str,
    form: Form,
    /// Number of rows of each matrix.
    rows: usize,
    /// Number of elements of a row.
    cols: usize,
    /// Layout of each matrix and a buffer for a row, if the matrices are in tiles.
    tiles: Option<(TileLayout, CodedRow)>,
    read: Box<Read<'a>>,
    /// The bytes that were read last.
    pub(super) bytes: Vec<u8>,
    /// Index of the row with which `bytes` begins.
    first: usize,
    /// The row that was decoded last.
    values: Vec<f32>,
    /// Index of the matrix that was loaded last.
    matrix: usize,
    /// Number that multiplies the scales of each matrix of NVFP4 blocks; empty if there are none.
    numbers: &'a [f32],
    /// Changes by adapters.
    merged: Vec<Merged<'a>>,
}

/// Change of a tensor by an adapter, with the factor of the adapter.
#[derive(Debug, Clone, Copy)]
pub(super) enum Merged<'a> {
    /// Changes of a matrix, or of each matrix of a stack.
    Matrix(&'a [Change], f32),
    /// Change of the bias of a matrix.
    Bias(&'a Change, f32),
}

impl Merged<'_> {
    /// Changes a row of a matrix, or a whole bias.
    fn apply(&self, matrix: usize, row: usize, values: &mut [f32]) {
        match self {
            Merged::Matrix(changes, factor) => {
                if let Some(change) = changes.get(matrix) {
                    change.merge_row(row, *factor, values);
                }
            }
            Merged::Bias(change, factor) => {
                if let Some(bias) = &change.bias {
                    values.copy_from_slice(bias);
                }
                let added = change.added.iter().flatten();
                values.iter_mut().zip(added).for_each(|(value, added)| *value += factor * added);
            }
        }
    }
}

impl<'a> RowSource<'a> {
    /// Creates a source; `read` reads its bytes from a position.
    pub(super) fn new(
        name: &'a str,
        form: Form,
        RowStack { rows, cols, .. }: RowStack,
        read: impl Fn(usize, &mut [u8]) -> Result<()> + 'a,
    ) -> Result<RowSource<'a>> {
        let (read, tiles) = (Box::new(read), tiles(form, rows, cols)?);
        Ok(RowSource {
            name,
            form,
            rows,
            cols,
            tiles,
            read,
            bytes: Vec::new(),
            first: 0,
            values: Vec::new(),
            matrix: 0,
            numbers: &[],
            merged: Vec::new(),
        })
    }

    /// Multiplies the scales of each matrix of NVFP4 blocks by a number.
    pub(super) fn with_numbers(self, numbers: &'a [f32]) -> RowSource<'a> {
        RowSource { numbers, ..self }
    }

    /// Adds changes by adapters to the rows that are decoded.
    pub(super) fn merge(mut self, merged: Vec<Merged<'a>>) -> RowSource<'a> {
        self.merged = merged;
        self
    }

    /// Reads rows of a matrix into `bytes`; from tiles, all rows of the tiles that contain them.
    pub(super) fn load(&mut self, matrix: usize, rows: Range<usize>) -> Result<()> {
        self.matrix = matrix;
        let (start, length) = match &self.tiles {
            Some((layout, _)) => {
                let tiles = rows.start / TILE_ROWS..rows.end.div_ceil(TILE_ROWS);
                self.first = tiles.start * TILE_ROWS;
                (matrix * layout.nbytes() + tiles.start * layout.tile_bytes, tiles.len() * layout.tile_bytes)
            }
            None => {
                self.first = rows.start;
                let row = self.row_bytes()?;
                ((matrix * self.rows + rows.start) * row, rows.len() * row)
            }
        };
        self.bytes.resize(length, 0);
        (self.read)(start, &mut self.bytes).tensor(self.name)
    }

    /// Returns the number of bytes of a row that is stored contiguously.
    fn row_bytes(&self) -> Result<usize> {
        let partial = |kind: GgmlType| {
            let found = format!("found rows of {} elements", self.cols);
            Error::unsupported(format!("{found}, expected a multiple of {} for {kind} blocks", kind.block()))
                .tensor(self.name)
        };
        match self.form {
            Form::Blocks(kind) => kind.row_bytes(self.cols).ok_or_else(|| partial(kind)),
            Form::Plain(dtype) => Ok(self.cols * dtype.size()),
            Form::Tiles(_) => unreachable!("rows of tiles are interleaved"),
        }
    }

    /// Returns a row that is stored contiguously.
    fn raw(&self, row: usize) -> Result<&[u8]> {
        let bytes = self.row_bytes()?;
        Ok(&self.bytes[(row - self.first) * bytes..][..bytes])
    }

    /// Returns a row of those loaded last from its tile; `None` if the tensor has no tiles.
    pub(super) fn coded(&mut self, row: usize) -> Option<(&TileLayout, &CodedRow)> {
        let (layout, coded) = self.tiles.as_mut()?;
        let row = row - self.first;
        get_row(layout, &self.bytes[row / TILE_ROWS * layout.tile_bytes..], row % TILE_ROWS, coded);
        Some((layout, coded))
    }

    /// Returns rows of the first matrix, decoded one after another.
    pub(super) fn floats(&mut self, rows: Range<usize>) -> Result<Vec<f32>> {
        self.load(0, rows.clone())?;
        let mut floats = Vec::with_capacity(rows.len() * self.cols);
        for row in rows {
            self.decode(row)?;
            floats.extend_from_slice(&self.values);
        }
        Ok(floats)
    }

    /// Returns a row of those loaded last, decoded.
    pub(super) fn values(&mut self, row: usize) -> Result<&[f32]> {
        self.decode(row)?;
        Ok(&self.values)
    }

    /// Decodes a row into `values`.
    fn decode(&mut self, row: usize) -> Result<()> {
        let mut values = std::mem::take(&mut self.values);
        values.resize(self.cols, 0.0);
        match self.form {
            Form::Plain(dtype) => decode_floats(dtype, self.raw(row)?, &mut values)?,
            Form::Blocks(kind) => {
                blocks::dequantize(kind, self.raw(row)?, &mut values)?;
                if let Some(number) = self.numbers.get(self.matrix) {
                    values.iter_mut().for_each(|value| *value *= number);
                }
            }
            Form::Tiles(_) => {
                let (layout, coded) = self.coded(row).expect("tiles have a layout");
                coded.dequantize(layout, &mut values);
            }
        }
        self.merged.iter().for_each(|merged| merged.apply(self.matrix, row, &mut values));
        self.values = values;
        Ok(())
    }
}

/// Returns the layout of the matrices and a buffer for a row, if `form` has tiles.
fn tiles(form: Form, rows: usize, cols: usize) -> Result<Option<(TileLayout, CodedRow)>> {
    let Form::Tiles(spec) = form else { return Ok(None) };
    let layout = TileLayout::new(spec, rows, cols)?;
    Ok(Some((layout, CodedRow::new(&layout))))
}

/// Columns in another order than in the source: run `i` of `width` columns is run `order[i]` of the source. Groups of
/// codes lie inside of runs ([`CodedRow::has_movable_runs`]).
#[derive(Debug, Clone)]
pub(super) struct ColumnOrder {
    pub(super) width: usize,
    pub(super) order: Vec<usize>,
}

/// Tensor that is written, or a part of one.
pub(super) struct RowTarget {
    pub(super) form: Form,
    /// Matrices of the sources that are written.
    pub(super) matrices: Range<usize>,
    /// Number of rows that are written of each matrix.
    pub(super) rows: usize,
    /// Number of elements of a row.
    pub(super) cols: usize,
    /// Number that is added to every element of floats; 0 for other forms.
    pub(super) add: f32,
    /// Order of the columns, if it is another one than in the sources.
    pub(super) columns: Option<ColumnOrder>,
}

impl RowTarget {
    /// Passes all rows of all matrices to `put` in order. For a row of the target, `find` returns the index of its
    /// source and its row in that source; these are the same for every matrix.
    pub(super) fn fill(
        &self,
        sources: &mut [RowSource<'_>],
        find: impl Fn(usize) -> (usize, usize),
        put: &mut Put<'_>,
    ) -> Result<()> {
        let height = (CHUNK_ELEMENTS / self.cols.max(1) / TILE_ROWS * TILE_ROWS).max(TILE_ROWS);
        let mut encoded = Vec::new();
        for matrix in self.matrices.clone() {
            for start in (0..self.rows).step_by(height) {
                let places: Vec<(usize, usize)> = (start..self.rows.min(start + height)).map(&find).collect();
                for (number, source) in sources.iter_mut().enumerate() {
                    let needed = || places.iter().filter(|place| place.0 == number).map(|place| place.1);
                    if let (Some(first), Some(last)) = (needed().min(), needed().max()) {
                        source.load(matrix, first..last + 1)?;
                    }
                }
                let source = &sources[places[0].0];
                let consecutive = places.windows(2).all(|pair| (pair[0].0, pair[0].1 + 1) == pair[1]);
                if consecutive && self.keeps_bytes(source) {
                    put(&source.bytes)?;
                    continue;
                }
                encoded.clear();
                match tiles(self.form, self.rows, self.cols)? {
                    Some((layout, mut coded)) => into_tiles(sources, &places, &layout, &mut coded, &mut encoded)?,
                    None => places
                        .iter()
                        .try_for_each(|(source, row)| self.append(&mut sources[*source], *row, &mut encoded))?,
                }
                put(&encoded)?;
            }
        }
        Ok(())
    }

    /// Returns true if rows are copied, because they have the same bytes in the source.
    fn keeps_bytes(&self, source: &RowSource) -> bool {
        matches!(self.form, Form::Plain(_))
            && self.form == source.form
            && self.add == 0.0
            && self.columns.is_none()
            && source.merged.is_empty()
    }

    /// Appends one row that is not in a tile.
    pub(super) fn append(&self, source: &mut RowSource, row: usize, encoded: &mut Vec<u8>) -> Result<()> {
        match self.form {
            Form::Plain(_) if self.keeps_bytes(source) => {
                encoded.extend_from_slice(source.raw(row)?);
                Ok(())
            }
            Form::Plain(to) => {
                source.decode(row)?;
                if self.add != 0.0 {
                    source.values.iter_mut().for_each(|x| *x += self.add);
                }
                if let Some(columns) = &self.columns {
                    source.values = columns
                        .order
                        .iter()
                        .flat_map(|run| &source.values[run * columns.width..][..columns.width])
                        .copied()
                        .collect();
                }
                round_into(to, &source.values, encoded)
            }
            Form::Blocks(kind) => {
                let start = encoded.len();
                let (layout, coded) = source.coded(row).expect("only tiles become blocks");
                encoded.resize(start + coded.codes.len() / kind.block() * kind.block_bytes(), 0);
                let moved = self.columns.as_ref().map(|columns| coded.with_runs(layout, columns.width, &columns.order));
                blocks::from_row(kind, layout, moved.as_ref().unwrap_or(coded), &mut encoded[start..]);
                Ok(())
            }
            Form::Tiles(_) => unreachable!("a row is part of a tile"),
        }
    }
}

/// Appends rows that are blocks in their sources as tiles. `places` holds, for each row, its source and its row there.
fn into_tiles(
    sources: &[RowSource<'_>],
    places: &[(usize, usize)],
    layout: &TileLayout,
    coded: &mut CodedRow,
    encoded: &mut Vec<u8>,
) -> Result<()> {
    encoded.resize(places.len().div_ceil(TILE_ROWS) * layout.tile_bytes, 0);
    for (tile, places) in encoded.chunks_exact_mut(layout.tile_bytes).zip(places.chunks(TILE_ROWS)) {
        for (slot, (source, row)) in places.iter().enumerate() {
            let source = &sources[*source];
            let Form::Blocks(kind) = source.form else { unreachable!("only blocks become tiles") };
            blocks::to_row(kind, source.raw(*row)?, coded)?;
            if let Some(number) = source.numbers.get(source.matrix) {
                coded.supers.copy_from_slice(&number.to_le_bytes());
            }
            put_row(layout, tile, slot, coded);
        }
        pad_tile(layout, tile, places.len());
    }
    Ok(())
}
