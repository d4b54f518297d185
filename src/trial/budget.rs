//! Bit-budget planner: selects the scheme of each tensor under a limit for the whole pack.
//!
//! The plan is based on three measurements. First, some rows of each tensor are quantized with every scheme
//! ([`candidates`]), which gives the relative errors of the schemes for the same tensor. Second, each tensor is
//! quantized alone in the float model, and the divergence gives the sensitivity of the model to that tensor. The
//! divergence is proportional to the square of the error, so measuring one scheme is sufficient to predict all. The
//! selection ([`crate::quant::budget`]) approximates the divergence of the whole model by the sum of these
//! predictions. Because this is an approximation, the divergence of the whole model is measured last.

use super::ptq::Ptq;
use super::{Blame, Question, Trial};
use crate::calibration::Calibration;
use crate::catalogue::Role;
use crate::convert::dry_run::in_words;
use crate::convert::quantize::candidates::{self, AS_IT_IS, Candidate, Subject};
use crate::convert::quantize::weights::Tensor;
use crate::error::{Error, Result};
use crate::iebin::PlannedTensor as Stored;
use crate::iebin::writer::Layout;
use crate::interrupt;
use crate::job::{Job, RunOptions};
use crate::manifest::Document;
use crate::manifest::plan::{Plan, PlanText, PlannedTensor, Target, Uniform, Yardstick};
use crate::progress;
use crate::quant::budget::{Choice, reach, spend};
use crate::quant::metrics::nine_digits;
use crate::quant_spec::TensorQuant;
use std::collections::BTreeMap;

/// Name of this job, which its fingerprint includes.
const COMMAND: &str = "plan";
/// Name of the task that records the divergence of every tensor alone.
const ALONE: &str = "alone";

/// Weight of an error of the output matrix if divergences are not measured, because no later layer can correct it. In
/// the test model llama-trained, a relative error of the outputs of this matrix causes 20 to 1000 times the divergence
/// of an equal error in a layer, most often about 100 times.
pub const HEAD_COUNTS: f64 = 64.0;

/// Inputs of a plan.
pub struct Planner<'a> {
    /// Model, its selection of tensors whose scheme is planned, and the packs that divergences are measured with.
    pub ptq: &'a Ptq,
    /// Budget of the pack. A divergence needs a question.
    pub target: Target,
    /// Text that divergences are measured on; without it, the plan is based on errors of outputs or weights.
    pub question: Option<Question>,
}

/// Result of planning.
#[derive(Debug)]
pub struct Planned {
    /// Quantization of each tensor that does not keep its source format.
    pub decisions: BTreeMap<String, TensorQuant>,
    /// Record of the plan for the manifest.
    pub record: Plan,
}

