//! Rotary embedding parameters in both spellings of `config.json`.
//!
//! Older files have `rope_theta` and `rope_scaling: null | {rope_type | type, …}`, newer ones one object
//! `rope_parameters: {rope_type, rope_theta, …}`. The variants are those of `modeling_rope_utils` in transformers.

use super::fields::Fields;
use crate::error::Result;
use crate::model_config::{Rope, RopeScaling};

/// Reads the parameters; `default_theta` is the family's base of frequencies, `max_context` its context length.
pub fn rope(config: &Fields, default_theta: f64, max_context: usize) -> Result<Rope> {
    let new = config.object_opt("rope_parameters")?;
    let scaling = match new {
        Some(parameters) => Some(parameters),
        None => config.object_opt("rope_scaling")?,
    };
    let theta = match new {
        Some(parameters) => parameters.number_opt("rope_theta")?.or(config.number_opt("rope_theta")?),
        None => config.number_opt("rope_theta")?,
    };
    for fields in [Some(*config), new].into_iter().flatten() {
        if fields.number_opt("partial_rotary_factor")?.is_some_and(|f| f != 1.0) {
            return Err(fields.unsupported("partial_rotary_factor", "only whole heads are rotated"));
        }
    }
    let scaling = scaling.map_or(Ok(RopeScaling::None), |fields| read_scaling(&fields, max_context))?;
    Ok(Rope { theta: theta.unwrap_or(default_theta), scaling })
}

fn read_scaling(fields: &Fields, max_context: usize) -> Result<RopeScaling> {
    let key = if fields.get("rope_type").is_some() { "rope_type" } else { "type" };
    Ok(match fields.word_opt(key)? {
        Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: factor(fields)? },
        Some("llama3") => RopeScaling::Llama3 {
            factor: factor(fields)?,
            low_freq_factor: fields.number("low_freq_factor")?,
            high_freq_factor: fields.number("high_freq_factor")?,
            original_max_position: fields.count("original_max_position_embeddings")?,
        },
        Some("yarn") => yarn(fields, max_context)?,
        Some(_) => return Err(fields.unsupported(key, "expected default, linear, llama3 or yarn")),
        None => return Err(fields.wrong("rope_type", "default, linear, llama3 or yarn")),
    })
}

fn factor(fields: &Fields) -> Result<f64> {
    let factor = fields.number("factor")?;
    if factor >= 1.0 { Ok(factor) } else { Err(fields.wrong("factor", "a number of at least 1")) }
}

fn yarn(fields: &Fields, max_context: usize) -> Result<RopeScaling> {
    let factor = factor(fields)?;
    let attention_factor = match (fields.number_opt("attention_factor")?, fields.number_opt("mscale")?) {
        (Some(given), _) => given,
        (None, Some(mscale)) if mscale != 0.0 => match fields.number_opt("mscale_all_dim")? {
            Some(all) if all != 0.0 => yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all),
            _ => yarn_magnitude(factor, 1.0),
        },
        _ => yarn_magnitude(factor, 1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: fields.number_opt("beta_fast")?.unwrap_or(32.0),
        beta_slow: fields.number_opt("beta_slow")?.unwrap_or(1.0),
        original_max_position: fields.count_opt("original_max_position_embeddings")?.unwrap_or(max_context),
        truncate: fields.flag("truncate", true)?,
        attention_factor,
    })
}

/// How much YaRN amplifies cos and sin: 0.1 · mscale · ln(factor) + 1 (arXiv 2309.00071, section 3.4).
pub fn yarn_magnitude(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}
