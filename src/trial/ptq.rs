//! Post-training quantization of a model, from the options to the manifest: plans under a budget, measures the
//! quantized weights, evaluates the outputs of the whole model, and writes the manifest.
//!
//! [`Ptq::open`] checks all inputs before the work begins. [`Ptq::dry_run`] and [`Ptq::outlook`] are dry runs,
//! [`Ptq::quantize`] does the work, and [`Quantized::manifest`] returns the manifest unless a gate rejects it.

use super::budget::Outlook;
use super::rates::Rates;
use super::{Blame, ModelSource, Packs, Planner, Question, RepairOptions, TaskTrial, Trial, repair, task_gate};
use crate::calibration::Calibration;
use crate::catalogue::Role;
use crate::convert::dry_run::DryRun;
use crate::convert::pack::PackOptions;
use crate::convert::quantize::judge::{self, Judgement, OnFailure};
use crate::convert::quantize::ptq::{self, Measured};
use crate::convert::quantize::select::{Selection, SelectionOptions};
use crate::convert::quantize::weights::{Tensor, Weights};
use crate::error::{Error, Result};
use crate::eval::tasks::TaskFile;
use crate::eval::windows::WINDOW;
use crate::job::RunOptions;
use crate::manifest::plan::Target;
use crate::manifest::{Document, TensorEntry, Verdict};
use crate::output::directory_of;
use crate::provenance::Gate;
use crate::sha256;
use std::cell::OnceCell;
use std::path::PathBuf;

/// Number of tensors that the error lists if a gate rejects the model.
const NAMED: usize = 10;

/// Text, and the part of it that is used.
#[derive(Debug, Clone)]
pub struct TextWindows {
    /// Path of the text.
    pub text: PathBuf,
    /// Largest number of windows.
    pub windows: Option<usize>,
}

/// Limit for the size of the pack, and the text that the plan is measured on.
#[derive(Debug, Clone)]
pub struct Budget {
    /// Limit for the size of the pack.
    pub target: Target,
    /// Text on which the divergence of each tensor, quantized alone, is measured; without it the plan is based on
    /// errors of outputs or weights.
    pub text: Option<TextWindows>,
    /// Bandwidth of the memory in 10^9 bytes per second, from which speeds are predicted; without it, the products with
    /// each storage are timed on this machine.
    pub bandwidth: Option<f64>,
}

/// Options that determine a manifest.
#[derive(Debug, Clone)]
pub struct PtqOptions {
    /// Model to quantize.
    pub model: ModelSource,
    /// Path of the manifest to write.
    pub out: PathBuf,
    /// Scheme, parameters and selection of tensors.
    pub selection: SelectionOptions,
    /// Manifest whose rules replace `selection`.
    pub rules: Option<PathBuf>,
    /// File with statistics of the inputs.
    pub calibration: Option<PathBuf>,
    /// Thresholds for tensors and for the outputs of the model.
    pub gate: Gate,
    /// Text that the outputs of the model are measured on.
    pub gate_text: Option<TextWindows>,
    /// Action for tensors that the gate rejects.
    pub on_failure: OnFailure,
    /// Largest number of bits per weight of the pack after repairs.
    pub max_bits: Option<f64>,
    /// Budget under which the scheme of every tensor is planned.
    pub budget: Option<Budget>,
    /// True to write the manifest even if a gate rejects it.
    pub force: bool,
    /// True to pack the quantized model even without a gate on outputs, for a report.
    pub pack: bool,
    /// Tensor that must be quantized, because a report shows it.
    pub shown_tensor: Option<String>,
    /// Number of threads of the engines.
    pub threads: usize,
    /// Options for saving and resuming the job.
    pub run: RunOptions,
}

impl PtqOptions {
    /// Returns true when the outputs of the model are to be measured.
    fn judges_answers(&self, calibration: Option<&Calibration>) -> Result<bool> {
        let Some(TextWindows { text, .. }) = &self.gate_text else {
            return match self.gate.asks_a_text() {
                true => {
                    Err(Error::usage("a gate on outputs (kl, ppl, top1) needs a text").help("add --gate-text FILE"))
                }
                false => Ok(false),
            };
        };
        if let Some(calibration) = calibration {
            let sha256 = sha256::of_file(text, |_| {})?;
            if calibration.description().texts.iter().any(|text| text.sha256 == sha256) {
                return Err(Error::usage(
                    "this text was used for calibration, so it cannot be used to judge the result",
                )
                .at(text)
                .help("name another text with --gate-text"));
            }
        }
        Ok(true)
    }

