//! Bit-budget planner: selects the scheme of each tensor under a limit for the whole pack.
//!
//! The plan is based on three measurements. First, some rows of each tensor are quantized with every scheme
//! ([`candidates`]), which gives the relative errors of the schemes for the same tensor. Second, each tensor is
//! quantized alone in the float model, and the divergence gives the sensitivity of the model to that tensor. The
//! divergence is proportional to the square of the error, so measuring one scheme is sufficient to predict all. The
//! selection ([`crate::quant::budget`]) approximates the divergence of the whole model by the sum of these
//! predictions. Because this is an approximation, the divergence of the whole model is measured last.

use super::parts::{self, PartShare};
use super::ptq::Ptq;
use super::rates::Rates;
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
use crate::job::{Command, Job, RunOptions};
use crate::manifest::Document;
use crate::manifest::plan::{Plan, PlanText, PlannedSpeed, PlannedTensor, Target, Uniform, Yardstick};
use crate::progress;
use crate::quant::budget::{Choice, reach, smallest, spend};
use crate::quant::metrics::nine_digits;
use crate::quant_spec::TensorQuant;
use serde::Serialize;
use std::collections::BTreeMap;

/// Name of this job, which its fingerprint includes.
const COMMAND: &str = "plan";
/// Name of the task that records the divergence of every tensor alone.
const ALONE: &str = "alone";

/// Weight of an error of the output matrix if divergences are not measured, because no later layer can correct it. In
/// the test model llama-trained, a relative error of the outputs of this matrix causes 20 to 1000 times the divergence
/// of an equal error in a layer, most often about 100 times.
pub const HEAD_COUNTS: f64 = 64.0;

/// Number of points of a curve, and the bits per weight at its end, where codes of 8 bits are as good as the model.
const POINTS: u64 = 64;
const MOST_BITS: f64 = 8.75;

/// Inputs of a plan.
pub struct Planner<'a> {
    /// Model, its selection of tensors whose scheme is planned, and the packs that divergences are measured with.
    pub ptq: &'a Ptq,
    /// Budget of the pack. A divergence needs a question, a speed needs rates.
    pub target: Target,
    /// Text that divergences are measured on; without it, the plan is based on errors of outputs or weights.
    pub question: Option<Question>,
    /// Prediction of speeds, which a target of speed and a curve need.
    pub rates: Option<Rates>,
}

/// Divergence that each tensor causes when it is quantized alone, by name, and the text it was measured on.
type Alone = (BTreeMap<String, f64>, PlanText);

/// Tensors that a plan chooses the storage of, and their measurements.
struct Known {
    /// All tensors of the model.
    tensors: Vec<Tensor>,
    /// Tensors with more than one possible storage.
    subjects: Vec<Subject>,
    /// Costs of the candidates of each subject.
    costs: Vec<Vec<f64>>,
    alone: Option<Alone>,
}

/// A pack of the least expected error for its size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CurvePoint {
    /// Bits per weight of the whole pack.
    pub bits_per_weight: f64,
    /// Expected cost, in the units of [`Plan::yardstick`].
    pub predicted: f64,
    /// Tokens per second that one text decodes, products with weights alone.
    pub tokens_per_second: f64,
}

