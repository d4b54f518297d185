//! Parameters of the quantization of a tensor. [`QuantFields`] are the optional parameters of a manifest or of the
//! command line, [`TensorQuant`] is the complete set; [`QuantFields::resolve`] is the only function that turns the
//! former into the latter.

use crate::error::{Error, Result};
use crate::scheme::{CodeMap, Granularity, QuantSpec, ScaleType, Scheme};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Method that chooses codes and scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Round to nearest with the default scale of the scheme.
    Rtn,
    /// Search for the scales and codes with the least squared error.
    Search,
    /// The same search, with each squared error weighted by the mean square of its input channel.
    Imatrix,
    /// Scales of `imatrix`, then codes chosen by GPTQ, one column after the other: each column compensates for the
    /// errors of the columns before it.
    Gptq,
    /// Recovers the exact codes and scales of weights that were quantized before; an error for other weights.
    #[serde(alias = "lattice")]
    Exact,
}

impl Method {
    /// Returns the name in manifests.
    pub fn name(self) -> &'static str {
        match self {
            Method::Rtn => "rtn",
            Method::Search => "search",
            Method::Imatrix => "imatrix",
            Method::Gptq => "gptq",
            Method::Exact => "exact",
        }
    }

    /// Returns true when the method needs statistics of the inputs.
    pub fn needs_inputs(self) -> bool {
        matches!(self, Method::Imatrix | Method::Gptq)
    }

    /// Returns true when the statistics must include the products of input channels.
    pub fn needs_products(self) -> bool {
        self == Method::Gptq
    }
}

/// Complete quantization parameters of one tensor: the same weights give the same bytes on every machine.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TensorQuant {
    /// Format of codes and scales.
    #[serde(flatten)]
    pub spec: QuantSpec,
    /// Method that chooses codes and scales.
    pub method: Method,
    /// Absolute value to which weights are clipped before quantization.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clamp: Option<f32>,
    /// Percentile of absolute values (50 < p <= 100) from which scales are computed instead of the maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percentile: Option<f32>,
}

impl TensorQuant {
    /// Returns true for formats whose codes and scales can be recovered exactly from float weights that were decoded
    /// from them, as in some checkpoints of models trained with such codes.
    pub fn may_be_exact(&self) -> bool {
        let has_16_levels = matches!(self.spec.code_map(), CodeMap::Biased(8) | CodeMap::Table(_));
        let shared = self.spec.granularity == Granularity::Tensor || self.spec.scale_dtype != ScaleType::F16;
        has_16_levels && !shared && self.clamp.is_none() && self.percentile.is_none()
    }

    /// Refuses combinations that no encoder offers.
    pub fn validate(&self) -> Result<()> {
        self.spec.validate()?;
        if !self.spec.scheme.has_encoder() {
            let name = self.spec.scheme.name();
            let found = format!("scheme {name} is kept where a GGUF file has it, but nothing is quantized to it");
            return Err(Error::usage(found).help("choose one of q4_0, int4, nl4, int5, int6, int8, t2 and t3"));
        }
        if let Some(limit) = self.clamp
            && !(limit.is_finite() && limit > 0.0)
        {
            return Err(Error::usage(format!("clamp: found {limit}, expected a positive number")));
        }
        let searches = self.method != Method::Rtn;
        if searches && self.spec.scale_dtype == ScaleType::E8m0 {
            let scheme = self.spec.scheme.name();
            let found = format!(
                "method {} does not support scheme {scheme}, whose scales are powers of two",
                self.method.name()
            );
            return Err(Error::usage(found).help("choose method rtn"));
        }
        if self.method.needs_inputs() && self.spec.granularity == Granularity::Tensor {
            let found = format!("method {} does not support one scale per tensor", self.method.name());
            return Err(Error::usage(found).help("choose a group size of `row` or of 32 to 256 weights"));
        }
        if self.method == Method::Exact && !self.may_be_exact() {
            let found =
                format!("method exact does not support scheme {} with these parameters", self.spec.scheme.name());
            return Err(Error::usage(found).help(
                "method exact recovers codes of q4_0, nl4 and symmetric int4 with fp16 scales per row or group, \
                 without clamp and percentile",
            ));
        }
        let Some(p) = self.percentile else { return Ok(()) };
        if self.spec.trellis().is_some() {
            let found = format!("scheme {} does not support percentiles", self.spec.scheme.name());
            return Err(Error::usage(found).help("leave out --percentile"));
        }
        if !(p > 50.0 && p <= 100.0) {
            return Err(Error::usage(format!("percentile: found {p}, expected above 50 and at most 100")));
        }
        if searches {
            return Err(Error::usage(format!("a percentile cannot be used with method {}", self.method.name()))
                .help("this method searches the best scale itself; leave out the percentile, or choose method rtn"));
        }
        Ok(())
    }
}

/// Optional quantization parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuantFields {
    /// Quantization scheme; if absent, [`QuantFields::resolve`] chooses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheme: Option<Scheme>,
    /// Bits per weight: 2, 3, 4, 5, 6 or 8; must agree with the scheme.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bits: Option<u32>,
    /// Number of weights that share a scale: 32, 64, 128, 256, `row` or `tensor`. int8 defaults to `row`, t2 and t3
    /// to 128, all other schemes to 32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_size: Option<Granularity>,
    /// False for quantization with zero points (int4 only).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symmetric: Option<bool>,
    /// Type of the scales: `f16` unless they need the range of `f32`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_dtype: Option<ScaleType>,
    /// Method that chooses codes and scales.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<Method>,
    /// Absolute value to which weights are clipped before quantization.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clamp: Option<f32>,
    /// Percentile of absolute values from which scales are computed; method rtn only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percentile: Option<f32>,
}

