//! Model families of transformers, by class or `model_type`, with the defaults of `configuration_*.py` and the rules by
//! which layers differ from each other.

use super::config::Activation;
use super::fields::Fields;
use crate::error::{Error, Result};

/// Model family of transformers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Family {
    Llama,
    Mistral,
    Mixtral,
    Ministral3,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Qwen3VlMoe,
    Gemma2,
    Gemma3,
    Gemma4,
    Phi3,
    GptOss,
    Granite,
    SmolLm3,
    Olmo2,
    Olmo3,
    Cohere2,
    Glm4Moe,
    MuseGlimmer,
    DeepseekV2,
    DeepseekV3,
    Glm4MoeLite,
    Mistral4,
    MiniMaxM2,
}

use Family::{
    Cohere2, DeepseekV2, DeepseekV3, Gemma2, Gemma3, Gemma4, Glm4Moe, Glm4MoeLite, GptOss, Granite, Llama, MiniMaxM2,
    Ministral3, Mistral, Mistral4, Mixtral, MuseGlimmer, Olmo2, Olmo3, Phi3, Qwen2, Qwen3, Qwen3Moe, Qwen3VlMoe,
    SmolLm3,
};

/// Classes and values of `model_type` of each family; the first is the class of the language model alone.
const FAMILIES: [(&[&str], Family); 25] = [
    (&["LlamaForCausalLM", "llama"], Llama),
    (&["MistralForCausalLM", "mistral"], Mistral),
    (&["MixtralForCausalLM", "mixtral"], Mixtral),
    (&["Ministral3ForCausalLM", "ministral3"], Ministral3),
    (
        &[
            "Qwen2ForCausalLM",
            "qwen2",
            "Qwen2_5_VLForConditionalGeneration",
            "qwen2_5_vl",
            "qwen2_5_vl_text",
            "Qwen2VLForConditionalGeneration",
            "qwen2_vl",
            "qwen2_vl_text",
        ],
        Qwen2,
    ),
    (&["Qwen3ForCausalLM", "qwen3", "qwen3_vl_text"], Qwen3),
    (&["Qwen3MoeForCausalLM", "qwen3_moe"], Qwen3Moe),
    (&["Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text"], Qwen3VlMoe),
    (&["Gemma2ForCausalLM", "gemma2"], Gemma2),
    (&["Gemma3ForCausalLM", "gemma3_text"], Gemma3),
    (&["Gemma4ForCausalLM", "gemma4_text", "Gemma4UnifiedForCausalLM", "gemma4_unified_text"], Gemma4),
    (&["Phi3ForCausalLM", "phi3"], Phi3),
    (&["GptOssForCausalLM", "gpt_oss"], GptOss),
    (&["GraniteForCausalLM", "granite"], Granite),
    (&["SmolLM3ForCausalLM", "smollm3"], SmolLm3),
    (&["Olmo2ForCausalLM", "olmo2"], Olmo2),
    (&["Olmo3ForCausalLM", "olmo3"], Olmo3),
    (&["Cohere2ForCausalLM", "cohere2"], Cohere2),
    (&["Glm4MoeForCausalLM", "glm4_moe"], Glm4Moe),
    (&["MuseGlimmerForCausalLM", "muse_glimmer_text"], MuseGlimmer),
    (&["DeepseekV2ForCausalLM", "deepseek_v2"], DeepseekV2),
    (&["DeepseekV3ForCausalLM", "deepseek_v3", "kimi_k2"], DeepseekV3),
    (&["Glm4MoeLiteForCausalLM", "glm4_moe_lite"], Glm4MoeLite),
    (&["Mistral4ForCausalLM", "mistral4"], Mistral4),
    (&["MiniMaxM2ForCausalLM", "minimax_m2"], MiniMaxM2),
];

impl Family {
    /// Finds the family of a configuration, or of the `text_config` of one.
    pub(super) fn of(json: Fields<'_>) -> Result<Family> {
        let class = json.0["architectures"][0].as_str();
        let name = class.or(json.word("model_type")).unwrap_or("no architecture");
        let row = FAMILIES.iter().find(|(names, _)| names.contains(&name));
        let known = || FAMILIES.map(|(names, _)| names[0]).join(", ");
        row.map(|row| row.1).ok_or_else(|| {
            Error::unsupported(format!("found `{name:.80}`, expected one of {}", known())).tensor("architectures")
        })
    }

    pub fn is_gemma(self) -> bool {
        matches!(self, Gemma2 | Gemma3 | Gemma4)
    }

    /// Returns true for families with multi-head latent attention.
    pub fn is_latent(self) -> bool {
        matches!(self, DeepseekV2 | DeepseekV3 | Glm4MoeLite | Mistral4)
    }

