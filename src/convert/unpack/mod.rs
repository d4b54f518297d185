//! Converts a pack back to a checkpoint: plans, reserves disk space, writes, commits.
//!
//! Names and layouts are those of the source, because config.json in the pack names the family. Floats and MXFP4 are
//! written byte for byte as in the source; tensors of other quantization schemes are decoded.

mod fill;
mod merged;
mod plan;

use super::adapter::Combination;
use super::arch::{Arch, Fields, TIED, disagrees_about_output};
use super::companions;
use super::executor::{Conversion, Task, TaskOutput};
use super::json::{read_json, read_limited};
use super::pack_input;
use super::sharding::{self, Shard, divide};
use crate::adapter::Adapter;
use crate::dtype::DType;
use crate::error::{Cause, Context, Error, Result};
use crate::files;
use crate::iebin::{IebinReader, Store};
use crate::job::{self, Command, DataFile, Fingerprint, Output, RunOptions};
use crate::output::{make_absolute, refuse_within};
use crate::strict_json::to_python;
use plan::{TargetPart, UnpackPlan, UnpackedTensor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Name of the command in fingerprints, and in `command.json` of unfinished parts, from which `iec merge` repeats it.
pub const COMMAND: &str = "unpack";
/// Cost of converting a tensor relative to hashing its bytes; balances the parts of a run.
const MAKE_FACTOR: u64 = 3;
const CONFIG: &str = "config.json";

/// Options of [`unpack()`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct UnpackOptions {
    /// Directory of the pack.
    pub model_dir: PathBuf,
    /// Directory of the new checkpoint; created if it is missing.
    #[serde(skip)]
    pub out_dir: PathBuf,
    /// Float type of tensors that are decoded; `None` is the most frequent float type of the pack.
    pub dtype: Option<DType>,
    /// Adapters to merge into the weights: directories of PEFT with their factors.
    pub adapters: Vec<(PathBuf, f32)>,
    /// Way in which several adapters become one change.
    pub combination: Combination,
    /// Largest number of bytes of weights in a file.
    pub max_shard_bytes: u64,
    /// True to replace an existing checkpoint.
    pub overwrite: bool,
    /// Options of the run; the bytes of the checkpoint do not depend on them.
    #[serde(skip)]
    pub run: RunOptions,
}

/// Result of [`unpack()`].
#[derive(Debug, Clone, Serialize)]
pub struct UnpackSummary {
    /// Class name of the model.
    pub architecture: String,
    /// The part that this run did; `None` for a complete run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// Number of tensors of the checkpoint; for a part, those that it has written.
    pub tensors: usize,
    /// Number of tensors that were taken over from an interrupted run or from parts.
    pub resumed_tensors: usize,
    /// Bytes of the weight files of all parts.
    pub bytes: u64,
    /// Names of the weight files.
    pub files: Vec<String>,
    /// Canonical names of tensors that were decoded from their quantized form, so that they differ from the source.
    pub dequantized: Vec<String>,
    /// Float type in which the decoded tensors are written.
    pub dtype: DType,
}

/// Unpacks the pack of `reader` or one part of it, or merges its parts.
///
/// # Errors
/// The pack is damaged or differs from its config.json, or the output cannot be written. In these cases no file has
/// its final name; work that was finished before an interrupt or a disk error is kept for the next run.
pub fn unpack(reader: &IebinReader, options: &UnpackOptions) -> Result<UnpackSummary> {
    if reader.description.is_older() {
        return Err(Error::unsupported("found a pack of an older program")
            .at(&options.model_dir)
            .help("convert it with `iec pack --hf-dir OLD_PACK --out-dir NEW_PACK`, then unpack NEW_PACK"));
    }
    refuse_within(&options.model_dir, &options.out_dir).help("choose another --out-dir")?;
    reader.check_files()?;
    let config_path = reader.path(CONFIG);
    let config: Map<String, Value> = read_json(&config_path).map_err(|e| match e.cause() {
        Cause::Io(_) => e.help("the directory of the pack must have the config.json that `iec pack` wrote"),
        _ => e,
    })?;
    let fields = Fields::new(&config);
    let arch = Arch::of(&fields).at(&config_path)?;
    let mut model = arch.model_config(&fields, None).at(&config_path)?;
    // A pack has an output matrix of its own if the checkpoint had one, whatever the configuration says.
    let has_output = reader.get("lm_head.weight").is_some();
    let unties = model.tied_embeddings && has_output;
    if model.tied_embeddings || disagrees_about_output(&fields).at(&config_path)? {
        model.tied_embeddings = !has_output;
    }
    let dtype = options.dtype.unwrap_or_else(|| float_type(reader));
    let adapters = merged::read(reader, &options.adapters, options.combination, &model)?;
    let plan = plan::plan(reader, arch, &model, &fields, dtype).at(&options.model_dir)?;
    let UnpackPlan { targets, dequantized, all_floats } = plan;
    let beside = companions(reader, &config, unties, all_floats)?;

    let shards = divide(targets, options.max_shard_bytes);
    let targets: Vec<&UnpackedTensor> = shards.iter().flat_map(|shard| &shard.tensors).collect();
    let make = |item: usize, out: &mut TaskOutput<'_>| fill::fill(reader, &adapters, targets[item], out);
    let finished = conversion(reader, &adapters, &shards, options)?.run(make, |job, files, _| {
        let small = sharding::index(&shards).into_iter().chain(beside);
        let small = small.map(|(name, content)| job.small_file(name, &content)).collect::<Result<Vec<_>>>()?;
        job.commit_begins()?;
        let allowed = || match job.was_torn() {
            true => Ok(()),
            false => sharding::refuse_checkpoint(&options.out_dir, options.overwrite),
        };
        sharding::commit(&options.out_dir, files.into_iter().chain(small), allowed)
    })?;
    Ok(UnpackSummary {
        architecture: model.architecture,
        tensors: finished.made(&targets).count(),
        resumed_tensors: finished.resumed,
        bytes: shards.iter().map(Shard::nbytes).sum(),
        files: shards.iter().map(|shard| shard.file_name.clone()).collect(),
        dequantized,
        dtype,
        part: finished.part,
    })
}

