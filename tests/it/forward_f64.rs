//! A forward pass of Llama and Mixtral in f64, written from their definition: the yardstick where rounding matters.

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Matrix or vector of f64, rows one after another.
#[derive(Clone)]
pub struct Tensor {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

impl Tensor {
    pub fn row(&self, i: usize) -> &[f64] {
        let width = self.shape[1..].iter().product();
        &self.values[i * width..][..width]
    }
}

/// Tensors of a checkpoint by name, with an output matrix also where it is tied.
pub type Weights = BTreeMap<String, Tensor>;

/// Reads the weights of a checkpoint in f32 in one file.
pub fn read(dir: &Path) -> Weights {
    let bytes = std::fs::read(dir.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let number = |bytes: &[u8]| f64::from(f32::from_le_bytes(bytes.try_into().unwrap()));
    let one = |(name, view): (String, TensorView<'_>)| {
        let values = view.data().chunks_exact(4).map(number).collect();
        (name, Tensor { shape: view.shape().to_vec(), values })
    };
    let mut weights: Weights = tensors.tensors().into_iter().map(one).collect();
    let embedding = weights["model.embed_tokens.weight"].clone();
    weights.entry("lm_head.weight".into()).or_insert(embedding);
    weights
}

/// A model of Llama or Mixtral in f64.
pub struct Model<'a> {
    pub config: &'a Value,
    pub weights: &'a Weights,
}

impl Model<'_> {
    fn size(&self, field: &str) -> usize {
        self.config[field].as_u64().unwrap() as usize
    }

    /// Multiplies a vector with a matrix and adds its bias, if it has one.
    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = &self.weights[&format!("{name}.weight")];
        let bias = self.weights.get(&format!("{name}.bias"));
        let dot = |r: usize| weight.row(r).iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
        (0..weight.shape[0]).map(|r| dot(r) + bias.map_or(0.0, |bias| bias.values[r])).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let root = (mean + self.config["rms_norm_eps"].as_f64().unwrap()).sqrt();
        x.iter().zip(&self.weights[&format!("{name}.weight")].values).map(|(x, w)| x / root * w).collect()
    }

    /// Rotates the heads of a vector for a position.
    fn rotated(&self, mut x: Vec<f64>, position: usize) -> Vec<f64> {
        let (dim, theta) = (self.size("head_dim"), self.config["rope_theta"].as_f64().unwrap());
        for head in x.chunks_exact_mut(dim) {
            for i in 0..dim / 2 {
                // Frequencies are f32 numbers in every implementation.
                let frequency = f64::from(theta.powf(-2.0 * i as f64 / dim as f64) as f32);
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                let (a, b) = (head[i], head[i + dim / 2]);
                (head[i], head[i + dim / 2]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
        x
    }

    /// Computes attention over all positions.
    fn attend(&self, prefix: &str, inputs: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let dim = self.size("head_dim");
        let (heads, kv_heads) = (self.size("num_attention_heads"), self.size("num_key_value_heads"));
        let project = |name: &str, x: &[f64]| self.linear(&format!("{prefix}.{name}_proj"), x);
        let positions = || inputs.iter().enumerate();
        let queries: Vec<_> = positions().map(|(p, x)| self.rotated(project("q", x), p)).collect();
        let keys: Vec<_> = positions().map(|(p, x)| self.rotated(project("k", x), p)).collect();
        let values: Vec<_> = inputs.iter().map(|x| project("v", x)).collect();
        let mixed = |p: usize| -> Vec<f64> {
            let head = |head: usize| {
                let kv = head / (heads / kv_heads) * dim..head / (heads / kv_heads) * dim + dim;
                let query = &queries[p][head * dim..][..dim];
                let score = |key: &Vec<f64>| query.iter().zip(&key[kv.clone()]).map(|(q, k)| q * k).sum::<f64>();
                let scores: Vec<f64> = keys[..=p].iter().map(|key| score(key) / (dim as f64).sqrt()).collect();
                let shares = softmax(&scores);
                let value = |i: usize| shares.iter().zip(&values).map(|(share, v)| share * v[i]).sum::<f64>();
                kv.map(value).collect::<Vec<f64>>()
            };
            (0..heads).flat_map(head).collect()
        };
        (0..inputs.len()).map(|p| self.linear(&format!("{prefix}.o_proj"), &mixed(p))).collect()
    }

    fn gated(&self, prefix: &str, [gate, up, down]: [&str; 3], x: &[f64]) -> Vec<f64> {
        let of = |name: &str, x: &[f64]| self.linear(&format!("{prefix}.{name}"), x);
        let inner = of(gate, x).into_iter().zip(of(up, x)).map(|(gate, up)| gate / (1.0 + (-gate).exp()) * up);
        of(down, &inner.collect::<Vec<f64>>())
    }

    fn feed_forward(&self, layer: &str, x: &[f64]) -> Vec<f64> {
        let Some(chosen) = self.config["num_experts_per_tok"].as_u64() else {
            return self.gated(&format!("{layer}.mlp"), ["gate_proj", "up_proj", "down_proj"], x);
        };
        let experts = format!("{layer}.block_sparse_moe");
        let shares = softmax(&self.linear(&format!("{experts}.gate"), x));
        let mut order: Vec<usize> = (0..shares.len()).collect();
        order.sort_by(|a, b| shares[*b].total_cmp(&shares[*a]));
        order.truncate(chosen as usize);
        let total: f64 = order.iter().map(|expert| shares[*expert]).sum();
        let mut sum = vec![0.0; x.len()];
        for expert in order {
            let y = self.gated(&format!("{experts}.experts.{expert}"), ["w1", "w3", "w2"], x);
            sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += shares[expert] / total * y);
        }
        sum
    }

    /// Returns the logits after every token.
    pub fn logits(&self, ids: &[u32]) -> Vec<f64> {
        let embedding = &self.weights["model.embed_tokens.weight"];
        let mut states: Vec<Vec<f64>> = ids.iter().map(|id| embedding.row(*id as usize).to_vec()).collect();
        let add = |x: &mut Vec<f64>, y: Vec<f64>| x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
        for layer in 0..self.size("num_hidden_layers") {
            let layer = format!("model.layers.{layer}");
            let normed: Vec<_> = states.iter().map(|x| self.norm(&format!("{layer}.input_layernorm"), x)).collect();
            let attended = self.attend(&format!("{layer}.self_attn"), &normed);
            states.iter_mut().zip(attended).for_each(|(x, y)| add(x, y));
            for x in &mut states {
                let y = self.feed_forward(&layer, &self.norm(&format!("{layer}.post_attention_layernorm"), x));
                add(x, y);
            }
        }
        states.iter().flat_map(|x| self.linear("lm_head", &self.norm("model.norm", x))).collect()
    }
}

pub fn softmax(scores: &[f64]) -> Vec<f64> {
    let largest = scores.iter().fold(f64::MIN, |a, b| a.max(*b));
    let all: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let sum: f64 = all.iter().sum();
    all.into_iter().map(|x| x / sum).collect()
}
