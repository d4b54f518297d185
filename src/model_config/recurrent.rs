//! Description of layers whose mixer keeps a state of fixed size in place of keys and values.

use super::ModelConfig;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Largest width of a convolution, far above that of real models; states have as many rows.
const WIDTH_LIMIT: usize = 64;

/// Layers that have a recurrent mixer in place of attention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecurrentLayers {
    /// Numbers of the layers, in ascending order.
    pub layers: Vec<usize>,
    /// Their mixer.
    pub mixer: Recurrent,
}

/// Mixer that reads earlier positions through a state of fixed size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recurrent {
    /// Gated short convolution.
    ShortConv(ShortConv),
}

/// Gated short convolution (LFM2): three projections B, C and x of the input, and the output projection of
/// `C * conv(B * x)`, where `conv` is a causal convolution over positions, channel by channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShortConv {
    /// Positions that the convolution reads, including the present one.
    pub width: usize,
    /// Whether the projections and the convolution have biases.
    #[serde(default)]
    pub bias: bool,
}

impl ModelConfig {
    /// Checks the list of recurrent layers and the sizes of their mixer.
    pub(super) fn validate_recurrent(&self) -> Result<()> {
        let Some(RecurrentLayers { layers, mixer }) = &self.recurrent else { return Ok(()) };
        let bad = |field: &str, why: String| Err(Error::corrupt(why).tensor(format!("recurrent.{field}")));
        if layers.is_empty() || !layers.is_sorted_by(|a, b| a < b) {
            return bad("layers", "expected at least one layer, in ascending order".into());
        }
        if let Some(last) = layers.last().filter(|last| **last >= self.n_layers) {
            return bad("layers", format!("found layer {last}, expected numbers below {}", self.n_layers));
        }
        if self.attention.latent.is_some() || self.parallel {
            return bad("layers", "found in a model with latent attention or parallel blocks".into());
        }
        if let Some(layer) = layers.iter().find(|layer| self.layer_has_window(**layer)) {
            return bad("layers", format!("found layer {layer}, which has a window of attention"));
        }
        let Recurrent::ShortConv(ShortConv { width, .. }) = mixer;
        match (1..=WIDTH_LIMIT).contains(width) {
            true => Ok(()),
            false => bad("mixer.width", format!("found {width}, expected 1 to {WIDTH_LIMIT}")),
        }
    }

    fn layer_has_window(&self, layer: usize) -> bool {
        self.attention.windows.get(layer).is_some_and(Option::is_some)
    }
}
