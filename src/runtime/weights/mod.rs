//! Weights of a model: binds every tensor to its place in the layers and checks its shape.
//!
//! Matrices stay in the mapped file. Only codes of 5 and 6 bits, and float matrices of another type than the requested
//! precision, are converted into owned memory; for fp32, narrower floats stay, because kernels widen them exactly.
//! Matrices of a pack without `model.ie.bin` (a deduplicated pack) are rebuilt when they are used ([`Weight`]). Vectors
//! (norms, biases, sinks) are small and held as f32.

mod bind;
mod held;
pub mod rebuilt;
mod shape;

pub use held::HeldBytes;
pub(super) use shape::{Shape, narrow, per_head_bytes, transposed_dtype};

use super::cpu::{Arithmetic, Form, Matrix, MatrixStore, scalar};
use super::layer::transfer::Transfer;
use super::layer::{Block, Layer, Operation, Storage};
use super::profile::Stage;
use super::residency::Residency;
use crate::calibration::Site;
use crate::catalogue::{EMBEDDING, LM_HEAD, LayerTensor, Role, Target, layer_part};
use crate::dtype::{DType, decode_floats, encode_floats};
use crate::error::{Context, Error, Result};
use crate::iebin::rebuild::Keep;
use crate::iebin::{IebinReader, JSON_NAME};
use crate::interrupt;
use crate::mapped::Bytes;
use crate::model_config::ModelConfig;
use crate::progress;
use crate::scheme::{BLOCK, TILE_ROWS};
use bind::Binder;
use rebuilt::Rebuilt;
use rebuilt::cache::{Cache, too_small};
use std::ops::Deref;
use std::sync::{Arc, RwLock};

/// A weight matrix, in memory or to be rebuilt.
#[derive(Debug, Clone)]
pub enum Weight {
    /// A mapped or converted matrix.
    Here(Matrix),
    /// A matrix that is rebuilt when it is used.
    Rebuilt(Rebuilt),
    /// A matrix in memory that another may replace for a time.
    Exchanged(Arc<Exchange>),
}

/// A matrix that another of the same shape and storage replaces for a time.
#[derive(Debug)]
pub struct Exchange {
    original: Matrix,
    replacement: RwLock<Option<Arc<Matrix>>>,
}

impl Exchange {
    /// Holds a matrix that nothing replaces.
    pub fn new(original: Matrix) -> Exchange {
        Exchange { original, replacement: RwLock::default() }
    }

    /// Replaces the matrix by one with these values, `(rows, cols)`, which are rounded to its storage; `None` brings
    /// the original back.
    ///
    /// # Errors
    /// The matrix does not hold floats, or the values have another number.
    pub fn replace(&self, values: Option<&[f32]>) -> Result<()> {
        let replacement = values.map(|values| -> Result<Arc<Matrix>> {
            let Matrix { rows, cols, store, .. } = self.original;
            let MatrixStore::Plain(dtype) = store else {
                return Err(Error::unsupported("found a quantized matrix, expected one of floats"));
            };
            let mut bytes = Vec::new();
            encode_floats(dtype, values, &mut bytes)?;
            Matrix::new(rows, cols, store, Bytes::copied(&bytes)).map(Arc::new)
        });
        *self.replacement.write().expect("no thread panics while it holds the lock") = replacement.transpose()?;
        Ok(())
    }

    /// Returns the replacement, or the original.
    fn current(&self) -> Held<'_> {
        match &*self.replacement.read().expect("no thread panics while it holds the lock") {
            Some(replacement) => Held::Rebuilt(replacement.clone()),
            None => Held::Here(&self.original),
        }
    }
}

