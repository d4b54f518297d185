//! Tests of hostile configurations of the newer families.

use super::*;
use serde_json::json;
use std::path::Path;

/// Reads the configuration of a newer family, which is also a seed of the fuzzer, with another value of a field.
fn newer(name: &str, pointer: &str, value: Value) -> Result<ModelConfig> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/config").join(name);
    let mut config: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    if !pointer.is_empty() {
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        config.pointer_mut(parent).unwrap()[field] = value;
    }
    let Value::Object(map) = config else { panic!("not an object") };
    let fields = Fields::new(&map);
    Arch::of(&fields)?.model_config(&fields, None)
}

#[test]
fn hostile_values_in_newer_families_are_refused_by_name() {
    let sliding = json!(vec!["sliding_attention"; 5]);
    for (name, pointer, value, field) in [
        ("gemma4-e", "/text_config/layer_types", json!(["full_attention"]), "layer_types"),
        ("gemma4-e", "/text_config/layer_types", json!(vec!["linear_attention"; 5]), "layer_types"),
        ("gemma4-e", "/text_config/num_kv_shared_layers", json!(5), "text_config.num_kv_shared_layers"),
        // The last layer reads all positions, so no earlier layer is of its type.
        ("gemma4-e", "/text_config/layer_types", sliding, "text_config.num_kv_shared_layers"),
        ("gemma4-e", "/text_config/global_head_dim", json!(33), "exceptions.head_dim"),
        ("gemma4-e", "/text_config/vocab_size_per_layer_input", json!(7), "per_layer_input"),
        (
            "gemma4-e",
            "/text_config/use_bidirectional_attention",
            json!("all"),
            "text_config.use_bidirectional_attention",
        ),
        ("gemma4-e", "/text_config/per_layer_config", json!({"1": {"head_dim": 32}}), "text_config.per_layer_config"),
        ("gemma4-moe", "/text_config/top_k_experts", json!(9), "mlp.top_k"),
        ("deepseek3", "/num_attention_heads", json!(1u64 << 31), "n_heads"),
        ("deepseek3", "/num_hidden_layers", json!(1u64 << 31), "num_hidden_layers"),
        ("deepseek3", "/n_group", json!(3), "mlp.selection.groups"),
        ("deepseek3", "/topk_group", json!(1), "mlp.selection.groups"),
        ("deepseek3", "/scoring_func", json!("tanh"), "scoring_func"),
        ("deepseek3", "/kv_lora_rank", json!(0), "attention.latent.kv_rank"),
        ("deepseek3", "/qk_rope_head_dim", json!(15), "head_dim"),
        ("glm4flash", "/mlp_layer_types", json!(["dense", "thin", "sparse"]), "mlp_layer_types"),
        ("glm4flash", "/mlp_layer_types", json!(["dense"]), "mlp_layer_types"),
        ("smollm3", "/no_rope_layers", json!([1, 0]), "no_rope_layers"),
        ("museglimmer", "/text_config/layer_rope_theta", json!([1, 2, 3, 4]), "text_config.layer_rope_theta"),
        ("museglimmer", "/text_config/post_norm_eps", json!(-1.0), "post_norm_eps"),
        ("granite", "/logits_scaling", json!(0), "logit_scale"),
        ("cohere2", "/logit_scale", json!("large"), "logit_scale"),
        ("olmo3", "/rope_parameters/sliding_attention", json!(7), "rope_parameters.sliding_attention"),
        (
            "ministral3",
            "/text_config/rope_parameters/original_max_position_embeddings",
            json!(0),
            "attention.position_scale",
        ),
    ] {
        assert!(newer(name, "", Value::Null).is_ok(), "{name}");
        let error = newer(name, pointer, value).unwrap_err();
        assert_eq!(error.tensor_name(), Some(field), "{name} {pointer}: {error}");
    }
}

#[test]
fn a_wrapper_that_says_two_things_about_its_output_matrix_leaves_it_to_the_weights() {
    let says = |inner: Value, outer: Value| {
        let config = json!({"text_config": {"tie_word_embeddings": inner}, "tie_word_embeddings": outer});
        disagrees_about_output(&Fields::new(config.as_object().unwrap())).unwrap()
    };
    assert!(says(json!(true), json!(false)) && says(json!(false), json!(true)));
    assert!(!says(json!(true), json!(true)) && !says(Value::Null, json!(true)) && !says(json!(false), Value::Null));
    // With one of the fields alone, that one counts.
    let config = newer("qwen25vl", "/tie_word_embeddings", json!(true)).unwrap();
    assert!(config.tied_embeddings);
    for (name, field, value, tied) in [
        ("gemma3-vl", "/text_config/tie_word_embeddings", Value::Null, true),
        ("ministral3", "/text_config/tie_word_embeddings", Value::Null, false),
    ] {
        assert_eq!(newer(name, field, value).unwrap().tied_embeddings, tied, "{name}");
    }
}
