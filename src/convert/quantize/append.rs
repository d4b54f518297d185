//! Rewrites a pack with its attention projections as q4_0, everything else untouched.

use super::judge::{Judgement, OnFailure};
use super::ptq::{Evidence, measure};
use super::select::{Selection, SelectionOptions};
use super::weights::{Tensor, Weights};
use crate::convert::payload::Payload;
use crate::error::{Context, Error, Result};
use crate::iebin::dependants;
use crate::iebin::writer::{DescriptionParts, IebinWriter, PlannedTensor};
use crate::iebin::{Entry, IebinReader, Store};
use crate::manifest::TensorEntry;
use crate::progress;
use crate::provenance::{Gate, Quality};
use crate::quant::Quantizer;
use crate::quant_spec::QuantFields;
use crate::scheme::{Scheme, TILE_ROWS};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

/// The attention projections by their canonical names.
const ATTENTION: &str = r"\.self_attn\.[qkvo]_proj\.weight$";
/// Rows quantized at once when the caller has no wish.
const CHUNK_ROWS: usize = 256;
/// Bytes copied at once.
const CHUNK_BYTES: usize = 1 << 20;

/// What may vary.
#[derive(Debug, Default)]
pub struct Options<'a> {
    /// The checkpoint the weights come from; otherwise the pack's own floats.
    pub hf_dir: Option<&'a Path>,
    /// The output matrix, too.
    pub include_lm_head: bool,
    /// Rows quantized at once; the bytes do not depend on it.
    pub chunk_rows: Option<usize>,
}

/// Rewrites the pack in `model_dir` and returns the names of the matrices. The default gate must accept them.
///
/// # Errors
/// The projections are quantized already and no checkpoint is given, the checkpoint is of another model, the gate
/// refuses, others are rebuilt from the pack, or it cannot be written; the old pack is still there then.
pub fn append_attention(model_dir: &Path, options: &Options<'_>) -> Result<Vec<String>> {
    dependants::refuse_if_needed(model_dir)?;
    let reader = IebinReader::open(model_dir).map_err(Error::while_opening_model)?;
    let weights = match options.hf_dir {
        Some(dir) => Weights::open_checkpoint(dir, None)?,
        None => Weights::open_pack(model_dir).map_err(Error::while_opening_model)?,
    };
    let selected = SelectionOptions {
        fields: QuantFields { scheme: Some(Scheme::Q4_0), ..QuantFields::default() },
        include: vec![ATTENTION.to_string()],
        include_lm_head: options.include_lm_head,
        ..SelectionOptions::default()
    };
    let judgement = Judgement { gate: Gate::default(), on_failure: OnFailure::Refuse };
    let measured = measure(&weights, &Selection::new(selected, None)?, &judgement, Evidence::default())?;
    if let (Some(made_from), Some(found)) = (&reader.description.source, &measured.document.source)
        && made_from != found
    {
        return Err(Error::corrupt("the pack was made from other weights than the checkpoint holds").at(model_dir));
    }
    if measured.document.refused {
        return Err(Error::refused("the gate refuses these matrices as q4_0")
            .help("see `iec ptq --include self_attn` for the tensors and their numbers"));
    }
    let decided: BTreeMap<&str, (&Tensor, &TensorEntry)> =
        measured.tensors.iter().map(|t| (t.name.as_str(), (t, &measured.document.tensors[&t.name]))).collect();
    // Tiles must not be torn.
    let chunk_rows = options.chunk_rows.unwrap_or(CHUNK_ROWS).clamp(1, 1 << 20).next_multiple_of(TILE_ROWS);
    rewrite(&reader, &weights, &decided, measured.document.quality(), chunk_rows)?;
    Ok(measured.tensors.into_iter().map(|t| t.name).collect())
}

fn rewrite(
    reader: &IebinReader,
    weights: &Weights,
    decided: &BTreeMap<&str, (&Tensor, &TensorEntry)>,
    quality: Option<Quality>,
    chunk_rows: usize,
) -> Result<()> {
    for (name, (tensor, _)) in decided {
        let entry = reader.get(name).ok_or_else(|| Error::corrupt("is not in the pack").tensor(*name))?;
        if entry.shape != tensor.shape {
            let found = format!("shape {:?} in the pack, {:?} in the checkpoint", entry.shape, tensor.shape);
            return Err(Error::corrupt(found).tensor(*name));
        }
    }
    let plan = reader.entries().iter().map(|e| planned(e, decided.get(e.name.as_str()).map(|d| d.1))).collect();
    let writer = IebinWriter::create(&reader.dir, plan, true)?;
    let bar = progress::bytes("rewriting", writer.entries().iter().map(|e| e.nbytes as u64).sum());
    let fill = |(index, entry): (usize, &Entry)| {
        let mut payload = Payload::new(&writer, &bar, index);
        match decided.get(entry.name.as_str()) {
            Some((tensor, decision)) => payload.quantize(weights, tensor, decision, chunk_rows)?,
            None => reader.payload(entry)?.chunks(CHUNK_BYTES).try_for_each(|bytes| payload.append(bytes))?,
        }
        Ok(payload.finish())
    };
    let hashes = reader.entries().par_iter().enumerate().map(fill).collect::<Result<Vec<_>>>()?;
    bar.finish_and_clear();
    let description = &reader.description;
    let parts = DescriptionParts {
        model: description.model.clone(),
        tokenizer: description.tokenizer.clone(),
        source: description.source.clone(),
        quality,
        ..DescriptionParts::default()
    };
    writer.finish(parts, hashes).map(|_| ())
}

fn planned(entry: &Entry, decision: Option<&TensorEntry>) -> PlannedTensor {
    let quantized = decision.and_then(|d| d.quant.map(|quant| (quant, d.metrics)));
    PlannedTensor {
        name: entry.name.clone(),
        shape: entry.shape.clone(),
        store: quantized.map_or(entry.store, |(quant, _)| Store::Tiled(quant.spec)),
        source_layout: entry.source_layout.clone(),
        metrics: match quantized {
            Some((_, metrics)) => metrics.and_then(|m| serde_json::to_value(m).ok()),
            None => entry.metrics.clone(),
        },
    }
}

impl Payload<'_> {
    fn quantize(
        &mut self,
        weights: &Weights,
        tensor: &Tensor,
        decision: &TensorEntry,
        chunk_rows: usize,
    ) -> Result<()> {
        let Some(quant) = decision.quant else { return Ok(()) };
        let (_, rows, cols) = tensor.matrices()?;
        let quantizer = Quantizer::new(quant, rows, cols).tensor(&tensor.name)?;
        let (mut values, mut tiles) = (Vec::new(), Vec::new());
        for start in (0..rows).step_by(chunk_rows) {
            let range = start..rows.min(start + chunk_rows);
            values.resize(range.len() * cols, 0.0);
            tiles.resize(range.len().div_ceil(TILE_ROWS) * quantizer.layout().tile_bytes, 0);
            weights.read_rows_f32(tensor, 0, range, &mut values)?;
            quantizer.encode_tiles(&values, &mut tiles).tensor(&tensor.name)?;
            self.append(&tiles)?;
        }
        Ok(())
    }
}
