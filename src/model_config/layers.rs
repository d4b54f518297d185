//! Description of single layers: those that differ from the others, and all properties of one.

use super::{
    DIM_LIMIT, Latent, Mlp, ModelConfig, NormKind, PerLayerInput, QkNorm, Recurrent, Rope, RotaryPairs, Selection,
    SharedExpert, is_default,
};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Largest number of exceptions.
const EXCEPTION_LIMIT: usize = 64;

/// Layers that differ from the description of the whole model. A layer is in at most one exception.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerException {
    /// Numbers of the layers, in ascending order.
    pub layers: Vec<usize>,
    /// Queries and keys are not rotated: the layer does not know positions.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unrotated: bool,
    /// Key/value heads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_kv_heads: Option<usize>,
    /// Width of a head.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// The layer has no value projection: values are the projected keys before their norm and rotation.
    #[serde(default, skip_serializing_if = "is_default")]
    pub keys_are_values: bool,
    /// Earlier layer whose keys and values the layer reads instead of computing some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_from: Option<usize>,
    /// Width of the dense MLP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intermediate: Option<usize>,
}

/// Description of one layer, as [`ModelConfig::layer`] finds it: what mixes the positions of a text, then the
/// feed-forward part, then what few families add.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerConfig {
    /// Part that reads other positions, if the layer has one.
    pub mixer: Option<Mixer>,
    /// The feed-forward part, if the layer has one.
    pub mlp: Option<Mlp>,
    /// Further parts.
    pub extras: Extras,
}

/// Part of a layer that reads other positions of the text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mixer {
    /// Grouped-query attention.
    Attention(Heads),
    /// Latent attention, with its heads as they are once keys and values are expanded.
    Latent(Heads, Latent),
    /// A mixer with a state of fixed size.
    Recurrent(Recurrent),
}

/// Heads of attention in one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Heads {
    /// Query heads.
    pub n_heads: usize,
    /// Key/value heads.
    pub n_kv_heads: usize,
    /// Width of a query or key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Number of positions that a query attends to, including its own; `None` = all.
    pub window: Option<usize>,
    /// Whether values are the projected keys.
    pub keys_are_values: bool,
    /// Earlier layer whose keys and values the layer reads; `None` = its own.
    pub kv_from: Option<usize>,
    /// Rotation of queries and keys, an index into [`ModelConfig::ropes`]; `None` = no rotation.
    pub rotary: Option<usize>,
}

/// Parts of a layer that few families have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Extras {
    /// Input that depends on the token alone.
    pub input: Option<PerLayerInput>,
    /// Whether the layer ends with a factor of the residual stream.
    pub scalar: bool,
}

impl LayerConfig {
    /// Returns the heads of attention, if the layer has it.
    pub fn heads(&self) -> Option<&Heads> {
        match self.mixer.as_ref()? {
            Mixer::Attention(heads) | Mixer::Latent(heads, _) => Some(heads),
            Mixer::Recurrent(_) => None,
        }
    }

    /// Returns the window of attention, if the layer has one.
    pub fn window(&self) -> Option<usize> {
        self.heads()?.window
    }

    /// Returns the earlier layer whose keys and values attention reads, if they are not its own.
    pub fn kv_from(&self) -> Option<usize> {
        self.heads()?.kv_from
    }

    /// Returns the recurrent mixer, if the layer has one.
    pub fn recurrent(&self) -> Option<&Recurrent> {
        match self.mixer.as_ref()? {
            Mixer::Attention(_) | Mixer::Latent(..) => None,
            Mixer::Recurrent(mixer) => Some(mixer),
        }
    }

    /// Returns the vectors of latent attention, if the layer has it.
    pub fn latent(&self) -> Option<&Latent> {
        match self.mixer.as_ref()? {
            Mixer::Attention(_) | Mixer::Recurrent(_) => None,
            Mixer::Latent(_, latent) => Some(latent),
        }
    }
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

impl ModelConfig {
    /// Adds an exception, unless it lists no layers.
    pub fn except(&mut self, exception: LayerException) {
        self.exceptions.extend(Some(exception).filter(|exception| !exception.layers.is_empty()));
    }