/// A plan, the best packs of other sizes, and the parts of the model that bear quantization less than others.
#[derive(Debug, Serialize)]
pub struct Outlook {
    /// The plan.
    #[serde(flatten)]
    pub plan: Plan,
    /// Tokens per second of the plan, products with weights alone.
    pub tokens_per_second: f64,
    /// Best packs by increasing size.
    pub curve: Vec<CurvePoint>,
    /// Kinds of tensors with their shares.
    pub parts: Vec<PartShare>,
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
        Job::for_file(&Command::new(COMMAND, &()), &self.ptq.options.out, run, |fingerprint| {
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
        self.decide(&self.measure(job)?)
    }

    /// Plans like [`Planner::plan`], and also for other sizes. Needs `rates`.
    ///
    /// # Errors
    /// The same as for [`Planner::plan`].
    pub fn outlook(&self, job: &Job) -> Result<Outlook> {
        let known = self.measure(job)?;
        let plan = self.decide(&known)?;
        let chosen: Vec<usize> = known.subjects.iter().map(|subject| plan.choice(subject)).collect();
        let tokens_per_second = self.tokens_per_second(&known, &chosen)?;
        let curve = self.curve(&known)?;
        let parts = parts::shares(known.subjects.iter().zip(&known.costs));
        Ok(Outlook { plan: plan.record, tokens_per_second, curve, parts })
    }

    fn measure(&self, job: &Job) -> Result<Known> {
        let tensors = self.ptq.weights.tensors();
        self.refuse_impossible(&tensors)?;
        let (subjects, alone) = job.keep(&[], || self.measure_all(&tensors, job))?;
        let head = if tensors.iter().any(|t| t.role == Role::LmHead) { Role::LmHead } else { Role::Embedding };
        let each = alone.as_ref().map(|(alone, _)| alone);
        let costs = subjects.iter().map(|s| costs(s, each, s.tensor.role == head)).collect();
        Ok(Known { tensors, subjects, costs, alone })
    }

    /// Measures the errors of all schemes and, if there is a text, the divergence that each tensor causes when it is
    /// quantized alone. Takes over what an earlier run recorded.
    fn measure_all(&self, tensors: &[Tensor], job: &Job) -> Result<(Vec<Subject>, Option<Alone>)> {
        let known = job.found::<(PlanText, Vec<Blame>)>(ALONE).next().map(|found| found.result);
        let Some(question) = self.question.as_ref().filter(|_| known.is_none()) else {
            return Ok((self.compare(tensors, job)?, known.map(|(text, blame)| (by_name(blame), text))));
        };
        // A text that cannot be used is refused before the work.
        let packs = self.ptq.packs()?;
        let mut trial = Trial::begin(packs, question.clone())?;
        let subjects = self.compare(tensors, job)?;
        packs.quantize(&candidates::document(&subjects, self.ptq.calibration.as_ref())?)?;
        let blame = trial.blame(usize::MAX, Some(job))?;
        let text = PlanText {
            file: trial.text.clone(),
            window: trial.windows.window_len(),
            skipped: trial.skipped,
            windows: trial.windows.count(),
        };
        job.record(ALONE, &(&text, &blame), 0)?;
        Ok((subjects, Some((by_name(blame), text))))
    }

    fn decide(&self, known: &Known) -> Result<Planned> {
        let Known { tensors, subjects, costs, alone } = known;
        let (chosen, layout) = self.choose(known)?;
        let mut planned = BTreeMap::new();
        let mut decisions = BTreeMap::new();
        for ((subject, choice), costs) in subjects.iter().zip(&chosen).zip(costs) {
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
        let uniform = alone.as_ref().map(|(alone, _)| -> Result<Uniform> {
            let same: Vec<Candidate> = subjects.iter().map(|s| s.measured().unwrap_or(&AS_IT_IS).clone()).collect();
            let layout = lay_out(tensors, subjects.iter().map(|s| &s.tensor).zip(&same))?;
            let predicted = nine_digits(alone.values().sum());
            Ok(Uniform { bits_per_weight: bits_per_weight(&layout), predicted })
        });
        let speed = match (self.target, &self.rates) {
            (Target::Speed(_), Some(rates)) => {
                let tokens_per_second = self.tokens_per_second(known, &chosen)?;
                Some(PlannedSpeed { tokens_per_second, rates: rates.measurements() })
            }
            _ => None,
        };
        let record = Plan {
            target: self.target,
            bits_per_weight: bits_per_weight(&layout),
            bytes: layout.total_bytes,
            yardstick: match (alone, &self.ptq.calibration) {
                (Some(_), _) => Yardstick::Divergence,
                (None, Some(_)) => Yardstick::Outputs,
                (None, None) => Yardstick::Weights,
            },
            text: alone.as_ref().map(|(_, text)| text.clone()),
            predicted: nine_digits(planned.values().map(|tensor| tensor.cost).sum()),
            measured: None,
            uniform: uniform.transpose()?,
            speed,
            tensors: planned,
        };
        Ok(Planned { decisions, record })
    }

    /// Returns the best packs between the smallest one and one that is about as good as the model itself.
    fn curve(&self, known: &Known) -> Result<Vec<CurvePoint>> {
        let choices = known.choices(|tensor, candidate| candidate.bytes(tensor))?;
        let fixed = self.fixed(&known.tensors, |tensor, candidate| candidate.bytes(tensor))?;
        let weights: u64 = known.tensors.iter().map(Tensor::elements).sum();
        let least = smallest(&choices);
        let most = ((MOST_BITS * weights as f64 / 8.0) as u64).saturating_sub(fixed).max(least);
        let mut points: Vec<CurvePoint> = Vec::new();
        for i in 0..POINTS {
            let budget = least + (most - least) / (POINTS - 1) * i;
            let Some(chosen) = spend(&choices, budget) else { continue };
            let taken = || choices.iter().zip(&chosen).map(|(choices, chosen)| choices[*chosen]);
            let bytes = fixed + taken().map(|choice| choice.bytes).sum::<u64>();
            let point = CurvePoint {
                bits_per_weight: nine_digits(bytes as f64 * 8.0 / weights.max(1) as f64),
                predicted: nine_digits(taken().map(|choice| choice.cost).sum()),
                tokens_per_second: self.tokens_per_second(known, &chosen)?,
            };
            if points.last().is_none_or(|last| last.bits_per_weight < point.bits_per_weight) {
                points.push(point);
            }
        }
        Ok(points)
    }

    /// Returns the predicted tokens per second of a choice.
    fn tokens_per_second(&self, known: &Known, chosen: &[usize]) -> Result<f64> {
        let fixed = self.fixed(&known.tensors, |tensor, candidate| self.picoseconds(tensor, candidate))?;
        let taken = known.subjects.iter().zip(chosen);
        let taken = taken.map(|(subject, i)| self.picoseconds(&subject.tensor, &subject.candidates[*i]));
        Ok(nine_digits(1e12 / (fixed + taken.sum::<Result<u64>>()?).max(1) as f64))
    }

    /// Returns the time that a token takes for a tensor.
    fn picoseconds(&self, tensor: &Tensor, candidate: &Candidate) -> Result<u64> {
        let rates = self.rates.as_ref().ok_or_else(|| Error::usage("found no rates to predict a speed with"))?;
        Ok((1e12 * rates.seconds(tensor, candidate.store(tensor), candidate.bytes(tensor)?)?) as u64)
    }

    /// Returns what a candidate takes of the budget: bytes, or picoseconds per token.
    fn price(&self, tensor: &Tensor, candidate: &Candidate) -> Result<u64> {
        match self.target {
            Target::Speed(_) => self.picoseconds(tensor, candidate),
            _ => candidate.bytes(tensor),
        }
    }

    /// Returns the price of all tensors that stay as they are.
    fn fixed(&self, tensors: &[Tensor], price: impl Fn(&Tensor, &Candidate) -> Result<u64>) -> Result<u64> {
        tensors.iter().filter(|tensor| !self.has_choice(tensor)).map(|tensor| price(tensor, &AS_IT_IS)).sum()
    }

    fn has_choice(&self, tensor: &Tensor) -> bool {
        self.ptq.selection.leaves_to_plan(tensor)
    }

    /// Returns an error for targets that cannot be reached or need no quantization, before anything is measured.
    fn refuse_impossible(&self, tensors: &[Tensor]) -> Result<()> {
        let weights = tensors.iter().map(Tensor::elements).sum();
        let Some(budget) = self.budget(weights) else { return Ok(()) };
        let (mut least, mut as_it_is) = (0u64, 0u64);
        for tensor in tensors {
            let unchanged = self.price(tensor, &AS_IT_IS)?;
            as_it_is = as_it_is.saturating_add(unchanged);
            let candidates = if self.has_choice(tensor) { candidates::possible(tensor)? } else { Vec::new() };
            let prices = candidates.iter().map(|candidate| self.price(tensor, candidate));
            let prices = prices.collect::<Result<Vec<_>>>()?;
            least = least.saturating_add(prices.into_iter().min().unwrap_or(unchanged));
        }
        if budget < least {
            return Err(self.out_of_reach(least, weights));
        }
        if budget >= as_it_is {
            let found = format!("the target is met without quantizing anything: {}", self.in_words(as_it_is, weights));
            return Err(Error::usage(found).help("choose a harder target, or pack the checkpoint without --q4-map"));
        }
        Ok(())
    }

    /// Describes a price in the terms of the target.
    fn in_words(&self, price: u64, weights: u64) -> String {
        match self.target {
            Target::Speed(_) => format!("{:.1} tokens per second", 1e12 / price.max(1) as f64),
            _ => format!("{:.3} bits per weight ({price} bytes)", price as f64 * 8.0 / weights.max(1) as f64),
        }
    }

    fn out_of_reach(&self, price: u64, weights: u64) -> Error {
        let best = if let Target::Speed(_) = self.target { "fastest" } else { "smallest" };
        let found = self.in_words(price, weights);
        Error::usage(format!("the target is out of reach: the {best} possible pack has {found}"))
            .help("choose an easier target, or exclude fewer tensors (--exclude)")
    }

    /// Returns the budget in units of [`Planner::price`], if the target is one.
    fn budget(&self, weights: u64) -> Option<u64> {
        match self.target {
            Target::BitsPerWeight(bits) => Some((bits * weights as f64 / 8.0) as u64),
            Target::Bytes(bytes) => Some(bytes),
            Target::Speed(tokens_per_second) => Some((1e12 / tokens_per_second) as u64),
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

    fn choose(&self, known: &Known) -> Result<(Vec<usize>, Layout)> {
        let choices = known.choices(|tensor, candidate| self.price(tensor, candidate))?;
        let fixed = self.fixed(&known.tensors, |tensor, candidate| self.price(tensor, candidate))?;
        let stored = |chosen: &[usize]| {
            let stored = known.subjects.iter().zip(chosen);
            lay_out(&known.tensors, stored.map(|(subject, i)| (&subject.tensor, &subject.candidates[*i])))
        };
        let weights = known.tensors.iter().map(Tensor::elements).sum();
        let Some(mut budget) = self.budget(weights) else {
            let Target::Divergence(most) = self.target else { unreachable!("other targets are budgets") };
            // A tensor that stays as it is costs nothing, so that every divergence is in reach.
            let chosen = reach(&choices, most).expect("a plan without quantization");
            return stored(&chosen).map(|layout| (chosen, layout));
        };
        loop {
            let Some(chosen) = budget.checked_sub(fixed).and_then(|budget| spend(&choices, budget)) else {
                return Err(self.out_of_reach(smallest(&choices) + fixed, weights));
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

impl Known {
    /// Returns the candidates of each subject with their costs and prices.
    fn choices(&self, price: impl Fn(&Tensor, &Candidate) -> Result<u64>) -> Result<Vec<Vec<Choice>>> {
        let choices = |(subject, costs): (&Subject, &Vec<f64>)| -> Result<Vec<Choice>> {
            let each = subject.candidates.iter().zip(costs);
            each.map(|(candidate, cost)| Ok(Choice { bytes: price(&subject.tensor, candidate)?, cost: *cost }))
                .collect()
        };
        self.subjects.iter().zip(&self.costs).map(choices).collect()
    }
}

impl Planned {
    /// Returns the number of the candidate that was chosen.
    fn choice(&self, subject: &Subject) -> usize {
        let quant = self.decisions.get(&subject.tensor.name).copied();
        subject.candidates.iter().position(|candidate| candidate.quant == quant).unwrap_or(0)
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