impl Planner<'_> {
    /// Opens the job that stores measurements until a manifest is made from them. The measurements do not depend on
    /// the target.
    ///
    /// # Errors
    /// The same as for [`Job::open`]; also if the weights cannot be read.
    pub fn job(&self, run: &RunOptions) -> Result<Job> {
        Job::for_file(COMMAND, &self.ptq.options.out, run, |fingerprint| {
            fingerprint.field("calibration", self.ptq.calibration.as_ref().map_or("", Calibration::seal));
            candidates::choices().for_each(|quant| fingerprint.field("scheme", in_words(&quant.spec)));
            self.ptq.weights.fingerprint(fingerprint)?;
            if let Some(question) = &self.question {
                fingerprint.field("windows", format_args!("{} {:?}", question.skip, question.windows));
                fingerprint.file(&question.text)?;
            }
            for tensor in self.ptq.weights.tensors().iter().filter(|tensor| self.has_choice(tensor)) {
                fingerprint.field("tensor", format_args!("{} {:?}", tensor.name, tensor.shape));
            }
            Ok(())
        })
    }

    /// Measures the candidates and selects one for each tensor.
    ///
    /// # Errors
    /// The target cannot be reached or is met without quantization, or a tensor cannot be read or is quantized
    /// already; for divergences, the same as for [`Trial::begin`].
    pub fn plan(&self, job: &Job) -> Result<Planned> {
        let tensors = self.ptq.weights.tensors();
        self.refuse_impossible(&tensors)?;
        let (subjects, alone) = job.keep(&[], || {
            let subjects = self.compare(&tensors, job)?;
            let alone = self.question.as_ref().map(|question| self.alone(question, &subjects, job)).transpose()?;
            Ok((subjects, alone))
        })?;
        let (alone, text) = alone.unzip();
        let head = if tensors.iter().any(|t| t.role == Role::LmHead) { Role::LmHead } else { Role::Embedding };
        let costs = subjects.iter().map(|s| costs(s, alone.as_ref(), s.tensor.role == head));
        let costs: Vec<Vec<f64>> = costs.collect();
        let (chosen, layout) = self.choose(&tensors, &subjects, &costs)?;
        let mut planned = BTreeMap::new();
        let mut decisions = BTreeMap::new();
        for ((subject, choice), costs) in subjects.iter().zip(&chosen).zip(&costs) {
            let (tensor, candidate) = (&subject.tensor, &subject.candidates[*choice]);
            let bits = candidate.bytes(tensor)? as f64 * 8.0 / tensor.elements() as f64;
            let stored = candidate.quant.map_or(tensor.store.name().to_string(), |quant| in_words(&quant.spec));
            planned.insert(tensor.name.clone(), PlannedTensor { stored, bits, cost: costs[*choice] });
            decisions.extend(candidate.quant.map(|quant| (tensor.name.clone(), quant)));
        }
        if decisions.is_empty() {
            return Err(Error::usage("found a target that no scheme meets for any tensor; nothing would be quantized")
                .help("choose a larger target, or pack the checkpoint without --q4-map"));
        }
        let uniform = alone.as_ref().map(|alone| -> Result<Uniform> {
            let same: Vec<Candidate> = subjects.iter().map(|s| s.measured().unwrap_or(&AS_IT_IS).clone()).collect();
            let layout = lay_out(&tensors, subjects.iter().map(|s| &s.tensor).zip(&same))?;
            let predicted = nine_digits(alone.values().sum());
            Ok(Uniform { bits_per_weight: bits_per_weight(&layout), predicted })
        });
        let record = Plan {
            target: self.target,
            bits_per_weight: bits_per_weight(&layout),
            bytes: layout.total_bytes,
            yardstick: match (&alone, &self.ptq.calibration) {
                (Some(_), _) => Yardstick::Divergence,
                (None, Some(_)) => Yardstick::Outputs,
                (None, None) => Yardstick::Weights,
            },
            text,
            predicted: nine_digits(planned.values().map(|tensor| tensor.cost).sum()),
            measured: None,
            uniform: uniform.transpose()?,
            tensors: planned,
        };
        Ok(Planned { decisions, record })
    }

    fn has_choice(&self, tensor: &Tensor) -> bool {
        self.ptq.selection.leaves_to_plan(tensor)
    }

    /// Returns an error for targets that cannot be reached or need no quantization, before anything is measured.
    fn refuse_impossible(&self, tensors: &[Tensor]) -> Result<()> {
        let all = |pick: fn(Vec<u64>) -> Option<u64>| -> Result<(u64, u64)> {
            let mut bytes = 0u64;
            for tensor in tensors {
                let sizes = match self.has_choice(tensor) {
                    true => candidates::sizes(tensor)?,
                    false => vec![AS_IT_IS.bytes(tensor)?],
                };
                bytes = bytes.saturating_add(pick(sizes).unwrap_or(0));
            }
            Ok((bytes, tensors.iter().map(Tensor::elements).sum()))
        };
        let (least, weights) = all(|sizes| sizes.into_iter().min())?;
        let (as_it_is, _) = all(|sizes| sizes.last().copied())?;
        let Some(budget) = self.budget(weights) else { return Ok(()) };
        let bits = |bytes: u64| bytes as f64 * 8.0 / weights.max(1) as f64;
        if budget < least {
            return Err(too_small(bits(least), least));
        }
        if budget >= as_it_is {
            let found = format!("the target is met without quantizing anything: {:.3} bits per weight", bits(as_it_is));
            return Err(Error::usage(found).help("choose a smaller target, or pack the checkpoint without --q4-map"));
        }
        Ok(())
    }

    /// Returns the budget in bytes of payload, if it is one of bytes.
    fn budget(&self, weights: u64) -> Option<u64> {
        match self.target {
            Target::BitsPerWeight(bits) => Some((bits * weights as f64 / 8.0) as u64),
            Target::Bytes(bytes) => Some(bytes),
            Target::Divergence(_) => None,
        }
    }

    /// Measures the error of every scheme on each tensor whose scheme is to be planned.
    fn compare(&self, tensors: &[Tensor], job: &Job) -> Result<Vec<Subject>> {
        let own: Vec<&Tensor> = tensors.iter().filter(|tensor| self.has_choice(tensor)).collect();
        let bar = progress::bytes("comparing schemes", own.iter().map(|tensor| tensor.elements()).sum());
        let compare = |tensor: &Tensor| {
            interrupt::check()?;
            let task = format!("candidates {}", tensor.name);
            let known = job.found::<Vec<Candidate>>(&task).next().map(|found| found.result);
            let candidates = match known {
                Some(candidates) => {
                    bar.skip(tensor.elements());
                    candidates
                }
                None => {
                    let candidates = candidates::compare(&self.ptq.weights, tensor, self.ptq.calibration.as_ref())?;
                    job.record(&task, &candidates, 0)?;
                    bar.inc(tensor.elements());
                    candidates
                }
            };
            Ok(Subject { tensor: tensor.clone(), candidates })
        };
        own.into_iter().map(compare).collect()
    }

    /// Returns the divergence that each tensor causes when it is quantized alone, by name, and the text it was measured
    /// on. Takes both from an earlier run if that run recorded them.
    fn alone(&self, question: &Question, subjects: &[Subject], job: &Job) -> Result<(BTreeMap<String, f64>, PlanText)> {
        if let Some(found) = job.found::<(PlanText, Vec<Blame>)>(ALONE).next() {
            let (text, blame) = found.result;
            return Ok((by_name(blame), text));
        }
        let packs = self.ptq.packs()?;
        packs.quantize(&candidates::document(subjects, self.ptq.calibration.as_ref())?)?;
        let mut trial = Trial::begin(packs, question.clone())?;
        let blame = trial.blame(usize::MAX, Some(job))?;
        let text = PlanText {
            file: trial.text.clone(),
            window: trial.windows.window_len(),
            skipped: trial.skipped,
            windows: trial.windows.count(),
        };
        job.record(ALONE, &(&text, &blame), 0)?;
        Ok((by_name(blame), text))
    }

    fn choose(&self, tensors: &[Tensor], subjects: &[Subject], costs: &[Vec<f64>]) -> Result<(Vec<usize>, Layout)> {
        let choices = |(subject, costs): (&Subject, &Vec<f64>)| -> Result<Vec<Choice>> {
            let each = subject.candidates.iter().zip(costs);
            each.map(|(candidate, cost)| Ok(Choice { bytes: candidate.bytes(&subject.tensor)?, cost: *cost })).collect()
        };
        let choices = subjects.iter().zip(costs).map(choices).collect::<Result<Vec<_>>>()?;
        let fixed = tensors.iter().filter(|tensor| !self.has_choice(tensor));
        let fixed: u64 = fixed.map(|tensor| AS_IT_IS.bytes(tensor)).sum::<Result<u64>>()?;
        let stored = |chosen: &[usize]| {
            let stored = subjects.iter().zip(chosen).map(|(subject, i)| (&subject.tensor, &subject.candidates[*i]));
            lay_out(tensors, stored)
        };
        let Some(mut budget) = self.budget(tensors.iter().map(Tensor::elements).sum()) else {
            let Target::Divergence(most) = self.target else { unreachable!("other targets are bytes") };
            // A tensor that stays as it is costs nothing, so that every divergence is in reach.
            let chosen = reach(&choices, most).expect("a plan without quantization");
            return stored(&chosen).map(|layout| (chosen, layout));
        };
        loop {
            let Some(chosen) = budget.checked_sub(fixed).and_then(|budget| spend(&choices, budget)) else {
                let least = crate::quant::budget::smallest(&choices) + fixed;
                let weights: u64 = tensors.iter().map(Tensor::elements).sum();
                return Err(too_small(least as f64 * 8.0 / weights as f64, least));
            };
            let layout = stored(&chosen)?;
            match self.target {
                // Gaps between tensors are part of the size.
                Target::Bytes(bytes) if layout.total_bytes > bytes => {
                    budget = budget.saturating_sub(layout.total_bytes - bytes);
                }
                _ => return Ok((chosen, layout)),
            }
        }
    }

    /// Measures the finished manifest on the text of the plan, and stores the plan in it.
    ///
    /// # Errors
    /// The same as for [`Trial::measure`]; also if a tensor needs more bytes than planned.
    pub fn conclude(&self, planned: Planned, document: &mut Document) -> Result<()> {
        let Planned { decisions, mut record } = planned;
        let entries =
            || decisions.iter().filter_map(|(name, planned)| Some((name, planned, document.tensors.get(name)?.quant?)));
        if let Some((name, ..)) = entries().find(|(_, planned, quant)| planned.spec != quant.spec) {
            return Err(Error::unsupported("found weights that need f32 scales, which the plan did not include")
                .tensor(name)
                .help("leave this tensor unquantized with --exclude"));
        }
        if let Some(question) = &self.question {
            let packs = self.ptq.packs()?;
            packs.quantize(document)?;
            let mut trial = Trial::begin(packs, question.clone())?;
            record.measured = Some(nine_digits(trial.divergence_of_weights()?));
        }
        document.plan = Some(record);
        Ok(())
    }
}

