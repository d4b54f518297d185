//! Compares the runtime with the independent reference of `verify` on shapes that no fixture has: head size 80,
//! widths that are no multiple of 32, vocabularies that are no multiple of 64, every bias, every rope scaling,
//! windows shorter than the prompt.

use crate::common::iec;
use crate::cuda::on_gpu;
use crate::random_checkpoint::Checkpoint;
use iec::convert::adapter::Combination;
use iec::convert::unpack::{UnpackOptions, unpack};
use iec::dtype::DType;
use iec::generate::speculate::Speculator;
use iec::generate::{Options, Request, generate};
use iec::iebin::IebinReader;
use iec::job::RunOptions;
use iec::rng::Rng;
use iec::runtime::kv::KvType;
use iec::runtime::precision::Precision;
use iec::runtime::{Engine, EngineOptions, Feed, Want};
use iec::verify::{RefDtype, Reference, ScoredText};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use std::path::Path;

/// Returns a Llama config with these overrides.
pub fn llama(overrides: Value) -> Value {
    let base = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 24, "vocab_size": 131, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false,
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32"
    });
    merged(base, overrides)
}

/// Returns a gpt-oss config with these overrides.
fn gpt_oss(overrides: Value) -> Value {
    let base = json!({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_act": "silu",
        "hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 20, "vocab_size": 97, "max_position_embeddings": 512,
        "num_local_experts": 5, "num_experts_per_tok": 3, "experts_per_token": 3, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"], "attention_bias": true, "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "tie_word_embeddings": false,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 64, "truncate": false},
        "eos_token_id": 2, "torch_dtype": "bfloat16"
    });
    merged(base, overrides)
}

/// Returns a config of another family: the Llama config with this class, model type and these overrides.
pub fn family(class: &str, model_type: &str, overrides: Value) -> Value {
    merged(llama(json!({"architectures": [class], "model_type": model_type})), overrides)
}

pub fn merged(mut base: Value, overrides: Value) -> Value {
    let Value::Object(overrides) = overrides else { panic!("an object") };
    base.as_object_mut().unwrap().extend(overrides);
    base
}

