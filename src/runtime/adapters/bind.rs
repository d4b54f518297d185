//! Binds adapters to the matrices of an opened model.

use super::heads::HeadChanges;
use super::{BoundAdapter, BoundChange, BoundEmbedding, BoundFactors, Factor, LayerChanges};
use crate::adapter::{Adapter, Change, Int8Factor, LowRank, transposed};
use crate::catalogue::{EMBEDDING, FURTHER_PROJECTION, LayerTensor, Target, layer_part};
use crate::dtype::{DType, encode_floats};
use crate::error::{Error, Result};
use crate::mapped::Bytes;
use crate::model_config::ModelConfig;
use crate::runtime::cpu::{Arithmetic, FactorType, LowRankInput, Matrix, MatrixStore, Panels};
use crate::runtime::layer::Operation;
use crate::runtime::weights::{Linear, Weight, Weights};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// Binds adapters to an opened model, also while its engine computes.
#[derive(Debug, Clone)]
pub struct AdapterBinder {
    pub(in crate::runtime) config: ModelConfig,
    pub(in crate::runtime) weights: Arc<Weights>,
    /// Whether factors stay exact: the precision is fp32.
    pub(in crate::runtime) exact: bool,
    /// Arithmetic of the products with the weights.
    pub(in crate::runtime) arithmetic: Arithmetic,
    /// Layers that the CPU computes.
    pub(in crate::runtime) on_cpu: Range<usize>,
}

impl AdapterBinder {
    /// Returns the sizes of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the bytes that a number of a factor takes in memory.
    pub fn number_bytes(&self) -> u64 {
        if self.exact { 4 } else { 2 }
    }

    /// Converts an adapter to the form that products read. Factors are f32 if the computation is exact, and bf16 if
    /// activations are rounded to int8 or bf16; otherwise they stay f16 or bf16, and f32 becomes f16 where it fits. For
    /// DoRA, all rows of the changed matrices are read.
    ///
    /// # Errors
    /// A change has other sizes than its matrix, or a weight cannot be read.
    pub fn bind(&self, adapter: &Adapter) -> Result<Arc<BoundAdapter>> {
        let mut bound = BoundAdapter {
            hash: adapter.hash.clone(),
            bytes: 0,
            layers: (0..self.config.n_layers).map(|_| LayerChanges::default()).collect(),
            embedding: None,
            lm_head: None,
            further: None,
            is_dora: adapter.changes.values().flatten().any(|change| change.magnitude.is_some()),
        };
        let tensor =
            |(name, changes): (&String, &Vec<Change>)| Bound::of(name, changes, self).map_err(|e| e.tensor(name));
        for tensor in adapter.changes.par_iter().map(tensor).collect::<Result<Vec<_>>>()? {
            bound.bytes += tensor.nbytes();
            match tensor {
                Bound::LmHead(change) => bound.lm_head = Some(change),
                Bound::Further(change) => bound.further = Some(change),
                Bound::Embedding(change) => bound.embedding = Some(change),
                Bound::Matrix(layer, target, change) => bound.layers[layer].targets[target as usize] = Some(change),
                Bound::Experts(layer, matrix, experts) => bound.layers[layer].experts[matrix] = experts,
                Bound::Heads(layer, heads) => bound.layers[layer].heads = Some(heads),
            }
        }
        Ok(Arc::new(bound))
    }
}

/// Bound changes of a tensor, with its place in the model.
enum Bound {
    LmHead(BoundChange),
    /// The projection to the further inputs of all layers.
    Further(BoundChange),
    Embedding(BoundEmbedding),
    /// A matrix of a layer.
    Matrix(usize, Target, BoundChange),
    /// The first or second matrix of all experts of a layer.
    Experts(usize, usize, Vec<Option<BoundChange>>),
    /// The matrices of the heads of a layer.
    Heads(usize, HeadChanges),
}

