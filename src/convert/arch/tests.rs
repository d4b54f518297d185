//! Tests of reading configurations and of the views of all families.

use super::*;
use crate::model_config::{Activation, DenseLayers, Mlp, RopeScaling, RouterSoftmax};
use proptest::prelude::*;
use serde_json::json;

fn read(config: Value) -> Result<ModelConfig> {
    let Value::Object(map) = config else { panic!("not an object") };
    let fields = Fields::new(&map);
    Arch::of(&fields)?.model_config(&fields, None)
}

fn llama() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "eos_token_id": [3, 4], "bos_token_id": 1
    })
}

fn gpt_oss() -> Value {
    json!({
        "architectures": ["GptOssForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512,
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "max_position_embeddings": 512,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": false}
    })
}

fn with(mut config: Value, key: &str, value: Value) -> Value {
    config[key] = value;
    config
}

#[test]
fn both_spellings_of_a_configuration_mean_the_same() {
    let old = with(llama(), "rope_scaling", json!({"type": "linear", "factor": 2.0}));
    let mut new = with(llama(), "dtype", json!("bfloat16"));
    new["rope_parameters"] = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0});
    new.as_object_mut().unwrap().remove("rope_theta");
    assert_eq!(read(old).unwrap(), read(new).unwrap());
}

#[test]
fn llama_defaults_are_those_of_transformers() {
    let model = read(llama()).unwrap();
    assert_eq!((model.head_dim, model.tied_embeddings, model.eos, model.bos), (16, false, vec![3, 4], Some(1)));
    assert_eq!(model.rope.scaling, RopeScaling::None);
    assert!(!model.attention.qkv_bias && model.attention.windows.is_empty());
}

#[test]
fn gpt_oss_windows_alternate_from_the_first_layer_and_yarn_has_its_magnitude() {
    let model = read(gpt_oss()).unwrap();
    assert_eq!(model.attention.windows, [Some(8), None, Some(8)]);
    let RopeScaling::Yarn { attention_factor, truncate, beta_fast, .. } = model.rope.scaling else { panic!() };
    assert!((attention_factor - (0.1 * 8f64.ln() + 1.0)).abs() < 1e-12 && !truncate && beta_fast == 32.0);
    let Mlp::Moe { activation: Activation::SwigluOai { alpha, limit }, top_k: 2, .. } = model.mlp else { panic!() };
    assert_eq!((alpha, limit), (1.702, 7.0));
}

#[test]
fn the_original_configuration_of_gpt_oss_is_understood() {
    let model = read(json!({
        "num_hidden_layers": 24, "num_experts": 32, "experts_per_token": 4, "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "swiglu_limit": 7.0, "head_dim": 64, "num_attention_heads": 64,
        "num_key_value_heads": 8, "sliding_window": 128, "initial_context_length": 4096, "rope_theta": 150000,
        "rope_scaling_factor": 32.0, "rope_ntk_alpha": 1, "rope_ntk_beta": 32
    }))
    .unwrap();
    assert_eq!((model.architecture.as_str(), model.max_context, model.n_layers), ("GptOssForCausalLM", 131_072, 24));
    assert_eq!(model.attention.windows[..2], [Some(128), None]);
}

#[test]
fn generation_config_adds_end_tokens() {
    let (Value::Object(config), Value::Object(generation)) = (llama(), json!({"eos_token_id": [4, 9]})) else {
        panic!()
    };
    let fields = Fields::new(&config);
    let model = Arch::of(&fields).unwrap().model_config(&fields, Some(&generation)).unwrap();
    assert_eq!(model.eos, [3, 4, 9]);
}

