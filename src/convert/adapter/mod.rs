//! Reads adapters of the PEFT library: LoRA, rsLoRA and DoRA, as `adapter_config.json` and
//! `adapter_model.safetensors`, for any family that the converter knows.
//!
//! Formulas and names are those of PEFT 0.21 (`peft/tuners/lora`). A module is mapped to canonical tensors by the views
//! of its family ([`View`](super::arch::View)), so a fused projection, for example, becomes changes of several
//! matrices that share A. Modules in the parts of a wrapper for images and sound are left out, and named
//! ([`Summary::unused`]); any other that is no matrix of the model is an error.

mod combine;
mod config;
mod experts;
mod int8;
mod map;
mod modules;
pub mod pack;

pub use combine::{Combination, combine};

use super::source::read_at::InputFile;
use super::source::source_tensor::SourceTensor;
use crate::adapter::Adapter;
use crate::convert::arch::{Arch, tower};
use crate::error::{Cause, Context, Error, Result};
use crate::files;
use crate::iebin::JSON_NAME;
use crate::iebin::reader::read_description;
use crate::model_config::ModelConfig;
use crate::sha256::{Digest, Sha256, hex, of_file};
use config::AdapterConfig;
pub use int8::round_to_int8;
use modules::ModulePart;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Name of the configuration of an adapter.
pub const CONFIG: &str = "adapter_config.json";
/// Name of the tensors of an adapter.
pub const FILE: &str = "adapter_model.safetensors";

/// Largest accepted configuration in bytes.
const CONFIG_LIMIT: u64 = 1 << 20;

/// Content of an adapter, without the model that it changes.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// `LoRA`, `rsLoRA` or `DoRA`.
    pub method: String,
    /// Name or path of the model for which it was trained, as the configuration says.
    pub base: Option<String>,
    /// Number of changed modules.
    pub modules: usize,
    /// Largest rank.
    pub rank: usize,
    /// Number of all numbers.
    pub parameters: u64,
    /// Bytes of the tensors in the file.
    pub bytes: u64,
    /// Number of modules with each last name, such as `q_proj`.
    pub targets: BTreeMap<String, usize>,
    /// Number of modules in each part for images or sound, which text does not use; they are not among the others.
    pub unused: BTreeMap<String, usize>,
}

/// Says which modules are left out because they belong to parts for images or sound ([`Summary::unused`]), if there are
/// some.
pub fn left_out(unused: &BTreeMap<String, usize>) -> Option<String> {
    let parts: Vec<String> = unused.iter().map(|(part, count)| format!("{part} ({count})")).collect();
    (!parts.is_empty()).then(|| format!("changes of parts for images or sound are left out: {}", parts.join(", ")))
}

/// Returns true if `dir` is the directory of an adapter of PEFT.
///
/// # Errors
/// The directory cannot be read.
pub fn is_at(dir: &Path) -> Result<bool> {
    Ok(files::is_dir(dir)? && files::exists(&dir.join(CONFIG))?)
}

/// Returns true if `dir` is the directory of the pack of an adapter.
///
/// # Errors
/// The directory or the description of the pack cannot be read.
pub fn is_packed(dir: &Path) -> Result<bool> {
    Ok(files::is_dir(dir)? && pack::is_at(dir)? && read_description(&dir.join(JSON_NAME))?.adapter.is_some())
}

/// Describes the adapter in the directory `dir`, of PEFT or packed; the values of its tensors are not read.
///
/// # Errors
/// There is no adapter, it is of another method than LoRA, or the header of a file is damaged.
pub fn describe(dir: &Path) -> Result<Summary> {
    if pack::is_at(dir)? {
        return pack::AdapterPack::open(dir)?.describe();
    }
    let (text, settings) = settings(dir)?;
    let path = dir.join(FILE);
    let modules = modules::list(&InputFile::open(&path)?, &path)?;
    let base = match crate::strict_json::parse_python(&text)? {
        Value::Object(map) => map.get("base_model_name_or_path").and_then(Value::as_str).map(String::from),
        _ => None,
    };
    let (mut targets, mut unused) = (BTreeMap::new(), BTreeMap::new());
    for name in modules.keys() {
        let last = || name.rsplit('.').find(|part| *part != "base_layer").unwrap_or(name);
        let (counts, key) = tower(name).map_or_else(|| (&mut targets, last()), |part| (&mut unused, part));
        *counts.entry(key.to_string()).or_insert(0) += 1;
    }
    let used = || modules.iter().filter(|(name, _)| tower(name).is_none()).flat_map(|(_, parts)| parts);
    let rank = |(part, tensor): (&ModulePart, &SourceTensor)| {
        matches!(part, ModulePart::A | ModulePart::EmbeddingA).then(|| tensor.shape[0])
    };
    Ok(Summary {
        method: settings.method().to_string(),
        base,
        modules: targets.values().sum(),
        rank: used().filter_map(rank).max().unwrap_or(0),
        parameters: used().map(|(_, tensor)| (tensor.nbytes / tensor.dtype.size()) as u64).sum(),
        bytes: modules.values().flat_map(BTreeMap::values).map(|tensor| tensor.nbytes as u64).sum(),
        targets,
        unused,
    })
}

/// Reads the adapter in the directory `dir`, of PEFT or packed, for a model.
///
/// # Errors
/// There is no adapter, it is of another method than LoRA, its tensors do not fit the model, or it changes something
/// that cannot be computed; the message names the field or the tensor.
pub fn read(dir: &Path, model: &ModelConfig) -> Result<Adapter> {
    if pack::is_at(dir)? {
        return pack::AdapterPack::open(dir)?.read(model);
    }
    let (text, settings) = settings(dir)?;
    let arch = arch_of(model).at(dir)?;
    let tensors = dir.join(FILE);
    let modules = modules::read(&tensors)?;
    let changes = map::Mapper { settings: &settings, arch, model, modules: &modules, used: Default::default() }
        .map()
        .at(&tensors)?;
    Ok(Adapter { hash: digest(&text, dir)?, changes })
}

/// Returns the names of a model's tensors in checkpoints.
fn arch_of(model: &ModelConfig) -> Result<&'static Arch> {
    let unknown =
        || Error::unsupported(format!("found a model of `{}`, for which no names are known", model.architecture));
    Arch::of_class(&model.architecture).ok_or_else(unknown)
}

/// Returns the digest of an adapter's configuration, of which `text` is the content, and of its tensors.
fn digest(text: &[u8], dir: &Path) -> Result<String> {
    let mut hash = Sha256::new_with_prefix(text);
    hash.update(of_file(&dir.join(FILE), |_| ())?);
    Ok(hex(hash))
}

/// Reads the configuration; returns its text as well.
fn settings(dir: &Path) -> Result<(Vec<u8>, AdapterConfig)> {
    let (config, tensors) = (dir.join(CONFIG), dir.join(FILE));
    if !files::exists(&tensors)? && files::exists(&dir.join("adapter_model.bin"))? {
        return Err(Error::unsupported("found adapter_model.bin, a file that can contain programs")
            .at(dir)
            .help(format!("save the adapter again with `safe_serialization=True`, as {FILE}")));
    }
    if !files::exists(&config)? {
        return Err(Error::new(Cause::Model(format!("found no {CONFIG}, expected an adapter of PEFT")))
            .at(dir)
            .help("name the directory that `save_pretrained` of PEFT or `iec pack ADAPTER --base PACK` wrote"));
    }
    let text = files::read_limited(&config, CONFIG_LIMIT)?;
    let settings = AdapterConfig::parse(&text).at(&config)?;
    Ok((text, settings))
}
