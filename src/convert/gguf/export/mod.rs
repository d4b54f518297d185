//! Exports a pack as a GGUF file. The plan fixes every type and offset; then all threads write the tensors to their
//! places, chunk by chunk. The bytes of the file do not depend on the number of threads.
//!
//! Tensors in q4_0, nl4 and mxfp4 keep their codes and scales. So do symmetric integers (int4, int5, int6, int8) with
//! fp16 scales of any group size: each block of 32 gets the scale of its group. Tensors that have no GGML type are
//! refused, or written as floats if the caller chooses so.

mod plan;

use super::config_out;
use super::family::Family;
use super::tokenizer_out::{self, tokenizer_keys};
use super::writer::{GgufEntry, GgufLayout, lay_out};
use crate::convert::executor::{Conversion, Section, Task, TaskOutput};
use crate::convert::json::{read_json, read_limited};
use crate::convert::pack_input;
use crate::convert::source::gguf::types::GgmlType;
use crate::convert::source::gguf::value::Value as Meta;
use crate::dtype::DType;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin::reader::plain_file_name;
use crate::iebin::{self, IebinReader, JSON_NAME, TOOL_TEMPLATE_NAME};
use crate::interrupt;
use crate::job::{self, Command, DataFile, Fingerprint, Output, RunOptions, dir_of_file};
use crate::model_config::ModelConfig;
use crate::output::{Inputs, Rules, make_absolute};
use plan::{ExportSource, ExportedTensor};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Name of the command in fingerprints, and in `command.json` of unfinished parts, from which `iec merge` repeats it.
pub const COMMAND: &str = "export-gguf";
/// Name of the file in the directory of partial work; the user chooses the final name.
const PARTIAL_NAME: &str = "model.gguf";

/// Input, output and settings of an export.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ExportOptions {
    /// Directory of the pack.
    pub model_dir: PathBuf,
    /// GGUF file to write.
    pub out: PathBuf,
    /// Float type of the matrices that are not quantized in the file; `None` keeps the type of each.
    pub dtype: Option<DType>,
    /// Quantized tensors that are written as floats.
    pub dequantize: Dequantize,
    /// Name of the pre-tokenizer, if it cannot be found from the tokenizer.
    pub pre: Option<String>,
    /// True to replace an existing file.
    pub overwrite: bool,
    /// Options of the job, such as parts and resuming; they do not affect the contents of the file.
    #[serde(skip)]
    pub run: RunOptions,
}

/// Choice of the quantized tensors that are written as floats.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dequantize {
    /// None; tensors that have no GGML type are refused.
    #[default]
    None,
    /// The tensors that have no GGML type.
    Needed,
    /// All quantized tensors.
    All,
}

/// Report of a finished export.
#[derive(Debug, Clone, Serialize)]
pub struct ExportSummary {
    /// Value of `general.architecture`.
    pub architecture: String,
    /// The part that was written; absent for a whole file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// Number of tensors in the file; for a part, the number of tensors it has written.
    pub tensors: usize,
    /// Number of these tensors that were taken from an interrupted run or from parts.
    pub resumed_tensors: usize,
    /// Number of tensors by type.
    pub types: BTreeMap<String, usize>,
    /// Number of quantized tensors that were written as floats.
    pub dequantized_tensors: usize,
    /// Length of the file in bytes.
    pub bytes: u64,
    /// Wall time in seconds.
    pub wall_time_s: f64,
    /// Notes about computations and tokenization in which llama.cpp will differ, and about what is left out.
    pub notes: Vec<String>,
}

/// Exports the pack of `reader`, writes one part of the export, or merges its parts.
///
/// # Errors
/// The pack is damaged, llama.cpp does not support its architecture or tokenizer, a tensor has no GGML type, or the
/// file cannot be written. In these cases no file is left under the final name. Work finished before an interrupt or a
/// disk failure is kept for the next run.
pub fn export(reader: &IebinReader, options: &ExportOptions) -> Result<ExportSummary> {
    let start = Instant::now();
    let read = reader.files().iter().map(|file| file.path());
    let inputs = Inputs::default().files(read).packs([&options.model_dir], &iebin::members());
    let target =
        job::check_target(&options.out, Rules { inputs: &inputs, overwrite: options.overwrite, stdout: true })?;
    let json = options.model_dir.join(JSON_NAME);
    let missing = || {
        Error::corrupt("missing; only packs with a model description can be exported")
            .tensor("model")
            .at(&json)
            .help("convert a pack of an older program: `iec pack --hf-dir OLD_PACK --out-dir NEW_PACK`")
    };
    let config = reader.description.model.clone().ok_or_else(missing)?;
    let family = Family::of_model(&config).at(&json)?;
    let description = config_out::describe(&config, family).at(&json)?;
    let pack = ExportSource::new(reader, options, family, &config)?;
    let planned = pack.plan(&description).at(&json)?;
    let tokenizer = tokenizer(reader, &config, options)?;
    let mut notes = description.notes;
    notes.extend(tokenizer.notes);
    notes.extend(pack.note_left_out());

    let mut metadata = general(family, &planned);
    metadata.extend(description.entries);
    metadata.extend(tokenizer.entries);
    let listed: Vec<GgufEntry> = planned.iter().map(|p| p.tensor.clone()).collect();
    let layout = lay_out(&metadata, &listed);
    let make = |item: usize, out: &mut TaskOutput<'_>| pack.fill(&planned[item], out);
    let out = target.work_path();
    let finished = conversion(reader, &planned, &layout, options, &out)?.run(make, |job, files, _| {
        interrupt::check()?;
        job.commit_begins()?;
        files.into_iter().try_for_each(|file| file.overwrite(options.overwrite).commit())
    })?;
    if finished.part.is_none() {
        target.deliver()?;
    }
    let written = || finished.made(&planned);
    let mut types = BTreeMap::new();
    written().for_each(|p| *types.entry(p.tensor.kind.to_string()).or_default() += 1);
    Ok(ExportSummary {
        architecture: family.name.to_string(),
        tensors: written().count(),
        resumed_tensors: finished.resumed,
        types,
        dequantized_tensors: written().filter(|p| pack.is_dequantized(p)).count(),
        bytes: layout.total,
        wall_time_s: start.elapsed().as_secs_f64(),
        notes,
        part: finished.part,
    })
}