#[test]
fn what_cannot_be_converted_exactly_is_refused_by_field() {
    let cases = [
        (with(llama(), "architectures", json!(["MambaForCausalLM"])), "architectures"),
        (with(llama(), "hidden_act", json!("gelu")), "hidden_act"),
        (with(llama(), "rope_scaling", json!({"rope_type": "dynamic", "factor": 2.0})), "rope_scaling.rope_type"),
        (with(llama(), "rope_scaling", json!({"rope_type": "longrope", "factor": 2.0})), "rope_scaling.short_factor"),
        (with(llama(), "rope_scaling", json!({"rope_type": "linear"})), "rope_scaling.factor"),
        (with(llama(), "rope_scaling", json!({"factor": 2.0})), "rope_scaling.rope_type"),
        (
            with(
                gpt_oss(),
                "rope_scaling",
                json!({"type": "yarn", "factor": 8, "original_max_position_embeddings": 0}),
            ),
            "rope.scaling",
        ),
        (with(llama(), "partial_rotary_factor", json!(0.5)), "partial_rotary_factor"),
        (with(gpt_oss(), "layer_types", json!(["full_attention"])), "layer_types"),
        (with(gpt_oss(), "layer_types", json!(["full_attention", "linear_attention", "x"])), "layer_types"),
        (with(gpt_oss(), "num_experts_per_tok", json!(5)), "mlp.top_k"),
        (with(llama(), "num_key_value_heads", json!(4)), "n_kv_heads"),
        (with(llama(), "num_attention_heads", json!(7)), "num_attention_heads"),
        (with(llama(), "num_attention_heads", json!(0)), "num_attention_heads"),
        (with(llama(), "num_hidden_layers", json!(1u64 << 40)), "num_hidden_layers"),
        (with(llama(), "hidden_size", json!(-1)), "hidden_size"),
        (with(llama(), "vocab_size", Value::Null), "vocab_size"),
        (with(llama(), "eos_token_id", json!("</s>")), "eos_token_id"),
        (with(llama(), "eos_token_id", json!(512)), "eos"),
    ];
    let mut failures = Vec::new();
    for (config, field) in cases {
        match read(config) {
            Ok(_) => failures.push(format!("{field}: accepted")),
            Err(e) if e.tensor_name() == Some(field) => assert_eq!(e.cause().exit_code(), 1, "{e}"),
            Err(e) => failures.push(format!("{field}: {e}")),
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn every_expected_tensor_has_a_view_in_each_spelling() {
    let model = read(gpt_oss()).unwrap();
    let arch = &ARCHS[1];
    for tensor in expected_tensors(&model) {
        let views = arch.views(&model, &tensor);
        let original = views.iter().any(|v| v.sources()[0].starts_with("block.") || !v.sources()[0].contains("layers"));
        assert!(views.len() >= 2 && original, "{}: {views:?}", tensor.name);
    }
    let k = ExpectedTensor { name: "model.layers.1.self_attn.k_proj.weight".into(), shape: vec![32, 64] };
    let rows = View::Rows { source: "block.1.attn.qkv.weight".into(), first: 128, of: 192 };
    assert!(arch.views(&model, &k).contains(&rows));
}

/// Returns the class and configuration of the fixtures of all families.
fn fixtures() -> Vec<(String, Value)> {
    let names = ["llama-gqa", "mistral-swa", "mixtral", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3"];
    let read = |name: &str| {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
        let config: Value = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
        (config["architectures"][0].as_str().unwrap().to_string(), config)
    };
    names.into_iter().chain(["gptoss-mxfp4", "qwen3moe-dense"]).map(read).collect()
}

/// Lists fields, each with a value that changes the arithmetic, one that does not, and the families
/// that support the field.
fn foreign_fields() -> Vec<(&'static str, Value, Value, &'static [&'static str])> {
    vec![
        ("attn_logit_softcapping", json!(50.0), Value::Null, &["Gemma2"]),
        ("final_logit_softcapping", json!(30.0), Value::Null, &["Gemma2", "Gemma3"]),
        ("query_pre_attn_scalar", json!(144), Value::Null, &["Gemma2", "Gemma3"]),
        ("attention_multiplier", json!(0.0078125), Value::Null, &[]),
        ("embedding_multiplier", json!(12.0), json!(1.0), &[]),
        ("residual_multiplier", json!(0.22), json!(1), &[]),
        ("logits_scaling", json!(8.0), json!(1.0), &[]),
        ("partial_rotary_factor", json!(0.75), json!(1.0), &["Phi3"]),
        ("clip_qkv", json!(8), Value::Null, &[]),
        ("rope_local_base_freq", json!(500), Value::Null, &["Gemma3"]),
        ("use_qk_norm", json!(true), json!(false), &[]),
        ("use_bidirectional_attention", json!(true), json!(false), &[]),
        ("attention_bias", json!(true), json!(false), &["Llama", "Qwen3", "Qwen3Moe", "Gemma2", "Gemma3", "GptOss"]),
        ("mlp_bias", json!(true), json!(false), &["Llama"]),
        ("use_sliding_window", json!(true), json!(false), &["Qwen2", "Qwen3", "Qwen3Moe"]),
        ("mlp_only_layers", json!([1]), json!([]), &["Qwen3Moe"]),
        ("decoder_sparse_step", json!(2), json!(1), &["Qwen3Moe"]),
        ("shared_expert_intermediate_size", json!(64), json!(0), &[]),
        ("num_experts", json!(4), json!(0), &["Mixtral", "Qwen3Moe", "GptOss"]),
    ]
}

#[test]
fn layers_without_experts_are_those_of_transformers() {
    let moe = |only: Value, step: Value| {
        let fields = json!({"num_hidden_layers": 4, "mlp_only_layers": only, "decoder_sparse_step": step});
        changed("Qwen3Moe", fields)
    };
    for (only, step, expected) in [
        (json!([]), json!(1), &[][..]),
        (Value::Null, Value::Null, &[]),
        (json!([1]), json!(1), &[1]),
        (json!([3, 0, 3]), json!(1), &[0, 3]),
        (json!([]), json!(2), &[0, 2]),
        (json!([3]), json!(2), &[0, 2, 3]),
        (json!([]), json!(3), &[0, 1, 3]),
    ] {
        let model = moe(only.clone(), step.clone()).unwrap();
        let layers = expected.to_vec();
        let dense = (!layers.is_empty()).then_some(DenseLayers { layers, intermediate: 128 });
        assert_eq!(model.dense_layers, dense, "{only} {step}");
        let with_gate: Vec<usize> = (0..4)
            .filter(|layer| {
                let name = format!("model.layers.{layer}.mlp.gate_proj.weight");
                expected_tensors(&model).contains(&ExpectedTensor { name, shape: vec![128, 64] })
            })
            .collect();
        assert_eq!(with_gate, expected, "{only} {step}");
    }
    for all_dense in [moe(json!([]), json!(5)), moe(json!([0, 1, 2, 3]), json!(1))] {
        let model = all_dense.unwrap();
        assert!(matches!(model.mlp, Mlp::Dense { intermediate: 128, .. }) && model.dense_layers.is_none());
    }
    for (only, step, field, found) in [
        (json!([4]), json!(1), "mlp_only_layers", "found `[4]`, expected numbers of layers below 4"),
        (json!([-1]), json!(1), "mlp_only_layers", "a list of whole numbers"),
        (json!(1), json!(1), "mlp_only_layers", "a list of whole numbers"),
        (json!([]), json!(0), "decoder_sparse_step", "a whole number from 1 on"),
    ] {
        let error = moe(only, step).unwrap_err();
        assert_eq!(error.tensor_name(), Some(field), "{error}");
        assert!(error.to_string().contains(found), "{error}");
    }
}

#[test]
fn a_field_that_a_family_does_not_know_is_refused_unless_it_changes_nothing() {
    let mut failures = Vec::new();
    for (class, config) in fixtures() {
        let original = read(config.clone()).unwrap();
        for (field, foreign, neutral, families) in foreign_fields() {
            if families.iter().any(|family| class == format!("{family}ForCausalLM")) {
                continue;
            }
            match read(with(config.clone(), field, foreign.clone())) {
                Err(e) if e.tensor_name() == Some(field) && e.to_string().contains(&foreign.to_string()) => {}
                other => failures.push(format!("{class} {field} {foreign}: {other:?}")),
            }
            if read(with(config.clone(), field, neutral.clone())).ok().as_ref() != Some(&original) {
                failures.push(format!("{class} {field} {neutral}: changes the model"));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn an_unknown_value_of_a_known_field_is_refused_in_every_family() {
    let mut failures = Vec::new();
    for (class, config) in fixtures() {
        let activation = if class.starts_with("Gemma") { "hidden_activation" } else { "hidden_act" };
        let rope = if config["rope_parameters"].is_object() { "rope_parameters" } else { "rope_scaling" };
        let n_layers = config["num_hidden_layers"].as_u64().unwrap() as usize;
        let mut types = vec!["full_attention"; n_layers];
        types[1] = "chunked_attention";
        let cases = [
            (activation, json!("relu2"), "relu2"),
            (rope, json!({"rope_type": "dynamic", "factor": 2.0}), "dynamic"),
            (rope, json!({"rope_type": "default", "mrope_section": [16, 24, 24]}), "16"),
            (rope, json!({"rope_type": "linear"}), "missing"),
            ("layer_types", json!(types), "chunked_attention"),
            ("layer_types", json!(["full_attention"]), "1 entries"),
            ("hidden_size", json!("64"), "64"),
            ("num_attention_heads", json!(-3), "-3"),
            ("rms_norm_eps", json!("small"), "small"),
            ("tie_word_embeddings", json!("yes"), "yes"),
        ];
        for (field, value, found) in cases {
            // Qwen turns all positions of a text alike, so parts for other axes change nothing.
            if found == "16" && ["Qwen2ForCausalLM", "Qwen3ForCausalLM"].contains(&class.as_str()) {
                continue;
            }
            let changed = with(config.clone(), field, value);
            match read(changed) {
                Err(e) if e.to_string().contains(found) => {
                    let named = e.tensor_name().unwrap_or_default();
                    if !named.starts_with(field) {
                        failures.push(format!("{class} {field}: {e} names {named}"));
                    }
                }
                other => failures.push(format!("{class} {field} {found}: {other:?}")),
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// Reads the fixture of a class with some fields changed.
fn changed(class: &str, changes: Value) -> Result<ModelConfig> {
    let (_, mut config) = fixtures().into_iter().find(|(c, _)| c.starts_with(class)).unwrap();
    let Value::Object(changes) = changes else { panic!("not an object") };
    config.as_object_mut().unwrap().extend(changes);
    read(config)
}

#[test]
fn fields_that_are_left_out_mean_what_transformers_takes_them_for() {
    let without = |class: &str, keys: &[&str]| {
        let (_, mut config) = fixtures().into_iter().find(|(c, _)| c.starts_with(class)).unwrap();
        keys.iter().for_each(|key| drop(config.as_object_mut().unwrap().remove(*key)));
        read(config).unwrap()
    };
    assert_eq!(without("Mistral", &["sliding_window"]).attention.windows, [Some(4096); 3]);
    assert!(changed("Mistral", json!({"sliding_window": null})).unwrap().attention.windows.is_empty());
    let gemma2 = without("Gemma2", &["attn_logit_softcapping", "final_logit_softcapping", "tie_word_embeddings"]);
    assert_eq!((gemma2.attention.softcap, gemma2.logit_softcap), (Some(50.0), Some(30.0)));
    assert!(gemma2.tied_embeddings);
    let bare = without("Gemma2", &["layer_types", "query_pre_attn_scalar"]);
    assert_eq!(bare.attention.windows, [Some(16), None, Some(16), None]);
    assert_eq!(bare.attention.scale, 1.0 / 16.0);
    let gemma3 = without("Gemma3", &["layer_types", "rope_parameters"]);
    assert_eq!(gemma3.attention.windows, [Some(16); 4]);
    assert_eq!((gemma3.rope.theta, gemma3.local_rope.map(|rope| rope.theta)), (1e6, Some(1e4)));
    let moe = without("Qwen3Moe", &["norm_topk_prob"]);
    assert!(matches!(moe.mlp, Mlp::Moe { router_softmax: RouterSoftmax::All, .. }));
    assert_eq!(without("Qwen3ForCausalLM", &["head_dim"]).head_dim, 128);
    let upper = changed(
        "Qwen2",
        json!({"use_sliding_window": true, "sliding_window": 9, "max_window_layers": 2,
        "layer_types": null}),
    );
    assert_eq!(upper.unwrap().attention.windows, [None, None, Some(9)]);
}

#[test]
fn longrope_takes_its_length_from_the_model_and_refuses_two_stories() {
    let factors = vec![1.5; 12];
    let rope = |more: Value| {
        let mut rope = json!({"type": "longrope", "short_factor": factors, "long_factor": factors});
        rope.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"original_max_position_embeddings": 128, "rope_scaling": rope})
    };
    let magnitude = (1.0 + 4f64.ln() / 128f64.ln()).sqrt();
    for (more, expected) in [
        (json!({}), magnitude),
        (json!({"factor": 4.0}), magnitude),
        (json!({"type": "su"}), magnitude),
        (json!({"attention_factor": 1.25}), 1.25),
    ] {
        let model = changed("Phi3", rope(more)).unwrap();
        let RopeScaling::LongRope { original_max_position, attention_factor, .. } = model.rope.scaling else {
            panic!()
        };
        assert_eq!((original_max_position, attention_factor), (128, expected));
    }
    for (more, culprit) in [
        (json!({"factor": 32.0}), "rope_scaling.factor"),
        (json!({"short_factor": [1.0]}), "rope.scaling"),
        (json!({"long_factor": null}), "rope_scaling.long_factor"),
        (json!({"long_factor": vec![0.0; 12]}), "rope.scaling"),
        (json!({"short_mscale": 1.2}), "rope_scaling.short_mscale"),
    ] {
        assert_eq!(changed("Phi3", rope(more)).unwrap_err().tensor_name(), Some(culprit));
    }
}

#[test]
fn parts_of_heads_and_bases_by_layer_are_for_families_that_know_them() {
    let rotary_dim = |changes| changed("Phi3", changes).map(|model| model.rope.rotary_dim);
    assert_eq!(rotary_dim(json!({"partial_rotary_factor": 0.75})).unwrap(), Some(18));
    assert_eq!(rotary_dim(json!({"partial_rotary_factor": 1.0})).unwrap(), None);
    for (share, field) in [(0.0, "partial_rotary_factor"), (1.5, "partial_rotary_factor"), (0.8, "rope.rotary_dim")] {
        assert_eq!(
            rotary_dim(json!({"partial_rotary_factor": share})).unwrap_err().tensor_name(),
            Some(field),
            "{share}"
        );
    }
    let by_type = |local: f64| {
        let rope = |theta: f64| json!({"rope_type": "default", "rope_theta": theta});
        json!({"rope_parameters": {"full_attention": rope(1e6), "sliding_attention": rope(local)}, "rope_theta": null})
    };
    assert_eq!(changed("Gemma2", by_type(1e6)).unwrap().rope.theta, 1e6);
    assert_eq!(changed("Gemma2", by_type(1e4)).unwrap_err().tensor_name(), Some("rope_parameters.sliding_attention"));
    let inside = json!({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}});
    assert_eq!(changed("Phi3", json!({"partial_rotary_factor": null})).unwrap().rope.rotary_dim, None);
    assert_eq!(
        changed("Qwen3ForCausalLM", inside).unwrap_err().tensor_name(),
        Some("rope_parameters.partial_rotary_factor")
    );
}

/// Generates JSON values as an untrusted file may contain them, including extreme numbers.
fn any_value() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        Just(json!(0)),
        Just(json!(-1)),
        Just(json!(1)),
        Just(json!(1u64 << 28)),
        Just(json!(u64::MAX)),
        Just(json!(0.5)),
        Just(json!(1e308)),
        Just(json!(-1e-300)),
        (0i64..3000).prop_map(|n| json!(n)),
    ];
    let word = prop_oneof![
        Just(json!("silu")),
        Just(json!("longrope")),
        Just(json!("yarn")),
        Just(json!("full_attention")),
        "[a-z]{0,6}".prop_map(|w| json!(w)),
    ];
    let leaf = prop_oneof![Just(Value::Null), any::<bool>().prop_map(|b| json!(b)), number, word].boxed();
    let keys = prop::sample::select(vec![
        "rope_type",
        "factor",
        "short_factor",
        "long_factor",
        "original_max_position_embeddings",
        "full_attention",
        "sliding_attention",
        "rope_theta",
        "partial_rotary_factor",
        "quant_method",
        "attention_factor",
        "mscale",
    ]);
    leaf.prop_recursive(3, 24, 8, move |inner| {
        let object = prop::collection::vec((keys.clone(), inner.clone()), 0..6);
        prop_oneof![
            prop::collection::vec(inner, 0..8).prop_map(Value::Array),
            object.prop_map(|pairs| pairs.into_iter().map(|(k, v)| (k.to_string(), v)).collect()),
        ]
    })
}

proptest! {
    #[test]
    fn no_configuration_panics_and_what_is_accepted_can_be_viewed(
        fixture in 0usize..11,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any_value()), 1..4),
    ) {
        let (_, mut config) = fixtures().swap_remove(fixture);
        let extra = ["rope_scaling", "rope_parameters", "layer_types", "sliding_window_pattern", "num_experts", "head_dim"];
        let keys: Vec<String> = config.as_object().unwrap().keys().cloned().chain(extra.map(String::from)).collect();
        for (key, value) in changes {
            config[&keys[key.index(keys.len())]] = value;
        }
        let map = config.as_object().unwrap();
        let fields = Fields::new(map);
        if let Ok(arch) = Arch::of(&fields)
            && let Ok(model) = arch.model_config(&fields, None)
        {
            let wide = matches!(model.mlp, Mlp::Moe { experts, .. } if experts > 100);
            for tensor in expected_tensors(&model).into_iter().take(if wide { 0 } else { 40 }) {
                prop_assert!(!arch.views(&model, &tensor).is_empty(), "{}", tensor.name);
            }
        }
    }
}
