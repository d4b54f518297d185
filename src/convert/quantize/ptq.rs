//! Measures a quantization: quantizes every selected tensor, measures its error and compares it with the gate. The
//! result is a manifest.

use super::entry::{already_quantized, blank_entry, kept, stored_bits};
use super::judge::{Judgement, Measuring};
use super::select::Selection;
use super::weights::{Tensor, Weights};
use crate::calibration::Calibration;
use crate::convert::dry_run::{DryRun, TensorRow, in_words};
use crate::convert::executor::{Conversion, Task, TaskOutput};
use crate::convert::requantized::Requantized;
use crate::error::{Context, Error, Result};
use crate::job::{Command, Fingerprint, Output, RunOptions, dir_of_file, this_version};
use crate::manifest::{CalibrationRecord, Document, Keep, TensorEntry, Verdict};
use crate::progress;
use crate::provenance::Source;
use crate::quant_spec::TensorQuant;
use crate::scheme::TileLayout;
use std::collections::BTreeMap;
use std::path::Path;

/// Name of the command in fingerprints.
const COMMAND: &str = "ptq";

/// Result of [`measure`]: the manifest, and the tensors of the table that is printed.
#[derive(Debug)]
pub struct Measured {
    /// The expanded manifest.
    pub document: Document,
    /// All selected tensors in the order of the model.
    pub tensors: Vec<Tensor>,
}

/// Quantizes, measures and judges every selected tensor for the manifest at `out`. If `calibration` is given and no
/// method was requested, each tensor gets the method with the smallest error on calibration windows that the methods
/// were not fitted on. Until the work is complete, finished measurements are kept in a hidden directory next to `out`,
/// so that an interrupted run can continue.
///
/// # Errors
/// Nothing is selected; a tensor cannot be read or holds NaN; the statistics are of another model; the hidden directory
/// cannot be written; or another process works on the same manifest.
pub fn measure(
    out: &Path,
    weights: &Weights,
    selection: &Selection,
    judgement: &Judgement,
    calibration: Option<&Calibration>,
    run: &RunOptions,
) -> Result<Measured> {
    let work = selected(weights, selection)?;
    let mut fingerprint = Fingerprint::for_file(COMMAND, out);
    fingerprint.field("judgement", format_args!("{judgement:?}"));
    fingerprint.field("calibration", calibration.map_or("", Calibration::seal));
    weights.fingerprint(&mut fingerprint)?;
    let mut tasks = weights.hash_tasks(work.iter().map(|(tensor, _)| tensor));
    for (number, (tensor, quant)) in work.iter().enumerate() {
        let open = selection.leaves_method_open(tensor);
        fingerprint.field("tensor", format_args!("{} {:?} {quant:?} {open}", tensor.name, tensor.shape));
        let task = Task::make(number, &tensor.name, tensor.nbytes(), Vec::new()).parallel();
        tasks.push(Task { length: tensor.elements(), ..task });
    }
    let conversion = Conversion {
        command: Command::new(COMMAND, &()),
        out_dir: dir_of_file(out)?,
        fingerprint: fingerprint.finish(),
        lead: None,
        output: Output::AmongOthers,
        run,
        label: "quantizing",
        files: Vec::new(),
        tasks,
    };
    let make = |number: usize, out: &mut TaskOutput<'_>| {
        let (tensor, quant) = &work[number];
        let measuring = Measuring { weights, tensor, calibration, bar: out.bar() };
        measuring.decide(*quant, selection.leaves_method_open(tensor), judgement)
    };
    let finished = conversion.run(make, |_, _, _| Ok(()))?;
    let source = weights.source(&finished.inputs);
    calibration.map_or(Ok(()), |c| refuse_other_model(c, source.as_ref()))?;
    let tensors: Vec<Tensor> = work.iter().map(|(tensor, _)| tensor.clone()).collect();
    let mut entries: BTreeMap<String, TensorEntry> = selection.kept_entries().collect();
    // Rules that a manifest brings along could otherwise select these tensors again when the model is packed.
    for tensor in weights.tensors().iter().filter(|tensor| selection.keeps(tensor)) {
        let reasons = vec!["--keep".to_string()];
        entries.insert(tensor.name.clone(), kept(blank_entry(tensor)?, Keep::Source, reasons));
    }
    let measured = finished.items.into_iter().flatten().filter_map(|made| made.value);
    entries.extend(tensors.iter().map(|t| t.name.clone()).zip(measured));
    for (tensor, metrics) in tensors.iter().filter_map(|t| Some((t, entries[&t.name].metrics?))) {
        let (mean, worst) = (metrics.cosine_mean, metrics.cosine_min);
        progress::detail(2, || format!("{}: cosine {mean:.5}, worst row {worst:.5}", tensor.name));
    }
    Ok(Measured { document: document(selection, judgement, calibration, source, entries), tensors })
}

