//! `GptOssForCausalLM`: mixture of experts in MXFP4, attention sinks, alternating sliding windows, YaRN.
//!
//! The same weights come in two spellings: Hugging Face's, and the one of the `original/` directory
//! (`block.N.attn.qkv.weight`, …) with its own `config.json`. Experts are MXFP4 (`*_blocks`, `*_scales`) or, in
//! fine-tuned checkpoints, floats stored `(experts, in, out)`.

use super::family::{Defaults, layers, plain, refuse_quantization, score_scale, silu, windows};
use super::{Arch, ExpectedTensor, Fields, View, layer_part, named, rope, whole};
use crate::error::Result;
use crate::model_config::{Activation, Attention, Mlp, ModelConfig, Rope, RopeScaling, RouterSoftmax};

pub(super) const ARCH: Arch = Arch {
    class: CLASS,
    claims: |config| Ok(is_original(config) || named(config, CLASS, "gpt_oss")?),
    config: |config| if is_original(config) { original_config(config) } else { hf_config(config) },
    views,
};

const CLASS: &str = "GptOssForCausalLM";
/// Slope of the sigmoid in the gate; a constant of the architecture that some configurations repeat.
const SWIGLU_ALPHA: f64 = 1.702;

/// The configuration of `original/` names no class; these two fields are its own.
fn is_original(config: &Fields) -> bool {
    config.get("architectures").is_none()
        && config.get("num_experts").is_some()
        && config.get("rope_ntk_beta").is_some()
}

const DEFAULTS: Defaults = Defaults {
    class: CLASS,
    n_kv_heads: Some(8),
    head_dim: Some(64),
    max_context: 131_072,
    norm_eps: 1e-5,
    theta: 150_000.0,
    tied: false,
    honours: &["attention_bias", "sliding_window", "num_local_experts", "num_experts"],
};

fn hf_config(config: &Fields) -> Result<ModelConfig> {
    refuse_quantization(config, Some("mxfp4"))?;
    silu(config)?;
    let top_k = if config.get("num_experts_per_tok").is_some() { "num_experts_per_tok" } else { "experts_per_token" };
    let mlp = experts(config, config.count("num_local_experts")?, config.count(top_k)?)?;
    let mut model = plain(config, &DEFAULTS, mlp)?;
    let bias = config.flag("attention_bias", true)?;
    (model.attention.qkv_bias, model.attention.o_bias) = (bias, bias);
    model.attention.sinks = true;
    model.attention.windows = alternating(config, model.n_layers)?;
    Ok(model)
}

fn experts(config: &Fields, experts: usize, top_k: usize) -> Result<Mlp> {
    let alpha = config.number_opt("swiglu_alpha")?.unwrap_or(SWIGLU_ALPHA) as f32;
    let limit = config.number_opt("swiglu_limit")?.unwrap_or(7.0) as f32;
    Ok(Mlp::Moe {
        experts,
        top_k,
        intermediate: config.count("intermediate_size")?,
        activation: Activation::SwigluOai { alpha, limit },
        bias: true,
        router_bias: true,
        router_softmax: RouterSoftmax::Chosen,
    })
}

/// Every other layer slides, from the first on.
fn alternating(config: &Fields, n_layers: usize) -> Result<Vec<Option<usize>>> {
    let width = config.count_opt("sliding_window")?.unwrap_or(128);
    windows(config, n_layers, width, |layer| layer.is_multiple_of(2))
}

