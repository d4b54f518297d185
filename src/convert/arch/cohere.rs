//! `Cohere2ForCausalLM` (Command R7B, Command A): attention and MLP read one LayerNorm of the residual stream; layers
//! with a window rotate pairs of neighbours, the others have no positions.

use super::family::{PLAIN, windows};
use super::row::Arch;
use crate::model_config::{LayerException, NormKind, RotaryPairs};

pub(super) const COHERE2: Arch = Arch {
    class: "Cohere2ForCausalLM",
    model_type: "cohere2",
    max_context: 8192,
    norm_eps: 1e-5,
    tied: true,
    honours: &["attention_bias", "sliding_window", "logit_scale", "layer_norm_eps"],
    windows: |config, n_layers| {
        let pattern = match config.count_opt("sliding_window_pattern")? {
            None => config.count_opt("_sliding_window_pattern")?.unwrap_or(4),
            Some(0) => return Err(config.wrong("sliding_window_pattern", "at least 1")),
            Some(pattern) => pattern,
        };
        let width = config.count_opt("sliding_window")?.unwrap_or(4096);
        windows(config, n_layers, width, |layer| !(layer + 1).is_multiple_of(pattern.max(1)))
    },
    adjust: |config, model| {
        model.parallel = true;
        model.norm_kind = NormKind::Layer;
        model.norm_eps = config.number_opt("layer_norm_eps")?.unwrap_or(1e-5) as f32;
        model.logit_scale = config.number_opt("logit_scale")?.unwrap_or(0.0625) as f32;
        model.rope.pairs = RotaryPairs::Adjacent;
        let layers = (0..model.n_layers).filter(|layer| model.attention.windows[*layer].is_none()).collect();
        model.except(LayerException { layers, unrotated: true, ..LayerException::default() });
        Ok(())
    },
    ..PLAIN
};
