//! Description of the codes and scales of a quantized tensor ([`QuantSpec`]).

use super::granularity::{Granularity, ScaleType};
use super::table::{CodeMap, Minimum, Scheme, SchemeInfo};
use super::trellis::Trellis;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Complete description of the codes and scales of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct QuantSpec {
    /// Scheme, which defines the value of each code.
    pub scheme: Scheme,
    /// Number of weights that share a scale.
    #[serde(rename = "group_size")]
    pub granularity: Granularity,
    /// False when groups carry a zero point: value = (code - zero) * scale.
    pub symmetric: bool,
    /// Storage type of the scales.
    pub scale_dtype: ScaleType,
}

impl QuantSpec {
    /// GGML's q4_0 format.
    pub const Q4_0: QuantSpec = QuantSpec {
        scheme: Scheme::Q4_0,
        granularity: Granularity::Group(32),
        symmetric: true,
        scale_dtype: ScaleType::F16,
    };
    /// int8 in groups of 32, whose values GGML's q8_0 stores exactly.
    pub const Q8_0: QuantSpec = QuantSpec {
        scheme: Scheme::Int8,
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

    /// int8 with a scale per row.
    pub const INT8_ROWS: QuantSpec =
        QuantSpec { scheme: Scheme::Int8, granularity: Granularity::Row, symmetric: true, scale_dtype: ScaleType::F16 };

    /// Returns the default specification of a scheme: symmetric, with its default granularity and scale type.
    pub fn usual(scheme: Scheme) -> QuantSpec {
        let SchemeInfo { granularity, scale_dtype, .. } = *scheme.info();
        QuantSpec { scheme, granularity, symmetric: true, scale_dtype }
    }

    /// Returns the map from stored codes to integers in units of the scale.
    #[inline]
    pub fn code_map(&self) -> CodeMap {
        if self.symmetric { self.scheme.info().codes } else { CodeMap::Affine }
    }

    /// Returns true when codes are indices into a table of values.
    #[inline]
    pub fn has_table(&self) -> bool {
        matches!(self.code_map(), CodeMap::Table(_))
    }

    /// Returns the trellis of the codes, if they have one.
    #[inline]
    pub fn trellis(&self) -> Option<&'static Trellis> {
        match self.scheme.info().codes {
            CodeMap::Trellis(trellis) => Some(trellis),
            _ => None,
        }
    }

    /// Returns the bias that tiles add to the integer value of a code: half the range of the codes, or 0 if codes are
    /// two's complement bytes. Returns `None` if a zero point or a table defines the values.
    pub fn bias(&self) -> Option<u8> {
        match self.code_map() {
            CodeMap::Biased(bias) => Some(bias),
            CodeMap::Bytes => Some(0),
            CodeMap::Unsigned => Some(0),
            CodeMap::Affine | CodeMap::Table(_) | CodeMap::Trellis(_) | CodeMap::E4m3 => None,
        }
    }

    /// Returns an error for combinations of parameters that no encoder writes.
    pub fn validate(&self) -> Result<()> {
        let info = self.scheme.info();
        if self.scale_dtype == ScaleType::I8Row {
            let may_scale = matches!(self.granularity, Granularity::Group(n) if info.row_scaled.contains(&n));
            return match may_scale && self.symmetric {
                true => Ok(()),
                false => Err(Error::unsupported(format!(
                    "found i8_row scales with scheme {} and {}groups of {}, expected symmetric groups of 32 of nl4, \
                     int4, int5 or int6, or of 32, 64 or 128 of t2 or t3",
                    info.name,
                    if self.symmetric { "" } else { "affine " },
                    self.granularity
                ))
                .help("leave the group size, the zero points and the type of scales out")),
            };
        }
        if info.is_block_format && *self != QuantSpec::usual(self.scheme) {
            return Err(Error::unsupported(format!(
                "scheme {} supports only groups of {}, symmetric, with {:?} scales",
                info.name, info.granularity, info.scale_dtype
            ))
            .help("leave the group size, the zero points and the type of scales out, or choose scheme int4 or int8"));
        }
        // Powers of two scale FP8 codes, too (MXFP8).
        let is_free = |scale| match scale {
            ScaleType::F16 | ScaleType::F32 => info.scale_dtype != ScaleType::I8Row,
            ScaleType::E8m0 => info.codes == CodeMap::E4m3,
            ScaleType::I8 | ScaleType::E4m3 | ScaleType::I8Row => false,
        };
        if let Some(fixed) = Some(self.scale_dtype).filter(|scale| *scale != info.scale_dtype && !is_free(*scale)) {
            return Err(Error::unsupported(format!("scheme {} does not support {fixed:?} scales", info.name))
                .help("leave the type of scales out"));
        }
        if !(self.symmetric || info.may_be_affine) {
            return Err(Error::unsupported(format!("scheme {} does not support zero points", info.name))
                .help("leave out --affine; in a manifest, set \"symmetric\" to true"));
        }
        match self.granularity {
            Granularity::Group(n) if !info.is_block_format && ![32, 64, 128, 256].contains(&n) => {
                Err(Error::unsupported(format!("group size: found {n}, expected 32, 64, 128 or 256"))
                    .help("choose one of these, or `row` for one scale per row"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the storage of the minimums of groups.
    #[inline]
    pub fn minimum(&self) -> Minimum {
        self.scheme.info().minimum
    }

    /// Returns true when the scales of groups are multiplied by numbers of their super-block or row.
    #[inline]
    pub fn has_two_levels(&self) -> bool {
        self.scale_dtype.has_two_levels()
    }

    /// Returns the number of scale groups along a row of `cols` weights as the kernels use them. A tensor-wide scale
    /// counts as one group per row.
    pub fn groups(&self, cols: usize) -> usize {
        match self.granularity {
            Granularity::Group(n) => cols.div_ceil(n as usize),
            Granularity::Row | Granularity::Tensor => 1,
        }
    }
}
