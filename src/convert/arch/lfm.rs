//! `Lfm2ForCausalLM` (LFM2, LFM2.5): gated short convolutions in most layers, attention in the others;
//! `Lfm2MoeForCausalLM`, with experts that are chosen by the sigmoids of their logits; and `Lfm3ForCausalLM`, with
//! norms after the blocks, a gate for each head, and windows in some layers.

use super::expected::ExpectedTensor;
use super::family::{PLAIN, dense, experts, same_names, separate_experts, silu};
use super::fields::Fields;
use super::rope::{self, LOCAL_BASE, PARTIAL};
use super::row::Arch;
use super::view::{View, whole};
use crate::catalogue::{FINAL_NORM, layer_part};
use crate::error::Result;
use crate::model_config::{
    DenseLayers, Mlp, ModelConfig, QkNorm, Recurrent, RecurrentLayers, RouterSoftmax, Selection, ShortConv,
};

/// Field with the positions that a convolution reads.
pub const WIDTH: &str = "conv_L_cache";
/// Field that says whether convolutions and their projections have biases.
pub const BIAS: &str = "conv_bias";
/// Field with the type of each layer.
const TYPES: &str = "layer_types";

pub(super) const LFM2: Arch = Arch {
    class: "Lfm2ForCausalLM",
    model_type: "lfm2",
    n_heads: Some(32),
    n_kv_heads: Some(8),
    vocab: Some(65_536),
    max_context: 128_000,
    norm_eps: 1e-5,
    theta: 1e6,
    tied: true,
    honours: &[WIDTH, BIAS],
    mlp: |_, config| Ok(Mlp::Dense { intermediate: adjusted_width(config)?, activation: silu(config)?, bias: false }),
    // Layers without attention are no layers with windows; `adjust` reads the types.
    windows: |_, _| Ok(Vec::new()),
    adjust: set_mixers,
    views,
    ..PLAIN
};

pub(super) const LFM2_MOE: Arch = Arch {
    class: "Lfm2MoeForCausalLM",
    model_type: "lfm2_moe",
    honours: &[WIDTH, BIAS, "num_experts", "num_local_experts", "num_dense_layers", "routed_scaling_factor"],
    mlp: |_, config| {
        Ok(Mlp::Moe {
            experts: experts(config)?,
            top_k: config.count_opt("num_experts_per_tok")?.unwrap_or(4),
            intermediate: config.count_opt("moe_intermediate_size")?.unwrap_or(1792),
            activation: silu(config)?,
            bias: false,
            router_bias: false,
            latent: None,
            router_softmax: match config.flag("norm_topk_prob", true)? {
                true => RouterSoftmax::Chosen,
                false => RouterSoftmax::All,
            },
            selection: Selection {
                sigmoid: true,
                bias: config.flag("use_expert_bias", true)?,
                scale: config.number_opt("routed_scaling_factor")?.unwrap_or(1.0) as f32,
                ..Selection::default()
            },
            shared: None,
        })
    },
    adjust: |config, model| {
        set_mixers(config, model)?;
        let dense = config.count_opt("num_dense_layers")?.unwrap_or(2).min(model.n_layers);
        let intermediate = config.count_opt("intermediate_size")?.unwrap_or(7168);
        if dense == model.n_layers {
            model.mlp = Mlp::Dense { intermediate, activation: silu(config)?, bias: false };
        } else if dense > 0 {
            model.dense_layers = Some(DenseLayers { layers: (0..dense).collect(), intermediate });
        }
        Ok(())
    },
    ..LFM2
};

/// Field that says whether there are norms after the blocks.
pub const SANDWICH: &str = "use_sandwich_norm";
/// Field that says whether the output of each head of attention has a gate.
pub const GATE: &str = "use_attention_gate";

pub(super) const LFM3: Arch = Arch {
    class: "Lfm3ForCausalLM",
    model_type: "lfm3",
    honours: &[WIDTH, BIAS, SANDWICH, GATE, "sliding_window", LOCAL_BASE, PARTIAL],
    mlp: |arch, config| dense(arch, config, silu(config)?),
    windows: |config, n_layers| {
        let Some(types) = config.words_opt(TYPES)?.filter(|types| types.contains(&"sliding_attention")) else {
            return Ok(Vec::new());
        };
        let width = config.count("sliding_window")?;
        let window = |layer| types.get(layer).filter(|word| **word == "sliding_attention").map(|_| width);
        Ok((0..n_layers).map(window).collect())
    },
    adjust: |config, model| {
        set_mixers(config, model)?;
        model.post_norms = config.flag(SANDWICH, true)?;
        model.attention.gate = config.flag(GATE, true)?;
        model.attention.head_gate = model.attention.gate;
        if config.object_opt("rope_parameters")?.is_none() {
            return Err(config.wrong("rope_parameters", "an object for each type of layer"));
        }
        let share = rope::partial(config)?.map_or(1.0, |(_, share)| share);
        if share < 1.0 {
            model.rope.turning_pairs = Some((share * model.head_dim as f64 / 2.0) as usize);
        }
        if !model.attention.windows.is_empty() {
            model.local_rope = Some(rope::local(config, 10_000.0, model.max_context)?);
        }
        Ok(())
    },
    views: views_of_lfm3,
    ..LFM2
};

