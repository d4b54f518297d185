//! The runtime against the f64 reference on shapes that no fixture has: head size 80, widths that are no multiple of 32,
//! vocabularies that are no multiple of 64, every bias, every rope scaling, windows shorter than the prompt.

use crate::common::iec;
use crate::reference::Reference;
use half::bf16;
use iec::iebin::IebinReader;
use iec::quant::block::tile::dequantize_rows;
use iec::rng::Rng;
use iec::runtime::engine::{Engine, EngineOptions, Feed, Want};
use iec::runtime::kv::KvType;
use iec::runtime::precision::Precision;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// A random checkpoint in the Hugging Face layout, in the making.
struct Checkpoint {
    config: Value,
    rng: Rng,
    dtype: Dtype,
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Checkpoint {
    fn new(config: Value, dtype: Dtype, seed: u64) -> Checkpoint {
        Checkpoint { config, rng: Rng::new(seed), dtype, tensors: BTreeMap::new() }
    }

    fn int(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    /// Normal values around `mean` with this spread.
    fn add(&mut self, name: &str, shape: &[usize], mean: f64, spread: f64) {
        let mut bytes = Vec::new();
        for _ in 0..shape.iter().product() {
            let value = (mean + spread * self.rng.next_normal()) as f32;
            match self.dtype {
                Dtype::F32 => bytes.extend(value.to_le_bytes()),
                _ => bytes.extend(bf16::from_f32(value).to_le_bytes()),
            }
        }
        self.tensors.insert(name.to_string(), (self.dtype, shape.to_vec(), bytes));
    }

    fn linear(&mut self, prefix: &str, out: usize, input: usize, bias: bool) {
        self.add(&format!("{prefix}.weight"), &[out, input], 0.0, 2.0 / (input as f64).sqrt());
        if bias {
            self.add(&format!("{prefix}.bias"), &[out], 0.0, 0.5);
        }
    }

    fn fill(mut self) -> Checkpoint {
        let (hidden, vocab) = (self.int("hidden_size"), self.int("vocab_size"));
        let (heads, kv_heads, dim) =
            (self.int("num_attention_heads"), self.int("num_key_value_heads"), self.int("head_dim"));
        let attention_bias = self.config["attention_bias"] == true;
        let gpt_oss = self.config["model_type"] == "gpt_oss";
        self.add("model.embed_tokens.weight", &[vocab, hidden], 0.0, 1.0);
        for layer in 0..self.int("num_hidden_layers") {
            let prefix = format!("model.layers.{layer}");
            let attention = format!("{prefix}.self_attn");
            self.add(&format!("{prefix}.input_layernorm.weight"), &[hidden], 1.0, 0.2);
            self.add(&format!("{prefix}.post_attention_layernorm.weight"), &[hidden], 1.0, 0.2);
            self.linear(&format!("{attention}.q_proj"), heads * dim, hidden, attention_bias);
            self.linear(&format!("{attention}.k_proj"), kv_heads * dim, hidden, attention_bias);
            self.linear(&format!("{attention}.v_proj"), kv_heads * dim, hidden, attention_bias);
            self.linear(&format!("{attention}.o_proj"), hidden, heads * dim, attention_bias);
            if gpt_oss {
                self.add(&format!("{attention}.sinks"), &[heads], 0.0, 1.0);
                self.experts(&format!("{prefix}.mlp"), hidden);
            } else {
                let (inter, bias) = (self.int("intermediate_size"), self.config["mlp_bias"] == true);
                self.linear(&format!("{prefix}.mlp.gate_proj"), inter, hidden, bias);
                self.linear(&format!("{prefix}.mlp.up_proj"), inter, hidden, bias);
                self.linear(&format!("{prefix}.mlp.down_proj"), hidden, inter, bias);
            }
        }
        self.add("model.norm.weight", &[hidden], 1.0, 0.2);
        if self.config["tie_word_embeddings"] != true {
            self.linear("lm_head", vocab, hidden, false);
        }
        self
    }

    fn experts(&mut self, prefix: &str, hidden: usize) {
        let (experts, inter) = (self.int("num_local_experts"), self.int("intermediate_size"));
        self.linear(&format!("{prefix}.router"), experts, hidden, true);
        for (name, out, input) in [("gate_up_proj", 2 * inter, hidden), ("down_proj", hidden, inter)] {
            let name = format!("{prefix}.experts.{name}");
            self.add(&format!("{name}_bias"), &[experts, out], 0.0, 0.5);
            if self.config["quantization_config"].is_object() {
                let mut random = |n: usize, low: u64, span: u64| -> Vec<u8> {
                    (0..n).map(|_| (low + self.rng.next_u64() % span) as u8).collect()
                };
                let blocks = random(experts * out * input / 2, 0, 256);
                let scales = random(experts * out * input / 32, 121, 4);
                let blocks = (Dtype::U8, vec![experts, out, input / 32, 16], blocks);
                self.tensors.insert(format!("{name}_blocks"), blocks);
                self.tensors.insert(format!("{name}_scales"), (Dtype::U8, vec![experts, out, input / 32], scales));
            } else {
                self.add(&name, &[experts, input, out], 0.0, 1.5 / (input as f64).sqrt());
            }
        }
    }

    fn write(&self, dir: &Path) {
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        let views = self.tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
    }
}

/// A Llama config with these overrides.
fn llama(overrides: Value) -> Value {
    let base = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": 72, "intermediate_size": 100, "num_hidden_layers": 2, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 24, "vocab_size": 131, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false,
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32"
    });
    merged(base, overrides)
}

