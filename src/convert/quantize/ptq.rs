//! Decides and proves a quantization: every selected tensor is quantized, measured and judged; the result is a manifest.

use super::select::Selection;
use super::weights::{Form, Tensor, Weights};
use crate::calibration::Calibration;
use crate::convert::outlook::{Outlook, Row, in_words};
use crate::error::{Cause, Context, Error, Result};
use crate::iebin::Source;
use crate::job::{Command, Fingerprint, Job, Order, Output, RunOptions};
use crate::manifest::{
    CalibrationRecord, Document, Gate, Keep, Method, Metrics, QuantFields, TensorEntry, TensorQuant, Verdict,
};
use crate::progress;
use crate::quant::Guides;
use crate::quant::metrics::nine_digits;
use crate::quant::spread::Spread;
use crate::quant::stream::{self, Outcome, Stack};
use crate::quant::trial::{FITTED, Judge};
use crate::scheme::{QuantSpec, ScaleType, Scheme, TileLayout};
use indicatif::ProgressBar;
use std::collections::BTreeMap;
use std::path::Path;

/// Name of the command in fingerprints.
const COMMAND: &str = "ptq";

/// What happens to a tensor that the gate refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// The whole manifest is refused.
    Refuse,
    /// It is kept in this form.
    Keep(Keep),
    /// It is quantized to this scheme instead, or to one of more bits, whichever passes; else kept as it is.
    Quantize(Scheme),
}

impl OnFailure {
    /// What a tensor of `scheme` gets instead.
    fn better(self, scheme: Scheme) -> Option<Scheme> {
        let OnFailure::Quantize(first) = self else { return None };
        Scheme::offered().find(|better| better.bits() > scheme.bits() && better.bits() >= first.bits())
    }
}

/// The manifest and what the table needs beside it.
#[derive(Debug)]
pub struct Measured {
    /// The expanded manifest.
    pub document: Document,
    /// Every tensor that was selected, in the order of the model.
    pub tensors: Vec<Tensor>,
}

/// What a tensor has to reach, and what happens if it does not.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Judgement {
    /// The thresholds.
    pub gate: Gate,
    /// Below them.
    pub on_failure: OnFailure,
}

/// What [`measure`] knows beside the weights.
#[derive(Clone, Copy, Default)]
pub struct Evidence<'a> {
    /// Statistics of the inputs.
    pub calibration: Option<&'a Calibration>,
    /// Keeps what is measured.
    pub job: Option<&'a Job>,
}

/// [`measure`] for the manifest at `out`, as a job that can be interrupted and continued: what was measured is kept in a
/// hidden directory beside `out` until all is.
///
/// # Errors
/// As [`measure`]; or the hidden directory cannot be written, or another process is at work on the same manifest.
pub fn measure_for(
    out: &Path,
    weights: &Weights,
    selection: &Selection,
    judgement: &Judgement,
    calibration: Option<&Calibration>,
    run: &RunOptions,
) -> Result<Measured> {
    let dir = out.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::read_dir(dir).at(dir)?;
    let mut fingerprint = Fingerprint::new(COMMAND);
    fingerprint.field("out", out.file_name().unwrap_or_default().to_string_lossy());
    fingerprint.field("judgement", format_args!("{judgement:?}"));
    fingerprint.field("calibration", calibration.map_or("", Calibration::seal));
    fingerprint.field("open", selection.leaves_method_open());
    weights.fingerprint(&mut fingerprint)?;
    for (tensor, quant) in selected(weights, selection)? {
        fingerprint.field("tensor", format_args!("{} {:?} {quant:?}", tensor.name, tensor.shape));
    }
    let order = Order {
        fingerprint: &fingerprint.finish(),
        command: Command::new(COMMAND, &()),
        commit_point: "",
        output: Output::AmongOthers,
        run,
    };
    let (job, _) = Job::open(dir, &order, &[])?;
    let measured = measure(weights, selection, judgement, Evidence { calibration, job: Some(&job) });
    job.conclude(measured)
}

