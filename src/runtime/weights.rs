//! Binds the tensors of an artifact to the places they have in the model, with every shape checked.
//!
//! Matrices stay where they are, in the mapped file; only a float matrix wider than the precision asked for is
//! converted into owned memory. Those of a pack without its binary are rebuilt when they are used ([`Weight`]). Vectors (norms,
//! biases, sinks) are small and held as f32.

use super::cache::{Cache, too_small};
use super::cpu::{Arithmetic, Cpu, Form, Matrix, MatrixStore, scalar};
use super::rebuilt::Rebuilt;
use super::residency::Residency;
use crate::dtype::{DType, decode_floats};
use crate::error::{Context, Error, Result};
use crate::iebin::rebuild::Keep;
use crate::iebin::{Entry, IebinReader, JSON_NAME, Store};
use crate::interrupt;
use crate::mapped::Bytes;
use crate::model_config::{Mlp, ModelConfig};
use crate::progress;
use crate::scheme::{BLOCK, TILE_ROWS, TileLayout};
use crate::windowed::Windowed;
use half::{bf16, f16};
use rayon::prelude::*;
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::ops::Deref;
use std::sync::Arc;

/// A weight matrix, in memory or to be rebuilt.
#[derive(Debug, Clone)]
pub enum Weight {
    /// Mapped, or converted.
    Here(Matrix),
    /// Rebuilt when it is used.
    Rebuilt(Rebuilt),
}

/// A weight matrix while it is computed with.
#[derive(Debug)]
pub enum Held<'a> {
    /// It is always there.
    Here(&'a Matrix),
    /// It stays as long as it is held.
    Rebuilt(Arc<Matrix>),
}

impl Deref for Held<'_> {
    type Target = Matrix;
    fn deref(&self) -> &Matrix {
        match self {
            Held::Here(matrix) => matrix,
            Held::Rebuilt(matrix) => matrix,
        }
    }
}

impl Weight {
    /// The matrix in memory.
    ///
    /// # Errors
    /// What it is rebuilt from was changed.
    pub fn hold(&self) -> Result<Held<'_>> {
        match self {
            Weight::Here(matrix) => Ok(Held::Here(matrix)),
            Weight::Rebuilt(rebuilt) => rebuilt.matrix(false).map(Held::Rebuilt),
        }
    }

    /// What is rebuilt.
    fn as_rebuilt(&self) -> Option<&Rebuilt> {
        match self {
            Weight::Here(_) => None,
            Weight::Rebuilt(rebuilt) => Some(rebuilt),
        }
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        match self {
            Weight::Here(matrix) => matrix.rows,
            Weight::Rebuilt(rebuilt) => rebuilt.rows,
        }
    }

    /// How the elements lie.
    pub fn store(&self) -> MatrixStore {
        match self {
            Weight::Here(matrix) => matrix.store,
            Weight::Rebuilt(rebuilt) => rebuilt.store,
        }
    }

    /// Bytes that a product reads.
    pub fn nbytes(&self) -> usize {
        match self {
            Weight::Here(matrix) => matrix.nbytes(),
            Weight::Rebuilt(rebuilt) => rebuilt.nbytes(),
        }
    }

    /// Writes row `row`, widened or dequantized, to `out` (one value per column).
    ///
    /// # Errors
    /// What it is rebuilt from was changed.
    pub fn read_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        match self {
            Weight::Here(matrix) => read_row(matrix, row, out),
            Weight::Rebuilt(rebuilt) => {
                let (part, row) = rebuilt.around(row)?;
                read_row(&part, row, out)
            }
        }
    }
}

/// A matrix with its optional bias.
#[derive(Debug)]
pub struct Linear {
    /// `(out, in)`.
    pub matrix: Weight,
    /// `(out)`.
    pub bias: Option<Vec<f32>>,
}

/// All weights of a model.
#[derive(Debug)]
pub struct Weights {
    /// `(vocab, hidden)`.
    pub embedding: Weight,
    /// One per layer.
    pub layers: Vec<Layer>,
    /// `(hidden)`.
    pub final_norm: Vec<f32>,
    /// `(vocab, hidden)`; the embedding itself when tied.
    pub lm_head: Weight,
    /// What is rebuilt, if anything is.
    pub cache: Option<Arc<Cache>>,
}

