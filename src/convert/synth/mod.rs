//! Creates checkpoints with the shapes of real models and random weights, without a download.
//!
//! A configuration becomes a [`Plan`] (files, tensors, sizes: plain data), and [`Plan::write`] writes it with seeded
//! random numbers in parallel. The result is a Hugging Face directory that any reader accepts. Its text is nonsense;
//! its sizes and speed are those of the real model.

pub mod presets;
mod tensors;
mod tokenizer;
mod values;

use crate::convert::arch::{Arch, Fields};
use crate::convert::sharding::{self, Shard, divide};
use crate::dtype::DType;
use crate::error::{Context, Error, Result};
use crate::model_config::{Mlp, ModelConfig};
use crate::output::{AtomicFile, OutDir};
use crate::progress::ProgressBar;
use crate::strict_json::to_python;
use crate::{interrupt, progress};
use rayon::prelude::*;
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use tensors::Tensor;
pub use values::Tails;
use values::{Palette, Values};

/// Bytes that one thread generates and writes at once; memory is this times the number of threads.
const CHUNK_BYTES: usize = 4 << 20;

/// Plan of a checkpoint that is not written yet.
#[derive(Debug)]
pub struct Plan {
    config: Value,
    side_files: Vec<(&'static str, Vec<u8>)>,
    shards: Vec<Shard<Values>>,
    tails: Tails,
}

impl Plan {
    /// Plans all files of a checkpoint with this `config.json` and at most `max_shard_bytes` of weights per file, with
    /// the layers of multi-token prediction if `with_mtp` is set.
    ///
    /// # Errors
    /// The configuration is invalid, of an architecture this program cannot run, or its vocabulary is too small.
    pub fn new(config: Value, max_shard_bytes: u64, with_mtp: bool) -> Result<Plan> {
        let Some(fields) = config.as_object().map(Fields::new) else {
            return Err(Error::corrupt("config.json is not a JSON object"));
        };
        let arch = Arch::of(&fields)?;
        let mut model = arch.model_config(&fields, None)?;
        if with_mtp {
            model.prediction_layers = arch.prediction_layers(&fields)?;
            model.validate()?;
            if model.prediction_layers == 0 {
                return Err(Error::usage("found a configuration without layers of multi-token prediction")
                    .help("leave --with-mtp out"));
            }
        }
        let mxfp4 = quantized_experts(&config, &model)?;
        let tensors = tensors::list(arch, &model, float_dtype(&config)?, mxfp4);
        if mxfp4 && !tensors.iter().any(|tensor| matches!(tensor.content, Values::Mxfp4Codes { .. })) {
            return Err(refuse_quantization("mxfp4"));
        }
        refuse_overflow(&tensors)?;
        let side_files = tokenizer::files(&presets::of_text(&config))?;
        Ok(Plan { config, side_files, shards: divide(tensors, max_shard_bytes), tails: Tails::default() })
    }

    /// Returns the plan with this distribution of weights.
    pub fn with_tails(self, tails: Tails) -> Plan {
        Plan { tails, ..self }
    }

    /// Returns the number of weights.
    pub fn parameters(&self) -> u64 {
        self.tensors().map(Tensor::parameters).sum()
    }

    /// Returns the number of tensors.
    pub fn tensor_count(&self) -> usize {
        self.tensors().count()
    }

    /// Returns the number of bytes of all weight files.
    pub fn nbytes(&self) -> u64 {
        self.shards.iter().map(Shard::nbytes).sum()
    }

    /// Returns the names of the weight files.
    pub fn weight_files(&self) -> impl Iterator<Item = &str> {
        self.shards.iter().map(|s| s.file_name.as_str())
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.shards.iter().flat_map(|s| &s.tensors)
    }