/// Returns the width of the MLP: by default, two thirds of the given one, times a factor, and rounded up to a multiple.
fn adjusted_width(config: &Fields) -> Result<usize> {
    let given = config.count_opt("block_ff_dim")?.or(config.count_opt("intermediate_size")?).unwrap_or(12_288);
    if !config.flag("block_auto_adjust_ff_dim", true)? {
        return Ok(given);
    }
    let factor = config.number_opt("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    let multiple = config.count_opt("block_multiple_of")?.unwrap_or(256);
    if multiple == 0 || !(0.0..1e6).contains(&factor) {
        return Err(config.wrong("block_multiple_of", "at least 1, and a factor of usual size"));
    }
    let width = (factor * (2.0 * given as f64 / 3.0).trunc()) as usize;
    width.checked_next_multiple_of(multiple).ok_or_else(|| config.wrong("block_multiple_of", "a number of usual size"))
}

/// Sets norms and the layers with convolutions: those that `layer_types` calls `conv`, or in older files all that
/// `full_attn_idxs` does not list.
fn set_mixers(config: &Fields, model: &mut ModelConfig) -> Result<()> {
    let n_layers = model.n_layers;
    let words: &[&str] = match model.attention.windows.is_empty() {
        true => &["conv", "full_attention"],
        false => &["conv", "full_attention", "sliding_attention"],
    };
    let is_attention: Vec<bool> = match (config.words_opt(TYPES)?, config.counts_opt("full_attn_idxs")?) {
        (Some(types), _) => {
            if types.len() != n_layers || types.iter().any(|word| !words.contains(word)) {
                return Err(config.wrong(TYPES, &format!("{} for each of {n_layers} layers", words.join(" or "))));
            }
            types.into_iter().map(|word| word != "conv").collect()
        }
        (None, Some(listed)) => (0..n_layers).map(|layer| listed.contains(&layer)).collect(),
        (None, None) => vec![true; n_layers],
    };
    let layers: Vec<usize> = (0..n_layers).filter(|layer| !is_attention[*layer]).collect();
    let conv = ShortConv { width: config.count_opt(WIDTH)?.unwrap_or(3), bias: config.flag(BIAS, false)? };
    model.recurrent = (!layers.is_empty()).then_some(RecurrentLayers { layers, mixer: Recurrent::ShortConv(conv) });
    model.attention.qk_norm = QkNorm::Head;
    model.norm_eps = config.number_opt("norm_eps")?.unwrap_or(LFM2.norm_eps) as f32;
    model.tied_embeddings = config.flag("tie_embedding", model.tied_embeddings)?;
    Ok(())
}

/// Returns the views of tensors, most of which have names of their own.
fn views(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    if tensor.name == FINAL_NORM {
        return vec![whole("model.embedding_norm.weight", tensor.shape[0])];
    }
    let Some((layer, part)) = layer_part(&tensor.name) else { return same_names(model, tensor) };
    let own = match part {
        "input_layernorm.weight" => "operator_norm.weight",
        "post_attention_layernorm.weight" => "ffn_norm.weight",
        "self_attn.q_norm.weight" => "self_attn.q_layernorm.weight",
        "self_attn.k_norm.weight" => "self_attn.k_layernorm.weight",
        "self_attn.o_proj.weight" => "self_attn.out_proj.weight",
        "mlp.gate_proj.weight" => "feed_forward.w1.weight",
        "mlp.up_proj.weight" => "feed_forward.w3.weight",
        "mlp.down_proj.weight" => "feed_forward.w2.weight",
        "mlp.router.selection_bias" => "feed_forward.expert_bias",
        _ => return separate_experts(model, tensor, "feed_forward", ["w1", "w3", "w2"]),
    };
    vec![whole(format!("model.layers.{layer}.{own}"), tensor.shape[0])]
}

/// Returns the views of tensors of LFM3, whose matrices of attention have the usual names.
fn views_of_lfm3(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    let own = match layer_part(&tensor.name) {
        Some((_, part)) if part.starts_with("self_attn.") => return same_names(model, tensor),
        Some((layer, "post_attention_layernorm.weight")) if model.post_norms => (layer, "post_operator_norm.weight"),
        Some((layer, "pre_feedforward_layernorm.weight")) => (layer, "ffn_norm.weight"),
        Some((layer, "post_feedforward_layernorm.weight")) => (layer, "post_ffn_norm.weight"),
        _ => return views(model, tensor),
    };
    let (layer, part) = own;
    vec![whole(format!("model.layers.{layer}.{part}"), tensor.shape[0])]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_width_of_the_mlp_is_rounded_up_and_never_wraps() {
        let width = |value: serde_json::Value| adjusted_width(&Fields::new(value.as_object().unwrap()));
        assert_eq!(width(json!({"block_ff_dim": 144, "block_multiple_of": 16})).unwrap(), 96);
        assert_eq!(width(json!({"intermediate_size": 10, "block_auto_adjust_ff_dim": false})).unwrap(), 10);
        assert!(width(json!({"block_multiple_of": 0})).is_err());
        let huge = json!({"block_ff_dim": u64::MAX, "block_ffn_dim_multiplier": 2.0, "block_multiple_of": 2});
        assert!(width(huge).is_err());
    }
}