    /// Returns the default base of the RoPE frequencies.
    pub fn theta(self) -> f64 {
        match self {
            Mixtral | Gemma3 | Gemma4 => 1e6,
            SmolLm3 => 2e6,
            GptOss => 150_000.0,
            Olmo3 | MuseGlimmer | Qwen3VlMoe => 500_000.0,
            MiniMaxM2 => 5e6,
            _ => 10_000.0,
        }
    }

    /// Returns the default epsilon of the norms.
    pub fn eps(self) -> f64 {
        match self {
            Mixtral | Ministral3 | Phi3 | GptOss | Olmo2 | Olmo3 | Cohere2 | Glm4Moe | Glm4MoeLite | MuseGlimmer => {
                1e-5
            }
            _ => 1e-6,
        }
    }

    /// Returns the default width of a head, if it does not follow from that of the hidden state.
    pub fn head_dim(self) -> Option<usize> {
        match self {
            Gemma2 | Gemma3 | Gemma4 => Some(256),
            Qwen3 | Ministral3 | MuseGlimmer | MiniMaxM2 => Some(128),
            GptOss => Some(64),
            _ => None,
        }
    }

    /// Returns the default number of query heads, if published configurations leave it out.
    pub fn heads(self) -> Option<usize> {
        (self == Gemma3).then_some(8)
    }

    /// Returns the default number of key/value heads, if it is not that of the query heads.
    pub fn kv_heads(self) -> Option<usize> {
        match self {
            Gemma2 | Gemma3 | Gemma4 | SmolLm3 => Some(4),
            Mistral | Mixtral | Ministral3 | Glm4Moe | MiniMaxM2 => Some(8),
            Qwen3VlMoe => Some(16),
            MuseGlimmer => Some(2),
            _ => None,
        }
    }

    /// Returns the default vocabulary, if published configurations leave it out.
    pub fn vocab(self) -> Option<usize> {
        (self == Gemma3).then_some(262_208)
    }

    pub fn is_tied(self) -> bool {
        self.is_gemma() || matches!(self, SmolLm3 | Cohere2)
    }

    /// Returns the number of further inputs that each layer reads per token.
    pub(super) fn per_layer_width(self, json: Fields<'_>) -> Result<usize> {
        match self {
            Gemma4 if json.word("model_type") == Some("gemma4_unified_text") => Ok(0),
            Gemma4 => Ok(json.size("hidden_size_per_layer_input")?.unwrap_or(256)),
            _ => Ok(0),
        }
    }

    /// Returns the width of the windows, in tokens.
    pub(super) fn window(self, json: Fields<'_>) -> Result<Option<usize>> {
        if json.0.get("sliding_window").is_some() {
            return json.size("sliding_window");
        }
        Ok(match self {
            Mistral | Qwen2 | Qwen3 | Qwen3Moe | Gemma2 | Gemma3 | Olmo3 | Cohere2 => Some(4096),
            GptOss => Some(128),
            Gemma4 if json.word("model_type") == Some("gemma4_unified_text") => Some(1024),
            Gemma4 => Some(512),
            MuseGlimmer => Some(2048),
            _ => None,
        })
    }

    /// Returns, for each layer, true if it uses sliding-window attention.
    pub(super) fn sliding_layers(self, json: Fields<'_>, layers: usize) -> Result<Vec<bool>> {
        let mut sliding = match json.0["layer_types"].as_array() {
            Some(types) if types.len() != layers => {
                let found = format!("found {} entries, expected {layers}", types.len());
                return Err(Error::corrupt(found).tensor("layer_types"));
            }
            Some(types) => types.iter().map(|kind| kind == "sliding_attention").collect(),
            None => self.usual_sliding_layers(json, layers)?,
        };
        match self {
            // Whatever the configuration says, the last layer attends to all positions.
            Gemma4 => sliding.iter_mut().last().into_iter().for_each(|last| *last = false),
            SmolLm3 if !json.flag("use_sliding_window", false)? => sliding.fill(false),
            _ => {}
        }
        Ok(sliding)
    }

