//! One group of weights, from floats to integer codes: plain scale, search, rounding.
//!
//! A [`Group`] is one [`Kernel`], so that all of it is compiled for the instruction set of the machine.

use super::block::{q4_0, stored_scale};
use super::plain::{self, Choice, CodeRange};
use super::search::Fit;
use crate::error::Result;
use crate::manifest::{Method, TensorQuant};
use crate::scheme::Scheme;
use crate::simd::Kernel;

/// A group to quantize.
pub(super) struct Group<'a> {
    /// How.
    pub quant: &'a TensorQuant,
    /// Scale and zero point, when they span the matrix.
    pub shared: Option<Choice>,
    /// The weights, padded with zeros to whole blocks.
    pub values: &'a [f32],
    /// How many of them belong to the matrix.
    pub real: usize,
    /// Stored codes, one for each value.
    pub codes: &'a mut [u8],
}

impl Kernel for Group<'_> {
    /// The scale in its storage type, and the zero point.
    type Output = Result<Choice>;

    #[inline(always)]
    fn run(self) -> Result<Choice> {
        let spec = &self.quant.spec;
        let mut choice = self.plain();
        let unrounded = choice.scale;
        choice.scale = stored_scale(spec.scale_dtype, unrounded)?;
        if self.quant.method == Method::Search && self.shared.is_none() {
            choice = Fit { values: self.values, spec, plain: choice }.run();
        } else if spec.scheme == Scheme::Q4_0 {
            q4_0::encode_block(self.values, unrounded, self.codes);
            return Ok(choice);
        }
        plain::encode(self.values, choice.scale, CodeRange::of(spec, choice.zero), self.codes);
        Ok(choice)
    }
}

impl Group<'_> {
    /// The plain choice, its scale not yet rounded to storage.
    #[inline(always)]
    fn plain(&self) -> Choice {
        let spec = &self.quant.spec;
        let real = &self.values[..self.real];
        match (self.shared, self.quant.percentile) {
            (Some(choice), _) => choice,
            (None, None) if spec.scheme == Scheme::Q4_0 => {
                Choice { scale: q4_0::scale(q4_0::signed_peak(self.values)), zero: 0 }
            }
            (None, Some(p)) if spec.scheme == Scheme::Q4_0 => {
                Choice { scale: q4_0::scale(plain::signed_percentile(real, p)), zero: 0 }
            }
            (None, percentile) => {
                let (min, max) = match percentile {
                    // The padding may count: every choice makes room for zero.
                    None => plain::extremes(self.values),
                    Some(p) => plain::percentiles(real, spec.symmetric, p),
                };
                plain::choose(spec, min, max)
            }
        }
    }
}
