//! `SmolLM3ForCausalLM`: Llama with some layers whose queries and keys are not rotated.

use super::family::PLAIN;
use super::fields::Fields;
use super::row::Arch;
use crate::error::Result;
use crate::model_config::{LayerException, ModelConfig};

pub(super) const SMOLLM3: Arch = Arch {
    class: "SmolLM3ForCausalLM",
    model_type: "smollm3",
    n_kv_heads: Some(4),
    max_context: 32_768,
    theta: 2e6,
    tied: true,
    honours: &["attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"],
    adjust: read_unrotated,
    ..PLAIN
};

/// Reads the layers without rotation: those with 0 in `no_rope_layers`, or every n-th.
fn read_unrotated(config: &Fields, model: &mut ModelConfig) -> Result<()> {
    const LIST: &str = "no_rope_layers";
    let layers: Vec<usize> = match config.counts_opt(LIST)? {
        Some(rotated) if rotated.len() == model.n_layers => {
            (0..model.n_layers).filter(|layer| rotated[*layer] == 0).collect()
        }
        Some(_) => return Err(config.wrong(LIST, &format!("one number for each of {} layers", model.n_layers))),
        None => match config.count_opt("no_rope_layer_interval")?.unwrap_or(4) {
            0 => return Err(config.wrong("no_rope_layer_interval", "at least 1")),
            interval => (0..model.n_layers).filter(|layer| (layer + 1).is_multiple_of(interval)).collect(),
        },
    };
    model.except(LayerException { layers, unrotated: true, ..LayerException::default() });
    Ok(())
}
