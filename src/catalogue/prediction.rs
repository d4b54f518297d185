//! Tensors of layers of multi-token prediction.
//!
//! Such a layer predicts the token after the next from what the model computed for a token and from the token that
//! follows it: `eh_proj` joins the normalized embedding of that token with the normalized output of the model's final
//! norm, a decoder layer follows, then a norm and the output matrix of the model (DeepSeek-V3, arXiv 2412.19437,
//! section 2.2; `MtpLayer` in transformers).

use super::LAYER;
use crate::model_config::ModelConfig;

/// Beginning of the names, before the number of the layer.
const LAYERS: &str = "mtp.layers.";

/// Norm of the embedding of the token that follows.
pub const EMBEDDING_NORM: &str = "enorm.weight";
/// Norm of what the model computed.
pub const HIDDEN_NORM: &str = "hnorm.weight";
/// Projection of both, the embedding first.
pub const PROJECTION: &str = "eh_proj.weight";
/// Norm before the output matrix.
pub const OUTPUT_NORM: &str = "norm.weight";

/// Returns the canonical name of a tensor of layer `n` of multi-token prediction.
pub fn name(n: usize, name: &str) -> String {
    format!("{LAYERS}{n}.{name}")
}

/// Splits `mtp.layers.N.rest` into N and rest.
pub fn part(canonical: &str) -> Option<(usize, &str)> {
    let (layer, rest) = canonical.strip_prefix(LAYERS)?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}

/// Returns the tensors of all layers of multi-token prediction, in the order in which a forward pass needs them.
pub(super) fn tensors(model: &ModelConfig) -> impl Iterator<Item = (String, Vec<usize>)> {
    let hidden = model.hidden;
    (0..model.prediction_layers).flat_map(move |n| {
        let layer = model.layer(model.n_layers + n);
        let before = [
            (EMBEDDING_NORM, vec![hidden]),
            (HIDDEN_NORM, vec![hidden]),
            (PROJECTION, vec![hidden, hidden.saturating_mul(2)]),
        ];
        let of_layer = LAYER.iter().filter_map(move |tensor| Some((tensor.name, tensor.shape(model, &layer)?)));
        let all = before.into_iter().chain(of_layer).chain([(OUTPUT_NORM, vec![hidden])]);
        all.map(move |(leaf, shape)| (name(n, leaf), shape))
    })
}
