//! Table of quantization schemes: one entry per scheme, with all properties that other modules use.
//!
//! Code outside this table never branches on the name of a scheme. Code that treats codes differently (codecs,
//! kernels, GGML types, the lossless coder) branches on the [`CodeMap`]; all other properties are read from the fields
//! of [`SchemeInfo`].

use super::granularity::{Granularity, ScaleType};
use super::trellis::{self, Trellis};
use crate::error::{Error, Result};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Identifier of a quantization scheme and of its entry in [`SCHEMES`].
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
    /// GGML Q4_1: blocks of 32, value = d * code + m with codes 0..=15, d and m fp16.
    Q4_1,
    /// GGML Q5_1: like Q4_1 with codes 0..=31.
    Q5_1,
    /// GGML Q2_K: groups of 16 in super-blocks of 256, value = d * scale * code - dmin * minimum; 4-bit scale and
    /// minimum in one byte.
    Q2K,
    /// GGML Q3_K: groups of 16 in super-blocks of 256, value = d * scale * (code - 4) with signed scales.
    Q3K,
    /// GGML Q4_K: groups of 32 in super-blocks of 256, value = d * scale * code - dmin * minimum.
    Q4K,
    /// GGML Q5_K: like Q4_K with codes 0..=31.
    Q5K,
    /// GGML Q6_K: groups of 16 in super-blocks of 256, value = d * scale * (code - 32) with signed scales.
    Q6K,
    /// GGML IQ4_XS: groups of 32 in super-blocks of 256, value = d * scale * an entry of [`CodeTable::Iq4Nl`].
    Iq4Xs,
    /// FP8 as published: E4M3 codes with a scale per group, row or tensor.
    Fp8,
    /// NVFP4: groups of 16 E2M1 codes, value = code * (E4M3 scale of the group * number of the row).
    Nvfp4,
    /// Trellis of 2 bits per weight, see [`Trellis`].
    T2,
    /// Trellis of 3 bits per weight, see [`Trellis`].
    T3,
}

/// Map from a stored code to an integer in units of the scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeMap {
    /// Integer, stored with this bias (half the range of the codes) added.
    Biased(u8),
    /// Integer 0..=15 minus the zero point of its group.
    Affine,
    /// Integer without a bias, in a group with a minimum (see [`Minimum`]).
    Unsigned,
    /// Index into a table of values.
    Table(CodeTable),
    /// Index of 6 bits into a table of values, which shares bits with the indices of other weights.
    Trellis(&'static Trellis),
    /// Two's complement byte, -127..=127.
    Bytes,
    /// FP8 number (see [`e4m3`]). In units of its least step, 2^-9, it is an integer of 19 bits, which integer kernels
    /// do not multiply.
    E4m3,
}

/// Table of values for 4-bit codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeTable {
    /// OCP FP4 (0 0.5 1 1.5 2 3 4 6 with sign). The values are doubled to make them integers, and the scale is halved
    /// to compensate.
    E2m1,
    /// GGML's `kvalues_iq4nl`. The values are closer together near zero, where most weights are.
    Iq4Nl,
}

impl CodeTable {
    /// Returns the value of each code.
    #[inline(always)]
    pub const fn values(self) -> &'static [i8; 16] {
        match self {
            CodeTable::E2m1 => &[0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12],
            CodeTable::Iq4Nl => &[-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
        }
    }

    /// Returns the code whose value has the smallest magnitude.
    const fn least(self) -> u8 {
        match self {
            CodeTable::E2m1 => 0,
            CodeTable::Iq4Nl => 8,
        }
    }
}

impl CodeMap {
    /// Returns the integer value of a stored code. `zero` is the zero point of its group; only affine codes use it.
    #[inline(always)]
    pub fn value(self, code: u8, zero: u8) -> i32 {
        match self {
            CodeMap::Biased(bias) => i32::from(code) - i32::from(bias),
            CodeMap::Affine => i32::from(code) - i32::from(zero),
            CodeMap::Table(table) => i32::from(table.values()[usize::from(code & 15)]),
            CodeMap::Trellis(trellis) => i32::from(trellis.values[usize::from(code & 63)]),
            CodeMap::Unsigned => i32::from(code),
            CodeMap::Bytes => i32::from(code as i8),
            CodeMap::E4m3 => e4m3_steps(code),
        }
    }

    /// Returns the number that the scale of its group multiplies: that of FP8, or the integer value.
    #[inline(always)]
    pub fn number(self, code: u8, zero: u8) -> f32 {
        if self == CodeMap::E4m3 { e4m3(code) } else { self.value(code, zero) as f32 }
    }