fn conversion<'a>(
    reader: &'a IebinReader,
    planned: &[ExportedTensor],
    layout: &GgufLayout,
    options: &'a ExportOptions,
    out: &'a Path,
) -> Result<Conversion<'a>> {
    let mut fingerprint = Fingerprint::for_file(COMMAND, out);
    pack_input::fingerprint(reader, &mut fingerprint)?;
    fingerprint.field("header", String::from_utf8_lossy(&layout.header));
    let mut tasks: Vec<Task<'_>> = pack_input::check_tasks(reader, |_| true).collect();
    for (number, (planned, start)) in planned.iter().zip(&layout.starts).enumerate() {
        fingerprint.field("tensor", format_args!("{start} {planned:?}"));
        let section = Section { file: 0, range: *start..start + planned.tensor.nbytes };
        tasks.push(Task::make(number, &planned.tensor.name, planned.tensor.nbytes, vec![section]));
    }
    let mut repeatable = options.clone();
    make_absolute([Some(&mut repeatable.model_dir)])?;
    let name = out.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let partial_name = PARTIAL_NAME.to_string();
    Ok(Conversion {
        command: Command::new(COMMAND, &repeatable),
        out_dir: dir_of_file(out)?,
        fingerprint: fingerprint.finish(),
        lead: None,
        output: Output::AmongOthers,
        run: &options.run,
        label: "exporting",
        files: vec![DataFile { partial_name, name, len: layout.total, header: layout.header.clone() }],
        tasks,
    })
}

/// Returns the keys `general.*`, which describe the file.
fn general(family: &Family, planned: &[ExportedTensor]) -> Vec<(String, Meta)> {
    let mut bytes: BTreeMap<GgmlType, u64> = BTreeMap::new();
    planned.iter().for_each(|p| *bytes.entry(p.tensor.kind).or_default() += p.tensor.nbytes);
    let most = bytes.into_iter().max_by_key(|(_, n)| *n).map_or(GgmlType::F32, |(kind, _)| kind);
    // `llama_ftype` of the type that takes the most bytes of the file; the key is informative.
    let file_type = match most {
        GgmlType::F16 => 1,
        GgmlType::Q4_0 => 2,
        GgmlType::Q8_0 => 7,
        GgmlType::Q5_0 => 8,
        GgmlType::IQ4_NL => 25,
        GgmlType::BF16 => 32,
        GgmlType::MXFP4 => 38,
        _ => 0,
    };
    vec![
        ("general.architecture".into(), Meta::String(family.name.into())),
        ("general.type".into(), Meta::String("model".into())),
        ("general.quantized_by".into(), Meta::String(concat!("iec ", env!("CARGO_PKG_VERSION")).into())),
        ("general.file_type".into(), Meta::u32(file_type)),
        ("general.quantization_version".into(), Meta::u32(2)),
    ]
}

fn tokenizer(reader: &IebinReader, config: &ModelConfig, options: &ExportOptions) -> Result<tokenizer_out::Keys> {
    let name = reader.description.tokenizer.as_deref().unwrap_or("tokenizer.json");
    reader.check_files()?;
    let path = reader.path(plain_file_name(name)?);
    if !files::exists(&path)? {
        return Err(Error::corrupt("missing; a GGUF file needs the tokenizer")
            .at(&path)
            .help("pack again with --tokenizer FILE"));
    }
    let tokenizer: Value = read_json(&path)?;
    let optional = |name: &str| files::first([reader.path(name)]);
    let settings: Value = optional("tokenizer_config.json")?.map_or(Ok(Value::Null), |path| read_json(&path))?;
    let template = |name: &str| -> Result<Option<String>> {
        let bytes = optional(name)?.map(|path| read_limited(&path)).transpose()?;
        Ok(bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()))
    };
    let (template, tool_template) = (template("chat_template.jinja")?, template(TOOL_TEMPLATE_NAME)?);
    let source = tokenizer_out::TokenizerSource {
        tokenizer: &tokenizer,
        config: &settings,
        template: template.as_deref(),
        tool_template: tool_template.as_deref(),
        model: config,
        pre: options.pre.as_deref(),
    };
    tokenizer_keys(&source)
        .at(&path)
        .help("llama.cpp has no such tokenizer, or the file is damaged; `iec pack --tokenizer FILE` takes another one")
}