/// The weights of one decoder layer.
#[derive(Debug)]
pub struct Layer {
    /// `(hidden)`.
    pub attention_norm: Vec<f32>,
    /// `(n_heads * head_dim, hidden)`.
    pub q: Linear,
    /// `(n_kv_heads * head_dim, hidden)`.
    pub k: Linear,
    /// `(n_kv_heads * head_dim, hidden)`.
    pub v: Linear,
    /// `(hidden, n_heads * head_dim)`.
    pub o: Linear,
    /// Norms of each query and each key head, where the model has them.
    pub head_norms: Option<HeadNorms>,
    /// `(n_heads)`: the extra logit of each head.
    pub sinks: Option<Vec<f32>>,
    /// `(hidden)`: norm of what attention adds to the residual stream.
    pub attention_post_norm: Option<Vec<f32>>,
    /// `(hidden)`.
    pub mlp_norm: Vec<f32>,
    /// The feed-forward part.
    pub mlp: MlpWeights,
    /// `(hidden)`: norm of what the feed-forward part adds to the residual stream.
    pub mlp_post_norm: Option<Vec<f32>>,
}

/// Norms within heads.
#[derive(Debug)]
pub struct HeadNorms {
    /// `(head_dim)`.
    pub q: Vec<f32>,
    /// `(head_dim)`.
    pub k: Vec<f32>,
}

/// The feed-forward weights of a layer. A model holds one per layer, so the size of the smaller variant is no concern.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
pub enum MlpWeights {
    /// One gated MLP.
    Dense {
        /// `(intermediate, hidden)`.
        gate: Linear,
        /// `(intermediate, hidden)`.
        up: Linear,
        /// `(hidden, intermediate)`.
        down: Linear,
    },
    /// A router and its experts.
    Moe {
        /// `(experts, hidden)`.
        router: Linear,
        /// One per expert: `(2 * intermediate, hidden)`, gate and up rows interleaved.
        gate_up: Vec<Linear>,
        /// One per expert: `(hidden, intermediate)`.
        down: Vec<Linear>,
    },
}

impl Weights {
    /// Binds every tensor the configuration calls for; float matrices are converted to `convert` if it is given. Of a pack without
    /// its binary, those that `cpu` can compute with as they are stored stay so.
    ///
    /// # Errors
    /// A tensor is missing, has the wrong shape or store, overflows the type it is converted to, or has no place in the
    /// model (running without it would be a silently different model).
    pub fn bind(reader: &IebinReader, config: &ModelConfig, convert: Option<DType>, cpu: &Cpu) -> Result<Weights> {
        let keep = reader.rebuilt().map(|(_, keep)| keep);
        let binder = Binder {
            reader,
            convert,
            bound: RefCell::default(),
            cache: keep.map(|keep| Arc::new(Cache::new(keep.limit))),
            in_place: cpu.unpacks(),
            hot_bytes_left: Cell::new(keep.map_or(0, |keep| keep.hot_bytes)),
        };
        binder.model(config).at(reader.dir.join(JSON_NAME))
    }

    /// All matrices, in the order of their use; a tied embedding twice.
    pub fn matrices(&self) -> impl Iterator<Item = &Weight> {
        let layers = self.layers.iter().flat_map(|layer| {
            let mlp: Vec<&Linear> = match &layer.mlp {
                MlpWeights::Dense { gate, up, down } => vec![gate, up, down],
                MlpWeights::Moe { router, gate_up, down } => [router].into_iter().chain(gate_up).chain(down).collect(),
            };
            [&layer.q, &layer.k, &layer.v, &layer.o].into_iter().chain(mlp).map(|linear| &linear.matrix)
        });
        [&self.embedding].into_iter().chain(layers).chain([&self.lm_head])
    }

