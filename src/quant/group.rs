//! Quantizes one group of several blocks: computes its plain choice, searches for a better one if the method asks for
//! it, and rounds the values to codes.

use super::block::stored_scale;
use super::plain::{self, Choice, CodeRange};
use super::search::Fit;
use crate::error::Result;
use crate::quant_spec::{Method, TensorQuant};
use crate::simd::Level;

/// Group to be quantized.
pub(super) struct Group<'a> {
    /// Instruction set of the loops.
    pub level: Level,
    /// Scheme, method and parameters.
    pub quant: &'a TensorQuant,
    /// Scale and zero point of the whole matrix, if all groups share them.
    pub shared: Option<Choice>,
    /// Weights, padded with zeros to whole blocks.
    pub values: &'a [f32],
    /// Weight of the squared error of each value, if the method uses it.
    pub importance: Option<&'a [f32]>,
    /// Number of values that belong to the matrix.
    pub real: usize,
    /// Stored codes, one per value.
    pub codes: &'a mut [u8],
}

impl Group<'_> {
    /// Writes the codes; returns the scale, rounded to its storage type, and the zero point.
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

    /// Returns the scale, rounded to its storage type, and the zero point, without writing codes.
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

    /// Returns the plain choice; its scale is not yet rounded to its storage type.
    fn plain(&self) -> Choice {
        match (self.shared, self.quant.percentile) {
            (Some(choice), _) => choice,
            (None, Some(p)) => plain::choose_by_percentile(&self.quant.spec, &self.values[..self.real], p),
            (None, None) => {
                // Zeros of the padding may be included, because the range of every choice contains zero.
                let (min, max) = self.level.run(plain::Extremes(self.values));
                plain::choose(&self.quant.spec, min, max)
            }
        }
    }
}
