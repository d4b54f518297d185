//! What the codes and scales of a tensor mean.

use super::granularity::{Granularity, ScaleType};
use super::table::Scheme;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Everything needed to know what the codes and scales of a tensor mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct QuantSpec {
    /// What a code means.
    pub scheme: Scheme,
    /// How many weights share a scale.
    #[serde(rename = "group_size")]
    pub granularity: Granularity,
    /// False when groups carry a zero point: value = (code - zero) * scale.
    pub symmetric: bool,
    /// How scales are stored.
    pub scale_dtype: ScaleType,
}

impl QuantSpec {
    /// GGML's q4_0.
    pub const Q4_0: QuantSpec = QuantSpec {
        scheme: Scheme::Q4_0,
        granularity: Granularity::Group(32),
        symmetric: true,
        scale_dtype: ScaleType::F16,
    };
    /// OCP MXFP4 as gpt-oss checkpoints store their experts.
    pub const MXFP4: QuantSpec = QuantSpec {
        scheme: Scheme::Mxfp4,
        granularity: Granularity::Group(32),
        symmetric: true,
        scale_dtype: ScaleType::E8m0,
    };

    /// What a scheme is where nothing else is said.
    pub fn usual(scheme: Scheme) -> QuantSpec {
        match scheme {
            Scheme::Mxfp4 => QuantSpec::MXFP4,
            Scheme::Int8 => QuantSpec { scheme, granularity: Granularity::Row, ..QuantSpec::Q4_0 },
            _ => QuantSpec { scheme, ..QuantSpec::Q4_0 },
        }
    }

    /// What tiles add to the integer that a code stands for: half the range, or nothing where codes are two's complement bytes.
    /// `None` where a zero point or a table says what codes stand for.
    pub fn bias(&self) -> Option<u8> {
        match self.scheme {
            Scheme::Nl4 | Scheme::Mxfp4 => None,
            _ if !self.symmetric => None,
            Scheme::Int8 => Some(0),
            scheme => Some(1 << (scheme.bits() - 1)),
        }
    }

    /// Refuses combinations that no encoder writes.
    pub fn validate(&self) -> Result<()> {
        let only = QuantSpec::usual(self.scheme);
        if matches!(self.scheme, Scheme::Q4_0 | Scheme::Nl4 | Scheme::Mxfp4) && *self != only {
            return Err(Error::unsupported(format!(
                "scheme {} has groups of 32, symmetric, {:?} scales only",
                self.scheme.name(),
                only.scale_dtype
            )));
        }
        if self.scale_dtype == ScaleType::E8m0 && self.scheme != Scheme::Mxfp4 {
            return Err(Error::unsupported(format!("e8m0 scales with scheme {}", self.scheme.name())));
        }
        if self.scheme != Scheme::Int4 && !self.symmetric {
            return Err(Error::unsupported(format!("affine {}; choose symmetric", self.scheme.name())));
        }
        match self.granularity {
            Granularity::Group(n) if ![32, 64, 128, 256].contains(&n) => {
                Err(Error::unsupported(format!("group size {n}; expected 32, 64, 128 or 256")))
            }
            _ => Ok(()),
        }
    }

    /// Scale groups along a row of `cols` weights, as kernels see them (a tensor-wide scale counts as one per row).
    pub fn groups(&self, cols: usize) -> usize {
        match self.granularity {
            Granularity::Group(n) => cols.div_ceil(n as usize),
            Granularity::Row | Granularity::Tensor => 1,
        }
    }
}