/// A gpt-oss config with these overrides.
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

fn merged(mut base: Value, overrides: Value) -> Value {
    let Value::Object(overrides) = overrides else { panic!("an object") };
    base.as_object_mut().unwrap().extend(overrides);
    base
}

struct Case {
    name: &'static str,
    config: Value,
    dtype: Dtype,
}

fn cases() -> Vec<Case> {
    let case = |name, config, dtype| Case { name, config, dtype };
    vec![
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
    ]
}

/// Packs a checkpoint with the real binary and opens the result.
fn packed(checkpoint: &Path, extra: &[&str]) -> (tempfile::TempDir, IebinReader) {
    let out = tempfile::tempdir().unwrap();
    let dir = out.path().join("pack");
    let mut command = iec();
    command.args(["pack", "--hf-dir"]).arg(checkpoint).arg("--out-dir").arg(&dir).args(extra).assert().success();
    let reader = IebinReader::open(&dir).unwrap();
    (out, reader)
}

/// The largest difference between the engine's logits and the reference's, over every position, and the largest logit.
fn difference(reader: &IebinReader, options: &EngineOptions, reference: &Reference, ids: &[u32]) -> (f64, f64) {
    let mut engine = Engine::open(reader, options).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let mut logits = Vec::new();
    engine.forward(&mut [Feed { sequence: &mut sequence, tokens: ids }], Want::All, &mut logits).unwrap();
    let expected: Vec<f64> = reference.logits(ids).concat();
    assert_eq!(logits.len(), expected.len());
    let apart = logits.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
    (apart, expected.iter().fold(0.0, |m, v| v.abs().max(m)))
}

/// Token ids that fit every vocabulary here; long enough to leave every window and cross block borders of the cache.
fn ids(vocab: u64) -> Vec<u32> {
    let mut rng = Rng::new(7);
    (0..75).map(|_| (rng.next_u64() % vocab) as u32).collect()
}

#[test]
fn fp32_agrees_with_the_reference_on_every_odd_shape() {
    let mut failures = Vec::new();
    for (seed, case) in cases().into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let vocab = case.config["vocab_size"].as_u64().unwrap();
        Checkpoint::new(case.config, case.dtype, seed as u64).fill().write(dir.path());
        let reference = Reference::load(dir.path());
        let (_keep, reader) = packed(dir.path(), &[]);
        let options = EngineOptions { precision: Some(Precision::Fp32), prefill_chunk: 11, ..Default::default() };
        let (apart, largest) = difference(&reader, &options, &reference, &ids(vocab));
        // f32 sums of a few hundred terms, twice per layer: well below 1e-5 of the largest logit.
        if apart > 2e-5 * largest {
            failures.push(format!("{}: {apart:e} apart, largest logit {largest}", case.name));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// Replaces the quantized tensors of the reference by what the pack holds, so that only the runtime's arithmetic differs.
fn dequantize_into(reference: &mut Reference, reader: &IebinReader) -> usize {
    let mut replaced = 0;
    for entry in reader.entries() {
        let Some(layout) = entry.layout().transpose().unwrap() else { continue };
        let (count, rows, cols) = entry.matrices().unwrap();
        let payload = reader.payload(entry).unwrap();
        let mut values = vec![0f32; count * rows * cols];
        for (tiles, out) in payload.chunks_exact(layout.nbytes()).zip(values.chunks_exact_mut(rows * cols)) {
            dequantize_rows(&layout, tiles, 0..rows, out);
        }
        reference.replace(&entry.name, &values, (rows, cols));
        replaced += 1;
    }
    replaced
}

#[test]
fn quantized_packs_agree_with_the_reference_on_their_own_weights() {
    let schemes = [
        (r#""scheme":"q4_0""#, Precision::Int4w),
        (r#""scheme":"int4","group_size":64"#, Precision::Int4w),
        (r#""scheme":"int4","group_size":32,"symmetric":false"#, Precision::Int4w),
        (r#""scheme":"int4","group_size":"row""#, Precision::Int4w),
        (r#""scheme":"int8","group_size":"tensor""#, Precision::Int8w),
        (r#""scheme":"int8","group_size":128"#, Precision::Int8w),
    ];
    let mut failures = Vec::new();
    for (seed, case) in cases().into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let vocab = case.config["vocab_size"].as_u64().unwrap();
        Checkpoint::new(case.config, case.dtype, seed as u64).fill().write(dir.path());
        for (fields, precision) in schemes {
            let rules = dir.path().join("rules.json");
            let text =
                format!(r#"{{"version":1,"rules":[{{"include":"(proj|embed_tokens|lm_head)(.weight)?$",{fields}}}]}}"#);
            std::fs::write(&rules, text).unwrap();
            let (_keep, reader) = packed(dir.path(), &["--q4-map", rules.to_str().unwrap()]);
            let mut reference = Reference::load(dir.path());
            assert!(dequantize_into(&mut reference, &reader) >= 8, "{}: {fields}", case.name);
            let options =
                EngineOptions { precision: Some(precision), kv: Some(KvType::F32), threads: 2, ..Default::default() };
            let (apart, largest) = difference(&reader, &options, &reference, &ids(vocab));
            if apart > 2e-5 * largest {
                failures.push(format!("{}, {fields}: {apart:e} apart, largest logit {largest}", case.name));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