    /// Rebuilds what is wanted before the first token: hot weights, and everything there is room for where `residency` asks for it.
    ///
    /// # Errors
    /// A hot tensor is none of this model, there is no room, or what weights are rebuilt from was changed.
    pub(super) fn rebuild(&self, keep: &Keep, residency: Residency) -> Result<()> {
        // The embedding is read row by row.
        let rebuilt: Vec<&Rebuilt> = self.matrices().skip(1).filter_map(Weight::as_rebuilt).collect();
        let (hot, cold) = sort_by_heat(&rebuilt, keep)?;
        let bytes = |list: &[&Rebuilt]| list.iter().map(|r| r.nbytes() as u64).sum::<u64>();
        let (limit, largest) = (keep.limit.unwrap_or(u64::MAX), cold.iter().map(|r| r.nbytes() as u64).max());
        let needed = bytes(&hot) + largest.unwrap_or(0);
        if limit < needed {
            return Err(too_small(limit, needed));
        }
        let mut room = if residency == Residency::OnDemand { 0 } else { limit - bytes(&hot) };
        let warm = cold.iter().take_while(|r| {
            let rest = room.checked_sub(r.nbytes() as u64);
            room = rest.unwrap_or(0);
            rest.is_some()
        });
        let warm: Vec<&Rebuilt> = warm.copied().collect();
        let bar = progress::bytes("rebuilding", bytes(&hot) + bytes(&warm));
        for (list, hot) in [(hot, true), (warm, false)] {
            for rebuilt in list {
                interrupt::check()?;
                rebuilt.matrix(hot)?;
                bar.inc(rebuilt.nbytes() as u64);
            }
        }
        bar.finish_and_clear();
        Ok(())
    }

    /// The forms of activations that products with these weights read.
    pub fn forms(&self, arithmetic: Arithmetic) -> Vec<Form> {
        let mut forms = vec![self.lm_head.store().form(arithmetic)];
        for layer in &self.layers {
            let form = |linear: &Linear| linear.matrix.store().form(arithmetic);
            forms.extend([&layer.q, &layer.k, &layer.v, &layer.o].map(form));
            match &layer.mlp {
                MlpWeights::Dense { gate, up, down } => forms.extend([gate, up, down].map(form)),
                MlpWeights::Moe { router, gate_up, down } => {
                    forms.push(router.matrix.store().form(arithmetic.for_routers()));
                    forms.extend(gate_up.iter().chain(down).map(form));
                }
            }
        }
        forms.sort_unstable();
        forms.dedup();
        forms
    }

    /// Bytes of weights read to compute one token: every matrix once, of the experts only the chosen ones.
    pub fn bytes_per_token(&self, config: &ModelConfig) -> u64 {
        let linear = |l: &Linear| l.matrix.nbytes() + l.bias.as_ref().map_or(0, |b| 4 * b.len());
        let layer = |layer: &Layer| {
            let attention: usize = [&layer.q, &layer.k, &layer.v, &layer.o].map(linear).iter().sum();
            let optional = [&layer.sinks, &layer.attention_post_norm, &layer.mlp_post_norm];
            let optional: usize = optional.into_iter().flatten().map(Vec::len).sum();
            let head_norms = layer.head_norms.as_ref().map_or(0, |norms| norms.q.len() + norms.k.len());
            let vectors = 4 * (layer.attention_norm.len() + layer.mlp_norm.len() + head_norms + optional);
            let mlp = match &layer.mlp {
                MlpWeights::Dense { gate, up, down } => linear(gate) + linear(up) + linear(down),
                MlpWeights::Moe { router, gate_up, down } => {
                    let Mlp::Moe { top_k, .. } = config.mlp else { unreachable!("bound from this configuration") };
                    let each = linear(&gate_up[0]) + linear(&down[0]);
                    linear(router) + top_k * each
                }
            };
            (attention + vectors + mlp) as u64
        };
        let embedding_row = self.embedding.nbytes() / self.embedding.rows();
        let ends = embedding_row + 4 * self.final_norm.len() + self.lm_head.nbytes();
        self.layers.iter().map(layer).sum::<u64>() + ends as u64
    }
}

