//! Reads the parameters of rotary embeddings from both forms of `config.json`.
//!
//! Older files have `rope_theta` and `rope_scaling: null | {rope_type | type, …}`, newer ones one object
//! `rope_parameters: {rope_type, rope_theta, …}`. The variants are those of `modeling_rope_utils` in transformers.

use super::fields::Fields;
use crate::error::Result;
use crate::model_config::{ModelConfig, PositionScale, Rope, RopeScaling, RotaryPairs};

/// Base of the RoPE frequencies in layers with a window. A family that supports it may also have it in
/// `rope_parameters`.
pub const LOCAL_BASE: &str = "rope_local_base_freq";

/// Field with the parts of a head that turn by each of three axes, whose positions are the same in text; it may be in
/// `rope_parameters`.
pub const AXES: &str = "mrope_section";

/// Field with the growth of queries with their positions; it may be in `rope_parameters`.
pub const GROWTH: &str = "llama_4_scaling_beta";

/// Field with the share of a head that is rotated; it may occur in several places.
pub const PARTIAL: &str = "partial_rotary_factor";

/// Reads the parameters; `default_theta` is the family's default base of the frequencies,
/// `max_context` the context length.
pub fn rope(config: &Fields, default_theta: f64, max_context: usize) -> Result<Rope> {
    let new = of_layers(config, "full_attention")?.or(config.object_opt("rope_parameters")?);
    let scaling = new.or(config.object_opt("rope_scaling")?);
    let theta = new.map(|fields| fields.number_opt("rope_theta")).transpose()?.flatten();
    let scaling = scaling.map_or(Ok(RopeScaling::None), |fields| read_scaling(config, &fields, max_context))?;
    let theta = theta.or(config.number_opt("rope_theta")?).unwrap_or(default_theta);
    Ok(Rope { theta, rotary_dim: None, pairs: RotaryPairs::Halves, turning_pairs: None, scaling })
}

/// Returns the parameters of one type of layer from `rope_parameters`, where families with two
/// bases list them by type.
fn of_layers<'a>(config: &Fields<'a>, layers: &'a str) -> Result<Option<Fields<'a>>> {
    config.object_opt("rope_parameters")?.map_or(Ok(None), |by_type| by_type.object_opt(layers))
}

/// Returns the share of each head that is rotated, if it is not 1, and the object that contains the field.
pub fn partial<'a>(config: &Fields<'a>) -> Result<Option<(Fields<'a>, f64)>> {
    Ok(given_partial(config)?.filter(|(_, share)| *share != 1.0))
}

/// Returns the share of each head that is rotated and the object that contains the field: the first that is not 1, or
/// else 1 if any object has it.
fn given_partial<'a>(config: &Fields<'a>) -> Result<Option<(Fields<'a>, f64)>> {
    let places = [
        config.object_opt("rope_scaling")?,
        Some(*config),
        of_layers(config, "full_attention")?,
        of_layers(config, "sliding_attention")?,
        config.object_opt("rope_parameters")?,
    ];
    let mut whole = None;
    for fields in places.into_iter().flatten() {
        match fields.number_opt(PARTIAL)? {
            Some(1.0) => whole = Some((fields, 1.0)),
            Some(share) => return Ok(Some((fields, share))),
            None => {}
        }
    }
    Ok(whole)
}

/// Sets the share of each head that is rotated: that of the configuration, or `default`.
///
/// # Errors
/// The share is not above 0 and at most 1.
pub fn set_partial(config: &Fields, model: &mut ModelConfig, default: Option<f64>) -> Result<()> {
    let given = given_partial(config)?;
    let Some(share) = given.map(|(_, share)| share).or(default) else { return Ok(()) };
    if let Some((fields, _)) = given.filter(|_| !(share > 0.0 && share <= 1.0)) {
        return Err(fields.wrong(PARTIAL, "more than 0 and at most 1"));
    }
    // Rounded down, as in `transformers`.
    if share < 1.0 {
        model.rope.rotary_dim = Some((model.head_dim as f64 * share) as usize);
    }
    Ok(())
}

/// Returns the object that divides heads among three axes, if there is one.
pub fn axes<'a>(config: &Fields<'a>) -> Result<Option<Fields<'a>>> {
    let places = [config.object_opt("rope_parameters")?, config.object_opt("rope_scaling")?];
    Ok(places.into_iter().flatten().find(|fields| fields.get(AXES).is_some()))
}

/// Returns the object with a growth of queries with their positions, if there is one.
pub fn growth<'a>(config: &Fields<'a>) -> Result<Option<Fields<'a>>> {
    let places = [config.object_opt("rope_parameters")?, config.object_opt("rope_scaling")?, Some(*config)];
    for fields in places.into_iter().flatten() {
        if fields.number_opt(GROWTH)?.is_some_and(|beta| beta != 0.0) {
            return Ok(Some(fields));
        }
    }
    Ok(None)
}

/// Reads the growth of queries with their positions.
pub fn position_scale(config: &Fields) -> Result<Option<PositionScale>> {
    let Some(fields) = growth(config)? else { return Ok(None) };
    let original_max_position = fields.count("original_max_position_embeddings")?;
    Ok(Some(PositionScale { beta: fields.number(GROWTH)?, original_max_position }))
}

/// Returns true if `rope_parameters` has parameters for layers with a window.
pub fn has_layer_types(config: &Fields) -> Result<bool> {
    Ok(of_layers(config, "sliding_attention")?.is_some())
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
    Ok(Rope {
        theta: theta.unwrap_or(default_theta),
        rotary_dim: None,
        pairs: RotaryPairs::Halves,
        turning_pairs: None,
        scaling,
    })
}

fn read_scaling(config: &Fields, fields: &Fields, max_context: usize) -> Result<RopeScaling> {
    const KNOWN: &str = "default, linear, llama3, yarn, longrope or proportional";
    for key in ["short_mscale", "long_mscale"] {
        if fields.get(key).is_some() {
            return Err(fields.unsupported(key, "expected no such field"));
        }
    }
    let key = if fields.get("rope_type").is_some() { "rope_type" } else { "type" };
    Ok(match fields.word_opt(key)? {
        // The three axes of multimodal RoPE have the same positions in text.
        Some("default" | "mrope") => RopeScaling::None,
        // Which pairs turn is read by the family.
        Some("proportional") => match fields.number_opt("factor")? {
            None => RopeScaling::None,
            Some(_) => RopeScaling::Linear { factor: factor(fields)? },
        },
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

/// Returns the factor of queries and keys by which models with latent attention make up for YaRN's longer texts, if
/// `mscale_all_dim` is set.
pub fn score_magnitude(config: &Fields) -> Result<Option<f64>> {
    let Some(fields) = config.object_opt("rope_parameters")?.or(config.object_opt("rope_scaling")?) else {
        return Ok(None);
    };
    let is_yarn = fields.word_opt("rope_type")?.or(fields.word_opt("type")?) == Some("yarn");
    match fields.number_opt("mscale_all_dim")?.filter(|all| is_yarn && *all != 0.0) {
        Some(all) => Ok(Some(yarn_magnitude(factor(&fields)?, all))),
        None => Ok(None),
    }
}

/// Returns YaRN's factor of cos and sin: 0.1 · mscale · ln(factor) + 1 (arXiv 2309.00071, section 3.4).
pub fn yarn_magnitude(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}
