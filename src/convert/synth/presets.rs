//! Configurations of published models by name, and their reduction to fewer layers.

use crate::error::{Error, Result};
use crate::model_config::LAYER_LIMIT;
use serde_json::Value;

/// `--like` name and the model's public `config.json`.
const PRESETS: &[(&str, &str)] = &[
    ("tinyllama-1.1b", include_str!("configs/tinyllama-1.1b.json")),
    ("llama-2-7b", include_str!("configs/llama-2-7b.json")),
    ("llama-3.1-8b", include_str!("configs/llama-3.1-8b.json")),
    ("llama-3.2-1b", include_str!("configs/llama-3.2-1b.json")),
    ("llama-3.2-3b", include_str!("configs/llama-3.2-3b.json")),
    ("qwen3-0.6b", include_str!("configs/qwen3-0.6b.json")),
    ("qwen3-30b-a3b", include_str!("configs/qwen3-30b-a3b.json")),
    ("gemma-3-1b", include_str!("configs/gemma-3-1b.json")),
    ("gemma-4-e4b", include_str!("configs/gemma-4-e4b.json")),
    ("gemma-4-26b-a4b", include_str!("configs/gemma-4-26b-a4b.json")),
    ("ministral-3-3b", include_str!("configs/ministral-3-3b.json")),
    ("ministral-3-8b", include_str!("configs/ministral-3-8b.json")),
    ("glm-4.7-flash", include_str!("configs/glm-4.7-flash.json")),
    ("minimax-m2", include_str!("configs/minimax-m2.json")),
    ("qwen3.5-4b", include_str!("configs/qwen3.5-4b.json")),
    ("qwen3.6-35b-a3b", include_str!("configs/qwen3.6-35b-a3b.json")),
    ("lfm2-2.6b", include_str!("configs/lfm2-2.6b.json")),
    ("nemotron-3-nano", include_str!("configs/nemotron-3-nano.json")),
    ("gpt-oss-20b", include_str!("configs/gpt-oss-20b.json")),
    ("gpt-oss-120b", include_str!("configs/gpt-oss-120b.json")),
];

/// Returns the names that `--like` accepts.
pub fn names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|(name, _)| *name)
}

/// Returns the public `config.json` of a published model.
///
/// # Errors
/// The name is not in the table; the message lists the names that are.
pub fn config(name: &str) -> Result<Value> {
    let Some((_, text)) = PRESETS.iter().find(|(known, _)| *known == name) else {
        let known = names().collect::<Vec<_>>().join(", ");
        return Err(Error::usage(format!("found the model name `{name}`, expected one of {known}"))
            .help("give the configuration of another model with `--config config.json`"));
    };
    Ok(serde_json::from_str(text).expect("presets are valid JSON"))
}

/// Returns the configuration of the language model: for a model that has further parts (`text_config`), its fields, and
/// those fields of the whole that it does not have itself.
pub fn of_text(config: &Value) -> Value {
    let mut all = config.clone();
    if let (Some(all), Some(inner)) = (all.as_object_mut(), config["text_config"].as_object()) {
        all.remove("text_config");
        all.extend(inner.clone());
    }
    all
}

/// Changes the number of layers, and with it the per-layer lists (`layer_types` continues with its own period, and so
/// does the pattern of Nemotron-H).
///
/// # Errors
/// `layers` is out of range or the configuration is no JSON object.
pub fn with_layers(mut config: Value, layers: usize) -> Result<Value> {
    let nested = config.get("text_config").is_some_and(Value::is_object);
    let model = if nested { &mut config["text_config"] } else { &mut config };
    let Some(object) = model.as_object_mut() else {
        return Err(Error::corrupt("config.json is not a JSON object"));
    };
    if !(1..=LAYER_LIMIT).contains(&layers) {
        return Err(Error::usage(format!("--layers: found {layers}, expected 1 to {LAYER_LIMIT}")));
    }
    let before = object.insert("num_hidden_layers".into(), layers.into());
    let before = before.and_then(|before| before.as_u64()).unwrap_or(0).max(1);
    // Layers that share keys and values keep their part of all, unless too few are left to have some of each type.
    if let Some(shared) = object.get("num_kv_shared_layers").and_then(Value::as_u64) {
        let kept = if layers < 12 { 0 } else { shared.saturating_mul(layers as u64) / before };
        object.insert("num_kv_shared_layers".into(), kept.into());
    }
    if let Some(Value::Array(types)) = object.get_mut("layer_types")
        && !types.is_empty()
    {
        *types = types.iter().cycle().take(layers).cloned().collect();
    }
    if let Some(Value::String(pattern)) = object.get_mut("hybrid_override_pattern") {
        *pattern = pattern.chars().cycle().take(layers).collect();
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_and_fields_of_a_wrapper_are_those_of_its_language_model() {
        let wrapper = serde_json::json!({"model_type": "w", "eos_token_id": 3,
            "text_config": {"model_type": "t", "num_hidden_layers": 9, "vocab_size": 300}});
        let changed = with_layers(wrapper, 2).unwrap();
        assert_eq!(changed["text_config"]["num_hidden_layers"], 2);
        assert_eq!((changed.get("num_hidden_layers"), changed.get("layer_types")), (None, None));
        let text = of_text(&changed);
        assert_eq!((&text["vocab_size"], &text["eos_token_id"]), (&300.into(), &3.into()));
        assert_eq!((&text["model_type"], text.get("text_config")), (&"t".into(), None));
    }

    #[test]
    fn every_preset_is_json_with_a_vocabulary() {
        for name in names() {
            assert!(config(name).unwrap()["vocab_size"].as_u64().unwrap() >= 32_000, "{name}");
        }
        assert_eq!(config("gpt-oss-20b").unwrap()["layer_types"].as_array().unwrap().len(), 24);
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let error = config("gpt-5").unwrap_err();
        assert_eq!(error.cause().exit_code(), 2);
        assert!(error.to_string().contains("gpt-oss-20b"));
    }

    #[test]
    fn layer_types_follow_the_number_of_layers() {
        let cut = with_layers(config("gpt-oss-20b").unwrap(), 3).unwrap();
        let types: Vec<_> = cut["layer_types"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
        assert_eq!(types, ["sliding_attention", "full_attention", "sliding_attention"]);
        let cut = with_layers(config("nemotron-3-nano").unwrap(), 7).unwrap();
        assert_eq!(cut["hybrid_override_pattern"], "MEMEM*E");
        for absurd in [0, usize::MAX] {
            assert!(with_layers(config("gpt-oss-20b").unwrap(), absurd).is_err());
        }
    }
}
