//! Tests of hostile configurations and of defaults of the newer families.

use super::*;
use crate::model_config::Mlp;
use crate::model_config::{PerLayerInput, RouterSoftmax};
use serde_json::json;
use std::path::Path;

/// Returns the configuration of a newer family, which is also a seed of the fuzzer.
fn config_of(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/config").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn read(config: &Value) -> Result<ModelConfig> {
    let fields = Fields::new(config.as_object().unwrap());
    Arch::of(&fields)?.model_config(&fields, None)
}

/// Reads the configuration of a newer family with another value of a field.
fn newer(name: &str, pointer: &str, value: Value) -> Result<ModelConfig> {
    let mut config = config_of(name);
    if !pointer.is_empty() {
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        config.pointer_mut(parent).unwrap()[field] = value;
    }
    read(&config)
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
        ("minimaxm2", "/rotary_dim", json!(33), "rotary_dim"),
        ("minimaxm2", "/rotary_dim", json!(0), "rotary_dim"),
        ("minimaxm2", "/rotary_dim", json!(15), "rope.rotary_dim"),
        ("minimaxm2", "/attn_type_list", json!([1, 0, 1]), "attn_type_list"),
        ("minimaxm2", "/scoring_func", json!("softmax"), "scoring_func"),
        ("minimaxm2", "/qk_norm_type", json!("per_head"), "qk_norm_type"),
        ("minimaxm2", "/use_qk_norm", json!(false), "use_qk_norm"),
        ("minimaxm2", "/use_routing_bias", json!(false), "use_routing_bias"),
        ("minimaxm2", "/shared_intermediate_size", json!(64), "shared_intermediate_size"),
        ("minimaxm2", "/num_experts_per_tok", json!(9), "mlp.top_k"),
        ("minimaxm2", "/head_dim", json!(0), "rotary_dim"),
        ("qwen3vlmoe", "/text_config/mlp_only_layers", json!([3]), "text_config.mlp_only_layers"),
        ("qwen3vlmoe", "/text_config/decoder_sparse_step", json!(0), "text_config.decoder_sparse_step"),
        ("qwen3vlmoe", "/text_config/sliding_window", json!(8), "text_config.sliding_window"),
        ("qwen3vlmoe", "/text_config/num_experts", Value::Null, "text_config.num_experts"),
        ("qwen3vlmoe", "/text_config/num_experts", json!(u64::MAX), "mlp.top_k"),
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

#[test]
fn the_language_model_inside_decides_the_family_of_a_wrapper() {
    let mut config = config_of("qwen35");
    let expected = read(&config).unwrap();
    (config["architectures"], config["model_type"]) = (json!(["JevForConditionalGeneration"]), "jev".into());
    assert_eq!(read(&config).unwrap(), expected);
    config["text_config"]["model_type"] = "dory".into();
    assert!(read(&config).unwrap_err().to_string().contains("dory"));
    config["text_config"]["architectures"] = json!(["DoryForCausalLM"]);
    assert!(read(&config).unwrap_err().to_string().contains("DoryForCausalLM"));
}

/// Reads the configuration of a family without some fields.
fn without(name: &str, keys: &[&str]) -> ModelConfig {
    let mut config = config_of(name);
    let text = match config.get("text_config") {
        Some(_) => config["text_config"].as_object_mut().unwrap(),
        None => config.as_object_mut().unwrap(),
    };
    keys.iter().for_each(|key| drop(text.remove(*key)));
    read(&config).unwrap()
}

#[test]
fn fields_that_are_left_out_mean_what_transformers_takes_them_for() {
    // The published Gemma 3 4B says nothing else about its heads and its vocabulary.
    let keys = ["num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"];
    let model = without("gemma3-vl", &keys);
    assert_eq!((model.n_heads, model.n_kv_heads, model.head_dim, model.vocab), (8, 4, 256, 262_208));

    let model = without("deepseek3", &["routed_scaling_factor", "topk_group"]);
    let Mlp::Moe { selection, .. } = model.mlp else { panic!("expected experts") };
    assert_eq!((selection.scale, selection.groups.map(|groups| groups.chosen)), (2.5, Some(4)));
    let model = without("glm4flash", &["routed_scaling_factor", "n_group"]);
    let Mlp::Moe { selection, .. } = model.mlp else { panic!("expected experts") };
    assert_eq!((selection.scale, selection.groups), (1.8, None));
    let model = without("deepseek2", &["n_shared_experts"]);
    let Mlp::Moe { shared, intermediate, .. } = model.mlp else { panic!("expected experts") };
    assert_eq!(shared.map(|shared| shared.intermediate), Some(2 * intermediate));

    let model = without("minimaxm2", &["rope_theta", "rotary_dim", "num_experts_per_tok"]);
    assert_eq!((model.rope.theta, model.rope.rotary_dim), (5e6, None));
    assert!(matches!(model.mlp, Mlp::Moe { top_k: 8, router_softmax: RouterSoftmax::Chosen, .. }));
    let model = without("qwen3vlmoe", &["rope_theta", "norm_topk_prob", "num_experts_per_tok"]);
    assert_eq!((model.rope.theta, model.tied_embeddings), (500_000.0, false));
    assert!(matches!(model.mlp, Mlp::Moe { top_k: 4, router_softmax: RouterSoftmax::Chosen, .. }));

    let model = without("gemma4-e", &["hidden_size_per_layer_input", "vocab_size_per_layer_input"]);
    assert_eq!(model.per_layer_input, Some(PerLayerInput { width: 256, vocab: 262_144 }));
    assert_eq!(newer("gemma4-e", "/text_config/hidden_size_per_layer_input", json!(0)).unwrap().per_layer_input, None);

    let model = without("museglimmer", &["output_multiplier", "qk_scale_factor", "final_logit_softcapping"]);
    assert_eq!((model.logit_scale, model.logit_softcap), (0.196_116_13, Some(20.0)));
    // An explicit share comes before the older field.
    assert_eq!(newer("minimaxm2", "/partial_rotary_factor", json!(0.25)).unwrap().rope.rotary_dim, Some(8));
    let rotated = |share| newer("glm4moe", "/partial_rotary_factor", share).unwrap().rope.rotary_dim;
    assert_eq!((rotated(json!(0.5)), rotated(json!(1.0))), (rotated(Value::Null), None));
}

#[test]
fn layers_of_one_block_follow_the_pattern_and_a_wrong_one_is_refused_by_name() {
    let model = newer("nemotronh", "", Value::Null).unwrap();
    assert_eq!(model.mlp_layers, Some(vec![1, 4]));
    let parts: Vec<_> = model.layers().map(|layer| (layer.mixer.is_some(), layer.mlp.is_some())).collect();
    assert_eq!(parts, [(true, false), (false, true), (true, false), (true, false), (false, true)]);
    assert_eq!(model.heads().map(|heads| heads.rotary).collect::<Vec<_>>(), [None]);
    let mut words = config_of("nemotronh");
    words["layers_block_type"] = json!(["mamba", "moe", "mamba", "attention", "moe"]);
    words.as_object_mut().unwrap().remove("hybrid_override_pattern");
    assert_eq!(read(&words).unwrap(), model);
    let both = newer("nemotronh", "/hybrid_override_pattern", json!("M-E*E")).unwrap();
    assert_eq!(both.layers().filter(|layer| matches!(layer.mlp, Some(Mlp::Dense { .. }))).count(), 1);
    for (field, value, named) in [
        ("hybrid_override_pattern", json!("MEM*"), "hybrid_override_pattern"),
        ("hybrid_override_pattern", json!("MEM*X"), "hybrid_override_pattern"),
        ("hybrid_override_pattern", Value::Null, "hybrid_override_pattern"),
        ("hybrid_override_pattern", json!("MEMME"), "recurrent.layers"),
        ("hybrid_override_pattern", json!("EEEEE"), "mlp_layers"),
        ("moe_latent_size", json!(1u64 << 40), "mlp.latent"),
        ("mlp_hidden_act", json!("silu"), "mlp_hidden_act"),
        ("mlp_bias", json!(true), "mlp_bias"),
        ("n_groups", json!(0), "recurrent.mixer.groups"),
        ("n_groups", json!(4), "recurrent.mixer.heads"),
        ("ssm_state_size", json!(u64::MAX), "recurrent.mixer.state"),
        ("time_step_limit", json!([0.1, 1.0]), "time_step_limit"),
    ] {
        let error = newer("nemotronh", &format!("/{field}"), value).unwrap_err();
        assert_eq!(error.tensor_name(), Some(named), "{field}: {error}");
    }
}
