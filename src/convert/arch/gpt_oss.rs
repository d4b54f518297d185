//! `GptOssForCausalLM`: mixture of experts in MXFP4, attention sinks, alternating sliding windows, YaRN.
//!
//! The same weights exist in two forms: Hugging Face's, and that of the `original/` directory
//! (`block.N.attn.qkv.weight`, …) with its own `config.json`. Experts are quantized or, in fine-tuned checkpoints,
//! floats of shape `(experts, in, out)`.

use super::expected::ExpectedTensor;
use super::family::{PLAIN, experts, rows_of_qkv, silu, windows};
use super::fields::Fields;
use super::rope;
use super::row::Arch;
use super::view::{View, whole};
use crate::catalogue::layer_part;
use crate::error::Result;
use crate::model_config::{Activation, Mlp, ModelConfig, RopeScaling, RouterSoftmax, Selection};

pub(super) const GPT_OSS: Arch = Arch {
    class: "GptOssForCausalLM",
    model_type: "gpt_oss",
    n_kv_heads: Some(8),
    head_dim: Some(64),
    max_context: 131_072,
    norm_eps: 1e-5,
    theta: 150_000.0,
    attention_bias: true,
    honours: &["attention_bias", "sliding_window", "num_local_experts", "num_experts"],
    claims: is_original,
    mlp,
    // Even layers have a sliding window, starting with layer 0.
    windows: |config, n_layers| {
        let width = config.count_opt("sliding_window")?.unwrap_or(128);
        windows(config, n_layers, width, |layer| layer.is_multiple_of(2))
    },
    adjust: |config, model| {
        model.attention.sinks = true;
        if is_original(config) { read_original(config, model) } else { Ok(()) }
    },
    views,
    ..PLAIN
};

/// Slope of the sigmoid in the gate; a constant of the architecture that some configurations repeat.
const SWIGLU_ALPHA: f64 = 1.702;

/// Returns true for the configuration of `original/`, which names no class and has two fields
/// that no other configuration without a class has.
fn is_original(config: &Fields) -> bool {
    config.get("architectures").is_none()
        && config.get("num_experts").is_some()
        && config.get("rope_ntk_beta").is_some()
}

fn mlp(_: &Arch, config: &Fields) -> Result<Mlp> {
    silu(config)?;
    let top_k = if config.get("num_experts_per_tok").is_some() { "num_experts_per_tok" } else { "experts_per_token" };
    let alpha = config.number_opt("swiglu_alpha")?.unwrap_or(SWIGLU_ALPHA) as f32;
    let limit = config.number_opt("swiglu_limit")?.unwrap_or(7.0) as f32;
    Ok(Mlp::Moe {
        experts: experts(config)?,
        top_k: config.count(top_k)?,
        intermediate: config.count("intermediate_size")?,
        activation: Activation::SwigluOai { alpha, limit },
        bias: true,
        router_bias: true,
        latent: None,
        router_softmax: RouterSoftmax::Chosen,
        selection: Selection::default(),
        shared: None,
    })
}

/// Reads the fields of the configuration of `original/` that have other names there. All of them are required.
fn read_original(config: &Fields, model: &mut ModelConfig) -> Result<()> {
    for key in ["head_dim", "num_key_value_heads", "rope_theta"] {
        config.number(key)?;
    }
    let trained_context = config.count("initial_context_length")?;
    let factor = config.number("rope_scaling_factor")?;
    // The cast saturates; the result is range-checked with the other fields.
    model.max_context = (trained_context as f64 * factor.max(1.0)) as usize;
    if factor > 1.0 {
        model.rope.scaling = RopeScaling::Yarn {
            factor,
            beta_fast: config.number("rope_ntk_beta")?,
            beta_slow: config.number("rope_ntk_alpha")?,
            original_max_position: trained_context,
            truncate: false,
            attention_factor: rope::yarn_magnitude(factor, 1.0),
        };
    }
    Ok(())
}

fn views(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    hf_views(tensor).into_iter().chain(original_views(model, tensor)).collect()
}

fn hf_views(tensor: &ExpectedTensor) -> Vec<View> {
    let name = &tensor.name;
    if name.ends_with(".experts.gate_up_proj") || name.ends_with(".experts.down_proj") {
        let source = name.clone();
        return vec![View::Coded { source: source.clone() }, View::Transposed { source, stacks: 1 }];
    }
    vec![whole(name, tensor.shape[0])]
}

fn original_views(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    let (block, part) = match layer_part(&tensor.name) {
        Some((layer, part)) => (format!("block.{layer}."), part),
        None => (String::new(), tensor.name.as_str()),
    };
    // q, k and v are stacked in one matrix (and one bias).
    if let Some((first, of)) = rows_of_qkv(model, part) {
        let leaf = if part.ends_with("bias") { "bias" } else { "weight" };
        return vec![View::Rows { source: format!("{block}attn.qkv.{leaf}"), first, of }];
    }
    let source = match part {
        "model.embed_tokens.weight" => "embedding.weight",
        "model.norm.weight" => "norm.scale",
        "lm_head.weight" => "unembedding.weight",
        "input_layernorm.weight" => "attn.norm.scale",
        "self_attn.sinks" => "attn.sinks",
        "self_attn.o_proj.weight" => "attn.out.weight",
        "self_attn.o_proj.bias" => "attn.out.bias",
        "post_attention_layernorm.weight" => "mlp.norm.scale",
        "mlp.router.weight" => "mlp.gate.weight",
        "mlp.router.bias" => "mlp.gate.bias",
        "mlp.experts.gate_up_proj" => "mlp.mlp1_weight",
        "mlp.experts.gate_up_proj_bias" => "mlp.mlp1_bias",
        "mlp.experts.down_proj" => "mlp.mlp2_weight",
        "mlp.experts.down_proj_bias" => "mlp.mlp2_bias",
        _ => return Vec::new(),
    };
    let source = format!("{block}{source}");
    // Experts are quantized, or floats that already have the shape (experts, out, in).
    let coded = part.ends_with("_proj").then(|| View::Coded { source: source.clone() });
    coded.into_iter().chain([whole(source, tensor.shape[0])]).collect()
}