/// Quantizes and judges every selected tensor. With statistics of the inputs, each gets the method that does best on what it was
/// not fitted on, unless one was asked for.
///
/// # Errors
/// Nothing is selected, a tensor cannot be read or holds NaN, or is quantized already (MXFP4 is kept as it is); the statistics
/// are of another model.
pub fn measure(
    weights: &Weights,
    selection: &Selection,
    judgement: &Judgement,
    Evidence { calibration, job }: Evidence<'_>,
) -> Result<Measured> {
    let work = selected(weights, selection)?;
    let open = selection.leaves_method_open();
    let bar = progress::bytes("quantizing", work.iter().map(|(t, _)| t.elements()).sum());
    let all = || {
        let measure = |(tensor, quant): &(Tensor, TensorQuant)| {
            let task = format!("tensor {}", tensor.name);
            if let Some(found) = job.and_then(|job| job.found::<TensorEntry>(&task).next()) {
                bar.inc(tensor.elements());
                return Ok(found.result);
            }
            let measuring = Measuring { weights, tensor, calibration, bar: &bar };
            let entry = measuring.decide(*quant, open, judgement)?;
            job.map_or(Ok(()), |job| job.record(&task, &entry, tensor.nbytes()))?;
            Ok(entry)
        };
        let (source, entries) =
            rayon::join(|| weights.source(job), || work.iter().map(measure).collect::<Result<Vec<_>>>());
        Ok((source?, entries?))
    };
    let (source, measured) = job.map_or_else(all, |job| job.keep(&[], all))?;
    bar.finish_and_clear();
    calibration.map_or(Ok(()), |c| refuse_other_model(c, source.as_ref()))?;
    let tensors: Vec<Tensor> = work.into_iter().map(|(t, _)| t).collect();
    let mut entries: BTreeMap<String, TensorEntry> = selection.kept_entries().collect();
    entries.extend(tensors.iter().map(|t| t.name.clone()).zip(measured));
    for (tensor, metrics) in tensors.iter().filter_map(|t| Some((t, entries[&t.name].metrics?))) {
        let (mean, worst) = (metrics.cosine_mean, metrics.cosine_min);
        progress::detail(2, || format!("{}: cosine {mean:.5}, worst row {worst:.5}", tensor.name));
    }
    let (defaults, rules) = selection.document_rules();
    let document = Document {
        created_by: Some(created_by()),
        source,
        defaults,
        rules,
        gate: Some(judgement.gate),
        calibration: calibration.map(CalibrationRecord::of),
        refused: entries.values().any(|e| e.verdict == Some(Verdict::Refused)),
        tensors: entries,
        ..Document::default()
    };
    Ok(Measured { document, tensors })
}

/// What [`measure`] would quantize, without measuring; a gate may keep some of it.
///
/// # Errors
/// Nothing is selected, or a tensor is quantized already.
pub fn outlook(weights: &Weights, selection: &Selection) -> Result<Outlook> {
    let row = |(tensor, quant): &(Tensor, TensorQuant)| {
        let stays = already_quantized(tensor)?;
        let (count, rows, cols) = tensor.matrices()?;
        let layout = TileLayout::new(quant.spec, rows, cols).tensor(&tensor.name)?;
        Ok(Row {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            source: tensor.form.name(),
            stored: if stays.is_some() { tensor.form.name().to_string() } else { in_words(&quant.spec) },
            bytes_in: tensor.nbytes(),
            bytes_out: if stays.is_some() { tensor.nbytes() } else { (count * layout.nbytes()) as u64 },
            why: stays.map_or(quant.method.name().to_string(), |entry| entry.reasons.join("; ")),
        })
    };
    let rows: Vec<Row> = selected(weights, selection)?.iter().map(row).collect::<Result<_>>()?;
    let bytes_in = rows.iter().map(|row| row.bytes_in).sum();
    Ok(Outlook::new(rows, bytes_in, None))
}

/// The program that made a manifest.
pub(super) fn created_by() -> String {
    format!("iec {}", env!("CARGO_PKG_VERSION"))
}

/// The tensors that are quantized, in the order of the model.
///
/// # Errors
/// There are none.
pub fn tensors(weights: &Weights, selection: &Selection) -> Result<Vec<Tensor>> {
    Ok(selected(weights, selection)?.into_iter().map(|(tensor, _)| tensor).collect())
}

/// These, and how.
pub(super) fn selected(weights: &Weights, selection: &Selection) -> Result<Vec<(Tensor, TensorQuant)>> {
    let mut work = Vec::new();
    let tensors = weights.tensors();
    selection.refuse_strangers(&tensors)?;
    for tensor in tensors {
        if let Some(quant) = selection.decide(&tensor)? {
            work.push((tensor, quant));
        }
    }
    if work.is_empty() {
        return Err(Error::usage("no tensor is selected")
            .help("compare the patterns with the names that `iec inspect --tensors` prints"));
    }
    Ok(work)
}

