//! A naive forward pass in f64 that shares no code with the runtime: whole sequence, no cache, nested loops, written
//! from the model descriptions alone. First it is held against Hugging Face's golden logits, then the runtime is held
//! against it on shapes that no fixture has.

use crate::common::{FIXTURES, fixture};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::HashMap;
use std::f64::consts::PI;
use std::path::Path;

/// Twice-nested loops are the point here: `rows` of `cols` values.
type Rows = Vec<Vec<f64>>;

/// A checkpoint read whole into f64, with the raw bytes of U8 tensors kept aside.
pub struct Reference {
    config: Value,
    tensors: HashMap<String, Vec<f64>>,
    bytes: HashMap<String, Vec<u8>>,
}

impl Reference {
    /// Reads every safetensors file of a Hugging Face directory.
    pub fn load(dir: &Path) -> Reference {
        let config = serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap();
        let (mut tensors, mut bytes) = (HashMap::new(), HashMap::new());
        for file in std::fs::read_dir(dir).unwrap().map(|f| f.unwrap().path()) {
            if file.extension().is_none_or(|e| e != "safetensors") {
                continue;
            }
            let data = std::fs::read(&file).unwrap();
            for (name, view) in SafeTensors::deserialize(&data).unwrap().iter() {
                let raw = view.data();
                if view.dtype() == Dtype::U8 {
                    bytes.insert(name.to_string(), raw.to_vec());
                    continue;
                }
                let pair = |b: &[u8]| [b[0], b[1]];
                let values = match view.dtype() {
                    Dtype::F32 => {
                        raw.chunks(4).map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect()
                    }
                    Dtype::BF16 => raw.chunks(2).map(|b| bf16::from_le_bytes(pair(b)).to_f64()).collect(),
                    Dtype::F16 => raw.chunks(2).map(|b| f16::from_le_bytes(pair(b)).to_f64()).collect(),
                    other => panic!("{name}: {other:?}"),
                };
                tensors.insert(name.to_string(), values);
            }
        }
        Reference { config, tensors, bytes }
    }

    /// Puts other weights, matrices of `(rows, cols)` one after the other, in the place of a tensor.
    pub fn replace(&mut self, name: &str, values: &[f32], (rows, cols): (usize, usize)) {
        let as_stored = |matrix: &[f32]| -> Vec<f64> {
            // Unquantized experts lie as (in, out) in a checkpoint.
            let transposed = name.contains(".experts.");
            let at = |i: usize| if transposed { matrix[i % rows * cols + i / rows] } else { matrix[i] };
            (0..rows * cols).map(|i| f64::from(at(i))).collect()
        };
        self.tensors.insert(name.to_string(), values.chunks_exact(rows * cols).flat_map(as_stored).collect());
    }

    fn int(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap_or_else(|| panic!("config.{key}")) as usize
    }

    fn float(&self, key: &str, default: f64) -> f64 {
        self.config[key].as_f64().unwrap_or(default)
    }

    fn is(&self, model_type: &str) -> bool {
        self.config["model_type"] == model_type
    }

    fn is_gemma(&self) -> bool {
        self.is("gemma2") || self.is("gemma3_text")
    }

