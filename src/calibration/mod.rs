//! Calibration statistics of the inputs of a model's matrix multiplications. `iec calib` collects them; `iec ptq` and
//! `iec pack` use them.
//!
//! The importance of a weight depends on its inputs: the squared error of an output, summed over a text, is
//! `(w - q) X^T X (w - q)^T`, where w is a row of the matrix, q is this row after quantization, and the rows of X are
//! the inputs of the matrix while the model processes the text. Matrices with the same inputs share a
//! [`Site`]. For each site [`Sums`] stores the squares per input channel and, on request, all products `X^T X`.
//!
//! Windows of the text are assigned alternately to two halves. Parameters fitted on one half can be evaluated on the
//! other, which prevents the selection of a method that overfits the calibration text. The windows of a half are
//! summed in [`shards`], whose sums are added in a fixed order, so that several machines compute the bytes of one.
//!
//! [`mod@file`] defines the file format; [`panel`] computes the products and factors a matrix.

pub mod file;
mod merge;
pub mod panel;
pub mod shards;
mod sums;

pub use file::{Calibration, CalibrationText, CalibrationWriter, InputMeans};
pub use merge::merge;
pub use sums::Sums;

use crate::catalogue::{LM_HEAD, LayerInput, LayerTensor, layer_part};
use std::fmt;

/// One half of the windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// Windows with even numbers.
    First,
    /// Windows with odd numbers.
    Second,
}

/// Place in the model that provides the inputs of one or more matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Site {
    /// Layer index; the number of layers stands for the output matrix.
    pub layer: usize,
    /// Inputs within the layer.
    pub part: LayerInput,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.part {
            LayerInput::LmHead => f.write_str("lm_head"),
            part => write!(f, "layers.{}.{}", self.layer, part.name()),
        }
    }
}

impl Site {
    /// Returns the site of the output matrix of a model with this number of layers.
    pub fn lm_head(layers: usize) -> Site {
        Site { layer: layers, part: LayerInput::LmHead }
    }

    /// Returns the name of the site that provides the inputs of the matrix with this canonical name. Returns `None`
    /// for tensors that do not multiply activations, and for routers, whose inputs are not recorded.
    pub fn name_of_tensor(name: &str) -> Option<String> {
        if name == LM_HEAD {
            return Some("lm_head".to_string());
        }
        let (layer, leaf) = layer_part(name)?;
        let (layer, part) = (layer.parse().ok()?, LayerTensor::of(leaf)?.input?);
        Some(Site { layer, part }.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrices_that_read_the_same_inputs_share_a_site() {
        for (tensor, site) in [
            ("model.layers.3.self_attn.q_proj.weight", Some("layers.3.attention")),
            ("model.layers.3.self_attn.v_proj.weight", Some("layers.3.attention")),
            ("model.layers.3.self_attn.o_proj.weight", Some("layers.3.attention_output")),
            ("model.layers.12.mlp.up_proj.weight", Some("layers.12.mlp")),
            ("model.layers.12.mlp.down_proj.weight", Some("layers.12.mlp_middle")),
            ("model.layers.0.mlp.experts.down_proj", Some("layers.0.experts_middle")),
            ("lm_head.weight", Some("lm_head")),
            ("model.embed_tokens.weight", None),
            ("model.layers.0.mlp.router.weight", None),
            ("model.layers.x.mlp.up_proj.weight", None),
        ] {
            assert_eq!(Site::name_of_tensor(tensor).as_deref(), site, "{tensor}");
        }
    }
}
