//! Inputs that the layers of Gemma 4 E2B and E4B read besides the hidden state: for each token and layer a short
//! vector, made from an embedding of the token and from a projection of its usual embedding.

use super::adapters::{ALL, Adapters};
use super::config::{Activation, Config};
use super::linear::{Linear, WeightSource};
use super::mlp;
use super::norm::Norm;
use super::weights::Weights;
use crate::error::Result;
use crate::verify::dtype::RefDtype;
use candle_core::Tensor;
use std::collections::HashMap;

/// Weights from which the inputs of all layers are computed.
pub(super) struct PerLayerInputs<'a> {
    weights: &'a Weights,
    projection: Linear,
    norm: Norm,
    layers: usize,
    width: usize,
    dtype: RefDtype,
}

impl<'a> PerLayerInputs<'a> {
    /// Reads the weights, if the model has such inputs.
    pub fn load(
        config: &Config,
        weights: &'a Weights,
        adapters: &Adapters,
        dtype: RefDtype,
    ) -> Result<Option<PerLayerInputs<'a>>> {
        if config.per_layer_width == 0 {
            return Ok(None);
        }
        let name = "model.per_layer_model_projection";
        let projection = Linear::load(weights, name, dtype)?;
        let norm = weights.get("model.per_layer_projection_norm.weight", dtype)?;
        Ok(Some(PerLayerInputs {
            weights,
            projection: adapters.change(projection, &format!("{name}.weight"), ALL)?,
            norm: Norm::new(norm, config.norms.kind, config.norms.eps),
            layers: config.layers.len(),
            width: config.per_layer_width,
            dtype,
        }))
    }

    /// Computes the inputs `(layers, tokens, width)` from tokens and their embeddings `(tokens, hidden)`.
    pub fn of(&self, ids: &[u32], x: &Tensor) -> Result<Tensor> {
        let scale = self.dtype.round_factor((self.width as f64).sqrt());
        // The table is large, so only the rows of these tokens are read.
        let mut rows: HashMap<u32, Tensor> = HashMap::new();
        for id in ids {
            if !rows.contains_key(id) {
                rows.insert(*id, self.weights.row("model.embed_tokens_per_layer.weight", *id as usize, self.dtype)?);
            }
        }
        let rows: Vec<&Tensor> = ids.iter().map(|id| &rows[id]).collect();
        let shape = (ids.len(), self.layers, self.width);
        let embedded = self.dtype.round((Tensor::stack(&rows, 0)?.reshape(shape)? * scale)?)?;
        let projected = self.dtype.round(self.projection.forward(x)?)?;
        let projected = self.dtype.round((projected * (x.dim(1)? as f64).powf(-0.5))?)?;
        let projected = self.dtype.round(self.norm.forward(&projected.reshape(shape)?)?)?;
        let sum = self.dtype.round((projected + embedded)?)?;
        Ok(self.dtype.round((sum * 0.5f64.sqrt())?)?.transpose(0, 1)?.contiguous()?)
    }
}

/// Weights by which a layer reads its input.
pub(super) struct PerLayer<'a> {
    source: WeightSource<'a>,
    gate: Linear,
    projection: Linear,
    norm: Norm,
    activation: Activation,
}

impl<'a> PerLayer<'a> {
    pub fn load(source: WeightSource<'a>) -> Result<PerLayer<'a>> {
        Ok(PerLayer {
            source,
            gate: source.linear("per_layer_input_gate")?,
            projection: source.linear("per_layer_projection")?,
            norm: source.norm("post_per_layer_input_norm", source.config.norms.eps)?,
            activation: source.config.activation,
        })
    }

    /// Returns what the input `(tokens, width)` adds to the hidden state `(tokens, hidden)`.
    pub fn forward(&self, x: &Tensor, input: &Tensor) -> candle_core::Result<Tensor> {
        let gate = self.source.round(self.gate.forward(x)?)?;
        let inner = self.source.round(mlp::gated(self.activation, &gate, input)?)?;
        let y = self.source.round(self.projection.forward(&inner)?)?;
        self.source.round(self.norm.forward(&y)?)
    }
}
