//! Reads the descriptions of 4-bit codes that older programs wrote into packs and manifests.
//!
//! These packs and manifests describe an INT4 matrix by fields: `per` row, tensor or group; `pack: nibble_lohi` (even
//! columns in the low nibble); a zero point of 0 (two's complement) or 8 (biased codes); and the type of the scales.
//! Values that this program cannot convert bit for bit are refused with the name of the field.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::scheme::{Granularity, QuantSpec, ScaleType, Scheme};
use serde_json::{Map, Value, json};

/// Fields that an older description of INT4 codes may have: their encoding, and how they were made.
pub const TERMS: &[&str] = &[
    "per",
    "group",
    "group_size",
    "pack",
    "bias",
    "zp",
    "zero_point",
    "symmetric",
    "scale_dtype",
    "bits",
    "dtype",
    "scheme",
    "align",
];

/// Zero points of older writers, for error messages.
const ZERO_POINTS: &str = "0 (two's complement) or 8 (codes + 8)";

/// Encoding of the codes and scales of one matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Int4Terms {
    /// Granularity and scale type; the scheme is `int4`, symmetric.
    pub spec: QuantSpec,
    /// True when codes are stored as `value + 8` instead of two's complement.
    pub biased: bool,
}

impl Int4Terms {
    /// Reads the encoding from an entry; `per` defaults to row, the default of the older packers.
    ///
    /// # Errors
    /// A field has a value that this program cannot convert exactly.
    pub fn read(entry: &Map<String, Value>) -> Result<Int4Terms> {
        let word = |field: &str| entry.get(field).filter(|v| !v.is_null());
        let terms = [
            ("dtype", json!(["int4", "int4w", "u4", "uint4", "q4"]), "\"int4\""),
            ("scheme", json!(["weight_only", "int4", "int4w"]), "\"weight_only\""),
            ("pack", json!(["nibble_lohi"]), "\"nibble_lohi\""),
            ("bits", json!([4]), "4"),
            ("symmetric", json!([true, 1]), "true, because zero points per group are not read from older packs"),
            ("zp", json!([0, 8]), ZERO_POINTS),
            ("zero_point", json!([0, 8]), ZERO_POINTS),
            ("bias", json!([0, 8]), ZERO_POINTS),
        ];
        for (field, accepted, expected) in terms {
            let Some(value) = word(field) else { continue };
            let lower = value.as_str().map_or_else(|| value.clone(), |word| word.to_ascii_lowercase().into());
            if !accepted.as_array().is_some_and(|accepted| accepted.contains(&lower)) {
                return Err(Error::unsupported(format!("{field}: found {value}, expected {expected}")));
            }
        }
        let biased = ["zp", "zero_point", "bias"].iter().any(|field| word(field).is_some_and(|zero| *zero == 8));
        let spec = QuantSpec {
            scheme: Scheme::Int4,
            granularity: granularity(entry)?,
            symmetric: true,
            scale_dtype: word("scale_dtype").map_or(Ok(ScaleType::F16), scale_type)?,
        };
        Ok(Int4Terms { spec, biased })
    }
}

/// Returns the type of scales in any spelling. Only fp16 and fp32 are accepted, because they can be copied unchanged.
pub fn scale_type(value: &Value) -> Result<ScaleType> {
    match value.as_str().and_then(|name| DType::parse(name).ok()) {
        Some(DType::F16) => Ok(ScaleType::F16),
        Some(DType::F32) => Ok(ScaleType::F32),
        _ => Err(Error::unsupported(format!("scale_dtype: found {value}, expected fp16 or fp32"))),
    }
}

/// Reads the granularity from `per` and a group size, which may be given together or alone.
pub fn granularity(entry: &Map<String, Value>) -> Result<Granularity> {
    let group = ["group", "group_size"].iter().find_map(|field| entry.get(*field)).filter(|v| !v.is_null());
    let group = match group {
        Some(Value::String(word)) => Some(word.parse()?),
        Some(Value::Number(n)) if n.as_i64().is_some_and(|n| n <= 0) => Some(Granularity::Row),
        Some(Value::Number(n)) => Some(n.to_string().parse()?),
        Some(other) => {
            return Err(Error::unsupported(format!("group: found {other}, expected a number, row or tensor")));
        }
        None => None,
    };
    match (entry.get("per").and_then(Value::as_str), group) {
        (None | Some("group" | "block"), Some(group)) => Ok(group),
        (None | Some("row"), None | Some(Granularity::Row)) => Ok(Granularity::Row),
        (Some("tensor"), None | Some(Granularity::Tensor)) => Ok(Granularity::Tensor),
        (per, group) => {
            let (per, group) = (per.unwrap_or("nothing"), group.map_or("no group".into(), |g| format!("group {g}")));
            Err(Error::unsupported(format!(
                "per: found `{per}` with {group}, expected row, tensor, or group with its size"
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(entry: Value) -> Result<Int4Terms> {
        Int4Terms::read(entry.as_object().unwrap())
    }

    #[test]
    fn every_older_spelling_says_what_the_codes_mean() {
        let row = read(json!({"per": "row", "scale_dtype": "fp16", "pack": "nibble_lohi", "zp": 0, "symmetric": true}))
            .unwrap();
        assert_eq!((row.spec.granularity, row.spec.scale_dtype, row.biased), (Granularity::Row, ScaleType::F16, false));
        let expanded = json!({"dtype": "int4", "scheme": "weight_only", "bits": 4, "zero_point": 0, "align": 256});
        assert_eq!(read(expanded).unwrap(), row);
        let biased =
            read(json!({"pack": "nibble_lohi", "bias": 8, "per": "group", "group": 64, "scale_dtype": "float32"}))
                .unwrap();
        assert_eq!(
            (biased.spec.granularity, biased.spec.scale_dtype, biased.biased),
            (Granularity::Group(64), ScaleType::F32, true)
        );
        assert_eq!(read(json!({"per": "tensor", "zp": 8})).unwrap().spec.granularity, Granularity::Tensor);
    }

    #[test]
    fn what_cannot_be_taken_over_exactly_is_refused_by_field() {
        for (field, value) in [
            ("pack", json!("nibble_hilo")),
            ("zp", json!(7)),
            ("bias", json!(-8)),
            ("symmetric", json!(false)),
            ("scale_dtype", json!("log2_u8_q3")),
            ("scale_dtype", json!("bf16")),
            ("bits", json!(3)),
            ("dtype", json!("fp4")),
            ("scheme", json!("q4_0")),
            ("group", json!(48)),
            ("group", json!([64])),
            ("per", json!("column")),
            ("per", json!("group")),
        ] {
            let message = read(json!({field: value})).unwrap_err().to_string();
            assert!(message.contains(field), "{field} {value}: {message}");
        }
    }
}
