//! Opens a pack, a checkpoint or a single weight file as one list of tensors.

use crate::catalogue::Role;
use crate::convert::assess::Assessment;
use crate::convert::json::read_limited;
use crate::convert::source::read_at::InputFile;
use crate::convert::source::shard;
use crate::convert::source::shards::Shards;
use crate::convert::source::source_tensor::SourceTensor;
use crate::dedup::source::{self, Trust};
use crate::dtype::DType;
use crate::error::{Cause, Context, Error, Result};
use crate::files;
use crate::iebin::reader::{check_entries, read_description};
use crate::iebin::rebuild::Rebuild;
use crate::iebin::{Description, Entry, IebinReader, JSON_NAME, Store};
use crate::mapped::{Bytes, MappedFile};
use crate::model_config::ModelConfig;
use crate::scheme::{Granularity, QuantSpec, ScaleType, TileLayout};
use crate::strict_json;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Pack, checkpoint or weight file with all its tensors.
#[derive(Default)]
pub struct Container {
    /// `IEBIN pack`, `deduplicated IEBIN pack`, `Hugging Face checkpoint`, `safetensors file` or `PyTorch file`.
    pub kind: &'static str,
    /// Class name of the model, if a configuration contains it.
    pub architecture: Option<String>,
    /// Files that hold weights, with their sizes in bytes.
    pub files: Vec<(PathBuf, u64)>,
    /// Tensors in file order.
    pub tensors: Vec<StoredTensor>,
    /// Dimensions of the model, if its configuration is understood.
    pub model: Option<ModelConfig>,
    /// Whether a checkpoint runs, and what else it holds.
    pub assessment: Option<Assessment>,
    /// Description of a pack, without its tensor list.
    pub pack: Option<Description>,
}

/// Tensor of any container.
pub struct StoredTensor {
    /// Name in the container.
    pub name: String,
    /// Role of the tensor in the model.
    pub role: Role,
    /// Element type; with scheme and group size when quantized.
    pub dtype: String,
    /// Shape in the container.
    pub shape: Vec<usize>,
    /// Number of weights: two per byte of MXFP4 codes, none for a byte of their exponents.
    pub parameters: u64,
    /// SHA-256 that the container records, if any.
    pub sha256: Option<String>,
    /// Bytes of the tensor and their format.
    pub payload: Payload,
}

/// Bytes of a tensor and their format.
pub enum Payload {
    /// Row-major elements.
    Plain(DType, Content),
    /// Tiled matrices, one after the other.
    Tiled(TileLayout, Content),
}

/// Bytes of a tensor.
pub enum Content {
    /// Bytes of a mapped file.
    Here(Bytes),
    /// Bytes that the pack rebuilds on request: the index of the tensor in the pack, and its length in bytes.
    Rebuilt(Arc<DeduplicatedPack>, usize, usize),
}

/// Deduplicated pack without its binary; the deduplicated files are opened at the first request for bytes.
pub struct DeduplicatedPack {
    dir: PathBuf,
    opened: Mutex<Option<Arc<dyn Rebuild>>>,
}

impl Content {
    fn len(&self) -> usize {
        match self {
            Content::Here(bytes) => bytes.len(),
            Content::Rebuilt(.., nbytes) => *nbytes,
        }
    }

    /// Returns the bytes, borrowed from the file or rebuilt.
    ///
    /// # Errors
    /// A file that the bytes are rebuilt from is missing or was changed.
    pub fn bytes(&self) -> Result<Bytes> {
        match self {
            Content::Here(bytes) => Ok(bytes.clone()),
            Content::Rebuilt(store, tensor, nbytes) => {
                let source = store.open()?;
                Bytes::build(*nbytes, |out| source.read(*tensor, 0..*nbytes, out))
            }
        }
    }
}

impl DeduplicatedPack {
    fn open(&self) -> Result<Arc<dyn Rebuild>> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(source) = &*opened {
            return Ok(source.clone());
        }
        let source = source::open(&self.dir.join(JSON_NAME), &self.dir, Trust::Files)?;
        Ok(opened.insert(source).clone())
    }
}

