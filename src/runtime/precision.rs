//! Which number types the engine computes with, and whether a pack can serve them.

use super::cpu::Arithmetic;
use super::kv::KvType;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::iebin::{IebinReader, JSON_NAME, Store};
use crate::scheme::{QuantSpec, Scheme};
use std::fmt;
use std::str::FromStr;

/// What weights are held as and what products are computed in; sums are always f32.
/// MXFP4 tensors run from their four bits in every precision; int5 and int6 are held as int8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// f32 (or narrower floats, widened exactly) weights, float activations.
    Fp32,
    /// bf16 weights, activations rounded to bf16 in products with them.
    Bf16,
    /// f16 weights, float activations.
    Fp16,
    /// Weights of 5 to 8 bits, float activations.
    Int8w,
    /// Weights of 5 to 8 bits, activations rounded to int8 per group of 128 (W8A8).
    Int8,
    /// 4-bit weights, float activations.
    Int4w,
    /// 4-bit weights, activations rounded to int8 per group of 128 (W4A8).
    Int4,
}

const NAMES: [(Precision, &str); 7] = [
    (Precision::Fp32, "fp32"),
    (Precision::Bf16, "bf16"),
    (Precision::Fp16, "fp16"),
    (Precision::Int8w, "int8w"),
    (Precision::Int8, "int8"),
    (Precision::Int4w, "int4w"),
    (Precision::Int4, "int4"),
];

impl Precision {
    /// The name used on the command line and in reports.
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(p, _)| *p == self).map_or("", |(_, name)| name)
    }

    /// The float type weights are converted to when they are wider, for the float precisions.
    pub fn float_dtype(self) -> Option<DType> {
        match self {
            Precision::Fp32 => Some(DType::F32),
            Precision::Bf16 => Some(DType::BF16),
            Precision::Fp16 => Some(DType::F16),
            Precision::Int8w | Precision::Int8 | Precision::Int4w | Precision::Int4 => None,
        }
    }

    /// What products are computed in.
    pub fn arithmetic(self) -> Arithmetic {
        match self {
            Precision::Int8 | Precision::Int4 => Arithmetic::Int8,
            Precision::Bf16 => Arithmetic::Bf16,
            Precision::Fp16 | Precision::Int8w | Precision::Int4w => Arithmetic::Int16,
            Precision::Fp32 => Arithmetic::Float,
        }
    }

    /// The type of cached keys and values, unless the user says otherwise: no more is rounded than the products round
    /// anyway. bf16 is the fastest.
    pub fn kv_type(self) -> KvType {
        match self {
            Precision::Fp32 => KvType::F32,
            Precision::Bf16 | Precision::Fp16 | Precision::Int8w | Precision::Int4w => KvType::F16,
            Precision::Int8 | Precision::Int4 => KvType::Bf16,
        }
    }

    /// The precision to run `reader` with: `asked` if the pack can serve it, else (for `None`) the fastest it holds.
    ///
    /// # Errors
    /// The pack does not hold what `asked` needs; the help names the commands that make such a pack.
    pub fn resolve(asked: Option<Precision>, reader: &IebinReader) -> Result<Precision> {
        let held = Holdings::of(reader);
        let Some(asked) = asked else { return Ok(held.fastest()) };
        match held.obstacle(asked) {
            None => Ok(asked),
            Some(why) => Err(Error::engine(format!("precision `{asked}` cannot be had from this pack: {why}"))
                .at(reader.dir.join(JSON_NAME))
                .help(recipe(asked))),
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Precision {
    type Err = Error;
    fn from_str(s: &str) -> Result<Precision> {
        NAMES.iter().find(|(_, name)| s.eq_ignore_ascii_case(name)).map(|(precision, _)| *precision).ok_or_else(|| {
            Error::usage(format!("precision `{s}`: expected fp32, bf16, fp16, int8w, int8, int4w or int4"))
        })
    }
}

/// The commands that make a pack for a precision.
fn recipe(precision: Precision) -> String {
    let bits = match precision {
        Precision::Fp32 | Precision::Bf16 | Precision::Fp16 => {
            return format!(
                "make a float pack: `iec pack --hf-dir HF --out-dir OUT --dtype {precision}` without --q4-map"
            );
        }
        Precision::Int8w | Precision::Int8 => 8,
        Precision::Int4w | Precision::Int4 => 4,
    };
    format!(
        "make one: `iec ptq --hf-dir HF --out manifest.json --bits {bits}`, then \
         `iec pack --hf-dir HF --out-dir OUT --q4-map manifest.json`"
    )
}

/// What kinds of tensors a pack holds: name and scheme of the first of each quantized kind, and the bytes of each float type in
/// matrices.
struct Holdings<'a> {
    int4: Option<(&'a str, Scheme)>,
    /// Those that are held as int8.
    int8: Option<(&'a str, Scheme)>,
    mxfp4: bool,
    float_bytes: [(DType, usize); 4],
}

impl<'a> Holdings<'a> {
    fn of(reader: &'a IebinReader) -> Holdings<'a> {
        let float_bytes = [DType::BF16, DType::F16, DType::F32, DType::F64].map(|dtype| (dtype, 0));
        let mut held = Holdings { int4: None, int8: None, mxfp4: false, float_bytes };
        for entry in reader.entries() {
            match entry.store {
                Store::Plain(dtype) => {
                    let slot = held.float_bytes.iter_mut().find(|(d, _)| *d == dtype && entry.shape.len() > 1);
                    slot.into_iter().for_each(|(_, bytes)| *bytes += entry.nbytes);
                }
                Store::Tiled(spec) if spec.scheme.info().is_source_format => held.mxfp4 = true,
                Store::Tiled(QuantSpec { scheme, .. }) => {
                    let slot = if scheme.bits() == 4 { &mut held.int4 } else { &mut held.int8 };
                    slot.get_or_insert((&entry.name, scheme));
                }
            }
        }
        held
    }

    fn fastest(&self) -> Precision {
        if self.int4.is_some() {
            return Precision::Int4;
        }
        if self.int8.is_some() {
            return Precision::Int8;
        }
        match self.float_bytes.iter().max_by_key(|(_, bytes)| *bytes) {
            Some((DType::BF16, n)) if *n > 0 => Precision::Bf16,
            Some((DType::F16, _)) => Precision::Fp16,
            _ => Precision::Fp32,
        }
    }

    fn obstacle(&self, asked: Precision) -> Option<String> {
        let none = |what: &str| Some(format!("it holds no {what} tensors"));
        match asked {
            Precision::Fp32 | Precision::Bf16 | Precision::Fp16 => {
                let (name, scheme) = self.int4.or(self.int8)?;
                Some(format!("`{name}` is stored as {}", scheme.name()))
            }
            Precision::Int8w | Precision::Int8 => match (self.int8, self.int4) {
                (_, Some((name, scheme))) => Some(format!("`{name}` is stored as {}", scheme.name())),
                (None, None) => none("int8"),
                (Some(_), None) => None,
            },
            Precision::Int4w | Precision::Int4 if self.int4.is_none() && !self.mxfp4 => none("int4"),
            Precision::Int4w | Precision::Int4 => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_parses_back_and_others_are_refused() {
        for (precision, name) in NAMES {
            assert_eq!(name.parse::<Precision>().unwrap(), precision);
            assert_eq!(precision.to_string(), name);
        }
        assert!("int3".parse::<Precision>().is_err());
    }
}
