//! Row of the table of families.

use super::expected::ExpectedTensor;
use super::fields::Fields;
use super::view::{View, whole};
use super::wrapper::text_fields;
use crate::catalogue::{name_in_layer, prediction};
use crate::error::Result;
use crate::model_config::{Mlp, ModelConfig};

/// A model family: the defaults of `transformers` for fields that a configuration leaves out, and the differences from
/// the plain decoder.
#[derive(Debug)]
pub struct Arch {
    /// Class name in `architectures`.
    pub class: &'static str,
    /// `model_type`, which decides when `architectures` is absent, and in the `text_config` of wrappers.
    pub model_type: &'static str,
    /// Other classes and model types with the same language model.
    pub(super) also: &'static [&'static str],
    /// Default number of query heads; `None` = the field is required.
    pub(super) n_heads: Option<usize>,
    /// Default number of key/value heads; `None` = as many as query heads.
    pub(super) n_kv_heads: Option<usize>,
    /// Default width of a head; `None` = the hidden width divided by the number of heads.
    pub(super) head_dim: Option<usize>,
    /// Default number of rows of the embedding matrix; `None` = the field is required.
    pub(super) vocab: Option<usize>,
    /// Default context length in tokens.
    pub(super) max_context: usize,
    /// Default epsilon of the norms.
    pub(super) norm_eps: f64,
    /// Default base of the RoPE frequencies.
    pub(super) theta: f64,
    /// Default of `tie_word_embeddings`: true when the output matrix is the embedding matrix.
    pub(super) tied: bool,
    /// Default of `attention_bias`: true when the projections of attention have biases.
    pub(super) attention_bias: bool,
    /// Fields that the family supports, of those that are otherwise refused: [`super::family::FOREIGN`] and
    /// [`super::rope::PARTIAL`].
    pub(super) honours: &'static [&'static str],
    /// Function that returns true when a configuration without class and type belongs to the family.
    pub(super) claims: fn(&Fields) -> bool,
    /// Function that reads the feed-forward part.
    pub(super) mlp: fn(&Arch, &Fields) -> Result<Mlp>,
    /// Function that reads the window of each layer; its second argument is the number of layers.
    pub(super) windows: fn(&Fields, usize) -> Result<Vec<Option<usize>>>,
    /// Function that applies the family's other differences from the plain decoder.
    pub(super) adjust: fn(&Fields, &mut ModelConfig) -> Result<()>,
    /// Function that returns the views by which a canonical tensor may be read from the source, the most likely first.
    pub(super) views: fn(&ModelConfig, &ExpectedTensor) -> Vec<View>,
    /// Place of the layers of multi-token prediction, in families whose layers are known.
    pub(super) prediction: Option<PredictionPlace>,
}

/// Place of the layers of multi-token prediction in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PredictionPlace {
    /// Behind the layers of the model, whose numbers they continue; `num_nextn_predict_layers` counts them.
    Behind,
    /// One layer, `mtp.layers.0`, with further tensors in `mtp`.
    Apart,
}

impl Arch {
    /// Returns true when `architectures` lists the class, or is absent and `model_type` is the family's.
    pub(super) fn is_named(&self, config: &Fields) -> Result<bool> {
        match config.words_opt("architectures")? {
            Some(classes) if !classes.is_empty() => {
                Ok(classes.iter().any(|class| *class == self.class || self.also.contains(class)))
            }
            _ => Ok(config
                .word_opt("model_type")?
                .is_some_and(|name| name == self.model_type || self.also.contains(&name))),
        }
    }

    /// Returns the views by which a canonical tensor may be read from the source, the most likely first.
    pub fn views(&self, model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
        match prediction::part(&tensor.name).zip(self.prediction) {
            Some(((layer, part), place)) => self.views_of_prediction(model, tensor, (layer, part), place),
            None => (self.views)(model, tensor),
        }
    }

    fn views_of_prediction(
        &self,
        model: &ModelConfig,
        tensor: &ExpectedTensor,
        (layer, part): (usize, &str),
        place: PredictionPlace,
    ) -> Vec<View> {
        let behind = name_in_layer(model.n_layers + layer, "");
        let own = match (place, part) {
            (PredictionPlace::Behind, prediction::OUTPUT_NORM) => Some(format!("{behind}shared_head.norm.weight")),
            (
                PredictionPlace::Behind,
                prediction::EMBEDDING_NORM | prediction::HIDDEN_NORM | prediction::PROJECTION,
            ) => Some(format!("{behind}{part}")),
            (PredictionPlace::Apart, prediction::EMBEDDING_NORM) => Some("mtp.pre_fc_norm_embedding.weight".into()),
            (PredictionPlace::Apart, prediction::HIDDEN_NORM) => Some("mtp.pre_fc_norm_hidden.weight".into()),
            (PredictionPlace::Apart, prediction::PROJECTION) => Some("mtp.fc.weight".into()),
            (PredictionPlace::Apart, prediction::OUTPUT_NORM) => Some("mtp.norm.weight".into()),
            _ => None,
        };
        if let Some(source) = own {
            return vec![whole(source, tensor.shape[0])];
        }
        let as_layer = ExpectedTensor { name: format!("{behind}{part}"), shape: tensor.shape.clone() };
        let views = (self.views)(model, &as_layer).into_iter();
        match place {
            PredictionPlace::Behind => views.collect(),
            PredictionPlace::Apart => {
                let rename = |source: &str| source.replacen(&behind, &prediction::name(layer, ""), 1);
                views.map(|view| view.renamed(&rename)).collect()
            }
        }
    }

    /// Returns the number of layers of multi-token prediction that checkpoints with this configuration have; 0 in
    /// families whose layers are not known.
    ///
    /// # Errors
    /// A field has the wrong type, or there are more layers than are supported.
    pub fn prediction_layers(&self, config: &Fields) -> Result<usize> {
        const APART: &str = "mtp_num_hidden_layers";
        const OWN: &str = "mtp_use_dedicated_embeddings";
        let text = text_fields(config)?;
        if self.prediction.is_some() && text.flag(OWN, false)? {
            return Err(text.unsupported(OWN, "expected false: these layers use the embedding of the model"));
        }
        match self.prediction {
            None => Ok(0),
            Some(PredictionPlace::Behind) => Ok(text.count_opt("num_nextn_predict_layers")?.unwrap_or(0)),
            Some(PredictionPlace::Apart) => match text.count_opt(APART)?.unwrap_or(1) {
                layers @ 0..=1 => Ok(layers),
                _ => Err(text.unsupported(APART, "expected at most 1")),
            },
        }
    }
}

/// Field that says whether the output matrix is the embedding matrix.
pub const TIED: &str = "tie_word_embeddings";
