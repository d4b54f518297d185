//! Architecture-independent description of a decoder-only transformer: dimensions, flags and kinds, no family names.
//!
//! A converter turns a family's `config.json` into a [`ModelConfig`]; packs contain it; the runtime is built from it
//! alone.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Hyperparameters of a model, as the runtime needs them.
///
/// An unknown field could change what the model computes, so it is refused instead of ignored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Class name from the source's `architectures`, for reports only.
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
    /// Maximum context length that the model was made for, in tokens.
    pub max_context: usize,
    /// Epsilon of every RMSNorm.
    pub norm_eps: f32,
    /// Norms multiply by `1 + weight` instead of `weight` (Gemma); the stored weights are those of the source.
    #[serde(default)]
    pub norm_plus_one: bool,
    /// The outputs of attention and MLP are normalized before they are added to the residual stream.
    #[serde(default)]
    pub post_norms: bool,
    /// Factor that multiplies the embedding of each token; 1 in most families.
    #[serde(default = "one")]
    pub embedding_scale: f32,
    /// Soft cap of the final logits, which become `cap * tanh(logit / cap)`.
    pub logit_softcap: Option<f32>,
    /// Rotary position embedding.
    pub rope: Rope,
    /// Rotary position embedding of the layers that have a window, if it differs from `rope`.
    pub local_rope: Option<Rope>,
    /// Attention details.
    pub attention: Attention,
    /// The feed-forward part of every layer that `dense_layers` does not list.
    pub mlp: Mlp,
    /// The layers of a mixture of experts that have a dense MLP in place of the experts. The field is not written if
    /// there are none, so that older versions read such packs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense_layers: Option<DenseLayers>,
    /// True when the output matrix is the embedding matrix.
    pub tied_embeddings: bool,
    /// Beginning-of-sequence token, if the config names one.
    pub bos: Option<u32>,
    /// Tokens that end a generation.
    #[serde(default)]
    pub eos: Vec<u32>,
}

fn one() -> f32 {
    1.0
}

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
    /// True when each head of the queries and of the keys is normalized before the rotation, with weights of
    /// `head_dim` values.
    #[serde(default)]
    pub qk_norm: bool,
    /// Soft cap of the scores, which become `cap * tanh(score / cap)` before the softmax.
    pub softcap: Option<f32>,
    /// Per layer: number of positions that a query attends to, including its own; `null` = all. An empty list means
    /// all in every layer.
    #[serde(default)]
    pub windows: Vec<Option<usize>>,
    /// Factor of the query-key dot product; 1/sqrt(head_dim) in most families.
    pub scale: f32,
}

/// Rotary position embedding: pairs are (i, i + rotary_dim/2), the half-split convention of Hugging Face.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Number of values at the start of each head that are rotated; `null` = all.
    pub rotary_dim: Option<usize>,
    /// Scaling of the frequencies for long contexts.
    pub scaling: RopeScaling,
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

/// Layers that have a dense MLP without biases, while the others have experts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DenseLayers {
    /// Numbers of the layers, in ascending order.
    pub layers: Vec<usize>,
    /// Number of rows of the gate matrix and of the up matrix.
    pub intermediate: usize,
}

/// The feed-forward part of a layer.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Mlp {
    /// `down(act(gate(x)) * up(x))`.
    Dense {
        intermediate: usize,
        activation: Activation,
        #[serde(default)]
        bias: bool,
    },
    /// Mixture of experts: a router selects the `top_k` largest of `experts` logits.
    Moe {
        experts: usize,
        top_k: usize,
        intermediate: usize,
        activation: Activation,
        #[serde(default)]
        bias: bool,
        #[serde(default)]
        router_bias: bool,
        #[serde(default)]
        router_softmax: RouterSoftmax,
    },
}

/// Set of router logits over which the softmax for the weights of the selected experts is taken.
///
/// Softmax over all logits, followed by selection and by division by the sum of the selected probabilities (Mixtral,
/// Qwen3-MoE with `norm_topk_prob`), equals softmax over the selected logits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RouterSoftmax {
    /// Softmax over the selected experts: their weights sum to one.
    #[default]
    Chosen,
    /// Softmax over all experts: the weights of the selected ones sum to less than one.
    All,
}

/// Function that combines the outputs of the gate and up matrices.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum Activation {
    /// silu(gate) * up
    Silu,
    /// gelu(gate) * up with the tanh approximation of gelu.
    GeluTanh,
    /// gpt-oss: gate clamped from above, up clamped on both sides, `(up + 1) * gate * sigmoid(alpha * gate)`.
    SwigluOai { alpha: f32, limit: f32 },
}

/// Upper bound of dimensions, far above those of real models; it keeps products of two dimensions from overflowing.
const DIM_LIMIT: usize = 1 << 28;

