//! Generates random checkpoints of any family in the Hugging Face layout, with shapes that no fixture has.

use half::bf16;
use iec::rng::Rng;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Builder of a random checkpoint in the Hugging Face layout.
pub struct Checkpoint {
    config: Value,
    rng: Rng,
    dtype: Dtype,
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Checkpoint {
    /// Creates a checkpoint without tensors.
    pub fn new(config: Value, dtype: Dtype, seed: u64) -> Checkpoint {
        Checkpoint { config, rng: Rng::new(seed), dtype, tensors: BTreeMap::new() }
    }

    fn int(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    /// Adds a tensor of normally distributed values with this mean and standard deviation.
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

    fn flag(&self, key: &str) -> bool {
        self.config[key] == true
    }

    fn is(&self, model_types: &[&str]) -> bool {
        model_types.iter().any(|name| self.config["model_type"] == *name)
    }

    fn norm(&mut self, name: &str, width: usize) {
        let mean = if self.is(&["gemma2", "gemma3_text"]) { 0.0 } else { 1.0 };
        self.add(&format!("{name}.weight"), &[width], mean, 0.2);
    }

    /// Adds every tensor that a model of this configuration has.
    pub fn fill(mut self) -> Checkpoint {
        let (hidden, vocab) = (self.int("hidden_size"), self.int("vocab_size"));
        self.add("model.embed_tokens.weight", &[vocab, hidden], 0.0, 1.0);
        for layer in 0..self.int("num_hidden_layers") {
            let prefix = format!("model.layers.{layer}");
            self.norm(&format!("{prefix}.input_layernorm"), hidden);
            self.norm(&format!("{prefix}.post_attention_layernorm"), hidden);
            if self.is(&["gemma2", "gemma3_text"]) {
                self.norm(&format!("{prefix}.pre_feedforward_layernorm"), hidden);
                self.norm(&format!("{prefix}.post_feedforward_layernorm"), hidden);
            }
            self.attention(&format!("{prefix}.self_attn"), hidden);
            if self.is(&["gpt_oss"]) {
                self.stacked_experts(&format!("{prefix}.mlp"), hidden);
            } else if self.is(&["mixtral", "qwen3_moe"]) && !self.is_dense(layer) {
                self.separate_experts(&prefix, hidden);
            } else {
                self.dense(&format!("{prefix}.mlp"), hidden);
            }
        }
        self.norm("model.norm", hidden);
        if !self.flag("tie_word_embeddings") {
            self.linear("lm_head", vocab, hidden, false);
        }
        self
    }

    /// Returns true for a layer without experts in a mixture-of-experts model.
    fn is_dense(&self, layer: usize) -> bool {
        let listed = self.config["mlp_only_layers"].as_array().is_some_and(|list| list.contains(&layer.into()));
        let step = self.config["decoder_sparse_step"].as_u64().unwrap_or(1);
        listed || !(layer as u64 + 1).is_multiple_of(step)
    }

    fn attention(&mut self, prefix: &str, hidden: usize) {
        let dim = self.int("head_dim");
        let (q, kv) = (self.int("num_attention_heads") * dim, self.int("num_key_value_heads") * dim);
        let bias = self.flag("attention_bias");
        if self.is(&["phi3"]) {
            self.linear(&format!("{prefix}.qkv_proj"), q + 2 * kv, hidden, false);
        } else {
            for (name, rows) in [("q", q), ("k", kv), ("v", kv)] {
                let bias = bias || self.is(&["qwen2"]);
                self.linear(&format!("{prefix}.{name}_proj"), rows, hidden, bias);
            }
        }
        self.linear(&format!("{prefix}.o_proj"), hidden, q, bias);
        if self.is(&["qwen3", "qwen3_moe", "gemma3_text"]) {
            self.norm(&format!("{prefix}.q_norm"), dim);
            self.norm(&format!("{prefix}.k_norm"), dim);
        }
        if self.is(&["gpt_oss"]) {
            self.add(&format!("{prefix}.sinks"), &[q / dim], 0.0, 1.0);
        }
    }

    fn dense(&mut self, prefix: &str, hidden: usize) {
        let (inter, bias) = (self.int("intermediate_size"), self.flag("mlp_bias"));
        if self.is(&["phi3"]) {
            self.linear(&format!("{prefix}.gate_up_proj"), 2 * inter, hidden, false);
        } else {
            self.linear(&format!("{prefix}.gate_proj"), inter, hidden, bias);
            self.linear(&format!("{prefix}.up_proj"), inter, hidden, bias);
        }
        self.linear(&format!("{prefix}.down_proj"), hidden, inter, bias);
    }

    fn separate_experts(&mut self, layer: &str, hidden: usize) {
        let (prefix, inter, names) = match self.is(&["mixtral"]) {
            true => (format!("{layer}.block_sparse_moe"), self.int("intermediate_size"), ["w1", "w3", "w2"]),
            false => (format!("{layer}.mlp"), self.int("moe_intermediate_size"), ["gate_proj", "up_proj", "down_proj"]),
        };
        let experts = self.int("num_local_experts");
        self.linear(&format!("{prefix}.gate"), experts, hidden, false);
        for expert in 0..experts {
            for (name, (out, input)) in names.into_iter().zip([(inter, hidden), (inter, hidden), (hidden, inter)]) {
                self.linear(&format!("{prefix}.experts.{expert}.{name}"), out, input, false);
            }
        }
    }

    fn stacked_experts(&mut self, prefix: &str, hidden: usize) {
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

    /// Writes `config.json` and `model.safetensors`.
    pub fn write(&self, dir: &Path) {
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        let views = self.tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
    }
}
