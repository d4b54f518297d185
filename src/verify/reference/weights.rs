//! Reads the tensors of a checkpoint: safetensors with the crate of that name, torch files with candle, those of the
//! old container with its pickle machine.

use crate::error::{Context, Error, Result};
use crate::files;
use crate::mapped::MappedFile;
use crate::verify::dtype::RefDtype;
use crate::verify::reference::legacy_torch::LegacyFile;
use candle_core::pickle::PthTensors;
use candle_core::{DType, Device, Tensor};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Matrices that a checkpoint holds as codes of another quantizer, decoded by the caller.
pub trait DecodedMatrices: std::fmt::Debug + Send + Sync {
    /// Returns the shape of a matrix, or of a stack of matrices, by its name in the unquantized model; `None` for
    /// tensors that are no codes.
    fn shape(&self, name: &str) -> Option<&[usize]>;

    /// Returns the exact values of matrix number `matrix` of a stack, or of the only one, row after row.
    ///
    /// # Errors
    /// The codes or scales are damaged, or reading fails.
    fn values(&self, name: &str, matrix: usize) -> Result<Vec<f32>>;
}

/// Opened weight files of a checkpoint, and for each tensor the index of its file.
#[derive(Debug)]
pub struct Weights {
    dir: PathBuf,
    files: Vec<File>,
    place: HashMap<String, usize>,
    decoded: Option<Box<dyn DecodedMatrices>>,
}

enum File {
    /// Memory-mapped file; the system may reclaim its pages.
    Safetensors(Arc<MappedFile>),
    Torch(PthTensors),
    LegacyTorch(LegacyFile),
}

impl std::fmt::Debug for File {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            File::Safetensors(_) => "safetensors",
            File::Torch(_) | File::LegacyTorch(_) => "torch",
        })
    }
}

impl Weights {
    /// Opens the weight files of the directory: those that `from_pretrained` prefers if there are several formats.
    /// `decoded` has the matrices that are no floats there.
    pub fn open(dir: &Path, decoded: Option<Box<dyn DecodedMatrices>>) -> Result<Weights> {
        let mut weights = Weights { dir: dir.to_path_buf(), files: Vec::new(), place: HashMap::new(), decoded };
        for path in weight_files(dir)? {
            weights.add(&path).at(&path)?;
        }
        Ok(weights)
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let index = self.files.len();
        let file = if path.extension().is_some_and(|e| e == "bin") {
            self.add_torch(path, index)?
        } else {
            let mapped = MappedFile::open(path)?;
            let parsed = parse(mapped.bytes())?;
            self.place.extend(parsed.names().into_iter().map(|name| (name.to_string(), index)));
            File::Safetensors(mapped)
        };
        self.files.push(file);
        Ok(())
    }

    fn add_torch(&mut self, path: &Path, index: usize) -> Result<File> {
        if let Some(legacy) = LegacyFile::open(path)? {
            self.place.extend(legacy.names().map(|name| (name.clone(), index)));
            return Ok(File::LegacyTorch(legacy));
        }
        let torch = PthTensors::new(path, None)?;
        self.place.extend(torch.tensor_infos().keys().map(|name| (name.clone(), index)));
        Ok(File::Torch(torch))
    }

    /// Returns true when the checkpoint has this tensor.
    pub fn has(&self, name: &str) -> bool {
        self.stored(name).is_some() || self.coded(name).is_some()
    }

    /// Returns the name that a tensor of a language model has in the checkpoint, which may be that of a wrapper, and
    /// the index of its file.
    fn stored(&self, name: &str) -> Option<(&str, usize)> {
        let mut found = possible(name).filter_map(|name| self.place.get_key_value(&name));
        found.next().map(|(name, index)| (name.as_str(), *index))
    }

    /// Returns the name and the shape of a matrix of codes.
    fn coded(&self, name: &str) -> Option<(&dyn DecodedMatrices, String, &[usize])> {
        let decoded = self.decoded.as_deref()?;
        possible(name).find_map(|name| decoded.shape(&name).map(|shape| (decoded, name, shape)))
    }