    /// Reads the files of questions of the gate.
    fn task_files(&self, calibration: Option<&Calibration>) -> Result<Vec<TaskFile>> {
        if !self.gate.tasks.is_empty() && self.on_failure != OnFailure::Refuse && self.gate_text.is_none() {
            let found = "--keep-failing with a gate on a task needs a text, whose divergences choose the tensors that \
                         get more bits";
            return Err(Error::usage(found).help("add --gate-text FILE, or leave out --keep-failing"));
        }
        let files = task_gate::read(&self.gate)?;
        let texts = || calibration.iter().flat_map(|calibration| &calibration.description().texts);
        match files.iter().find(|file| texts().any(|text| text.sha256 == file.source.sha256)) {
            Some(file) => {
                Err(Error::usage("this file was used for calibration, so it cannot be used to judge the result")
                    .at(&file.path)
                    .help("name another file with --gate task=FILE:-X%"))
            }
            None => Ok(files),
        }
    }

    /// Returns the text that a plan is measured on, after the parts of the same file that calibration and the gate
    /// use.
    fn plan_question(&self, calibration: Option<&Calibration>) -> Result<Option<Question>> {
        let Some(TextWindows { text, windows }) = self.budget.as_ref().and_then(|budget| budget.text.as_ref()) else {
            return Ok(None);
        };
        let sha256 = sha256::of_file(text, |_| {})?;
        // One extra token for the beginning-of-sequence token.
        let calibrated = calibration.iter().flat_map(|c| &c.description().texts).filter(|t| t.sha256 == sha256);
        let mut skip = calibrated.map(|text| text.tokens as usize + 1).max().unwrap_or(0);
        if let Some(gate) = &self.gate_text
            && sha256::of_file(&gate.text, |_| {})? == sha256
        {
            let windows = gate.windows.ok_or_else(|| {
                Error::usage("the gate uses all of this text, which leaves nothing for the plan")
                    .at(text)
                    .help("limit the gate with --gate-windows, or name another --plan-text")
            })?;
            skip = skip.max(windows.saturating_mul(WINDOW));
        }
        Ok(Some(Question { text: text.clone(), skip, windows: *windows, threads: self.threads }))
    }
}

/// Model to be quantized, with its options.
pub struct Ptq {
    /// Options it was opened with.
    pub options: PtqOptions,
    /// Selection of the tensors to quantize, with their parameters.
    pub selection: Selection,
    /// Weights to be quantized.
    pub weights: Weights,
    /// Statistics of the inputs.
    pub calibration: Option<Calibration>,
    judges_answers: bool,
    /// Files of questions of the gate.
    task_files: Vec<TaskFile>,
    packs: OnceCell<Packs>,
}

impl Ptq {
    /// Opens the model and the statistics.
    ///
    /// # Errors
    /// The model or the statistics cannot be read, or options contradict each other.
    pub fn open(options: PtqOptions) -> Result<Ptq> {
        let selection = Selection::new(options.selection.clone(), options.rules.as_deref())?;
        let calibration = options.calibration.as_deref().map(Calibration::open).transpose()?;
        if let Some(along) = calibration.as_ref().filter(|found| found.description().quantized.is_some()) {
            return Err(Error::usage(
                "found statistics along a quantized model, which only `iec pack` and `iec q4` read",
            )
            .at(along.path())
            .help("give the statistics of the model itself, made without --quantized"));
        }
        let judges_answers = options.judges_answers(calibration.as_ref())?;
        let task_files = options.task_files(calibration.as_ref())?;
        let weights = options.model.weights()?;
        selection.note_options_without_effect(&weights.tensors());
        if options.budget.is_some() && options.on_failure != OnFailure::Refuse && options.max_bits.is_none() {
            return Err(Error::usage("--keep-failing with a budget needs --max-bpw")
                .help("add --max-bpw X and --gate-text FILE, or leave out --keep-failing"));
        }
        Ok(Ptq { options, selection, weights, calibration, judges_answers, task_files, packs: OnceCell::new() })
    }

