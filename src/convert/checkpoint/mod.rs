//! Opens a Hugging Face checkpoint, a pack or a GGUF file as a model: its configuration and its canonical tensors,
//! checked against each other.
//!
//! Each [`CanonicalTensor`] records the location of its numbers in the source ([`bind`]). Rows are read by position
//! into the caller's buffers; the reader transposes, interleaves or unpacks them as needed ([`read`]). [`stored`] reads
//! packs and GGUF files.

mod bind;
mod codes;
mod origin;
mod output_matrix;
mod read;
mod stored;

use super::arch::{Arch, Fields, LeftOut, Naming, PartKind, disagrees_about_output};
use super::json::read_object;
use super::published::{Coded, Published, Source};
use super::source::kind::SourceKind;
use super::source::layout::Layout;
use super::source::shards::Shards;
use super::source::source_tensor::SourceTensor;
use crate::catalogue::Role;
use crate::dtype::DType;
use crate::error::{Cause, Context, Error, Result};
use crate::files;
use crate::iebin::{Store, matrices};
use crate::manifest::{FinishedTensor, Manifest, PackedRange};
use crate::model_config::ModelConfig;
use crate::scheme::BLOCK;
use origin::Origin;
use serde::Serialize;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use stored::Stored;

const CONFIG: &str = "config.json";

/// An opened checkpoint, pack or GGUF file that holds every tensor the model needs, with the right shape.
#[derive(Debug)]
pub struct Checkpoint {
    origin: Origin,
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
    /// Configuration to use instead of `config.json` in the directory of a Hugging Face checkpoint.
    pub config: Option<&'a Path>,
    /// Manifest whose files supply the codes and scales of tensors that the weights lack.
    pub manifest: Option<&'a Manifest>,
    /// True to read the layers of multi-token prediction, too. Those of a pack are always read.
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
    /// A tensor of a pack or of a GGUF file, by its number.
    Stored { model: Arc<Stored>, item: usize },
    /// A stack of matrices, each with its own view.
    Stacked(Vec<BoundView>),
    /// Ranges of `rows` rows of a matrix, each with its own view.
    Joined { parts: Vec<BoundView>, rows: usize },
    /// Interleaved rows of `n` stacks: row `r` of each matrix is row `r / n` of the matrix in stack `r % n`.
    Interleaved(Vec<BoundView>),
}

