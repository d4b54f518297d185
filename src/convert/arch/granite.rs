//! `GraniteForCausalLM`: Llama with factors of the embeddings, the scores, the outputs of blocks, and the logits.

use super::family::PLAIN;
use super::row::Arch;

pub(super) const GRANITE: Arch = Arch {
    class: "GraniteForCausalLM",
    model_type: "granite",
    honours: &[
        "attention_bias",
        "mlp_bias",
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    ],
    adjust: |config, model| {
        let factor = |key: &str| Ok::<_, crate::error::Error>(config.number_opt(key)?.unwrap_or(1.0));
        model.embedding_scale = factor("embedding_multiplier")? as f32;
        model.attention.scale = factor("attention_multiplier")? as f32;
        model.residual_scale = factor("residual_multiplier")? as f32;
        model.logit_scale = (1.0 / factor("logits_scaling")?) as f32;
        Ok(())
    },
    ..PLAIN
};
