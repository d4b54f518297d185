//! `MiniMaxM2ForCausalLM` (MiniMax M2, M2.1 and M2.5): one norm for the queries of all heads and one for the keys, a
//! rotation of half of each head, and experts in every layer, chosen by the sigmoids of their logits.

use super::expected::ExpectedTensor;
use super::family::{PLAIN, separate_experts, sparse};
use super::fields::Fields;
use super::rope::{self, PARTIAL};
use super::row::Arch;
use super::view::{View, whole};
use crate::catalogue::layer_part;
use crate::error::Result;
use crate::model_config::{Mlp, ModelConfig, QkNorm, RouterSoftmax, Selection};

const ROTATED: &str = "rotary_dim";

pub(super) const MINIMAX_M2: Arch = Arch {
    class: "MiniMaxM2ForCausalLM",
    model_type: "minimax_m2",
    n_kv_heads: Some(8),
    head_dim: Some(128),
    max_context: 196_608,
    theta: 5e6,
    honours: &["num_local_experts", "num_experts", "use_qk_norm", ROTATED, PARTIAL],
    mlp: |_, config| {
        let mut mlp = sparse(config, 8, config.count("intermediate_size")?, RouterSoftmax::Chosen)?;
        if let Mlp::Moe { selection, .. } = &mut mlp {
            *selection = Selection { sigmoid: true, bias: true, ..Selection::default() };
        }
        Ok(mlp)
    },
    adjust: |config, model| {
        refuse_others(config)?;
        model.attention.qk_norm = QkNorm::All;
        rotate_part(config, model)
    },
    views,
    ..PLAIN
};

/// Refuses values of fields that describe other models of the same makers, which `transformers` does not compute.
fn refuse_others(config: &Fields) -> Result<()> {
    for (key, expected) in [("scoring_func", "sigmoid"), ("qk_norm_type", "per_layer")] {
        if config.word_opt(key)?.is_some_and(|found| found != expected) {
            return Err(config.unsupported(key, &format!("expected {expected} in this family")));
        }
    }
    for key in ["use_qk_norm", "use_routing_bias"] {
        if !config.flag(key, true)? {
            return Err(config.unsupported(key, "expected true in this family"));
        }
    }
    // 0 stands for linear attention.
    if config.counts_opt("attn_type_list")?.is_some_and(|types| types.iter().any(|kind| *kind != 1)) {
        return Err(config.unsupported("attn_type_list", "expected 1, full attention, in every layer"));
    }
    Ok(())
}

/// Sets the part of each head that is rotated: a share, or `rotary_dim` values.
fn rotate_part(config: &Fields, model: &mut ModelConfig) -> Result<()> {
    let rotated = config.count_opt(ROTATED)?;
    if rotated.is_some_and(|rotated| !(1..=model.head_dim).contains(&rotated)) {
        return Err(config.wrong(ROTATED, &format!("1 to {}, the size of a head", model.head_dim)));
    }
    rope::set_partial(config, model, rotated.map(|rotated| rotated as f64 / model.head_dim as f64))
}

fn views(model: &ModelConfig, tensor: &ExpectedTensor) -> Vec<View> {
    match layer_part(&tensor.name) {
        Some((layer, "mlp.router.selection_bias")) => {
            vec![whole(format!("model.layers.{layer}.block_sparse_moe.e_score_correction_bias"), tensor.shape[0])]
        }
        _ => separate_experts(model, tensor, "block_sparse_moe", ["w1", "w3", "w2"]),
    }
}
