//! Reads the parameters of rotary embeddings from both forms of `config.json`.
//!
//! Older files have `rope_theta` and `rope_scaling: null | {rope_type | type, …}`, newer ones one object
//! `rope_parameters: {rope_type, rope_theta, …}`. The variants are those of `modeling_rope_utils` in transformers.

use super::fields::Fields;
use crate::error::Result;
use crate::model_config::{Rope, RopeScaling};

/// Reads the parameters; `default_theta` is the family's default base of the frequencies,
/// `max_context` the context length.
pub fn rope(config: &Fields, default_theta: f64, max_context: usize) -> Result<Rope> {
    let new = of_layers(config, "full_attention")?.or(config.object_opt("rope_parameters")?);
    let scaling = new.or(config.object_opt("rope_scaling")?);
    let theta = new.map(|fields| fields.number_opt("rope_theta")).transpose()?.flatten();
    let scaling = scaling.map_or(Ok(RopeScaling::None), |fields| read_scaling(config, &fields, max_context))?;
    let theta = theta.or(config.number_opt("rope_theta")?).unwrap_or(default_theta);
    Ok(Rope { theta, rotary_dim: None, scaling })
}

/// Returns the parameters of one type of layer from `rope_parameters`, where families with two
/// bases list them by type.
fn of_layers<'a>(config: &Fields<'a>, layers: &'a str) -> Result<Option<Fields<'a>>> {
    config.object_opt("rope_parameters")?.map_or(Ok(None), |by_type| by_type.object_opt(layers))
}

/// Returns the share of each head that is rotated, if it is not 1, and the object that contains the field.
pub fn partial<'a>(config: &Fields<'a>) -> Result<Option<(Fields<'a>, f64)>> {
    let places = [
        config.object_opt("rope_scaling")?,
        Some(*config),
        of_layers(config, "full_attention")?,
        of_layers(config, "sliding_attention")?,
        config.object_opt("rope_parameters")?,
    ];
    for fields in places.into_iter().flatten() {
        if let Some(share) = fields.number_opt("partial_rotary_factor")?.filter(|share| *share != 1.0) {
            return Ok(Some((fields, share)));
        }
    }
    Ok(None)
}

/// Refuses separate parameters for layers with a window, in families that do not support them (see [`local`]).
pub fn refuse_local(config: &Fields) -> Result<()> {
    let Some(new) = config.object_opt("rope_parameters")? else { return Ok(()) };
    match new.get("sliding_attention") {
        Some(local) if new.get("full_attention") != Some(local) => {
            Err(new.unsupported("sliding_attention", "this family rotates all layers alike"))
        }
        _ => Ok(()),
    }
}

/// Reads the parameters of layers with a window, in families where these layers have their own base.
pub fn local(config: &Fields, default_theta: f64, max_context: usize) -> Result<Rope> {
    let (theta, scaling) = match of_layers(config, "sliding_attention")? {
        Some(new) => (new.number_opt("rope_theta")?, read_scaling(config, &new, max_context)?),
        None => (config.number_opt("rope_local_base_freq")?, RopeScaling::None),
    };
    Ok(Rope { theta: theta.unwrap_or(default_theta), rotary_dim: None, scaling })
}

fn read_scaling(config: &Fields, fields: &Fields, max_context: usize) -> Result<RopeScaling> {
    const KNOWN: &str = "default, linear, llama3, yarn or longrope";
    for key in ["mrope_section", "short_mscale", "long_mscale"] {
        if fields.get(key).is_some() {
            return Err(fields.unsupported(key, "expected no such field"));
        }
    }
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
        // The first release of Phi-3 used the name `su`.
        Some("longrope" | "su") => longrope(config, fields, max_context)?,
        Some(_) => return Err(fields.unsupported(key, &format!("expected {KNOWN}"))),
        // In the newer form, unscaled frequencies may have no type.
        None if fields.get("rope_theta").is_some() && fields.get("factor").is_none() => RopeScaling::None,
        None => return Err(fields.wrong("rope_type", KNOWN)),
    })
}

fn factor(fields: &Fields) -> Result<f64> {
    let factor = fields.number("factor")?;
    if factor >= 1.0 { Ok(factor) } else { Err(fields.wrong("factor", "a number of at least 1")) }
}

fn yarn(fields: &Fields, max_context: usize) -> Result<RopeScaling> {
    let factor = factor(fields)?;
    let given = |key: &str| -> Result<Option<f64>> { Ok(fields.number_opt(key)?.filter(|number| *number != 0.0)) };
    let attention_factor = match (fields.number_opt("attention_factor")?, given("mscale")?, given("mscale_all_dim")?) {
        (Some(factor), _, _) => factor,
        (None, Some(mscale), Some(all)) => yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all),
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

/// Reads LongRoPE. The default factor of cos and sin is the square root of 1 + ln(stretch) / ln(original length)
/// (arXiv 2402.13753).
fn longrope(config: &Fields, fields: &Fields, max_context: usize) -> Result<RopeScaling> {
    const ORIGINAL: &str = "original_max_position_embeddings";
    // Phi-3 has the field outside of `rope_scaling`, too, where it takes precedence.
    let original = config.count_opt(ORIGINAL)?.or(fields.count_opt(ORIGINAL)?).unwrap_or(max_context);
    let ratio = max_context as f64 / original as f64;
    let stretch = fields.number_opt("factor")?.unwrap_or(ratio);
    if stretch != ratio && original != max_context && fields.get("attention_factor").is_none() {
        // Versions of transformers differ in which of the two values they use.
        return Err(fields.wrong("factor", &format!("{ratio}, the ratio of max_position_embeddings to {ORIGINAL}")));
    }
    let magnitude = if stretch <= 1.0 { 1.0 } else { (1.0 + stretch.ln() / (original as f64).ln()).sqrt() };
    Ok(RopeScaling::LongRope {
        short: fields.numbers("short_factor")?,
        long: fields.numbers("long_factor")?,
        original_max_position: original,
        attention_factor: fields.number_opt("attention_factor")?.unwrap_or(magnitude),
    })
}

/// Returns YaRN's factor of cos and sin: 0.1 · mscale · ln(factor) + 1 (arXiv 2309.00071, section 3.4).
pub fn yarn_magnitude(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}
