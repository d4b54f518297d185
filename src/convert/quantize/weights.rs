//! Reads the weights that are to be quantized, from a checkpoint, a pack or a GGUF file.

use crate::calibration::Calibration;
use crate::catalogue::Role;
use crate::convert::executor::Task;
use crate::convert::guidance;
use crate::convert::source::read_at::InputFile;
use crate::convert::{Checkpoint, CheckpointOptions};
use crate::error::{Context, Result};
use crate::iebin::{self, Store};
use crate::job::Fingerprint;
use crate::model_config::ModelConfig;
use crate::provenance::Source;
use crate::quant::stream::{self, Stack};
use crate::quant_spec::TensorQuant;
use std::ops::Range;
use std::path::Path;

/// Canonical name of the embedding that may also be the output matrix.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// An opened model: a Hugging Face checkpoint, a pack, or a GGUF file.
#[derive(Debug)]
pub struct Weights(Box<Checkpoint>);

/// A tensor of the model.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Canonical name.
    pub name: String,
    /// Canonical shape.
    pub shape: Vec<usize>,
    /// Role in the model.
    pub role: Role,
    /// True for the embedding of a model that uses it as its output matrix, too.
    pub is_tied: bool,
    /// Storage format of the source.
    pub store: Store,
    /// True if the weights are quantized in the source, also if `store` is the type of their decoded values.
    pub is_coded: bool,
    index: usize,
}

impl Tensor {
    /// Returns the shape as a stack of matrices: `(count, rows, cols)`.
    pub fn matrices(&self) -> Result<(usize, usize, usize)> {
        iebin::matrices(&self.shape).tensor(&self.name)
    }

    /// Returns the number of weights.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product::<usize>() as u64
    }

    /// Returns the size in the source in bytes; of quantized tensors, the size of the codes without the scales.
    pub fn nbytes(&self) -> u64 {
        match self.store {
            Store::Plain(dtype) => self.elements() * dtype.size() as u64,
            Store::Tiled(spec) => self.elements() * u64::from(spec.scheme.bits()) / 8,
        }
    }
}

impl Weights {
    /// Opens a model; `config` replaces the config.json of a Hugging Face checkpoint.
    ///
    /// # Errors
    /// The same as for [`Checkpoint::open`].
    pub fn open(path: &Path, config: Option<&Path>) -> Result<Weights> {
        let checkpoint = Checkpoint::open_with(path, CheckpointOptions { config, ..CheckpointOptions::default() })?;
        Ok(Weights(Box::new(checkpoint)))
    }

    /// Returns the description of the model.
    pub fn config(&self) -> &ModelConfig {
        self.0.config()
    }

    /// Returns all tensors in the order of the model.
    pub fn tensors(&self) -> Vec<Tensor> {
        let listed = self.0.tensors().iter().enumerate();
        let mut tensors: Vec<Tensor> =
            listed.map(|(i, t)| Tensor { is_coded: t.is_coded(), ..tensor(i, &t.name, &t.shape, t.store) }).collect();
        let has_head = tensors.iter().any(|tensor| tensor.role == Role::LmHead);
        tensors.iter_mut().for_each(|tensor| tensor.is_tied = !has_head && tensor.name == EMBEDDING);
        tensors
    }

    /// Reads rows of one matrix of a tensor into `out`, which must have exactly their length. Codes are decoded.
    ///
    /// # Errors
    /// The tensor holds finished codes of an older pack, or reading fails.
    pub fn read_rows_f32(&self, tensor: &Tensor, matrix: usize, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.0.read_rows_f32(&self.0.tensors()[tensor.index], matrix, rows, out)
    }

    /// Returns a closure that reads rows of a tensor, for [`Stack::read`](crate::quant::stream::Stack::read).
    pub(super) fn rows<'a>(
        &'a self,
        tensor: &'a Tensor,
    ) -> impl Fn(usize, Range<usize>, &mut [f32]) -> Result<()> + 'a {
        move |matrix, rows, out| self.read_rows_f32(tensor, matrix, rows, out)
    }

    /// Returns a closure like that of [`Weights::rows`], which adds the correction of the tensor if the statistics have
    /// one.
    pub(super) fn corrected_rows<'a>(
        &'a self,
        tensor: &'a Tensor,
        calibration: Option<&'a Calibration>,
    ) -> impl Fn(usize, Range<usize>, &mut [f32]) -> Result<()> + 'a {
        move |matrix, range, out| {
            let first = range.start;
            self.read_rows_f32(tensor, matrix, range, out)?;
            let (_, rows, cols) = tensor.matrices()?;
            calibration.map_or(Ok(()), |calibration| calibration.correct(&tensor.name, [rows, cols], first, out))
        }
    }

    /// Quantizes matrix number `matrix` of a tensor as a pack does, and returns the values that its codes stand for.
    ///
    /// # Errors
    /// The tensor cannot be read or quantized, or the statistics are of another model.
    pub fn quantized(
        &self,
        tensor: &Tensor,
        quant: TensorQuant,
        calibration: Option<&Calibration>,
        matrix: usize,
    ) -> Result<Vec<f32>> {
        let (count, rows, cols) = tensor.matrices()?;
        let inputs = guidance::inputs(calibration, &tensor.name, (count, cols), quant.method)?;
        let read = self.corrected_rows(tensor, calibration);
        let stack = Stack { count, rows, cols, read: &read, chunk_rows: None, inputs: inputs.as_ref() };
        stream::round_trip(quant, &stack, matrix)
    }

    /// Returns the weight files whose hashes identify the model; none for a pack.
    pub(super) fn files(&self) -> &[InputFile] {
        self.0.hashed_files()
    }

    /// Returns the size of all weight files in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.0.files().iter().map(InputFile::nbytes).sum()
    }

    /// Lists tasks that hash the weight files, for [`Weights::source`], and tasks that compare `tensors` of a pack with
    /// their recorded hashes.
    pub(super) fn hash_tasks<'a>(&'a self, tensors: impl IntoIterator<Item = &'a Tensor>) -> Vec<Task<'a>> {
        let checks = tensors.into_iter().filter_map(|tensor| self.0.check_task(&self.0.tensors()[tensor.index]));
        self.files().iter().map(Task::hash_file).chain(checks).collect()
    }

    /// Adds everything to `fingerprint` that determines the values of the weights.
    pub(crate) fn fingerprint(&self, fingerprint: &mut Fingerprint) -> Result<()> {
        self.0.fingerprint(fingerprint)
    }

    /// Returns names, sizes and hashes of the weight files; for a pack, those of the files it was made from.
    /// `sha256` holds the digests of [`Weights::files`].
    pub(super) fn source(&self, sha256: &[Option<String>]) -> Option<Source> {
        self.0.source(sha256)
    }
}

fn tensor(index: usize, name: &str, shape: &[usize], store: Store) -> Tensor {
    let (name, role) = (name.to_string(), Role::of(name));
    Tensor { name, shape: shape.to_vec(), role, is_tied: false, store, is_coded: false, index }
}

#[cfg(test)]
impl Tensor {
    /// Returns a tensor of floats for tests that read no weights.
    pub(crate) fn float(name: &str, shape: &[usize], is_tied: bool) -> Tensor {
        Tensor { is_tied, ..tensor(0, name, shape, Store::Plain(crate::dtype::DType::F32)) }
    }
}
