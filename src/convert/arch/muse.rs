//! `MuseGlimmerForConditionalGeneration` (Muse Glimmer): normalized embeddings, queries and keys normalized without
//! weights, a gate of the attention output, and layers with all positions that do not rotate.

use super::family::{PLAIN, dense, score_scale, windows};
use super::fields::Fields;
use super::gemma::softcap;
use super::row::Arch;
use crate::error::Result;
use crate::model_config::{Activation, LayerException, ModelConfig, QkNorm};

pub(super) const MUSE_GLIMMER: Arch = Arch {
    class: "MuseGlimmerForCausalLM",
    model_type: "muse_glimmer_text",
    n_kv_heads: Some(2),
    head_dim: Some(128),
    norm_eps: 1e-5,
    theta: 500_000.0,
    honours: &[
        "sliding_window",
        "final_logit_softcapping",
        "output_multiplier",
        "qk_scale_factor",
        "post_norm_eps",
        "layer_rope_theta",
    ],
    mlp: |arch, config| match config.word_opt("hidden_activation")? {
        None | Some("silu") => dense(arch, config, Activation::Silu),
        Some(_) => Err(config.unsupported("hidden_activation", "expected silu")),
    },
    windows: |config, n_layers| {
        let width = config.count_opt("sliding_window")?.unwrap_or(2048);
        windows(config, n_layers, width, |layer| !reads_all(layer, n_layers))
    },
    adjust,
    ..PLAIN
};

/// Returns true for layers without a window: every fourth, counted from the last one.
fn reads_all(layer: usize, n_layers: usize) -> bool {
    (n_layers - 1 - layer).is_multiple_of(4)
}

fn adjust(config: &Fields, model: &mut ModelConfig) -> Result<()> {
    (model.norm_plus_one, model.plain_final_norm) = (true, true);
    (model.post_norms, model.embedding_norm) = (true, true);
    model.post_norm_eps = Some(config.number_opt("post_norm_eps")?.unwrap_or(1e-8) as f32);
    model.attention.qk_norm = QkNorm::Unit;
    model.attention.gate = true;
    let factor = config.number_opt("qk_scale_factor")?.unwrap_or(3.87);
    model.attention.scale = (factor * f64::from(score_scale(model.head_dim as f64))) as f32;
    model.logit_scale = config.number_opt("output_multiplier")?.unwrap_or(1.0 / 26f64.sqrt()) as f32;
    model.logit_softcap = softcap(config, "final_logit_softcapping", Some(20.0))?;
    const THETAS: &str = "layer_rope_theta";
    let layers = match config.get(THETAS).map(|_| config.numbers(THETAS)).transpose()? {
        None => (0..model.n_layers).filter(|layer| reads_all(*layer, model.n_layers)).collect(),
        Some(thetas) if thetas.len() != model.n_layers => {
            return Err(config.wrong(THETAS, &format!("one number for each of {} layers", model.n_layers)));
        }
        Some(thetas) => {
            if thetas.iter().any(|theta| *theta != 0.0 && *theta != model.rope.theta) {
                return Err(config.unsupported(THETAS, "expected 0 or rope_theta for each layer"));
            }
            (0..model.n_layers).filter(|layer| thetas[*layer] == 0.0).collect()
        }
    };
    model.except(LayerException { layers, unrotated: true, ..LayerException::default() });
    Ok(())
}
