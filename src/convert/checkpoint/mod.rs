//! Opens a Hugging Face checkpoint as a model: its configuration and its canonical tensors, checked against each
//! other.
//!
//! Each [`CanonicalTensor`] records the location of its numbers in the source ([`bind`]). Rows are read by position
//! into the caller's buffers; the reader transposes, interleaves or unpacks them as needed ([`read`]).

mod bind;
mod codes;
mod output_matrix;
mod read;

use super::arch::{Arch, Fields, LeftOut, Naming, PartKind, disagrees_about_output};
use super::json::read_object;
use super::published::{Coded, Published, Source};
use super::source::foreign;
use super::source::hub;
use super::source::layout::Layout;
use super::source::shards::Shards;
use super::source::source_tensor::SourceTensor;
use super::tokenizer_files::{self, MadeTokenizer};
use crate::dtype::DType;
use crate::error::{Cause, Context, Result};
use crate::files;
use crate::iebin::{Store, matrices};
use crate::manifest::{FinishedTensor, Manifest, PackedRange};
use crate::model_config::ModelConfig;
use crate::scheme::BLOCK;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const CONFIG: &str = "config.json";

/// An opened checkpoint that holds every tensor the model needs, with the right shape.
#[derive(Debug)]
pub struct Checkpoint {
    layout: Layout,
    config_path: PathBuf,
    config: ModelConfig,
    tensors: Vec<CanonicalTensor>,
    by_name: HashMap<String, usize>,
    shards: Shards,
    left_out: Vec<LeftOutPart>,
    published: Published,
}

/// Tensors of a checkpoint that do not belong to the language model and are left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LeftOutPart {
    /// Name of the part, as at the beginning of the names of its tensors.
    pub part: String,
    /// Kind of the part.
    pub kind: PartKind,
    /// Number of tensors.
    pub tensors: usize,
    /// Bytes of these tensors.
    pub bytes: u64,
}

/// Inputs for opening a checkpoint, in addition to its directory.
#[derive(Debug, Clone, Copy, Default)]
pub struct CheckpointOptions<'a> {
    /// Configuration to use instead of `config.json` in the directory.
    pub config: Option<&'a Path>,
    /// Manifest whose files supply the codes and scales of tensors that the weights lack.
    pub manifest: Option<&'a Manifest>,
    /// True to read the tensors of multi-token prediction, too.
    pub with_mtp: bool,
}

/// A tensor with its canonical name and shape.
#[derive(Debug, Clone)]
pub struct CanonicalTensor {
    /// Canonical name (see [`crate::catalogue`]).
    pub name: String,
    /// Canonical shape.
    pub shape: Vec<usize>,
    /// Lossless storage of the same numbers in a pack: floats of this type, or codes of this scheme. Of a published
    /// quantized matrix, the type of its exact values; [`Checkpoint::native`] says whether a pack can hold its codes.
    pub store: Store,
    source: BoundView,
}

#[derive(Debug, Clone)]
enum BoundView {
    /// The bytes of a source tensor from `skip` on.
    Straight { tensor: SourceTensor, skip: usize },
    /// Rows from `first` on of each matrix of a source tensor, whose matrices have `of` rows.
    Slices { tensor: SourceTensor, first: usize, of: usize },
    /// Columns from `first` on of each matrix of a source tensor, whose matrices have `of` columns, as rows.
    Transposed { tensor: SourceTensor, first: usize, of: usize },
    /// Rows of a published quantized matrix or stack of matrices: row `r` of matrix `m` is row `m * of + first + r` of
    /// all its rows. The values are f32.
    Coded { coded: Arc<Coded>, first: usize, of: usize },
    /// Floats of this type, widened to f32.
    Widened { view: Box<BoundView>, from: DType },
    /// Codes and scales that are already in their final form.
    Packed(FinishedTensor),
    /// A stack of matrices, each with its own view.
    Stacked(Vec<BoundView>),
    /// Interleaved rows of `n` stacks: row `r` of each matrix is row `r / n` of the matrix in stack `r % n`.
    Interleaved(Vec<BoundView>),
}

