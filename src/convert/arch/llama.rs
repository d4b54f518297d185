//! `LlamaForCausalLM`, the plain decoder with optional biases; `MistralForCausalLM`, Llama with a sliding window in
//! every layer; `MixtralForCausalLM`, Mistral with experts, each of which is stored as three tensors; and
//! `Ministral3ForCausalLM`, Mistral without windows whose queries grow with their positions.

use super::family::{PLAIN, same_windows, separate_experts, sparse};
use super::rope::{self, GROWTH};
use super::row::Arch;
use crate::model_config::RouterSoftmax;

pub(super) const LLAMA: Arch =
    Arch { class: "LlamaForCausalLM", model_type: "llama", honours: &["attention_bias", "mlp_bias"], ..PLAIN };

pub(super) const MISTRAL: Arch = Arch {
    class: "MistralForCausalLM",
    model_type: "mistral",
    n_kv_heads: Some(8),
    max_context: 131_072,
    honours: &["sliding_window"],
    windows: |config, n_layers| {
        // An absent field means 4096; `null`, as in later releases, means no window.
        let absent = config.get("sliding_window").is_none() && !config.is_null("sliding_window");
        let width = if absent { Some(4096) } else { config.count_opt("sliding_window")? };
        same_windows(config, n_layers, width)
    },
    ..PLAIN
};

pub(super) const MIXTRAL: Arch = Arch {
    class: "MixtralForCausalLM",
    model_type: "mixtral",
    norm_eps: 1e-5,
    theta: 1e6,
    honours: &["sliding_window", "num_local_experts", "num_experts"],
    mlp: |_, config| sparse(config, 2, config.count("intermediate_size")?, RouterSoftmax::Chosen),
    windows: |config, n_layers| same_windows(config, n_layers, config.count_opt("sliding_window")?),
    views: |model, tensor| separate_experts(model, tensor, "block_sparse_moe", ["w1", "w3", "w2"]),
    ..MISTRAL
};

pub(super) const MINISTRAL3: Arch = Arch {
    class: "Ministral3ForCausalLM",
    model_type: "ministral3",
    max_context: 262_144,
    norm_eps: 1e-5,
    theta: 1e6,
    honours: &["sliding_window", GROWTH],
    windows: |config, n_layers| same_windows(config, n_layers, config.count_opt("sliding_window")?),
    adjust: |config, model| {
        model.attention.position_scale = rope::position_scale(config)?;
        Ok(())
    },
    ..MISTRAL
};
