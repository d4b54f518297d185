//! Converts a model's description to the hyper-parameters of a GGUF file.
//!
//! Many properties of a family are built into llama.cpp. A model with a property that llama.cpp's code for the family
//! does not implement is refused; where llama.cpp computes nearly the same, a note reports the difference.

use super::config::{FACTORS, ROPE_FREQS};
use super::family::Family;
use super::rope_factors::Llama3;
use super::value::{Scalar, Value as Meta};
use crate::error::{Error, Result};
use crate::model_config::{Mlp, ModelConfig, QkNorm, Rope, RopeScaling, RouterSoftmax};

/// Metadata keys, extra tensors, and notes for the user.
#[derive(Debug, Default)]
pub struct Description {
    /// Keys and values in the order in which they are written.
    pub entries: Vec<(String, Meta)>,
    /// Tensors that hold hyper-parameters (factors of RoPE scaling): name and values.
    pub factors: Vec<(&'static str, Vec<f32>)>,
    /// Notes about computations in which llama.cpp differs.
    pub notes: Vec<String>,
}

/// Converts the description of a model of a family to metadata keys.
///
/// # Errors
/// The model needs a feature that llama.cpp lacks for this family; the message names the field.
pub fn describe(model: &ModelConfig, family: &Family) -> Result<Description> {
    check(model, family)?;
    let mut out = Description::default();
    let mut put = |leaf: &str, value: Meta| out.entries.push((format!("{}.{leaf}", family.name), value));
    let count = |n: usize| Meta::u32(n as u32);
    put("vocab_size", count(model.vocab));
    put("context_length", count(context(model, family)));
    put("embedding_length", count(model.hidden));
    put("block_count", count(model.n_layers));
    match model.mlp {
        Mlp::Dense { intermediate, .. } => put("feed_forward_length", count(intermediate)),
        Mlp::Moe { experts, top_k, intermediate, .. } => {
            put("feed_forward_length", count(intermediate));
            if family.expert_width_key {
                put("expert_feed_forward_length", count(intermediate));
            }
            put("expert_count", count(experts));
            put("expert_used_count", count(top_k));
        }
    }
    put("attention.head_count", count(model.n_heads));
    put("attention.head_count_kv", count(model.n_kv_heads));
    put("attention.key_length", count(model.head_dim));
    put("attention.value_length", count(model.head_dim));
    put("attention.layer_norm_rms_epsilon", Meta::f32(model.norm_eps));
    put("rope.dimension_count", count(model.rope.rotary_dim(model.head_dim)));
    put("rope.freq_base", Meta::f32(model.rope.theta as f32));
    if let Some(cap) = model.attention.softcap {
        put("attn_logit_softcapping", Meta::f32(cap));
    }
    if let Some(cap) = model.logit_softcap {
        put("final_logit_softcapping", Meta::f32(cap));
    }
    windows(model, family, &mut out);
    rope(model, family, &mut out)?;
    Ok(out)
}

/// Refuses models with properties that llama.cpp's code for the family does not implement.
fn check(model: &ModelConfig, family: &Family) -> Result<()> {
    let (Mlp::Dense { activation, .. } | Mlp::Moe { activation, .. }) = model.mlp;
    let all_experts = matches!(model.mlp, Mlp::Moe { router_softmax: RouterSoftmax::All, .. });
    let width = family.score_width(model.n_layers, model.hidden, model.n_heads, model.head_dim);
    let scale = (1.0 / (width as f64).sqrt()) as f32;
    let embedding = if family.norm_plus_one { (model.hidden as f32).sqrt() } else { 1.0 };
    let (attention, cap) = (&model.attention, model.logit_softcap);
    let ropes = [Some(&model.rope), model.local_rope.as_ref()];
    let partial = ropes.into_iter().flatten().any(|rope| rope.rotary_dim(model.head_dim) != model.head_dim);
    let (of_its_kind, kind) = match model.mlp {
        Mlp::Dense { .. } => (family.dense.or(family.windowed), "a dense MLP in every layer"),
        Mlp::Moe { .. } => (family.moe, "experts"),
    };
    let checks = [
        ("mlp.kind", of_its_kind.is_some(), kind.to_string()),
        ("dense_layers", model.dense_layers.is_none(), "a dense MLP in some layers and experts in the others".into()),
        (
            "mlp.activation",
            activation == family.activation,
            format!("{activation:?}, expected {:?}", family.activation),
        ),
        ("mlp.router_softmax", !all_experts, "weights of experts that do not sum to one".into()),
        ("attention.scale", close(attention.scale, scale), format!("{}, expected {scale}", attention.scale)),
        (
            "embedding_scale",
            close(model.embedding_scale, embedding),
            format!("{}, expected {embedding}", model.embedding_scale),
        ),
        ("attention.softcap", attention.softcap.is_some() == family.softcap, or_none(attention.softcap)),
        ("logit_softcap", if cap.is_some() { family.logit_softcap } else { !family.softcap }, or_none(cap)),
        ("rope.rotary_dim", family.partial_rotary || !partial, "a rotation of only a part of each head".into()),
        ("norm_plus_one", model.norm_plus_one == family.norm_plus_one, model.norm_plus_one.to_string()),
        ("post_norms", model.post_norms == family.norm_plus_one, model.post_norms.to_string()),
        ("attention.sinks", attention.sinks == family.sinks, attention.sinks.to_string()),
        (
            "attention.qk_norm",
            (attention.qk_norm == QkNorm::Head) == family.qk_norm,
            format!("{:?}", attention.qk_norm),
        ),
        (
            "tied_embeddings",
            family.tied.is_none_or(|tied| tied == model.tied_embeddings),
            model.tied_embeddings.to_string(),
        ),
    ];
    if let Some(field) = model.first_extension() {
        return Err(cannot(family, field, "a property that only newer families have"));
    }
    match checks.into_iter().find(|(_, fits, _)| !fits) {
        Some((field, _, why)) => Err(cannot(family, field, &why)),
        None => Ok(()),
    }
}

fn or_none(number: Option<f32>) -> String {
    number.map_or("none".to_string(), |number| number.to_string())
}

fn cannot(family: &Family, field: &str, why: &str) -> Error {
    Error::unsupported(format!("found {why}; llama.cpp does not support this for {}", family.name)).tensor(field)
}

fn close(a: f32, b: f32) -> bool {
    (a - b).abs() <= 1e-6 * b.abs()
}

/// Returns the smallest window of the model if llama.cpp has no windows for the family and the window is
/// shorter than the context.
fn lost_window(model: &ModelConfig, family: &Family) -> Option<usize> {
    let smallest = model.attention.windows.iter().flatten().min().copied();
    smallest.filter(|width| family.window.is_none() && *width < model.max_context)
}

/// Returns the context length up to which llama.cpp computes the same as this program.
fn context(model: &ModelConfig, family: &Family) -> usize {
    lost_window(model, family).unwrap_or(model.max_context)
}

fn windows(model: &ModelConfig, family: &Family, out: &mut Description) {
    let key = |leaf: &str| format!("{}.attention.{leaf}", family.name);
    let Some(period) = family.window else {
        if let Some(width) = lost_window(model, family) {
            out.notes.push(format!(
                "llama.cpp has no sliding window for {}; context_length is written as {width} instead of {}, because \
                 only up to this length the results are the same",
                family.name, model.max_context
            ));
        }
        return;
    };
    let windowed: Vec<bool> = (0..model.n_layers).map(|layer| model.layer(layer).window.is_some()).collect();
    let width = model.attention.windows.iter().flatten().next().copied();
    // Without windows, every layer attends to all positions, which a window as wide as the context expresses.
    out.entries.push((key("sliding_window"), Meta::u32(width.unwrap_or(model.max_context) as u32)));
    let usual = windowed.iter().enumerate().all(|(layer, w)| *w == (layer % period < period - 1));
    if !usual && width.is_some() {
        let flags = windowed.iter().map(|w| u8::from(*w)).collect();
        out.entries.push((key("sliding_window_pattern"), Meta::Numbers(Scalar::Bool, flags)));
    }
}

fn rope(model: &ModelConfig, family: &Family, out: &mut Description) -> Result<()> {
    let no = |what: &str| cannot(family, "rope", what);
    let mut put = |leaf: &str, value: Meta| out.entries.push((format!("{}.rope.{leaf}", family.name), value));
    if let Some(Rope { theta, scaling, .. }) = &model.local_rope {
        if *scaling != RopeScaling::None || !family.local_rope {
            return Err(no("another RoPE in layers with a window"));
        }
        put("freq_base_swa", Meta::f32(*theta as f32));
    }
    let text = |word: &str| Meta::String(word.into());
    match &model.rope.scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => {
            put("scaling.type", text("linear"));
            put("scaling.factor", Meta::f32(*factor as f32));
        }
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
            if !family.llama3_rope {
                return Err(no("Llama 3's RoPE scaling"));
            }
            let (low, high) = (*low_freq_factor, *high_freq_factor);
            let llama3 = Llama3 { factor: *factor, low, high, original: *original_max_position };
            out.factors.push((ROPE_FREQS, llama3.factors(model.rope.theta, model.head_dim)));
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position, truncate, attention_factor } => {
            put("scaling.type", text("yarn"));
            put("scaling.factor", Meta::f32(*factor as f32));
            put("scaling.original_context_length", Meta::u32(*original_max_position as u32));
            put("scaling.yarn_beta_fast", Meta::f32(*beta_fast as f32));
            put("scaling.yarn_beta_slow", Meta::f32(*beta_slow as f32));
            // llama.cpp already applies YaRN's standard magnitude, so only the ratio to it is written.
            let extra = attention_factor / (0.1 * factor.ln() + 1.0);
            if (extra - 1.0).abs() > 1e-6 {
                put("scaling.attn_factor", Meta::f32(extra as f32));
            }
            out.notes.extend((!truncate).then(|| ROUNDED_RAMP.to_string()));
        }
        RopeScaling::LongRope { short, long, original_max_position, attention_factor } => {
            if !family.longrope {
                return Err(no("LongRoPE"));
            }
            put("scaling.type", text("longrope"));
            put("scaling.original_context_length", Meta::u32(*original_max_position as u32));
            put("scaling.attn_factor", Meta::f32(*attention_factor as f32));
            let floats = |list: &[f64]| -> Vec<f32> { list.iter().map(|x| *x as f32).collect() };
            out.factors.extend(FACTORS.into_iter().zip([floats(long), floats(short)]));
            out.notes.push(format!(
                "llama.cpp chooses LongRoPE's factors by the context it is started with: keep -c at or below \
                 {original_max_position} for short texts"
            ));
        }
    }
    Ok(())
}

const ROUNDED_RAMP: &str =
    "llama.cpp rounds the bounds of YaRN's ramp to whole frequencies, unlike this model: rotary angles differ a little";