/// Statistics of another checkpoint would guide badly and unnoticed.
fn refuse_other_model(calibration: &Calibration, found: Option<&Source>) -> Result<()> {
    let (Some(made_from), Some(found)) = (&calibration.description().source, found) else { return Ok(()) };
    for expected in &made_from.files {
        if !found.files.iter().any(|file| file.sha256 == expected.sha256) {
            let message = format!("made from other weights than these: another `{}`", expected.name);
            return Err(Error::usage(message).at(calibration.path()).help("run `iec calib` with this checkpoint"));
        }
    }
    Ok(())
}

/// One tensor and what is known of it.
struct Measuring<'a> {
    weights: &'a Weights,
    tensor: &'a Tensor,
    calibration: Option<&'a Calibration>,
    bar: &'a ProgressBar,
}

impl Measuring<'_> {
    /// Quantizes, measures and judges.
    fn decide(&self, quant: TensorQuant, open: bool, judgement: &Judgement) -> Result<TensorEntry> {
        let Judgement { gate, on_failure } = judgement;
        if let Some(kept) = already_quantized(self.tensor)? {
            return Ok(kept);
        }
        let (quant, metrics) = self.best(quant, open).tensor(&self.tensor.name)?;
        let measured = TensorEntry { quant: Some(quant), metrics: Some(metrics), ..blank_entry(self.tensor)? };
        let reasons = gate.objections(&metrics);
        if reasons.is_empty() {
            return Ok(TensorEntry { verdict: Some(Verdict::Accepted), ..measured });
        }
        match on_failure {
            OnFailure::Refuse => Ok(TensorEntry { verdict: Some(Verdict::Refused), reasons, ..measured }),
            OnFailure::Keep(keep) => Ok(kept(measured, *keep, reasons)),
            OnFailure::Quantize(_) => {
                let (mut scheme, mut last, mut still) = (quant.spec.scheme, measured, reasons.clone());
                while let Some(better) = on_failure.better(scheme) {
                    let (quant, metrics) = self.in_scheme(better, open)?;
                    last = TensorEntry { quant: Some(quant), metrics: Some(metrics), ..last };
                    still = gate.objections(&metrics);
                    if still.is_empty() {
                        return Ok(TensorEntry { verdict: Some(Verdict::Accepted), reasons, ..last });
                    }
                    scheme = better;
                }
                Ok(kept(last, Keep::Source, still))
            }
        }
    }

    fn in_scheme(&self, scheme: Scheme, open: bool) -> Result<(TensorQuant, Metrics)> {
        let fields = QuantFields { scheme: Some(scheme), ..QuantFields::default() };
        self.best(fields.resolve(&QuantFields::default())?, open).tensor(&self.tensor.name)
    }

    /// The codes that the weights already are, if they are; whatever method was asked for could only lose.
    fn lattice(&self, quant: TensorQuant) -> Result<Option<(TensorQuant, Metrics)>> {
        if !quant.may_be_lattice() {
            return Ok(None);
        }
        let quant = TensorQuant { method: Method::Lattice, ..quant };
        // Most tensors are none, which a few of their rows tell.
        let whole = |stack: &Stack<'_>| {
            stream::try_rows(quant, stack).and_then(|()| stream::quantize(quant, stack, &mut |_| Ok(())))
        };
        match self.with_stack(None, false, whole) {
            Ok(outcome) => Ok(Some((quant, outcome.metrics))),
            Err(e) if matches!(e.cause(), Cause::Unsupported(_)) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// With the best method if the choice is open, otherwise with the one that was asked for; whatever it is, codes are recovered where
    /// the weights are some.
    fn best(&self, quant: TensorQuant, open: bool) -> Result<(TensorQuant, Metrics)> {
        if let Some(recovered) = self.lattice(quant)? {
            self.bar.inc(self.tensor.elements());
            return Ok(recovered);
        }
        let (count, _, cols) = self.tensor.matrices()?;
        let name = &self.tensor.name;
        let judge = self.calibration.map(|c| Judge::new(c, name, (count, cols))).transpose()?.flatten();
        let (Some(calibration), Some(judge)) = (self.calibration, judge) else {
            // Without statistics of its inputs a tensor cannot have a method that needs them.
            let method = if quant.method.needs_inputs() { Method::Search } else { quant.method };
            return self.quantize_with_fitting_scales(TensorQuant { method, ..quant });
        };
        let mut best: Option<(f64, TensorQuant)> = None;
        for quant in candidates(quant, open && quant.percentile.is_none(), judge.knows_products()) {
            let fitted = Guides::new(calibration, name, (count, cols), Some(FITTED), quant.method)?;
            let error = self.with_stack(fitted.as_ref(), false, |stack| judge.measure(quant, stack))?.relative();
            if best.is_none_or(|(least, _)| error < least) {
                best = Some((error, quant));
            }
            progress::detail(2, || format!("{name}: {} leaves {error:.5} of the outputs", quant.method.name()));
        }
        let (error, quant) = best.expect("one candidate at least");
        let (quant, metrics) = self.quantize_with_fitting_scales(quant)?;
        Ok((quant, Metrics { output_error: Some(nine_digits(error)), ..metrics }))
    }

    /// Quantizes with fp16 scales and, where they over- or underflow, again with f32 scales (q4_0 and nl4 have fp16 only).
    fn quantize_with_fitting_scales(&self, quant: TensorQuant) -> Result<(TensorQuant, Metrics)> {
        let first = self.run(quant);
        let fixed = matches!(quant.spec.scheme, Scheme::Q4_0 | Scheme::Nl4) || quant.method == Method::Lattice;
        let narrow = quant.spec.scale_dtype == ScaleType::F16 && !fixed;
        let unfit = match &first {
            // Below 2^-14 halves lose precision; that matters when even the largest scale lies there.
            Ok(o) => o.metrics.relative_rms > 0.0 && o.largest_scale < half::f16::MIN_POSITIVE.to_f32(),
            Err(e) => matches!(e.cause(), Cause::Unsupported(_)),
        };
        if !(narrow && unfit) {
            return first.map(|outcome| (quant, outcome.metrics));
        }
        let mut wide = quant;
        wide.spec.scale_dtype = ScaleType::F32;
        self.run(wide).map(|outcome| (wide, outcome.metrics))
    }

    /// One pass over the tensor.
    fn run(&self, quant: TensorQuant) -> Result<Outcome> {
        let guides = self.guides(quant)?;
        self.with_stack(guides.as_ref(), true, |stack| stream::quantize(quant, stack, &mut |_| Ok(())))
    }

    /// What the method is told of the inputs.
    fn guides(&self, quant: TensorQuant) -> Result<Option<Guides<'_>>> {
        let (count, _, cols) = self.tensor.matrices()?;
        let calibration = self.calibration.filter(|_| quant.method.needs_inputs());
        let guides = calibration.map(|c| Guides::new(c, &self.tensor.name, (count, cols), None, quant.method));
        Ok(guides.transpose()?.flatten())
    }

    fn with_stack<T>(
        &self,
        guides: Option<&Guides<'_>>,
        counts: bool,
        f: impl FnOnce(&Stack<'_>) -> Result<T>,
    ) -> Result<T> {
        let (count, rows, cols) = self.tensor.matrices()?;
        let read = |matrix: usize, rows: std::ops::Range<usize>, out: &mut [f32]| {
            self.bar.inc(if counts { out.len() as u64 } else { 0 });
            self.weights.read_rows_f32(self.tensor, matrix, rows, out)
        };
        f(&Stack { count, rows, cols, read: &read, chunk_rows: None, guides })
    }
}