    /// Returns the description of a layer.
    pub fn layer(&self, layer: usize) -> LayerConfig {
        let window = self.attention.windows.get(layer).copied().flatten();
        let exception = self.exceptions.iter().find(|exception| exception.layers.binary_search(&layer).is_ok());
        let rotary = usize::from(self.local_rope.is_some() && window.is_some());
        let head_dim = exception.and_then(|exception| exception.head_dim).unwrap_or(self.head_dim);
        let heads = Heads {
            n_heads: self.n_heads,
            n_kv_heads: exception.and_then(|exception| exception.n_kv_heads).unwrap_or(self.n_kv_heads),
            head_dim,
            value_dim: self.attention.latent.map_or(head_dim, |latent| latent.value),
            window,
            keys_are_values: exception.is_some_and(|exception| exception.keys_are_values),
            kv_from: exception.and_then(|exception| exception.kv_from),
            rotary: (!exception.is_some_and(|exception| exception.unrotated)).then_some(rotary),
        };
        let recurrent = self.recurrent.as_ref().filter(|recurrent| recurrent.layers.binary_search(&layer).is_ok());
        let mixer = match (recurrent, self.attention.latent) {
            (Some(recurrent), _) => Mixer::Recurrent(recurrent.mixer),
            (None, Some(latent)) => Mixer::Latent(heads, latent),
            (None, None) => Mixer::Attention(heads),
        };
        let mlp = match (self.mlp_of(layer), exception.and_then(|exception| exception.intermediate)) {
            (Mlp::Dense { activation, bias, .. }, Some(intermediate)) => Mlp::Dense { intermediate, activation, bias },
            (mlp, _) => mlp,
        };
        let is_mlp = self.mlp_layers.as_ref().map(|layers| layers.binary_search(&layer).is_ok());
        LayerConfig {
            mixer: (is_mlp != Some(true)).then_some(mixer),
            mlp: (is_mlp != Some(false)).then_some(mlp),
            extras: Extras { input: self.per_layer_input, scalar: self.layer_scalars },
        }
    }

    /// Describes a layer of multi-token prediction as a model of one layer.
    pub fn of_prediction(&self) -> ModelConfig {
        let mut one =
            ModelConfig { n_layers: 1, prediction_layers: 0, recurrent: None, mlp_layers: None, ..self.clone() };
        (one.dense_layers, one.attention.windows, one.exceptions) = (None, Vec::new(), Vec::new());
        one
    }

    /// Returns the descriptions of all layers.
    pub fn layers(&self) -> impl Iterator<Item = LayerConfig> {
        (0..self.n_layers).map(|layer| self.layer(layer))
    }

    /// Returns the heads of all layers with attention.
    pub fn heads(&self) -> impl Iterator<Item = Heads> {
        self.layers().filter_map(|layer| layer.heads().copied())
    }

    /// Returns the width of the heads that a rotation, an index into [`ModelConfig::ropes`], turns.
    pub fn rotated_head_dim(&self, rotary: usize) -> usize {
        let turned = self.heads().find(|heads| heads.rotary == Some(rotary));
        turned.map_or(self.head_dim, |heads| heads.head_dim)
    }

