//! `MixtralForCausalLM`: Mistral with experts, each in three tensors of its own: `w1` gate, `w3` up, `w2` down.

use super::family::{Defaults, experts, plain, refuse_quantization, same_names, same_windows, separate_experts, silu};
use super::{Arch, ExpectedTensor, Fields, View, layer_part, named, whole};
use crate::error::Result;
use crate::model_config::{Mlp, ModelConfig, RouterSoftmax};

pub(super) const ARCH: Arch =
    Arch { class: DEFAULTS.class, claims: |config| named(config, DEFAULTS.class, "mixtral"), config, views };

const DEFAULTS: Defaults = Defaults {
    class: "MixtralForCausalLM",
    n_kv_heads: Some(8),
    head_dim: None,
    max_context: 131_072,
    norm_eps: 1e-5,
    theta: 1e6,
    tied: false,
    honours: &["sliding_window", "num_local_experts", "num_experts"],
};

fn config(config: &Fields) -> Result<ModelConfig> {
    refuse_quantization(config, None)?;
    let mlp = Mlp::Moe {
        experts: experts(config)?,
        top_k: config.count_opt("num_experts_per_tok")?.unwrap_or(2),
        intermediate: config.count("intermediate_size")?,
        activation: silu(config)?,
        bias: false,
        router_bias: false,
        router_softmax: RouterSoftmax::Chosen,
    };
    let mut model = plain(config, &DEFAULTS, mlp)?;
    model.attention.windows = same_windows(config, model.n_layers, config.count_opt("sliding_window")?)?;
    Ok(model)
}

fn views(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    let Some((layer, part)) = layer_part(&tensor.name) else { return same_names(model, tensor) };
    let at = format!("model.layers.{layer}.block_sparse_moe");
    match part {
        "mlp.router.weight" => vec![whole(format!("{at}.gate.weight"), tensor.shape[0])],
        _ if part.starts_with("mlp.experts.") => vec![separate_experts(tensor, |expert, part| {
            let leaf = match part {
                "gate" => "w1",
                "up" => "w3",
                _ => "w2",
            };
            format!("{at}.experts.{expert}.{leaf}.weight")
        })],
        _ => same_names(model, tensor),
    }
}
