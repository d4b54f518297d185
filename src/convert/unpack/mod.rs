//! Converts a pack back to a checkpoint: plans, reserves disk space, writes, commits.
//!
//! Names and layouts are those of the source, because config.json in the pack names the family. Floats and MXFP4 are
//! written byte for byte as in the source; tensors of other quantization schemes are decoded.

pub(super) mod fill;
mod merged;
mod model;
pub(super) mod plan;

pub(super) use model::{PackModel, Quantization};

use super::adapter::Combination;
use super::executor::{Task, TaskOutput};
use super::new_checkpoint::NewCheckpoint;
use super::pack_input;
use super::sharding::{Shard, divide};
use crate::adapter::Adapter;
use crate::dtype::DType;
use crate::error::{Context, Result};
use crate::iebin::{IebinReader, Store};
use crate::job::{Command, Fingerprint, RunOptions};
use crate::output::{make_absolute, refuse_within};
use plan::{TargetPart, UnpackPlan, UnpackedTensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Name of the command in fingerprints, and in `command.json` of unfinished parts, from which `iec merge` repeats it.
pub const COMMAND: &str = "unpack";
/// Cost of converting a tensor relative to hashing its bytes; balances the parts of a run.
pub(super) const MAKE_FACTOR: u64 = 3;

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
    let pack = PackModel::read(reader, &options.model_dir)?;
    refuse_within(&options.model_dir, &options.out_dir).help("choose another --out-dir")?;
    let dtype = options.dtype.unwrap_or_else(|| float_type(reader));
    let adapters = merged::read(reader, &options.adapters, options.combination, &pack.model)?;
    let UnpackPlan { targets, dequantized, all_floats } = pack.plan(reader, dtype).at(&options.model_dir)?;
    let quantization = if all_floats { Quantization::Absent } else { Quantization::AsInSource };
    let beside = pack.companions(reader, quantization)?;

    let shards = divide(targets, options.max_shard_bytes);
    let targets: Vec<&UnpackedTensor> = shards.iter().flat_map(|shard| &shard.tensors).collect();
    let make = |item: usize, out: &mut TaskOutput<'_>| fill::fill(reader, &adapters, targets[item], out);
    let checkpoint = NewCheckpoint {
        shards: &shards,
        beside,
        out_dir: &options.out_dir,
        overwrite: options.overwrite,
        run: &options.run,
        label: "unpacking",
    };
    let (fingerprint, tasks) = tasks(reader, &adapters, &shards)?;
    let finished = checkpoint.write(command(options)?, fingerprint, tasks, make)?;
    Ok(UnpackSummary {
        architecture: pack.model.architecture,
        tensors: finished.made(&targets).count(),
        resumed_tensors: finished.resumed,
        bytes: shards.iter().map(Shard::nbytes).sum(),
        files: shards.iter().map(|shard| shard.file_name.clone()).collect(),
        dequantized,
        dtype,
        part: finished.part,
    })
}

/// Lists the tasks, and everything that affects the bytes of their output.
fn tasks<'a>(
    reader: &'a IebinReader,
    adapters: &[(Adapter, f32)],
    shards: &[Shard<Vec<TargetPart>>],
) -> Result<(Fingerprint, Vec<Task<'a>>)> {
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
    Ok((fingerprint, tasks))
}

/// Returns the command that `iec merge` repeats.
fn command(options: &UnpackOptions) -> Result<Command> {
    let mut repeatable = options.clone();
    let adapters = repeatable.adapters.iter_mut().map(|(dir, _)| Some(dir));
    make_absolute([Some(&mut repeatable.model_dir)].into_iter().chain(adapters))?;
    Ok(Command::new(COMMAND, &repeatable))
}

/// Returns the most frequent float type of the pack; bf16 if it has no floats.
pub(super) fn float_type(reader: &IebinReader) -> DType {
    let mut elements: BTreeMap<&str, (usize, DType)> = BTreeMap::new();
    for entry in reader.entries() {
        if let Store::Plain(dtype @ (DType::F32 | DType::F16 | DType::BF16)) = entry.store {
            elements.entry(dtype.name()).or_insert((0, dtype)).0 += entry.elements();
        }
    }
    elements.into_values().max_by_key(|(n, _)| *n).map_or(DType::BF16, |(_, dtype)| dtype)
}
