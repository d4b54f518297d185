//! One group of weights, from floats to integer codes: plain scale, search, rounding.

use super::block::{q4_0, stored_scale};
use super::plain::{self, Choice, CodeRange};
use super::search::Fit;
use crate::error::Result;
use crate::manifest::{Method, TensorQuant};
use crate::scheme::Scheme;
use crate::simd::Level;

/// A group to quantize.
pub(super) struct Group<'a> {
    /// The instruction set for the loops.
    pub level: Level,
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

impl Group<'_> {
    /// Writes the codes; returns the scale in its storage type, and the zero point.
    ///
    /// # Errors
    /// The scale does not fit its storage type.
    pub fn encode(self) -> Result<Choice> {
        let Group { level, quant: TensorQuant { spec, .. }, values, .. } = self;
        let (plain, unrounded) = self.plain()?;
        if self.quant.method == Method::Search && self.shared.is_none() {
            let choice = Fit { level, values, spec, plain }.best();
            self.round(choice);
            return Ok(choice);
        }
        if spec.scheme == Scheme::Q4_0 {
            level.run(q4_0::Encode { values, scale: unrounded, codes: self.codes });
        } else {
            self.round(plain);
        }
        Ok(plain)
    }

    /// Writes the codes nearest to the weights under `choice`.
    pub fn round(self, choice: Choice) {
        let (values, range) = (self.values, CodeRange::of(&self.quant.spec, choice.zero));
        self.level.run(plain::Encode { values, scale: choice.scale, range, codes: self.codes });
    }

    /// The plain choice, and its scale before it was rounded to storage.
    ///
    /// # Errors
    /// The scale does not fit its storage type.
    pub fn plain(&self) -> Result<(Choice, f32)> {
        let Choice { scale, zero } = self.unrounded();
        Ok((Choice { scale: stored_scale(self.quant.spec.scale_dtype, scale)?, zero }, scale))
    }

    /// The plain choice, its scale not yet rounded to storage.
    fn unrounded(&self) -> Choice {
        let spec = &self.quant.spec;
        let real = &self.values[..self.real];
        match (self.shared, self.quant.percentile) {
            (Some(choice), _) => choice,
            (None, None) if spec.scheme == Scheme::Q4_0 => {
                Choice { scale: q4_0::scale(q4_0::signed_peak(self.level, self.values)), zero: 0 }
            }
            (None, Some(p)) if spec.scheme == Scheme::Q4_0 => {
                Choice { scale: q4_0::scale(plain::signed_percentile(real, p)), zero: 0 }
            }
            (None, percentile) => {
                let (min, max) = match percentile {
                    // The padding may count: every choice makes room for zero.
                    None => self.level.run(plain::Extremes(self.values)),
                    Some(p) => plain::percentiles(real, spec.symmetric, p),
                };
                plain::choose(spec, min, max)
            }
        }
    }
}
