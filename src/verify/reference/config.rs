//! Parses `config.json` as `configuration_*.py` of transformers does, including defaults.
//!
//! The fields of the language model inside a wrapper are those of `text_config`, if there is one.

use super::family::Family;
use super::family::Family::{
    Cohere2, Gemma2, Gemma4, Glm4Moe, Granite, GraniteHybrid, Lfm3, Ministral3, Mistral4, MuseGlimmer, NemotronH,
};
use super::fields::Fields;
use super::rope::{Pairs, Rope, Ropes, yarn_magnitude};
use super::routing::Routing;
use super::rules::PairRule;
use crate::error::{Error, Result};
use serde_json::Value;

/// Configuration of the forward pass.
#[derive(Debug)]
pub struct Config {
    pub family: Family,
    pub heads: usize,
    pub vocab: usize,
    pub layers: Vec<LayerConfig>,
    pub norms: Norms,
    pub factors: Factors,
    /// True if the output matrix is that of the embeddings; `None` if the wrapper and its language model disagree, so
    /// that the tensors of the checkpoint decide.
    pub tied: Option<bool>,
    pub logit_cap: Option<f64>,
    pub score_cap: Option<f64>,
    /// Length in tokens of the longest text that uses LongRoPE's short factors.
    pub long_border: Option<usize>,
    pub activation: Activation,
    pub routing: Routing,
    /// Sizes of multi-head latent attention, if the family has it.
    pub latent: Option<LatentSizes>,
    /// Growth of queries with their positions.
    pub growth: Option<Growth>,
    /// True if the output of attention is multiplied by the sigmoid of another projection.
    pub output_gate: bool,
    /// Values per token and layer that layers read besides the hidden state (Gemma 4 E2B and E4B); 0 for none.
    pub per_layer_width: usize,
}

/// Properties of one layer.
#[derive(Debug, Clone)]
pub struct LayerConfig {
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Number of positions that a query attends to, including its own; `None` for all.
    pub window: Option<usize>,
    /// Rotary position embedding; `None` if queries and keys are not rotated.
    pub rope: Option<Rope>,
    /// True if the layer has a dense MLP in a model with experts.
    pub dense: bool,
    /// True if values are the projected keys.
    pub keys_are_values: bool,
    /// Earlier layer whose keys and values this layer reads in place of its own.
    pub kv_from: Option<usize>,
    /// Mixer that the layer has in place of attention.
    pub recurrent: Option<Recurrent>,
    pub parts: LayerParts,
}

/// LayerParts that a layer has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LayerParts {
    Both,
    /// Attention or a recurrent mixer alone.
    Mixer,
    /// An MLP or experts alone.
    Mlp,
}

/// Mixer of a layer in place of attention.
#[derive(Debug, Clone, Copy)]
pub enum Recurrent {
    /// Short convolution of this width.
    ShortConv(usize),
    /// Gated delta net.
    DeltaNet(DeltaSizes),
    /// Mamba-2.
    Mamba(MambaSizes),
}

/// Sizes of Mamba-2.
#[derive(Debug, Clone, Copy)]
pub struct MambaSizes {
    pub groups: usize,
    pub heads: usize,
    pub state: usize,
    pub head_dim: usize,
}

/// Sizes of a gated delta net.
#[derive(Debug, Clone, Copy)]
pub struct DeltaSizes {
    pub key_heads: usize,
    pub value_heads: usize,
    /// Values of a key.
    pub key: usize,
    pub value: usize,
}

/// Kinds and places of the norms.
#[derive(Debug, Clone, Copy)]
pub struct Norms {
    pub kind: NormKind,
    /// Kind of the norm before the output matrix.
    pub last: NormKind,
    pub places: Places,
    pub eps: f64,
    /// Epsilon of the norms after attention and after the MLP.
    pub eps_after: f64,
    pub queries_and_keys: QkNorm,
    /// True if each head of the values is normalized without weight.
    pub values: bool,
    /// True if embeddings are normalized without weight.
    pub embeddings: bool,
}

/// Arithmetic of a norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NormKind {
    Rms,
    /// RMS norm that multiplies by one plus its weight.
    RmsOnePlus,
    /// Layer norm without bias.
    Layer,
}

/// Norms of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Places {
    /// Before attention and before the MLP.
    Before,
    /// After attention and after the MLP.
    After,
    /// Before and after both.
    Around,
    /// One, which attention and MLP read in parallel.
    Common,
}

