//! Element types of unquantized tensors, their names, and conversion from and to f32.

use crate::error::{Error, Result};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Element type of an unquantized tensor.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DType {
    F64,
    F32,
    F16,
    BF16,
    I64,
    I32,
    I16,
    I8,
    U8,
    #[serde(rename = "BOOL")]
    Bool,
    /// Unsigned integers, which are listed but not computed, as the next types.
    U16,
    U32,
    U64,
    /// 8-bit floats by their bits of exponent and mantissa.
    #[serde(rename = "F8_E4M3")]
    F8E4M3,
    #[serde(rename = "F8_E5M2")]
    F8E5M2,
    #[serde(rename = "F8_E8M0")]
    F8E8M0,
}

impl DType {
    /// Returns the size of one element in bytes.
    pub fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 | DType::U64 => 8,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 => 2,
            DType::I8 | DType::U8 | DType::Bool | DType::F8E4M3 | DType::F8E5M2 | DType::F8E8M0 => 1,
        }
    }

    /// Returns the name in the safetensors format, which IEBIN also uses.
    pub fn name(self) -> &'static str {
        match self {
            DType::F64 => "F64",
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::I64 => "I64",
            DType::I32 => "I32",
            DType::I16 => "I16",
            DType::I8 => "I8",
            DType::U8 => "U8",
            DType::Bool => "BOOL",
            DType::U16 => "U16",
            DType::U32 => "U32",
            DType::U64 => "U64",
            DType::F8E4M3 => "F8_E4M3",
            DType::F8E5M2 => "F8_E5M2",
            DType::F8E8M0 => "F8_E8M0",
        }
    }

    /// Parses safetensors, numpy and torch spellings in any case (`BF16`, `bfloat16`, `torch.bfloat16`).
    pub fn parse(name: &str) -> Result<DType> {
        let lower = name.to_ascii_lowercase();
        Ok(match lower.strip_prefix("torch.").unwrap_or(&lower) {
            "f64" | "float64" | "double" => DType::F64,
            "f32" | "float32" | "float" | "fp32" => DType::F32,
            "f16" | "float16" | "half" | "fp16" => DType::F16,
            "bf16" | "bfloat16" => DType::BF16,
            "i64" | "int64" => DType::I64,
            "i32" | "int32" => DType::I32,
            "i16" | "int16" => DType::I16,
            "i8" | "int8" => DType::I8,
            "u8" | "uint8" => DType::U8,
            "bool" => DType::Bool,
            _ => {
                return Err(Error::unsupported(format!(
                    "found dtype `{name}`, expected f64, f32, f16, bf16, i64, i32, i16, i8, u8 or bool"
                )));
            }
        })
    }

    /// Parses the name of a type in the header of a safetensors file, which may be a type that is only listed.
    pub fn of_header(name: &str) -> Result<DType> {
        let only_listed = [DType::U16, DType::U32, DType::U64, DType::F8E4M3, DType::F8E5M2, DType::F8E8M0];
        let listed = only_listed.into_iter().find(|dtype| dtype.name() == name);
        listed.map_or_else(|| DType::parse(name), Ok)
    }

    /// Returns true for floating-point types that are computed.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Widens little-endian float elements to f32 (exact for F16, BF16 and F32; F64 is rounded).
///
/// `bytes` holds `out.len()` elements of `dtype`.
pub fn decode_floats(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<()> {
    if bytes.len() != out.len() * dtype.size() {
        return Err(Error::corrupt(format!("found {} bytes, expected {} elements of {dtype}", bytes.len(), out.len())));
    }
    match dtype {
        DType::F32 => each(bytes, out, |b| f32::from_le_bytes(*b)),
        DType::BF16 => each(bytes, out, |b| bf16::from_le_bytes(*b).to_f32()),
        DType::F16 => each(bytes, out, |b| f16::from_le_bytes(*b).to_f32()),
        DType::F64 => each(bytes, out, |b| f64::from_le_bytes(*b) as f32),
        other => return Err(Error::unsupported(format!("found {other} elements, expected floats"))),
    }
    Ok(())
}

/// Appends f32 values to `out`, rounded to nearest-even in `dtype` (F32, F16 or BF16), little-endian.
pub fn encode_floats(dtype: DType, values: &[f32], out: &mut Vec<u8>) -> Result<()> {
    out.reserve(values.len() * dtype.size());
    match dtype {
        DType::F32 => values.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes())),
        DType::BF16 => values.iter().for_each(|v| out.extend_from_slice(&bf16::from_f32(*v).to_le_bytes())),
        DType::F16 => values.iter().for_each(|v| out.extend_from_slice(&f16::from_f32(*v).to_le_bytes())),
        other => return Err(Error::unsupported(format!("cannot write floats as {other}"))),
    }
    Ok(())
}

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], f: impl Fn(&[u8; N]) -> f32) {
    let chunks = &bytes.as_chunks::<N>().0[..out.len()];
    for i in 0..out.len() {
        out[i] = f(&chunks[i]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_in_every_spelling() {
        for (name, dtype) in [
            ("BF16", DType::BF16),
            ("torch.bfloat16", DType::BF16),
            ("float32", DType::F32),
            ("Torch.UInt8", DType::U8),
        ] {
            assert_eq!(DType::parse(name).unwrap(), dtype);
        }
        assert!(DType::parse("F8_E4M3").is_err());
    }

    #[test]
    fn floats_round_trip_through_every_float_type() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let mut bytes = Vec::new();
            encode_floats(dtype, &[0.0, -1.5, 2.25, f32::INFINITY], &mut bytes).unwrap();
            let mut back = [0f32; 4];
            decode_floats(dtype, &bytes, &mut back).unwrap();
            assert_eq!(back, [0.0, -1.5, 2.25, f32::INFINITY], "{dtype}");
        }
    }

    #[test]
    fn a_wrong_length_is_refused() {
        assert!(decode_floats(DType::F32, &[0; 7], &mut [0.0; 2]).is_err());
    }
}
