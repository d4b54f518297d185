//! `Gemma2ForCausalLM` and `Gemma3ForCausalLM`: norms on both sides of attention and MLP that multiply by 1 + weight,
//! embeddings scaled by the root of their width, GeGLU, and windows in some layers. Gemma 2 caps scores and logits; Gemma 3
//! norms q and k and rotates the layers with a window by a base of their own.

use super::family::{Defaults, LOCAL_BASE, dense, plain, refuse_quantization, same_names, score_scale, windows};
use super::{Arch, Fields, named, rope};
use crate::error::Result;
use crate::model_config::{Activation, ModelConfig};

pub(super) const GEMMA2: Arch = Arch {
    class: GEMMA2_DEFAULTS.class,
    claims: |config| named(config, GEMMA2_DEFAULTS.class, "gemma2"),
    config: gemma2,
    views: same_names,
};

pub(super) const GEMMA3: Arch = Arch {
    class: GEMMA3_DEFAULTS.class,
    claims: |config| named(config, GEMMA3_DEFAULTS.class, "gemma3_text"),
    config: gemma3,
    views: same_names,
};

const GEMMA2_DEFAULTS: Defaults = Defaults {
    class: "Gemma2ForCausalLM",
    n_kv_heads: Some(4),
    head_dim: Some(256),
    max_context: 8192,
    norm_eps: 1e-6,
    theta: 10_000.0,
    tied: true,
    honours: &[
        "attention_bias",
        "sliding_window",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
        "attn_logit_softcapping",
    ],
};

const GEMMA3_DEFAULTS: Defaults = Defaults {
    class: "Gemma3ForCausalLM",
    max_context: 131_072,
    theta: 1e6,
    honours: &["attention_bias", "sliding_window", "query_pre_attn_scalar", "final_logit_softcapping", LOCAL_BASE],
    ..GEMMA2_DEFAULTS
};

fn gemma2(config: &Fields) -> Result<ModelConfig> {
    let mut model = gemma(config, &GEMMA2_DEFAULTS, 2)?;
    model.attention.softcap = softcap(config, "attn_logit_softcapping", Some(50.0))?;
    model.logit_softcap = softcap(config, "final_logit_softcapping", Some(30.0))?;
    Ok(model)
}

fn gemma3(config: &Fields) -> Result<ModelConfig> {
    let pattern = match config.count_opt("sliding_window_pattern")? {
        None => config.count_opt("_sliding_window_pattern")?.unwrap_or(6),
        Some(pattern) => pattern,
    };
    if pattern == 0 {
        return Err(config.wrong("sliding_window_pattern", "at least 1"));
    }
    let mut model = gemma(config, &GEMMA3_DEFAULTS, pattern)?;
    model.attention.qk_norm = true;
    model.local_rope = Some(rope::local(config, 10_000.0, model.max_context)?);
    model.logit_softcap = softcap(config, "final_logit_softcapping", None)?;
    Ok(model)
}

/// What both have in common; every `pattern`-th layer sees everything.
fn gemma(config: &Fields, defaults: &Defaults, pattern: usize) -> Result<ModelConfig> {
    refuse_quantization(config, None)?;
    for key in ["hidden_activation", "hidden_act"] {
        if !matches!(config.word_opt(key)?, None | Some("gelu_pytorch_tanh")) {
            return Err(config.unsupported(key, "expected gelu_pytorch_tanh"));
        }
    }
    let mut model = plain(config, defaults, dense(config, Activation::GeluTanh)?)?;
    let bias = config.flag("attention_bias", false)?;
    (model.attention.qkv_bias, model.attention.o_bias) = (bias, bias);
    model.attention.scale = score_scale(config.number_opt("query_pre_attn_scalar")?.unwrap_or(256.0));
    let width = config.count_opt("sliding_window")?.unwrap_or(4096);
    model.attention.windows = windows(config, model.n_layers, width, |layer| !(layer + 1).is_multiple_of(pattern))?;
    model.norm_plus_one = true;
    model.post_norms = true;
    model.embedding_scale = (model.hidden as f64).sqrt() as f32;
    Ok(model)
}

/// A cap; left out it is the family's, `null` is none.
fn softcap(config: &Fields, key: &str, default: Option<f32>) -> Result<Option<f32>> {
    let given = config.number_opt(key)?.map(|cap| cap as f32);
    Ok(if given.is_some() || config.is_null(key) { given } else { default })
}
