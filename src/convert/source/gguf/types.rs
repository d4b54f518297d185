//! Element types of GGML tensors: their numbers in files, names, and block sizes.

use super::blocks::{iq, k, legacy, small};
use super::foreign;
use crate::dtype::DType;
use crate::error::Result;
use std::fmt;

/// Storage format of the elements of a GGUF tensor, with the names of GGML.
#[allow(missing_docs, non_camel_case_types)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GgmlType {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ2_XXS,
    IQ2_XS,
    IQ3_XXS,
    IQ1_S,
    IQ4_NL,
    IQ3_S,
    IQ2_S,
    IQ4_XS,
    I8,
    I16,
    I32,
    I64,
    F64,
    IQ1_M,
    BF16,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_0,
    /// Q2_0 with groups of 128 elements, as forks of llama.cpp wrote it under the same number.
    Q2_0_G128,
}

/// Decoder of the blocks of a type.
#[derive(Clone, Copy)]
pub(super) enum Meaning {
    /// A block is one element of this type.
    Plain(DType),
    /// A block holds codes with scales; the function writes the values of one block.
    Coded(fn(&[u8], &mut [f32])),
    /// This program cannot decode the type.
    Unread,
}

use GgmlType::*;
use Meaning::*;

/// Entry of [`TYPES`].
type Row = (GgmlType, u32, usize, usize, Meaning);

/// Type, number in files, elements per block, bytes per block (`ggml.h` and `ggml-common.h`), and decoder.
const TYPES: &[Row] = &[
    (F32, 0, 1, 4, Plain(DType::F32)),
    (F16, 1, 1, 2, Plain(DType::F16)),
    (Q4_0, 2, 32, 18, Coded(legacy::q4_0)),
    (Q4_1, 3, 32, 20, Coded(legacy::q4_1)),
    (Q5_0, 6, 32, 22, Coded(legacy::q5_0)),
    (Q5_1, 7, 32, 24, Coded(legacy::q5_1)),
    (Q8_0, 8, 32, 34, Coded(legacy::q8_0)),
    (Q8_1, 9, 32, 36, Unread),
    (Q2_K, 10, 256, 84, Coded(k::q2)),
    (Q3_K, 11, 256, 110, Coded(k::q3)),
    (Q4_K, 12, 256, 144, Coded(k::q4)),
    (Q5_K, 13, 256, 176, Coded(k::q5)),
    (Q6_K, 14, 256, 210, Coded(k::q6)),
    (Q8_K, 15, 256, 292, Unread),
    (IQ2_XXS, 16, 256, 66, Coded(iq::iq2_xxs)),
    (IQ2_XS, 17, 256, 74, Coded(iq::iq2_xs)),
    (IQ3_XXS, 18, 256, 98, Coded(iq::iq3_xxs)),
    (IQ1_S, 19, 256, 50, Coded(iq::iq1_s)),
    (IQ4_NL, 20, 32, 18, Coded(legacy::iq4_nl)),
    (IQ3_S, 21, 256, 110, Coded(iq::iq3_s)),
    (IQ2_S, 22, 256, 82, Coded(iq::iq2_s)),
    (IQ4_XS, 23, 256, 136, Coded(k::iq4_xs)),
    (I8, 24, 1, 1, Unread),
    (I16, 25, 1, 2, Unread),
    (I32, 26, 1, 4, Unread),
    (I64, 27, 1, 8, Unread),
    (F64, 28, 1, 8, Plain(DType::F64)),
    (IQ1_M, 29, 256, 56, Coded(iq::iq1_m)),
    (BF16, 30, 1, 2, Plain(DType::BF16)),
    (TQ1_0, 34, 256, 54, Coded(small::tq1_0)),
    (TQ2_0, 35, 256, 66, Coded(small::tq2_0)),
    (MXFP4, 39, 32, 17, Coded(legacy::mxfp4)),
    (NVFP4, 40, 64, 36, Coded(small::nvfp4)),
    (Q1_0, 41, 128, 18, Coded(small::q1_0)),
    (Q2_0, 42, 64, 18, Coded(small::q2_0)),
    (Q2_0_G128, 42, 128, 34, Coded(small::q2_0)),
];

impl GgmlType {
    /// Returns the type with this number in files; for number 42, which stands for two group sizes, the one of
    /// llama.cpp ([`Q2_0`]).
    ///
    /// # Errors
    /// This program does not support a type with this number. The error names the program that does, if it is known.
    pub fn of(id: u32) -> Result<GgmlType> {
        let row = TYPES.iter().find(|row| row.1 == id);
        row.map(|row| row.0).ok_or_else(|| foreign::refusal(id))
    }

    /// Returns the names of the types whose values can be decoded.
    pub(super) fn readable() -> Vec<String> {
        TYPES.iter().filter(|row| !matches!(row.4, Unread)).map(|row| row.0.to_string()).collect()
    }

    /// Returns all types of the table.
    #[cfg(test)]
    pub(super) fn all() -> impl Iterator<Item = GgmlType> {
        TYPES.iter().map(|row| row.0)
    }

    fn row(self) -> &'static Row {
        TYPES.iter().find(|row| row.0 == self).expect("every type has a row")
    }

    /// Returns the number of the type in files.
    pub fn id(self) -> u32 {
        self.row().1
    }

    /// Returns the number of elements per block; rows consist of whole blocks.
    pub fn block(self) -> usize {
        self.row().2
    }

    /// Returns the size of a block in bytes.
    pub fn block_bytes(self) -> usize {
        self.row().3
    }

    /// Returns the decoder of the type's blocks.
    pub(super) fn meaning(self) -> Meaning {
        self.row().4
    }

    /// Returns the size in bytes of a row of `cols` elements; `None` when `cols` is not a multiple of the
    /// block or the size overflows.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        cols.is_multiple_of(self.block()).then(|| (cols / self.block()).checked_mul(self.block_bytes())).flatten()
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_types_belong_together_and_rows_are_whole_blocks() {
        for (kind, id, ..) in TYPES {
            let first = if *kind == Q2_0_G128 { Q2_0 } else { *kind };
            assert_eq!((GgmlType::of(*id).unwrap(), kind.id()), (first, *id));
        }
        assert!(GgmlType::of(4).is_err() && GgmlType::of(u32::MAX).is_err());
        assert_eq!((Q4_K.row_bytes(512), Q4_K.row_bytes(500), F32.row_bytes(usize::MAX)), (Some(288), None, None));
    }
}
