//! The table of quantization schemes.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// What a code means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scheme {
    /// GGML q4_0: blocks of 32, value = (code - 8) * d, d = fp16 (value of largest magnitude) / -8.
    #[serde(rename = "q4_0")]
    Q4_0,
    /// 4-bit integers per group, row or tensor: symmetric -8..=7, or affine 0..=15 with a zero point.
    Int4,
    /// GGML's IQ4_NL: blocks of 32, value = d * an entry of a table of 16 ([`crate::quant::block::nl4`]).
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

/// Every scheme with its name in manifests and on the command line, and its bits per code.
const SCHEMES: [(Scheme, &str, u32); 7] = [
    (Scheme::Q4_0, "q4_0", 4),
    (Scheme::Int4, "int4", 4),
    (Scheme::Nl4, "nl4", 4),
    (Scheme::Mxfp4, "mxfp4", 4),
    (Scheme::Int5, "int5", 5),
    (Scheme::Int6, "int6", 6),
    (Scheme::Int8, "int8", 8),
];

impl Scheme {
    /// Bits per code.
    pub fn bits(self) -> u32 {
        self.row().2
    }

    /// The name used in manifests and on the command line.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    fn row(self) -> &'static (Scheme, &'static str, u32) {
        SCHEMES.iter().find(|row| row.0 == self).expect("every scheme has a row")
    }

    /// Those that weights are quantized to.
    pub fn offered() -> impl Iterator<Item = Scheme> {
        SCHEMES.into_iter().map(|row| row.0).filter(|scheme| *scheme != Scheme::Mxfp4)
    }

    /// The one that is meant where only bits per code are given.
    pub fn of_bits(bits: u32) -> Option<Scheme> {
        Scheme::offered().find(|scheme| scheme.bits() == bits)
    }
}

impl std::str::FromStr for Scheme {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let row = SCHEMES.iter().find(|row| row.1 == s);
        row.map(|row| row.0).ok_or_else(|| Error::usage(format!("there is no scheme `{s}`")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheme::QuantSpec;

    #[test]
    fn names_parse_back_and_bits_name_the_usual_scheme() {
        for (scheme, name, bits) in SCHEMES {
            assert_eq!((name.parse::<Scheme>().unwrap(), scheme.bits()), (scheme, bits));
            assert_eq!(serde_json::to_value(scheme).unwrap(), name);
            QuantSpec::usual(scheme).validate().unwrap();
        }
        let of_bits = [4, 5, 6, 7, 8].map(Scheme::of_bits);
        assert_eq!(of_bits, [Some(Scheme::Q4_0), Some(Scheme::Int5), Some(Scheme::Int6), None, Some(Scheme::Int8)]);
        assert!("int7".parse::<Scheme>().is_err());
    }
}
