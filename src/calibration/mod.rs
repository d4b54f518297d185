//! What do the inputs of a model's products look like? Statistics that `iec calib` gathers and `iec ptq` and `iec pack`
//! read.
//!
//! A weight matters as much as what it is multiplied with: the error of an output is `(w - q) X^T X (w - q)^T`, where
//! the rows of X are the inputs that the matrix meets while the model reads a text. Matrices that read the same inputs
//! share a [`Site`]. Of each site [`Sums`] keeps the squares per input channel and, on request, all products `X^T X`.
//!
//! Windows of the text go to two halves in turn. What was fitted on one half can be judged on the other, so that no
//! method is kept because it has learnt the calibration text by heart.
//!
//! [`mod@file`] says how the sums are stored, [`panel`] how products are summed and a matrix is factored.

pub mod file;
mod merge;
pub mod panel;
mod sums;

pub use file::{Calibration, CalibrationWriter, Inputs, Text};
pub use merge::merge;
pub use sums::Sums;

use std::fmt;

/// Half of the windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    /// The windows with even numbers.
    First,
    /// The windows with odd numbers.
    Second,
}

/// Which inputs.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// The normed input of q, k and v.
    Attention,
    /// What attention gives to o.
    AttentionOutput,
    /// The normed input of gate and up.
    Mlp,
    /// The activated values that down reads.
    MlpMiddle,
    /// The normed input of each expert, for the tokens that go there.
    Experts,
    /// The activated values that each expert's down reads.
    ExpertsMiddle,
    /// The normed input of the output matrix.
    LmHead,
}

impl Part {
    const LAYERED: [(Part, &str); 6] = [
        (Part::Attention, "attention"),
        (Part::AttentionOutput, "attention_output"),
        (Part::Mlp, "mlp"),
        (Part::MlpMiddle, "mlp_middle"),
        (Part::Experts, "experts"),
        (Part::ExpertsMiddle, "experts_middle"),
    ];
}

/// A place in the model where matrices read their inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Site {
    /// The layer; the number of layers for the output matrix.
    pub layer: usize,
    /// Which inputs of the layer.
    pub part: Part,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Part::LAYERED.iter().find(|(part, _)| *part == self.part) {
            Some((_, name)) => write!(f, "layers.{}.{name}", self.layer),
            None => f.write_str("lm_head"),
        }
    }
}

impl Site {
    /// The name of the site that feeds a matrix with this canonical name; `None` for what reads no activations, and for
    /// routers, whose inputs are not kept.
    pub fn name_of_tensor(name: &str) -> Option<String> {
        if name == "lm_head.weight" {
            return Some("lm_head".to_string());
        }
        let (layer, leaf) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let part = match leaf {
            "self_attn.q_proj.weight" | "self_attn.k_proj.weight" | "self_attn.v_proj.weight" => Part::Attention,
            "self_attn.o_proj.weight" => Part::AttentionOutput,
            "mlp.gate_proj.weight" | "mlp.up_proj.weight" => Part::Mlp,
            "mlp.down_proj.weight" => Part::MlpMiddle,
            "mlp.experts.gate_up_proj" => Part::Experts,
            "mlp.experts.down_proj" => Part::ExpertsMiddle,
            _ => return None,
        };
        let layer = layer.parse().ok()?;
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
