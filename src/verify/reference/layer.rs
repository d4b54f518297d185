//! One decoder layer of the reference: norms, attention, MLP, and their sums.

use super::attention::{Attention, KeysValues};
use super::config::{LayerParts, Places, Recurrent};
use super::conv::ShortConv;
use super::delta::DeltaNet;
use super::linear::WeightSource;
use super::mamba::Mamba;
use super::mlp::Mlp;
use super::norm::Norm;
use super::per_layer::PerLayer;
use crate::error::{Error, Result};
use candle_core::Tensor;
use std::collections::HashMap;

/// State of a text between two layers.
pub(super) struct TextState {
    /// Hidden state: `(tokens, hidden)`.
    pub x: Tensor,
    /// True if LongRoPE's long factors apply.
    pub long: bool,
    /// Keys and values of layers that later layers read.
    pub kept: HashMap<usize, KeysValues>,
    /// Inputs of the layers besides the hidden state, if they have any: `(layers, tokens, width)`.
    pub per_layer: Option<Tensor>,
}

/// Weights of a layer.
pub(super) struct Layer<'a> {
    source: WeightSource<'a>,
    norms: Norms,
    /// Part that reads other positions, if the layer has one.
    mixer: Option<Mixer<'a>>,
    mlp: Option<Mlp<'a>>,
    per_layer: Option<PerLayer<'a>>,
    /// Factor of the output: `(1)`.
    scalar: Option<Tensor>,
}

/// Part of a layer that reads other positions.
enum Mixer<'a> {
    Attention(Attention<'a>),
    ShortConv(ShortConv<'a>),
    DeltaNet(Box<DeltaNet<'a>>),
    Mamba(Box<Mamba<'a>>),
}

/// Norms of a layer, as far as the family has them.
struct Norms {
    before_attention: Option<Norm>,
    after_attention: Option<Norm>,
    before_mlp: Option<Norm>,
    after_mlp: Option<Norm>,
}

impl Norms {
    fn load(source: WeightSource<'_>) -> Result<Norms> {
        let norms = source.config.norms;
        let before = |name: &str| source.norm(name, norms.eps).map(Some);
        let after = |name: &str| source.norm(name, norms.eps_after).map(Some);
        let (before_attention, after_attention, before_mlp, after_mlp) = match norms.places {
            Places::Before => {
                let parts = source.config.layers[source.index].parts;
                let mixer = if parts == LayerParts::Mlp { None } else { before("input_layernorm")? };
                let mlp = if parts == LayerParts::Mixer { None } else { before("post_attention_layernorm")? };
                (mixer, None, mlp, None)
            }
            Places::After => (None, after("post_attention_layernorm")?, None, after("post_feedforward_layernorm")?),
            Places::Around => (
                before("input_layernorm")?,
                after("post_attention_layernorm")?,
                before("pre_feedforward_layernorm")?,
                after("post_feedforward_layernorm")?,
            ),
            Places::Common => (before("input_layernorm")?, None, None, None),
        };
        Ok(Norms { before_attention, after_attention, before_mlp, after_mlp })
    }
}

impl<'a> Layer<'a> {
    pub fn load(source: WeightSource<'a>) -> Result<Layer<'a>> {
        let has_per_layer = source.config.per_layer_width > 0;
        let layer = &source.config.layers[source.index];
        let mixer = || {
            Ok::<_, Error>(match layer.recurrent {
                Some(Recurrent::ShortConv(width)) => Mixer::ShortConv(ShortConv::load(source, width)?),
                Some(Recurrent::Mamba(sizes)) => Mixer::Mamba(Box::new(Mamba::load(source, sizes)?)),
                Some(Recurrent::DeltaNet(sizes)) => Mixer::DeltaNet(Box::new(DeltaNet::load(source, sizes)?)),
                None => Mixer::Attention(Attention::load(source)?),
            })
        };
        Ok(Layer {
            source,
            norms: Norms::load(source)?,
            mixer: (layer.parts != LayerParts::Mlp).then(mixer).transpose()?,
            mlp: (layer.parts != LayerParts::Mixer).then(|| Mlp::load(source)).transpose()?,
            per_layer: has_per_layer.then(|| PerLayer::load(source)).transpose()?,
            scalar: source.find("layer_scalar")?,
        })
    }

    /// Computes the layer and replaces the hidden state of the text.
    pub fn forward(&self, state: &mut TextState) -> Result<()> {
        let normed = self.normed(&state.x, &self.norms.before_attention)?;
        let mut x = state.x.clone();
        if let Some(mixer) = &self.mixer {
            let mixed = match mixer {
                Mixer::Attention(attention) => attention.forward(&normed, state)?,
                Mixer::ShortConv(conv) => conv.forward(&normed)?,
                Mixer::DeltaNet(net) => net.forward(&normed)?,
                Mixer::Mamba(mamba) => mamba.forward(&normed)?,
            };
            x = self.sum(&x, self.normed(&mixed, &self.norms.after_attention)?)?;
        }
        if let Some(mlp) = &self.mlp {
            let normed = match self.source.config.norms.places {
                Places::Common => normed,
                _ => self.normed(&x, &self.norms.before_mlp)?,
            };
            x = self.sum(&x, self.normed(&mlp.forward(&normed, &x)?, &self.norms.after_mlp)?)?;
        }
        if let (Some(per_layer), Some(inputs)) = (&self.per_layer, &state.per_layer) {
            let y = per_layer.forward(&x, &inputs.get(self.source.index)?)?;
            x = self.source.round((x + y)?)?;
        }
        if let Some(scalar) = &self.scalar {
            x = self.source.round(x.broadcast_mul(scalar)?)?;
        }
        state.x = x;
        Ok(())
    }

    fn normed(&self, x: &Tensor, norm: &Option<Norm>) -> candle_core::Result<Tensor> {
        match norm {
            Some(norm) => self.source.round(norm.forward(x)?),
            None => Ok(x.clone()),
        }
    }

    /// Adds the output of attention or of the MLP to the hidden state.
    fn sum(&self, x: &Tensor, mut y: Tensor) -> candle_core::Result<Tensor> {
        let factor = self.source.config.factors.branch;
        if factor != 1.0 {
            y = self.source.round((y * factor)?)?;
        }
        self.source.round((x + y)?)
    }
}