/// Lists cases for the features that families other than Llama and gpt-oss add, each at least once: Q/K norms per
/// head, sliding windows in some layers, logit caps, post-norms, GeGLU, a second rotary base, LongRoPE below and
/// above its original context length, and routers.
fn families() -> Vec<Case> {
    let case = |name, config| Case { name, config, dtype: Dtype::F32 };
    let qwen = json!({"use_sliding_window": true, "sliding_window": 9, "max_window_layers": 1});
    let moe = |more| merged(json!({"num_local_experts": 7, "num_experts_per_tok": 3}), more);
    let longrope = |original: usize, head_dim: usize| {
        let factors = |from: f64| (0..head_dim / 2).map(|i| from + 0.3 * i as f64).collect::<Vec<f64>>();
        json!({"head_dim": head_dim, "original_max_position_embeddings": original, "num_key_value_heads": 1,
            "rope_scaling": {"type": "longrope", "short_factor": factors(1.0), "long_factor": factors(2.5)}})
    };
    vec![
        case(
            "qwen2, upper layers slide, head size 10",
            family("Qwen2ForCausalLM", "qwen2", merged(qwen.clone(), json!({"head_dim": 10}))),
        ),
        case(
            "qwen3, head size 80, every bias, yarn",
            family(
                "Qwen3ForCausalLM",
                "qwen3",
                merged(
                    qwen.clone(),
                    json!({"head_dim": 80, "attention_bias": true, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                "original_max_position_embeddings": 64}}),
                ),
            ),
        ),
        case(
            "qwen3moe, softmax over all, windows everywhere",
            family(
                "Qwen3MoeForCausalLM",
                "qwen3_moe",
                merged(qwen, moe(json!({"moe_intermediate_size": 41, "norm_topk_prob": false}))),
            ),
        ),
        case(
            "qwen3moe, normed choice",
            family(
                "Qwen3MoeForCausalLM",
                "qwen3_moe",
                moe(json!({"moe_intermediate_size": 33, "norm_topk_prob": true})),
            ),
        ),
        case(
            "qwen3moe, dense layers by list and by step",
            family(
                "Qwen3MoeForCausalLM",
                "qwen3_moe",
                moe(json!({"moe_intermediate_size": 33, "num_hidden_layers": 4, "mlp_only_layers": [0],
                    "decoder_sparse_step": 2})),
            ),
        ),
        case("mistral, window 5", family("MistralForCausalLM", "mistral", json!({"sliding_window": 5}))),
        case(
            "mixtral, odd width, window 6",
            family("MixtralForCausalLM", "mixtral", moe(json!({"intermediate_size": 37, "sliding_window": 6}))),
        ),
        case(
            "gemma2, small caps, head size 80, tied",
            family(
                "Gemma2ForCausalLM",
                "gemma2",
                json!({
            "hidden_act": null, "hidden_size": 66, "head_dim": 80, "query_pre_attn_scalar": 33, "sliding_window": 7,
            "attn_logit_softcapping": 3.5, "final_logit_softcapping": 4.0, "tie_word_embeddings": true}),
            ),
        ),
        case(
            "gemma2, no caps, every bias",
            family(
                "Gemma2ForCausalLM",
                "gemma2",
                json!({
            "hidden_act": null, "head_dim": 22, "query_pre_attn_scalar": 22, "sliding_window": 30, "attention_bias": true,
            "attn_logit_softcapping": null, "final_logit_softcapping": null}),
            ),
        ),
        case(
            "gemma3, every second layer sees all, global rope stretched",
            family(
                "Gemma3ForCausalLM",
                "gemma3_text",
                json!({"hidden_act": null, "head_dim": 20, "query_pre_attn_scalar": 50, "sliding_window": 11,
                "sliding_window_pattern": 2, "rope_local_base_freq": 77.0, "final_logit_softcapping": 9.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
            ),
        ),
        case(
            "phi3, three quarters of a head rotated",
            family(
                "Phi3ForCausalLM",
                "phi3",
                merged(longrope(40, 24), json!({"head_dim": 32, "partial_rotary_factor": 0.75})),
            ),
        ),
        case("phi3, short longrope, head size 80", family("Phi3ForCausalLM", "phi3", longrope(75, 80))),
        case(
            "phi3, long longrope, window 31",
            family("Phi3ForCausalLM", "phi3", merged(longrope(74, 34), json!({"sliding_window": 31}))),
        ),
    ]
}

struct Case {
    name: &'static str,
    config: Value,
    dtype: Dtype,
}

fn cases() -> Vec<Case> {
    let case = |name, config, dtype| Case { name, config, dtype };
    let mut cases = vec![
        case(
            "head size 80, linear rope, every bias",
            llama(json!({"hidden_size": 160, "num_attention_heads": 2, "head_dim": 80, "attention_bias": true,
                "mlp_bias": true, "rope_scaling": {"type": "linear", "factor": 4.0}})),
            Dtype::F32,
        ),
        case(
            "head size 10, llama3 rope, tied, bf16",
            llama(json!({"head_dim": 10, "num_key_value_heads": 3, "tie_word_embeddings": true,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 32}})),
            Dtype::BF16,
        ),
        case(
            "hidden 33, one head",
            llama(json!({"hidden_size": 33, "num_attention_heads": 1, "head_dim": 34})),
            Dtype::F32,
        ),
        case("bf16 experts of odd width", gpt_oss(json!({"intermediate_size": 41})), Dtype::BF16),
        case(
            "MXFP4 experts, truncated YaRN",
            gpt_oss(json!({"intermediate_size": 32, "quantization_config": {"quant_method": "mxfp4"},
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                    "original_max_position_embeddings": 64, "truncate": true}})),
            Dtype::BF16,
        ),
    ];
    cases.extend(families());
    cases
}

/// Packs a checkpoint with the real binary and opens the result.
pub fn packed(checkpoint: &Path, extra: &[&str]) -> (tempfile::TempDir, IebinReader) {
    let out = tempfile::tempdir().unwrap();
    let dir = out.path().join("pack");
    let mut command = iec();
    command.args(["pack", "--hf-dir"]).arg(checkpoint).arg("--out-dir").arg(&dir).args(extra).assert().success();
    let reader = IebinReader::open(&dir).unwrap();
    (out, reader)
}

/// Computes the logits of a text with the reference from a checkpoint. With LongRoPE the result starts at the
/// original context length, because the reference rotates shorter prefixes with the short factors.
pub fn reference_logits(checkpoint: &Path, config: &Value, ids: &[u32]) -> Vec<f32> {
    logits_of(&Reference::open(checkpoint, RefDtype::F64).unwrap(), config, ids)
}

/// Returns the logits of a reference, see [`reference_logits`].
pub fn logits_of(reference: &Reference, config: &Value, ids: &[u32]) -> Vec<f32> {
    let border = config["original_max_position_embeddings"].as_u64().map_or(0, |border| border as usize);
    let text = ScoredText { ids: ids.to_vec(), from: if border < ids.len() { border } else { 0 } };
    let mut all = Vec::new();
    let take = |_, logits: &[f32]| {
        all.extend_from_slice(logits);
        Ok(())
    };
    reference.logits(&[text], || Ok(()), take).unwrap();
    all
}

