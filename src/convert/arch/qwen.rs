//! `Qwen2ForCausalLM` (biases at q, k and v), `Qwen3ForCausalLM` (normed q and k instead) and `Qwen3MoeForCausalLM`
//! (experts in place of the MLP).

use super::family::{
    Defaults, dense, experts, plain, refuse_quantization, same_names, same_windows, separate_experts, silu, windows,
};
use super::{Arch, ExpectedTensor, Fields, View, layer_part, named, whole};
use crate::error::Result;
use crate::model_config::{Mlp, ModelConfig, RouterSoftmax};

pub(super) const QWEN2: Arch = Arch {
    class: QWEN2_DEFAULTS.class,
    claims: |config| named(config, QWEN2_DEFAULTS.class, "qwen2"),
    config: qwen2,
    views: same_names,
};

pub(super) const QWEN3: Arch = Arch {
    class: QWEN3_DEFAULTS.class,
    claims: |config| named(config, QWEN3_DEFAULTS.class, "qwen3"),
    config: qwen3,
    views: same_names,
};

pub(super) const QWEN3_MOE: Arch = Arch {
    class: QWEN3_MOE_DEFAULTS.class,
    claims: |config| named(config, QWEN3_MOE_DEFAULTS.class, "qwen3_moe"),
    config: qwen3_moe,
    views: moe_views,
};

const QWEN2_DEFAULTS: Defaults = Defaults {
    class: "Qwen2ForCausalLM",
    n_kv_heads: Some(32),
    head_dim: None,
    max_context: 32_768,
    norm_eps: 1e-6,
    theta: 10_000.0,
    tied: false,
    honours: &["sliding_window", "use_sliding_window"],
};

const QWEN3_DEFAULTS: Defaults = Defaults {
    class: "Qwen3ForCausalLM",
    head_dim: Some(128),
    honours: &["sliding_window", "use_sliding_window", "attention_bias"],
    ..QWEN2_DEFAULTS
};

const QWEN3_MOE_DEFAULTS: Defaults = Defaults {
    class: "Qwen3MoeForCausalLM",
    n_kv_heads: Some(4),
    honours: &["sliding_window", "use_sliding_window", "attention_bias", "num_experts", "num_local_experts"],
    ..QWEN2_DEFAULTS
};

fn qwen2(config: &Fields) -> Result<ModelConfig> {
    refuse_quantization(config, None)?;
    let mut model = plain(config, &QWEN2_DEFAULTS, dense(config, silu(config)?)?)?;
    model.attention.qkv_bias = true;
    model.attention.windows = upper_windows(config, model.n_layers)?;
    Ok(model)
}

fn qwen3(config: &Fields) -> Result<ModelConfig> {
    refuse_quantization(config, None)?;
    let mut model = plain(config, &QWEN3_DEFAULTS, dense(config, silu(config)?)?)?;
    norm_heads(config, &mut model)?;
    model.attention.windows = upper_windows(config, model.n_layers)?;
    Ok(model)
}

fn qwen3_moe(config: &Fields) -> Result<ModelConfig> {
    refuse_quantization(config, None)?;
    let mlp = Mlp::Moe {
        experts: experts(config)?,
        top_k: config.count_opt("num_experts_per_tok")?.unwrap_or(8),
        intermediate: config.count_opt("moe_intermediate_size")?.unwrap_or(768),
        activation: silu(config)?,
        bias: false,
        router_bias: false,
        router_softmax: if config.flag("norm_topk_prob", false)? { RouterSoftmax::Chosen } else { RouterSoftmax::All },
    };
    let mut model = plain(config, &QWEN3_MOE_DEFAULTS, mlp)?;
    norm_heads(config, &mut model)?;
    let width = if config.flag("use_sliding_window", false)? { Some(window_width(config)?) } else { None };
    model.attention.windows = same_windows(config, model.n_layers, width)?;
    Ok(model)
}

fn norm_heads(config: &Fields, model: &mut ModelConfig) -> Result<()> {
    let bias = config.flag("attention_bias", false)?;
    (model.attention.qkv_bias, model.attention.o_bias) = (bias, bias);
    model.attention.qk_norm = true;
    Ok(())
}

/// With `use_sliding_window` the layers from `max_window_layers` on slide, unless `layer_types` says otherwise.
fn upper_windows(config: &Fields, n_layers: usize) -> Result<Vec<Option<usize>>> {
    if !config.flag("use_sliding_window", false)? {
        return same_windows(config, n_layers, None);
    }
    let first = config.count_opt("max_window_layers")?.unwrap_or(28);
    windows(config, n_layers, window_width(config)?, |layer| layer >= first)
}

fn window_width(config: &Fields) -> Result<usize> {
    Ok(config.count_opt("sliding_window")?.unwrap_or(4096))
}

fn moe_views(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    let Some((layer, part)) = layer_part(&tensor.name) else { return same_names(model, tensor) };
    let at = format!("model.layers.{layer}.mlp");
    match part {
        "mlp.router.weight" => vec![whole(format!("{at}.gate.weight"), tensor.shape[0])],
        _ if part.starts_with("mlp.experts.") => {
            vec![separate_experts(tensor, |expert, part| format!("{at}.experts.{expert}.{part}_proj.weight"))]
        }
        _ => same_names(model, tensor),
    }
}