/// The methods that may serve a tensor: the one given, and if the choice is open all that the statistics allow.
fn candidates(quant: TensorQuant, open: bool, products: bool) -> Vec<TensorQuant> {
    let by_inputs = [Method::Search, Method::Imatrix, Method::Gptq].map(|method| TensorQuant { method, ..quant });
    let others = by_inputs.into_iter().filter(|q| {
        open && q.method != quant.method && (products || !q.method.needs_products()) && q.validate().is_ok()
    });
    std::iter::once(quant).chain(others).collect()
}

/// The entry of a tensor with more bits than `entry` gives it; `None` when it has all that `on_failure` allows.
///
/// # Errors
/// It cannot be read or quantized.
pub fn promote(
    weights: &Weights,
    calibration: Option<&Calibration>,
    tensor: &Tensor,
    entry: &TensorEntry,
    on_failure: OnFailure,
) -> Result<Option<TensorEntry>> {
    let Some(quant) = entry.quant else { return Ok(None) };
    let reasons = vec!["the answers of the whole model were not good enough".to_string()];
    match on_failure {
        OnFailure::Refuse => Ok(None),
        OnFailure::Keep(keep) => Ok(Some(kept(entry.clone(), keep, reasons))),
        OnFailure::Quantize(_) => {
            let Some(better) = on_failure.better(quant.spec.scheme) else {
                return Ok(Some(kept(entry.clone(), Keep::Source, reasons)));
            };
            let measuring = Measuring { weights, tensor, calibration, bar: &ProgressBar::hidden() };
            let (quant, metrics) = measuring.in_scheme(better, true)?;
            Ok(Some(TensorEntry { quant: Some(quant), metrics: Some(metrics), reasons, ..entry.clone() }))
        }
    }
}

