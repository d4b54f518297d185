use super::*;
use crate::model_config::{Activation, Mlp, RopeScaling};
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
        (with(llama(), "quantization_config", json!({"quant_method": "gptq"})), "quantization_config.quant_method"),
        (with(llama(), "quantization_config", json!({"quant_method": "mxfp4"})), "quantization_config.quant_method"),
        (with(gpt_oss(), "quantization_config", json!({"quant_method": "awq"})), "quantization_config.quant_method"),
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
    let k = Expected { name: "model.layers.1.self_attn.k_proj.weight".into(), shape: vec![32, 64] };
    let rows = View::Rows { source: "block.1.attn.qkv.weight".into(), first: 128, of: 192 };
    assert!(arch.views(&model, &k).contains(&rows));
}