/// Norm of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum QkNorm {
    /// There is no norm.
    None,
    /// Each head has a norm, if the checkpoint has the weights.
    Head,
    /// All heads together have one norm.
    All,
    /// Each head has a norm without weight.
    Unit,
}

/// Factors by which intermediate results are multiplied.
#[derive(Debug, Clone, Copy)]
pub struct Factors {
    pub embedding: f64,
    /// Factor of the outputs of attention and MLP.
    pub branch: f64,
    /// Factor of normalized queries.
    pub query: f64,
    pub score: f64,
    pub logit: f64,
}

/// Sizes of multi-head latent attention.
#[derive(Debug, Clone, Copy)]
pub struct LatentSizes {
    pub kv_rank: usize,
    /// Values of a key that are not rotated.
    pub nope: usize,
    /// Rotated values of a key, which all heads share.
    pub rope: usize,
    pub value: usize,
}

/// Factor of the query at position `p`: `1 + beta * ln(1 + floor(p / original))`.
#[derive(Debug, Clone, Copy)]
pub struct Growth {
    pub beta: f64,
    /// Context length in tokens before it was extended.
    pub original: usize,
}

/// Activation function of the gate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    Silu,
    GeluTanh,
    /// Clamped SwiGLU of gpt-oss with its limit.
    Clamped(f64),
    /// Square of the positive part, without a gate.
    Relu2,
}

impl Config {
    /// Reads a configuration.
    pub fn read(json: &Value) -> Result<Config> {
        let whole = Fields(json);
        let json = whole.object("text_config").unwrap_or(whole);
        let family = Family::of(json)?;
        family.refuse(json)?;
        let hidden = json.required("hidden_size")?;
        let heads = json.size("num_attention_heads")?.or(family.heads());
        let heads = heads.map_or_else(|| json.required("num_attention_heads"), Ok)?;
        if heads == 0 {
            return Err(Error::corrupt("found 0, expected a positive whole number").tensor("num_attention_heads"));
        }
        let latent = if family.row().is_latent { Some(LatentSizes::read(json)?) } else { None };
        let head_dim = match latent {
            Some(sizes) => sizes.nope + sizes.rope,
            None => json.size("head_dim")?.or(family.row().heads.1).unwrap_or(hidden / heads),
        };
        let layers = read_layers(family, json, heads, head_dim, latent)?;
        let cap = |key: &str, default: f64| match json.0.get(key) {
            None if family == Gemma2 => Ok(Some(default)),
            _ if family.is_gemma() => json.number(key),
            _ => Ok(None),
        };
        let logit_cap = match family {
            MuseGlimmer => Some(json.number("final_logit_softcapping")?.unwrap_or(20.0)),
            _ => cap("final_logit_softcapping", 30.0)?,
        };
        Ok(Config {
            family,
            heads,
            vocab: json.size("vocab_size")?.or(family.vocab()).map_or_else(|| json.required("vocab_size"), Ok)?,
            long_border: layers.iter().find_map(|layer| layer.rope.as_ref()?.border()),
            layers,
            norms: Norms::read(family, json)?,
            factors: Factors::read(family, json, hidden, head_dim)?,
            tied: tied(family, json, whole)?,
            logit_cap,
            score_cap: if family == Gemma4 { None } else { cap("attn_logit_softcapping", 50.0)? },
            activation: family.activation(json)?,
            routing: Routing::read(family, json)?,
            latent,
            growth: if matches!(family, Ministral3 | Mistral4) { Growth::read(json)? } else { None },
            output_gate: family == MuseGlimmer
                || family.has_delta_nets()
                || family == Lfm3 && json.flag("use_attention_gate", true)?,
            per_layer_width: family.per_layer_width(json)?,
        })
    }
}

/// Reads `tie_word_embeddings` of the language model and of the wrapper around it.
fn tied(family: Family, json: Fields<'_>, whole: Fields<'_>) -> Result<Option<bool>> {
    const KEY: &str = "tie_word_embeddings";
    let default = json.flag("tie_embedding", family.row().is_tied)?;
    Ok(match (json.find(KEY), whole.find(KEY)) {
        (Some(inner), Some(outer)) if inner != outer => None,
        (Some(_), _) => Some(json.flag(KEY, default)?),
        (None, _) => Some(whole.flag(KEY, default)?),
    })
}

