//! `LlamaForCausalLM`: grouped-query attention, gated SiLU, optional biases, RoPE with or without scaling.
//!
//! Its tensor names are the canonical ones.

use super::{Arch, Expected, Fields, View, head_dim, layers, named, refuse_quantization, rope, score_scale, whole};
use crate::error::Result;
use crate::model_config::{Activation, Attention, Mlp, ModelConfig};

pub(super) const ARCH: Arch = Arch { class: CLASS, claims: |config| named(config, CLASS, "llama"), config, views };

/// Some tied checkpoints save the shared matrix under the name of the output.
fn views(model: &ModelConfig, tensor: &Expected) -> Vec<View> {
    let shared = model.tied_embeddings && tensor.name == "model.embed_tokens.weight";
    let names = [Some(tensor.name.as_str()), shared.then_some("lm_head.weight")];
    names.into_iter().flatten().map(|name| whole(name, tensor.shape[0])).collect()
}

const CLASS: &str = "LlamaForCausalLM";

fn config(config: &Fields) -> Result<ModelConfig> {
    refuse_quantization(config, None)?;
    if !matches!(config.word_opt("hidden_act")?, None | Some("silu" | "swish")) {
        return Err(config.unsupported("hidden_act", "expected silu"));
    }
    let hidden = config.count("hidden_size")?;
    let n_heads = config.count("num_attention_heads")?;
    let head_dim = head_dim(config, hidden, n_heads)?;
    let max_context = config.count_opt("max_position_embeddings")?.unwrap_or(2048);
    let attention_bias = config.flag("attention_bias", false)?;
    Ok(ModelConfig {
        architecture: CLASS.to_string(),
        hidden,
        n_layers: layers(config)?,
        n_heads,
        n_kv_heads: config.count_opt("num_key_value_heads")?.unwrap_or(n_heads),
        head_dim,
        vocab: config.count("vocab_size")?,
        max_context,
        norm_eps: config.number_opt("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        rope: rope::rope(config, 10_000.0, max_context)?,
        local_rope: None,
        norm_plus_one: false,
        post_norms: false,
        embedding_scale: 1.0,
        logit_softcap: None,
        attention: Attention {
            qkv_bias: attention_bias,
            o_bias: attention_bias,
            sinks: false,
            windows: Vec::new(),
            scale: score_scale(head_dim),
            qk_norm: false,
            softcap: None,
        },
        mlp: Mlp::Dense {
            intermediate: config.count("intermediate_size")?,
            activation: Activation::Silu,
            bias: config.flag("mlp_bias", false)?,
        },
        tied_embeddings: config.flag("tie_word_embeddings", false)?,
        bos: None,
        eos: Vec::new(),
    })
}