impl ModelConfig {
    /// Checks the properties that the runtime relies on.
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
                return Err(Error::corrupt(format!("found {value}, expected 1 to {DIM_LIMIT}")).tensor(name));
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
            return bad("norm_eps", format!("found {}, expected a finite number of at least 0", self.norm_eps));
        }
        for (name, rope) in [("rope", Some(&self.rope)), ("local_rope", self.local_rope.as_ref())] {
            rope.map_or(Ok(()), |rope| rope.validate(name, self.head_dim))?;
        }
        for (name, factor) in [("attention.scale", self.attention.scale), ("embedding_scale", self.embedding_scale)] {
            if !factor.is_finite() {
                return bad(name, format!("found {factor}, expected a finite number"));
            }
        }
        for (name, cap) in [("attention.softcap", self.attention.softcap), ("logit_softcap", self.logit_softcap)] {
            if let Some(cap) = cap
                && !(cap.is_finite() && cap > 0.0)
            {
                return bad(name, format!("found {cap}, expected a positive number"));
            }
        }
        if !self.attention.windows.is_empty() && self.attention.windows.len() != self.n_layers {
            return bad(
                "attention.windows",
                format!("found {} entries, expected one per layer ({})", self.attention.windows.len(), self.n_layers),
            );
        }
        if self.attention.windows.contains(&Some(0)) {
            return bad("attention.windows", "found a window of 0 positions, expected at least 1".into());
        }
        self.mlp.validate("mlp")?;
        self.validate_dense_layers()?;
        match self.eos.iter().chain(&self.bos).find(|id| **id as usize >= self.vocab) {
            Some(id) => bad("eos", format!("bos or eos token {id} is outside the vocabulary of {}", self.vocab)),
            None => Ok(()),
        }
    }

    fn validate_dense_layers(&self) -> Result<()> {
        let (Some(dense), Some(mlp)) = (&self.dense_layers, self.dense_mlp()) else { return Ok(()) };
        let bad = |field: &str, why: String| Err(Error::corrupt(why).tensor(field));
        if !matches!(self.mlp, Mlp::Moe { .. }) {
            return bad("dense_layers", "found in a model without experts, in which all layers are dense".into());
        }
        if let Some(pair) = dense.layers.windows(2).find(|pair| pair[0] >= pair[1]) {
            return bad("dense_layers.layers", format!("{} follows {}, expected ascending order", pair[1], pair[0]));
        }
        match dense.layers.last() {
            None => bad("dense_layers.layers", "the list is empty, expected at least one layer".into()),
            Some(last) if *last >= self.n_layers => {
                bad("dense_layers.layers", format!("found layer {last}, expected numbers below {}", self.n_layers))
            }
            Some(_) if dense.layers.len() == self.n_layers => {
                bad("dense_layers.layers", "all layers are listed, which leaves none to the experts".into())
            }
            Some(_) => mlp.validate("dense_layers"),
        }
    }

    /// Returns the feed-forward part of a layer.
    pub fn mlp_of(&self, layer: usize) -> Mlp {
        let listed = self.dense_layers.as_ref().filter(|dense| dense.layers.binary_search(&layer).is_ok());
        listed.and(self.dense_mlp()).unwrap_or(self.mlp)
    }

    /// Returns the kinds of feed-forward parts that layers have: one, or experts and a dense MLP.
    pub fn mlps(&self) -> impl Iterator<Item = Mlp> {
        [Some(self.mlp), self.dense_mlp()].into_iter().flatten()
    }

    /// Returns the MLP of the layers that `dense_layers` lists. It has the activation of the experts.
    fn dense_mlp(&self) -> Option<Mlp> {
        let intermediate = self.dense_layers.as_ref()?.intermediate;
        let (Mlp::Dense { activation, .. } | Mlp::Moe { activation, .. }) = self.mlp;
        Some(Mlp::Dense { intermediate, activation, bias: false })
    }

    /// Returns the number of positions that a query of `layer` attends to, including its own; `None` = all.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.attention.windows.get(layer).copied().flatten()
    }
}

impl Rope {
    /// Returns the number of values of each head that are rotated.
    pub fn rotary_dim(&self, head_dim: usize) -> usize {
        self.rotary_dim.unwrap_or(head_dim)
    }