impl StoredTensor {
    /// Returns the stored size in bytes.
    pub fn nbytes(&self) -> u64 {
        match &self.payload {
            Payload::Plain(_, content) | Payload::Tiled(_, content) => content.len() as u64,
        }
    }
}

impl Container {
    /// Opens a pack, a checkpoint or a weight file at `path`; `None` for a JSON file of another kind.
    ///
    /// # Errors
    /// There is no file of a known kind at `path`, or it breaks the rules of its format.
    pub fn open(path: &Path) -> Result<Option<Container>> {
        if std::fs::metadata(path).at(path)?.is_dir() {
            return open_dir(path).map(Some);
        }
        files::open(path)?;
        match path.extension().and_then(|e| e.to_str()) {
            Some(extension @ ("safetensors" | "bin" | "pt" | "pth")) => {
                let (shard, tensors) = shard::open(path, 0)?;
                let kind = if extension == "safetensors" { "safetensors file" } else { "PyTorch file" };
                let mut container = Container { kind, ..Container::default() };
                container.add(&[shard], tensors, &HashMap::new())?;
                Ok(Some(container))
            }
            Some("json") if is_description(path)? => Container::pack(IebinReader::open_files(path, None)?).map(Some),
            Some("json") => Ok(None),
            _ => Err(Error::unsupported(
                "found a file of an unknown kind, expected a directory, a .safetensors, .bin, .gguf or .jsonl file, \
                 model.ie.json or a manifest",
            )
            .at(path)),
        }
    }

    fn pack(reader: IebinReader) -> Result<Container> {
        let bin = reader.bin()?;
        let files = vec![(bin.path().to_path_buf(), bin.bytes().len() as u64)];
        let tensor = |e| packed_tensor(e, Content::Here(reader.payload(e)?));
        let tensors = reader.entries().iter().map(tensor).collect::<Result<_>>()?;
        Ok(Container { kind: "IEBIN pack", files, tensors, ..Container::described(reader.description) })
    }

    /// Creates a container with the fields that come from the description of a pack.
    fn described(description: Description) -> Container {
        let (architecture, model) = (description.architecture.clone(), description.model.clone());
        Container { architecture, model, pack: Some(description), ..Container::default() }
    }

    /// Opens a deduplicated pack whose binary was removed.
    fn deduplicated(dir: &Path) -> Result<Container> {
        let json = dir.join(JSON_NAME);
        let mut description = read_description(&json)?;
        let (older, length) = (description.is_older(), description.total_bytes.unwrap_or(u64::MAX) as usize);
        let entries = check_entries(std::mem::take(&mut description.tensors), length, older).at(&json)?;
        let store = Arc::new(DeduplicatedPack { dir: dir.to_path_buf(), opened: Mutex::default() });
        let tensor =
            |(i, entry): (usize, &Entry)| packed_tensor(entry, Content::Rebuilt(store.clone(), i, entry.nbytes));
        let tensors = entries.iter().enumerate().map(tensor).collect::<Result<_>>()?;
        let file = |path: PathBuf| (path.clone(), path.metadata().map_or(0, |m| m.len()));
        let files = crate::dedup::FILE_NAMES.map(|name| file(dir.join(name))).to_vec();
        Ok(Container { kind: "deduplicated IEBIN pack", files, tensors, ..Container::described(description) })
    }

    /// Opens a directory of weight files; its configuration, if there is one, may be of any architecture.
    fn checkpoint(dir: &Path) -> Result<Container> {
        let mut container = Container { kind: "Hugging Face checkpoint", ..Container::default() };
        let shards = match Shards::open(dir) {
            Err(e) if !matches!(e.cause(), Cause::Unsupported(_)) => return Err(e),
            shards => shards,
        };
        let mut assessment = Assessment::of(dir, shards.as_ref())?;
        if let Ok(shards) = &shards {
            container.add(shards.files(), shards.tensors().cloned().collect(), &assessment.weights_by_tensor)?;
        }
        container.architecture = assessment.architecture.take();
        container.model = assessment.model.take();
        container.assessment = Some(assessment);
        Ok(container)
    }

