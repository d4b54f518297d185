//! A matrix in codes, as plain data: which source tensors hold its codes, scales and zero points, and how they lie
//! there. Each format describes its matrices in this form; [`super::decode`] computes floats from it, and
//! [`super::native`] the codes of a scheme of packs.
//!
//! The value of an element is `(code - zero) * scale`, or `table[code] * scale` for codes that are indices, or
//! `code * scale + offset`. All arithmetic is float32 on the stored numbers.

use crate::convert::source::source_tensor::SourceTensor;
use crate::scheme::BLOCK;
use std::ops::Range;

/// Matrix, or stack of matrices, whose elements are codes.
#[derive(Debug, Clone, PartialEq)]
pub struct Coded {
    /// Name that the tensor has in the unquantized model, which the views of families use: `MODULE.weight`.
    pub name: String,
    /// Shape in the unquantized model: `(out, in)` or `(experts, out, in)`.
    pub shape: Vec<usize>,
    /// Format in words, such as `GPTQ 4 bit`.
    pub form: String,
    /// Codes of all elements.
    pub(super) codes: Codes,
    /// Scales of groups of elements.
    pub(super) scales: Scales,
    /// Zero points of the same groups.
    pub(super) zeros: Zeros,
    /// Group of each column, `(in)` of I32, if columns of a group are not consecutive.
    pub(super) index: Option<SourceTensor>,
    /// Names of other tensors that belong to the matrix and are not read with its rows.
    pub(super) others: Vec<String>,
    /// True for matrices that `ptq` does not quantize again, because their codes are what the model was trained with.
    pub(super) is_final: bool,
}

/// Codes of a matrix.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Codes {
    /// Tensor that holds them.
    pub tensor: SourceTensor,
    /// Order of the codes in the tensor.
    pub packing: Packing,
    /// Bits of a code, 1 to 8.
    pub bits: u32,
    /// Meaning of a code.
    pub meaning: Meaning,
}

/// Order of codes in a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Packing {
    /// One byte for each code, row after row.
    Bytes,
    /// Rows of dense little-endian bit streams: code `j` has bits `bits * j ..` of the row.
    Stream,
    /// Rows of 32-bit words with `32 / bits` codes each, lowest bits first; the highest bits may be unused.
    Words,
    /// All rows as one sequence of nibbles, high nibble first.
    HighNibbleFirst,
    /// `(in * bits / 32, out)` words: for each output, a dense bit stream along the inputs.
    AlongInputs,
    /// `(in, out / 8)` words: nibble `i` of word `c` is output `8 c + [0, 2, 4, 6, 1, 3, 5, 7][i]`.
    Interleaved,
}

/// Meaning of a code.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Meaning {
    /// Unsigned integer.
    Unsigned,
    /// Two's complement byte.
    Signed,
    /// OCP FP4: 0 0.5 1 1.5 2 3 4 6 with sign.
    E2m1,
    /// FP8 with 4 bits of exponent and 3 of mantissa, without infinity.
    E4m3,
    /// Table of the file.
    Table(Box<[f32; 16]>),
}

/// Scales of a matrix.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Scales {
    /// Numbers.
    pub values: ScaleValues,
    /// Elements that share a scale.
    pub grid: Grid,
    /// Number of groups of a row.
    pub groups: usize,
    /// Factor of every product `code * scale`; 1 for most formats.
    pub factor: f32,
}

/// Numbers of scales as a file stores them.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum ScaleValues {
    /// Floats.
    Floats(SourceTensor),
    /// Bytes `s` for the scale 2^(s - 127).
    E8m0(SourceTensor),
    /// FP8 (e4m3) scales of groups, times one float for the tensor or divided by it.
    TwoLevels { groups: SourceTensor, tensor: SourceTensor, divides: bool },
    /// Codes of scales: `map[code] * absmax[i / block] + offset`.
    Nested { codes: SourceTensor, map: Box<[f32]>, absmax: SourceTensor, block: usize, offset: f32 },
}

/// Elements that share a scale, and the order of the scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Grid {
    /// Blocks of `height` rows and `width` columns, the last ones shorter; scales row after row for each matrix.
    Blocks { height: usize, width: usize },
    /// `width` columns of one row; the scales are `(groups, out)`.
    Transposed { width: usize },
    /// `length` consecutive elements of the matrix, over the ends of rows.
    Flat { length: usize },
}

/// Zero points of groups.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Zeros {
    /// The same for all groups.
    Constant(i32),
    /// Codes of as many bits as those of the weights, packed in 32-bit words, plus a number.
    Packed { tensor: SourceTensor, order: ZeroOrder, add: i32 },
    /// Bytes in the order of the scales.
    Bytes { tensor: SourceTensor, is_signed: bool },
    /// Floats in the order of the scales that are added after scaling.
    Offsets(SourceTensor),
}