/// Reads the layers.
fn read_layers(
    family: Family,
    json: Fields<'_>,
    heads: usize,
    head_dim: usize,
    latent: Option<LatentSizes>,
) -> Result<Vec<LayerConfig>> {
    let count = json.required("num_hidden_layers")?;
    if count > 10_000 {
        return Err(Error::corrupt(format!("found {count}, expected at most 10000")).tensor("num_hidden_layers"));
    }
    let keys_are_values = family == Gemma4 && json.flag("attention_k_eq_v", false)?;
    let kv_heads = match json.0.get("num_key_value_heads") {
        None => family.row().heads.0.unwrap_or(heads),
        Some(_) => json.size("num_key_value_heads")?.unwrap_or(heads),
    };
    let (window, sliding) = (family.window(json)?, family.sliding_layers(json, count)?);
    let sizes = match family {
        Gemma4 => own_heads(json, &sliding, [kv_heads, head_dim], keys_are_values)?,
        _ => vec![[kv_heads, head_dim]; count],
    };
    for [kv_heads, head_dim] in &sizes {
        check_heads(heads, *kv_heads, *head_dim)?;
    }
    let (rotated, dense) = (family.rotated_layers(json, &sliding)?, family.dense_layers(json, count)?);
    let rotary = latent.map(|sizes| sizes.rope);
    let width = |slides| rotary.map_or_else(|| common_width(&sizes, &sliding, slides, head_dim), Ok);
    let ropes = Ropes::read(family, json, width(false)?, width(true)?)?;
    let owners = kv_owners(family, json, &sliding)?;
    let (recurrent, parts) = (family.recurrent_layers(json, count)?, family.parts(json, count)?);
    let layer = |index: usize| {
        let slides = sliding[index];
        LayerConfig {
            kv_heads: sizes[index][0],
            head_dim: sizes[index][1],
            window: window.filter(|_| slides),
            rope: rotated[index].then(|| if slides { ropes.sliding.clone() } else { ropes.full.clone() }),
            dense: dense[index],
            keys_are_values: keys_are_values && !slides,
            kv_from: owners[index],
            recurrent: recurrent[index],
            parts: parts[index],
        }
    };
    Ok((0..count).map(layer).collect())
}

/// Returns, for each layer of Gemma 4, the number of its key/value heads and the width of its heads, which differ in
/// layers without a window. Newer configurations list the layers that differ.
fn own_heads(json: Fields<'_>, sliding: &[bool], usual: [usize; 2], keys_are_values: bool) -> Result<Vec<[usize; 2]>> {
    const LAYERS: &str = "per_layer_config";
    const NAMES: [&str; 2] = ["num_key_value_heads", "head_dim"];
    let Some(layers) = json.object(LAYERS) else {
        let heads = if keys_are_values { json.size("num_global_key_value_heads")? } else { None };
        let full = [heads.unwrap_or(usual[0]), json.size("global_head_dim")?.unwrap_or(512)];
        return Ok(sliding.iter().map(|slides| if *slides { usual } else { full }).collect());
    };
    let of_layer = |layer: usize| {
        let Some(own) = layers.object(&layer.to_string()) else { return Ok(usual) };
        if own.0.as_object().is_some_and(|own| own.keys().any(|key| !NAMES.contains(&key.as_str()))) {
            let found = format!("found other fields than {} and {} in layer {layer}", NAMES[0], NAMES[1]);
            return Err(Error::unsupported(found).tensor(LAYERS));
        }
        Ok([own.size(NAMES[0])?.unwrap_or(usual[0]), own.size(NAMES[1])?.unwrap_or(usual[1])])
    };
    (0..sliding.len()).map(of_layer).collect()
}

/// Returns the width of the heads of all layers with a window, or of all without one.
fn common_width(sizes: &[[usize; 2]], sliding: &[bool], slides: bool, usual: usize) -> Result<usize> {
    let mut widths = sizes.iter().zip(sliding).filter(|(_, own)| **own == slides).map(|(size, _)| size[1]);
    let first = widths.next().unwrap_or(usual);
    match widths.all(|width| width == first) {
        true => Ok(first),
        false => Err(Error::unsupported("found heads of several widths in layers of one type").tensor("head_dim")),
    }
}

