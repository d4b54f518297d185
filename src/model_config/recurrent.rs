//! Description of layers whose mixer keeps a state of fixed size in place of keys and values.

use super::{ModelConfig, is_default};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Largest width of a convolution, far above that of real models; states have as many rows.
const WIDTH_LIMIT: usize = 64;

/// Largest number of heads of a recurrent mixer, and largest width of one.
const HEAD_LIMIT: usize = 1024;
const HEAD_DIM_LIMIT: usize = 1024;

/// Largest number of values of the matrices of a text in all layers: 4 GiB. The largest published model has a twentieth.
const STATE_LIMIT: usize = 1 << 30;

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
    /// Gated delta rule.
    GatedDeltaNet(GatedDeltaNet),
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

/// Gated delta net (Qwen3-Next; Gated DeltaNet, arXiv 2412.06464). Queries, keys and values are projections of the
/// input after a causal convolution, channel by channel, and SiLU. Each value head reads one key head,
/// keeps a matrix `S` of `key_dim` rows and `value_dim` columns, which is zero at first,
/// and gives `S' q` after `S = a S + k (b (v - a S' k))'`, with a decay `a` and a rate `b` of the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatedDeltaNet {
    /// Heads of queries and keys; divides `value_heads`.
    pub key_heads: usize,
    /// Heads of values.
    pub value_heads: usize,
    /// Width of a query or key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Positions that the convolution reads, including the present one.
    pub width: usize,
    /// Value heads that read one key head are `key_heads` apart, and not next to each other (GGUF files of Qwen3.5).
    #[serde(default, skip_serializing_if = "is_default")]
    pub tiled: bool,
    /// The model has the factors `-exp(A_log)` in place of `A_log` (GGUF files).
    #[serde(default, skip_serializing_if = "is_default")]
    pub decay_factors: bool,
}

impl GatedDeltaNet {
    /// Returns the number of value heads that read one key head.
    pub fn per_key(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Returns the value head number `index` of those that read a key head.
    pub fn value_head(&self, key_head: usize, index: usize) -> usize {
        if self.tiled { index * self.key_heads + key_head } else { key_head * self.per_key() + index }
    }

    /// Returns the width of all query heads, which is also that of all key heads.
    pub fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Returns the width of all value heads.
    pub fn values(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the number of channels of the convolution: queries, keys and values, in this order.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Checks the sizes, whose products are then far from overflow.
    fn validate(&self) -> std::result::Result<(), (&'static str, String)> {
        let GatedDeltaNet { key_heads, value_heads, key_dim, value_dim, .. } = *self;
        for (field, size, most) in [
            ("key_heads", key_heads, HEAD_LIMIT),
            ("value_heads", value_heads, HEAD_LIMIT),
            ("key_dim", key_dim, HEAD_DIM_LIMIT),
            ("value_dim", value_dim, HEAD_DIM_LIMIT),
        ] {
            if !(1..=most).contains(&size) {
                return Err((field, format!("found {size}, expected 1 to {most}")));
            }
        }
        match value_heads.is_multiple_of(key_heads) {
            true => Ok(()),
            false => Err(("value_heads", format!("found {value_heads}, expected a multiple of {key_heads} key heads"))),
        }
    }
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
        let width = match mixer {
            Recurrent::ShortConv(conv) => conv.width,
            Recurrent::GatedDeltaNet(net) => {
                net.validate().or_else(|(field, why)| bad(&format!("mixer.{field}"), why))?;
                let values = layers.len() * net.value_heads * net.key_dim * net.value_dim;
                if values > STATE_LIMIT {
                    let found =
                        format!("found a state of {values} numbers for each text, expected at most {STATE_LIMIT}");
                    return bad("mixer", found);
                }
                net.width
            }
        };
        match (1..=WIDTH_LIMIT).contains(&width) {
            true => Ok(()),
            false => bad("mixer.width", format!("found {width}, expected 1 to {WIDTH_LIMIT}")),
        }
    }

    fn layer_has_window(&self, layer: usize) -> bool {
        self.attention.windows.get(layer).is_some_and(Option::is_some)
    }
}