impl CanonicalTensor {
    /// Returns the shape of the tensor as a stack of matrices, `(count, rows, cols)`; a vector is one row.
    pub fn matrices(&self) -> (usize, usize, usize) {
        // A vector has no second axis. The shapes of matrices were checked for overflow when the file was opened.
        matrices(&self.shape).unwrap_or((1, 1, self.shape.iter().product()))
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns `Some("in_out")` when the source stores the last two axes swapped.
    pub fn source_layout(&self) -> Option<&'static str> {
        self.source.is_transposed().then_some("in_out")
    }

    /// Returns the position in the source, `(file index, offset)`, used to read tensors in disk order.
    pub fn position(&self) -> (usize, u64) {
        self.source.tensors().first().map_or((0, 0), |tensor| (tensor.shard, tensor.start))
    }

    /// Returns the range with the canonical bytes of a tensor whose codes and scales are already final.
    pub fn packed(&self) -> Option<&PackedRange> {
        match &self.source {
            BoundView::Packed(packed) => Some(&packed.range),
            _ => None,
        }
    }

    /// Returns the name of the form in the source for display: `BF16`, `MXFP4`, `GPTQ 4 bit`.
    pub fn store_name(&self) -> &str {
        self.source.coded().first().map_or(self.store.name(), |coded| &coded.form)
    }

    /// Returns true for tensors that are made of published quantized matrices, all or some of them.
    pub fn is_coded(&self) -> bool {
        !self.source.coded().is_empty()
    }

    /// Returns true if the source holds columns of the tensor together and must be decoded, so that reading few rows at
    /// a time is slow.
    pub fn prefers_many_rows(&self) -> bool {
        self.source.coded().iter().any(|coded| coded.is_transposed())
    }

    /// Returns the number of bytes in the source. For finished codes the scales, a few percent, are not counted.
    pub fn source_bytes(&self) -> u64 {
        let elements = self.elements() as u64;
        let coded = self.source.coded();
        if !coded.is_empty() {
            let of_all = |count: fn(&Coded) -> u64| coded.iter().map(|coded| count(coded)).sum::<u64>();
            let all = of_all(|coded| coded.shape.iter().product::<usize>() as u64).max(1);
            return (u128::from(of_all(Coded::nbytes)) * u128::from(elements) / u128::from(all)) as u64;
        }
        match self.store {
            Store::Plain(dtype) => elements * dtype.size() as u64,
            Store::Tiled(spec) => {
                let scales = if self.packed().is_none() { elements / BLOCK as u64 } else { 0 };
                elements * u64::from(spec.scheme.bits()) / 8 + scales
            }
        }
    }
}

impl BoundView {
    /// Returns true when the source stores the last two axes swapped.
    fn is_transposed(&self) -> bool {
        match self {
            BoundView::Transposed { .. } => true,
            BoundView::Interleaved(parts) => parts.iter().all(BoundView::is_transposed),
            BoundView::Widened { view, .. } => view.is_transposed(),
            _ => false,
        }
    }

    /// Lists the source tensors of the view in the order in which they are read; empty when the codes are already
    /// final.
    fn tensors(&self) -> Vec<&SourceTensor> {
        match self {
            BoundView::Straight { tensor, .. }
            | BoundView::Slices { tensor, .. }
            | BoundView::Transposed { tensor, .. } => {
                vec![tensor]
            }
            BoundView::Coded { coded, .. } => coded.tensors(),
            BoundView::Widened { view, .. } => view.tensors(),
            BoundView::Packed(_) => vec![],
            BoundView::Stacked(parts) | BoundView::Interleaved(parts) => {
                parts.iter().flat_map(BoundView::tensors).collect()
            }
        }
    }

    /// Lists the published quantized matrices of the view.
    fn coded(&self) -> Vec<&Arc<Coded>> {
        match self {
            BoundView::Coded { coded, .. } => vec![coded],
            BoundView::Stacked(parts) | BoundView::Interleaved(parts) => {
                parts.iter().flat_map(BoundView::coded).collect()
            }
            _ => vec![],
        }
    }
}