/// Writes row `row` of a matrix, widened or dequantized, to `out` (`cols` values).
fn read_row(matrix: &Matrix, row: usize, out: &mut [f32]) -> Result<()> {
    if let Some(bytes) = matrix.unpacked_row(row) {
        return decode_floats(DType::BF16, &bytes?, out);
    }
    match matrix.store {
        MatrixStore::Plain(dtype) => {
            let bytes = matrix.cols * dtype.size();
            decode_floats(dtype, &matrix.data[row * bytes..][..bytes], out)
        }
        MatrixStore::Tiled(layout) => {
            let tile = &matrix.data[row / TILE_ROWS * layout.tile_bytes..][..layout.tile_bytes];
            for (block, out) in out.chunks_mut(BLOCK).enumerate() {
                let (codes, scale) = scalar::tile_block(&layout, tile, row % TILE_ROWS, block);
                out.iter_mut().zip(codes).for_each(|(out, code)| *out = code as f32 * scale);
            }
            Ok(())
        }
    }
}

struct Binder<'a> {
    reader: &'a IebinReader,
    convert: Option<DType>,
    bound: RefCell<HashSet<String>>,
    cache: Option<Arc<Cache>>,
    /// Some matrices are computed with as they are stored.
    in_place: bool,
    hot_bytes_left: Cell<u64>,
}

const EMBEDDING: &str = "model.embed_tokens.weight";

