//! `Qwen2ForCausalLM` (biases of q, k and v), `Qwen3ForCausalLM` (normalized q and k instead) and
//! `Qwen3MoeForCausalLM` (experts in place of the MLP).

use super::family::{same_windows, separate_experts, sparse, windows};
use super::{Arch, Fields, PLAIN};
use crate::error::Result;
use crate::model_config::RouterSoftmax;

pub(super) const QWEN2: Arch = Arch {
    class: "Qwen2ForCausalLM",
    model_type: "qwen2",
    n_kv_heads: Some(32),
    max_context: 32_768,
    honours: &["sliding_window", "use_sliding_window"],
    windows: upper_windows,
    adjust: |_, model| {
        model.attention.qkv_bias = true;
        Ok(())
    },
    ..PLAIN
};

pub(super) const QWEN3: Arch = Arch {
    class: "Qwen3ForCausalLM",
    model_type: "qwen3",
    head_dim: Some(128),
    honours: &["sliding_window", "use_sliding_window", "attention_bias"],
    adjust: |_, model| {
        model.attention.qk_norm = true;
        Ok(())
    },
    ..QWEN2
};

pub(super) const QWEN3_MOE: Arch = Arch {
    class: "Qwen3MoeForCausalLM",
    model_type: "qwen3_moe",
    n_kv_heads: Some(4),
    head_dim: None,
    honours: &["sliding_window", "use_sliding_window", "attention_bias", "num_experts", "num_local_experts"],
    mlp: |_, config| {
        let router_softmax =
            if config.flag("norm_topk_prob", false)? { RouterSoftmax::Chosen } else { RouterSoftmax::All };
        sparse(config, 8, config.count_opt("moe_intermediate_size")?.unwrap_or(768), router_softmax)
    },
    windows: |config, n_layers| {
        let width = config.flag("use_sliding_window", false)?.then(|| window_width(config)).transpose()?;
        same_windows(config, n_layers, width)
    },
    views: |model, tensor| separate_experts(model, tensor, "mlp", ["gate_proj", "up_proj", "down_proj"]),
    ..QWEN3
};

/// Reads the windows: with `use_sliding_window`, layers from `max_window_layers` on have one, unless
/// `layer_types` says otherwise.
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
