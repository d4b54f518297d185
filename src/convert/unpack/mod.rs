//! How does a pack become a checkpoint again? The other way round: plan, reserve, fill, commit.
//!
//! Names and layouts are those of the source, as config.json in the pack tells the family. Floats and MXFP4 come out byte
//! for byte as they went in; tensors of other quantizations are decoded.

mod fill;
mod plan;

use super::arch::{Arch, Fields};
use super::digest::hash_file;
use super::json::{read_json, read_limited};
use super::pack::companions;
use super::sharding::{NewCheckpoint, divide, pretty};
use crate::dtype::DType;
use crate::error::{Cause, Context, Error, Result};
use crate::iebin::by_position::ByPosition;
use crate::iebin::{IebinReader, Store};
use crate::output::refuse_within;
use crate::progress::{self, ProgressBar};
use plan::{Plan, Target};
use rayon::prelude::*;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::PathBuf;

const CONFIG: &str = "config.json";

/// What is unpacked, and how.
#[derive(Debug, Clone)]
pub struct UnpackOptions {
    /// The pack.
    pub model_dir: PathBuf,
    /// Where the checkpoint goes; made when missing.
    pub out_dir: PathBuf,
    /// The float type of tensors that are decoded; `None` takes the one that most floats of the pack have.
    pub dtype: Option<DType>,
    /// Most bytes of weights in a file.
    pub max_shard_bytes: u64,
    /// Replace a checkpoint that is already there.
    pub overwrite: bool,
}

/// What was unpacked.
#[derive(Debug, Clone, Serialize)]
pub struct UnpackSummary {
    /// Class name of the model.
    pub architecture: String,
    /// Tensors written, by the names of the source.
    pub tensors: usize,
    /// Bytes of weight files written.
    pub bytes: u64,
    /// Weight files.
    pub files: Vec<String>,
    /// Canonical names of tensors that were decoded from their quantized form: these are not the source's numbers.
    pub dequantized: Vec<String>,
    /// Their type.
    pub dtype: DType,
}

/// Unpacks a pack, whose reader this is.
///
/// # Errors
/// The pack is damaged or does not hold what its config.json describes, or the output cannot be written. Nothing is left
/// then.
pub fn unpack(reader: &IebinReader, options: &UnpackOptions) -> Result<UnpackSummary> {
    if reader.description.is_older() {
        return Err(Error::unsupported("a pack of an older program, which can be read as a checkpoint")
            .at(&options.model_dir)
            .help("convert it with `iec pack --hf-dir`, then unpack the result"));
    }
    refuse_within(&options.model_dir, &options.out_dir).help("choose another --out-dir")?;
    let config_path = reader.dir.join(CONFIG);
    let config: Map<String, Value> = read_json(&config_path).map_err(|e| match e.cause() {
        Cause::Io(_) => e.help("the pack must lie with the config.json that `iec pack` put beside it"),
        _ => e,
    })?;
    let fields = Fields::new(&config);
    let arch = Arch::of(&fields).at(&config_path)?;
    let model = arch.model_config(&fields, None).at(&config_path)?;
    let dtype = options.dtype.unwrap_or_else(|| float_type(reader));
    let plan = plan::plan(reader, arch, &model, &fields, dtype).at(&options.model_dir)?;
    let Plan { targets, dequantized, all_floats } = plan;
    let beside = companions(reader, &config, all_floats)?;

    let shards = divide(targets, options.max_shard_bytes);
    let bytes = shards.iter().map(|shard| shard.nbytes()).sum();
    let new = NewCheckpoint::create(&options.out_dir, &shards, options.overwrite)?;
    let payloads = ByPosition::new(reader)?;
    check_hashes(reader, &payloads).at(payloads.path())?;
    let bar = progress::bytes("unpacking", bytes);
    for (shard, file) in shards.iter().zip(&new.files) {
        let all: Vec<(&Target, u64)> = shard.offsets().collect();
        all.into_par_iter()
            .try_for_each(|(target, offset)| fill::fill(reader, &payloads, target, file.file(), offset, &bar))
            .at(file.path())?;
    }
    bar.finish_and_clear();
    new.commit(beside.iter().map(|(name, content)| (*name, content.as_slice())))?;
    Ok(UnpackSummary {
        architecture: model.architecture,
        tensors: shards.iter().map(|shard| shard.tensors.len()).sum(),
        bytes,
        files: shards.into_iter().map(|shard| shard.file_name).collect(),
        dequantized,
        dtype,
    })
}

/// The type that most floats of the pack have; bf16 where it has none.
fn float_type(reader: &IebinReader) -> DType {
    let mut elements: BTreeMap<&str, (usize, DType)> = BTreeMap::new();
    for entry in reader.entries() {
        if let Store::Plain(dtype @ (DType::F32 | DType::F16 | DType::BF16)) = entry.store {
            elements.entry(dtype.name()).or_insert((0, dtype)).0 += entry.elements();
        }
    }
    elements.into_values().max_by_key(|(n, _)| *n).map_or(DType::BF16, |(_, dtype)| dtype)
}

/// The files beside the weights, config.json last. A configuration that announces MXFP4 must not lie with floats.
fn companions(
    reader: &IebinReader,
    config: &Map<String, Value>,
    all_floats: bool,
) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let mut files = Vec::new();
    for name in companions::NAMES.iter().filter(|name| **name != CONFIG) {
        let path = reader.dir.join(name);
        if path.exists() {
            files.push((*name, read_limited(&path)?));
        }
    }
    let announced = config.contains_key("quantization_config");
    let bytes = if announced && all_floats {
        let mut config = config.clone();
        config.shift_remove("quantization_config");
        pretty(&Value::Object(config))
    } else {
        read_limited(&reader.dir.join(CONFIG))?
    };
    files.push((CONFIG, bytes));
    Ok(files)
}

/// Compares every payload with its recorded hash: what is written must be what was packed.
fn check_hashes(reader: &IebinReader, payloads: &ByPosition<'_>) -> Result<()> {
    let total = reader.entries().iter().map(|e| e.nbytes as u64).sum();
    let bar: ProgressBar = progress::bytes("checking", total);
    reader.entries().par_iter().try_for_each(|entry| {
        let Some(expected) = &entry.sha256 else { return Ok(()) };
        let read = |at: u64, out: &mut [u8]| payloads.read(entry, at as usize, out);
        let found = hash_file(entry.nbytes as u64, &bar, read)?;
        if found == *expected {
            return Ok(());
        }
        Err(Error::corrupt(format!("has the SHA-256 {found}, but {expected} is recorded"))
            .tensor(&entry.name)
            .help("the pack is damaged; pack again"))
    })?;
    bar.finish_and_clear();
    Ok(())
}
