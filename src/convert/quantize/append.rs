//! Rewrites a pack with its attention projections as q4_0; all other tensors are copied unchanged.
//!
//! The new binary is written in a hidden directory of the pack and replaces the old one when it is complete. Tensors
//! are compared with their recorded hashes, so that damaged data does not get a new hash that
//! confirms it.

use super::judge::{Judgement, Measuring, OnFailure};
use super::ptq::selected;
use super::select::{OuterStorage, Selection, SelectionOptions};
use super::weights::{Tensor, Weights};
use crate::convert::executor::{Conversion, Finished, Task, TaskOutput};
use crate::convert::{pack_input, pack_output};
use crate::error::{Context, Error, Result};
use crate::iebin::writer::{self, DescriptionParts, Layout, PlannedTensor};
use crate::iebin::{IebinReader, JSON_NAME, Store, dependants};
use crate::job::{self, Command, Fingerprint, Job, Output, RunOptions};
use crate::manifest::{TensorEntry, Verdict};
use crate::output::AtomicFile;
use crate::output::make_absolute;
use crate::progress::ProgressBar;
use crate::provenance::{Gate, Quality};
use crate::quant::stream::{self, Stack};
use crate::quant_spec::{QuantFields, TensorQuant};
use crate::scheme::Scheme;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Name of the command in fingerprints, and in `command.json` of unfinished parts, from which `iec merge` repeats it.
pub const COMMAND: &str = "q4 --append-attn";
/// Pattern of the canonical names of attention projections.
const ATTENTION: &str = r"\.self_attn\.[qkvo]_proj\.weight$";
/// Bytes that are copied at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// Time to measure and quantize a tensor relative to the time to hash the same bytes; balances the parts of a run.
const QUANTIZE_FACTOR: u64 = 64;

/// Options of [`append_attention`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct AppendOptions {
    /// Directory of the pack.
    #[serde(skip)]
    pub model_dir: PathBuf,
    /// Checkpoint that the weights are read from; `None` to quantize the floats in the pack.
    pub hf_dir: Option<PathBuf>,
    /// True to quantize the output matrix (LM head), too.
    pub include_lm_head: bool,
    /// Number of rows that are quantized at a time; the output bytes do not depend on it.
    pub chunk_rows: Option<usize>,
    /// Options of the run; the output bytes do not depend on them.
    #[serde(skip)]
    pub run: RunOptions,
}

/// Result of [`append_attention`].
#[derive(Debug, Clone, Serialize)]
pub struct AppendSummary {
    /// Directory of the pack.
    pub model_dir: PathBuf,
    /// The part that this run did; `None` for a complete run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// Names of the matrices that are now q4_0; for a part, the ones that it quantized.
    pub tensors: Vec<String>,
    /// Tensors of the pack, quantized or copied, that were taken over from an interrupted run or from parts.
    pub resumed_tensors: usize,
}

/// Rewrites the attention projections of a pack as q4_0. The default gate must accept each matrix. Without a
/// checkpoint, projections that are q4_0 already stay as they are.
///
/// # Errors
/// Projections are quantized in another format and no checkpoint is given, the checkpoint is of another model, the gate
/// refuses a matrix, the pack is damaged, other packs are rebuilt from it, or the new pack cannot be written. In all
/// these cases the old pack remains.
pub fn append_attention(options: &AppendOptions) -> Result<AppendSummary> {
    writer::recover(&options.model_dir).map_err(Error::while_opening_model)?;
    dependants::refuse_if_needed(&options.model_dir)?;
    let reader = IebinReader::open(&options.model_dir).map_err(Error::while_opening_model)?;
    let weights = match &options.hf_dir {
        Some(dir) => Weights::open(dir, None)?,
        None => Weights::open(&options.model_dir, None)?,
    };
    reader.check_files()?;
    let rewriting = Rewriting::new(options, &reader, &weights)?;
    if rewriting.quantized.is_empty() {
        // If an earlier run was killed after it had replaced the pack, its partial work is removed now.
        job::remove_over(&options.model_dir);
        let model_dir = options.model_dir.clone();
        return Ok(AppendSummary { model_dir, part: None, tensors: Vec::new(), resumed_tensors: 0 });
    }
    let conversion = rewriting.conversion()?;
    let finished = conversion
        .run(|item, out| rewriting.make(item, out), |job, files, finished| rewriting.commit(job, files, finished))?;
    let entries = finished.made(&rewriting.layout.entries).map(|entry| entry.name.clone());
    Ok(AppendSummary {
        model_dir: options.model_dir.clone(),
        tensors: entries.filter(|name| rewriting.quantized.contains_key(name)).collect(),
        resumed_tensors: finished.resumed,
        part: finished.part,
    })
}

