//! Parses `config.json` as `configuration_*.py` of transformers does, including defaults.

use super::rope::Rope;
use crate::error::{Error, Result};
use serde_json::Value;

/// Configuration of the forward pass.
#[derive(Debug)]
pub struct Config {
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    pub eps: f64,
    pub tied: bool,
    /// True if norms multiply by one plus their weight.
    pub one_plus: bool,
    /// True if layers have additional norms after attention and after the MLP, as in Gemma.
    pub sandwich: bool,
    pub embedding_scale: f64,
    pub logit_cap: Option<f64>,
    pub score_cap: Option<f64>,
    /// Factor that multiplies the attention scores.
    pub scale: f64,
    /// Number of positions that a query attends to, including its own, per layer; `None` for all.
    pub windows: Vec<Option<usize>>,
    /// Rotary position embedding per layer.
    pub ropes: Vec<Rope>,
    /// Length in tokens of the longest text that uses LongRoPE's short factors.
    pub long_border: Option<usize>,
    pub activation: Activation,
    pub experts: Experts,
    /// True for each layer that has a dense MLP in a model with experts.
    pub dense: Vec<bool>,
}

/// Activation function of the gate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    Silu,
    GeluTanh,
    /// Clamped SwiGLU of gpt-oss with its limit.
    Clamped(f64),
}

/// Routing parameters of the experts.
#[derive(Debug, Clone, Copy)]
pub struct Experts {
    pub count: usize,
    pub chosen: usize,
    /// True if the weights of the selected experts sum to one.
    pub normalized: bool,
}

/// Access to the fields of a JSON object; a field that is `null` counts as missing. Errors name the field.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a>(pub &'a Value);

impl<'a> Fields<'a> {
    fn find(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|v| !v.is_null())
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.find(key) else { return Ok(None) };
        let number = value.as_f64().filter(|v| v.is_finite());
        number.map(Some).ok_or_else(|| Error::corrupt(format!("found {value:.80}, expected a number")).tensor(key))
    }

    pub(super) fn size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.find(key) else { return Ok(None) };
        let size = value.as_u64().filter(|v| *v < 1 << 32);
        let wrong = || Error::corrupt(format!("found {value:.80}, expected a whole number below 2^32")).tensor(key);
        size.map(|v| Some(v as usize)).ok_or_else(wrong)
    }

    fn required(&self, key: &str) -> Result<usize> {
        let missing = || Error::corrupt("found no value or 0, expected a positive whole number").tensor(key);
        self.size(key)?.filter(|v| *v > 0).ok_or_else(missing)
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        let Some(value) = self.find(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| Error::corrupt(format!("found {value:.80}, expected true or false")).tensor(key))
    }

    pub(super) fn word(&self, key: &str) -> Option<&'a str> {
        self.find(key)?.as_str()
    }

    pub(super) fn numbers(&self, key: &str) -> Option<Vec<f64>> {
        self.find(key)?.as_array()?.iter().map(Value::as_f64).collect()
    }

    pub(super) fn object(&self, key: &str) -> Option<Fields<'a>> {
        self.find(key).filter(|v| v.is_object()).map(Fields)
    }
}

/// Model family of transformers.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Family {
    Llama,
    Mistral,
    Mixtral,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Gemma2,
    Gemma3,
    Phi3,
    GptOss,
}

use Family::{Gemma2, Gemma3, GptOss, Llama, Mistral, Mixtral, Phi3, Qwen2, Qwen3, Qwen3Moe};

const FAMILIES: [(&str, &str, Family); 10] = [
    ("LlamaForCausalLM", "llama", Llama),
    ("MistralForCausalLM", "mistral", Mistral),
    ("MixtralForCausalLM", "mixtral", Mixtral),
    ("Qwen2ForCausalLM", "qwen2", Qwen2),
    ("Qwen3ForCausalLM", "qwen3", Qwen3),
    ("Qwen3MoeForCausalLM", "qwen3_moe", Qwen3Moe),
    ("Gemma2ForCausalLM", "gemma2", Gemma2),
    ("Gemma3ForCausalLM", "gemma3_text", Gemma3),
    ("Phi3ForCausalLM", "phi3", Phi3),
    ("GptOssForCausalLM", "gpt_oss", GptOss),
];

impl Family {
    fn of(json: Fields<'_>) -> Result<Family> {
        let class = json.0["architectures"][0].as_str();
        let kind = json.word("model_type");
        let row = FAMILIES.iter().find(|row| match class {
            Some(class) => class == row.0,
            None => kind == Some(row.1),
        });
        let known = || FAMILIES.map(|row| row.0).join(", ");
        let name = class.or(kind).unwrap_or("no architecture");
        row.map(|row| row.2).ok_or_else(|| {
            Error::unsupported(format!("found `{name}`, expected one of {}", known())).tensor("architectures")
        })
    }

    fn is_gemma(self) -> bool {
        matches!(self, Gemma2 | Gemma3)
    }
}

