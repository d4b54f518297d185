//! Precisions: the number types the engine computes with, and the check whether a pack supports them.

use super::cpu::Arithmetic;
use super::kv::KvType;
use crate::catalogue::Role;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::iebin::{IebinReader, JSON_NAME, Store};
use crate::scheme::{QuantSpec, Scheme};
use std::fmt;
use std::str::FromStr;

/// The type that weights are held in and the type of products; sums are always f32. MXFP4 tensors stay in 4 bits in
/// every precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Weights in f32 (or narrower floats, widened exactly), activations in f32.
    Fp32,
    /// Weights in bf16; activations are rounded to bf16 in products with them.
    Bf16,
    /// Weights in f16, float activations.
    Fp16,
    /// Weights of 5 to 8 bits, activations rounded to 16-bit integers per group of 128.
    Int8w,
    /// Weights of 5 to 8 bits, activations rounded to int8 per group of 128 (W8A8).
    Int8,
    /// Weights of 2 to 4 bits, activations rounded to 16-bit integers per group of 128.
    Int4w,
    /// Weights of 2 to 4 bits, activations rounded to int8 per group of 128 (W4A8).
    Int4,
}

/// Properties of a precision.
struct PrecisionRow {
    precision: Precision,
    name: &'static str,
    /// Float type that wider weights are converted to, or number of bits of quantized weights.
    weights: Held,
    arithmetic: Arithmetic,
    kv: KvType,
}

/// Type in which weights are held.
#[derive(Clone, Copy)]
enum Held {
    Floats(DType),
    Codes { bits: u32 },
}

/// Properties of all precisions, in the order of [`Precision`].
static TABLE: [PrecisionRow; 7] = {
    use Arithmetic::{Bf16, Float, Int8, Int16};
    use Held::{Codes, Floats};
    const fn row(
        precision: Precision,
        name: &'static str,
        weights: Held,
        arithmetic: Arithmetic,
        kv: KvType,
    ) -> PrecisionRow {
        PrecisionRow { precision, name, weights, arithmetic, kv }
    }
    [
        row(Precision::Fp32, "fp32", Floats(DType::F32), Float, KvType::F32),
        row(Precision::Bf16, "bf16", Floats(DType::BF16), Bf16, KvType::F16),
        row(Precision::Fp16, "fp16", Floats(DType::F16), Int16, KvType::F16),
        row(Precision::Int8w, "int8w", Codes { bits: 8 }, Int16, KvType::F16),
        row(Precision::Int8, "int8", Codes { bits: 8 }, Int8, KvType::Bf16),
        row(Precision::Int4w, "int4w", Codes { bits: 4 }, Int16, KvType::F16),
        row(Precision::Int4, "int4", Codes { bits: 4 }, Int8, KvType::Bf16),
    ]
};

impl Precision {
    fn row(self) -> &'static PrecisionRow {
        &TABLE[self as usize]
    }

    /// Returns the name used on the command line and in reports.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the float type that wider weights are converted to; `None` for the quantized precisions.
    pub fn float_dtype(self) -> Option<DType> {
        match self.row().weights {
            Held::Floats(dtype) => Some(dtype),
            Held::Codes { .. } => None,
        }
    }

    /// Returns the arithmetic of matrix products.
    pub fn arithmetic(self) -> Arithmetic {
        self.row().arithmetic
    }

    /// Returns the default type of cached keys and values: it rounds no more than the products do. bf16 is the
    /// fastest.
    pub fn kv_type(self) -> KvType {
        self.row().kv
    }

    /// Returns the precision to run `reader` with: `asked` if the pack supports it; for `None`, the fastest
    /// supported.
    ///
    /// # Errors
    /// The pack does not hold the tensors that `asked` needs; the help names the commands that make such a pack.
    pub fn resolve(asked: Option<Precision>, reader: &IebinReader) -> Result<Precision> {
        let held = Holdings::of(reader);
        let Some(asked) = asked else { return Ok(held.fastest()) };
        match held.obstacle(asked) {
            None => Ok(asked),
            Some(why) => Err(Error::engine(format!("precision `{asked}` is not available for this pack: {why}"))
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
        let name = match s.to_ascii_lowercase().as_str() {
            "f32" => "fp32",
            "f16" => "fp16",
            _ => s,
        };
        TABLE.iter().find(|row| name.eq_ignore_ascii_case(row.name)).map(|row| row.precision).ok_or_else(|| {
            Error::usage(format!("precision `{s}`: expected fp32, bf16, fp16, int8w, int8, int4w or int4"))
        })
    }
}

/// Returns the commands that make a pack for a precision.
fn recipe(precision: Precision) -> String {
    match precision.row().weights {
        Held::Floats(_) => {
            format!(
                "leave out --precision to run this pack, or make a float pack: `iec pack --hf-dir HF --out-dir OUT \
                 --as float --dtype {precision}` without --q4-map"
            )
        }
        Held::Codes { bits } => format!(
            "leave out --precision to run this pack, or make an int{bits} pack: \
             `iec ptq --hf-dir HF --out manifest.json --bits {bits}`, then \
             `iec pack --hf-dir HF --out-dir OUT --q4-map manifest.json`"
        ),
    }
}

/// Kinds of tensors in a pack: name and scheme of the first tensor of each quantized kind, and the bytes that the
/// matrices of each float type take.
struct Holdings<'a> {
    int4: Option<(&'a str, Scheme)>,
    /// The first tensor of more than 4 bits.
    int8: Option<(&'a str, Scheme)>,
    mxfp4: bool,
    float_bytes: [(DType, usize); 4],
}

impl<'a> Holdings<'a> {
    fn of(reader: &'a IebinReader) -> Holdings<'a> {
        let float_bytes = [DType::BF16, DType::F16, DType::F32, DType::F64].map(|dtype| (dtype, 0));
        let mut held = Holdings { int4: None, int8: None, mxfp4: false, float_bytes };
        for entry in reader.entries().iter().filter(|entry| Role::of(&entry.name) != Role::Prediction) {
            match entry.store {
                Store::Plain(dtype) => {
                    let slot = held.float_bytes.iter_mut().find(|(d, _)| *d == dtype && entry.shape.len() > 1);
                    slot.into_iter().for_each(|(_, bytes)| *bytes += entry.nbytes);
                }
                Store::Tiled(QuantSpec::MXFP4) => held.mxfp4 = true,
                Store::Tiled(QuantSpec { scheme, .. }) => {
                    let slot = if scheme.bits() <= 4 { &mut held.int4 } else { &mut held.int8 };
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
        let stored = |(name, scheme): (&str, Scheme)| format!("`{name}` is stored as {}", scheme.name());
        let none = |what: &str| Some(format!("it holds no {what} tensors"));
        match (asked.row().weights, self.int4) {
            (Held::Floats(_), int4) => int4.or(self.int8).map(stored),
            (Held::Codes { bits: 8 }, Some(int4)) => Some(stored(int4)),
            (Held::Codes { bits: 8 }, None) if self.int8.is_none() => none("int8"),
            (Held::Codes { bits: 4 }, None) if !self.mxfp4 => none("int4"),
            (Held::Codes { .. }, _) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_parses_back_and_others_are_refused() {
        for (i, row) in TABLE.iter().enumerate() {
            assert_eq!((row.name.parse::<Precision>().unwrap(), row.precision as usize), (row.precision, i));
            assert_eq!(row.precision.to_string(), row.name);
        }
        assert!("int3".parse::<Precision>().is_err());
    }
}