/// Inputs of the rewriting, and the layout of the new pack.
struct Rewriting<'a> {
    options: &'a AppendOptions,
    reader: &'a IebinReader,
    weights: &'a Weights,
    /// Tensors that are quantized, by name.
    quantized: HashMap<String, (Tensor, TensorQuant)>,
    layout: Layout,
}

/// Result for a finished tensor.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Rewritten {
    entry: Option<TensorEntry>,
}

impl<'a> Rewriting<'a> {
    fn new(options: &'a AppendOptions, reader: &'a IebinReader, weights: &'a Weights) -> Result<Rewriting<'a>> {
        let attention = SelectionOptions {
            fields: QuantFields { scheme: Some(Scheme::Q4_0), ..QuantFields::default() },
            include: vec![ATTENTION.to_string()],
            lm_head: if options.include_lm_head { OuterStorage::LikeLayers } else { OuterStorage::Chosen },
            ..SelectionOptions::default()
        };
        // File names and sizes usually show at once that the weights are others; hashes are compared only at the end.
        if let (Some(made_from), [_, ..]) = (&reader.description.source, weights.files()) {
            let found = weights.files().iter().map(|file| (file.name(), file.nbytes()));
            if !found.eq(made_from.files.iter().map(|file| (file.name.clone(), file.bytes))) {
                return Err(other_weights(&options.model_dir));
            }
        }
        let selection = Selection::new(attention, None)?;
        selection.note_lm_head(&weights.tensors());
        let mut quantized = HashMap::new();
        for (tensor, quant) in selected(weights, &selection)? {
            if options.hf_dir.is_none() && tensor.store == Store::Tiled(quant.spec) {
                continue;
            }
            refuse_codes(&tensor)?;
            let entry = reader.get(&tensor.name);
            let entry = entry.ok_or_else(|| {
                Error::corrupt("found no such tensor in the pack").tensor(&tensor.name).help(OTHER_CHECKPOINT)
            })?;
            if entry.shape != tensor.shape {
                let found = format!(
                    "found shape {:?} in the pack, expected {:?} from the checkpoint",
                    entry.shape, tensor.shape
                );
                return Err(Error::corrupt(found).tensor(&tensor.name).help(OTHER_CHECKPOINT));
            }
            quantized.insert(tensor.name.clone(), (tensor, quant));
        }
        let planned = reader.entries().iter().map(|entry| PlannedTensor {
            name: entry.name.clone(),
            shape: entry.shape.clone(),
            store: quantized.get(&entry.name).map_or(entry.store, |(_, quant)| Store::Tiled(quant.spec)),
            source_layout: entry.source_layout.clone(),
            metrics: entry.metrics.clone(),
        });
        let layout = Layout::new(planned.collect())?;
        Ok(Rewriting { options, reader, weights, quantized, layout })
    }

    fn conversion(&self) -> Result<Conversion<'_>> {
        let mut options = self.options.clone();
        make_absolute([options.hf_dir.as_mut()])?;
        let mut fingerprint = Fingerprint::new(COMMAND);
        self.weights.fingerprint(&mut fingerprint)?;
        pack_input::fingerprint(self.reader, &mut fingerprint)?;
        for entry in &self.layout.entries {
            fingerprint.field("tensor", format_args!("{entry:?}"));
        }
        let (mut tasks, mut copies) = (Vec::new(), Vec::new());
        for (number, entry) in self.layout.entries.iter().enumerate() {
            let task = |weight| Task::make(number, &entry.name, weight, pack_output::section(entry));
            match self.quantized.get(&entry.name) {
                Some((tensor, _)) => tasks.push(task(tensor.nbytes() * QUANTIZE_FACTOR).parallel()),
                None => copies.push(task(2 * entry.nbytes as u64)),
            }
        }
        let mut read: Vec<&Tensor> = self.quantized.values().map(|(tensor, _)| tensor).collect();
        read.sort_by(|a, b| a.name.cmp(&b.name));
        tasks.extend(self.weights.hash_tasks(read));
        tasks.extend(copies);
        Ok(Conversion {
            command: Command::new(COMMAND, &options),
            out_dir: &self.reader.dir,
            fingerprint: fingerprint.finish(),
            lead: Some(JSON_NAME),
            output: Output::AmongOthers,
            run: &self.options.run,
            label: "rewriting",
            files: vec![pack_output::binary(&self.layout)],
            tasks,
        })
    }