impl Binder<'_> {
    fn model(&self, c: &ModelConfig) -> Result<Weights> {
        let embedding = self.matrix(EMBEDDING, c.vocab, c.hidden)?;
        let layers = (0..c.n_layers).map(|n| self.layer(c, n)).collect::<Result<Vec<_>>>()?;
        let final_norm = self.norm(c, "model.norm.weight", c.hidden)?;
        let lm_head =
            if c.tied_embeddings { embedding.clone() } else { self.matrix("lm_head.weight", c.vocab, c.hidden)? };
        self.refuse_leftovers(c)?;
        Ok(Weights { embedding, layers, final_norm, lm_head, cache: self.cache.clone() })
    }

    fn layer(&self, c: &ModelConfig, n: usize) -> Result<Layer> {
        interrupt::check()?;
        let at = |leaf: &str| format!("model.layers.{n}.{leaf}");
        let attention = |leaf: &str, out, cols, bias| self.linear(&at(&format!("self_attn.{leaf}")), out, cols, bias);
        let (q, kv) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
        let sinks = c.attention.sinks.then(|| self.vector(&at("self_attn.sinks"), c.n_heads)).transpose()?;
        let norm = |leaf: &str| self.norm(c, &at(leaf), c.hidden);
        let head_norm = |leaf: &str| self.norm(c, &at(&format!("self_attn.{leaf}.weight")), c.head_dim);
        let head_norms = match c.attention.qk_norm {
            true => Some(HeadNorms { q: head_norm("q_norm")?, k: head_norm("k_norm")? }),
            false => None,
        };
        // Where outputs are normed, `post_attention` is one of these norms; elsewhere it is the norm before the MLP.
        let (attention_post_norm, mlp_norm, mlp_post_norm) = match c.post_norms {
            true => (
                Some(norm("post_attention_layernorm.weight")?),
                norm("pre_feedforward_layernorm.weight")?,
                Some(norm("post_feedforward_layernorm.weight")?),
            ),
            false => (None, norm("post_attention_layernorm.weight")?, None),
        };
        Ok(Layer {
            attention_norm: norm("input_layernorm.weight")?,
            head_norms,
            attention_post_norm,
            mlp_norm,
            mlp_post_norm,
            q: attention("q_proj", q, c.hidden, c.attention.qkv_bias)?,
            k: attention("k_proj", kv, c.hidden, c.attention.qkv_bias)?,
            v: attention("v_proj", kv, c.hidden, c.attention.qkv_bias)?,
            o: attention("o_proj", c.hidden, q, c.attention.o_bias)?,
            sinks,
            mlp: self.mlp(c, &at("mlp"))?,
        })
    }

    fn mlp(&self, c: &ModelConfig, prefix: &str) -> Result<MlpWeights> {
        let linear = |leaf: &str, out, cols, bias| self.linear(&format!("{prefix}.{leaf}"), out, cols, bias);
        Ok(match c.mlp {
            Mlp::Dense { intermediate, bias, .. } => MlpWeights::Dense {
                gate: linear("gate_proj", intermediate, c.hidden, bias)?,
                up: linear("up_proj", intermediate, c.hidden, bias)?,
                down: linear("down_proj", c.hidden, intermediate, bias)?,
            },
            Mlp::Moe { experts, intermediate, bias, router_bias, .. } => {
                let stack = |leaf: &str, shape| self.experts(&format!("{prefix}.experts.{leaf}"), shape, bias);
                MlpWeights::Moe {
                    router: linear("router", experts, c.hidden, router_bias)?,
                    gate_up: stack("gate_up_proj", [experts, 2 * intermediate, c.hidden])?,
                    down: stack("down_proj", [experts, c.hidden, intermediate])?,
                }
            }
        })
    }

    fn linear(&self, prefix: &str, rows: usize, cols: usize, bias: bool) -> Result<Linear> {
        let bias = bias.then(|| self.vector(&format!("{prefix}.bias"), rows)).transpose()?;
        Ok(Linear { matrix: self.matrix(&format!("{prefix}.weight"), rows, cols)?, bias })
    }

    /// A stack of matrices, bias in `<name>_bias`.
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

    /// The matrices of a tensor, all of the same size.
    fn bind_matrices(&self, entry: &Entry, [matrices, rows, cols]: [usize; 3]) -> Result<Vec<Weight>> {
        let shape = Shape::new(entry.store, rows, cols, self.convert)?;
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

    /// The numbers of a matrix that is best computed with as it is stored.
    fn windowed(&self, shape: Shape, numbers: impl FnOnce() -> Option<Windowed>) -> Option<Windowed> {
        let plain = shape.from.is_none() && shape.store == MatrixStore::Plain(DType::BF16);
        if plain && self.in_place { numbers() } else { None }
    }

    /// True for tensors that are to be rebuilt before the first token. They come here in the order of their use, but for the
    /// embedding.
    fn is_hot(&self, entry: &Entry) -> bool {
        let Some((_, keep)) = self.reader.rebuilt() else { return false };
        if keep.hot.contains(&entry.name) {
            return true;
        }
        let left = self.hot_bytes_left.get();
        if entry.name == EMBEDDING {
            return false;
        }
        let rest = left.checked_sub(entry.nbytes as u64);
        self.hot_bytes_left.set(rest.unwrap_or(0));
        rest.is_some()
    }

    /// The factors of a norm.
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
            return Err(Error::unsupported("quantized, where the runtime needs floats").tensor(name));
        };
        let mut values = vec![0.0; entry.elements()];
        decode_floats(dtype, &self.reader.payload(entry)?, &mut values).tensor(name)?;
        Ok(values)
    }

    fn entry(&self, name: &str, shape: &[usize]) -> Result<&Entry> {
        let Some(entry) = self.reader.get(name) else {
            return Err(Error::corrupt(format!("missing; the model needs it with shape {shape:?}")).tensor(name));
        };
        if entry.shape != shape {
            return Err(Error::corrupt(format!("shape {:?}, the model needs {shape:?}", entry.shape)).tensor(name));
        }
        self.bound.borrow_mut().insert(name.to_string());
        Ok(entry)
    }

    /// A tensor without a place would be ignored; only those that carry no information of their own may be.
    fn refuse_leftovers(&self, c: &ModelConfig) -> Result<()> {
        let bound = self.bound.borrow();
        let harmless =
            |name: &str| name.ends_with("rotary_emb.inv_freq") || c.tied_embeddings && name == "lm_head.weight";
        match self.reader.entries().iter().find(|e| !bound.contains(&e.name) && !harmless(&e.name)) {
            Some(extra) => {
                Err(Error::unsupported("the model description has no place for this tensor").tensor(&extra.name))
            }
            None => Ok(()),
        }
    }
}

/// Hot weights, and the others.
///
/// # Errors
/// A hot tensor is none of these.
fn sort_by_heat<'a>(rebuilt: &[&'a Rebuilt], keep: &Keep) -> Result<(Vec<&'a Rebuilt>, Vec<&'a Rebuilt>)> {
    let is_listed = |r: &Rebuilt| keep.hot.iter().any(|name| r.name() == name);
    if let Some(unknown) = keep.hot.iter().find(|name| !rebuilt.iter().any(|r| r.name() == **name)) {
        return Err(Error::usage("a hot tensor that is no matrix of this model")
            .tensor(unknown)
            .help("`iec inspect PACK --tensors` lists the names"));
    }
    let mut left = keep.hot_bytes;
    Ok(rebuilt.iter().partition(|r| {
        is_listed(r) || {
            let rest = left.checked_sub(r.nbytes() as u64);
            left = rest.unwrap_or(0);
            rest.is_some()
        }
    }))
}