    /// Returns what a number of 1 stands for, in units of the stored scale.
    #[inline(always)]
    pub fn unit(self) -> f32 {
        if self == CodeMap::Table(CodeTable::E2m1) { 0.5 } else { 1.0 }
    }

    /// Returns the stored code for zero, or for the value of smallest magnitude if there is no code for zero. Padding
    /// columns get this code; they are multiplied by activations of zero. In a trellis they get any code.
    pub fn neutral(self, zero: u8) -> u8 {
        match self {
            CodeMap::Biased(bias) => bias,
            CodeMap::Affine => zero,
            CodeMap::Table(table) => table.least(),
            CodeMap::Unsigned | CodeMap::Bytes | CodeMap::E4m3 | CodeMap::Trellis(_) => 0,
        }
    }
}

/// Returns the FP8 number of a code: a sign, 4 bits of exponent with bias 7, 3 bits of fraction; exponent 0 is
/// subnormal. The two patterns of NaN, 0x7f and 0xff, count as 480 and -480; converters refuse them.
#[inline(always)]
pub fn e4m3(code: u8) -> f32 {
    e4m3_steps(code) as f32 / 512.0
}

/// Returns the FP8 number of a code in units of 2^-9, which are integers.
#[inline(always)]
fn e4m3_steps(code: u8) -> i32 {
    let (exponent, fraction) = (code >> 3 & 15, i32::from(code & 7));
    let steps = if exponent == 0 { fraction } else { (8 + fraction) << (exponent - 1) };
    if code < 0x80 { steps } else { -steps }
}

/// Assignment of columns to the bytes of canonical codes (see [`crate::quant::block`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeOrder {
    /// GGML's blocks of 32: byte j holds element j in its low nibble and element j + 16 in its high nibble.
    Halves,
    /// Byte j holds column 2j in its low nibble and column 2j + 1 in its high nibble. The bits above the low four
    /// follow all nibbles. 8-bit codes take one byte per column. Biased codes are stored as two's complement.
    Columns,
    /// The four streams of each block of 32, one after the other, each of one byte per bit of a weight.
    Streams,
}

/// Storage of the minimum of a group, the number that is added to each product of scale and code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Minimum {
    /// Groups have no minimum.
    None,
    /// Half-precision number per group.
    F16,
    /// Byte per group, to be multiplied by the second fp16 number of the super-block and subtracted.
    U8,
    /// High nibble of the scale byte, to be multiplied like [`Minimum::U8`].
    Nibble,
}

impl Minimum {
    /// Returns the size in bytes of the entry that a group has behind its scale.
    pub const fn size(self) -> usize {
        match self {
            Minimum::None | Minimum::Nibble => 0,
            Minimum::U8 => 1,
            Minimum::F16 => 2,
        }
    }

    /// Returns the number of fp16 numbers that multiply the scales and minimums of a super-block.
    pub const fn supers(self) -> usize {
        if matches!(self, Minimum::U8 | Minimum::Nibble) { 2 } else { 1 }
    }
}

/// Rule for the initial scale of a group, before any search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlainScale {
    /// Scale under which the largest magnitude gets the highest code.
    Magnitude,
    /// Scale under which the value of largest magnitude, with its sign, gets the lowest code, as in GGML.
    SignedPeak,
}

/// Properties of one scheme: an entry of [`SCHEMES`].
#[derive(Debug)]
pub struct SchemeInfo {
    /// Scheme that this entry describes.
    pub scheme: Scheme,
    /// Name used in manifests, packs, reports and on the command line.
    pub name: &'static str,
    /// Names used in the rules of older manifests.
    pub older_names: &'static [&'static str],
    /// Value of the `dtype` field in packs.
    pub dtype: &'static str,
    /// Bits per code.
    pub bits: u32,
    /// Meaning of the codes of symmetric groups.
    pub codes: CodeMap,
    /// True if groups may have zero points, which changes [`SchemeInfo::codes`] to [`CodeMap::Affine`].
    pub may_be_affine: bool,
    /// True for formats made of blocks: group size, symmetry and scale type are fixed, and the canonical codes of each
    /// row are padded to a multiple of 32.
    pub is_block_format: bool,
    /// Order of columns in canonical codes.
    pub order: CodeOrder,
    /// Default granularity.
    pub granularity: Granularity,
    /// Storage of the minimums of groups.
    pub minimum: Minimum,
    /// Default storage type of scales.
    pub scale_dtype: ScaleType,
    /// Sizes of symmetric groups that may have scales of [`ScaleType::I8Row`].
    pub row_scaled: &'static [u32],
    /// Rule for the plain scale, with which a search begins.
    pub plain_scale: PlainScale,
    /// True if the default method searches for the best scale. For int8 the search reduces the squared error by only
    /// 1 %, which does not justify its time; for the other schemes it reduces it by 11 % and more (llama-trained,
    /// stories260k).
    pub is_searched: bool,
    /// True if published checkpoints contain these codes. They are stored unchanged, and `iec ptq` does not offer the
    /// scheme as a target.
    pub is_source_format: bool,
    /// Shapes of groups that the bit-budget planner may choose from: size, symmetry (true = symmetric), type of scales.
    pub budget: &'static [(u32, bool, ScaleType)],
}

