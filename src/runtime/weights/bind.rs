//! Binding: finds the tensors of a pack that the model configuration requires and assigns them to the layers.

use super::rebuilt::Rebuilt;
use super::rebuilt::cache::Cache;
use super::{Host, Linear, PerLayerWeights, Shape, Weight, Weights, take};
use crate::dtype::{DType, decode_floats};
use crate::error::{Context, Error, Result};
use crate::iebin::{Entry, IebinReader, Store};
use crate::interrupt;
use crate::model_config::{self as config, Latent, LayerConfig, ModelConfig, PerLayerInput, QkNorm};
use crate::role::Role;
use crate::runtime::cpu::{Matrix, MatrixStore};
use crate::runtime::layer::{
    Attention, AttentionShape, Block, BlockInput, LatentAttention, Layer, MixtureNorms, Mlp, Moe, Operation, TokenInput,
};
use crate::windowed::Windowed;
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::sync::Arc;

/// A pack and the names of the tensors bound so far.
pub(super) struct Binder<'a> {
    reader: &'a IebinReader,
    convert: Option<DType>,
    bound: RefCell<HashSet<String>>,
    cache: Option<Arc<Cache>>,
    /// True if matrices of a deduplicated pack stay compressed ([`Windowed`]) where kernels can compute with that form.
    in_place: bool,
    /// Bytes of further tensors that may become hot, see [`Keep::hot_bytes`](crate::iebin::rebuild::Keep::hot_bytes).
    hot_bytes_left: Cell<u64>,
    /// True if the embedding is also the output matrix; otherwise only single rows of it are read.
    embedding_multiplies: bool,
}

pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
const FINAL_NORM: &str = "model.norm.weight";

