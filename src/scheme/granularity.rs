//! Granularity of quantization scales ([`Granularity`]) and their storage type ([`ScaleType`]).

use crate::error::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// Number of weights that share a scale: a number of columns, a whole row, or a whole matrix. Written as `32`, `"row"`,
/// `"tensor"` in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// Number of consecutive columns of a row that share a scale: a multiple of [`BLOCK`](super::BLOCK), or half of it
    /// in formats that have such groups.
    Group(u32),
    /// One scale per row.
    Row,
    /// One scale for the whole tensor; in a tensor of several matrices, one for each matrix. Tiles store a copy for
    /// each row, so kernels treat it like [`Granularity::Row`].
    Tensor,
}

impl fmt::Display for Granularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Granularity::Group(n) => write!(f, "{n}"),
            Granularity::Row => f.write_str("row"),
            Granularity::Tensor => f.write_str("tensor"),
        }
    }
}

impl std::str::FromStr for Granularity {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        match s {
            "row" => Ok(Granularity::Row),
            "tensor" => Ok(Granularity::Tensor),
            _ => match s.parse() {
                Ok(n @ (16 | 32 | 64 | 128 | 256)) => Ok(Granularity::Group(n)),
                _ => Err(Error::usage(format!("group size `{s}`: expected 32, 64, 128, 256, row or tensor"))),
            },
        }
    }
}

impl Serialize for Granularity {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        match self {
            Granularity::Group(n) => s.serialize_u32(*n),
            _ => s.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for Granularity {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Spelling {
            Number(u32),
            Word(String),
        }
        let word = match Spelling::deserialize(d)? {
            Spelling::Number(n) => n.to_string(),
            Spelling::Word(w) => w,
        };
        word.parse().map_err(serde::de::Error::custom)
    }
}

/// Storage type of scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScaleType {
    /// IEEE half precision.
    F16,
    /// IEEE single precision, for scales that would overflow or underflow in half precision.
    F32,
    /// Exponent byte `s` for the scale 2^(s - 127); MXFP4 only.
    E8m0,
    /// Integer that is multiplied by the fp16 number of its super-block of 256 columns; GGML's types with two levels of
    /// scales only. It is unsigned in schemes with minimums, otherwise signed.
    I8,
    /// FP8 number that is multiplied by the f32 number of its row; NVFP4 only.
    E4m3,
    /// Signed integer that is multiplied by the f32 number of its row. In rows whose largest scale has 127 of these
    /// steps, the rounding of scales costs next to nothing, and they take half the bits of f16.
    #[serde(rename = "i8_row")]
    I8Row,
}

impl ScaleType {
    /// Returns the size of one scale in bytes.
    pub fn size(self) -> usize {
        match self {
            ScaleType::F16 => 2,
            ScaleType::F32 => 4,
            ScaleType::E8m0 | ScaleType::I8 | ScaleType::E4m3 | ScaleType::I8Row => 1,
        }
    }

    /// Returns true when scales are multiplied by numbers that many groups share.
    pub fn has_two_levels(self) -> bool {
        matches!(self, ScaleType::I8) || self.is_of_row()
    }

    /// Returns true when scales are multiplied by the f32 number of their row.
    pub const fn is_of_row(self) -> bool {
        matches!(self, ScaleType::E4m3 | ScaleType::I8Row)
    }

    /// Returns the size in bytes of one of these numbers.
    pub fn super_size(self) -> usize {
        if self.is_of_row() { 4 } else { 2 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn granularity_is_a_number_or_a_word_in_json() {
        for (text, g) in
            [("32", Granularity::Group(32)), ("\"row\"", Granularity::Row), ("\"tensor\"", Granularity::Tensor)]
        {
            assert_eq!(serde_json::from_str::<Granularity>(text).unwrap(), g);
            assert_eq!(serde_json::to_string(&g).unwrap(), text);
        }
        assert!(serde_json::from_str::<Granularity>("48").is_err());
    }
}