    fn get(&self, name: &str) -> &[f64] {
        self.tensors.get(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// `x * W^T + b`, where the bias exists if the checkpoint has it.
    fn linear(&self, prefix: &str, x: &[f64]) -> Vec<f64> {
        let w = self.get(&format!("{prefix}.weight"));
        let mut y: Vec<f64> = w.chunks(x.len()).map(|row| dot(row, x)).collect();
        if let Some(bias) = self.tensors.get(&format!("{prefix}.bias")) {
            y.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
        y
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mean = dot(x, x) / x.len() as f64;
        let scale = 1.0 / (mean + self.float("rms_norm_eps", 1e-5)).sqrt();
        let offset = if self.is_gemma() { 1.0 } else { 0.0 };
        x.iter().zip(self.get(name)).map(|(x, w)| x * scale * (offset + w)).collect()
    }

    fn norms(&self, name: &str, rows: &Rows) -> Rows {
        rows.iter().map(|x| self.norm(name, x)).collect()
    }

    /// What a matrix makes of `x`, or a part of a fused matrix where the checkpoint has none of this name.
    fn projection(&self, prefix: &str, fused: &str, rows: std::ops::Range<usize>, x: &[f64]) -> Vec<f64> {
        if self.tensors.contains_key(&format!("{prefix}.weight")) {
            return self.linear(prefix, x);
        }
        let w = self.get(&format!("{fused}.weight"));
        w[rows.start * x.len()..rows.end * x.len()].chunks(x.len()).map(|row| dot(row, x)).collect()
    }

    /// Logits of every position.
    pub fn logits(&self, ids: &[u32]) -> Rows {
        let hidden = self.int("hidden_size");
        let embedding = self.get("model.embed_tokens.weight");
        let mut stream: Rows = ids.iter().map(|id| embedding[*id as usize * hidden..][..hidden].to_vec()).collect();
        if self.is_gemma() {
            stream.iter_mut().flatten().for_each(|x| *x *= (hidden as f64).sqrt());
        }
        for layer in 0..self.int("num_hidden_layers") {
            let prefix = format!("model.layers.{layer}");
            let norm = |leaf: &str, rows: &Rows| self.norms(&format!("{prefix}.{leaf}_layernorm.weight"), rows);
            let attended = self.attention(layer, &norm("input", &stream));
            let mlp = |rows: Rows| -> Rows { rows.iter().map(|x| self.mlp(&prefix, x)).collect() };
            if self.is_gemma() {
                add(&mut stream, &norm("post_attention", &attended));
                let computed = mlp(norm("pre_feedforward", &stream));
                add(&mut stream, &norm("post_feedforward", &computed));
            } else {
                add(&mut stream, &attended);
                let computed = mlp(norm("post_attention", &stream));
                add(&mut stream, &computed);
            }
        }
        let output = self.tensors.get("lm_head.weight").map_or(embedding, |w| w);
        let last = self.norms("model.norm.weight", &stream);
        let mut logits: Rows = last.iter().map(|x| output.chunks(hidden).map(|row| dot(row, x)).collect()).collect();
        if let Some(cap) = self.config["final_logit_softcapping"].as_f64() {
            logits.iter_mut().flatten().for_each(|x| *x = cap * (*x / cap).tanh());
        }
        logits
    }

    /// How many positions a query of this layer sees.
    fn window(&self, layer: usize) -> usize {
        let slides = match (&self.config["layer_types"][layer], self.config["model_type"].as_str()) {
            (Value::String(word), _) => word == "sliding_attention",
            (_, Some("mistral" | "mixtral" | "phi3")) => self.config["sliding_window"].is_u64(),
            (_, Some("qwen2" | "qwen3")) => {
                self.config["use_sliding_window"] == true && layer >= self.int("max_window_layers")
            }
            (_, Some("qwen3_moe")) => self.config["use_sliding_window"] == true,
            (_, Some("gemma2")) => layer.is_multiple_of(2),
            (_, Some("gemma3_text")) => !(layer + 1).is_multiple_of(self.int("sliding_window_pattern")),
            _ => false,
        };
        if slides { self.int("sliding_window") } else { usize::MAX }
    }

    fn attention(&self, layer: usize, xs: &Rows) -> Rows {
        let prefix = format!("model.layers.{layer}.self_attn");
        let fused = format!("{prefix}.qkv_proj");
        let heads = self.int("num_attention_heads");
        let kv_heads = self.int("num_key_value_heads");
        let dim = self.config["head_dim"].as_u64().map_or(self.int("hidden_size") / heads, |d| d as usize);
        let window = self.window(layer);
        let rotary_dim = (dim as f64 * self.float("partial_rotary_factor", 1.0)) as usize;
        let (inv_freq, factor) = self.rope(rotary_dim, window < usize::MAX, xs.len());
        let (q_rows, kv_rows) = (heads * dim, kv_heads * dim);
        let project = |name: &str, first: usize, n: usize| -> Rows {
            let at = |x| self.projection(&format!("{prefix}.{name}_proj"), &fused, first..first + n, x);
            xs.iter().map(|x| at(x)).collect()
        };
        let rotated = |name: &str, mut rows: Rows| -> Rows {
            let norm = format!("{prefix}.{name}_norm.weight");
            for head in rows.iter_mut().flat_map(|row| row.chunks_mut(dim)).filter(|_| self.tensors.contains_key(&norm))
            {
                let normed = self.norm(&norm, head);
                head.copy_from_slice(&normed);
            }
            rows.into_iter().enumerate().map(|(p, row)| rotate(row, p, dim, &inv_freq, factor)).collect()
        };
        let q = rotated("q", project("q", 0, q_rows));
        let k = rotated("k", project("k", q_rows, kv_rows));
        let v = project("v", q_rows + kv_rows, kv_rows);
        let scale = 1.0 / self.float("query_pre_attn_scalar", dim as f64).sqrt();
        let cap = self.config["attn_logit_softcapping"].as_f64();
        let sinks = self.tensors.get(&format!("{prefix}.sinks"));
        let mut out = Vec::new();
        for (p, queries) in q.iter().enumerate() {
            let first = (p + 1).saturating_sub(window);
            let mut joined = Vec::new();
            for h in 0..heads {
                let kv = h / (heads / kv_heads) * dim;
                let query = &queries[h * dim..][..dim];
                let mut scores: Vec<f64> = (first..=p).map(|t| dot(query, &k[t][kv..][..dim]) * scale).collect();
                if let Some(cap) = cap {
                    scores.iter_mut().for_each(|s| *s = cap * (*s / cap).tanh());
                }
                scores.extend(sinks.map(|s| s[h]));
                softmax(&mut scores);
                joined.extend((0..dim).map(|d| (first..=p).zip(&scores).map(|(t, s)| s * v[t][kv + d]).sum::<f64>()));
            }
            out.push(self.linear(&format!("{prefix}.o_proj"), &joined));
        }
        out
    }

    /// Frequencies and the factor on cos and sin for a text of `len` tokens, in a layer with a window or without.
    fn rope(&self, dim: usize, sliding: bool, len: usize) -> (Vec<f64>, f64) {
        let newer = &self.config["rope_parameters"];
        let by_type = &newer[if sliding { "sliding_attention" } else { "full_attention" }];
        let newer = if by_type.is_object() { by_type } else { newer };
        let local = sliding && self.is("gemma3_text") && !by_type.is_object();
        let old = if local { &Value::Null } else { &self.config["rope_scaling"] };
        let scaling = if newer.is_object() { newer } else { old };
        let old_theta = self.float(if local { "rope_local_base_freq" } else { "rope_theta" }, 10_000.0);
        let theta = newer["rope_theta"].as_f64().unwrap_or(old_theta);
        let plain = |i: usize| theta.powf(-2.0 * i as f64 / dim as f64);
        let number = |key: &str, default: f64| scaling[key].as_f64().unwrap_or(default);
        let kind = scaling["rope_type"].as_str().or(scaling["type"].as_str()).unwrap_or("default");
        let factor = number("factor", 1.0);
        let original = number("original_max_position_embeddings", 0.0);
        let half = 0..dim / 2;
        match kind {
            "default" => (half.map(plain).collect(), 1.0),
            "linear" => (half.map(|i| plain(i) / factor).collect(), 1.0),
            "llama3" => {
                let (low, high) = (number("low_freq_factor", 1.0), number("high_freq_factor", 4.0));
                let stretch = |f: f64| {
                    let turns = original * f / (2.0 * PI);
                    let smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    (1.0 - smooth) * f / factor + smooth * f
                };
                (half.map(|i| stretch(plain(i))).collect(), 1.0)
            }
            "yarn" => {
                let border = |turns: f64| dim as f64 * (original / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
                let (mut low, mut high) = (border(number("beta_fast", 32.0)), border(number("beta_slow", 1.0)));
                if scaling["truncate"].as_bool().unwrap_or(true) {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
                let high = if low == high { high + 0.001 } else { high };
                let blend = |i: usize| {
                    let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    plain(i) / factor * ramp + plain(i) * (1.0 - ramp)
                };
                (half.map(blend).collect(), number("attention_factor", 0.1 * factor.ln() + 1.0))
            }
            "longrope" => {
                let original = self.int("original_max_position_embeddings");
                let stretch = self.float("max_position_embeddings", 0.0) / original as f64;
                let divisors = &scaling[if len > original { "long_factor" } else { "short_factor" }];
                let magnitude = (1.0 + stretch.ln() / (original as f64).ln()).sqrt();
                (half.map(|i| plain(i) / divisors[i].as_f64().unwrap()).collect(), magnitude)
            }
            other => panic!("rope type {other}"),
        }
    }

    fn mlp(&self, prefix: &str, x: &[f64]) -> Vec<f64> {
        if ["gpt_oss", "mixtral", "qwen3_moe"].iter().any(|name| self.is(name)) {
            return self.experts(prefix, x);
        }
        let (inter, fused) = (self.int("intermediate_size"), format!("{prefix}.mlp.gate_up_proj"));
        let gate = self.projection(&format!("{prefix}.mlp.gate_proj"), &fused, 0..inter, x);
        let up = self.projection(&format!("{prefix}.mlp.up_proj"), &fused, inter..2 * inter, x);
        let act = |g: f64| match self.is_gemma() {
            true => 0.5 * g * (1.0 + ((2.0 / PI).sqrt() * (g + 0.044715 * g.powi(3))).tanh()),
            false => g * sigmoid(g),
        };
        let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| act(*g) * u).collect();
        self.linear(&format!("{prefix}.mlp.down_proj"), &inner)
    }

    /// The chosen experts, best first, and their weights.
    fn route(&self, prefix: &str, x: &[f64]) -> Vec<(usize, f64)> {
        let top_k = self.int("num_experts_per_tok");
        let router = match self.config["model_type"].as_str() {
            Some("mixtral") => "block_sparse_moe.gate",
            Some("qwen3_moe") => "mlp.gate",
            _ => "mlp.router",
        };
        let mut router = self.linear(&format!("{prefix}.{router}"), x);
        let mut order: Vec<usize> = (0..router.len()).collect();
        order.sort_by(|a, b| router[*b].total_cmp(&router[*a]).then(a.cmp(b)));
        order.truncate(top_k);
        if self.is("gpt_oss") {
            let mut weights: Vec<f64> = order.iter().map(|e| router[*e]).collect();
            softmax(&mut weights);
            return order.into_iter().zip(weights).collect();
        }
        softmax(&mut router);
        let sum: f64 = order.iter().map(|e| router[*e]).sum();
        let normed = self.is("mixtral") || self.config["norm_topk_prob"] == true;
        order.into_iter().map(|e| (e, if normed { router[e] / sum } else { router[e] })).collect()
    }

    fn experts(&self, prefix: &str, x: &[f64]) -> Vec<f64> {
        let width = if self.is("qwen3_moe") { "moe_intermediate_size" } else { "intermediate_size" };
        let inter = self.int(width);
        let mut out = vec![0.0; x.len()];
        for (expert, weight) in self.route(prefix, x) {
            let together = format!("{prefix}.mlp.experts");
            let result = if self.is("gpt_oss") || self.tensors.contains_key(&format!("{together}.gate_up_proj")) {
                self.expert_of_stack(&together, expert, inter, x)
            } else {
                let [gate, up, down] = match self.is("mixtral") {
                    true => ["w1", "w3", "w2"].map(|w| format!("{prefix}.block_sparse_moe.experts.{expert}.{w}")),
                    false => ["gate", "up", "down"].map(|w| format!("{together}.{expert}.{w}_proj")),
                };
                let (gate, up) = (self.linear(&gate, x), self.linear(&up, x));
                let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g * sigmoid(*g) * u).collect();
                self.linear(&down, &inner)
            };
            out.iter_mut().zip(result).for_each(|(o, r)| *o += weight * r);
        }
        out
    }

    /// An expert with gate and up interleaved in a stack.
    fn expert_of_stack(&self, prefix: &str, expert: usize, inter: usize, x: &[f64]) -> Vec<f64> {
        let limit = self.float("swiglu_limit", 7.0);
        let act = |pair: &[f64]| {
            let (gate, up) = (pair[0].min(limit), pair[1].clamp(-limit, limit));
            match self.is("gpt_oss") {
                true => (up + 1.0) * gate * sigmoid(1.702 * gate),
                false => pair[0] * sigmoid(pair[0]) * pair[1],
            }
        };
        let both = self.expert(&format!("{prefix}.gate_up_proj"), expert, 2 * inter, x);
        let inner: Vec<f64> = both.chunks(2).map(act).collect();
        self.expert(&format!("{prefix}.down_proj"), expert, x.len(), &inner)
    }

    /// One expert's matrix times `x`, plus its bias if there is one.
    fn expert(&self, name: &str, expert: usize, rows: usize, x: &[f64]) -> Vec<f64> {
        let product: Vec<f64> = match self.tensors.get(name) {
            Some(w) => {
                let w = &w[expert * rows * x.len()..][..rows * x.len()];
                (0..rows).map(|r| (0..x.len()).map(|c| w[c * rows + r] * x[c]).sum()).collect()
            }
            None => (0..rows).map(|r| dot(&self.mxfp4_row(name, expert * rows + r, x.len()), x)).collect(),
        };
        match self.tensors.get(&format!("{name}_bias")) {
            Some(bias) => product.iter().zip(&bias[expert * rows..]).map(|(y, b)| y + b).collect(),
            None => product,
        }
    }

    fn mxfp4_row(&self, name: &str, row: usize, cols: usize) -> Vec<f64> {
        const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let blocks = &self.bytes[&format!("{name}_blocks")][row * cols / 2..][..cols / 2];
        let scales = &self.bytes[&format!("{name}_scales")][row * cols / 32..][..cols / 32];
        let value = |c: usize| {
            let nibble = blocks[c / 2] >> (4 * (c % 2)) & 15;
            let sign = if nibble < 8 { 1.0 } else { -1.0 };
            sign * E2M1[(nibble & 7) as usize] * 2f64.powi(i32::from(scales[c / 32]) - 127)
        };
        (0..cols).map(value).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut Rows, from: &Rows) {
    to.iter_mut().flatten().zip(from.iter().flatten()).for_each(|(t, f)| *t += f);
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softmax(x: &mut [f64]) {
    let max = x.iter().fold(f64::NEG_INFINITY, |m, v| m.max(*v));
    x.iter_mut().for_each(|v| *v = (*v - max).exp());
    let sum: f64 = x.iter().sum();
    x.iter_mut().for_each(|v| *v /= sum);
}

fn rotate(mut row: Vec<f64>, position: usize, dim: usize, inv_freq: &[f64], factor: f64) -> Vec<f64> {
    for head in row.chunks_mut(dim) {
        let (low, high) = head[..2 * inv_freq.len()].split_at_mut(inv_freq.len());
        for ((a, b), f) in low.iter_mut().zip(high).zip(inv_freq) {
            let (sin, cos) = (position as f64 * f).sin_cos();
            (*a, *b) = (factor * (*a * cos - *b * sin), factor * (*b * cos + *a * sin));
        }
    }
    row
}

/// The ids of a golden prompt and the golden logits of its last position.
fn golden_last_logits(dir: &Path, prompt: usize) -> (Vec<u32>, Vec<f64>) {
    let golden: Value = serde_json::from_slice(&std::fs::read(dir.join("golden.json")).unwrap()).unwrap();
    let prompt = &golden["prompts"][prompt];
    let ids = prompt["ids"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect();
    let full = prompt["prompt_last_logits"]["full"].as_array().expect("small vocabularies have full logits");
    (ids, full.iter().map(|v| v.as_f64().unwrap()).collect())
}

#[test]
fn the_reference_agrees_with_hugging_face() {
    // The reader of this reference knows safetensors only; the other trained fixture is slow in nested loops.
    for name in FIXTURES.into_iter().filter(|name| !["mistral-swa", "gptoss-trained"].contains(name)) {
        let dir = fixture(name);
        let reference = Reference::load(&dir);
        for prompt in 0..2 {
            let (ids, golden) = golden_last_logits(&dir, prompt);
            let logits = reference.logits(&ids).pop().unwrap();
            assert_eq!(golden.len(), logits.len());
            for (token, (got, expected)) in logits.iter().zip(golden).enumerate() {
                assert!(
                    (got - expected).abs() < 2e-4,
                    "{name} prompt {prompt} token {token}: {got} against {expected}"
                );
            }
        }
    }
}