fn conversion<'a>(
    reader: &'a IebinReader,
    adapters: &[(Adapter, f32)],
    shards: &'a [Shard<Vec<TargetPart>>],
    options: &'a UnpackOptions,
) -> Result<Conversion<'a>> {
    let mut fingerprint = Fingerprint::new(COMMAND);
    pack_input::fingerprint(reader, &mut fingerprint)?;
    adapters
        .iter()
        .for_each(|(adapter, factor)| fingerprint.field("adapter", format_args!("{} {factor}", adapter.hash)));
    let mut tasks: Vec<Task<'_>> = pack_input::check_tasks(reader, |_| true).collect();
    let mut item = 0;
    for (file, shard) in shards.iter().enumerate() {
        for (target, start) in shard.offsets() {
            fingerprint.field("tensor", format_args!("{file} {start} {target:?}"));
            let sections = target.sections(reader, file, start);
            tasks.push(Task::make(item, &target.name, target.nbytes() * MAKE_FACTOR, sections));
            item += 1;
        }
    }
    let fingerprint = fingerprint.finish();
    if !job::was_torn(&options.out_dir, &fingerprint, None, shards.iter().map(|shard| &*shard.file_name)) {
        sharding::refuse_checkpoint(&options.out_dir, options.overwrite)?;
    }
    let mut repeatable = options.clone();
    let adapters = repeatable.adapters.iter_mut().map(|(dir, _)| Some(dir));
    make_absolute([Some(&mut repeatable.model_dir)].into_iter().chain(adapters))?;
    Ok(Conversion {
        command: Command::new(COMMAND, &repeatable),
        out_dir: &options.out_dir,
        fingerprint,
        lead: None,
        output: Output::Alone,
        run: &options.run,
        label: "unpacking",
        files: shards.iter().map(|s| DataFile::new(&s.file_name, s.nbytes(), s.header.clone())).collect(),
        tasks,
    })
}

/// Returns the most frequent float type of the pack; bf16 if it has no floats.
fn float_type(reader: &IebinReader) -> DType {
    let mut elements: BTreeMap<&str, (usize, DType)> = BTreeMap::new();
    for entry in reader.entries() {
        if let Store::Plain(dtype @ (DType::F32 | DType::F16 | DType::BF16)) = entry.store {
            elements.entry(dtype.name()).or_insert((0, dtype)).0 += entry.elements();
        }
    }
    elements.into_values().max_by_key(|(n, _)| *n).map_or(DType::BF16, |(_, dtype)| dtype)
}

/// Returns the companion files, config.json last. Its `quantization_config` is removed if no tensor is written as
/// MXFP4. A tokenizer that was made from other files is left out, because the checkpoint had none.
fn companions(
    reader: &IebinReader,
    config: &Map<String, Value>,
    unties: bool,
    all_floats: bool,
) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let mut files = Vec::new();
    let made = !reader.description.tokenizer_from.is_empty();
    let is_copied = |name: &str| name != CONFIG && !(made && name == companions::TOKENIZER);
    for name in companions::NAMES.iter().filter(|name| is_copied(name)) {
        let path = reader.path(name);
        if files::exists(&path)? {
            files.push((*name, read_limited(&path)?));
        }
    }
    let mut made = config.clone();
    if all_floats {
        made.shift_remove("quantization_config");
    }
    if unties {
        untie(&mut made);
    }
    let is_changed = made != *config;
    files.push((CONFIG, if is_changed { to_python(&made) } else { read_limited(&reader.path(CONFIG))? }));
    Ok(files)
}

/// Writes into a configuration that the output matrix is not the embedding. Programs that believe this field would
/// otherwise drop the matrix.
fn untie(config: &mut Map<String, Value>) {
    config.insert(TIED.to_string(), false.into());
    if let Some(Value::Object(text)) = config.get_mut("text_config")
        && text.contains_key(TIED)
    {
        text.insert(TIED.to_string(), false.into());
    }
}
