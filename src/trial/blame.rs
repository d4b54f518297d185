//! Measures the divergence that each quantized tensor causes: the float model is run repeatedly with one tensor
//! quantized.
//!
//! Errors of different tensors are nearly independent, so their contributions to the divergence are nearly additive.
//! A tensor quantized alone is measured without the noise of the others.

use super::{Packs, Trial, open_reader, weights_alone};
use crate::error::{Context, Result};
use crate::eval::Remembered;
use crate::files;
use crate::iebin::reader::read_description;
use crate::iebin::{BIN_NAME, Description, EntryJson, IebinReader, JSON_NAME, QUANT_ALIGNMENT};
use crate::interrupt;
use crate::job::Job;
use crate::progress;
use crate::quant::metrics::nine_digits;
use crate::runtime::PrefixActivations;
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::PathBuf;

/// Number of windows evaluated for each tensor when tensors are only ranked. It is small, because each tensor needs a
/// run of the model over the windows.
pub const WINDOWS: usize = 2;
/// Name of the file with the payload of the float pack followed by that of the quantized pack.
const BOTH: &str = "both.bin";

/// Divergence caused by one tensor.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Blame {
    /// Name of the tensor.
    pub tensor: String,
    /// Mean divergence of a model in which only this tensor is quantized, in nats per token.
    pub kl: f64,
}

impl Trial<'_> {
    /// Measures, for each quantized tensor of the pack that was made last, the divergence of a model in which only
    /// this tensor is quantized, over the first `windows` windows. Returns the tensors, the worst first. Takes results
    /// of an earlier run from `job` and records the others there.
    ///
    /// # Errors
    /// The disk is full, an engine fails, or the user interrupts.
    pub fn blame(&mut self, windows: usize, job: Option<&Job>) -> Result<Vec<Blame>> {
        let mixed = Mixed::of(self.packs)?;
        let windows = self.windows.first(windows);
        let bar = progress::items("tensors alone", (mixed.suspects.len() * windows.count()) as u64);
        let mut sums = vec![0.0; mixed.suspects.len()];
        let layers = self.reference.config().n_layers;
        let mut order: Vec<(Option<usize>, usize)> =
            mixed.suspects.iter().enumerate().map(|(i, suspect)| (layer_of(&suspect.1.name, layers), i)).collect();
        // From the last layer to the first: a run for a layer stores the inputs of all layers up to it, from which the
        // runs for earlier layers start.
        order.sort_by_key(|(layer, _)| std::cmp::Reverse(*layer));
        // Window by window, so that the reference predictions are computed once and only those of one window are in
        // memory.
        for (number, window) in windows.iter().enumerate() {
            let (mut reference, mut prefix) = (None, PrefixActivations::default());
            for (layer, i) in order.iter().copied() {
                interrupt::check()?;
                let suspect = &mixed.suspects[i];
                let task = format!("window {number} with {}", suspect.1.name);
                let mut measure = || -> Result<f64> {
                    let reference = match &mut reference {
                        Some(reference) => reference,
                        none => none.insert(Remembered::of(&mut self.reference, &windows, window.clone())?),
                    };
                    let reader = mixed.with(suspect)?;
                    let mut engine = open_reader(&reader, weights_alone(&reader), self.question.threads)?;
                    let kl = match layer {
                        Some(layer) => reference.kl_reusing(&mut engine, layer, &mut prefix)?,
                        None => reference.kl(&mut engine)?,
                    };
                    let kl = nine_digits(kl);
                    job.map_or(Ok(()), |job| job.record(&task, &kl, 0))?;
                    Ok(kl)
                };
                match job.and_then(|job| job.found::<f64>(&task).next()) {
                    Some(found) => {
                        sums[i] += found.result;
                        bar.skip(1);
                    }
                    None => {
                        sums[i] += measure()?;
                        bar.inc(1);
                    }
                }
            }
        }
        let mean = |sum: &f64| nine_digits(*sum / windows.count() as f64);
        let each = mixed.suspects.iter().zip(&sums);
        let mut blame: Vec<Blame> =
            each.map(|(suspect, sum)| Blame { tensor: suspect.1.name.clone(), kl: mean(sum) }).collect();
        blame.sort_by(|a, b| b.kl.total_cmp(&a.kl).then_with(|| a.tensor.cmp(&b.tensor)));
        Ok(blame)
    }
}

/// Returns the first layer that a tensor affects; `layers` for the output matrix, `None` for the embedding.
fn layer_of(name: &str, layers: usize) -> Option<usize> {
    match name.strip_prefix("model.layers.") {
        Some(rest) => rest.split_once('.')?.0.parse().ok().filter(|layer| *layer < layers),
        None => (name == "lm_head.weight").then_some(layers),
    }
}

/// Source of models with one tensor from the quantized pack and all others from the float pack.
struct Mixed {
    dir: PathBuf,
    float: Description,
    /// Each quantized tensor: its index in the float pack, and its quantized entry with the offset in file [`BOTH`].
    suspects: Vec<(usize, EntryJson)>,
}

impl Mixed {
    fn of(packs: &Packs) -> Result<Mixed> {
        let float = read_description(&packs.float().join(JSON_NAME))?;
        let quantized = read_description(&packs.quantized().join(JSON_NAME))?;
        let behind = concatenate(packs)?;
        let suspects = (float.tensors.iter().enumerate())
            .filter(|(_, entry)| entry.quant.is_none())
            .filter_map(|(i, entry)| Some((i, quantized.tensors.iter().find(|q| q.name == entry.name)?)))
            .filter(|(_, entry)| entry.quant.is_some())
            .map(|(i, entry)| (i, EntryJson { offset: entry.offset + behind, ..entry.clone() }))
            .collect();
        Ok(Mixed { dir: packs.dir().to_path_buf(), float, suspects })
    }

    fn with(&self, (place, entry): &(usize, EntryJson)) -> Result<IebinReader> {
        let mut mixed = Description { weights_bin: BOTH.into(), total_bytes: None, ..self.float.clone() };
        mixed.tensors[*place] = entry.clone();
        IebinReader::open_described(mixed, &self.dir.join(JSON_NAME), None)
    }
}

/// Writes the file [`BOTH`]; returns the offset of the payload of the quantized pack.
fn concatenate(packs: &Packs) -> Result<u64> {
    let path = packs.dir().join(BOTH);
    let mut out = File::create(&path).at(&path)?;
    let mut behind = 0;
    for pack in [packs.float(), packs.quantized()] {
        behind = out.stream_position().at(&path)?.next_multiple_of(QUANT_ALIGNMENT as u64);
        out.seek(SeekFrom::Start(behind)).at(&path)?;
        let from = pack.join(BIN_NAME);
        std::io::copy(&mut files::open(&from)?, &mut out).at(&from)?;
    }
    Ok(behind)
}