fn document(
    selection: &Selection,
    judgement: &Judgement,
    calibration: Option<&Calibration>,
    source: Option<Source>,
    tensors: BTreeMap<String, TensorEntry>,
) -> Document {
    let (defaults, rules) = selection.document_rules();
    Document {
        created_by: Some(this_version()),
        source,
        defaults,
        rules,
        gate: Some(judgement.gate.clone()),
        calibration: calibration.map(CalibrationRecord::of),
        refused: tensors.values().any(|e| e.verdict == Some(Verdict::Refused)),
        tensors,
        ..Document::default()
    }
}

/// Lists the tensors that [`measure`] would quantize, without measuring them. The gate may still keep some of them
/// unquantized.
///
/// # Errors
/// Nothing is selected.
pub fn dry_run(weights: &Weights, selection: &Selection) -> Result<DryRun> {
    let row = |(tensor, quant): &(Tensor, TensorQuant)| {
        let stays = already_quantized(tensor, &quant.spec)?;
        let (count, rows, cols) = tensor.matrices()?;
        let layout = TileLayout::new(quant.spec, rows, cols).tensor(&tensor.name)?;
        Ok(TensorRow {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            source: tensor.store.name().to_string(),
            stored: if stays.is_some() { tensor.store.name().to_string() } else { in_words(&quant.spec) },
            bytes_in: tensor.nbytes(),
            bytes: if stays.is_some() { tensor.nbytes() } else { (count * layout.nbytes()) as u64 },
            why: stays.map_or(quant.method.name().to_string(), |entry| entry.reasons.join("; ")),
        })
    };
    let rows: Vec<TensorRow> = selected(weights, selection)?.iter().map(row).collect::<Result<_>>()?;
    let bytes_in = rows.iter().map(|row| row.bytes_in).sum();
    Ok(DryRun::new(rows, bytes_in, None))
}

/// Returns the tensors that are quantized, in the order of the model.
///
/// # Errors
/// No tensor is selected.
pub fn tensors(weights: &Weights, selection: &Selection) -> Result<Vec<Tensor>> {
    Ok(selected(weights, selection)?.into_iter().map(|(tensor, _)| tensor).collect())
}

/// Returns the tensors that are quantized, in the order of the model, each with its quantization.
pub(super) fn selected(weights: &Weights, selection: &Selection) -> Result<Vec<(Tensor, TensorQuant)>> {
    let mut work = Vec::new();
    let tensors = weights.tensors();
    if let Some(manifest) = selection.manifest() {
        manifest.refuse_strangers(|name| tensors.iter().any(|tensor| tensor.name == name))?;
    }
    for tensor in tensors {
        if let Some(quant) = selection.decide(&tensor)? {
            work.push((tensor, quant));
        }
    }
    if work.is_empty() {
        return Err(Error::usage("no tensor is selected")
            .help("compare the patterns with the names that `iec pack MODEL --out-dir NEW --dry-run` prints"));
    }
    Ok(work)
}

/// Refuses statistics that were collected with other weights; the mistake would otherwise go unnoticed.
fn refuse_other_model(calibration: &Calibration, found: Option<&Source>) -> Result<()> {
    let (Some(made_from), Some(found)) = (&calibration.description().source, found) else { return Ok(()) };
    for expected in &made_from.files {
        if !found.files.iter().any(|file| file.sha256 == expected.sha256) {
            let message =
                format!("found statistics that were collected with another `{}` than this model has", expected.name);
            return Err(Error::usage(message)
                .at(calibration.path())
                .help("collect statistics of this model with `iec calib`, or give those that belong to it"));
        }
    }
    Ok(())
}

impl Measured {
    /// Returns the tensors that are quantized in the source and are quantized again, and the loss that this adds.
    pub fn requantized(&self) -> Option<Requantized> {
        let again = self.tensors.iter().filter(|tensor| tensor.is_coded);
        Requantized::of(again.filter_map(|tensor| {
            let entry = &self.document.tensors[&tensor.name];
            entry.quant.and(entry.metrics).map(|metrics| (&*tensor.name, metrics.relative_rms))
        }))
    }

    /// Returns the verdict of the gate on a tensor.
    pub fn verdict(&self, tensor: &Tensor) -> Option<Verdict> {
        self.document.tensors[&tensor.name].verdict
    }

    /// Returns the mean row cosine of a tensor, or 1 if it was not measured.
    pub fn cosine(&self, tensor: &Tensor) -> f64 {
        self.document.tensors[&tensor.name].metrics.map_or(1.0, |m| m.cosine_mean)
    }

    /// Returns the bits per weight of a tensor in the form in which it will be stored.
    pub fn stored_bits(&self, tensor: &Tensor) -> Result<f64> {
        stored_bits(tensor, &self.document.tensors[&tensor.name])
    }
}