/// A stored matrix, and what it is held as.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub rows: usize,
    pub cols: usize,
    /// What it is held as.
    pub store: MatrixStore,
    /// The floats that are to be converted.
    from: Option<DType>,
}

impl Shape {
    /// A matrix whose floats are converted to `convert`, if it is given.
    fn new(store: Store, rows: usize, cols: usize, convert: Option<DType>) -> Result<Shape> {
        let (store, from) = match store {
            Store::Tiled(spec) => (MatrixStore::Tiled(TileLayout::new(spec, rows, cols)?), None),
            Store::Plain(dtype) => {
                // F32 is never a reason to convert narrower floats: kernels widen them exactly.
                let to = match (convert, dtype) {
                    (Some(DType::F32) | None, DType::F64) => DType::F32,
                    (Some(DType::F32) | None, _) => dtype,
                    (Some(to), _) => to,
                };
                (MatrixStore::Plain(to), Some(dtype).filter(|from| *from != to))
            }
        };
        Ok(Shape { rows, cols, store, from })
    }

    /// The same of so many rows.
    pub fn with_rows(&self, rows: usize) -> Result<Shape> {
        let store = match self.store {
            MatrixStore::Tiled(layout) => MatrixStore::Tiled(TileLayout::new(layout.spec, rows, self.cols)?),
            plain => plain,
        };
        Ok(Shape { rows, store, ..*self })
    }

    /// The matrix whose stored bytes these are.
    ///
    /// # Errors
    /// They are too many or too few, no floats, or overflow the type they are converted to.
    pub fn matrix(&self, data: Bytes) -> Result<Matrix> {
        let data = match (self.store, self.from) {
            (MatrixStore::Plain(to), Some(from)) => narrow(from, &data, to)?,
            _ => data,
        };
        Matrix::new(self.rows, self.cols, self.store, data)
    }
}

/// Elements converted by one task.
const CONVERT_CHUNK: usize = 1 << 16;

/// Rounds float elements to a narrower float type, in parallel.
fn narrow(from: DType, bytes: &[u8], to: DType) -> Result<Bytes> {
    if !from.is_float() {
        return Err(Error::unsupported(format!("{from} elements where floats are needed")));
    }
    let elements = bytes.len() / from.size();
    Bytes::build(elements * to.size(), |out| {
        let sources = bytes.par_chunks(CONVERT_CHUNK * from.size());
        out.par_chunks_mut(CONVERT_CHUNK * to.size()).zip(sources).try_for_each(|(out, source)| {
            let mut values = vec![0.0; source.len() / from.size()];
            decode_floats(from, source, &mut values)?;
            let lost = match to {
                DType::F16 => {
                    round_to(&values, out, |v| f16::from_f32(v).to_le_bytes(), |b| f16::from_le_bytes(b).is_finite())
                }
                DType::BF16 => {
                    round_to(&values, out, |v| bf16::from_f32(v).to_le_bytes(), |b| bf16::from_le_bytes(b).is_finite())
                }
                _ => round_to(&values, out, f32::to_le_bytes, |b| f32::from_le_bytes(b).is_finite()),
            };
            match lost {
                Some(value) => Err(Error::engine(format!("the weight {value} does not fit {to}"))
                    .help("choose a precision with a wider range, for example --precision bf16 or fp32")),
                None => Ok(()),
            }
        })
    })
}

/// Rounds each value into `out`; returns a finite value that did not stay finite, if there is one.
fn round_to<const N: usize>(
    values: &[f32],
    out: &mut [u8],
    round: impl Fn(f32) -> [u8; N],
    finite: impl Fn([u8; N]) -> bool,
) -> Option<f32> {
    let mut lost = None;
    let (slots, _) = out.as_chunks_mut::<N>();
    for (slot, value) in slots.iter_mut().zip(values) {
        *slot = round(*value);
        if !finite(*slot) && value.is_finite() {
            lost = Some(*value);
        }
    }
    lost
}