/// What quantization does to the weights of a tensor; `None` where it is kept.
///
/// # Errors
/// It cannot be read or quantized.
pub fn spread(
    weights: &Weights,
    calibration: Option<&Calibration>,
    tensor: &Tensor,
    entry: &TensorEntry,
) -> Result<Option<Spread>> {
    let Some(quant) = entry.quant else { return Ok(None) };
    let measuring = Measuring { weights, tensor, calibration, bar: &ProgressBar::hidden() };
    let guides = measuring.guides(quant)?;
    measuring.with_stack(guides.as_ref(), false, |stack| Spread::of(quant, stack)).tensor(&tensor.name).map(Some)
}

/// What a tensor is stored as, in words.
pub fn stored_as(tensor: &Tensor, entry: &TensorEntry) -> String {
    match (&entry.quant, entry.keep) {
        (Some(quant), _) => in_words(&quant.spec),
        (None, Some(Keep::Fp16)) => "fp16".to_string(),
        (None, Some(Keep::Bf16)) => "bf16".to_string(),
        (None, _) => tensor.form.name().to_string(),
    }
}

/// An entry with the shape of a tensor and nothing decided.
pub(super) fn blank_entry(tensor: &Tensor) -> Result<TensorEntry> {
    let (count, rows, cols) = tensor.matrices()?;
    Ok(TensorEntry {
        rows,
        cols,
        count,
        quant: None,
        keep: None,
        metrics: None,
        verdict: None,
        reasons: vec![],
        packed: None,
    })
}

/// The entry of a tensor that is not quantized after all; its metrics say why.
fn kept(entry: TensorEntry, keep: Keep, reasons: Vec<String>) -> TensorEntry {
    TensorEntry { quant: None, keep: Some(keep), verdict: Some(Verdict::Kept), reasons, ..entry }
}

/// An entry that leaves the codes of a checkpoint alone: computing them again from their values could only lose.
pub(super) fn already_quantized(tensor: &Tensor) -> Result<Option<TensorEntry>> {
    match tensor.form {
        Form::Float(_) => Ok(None),
        Form::Quantized(Scheme::Mxfp4) => {
            let reason = "the checkpoint holds MXFP4 codes; they stay as they are".to_string();
            Ok(Some(kept(blank_entry(tensor)?, Keep::Source, vec![reason])))
        }
        Form::Quantized(scheme) => Err(Error::unsupported(format!(
            "is quantized already ({}); its original weights are needed",
            scheme.name()
        ))
        .tensor(&tensor.name)
        .help("use --hf-dir with the checkpoint the pack was made from")),
    }
}

impl Measured {
    /// What the gate said about a tensor.
    pub fn verdict(&self, tensor: &Tensor) -> Option<Verdict> {
        self.document.tensors[&tensor.name].verdict
    }

    /// Mean row cosine of a tensor; 1 where nothing was measured.
    pub fn cosine(&self, tensor: &Tensor) -> f64 {
        self.document.tensors[&tensor.name].metrics.map_or(1.0, |m| m.cosine_mean)
    }

    /// Bits per weight of a tensor as it will be stored.
    pub fn stored_bits(&self, tensor: &Tensor) -> Result<f64> {
        stored_bits(tensor, &self.document.tensors[&tensor.name])
    }
}

/// Bits per weight of a tensor that is stored as `entry` says.
pub fn stored_bits(tensor: &Tensor, entry: &TensorEntry) -> Result<f64> {
    let tiled = |spec| -> Result<f64> {
        let layout = TileLayout::new(spec, entry.rows, entry.cols)?;
        Ok(layout.nbytes() as f64 * 8.0 / (entry.rows * entry.cols) as f64)
    };
    match (entry.quant, entry.keep, tensor.form) {
        (Some(quant), _, _) => tiled(quant.spec),
        (None, Some(Keep::Fp16 | Keep::Bf16), _) => Ok(16.0),
        (None, _, Form::Float(dtype)) => Ok(dtype.size() as f64 * 8.0),
        // The only codes that are kept.
        (None, _, Form::Quantized(_)) => tiled(QuantSpec::MXFP4),
    }
}
