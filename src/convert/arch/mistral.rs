//! `MistralForCausalLM`: Llama with a sliding window in every layer.

use super::family::{Defaults, dense, plain, refuse_quantization, same_names, same_windows, silu};
use super::{Arch, Fields, named};
use crate::error::Result;
use crate::model_config::ModelConfig;

pub(super) const ARCH: Arch = Arch {
    class: DEFAULTS.class,
    claims: |config| named(config, DEFAULTS.class, "mistral"),
    config,
    views: same_names,
};

const DEFAULTS: Defaults = Defaults {
    class: "MistralForCausalLM",
    n_kv_heads: Some(8),
    head_dim: None,
    max_context: 131_072,
    norm_eps: 1e-6,
    theta: 10_000.0,
    tied: false,
    honours: &["sliding_window"],
};

fn config(config: &Fields) -> Result<ModelConfig> {
    refuse_quantization(config, None)?;
    let mut model = plain(config, &DEFAULTS, dense(config, silu(config)?)?)?;
    // Left out is 4096; `null`, as in later releases, is no window.
    let absent = config.get("sliding_window").is_none() && !config.is_null("sliding_window");
    let width = if absent { Some(4096) } else { config.count_opt("sliding_window")? };
    model.attention.windows = same_windows(config, model.n_layers, width)?;
    Ok(model)
}