/// Splits rows of a matrix whose ranges of `height` rows are parts: returns for each part its number, its rows, and the
/// number of rows before them.
fn rows_of_parts(height: usize, rows: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>, usize)> {
    let parts = rows.start / height..rows.end.div_ceil(height);
    parts.map(move |part| {
        let (first, end) = (rows.start.max(part * height), rows.end.min((part + 1) * height));
        (part, first - part * height..end - part * height, first - rows.start)
    })
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

    /// Returns `Some("in_out")` when the source stores the last two axes swapped; for a pack, what it records.
    pub fn source_layout(&self) -> Option<&str> {
        match &self.source {
            BoundView::Stored { model, item } => model.entry(*item)?.source_layout.as_deref(),
            source => source.is_transposed().then_some("in_out"),
        }
    }

    /// Returns the error of the quantization that a pack records.
    pub(in crate::convert) fn recorded_metrics(&self) -> Option<&serde_json::Value> {
        match &self.source {
            BoundView::Stored { model, item } => model.entry(*item)?.metrics.as_ref(),
            _ => None,
        }
    }

    /// Returns the position in the source, `(file index, offset)`, used to read tensors in disk order.
    pub fn position(&self) -> (usize, u64) {
        if let BoundView::Stored { model, item } = &self.source {
            return model.position(*item);
        }
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
    pub fn store_name(&self) -> String {
        match &self.source {
            BoundView::Stored { model, item } => model.form(*item),
            source => source.coded().first().map_or(self.store.name(), |coded| &coded.form).to_string(),
        }
    }

    /// Returns true for tensors that are quantized in the source: those of a pack or a GGUF file, and those that are
    /// made of published quantized matrices, all or some of them.
    pub fn is_coded(&self) -> bool {
        match &self.source {
            BoundView::Stored { model, item } => model.is_coded(*item),
            source => !source.coded().is_empty(),
        }
    }

    /// Returns true for a tensor of a pack or a GGUF file.
    pub(in crate::convert) fn is_stored(&self) -> bool {
        matches!(self.source, BoundView::Stored { .. })
    }

    /// Returns true if the source holds columns of the tensor together and must be decoded, so that reading few rows at
    /// a time is slow.
    pub fn prefers_many_rows(&self) -> bool {
        self.source.coded().iter().any(|coded| coded.is_transposed())
    }

    /// Returns the number of bytes in the source. For finished codes the scales, a few percent, are not counted.
    pub fn source_bytes(&self) -> u64 {
        if let BoundView::Stored { model, item } = &self.source {
            return model.bytes(*item);
        }
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
    /// final, and for packs and GGUF files.
    fn tensors(&self) -> Vec<&SourceTensor> {
        match self {
            BoundView::Straight { tensor, .. }
            | BoundView::Slices { tensor, .. }
            | BoundView::Transposed { tensor, .. } => {
                vec![tensor]
            }
            BoundView::Coded { coded, .. } => coded.tensors(),
            BoundView::Widened { view, .. } => view.tensors(),
            BoundView::Packed(_) | BoundView::Stored { .. } => vec![],
            BoundView::Stacked(parts) | BoundView::Joined { parts, .. } | BoundView::Interleaved(parts) => {
                parts.iter().flat_map(BoundView::tensors).collect()
            }
        }
    }

    /// Lists the published quantized matrices of the view.
    fn coded(&self) -> Vec<&Arc<Coded>> {
        match self {
            BoundView::Coded { coded, .. } => vec![coded],
            BoundView::Stacked(parts) | BoundView::Joined { parts, .. } | BoundView::Interleaved(parts) => {
                parts.iter().flat_map(BoundView::coded).collect()
            }
            _ => vec![],
        }
    }
}

impl Checkpoint {
    /// Opens a directory with `config.json` and weights, or a weight file with its configuration next to it
    /// ([`Layout`] lists the places), a pack, or a GGUF file.
    ///
    /// # Errors
    /// A file is missing or damaged, the configuration is not supported, or tensors are missing, unexpected or of
    /// another shape than the configuration requires.
    pub fn open(dir: &Path) -> Result<Checkpoint> {
        Checkpoint::open_with(dir, CheckpointOptions::default())
    }

    /// Opens a checkpoint like [`Checkpoint::open`], with a configuration or finished tensors from other files.
    ///
    /// # Errors
    /// The same as for [`Checkpoint::open`]; an option does not apply to a pack or a GGUF file.
    pub fn open_with(path: &Path, options: CheckpointOptions) -> Result<Checkpoint> {
        let stored = match SourceKind::of(path)? {
            SourceKind::Checkpoint(dir) => return Checkpoint::open_directory(&dir, options),
            SourceKind::Pack(json) => Stored::open_pack(&json)?,
            SourceKind::Gguf(file) => Stored::open_gguf(&file)?,
        };
        Checkpoint::of_stored(&Arc::new(stored), options).at(path)
    }

    /// Makes a model of an opened pack or GGUF file.
    fn of_stored(stored: &Arc<Stored>, options: CheckpointOptions) -> Result<Checkpoint> {
        if options.config.is_some() {
            return Err(Error::usage("found --config with a pack or a GGUF file, which has its own configuration")
                .help("leave --config out"));
        }
        let tensors = stored.tensors();
        if options.with_mtp && !tensors.iter().any(|tensor| Role::of(&tensor.name) == Role::Prediction) {
            return Err(Error::usage("--with-mtp: found no tensors of multi-token prediction")
                .help("leave --with-mtp out, or name the checkpoint that has these tensors"));
        }
        Ok(Checkpoint {
            config: stored.config().clone(),
            by_name: numbers(&tensors),
            tensors,
            shards: Shards::default(),
            left_out: Vec::new(),
            published: Published::default(),
            origin: Origin::Stored(stored.clone()),
        })
    }

    fn open_directory(dir: &Path, options: CheckpointOptions) -> Result<Checkpoint> {
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
        if options.with_mtp {
            model.prediction_layers = arch.prediction_layers(&fields).at(&config_path)?;
            model.validate().at(&config_path)?;
        }
        let is_left_out = |name: &str| match left_out.part(name) {
            Some((PartKind::Prediction, _)) => model.prediction_layers == 0,
            part => part.is_some(),
        };
        let published = Published::open(&source, &shards, &is_left_out).at(layout.dir())?;
        if model.tied_embeddings || disagrees_about_output(&fields).at(&config_path)? {
            model.tied_embeddings = output_matrix::is_embedding(&shards, &published).at(layout.dir())?;
        }
        let weights = bind::Weights { shards: &shards, published: &published, manifest: options.manifest };
        let mut tensors = bind::bind(arch, &model, &left_out, &weights).at(layout.dir())?;
        if options.with_mtp {
            let naming = Naming::usual(&fields).at(&config_path)?;
            tensors.extend(bind::further_predictions(&left_out, naming, &weights, &tensors).at(layout.dir())?);
        }
        let used = tensors.iter().flat_map(|tensor| tensor.source.tensors()).map(|tensor| tensor.name.as_str());
        let left_out = LeftOutPart::list(&left_out, &shards, &used.collect());
        let (by_name, origin) = (numbers(&tensors), Origin::Directory { layout, config_path });
        Ok(Checkpoint { origin, config: model, tensors, by_name, shards, left_out, published })
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

    /// Returns the weight files of a Hugging Face checkpoint and their tensors; none for a pack or a GGUF file.
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
}

/// Maps the names of tensors to their numbers.
fn numbers(tensors: &[CanonicalTensor]) -> HashMap<String, usize> {
    tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect()
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
    use std::path::PathBuf;

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
