//! The common description of a decoder-only transformer: dimensions, flags and kinds, no family names.
//!
//! A converter turns a family's `config.json` into this; the artifact carries it; the runtime is built from it alone.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Hyper-parameters of a model, as the runtime needs them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// The class name in the source's `architectures`, for reports only.
    pub architecture: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of decoder layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key/value heads; divides `n_heads` (GQA).
    pub n_kv_heads: usize,
    /// Width of one head; need not be `hidden / n_heads`.
    pub head_dim: usize,
    /// Rows of the embedding and of the output matrix.
    pub vocab: usize,
    /// Longest context the model was made for, in tokens.
    pub max_context: usize,
    /// Epsilon of every RMSNorm.
    pub norm_eps: f32,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Attention details.
    pub attention: Attention,
    /// The feed-forward part, the same kind in every layer.
    pub mlp: Mlp,
    /// True when the output matrix is the embedding matrix.
    pub tied_embeddings: bool,
    /// Beginning-of-sequence token, if the config names one.
    #[serde(default)]
    pub bos: Option<u32>,
    /// Tokens that end a generation.
    #[serde(default)]
    pub eos: Vec<u32>,
}

/// Attention flags and windows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// q, k and v projections carry a bias.
    #[serde(default)]
    pub qkv_bias: bool,
    /// The output projection carries a bias.
    #[serde(default)]
    pub o_bias: bool,
    /// One learned extra logit per head joins the softmax and its probability is dropped.
    #[serde(default)]
    pub sinks: bool,
    /// Per layer: how many positions a query sees, its own included; `null` = all. Empty = all in every layer.
    #[serde(default)]
    pub windows: Vec<Option<usize>>,
    /// Multiplies the query-key dot product; 1/sqrt(head_dim) in most families.
    pub scale: f32,
}

/// Rotary position embedding: pairs are (i, i + head_dim/2), the half-split convention of Hugging Face.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// How frequencies are stretched for long contexts.
    pub scaling: RopeScaling,
}

/// Long-context variants of RoPE, as `transformers` implements them in `modeling_rope_utils`.
#[allow(missing_docs)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// Plain RoPE.
    None,
    /// All frequencies divided by `factor`.
    Linear { factor: f64 },
    /// Llama 3: low frequencies divided, a smooth band between.
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
}

/// The feed-forward part of a layer.
#[allow(missing_docs)]
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Mlp {
    /// `down(act(gate(x)) * up(x))`.
    Dense {
        intermediate: usize,
        activation: Activation,
        #[serde(default)]
        bias: bool,
    },
    /// A router picks `top_k` of `experts`; the softmax is taken over the chosen logits.
    /// Expert tensors: gate and up interleaved row by row in `gate_up_proj` `(experts, 2 * intermediate, hidden)` and
    /// `down_proj` `(experts, hidden, intermediate)`.
    Moe {
        experts: usize,
        top_k: usize,
        intermediate: usize,
        activation: Activation,
        #[serde(default)]
        bias: bool,
        #[serde(default)]
        router_bias: bool,
    },
}

/// The non-linearity between gate and up.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum Activation {
    /// silu(gate) * up
    Silu,
    /// gpt-oss: gate clamped from above, up on both sides, `(up + 1) * gate * sigmoid(alpha * gate)`.
    SwigluOai { alpha: f32, limit: f32 },
}

/// No dimension of a real model comes near this; it keeps products of two dimensions far from overflow.
const DIM_LIMIT: usize = 1 << 28;

