//! Description of rotary position embeddings.

use super::is_default;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Rotary position embedding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Number of values at the start of each head that are rotated; `null` = all.
    pub rotary_dim: Option<usize>,
    /// Values of a head that are rotated together.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pairs: RotaryPairs,
    /// Number of pairs that turn, the first ones; `null` = all. The others stay as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turning_pairs: Option<usize>,
    /// Scaling of the frequencies for long contexts.
    pub scaling: RopeScaling,
}

/// Pairs of values that a rotation turns; `dim` is the number of rotated values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RotaryPairs {
    /// `(i, i + dim / 2)`, the convention of most families in `transformers`.
    #[default]
    Halves,
    /// `(2 i, 2 i + 1)`, also called interleaved.
    Adjacent,
}

/// Long-context variants of RoPE, as `transformers` implements them in `modeling_rope_utils`.
#[allow(missing_docs)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
pub enum RopeScaling {
    /// Plain RoPE.
    None,
    /// All frequencies divided by `factor`.
    Linear { factor: f64 },
    /// Llama 3: low frequencies divided by `factor`, high ones kept, with a smooth transition in between.
    Llama3 { factor: f64, low_freq_factor: f64, high_freq_factor: f64, original_max_position: usize },
    /// YaRN (arXiv 2309.00071); `attention_factor` multiplies cos and sin.
    Yarn {
        factor: f64,
        beta_fast: f64,
        beta_slow: f64,
        original_max_position: usize,
        truncate: bool,
        attention_factor: f64,
    },
    /// LongRoPE (arXiv 2402.13753): each frequency is divided by its own factor, `short` while the text is no longer
    /// than `original_max_position` and `long` beyond (one for each pair); `attention_factor` multiplies cos and sin.
    LongRope { short: Vec<f64>, long: Vec<f64>, original_max_position: usize, attention_factor: f64 },
}

impl Rope {
    /// Returns the number of values of each head that are rotated.
    pub fn rotary_dim(&self, head_dim: usize) -> usize {
        self.rotary_dim.unwrap_or(head_dim)
    }

    /// Fails for parameters that would make angles infinite or NaN; `name` is the field they were read from.
    pub(super) fn validate(&self, name: &str, head_dim: usize) -> Result<()> {
        if !(self.theta.is_finite() && self.theta > 0.0) {
            let found = format!("found {}, expected a positive number", self.theta);
            return Err(Error::corrupt(found).tensor(format!("{name}.theta")));
        }
        let rotary_dim = self.rotary_dim(head_dim);
        if rotary_dim == 0 || rotary_dim > head_dim || !rotary_dim.is_multiple_of(2) {
            let found = format!("found {rotary_dim}, expected an even number up to the head size {head_dim}");
            return Err(Error::corrupt(found).tensor(format!("{name}.rotary_dim")));
        }
        let positive = |x: f64| x.is_finite() && x > 0.0;
        let in_order = |small: f64, large: f64| 0.0 < small && small < large && large.is_finite();
        let ok = match &self.scaling {
            RopeScaling::None => true,
            RopeScaling::Linear { factor } => positive(*factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                positive(*factor) && *original_max_position > 0 && in_order(*low_freq_factor, *high_freq_factor)
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position, attention_factor, .. } => {
                let factors = positive(*factor) && attention_factor.is_finite();
                factors && *original_max_position > 0 && in_order(*beta_slow, *beta_fast)
            }
            RopeScaling::LongRope { short, long, original_max_position, attention_factor } => {
                let each = |list: &[f64]| list.len() == rotary_dim / 2 && list.iter().all(|f| positive(*f));
                each(short) && each(long) && *original_max_position > 0 && attention_factor.is_finite()
            }
        };
        if ok {
            return Ok(());
        }
        let found = format!(
            "found {:.300}, which is out of range for heads of {head_dim} values",
            format!("{:?}", self.scaling)
        );
        Err(Error::corrupt(found).tensor(format!("{name}.scaling")))
    }
}