    /// Returns the planned type of each tensor, for options without a budget; measures nothing.
    ///
    /// # Errors
    /// The same as for [`ptq::dry_run`].
    pub fn dry_run(&self) -> Result<DryRun> {
        ptq::dry_run(&self.weights, &self.selection)
    }

    /// Creates the plan under a budget, and the best packs of other sizes. The measurements are stored next to the
    /// output for the next run.
    ///
    /// # Errors
    /// The same as for [`Planner::plan`].
    pub fn outlook(&self, budget: &Budget) -> Result<Outlook> {
        let planner = Planner { rates: Some(self.rates(budget)?), ..self.planner(budget)? };
        let job = planner.job(&self.options.run)?;
        planner.outlook(&job).or_else(|e| job.conclude(Err(e)))
    }

    /// Plans, measures every tensor, and measures and repairs the outputs of the model if a gate requires it.
    ///
    /// # Errors
    /// The target of the plan is out of reach, a tensor cannot be quantized, or a model cannot be packed or run.
    pub fn quantize(&self) -> Result<Quantized<'_>> {
        let PtqOptions { gate, on_failure, .. } = self.options.clone();
        let measured = match &self.options.budget {
            Some(budget) => self.measure_planned(budget)?,
            None => {
                self.check_shown(&self.selection)?;
                self.measure(&self.selection, &Judgement { gate, on_failure })?
            }
        };
        self.judge(measured)
    }

    fn planner(&self, budget: &Budget) -> Result<Planner<'_>> {
        let question = self.options.plan_question(self.calibration.as_ref())?;
        let rates = if let Target::Speed(_) = budget.target { Some(self.rates(budget)?) } else { None };
        Ok(Planner { ptq: self, target: budget.target, question, rates })
    }

    fn rates(&self, budget: &Budget) -> Result<Rates> {
        Rates::new(&self.weights.config().mlp, self.options.threads, budget.bandwidth)
    }

    /// Plans, and measures the planned quantization.
    fn measure_planned(&self, budget: &Budget) -> Result<Measured> {
        let planner = self.planner(budget)?;
        let job = planner.job(&self.options.run)?;
        let planned = match planner.plan(&job) {
            Ok(planned) => planned,
            Err(e) => return job.conclude(Err(e)),
        };
        let selection = Selection::new(self.options.selection.clone(), None)?.planned(planned.decisions.clone());
        self.check_shown(&selection)?;
        let judgement = Judgement { gate: self.options.gate.clone(), on_failure: OnFailure::Refuse };
        job.conclude(self.measure(&selection, &judgement).and_then(|mut measured| {
            planner.conclude(planned, &mut measured.document)?;
            Ok(measured)
        }))
    }

    fn check_shown(&self, selection: &Selection) -> Result<()> {
        let Some(name) = &self.options.shown_tensor else { return Ok(()) };
        match ptq::tensors(&self.weights, selection)?.iter().any(|tensor| tensor.name == *name) {
            true => Ok(()),
            false => Err(Error::usage("--report-tensor: no tensor of this name is quantized")
                .tensor(name)
                .help("`iec ptq --dry-run` lists the tensors that are quantized")),
        }
    }

    fn measure(&self, selection: &Selection, judgement: &Judgement) -> Result<Measured> {
        let PtqOptions { out, run, .. } = &self.options;
        ptq::measure(out, &self.weights, selection, judgement, self.calibration.as_ref(), run)
    }

    /// Returns the packs of the float model and a quantized one next to the output; packs the float model at the
    /// first use.
    pub(super) fn packs(&self) -> Result<&Packs> {
        if let Some(packs) = self.packs.get() {
            return Ok(packs);
        }
        let ModelSource { path: hf_dir, config } = self.options.model.clone();
        let calibration = self.options.calibration.clone();
        let origin = PackOptions { hf_dir, config, calibration, ..PackOptions::default() };
        let packs = Packs::begin(directory_of(&self.options.out), origin)?;
        Ok(self.packs.get_or_init(|| packs))
    }

    /// Applies the gate to the outputs of the whole model. A model with rejected tensors is packed only if the user
    /// forces it.
    fn judge(&self, mut measured: Measured) -> Result<Quantized<'_>> {
        let options = &self.options;
        let refused = measured.document.refused;
        let wanted = self.judges_answers || options.pack || !self.task_files.is_empty();
        let packed = (!refused || options.force) && wanted;
        let packs = packed.then(|| self.packs()).transpose()?;
        let tasks = packs.filter(|_| !self.task_files.is_empty());
        let tasks = tasks.map(|packs| TaskTrial::begin(packs, &options.gate, &self.task_files, options.threads));
        let tasks = tasks.transpose()?;
        let mut blame = Vec::new();
        match (packs, &options.gate_text) {
            (Some(packs), Some(TextWindows { text, windows })) => {
                let question = Question { text: text.clone(), skip: 0, windows: *windows, threads: options.threads };
                let promote = |tensor: &Tensor, entry: &TensorEntry| {
                    judge::promote(&self.weights, self.calibration.as_ref(), tensor, entry, options.on_failure)
                };
                let mut trial = Trial::begin(packs, question)?;
                let (gate, most_bits, tasks) = (&options.gate, options.max_bits, tasks.as_ref());
                let how = RepairOptions { gate, promote: &promote, most_bits, tasks };
                blame = repair(&mut trial, &mut measured, &how)?;
            }
            (Some(packs), None) => {
                packs.quantize(&measured.document)?;
                measured.document.task_evidence = tasks.map_or_else(|| Ok(Vec::new()), |tasks| tasks.measure())?;
                measured.document.refused |= !measured.document.objections().is_empty();
            }
            (None, _) => (),
        }
        Ok(Quantized { ptq: self, measured, blame, packs, refused })
    }
}

