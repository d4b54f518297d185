//! `Olmo2ForCausalLM` and `Olmo3ForCausalLM`: norms after attention and MLP instead of before them, and one norm for
//! the queries of all heads and one for the keys. OLMo 3 has sliding windows in most layers, whose rotation is not
//! scaled for long contexts.

use super::family::{PLAIN, windows};
use super::fields::Fields;
use super::rope;
use super::row::Arch;
use crate::error::Result;
use crate::model_config::{ModelConfig, QkNorm, Rope, RopeScaling};

pub(super) const OLMO2: Arch = Arch {
    class: "Olmo2ForCausalLM",
    model_type: "olmo2",
    norm_eps: 1e-5,
    honours: &["attention_bias"],
    adjust: |_, model| {
        norms(model);
        Ok(())
    },
    ..PLAIN
};

pub(super) const OLMO3: Arch = Arch {
    class: "Olmo3ForCausalLM",
    model_type: "olmo3",
    theta: 500_000.0,
    honours: &["attention_bias", "sliding_window", super::rope::LOCAL_BASE],
    windows: |config, n_layers| {
        let width = config.count_opt("sliding_window")?.unwrap_or(4096);
        windows(config, n_layers, width, |layer| !(layer + 1).is_multiple_of(4))
    },
    adjust: |config, model| {
        norms(model);
        local_rope(config, model)
    },
    ..OLMO2
};

fn norms(model: &mut ModelConfig) {
    (model.pre_norms, model.post_norms) = (false, true);
    model.attention.qk_norm = QkNorm::All;
}

fn local_rope(config: &Fields, model: &mut ModelConfig) -> Result<()> {
    let local = match rope::has_layer_types(config)? {
        true => rope::local(config, model.rope.theta, model.max_context)?,
        false => Rope { scaling: RopeScaling::None, ..model.rope.clone() },
    };
    model.local_rope = (local != model.rope).then_some(local);
    Ok(())
}