    fn usual_sliding_layers(self, json: Fields<'_>, layers: usize) -> Result<Vec<bool>> {
        let pattern = json.size("sliding_window_pattern")?.or(json.size("_sliding_window_pattern")?);
        let uses = json.flag("use_sliding_window", false)?;
        let from = json.size("max_window_layers")?.unwrap_or(28);
        let all_but = |layer: usize, usual: usize| !(layer + 1).is_multiple_of(pattern.unwrap_or(usual).max(1));
        let rotated = self.rotated_layers(json, &vec![true; layers])?;
        let slides = |layer: usize| match self {
            Mistral | Mixtral | Ministral3 | Phi3 => true,
            Qwen2 | Qwen3 => uses && layer >= from,
            Qwen3Moe => uses,
            Gemma2 | GptOss => layer.is_multiple_of(2),
            Gemma3 => all_but(layer, 6),
            Gemma4 => !(layer + 1).is_multiple_of(6),
            Olmo3 => !(layer + 1).is_multiple_of(4),
            Cohere2 => all_but(layer, 4),
            MuseGlimmer => !(layers - 1 - layer).is_multiple_of(4),
            SmolLm3 => uses && !rotated[layer],
            _ => false,
        };
        Ok((0..layers).map(slides).collect())
    }

    /// Returns, for each layer, true if it rotates queries and keys.
    pub(super) fn rotated_layers(self, json: Fields<'_>, sliding: &[bool]) -> Result<Vec<bool>> {
        let layers = sliding.len();
        let listed = |key: &str| match json.numbers(key) {
            Some(list) if list.len() < layers => {
                let found = format!("found {} numbers, expected one for each of {layers} layers", list.len());
                Err(Error::corrupt(found).tensor(key))
            }
            list => Ok(list.map(|list| list[..layers].iter().map(|number| *number != 0.0).collect())),
        };
        Ok(match self {
            Cohere2 => sliding.to_vec(),
            SmolLm3 => {
                let interval = json.size("no_rope_layer_interval")?.unwrap_or(4).max(1);
                listed("no_rope_layers")?
                    .unwrap_or_else(|| (0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect())
            }
            MuseGlimmer => listed("layer_rope_theta")?
                .unwrap_or_else(|| (0..layers).map(|layer| !(layers - 1 - layer).is_multiple_of(4)).collect()),
            _ => vec![true; layers],
        })
    }

    /// Returns, for each layer, true if it has a dense MLP in a family with experts.
    pub(super) fn dense_layers(self, json: Fields<'_>, layers: usize) -> Result<Vec<bool>> {
        let first = |usual: usize| -> Result<Vec<bool>> {
            let first = json.size("first_k_dense_replace")?.unwrap_or(usual);
            Ok((0..layers).map(|layer| layer < first).collect())
        };
        match self {
            Qwen3Moe | Qwen3VlMoe => {
                let only = json.numbers("mlp_only_layers").unwrap_or_default();
                let step = json.size("decoder_sparse_step")?.unwrap_or(1);
                if step == 0 {
                    let found = Error::corrupt("found 0, expected a positive whole number");
                    return Err(found.tensor("decoder_sparse_step"));
                }
                Ok((0..layers).map(|layer| only.contains(&(layer as f64)) || (layer + 1) % step != 0).collect())
            }
            Glm4MoeLite => match json.0["mlp_layer_types"].as_array() {
                Some(types) if types.len() == layers => Ok(types.iter().map(|kind| kind == "dense").collect()),
                Some(types) => {
                    let found = format!("found {} entries, expected {layers}", types.len());
                    Err(Error::corrupt(found).tensor("mlp_layer_types"))
                }
                None => first(1),
            },
            DeepseekV3 => first(3),
            Glm4Moe => first(1),
            DeepseekV2 | Mistral4 => first(0),
            _ => Ok(vec![false; layers]),
        }
    }

    pub(super) fn activation(self, json: Fields<'_>) -> Result<Activation> {
        if self == GptOss {
            return Ok(Activation::Clamped(json.number("swiglu_limit")?.unwrap_or(7.0)));
        }
        // Gemma and Muse Glimmer use hidden_activation, the other families use hidden_act.
        let (key, default) = match self {
            _ if self.is_gemma() => ("hidden_activation", "gelu_pytorch_tanh"),
            MuseGlimmer => ("hidden_activation", "silu"),
            _ => ("hidden_act", "silu"),
        };
        match json.word(key).unwrap_or(default) {
            "silu" => Ok(Activation::Silu),
            "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
            other => {
                Err(Error::unsupported(format!("found `{other:.40}`, expected silu or gelu_pytorch_tanh")).tensor(key))
            }
        }
    }

    /// Refuses fields of families that the reference supports only in part.
    pub(super) fn refuse(self, json: Fields<'_>) -> Result<()> {
        match self {
            Gemma4 if json.word("use_bidirectional_attention") == Some("all") => {
                let found = Error::unsupported("found `all`, expected none or vision");
                Err(found.tensor("use_bidirectional_attention"))
            }
            _ => Ok(()),
        }
    }
}
