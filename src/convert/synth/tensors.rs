//! Which tensors a checkpoint of a given configuration holds: names, shapes, dtypes and distributions, in model order.

use super::values::Values;
use crate::dtype::DType;
use crate::model_config::{Mlp, ModelConfig};

/// One tensor of the checkpoint to be.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Hugging Face name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape as the checkpoint stores it.
    pub shape: Vec<usize>,
    /// How its numbers are distributed.
    pub values: Values,
}

impl Tensor {
    /// Elements of one row: the unit that is generated at once. MXFP4 keeps `(blocks, 16)` of an output row together.
    pub fn row_elements(&self) -> usize {
        match self.values {
            Values::Mxfp4Codes { .. } => self.shape[self.shape.len() - 2..].iter().product(),
            _ => *self.shape.last().expect("tensors have a shape"),
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.shape.iter().product::<usize>() / self.row_elements()
    }

    /// Size in bytes.
    pub fn nbytes(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64 * self.dtype.size() as u64
    }

    /// What shares row scales: the codes and exponents of one MXFP4 tensor.
    pub fn group(&self) -> &str {
        self.name.strip_suffix("_blocks").or(self.name.strip_suffix("_scales")).unwrap_or(&self.name)
    }

    /// Weights this tensor stands for; exponents stand for none of their own.
    pub fn parameters(&self) -> u64 {
        let elements = self.shape.iter().product::<usize>() as u64;
        match self.values {
            Values::Normal { .. } => elements,
            Values::Mxfp4Codes { .. } => 2 * elements,
            Values::Mxfp4Scales { .. } => 0,
        }
    }
}

/// All tensors of a model with floats in `dtype` and, with `mxfp4`, its experts in 4 bit.
pub fn list(config: &ModelConfig, dtype: DType, mxfp4: bool) -> Vec<Tensor> {
    let mut list = List { tensors: Vec::new(), prefix: "model.".into(), dtype };
    list.matrix("embed_tokens.weight", &[config.vocab], config.hidden);
    for layer in 0..config.n_layers {
        list.prefix = format!("model.layers.{layer}.");
        list.norm("input_layernorm.weight", config.hidden);
        attention(&mut list, config);
        list.norm("post_attention_layernorm.weight", config.hidden);
        mlp(&mut list, config, mxfp4);
    }
    list.prefix = "model.".into();
    list.norm("norm.weight", config.hidden);
    if !config.tied_embeddings {
        list.prefix.clear();
        list.matrix("lm_head.weight", &[config.vocab], config.hidden);
    }
    list.tensors
}

fn attention(list: &mut List, config: &ModelConfig) {
    let (q, kv) = (config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim);
    for (name, out) in [("q", q), ("k", kv), ("v", kv)] {
        list.linear(&format!("self_attn.{name}_proj"), out, config.hidden, config.attention.qkv_bias);
    }
    list.linear("self_attn.o_proj", config.hidden, q, config.attention.o_bias);
    if config.attention.sinks {
        list.push("self_attn.sinks", vec![config.n_heads], Values::Normal { mean: 0.0, std: 1.0 });
    }
}

fn mlp(list: &mut List, config: &ModelConfig, mxfp4: bool) {
    let hidden = config.hidden;
    match config.mlp {
        Mlp::Dense { intermediate, bias, .. } => {
            list.linear("mlp.gate_proj", intermediate, hidden, bias);
            list.linear("mlp.up_proj", intermediate, hidden, bias);
            list.linear("mlp.down_proj", hidden, intermediate, bias);
        }
        Mlp::Moe { experts, intermediate, bias, router_bias, .. } => {
            list.linear("mlp.router", experts, hidden, router_bias);
            for (name, out, columns) in
                [("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)]
            {
                let name = format!("mlp.experts.{name}");
                list.experts(&name, experts, out, columns, mxfp4);
                if bias {
                    list.bias(&format!("{name}_bias"), vec![experts, out]);
                }
            }
        }
    }
}

struct List {
    tensors: Vec<Tensor>,
    prefix: String,
    dtype: DType,
}

impl List {
    fn push(&mut self, name: &str, shape: Vec<usize>, values: Values) {
        let dtype = if matches!(values, Values::Normal { .. }) { self.dtype } else { DType::U8 };
        self.tensors.push(Tensor { name: format!("{}{name}", self.prefix), dtype, shape, values });
    }

    fn norm(&mut self, name: &str, width: usize) {
        self.push(name, vec![width], Values::Normal { mean: 1.0, std: 0.05 });
    }

    fn bias(&mut self, name: &str, shape: Vec<usize>) {
        self.push(name, shape, Values::Normal { mean: 0.0, std: 0.05 });
    }

    /// Weights of deviation 1/sqrt(columns): a product with a normalised vector keeps its size.
    fn matrix(&mut self, name: &str, rows: &[usize], columns: usize) {
        self.push(name, [rows, &[columns]].concat(), Values::Normal { mean: 0.0, std: fan_in(columns) });
    }

    fn linear(&mut self, name: &str, out: usize, columns: usize, bias: bool) {
        self.matrix(&format!("{name}.weight"), &[out], columns);
        if bias {
            self.bias(&format!("{name}.bias"), vec![out]);
        }
    }

    fn experts(&mut self, name: &str, experts: usize, out: usize, columns: usize, mxfp4: bool) {
        let std = fan_in(columns);
        if mxfp4 {
            let blocks = columns / 32;
            self.push(&format!("{name}_blocks"), vec![experts, out, blocks, 16], Values::Mxfp4Codes { std });
            self.push(&format!("{name}_scales"), vec![experts, out, blocks], Values::Mxfp4Scales { std });
        } else {
            // Hugging Face stores float experts as (experts, in, out).
            self.push(name, vec![experts, columns, out], Values::Normal { mean: 0.0, std });
        }
    }
}

fn fan_in(columns: usize) -> f32 {
    1.0 / (columns as f32).sqrt()
}