    /// Returns a tensor, rounded to `dtype`.
    pub fn get(&self, name: &str, dtype: RefDtype) -> Result<Tensor> {
        if let Some((decoded, stored, shape)) = self.coded(name) {
            let count = shape.iter().rev().skip(2).product();
            let mut values = Vec::new();
            for matrix in 0..count {
                values.extend(decoded.values(&stored, matrix).tensor(name).at(&self.dir)?);
            }
            return self.rounded(name, values, shape, dtype);
        }
        let (stored, file) = self.file(name)?;
        let found = match file {
            File::Safetensors(mapped) => tensor(&parse(mapped.bytes())?.tensor(stored)?),
            File::LegacyTorch(legacy) => Ok(legacy.get(stored).tensor(name).at(&self.dir)?),
            File::Torch(torch) => {
                torch.get(stored).and_then(|t| t.ok_or_else(|| candle_core::Error::Msg("found no such tensor".into())))
            }
        };
        let widened = found.and_then(|t| dtype.round(t.to_dtype(dtype.wide())?));
        widened.tensor(name).at(&self.dir)
    }

    /// Makes a tensor of values and rounds it to `dtype`.
    fn rounded(&self, name: &str, values: Vec<f32>, shape: &[usize], dtype: RefDtype) -> Result<Tensor> {
        let made = Tensor::from_vec(values, shape, &Device::Cpu);
        made.and_then(|t| dtype.round(t.to_dtype(dtype.wide())?)).tensor(name).at(&self.dir)
    }

    /// Returns a tensor as [`Weights::get`] does, or `None` if there is no such tensor.
    pub fn find(&self, name: &str, dtype: RefDtype) -> Result<Option<Tensor>> {
        if self.has(name) { self.get(name, dtype).map(Some) } else { Ok(None) }
    }

    /// Returns entry `index` along the first dimension, rounded to `dtype`.
    pub fn row(&self, name: &str, index: usize, dtype: RefDtype) -> Result<Tensor> {
        if let Some((decoded, stored, [_, shape @ ..])) = self.coded(name) {
            let values = decoded.values(&stored, index).tensor(name).at(&self.dir)?;
            return self.rounded(name, values, shape, dtype);
        }
        let (stored, File::Safetensors(mapped)) = self.file(name)? else {
            return self.get(name, dtype)?.get(index).tensor(name);
        };
        let parsed = parse(mapped.bytes())?;
        let view = parsed.tensor(stored)?;
        let (shape, bytes) = entry(&view, index).tensor(name).at(&self.dir)?;
        let view = TensorView::new(view.dtype(), shape, bytes)?;
        tensor(&view).and_then(|t| dtype.round(t.to_dtype(dtype.wide())?)).tensor(name)
    }

    /// Returns the shape and the bytes of entry `index` along the first dimension of a U8 tensor.
    pub fn bytes(&self, name: &str, index: usize) -> Result<(Vec<usize>, Vec<u8>)> {
        let (stored, File::Safetensors(mapped)) = self.file(name)? else {
            let found = "found a tensor of bytes in a torch file, which the reference reads only from safetensors";
            return Err(Error::unsupported(found).tensor(name));
        };
        let parsed = parse(mapped.bytes())?;
        let view = parsed.tensor(stored)?;
        if view.dtype() != safetensors::Dtype::U8 {
            return Err(Error::corrupt(format!("found {:?}, expected U8", view.dtype())).tensor(name).at(&self.dir));
        }
        entry(&view, index).map(|(shape, bytes)| (shape, bytes.to_vec())).tensor(name).at(&self.dir)
    }