impl QuantFields {
    /// Returns these fields with absent ones taken from `other`. Fields that specify their own scheme or bits do not
    /// take the group size, symmetry and scale type, which were meant for another scheme.
    #[must_use]
    pub fn or(&self, other: &QuantFields) -> QuantFields {
        let own_scheme = self.scheme.is_some() || self.bits.is_some();
        let scheme = if own_scheme { QuantFields::default() } else { *other };
        QuantFields {
            scheme: self.scheme.or(scheme.scheme),
            bits: self.bits.or(scheme.bits),
            group_size: self.group_size.or(scheme.group_size),
            symmetric: self.symmetric.or(scheme.symmetric),
            scale_dtype: self.scale_dtype.or(scheme.scale_dtype),
            method: self.method.or(other.method),
            clamp: self.clamp.or(other.clamp),
            percentile: self.percentile.or(other.percentile),
        }
    }

    /// Fills absent fields from `defaults`, then from the defaults of the scheme. Fields that specify their own
    /// scheme do not inherit the group size, symmetry and scale type, which were meant for another scheme.
    ///
    /// If only bits or nothing (4 bits) is given, the scheme is the first one with these bits that supports the
    /// requested group size, symmetry and scale type: 4 bits select q4_0, or int4 for groups of 64 or with zero
    /// points.
    ///
    /// # Errors
    /// The fields contradict each other, or no encoder supports their combination.
    pub fn resolve(&self, defaults: &QuantFields) -> Result<TensorQuant> {
        let inherits = self.scheme.is_none() && self.bits.is_none_or(|bits| defaults.bits_of_scheme() == bits);
        let base = if inherits { *defaults } else { QuantFields::default() };
        let shape = QuantFields {
            group_size: self.group_size.or(base.group_size),
            symmetric: self.symmetric.or(base.symmetric),
            scale_dtype: self.scale_dtype.or(base.scale_dtype),
            ..QuantFields::default()
        };
        let bits = self.bits.or(if self.scheme.is_some() { None } else { defaults.bits });
        let scheme = match self.scheme.or(base.scheme) {
            Some(scheme) => scheme,
            None => shape.scheme_of_bits(bits.unwrap_or(4))?,
        };
        if let Some(bits) = bits
            && bits != scheme.bits()
        {
            return Err(Error::usage(format!("found {bits} bits, but scheme {} has {}", scheme.name(), scheme.bits())));
        }
        let percentile = self.percentile.or(defaults.percentile);
        let is_searched = scheme.info().is_searched && percentile.is_none();
        let usual = if is_searched { Method::Search } else { Method::Rtn };
        let quant = TensorQuant {
            spec: shape.in_scheme(scheme),
            method: self.method.or(defaults.method).unwrap_or(usual),
            clamp: self.clamp.or(defaults.clamp),
            percentile,
        };
        quant.validate()?;
        Ok(quant)
    }

    /// Returns the first scheme of `bits` bits that supports the group size, symmetry and scale type of these fields.
    /// If there is none, returns the first scheme of `bits` bits, for which validation then reports the reason.
    fn scheme_of_bits(&self, bits: u32) -> Result<Scheme> {
        let with_bits = || Scheme::offered().filter(|scheme| scheme.bits() == bits);
        let has_shape = |scheme: &Scheme| self.in_scheme(*scheme).validate().is_ok();
        with_bits().find(has_shape).or(with_bits().next()).ok_or_else(|| {
            let known: BTreeSet<u32> = Scheme::offered().map(Scheme::bits).collect();
            let mut known: Vec<String> = known.iter().map(u32::to_string).collect();
            let last = known.pop().unwrap_or_default();
            Error::usage(format!("found {bits} bits per weight, expected {} or {last}", known.join(", ")))
        })
    }

    /// Returns the format of a scheme with the group size, symmetry and scale type of these fields; absent fields
    /// take the defaults of the scheme.
    fn in_scheme(&self, scheme: Scheme) -> QuantSpec {
        let usual = QuantSpec::usual(scheme);
        QuantSpec {
            scheme,
            granularity: self.group_size.unwrap_or(usual.granularity),
            symmetric: self.symmetric.unwrap_or(usual.symmetric),
            scale_dtype: self.scale_dtype.unwrap_or(usual.scale_dtype),
        }
    }

    fn bits_of_scheme(&self) -> u32 {
        self.scheme.map(Scheme::bits).or(self.bits).unwrap_or(4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_with_its_own_scheme_does_not_inherit_the_shape_of_another() {
        let defaults = QuantFields {
            scheme: Some(Scheme::Int4),
            group_size: Some(Granularity::Group(64)),
            symmetric: Some(false),
            ..QuantFields::default()
        };
        let own = QuantFields { scheme: Some(Scheme::Int8), ..QuantFields::default() }.resolve(&defaults).unwrap();
        assert_eq!((own.spec.granularity, own.spec.symmetric), (Granularity::Row, true));
        let open = QuantFields::default().resolve(&defaults).unwrap();
        assert_eq!((open.spec.granularity, open.spec.symmetric), (Granularity::Group(64), false));
    }
}
