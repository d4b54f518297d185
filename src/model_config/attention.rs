//! Description of attention: norms, windows, factors, latent vectors.

use super::{DIM_LIMIT, ModelConfig, is_default};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Attention flags and windows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attention {
    /// True when the q, k and v projections have a bias.
    #[serde(default)]
    pub qkv_bias: bool,
    /// True when the output projection has a bias.
    #[serde(default)]
    pub o_bias: bool,
    /// True when one learned extra logit per head is included in the softmax and its probability is dropped.
    #[serde(default)]
    pub sinks: bool,
    /// Norm of queries and keys before the rotation.
    #[serde(default)]
    pub qk_norm: QkNorm,
    /// True when each value head is divided by its root mean square.
    #[serde(default, skip_serializing_if = "is_default")]
    pub value_norm: bool,
    /// True when the output of each head is multiplied by the sigmoid of a projection of the input, before the output
    /// projection.
    #[serde(default, skip_serializing_if = "is_default")]
    pub gate: bool,
    /// True when the gate has one number for each head, and not one for each value.
    #[serde(default, skip_serializing_if = "is_default")]
    pub head_gate: bool,
    /// Sizes of latent attention, whose keys and values are computed from one short vector per token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latent: Option<Latent>,
    /// Growth of the queries with their positions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position_scale: Option<PositionScale>,
    /// Soft cap of the scores, which become `cap * tanh(score / cap)` before the softmax.
    pub softcap: Option<f32>,
    /// Per layer: number of positions that a query attends to, including its own; `null` = all. An empty list means
    /// all in every layer.
    #[serde(default)]
    pub windows: Vec<Option<usize>>,
    /// Factor of the query-key dot product; 1/sqrt(head_dim) in most families.
    pub scale: f32,
}

/// Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). A head has keys of `nope + rope` values, of
/// which the last `rope` are rotated and common to all heads, and values of `value` values.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Latent {
    /// Width of the vector from which queries are computed; `null` = they are computed from the input.
    pub q_rank: Option<usize>,
    /// Width of the vector from which keys and values are computed.
    pub kv_rank: usize,
    /// Values of a key that are not rotated.
    pub nope: usize,
    /// Values of a key that are rotated.
    pub rope: usize,
    /// Values of a value head.
    pub value: usize,
    /// Epsilon of the norms of both vectors.
    pub norm_eps: f32,
}

/// Norm of queries and keys. In JSON, `false` is [`QkNorm::None`] and `true` is [`QkNorm::Head`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "WrittenQkNorm", into = "WrittenQkNorm")]
pub enum QkNorm {
    /// No norm.
    #[default]
    None,
    /// Each head on its own, with weights of `head_dim` values that all heads share.
    Head,
    /// All heads together, with a weight for each value.
    All,
    /// Each head on its own, without weights.
    Unit,
}

/// [`QkNorm`] in JSON.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(untagged)]
enum WrittenQkNorm {
    Head(bool),
    Other(OtherQkNorm),
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum OtherQkNorm {
    All,
    Unit,
}

impl From<WrittenQkNorm> for QkNorm {
    fn from(written: WrittenQkNorm) -> QkNorm {
        match written {
            WrittenQkNorm::Head(false) => QkNorm::None,
            WrittenQkNorm::Head(true) => QkNorm::Head,
            WrittenQkNorm::Other(OtherQkNorm::All) => QkNorm::All,
            WrittenQkNorm::Other(OtherQkNorm::Unit) => QkNorm::Unit,
        }
    }
}

impl From<QkNorm> for WrittenQkNorm {
    fn from(norm: QkNorm) -> WrittenQkNorm {
        match norm {
            QkNorm::None => WrittenQkNorm::Head(false),
            QkNorm::Head => WrittenQkNorm::Head(true),
            QkNorm::All => WrittenQkNorm::Other(OtherQkNorm::All),
            QkNorm::Unit => WrittenQkNorm::Other(OtherQkNorm::Unit),
        }
    }
}

/// Factor of a rotated query at position `p`: `1 + beta * ln(1 + floor(p / original_max_position))`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PositionScale {
    /// Growth per step of the logarithm.
    pub beta: f64,
    /// Context length of the training before it was extended, in tokens.
    pub original_max_position: usize,
}

impl PositionScale {
    /// Returns the factor at a position.
    pub fn at(&self, position: usize) -> f32 {
        (1.0 + self.beta * (1.0 + (position / self.original_max_position) as f64).ln()) as f32
    }
}

impl Latent {
    /// Checks the sizes against those of the model.
    pub(super) fn validate(&self, model: &ModelConfig) -> Result<()> {
        let bad = |field: &str, why: String| Err(Error::corrupt(why).tensor(format!("attention.latent.{field}")));
        let Latent { q_rank, kv_rank, nope, rope, value, norm_eps } = *self;
        for (field, size) in
            [("q_rank", q_rank.unwrap_or(1)), ("kv_rank", kv_rank), ("nope", nope), ("rope", rope), ("value", value)]
        {
            if size == 0 || size > DIM_LIMIT {
                return bad(field, format!("found {size}, expected 1 to {DIM_LIMIT}"));
            }
        }
        if nope + rope != model.head_dim || model.rope.rotary_dim != Some(rope) || model.local_rope.is_some() {
            let found = format!("found {nope} + {rope}, expected the head size {}, with one rotation", model.head_dim);
            return bad("nope", found);
        }
        if model.n_kv_heads != model.n_heads {
            return bad("kv_rank", format!("found {} key/value heads, expected as many as queries", model.n_kv_heads));
        }
        if model.attention.qk_norm != QkNorm::None || model.attention.gate || model.attention.sinks {
            return bad("kv_rank", "found norms of heads, a gate or sinks, expected none of them".into());
        }
        match norm_eps.is_finite() && norm_eps >= 0.0 {
            true => Ok(()),
            false => bad("norm_eps", format!("found {norm_eps}, expected a finite number of at least 0")),
        }
    }
}