impl Bound {
    fn of(name: &str, changes: &[Change], base: &AdapterBinder) -> Result<Bound> {
        let unknown = || Error::unsupported("found a change of a tensor that cannot be changed");
        let first = changes.first().ok_or_else(unknown)?;
        if name == "lm_head.weight" {
            return bind_change(first, &base.weights.lm_head, None, base).map(Bound::LmHead);
        }
        if name == EMBEDDING {
            return bind_embedding(first, base).map(Bound::Embedding);
        }
        if name == FURTHER_PROJECTION {
            let projection = &base.weights.per_layer.as_ref().ok_or_else(unknown)?.projection;
            return bind_change(first, &projection.matrix, None, base).map(Bound::Further);
        }
        let (layer, part) = layer_part(name).ok_or_else(unknown)?;
        let layer: usize = layer.parse().map_err(|_| unknown())?;
        let operations = &base.weights.layers.get(layer).ok_or_else(unknown)?.blocks;
        if let Some(target) = LayerTensor::of(part).and_then(|tensor| tensor.target) {
            let found = operations.iter().find_map(|block| Some((block, block.operation.target(target)?)));
            let (block, linear) = found.ok_or_else(unknown)?;
            if let (Operation::Latent(op), Target::KvHeads, true) =
                (&block.operation, target, base.on_cpu.contains(&layer))
            {
                return HeadChanges::bind(first, op, base).map(|heads| Bound::Heads(layer, heads));
            }
            let change = bind_change(first, &linear.matrix, linear.bias.as_deref(), base)?;
            return Ok(Bound::Matrix(layer, target, change));
        }
        let matrix = match part {
            "mlp.experts.gate_up_proj" | "mlp.experts.up_proj" => 0,
            "mlp.experts.down_proj" => 1,
            _ => return Err(unknown()),
        };
        let stack = operations.iter().find_map(|block| block.operation.experts(matrix)).ok_or_else(unknown)?;
        if stack.len() != changes.len() {
            return Err(unknown());
        }
        let bind = |(change, linear): (&Change, &Linear)| match change.is_empty() {
            true => Ok(None),
            false => bind_change(change, &linear.matrix, linear.bias.as_deref(), base).map(Some),
        };
        let experts = changes.iter().zip(stack).map(bind).collect::<Result<Vec<_>>>()?;
        Ok(Bound::Experts(layer, matrix, experts))
    }

    fn nbytes(&self) -> usize {
        match self {
            Bound::LmHead(change) | Bound::Further(change) | Bound::Matrix(.., change) => change.nbytes(),
            Bound::Heads(_, heads) => heads.nbytes(),
            Bound::Embedding(change) => change.nbytes(),
            Bound::Experts(.., experts) => experts.iter().flatten().map(BoundChange::nbytes).sum(),
        }
    }
}

/// Binds the change of a matrix with a bias, `(rows)`.
fn bind_change(change: &Change, weight: &Weight, bias: Option<&[f32]>, base: &AdapterBinder) -> Result<BoundChange> {
    let (rows, cols) = (weight.rows(), weight.cols());
    let low_rank = change.low_rank.as_ref().map(|factors| bind_factors(factors, rows, cols, base)).transpose()?;
    let replaced = match &change.replaced {
        Some(values) if !equals(values, weight)? => {
            Some(matrix(rows, cols, values, storage(DType::F32, values, base))?)
        }
        _ => None,
    };
    let gain = match &change.magnitude {
        Some(magnitude) => Some(gain(magnitude, change, weight)?),
        None => None,
    };
    // The product has added the bias already, and `gain` multiplies it, too.
    let own = |i: usize| bias.map_or(0.0, |bias| bias[i]);
    let number = |i: usize| {
        let scaled = gain.as_ref().map_or(1.0, |gain| gain[i]);
        let bias = change.bias.as_ref().map_or(own(i), |bias| bias[i]);
        bias - scaled * own(i) + change.added.as_ref().map_or(0.0, |added| added[i])
    };
    let adds = change.bias.is_some() || change.added.is_some() || gain.is_some() && bias.is_some();
    let add = adds.then(|| (0..rows).map(number).collect());
    Ok(BoundChange { rows, low_rank, gain, add, add_scales: change.bias.is_none(), replaced })
}

/// Binds the change of the embedding, whose A has a row per token.
fn bind_embedding(change: &Change, base: &AdapterBinder) -> Result<BoundEmbedding> {
    let weight = &base.weights.embedding;
    let (vocab, hidden) = (weight.rows(), weight.cols());
    let low_rank = match &change.low_rank {
        None => None,
        Some(LowRank { rank, scale, a, b, dtype, .. }) => {
            // As a product: B of the embedding has a row per token, A a column per number of an embedding.
            let (by_token, by_number) = (b, transposed(a, *rank, hidden));
            let dtype = storage(*dtype, by_token, base);
            let panels = Panels::new(&by_number, hidden, *rank, factor_type(dtype, base));
            Some((matrix(vocab, *rank, by_token, dtype)?, panels, *scale))
        }
    };
    let replaced = match &change.replaced {
        Some(values) if !equals(values, weight)? => {
            Some(matrix(vocab, hidden, values, storage(DType::F32, values, base))?)
        }
        _ => None,
    };
    let gain = match &change.magnitude {
        Some(magnitude) => Some(column_gain(magnitude, change, weight)?),
        None => None,
    };
    Ok(BoundEmbedding { low_rank, gain, replaced })
}

/// Binds low-rank factors of a matrix `(rows, cols)`.
fn bind_factors(factors: &LowRank, rows: usize, cols: usize, base: &AdapterBinder) -> Result<BoundFactors> {
    check_size(factors, rows, cols)?;
    let LowRank { rank, scale, a, b, dtype, int8 } = factors;
    let of = |values: &[f32]| factor_type(storage(*dtype, values, base), base);
    Ok(BoundFactors {
        a: match &int8[0] {
            Some(a) => bound_int8(a, *rank, cols)?,
            None => Factor::Floats(Arc::new(LowRankInput::new(a, *rank, cols, of(a)))),
        },
        b: match &int8[1] {
            Some(b) => bound_int8(b, rows, *rank)?,
            None => Factor::Floats(Arc::new(Panels::new(b, rows, *rank, of(b)))),
        },
        scale: *scale,
    })
}

