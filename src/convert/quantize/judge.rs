//! Chooses the quantization of one tensor and judges it. If the weights already lie on a quantization grid, their codes
//! are recovered exactly. Otherwise the method is the requested one, or the one with the smallest error on inputs that
//! it was not fitted on. A tensor that fails the gate is kept in a float type or gets more bits.

use super::entry::{already_quantized, blank_entry, kept};
use super::weights::{Tensor, Weights};
use crate::calibration::Calibration;
use crate::convert::guidance;
use crate::error::{Cause, Context, Result};
use crate::iebin::Store;
use crate::manifest::{Keep, Metrics, TensorEntry, Verdict};
use crate::progress::{self, ProgressBar};
use crate::provenance::Gate;
use crate::quant::TensorInputStats;
use crate::quant::metrics::nine_digits;
use crate::quant::spread::Spread;
use crate::quant::stream::{self, Outcome, Stack};
use crate::quant::trial::{FITTED, Judge};
use crate::quant_spec::{Method, QuantFields, TensorQuant};
use crate::scheme::{ScaleType, Scheme};

/// Thresholds of a tensor, and the consequence of missing them.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    /// The thresholds.
    pub gate: Gate,
    /// Consequence of missing the thresholds.
    pub on_failure: OnFailure,
}

/// Treatment of a tensor that fails the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// The whole manifest is refused.
    Refuse,
    /// The tensor is kept in this float type.
    Keep(Keep),
    /// Schemes of more bits are tried, beginning with this one, until the tensor passes; if it passes with none of
    /// them, it is kept as it is.
    Quantize(Scheme),
}

impl OnFailure {
    /// Returns the scheme to try when a tensor fails with `scheme`; `None` when none of more bits is left.
    fn better(self, scheme: Scheme) -> Option<Scheme> {
        let OnFailure::Quantize(first) = self else { return None };
        Scheme::offered().find(|better| better.bits() > scheme.bits() && better.bits() >= first.bits())
    }
}

/// One tensor and the data to measure it with.
pub(super) struct Measuring<'a> {
    /// Reader of the weights.
    pub weights: &'a Weights,
    /// The tensor.
    pub tensor: &'a Tensor,
    /// Statistics of its inputs.
    pub calibration: Option<&'a Calibration>,
    /// Progress bar, which counts weights.
    pub bar: &'a ProgressBar,
}