impl Config {
    /// Reads a configuration.
    pub fn read(json: &Value) -> Result<Config> {
        let json = Fields(json);
        let family = Family::of(json)?;
        let (hidden, heads) = (json.required("hidden_size")?, json.required("num_attention_heads")?);
        let layers = json.required("num_hidden_layers")?;
        let default_head_dim = match family {
            Gemma2 | Gemma3 => 256,
            Qwen3 => 128,
            GptOss => 64,
            _ => hidden / heads,
        };
        let head_dim = json.size("head_dim")?.unwrap_or(default_head_dim);
        let kv_heads = json.size("num_key_value_heads")?.unwrap_or(heads);
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) || head_dim == 0 || !head_dim.is_multiple_of(2) {
            let found = format!(
                "found {heads} query heads and {kv_heads} key/value heads of {head_dim} values, expected a multiple of \
                 the key/value heads and an even number of values"
            );
            return Err(Error::corrupt(found).tensor("num_key_value_heads"));
        }
        let sliding = sliding_layers(family, json, layers)?;
        let window = json.size("sliding_window")?;
        let ropes = Rope::by_layer(json, family.theta(), head_dim, &sliding)?;
        let scalar = json.number("query_pre_attn_scalar")?.unwrap_or(256.0);
        let cap = |key: &str, default: f64| match json.0.get(key) {
            None if family == Gemma2 => Ok(Some(default)),
            _ if family.is_gemma() => json.number(key),
            _ => Ok(None),
        };
        Ok(Config {
            layers,
            heads,
            kv_heads,
            head_dim,
            vocab: json.required("vocab_size")?,
            eps: json.number("rms_norm_eps")?.unwrap_or(if matches!(family, Mixtral | Phi3 | GptOss) {
                1e-5
            } else {
                1e-6
            }),
            tied: json.flag("tie_word_embeddings", family.is_gemma())?,
            one_plus: family.is_gemma(),
            sandwich: family.is_gemma(),
            embedding_scale: if family.is_gemma() { (hidden as f32).sqrt().into() } else { 1.0 },
            logit_cap: cap("final_logit_softcapping", 30.0)?,
            score_cap: cap("attn_logit_softcapping", 50.0)?,
            scale: if family.is_gemma() { scalar.powf(-0.5) } else { (head_dim as f64).powf(-0.5) },
            windows: sliding.iter().map(|sliding| window.filter(|_| *sliding)).collect(),
            long_border: ropes.iter().find_map(Rope::border),
            ropes,
            activation: family.activation(json)?,
            experts: family.experts(json)?,
            dense: family.dense_layers(json, layers)?,
        })
    }
}

impl Family {
    fn theta(self) -> f64 {
        match self {
            Mixtral | Gemma3 => 1e6,
            GptOss => 150_000.0,
            _ => 10_000.0,
        }
    }

    fn activation(self, json: Fields<'_>) -> Result<Activation> {
        if self == GptOss {
            return Ok(Activation::Clamped(json.number("swiglu_limit")?.unwrap_or(7.0)));
        }
        // Gemma uses hidden_activation, the other families use hidden_act.
        let (key, default) =
            if self.is_gemma() { ("hidden_activation", "gelu_pytorch_tanh") } else { ("hidden_act", "silu") };
        match json.word(key).unwrap_or(default) {
            "silu" => Ok(Activation::Silu),
            "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
            other => {
                Err(Error::unsupported(format!("found `{other:.40}`, expected silu or gelu_pytorch_tanh")).tensor(key))
            }
        }
    }

    fn experts(self, json: Fields<'_>) -> Result<Experts> {
        let (count, chosen, normalized) = match self {
            Mixtral => (json.size("num_local_experts")?.unwrap_or(8), 2, true),
            Qwen3Moe => {
                let count = json.size("num_experts")?.or(json.size("num_local_experts")?).unwrap_or(128);
                (count, 8, json.flag("norm_topk_prob", false)?)
            }
            GptOss => (json.size("num_local_experts")?.or(json.size("num_experts")?).unwrap_or(128), 4, true),
            _ => (0, 0, true),
        };
        let chosen = json.size("num_experts_per_tok")?.or(json.size("experts_per_token")?).unwrap_or(chosen);
        if count > 0 && (chosen == 0 || chosen > count) {
            return Err(Error::corrupt(format!("found {chosen}, expected 1 to {count}")).tensor("num_experts_per_tok"));
        }
        Ok(Experts { count, chosen, normalized })
    }
}

impl Family {
    /// Returns, for each layer, true if it has a dense MLP, which `Qwen3MoeDecoderLayer` calls `Qwen3MoeMLP`.
    fn dense_layers(self, json: Fields<'_>, layers: usize) -> Result<Vec<bool>> {
        if self != Qwen3Moe {
            return Ok(vec![false; layers]);
        }
        let only = json.numbers("mlp_only_layers").unwrap_or_default();
        let step = json.size("decoder_sparse_step")?.unwrap_or(1);
        if step == 0 {
            return Err(Error::corrupt("found 0, expected a positive whole number").tensor("decoder_sparse_step"));
        }
        Ok((0..layers).map(|layer| only.contains(&(layer as f64)) || (layer + 1) % step != 0).collect())
    }
}

/// Returns, for each layer, true if it uses sliding-window attention.
fn sliding_layers(family: Family, json: Fields<'_>, layers: usize) -> Result<Vec<bool>> {
    if let Some(types) = json.0["layer_types"].as_array() {
        if types.len() != layers {
            return Err(
                Error::corrupt(format!("found {} entries, expected {layers}", types.len())).tensor("layer_types")
            );
        }
        return Ok(types.iter().map(|kind| kind == "sliding_attention").collect());
    }
    let pattern = json.size("sliding_window_pattern")?.or(json.size("_sliding_window_pattern")?);
    let uses = json.flag("use_sliding_window", false)?;
    let from = json.size("max_window_layers")?.unwrap_or(28);
    Ok((0..layers)
        .map(|layer| match family {
            Llama => false,
            Mistral | Mixtral | Phi3 => true,
            Qwen2 | Qwen3 => uses && layer >= from,
            Qwen3Moe => uses,
            Gemma2 | GptOss => layer % 2 == 0,
            Gemma3 => !(layer + 1).is_multiple_of(pattern.unwrap_or(6).max(1)),
        })
        .collect())
}
