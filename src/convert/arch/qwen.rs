//! `Qwen2ForCausalLM` (biases of q, k and v), `Qwen3ForCausalLM` (normalized q and k instead),
//! `Qwen3MoeForCausalLM` (experts in place of the MLP in all layers or in some) and
//! `Qwen3VLMoeForConditionalGeneration` (its text part, with transposed stacks of experts).

use super::expected::ExpectedTensor;
use super::family::{PLAIN, same_windows, separate_experts, sparse, windows};
use super::fields::Fields;
use super::rope::AXES;
use super::row::Arch;
use super::view::View;
use crate::error::Result;
use crate::model_config::{DenseLayers, Mlp, ModelConfig, QkNorm, RouterSoftmax};

pub(super) const QWEN2: Arch = Arch {
    class: "Qwen2ForCausalLM",
    model_type: "qwen2",
    also: &[
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        "qwen2_vl",
        "qwen2_vl_text",
    ],
    n_kv_heads: Some(32),
    max_context: 32_768,
    honours: &["sliding_window", "use_sliding_window", AXES],
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
    also: &["qwen3_vl_text"],
    head_dim: Some(128),
    honours: &["sliding_window", "use_sliding_window", "attention_bias", AXES],
    adjust: |_, model| {
        model.attention.qk_norm = QkNorm::Head;
        Ok(())
    },
    ..QWEN2
};

pub(super) const QWEN3_MOE: Arch = Arch {
    class: "Qwen3MoeForCausalLM",
    model_type: "qwen3_moe",
    also: &[],
    n_kv_heads: Some(4),
    head_dim: None,
    honours: &[
        "sliding_window",
        "use_sliding_window",
        "attention_bias",
        "num_experts",
        "num_local_experts",
        "mlp_only_layers",
        "decoder_sparse_step",
    ],
    mlp: |_, config| {
        let router_softmax =
            if config.flag("norm_topk_prob", false)? { RouterSoftmax::Chosen } else { RouterSoftmax::All };
        sparse(config, 8, config.count_opt("moe_intermediate_size")?.unwrap_or(768), router_softmax)
    },
    windows: |config, n_layers| {
        let width = config.flag("use_sliding_window", false)?.then(|| window_width(config)).transpose()?;
        same_windows(config, n_layers, width)
    },
    adjust: |config, model| {
        model.attention.qk_norm = QkNorm::Head;
        set_dense_layers(config, model, 6144)
    },
    views: |model, tensor| separate_experts(model, tensor, "mlp", ["gate_proj", "up_proj", "down_proj"]),
    ..QWEN3
};

pub(super) const QWEN3_VL_MOE: Arch = Arch {
    class: "Qwen3VLMoeForConditionalGeneration",
    model_type: "qwen3_vl_moe_text",
    n_kv_heads: Some(16),
    max_context: 128_000,
    theta: 500_000.0,
    honours: &["attention_bias", "num_experts", "num_local_experts", "mlp_only_layers", "decoder_sparse_step", AXES],
    // `transformers` normalizes the weights of experts whatever `norm_topk_prob` says.
    mlp: |_, config| {
        let intermediate = config.count_opt("moe_intermediate_size")?.unwrap_or(1408);
        sparse(config, 4, intermediate, RouterSoftmax::Chosen)
    },
    windows: |config, n_layers| same_windows(config, n_layers, None),
    adjust: |config, model| {
        model.attention.qk_norm = QkNorm::Head;
        set_dense_layers(config, model, 5632)
    },
    views: transposed_experts,
    ..QWEN3_MOE
};

/// Returns the views of stacks of experts that are stored as `(experts, in, out)`, gate before up, and of all other
/// tensors.
fn transposed_experts(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    let mut views = (QWEN3_MOE.views)(model, tensor);
    let stacks = match tensor.name.rsplit_once(".mlp.experts.") {
        Some((_, "gate_up_proj")) => 2,
        Some((_, "down_proj")) => 1,
        _ => return views,
    };
    // As in `transformers`, the shape decides, so that square matrices are not transposed.
    if tensor.shape[1] != tensor.shape[2] {
        views.insert(0, View::Transposed { source: tensor.name.clone(), stacks });
    }
    views
}

/// Sets the layers that have a dense MLP: those that `mlp_only_layers` lists, and those whose number, counted from 1,
/// is no multiple of `decoder_sparse_step`. Without experts all layers have one. `width` is the default of
/// `intermediate_size`.
pub(super) fn set_dense_layers(config: &Fields, model: &mut ModelConfig, width: usize) -> Result<()> {
    let Mlp::Moe { experts, activation, .. } = model.mlp else { unreachable!("the family has experts") };
    let step = config.count_opt("decoder_sparse_step")?.unwrap_or(1);
    if step == 0 {
        return Err(config.wrong("decoder_sparse_step", "a whole number from 1 on"));
    }
    let mut dense: Vec<bool> =
        (1..=model.n_layers).map(|number| experts == 0 || !number.is_multiple_of(step)).collect();
    for layer in config.counts_opt("mlp_only_layers")?.unwrap_or_default() {
        let known = dense.get_mut(layer);
        *known.ok_or_else(|| {
            let expected = format!("numbers of layers below {}, as num_hidden_layers says", model.n_layers);
            config.wrong("mlp_only_layers", &expected)
        })? = true;
    }
    let layers: Vec<usize> = (0..model.n_layers).filter(|layer| dense[*layer]).collect();
    if layers.is_empty() {
        return Ok(());
    }
    let intermediate = config.count_opt("intermediate_size")?.unwrap_or(width);
    if layers.len() == model.n_layers {
        model.mlp = Mlp::Dense { intermediate, activation, bias: false };
    } else {
        model.dense_layers = Some(DenseLayers { layers, intermediate });
    }
    Ok(())
}

/// Reads the windows: with `use_sliding_window`, layers from `max_window_layers` on have one, unless
/// `layer_types` lists the layers.
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