fn check_heads(heads: usize, kv_heads: usize, head_dim: usize) -> Result<()> {
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) || head_dim == 0 || !head_dim.is_multiple_of(2) {
        let found = format!(
            "found {heads} query heads and {kv_heads} key/value heads of {head_dim} values, expected a multiple of \
             the key/value heads and an even number of values"
        );
        return Err(Error::corrupt(found).tensor("num_key_value_heads"));
    }
    Ok(())
}

/// Returns, for each layer, the earlier layer whose keys and values it reads: the last one of the same type before the
/// layers that share.
fn kv_owners(family: Family, json: Fields<'_>, sliding: &[bool]) -> Result<Vec<Option<usize>>> {
    const KEY: &str = "num_kv_shared_layers";
    let shared = if family == Gemma4 { json.size(KEY)?.unwrap_or(0) } else { 0 };
    let first = sliding.len().saturating_sub(shared);
    let owner = |layer: usize| (0..first).rev().find(|owner| sliding[*owner] == sliding[layer]);
    let owners: Vec<_> = (0..sliding.len()).map(|layer| owner(layer).filter(|_| layer >= first)).collect();
    match owners[first..].contains(&None) {
        false => Ok(owners),
        true => {
            let found = format!("found {shared}, expected an earlier layer of each type that has keys and values");
            Err(Error::corrupt(found).tensor(KEY))
        }
    }
}

impl Norms {
    fn read(family: Family, json: Fields<'_>) -> Result<Norms> {
        let key = match family {
            Cohere2 => "layer_norm_eps",
            NemotronH => "layer_norm_epsilon",
            _ if family.has_convolutions() => "norm_eps",
            _ => "rms_norm_eps",
        };
        let eps = json.number(key)?.unwrap_or(family.row().eps);
        let (kind, mut places, usual) = family.row().norms;
        if family == Lfm3 && !json.flag("use_sandwich_norm", true)? {
            places = Places::Before;
        }
        let has_none = family == Glm4Moe && !json.flag("use_qk_norm", false)?;
        let queries_and_keys = if has_none { QkNorm::None } else { usual };
        let eps_after = if family == MuseGlimmer { json.number("post_norm_eps")?.unwrap_or(1e-8) } else { eps };
        Ok(Norms {
            kind,
            last: if family == MuseGlimmer { NormKind::Rms } else { kind },
            places,
            eps,
            eps_after,
            queries_and_keys,
            values: family == Gemma4,
            embeddings: family == MuseGlimmer,
        })
    }
}

impl Factors {
    fn read(family: Family, json: Fields<'_>, hidden: usize, head_dim: usize) -> Result<Factors> {
        let number = |key: &str, default: f64| Ok::<_, Error>(json.number(key)?.unwrap_or(default));
        let one_over_root = (head_dim as f64).powf(-0.5);
        let plain = Factors { embedding: 1.0, branch: 1.0, query: 1.0, score: one_over_root, logit: 1.0 };
        Ok(match family {
            Gemma4 => Factors { embedding: (hidden as f32).sqrt().into(), score: 1.0, ..plain },
            _ if family.is_gemma() => Factors {
                embedding: (hidden as f32).sqrt().into(),
                score: number("query_pre_attn_scalar", 256.0)?.powf(-0.5),
                ..plain
            },
            Granite | GraniteHybrid => Factors {
                embedding: number("embedding_multiplier", 1.0)?,
                branch: number("residual_multiplier", 1.0)?,
                score: number("attention_multiplier", 1.0)?,
                logit: 1.0 / number("logits_scaling", 1.0)?,
                ..plain
            },
            Cohere2 => Factors { logit: number("logit_scale", 0.0625)?, ..plain },
            MuseGlimmer => Factors {
                query: number("qk_scale_factor", 3.87)?,
                logit: number("output_multiplier", 0.196_116_135_138_184_04)?,
                ..plain
            },
            _ if family.row().is_latent => Factors { score: one_over_root * latent_magnitude(json)?.powi(2), ..plain },
            _ => plain,
        })
    }
}

/// Returns YaRN's factor of queries and keys in models with latent attention.
fn latent_magnitude(json: Fields<'_>) -> Result<f64> {
    let Some(p) = json.object("rope_parameters").or(json.object("rope_scaling")) else { return Ok(1.0) };
    let is_scaled = p.word("rope_type").or(p.word("type")).unwrap_or("default") != "default";
    match (p.number("mscale_all_dim")?, p.number("factor")?) {
        (Some(all), Some(factor)) if is_scaled && all != 0.0 => Ok(yarn_magnitude(factor, all)),
        _ => Ok(1.0),
    }
}