    /// Returns all properties, as the names of their fields, that the plain decoder of the first families does not
    /// have. Code for a format that knows only the plain decoder refuses models with other properties.
    pub fn extensions(&self) -> impl Iterator<Item = &'static str> {
        let moe = |found: fn(&Selection, Option<SharedExpert>) -> bool| {
            self.mlps().any(|mlp| matches!(mlp, Mlp::Moe { selection, shared, .. } if found(&selection, shared)))
        };
        let properties = [
            ("pre_norms", !self.pre_norms),
            ("norm_kind", self.norm_kind != NormKind::Rms),
            ("parallel", self.parallel),
            ("post_norm_eps", self.post_norm_eps.is_some_and(|eps| eps != self.norm_eps)),
            ("plain_final_norm", self.plain_final_norm),
            ("embedding_norm", self.embedding_norm),
            ("residual_scale", self.residual_scale != 1.0),
            ("logit_scale", self.logit_scale != 1.0),
            ("layer_scalars", self.layer_scalars),
            ("per_layer_input", self.per_layer_input.is_some()),
            ("attention.value_norm", self.attention.value_norm),
            ("rope.turning_pairs", self.ropes().any(|rope| rope.turning_pairs.is_some())),
            ("recurrent", self.recurrent.is_some()),
            ("mlp_layers", self.mlp_layers.is_some()),
            ("exceptions", !self.exceptions.is_empty()),
            ("attention.qk_norm", matches!(self.attention.qk_norm, QkNorm::All | QkNorm::Unit)),
            ("attention.gate", self.attention.gate),
            ("attention.head_gate", self.attention.head_gate),
            ("attention.latent", self.attention.latent.is_some()),
            ("attention.position_scale", self.attention.position_scale.is_some()),
            ("rope.pairs", self.ropes().any(|rope| rope.pairs != RotaryPairs::Halves)),
            ("mlp.selection", moe(|selection, _| *selection != Selection::default())),
            ("mlp.shared", moe(|_, shared| shared.is_some())),
            ("mlp.latent", self.mlps().any(|mlp| matches!(mlp, Mlp::Moe { latent: Some(_), .. }))),
            ("mlp.shared.gate", moe(|_, shared| shared.is_some_and(|shared| shared.gate))),
        ];
        properties.into_iter().filter(|(_, found)| *found).map(|(name, _)| name)
    }

    /// Returns the rotations of the model: that of most layers, and that of layers with a window if it is another one.
    pub fn ropes(&self) -> impl Iterator<Item = &Rope> {
        [Some(&self.rope), self.local_rope.as_ref()].into_iter().flatten()
    }

    /// Returns the feed-forward part of a layer.
    fn mlp_of(&self, layer: usize) -> Mlp {
        let listed = self.dense_layers.as_ref().filter(|dense| dense.layers.binary_search(&layer).is_ok());
        listed.and(self.dense_mlp()).unwrap_or(self.mlp)
    }

    /// Returns the kinds of feed-forward parts that layers have: one, or experts and a dense MLP.
    pub fn mlps(&self) -> impl Iterator<Item = Mlp> {
        let wide = self.exceptions.iter().filter(|exception| exception.intermediate.is_some());
        let wide = wide.filter_map(|exception| self.layer(*exception.layers.first()?).mlp);
        [Some(self.mlp), self.dense_mlp()].into_iter().flatten().chain(wide)
    }

    /// Returns the MLP of the layers that `dense_layers` lists. It has the activation of the experts.
    fn dense_mlp(&self) -> Option<Mlp> {
        let intermediate = self.dense_layers.as_ref()?.intermediate;
        Some(Mlp::Dense { intermediate, activation: self.mlp.activation(), bias: false })
    }