    /// Returns the name of a tensor in the checkpoint, and its file.
    fn file(&self, name: &str) -> Result<(&str, &File)> {
        let (stored, index) = self.stored(name).ok_or_else(|| {
            Error::corrupt("found no such tensor in the checkpoint")
                .tensor(name)
                .at(&self.dir)
                .help("name a complete checkpoint with the tensor names of Hugging Face `transformers` with --hf-dir")
        })?;
        Ok((stored, &self.files[index]))
    }
}

/// Returns the names that a tensor of a language model may have in a checkpoint.
fn possible(name: &str) -> impl Iterator<Item = String> {
    let inside = name.strip_prefix("model.").map(|rest| format!("model.language_model.{rest}"));
    // Nemotron-H.
    let in_backbone = name.strip_prefix("model.").map(|rest| match rest {
        "embed_tokens.weight" => "backbone.embeddings.weight".to_string(),
        "norm.weight" => "backbone.norm_f.weight".to_string(),
        rest => format!("backbone.{rest}"),
    });
    [Some(name.to_string()), inside, Some(format!("language_model.{name}")), in_backbone].into_iter().flatten()
}

fn entry<'a>(view: &TensorView<'a>, index: usize) -> Result<(Vec<usize>, &'a [u8])> {
    let (count, shape) = view
        .shape()
        .split_first()
        .ok_or_else(|| Error::corrupt("found a tensor of rank 0, expected at least one dimension"))?;
    if index >= *count {
        return Err(Error::corrupt(format!("found {count} entries, expected at least {}", index + 1)));
    }
    let bytes = view.data().len() / count;
    Ok((shape.to_vec(), &view.data()[index * bytes..(index + 1) * bytes]))
}

fn tensor(view: &TensorView<'_>) -> candle_core::Result<Tensor> {
    let dtype = match view.dtype() {
        safetensors::Dtype::F32 => DType::F32,
        safetensors::Dtype::F16 => DType::F16,
        safetensors::Dtype::BF16 => DType::BF16,
        safetensors::Dtype::F64 => DType::F64,
        other => return Err(candle_core::Error::Msg(format!("found {other:?}, expected a float type"))),
    };
    Tensor::from_raw_buffer(view.data(), dtype, view.shape(), &Device::Cpu)
}

fn parse(bytes: &[u8]) -> Result<SafeTensors<'_>> {
    Ok(SafeTensors::deserialize(bytes)?)
}

impl From<safetensors::SafeTensorError> for Error {
    fn from(e: safetensors::SafeTensorError) -> Error {
        Error::corrupt(format!("not readable as safetensors: {e}"))
    }
}

/// Returns the single weight file, or the shards listed by an index; safetensors are preferred to torch files.
fn weight_files(dir: &Path) -> Result<Vec<PathBuf>> {
    for stem in ["model.safetensors", "pytorch_model.bin"] {
        let single = dir.join(stem);
        if files::exists(&single)? {
            return Ok(vec![single]);
        }
        let index = dir.join(format!("{stem}.index.json"));
        if files::exists(&index)? {
            let text = files::read(&index)?;
            let json: serde_json::Value =
                serde_json::from_slice(&text).map_err(|e| Error::corrupt(format!("not JSON: {e}"))).at(&index)?;
            let map = json["weight_map"].as_object();
            let none =
                || Error::corrupt("found no object, expected one with the file of each tensor").tensor("weight_map");
            let map = map.ok_or_else(|| none().at(&index))?;
            let names: std::collections::BTreeSet<&str> = map.values().filter_map(|v| v.as_str()).collect();
            return names.into_iter().map(|name| shard(dir, name).at(&index)).collect();
        }
    }
    Err(Error::corrupt("found no model.safetensors, no pytorch_model.bin and no index of one")
        .at(dir)
        .help("name the directory of the original checkpoint with --hf-dir"))
}

fn shard(dir: &Path, name: &str) -> Result<PathBuf> {
    match Path::new(name).file_name() {
        Some(plain) if plain == name => Ok(dir.join(name)),
        _ => Err(Error::corrupt(format!("found `{name:.80}`, expected a file name without directories"))
            .tensor("weight_map")),
    }
}