/// Checks the sizes of the factors of a matrix `(rows, cols)`.
pub(super) fn check_size(LowRank { rank, a, b, .. }: &LowRank, rows: usize, cols: usize) -> Result<()> {
    match a.len() == rank * cols && b.len() == rows * rank {
        true => Ok(()),
        false => {
            Err(Error::corrupt(format!("found factors of another size, expected those of a matrix {rows} x {cols}")))
        }
    }
}

/// Binds a factor in int8.
fn bound_int8<T>(factor: &Int8Factor, rows: usize, cols: usize) -> Result<Factor<T>> {
    Matrix::new(rows, cols, MatrixStore::Tiled(factor.layout), factor.data.clone()).map(Factor::Int8)
}

/// Returns the type in which factors are stored.
pub(super) fn storage(dtype: DType, values: &[f32], base: &AdapterBinder) -> DType {
    let fits = |x: &f32| x.abs() < half::f16::MAX.to_f32();
    match dtype {
        _ if base.exact => DType::F32,
        DType::F32 if values.iter().all(fits) => DType::F16,
        DType::F32 => DType::BF16,
        narrow => narrow,
    }
}

/// Returns the form of factors that are stored in this type.
pub(super) fn factor_type(dtype: DType, base: &AdapterBinder) -> FactorType {
    match dtype {
        DType::F32 => FactorType::F32,
        _ if matches!(base.arithmetic, Arithmetic::Int8 | Arithmetic::Bf16) => FactorType::Pairs,
        DType::F16 => FactorType::F16,
        _ => FactorType::Bf16,
    }
}

/// Makes a matrix of floats.
fn matrix(rows: usize, cols: usize, values: &[f32], dtype: DType) -> Result<Matrix> {
    let mut bytes = Vec::new();
    encode_floats(dtype, values, &mut bytes)?;
    let data = Bytes::build(bytes.len(), |out| {
        out.copy_from_slice(&bytes);
        Ok(())
    })?;
    Matrix::new(rows, cols, MatrixStore::Plain(dtype), data)
}

/// Returns true if a weight has these values.
fn equals(values: &[f32], weight: &Weight) -> Result<bool> {
    let cols = weight.cols();
    let same = |row: usize| -> Result<bool> {
        let mut own = vec![0.0; cols];
        weight.read_row(row, &mut own)?;
        Ok(own == values[row * cols..][..cols])
    };
    // Usually the first row tells.
    Ok(same(0)? && (1..weight.rows()).into_par_iter().map(same).try_reduce(|| true, |a, b| Ok(a && b))?)
}

/// Adds the low-rank change of a row to the row.
fn add_row(row: &mut [f64], number: usize, change: &Change) {
    let Some(LowRank { rank, scale, a, b, .. }) = &change.low_rank else { return };
    let cols = row.len();
    for k in 0..*rank {
        let factor = f64::from(*scale) * f64::from(b[number * rank + k]);
        row.iter_mut().zip(&a[k * cols..]).for_each(|(x, a)| *x += factor * f64::from(*a));
    }
}

/// Reads a row of a matrix with its change.
fn changed_row(number: usize, change: &Change, weight: &Weight) -> Result<Vec<f64>> {
    let cols = weight.cols();
    let mut row = vec![0.0; cols];
    match &change.replaced {
        Some(values) => row.copy_from_slice(&values[number * cols..][..cols]),
        None => weight.read_row(number, &mut row)?,
    }
    let mut row: Vec<f64> = row.into_iter().map(f64::from).collect();
    add_row(&mut row, number, change);
    Ok(row)
}

/// Returns the gain of each row for DoRA.
pub(super) fn gain(magnitude: &[f32], change: &Change, weight: &Weight) -> Result<Vec<f32>> {
    let one = |number: usize| {
        let norm = changed_row(number, change, weight)?.iter().map(|x| x * x).sum::<f64>().sqrt();
        Ok((f64::from(magnitude[number]) / norm) as f32)
    };
    finite((0..weight.rows()).into_par_iter().map(one).collect::<Result<_>>()?)
}

/// Returns the gain of each column of an embedding for DoRA.
fn column_gain(magnitude: &[f32], change: &Change, weight: &Weight) -> Result<Vec<f32>> {
    let mut squares = vec![0f64; weight.cols()];
    for number in 0..weight.rows() {
        squares.iter_mut().zip(changed_row(number, change, weight)?).for_each(|(sum, x)| *sum += x * x);
    }
    finite(squares.iter().zip(magnitude).map(|(sum, m)| (f64::from(*m) / sum.sqrt()) as f32).collect())
}

fn finite(gain: Vec<f32>) -> Result<Vec<f32>> {
    match gain.iter().all(|gain| gain.is_finite()) {
        true => Ok(gain),
        false => Err(Error::corrupt("found a changed matrix with a row of zeros, expected a norm for each magnitude")),
    }
}