/// Quantized model: its manifest and its measurements.
pub struct Quantized<'a> {
    /// Model that was quantized.
    pub ptq: &'a Ptq,
    /// Manifest and selected tensors.
    pub measured: Measured,
    /// Divergence of the model with one tensor quantized alone, if it was measured; the worst first.
    pub blame: Vec<Blame>,
    /// Packs of the float model and the quantized one, if they were created.
    pub packs: Option<&'a Packs>,
    /// True if the gate rejected tensors.
    refused: bool,
}

impl Quantized<'_> {
    /// Returns the text of the manifest.
    ///
    /// # Errors
    /// A gate rejects the manifest and `force` is not set.
    pub fn manifest(&self) -> Result<Vec<u8>> {
        match self.refusal().filter(|_| !self.ptq.options.force) {
            Some(refusal) => Err(refusal),
            None => Ok(self.measured.document.to_json()),
        }
    }

    /// Returns the error of the gate that rejects the manifest, if one does.
    fn refusal(&self) -> Option<Error> {
        if self.refused {
            return Some(refused_tensors(&self.measured));
        }
        let document = &self.measured.document;
        (!document.objections().is_empty()).then(|| refused_answers(document, &self.blame))
    }
}

/// Creates the error of a gate on tensors, which names the worst tensor.
fn refused_tensors(measured: &Measured) -> Error {
    let refused = || measured.tensors.iter().filter(|t| measured.verdict(t) == Some(Verdict::Refused));
    let worst = refused().min_by(|a, b| measured.cosine(a).total_cmp(&measured.cosine(b)));
    let place = worst.map_or(String::new(), |t| {
        format!("; worst: {}, {}", t.name, measured.document.tensors[&t.name].reasons.join(", "))
    });
    let help = match worst.map(|t| t.role) {
        Some(Role::Embedding) => "leave it unquantized with --keep embedding, or lower the gate with --gate",
        Some(Role::LmHead) => "leave it unquantized with --keep lm_head, or lower the gate with --gate",
        _ => "try --keep-failing int6 or int8, a smaller --group-size, or --force to write the manifest all the same",
    };
    Error::refused(format!("the gate refuses {} of {} tensors{place}", refused().count(), measured.tensors.len()))
        .help(help)
}

/// Creates the error of a gate on the model's outputs, which lists the tensors that contribute most.
fn refused_answers(document: &Document, blame: &[Blame]) -> Error {
    let worst: Vec<String> = blame.iter().take(NAMED).map(|b| format!("{} {:.5}", b.tensor, b.kl)).collect();
    let worst =
        if worst.is_empty() { String::new() } else { format!("; divergence of single tensors: {}", worst.join(", ")) };
    Error::refused(format!("the gate refuses the model's outputs: {}{worst}", document.objections().join(", "))).help(
        "try --keep-failing int6 or int8 (with a higher --max-bpw), a smaller --group-size, or --force to write the \
         manifest all the same",
    )
}
