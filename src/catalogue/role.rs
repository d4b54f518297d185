//! Roles of tensors.

use super::{LayerTensor, ModelTensor, layer_part};

/// Role of a tensor in the model; quantization rules and reports refer to tensors by role.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    Embedding,
    Norm,
    Attention,
    Mixer,
    Mlp,
    Experts,
    Router,
    Bias,
    Sinks,
    LmHead,
    Prediction,
    Other,
}

/// Parts of the names of large matrices of recurrent mixers.
const MIXERS: [&str; 16] = [
    ".conv.in_proj.",
    ".conv.out_proj.",
    ".linear_attn.q_proj.",
    ".linear_attn.k_proj.",
    ".linear_attn.v_proj.",
    ".linear_attn.z_proj.",
    ".linear_attn.in_proj_qkv.",
    ".linear_attn.in_proj_qkvz.",
    ".linear_attn.in_proj_z.",
    ".linear_attn.out_proj.",
    ".mamba.in_proj.",
    ".mamba.z_proj.",
    ".mamba.x_proj.",
    ".mamba.b_proj.",
    ".mamba.c_proj.",
    ".mamba.out_proj.",
];

impl Role {
    /// Returns the role of the tensor with this canonical name. Names in files of others, which are in no row of the
    /// catalogue, resemble canonical ones, and their parts decide.
    pub fn of(name: &str) -> Role {
        let in_layer = || LayerTensor::of(layer_part(name)?.1).map(|tensor| tensor.role);
        let outside = ModelTensor::of(name).map(|tensor| tensor.role);
        outside.or_else(in_layer).unwrap_or_else(|| Role::by_parts(name))
    }

    fn by_parts(name: &str) -> Role {
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
        } else if MIXERS.iter().any(|part| leaf.contains(part)) {
            Role::Mixer
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
            Role::Mixer => "mixer",
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

    /// Returns true for the matrices that are quantized by default: those of attention, recurrent mixers, MLP and
    /// experts.
    pub fn quantizes_by_default(self) -> bool {
        matches!(self, Role::Attention | Role::Mixer | Role::Mlp | Role::Experts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::{LAYER, name_in_layer};

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
            ("model.layers.3.mlp.experts.gate_up_proj_blocks", Role::Experts),
            ("model.layers.3.self_attn.qkv_proj.weight", Role::Attention),
            ("rotary.inv_freq", Role::Other),
        ] {
            assert_eq!(Role::of(name), role, "{name}");
        }
        for tensor in LAYER {
            let name = name_in_layer(3, tensor.name);
            assert_eq!((Role::of(&name), Role::by_parts(&name)), (tensor.role, tensor.role), "{name}");
        }
    }
}