    /// Checks that the exceptions list layers of the model, each at most once.
    pub(super) fn validate_exceptions(&self) -> Result<()> {
        let is_ordered = |exception: &LayerException| exception.layers.is_sorted_by(|a, b| a < b);
        if self.exceptions.len() > EXCEPTION_LIMIT || !self.exceptions.iter().all(is_ordered) {
            let found = format!("expected at most {EXCEPTION_LIMIT} lists of layers in ascending order");
            return Err(Error::corrupt(found).tensor("exceptions"));
        }
        let mut listed = vec![false; if self.exceptions.is_empty() { 0 } else { self.n_layers }];
        for layer in self.exceptions.iter().flat_map(|exception| &exception.layers) {
            let why = match listed.get_mut(*layer) {
                None => format!("found layer {layer}, expected numbers below {}", self.n_layers),
                Some(true) => format!("found layer {layer} twice, expected each layer at most once"),
                Some(listed) => {
                    *listed = true;
                    continue;
                }
            };
            return Err(Error::corrupt(why).tensor("exceptions"));
        }
        for (number, layer) in self.layers().enumerate() {
            self.validate_layer(number, &layer)?;
        }
        for (rotary, (name, rope)) in ["rope", "local_rope"].into_iter().zip(self.ropes()).enumerate() {
            let head_dim = self.rotated_head_dim(rotary);
            rope.validate(name, head_dim)?;
            let mut turned = self.heads().filter(|heads| heads.rotary == Some(rotary));
            if turned.any(|heads| heads.head_dim != head_dim) {
                let found = "found heads of several sizes that this rotation turns, expected one size";
                return Err(Error::corrupt(found).tensor(name));
            }
        }
        Ok(())
    }

    /// Checks the sizes of a layer, and the layer whose keys and values it reads.
    pub(super) fn validate_layer(&self, number: usize, layer: &LayerConfig) -> Result<()> {
        let bad = |field: &str, why: String| Err(Error::corrupt(why).tensor(format!("exceptions.{field}")));
        if let Some(mlp) = layer.mlp {
            mlp.validate("exceptions.intermediate")?;
        }
        let Some(Heads { n_heads, n_kv_heads, head_dim, keys_are_values, kv_from, .. }) = layer.heads().copied() else {
            return Ok(());
        };
        if n_kv_heads == 0 || !n_heads.is_multiple_of(n_kv_heads) {
            let found = format!("{n_heads} query heads do not divide into {n_kv_heads} key/value heads");
            return bad("n_kv_heads", found);
        }
        if head_dim == 0 || head_dim > DIM_LIMIT || !head_dim.is_multiple_of(2) {
            return bad("head_dim", format!("found {head_dim}, expected an even number of at most {DIM_LIMIT}"));
        }
        if layer.latent().is_some() && (keys_are_values || kv_from.is_some() || head_dim != self.head_dim) {
            return bad("layers", "found other keys and values in a model with latent attention".into());
        }
        if let Some(owner) = kv_from {
            if owner >= number {
                return bad("kv_from", format!("layer {number} reads layer {owner}, expected an earlier layer"));
            }
            let fits =
                |owner: &Heads| owner.kv_from.is_none() && owner.n_kv_heads == n_kv_heads && owner.head_dim == head_dim;
            if !self.layer(owner).heads().is_some_and(fits) {
                let found = format!("layer {number} reads a layer that has no keys and values of its sizes");
                return bad("kv_from", found);
            }
        }
        Ok(())
    }

    /// Checks the list of layers that are an MLP alone.
    pub(super) fn validate_mlp_layers(&self) -> Result<()> {
        let Some(layers) = &self.mlp_layers else { return Ok(()) };
        let bad = |why: String| Err(Error::corrupt(why).tensor("mlp_layers"));
        if !layers.is_sorted_by(|a, b| a < b) {
            return bad("expected layers in ascending order".into());
        }
        if let Some(last) = layers.last().filter(|last| **last >= self.n_layers) {
            return bad(format!("found layer {last}, expected numbers below {}", self.n_layers));
        }
        let recurrent = self.recurrent.as_ref().map_or(&[][..], |recurrent| &recurrent.layers);
        if let Some(layer) = layers.iter().find(|layer| recurrent.contains(layer)) {
            return bad(format!("found layer {layer}, which has a recurrent mixer"));
        }
        if self.heads().next().is_none() {
            return bad("no layer has attention, expected at least one with attention".into());
        }
        let differs = self.parallel || self.post_norms || self.per_layer_input.is_some();
        match differs || self.attention.latent.is_some() {
            true => bad("found in a model with parallel blocks, post norms, further inputs or latent attention".into()),
            false => Ok(()),
        }
    }

    pub(super) fn validate_dense_layers(&self) -> Result<()> {
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
}