/// Access to a weight matrix during a computation.
#[derive(Debug)]
pub enum Held<'a> {
    /// A matrix that is always in memory.
    Here(&'a Matrix),
    /// A rebuilt matrix or a replacement, which stays in memory as long as this value exists.
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
    /// Returns the matrix in memory, rebuilding it if necessary.
    ///
    /// # Errors
    /// The source of the rebuilt bytes is damaged or was changed, or the cache has no room for the matrix.
    pub fn hold(&self) -> Result<Held<'_>> {
        match self {
            Weight::Here(matrix) => Ok(Held::Here(matrix)),
            Weight::Rebuilt(rebuilt) => rebuilt.matrix(false).map(Held::Rebuilt),
            Weight::Exchanged(exchange) => Ok(exchange.current()),
        }
    }

    /// Returns the description of a matrix that is rebuilt when it is used; `None` for a matrix that is in memory.
    fn as_rebuilt(&self) -> Option<&Rebuilt> {
        match self {
            Weight::Here(_) | Weight::Exchanged(_) => None,
            Weight::Rebuilt(rebuilt) => Some(rebuilt),
        }
    }

    /// Returns the number of rows, the output features.
    pub fn rows(&self) -> usize {
        match self {
            Weight::Here(matrix) => matrix.rows,
            Weight::Rebuilt(rebuilt) => rebuilt.shape.rows,
            Weight::Exchanged(exchange) => exchange.original.rows,
        }
    }

    /// Returns the number of columns, the input features.
    pub fn cols(&self) -> usize {
        match self {
            Weight::Here(matrix) => matrix.cols,
            Weight::Rebuilt(rebuilt) => rebuilt.shape.cols,
            Weight::Exchanged(exchange) => exchange.original.cols,
        }
    }

    /// Returns the storage format of the elements.
    pub fn store(&self) -> MatrixStore {
        match self {
            Weight::Here(matrix) => matrix.store,
            Weight::Rebuilt(rebuilt) => rebuilt.shape.store,
            Weight::Exchanged(exchange) => exchange.original.store,
        }
    }

    /// Returns the bytes that a product reads.
    pub fn nbytes(&self) -> usize {
        match self {
            Weight::Here(matrix) => matrix.nbytes(),
            Weight::Rebuilt(rebuilt) => rebuilt.nbytes(),
            Weight::Exchanged(exchange) => exchange.original.nbytes(),
        }
    }

    /// Writes row `row`, widened or dequantized, to `out` (one value per column).
    ///
    /// # Errors
    /// The stored bytes, or the source from which they are rebuilt, are damaged or were changed.
    pub fn read_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        match self {
            Weight::Here(matrix) => read_row(matrix, row, out),
            Weight::Rebuilt(rebuilt) => {
                let (part, row) = rebuilt.around(row)?;
                read_row(&part, row, out)
            }
            Weight::Exchanged(exchange) => read_row(&exchange.current(), row, out),
        }
    }
}

/// A matrix with its optional bias.
#[derive(Debug)]
pub struct Linear {
    /// Weights: `(out, in)`.
    pub matrix: Weight,
    /// Bias: `(out)`.
    pub bias: Option<Vec<f32>>,
    /// Layer and row of the catalogue, for matrices of layers.
    pub identity: Option<(usize, &'static LayerTensor)>,
}

impl Linear {
    /// Returns the layer and the target of adapters that may change the matrix as a whole.
    pub(super) fn target(&self) -> Option<(usize, Target)> {
        self.identity.and_then(|(layer, tensor)| Some((layer, tensor.target?)))
    }

    /// Returns true for the matrix that chooses experts.
    pub(super) fn is_router(&self) -> bool {
        self.identity.is_some_and(|(_, tensor)| tensor.role == Role::Router)
    }

    /// Returns the site that provides the inputs of the matrix, if calibration collects them.
    pub(super) fn site(&self) -> Option<Site> {
        self.identity.and_then(|(layer, tensor)| Some(Site { layer, part: tensor.input? }))
    }

    /// Returns the stage that counts the time of its products.
    pub(super) fn stage(&self) -> Stage {
        const MIXERS: [&str; 4] = ["self_attn.", "conv.", "linear_attn.", "mamba."];
        let name = self.identity.map_or("", |(_, tensor)| tensor.name);
        if MIXERS.iter().any(|mixer| name.starts_with(mixer)) { Stage::Projections } else { Stage::Mlp }
    }

