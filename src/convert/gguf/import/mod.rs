//! How does a GGUF file become a pack? Metadata gives the configuration, the family's own code the description, that
//! the tensors there must be; then every tensor is gathered row by row in canonical order.
//!
//! Blocks that have a scheme of ours keep codes and scales; floats keep their bytes; all other types become their exact
//! f32 values. Memory is bounded by a few chunks per thread.

mod plan;

use super::reader::Gguf;
use crate::convert::executor::{Conversion, Finished, Task, TaskOutput};
use crate::convert::pack_output::{self, Totals, refuse_occupied};
use crate::convert::read_at::InputFile;
use crate::dtype::DType;
use crate::error::{Context, Result};
use crate::iebin::writer::Layout;
use crate::iebin::{DescriptionParts, JSON_NAME};
use crate::job::{self, Command, Fingerprint, Output, RunOptions};
use crate::output::{Inputs, make_absolute};
use crate::provenance::Source;
use plan::{GgufModel, ImportedTensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

/// Name of the command, as parts record it.
pub const COMMAND: &str = "import-gguf";
/// What making a tensor costs a part in relation to hashing its bytes.
const MAKE_FACTOR: u64 = 4;

/// What is imported, and how.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ImportOptions {
    /// The file, or the first one of a split model.
    pub file: PathBuf,
    /// Where the pack goes; made when missing.
    #[serde(skip)]
    pub out_dir: PathBuf,
    /// The float type of tensors that are not quantized in the pack; `None` keeps each as it is, and makes exact f32 of
    /// types that have no scheme of ours.
    pub dtype: Option<DType>,
    /// A tokenizer.json to use instead of the file's own tokenizer.
    pub tokenizer: Option<PathBuf>,
    /// Replace an existing pack.
    pub overwrite: bool,
    /// How the work is run; it does not show in the pack.
    #[serde(skip)]
    pub run: RunOptions,
}

/// What was imported. For a part, everything but `architecture` and `bytes_in` is about the part.
#[derive(Debug, Clone, Serialize)]
pub struct ImportSummary {
    /// Class name of the model.
    pub architecture: String,
    /// Which part; absent for a whole pack.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// Number of tensors in the pack.
    pub tensors: usize,
    /// Of these, stored quantized, with the codes and scales of the file.
    pub quantized_tensors: usize,
    /// Of these, taken over from an interrupted run or from parts.
    pub resumed_tensors: usize,
    /// Of these, decoded from a type that has no scheme here, by the name of the type.
    pub decoded_tensors: BTreeMap<String, usize>,
    /// Of these, rounded to the type asked for.
    pub rounded_tensors: usize,
    /// Number of weights.
    pub parameters: u64,
    /// Bytes of all files read.
    pub bytes_in: u64,
    /// Bytes of the binary written.
    pub bytes_out: u64,
    /// Payload bits per weight.
    pub bits_per_weight: f64,
    /// Wall time.
    pub seconds: f64,
    /// False when the file has no tokenizer and none was given.
    pub tokenizer: bool,
}

/// Imports a GGUF file as a pack, or does one part of it, or puts its parts together.
///
/// # Errors
/// The file is damaged or of a family, type or tokenizer that is not supported, or the output cannot be written.
/// Nothing is left under a final name then; what was finished before an interrupt or a failure of the disk is kept
/// for the next run.
pub fn import(options: &ImportOptions) -> Result<ImportSummary> {
    let start = Instant::now();
    let gguf = Gguf::open(&options.file)?;
    let model = GgufModel::read(&gguf, options).at(&options.file)?;
    let items = model.plan(options.dtype).at(&options.file)?;
    let layout = Layout::new(items.iter().map(|item| item.planned.clone()).collect())?;
    let make = |item: usize, out: &mut TaskOutput<'_>| model.fill(&items[item], out).at(&options.file);
    let finished = conversion(&model, &items, &layout, options)?.run(make, |job, files, finished| {
        let read = gguf.files().iter().zip(finished.inputs.iter().flatten());
        let files_read = read.map(|(file, sha256)| file.source_file(sha256.clone())).collect();
        let parts = DescriptionParts {
            model: Some(model.config.clone()),
            source: Some(Source { repo: None, files: files_read }),
            ..pack_output::with_companions(&model.companions(), &options.out_dir, job)?
        };
        pack_output::commit(job, files, &layout, finished, parts)
    })?;
    Ok(summary(&model, &items, &layout, finished, start))
}

fn conversion<'a>(
    model: &GgufModel<'a>,
    items: &[ImportedTensor],
    layout: &Layout,
    options: &'a ImportOptions,
) -> Result<Conversion<'a>> {
    let mut fingerprint = Fingerprint::new(COMMAND);
    model.gguf.files().iter().try_for_each(|file| fingerprint.file(file.path()))?;
    for item in items {
        fingerprint.field("tensor", format_args!("{item:?}"));
    }
    let fingerprint = fingerprint.finish();
    if !job::was_torn(&options.out_dir, &fingerprint, JSON_NAME) {
        let inputs = [Some(&options.file), options.tokenizer.as_ref()].into_iter().flatten();
        refuse_occupied(&options.out_dir, options.overwrite, &Inputs::default().files(inputs))?;
    }
    let mut repeatable = options.clone();
    make_absolute([Some(&mut repeatable.file), repeatable.tokenizer.as_mut()])?;
    let tensors = layout.entries.iter().enumerate().map(|(item, entry)| {
        Task::make(item, &entry.name, entry.nbytes as u64 * MAKE_FACTOR, pack_output::section(entry))
    });
    Ok(Conversion {
        command: Command::new(COMMAND, &repeatable),
        out_dir: &options.out_dir,
        fingerprint,
        commit_point: JSON_NAME,
        output: Output::Alone,
        run: &options.run,
        label: "importing",
        files: vec![pack_output::binary(layout)],
        tasks: model.gguf.files().iter().map(Task::hash_file).chain(tensors).collect(),
    })
}

fn summary<T>(
    model: &GgufModel,
    items: &[ImportedTensor],
    layout: &Layout,
    done: Finished<T>,
    start: Instant,
) -> ImportSummary {
    let mut decoded = BTreeMap::new();
    for kind in done.made(items).filter_map(ImportedTensor::decoded_from) {
        *decoded.entry(kind.to_string()).or_default() += 1;
    }
    let totals = Totals::new(layout, &done);
    ImportSummary {
        architecture: model.config.architecture.clone(),
        tensors: totals.tensors,
        quantized_tensors: totals.quantized,
        resumed_tensors: done.resumed,
        decoded_tensors: decoded,
        rounded_tensors: done.made(items).filter(|item| item.is_rounded()).count(),
        parameters: totals.parameters,
        bytes_in: model.gguf.files().iter().map(InputFile::nbytes).sum(),
        bytes_out: totals.bytes_out,
        bits_per_weight: totals.bits_per_weight,
        seconds: start.elapsed().as_secs_f64(),
        tokenizer: model.tokenizer.is_some(),
        part: done.part,
    }
}
