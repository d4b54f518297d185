//! The table of quantization schemes: one row per scheme, with everything that other modules ask about it.
//!
//! Nothing outside this table decides by the name of a scheme. Code that treats codes differently (codecs, kernels,
//! GGML types, the lossless coder) decides by the [`CodeMap`]; the other columns answer for themselves.

use super::granularity::{Granularity, ScaleType};
use crate::error::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The name of a row of [`SCHEMES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// GGML q4_0: blocks of 32, value = (code - 8) * d, d = fp16 (value of largest magnitude) / -8.
    Q4_0,
    /// 4-bit integers per group, row or tensor: symmetric -8..=7, or affine 0..=15 with a zero point.
    Int4,
    /// GGML's IQ4_NL: blocks of 32, value = d * an entry of [`CodeTable::Iq4Nl`].
    Nl4,
    /// OCP microscaling FP4: blocks of 32 E2M1 codes, scale 2^(s - 127).
    Mxfp4,
    /// 5-bit integers -16..=15 per group, row or tensor; symmetric.
    Int5,
    /// 6-bit integers -32..=31 per group, row or tensor; symmetric.
    Int6,
    /// 8-bit integers -127..=127 per group, row or tensor; symmetric.
    Int8,
}

/// What a stored code stands for, in units of the scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeMap {
    /// An integer, stored with this bias (half the range of the codes) added.
    Biased(u8),
    /// An integer 0..=15 minus the zero point of its group.
    Affine,
    /// An entry of a table.
    Table(CodeTable),
    /// A two's-complement byte, -127..=127.
    Bytes,
}

/// A table of values for codes of four bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeTable {
    /// OCP FP4 (0 0.5 1 1.5 2 3 4 6 with sign), doubled so that the values are integers; the scale is halved in turn.
    E2m1,
    /// GGML's `kvalues_iq4nl`: the values lie closer together near zero, where most weights are.
    Iq4Nl,
}

impl CodeTable {
    /// What each code stands for.
    pub const fn values(self) -> &'static [i8; 16] {
        match self {
            CodeTable::E2m1 => &[0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
            CodeTable::Iq4Nl => &[-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
        }
    }

    /// The code of the least magnitude.
    const fn least(self) -> u8 {
        match self {
            CodeTable::E2m1 => 0,
            CodeTable::Iq4Nl => 8,
        }
    }
}

impl CodeMap {
    /// What a stored code stands for; `zero` is the zero point of its group, used by affine codes only.
    #[inline(always)]
    pub fn value(self, code: u8, zero: u8) -> i32 {
        match self {
            CodeMap::Biased(bias) => i32::from(code) - i32::from(bias),
            CodeMap::Affine => i32::from(code) - i32::from(zero),
            CodeMap::Table(table) => i32::from(table.values()[usize::from(code & 15)]),
            CodeMap::Bytes => i32::from(code as i8),
        }
    }

    /// The stored code that means zero, or the least value there is: padding meets activations of zero.
    pub fn neutral(self, zero: u8) -> u8 {
        match self {
            CodeMap::Biased(bias) => bias,
            CodeMap::Affine => zero,
            CodeMap::Table(table) => table.least(),
            CodeMap::Bytes => 0,
        }
    }
}

/// Which columns share a byte of canonical codes (see [`crate::quant::block`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeOrder {
    /// GGML's blocks of 32: byte j holds element j in the low and element j + 16 in the high nibble.
    Halves,
    /// Byte j holds column 2j in the low and column 2j + 1 in the high nibble; the bits above four lie behind all
    /// nibbles. Codes of eight bits are bytes, one per column. Biased codes are stored as two's complement.
    Columns,
}

/// The scale of a group before any search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlainScale {
    /// Puts the largest magnitude on the highest code.
    Magnitude,
    /// Puts the value of largest magnitude, with its sign, on the lowest code, as GGML does.
    SignedPeak,
}

/// A row of [`SCHEMES`].
#[derive(Debug)]
pub struct SchemeInfo {
    /// Which row this is.
    pub scheme: Scheme,
    /// Name in manifests and packs, in reports and on the command line.
    pub name: &'static str,
    /// Names in rules of older manifests.
    pub older_names: &'static [&'static str],
    /// The `dtype` word of packs.
    pub dtype: &'static str,
    /// Bits per code.
    pub bits: u32,
    /// What the codes of symmetric groups stand for.
    pub codes: CodeMap,
    /// Groups may have zero points, which turns [`SchemeInfo::codes`] into [`CodeMap::Affine`].
    pub may_be_affine: bool,
    /// Blocks of 32 weights: group size, symmetry and scale type cannot be chosen, and canonical codes are whole
    /// blocks.
    pub is_block_format: bool,
    /// Which columns share a byte of canonical codes.
    pub order: CodeOrder,
    /// Weights that share a scale where nothing else is said.
    pub granularity: Granularity,
    /// Type of scales where nothing else is said.
    pub scale_dtype: ScaleType,
    /// The scale that searches start from.
    pub plain_scale: PlainScale,
    /// The best scale is searched where no method is named. For int8 the search gains 1 % of the squared error, which
    /// is not worth its time; for the others 11 % and more (llama-trained, stories260k).
    pub is_searched: bool,
    /// Checkpoints hold these codes, and they are kept as they are: `iec ptq` does not offer to quantize to them.
    pub is_source_format: bool,
    /// Group sizes, each symmetric or not, that a budget may choose from.
    pub budget: &'static [(u32, bool)],
}

/// Integers with groups of a size that can be chosen.
const INTEGERS: SchemeInfo = SchemeInfo {
    scheme: Scheme::Int4,
    name: "int4",
    older_names: &[],
    dtype: "INT4",
    bits: 4,
    codes: CodeMap::Biased(8),
    may_be_affine: false,
    is_block_format: false,
    order: CodeOrder::Columns,
    granularity: Granularity::Group(32),
    scale_dtype: ScaleType::F16,
    plain_scale: PlainScale::Magnitude,
    is_searched: true,
    is_source_format: false,
    budget: &[(32, true)],
};

/// GGML's blocks of 32 with one scale.
const GGML_BLOCKS: SchemeInfo =
    SchemeInfo { is_block_format: true, order: CodeOrder::Halves, plain_scale: PlainScale::SignedPeak, ..INTEGERS };

/// Every scheme, in the order of [`Scheme`]. Of those with the same bits the first that has the wanted shape is meant
/// where only bits are given.
pub static SCHEMES: [SchemeInfo; 7] = [
    SchemeInfo { scheme: Scheme::Q4_0, name: "q4_0", ..GGML_BLOCKS },
    SchemeInfo {
        older_names: &["int4", "int4w", "q4"],
        may_be_affine: true,
        budget: &[(128, true), (64, true), (64, false), (32, false)],
        ..INTEGERS
    },
    SchemeInfo {
        scheme: Scheme::Nl4,
        name: "nl4",
        dtype: "NL4",
        codes: CodeMap::Table(CodeTable::Iq4Nl),
        ..GGML_BLOCKS
    },
    SchemeInfo {
        scheme: Scheme::Mxfp4,
        name: "mxfp4",
        dtype: "FP4",
        codes: CodeMap::Table(CodeTable::E2m1),
        is_block_format: true,
        scale_dtype: ScaleType::E8m0,
        is_searched: false,
        is_source_format: true,
        budget: &[],
        ..INTEGERS
    },
    SchemeInfo { scheme: Scheme::Int5, name: "int5", dtype: "INT5", bits: 5, codes: CodeMap::Biased(16), ..INTEGERS },
    SchemeInfo { scheme: Scheme::Int6, name: "int6", dtype: "INT6", bits: 6, codes: CodeMap::Biased(32), ..INTEGERS },
    SchemeInfo {
        scheme: Scheme::Int8,
        name: "int8",
        older_names: &["int8", "int8w", "q8"],
        dtype: "INT8",
        bits: 8,
        codes: CodeMap::Bytes,
        granularity: Granularity::Row,
        is_searched: false,
        ..INTEGERS
    },
];

impl Scheme {
    /// Its row.
    #[inline]
    pub fn info(self) -> &'static SchemeInfo {
        &SCHEMES[self as usize]
    }

    /// Bits per code.
    pub fn bits(self) -> u32 {
        self.info().bits
    }

    /// The name used in manifests and on the command line.
    pub fn name(self) -> &'static str {
        self.info().name
    }

    /// The schemes that weights are quantized to.
    pub fn offered() -> impl Iterator<Item = Scheme> {
        SCHEMES.iter().filter(|row| !row.is_source_format).map(|row| row.scheme)
    }
}

impl std::str::FromStr for Scheme {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let row = SCHEMES.iter().find(|row| row.name == s);
        row.map(|row| row.scheme).ok_or_else(|| {
            let names = SCHEMES.iter().map(|row| row.name).collect::<Vec<_>>().join(", ");
            Error::usage(format!("scheme `{s}`: expected one of {names}"))
        })
    }
}

impl Serialize for Scheme {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        s.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Scheme {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheme::QuantSpec;

    #[test]
    fn rows_stand_in_the_order_of_the_schemes_and_agree_with_themselves() {
        for (i, row) in SCHEMES.iter().enumerate() {
            assert_eq!((row.scheme as usize, row.name.parse::<Scheme>().unwrap()), (i, row.scheme));
            assert_eq!(serde_json::to_value(row.scheme).unwrap(), row.name);
            assert_eq!(serde_json::from_value::<Scheme>(row.name.into()).unwrap(), row.scheme);
            QuantSpec::usual(row.scheme).validate().unwrap();
            let bits = match row.codes {
                CodeMap::Biased(bias) => u32::from(bias).ilog2() + 1,
                CodeMap::Affine | CodeMap::Table(_) => 4,
                CodeMap::Bytes => 8,
            };
            assert_eq!(row.bits, bits, "{}", row.name);
        }
        assert!("int7".parse::<Scheme>().is_err());
    }

    #[test]
    fn neutral_codes_mean_the_least_magnitude() {
        for codes in SCHEMES.iter().map(|row| row.codes).chain([CodeMap::Affine]) {
            let neutral = codes.value(codes.neutral(3), 3);
            let least = (0..=15).map(|code| codes.value(code, 3).abs()).min();
            assert!(Some(neutral.abs()) <= least, "{codes:?}: {neutral}");
        }
    }
}
