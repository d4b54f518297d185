//! How does a GGUF file become a pack? Metadata gives the configuration, the family's own code the description, that the
//! tensors there must be; then every tensor is gathered row by row in canonical order.
//!
//! Blocks that have a scheme of ours keep codes and scales; floats keep their bytes; all other types become their exact f32
//! values. Memory is bounded by a few chunks per thread.

mod fill;
mod plan;

use super::reader::{Gguf, GgufFile};
use crate::convert::digest::hash_file;
use crate::convert::pack::companions::TOKENIZER;
use crate::convert::pack::refuse_occupied;
use crate::convert::read_at::ReadAt;
use crate::dtype::DType;
use crate::error::{Context, Result};
use crate::iebin::{DescriptionParts, Entry, IebinWriter, JSON_NAME, Store};
use crate::output::Inputs;
use crate::progress::{self, ProgressBar};
use crate::provenance::{Source, SourceFile};
use fill::fill;
use plan::{Item, Model};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

/// What is imported, and how.
#[derive(Debug, Clone, Default)]
pub struct ImportOptions {
    /// The file, or the first one of a split model.
    pub file: PathBuf,
    /// Where the pack goes; made when missing.
    pub out_dir: PathBuf,
    /// The float type of tensors that are not quantized in the pack; `None` keeps each as it is, and makes exact f32 of
    /// types that have no scheme of ours.
    pub dtype: Option<DType>,
    /// A tokenizer.json to use instead of the file's own tokenizer.
    pub tokenizer: Option<PathBuf>,
    /// Replace an existing pack.
    pub overwrite: bool,
}

/// What was imported.
#[derive(Debug, Clone, Serialize)]
pub struct ImportSummary {
    /// Class name of the model.
    pub architecture: String,
    /// Number of tensors in the pack.
    pub tensors: usize,
    /// Of these, stored quantized, with the codes and scales of the file.
    pub quantized_tensors: usize,
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

/// Imports a GGUF file as a pack.
///
/// # Errors
/// The file is damaged or of a family, type or tokenizer that is not supported, or the output cannot be written. Nothing is
/// left in `out_dir` then.
pub fn import(options: &ImportOptions) -> Result<ImportSummary> {
    let start = Instant::now();
    let inputs = Inputs::default().files([Some(&options.file), options.tokenizer.as_ref()].into_iter().flatten());
    refuse_occupied(&options.out_dir, options.overwrite, &inputs)?;
    let gguf = Gguf::open(&options.file)?;
    let model = Model::read(&gguf, options).at(&options.file)?;
    let items = model.plan(options.dtype).at(&options.file)?;
    let planned = items.iter().map(|item| item.planned.clone()).collect();
    let writer = IebinWriter::create(&options.out_dir, planned, options.overwrite)?;
    let payloads: u64 = writer.entries().iter().map(|e| e.nbytes as u64).sum();
    let bytes_in: u64 = gguf.files().iter().map(|f| f.nbytes).sum();
    let bar = progress::bytes("importing", payloads + bytes_in);
    let (source, hashes) = rayon::join(|| source(&gguf, &bar), || fill(&model, &items, &writer, &bar));
    bar.finish_and_clear();
    let (source, hashes) = (source?, hashes.at(&options.file)?);
    let parts = DescriptionParts {
        model: Some(model.config.clone()),
        tokenizer: model.tokenizer.is_some().then(|| TOKENIZER.to_string()),
        source: Some(source),
        companions: model.companions(&options.out_dir)?,
        quality: None,
        obsolete: if options.out_dir.join(JSON_NAME).exists() { model.obsolete() } else { Vec::new() },
    };
    let entries = writer.finish(parts, hashes)?;
    Ok(summary(&model, &items, &entries, bytes_in, start))
}

fn summary(model: &Model, items: &[Item], entries: &[Entry], bytes_in: u64, start: Instant) -> ImportSummary {
    let mut decoded = BTreeMap::new();
    for item in items {
        if let Some(kind) = item.decoded_from() {
            *decoded.entry(kind.to_string()).or_default() += 1;
        }
    }
    let payload: u64 = entries.iter().map(|e| e.nbytes as u64).sum();
    let parameters: u64 = entries.iter().map(|e| e.elements() as u64).sum();
    ImportSummary {
        architecture: model.config.architecture.clone(),
        tensors: entries.len(),
        quantized_tensors: items.iter().filter(|item| matches!(item.planned.store, Store::Tiled(_))).count(),
        decoded_tensors: decoded,
        rounded_tensors: items.iter().filter(|item| item.is_rounded()).count(),
        parameters,
        bytes_in,
        bytes_out: entries.last().map_or(0, |e| (e.offset + e.nbytes) as u64),
        bits_per_weight: payload as f64 * 8.0 / parameters as f64,
        seconds: start.elapsed().as_secs_f64(),
        tokenizer: model.tokenizer.is_some(),
    }
}

/// Hashes the files.
fn source(gguf: &Gguf, bar: &ProgressBar) -> Result<Source> {
    let hash = |file: &GgufFile| {
        let name = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let sha256 = hash_file(file.nbytes, bar, |at, out| file.read_at(at, out)).at(&file.path)?;
        Ok(SourceFile { name, bytes: file.nbytes, sha256 })
    };
    Ok(Source { repo: None, files: gguf.files().iter().map(hash).collect::<Result<_>>()? })
}
