//! Binding: finds the tensors of a pack that the model configuration requires and assigns them to the layers.

use super::{Host, Linear, Shape, Weight, Weights, take};
use crate::dtype::{DType, decode_floats};
use crate::error::{Context, Error, Result};
use crate::iebin::{Entry, IebinReader, Store};
use crate::interrupt;
use crate::model_config::{self as config, ModelConfig};
use crate::runtime::cache::Cache;
use crate::runtime::cpu::{Matrix, MatrixStore};
use crate::runtime::layer::{Attention, AttentionShape, Block, Layer, Mlp, Moe, Operation};
use crate::runtime::rebuilt::Rebuilt;
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
        let layers = (0..c.n_layers).map(|n| self.layer(c, n)).collect::<Result<Vec<_>>>()?;
        let final_norm = self.norm(c, "model.norm.weight", c.hidden)?;
        let lm_head =
            if c.tied_embeddings { embedding.clone() } else { self.matrix("lm_head.weight", c.vocab, c.hidden)? };
        self.refuse_leftovers(c)?;
        Ok(Weights { embedding, layers, final_norm, lm_head, cache: self.cache.clone() })
    }

    fn layer(&self, c: &ModelConfig, n: usize) -> Result<Layer<Host>> {
        interrupt::check()?;
        let norm = |leaf: &str| self.norm(c, &format!("model.layers.{n}.{leaf}"), c.hidden);
        // In models with post norms, `post_attention` is one of them; in others, it is the norm before the MLP.
        let (attention_post_norm, mlp_norm, mlp_post_norm) = match c.post_norms {
            true => (
                Some(norm("post_attention_layernorm.weight")?),
                norm("pre_feedforward_layernorm.weight")?,
                Some(norm("post_feedforward_layernorm.weight")?),
            ),
            false => (None, norm("post_attention_layernorm.weight")?, None),
        };
        let attention = Block {
            norm: norm("input_layernorm.weight")?,
            operation: Operation::Attention(self.attention(c, n)?),
            post_norm: attention_post_norm,
        };
        let mlp = Block { norm: mlp_norm, operation: self.mlp(c, n)?, post_norm: mlp_post_norm };
        Ok(Layer { blocks: vec![attention, mlp] })
    }

    fn attention(&self, c: &ModelConfig, n: usize) -> Result<Attention<Host>> {
        let at = |leaf: &str| format!("model.layers.{n}.self_attn.{leaf}");
        let linear = |leaf: &str, out, cols, bias| self.linear(&at(leaf), out, cols, bias);
        let (q, kv) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
        let head_norm = |leaf: &str| self.norm(c, &at(leaf), c.head_dim);
        let window = c.window(n);
        Ok(Attention {
            shape: AttentionShape {
                n_heads: c.n_heads,
                n_kv_heads: c.n_kv_heads,
                head_dim: c.head_dim,
                rotary: usize::from(c.local_rope.is_some() && window.is_some()),
                window,
                scale: c.attention.scale,
                softcap: c.attention.softcap,
            },
            sinks: c.attention.sinks.then(|| self.vector(&at("sinks"), c.n_heads)).transpose()?,
            head_norms: match c.attention.qk_norm {
                true => Some([head_norm("q_norm.weight")?, head_norm("k_norm.weight")?]),
                false => None,
            },
            q: linear("q_proj", q, c.hidden, c.attention.qkv_bias)?,
            k: linear("k_proj", kv, c.hidden, c.attention.qkv_bias)?,
            v: linear("v_proj", kv, c.hidden, c.attention.qkv_bias)?,
            o: linear("o_proj", c.hidden, q, c.attention.o_bias)?,
        })
    }

    fn mlp(&self, c: &ModelConfig, n: usize) -> Result<Operation<Host>> {
        let prefix = format!("model.layers.{n}.mlp");
        let linear = |leaf: &str, out, cols, bias| self.linear(&format!("{prefix}.{leaf}"), out, cols, bias);
        Ok(match c.mlp_of(n) {
            config::Mlp::Dense { intermediate, activation, bias } => Operation::Mlp(Mlp {
                activation,
                intermediate,
                gate: linear("gate_proj", intermediate, c.hidden, bias)?,
                up: linear("up_proj", intermediate, c.hidden, bias)?,
                down: linear("down_proj", c.hidden, intermediate, bias)?,
            }),
            config::Mlp::Moe { experts, top_k, intermediate, activation, router_softmax, bias, router_bias } => {
                let stack = |leaf: &str, shape| self.experts(&format!("{prefix}.experts.{leaf}"), shape, bias);
                Operation::Moe(Moe {
                    activation,
                    intermediate,
                    experts,
                    top_k,
                    softmax: router_softmax,
                    router: linear("router", experts, c.hidden, router_bias)?,
                    gate_up: stack("gate_up_proj", [experts, 2 * intermediate, c.hidden])?,
                    down: stack("down_proj", [experts, c.hidden, intermediate])?,
                })
            }
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
    /// different model. Only rotary frequencies, which are computed, and the copy of a tied embedding are ignored.
    fn refuse_leftovers(&self, c: &ModelConfig) -> Result<()> {
        let bound = self.bound.borrow();
        let harmless =
            |name: &str| name.ends_with("rotary_emb.inv_freq") || c.tied_embeddings && name == "lm_head.weight";
        match self.reader.entries().iter().find(|e| !bound.contains(&e.name) && !harmless(&e.name)) {
            Some(extra) => {
                Err(Error::unsupported("found a tensor that the described model does not use").tensor(&extra.name))
            }
            None => Ok(()),
        }
    }
}
