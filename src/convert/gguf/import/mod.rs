//! Imports a GGUF file as a pack. The metadata is converted to a `config.json`. The code of the model family reads this
//! file like that of a checkpoint and lists the tensors that the model must have. Every tensor is then gathered row by
//! row under its canonical name.
//!
//! Blocks of a type with an equivalent scheme keep codes and scales, floats keep their bytes, and all other types are
//! decoded to their exact f32 values. Memory is bounded by a few chunks per thread.

pub(in crate::convert) mod plan;

use crate::convert::companions::Companions;
use crate::convert::executor::{Conversion, Finished, Task, TaskOutput};
use crate::convert::pack_output::{self, Totals, refuse_occupied};
use crate::convert::source::read_at::InputFile;
use crate::dtype::DType;
use crate::error::{Context, Result};
use crate::iebin::writer::{self, Layout};
use crate::iebin::{DescriptionParts, JSON_NAME};
use crate::job::{Command, Fingerprint, Output, RunOptions};
use crate::output::{Inputs, make_absolute};
use crate::provenance::Source;
use plan::{GgufModel, ImportedTensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

/// Name of the command in fingerprints, and in `command.json` of unfinished parts, from which `iec merge` repeats it.
pub const COMMAND: &str = "import-gguf";
/// Time to convert a byte of a tensor relative to the time to hash it; used to divide the work into equal parts.
const MAKE_FACTOR: u64 = 4;

/// Input, output and settings of an import.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ImportOptions {
    /// GGUF file, or the first file of a split model.
    pub file: PathBuf,
    /// Directory of the pack; created if it does not exist.
    #[serde(skip)]
    pub out_dir: PathBuf,
    /// Float type of the tensors that are not quantized in the pack; `None` keeps the type of each, and uses f32 for
    /// types without an equivalent scheme.
    pub dtype: Option<DType>,
    /// A tokenizer.json to use instead of the file's own tokenizer.
    pub tokenizer: Option<PathBuf>,
    /// True to replace an existing pack.
    pub overwrite: bool,
    /// Options of the job, such as parts and resuming; they do not affect the contents of the pack.
    #[serde(skip)]
    pub run: RunOptions,
}

/// Report of a finished import. For a part, all fields but `architecture` and `bytes_in` describe the part.
#[derive(Debug, Clone, Serialize)]
pub struct ImportSummary {
    /// Class name of the model.
    pub architecture: String,
    /// The part that was written; absent for a whole pack.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// Number of tensors in the pack.
    pub tensors: usize,
    /// Number of these tensors that are stored quantized, with the codes and scales of the file.
    pub quantized_tensors: usize,
    /// Number of these tensors that were taken from an interrupted run or from parts.
    pub resumed_tensors: usize,
    /// Number of these tensors that were decoded from a type without an equivalent scheme, by the name of the type.
    pub decoded_tensors: BTreeMap<String, usize>,
    /// Number of these tensors that were rounded to the requested type.
    pub rounded_tensors: usize,
    /// Number of weights.
    pub weights: u64,
    /// Size of all files read, in bytes.
    pub bytes_in: u64,
    /// Size of the written binary file, in bytes.
    pub bytes: u64,
    /// Payload bits per weight.
    pub bits_per_weight: f64,
    /// Wall time in seconds.
    pub wall_time_s: f64,
    /// True when the pack has a tokenizer, from the file or from the options.
    pub tokenizer: bool,
}

impl ImportSummary {
    /// Says which tensors were decoded because packs do not have their types, what this costs, and what leads on to
    /// fewer bits; `None` if there are none.
    pub fn decoded(&self) -> Option<String> {
        if self.decoded_tensors.is_empty() {
            return None;
        }
        let kinds: Vec<String> = self.decoded_tensors.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
        let rounded = if self.rounded_tensors > 0 { "and rounded to the --dtype" } else { "exactly, to f32" };
        let times = self.bytes as f64 / self.bytes_in.max(1) as f64;
        Some(format!(
            "tensors of types that packs do not have were decoded {rounded}: {}; the pack has {times:.1} times the \
             bytes of the file, all of which are read for each token; `iec run FILE --precision int4` quantizes them \
             to 4 bits",
            kinds.join(", ")
        ))
    }
}

/// Imports a GGUF file as a pack, writes one part of the import, or merges its parts.
///
/// # Errors
/// The file is damaged, its family, types or tokenizer are not supported, or the output cannot be written.
/// In these cases no file is left under a final name. Work finished before an interrupt or a disk failure
/// is kept for the next run.
pub fn import(options: &ImportOptions) -> Result<ImportSummary> {
    let start = Instant::now();
    let model = GgufModel::open(&options.file)?;
    let companions = model.companions(options.tokenizer.as_deref()).at(&options.file)?;
    let items = model.plan(options.dtype).at(&options.file)?;
    let layout = Layout::new(items.iter().map(|item| item.planned.clone()).collect())?;
    writer::recover(&options.out_dir)?;
    let make = |item: usize, out: &mut TaskOutput<'_>| model.fill(&items[item], out).at(&options.file);
    let finished = conversion(&model, &items, &layout, options)?.run(make, |job, files, finished| {
        let read = model.gguf.files().iter().zip(finished.inputs.iter().flatten());
        let files_read = read.map(|(file, sha256)| file.source_file(sha256.clone())).collect();
        let parts = DescriptionParts {
            model: Some(model.config.clone()),
            source: Some(Source { repo: None, files: files_read }),
            ..pack_output::with_companions(&companions, job)?
        };
        pack_output::commit(job, files, &layout, finished, parts, || occupied(options))
    })?;
    Ok(summary(&model, &companions, (&items[..], &layout), finished, start))
}

fn conversion<'a>(
    model: &'a GgufModel,
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
    if !pack_output::was_torn(&options.out_dir, &fingerprint) {
        occupied(options)?;
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
        lead: Some(JSON_NAME),
        output: Output::Alone,
        run: &options.run,
        label: "importing",
        files: vec![pack_output::binary(layout)],
        tasks: model.gguf.files().iter().map(Task::hash_file).chain(tensors).collect(),
    })
}

/// Fails when files would be lost in the output directory.
fn occupied(options: &ImportOptions) -> Result<()> {
    let inputs = [Some(&options.file), options.tokenizer.as_ref()].into_iter().flatten();
    refuse_occupied(&options.out_dir, options.overwrite, &Inputs::default().files(inputs))
}

fn summary<T>(
    model: &GgufModel,
    companions: &Companions,
    (items, layout): (&[ImportedTensor], &Layout),
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
        weights: totals.weights,
        bytes_in: model.gguf.files().iter().map(InputFile::nbytes).sum(),
        bytes: totals.bytes,
        bits_per_weight: totals.bits_per_weight,
        wall_time_s: start.elapsed().as_secs_f64(),
        tokenizer: companions.tokenizer().is_some(),
        part: done.part,
    }
}