    /// Writes the checkpoint into `dir`, which is created if it is missing. The same plan and seed give the same
    /// bytes with any number of threads. Weights are written under temporary names; `config.json`, which every reader
    /// needs, is written last.
    ///
    /// # Errors
    /// `dir` already holds a checkpoint and `overwrite` is false, the disk is full, or the user interrupts.
    pub fn write(&self, dir: &Path, seed: u64, overwrite: bool) -> Result<()> {
        sharding::refuse_checkpoint(dir, overwrite)?;
        // Removes a new directory on failure; dropped after the files in it.
        let _out = OutDir::make(dir)?;
        let files = self.shards.iter().map(|shard| shard.create(dir)).collect::<Result<Vec<_>>>()?;
        let bar = progress::bytes("weights", self.nbytes());
        for (shard, file) in self.shards.iter().zip(&files) {
            fill_shard(shard, file, seed, self.tails, &bar)?;
        }
        let config = to_python(&self.config);
        let small_file = |(name, bytes): (&str, Vec<u8>)| {
            let mut file = AtomicFile::create(&dir.join(name))?;
            file.write_all(&bytes).at(file.path())?;
            Ok(file)
        };
        let beside = self.side_files.iter().map(|(name, content)| (*name, content.clone()));
        let small = sharding::index(&self.shards).into_iter().chain(beside).chain([("config.json", config)]);
        let small = small.map(small_file).collect::<Result<Vec<_>>>()?;
        sharding::commit(dir, files.into_iter().chain(small), || sharding::refuse_checkpoint(dir, overwrite))
    }
}

fn fill_shard(shard: &Shard<Values>, file: &AtomicFile, seed: u64, tails: Tails, bar: &ProgressBar) -> Result<()> {
    let palettes =
        shard.tensors.iter().map(|t| Palette::new(&t.content, t.dtype, tails)).collect::<Result<Vec<_>>>()?;
    let chunks = shard.offsets().zip(&palettes).flat_map(|((tensor, start), palette)| {
        let row_bytes = tensor.row_elements() * tensor.dtype.size();
        let step = (CHUNK_BYTES / row_bytes).max(1);
        let rows_from = move |first: usize| first..(first + step).min(tensor.rows());
        (0..tensor.rows()).step_by(step).map(move |first| (tensor, palette, start, row_bytes, rows_from(first)))
    });
    // The bridge hands chunks out in file order, so the disk sees one nearly sequential stream.
    chunks.par_bridge().try_for_each_init(Vec::new, |buffer, (tensor, palette, start, row_bytes, rows)| -> Result<()> {
        interrupt::check()?;
        buffer.resize(rows.len() * row_bytes, 0);
        for (row, out) in rows.clone().zip(buffer.chunks_mut(row_bytes)) {
            palette.fill_row(seed, tensor.group(), &tensor.name, row as u64, out);
        }
        file.write_at(buffer, start + (rows.start * row_bytes) as u64)?;
        bar.inc(buffer.len() as u64);
        Ok(())
    })
}

/// Refuses tensors of 2^60 bytes or more in total: an untrusted configuration may have any dimensions, and sizes are
/// added without checks afterwards.
fn refuse_overflow(tensors: &[Tensor]) -> Result<()> {
    let mut total = 0u64;
    for tensor in tensors {
        let nbytes = tensor.shape.iter().try_fold(tensor.dtype.size() as u64, |n, d| n.checked_mul(*d as u64));
        total = nbytes.and_then(|n| total.checked_add(n)).filter(|total| *total < 1 << 60).ok_or_else(|| {
            let found = format!("found shape {:?}, with which the checkpoint overflows 2^60 bytes", tensor.shape);
            Error::unsupported(found).tensor(&tensor.name)
        })?;
    }
    Ok(())
}

/// Returns the type of unquantized tensors: `dtype` or `torch_dtype` of the configuration, or bf16 if both are
/// missing.
fn float_dtype(config: &Value) -> Result<DType> {
    let field = ["dtype", "torch_dtype"].into_iter().find(|f| config[*f].is_string());
    let Some(field) = field else { return Ok(DType::BF16) };
    let dtype = DType::parse(config[field].as_str().unwrap_or_default()).tensor(field)?;
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(dtype),
        other => Err(Error::unsupported(format!("found {other}, expected float32, float16 or bfloat16")).tensor(field)),
    }
}

fn refuse_quantization(method: &str) -> Error {
    let method: String = method.chars().take(60).collect();
    Error::unsupported(format!("found `{method}`, expected mxfp4, and a family whose experts have that form"))
        .tensor("quantization_config.quant_method")
        .help("remove quantization_config; quantize the synthetic checkpoint with `iec pack --bits 4`")
}

/// Returns true if the experts are written as MXFP4 blocks.
///
/// # Errors
/// The configuration asks for another quantization, or the family has no experts in that form.
fn quantized_experts(config: &Value, model: &ModelConfig) -> Result<bool> {
    let settings = &config["quantization_config"];
    if settings.is_null() {
        return Ok(false);
    }
    let (Mlp::Moe { intermediate, .. }, true) = (&model.mlp, settings["quant_method"] == "mxfp4") else {
        return Err(refuse_quantization(settings["quant_method"].as_str().unwrap_or("no method")));
    };
    let intermediate = *intermediate;
    let widths = [("hidden_size", model.hidden), ("intermediate_size", intermediate)];
    match widths.iter().find(|(_, width)| width % 32 != 0) {
        Some((field, width)) => {
            Err(Error::unsupported(format!("found {width}, expected a multiple of 32 for MXFP4 blocks")).tensor(*field))
        }
        None => Ok(true),
    }
}
