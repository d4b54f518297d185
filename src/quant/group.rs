//! One group of several blocks, from floats to integer codes: plain scale, search, rounding.

use super::block::stored_scale;
use super::plain::{self, Choice, CodeRange};
use super::search::Fit;
use crate::error::Result;
use crate::quant_spec::{Method, TensorQuant};
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
    /// How much each counts, where the method asks.
    pub importance: Option<&'a [f32]>,
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
        let choice = self.choose()?;
        let Group { level, quant: TensorQuant { spec, .. }, values, .. } = self;
        let range = CodeRange::of(spec, choice.zero);
        level.run(plain::Encode { values, scale: choice.scale, range, codes: self.codes });
        Ok(choice)
    }

    /// Scale and zero point alone.
    ///
    /// # Errors
    /// The scale does not fit its storage type.
    pub fn choose(&self) -> Result<Choice> {
        let Group { level, quant: TensorQuant { spec, .. }, values, importance, .. } = *self;
        let Choice { scale, zero } = self.plain();
        let plain = Choice { scale: stored_scale(spec.scale_dtype, scale)?, zero };
        let search = self.quant.method != Method::Rtn && self.shared.is_none();
        Ok(if search { Fit { level, values, importance, spec, plain }.best() } else { plain })
    }

    /// The plain choice, its scale not yet rounded to storage.
    fn plain(&self) -> Choice {
        match (self.shared, self.quant.percentile) {
            (Some(choice), _) => choice,
            (None, Some(p)) => plain::choose_by_percentile(&self.quant.spec, &self.values[..self.real], p),
            (None, None) => {
                // The padding may count: every choice makes room for zero.
                let (min, max) = self.level.run(plain::Extremes(self.values));
                plain::choose(&self.quant.spec, min, max)
            }
        }
    }
}
