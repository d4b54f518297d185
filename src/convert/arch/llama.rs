//! `LlamaForCausalLM`: the plain decoder with optional biases. Its tensor names are the canonical ones.

use super::family::{Defaults, dense, plain, refuse_quantization, same_names, same_windows, silu};
use super::{Arch, Fields, named};
use crate::error::Result;
use crate::model_config::{Mlp, ModelConfig};

pub(super) const ARCH: Arch =
    Arch { class: DEFAULTS.class, claims: |config| named(config, DEFAULTS.class, "llama"), config, views: same_names };

const DEFAULTS: Defaults = Defaults {
    class: "LlamaForCausalLM",
    n_kv_heads: None,
    head_dim: None,
    max_context: 2048,
    norm_eps: 1e-6,
    theta: 10_000.0,
    tied: false,
    honours: &["attention_bias", "mlp_bias"],
};

fn config(config: &Fields) -> Result<ModelConfig> {
    refuse_quantization(config, None)?;
    let mut mlp = dense(config, silu(config)?)?;
    if let Mlp::Dense { bias, .. } = &mut mlp {
        *bias = config.flag("mlp_bias", false)?;
    }
    let mut model = plain(config, &DEFAULTS, mlp)?;
    let bias = config.flag("attention_bias", false)?;
    (model.attention.qkv_bias, model.attention.o_bias) = (bias, bias);
    model.attention.windows = same_windows(config, model.n_layers, None)?;
    Ok(model)
}