    /// Returns the bytes that a product reads.
    pub fn nbytes(&self) -> usize {
        self.matrix.nbytes() + self.bias.as_ref().map_or(0, |bias| size_of_val(bias.as_slice()))
    }
}

/// Storage of weights in host memory, most of them mapped.
#[derive(Debug)]
pub struct Host;

impl Storage for Host {
    type Matrix = Linear;
    type Stack = Vec<Linear>;
    type Vector = Vec<f32>;
}

/// Weights that make the further inputs of all layers from a token and its embedding.
#[derive(Debug)]
pub struct PerLayerWeights {
    /// Embedding of the inputs of all layers: `(vocab, layers * width)`.
    pub embedding: Weight,
    /// Projection of the embedding of the model: `(layers * width, hidden)`.
    pub projection: Linear,
    /// Factors of the norm of the projection, layer by layer: `(width)`.
    pub norm: Vec<f32>,
}

/// Weights that make the input of a layer of multi-token prediction.
#[derive(Debug)]
pub struct JoinWeights {
    /// Factors of the norm of embeddings: `(hidden)`.
    pub embedding_norm: Vec<f32>,
    /// Factors of the norm of what the model computed: `(hidden)`.
    pub hidden_norm: Vec<f32>,
    /// Projection of both: `(hidden, 2 * hidden)`.
    pub projection: Linear,
}

/// All weights of a model.
#[derive(Debug)]
pub struct Weights {
    /// Embedding: `(vocab, hidden)`.
    pub embedding: Weight,
    /// Weights of the further inputs of layers, if there are some.
    pub per_layer: Option<PerLayerWeights>,
    /// Weights that make the input of the first layer, if it is one of multi-token prediction.
    pub join: Option<JoinWeights>,
    /// Decoder layers.
    pub layers: Vec<Layer<Host>>,
    /// Factors of the final norm: `(hidden)`.
    pub final_norm: Vec<f32>,
    /// Output matrix, `(vocab, hidden)`; the embedding itself if tied.
    pub lm_head: Weight,
    /// Cache of rebuilt matrices; `None` if the pack has its `model.ie.bin`.
    pub cache: Option<Arc<Cache>>,
}

/// Forms in which matrices are bound besides the usual one.
#[derive(Debug, Clone, Copy, Default)]
pub struct BindForm {
    /// True if matrices of a deduplicated pack stay compressed ([`crate::windowed::Windowed`]) where kernels can
    /// compute with that form.
    pub in_place: bool,
    /// True if others may replace the matrices.
    pub exchanged: bool,
}

/// Storage of nothing, for visits of all weights.
#[derive(Debug)]
struct Visited;

impl Storage for Visited {
    type Matrix = ();
    type Stack = ();
    type Vector = ();
}

/// List of all matrices.
struct List<'a>(Vec<&'a Linear>);

impl<'a> Transfer<'a, Host, Visited> for List<'a> {
    fn matrix(&mut self, linear: &'a Linear) -> Result<()> {
        self.0.push(linear);
        Ok(())
    }

    fn stack(&mut self, stack: &'a Vec<Linear>) -> Result<()> {
        self.0.extend(stack);
        Ok(())
    }

    fn vector(&mut self, _: &'a Vec<f32>) -> Result<()> {
        Ok(())
    }
}

/// Bytes of weights that one token reads.
struct TokenBytes {
    /// Number of experts that a token chooses.
    chosen: usize,
    bytes: usize,
}

impl<'a> Transfer<'a, Host, Visited> for TokenBytes {
    fn matrix(&mut self, linear: &'a Linear) -> Result<()> {
        self.bytes += linear.nbytes();
        Ok(())
    }

    fn stack(&mut self, stack: &'a Vec<Linear>) -> Result<()> {
        self.bytes += self.chosen * stack.first().map_or(0, Linear::nbytes);
        Ok(())
    }

    fn vector(&mut self, vector: &'a Vec<f32>) -> Result<()> {
        self.bytes += size_of_val(vector.as_slice());
        Ok(())
    }
}

impl Operation<Host> {
    /// Returns all matrices in the order of their use.
    fn linears(&self) -> Vec<&Linear> {
        let mut list = List(Vec::new());
        self.transfer(&mut list).expect("a list has room for all");
        list.0
    }

    /// Returns the matrix that an adapter changes as this [`Target`].
    pub(super) fn target(&self, target: Target) -> Option<&Linear> {
        self.linears().into_iter().find(|linear| linear.target().is_some_and(|(_, own)| own == target))
    }

    /// Returns the first or second matrices of all experts.
    pub(super) fn experts(&self, matrix: usize) -> Option<&[Linear]> {
        match self {
            Operation::Moe(op) => Some(if matrix == 0 { &op.gate_up } else { &op.down }),
            _ => None,
        }
    }

    /// Returns the forms of activations that its products read.
    fn forms(&self, arithmetic: Arithmetic) -> Vec<Form> {
        let of = |linear: &Linear| if linear.is_router() { arithmetic.for_routers() } else { arithmetic };
        self.linears().into_iter().map(|linear| linear.matrix.store().form(of(linear))).collect()
    }

    /// Returns the bytes read to compute one token; of experts only the chosen ones.
    fn bytes_per_token(&self, arithmetic: Arithmetic) -> usize {
        let chosen = if let Operation::Moe(op) = self { op.top_k } else { 0 };
        let mut read = TokenBytes { chosen, bytes: 0 };
        self.transfer(&mut read).expect("counting does not fail");
        let Operation::Latent(op) = self else { return read.bytes };
        let heads = per_head_bytes(&op.kv_b.matrix.store(), op.shape.n_heads, &op.latent, arithmetic);
        read.bytes - op.kv_b.nbytes() + heads.unwrap_or(0) as usize
    }
}

