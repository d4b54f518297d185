//! Compares the runtime with the independent reference of `verify` on odd shapes of the families that describe their
//! layers one by one: head sizes that are no multiple of 16, widths and vocabularies that are no multiple of 32, and
//! fewer or more groups and experts than the fixtures have.

use crate::common::{fixture, iec};
use crate::cuda::on_gpu;
use crate::odd_shapes::{
    QUANTIZED_LIMIT, difference, difference_of, ids, logits_of, merged, packed, reference_logits, unpacked,
};
use crate::random_adapter::{random_adapter, with_magnitudes};
use iec::rng::Rng;
use iec::runtime::adapters::AdapterSet;
use iec::runtime::kv::KvType;
use iec::runtime::precision::Precision;
use iec::runtime::{Engine, EngineOptions};
use iec::verify::{RefDtype, Reference};
use serde_json::{Value, json};
use std::path::Path;

/// Shapes that most cases have: hidden vectors and vocabularies with a rest in every unit of work.
fn base() -> Value {
    json!({"hidden_size": 66, "vocab_size": 261, "intermediate_size": 45, "bos_token_id": 1, "eos_token_id": 2})
}

/// Lists fixtures whose configurations are changed, and the changes.
fn cases() -> Vec<(&'static str, Value)> {
    let latent = |rank: usize, nope: usize, rope: usize, value: usize| {
        json!({"kv_lora_rank": rank, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value,
            "qk_head_dim": nope + rope, "head_dim": rope, "num_attention_heads": 3, "num_key_value_heads": 3})
    };
    let experts = |count: usize, chosen: usize, width: usize| {
        json!({"n_routed_experts": count, "num_experts": count, "num_local_experts": count,
            "num_experts_per_tok": chosen, "top_k_experts": chosen, "moe_intermediate_size": width})
    };
    let heads = |count: usize, kv: usize, head_dim: usize| json!({"num_attention_heads": count, "num_key_value_heads": kv, "head_dim": head_dim});
    let all = |parts: &[Value]| parts.iter().cloned().fold(base(), merged);
    vec![
        ("deepseek2", all(&[latent(37, 18, 6, 14), experts(7, 3, 33)])),
        (
            "deepseek2",
            all(&[latent(80, 80, 80, 80), experts(5, 1, 41), json!({"q_lora_rank": 19, "n_shared_experts": 1})]),
        ),
        ("deepseek3", all(&[latent(18, 10, 22, 34), experts(9, 4, 35), json!({"n_group": 3, "q_lora_rank": 35})])),
        ("deepseek3", all(&[latent(65, 32, 2, 16), experts(6, 2, 32), json!({"n_group": 1, "topk_group": 1})])),
        ("glm4flash", all(&[latent(41, 12, 10, 50), experts(11, 5, 17), json!({"n_shared_experts": 2})])),
        ("mistral4", all(&[latent(33, 22, 14, 20), experts(7, 3, 29), json!({"q_lora_rank": 21})])),
        ("gemma4", all(&[heads(3, 1, 20), json!({"global_head_dim": 80, "sliding_window": 7})])),
        (
            "gemma4",
            all(&[
                heads(6, 3, 24),
                json!({"global_head_dim": 40, "num_global_key_value_heads": 2, "vocab_size": 275,
                "attention_k_eq_v": false}),
            ]),
        ),
        ("gemma4-moe", all(&[heads(3, 1, 18), experts(7, 2, 21), json!({"global_head_dim": 48})])),
        (
            "gemma4-e",
            all(&[
                heads(3, 1, 20),
                json!({"global_head_dim": 80, "hidden_size_per_layer_input": 7,
            "vocab_size_per_layer_input": 261, "sliding_window": 5}),
            ]),
        ),
        ("gemma4-unified", all(&[heads(4, 2, 10), json!({"global_head_dim": 24})])),
        ("gemma3-vl", all(&[heads(3, 3, 80)])),
        (
            "qwen3vl",
            all(&[
                heads(3, 1, 80),
                json!({"rope_parameters": {"mrope_interleaved": true,
            "mrope_section": [14, 13, 13], "rope_theta": 5e6, "rope_type": "default"}}),
            ]),
        ),
        (
            "qwen3vlmoe",
            all(&[
                heads(4, 2, 22),
                experts(5, 2, 35),
                json!({"rope_scaling": {"mrope_interleaved": true,
            "mrope_section": [5, 3, 3], "rope_type": "default"}}),
            ]),
        ),
        ("ministral3", all(&[heads(3, 1, 18)])),
        ("cohere2", all(&[heads(3, 1, 22), json!({"logit_scale": 0.13, "sliding_window": 9})])),
        ("olmo2", all(&[json!({"num_attention_heads": 3, "num_key_value_heads": 1})])),
        ("olmo3", all(&[json!({"num_attention_heads": 11, "num_key_value_heads": 11, "sliding_window": 33})])),
        ("glm4moe", all(&[heads(3, 1, 20), experts(7, 2, 33), json!({"use_qk_norm": false})])),
        ("glm4moe", all(&[heads(4, 2, 80), experts(6, 3, 16), json!({"n_group": 2, "attention_bias": false})])),
        ("granite", all(&[json!({"num_attention_heads": 3, "num_key_value_heads": 1, "attention_bias": true})])),
        (
            "smollm3",
            all(&[json!({"num_attention_heads": 3, "num_key_value_heads": 3, "no_rope_layers": [0, 1, 1, 0, 0]})]),
        ),
        ("museglimmer", all(&[heads(3, 1, 22), json!({"sliding_window": 6})])),
        ("minimaxm2", all(&[heads(3, 1, 20), experts(7, 2, 33), json!({"rotary_dim": 10})])),
        // The last layer has a convolution, after which only the wanted rows are left.
        (
            "lfm2",
            all(&[
                heads(3, 1, 22),
                json!({"conv_L_cache": 7, "conv_bias": true, "block_auto_adjust_ff_dim": false, "block_ff_dim": 45,
                    "layer_types": ["conv", "full_attention", "conv", "conv", "conv"]}),
            ]),
        ),
        (
            "lfm2moe",
            all(&[
                heads(3, 3, 22),
                experts(7, 2, 33),
                json!({"conv_L_cache": 1, "layer_types": ["full_attention", "conv", "conv", "conv"]}),
            ]),
        ),
        ("lfm3", all(&[heads(3, 1, 20), json!({"conv_L_cache": 5, "sliding_window": 7})])),
        (
            "lfm3",
            all(&[
                heads(3, 3, 80),
                json!({"use_sandwich_norm": false, "use_attention_gate": false,
                    "layer_types": ["sliding_attention", "conv", "full_attention", "conv", "conv"]}),
            ]),
        ),
        // Heads of several sizes that are no whole vectors, several value heads for each key head, and all layers
        // recurrent but the first.
        (
            "qwen35-text",
            all(&[
                heads(3, 1, 20),
                net([3, 9, 20, 36], 3),
                json!({"layer_types": ["full_attention", "linear_attention", "linear_attention", "linear_attention"]}),
            ]),
        ),
        ("qwen35moe", all(&[net([1, 5, 7, 80], 1), experts(7, 2, 33), json!({"shared_expert_intermediate_size": 19})])),
        (
            "qwen3next",
            all(&[
                heads(6, 2, 80),
                net([2, 6, 80, 16], 5),
                experts(6, 3, 16),
                json!({"mlp_only_layers": [1], "intermediate_size": 45, "norm_topk_prob": false,
                    "partial_rotary_factor": 0.1}),
            ]),
        ),
        (
            "granite4h",
            all(&[json!({"num_attention_heads": 3, "num_key_value_heads": 1, "mamba_n_heads": 9, "mamba_d_head": 20,
                    "mamba_d_state": 24, "mamba_d_conv": 3, "mamba_conv_bias": false, "num_local_experts": 0,
                    "shared_intermediate_size": 45, "layer_types": ["attention", "mamba", "mamba", "mamba"]})]),
        ),
        (
            "granite4h",
            all(&[
                experts(7, 2, 33),
                json!({"num_attention_heads": 3, "num_key_value_heads": 3, "mamba_n_heads": 3, "mamba_d_head": 44,
                    "mamba_d_state": 7, "mamba_d_conv": 1, "intermediate_size": 33, "shared_intermediate_size": 19,
                    "position_embedding_type": "rope", "mamba_proj_bias": false}),
            ]),
        ),
        (
            "nemotronh",
            json!({"hybrid_override_pattern": "*M-EM", "num_attention_heads": 3, "num_key_value_heads": 1,
                "head_dim": 20, "mamba_num_heads": 6, "mamba_head_dim": 20, "n_groups": 3, "ssm_state_size": 24,
                "conv_kernel": 3, "use_conv_bias": false, "intermediate_size": 45, "n_routed_experts": 7,
                "num_experts_per_tok": 2, "moe_intermediate_size": 33, "moe_shared_expert_intermediate_size": 19}),
        ),
        ("nemotronh", json!({"moe_latent_size": 24, "moe_intermediate_size": 33, "hybrid_override_pattern": "EM*EM"})),
        (
            "nemotronh",
            json!({"hybrid_override_pattern": "M*-M-", "mamba_num_heads": 3, "mamba_head_dim": 44, "n_groups": 1,
                "ssm_state_size": 7, "conv_kernel": 1, "use_bias": true, "intermediate_size": 33,
                "n_routed_experts": 0, "n_shared_experts": 0}),
        ),
    ]
}