impl Checkpoint {
    /// Opens a directory with `config.json` and weights, or a weight file with its configuration next to it
    /// ([`Layout`] lists the places).
    ///
    /// # Errors
    /// A file is missing or damaged, the configuration is not supported, or tensors are missing, unexpected or of
    /// another shape than the configuration requires.
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        Checkpoint::open_with(dir, CheckpointOptions::default())
    }

    /// Opens a checkpoint like [`Checkpoint::open`], with a configuration or finished tensors from other files.
    pub fn open_with(dir: &Path, options: CheckpointOptions) -> Result<Checkpoint> {
        foreign::refuse(dir)?;
        let layout = Layout::find(dir)?;
        let config_path = options.config.map_or_else(|| layout.dir().join(CONFIG), Path::to_path_buf);
        if options.config.is_none() && files::exists(&config_path)? {
            layout.refuse_escape(&config_path)?;
        }
        let config = read_object(&config_path).map_err(|e| match e.cause() {
            Cause::Io(_) => e.help(
                "name the directory of a Hugging Face checkpoint with --hf-dir, or its config.json with --config",
            ),
            _ => e,
        })?;
        let generation = match layout.companion("generation_config.json")? {
            Some(path) => Some(read_object(&path)?),
            None => None,
        };
        let fields = Fields::new(&config);
        let arch = Arch::of(&fields).at(&config_path)?;
        let mut model = arch.model_config(&fields, generation.as_ref()).at(&config_path)?;
        let shards = Shards::open_layout(&layout)?;
        let left_out = LeftOut::of(&fields).at(&config_path)?;
        let source = Source { config: &config, path: &config_path, layout: &layout };
        let published = Published::open(&source, &shards, &|name| left_out.part(name).is_some()).at(layout.dir())?;
        if model.tied_embeddings || disagrees_about_output(&fields).at(&config_path)? {
            model.tied_embeddings = output_matrix::is_embedding(&shards, &published).at(layout.dir())?;
        }
        let weights = bind::Weights { shards: &shards, published: &published, manifest: options.manifest };
        let mut tensors = bind::bind(arch, &model, &left_out, &weights).at(layout.dir())?;
        if options.with_mtp {
            let naming = Naming::usual(&fields).at(&config_path)?;
            tensors.extend(bind::predictions(&left_out, naming, &shards).at(layout.dir())?);
        }
        let used = tensors.iter().flat_map(|tensor| tensor.source.tensors()).map(|tensor| tensor.name.as_str());
        let left_out = LeftOutPart::list(&left_out, &shards, &used.collect());
        let by_name = tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        Ok(Checkpoint { layout, config_path, config: model, tensors, by_name, shards, left_out, published })
    }

    /// Returns the model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns all tensors, in the order in which a forward pass needs them; those of multi-token prediction come last.
    pub fn tensors(&self) -> &[CanonicalTensor] {
        &self.tensors
    }

    /// Finds a tensor by its canonical name.
    pub fn get(&self, name: &str) -> Option<&CanonicalTensor> {
        self.by_name.get(name).map(|i| &self.tensors[*i])
    }

    /// Returns the weight files.
    pub fn shards(&self) -> &Shards {
        &self.shards
    }

    /// Returns the published quantized matrices of the weights.
    pub fn published(&self) -> &Published {
        &self.published
    }

    /// Returns the tensors that do not belong to the language model, by part.
    pub fn left_out(&self) -> &[LeftOutPart] {
        &self.left_out
    }

    /// Returns the repository id (`ORG/NAME`) when the weights are in a Hugging Face cache.
    pub fn repo(&self) -> Option<String> {
        hub::repo_of(self.layout.dir())
    }

    /// Makes a tokenizer.json from other files, for a checkpoint that has none; see [`tokenizer_files::make`].
    ///
    /// # Errors
    /// A file is damaged, or the rules of the tokenizer are not known.
    pub fn make_tokenizer(&self) -> Result<Option<MadeTokenizer>> {
        tokenizer_files::of_checkpoint(&self.layout, &self.config_path)
    }

    /// Finds a file that accompanies the weights (`tokenizer.json`, …); returns `None` when there is none.
    ///
    /// # Errors
    /// The file is a symbolic link to a target outside the checkpoint.
    pub fn companion(&self, name: &str) -> Result<Option<PathBuf>> {
        match name {
            CONFIG => Ok(Some(self.config_path.clone())),
            _ => self.layout.companion(name),
        }
    }
}