impl Layer<Host> {
    /// Returns all matrices in the order of their use.
    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.blocks.iter().flat_map(|block| block.operation.linears())
    }

    /// Releases the pages of mapped matrices, for use when memory is scarce. They are mapped again at the next access.
    pub fn release(&self) {
        self.linears().for_each(|linear| match &linear.matrix {
            Weight::Here(matrix) => matrix.data.release(),
            Weight::Exchanged(exchange) => exchange.original.data.release(),
            Weight::Rebuilt(_) => {}
        });
    }
}

impl Weights {
    /// Binds all tensors that the configuration requires and converts float matrices to `convert` if it is given.
    ///
    /// # Errors
    /// A tensor is missing, has the wrong shape or storage, overflows the type it is converted to, or has no place in
    /// the model (ignoring it would silently run a different model).
    pub fn bind(reader: &IebinReader, config: &ModelConfig, convert: Option<DType>, form: BindForm) -> Result<Weights> {
        Binder::new(reader, convert, form)
            .model(config)
            .at(reader.dir.join(JSON_NAME))
            .help("the pack is damaged, or another program made it; make it again with `iec pack`")
    }

    /// Binds the tensors of layer `number` of multi-token prediction as those of a model of one layer, which `config`
    /// describes; the embedding and the output matrix are those of `main`.
    ///
    /// # Errors
    /// The same as for [`Weights::bind`].
    pub(super) fn bind_prediction(
        reader: &IebinReader,
        config: &ModelConfig,
        convert: Option<DType>,
        main: &Weights,
        number: usize,
    ) -> Result<Weights> {
        Binder::new(reader, convert, BindForm::default())
            .prediction(config, main, number)
            .at(reader.dir.join(JSON_NAME))
            .help("the pack is damaged, or another program made it; make it again with `iec pack --with-mtp`")
    }

    /// Returns the matrices of a tensor, by its canonical name, that others may replace: those of all experts,
    /// otherwise one; none if the weights were not bound as [`BindForm::exchanged`].
    pub(super) fn exchanges(&self, tensor: &str) -> Vec<&Exchange> {
        let outside = match tensor {
            EMBEDDING => Some(&self.embedding),
            LM_HEAD => Some(&self.lm_head),
            _ => None,
        };
        let number = layer_part(tensor).and_then(|(number, leaf)| Some((number.parse::<usize>().ok()?, leaf)));
        let inside = number.and_then(|(number, leaf)| Some((self.layers.get(number)?, leaf)));
        let named = inside.into_iter().flat_map(|(layer, leaf)| {
            let is_named = move |linear: &&Linear| linear.identity.is_some_and(|(_, own)| own.name == leaf);
            layer.linears().filter(is_named).map(|linear| &linear.matrix)
        });
        let matrices = outside.into_iter().chain(named);
        matrices
            .filter_map(|weight| if let Weight::Exchanged(exchange) = weight { Some(&**exchange) } else { None })
            .collect()
    }

    /// Returns all matrices in the order of their use; a tied embedding appears twice.
    pub fn matrices(&self) -> impl Iterator<Item = &Weight> {
        let layers = self.layers.iter().flat_map(Layer::linears).map(|linear| &linear.matrix);
        let further = self.per_layer.iter().map(|weights| &weights.projection.matrix);
        [&self.embedding].into_iter().chain(further).chain(layers).chain([&self.lm_head])
    }

    /// Rebuilds weights before the first token: hot weights and, with [`Residency::Whole`] and [`Residency::Locked`],
    /// as many others as there is room for.
    ///
    /// # Errors
    /// A hot tensor does not belong to this model, there is not enough room, or the source of the rebuilt bytes is
    /// damaged or was changed.
    pub(super) fn rebuild(&self, keep: &Keep, residency: Residency) -> Result<()> {
        let Some(cache) = &self.cache else { return Ok(()) };
        // The embedding is skipped because it is read row by row.
        let rebuilt: Vec<&Rebuilt> = self.matrices().skip(1).filter_map(Weight::as_rebuilt).collect();
        let (hot, cold) = sort_by_heat(&rebuilt, keep)?;
        let bytes = |list: &[&Rebuilt]| list.iter().map(|r| r.nbytes() as u64).sum::<u64>();
        let (limit, largest) = (cache.limit(), cold.iter().map(|r| r.nbytes() as u64).max());
        let needed = bytes(&hot) + largest.unwrap_or(0);
        if cache.is_bounded() && limit < needed {
            return Err(too_small(limit, needed));
        }
        let all = matches!(residency, Residency::Whole | Residency::Locked);
        let mut room = if all { limit.saturating_sub(bytes(&hot)) } else { 0 };
        let warm: Vec<&Rebuilt> = cold.iter().take_while(|r| take(&mut room, r.nbytes())).copied().collect();
        let bar = progress::bytes("rebuilding", bytes(&hot) + bytes(&warm));
        for (list, hot) in [(hot, true), (warm, false)] {
            for rebuilt in list {
                interrupt::check()?;
                rebuilt.matrix(hot)?;
                bar.inc(rebuilt.nbytes() as u64);
            }
        }
        Ok(())
    }