    /// Adds tensors of weight files. `weights` has the number of weights of those that belong to quantized matrices.
    fn add(
        &mut self,
        files: &[InputFile],
        mut tensors: Vec<SourceTensor>,
        weights: &HashMap<String, u64>,
    ) -> Result<()> {
        tensors.sort_by_key(|t| (t.shard, t.start));
        let maps = files.iter().map(|f| MappedFile::open(f.path())).collect::<Result<Vec<_>>>()?;
        for tensor in tensors {
            let start = tensor.start as usize;
            let bytes = match tensor.strides {
                None => Bytes::mapped(&maps[tensor.shard], start..start + tensor.nbytes)?,
                Some(_) => Bytes::build(tensor.nbytes, |out| tensor.read(&files[tensor.shard], 0, out))?,
            };
            self.tensors.push(StoredTensor {
                role: Role::of(&tensor.name),
                dtype: tensor.dtype.name().into(),
                parameters: weights.get(&tensor.name).copied().unwrap_or_else(|| parameters(&tensor)),
                name: tensor.name,
                shape: tensor.shape,
                sha256: None,
                payload: Payload::Plain(tensor.dtype, Content::Here(bytes)),
            });
        }
        self.files.extend(files.iter().map(|f| (f.path().to_path_buf(), f.nbytes())));
        Ok(())
    }
}

/// Returns the number of weights in a stored tensor: two per byte of MXFP4 codes, none for an exponent.
fn parameters(tensor: &SourceTensor) -> u64 {
    let elements = tensor.shape.iter().product::<usize>() as u64;
    match tensor.name.rsplit(['_', '.']).next() {
        Some("blocks") if tensor.dtype == DType::U8 => 2 * elements,
        Some("scales") if tensor.dtype == DType::U8 => 0,
        _ => elements,
    }
}

fn open_dir(dir: &Path) -> Result<Container> {
    if crate::dedup::is_reduced(dir)? {
        return Container::deduplicated(dir);
    }
    if files::is_file(&dir.join(JSON_NAME))? {
        return Container::pack(IebinReader::open(dir)?);
    }
    Container::checkpoint(dir)
        .map_err(|e| e.help(format!("name a directory with {JSON_NAME} or a Hugging Face checkpoint")))
}

/// Returns true when a JSON file describes a pack: it names a binary and a format, which manifests do not.
fn is_description(path: &Path) -> Result<bool> {
    let named = path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(".ie.json"));
    if named {
        return Ok(true);
    }
    let json = strict_json::parse_python(&read_limited(path)?).at(path)?;
    Ok(json["weights_bin"].is_string() && json["format"].as_str().is_some_and(|f| f.starts_with("iebin")))
}

fn packed_tensor(entry: &Entry, content: Content) -> Result<StoredTensor> {
    let (dtype, payload) = match entry.store {
        Store::Plain(dtype) => (dtype.name().to_string(), Payload::Plain(dtype, content)),
        Store::Tiled(spec) => {
            let (_, rows, cols) = entry.matrices()?;
            (describe_spec(&spec), Payload::Tiled(TileLayout::new(spec, rows, cols)?, content))
        }
    };
    Ok(StoredTensor {
        name: entry.name.clone(),
        role: Role::of(&entry.name),
        dtype,
        shape: entry.shape.clone(),
        parameters: entry.elements() as u64,
        sha256: entry.sha256.clone(),
        payload,
    })
}

/// Formats a quantization format as `q4_0`, `nl4`, `nl4 i8_row`, `int4 g64`, `int4 row affine` or `int8 tensor`.
pub fn describe_spec(spec: &QuantSpec) -> String {
    let affine = if spec.symmetric { "" } else { " affine" };
    let scales = if spec.scale_dtype == ScaleType::I8Row { " i8_row" } else { "" };
    let info = spec.scheme.info();
    match spec.granularity {
        _ if info.is_block_format => format!("{}{scales}", info.name),
        Granularity::Group(n) => format!("{} g{n}{affine}{scales}", info.name),
        granularity => format!("{} {granularity}{affine}", info.name),
    }
}
