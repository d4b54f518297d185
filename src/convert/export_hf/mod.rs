//! Writes a pack as a quantized checkpoint of Hugging Face that vLLM, SGLang and transformers load: compressed-tensors,
//! GPTQ, or FP8 in blocks.
//!
//! Names, files beside the weights and the plan of all tensors are those of `iec unpack`. Each linear layer then
//! becomes a `Module`, whose tensors the format defines (`format`): compressed-tensors and GPTQ keep the codes and
//! scales of the pack, FP8 quantizes floats. All other tensors stay floats.

mod compressed;
mod format;
mod fp8;
mod gptq;
mod matrix;
mod plan;

pub use format::HfFormat;

use super::executor::{OnlyBytes, Section, Task, TaskOutput};
use super::new_checkpoint::NewCheckpoint;
use super::pack_input;
use super::sharding::{Shard, divide};
use super::unpack::{MAKE_FACTOR, PackModel, Quantization, fill, float_type};
use crate::dtype::DType;
use crate::error::{Context, Result};
use crate::iebin::IebinReader;
use crate::job::{Command, Fingerprint, RunOptions};
use crate::output::{make_absolute, refuse_within};
use format::Format;
use matrix::ExportedMatrix;
use plan::{HfPlan, Item, TensorOfItem};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Name of the command in fingerprints, and in `command.json` of unfinished parts, from which `iec merge` repeats it.
pub const COMMAND: &str = "export-hf";

/// Options of [`export`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ExportHfOptions {
    /// Directory of the pack.
    pub model_dir: PathBuf,
    /// Directory of the new checkpoint; created if it is missing.
    #[serde(skip)]
    pub out_dir: PathBuf,
    /// Format of the quantized matrices.
    pub format: HfFormat,
    /// True to decode the quantized tensors that the format has no equivalent for; they are refused otherwise.
    pub dequantize: bool,
    /// Float type of tensors that are decoded; `None` is the most frequent float type of the pack.
    pub dtype: Option<DType>,
    /// Largest number of bytes of weights in a file.
    pub max_shard_bytes: u64,
    /// True to replace an existing checkpoint.
    pub overwrite: bool,
    /// Options of the run; the bytes of the checkpoint do not depend on them.
    #[serde(skip)]
    pub run: RunOptions,
}

/// Result of [`export`].
#[derive(Debug, Clone, Serialize)]
pub struct ExportHfSummary {
    /// Class name of the model.
    pub architecture: String,
    /// Format of the quantized matrices.
    pub format: HfFormat,
    /// The part that this run did; `None` for a complete run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// Number of linear layers in codes and of other tensors; for a part, those that it has written.
    pub tensors: usize,
    /// Number of these that were taken over from an interrupted run or from parts.
    pub resumed_tensors: usize,
    /// Number of linear layers of the checkpoint in codes.
    pub quantized_modules: usize,
    /// Bytes of the weight files of all parts.
    pub bytes: u64,
    /// Names of the weight files.
    pub files: Vec<String>,
    /// Canonical names of tensors that are quantized in the pack and were decoded.
    pub dequantized: Vec<String>,
    /// Float type in which the decoded tensors are written.
    pub dtype: DType,
    /// Notes about the programs that read the checkpoint.
    pub notes: Vec<String>,
}

/// Exports the pack of `reader` or one part of it, or merges its parts.
///
/// # Errors
/// The pack is damaged or differs from its config.json, a quantized tensor has no equivalent in the format, or the
/// output cannot be written. In these cases no file has its final name; work that was finished before an interrupt or a
/// disk error is kept for the next run.
pub fn export(reader: &IebinReader, options: &ExportHfOptions) -> Result<ExportHfSummary> {
    let pack = PackModel::read(reader, &options.model_dir)?;
    refuse_within(&options.model_dir, &options.out_dir).help("choose another --out-dir")?;
    let dtype = options.dtype.unwrap_or_else(|| float_type(reader));
    let format = options.format.row();
    let planned = pack.plan(reader, dtype).at(&options.model_dir)?;
    let plan = plan::plan(reader, planned, format, options.dequantize).at(&options.model_dir)?;
    let modules = plan.modules();
    let config = (format.config)(&modules, &plan.unquantized).at(&options.model_dir)?;
    let notes = notes(&plan, &pack, format);
    let beside = pack.companions(reader, Quantization::New(config))?;
    let quantized_modules = modules.len();
    let HfPlan { items, tensors, dequantized, .. } = plan;

    let shards = divide(tensors, options.max_shard_bytes);
    let checkpoint = NewCheckpoint {
        shards: &shards,
        beside,
        out_dir: &options.out_dir,
        overwrite: options.overwrite,
        run: &options.run,
        label: "exporting",
    };
    let (fingerprint, tasks) = tasks(reader, options.format, &items, &shards)?;
    let make = |item: usize, out: &mut TaskOutput<'_>| make(reader, format, &items[item], out);
    let finished = checkpoint.write(command(options)?, fingerprint, tasks, make)?;
    Ok(ExportHfSummary {
        architecture: pack.model.architecture,
        format: options.format,
        tensors: finished.made(&items).count(),
        quantized_modules,
        resumed_tensors: finished.resumed,
        bytes: shards.iter().map(Shard::nbytes).sum(),
        files: shards.iter().map(|shard| shard.file_name.clone()).collect(),
        dequantized,
        dtype,
        notes,
        part: finished.part,
    })
}

