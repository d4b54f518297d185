//! Model families of transformers: what follows from the row of a family and a configuration.

use super::config::{Activation, DeltaSizes, LayerParts, MambaSizes, Places, Recurrent};
use super::families::{FAMILIES, Row};
use super::fields::Fields;
use super::rules::{Dense, Rotates, Slides};
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
    Lfm2,
    Lfm2Moe,
    Lfm3,
    Qwen3_5,
    Qwen3_5Moe,
    Qwen3Next,
    GraniteHybrid,
    NemotronH,
}

impl Family {
    /// Finds the family of a configuration, or of the `text_config` of one.
    pub(super) fn of(json: Fields<'_>) -> Result<Family> {
        let class = json.0["architectures"][0].as_str();
        let name = class.or(json.word("model_type")).unwrap_or("no architecture");
        let row = FAMILIES.iter().find(|row| row.names.contains(&name));
        let known = || FAMILIES.iter().map(|row| row.names[0]).collect::<Vec<_>>().join(", ");
        row.map(|row| row.family).ok_or_else(|| {
            Error::unsupported(format!("found `{name:.80}`, expected one of {}", known())).tensor("architectures")
        })
    }

    /// Returns the row of the family.
    pub(super) fn row(self) -> &'static Row {
        FAMILIES.iter().find(|row| row.family == self).expect("every family has a row")
    }

    /// Returns the default number of query heads, if published configurations leave it out.
    pub fn heads(self) -> Option<usize> {
        (self == Family::Gemma3).then_some(8)
    }

    /// Returns the default vocabulary, if published configurations leave it out.
    pub fn vocab(self) -> Option<usize> {
        (self == Family::Gemma3).then_some(262_208)
    }

    pub fn is_gemma(self) -> bool {
        matches!(self, Family::Gemma2 | Family::Gemma3 | Family::Gemma4)
    }

    /// Returns the number of further inputs that each layer reads per token.
    pub(super) fn per_layer_width(self, json: Fields<'_>) -> Result<usize> {
        match self == Family::Gemma4 && !is_unified(json) {
            true => Ok(json.size("hidden_size_per_layer_input")?.unwrap_or(256)),
            false => Ok(0),
        }
    }

    /// Returns, for each layer, what it has in place of attention.
    pub(super) fn recurrent_layers(self, json: Fields<'_>, layers: usize) -> Result<Vec<Option<Recurrent>>> {
        if self == Family::GraniteHybrid {
            return mamba_layers(json, layers);
        }
        if self == Family::NemotronH {
            let size = |key: &str, usual: usize| Ok::<_, Error>(json.size(key)?.unwrap_or(usual));
            let sizes = MambaSizes {
                groups: size("n_groups", 8)?.max(1),
                heads: size("mamba_num_heads", 128)?.max(1),
                state: size("ssm_state_size", 128)?,
                head_dim: size("mamba_head_dim", 64)?,
            };
            let blocks = blocks(json, layers)?;
            return Ok(blocks.iter().map(|block| (*block == 'M').then_some(Recurrent::Mamba(sizes))).collect());
        }
        if self.has_delta_nets() {
            let size = |key: &str, usual: usize| Ok::<_, Error>(json.size(key)?.unwrap_or(usual));
            let sizes = DeltaSizes {
                key_heads: size("linear_num_key_heads", 16)?,
                value_heads: size("linear_num_value_heads", 32)?,
                key: size("linear_key_head_dim", 128)?,
                value: size("linear_value_head_dim", 128)?,
            };
            if sizes.key_heads == 0 || !sizes.value_heads.is_multiple_of(sizes.key_heads) {
                let found = format!("found {}, expected a multiple of the key heads", sizes.value_heads);
                return Err(Error::corrupt(found).tensor("linear_num_value_heads"));
            }
            let interval = size("full_attention_interval", 4)?.max(1);
            let has_attention = |layer: usize| match json.0["layer_types"].as_array() {
                Some(types) => types.get(layer).is_some_and(|kind| kind == "full_attention"),
                None => (layer + 1).is_multiple_of(interval),
            };
            let net = Recurrent::DeltaNet(sizes);
            return Ok((0..layers).map(|layer| (!has_attention(layer)).then_some(net)).collect());
        }
        if !self.has_convolutions() {
            return Ok(vec![None; layers]);
        }
        let width = json.size("conv_L_cache")?.unwrap_or(3).max(1);
        let has_attention = |layer: usize| match (json.0["layer_types"].as_array(), json.numbers("full_attn_idxs")) {
            (Some(types), _) => types.get(layer).is_some_and(|kind| kind != "conv"),
            (None, Some(listed)) => listed.contains(&(layer as f64)),
            (None, None) => true,
        };
        Ok((0..layers).map(|layer| (!has_attention(layer)).then_some(Recurrent::ShortConv(width))).collect())
    }

    /// Returns the parts of each layer.
    pub(super) fn parts(self, json: Fields<'_>, layers: usize) -> Result<Vec<LayerParts>> {
        if self != Family::NemotronH {
            return Ok(vec![LayerParts::Both; layers]);
        }
        let part = |block: &char| if ['M', '*'].contains(block) { LayerParts::Mixer } else { LayerParts::Mlp };
        Ok(blocks(json, layers)?.iter().map(part).collect())
    }

    pub(super) fn has_delta_nets(self) -> bool {
        matches!(self, Family::Qwen3_5 | Family::Qwen3_5Moe | Family::Qwen3Next)
    }

    pub(super) fn has_convolutions(self) -> bool {
        matches!(self, Family::Lfm2 | Family::Lfm2Moe | Family::Lfm3)
    }

    /// Returns the name in the checkpoint of a part of a layer.
    pub(super) fn stored(self, part: &str, places: Places) -> String {
        const OF_ALL: [(&str, &str); 4] = [
            ("input_layernorm", "operator_norm"),
            ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.up_proj", "feed_forward.w3"),
            ("mlp.down_proj", "feed_forward.w2"),
        ];
        const OF_ATTENTION: [(&str, &str); 3] = [
            ("self_attn.q_norm", "self_attn.q_layernorm"),
            ("self_attn.k_norm", "self_attn.k_layernorm"),
            ("self_attn.o_proj", "self_attn.out_proj"),
        ];
        const AROUND: [(&str, &str); 3] = [
            ("post_attention_layernorm", "post_operator_norm"),
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_feedforward_layernorm", "post_ffn_norm"),
        ];
        const BEFORE: [(&str, &str); 1] = [("post_attention_layernorm", "ffn_norm")];
        if self == Family::NemotronH {
            let norms = ["input_layernorm", "post_attention_layernorm"];
            if let Some(rest) = norms.iter().find_map(|norm| part.strip_prefix(norm)) {
                return format!("norm{rest}");
            }
            let rest = ["self_attn.", "mamba.", "mlp."].iter().find_map(|prefix| part.strip_prefix(prefix));
            return rest.map_or_else(|| part.to_string(), |rest| format!("mixer.{rest}"));
        }
        let of_attention = OF_ATTENTION.iter().filter(|_| self != Family::Lfm3);
        let norms = if places == Places::Around { &AROUND[..] } else { &BEFORE[..] };
        let own = OF_ALL.iter().chain(of_attention).chain(norms).filter(|_| self.has_convolutions());
        let renamed = own.filter_map(|(name, own)| Some(format!("{own}{}", part.strip_prefix(name)?))).next();
        renamed.unwrap_or_else(|| part.to_string())
    }

    /// Returns the width of the windows, in tokens.
    pub(super) fn window(self, json: Fields<'_>) -> Result<Option<usize>> {
        match json.0.get("sliding_window") {
            Some(_) => json.size("sliding_window"),
            None if is_unified(json) => Ok(Some(1024)),
            None => Ok(self.row().window),
        }
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
        if self == Family::Gemma4 {
            // Whatever the configuration says, the last layer attends to all positions.
            sliding.iter_mut().last().into_iter().for_each(|last| *last = false);
        }
        if self == Family::SmolLm3 && !json.flag("use_sliding_window", false)? {
            sliding.fill(false);
        }
        Ok(sliding)
    }

    fn usual_sliding_layers(self, json: Fields<'_>, layers: usize) -> Result<Vec<bool>> {
        let pattern = json.size("sliding_window_pattern")?.or(json.size("_sliding_window_pattern")?);
        let uses = json.flag("use_sliding_window", false)?;
        let from = json.size("max_window_layers")?.unwrap_or(28);
        let rotated = self.rotated_layers(json, &vec![true; layers])?;
        let all_but = |layer: usize, every: usize| !(layer + 1).is_multiple_of(every.max(1));
        let slides = |layer: usize| match self.row().slides {
            Slides::Nowhere => false,
            Slides::All => true,
            Slides::FromMaxWindowLayers => uses && layer >= from,
            Slides::IfUsed => uses,
            Slides::EverySecond => layer.is_multiple_of(2),
            Slides::AllButPattern(usual) => all_but(layer, pattern.unwrap_or(usual)),
            Slides::AllButEvery(every) => all_but(layer, every),
            Slides::AllButEveryFromTheEnd(every) => !(layers - 1 - layer).is_multiple_of(every),
            Slides::WhereNotRotatedIfUsed => uses && !rotated[layer],
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
        Ok(match self.row().rotates {
            Rotates::Everywhere => vec![true; layers],
            Rotates::Nowhere => vec![false; layers],
            Rotates::WhereItSlides => sliding.to_vec(),
            Rotates::IfSaid => vec![json.word("position_embedding_type") == Some("rope"); layers],
            Rotates::ListedOrByInterval => {
                let interval = json.size("no_rope_layer_interval")?.unwrap_or(4).max(1);
                listed("no_rope_layers")?
                    .unwrap_or_else(|| (0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect())
            }
            Rotates::ListedOrAllButEveryFromTheEnd(every) => listed("layer_rope_theta")?
                .unwrap_or_else(|| (0..layers).map(|layer| !(layers - 1 - layer).is_multiple_of(every)).collect()),
        })
    }

    /// Returns, for each layer, true if it has a dense MLP in a family with experts.
    pub(super) fn dense_layers(self, json: Fields<'_>, layers: usize) -> Result<Vec<bool>> {
        let first = |usual: usize| -> Result<Vec<bool>> {
            let first = json.size("first_k_dense_replace")?.unwrap_or(usual);
            Ok((0..layers).map(|layer| layer < first).collect())
        };
        match self.row().dense {
            Dense::Nowhere => Ok(vec![false; layers]),
            Dense::ListedOrByStep => {
                let only = json.numbers("mlp_only_layers").unwrap_or_default();
                let step = json.size("decoder_sparse_step")?.unwrap_or(1);
                if step == 0 {
                    let found = Error::corrupt("found 0, expected a positive whole number");
                    return Err(found.tensor("decoder_sparse_step"));
                }
                Ok((0..layers).map(|layer| only.contains(&(layer as f64)) || (layer + 1) % step != 0).collect())
            }
            Dense::TypesOrFirst(usual) => match json.0["mlp_layer_types"].as_array() {
                Some(types) if types.len() == layers => Ok(types.iter().map(|kind| kind == "dense").collect()),
                Some(types) => {
                    let found = format!("found {} entries, expected {layers}", types.len());
                    Err(Error::corrupt(found).tensor("mlp_layer_types"))
                }
                None => first(usual),
            },
            Dense::First(usual) => first(usual),
            Dense::InPattern => Ok(blocks(json, layers)?.iter().map(|block| *block == '-').collect()),
            Dense::FirstOf(field, usual) => {
                let first = json.size(field)?.unwrap_or(usual);
                Ok((0..layers).map(|layer| layer < first).collect())
            }
        }
    }

    pub(super) fn activation(self, json: Fields<'_>) -> Result<Activation> {
        if self == Family::GptOss {
            return Ok(Activation::Clamped(json.number("swiglu_limit")?.unwrap_or(7.0)));
        }
        let (key, default) = self.row().activation;
        match json.word(key).unwrap_or(default) {
            "silu" => Ok(Activation::Silu),
            "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
            "relu2" if self == Family::NemotronH => Ok(Activation::Relu2),
            other => {
                Err(Error::unsupported(format!("found `{other:.40}`, expected silu or gelu_pytorch_tanh")).tensor(key))
            }
        }
    }

    /// Refuses fields of families that the reference supports only in part.
    pub(super) fn refuse(self, json: Fields<'_>) -> Result<()> {
        match self == Family::Gemma4 && json.word("use_bidirectional_attention") == Some("all") {
            true => {
                let found = Error::unsupported("found `all`, expected none or vision");
                Err(found.tensor("use_bidirectional_attention"))
            }
            false => Ok(()),
        }
    }
}

/// Returns the layers of Granite 4 with Mamba-2.
fn mamba_layers(json: Fields<'_>, layers: usize) -> Result<Vec<Option<Recurrent>>> {
    let size = |key: &str, usual: usize| Ok::<_, Error>(json.size(key)?.unwrap_or(usual));
    let heads = size("mamba_n_heads", 128)?.max(1);
    let head_dim = match json.0["mamba_d_head"].as_u64() {
        Some(width) => width as usize,
        None => size("mamba_expand", 2)? * json.required("hidden_size")? / heads,
    };
    let sizes = MambaSizes { groups: size("mamba_n_groups", 1)?, heads, state: size("mamba_d_state", 256)?, head_dim };
    let has_attention = |layer: usize| {
        let kind = json.0["layer_types"][layer].as_str().unwrap_or("mamba");
        kind == "attention" || kind == "full_attention"
    };
    Ok((0..layers).map(|layer| (!has_attention(layer)).then_some(Recurrent::Mamba(sizes))).collect())
}

/// Returns the letters of the blocks of Nemotron-H, or the words of newer files as letters.
fn blocks(json: Fields<'_>, layers: usize) -> Result<Vec<char>> {
    const WORDS: [(&str, char); 4] = [("mamba", 'M'), ("attention", '*'), ("mlp", '-'), ("moe", 'E')];
    let letters: Vec<char> = match (json.word("hybrid_override_pattern"), json.0["layers_block_type"].as_array()) {
        (Some(pattern), _) => pattern.chars().collect(),
        (None, Some(types)) => {
            let letter = |kind: &serde_json::Value| WORDS.iter().find(|(word, _)| kind == word).map(|word| word.1);
            types.iter().filter_map(letter).collect()
        }
        (None, None) => Vec::new(),
    };
    match letters.len() == layers {
        true => Ok(letters),
        false => {
            let found = format!("found {} blocks, expected one for each of {layers} layers", letters.len());
            Err(Error::corrupt(found).tensor("hybrid_override_pattern"))
        }
    }
}

/// Returns true for Gemma 4 with one decoder for all modalities, whose defaults differ.
fn is_unified(json: Fields<'_>) -> bool {
    json.word("model_type") == Some("gemma4_unified_text")
}
