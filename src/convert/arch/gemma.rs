//! `Gemma2ForCausalLM` and `Gemma3ForCausalLM`: norms before and after attention and MLP that multiply by 1 + weight,
//! embeddings scaled by the square root of their width, GeGLU, and sliding windows in some layers. Gemma 2 soft-caps
//! scores and logits; Gemma 3 normalizes q and k and has a separate RoPE base in layers with a window.

use super::family::{PLAIN, dense, score_scale, windows};
use super::fields::Fields;
use super::rope::{self, LOCAL_BASE};
use super::row::Arch;
use crate::error::Result;
use crate::model_config::{Activation, Mlp, ModelConfig, QkNorm};

pub(super) const GEMMA2: Arch = Arch {
    class: "Gemma2ForCausalLM",
    model_type: "gemma2",
    n_heads: Some(8),
    n_kv_heads: Some(4),
    head_dim: Some(256),
    vocab: Some(256_000),
    max_context: 8192,
    tied: true,
    honours: &[
        "attention_bias",
        "sliding_window",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        "attn_logit_softcapping",
    ],
    mlp: geglu,
    windows: |config, n_layers| all_but(config, n_layers, 2),
    adjust: |config, model| {
        scale(config, model)?;
        model.attention.softcap = softcap(config, "attn_logit_softcapping", Some(50.0))?;
        model.logit_softcap = softcap(config, "final_logit_softcapping", Some(30.0))?;
        Ok(())
    },
    ..PLAIN
};

pub(super) const GEMMA3: Arch = Arch {
    class: "Gemma3ForCausalLM",
    model_type: "gemma3_text",
    // The published 4B model leaves out this number and those of its heads.
    vocab: Some(262_208),
    max_context: 131_072,
    theta: 1e6,
    honours: &["attention_bias", "sliding_window", "query_pre_attn_scalar", "final_logit_softcapping", LOCAL_BASE],
    windows: |config, n_layers| {
        let pattern = match config.count_opt("sliding_window_pattern")? {
            None => config.count_opt("_sliding_window_pattern")?.unwrap_or(6),
            Some(pattern) => pattern,
        };
        match pattern {
            0 => Err(config.wrong("sliding_window_pattern", "at least 1")),
            _ => all_but(config, n_layers, pattern),
        }
    },
    adjust: |config, model| {
        scale(config, model)?;
        model.attention.qk_norm = QkNorm::Head;
        model.local_rope = Some(rope::local(config, 10_000.0, model.max_context)?);
        model.logit_softcap = softcap(config, "final_logit_softcapping", None)?;
        Ok(())
    },
    ..GEMMA2
};

fn geglu(arch: &Arch, config: &Fields) -> Result<Mlp> {
    check_gelu(config)?;
    dense(arch, config, Activation::GeluTanh)
}

/// Refuses another activation than the tanh approximation of GELU.
pub(super) fn check_gelu(config: &Fields) -> Result<()> {
    for key in ["hidden_activation", "hidden_act"] {
        if !matches!(config.word_opt(key)?, None | Some("gelu_pytorch_tanh")) {
            return Err(config.unsupported(key, "expected gelu_pytorch_tanh"));
        }
    }
    Ok(())
}

/// Reads the windows: every `pattern`-th layer attends to all positions, the others have a sliding window.
fn all_but(config: &Fields, n_layers: usize, pattern: usize) -> Result<Vec<Option<usize>>> {
    let width = config.count_opt("sliding_window")?.unwrap_or(4096);
    windows(config, n_layers, width, |layer| !(layer + 1).is_multiple_of(pattern))
}

/// Sets the norms and scales that both models have in common.
fn scale(config: &Fields, model: &mut ModelConfig) -> Result<()> {
    model.attention.scale = score_scale(config.number_opt("query_pre_attn_scalar")?.unwrap_or(256.0));
    model.norm_plus_one = true;
    model.post_norms = true;
    model.embedding_scale = (model.hidden as f64).sqrt() as f32;
    Ok(())
}

/// Reads a soft cap: an absent field means the family's default, `null` means none.
pub(super) fn softcap(config: &Fields, key: &str, default: Option<f32>) -> Result<Option<f32>> {
    let given = config.number_opt(key)?.map(|cap| cap as f32);
    Ok(if given.is_some() || config.is_null(key) { given } else { default })
}