/// Returns the fields of gated delta nets: key heads, value heads, their widths, and the width of the convolution.
fn net([key_heads, value_heads, key, value]: [usize; 4], width: usize) -> Value {
    json!({"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads, "linear_key_head_dim": key,
        "linear_value_head_dim": value, "linear_conv_kernel_dim": width})
}

/// Returns the factor of the usual limits for differences of logits. Gemma 4 normalizes queries and keys and does not
/// scale their products, so scores reach the head size and softmax multiplies rounding errors: the reference in f32 is
/// as far from that in f64 as the runtime is. Delta nets normalize queries and keys of a few values, too, and recurrent
/// states carry errors from position to position.
fn sensitivity(name: &str) -> f32 {
    match name {
        _ if name.starts_with("gemma4") => 10.0,
        "qwen35-text" | "qwen35moe" | "qwen3next" => 10.0,
        "granite4h" | "nemotronh" => 3.0,
        _ => 1.0,
    }
}

/// Returns the options for each device that computes the layers of a model. GPUs do not compute experts that read
/// narrower vectors.
fn places(config: &Value, cpu: EngineOptions) -> Vec<(&'static str, EngineOptions)> {
    let gpu = config["moe_latent_size"].is_null().then(|| ("GPU", on_gpu(cpu)));
    [("CPU", cpu)].into_iter().chain(gpu).collect()
}