impl LeftOutPart {
    /// Counts the tensors that are left out, by part. `used` has the names of those that are not.
    pub(super) fn list(left_out: &LeftOut, shards: &Shards, used: &HashSet<&str>) -> Vec<LeftOutPart> {
        let mut parts = BTreeMap::<String, LeftOutPart>::new();
        for tensor in shards.tensors().filter(|tensor| !used.contains(tensor.name.as_str())) {
            let Some((kind, part)) = left_out.part(&tensor.name) else { continue };
            let empty = || LeftOutPart { part: part.clone(), kind, tensors: 0, bytes: 0 };
            let found = parts.entry(part.clone()).or_insert_with(empty);
            found.tensors += 1;
            found.bytes += tensor.nbytes as u64;
        }
        parts.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::decode_floats;
    use crate::scheme::QuantSpec;

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
    }

    #[test]
    fn every_fixture_opens_with_all_its_tensors() {
        for (name, layers, windows) in
            [("llama-gqa", 3, 0), ("llama3-rope-tied", 2, 0), ("gptoss-bf16", 2, 2), ("gptoss-trained", 4, 4)]
        {
            let checkpoint = Checkpoint::open(&fixture(name)).unwrap();
            assert_eq!(checkpoint.config().n_layers, layers, "{name}");
            assert_eq!(checkpoint.config().attention.windows.len(), windows, "{name}");
            let last = &checkpoint.tensors()[checkpoint.tensors().len() - 1].name;
            assert_eq!(*last == "lm_head.weight", !checkpoint.config().tied_embeddings, "{name}");
        }
    }

    #[test]
    fn float_experts_are_read_transposed_in_any_chunks() {
        let checkpoint = Checkpoint::open(&fixture("gptoss-bf16")).unwrap();
        let tensor = checkpoint.get("model.layers.1.mlp.experts.gate_up_proj").unwrap();
        assert_eq!((tensor.shape.as_slice(), tensor.source_layout()), (&[4, 192, 64][..], Some("in_out")));
        let source = checkpoint.shards().get("model.layers.1.mlp.experts.gate_up_proj").unwrap();
        let mut raw = vec![0; source.nbytes];
        checkpoint.shards().read(source, 0, &mut raw).unwrap();
        let mut stored = vec![0f32; tensor.elements()];
        decode_floats(source.dtype, &raw, &mut stored).unwrap();
        for (matrix, rows) in [(0, 0..192), (3, 0..192), (2, 17..100), (1, 191..192), (1, 5..5)] {
            let mut values = vec![f32::NAN; rows.len() * 64];
            checkpoint.read_rows_f32(tensor, matrix, rows.clone(), &mut values).unwrap();
            for (i, row) in rows.enumerate() {
                for k in 0..64 {
                    assert_eq!(values[i * 64 + k], stored[(matrix * 64 + k) * 192 + row]);
                }
            }
        }
    }

    #[test]
    fn mxfp4_experts_decode_as_the_standard_says() {
        let checkpoint = Checkpoint::open(&fixture("gptoss-mxfp4")).unwrap();
        let tensor = checkpoint.get("model.layers.2.mlp.experts.down_proj").unwrap();
        let (experts, rows, cols) = tensor.matrices();
        assert_eq!((experts, rows, cols, tensor.store), (8, 96, 64, Store::Tiled(QuantSpec::MXFP4)));
        let raw = |suffix: &str| {
            let source = checkpoint.shards().get(&format!("{}_{suffix}", tensor.name)).unwrap();
            let mut bytes = vec![0; source.nbytes];
            checkpoint.shards().read(source, 0, &mut bytes).unwrap();
            bytes
        };
        let (blocks, scales) = (raw("blocks"), raw("scales"));
        let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let (matrix, range) = (5, 30..61);
        let mut values = vec![f32::NAN; range.len() * cols];
        checkpoint.read_rows_f32(tensor, matrix, range.clone(), &mut values).unwrap();
        for (i, row) in range.enumerate() {
            for k in 0..cols {
                let at = (matrix * rows + row) * cols + k;
                let code = blocks[at / 2] >> (4 * (at % 2)) & 15;
                let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
                let value = sign * magnitudes[code as usize & 7] * 2f32.powi(i32::from(scales[at / 32]) - 127);
                assert_eq!(values[i * cols + k], value);
            }
        }
    }
}