/// Lists the tasks, one for each item with a section for each of its tensors, and everything that affects their bytes.
fn tasks<'a>(
    reader: &'a IebinReader,
    format: HfFormat,
    items: &[Item],
    shards: &[Shard<TensorOfItem>],
) -> Result<(Fingerprint, Vec<Task<'a>>)> {
    let mut fingerprint = Fingerprint::new(COMMAND);
    pack_input::fingerprint(reader, &mut fingerprint)?;
    fingerprint.field("format", format);
    let mut places: Vec<Vec<(usize, Section)>> = vec![Vec::new(); items.len()];
    for (file, shard) in shards.iter().enumerate() {
        for (tensor, start) in shard.offsets() {
            fingerprint.field("tensor", format_args!("{file} {start} {tensor:?}"));
            let section = Section { file, range: start..start + tensor.nbytes() };
            places[tensor.content.item].push((tensor.content.part, section));
        }
    }
    let mut tasks: Vec<Task<'_>> = pack_input::check_tasks(reader, |_| true).collect();
    for (number, (item, mut places)) in items.iter().zip(places).enumerate() {
        fingerprint.field("item", format_args!("{item:?}"));
        places.sort_by_key(|(part, _)| *part);
        let nbytes: u64 = places.iter().map(|(_, section)| section.range.end - section.range.start).sum();
        let sections = match item {
            Item::Plain(target) => {
                let Section { file, range } = &places[0].1;
                target.sections(reader, *file, range.start)
            }
            Item::Coded(_) => places.into_iter().map(|(_, section)| section).collect(),
        };
        tasks.push(Task::make(number, item.name(), nbytes * MAKE_FACTOR, sections));
    }
    Ok((fingerprint, tasks))
}

/// Writes the tensors of one item.
fn make(reader: &IebinReader, format: &Format, item: &Item, out: &mut TaskOutput<'_>) -> Result<OnlyBytes> {
    match item {
        Item::Plain(target) => fill::fill(reader, &[], target, out),
        Item::Coded(module) => {
            let mut matrix = ExportedMatrix::open(reader, module)?;
            (format.fill)(module, &mut matrix, out).tensor(&module.name)?;
            Ok(OnlyBytes {})
        }
    }
}

/// Returns the command that `iec merge` repeats.
fn command(options: &ExportHfOptions) -> Result<Command> {
    let mut repeatable = options.clone();
    make_absolute([Some(&mut repeatable.model_dir)])?;
    Ok(Command::new(COMMAND, &repeatable))
}

/// Returns notes about what the programs that read the checkpoint do with it.
fn notes(plan: &HfPlan, pack: &PackModel, format: &Format) -> Vec<String> {
    let modules = plan.modules();
    let mut notes: Vec<String> = (format.notes)(&modules);
    let is_expert = |name: &str| name.contains(".experts.");
    if format.format != HfFormat::Fp8 && modules.iter().any(|module| is_expert(&module.name)) {
        notes.push("vLLM and SGLang read experts in codes; transformers 5 does not".to_string());
    }
    let dtype = ["dtype", "torch_dtype"].iter().find_map(|key| pack.config.get(*key)?.as_str());
    if dtype == Some("bfloat16") && modules.iter().any(|module| module.has_f16_scales()) {
        notes.push(
            "config.json has the type bfloat16, to which programs round the f16 scales; load the model as \
                    float16 or float32 to keep them"
                .to_string(),
        );
    }
    notes
}