/// Writes a checkpoint with random weights of a fixture's configuration with these changes, and returns the
/// configuration.
fn write(name: &str, changes: &Value, seed: usize, dir: &Path) -> Value {
    let text = std::fs::read(fixture(name).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    config["torch_dtype"] = "float32".into();
    config["dtype"] = "float32".into();
    let model = if config["text_config"].is_object() { &mut config["text_config"] } else { &mut config };
    // Changes of fields that the configuration does not have belong to other families.
    let known = changes.as_object().unwrap().iter().filter(|(field, _)| model.get(*field).is_some());
    *model = merged(model.clone(), Value::Object(known.map(|(k, v)| (k.clone(), v.clone())).collect()));
    let file = dir.join("odd.json");
    std::fs::write(&file, config.to_string()).unwrap();
    let mut command = iec();
    command.args(["synth", "--heavy-tails", "--seed", &seed.to_string(), "--config"]).arg(&file);
    command.arg("--out-dir").arg(dir.join("hf")).assert().success();
    config
}

#[test]
fn fp32_agrees_with_the_reference() {
    let mut failures = Vec::new();
    for (seed, (name, changes)) in cases().into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let config = write(name, &changes, seed, dir.path());
        let ids = ids(261);
        let expected = reference_logits(&dir.path().join("hf"), &config, &ids);
        let (_keep, reader) = packed(&dir.path().join("hf"), &[]);
        let options = EngineOptions { precision: Some(Precision::Fp32), prefill_chunk: 11, ..Default::default() };
        for (place, options) in places(&config, options) {
            let (apart, largest) = difference(&reader, &options, &expected, &ids);
            if apart.is_nan() || apart > sensitivity(name) * 2e-5 * largest {
                failures.push(format!("{seed} {name}, {place}: {apart:e} apart, largest logit {largest}"));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn fp32_with_adapters_agrees_with_the_reference() {
    let mut failures = Vec::new();
    for (seed, (name, changes)) in cases().into_iter().enumerate() {
        let (dir, mut rng) = (tempfile::tempdir().unwrap(), Rng::new(seed as u64));
        let (config, ids) = (write(name, &changes, seed, dir.path()), ids(261));
        let (_keep, reader) = packed(&dir.path().join("hf"), &[]);
        let cpu = EngineOptions { precision: Some(Precision::Fp32), prefill_chunk: 11, ..Default::default() };
        let open = |(place, options)| (place, Engine::open(&reader, &options).unwrap());
        let mut engines: Vec<_> = places(&config, cpu).into_iter().map(open).collect();
        let adapters = [0.5, 1.0].map(|_| random_adapter(engines[0].1.config(), &mut rng));
        let dora = with_magnitudes(random_adapter(engines[0].1.config(), &mut rng), &mut rng);
        let plain = reference_logits(&dir.path().join("hf"), &config, &ids);
        for adapters in [adapters.into_iter().zip([0.5, 1.5]).collect(), vec![(dora, 1.0)]] {
            let reference = Reference::open(&dir.path().join("hf"), RefDtype::F64).unwrap();
            let expected = logits_of(&reference.with_adapters(adapters.clone()), &config, &ids);
            let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
            let changed = plain.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            for (place, engine) in &mut engines {
                let bound = adapters.iter().map(|(adapter, factor)| {
                    let bound = engine.adapter_binder().bind(adapter).unwrap();
                    (bound, *factor)
                });
                let set = AdapterSet::new(bound).unwrap();
                engine.set_adapters(set);
                let (apart, _) = difference_of(engine, &expected, &ids);
                if !(apart <= sensitivity(name) * 2e-5 * largest && changed > 0.05 * largest) {
                    failures.push(format!("{seed} {name}, {place}: {apart:e} apart, {changed} changed, of {largest}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn quantized_packs_agree_with_the_reference_on_their_own_weights() {
    let schemes = [
        (r#""scheme":"q4_0""#, Precision::Int4w),
        (r#""scheme":"int4","group_size":32,"symmetric":false"#, Precision::Int4w),
        (r#""scheme":"int8","group_size":128"#, Precision::Int8w),
    ];
    let mut failures = Vec::new();
    for (seed, (name, changes)) in cases().into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let config = write(name, &changes, seed, dir.path());
        let (fields, precision) = schemes[seed % schemes.len()];
        let rules = dir.path().join("rules.json");
        let rule = format!(r#"{{"include":"(proj|embed_tokens|lm_head)(.weight)?$",{fields},"method":"rtn"}}"#);
        std::fs::write(&rules, format!(r#"{{"version":1,"rules":[{rule}]}}"#)).unwrap();
        let (_keep, reader) = packed(&dir.path().join("hf"), &["--q4-map", rules.to_str().unwrap()]);
        let ids = ids(261);
        let options =
            EngineOptions { precision: Some(precision), kv: Some(KvType::F32), threads: 2, ..Default::default() };
        let (mut engine, own) = (Engine::open(&reader, &options).unwrap(), unpacked(&reader));
        let adapter = random_adapter(engine.config(), &mut Rng::new(seed as u64));
        for adapters in [vec![], vec![(adapter, 1.0)]] {
            let set =
                adapters.iter().map(|(adapter, factor)| (engine.adapter_binder().bind(adapter).unwrap(), *factor));
            let set = AdapterSet::new(set).unwrap();
            engine.set_adapters(set);
            let reference = Reference::open(own.path(), RefDtype::F64).unwrap().with_adapters(adapters);
            let expected = logits_of(&reference, &config, &ids);
            let (apart, largest) = difference_of(&mut engine, &expected, &ids);
            // Rounding may swap experts with nearly equal scores.
            let experts = changes.get("moe_intermediate_size").is_some();
            if apart.is_nan() || apart > if experts { 0.1 } else { sensitivity(name) * QUANTIZED_LIMIT } * largest {
                failures.push(format!("{seed} {name}, {fields}: {apart:e} apart, largest logit {largest}"));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