impl<'a> Binder<'a> {
    /// Creates a binder that has bound nothing yet.
    pub(super) fn new(reader: &'a IebinReader, c: &ModelConfig, convert: Option<DType>, in_place: bool) -> Binder<'a> {
        let keep = reader.rebuilt().map(|(_, keep)| keep);
        Binder {
            reader,
            convert,
            bound: RefCell::default(),
            cache: keep.map(|keep| Arc::new(Cache::new(keep.limit))),
            in_place,
            hot_bytes_left: Cell::new(keep.map_or(0, |keep| keep.hot_bytes)),
            embedding_multiplies: c.tied_embeddings,
        }
    }

    /// Binds every tensor of the model.
    pub(super) fn model(&self, c: &ModelConfig) -> Result<Weights> {
        let embedding = self.matrix(EMBEDDING, c.vocab, c.hidden)?;
        let per_layer = match c.per_layer_input {
            Some(PerLayerInput { width, vocab }) => Some(PerLayerWeights {
                embedding: self.matrix("model.embed_tokens_per_layer.weight", vocab, width * c.n_layers)?,
                projection: self.linear("model.per_layer_model_projection", width * c.n_layers, c.hidden, false)?,
                norm: self.norm(c, "model.per_layer_projection_norm.weight", width)?,
            }),
            None => None,
        };
        let layers = (0..c.n_layers).map(|n| self.layer(c, n)).collect::<Result<Vec<_>>>()?;
        let final_norm = match c.plain_final_norm {
            true => self.vector(FINAL_NORM, c.hidden)?,
            false => self.norm(c, FINAL_NORM, c.hidden)?,
        };
        let lm_head =
            if c.tied_embeddings { embedding.clone() } else { self.matrix("lm_head.weight", c.vocab, c.hidden)? };
        self.refuse_leftovers()?;
        Ok(Weights { embedding, per_layer, layers, final_norm, lm_head, cache: self.cache.clone() })
    }

    fn layer(&self, c: &ModelConfig, n: usize) -> Result<Layer<Host>> {
        interrupt::check()?;
        let layer = c.layer(n);
        let norm = |leaf: &str| self.norm(c, &format!("model.layers.{n}.{leaf}_layernorm.weight"), c.hidden);
        let input =
            |leaf: &str| Ok::<_, Error>(if c.pre_norms { BlockInput::Normed(norm(leaf)?) } else { BlockInput::Stream });
        let post_norm = |leaf: &str| if c.post_norms { norm(leaf).map(Some) } else { Ok(None) };
        // In models with post norms, `post_attention` is one of them; in others, it is the norm before the MLP.
        let mlp_input = match (c.parallel, c.post_norms) {
            (true, _) => BlockInput::Previous,
            (false, true) => input("pre_feedforward")?,
            (false, false) => input("post_attention")?,
        };
        let attention = Block {
            input: input("input")?,
            operation: match c.attention.latent {
                Some(latent) => Operation::Latent(self.latent_attention(c, &layer, latent, n)?),
                None => Operation::Attention(self.attention(c, &layer, n)?),
            },
            post_norm: post_norm("post_attention")?,
        };
        let mlp =
            Block { input: mlp_input, operation: self.mlp(c, &layer, n)?, post_norm: post_norm("post_feedforward")? };
        let mut blocks = vec![attention, mlp];
        if let Some(PerLayerInput { width, .. }) = c.per_layer_input {
            let linear = |leaf: &str, out, cols| self.linear(&format!("model.layers.{n}.{leaf}"), out, cols, false);
            blocks.push(Block {
                input: BlockInput::Stream,
                operation: Operation::Input(TokenInput {
                    gate: linear("per_layer_input_gate", width, c.hidden)?,
                    projection: linear("per_layer_projection", c.hidden, width)?,
                }),
                post_norm: Some(self.norm(
                    c,
                    &format!("model.layers.{n}.post_per_layer_input_norm.weight"),
                    c.hidden,
                )?),
            });
        }
        let scalar = c.layer_scalars.then(|| self.vector(&format!("model.layers.{n}.layer_scalar"), 1)).transpose()?;
        Ok(Layer { blocks, scalar: scalar.map(|values| values[0]) })
    }

    /// Returns the sizes and variants of the attention of a layer.
    fn shape(c: &ModelConfig, layer: &LayerConfig) -> AttentionShape {
        let LayerConfig { n_heads, n_kv_heads, head_dim, value_dim, window, rotary, kv_from, .. } = *layer;
        AttentionShape {
            n_heads,
            n_kv_heads,
            head_dim,
            value_dim,
            kv_from,
            rotary,
            pairs: c.ropes().nth(rotary.unwrap_or(0)).map(|rope| rope.pairs).unwrap_or_default(),
            position_scale: c.attention.position_scale,
            window,
            scale: c.attention.scale,
            softcap: c.attention.softcap,
        }
    }

    fn latent_attention(
        &self,
        c: &ModelConfig,
        layer: &LayerConfig,
        latent: Latent,
        n: usize,
    ) -> Result<LatentAttention<Host>> {
        let at = |leaf: &str| format!("model.layers.{n}.self_attn.{leaf}");
        let linear = |leaf: &str, out, cols, bias| self.linear(&at(leaf), out, cols, bias);
        let (q, bias) = (layer.n_heads * layer.head_dim, c.attention.qkv_bias);
        let Latent { q_rank, kv_rank, nope, rope, value, .. } = latent;
        let (q_a, q) = match q_rank {
            Some(rank) => {
                let norm = self.vector(&at("q_a_layernorm.weight"), rank)?;
                (Some((linear("q_a_proj", rank, c.hidden, bias)?, norm)), linear("q_b_proj", q, rank, false)?)
            }
            None => (None, linear("q_proj", q, c.hidden, false)?),
        };
        Ok(LatentAttention {
            shape: Binder::shape(c, layer),
            latent,
            q_a,
            q,
            kv_a: linear("kv_a_proj_with_mqa", kv_rank + rope, c.hidden, bias)?,
            kv_norm: self.vector(&at("kv_a_layernorm.weight"), kv_rank)?,
            kv_b: linear("kv_b_proj", layer.n_heads * (nope + value), kv_rank, false)?,
            o: linear("o_proj", c.hidden, layer.n_heads * value, c.attention.o_bias)?,
        })
    }

    fn attention(&self, c: &ModelConfig, layer: &LayerConfig, n: usize) -> Result<Attention<Host>> {
        let LayerConfig { n_heads, n_kv_heads, head_dim, keys_are_values, kv_from, .. } = *layer;
        let at = |leaf: &str| format!("model.layers.{n}.self_attn.{leaf}");
        let linear = |leaf: &str, out, cols, bias| self.linear(&at(leaf), out, cols, bias);
        let (q, kv) = (n_heads * head_dim, n_kv_heads * head_dim);
        let head_norms = |widths: [usize; 2]| -> Result<_> {
            let k_norm = match kv_from {
                None => self.norm(c, &at("k_norm.weight"), widths[1])?,
                Some(_) => Vec::new(),
            };
            Ok([self.norm(c, &at("q_norm.weight"), widths[0])?, k_norm])
        };
        Ok(Attention {
            shape: Binder::shape(c, layer),
            sinks: c.attention.sinks.then(|| self.vector(&at("sinks"), n_heads)).transpose()?,
            head_norms: match c.attention.qk_norm {
                QkNorm::None => None,
                QkNorm::Head => Some(head_norms([head_dim; 2])?),
                QkNorm::All => Some(head_norms([q, kv])?),
                QkNorm::Unit => Some([vec![1.0; head_dim], vec![1.0; head_dim]]),
            },
            gate: c.attention.gate.then(|| linear("gate_proj", q, c.hidden, false)).transpose()?,
            q: linear("q_proj", q, c.hidden, c.attention.qkv_bias)?,
            k: kv_from.is_none().then(|| linear("k_proj", kv, c.hidden, c.attention.qkv_bias)).transpose()?,
            v: match kv_from.is_none() && !keys_are_values {
                true => Some(linear("v_proj", kv, c.hidden, c.attention.qkv_bias)?),
                false => None,
            },
            value_norm: c.attention.value_norm.then(|| vec![1.0; head_dim]),
            o: linear("o_proj", c.hidden, q, c.attention.o_bias)?,
        })
    }

    fn mlp(&self, c: &ModelConfig, layer: &LayerConfig, n: usize) -> Result<Operation<Host>> {
        let prefix = format!("model.layers.{n}.mlp");
        let linear = |leaf: &str, out, cols, bias| self.linear(&format!("{prefix}.{leaf}"), out, cols, bias);
        let dense = |prefix: &str, activation, intermediate, bias| -> Result<Mlp<Host>> {
            let linear = |leaf: &str, out, cols| self.linear(&format!("{prefix}.{leaf}"), out, cols, bias);
            Ok(Mlp {
                activation,
                intermediate,
                gate: linear("gate_proj", intermediate, c.hidden)?,
                up: linear("up_proj", intermediate, c.hidden)?,
                down: linear("down_proj", c.hidden, intermediate)?,
            })
        };
        Ok(match layer.mlp {
            config::Mlp::Dense { intermediate, activation, bias } => {
                Operation::Mlp(dense(&prefix, activation, intermediate, bias)?)
            }
            config::Mlp::Moe {
                experts,
                top_k,
                intermediate,
                activation,
                router_softmax,
                bias,
                router_bias,
                selection,
                shared,
            } => {
                let stack = |leaf: &str, shape| self.experts(&format!("{prefix}.experts.{leaf}"), shape, bias);
                let normed = shared.is_some_and(|shared| shared.norms);
                let shared = shared
                    .map(|shared| dense(&format!("{prefix}.shared_experts"), activation, shared.intermediate, false));
                Operation::Moe(Moe {
                    activation,
                    intermediate,
                    experts,
                    top_k,
                    softmax: router_softmax,
                    selection,
                    selection_bias: match selection.bias {
                        true => Some(self.vector(&format!("{prefix}.router.selection_bias"), experts)?),
                        false => None,
                    },
                    factors: match selection.factors {
                        true => Some(self.vector(&format!("{prefix}.router.expert_scale"), experts)?),
                        false => None,
                    },
                    norms: normed.then(|| self.mixture_norms(c, &prefix)).transpose()?,
                    shared: shared.transpose()?,
                    router: linear("router", experts, c.hidden, router_bias)?,
                    gate_up: stack("gate_up_proj", [experts, 2 * intermediate, c.hidden])?,
                    down: stack("down_proj", [experts, c.hidden, intermediate])?,
                })
            }
        })
    }

    /// Binds the norms of an MLP and of the experts beside it.
    fn mixture_norms(&self, c: &ModelConfig, prefix: &str) -> Result<MixtureNorms<Vec<f32>>> {
        let norm = |leaf: &str| self.norm(c, &format!("{prefix}.{leaf}_layernorm.weight"), c.hidden);
        let mut router_input = self.vector(&format!("{prefix}.router.input_scale"), c.hidden)?;
        router_input.iter_mut().for_each(|x| *x /= (c.hidden as f32).sqrt());
        Ok(MixtureNorms {
            mlp_output: norm("shared_experts.post")?,
            router_input,
            expert_input: norm("experts.pre")?,
            expert_output: norm("experts.post")?,
        })
    }

    fn linear(&self, prefix: &str, rows: usize, cols: usize, bias: bool) -> Result<Linear> {
        let bias = bias.then(|| self.vector(&format!("{prefix}.bias"), rows)).transpose()?;
        Ok(Linear { matrix: self.matrix(&format!("{prefix}.weight"), rows, cols)?, bias })
    }

    /// Binds the matrices of all experts; their biases are in the tensor `<name>_bias`.
    fn experts(&self, name: &str, shape: [usize; 3], bias: bool) -> Result<Vec<Linear>> {
        let [experts, rows, cols] = shape;
        let bias_name = format!("{name}_bias");
        let biases = bias.then(|| self.floats(&bias_name, &[experts, rows])).transpose()?;
        let entry = self.entry(name, &shape)?;
        let matrices = self.bind_matrices(entry, [experts, rows, cols]).tensor(name)?;
        let bias = |e: usize| biases.as_ref().map(|b| b[e * rows..][..rows].to_vec());
        Ok(matrices.into_iter().enumerate().map(|(e, matrix)| Linear { matrix, bias: bias(e) }).collect())
    }

    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Weight> {
        let entry = self.entry(name, &[rows, cols])?;
        let mut matrices = self.bind_matrices(entry, [1, rows, cols]).tensor(name)?;
        Ok(matrices.remove(0))
    }

    /// Binds the matrices of a tensor, which all have the same size.
    fn bind_matrices(&self, entry: &Entry, [matrices, rows, cols]: [usize; 3]) -> Result<Vec<Weight>> {
        let multiplies = self.embedding_multiplies || entry.name != EMBEDDING;
        let shape = Shape::new(entry.store, rows, cols, self.convert, multiplies)?;
        let each = entry.nbytes / matrices;
        let range = |i: usize| i * each..(i + 1) * each;
        let Some((source, cache)) = self.reader.rebuilt().map(|(source, _)| source).zip(self.cache.as_ref()) else {
            let payload = self.reader.payload(entry)?;
            return (0..matrices).map(|i| shape.matrix(payload.slice(range(i))).map(Weight::Here)).collect();
        };
        let tensor = self.reader.position(&entry.name).expect("an entry of this reader");
        let name: Arc<str> = entry.name.as_str().into();
        let hot = self.is_hot(entry);
        let bind = |i| {
            if !hot && let Some(numbers) = self.windowed(shape, || source.windowed(tensor, range(i))) {
                return Matrix::windowed(rows, cols, numbers).map(Weight::Here);
            }
            Rebuilt::new(&name, shape, (tensor, i), range(i), source.clone(), cache.clone()).map(Weight::Rebuilt)
        };
        (0..matrices).map(bind).collect()
    }

    /// Returns the compressed numbers of a matrix if kernels can and should read it in that form.
    fn windowed(&self, shape: Shape, numbers: impl FnOnce() -> Option<Windowed>) -> Option<Windowed> {
        let plain = shape.from.is_none() && shape.store == MatrixStore::Plain(DType::BF16);
        if plain && self.in_place { numbers() } else { None }
    }

    /// Returns true for hot tensors, which are rebuilt before the first token and always kept. It must be called for
    /// tensors in the order of their use, because it also counts down the bytes that are left for hot tensors.
    fn is_hot(&self, entry: &Entry) -> bool {
        let Some((_, keep)) = self.reader.rebuilt() else { return false };
        if keep.hot.contains(&entry.name) {
            return true;
        }
        if entry.name == EMBEDDING {
            return false;
        }
        let mut left = self.hot_bytes_left.get();
        let fits = take(&mut left, entry.nbytes);
        self.hot_bytes_left.set(left);
        fits
    }

    /// Returns the factors of a norm.
    fn norm(&self, c: &ModelConfig, name: &str, len: usize) -> Result<Vec<f32>> {
        let mut weight = self.vector(name, len)?;
        if c.norm_plus_one {
            weight.iter_mut().for_each(|w| *w += 1.0);
        }
        Ok(weight)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        self.floats(name, &[len])
    }

    fn floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let entry = self.entry(name, shape)?;
        let Store::Plain(dtype) = entry.store else {
            return Err(Error::unsupported("found quantized codes, expected floats").tensor(name));
        };
        let mut values = vec![0.0; entry.elements()];
        decode_floats(dtype, &self.reader.payload(entry)?, &mut values).tensor(name)?;
        Ok(values)
    }

    fn entry(&self, name: &str, shape: &[usize]) -> Result<&Entry> {
        let Some(entry) = self.reader.get(name) else {
            return Err(Error::corrupt(format!("found no such tensor, expected one of shape {shape:?}")).tensor(name));
        };
        if entry.shape != shape {
            return Err(Error::corrupt(format!("found shape {:?}, expected {shape:?}", entry.shape)).tensor(name));
        }
        self.bound.borrow_mut().insert(name.to_string());
        Ok(entry)
    }

    /// Returns an error if the pack has a tensor that the model does not use, because ignoring it would silently run a
    /// different model. Only rotary frequencies, which are computed, and the tensors of multi-token prediction are
    /// ignored.
    fn refuse_leftovers(&self) -> Result<()> {
        let bound = self.bound.borrow();
        let harmless = |name: &str| name.ends_with("rotary_emb.inv_freq") || Role::of(name) == Role::Prediction;
        match self.reader.entries().iter().find(|e| !bound.contains(&e.name) && !harmless(&e.name)) {
            Some(extra) => {
                Err(Error::unsupported("found a tensor that the described model does not use").tensor(&extra.name))
            }
            None => Ok(()),
        }
    }
}