fn by_name(blame: Vec<Blame>) -> BTreeMap<String, f64> {
    blame.into_iter().map(|blame| (blame.tensor, blame.kl)).collect()
}

/// Returns the cost of each candidate of a tensor: its predicted divergence in nats per token. If divergences were
/// not measured, this is its relative squared error, weighted by [`HEAD_COUNTS`] for the output matrix.
fn costs(subject: &Subject, alone: Option<&BTreeMap<String, f64>>, is_head: bool) -> Vec<f64> {
    let price = match (alone, subject.measured()) {
        (None, _) if is_head => HEAD_COUNTS,
        (None, _) => 1.0,
        (Some(alone), Some(measured)) if measured.error > 0.0 => {
            alone.get(&subject.tensor.name).map_or(0.0, |kl| kl / measured.error)
        }
        (Some(_), _) => 0.0,
    };
    subject.candidates.iter().map(|candidate| nine_digits(price * candidate.error)).collect()
}

/// Computes the layout of the pack for the selected candidates.
fn lay_out<'a>(tensors: &[Tensor], chosen: impl Iterator<Item = (&'a Tensor, &'a Candidate)>) -> Result<Layout> {
    let chosen: BTreeMap<&str, &Candidate> =
        chosen.map(|(tensor, candidate)| (tensor.name.as_str(), candidate)).collect();
    let stored = |tensor: &Tensor| Stored {
        name: tensor.name.clone(),
        shape: tensor.shape.clone(),
        store: chosen.get(tensor.name.as_str()).unwrap_or(&&AS_IT_IS).store(tensor),
        source_layout: None,
        metrics: None,
    };
    Layout::new(tensors.iter().map(stored).collect())
}

fn bits_per_weight(layout: &Layout) -> f64 {
    let payload: usize = layout.entries.iter().map(|entry| entry.nbytes).sum();
    let weights: usize = layout.entries.iter().map(|entry| entry.elements()).sum();
    payload as f64 * 8.0 / weights.max(1) as f64
}

fn too_small(bits: f64, bytes: u64) -> Error {
    Error::usage(format!(
        "the target is out of reach: the smallest possible pack has {bits:.3} bits per weight ({bytes} bytes)"
    ))
    .help("choose a larger target, or exclude fewer tensors (--exclude)")
}
