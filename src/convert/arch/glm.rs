//! `Glm4MoeForCausalLM` (GLM-4.5 to 4.7): partial rotation, biases of q, k and v, and experts that are chosen by the
//! sigmoids of their logits, beside an MLP for every token. The first layers have a dense MLP.

use super::family::{PLAIN, routed};
use super::rope::{self, PARTIAL};
use super::row::{Arch, PredictionPlace};
use crate::model_config::QkNorm;

pub(super) const GLM4_MOE: Arch = Arch {
    class: "Glm4MoeForCausalLM",
    model_type: "glm4_moe",
    n_kv_heads: Some(8),
    max_context: 131_072,
    norm_eps: 1e-5,
    honours: &[
        "attention_bias",
        "use_qk_norm",
        "n_routed_experts",
        "n_shared_experts",
        "first_k_dense_replace",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        PARTIAL,
    ],
    mlp: |_, config| routed::experts(config, &routed::Defaults { experts: 128, top_k: 8, ..routed::SIGMOID }),
    adjust: |config, model| {
        model.attention.o_bias = false;
        if config.flag("use_qk_norm", false)? {
            model.attention.qk_norm = QkNorm::Head;
        }
        rope::set_partial(config, model, Some(0.5))?;
        routed::dense_layers(config, model, 1)
    },
    views: routed::views,
    prediction: Some(PredictionPlace::Behind),
    ..PLAIN
};
