//! The element types of GGML tensors: numbers in files, names, and the size of a block.

use crate::error::{Error, Result};
use std::fmt;

/// How the elements of a GGUF tensor are stored. Names are GGML's.
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
}

use GgmlType::*;

/// Type, number in the file, elements of a block, bytes of a block (`ggml.h` and `ggml-common.h`).
const TYPES: &[(GgmlType, u32, usize, usize)] = &[
    (F32, 0, 1, 4),
    (F16, 1, 1, 2),
    (Q4_0, 2, 32, 18),
    (Q4_1, 3, 32, 20),
    (Q5_0, 6, 32, 22),
    (Q5_1, 7, 32, 24),
    (Q8_0, 8, 32, 34),
    (Q8_1, 9, 32, 36),
    (Q2_K, 10, 256, 84),
    (Q3_K, 11, 256, 110),
    (Q4_K, 12, 256, 144),
    (Q5_K, 13, 256, 176),
    (Q6_K, 14, 256, 210),
    (Q8_K, 15, 256, 292),
    (IQ2_XXS, 16, 256, 66),
    (IQ2_XS, 17, 256, 74),
    (IQ3_XXS, 18, 256, 98),
    (IQ1_S, 19, 256, 50),
    (IQ4_NL, 20, 32, 18),
    (IQ3_S, 21, 256, 110),
    (IQ2_S, 22, 256, 82),
    (IQ4_XS, 23, 256, 136),
    (I8, 24, 1, 1),
    (I16, 25, 1, 2),
    (I32, 26, 1, 4),
    (I64, 27, 1, 8),
    (F64, 28, 1, 8),
    (IQ1_M, 29, 256, 56),
    (BF16, 30, 1, 2),
    (TQ1_0, 34, 256, 54),
    (TQ2_0, 35, 256, 66),
    (MXFP4, 39, 32, 17),
];

impl GgmlType {
    /// The type of a number in a file.
    ///
    /// # Errors
    /// No type that this program knows has that number.
    pub fn of(id: u32) -> Result<GgmlType> {
        let row = TYPES.iter().find(|row| row.1 == id);
        row.map(|row| row.0).ok_or_else(|| Error::unsupported(format!("element type number {id} is not known")))
    }

    fn row(self) -> &'static (GgmlType, u32, usize, usize) {
        TYPES.iter().find(|row| row.0 == self).expect("every type has a row")
    }

    /// Its number in a file.
    pub fn id(self) -> u32 {
        self.row().1
    }

    /// Elements of one block; rows consist of whole blocks.
    pub fn block(self) -> usize {
        self.row().2
    }

    /// Bytes of one block.
    pub fn block_bytes(self) -> usize {
        self.row().3
    }

    /// Bytes of a row of `cols` elements; `None` when it does not consist of whole blocks or is too long.
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
            assert_eq!((GgmlType::of(*id).unwrap(), kind.id()), (*kind, *id));
        }
        assert!(GgmlType::of(4).is_err() && GgmlType::of(u32::MAX).is_err());
        assert_eq!((Q4_K.row_bytes(512), Q4_K.row_bytes(500), F32.row_bytes(usize::MAX)), (Some(288), None, None));
    }
}