/// Returns the largest difference between the engine's logits of the last positions and the expected ones, and the
/// largest expected logit.
pub fn difference(reader: &IebinReader, options: &EngineOptions, expected: &[f32], ids: &[u32]) -> (f32, f32) {
    difference_of(&mut Engine::open(reader, options).unwrap(), expected, ids)
}

/// Returns the difference of an engine that is open, see [`difference`].
pub fn difference_of(engine: &mut Engine, expected: &[f32], ids: &[u32]) -> (f32, f32) {
    let mut sequence = engine.new_sequence().unwrap();
    let mut logits = Vec::new();
    engine.forward(&mut [Feed { sequence: &mut sequence, tokens: ids, want: Want::All }], &mut logits).unwrap();
    let logits = &logits[logits.len() - expected.len()..];
    let apart = logits.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    (apart, expected.iter().fold(0.0, |m, v| v.abs().max(m)))
}

/// Returns 75 random token ids below `vocab`: enough to exceed every sliding window and to cross block borders of the
/// KV cache.
pub fn ids(vocab: u64) -> Vec<u32> {
    let mut rng = Rng::new(7);
    (0..75).map(|_| (rng.next_u64() % vocab) as u32).collect()
}

#[test]
fn fp32_agrees_with_the_reference_on_every_odd_shape() {
    let mut failures = Vec::new();
    for (seed, case) in cases().into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let vocab = case.config["vocab_size"].as_u64().unwrap();
        Checkpoint::new(case.config.clone(), case.dtype, seed as u64).fill().write(dir.path());
        let ids = ids(vocab);
        let expected = reference_logits(dir.path(), &case.config, &ids);
        let (_keep, reader) = packed(dir.path(), &[]);
        let options = EngineOptions { precision: Some(Precision::Fp32), prefill_chunk: 11, ..Default::default() };
        for (place, options) in [("CPU", options), ("GPU", on_gpu(options))] {
            let (apart, largest) = difference(&reader, &options, &expected, &ids);
            // Expected rounding errors of f32 sums of a few hundred terms, twice per layer, are well below 1e-5 of
            // the largest logit.
            if apart > 2e-5 * largest {
                failures.push(format!("{}, {place}: {apart:e} apart, largest logit {largest}", case.name));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// Writes a checkpoint with the dequantized weights of the pack, so that only the arithmetic of the runtime can cause
/// differences.
pub fn unpacked(reader: &IebinReader) -> tempfile::TempDir {
    let out = tempfile::tempdir().unwrap();
    let options = UnpackOptions {
        model_dir: reader.dir.clone(),
        out_dir: out.path().to_path_buf(),
        adapters: Vec::new(),
        combination: Combination::Cat,
        dtype: Some(DType::F32),
        max_shard_bytes: 1 << 40,
        overwrite: true,
        run: RunOptions::default(),
    };
    assert!(unpack(reader, &options).unwrap().dequantized.len() >= 8);
    out
}

/// Limit of the difference of logits from the reference, relative to the largest logit, for quantized weights:
/// activations are rounded to 2^-16 of the largest value of their group. Observed: 7e-4.
pub const QUANTIZED_LIMIT: f32 = 2e-3;

#[test]
fn quantized_packs_agree_with_the_reference_on_their_own_weights() {
    let schemes = [
        (r#""scheme":"q4_0""#, Precision::Int4w),
        (r#""scheme":"int4","group_size":64"#, Precision::Int4w),
        (r#""scheme":"int4","group_size":32,"symmetric":false"#, Precision::Int4w),
        (r#""scheme":"int4","group_size":"row""#, Precision::Int4w),
        (r#""scheme":"nl4""#, Precision::Int4w),
        (r#""scheme":"int5","group_size":64"#, Precision::Int8w),
        (r#""scheme":"int6""#, Precision::Int8w),
        (r#""scheme":"int8","group_size":"tensor""#, Precision::Int8w),
        (r#""scheme":"int8","group_size":128"#, Precision::Int8w),
    ];
    let mut failures = Vec::new();
    for (seed, case) in cases().into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let vocab = case.config["vocab_size"].as_u64().unwrap();
        Checkpoint::new(case.config.clone(), case.dtype, seed as u64).fill().write(dir.path());
        for (i, (fields, precision)) in schemes.into_iter().enumerate() {
            let rules = dir.path().join("rules.json");
            let text =
                format!(r#"{{"version":1,"rules":[{{"include":"(proj|embed_tokens|lm_head)(.weight)?$",{fields}}}]}}"#);
            std::fs::write(&rules, text).unwrap();
            let (_keep, reader) = packed(dir.path(), &["--q4-map", rules.to_str().unwrap()]);
            let ids = ids(vocab);
            let expected = reference_logits(unpacked(&reader).path(), &case.config, &ids);
            let options =
                EngineOptions { precision: Some(precision), kv: Some(KvType::F32), threads: 2, ..Default::default() };
            let mut places = vec![("CPU", options)];
            // The simulated GPU is slow, so each scheme runs there on every third shape only.
            places.extend((i % 3 == seed % 3).then(|| ("GPU", on_gpu(options))));
            // A router selects experts discontinuously: rounding may swap experts with nearly equal scores.
            let experts = ["num_experts", "num_local_experts"].iter().any(|field| case.config.get(field).is_some());
            for (place, options) in places {
                let (apart, largest) = difference(&reader, &options, &expected, &ids);
                if apart > if experts { 0.1 } else { QUANTIZED_LIMIT } * largest {
                    failures
                        .push(format!("{}, {fields}, {place}: {apart:e} apart, largest logit {largest}", case.name));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// Packs a LongRoPE model that switches to its long factors beyond 20 tokens.
fn border_at_20() -> (tempfile::TempDir, IebinReader) {
    let factors = |from: f64| (0..12).map(|i| from + 0.3 * f64::from(i)).collect::<Vec<f64>>();
    let overrides = json!({"original_max_position_embeddings": 20, "sliding_window": 16,
        "rope_scaling": {"type": "longrope", "short_factor": factors(1.0), "long_factor": factors(2.5)}});
    let dir = tempfile::tempdir().unwrap();
    Checkpoint::new(family("Phi3ForCausalLM", "phi3", overrides), Dtype::F32, 5).fill().write(dir.path());
    packed(dir.path(), &[])
}

#[test]
fn a_text_that_crosses_the_border_of_longrope_continues_as_if_read_at_once() {
    let (_keep, reader) = border_at_20();
    let mut engine = Engine::open(&reader, &EngineOptions { prefill_chunk: 8, ..Default::default() }).unwrap();
    let (text, mut logits) = (ids(131), Vec::new());
    let mut at_once = |engine: &mut Engine, len: usize| {
        let mut sequence = engine.new_sequence().unwrap();
        let mut feed = [Feed { sequence: &mut sequence, tokens: &text[..len], want: Want::Last }];
        engine.forward(&mut feed, &mut logits).unwrap();
        logits.iter().map(|v| v.to_bits()).collect::<Vec<u32>>()
    };
    let expected: Vec<_> = (1..=24).map(|len| at_once(&mut engine, len)).collect();
    let (mut walker, mut other, mut logits) =
        (engine.new_sequence().unwrap(), engine.new_sequence().unwrap(), Vec::new());
    for len in (1..=24).chain([18, 19, 20, 21]) {
        // `walker` also goes back over the border and must then rotate as before; `other`, in the same batch, stays
        // below the border.
        walker.truncate(len - 1);
        other.truncate(0);
        let tokens = &text[len - 1..len];
        let mut feeds = [
            Feed { sequence: &mut walker, tokens, want: Want::Last },
            Feed { sequence: &mut other, tokens: &text[..3], want: Want::Last },
        ];
        engine.forward(&mut feeds, &mut logits).unwrap();
        let rows: Vec<Vec<u32>> = logits.chunks(131).map(|row| row.iter().map(|v| v.to_bits()).collect()).collect();
        assert!(rows[0] == expected[len - 1], "{len} tokens");
        assert!(rows[1] == expected[2], "beside {len} tokens");
    }
    // A feed that is refused leaves the sequence with the factors it had before.
    walker.truncate(15);
    let mut feeds = [
        Feed { sequence: &mut walker, tokens: &text[15..16], want: Want::Last },
        Feed { sequence: &mut other, tokens: &[], want: Want::Last },
    ];
    assert!(engine.forward(&mut feeds, &mut logits).is_err());
    engine.forward(&mut feeds[..1], &mut logits).unwrap();
    assert!(logits.iter().map(|v| v.to_bits()).eq(expected[15].iter().copied()));
}

#[test]
fn guesses_across_the_border_of_longrope_change_nothing() {
    let (_keep, reader) = border_at_20();
    let mut engine = Engine::open(&reader, &EngineOptions::default()).unwrap();
    let mut said = |mut speculator: Speculator| {
        let request = Request { ids: [5, 6, 7].repeat(5), max_new: 16, logprobs: Some(2), ..Request::default() };
        let options = Options { tokenizer: None, batch: 1, eos: &[], ..Options::default() };
        let mut logits = Vec::new();
        generate(&mut engine, None, &mut speculator, vec![request], &options, |event| {
            logits.push(event.likely.unwrap().0.logit.to_bits());
            Ok(())
        })
        .unwrap();
        logits
    };
    let plain = said(Speculator::off());
    assert!(said(Speculator::ngram().always(9)) == plain);
}