impl ModelConfig {
    /// Checks what the runtime relies on.
    ///
    /// # Errors
    /// Names the first field that is out of range or contradicts another.
    pub fn validate(&self) -> Result<()> {
        let dims = [
            ("hidden", self.hidden),
            ("n_layers", self.n_layers),
            ("n_heads", self.n_heads),
            ("n_kv_heads", self.n_kv_heads),
            ("head_dim", self.head_dim),
            ("vocab", self.vocab),
            ("max_context", self.max_context),
        ];
        for (name, value) in dims {
            if value == 0 || value > DIM_LIMIT {
                return Err(Error::corrupt(format!("{value} is out of range 1..={DIM_LIMIT}")).tensor(name));
            }
        }
        let bad = |field: &str, why: String| Err(Error::corrupt(why).tensor(field));
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return bad(
                "n_kv_heads",
                format!("{} query heads do not divide into {} key/value heads", self.n_heads, self.n_kv_heads),
            );
        }
        if !self.head_dim.is_multiple_of(2) {
            return bad("head_dim", format!("{} is odd; rotary embedding needs pairs", self.head_dim));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps >= 0.0) {
            return bad("norm_eps", format!("{} is not a small positive number", self.norm_eps));
        }
        if !(self.rope.theta.is_finite() && self.rope.theta > 0.0) {
            return bad("rope.theta", format!("{} is not a positive number", self.rope.theta));
        }
        self.rope.scaling.validate()?;
        if !self.attention.scale.is_finite() {
            return bad("attention.scale", format!("{} is not a number", self.attention.scale));
        }
        if !self.attention.windows.is_empty() && self.attention.windows.len() != self.n_layers {
            return bad(
                "attention.windows",
                format!("{} entries for {} layers", self.attention.windows.len(), self.n_layers),
            );
        }
        if self.attention.windows.contains(&Some(0)) {
            return bad("attention.windows", "a window of 0 sees nothing".into());
        }
        self.mlp.validate()?;
        match self.eos.iter().chain(&self.bos).find(|id| **id as usize >= self.vocab) {
            Some(id) => bad("eos", format!("token {id} is outside the vocabulary of {}", self.vocab)),
            None => Ok(()),
        }
    }

    /// How many positions a query of `layer` sees, its own included; `None` = all.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.attention.windows.get(layer).copied().flatten()
    }
}

impl RopeScaling {
    /// Refuses parameters that would make angles infinite or no numbers.
    fn validate(&self) -> Result<()> {
        let in_order = |small: f64, large: f64| 0.0 < small && small < large && large.is_finite();
        let ok = match *self {
            RopeScaling::None => true,
            RopeScaling::Linear { factor } => factor.is_finite() && factor > 0.0,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                factor.is_finite()
                    && factor > 0.0
                    && original_max_position > 0
                    && in_order(low_freq_factor, high_freq_factor)
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position, attention_factor, .. } => {
                let factors = factor.is_finite() && factor > 0.0 && attention_factor.is_finite();
                factors && original_max_position > 0 && in_order(beta_slow, beta_fast)
            }
        };
        if ok { Ok(()) } else { Err(Error::corrupt(format!("{self:?} is out of range")).tensor("rope.scaling")) }
    }
}

impl Mlp {
    fn validate(&self) -> Result<()> {
        let (intermediate, activation) = match *self {
            Mlp::Dense { intermediate, activation, .. } => (intermediate, activation),
            Mlp::Moe { experts, top_k, intermediate, activation, .. } => {
                if experts == 0 || experts > 65_536 || top_k == 0 || top_k > experts {
                    return Err(Error::corrupt(format!("top {top_k} of {experts} experts")).tensor("mlp.top_k"));
                }
                (intermediate, activation)
            }
        };
        if let Activation::SwigluOai { alpha, limit } = activation
            && !(alpha.is_finite() && limit.is_finite() && limit > 0.0)
        {
            let found = format!("alpha {alpha}, limit {limit}; expected finite numbers and a positive limit");
            return Err(Error::corrupt(found).tensor("mlp.activation"));
        }
        if intermediate == 0 || intermediate > DIM_LIMIT {
            return Err(Error::corrupt(format!("{intermediate} is out of range")).tensor("mlp.intermediate"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_cannot_clamp_is_refused() {
        for (limit, good) in [(7.0, true), (0.0, false), (-7.0, false), (f32::INFINITY, false), (f32::NAN, false)] {
            let activation = Activation::SwigluOai { alpha: 1.702, limit };
            assert_eq!(Mlp::Dense { intermediate: 8, activation, bias: false }.validate().is_ok(), good, "{limit}");
        }
    }
}