    fn make(&self, item: usize, out: &mut TaskOutput<'_>) -> Result<Rewritten> {
        let entry = &self.reader.entries()[item];
        match self.quantized.get(&entry.name) {
            Some((tensor, quant)) => self.quantize(tensor, *quant, out),
            None => {
                let payload = self.reader.payload(entry)?;
                payload.chunks(CHUNK_BYTES).try_for_each(|bytes| out.append(0, bytes))?;
                Ok(Rewritten { entry: None })
            }
        }
    }

    fn quantize(&self, tensor: &Tensor, quant: TensorQuant, out: &mut TaskOutput<'_>) -> Result<Rewritten> {
        let judgement = Judgement { gate: Gate::default(), on_failure: OnFailure::Refuse };
        let bar = ProgressBar::hidden();
        let measuring = Measuring { weights: self.weights, tensor, calibration: None, bar: &bar };
        let entry = measuring.decide(quant, true, &judgement)?;
        let quant = match (entry.quant, entry.verdict) {
            (Some(quant), Some(Verdict::Accepted)) => quant,
            _ => {
                return Err(Error::refused("the gate refuses this matrix as q4_0").tensor(&tensor.name).help(
                    "keep such matrices as bf16: `iec ptq --include self_attn --keep-failing bf16`, then `iec pack \
                     --q4-map` with its manifest",
                ));
            }
        };
        let (count, rows, cols) = tensor.matrices()?;
        let read = self.weights.rows(tensor);
        let stack = Stack { count, rows, cols, read: &read, chunk_rows: self.options.chunk_rows, inputs: None };
        stream::encode(quant, &stack, &mut |tiles| out.append(0, tiles)).tensor(&tensor.name)?;
        Ok(Rewritten { entry: Some(entry) })
    }

    fn commit(&self, job: &Job, files: Vec<AtomicFile>, finished: &Finished<Rewritten>) -> Result<()> {
        let description = &self.reader.description;
        if let (Some(made_from), Some(found)) = (&description.source, self.weights.source(&finished.inputs))
            && *made_from != found
        {
            return Err(other_weights(&self.options.model_dir));
        }
        let mut layout = self.layout.clone();
        for (entry, copy) in self.reader.entries().iter().zip(finished.digests()) {
            if !self.quantized.contains_key(&entry.name) {
                pack_input::refuse_damage(self.reader, entry, &copy)?;
            }
        }
        for (entry, made) in layout.entries.iter_mut().zip(&finished.items) {
            if let Some(measured) = made.as_ref().and_then(|made| made.value.as_ref()?.entry.as_ref()) {
                entry.metrics = measured.metrics.and_then(|m| serde_json::to_value(m).ok());
            }
        }
        let parts = DescriptionParts {
            model: description.model.clone(),
            tokenizer: description.tokenizer.clone(),
            tokenizer_from: description.tokenizer_from.clone(),
            source: description.source.clone(),
            published: description.published.clone(),
            quality: Some(Quality { gate: Gate::default(), refused: false, evidence: None, task_evidence: Vec::new() }),
            files: self.reader.file_digests()?,
            adapter: None,
            companions: Vec::new(),
        };
        pack_output::commit(job, files, &layout, finished, parts, || Ok(()))
    }
}

/// Refuses a matrix of codes, which the command does not quantize again.
fn refuse_codes(tensor: &Tensor) -> Result<()> {
    match tensor.store {
        Store::Plain(_) => Ok(()),
        Store::Tiled(spec) => {
            let found = format!("found weights quantized as {}, expected the original floats", spec.scheme.name());
            Err(Error::unsupported(found)
                .tensor(&tensor.name)
                .help("name the checkpoint with the original weights with --hf-dir"))
        }
    }
}

/// Advice for weights that are not those of the pack.
const OTHER_CHECKPOINT: &str = "name the checkpoint that the pack was made from with --hf-dir, or leave --hf-dir out";

fn other_weights(pack: &Path) -> Error {
    Error::corrupt("found a pack that was made from other weights than this checkpoint has")
        .at(pack)
        .help(OTHER_CHECKPOINT)
}