/// Template for entries with integer codes and a selectable group size.
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
    minimum: Minimum::None,
    scale_dtype: ScaleType::F16,
    row_scaled: &[32],
    plain_scale: PlainScale::Magnitude,
    is_searched: true,
    is_source_format: false,
    budget: &[(32, true, ScaleType::I8Row)],
};

/// Template for entries with GGML's blocks of 32 and one scale per block.
const GGML_BLOCKS: SchemeInfo = SchemeInfo {
    is_block_format: true,
    order: CodeOrder::Halves,
    row_scaled: &[],
    plain_scale: PlainScale::SignedPeak,
    budget: &[(32, true, ScaleType::F16)],
    ..INTEGERS
};

/// Template for GGML's types with two levels of scales: a small integer per group, and fp16 numbers per super-block.
const SUPER_BLOCKS: SchemeInfo = SchemeInfo {
    is_block_format: true,
    scale_dtype: ScaleType::I8,
    row_scaled: &[],
    is_searched: false,
    is_source_format: true,
    budget: &[],
    ..INTEGERS
};

/// Template for trellises. A table of 64 values adapts to the spread of a group by itself, so that large groups cost
/// little.
const TRELLIS: SchemeInfo = SchemeInfo {
    order: CodeOrder::Streams,
    granularity: Granularity::Group(128),
    scale_dtype: ScaleType::I8Row,
    row_scaled: &[32, 64, 128],
    budget: &[(128, true, ScaleType::I8Row), (32, true, ScaleType::I8Row)],
    ..INTEGERS
};

/// All schemes, in the order of [`Scheme`]. If only a number of bits is given, the first entry with these bits that
/// supports the requested group size, symmetry and scale type is chosen.
pub static SCHEMES: [SchemeInfo; 19] = [
    SchemeInfo { scheme: Scheme::Q4_0, name: "q4_0", ..GGML_BLOCKS },
    SchemeInfo {
        older_names: &["int4", "int4w", "q4"],
        may_be_affine: true,
        budget: &[
            (128, true, ScaleType::F16),
            (64, true, ScaleType::F16),
            (64, false, ScaleType::F16),
            (32, false, ScaleType::F16),
        ],
        ..INTEGERS
    },
    SchemeInfo {
        scheme: Scheme::Nl4,
        name: "nl4",
        dtype: "NL4",
        codes: CodeMap::Table(CodeTable::Iq4Nl),
        row_scaled: INTEGERS.row_scaled,
        budget: INTEGERS.budget,
        ..GGML_BLOCKS
    },
    SchemeInfo {
        scheme: Scheme::Mxfp4,
        name: "mxfp4",
        dtype: "FP4",
        codes: CodeMap::Table(CodeTable::E2m1),
        is_block_format: true,
        scale_dtype: ScaleType::E8m0,
        row_scaled: &[],
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
        row_scaled: &[],
        is_searched: false,
        budget: GGML_BLOCKS.budget,
        ..INTEGERS
    },
    SchemeInfo {
        scheme: Scheme::Q4_1,
        name: "q4_1",
        codes: CodeMap::Unsigned,
        minimum: Minimum::F16,
        scale_dtype: ScaleType::F16,
        ..SUPER_BLOCKS
    },
    SchemeInfo {
        scheme: Scheme::Q5_1,
        name: "q5_1",
        dtype: "INT5",
        bits: 5,
        codes: CodeMap::Unsigned,
        minimum: Minimum::F16,
        scale_dtype: ScaleType::F16,
        ..SUPER_BLOCKS
    },
    SchemeInfo {
        scheme: Scheme::Q2K,
        name: "q2_k",
        dtype: "INT2",
        bits: 2,
        codes: CodeMap::Unsigned,
        granularity: Granularity::Group(16),
        minimum: Minimum::Nibble,
        ..SUPER_BLOCKS
    },
    SchemeInfo {
        scheme: Scheme::Q3K,
        name: "q3_k",
        dtype: "INT3",
        bits: 3,
        codes: CodeMap::Biased(4),
        granularity: Granularity::Group(16),
        ..SUPER_BLOCKS
    },
    SchemeInfo { scheme: Scheme::Q4K, name: "q4_k", codes: CodeMap::Unsigned, minimum: Minimum::U8, ..SUPER_BLOCKS },
    SchemeInfo {
        scheme: Scheme::Q5K,
        name: "q5_k",
        dtype: "INT5",
        bits: 5,
        codes: CodeMap::Unsigned,
        minimum: Minimum::U8,
        ..SUPER_BLOCKS
    },
    SchemeInfo {
        scheme: Scheme::Q6K,
        name: "q6_k",
        dtype: "INT6",
        bits: 6,
        codes: CodeMap::Biased(32),
        granularity: Granularity::Group(16),
        ..SUPER_BLOCKS
    },
    SchemeInfo {
        scheme: Scheme::Iq4Xs,
        name: "iq4_xs",
        dtype: "NL4",
        codes: CodeMap::Table(CodeTable::Iq4Nl),
        ..SUPER_BLOCKS
    },
    SchemeInfo {
        scheme: Scheme::Fp8,
        name: "fp8",
        dtype: "FP8",
        bits: 8,
        codes: CodeMap::E4m3,
        granularity: Granularity::Row,
        scale_dtype: ScaleType::F32,
        row_scaled: &[],
        is_searched: false,
        is_source_format: true,
        budget: &[],
        ..INTEGERS
    },
    SchemeInfo {
        scheme: Scheme::Nvfp4,
        name: "nvfp4",
        dtype: "FP4",
        codes: CodeMap::Table(CodeTable::E2m1),
        granularity: Granularity::Group(16),
        scale_dtype: ScaleType::E4m3,
        ..SUPER_BLOCKS
    },
    SchemeInfo {
        scheme: Scheme::T2,
        name: "t2",
        dtype: "INT2",
        bits: 2,
        codes: CodeMap::Trellis(&trellis::T2),
        ..TRELLIS
    },
    SchemeInfo {
        scheme: Scheme::T3,
        name: "t3",
        dtype: "INT3",
        bits: 3,
        codes: CodeMap::Trellis(&trellis::T3),
        ..TRELLIS
    },
];

