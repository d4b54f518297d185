//! Description of layers whose mixer keeps a state of fixed size in place of keys and values.

use super::{ModelConfig, is_default};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// Largest width of a convolution, far above that of real models; states have as many rows.
const WIDTH_LIMIT: usize = 64;

/// Largest number of heads of a recurrent mixer, and largest width of one.
const HEAD_LIMIT: usize = 1024;
const HEAD_DIM_LIMIT: usize = 1024;

/// Largest number of values of the matrices of a text in all layers: 4 GiB. The largest published model has a twentieth
/// of it.
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
    /// State space with a scalar decay for each head.
    Mamba2(Mamba2),
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
}

/// Mamba-2 (arXiv 2405.21060). B, C and x are projections of the input after a causal convolution, channel by channel,
/// and SiLU. A head has a matrix `S` of `state` rows and `head_dim` columns, which is zero at first, and gives
/// `S' C + d x` after `S = exp(a t) S + B (t x)'`, with a step `t` of the token, and `a` and `d` of the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mamba2 {
    /// Number of pairs of B and C; divides `heads`.
    pub groups: usize,
    /// Number of heads.
    pub heads: usize,
    /// Width of B and C.
    pub state: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Positions that the convolution reads, including the present one.
    pub width: usize,
    /// Whether the convolution has a bias.
    #[serde(default)]
    pub conv_bias: bool,
    /// Whether the projections have biases.
    #[serde(default)]
    pub bias: bool,
    /// The model has the factors `-exp(A_log)` in place of `A_log` (GGUF files).
    #[serde(default, skip_serializing_if = "is_default")]
    pub decay_factors: bool,
}

impl Mamba2 {
    /// Returns the width of all heads.
    pub fn values(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the width of all B, which is also that of all C.
    pub fn keys(&self) -> usize {
        self.groups * self.state
    }

    /// Returns the number of channels of the convolution: x, B and C, in this order.
    pub fn channels(&self) -> usize {
        self.values() + 2 * self.keys()
    }
}

/// Checks numbers of heads and widths, whose products are then far from overflow. `fields` are their names: heads of
/// keys, heads of values, width of keys, width of values.
fn validate_heads(fields: [&'static str; 4], sizes: [usize; 4]) -> std::result::Result<(), (&'static str, String)> {
    let limits = [HEAD_LIMIT, HEAD_LIMIT, HEAD_DIM_LIMIT, HEAD_DIM_LIMIT];
    for ((field, size), most) in fields.into_iter().zip(sizes).zip(limits) {
        if !(1..=most).contains(&size) {
            return Err((field, format!("found {size}, expected 1 to {most}")));
        }
    }
    match sizes[1].is_multiple_of(sizes[0]) {
        true => Ok(()),
        false => Err((fields[1], format!("found {}, expected a multiple of {} {}", sizes[1], sizes[0], fields[0]))),
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
        // Memory is counted in pages of keys and values.
        if self.heads().next().is_none() {
            return bad("layers", "no other layer has attention, expected at least one with attention".into());
        }
        if self.attention.latent.is_some() || self.parallel {
            return bad("layers", "found in a model with latent attention or parallel blocks".into());
        }
        if let Some(layer) = layers.iter().find(|layer| self.layer_has_window(**layer)) {
            return bad("layers", format!("found layer {layer}, which has a window of attention"));
        }
        let width = match mixer {
            Recurrent::ShortConv(conv) => conv.width,
            Recurrent::GatedDeltaNet(net) => net.width,
            Recurrent::Mamba2(mamba) => mamba.width,
        };
        let heads = match mixer {
            Recurrent::ShortConv(_) => None,
            Recurrent::GatedDeltaNet(GatedDeltaNet { key_heads, value_heads, key_dim, value_dim, .. }) => Some((
                ["key_heads", "value_heads", "key_dim", "value_dim"],
                [*key_heads, *value_heads, *key_dim, *value_dim],
            )),
            Recurrent::Mamba2(Mamba2 { groups, heads, state, head_dim, .. }) => {
                Some((["groups", "heads", "state", "head_dim"], [*groups, *heads, *state, *head_dim]))
            }
        };
        if let Some((fields, sizes)) = heads {
            validate_heads(fields, sizes).or_else(|(field, why)| bad(&format!("mixer.{field}"), why))?;
            let values = layers.len() * sizes[1] * sizes[2] * sizes[3];
            if values > STATE_LIMIT {
                let found = format!("found a state of {values} numbers for each text, expected at most {STATE_LIMIT}");
                return bad("mixer", found);
            }
        }
        match (1..=WIDTH_LIMIT).contains(&width) {
            true => Ok(()),
            false => bad("mixer.width", format!("found {width}, expected 1 to {WIDTH_LIMIT}")),
        }
    }

    fn layer_has_window(&self, layer: usize) -> bool {
        self.attention.windows.get(layer).is_some_and(Option::is_some)
    }
}