fn original_config(config: &Fields) -> Result<ModelConfig> {
    let hidden = config.count("hidden_size")?;
    let n_heads = config.count("num_attention_heads")?;
    let head_dim = config.count("head_dim")?;
    let n_layers = layers(config)?;
    let trained_context = config.count("initial_context_length")?;
    let factor = config.number("rope_scaling_factor")?;
    let scaling = if factor > 1.0 {
        RopeScaling::Yarn {
            factor,
            beta_fast: config.number("rope_ntk_beta")?,
            beta_slow: config.number("rope_ntk_alpha")?,
            original_max_position: trained_context,
            truncate: false,
            attention_factor: rope::yarn_magnitude(factor, 1.0),
        }
    } else {
        RopeScaling::None
    };
    Ok(ModelConfig {
        architecture: CLASS.to_string(),
        hidden,
        n_layers,
        n_heads,
        n_kv_heads: config.count("num_key_value_heads")?,
        head_dim,
        vocab: config.count("vocab_size")?,
        // `as` saturates; the result is range-checked with the rest.
        max_context: (trained_context as f64 * factor.max(1.0)) as usize,
        norm_eps: 1e-5,
        rope: Rope { theta: config.number("rope_theta")?, rotary_dim: None, scaling },
        local_rope: None,
        norm_plus_one: false,
        post_norms: false,
        embedding_scale: 1.0,
        logit_softcap: None,
        attention: Attention {
            qkv_bias: true,
            o_bias: true,
            sinks: true,
            windows: alternating(config, n_layers)?,
            scale: score_scale(head_dim as f64),
            qk_norm: false,
            softcap: None,
        },
        mlp: experts(config, config.count("num_experts")?, config.count("experts_per_token")?)?,
        tied_embeddings: false,
        bos: None,
        eos: Vec::new(),
    })
}

fn views(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    hf_views(tensor).into_iter().chain(original_views(model, tensor)).collect()
}

fn hf_views(tensor: &ExpectedTensor) -> Vec<View> {
    let name = &tensor.name;
    if name.ends_with(".experts.gate_up_proj") || name.ends_with(".experts.down_proj") {
        let mxfp4 = View::Mxfp4 { blocks: format!("{name}_blocks"), scales: format!("{name}_scales") };
        return vec![mxfp4, View::Transposed { source: name.clone() }];
    }
    vec![whole(name, tensor.shape[0])]
}

fn original_views(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    let top = match tensor.name.as_str() {
        "model.embed_tokens.weight" => Some("embedding.weight"),
        "model.norm.weight" => Some("norm.scale"),
        "lm_head.weight" => Some("unembedding.weight"),
        _ => None,
    };
    if let Some(source) = top {
        return vec![whole(source, tensor.shape[0])];
    }
    let Some((layer, part)) = layer_part(&tensor.name) else { return Vec::new() };
    let block = |leaf: &str| format!("block.{layer}.{leaf}");
    let leaf = match part {
        "input_layernorm.weight" => "attn.norm.scale",
        "self_attn.sinks" => "attn.sinks",
        "self_attn.o_proj.weight" => "attn.out.weight",
        "self_attn.o_proj.bias" => "attn.out.bias",
        "post_attention_layernorm.weight" => "mlp.norm.scale",
        "mlp.router.weight" => "mlp.gate.weight",
        "mlp.router.bias" => "mlp.gate.bias",
        "mlp.experts.gate_up_proj_bias" => "mlp.mlp1_bias",
        "mlp.experts.down_proj_bias" => "mlp.mlp2_bias",
        "mlp.experts.gate_up_proj" => return original_experts(block("mlp.mlp1_weight"), tensor),
        "mlp.experts.down_proj" => return original_experts(block("mlp.mlp2_weight"), tensor),
        _ => return rows_of_qkv(model, part, block).into_iter().collect(),
    };
    vec![whole(block(leaf), tensor.shape[0])]
}

fn original_experts(source: String, tensor: &ExpectedTensor) -> Vec<View> {
    let mxfp4 = View::Mxfp4 { blocks: format!("{source}.blocks"), scales: format!("{source}.scales") };
    // Floats of this spelling are (experts, out, in) already.
    vec![mxfp4, whole(source, tensor.shape[0])]
}

/// q, k and v lie below each other in one matrix (and one bias).
fn rows_of_qkv(model: &ModelConfig, part: &str, block: impl Fn(&str) -> String) -> Option<View> {
    let (projection, leaf) = part.strip_prefix("self_attn.")?.split_once("_proj.")?;
    let (q, kv) = (model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim);
    let first = match projection {
        "q" => 0,
        "k" => q,
        "v" => q + kv,
        _ => return None,
    };
    Some(View::Rows { source: block(&format!("attn.qkv.{leaf}")), first, of: q + 2 * kv })
}
