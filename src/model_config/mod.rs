//! Architecture-independent description of a decoder-only transformer: dimensions, flags and kinds, no family names.
//!
//! A converter turns a family's `config.json` into a [`ModelConfig`]; packs contain it; the runtime is built from it
//! alone.

mod attention;
mod layers;
mod mlp;
mod recurrent;
mod rope;

pub use attention::{Attention, Latent, PositionScale, QkNorm};
pub use layers::{DenseLayers, Extras, Heads, LayerConfig, LayerException, Mixer};
pub use mlp::{Activation, ExpertGroups, Mlp, RouterSoftmax, Selection, SharedExpert};
pub use recurrent::{GatedDeltaNet, Mamba2, Recurrent, RecurrentLayers, ShortConv};
pub use rope::{Rope, RopeScaling, RotaryPairs};

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
    /// The inputs of attention and MLP are normalized. False only in models with `post_norms` alone (OLMo 2).
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub pre_norms: bool,
    /// Kind of the norms of the residual stream.
    #[serde(default, skip_serializing_if = "is_default")]
    pub norm_kind: NormKind,
    /// Attention and MLP read the same normalized input, and both outputs are added to the residual stream (Cohere).
    #[serde(default, skip_serializing_if = "is_default")]
    pub parallel: bool,
    /// Epsilon of the norms of `post_norms`, if it differs from `norm_eps`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub post_norm_eps: Option<f32>,
    /// The final norm multiplies by `weight` although the others multiply by `1 + weight`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub plain_final_norm: bool,
    /// Embeddings are divided by their root mean square, with `norm_eps`, after `embedding_scale`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub embedding_norm: bool,
    /// Factor of the outputs of attention and MLP when they are added to the residual stream (Granite).
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub residual_scale: f32,
    /// Each layer ends with a factor of the residual stream, which is a tensor of one value.
    #[serde(default, skip_serializing_if = "is_default")]
    pub layer_scalars: bool,
    /// Sizes of the further input of each layer, which depends on the token alone (Gemma 4 E2B and E4B).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_layer_input: Option<PerLayerInput>,
    /// Factor of the final logits, before their soft cap.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub logit_scale: f32,
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
    /// The layers that have a recurrent mixer in place of attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recurrent: Option<RecurrentLayers>,
    /// The layers that are a feed-forward part alone, in ascending order, while the others are attention or a recurrent
    /// mixer alone (Nemotron-H). Without this field, each layer has both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mlp_layers: Option<Vec<usize>>,
    /// Number of layers of multi-token prediction that the pack has. Each has the form of a decoder layer behind those
    /// of the model, with attention and the most frequent feed-forward part.
    #[serde(default, skip_serializing_if = "is_default")]
    pub prediction_layers: usize,
    /// Layers that differ from the others in other ways.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exceptions: Vec<LayerException>,
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

fn is_one(value: &f32) -> bool {
    *value == 1.0
}

fn yes() -> bool {
    true
}

fn is_yes(value: &bool) -> bool {
    *value
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Kind of a norm.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NormKind {
    /// RMSNorm: `x / rms(x) * weight`.
    #[default]
    Rms,
    /// LayerNorm without bias: `(x - mean(x)) / deviation(x) * weight`.
    Layer,
}

/// Sizes of the further inputs of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PerLayerInput {
    /// Width of the input of a layer.
    pub width: usize,
    /// Rows of the embedding of these inputs.
    pub vocab: usize,
}

/// Upper bound of dimensions, far above those of real models; it keeps products of two dimensions from overflowing.
const DIM_LIMIT: usize = 1 << 28;
/// Largest number of layers, far above that of real models; it keeps lists per layer short.
pub const LAYER_LIMIT: usize = 10_000;

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
            let most = if name == "n_layers" { LAYER_LIMIT } else { DIM_LIMIT };
            if value == 0 || value > most {
                return Err(Error::corrupt(format!("found {value}, expected 1 to {most}")).tensor(name));
            }
        }
        let bad = |field: &str, why: String| Err(Error::corrupt(why).tensor(field));
        if self.prediction_layers > LAYER_LIMIT {
            let found = format!("found {}, expected at most {LAYER_LIMIT}", self.prediction_layers);
            return bad("prediction_layers", found);
        }
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
        let factors = [
            ("attention.scale", self.attention.scale),
            ("embedding_scale", self.embedding_scale),
            ("residual_scale", self.residual_scale),
            ("logit_scale", self.logit_scale),
        ];
        for (name, factor) in factors {
            if !factor.is_finite() {
                return bad(name, format!("found {factor}, expected a finite number"));
            }
        }
        self.validate_limits()?;
        self.validate_blocks()?;
        self.mlp.validate("mlp")?;
        self.validate_dense_layers()?;
        self.validate_recurrent()?;
        self.validate_mlp_layers()?;
        self.validate_exceptions()?;
        match self.eos.iter().chain(&self.bos).find(|id| **id as usize >= self.vocab) {
            Some(id) => bad("eos", format!("bos or eos token {id} is outside the vocabulary of {}", self.vocab)),
            None => Ok(()),
        }
    }

    /// Checks soft caps and windows.
    fn validate_limits(&self) -> Result<()> {
        let bad = |field: &str, why: String| Err(Error::corrupt(why).tensor(field));
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
        Ok(())
    }

    /// Checks the order of norms and blocks, and the factors of queries.
    fn validate_blocks(&self) -> Result<()> {
        let bad = |field: &str, why: &str| Err(Error::corrupt(why).tensor(field));
        if self.post_norm_eps.is_some_and(|eps| !(eps.is_finite() && eps >= 0.0)) {
            return bad("post_norm_eps", "found a negative number, expected a finite number of at least 0");
        }
        if !self.pre_norms && !self.post_norms {
            return bad("pre_norms", "found a model without norms before and after its blocks, expected one of them");
        }
        if self.parallel && (self.post_norms || !self.pre_norms) {
            return bad("parallel", "found norms after the blocks, expected one norm before both of them");
        }
        if self.post_norms && self.residual_scale != 1.0 {
            return bad("residual_scale", "found a factor of normalized outputs, expected 1");
        }
        if let Some(PerLayerInput { width, vocab }) = self.per_layer_input
            && !((1..=DIM_LIMIT).contains(&width) && (1..=DIM_LIMIT).contains(&vocab) && self.vocab <= vocab)
        {
            return bad("per_layer_input", "expected a width of at least 1 and a row for each token");
        }
        if self.attention.head_gate && !self.attention.gate {
            return bad("attention.head_gate", "found in a model without a gate of attention");
        }
        if let Some(latent) = self.attention.latent {
            latent.validate(self)?;
        }
        if let Some(PositionScale { beta, original_max_position }) = self.attention.position_scale
            && !(beta.is_finite() && original_max_position > 0)
        {
            return bad("attention.position_scale", "expected a finite number and a context length of at least 1");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