    /// Fails for parameters that would make angles infinite or NaN; `name` is the field they were read from.
    fn validate(&self, name: &str, head_dim: usize) -> Result<()> {
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

impl Mlp {
    /// Checks sizes and activation; `name` is the field they were read from.
    fn validate(&self, name: &str) -> Result<()> {
        let (intermediate, activation) = match *self {
            Mlp::Dense { intermediate, activation, .. } => (intermediate, activation),
            Mlp::Moe { experts, top_k, intermediate, activation, .. } => {
                if experts == 0 || experts > 65_536 || top_k == 0 || top_k > experts {
                    return Err(Error::corrupt(format!(
                        "found {top_k} of {experts} experts per token, expected at least 1 and at most all of up to \
                         65536 experts"
                    ))
                    .tensor(format!("{name}.top_k")));
                }
                (intermediate, activation)
            }
        };
        if let Activation::SwigluOai { alpha, limit } = activation
            && !(alpha.is_finite() && limit.is_finite() && limit > 0.0)
        {
            let found = format!("found alpha {alpha} and limit {limit}, expected finite numbers and a positive limit");
            return Err(Error::corrupt(found).tensor(format!("{name}.activation")));
        }
        if intermediate == 0 || intermediate > DIM_LIMIT {
            let found = format!("found {intermediate}, expected 1 to {DIM_LIMIT}");
            return Err(Error::corrupt(found).tensor(format!("{name}.intermediate")));
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
            assert_eq!(
                Mlp::Dense { intermediate: 8, activation, bias: false }.validate("mlp").is_ok(),
                good,
                "{limit}"
            );
        }
    }

    /// Description as packs contained it before the first fields with defaults were added.
    const FIRST: &str = r#"{"architecture": "LlamaForCausalLM", "hidden": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2,
        "head_dim": 16, "vocab": 512, "max_context": 512, "norm_eps": 1e-5, "rope": {"theta": 10000.0,
        "scaling": {"type": "none"}}, "attention": {"scale": 0.25}, "mlp": {"kind": "moe", "experts": 4, "top_k": 2,
        "intermediate": 64, "activation": {"name": "silu"}}, "tied_embeddings": true}"#;

    #[test]
    fn a_description_without_the_later_fields_is_a_plain_model() {
        let model: ModelConfig = serde_json::from_str(FIRST).unwrap();
        model.validate().unwrap();
        assert_eq!(model.dense_layers, None);
        assert!(!serde_json::to_string(&model).unwrap().contains("dense_layers"));
        assert_eq!((model.embedding_scale, model.norm_plus_one, model.post_norms), (1.0, false, false));
        assert_eq!((model.local_rope, model.logit_softcap, model.rope.rotary_dim), (None, None, None));
        assert_eq!((model.attention.softcap, model.attention.qk_norm), (None, false));
        assert!(matches!(model.mlp, Mlp::Moe { router_softmax: RouterSoftmax::Chosen, .. }));
    }

    #[test]
    fn layers_are_dense_as_listed_and_a_wrong_list_is_refused() {
        let mut model: ModelConfig = serde_json::from_str(FIRST).unwrap();
        model.n_layers = 3;
        let dense = |layers: &[usize]| Some(DenseLayers { layers: layers.to_vec(), intermediate: 96 });
        model.dense_layers = dense(&[1]);
        model.validate().unwrap();
        let expected = Mlp::Dense { intermediate: 96, activation: Activation::Silu, bias: false };
        assert_eq!([0, 1, 2].map(|layer| model.mlp_of(layer)), [model.mlp, expected, model.mlp]);
        assert_eq!(model.mlps().collect::<Vec<_>>(), [model.mlp, expected]);
        let text = serde_json::to_string(&model).unwrap();
        assert_eq!(serde_json::from_str::<ModelConfig>(&text).unwrap(), model);
        for (layers, complaint) in [
            (&[][..], "empty"),
            (&[3], "layer 3, expected numbers below 3"),
            (&[0, usize::MAX], "expected numbers below 3"),
            (&[1, 1], "1 follows 1"),
            (&[1, 0], "0 follows 1"),
            (&[0, 1, 2], "leaves none"),
        ] {
            model.dense_layers = dense(layers);
            let error = model.validate().unwrap_err();
            assert_eq!(error.tensor_name(), Some("dense_layers.layers"));
            assert!(error.to_string().contains(complaint), "{layers:?}: {error}");
        }
        for intermediate in [0, DIM_LIMIT + 1] {
            model.dense_layers = Some(DenseLayers { layers: vec![1], intermediate });
            assert_eq!(model.validate().unwrap_err().tensor_name(), Some("dense_layers.intermediate"));
        }
        model.dense_layers = dense(&[1]);
        model.mlp = expected;
        assert_eq!(model.validate().unwrap_err().tensor_name(), Some("dense_layers"));
    }

    #[test]
    fn a_field_that_may_change_the_model_is_not_ignored() {
        for (place, with) in [
            (r#""hidden""#, r#""residual_scale": 0.5, "hidden""#),
            (r#""scale""#, r#""alibi": true, "scale""#),
            (r#""theta""#, r#""twist": 2, "theta""#),
            (r#""kind": "moe""#, r#""kind": "moe", "shared": 1"#),
        ] {
            let error = serde_json::from_str::<ModelConfig>(&FIRST.replacen(place, with, 1)).unwrap_err();
            assert!(error.to_string().contains("unknown field"), "{with}: {error}");
        }
    }
}
