//! What the codes and scales of a tensor mean.

use super::granularity::{Granularity, ScaleType};
use super::table::{CodeMap, Scheme, SchemeInfo};
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
        let SchemeInfo { granularity, scale_dtype, .. } = *scheme.info();
        QuantSpec { scheme, granularity, symmetric: true, scale_dtype }
    }

    /// What stored codes stand for.
    #[inline]
    pub fn code_map(&self) -> CodeMap {
        if self.symmetric { self.scheme.info().codes } else { CodeMap::Affine }
    }

    /// True when codes name the values of a table.
    #[inline]
    pub fn has_table(&self) -> bool {
        matches!(self.code_map(), CodeMap::Table(_))
    }

    /// What tiles add to the integer that a code stands for: half the range, or nothing where codes are two's
    /// complement bytes. `None` where a zero point or a table says what codes stand for.
    pub fn bias(&self) -> Option<u8> {
        match self.code_map() {
            CodeMap::Biased(bias) => Some(bias),
            CodeMap::Bytes => Some(0),
            CodeMap::Affine | CodeMap::Table(_) => None,
        }
    }

    /// Refuses combinations that no encoder writes.
    pub fn validate(&self) -> Result<()> {
        let info = self.scheme.info();
        if info.is_block_format && *self != QuantSpec::usual(self.scheme) {
            return Err(Error::unsupported(format!(
                "scheme {} has groups of 32, symmetric, {:?} scales only",
                info.name, info.scale_dtype
            )));
        }
        if self.scale_dtype == ScaleType::E8m0 && info.scale_dtype != ScaleType::E8m0 {
            return Err(Error::unsupported(format!("e8m0 scales with scheme {}", info.name)));
        }
        if !(self.symmetric || info.may_be_affine) {
            return Err(Error::unsupported(format!("affine {}; choose symmetric", info.name)));
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
