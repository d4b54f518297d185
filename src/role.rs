//! Derives the role of a tensor in the model from its canonical name.
//!
//! Canonical names are those of Hugging Face's Llama and gpt-oss; converters map every other naming onto them:
//!
//! ```text
//! model.embed_tokens.weight                                  (vocab, hidden)
//! model.layers.N.input_layernorm.weight                      (hidden)
//! model.layers.N.self_attn.{q,k,v,o}_proj.{weight,bias}      (out, in) / (out)
//! model.layers.N.self_attn.{q,k}_norm.weight                 (head_dim); one norm for all heads; or (heads * head_dim)
//! model.layers.N.self_attn.gate_proj.weight                  (heads * head_dim, hidden); gate of the heads' outputs
//! model.layers.N.self_attn.{q_a,q_b,kv_b}_proj.weight, .kv_a_proj_with_mqa.weight, .{q_a,kv_a}_layernorm.weight
//!                                                            latent attention, see [`crate::model_config::Latent`]
//! model.layers.N.self_attn.sinks                             (n_heads)
//! model.layers.N.post_attention_layernorm.weight             (hidden); norm of the MLP's input; with post norms: of
//!                                                            attention's output, and the next two exist, too:
//! model.layers.N.{pre,post}_feedforward_layernorm.weight     (hidden); input and output of the MLP
//! model.layers.N.mlp.{gate,up,down}_proj.{weight,bias}       (out, in) / (out)
//! model.layers.N.mlp.router.{weight,bias}                    (experts, hidden) / (experts)
//! model.layers.N.mlp.router.selection_bias                   (experts); added to scores for the choice of experts
//! model.layers.N.mlp.shared_experts.{gate,up,down}_proj.weight   (out, in); an MLP beside the experts
//! model.layers.N.mlp.experts.{gate_up,down}_proj             (experts, out, in); gate and up rows alternate
//! model.layers.N.mlp.experts.{gate_up,down}_proj_bias        (experts, out)
//! model.layers.N.mlp.{experts.pre,experts.post,shared_experts.post}_layernorm.weight   (hidden)
//! model.layers.N.mlp.router.{input_scale,expert_scale}       (hidden) / (experts)
//! model.layers.N.{per_layer_input_gate,per_layer_projection}.weight, .post_per_layer_input_norm.weight,
//! model.{embed_tokens_per_layer,per_layer_model_projection,per_layer_projection_norm}.weight
//!                                                            further inputs of layers (Gemma 4 E2B and E4B)
//! model.layers.N.layer_scalar                                (1); factor at the end of the layer
//! model.norm.weight                                          (hidden)
//! lm_head.weight                                             (vocab, hidden); absent if the embedding is used instead
//! mtp.*                                                      multi-token prediction, kept but not computed
//! ```

/// Role of a tensor in the model; quantization rules and reports refer to tensors by role.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    Embedding,
    Norm,
    Attention,
    Mlp,
    Experts,
    Router,
    Bias,
    Sinks,
    LmHead,
    Prediction,
    Other,
}

impl Role {
    /// Returns the role of the tensor with this canonical name.
    pub fn of(name: &str) -> Role {
        let leaf = name.strip_prefix("model.").unwrap_or(name);
        if name.starts_with("mtp.") {
            Role::Prediction
        } else if leaf.ends_with("bias") {
            Role::Bias
        } else if leaf.starts_with("embed_tokens.") || leaf.starts_with("embed_tokens_per_layer.") {
            Role::Embedding
        } else if leaf.starts_with("lm_head.") {
            Role::LmHead
        } else if leaf.ends_with("norm.weight") {
            Role::Norm
        } else if leaf.ends_with(".sinks") {
            Role::Sinks
        } else if leaf.contains(".mlp.router.") {
            Role::Router
        } else if leaf.contains(".mlp.experts.") {
            Role::Experts
        } else if leaf.contains(".mlp.") {
            Role::Mlp
        } else if leaf.contains(".self_attn.") {
            Role::Attention
        } else {
            Role::Other
        }
    }

    /// Returns the name of the role in reports.
    pub fn name(self) -> &'static str {
        match self {
            Role::Embedding => "embedding",
            Role::Norm => "norm",
            Role::Attention => "attention",
            Role::Mlp => "mlp",
            Role::Experts => "experts",
            Role::Router => "router",
            Role::Bias => "bias",
            Role::Sinks => "sinks",
            Role::LmHead => "lm_head",
            Role::Prediction => "prediction",
            Role::Other => "other",
        }
    }

    /// Returns true for the matrices that are quantized by default: those of attention, MLP and experts.
    pub fn quantizes_by_default(self) -> bool {
        matches!(self, Role::Attention | Role::Mlp | Role::Experts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_follow_from_canonical_names() {
        for (name, role) in [
            ("model.embed_tokens.weight", Role::Embedding),
            ("model.layers.3.self_attn.q_proj.weight", Role::Attention),
            ("model.layers.3.self_attn.q_proj.bias", Role::Bias),
            ("model.layers.3.self_attn.sinks", Role::Sinks),
            ("model.layers.3.input_layernorm.weight", Role::Norm),
            ("model.layers.3.post_feedforward_layernorm.weight", Role::Norm),
            ("model.layers.3.self_attn.q_norm.weight", Role::Norm),
            ("model.layers.3.mlp.down_proj.weight", Role::Mlp),
            ("model.layers.3.mlp.router.weight", Role::Router),
            ("model.layers.3.mlp.experts.gate_up_proj", Role::Experts),
            ("model.layers.3.mlp.experts.gate_up_proj_bias", Role::Bias),
            ("model.norm.weight", Role::Norm),
            ("lm_head.weight", Role::LmHead),
            ("mtp.layers.0.mlp.down_proj.weight", Role::Prediction),
            ("rotary.inv_freq", Role::Other),
        ] {
            assert_eq!(Role::of(name), role, "{name}");
        }
    }
}
