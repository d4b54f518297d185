//! Families with multi-head latent attention: `DeepseekV2ForCausalLM`, `DeepseekV3ForCausalLM` (also R1, Kimi K2 and
//! Moonlight), `Glm4MoeLiteForCausalLM` (GLM-4.7-Flash) and `Mistral4ForCausalLM` (Mistral Small 4).

use super::family::routed::{self, Defaults, SIGMOID};
use super::family::{PLAIN, score_scale};
use super::fields::Fields;
use super::rope::{self, GROWTH};
use super::row::{Arch, PredictionPlace};
use crate::error::Result;
use crate::model_config::{ExpertGroups, Latent, ModelConfig, RotaryPairs, Selection};

/// Epsilon of the norms of the vectors, whatever the configuration says for the others.
const LATENT_EPS: f32 = 1e-6;

const FIELDS: &[&str] = &[
    "attention_bias",
    "n_routed_experts",
    "n_shared_experts",
    "first_k_dense_replace",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "kv_lora_rank",
    "q_lora_rank",
];

pub(super) const DEEPSEEK_V3: Arch = Arch {
    class: "DeepseekV3ForCausalLM",
    model_type: "deepseek_v3",
    also: &["kimi_k2"],
    // Heads have the sizes of their parts, and the hidden size need not be a multiple of their count.
    head_dim: Some(64),
    max_context: 4096,
    honours: FIELDS,
    mlp: |_, config| {
        check_choice(config, "sigmoid")?;
        let groups = Some(ExpertGroups { count: 8, chosen: 4, best: 2 });
        let selection = Selection { groups, scale: 2.5, ..SIGMOID.selection };
        routed::experts(config, &Defaults { selection, ..SIGMOID })
    },
    adjust: |config, model| {
        latent(config, model)?;
        routed::dense_layers(config, model, 3)
    },
    views: routed::views,
    prediction: Some(PredictionPlace::Behind),
    ..PLAIN
};

pub(super) const DEEPSEEK_V2: Arch = Arch {
    class: "DeepseekV2ForCausalLM",
    model_type: "deepseek_v2",
    also: &[],
    max_context: 2048,
    mlp: |_, config| {
        check_choice(config, "softmax")?;
        let is_grouped = match config.word_opt("topk_method")? {
            None | Some("greedy") => false,
            Some("group_limited_greedy") => true,
            Some(_) => return Err(config.unsupported("topk_method", "expected greedy or group_limited_greedy")),
        };
        let groups = is_grouped.then_some(ExpertGroups { count: 1, chosen: 1, best: 1 });
        let selection = Selection { groups, ..Selection::default() };
        // `transformers` ignores `norm_topk_prob` in this family.
        routed::experts(config, &Defaults { experts: 64, top_k: 6, shared: 2, normalized: None, selection })
    },
    adjust: |config, model| {
        latent(config, model)?;
        routed::dense_layers(config, model, 0)
    },
    prediction: None,
    ..DEEPSEEK_V3
};

pub(super) const GLM4_MOE_LITE: Arch = Arch {
    class: "Glm4MoeLiteForCausalLM",
    model_type: "glm4_moe_lite",
    also: &[],
    max_context: 202_752,
    norm_eps: 1e-5,
    mlp: |_, config| {
        let selection = Selection { scale: 1.8, ..SIGMOID.selection };
        routed::experts(config, &Defaults { experts: 64, top_k: 4, selection, ..SIGMOID })
    },
    adjust: |config, model| {
        latent(config, model)?;
        routed::dense_layers(config, model, 1)
    },
    ..DEEPSEEK_V3
};

pub(super) const MISTRAL4: Arch = Arch {
    class: "Mistral4ForCausalLM",
    model_type: "mistral4",
    also: &[],
    max_context: 1_048_576,
    honours: &[
        "attention_bias",
        "n_routed_experts",
        "n_shared_experts",
        "first_k_dense_replace",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "kv_lora_rank",
        "q_lora_rank",
        super::rope::PARTIAL,
        GROWTH,
    ],
    mlp: |_, config| {
        let groups = Some(ExpertGroups { count: 1, chosen: 1, best: 2 });
        let selection = Selection { groups, ..Selection::default() };
        routed::experts(config, &Defaults { experts: 128, top_k: 4, shared: 1, normalized: Some(true), selection })
    },
    adjust: |config, model| {
        latent(config, model)?;
        model.attention.position_scale = rope::position_scale(config)?;
        routed::dense_layers(config, model, 0)
    },
    prediction: None,
    ..DEEPSEEK_V3
};

/// Refuses another function of the router's logits than the family's.
fn check_choice(config: &Fields, function: &str) -> Result<()> {
    match config.word_opt("scoring_func")? {
        Some(found) if found != function => {
            Err(config.unsupported("scoring_func", &format!("expected {function} in this family")))
        }
        _ => Ok(()),
    }
}

/// Sets latent attention.
fn latent(config: &Fields, model: &mut ModelConfig) -> Result<()> {
    let size = |key: &str| config.count(key);
    let (nope, rope) = (size("qk_nope_head_dim")?, size("qk_rope_head_dim")?);
    let value = size("v_head_dim")?;
    let q_rank = config.count_opt("q_lora_rank")?;
    let kv_rank = size("kv_lora_rank")?;
    model.attention.latent = Some(Latent { q_rank, kv_rank, nope, rope, value, norm_eps: LATENT_EPS });
    model.head_dim = nope.saturating_add(rope);
    model.rope.rotary_dim = Some(rope);
    model.rope.pairs = match config.flag("rope_interleave", true)? {
        true => RotaryPairs::Adjacent,
        false => RotaryPairs::Halves,
    };
    model.attention.scale = score_scale(model.head_dim as f64);
    if let Some(magnitude) = rope::score_magnitude(config)? {
        model.attention.scale = (f64::from(model.attention.scale) * magnitude * magnitude) as f32;
    }
    Ok(())
}