impl Measuring<'_> {
    /// Quantizes and measures the tensor and applies the gate. `open` is true if no method was requested, so that the
    /// best one may be chosen.
    pub fn decide(&self, quant: TensorQuant, open: bool, judgement: &Judgement) -> Result<TensorEntry> {
        let Judgement { gate, on_failure } = judgement;
        if let Some(kept) = already_quantized(self.tensor, &quant.spec)? {
            return Ok(kept);
        }
        let (quant, metrics) = self.best(quant, open).tensor(&self.tensor.name)?;
        let measured = TensorEntry { quant: Some(quant), metrics: Some(metrics), ..blank_entry(self.tensor)? };
        let reasons = gate.objections(quant.spec.scheme, &metrics);
        if reasons.is_empty() {
            return Ok(TensorEntry { verdict: Some(Verdict::Accepted), ..measured });
        }
        match on_failure {
            OnFailure::Refuse => Ok(TensorEntry { verdict: Some(Verdict::Refused), reasons, ..measured }),
            OnFailure::Keep(keep) => Ok(kept(measured, kept_as(self.tensor, *keep), reasons)),
            OnFailure::Quantize(_) => {
                let (mut scheme, mut last, mut still) = (quant.spec.scheme, measured, reasons.clone());
                while let Some(better) = on_failure.better(scheme).filter(|better| self.may_be(*better)) {
                    let (quant, metrics) = self.in_scheme(better, open)?;
                    last = TensorEntry { quant: Some(quant), metrics: Some(metrics), ..last };
                    still = gate.objections(better, &metrics);
                    if still.is_empty() {
                        return Ok(TensorEntry { verdict: Some(Verdict::Accepted), reasons, ..last });
                    }
                    scheme = better;
                }
                Ok(kept(last, Keep::Source, still))
            }
        }
    }

    /// Returns true if a scheme has fewer bits than the codes of the source, or if the source holds floats.
    fn may_be(&self, scheme: Scheme) -> bool {
        !matches!(self.tensor.store, Store::Tiled(spec) if spec.scheme.bits() <= scheme.bits())
    }

    fn in_scheme(&self, scheme: Scheme, open: bool) -> Result<(TensorQuant, Metrics)> {
        let fields = QuantFields { scheme: Some(scheme), ..QuantFields::default() };
        self.best(fields.resolve(&QuantFields::default())?, open).tensor(&self.tensor.name)
    }

    /// Recovers the codes of weights that lie on a quantization grid already; every other method could only be worse.
    fn exact_codes(&self, quant: TensorQuant) -> Result<Option<(TensorQuant, Metrics)>> {
        if !quant.may_be_exact() {
            return Ok(None);
        }
        let quant = TensorQuant { method: Method::Exact, ..quant };
        // Most tensors do not lie on a grid; a few rows suffice to show that.
        let whole = |stack: &Stack<'_>| {
            stream::try_rows(quant, stack).and_then(|()| stream::quantize(quant, stack, &mut |_| Ok(())))
        };
        match self.with_stack(None, false, whole) {
            Ok(outcome) => Ok(Some((quant, outcome.metrics))),
            Err(e) if matches!(e.cause(), Cause::Unsupported(_)) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Quantizes with the best method if the choice is open, otherwise with the requested one. In both cases codes
    /// are recovered if the weights lie on a grid.
    fn best(&self, quant: TensorQuant, open: bool) -> Result<(TensorQuant, Metrics)> {
        if let Some(recovered) = self.exact_codes(quant)? {
            self.bar.inc(self.tensor.elements());
            return Ok(recovered);
        }
        let (count, _, cols) = self.tensor.matrices()?;
        let name = &self.tensor.name;
        let judge = self.calibration.map(|c| Judge::new(c, name, (count, cols))).transpose()?.flatten();
        let (Some(calibration), Some(judge)) = (self.calibration, judge) else {
            // Without statistics of the tensor's inputs, a method that needs them is replaced by scale search.
            let method = if quant.method.needs_inputs() { Method::Search } else { quant.method };
            return self.quantize_with_fitting_scales(TensorQuant { method, ..quant });
        };
        let mut best: Option<(f64, TensorQuant)> = None;
        for quant in candidates(quant, open && quant.percentile.is_none(), judge.knows_products()) {
            let fitted = TensorInputStats::new(calibration, name, (count, cols), Some(FITTED), quant.method)?;
            let error = self.with_stack(fitted.as_ref(), false, |stack| judge.measure(quant, stack))?.relative();
            if best.is_none_or(|(least, _)| error < least) {
                best = Some((error, quant));
            }
            progress::detail(2, || format!("{name}: relative output error {error:.5} with {}", quant.method.name()));
        }
        let (error, quant) = best.expect("one candidate at least");
        let (quant, metrics) = self.quantize_with_fitting_scales(quant)?;
        Ok((quant, Metrics { output_error: Some(nine_digits(error)), ..metrics }))
    }

    /// Quantizes with fp16 scales and, if they overflow or underflow, again with f32 scales, unless the
    /// block format has only fp16 scales or the codes are recovered.
    fn quantize_with_fitting_scales(&self, quant: TensorQuant) -> Result<(TensorQuant, Metrics)> {
        let first = self.run(quant);
        let fixed = quant.spec.scheme.info().is_block_format || quant.method == Method::Exact;
        let narrow = quant.spec.scale_dtype == ScaleType::F16 && !fixed;
        let unfit = match &first {
            // f16 loses precision below 2^-14; that matters when even the largest scale is smaller.
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

    /// Quantizes the tensor once.
    fn run(&self, quant: TensorQuant) -> Result<Outcome> {
        let inputs = self.inputs(quant)?;
        self.with_stack(inputs.as_ref(), true, |stack| stream::quantize(quant, stack, &mut |_| Ok(())))
    }

    /// Returns the statistics of the inputs that the method uses.
    fn inputs(&self, quant: TensorQuant) -> Result<Option<TensorInputStats<'_>>> {
        let (count, _, cols) = self.tensor.matrices()?;
        guidance::inputs(self.calibration, &self.tensor.name, (count, cols), quant.method)
    }

    fn with_stack<T>(
        &self,
        inputs: Option<&TensorInputStats<'_>>,
        counts: bool,
        f: impl FnOnce(&Stack<'_>) -> Result<T>,
    ) -> Result<T> {
        let (count, rows, cols) = self.tensor.matrices()?;
        let read = |matrix: usize, rows: std::ops::Range<usize>, out: &mut [f32]| {
            self.bar.inc(if counts { out.len() as u64 } else { 0 });
            self.weights.read_rows_f32(self.tensor, matrix, rows, out)
        };
        f(&Stack { count, rows, cols, read: &read, chunk_rows: None, inputs })
    }
}

/// Returns the type in which a tensor that fails the gate is kept: codes of the source stay as they are, as floats of
/// more bits are not more accurate.
fn kept_as(tensor: &Tensor, keep: Keep) -> Keep {
    if matches!(tensor.store, Store::Tiled(_)) { Keep::Source } else { keep }
}

/// Returns the quantizations to compare: the given one and, if the choice of the method is open, those with every other
/// method that the statistics permit. `products` is true if the statistics include products of pairs of inputs.
fn candidates(quant: TensorQuant, open: bool, products: bool) -> Vec<TensorQuant> {
    let by_inputs = [Method::Search, Method::Imatrix, Method::Gptq].map(|method| TensorQuant { method, ..quant });
    let others = by_inputs.into_iter().filter(|q| {
        open && q.method != quant.method && (products || !q.method.needs_products()) && q.validate().is_ok()
    });
    std::iter::once(quant).chain(others).collect()
}

/// Returns an entry that stores a tensor more accurately than `entry`: with a scheme of more bits or, if `on_failure`
/// has none, unquantized. `None` if the tensor is not quantized or `on_failure` is [`OnFailure::Refuse`].
///
/// # Errors
/// The tensor cannot be read or quantized.
pub fn promote(
    weights: &Weights,
    calibration: Option<&Calibration>,
    tensor: &Tensor,
    entry: &TensorEntry,
    on_failure: OnFailure,
) -> Result<Option<TensorEntry>> {
    let Some(quant) = entry.quant else { return Ok(None) };
    let reasons = vec!["the whole model was not accurate enough with this tensor quantized".to_string()];
    match on_failure {
        OnFailure::Refuse => Ok(None),
        OnFailure::Keep(keep) => Ok(Some(kept(entry.clone(), kept_as(tensor, keep), reasons))),
        OnFailure::Quantize(_) => {
            let measuring = Measuring { weights, tensor, calibration, bar: &ProgressBar::hidden() };
            let better = on_failure.better(quant.spec.scheme).filter(|better| measuring.may_be(*better));
            let Some(better) = better else {
                return Ok(Some(kept(entry.clone(), Keep::Source, reasons)));
            };
            let (quant, metrics) = measuring.in_scheme(better, true)?;
            Ok(Some(TensorEntry { quant: Some(quant), metrics: Some(metrics), reasons, ..entry.clone() }))
        }
    }
}

/// Returns the distribution of a tensor's weights before and after quantization; `None` if it is not quantized.
///
/// # Errors
/// The tensor cannot be read or quantized.
pub fn spread(
    weights: &Weights,
    calibration: Option<&Calibration>,
    tensor: &Tensor,
    entry: &TensorEntry,
) -> Result<Option<Spread>> {
    let Some(quant) = entry.quant else { return Ok(None) };
    let measuring = Measuring { weights, tensor, calibration, bar: &ProgressBar::hidden() };
    let inputs = measuring.inputs(quant)?;
    measuring.with_stack(inputs.as_ref(), false, |stack| Spread::of(quant, stack)).tensor(&tensor.name).map(Some)
}