    /// Locks rebuilt matrices in memory, after rebuilding those that are missing.
    ///
    /// # Errors
    /// A matrix cannot be rebuilt, or the system refuses to lock memory.
    pub(super) fn lock(&self) -> Result<()> {
        self.matrices().filter_map(Weight::as_rebuilt).try_for_each(|rebuilt| rebuilt.matrix(true)?.data.lock())
    }

    /// Returns the forms of activations that products with these weights read.
    pub fn forms(&self, arithmetic: Arithmetic) -> Vec<Form> {
        let blocks = self.layers.iter().flat_map(|layer| &layer.blocks);
        let mut forms: Vec<Form> = blocks.flat_map(|block| block.operation.forms(arithmetic)).collect();
        forms.push(self.lm_head.store().form(arithmetic));
        let inputs = self.per_layer.iter().map(|weights| &weights.projection);
        let inputs = inputs.chain(self.join.iter().map(|weights| &weights.projection));
        forms.extend(inputs.map(|projection| projection.matrix.store().form(arithmetic)));
        forms.sort_unstable();
        forms.dedup();
        forms
    }

    /// Returns the bytes of weights read to compute one token: every matrix once, of experts only the chosen ones.
    pub fn bytes_per_token(&self, arithmetic: Arithmetic) -> u64 {
        let blocks = self.layers.iter().flat_map(|layer| &layer.blocks);
        let block = |block: &Block<Host>| {
            let norms = [block.input.norm(), block.post_norm.as_ref()].into_iter().flatten();
            norms.map(|norm| size_of_val(norm.as_slice())).sum::<usize>() + block.operation.bytes_per_token(arithmetic)
        };
        let embedding_row = self.embedding.nbytes() / self.embedding.rows();
        let ends = embedding_row + size_of_val(self.final_norm.as_slice()) + self.lm_head.nbytes();
        let further = self
            .per_layer
            .iter()
            .map(|weights| weights.projection.nbytes() + weights.embedding.nbytes() / weights.embedding.rows());
        (blocks.map(block).sum::<usize>() + ends + further.sum::<usize>()) as u64
    }
}

/// Writes row `row` of a matrix, widened or dequantized, to `out` (`cols` values).
pub(in crate::runtime) fn read_row(matrix: &Matrix, row: usize, out: &mut [f32]) -> Result<()> {
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
                let (codes, factors) = scalar::tile_block(&layout, tile, row % TILE_ROWS, block);
                let width = BLOCK / layout.block_groups;
                out.iter_mut()
                    .zip(codes)
                    .enumerate()
                    .for_each(|(k, (out, code))| *out = factors[k / width].weight(code));
            }
            Ok(())
        }
    }
}

/// Splits matrices into hot ones and others.
///
/// # Errors
/// A hot tensor is not among these matrices.
fn sort_by_heat<'a>(rebuilt: &[&'a Rebuilt], keep: &Keep) -> Result<(Vec<&'a Rebuilt>, Vec<&'a Rebuilt>)> {
    let is_listed = |r: &Rebuilt| keep.hot.iter().any(|name| r.name() == name);
    if let Some(unknown) = keep.hot.iter().find(|name| !rebuilt.iter().any(|r| r.name() == **name)) {
        return Err(Error::usage("--dedup-hot-list names a tensor that is not a matrix of this model")
            .tensor(unknown)
            .help("`iec inspect PACK --tensors` lists the names"));
    }
    let mut left = keep.hot_bytes;
    Ok(rebuilt.iter().partition(|r| is_listed(r) || take(&mut left, r.nbytes())))
}

/// Takes bytes from the rest of a budget and returns true. If they exceed the rest, sets it to 0 and returns false.
fn take(left: &mut u64, bytes: usize) -> bool {
    let rest = left.checked_sub(bytes as u64);
    *left = rest.unwrap_or(0);
    rest.is_some()
}
