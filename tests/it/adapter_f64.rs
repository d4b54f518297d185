//! Compares the engine and the reference of `iec verify` with a plain forward pass in f64 that adds adapters to the
//! weights: ranks 1, 3 and 33, rsLoRA, patterns of ranks and alphas, DoRA, biases, whole matrices and experts.
//!
//! The f64 pass knows neither PEFT's configuration nor its names: each case states the weight that a pair of factors
//! changes and the scale that PEFT gives it.

use crate::common::all_logits;
use crate::forward_f64::{Model, Tensor, Weights, read};
use crate::odd_shapes::{family, llama, packed};
use crate::random_checkpoint::Checkpoint;
use iec::convert::adapter;
use iec::rng::Rng;
use iec::runtime::adapters::AdapterSet;
use iec::runtime::{Engine, EngineOptions, Precision};
use iec::verify::{RefDtype, Reference, ScoredText};
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// Writer of an adapter in PEFT's files; applies the same changes to the weights of the f64 pass.
struct Peft<'a> {
    weights: &'a mut Weights,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    rng: Rng,
    dora: bool,
    factor: f64,
}

impl Peft<'_> {
    /// Adds a tensor of normally distributed numbers to the file and returns them.
    fn random(&mut self, name: &str, shape: &[usize], mean: f64, spread: f64) -> Vec<f64> {
        let count = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|_| (mean + spread * self.rng.next_normal()) as f32).collect();
        let wide = values.iter().map(|value| f64::from(*value)).collect();
        self.tensors.insert(format!("base_model.model.{name}"), (shape.to_vec(), values));
        wide
    }

    /// Changes `module` of the checkpoint, which PEFT calls the same.
    fn linear(&mut self, module: &str, rank: usize, scale: f64) {
        self.renamed(module, module, rank, scale);
    }

    fn renamed(&mut self, name: &str, module: &str, rank: usize, scale: f64) {
        let shape = self.weights[&format!("{module}.weight")].shape.clone();
        let (rows, cols) = (shape[0], shape[1]);
        let a = self.random(&format!("{name}.lora_A.weight"), &[rank, cols], 0.0, 1.0 / (cols as f64).sqrt());
        let b = self.random(&format!("{name}.lora_B.weight"), &[rows, rank], 0.0, 0.6 / scale / (rank as f64).sqrt());
        let magnitude = self.dora.then(|| self.random(&format!("{name}.lora_magnitude_vector"), &[rows], 2.0, 0.3));
        let factor = self.factor * scale;
        let weight = self.weights.get_mut(&format!("{module}.weight")).unwrap();
        for (r, row) in weight.values.chunks_exact_mut(cols).enumerate() {
            for (c, value) in row.iter_mut().enumerate() {
                *value += factor * (0..rank).map(|k| b[r * rank + k] * a[k * cols + c]).sum::<f64>();
            }
            if let Some(magnitude) = &magnitude {
                let norm = row.iter().map(|value| value * value).sum::<f64>().sqrt();
                row.iter_mut().for_each(|value| *value *= magnitude[r] / norm);
            }
        }
    }

    /// Changes the embedding, whose A has a column per token; the magnitudes of DoRA are those of its columns.
    fn embedding(&mut self, rank: usize, scale: f64) {
        let name = "model.embed_tokens";
        let weight = &self.weights[&format!("{name}.weight")];
        let (vocab, hidden) = (weight.shape[0], weight.shape[1]);
        let a = self.random(&format!("{name}.lora_embedding_A"), &[rank, vocab], 0.0, 1.0);
        let b = self.random(&format!("{name}.lora_embedding_B"), &[hidden, rank], 0.0, 0.3 / scale);
        let magnitude = self.dora.then(|| self.random(&format!("{name}.lora_magnitude_vector"), &[hidden], 11.0, 1.0));
        let factor = self.factor * scale;
        let weight = self.weights.get_mut(&format!("{name}.weight")).unwrap();
        for (i, value) in weight.values.iter_mut().enumerate() {
            let (token, h) = (i / hidden, i % hidden);
            *value += factor * (0..rank).map(|k| a[k * vocab + token] * b[h * rank + k]).sum::<f64>();
        }
        for (h, magnitude) in magnitude.iter().flatten().enumerate() {
            let column = || (0..vocab).map(move |token| token * hidden + h);
            let norm = column().map(|i| weight.values[i] * weight.values[i]).sum::<f64>().sqrt();
            column().for_each(|i| weight.values[i] *= magnitude / norm);
        }
    }

    /// Replaces a tensor of the checkpoint, which is called `name` in the adapter.
    fn replace(&mut self, name: &str, tensor: &str, spread: f64) {
        let shape = self.weights[tensor].shape.clone();
        let values = self.random(name, &shape, 0.0, spread);
        self.weights.insert(tensor.into(), Tensor { shape, values });
    }

    /// Adds a bias of B to the bias of a module.
    fn bias_of_b(&mut self, module: &str, scale: f64) {
        let bias = format!("{module}.bias");
        let added = self.random(&format!("{module}.lora_B.bias"), &self.weights[&bias].shape.clone(), 0.0, 0.5);
        let factor = self.factor * scale;
        let values = &mut self.weights.get_mut(&bias).unwrap().values;
        values.iter_mut().zip(added).for_each(|(value, added)| *value += factor * added);
    }

    /// Changes all experts of a layer as one parameter of `module`: A `(experts * rank, in)` and B
    /// `(out, rank * experts)`, whose rows are those of the matrices `names` of each expert, one matrix after another.
    fn experts(&mut self, module: &str, layer: usize, names: &[&str], rank: usize, scale: f64) {
        let tensor =
            |expert: usize, name: &str| format!("model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}.weight");
        let count = (0..).take_while(|expert| self.weights.contains_key(&tensor(*expert, names[0]))).count();
        let (rows, cols) = (self.weights[&tensor(0, names[0])].shape[0], self.weights[&tensor(0, names[0])].shape[1]);
        let out = rows * names.len();
        let spread = 0.6 / scale / (rank as f64).sqrt();
        let a = self.random(&format!("{module}.lora_A.weight"), &[count * rank, cols], 0.0, 1.0 / (cols as f64).sqrt());
        let b = self.random(&format!("{module}.lora_B.weight"), &[out, rank * count], 0.0, spread);
        let factor = self.factor * scale;
        for expert in 0..count {
            for (n, name) in names.iter().enumerate() {
                let weight = self.weights.get_mut(&tensor(expert, name)).unwrap();
                for (i, value) in weight.values.iter_mut().enumerate() {
                    let (r, c) = (n * rows + i / cols, i % cols);
                    let product =
                        |k: usize| b[r * rank * count + k * count + expert] * a[(expert * rank + k) * cols + c];
                    *value += factor * (0..rank).map(product).sum::<f64>();
                }
            }
        }
    }

    fn write(self, dir: &Path, mut config: Value) {
        config["peft_type"] = "LORA".into();
        config["peft_version"] = "0.21.2".into();
        std::fs::write(dir.join("adapter_config.json"), config.to_string()).unwrap();
        let bytes = |values: Vec<f32>| values.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
        let tensors = self.tensors.into_iter().map(|(name, (shape, values))| (name, shape, bytes(values)));
        let tensors: Vec<_> = tensors.collect();
        let views = tensors
            .iter()
            .map(|(name, shape, bytes)| (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
        serialize_to_file(views, None, &dir.join("adapter_model.safetensors")).unwrap();
    }
}

/// Names of the matrices of a layer.
const MATRICES: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// Changes every matrix of both layers.
fn everywhere(peft: &mut Peft<'_>, rank: usize, scale: f64) {
    for layer in 0..2 {
        MATRICES.iter().for_each(|name| peft.linear(&format!("model.layers.{layer}.{name}"), rank, scale));
    }
}

/// Makes the changes of an adapter.
type Make = fn(&mut Peft<'_>);

struct Case {
    name: &'static str,
    model: Value,
    /// Configurations of PEFT, factors, and changes.
    adapters: Vec<(Value, f32, Make)>,
}

fn dense() -> Vec<Case> {
    let case =
        |name, model, config, make: Make| Case { name, model: llama(model), adapters: vec![(config, 1.0, make)] };
    vec![
        case("rank 1", json!({}), json!({"r": 1, "lora_alpha": 3}), |peft| everywhere(peft, 1, 3.0)),
        case("rank 33, rsLoRA", json!({}), json!({"r": 33, "lora_alpha": 5, "use_rslora": true}), |peft| {
            everywhere(peft, 33, 5.0 / 33f64.sqrt());
        }),
        case(
            "ranks and alphas by patterns",
            json!({}),
            json!({"r": 3, "lora_alpha": 6, "rank_pattern": {"v_proj": 1, "layers.1.mlp.down_proj": 33},
                "alpha_pattern": {"v_proj": 4, "layers\\.1\\..*down_proj": 11, "down_proj": 9}}),
            |peft| {
                for layer in ["model.layers.0", "model.layers.1"] {
                    peft.linear(&format!("{layer}.self_attn.q_proj"), 3, 2.0);
                    peft.linear(&format!("{layer}.self_attn.v_proj"), 1, 4.0);
                }
                peft.linear("model.layers.0.mlp.down_proj", 3, 3.0);
                peft.linear("model.layers.1.mlp.down_proj", 33, 11.0 / 33.0);
            },
        ),
        case(
            "DoRA of rank 3, also of embedding and output matrix",
            json!({}),
            json!({"r": 3, "lora_alpha": 6, "use_dora": true}),
            |peft| {
                everywhere(peft, 3, 2.0);
                peft.embedding(3, 2.0);
                peft.linear("lm_head", 3, 2.0);
            },
        ),
        case(
            "DoRA of rank 33, rsLoRA, every bias",
            json!({"attention_bias": true, "mlp_bias": true}),
            json!({"r": 33, "lora_alpha": 4, "use_dora": true, "use_rslora": true}),
            |peft| everywhere(peft, 33, 4.0 / 33f64.sqrt()),
        ),
        case(
            "whole embedding and output matrix",
            json!({}),
            json!({"r": 3, "lora_alpha": 6, "modules_to_save": ["embed_tokens", "lm_head"]}),
            |peft| {
                peft.replace("model.embed_tokens.weight", "model.embed_tokens.weight", 1.0);
                peft.replace("lm_head.weight", "lm_head.weight", 0.25);
                peft.linear("model.layers.1.self_attn.k_proj", 3, 2.0);
            },
        ),
        case(
            "biases of B and of the model",
            json!({"attention_bias": true}),
            json!({"r": 3, "lora_alpha": 6, "lora_bias": true, "bias": "lora_only", "rank_pattern": {"k_proj": 1}}),
            |peft| {
                peft.linear("model.layers.0.self_attn.q_proj", 3, 2.0);
                peft.bias_of_b("model.layers.0.self_attn.q_proj", 2.0);
                peft.linear("model.layers.1.self_attn.k_proj", 1, 6.0);
                let name = "model.layers.1.self_attn.k_proj";
                peft.replace(&format!("{name}.base_layer.bias"), &format!("{name}.bias"), 0.5);
            },
        ),
        case(
            "embedding alone of a tied model, rank 33",
            json!({"tie_word_embeddings": true}),
            json!({"r": 33, "lora_alpha": 33}),
            |peft| peft.embedding(33, 1.0),
        ),
        Case {
            name: "two adapters with factors",
            model: llama(json!({})),
            adapters: vec![
                (json!({"r": 1, "lora_alpha": 2}), 0.5, |peft| everywhere(peft, 1, 2.0)),
                (json!({"r": 33, "lora_alpha": 11}), -1.5, |peft| everywhere(peft, 33, 11.0 / 33.0)),
            ],
        },
    ]
}

fn experts() -> Vec<Case> {
    let mixtral = family(
        "MixtralForCausalLM",
        "mixtral",
        json!({"intermediate_size": 37, "num_local_experts": 5, "num_experts_per_tok": 2}),
    );
    let parameters = json!({"r": 3, "lora_alpha": 6, "rank_pattern": {"mlp.gate.weight": 1},
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]});
    let fused: Make = |peft| {
        for layer in 0..2 {
            let mlp = format!("model.layers.{layer}.mlp");
            peft.experts(&format!("{mlp}.experts.base_layer"), layer, &["w1", "w3"], 3, 2.0);
            peft.experts(&format!("{mlp}.experts"), layer, &["w2"], 3, 2.0);
            peft.renamed(&format!("{mlp}.gate"), &format!("model.layers.{layer}.block_sparse_moe.gate"), 1, 6.0);
        }
    };
    let modules: Make = |peft| {
        for expert in [0, 2, 3] {
            for name in ["w1", "w2", "w3"] {
                peft.linear(&format!("model.layers.1.block_sparse_moe.experts.{expert}.{name}"), 33, 11.0 / 33.0);
            }
        }
    };
    vec![
        Case { name: "fused experts of rank 3", model: mixtral.clone(), adapters: vec![(parameters, 1.0, fused)] },
        Case {
            name: "experts of rank 33 as modules",
            model: mixtral,
            adapters: vec![(json!({"r": 33, "lora_alpha": 11}), 0.5, modules)],
        },
    ]
}

/// Largest difference from the f64 pass, relative to the largest logit: rounding errors of f32 sums of up to 100 terms
/// in two layers. Observed: up to 4e-6, and 1e-5 with experts.
const LIMIT: f64 = 3e-5;

#[test]
fn engine_and_reference_agree_with_f64_on_every_kind_of_adapter() {
    let mut failures = Vec::new();
    for (seed, case) in dense().into_iter().chain(experts()).enumerate() {
        let dir = tempfile::tempdir().unwrap();
        Checkpoint::new(case.model.clone(), Dtype::F32, seed as u64).fill().write(dir.path());
        let ids: Vec<u32> = (0..40).map(|i| (i * i * 7 + 3) % 131).collect();
        let mut weights = read(dir.path());
        let plain = Model { config: &case.model, weights: &weights }.logits(&ids);
        let (_keep, reader) = packed(dir.path(), &[]);
        let options = EngineOptions { precision: Some(Precision::Fp32), prefill_chunk: 11, ..Default::default() };
        let mut engine = Engine::open(&reader, &options).unwrap();
        let (mut bound, mut adapters) = (Vec::new(), Vec::new());
        for (number, (config, factor, make)) in case.adapters.into_iter().enumerate() {
            let place = dir.path().join(format!("adapter{number}"));
            std::fs::create_dir(&place).unwrap();
            let (rng, dora) = (Rng::new(100 + number as u64), config["use_dora"] == true);
            let tensors = BTreeMap::new();
            let mut peft = Peft { weights: &mut weights, tensors, rng, dora, factor: factor.into() };
            make(&mut peft);
            peft.write(&place, config);
            let read = adapter::read(&place, engine.config()).unwrap();
            bound.push((engine.adapter_binder().bind(&read).unwrap(), factor));
            adapters.push((read, factor));
        }
        let expected = Model { config: &case.model, weights: &weights }.logits(&ids);
        let largest = expected.iter().fold(0f64, |largest, x| largest.max(x.abs()));
        let apart = |found: &[f32]| {
            assert_eq!(found.len(), expected.len());
            let all = found.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs());
            all.fold(0.0, f64::max) / largest
        };
        engine.set_adapters(AdapterSet::new(bound).unwrap());
        let of_engine = apart(&all_logits(&mut engine, &ids));
        let reference = Reference::open(dir.path(), RefDtype::F32).unwrap().with_adapters(adapters);
        let mut of_reference = f64::NAN;
        let take = |_, logits: &[f32]| {
            of_reference = apart(logits);
            Ok(())
        };
        reference.logits(&[ScoredText { ids: ids.clone(), from: 0 }], || Ok(()), take).unwrap();
        let changed = apart(&plain.iter().map(|x| *x as f32).collect::<Vec<f32>>());
        if !(of_engine <= LIMIT && of_reference <= LIMIT && changed > 0.1) {
            failures.push(format!(
                "{}: engine {of_engine:e}, reference {of_reference:e}, without adapters {changed:e} apart",
                case.name
            ));
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