impl Scheme {
    /// Returns the entry of the scheme in [`SCHEMES`].
    #[inline]
    pub fn info(self) -> &'static SchemeInfo {
        &SCHEMES[self as usize]
    }

    /// Returns the number of bits per code.
    pub fn bits(self) -> u32 {
        self.info().bits
    }

    /// Returns the name used in manifests and on the command line.
    pub fn name(self) -> &'static str {
        self.info().name
    }

    /// Returns true for schemes that floats can be quantized to; tensors of the others are only kept as they are.
    pub fn has_encoder(self) -> bool {
        let info = self.info();
        let has_scales = !info.scale_dtype.has_two_levels() || info.scale_dtype == ScaleType::I8Row;
        info.minimum == Minimum::None && has_scales && info.codes != CodeMap::E4m3
    }

    /// Returns the schemes that `iec ptq` can quantize weights to.
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
                CodeMap::Unsigned => row.bits,
                CodeMap::Trellis(trellis) => trellis.bits,
                CodeMap::Bytes | CodeMap::E4m3 => 8,
            };
            assert_eq!(row.bits, bits, "{}", row.name);
        }
        assert!("int7".parse::<Scheme>().is_err());
    }

    #[test]
    fn numbers_of_fp8_are_those_of_its_definition() {
        let expected = [(0, 0.0), (1, 1.0 / 512.0), (7, 7.0 / 512.0), (8, 1.0 / 64.0), (0x38, 1.0), (0x7e, 448.0)];
        for (code, value) in expected {
            assert_eq!((e4m3(code), e4m3(code | 0x80)), (value, -value));
            assert_eq!(CodeMap::E4m3.number(code, 0), value);
        }
    }

    #[test]
    fn neutral_codes_mean_the_least_magnitude() {
        let is_trellis = |codes: &CodeMap| matches!(codes, CodeMap::Trellis(_));
        for codes in SCHEMES.iter().map(|row| row.codes).chain([CodeMap::Affine]).filter(|codes| !is_trellis(codes)) {
            let neutral = codes.value(codes.neutral(3), 3);
            let least = (0..=15).map(|code| codes.value(code, 3).abs()).min();
            assert!(Some(neutral.abs()) <= least, "{codes:?}: {neutral}");
        }
    }
}