/// Order of packed zero points.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ZeroOrder {
    /// `(ceil(out * bits / 32), groups)`: for each group, a dense bit stream along the outputs.
    AlongRows,
    /// `(groups, out * bits / 32)`: for each group, a dense bit stream along the outputs.
    AlongOutputs,
    /// `(groups, out / 8)` in the order of [`Packing::Interleaved`].
    Interleaved,
}

/// Outputs of the nibbles of a word in the order of [`Packing::Interleaved`], lowest nibble first.
pub(super) const INTERLEAVED: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

impl Codes {
    /// Creates a description of codes.
    pub fn new(tensor: &SourceTensor, packing: Packing, bits: u32, meaning: Meaning) -> Codes {
        Codes { tensor: tensor.clone(), packing, bits, meaning }
    }
}

impl Scales {
    /// Creates scales of blocks of `height` rows and `width` columns of a matrix with `cols` columns.
    pub fn blocks(values: ScaleValues, height: usize, width: usize, cols: usize) -> Scales {
        let (height, width) = (height.max(1), width.max(1));
        Scales { values, grid: Grid::Blocks { height, width }, groups: cols.div_ceil(width), factor: 1.0 }
    }
}

impl Coded {
    /// Creates a symmetric matrix: codes without zero points, or tables.
    pub(super) fn new(name: &str, shape: &[usize], form: impl Into<String>, codes: Codes, scales: Scales) -> Coded {
        Coded {
            name: name.to_string(),
            shape: shape.to_vec(),
            form: form.into(),
            codes,
            scales,
            zeros: Zeros::Constant(0),
            index: None,
            others: Vec::new(),
            is_final: false,
        }
    }

    /// Returns the number of rows and columns of each matrix.
    pub(super) fn matrix(&self) -> (usize, usize) {
        match self.shape[..] {
            [.., rows, cols] => (rows, cols),
            _ => (0, 0),
        }
    }

    /// Returns the number of the matrix and the rows in it of `count` rows from row number `first` of the stack on, all
    /// of which are in one matrix.
    pub fn place(&self, first: usize, count: usize) -> (usize, Range<usize>) {
        let (n_rows, _) = self.matrix();
        let (matrix, row) = (first / n_rows.max(1), first % n_rows.max(1));
        (matrix, row..row + count)
    }

    /// Returns the source tensors whose rows are read, the codes first.
    pub fn tensors(&self) -> Vec<&SourceTensor> {
        let scales = match &self.scales.values {
            ScaleValues::Floats(tensor) | ScaleValues::E8m0(tensor) => vec![tensor],
            ScaleValues::TwoLevels { groups, tensor, .. } => vec![groups, tensor],
            ScaleValues::Nested { codes, absmax, .. } => vec![codes, absmax],
        };
        let zeros = match &self.zeros {
            Zeros::Constant(_) => None,
            Zeros::Packed { tensor, .. } | Zeros::Bytes { tensor, .. } | Zeros::Offsets(tensor) => Some(tensor),
        };
        [&self.codes.tensor].into_iter().chain(scales).chain(zeros).chain(&self.index).collect()
    }

    /// Returns the names of all source tensors that belong to the matrix.
    pub fn part_names(&self) -> impl Iterator<Item = &str> {
        let read = self.tensors().into_iter().map(|tensor| tensor.name.as_str());
        read.chain(self.others.iter().map(String::as_str))
    }

    /// Returns the bytes of the source tensors that are read.
    pub fn nbytes(&self) -> u64 {
        self.tensors().iter().map(|tensor| tensor.nbytes as u64).sum()
    }

    /// Returns true if the source holds columns of the matrix together, so that reading few rows at a time is slow.
    pub fn is_transposed(&self) -> bool {
        matches!(self.codes.packing, Packing::AlongInputs | Packing::Interleaved)
    }

    /// Returns true if every value of the codes is known to be kept by `ptq`.
    pub fn is_final(&self) -> bool {
        self.is_final
    }

    /// Returns the number of consecutive columns of a row that share a scale; `None` if groups are other than that.
    pub(super) fn group_width(&self) -> Option<usize> {
        match self.scales.grid {
            Grid::Blocks { height: _, width } | Grid::Transposed { width } => Some(width),
            Grid::Flat { .. } => None,
        }
    }

    /// Returns true for NVFP4: FP4 codes with an FP8 scale for each 16 columns and a float for the matrix.
    pub(super) fn is_nvfp4(&self) -> bool {
        let scales = matches!(self.scales.values, ScaleValues::TwoLevels { .. });
        let grid = Grid::Blocks { height: 1, width: BLOCK / 2 };
        self.codes.meaning == Meaning::E2m1 && scales && self.scales.grid == grid && self.shape.len() == 2
    }

    /// Returns true for MX blocks: FP4 codes with a power of two for each [`BLOCK`] columns.
    pub(super) fn is_mxfp4(&self) -> bool {
        let scales = matches!(self.scales.values, ScaleValues::E8m0(_));
        self.codes.meaning == Meaning::E2m1 && scales && self.scales.grid == Grid::Blocks { height: 1, width: BLOCK }
    }
}