impl LatentSizes {
    fn read(json: Fields<'_>) -> Result<LatentSizes> {
        Ok(LatentSizes {
            kv_rank: json.required("kv_lora_rank")?,
            nope: json.required("qk_nope_head_dim")?,
            rope: json.required("qk_rope_head_dim")?,
            value: json.required("v_head_dim")?,
        })
    }
}

impl Growth {
    fn read(json: Fields<'_>) -> Result<Option<Growth>> {
        let Some(p) = json.object("rope_parameters").or(json.object("rope_scaling")) else {
            let found = Error::corrupt("found no value, expected an object with YaRN's parameters");
            return Err(found.tensor("rope_parameters"));
        };
        match p.number("llama_4_scaling_beta")? {
            Some(beta) => Ok(Some(Growth { beta, original: p.required("original_max_position_embeddings")? })),
            None => Ok(None),
        }
    }
}

/// Returns which values of a head form the pairs that a family rotates.
pub(super) fn pairs(family: Family, json: Fields<'_>) -> Result<Pairs> {
    let adjacent = match family.row().rotation.1 {
        PairRule::Halves => false,
        PairRule::Adjacent => true,
        PairRule::AdjacentUnless(field) => json.flag(field, true)?,
    };
    Ok(if adjacent { Pairs::Adjacent } else { Pairs::Halves })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(fields: Value) -> Config {
        Config::read(&fields).unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn fields_that_a_published_gemma_3_leaves_out_have_the_defaults_of_transformers() {
        let config = read(json!({
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        }));
        assert_eq!((config.heads, config.vocab, config.tied), (8, 262_208, Some(true)));
        let sizes = |index: usize| (config.layers[index].kv_heads, config.layers[index].head_dim);
        assert_eq!((sizes(0), sizes(5)), ((4, 256), (4, 256)));
        assert_eq!((config.layers[4].window, config.layers[5].window), (Some(1024), None));
    }

    #[test]
    fn levels_that_disagree_about_tied_embeddings_leave_the_decision_to_the_tensors() {
        let text = json!({"model_type": "qwen3_vl_text", "hidden_size": 64, "num_attention_heads": 4,
            "num_hidden_layers": 1, "vocab_size": 8});
        let with = |inner: Value, outer: Value| {
            let mut fields = json!({"text_config": text, "tie_word_embeddings": outer});
            fields["text_config"]["tie_word_embeddings"] = inner;
            read(fields).tied
        };
        let (yes, no, none) = (Value::Bool(true), Value::Bool(false), Value::Null);
        assert_eq!(with(yes.clone(), no.clone()), None);
        assert_eq!(with(yes.clone(), none.clone()), Some(true));
        assert_eq!(with(none.clone(), yes), Some(true));
        assert_eq!((with(no, none.clone()), with(none.clone(), none)), (Some(false), Some(false)));
    }

    #[test]
    fn sizes_of_gemma_4_are_read_in_both_forms() {
        let text = json!({"architectures": ["Gemma4ForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 8,
            "layer_types": ["sliding_attention", "full_attention"], "attention_k_eq_v": true,
            "num_kv_shared_layers": 0, "rope_parameters": {"full_attention": {"rope_type": "proportional"}}});
        let with = |fields: &[(&str, Value)]| {
            let mut text = text.clone();
            fields.iter().for_each(|(key, value)| text[key] = value.clone());
            Config::read(&text).map(|config| {
                let sizes = config.layers.iter().map(|layer| [layer.kv_heads, layer.head_dim]);
                sizes.collect::<Vec<_>>()
            })
        };
        let older = [("global_head_dim", json!(32)), ("num_global_key_value_heads", json!(1))];
        let newer = [("per_layer_config", json!({"1": {"head_dim": 32, "num_key_value_heads": 1}}))];
        assert_eq!(with(&older).unwrap(), [[2, 16], [1, 32]]);
        assert_eq!(with(&newer).unwrap(), [[2, 16], [1, 32]]);
        let other = with(&[("per_layer_config", json!({"1": {"intermediate_size": 3}}))]);
        assert!(other.unwrap_err().to_string().contains("layer 1"));
    }
}
