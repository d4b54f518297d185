//! `iec ptq`: options, and the order of planning, measuring, judging and telling.

mod answers;
pub mod budget;
mod report;
mod summary;

use crate::global::Global;
use crate::job::Keeping;
use crate::outlook;
use crate::source::SourceArgs;
use answers::AnswerArgs;
use budget::BudgetArgs;
use clap::ArgAction;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use iec::atomic_file::write_atomically;
use iec::calibration::Calibration;
use iec::convert::quantize::judge::{self, Judgement, OnFailure};
use iec::convert::quantize::ptq::{self, Measured};
use iec::convert::quantize::select::{Selection, Wishes};
use iec::convert::quantize::weights::{Tensor, Weights};
use iec::error::{Error, Result};
use iec::manifest::plan::Target;
use iec::manifest::{Keep, Method, QuantFields, TensorEntry, Verdict};
use iec::provenance::Gate;
use iec::role::Role;
use iec::scheme::{Granularity, Scheme};
use iec::trial::{Origin, Packs, Planner};
use report::{Report, ReportArgs};
use serde_json::json;
use std::cell::OnceCell;
use std::path::{Path, PathBuf};

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("source").required(true).args(["hf_dir", "hf_repo", "model_dir"]))]
#[command(after_help = "Examples:
  iec ptq --hf-dir models/tinyllama --out q4_manifest.json --bits 4
  iec ptq --hf-dir models/tinyllama --out q4_manifest.json --bits 4 --group-size 128 --keep-failing int8
  iec ptq --hf-dir models/tinyllama --out q4_manifest.json --bits 4 --calib tinyllama.calib
  iec ptq --hf-dir models/tinyllama --out q4_manifest.json --bits 4 --gate kl=0.02 --gate-text heldout.txt --keep-failing int8
  iec ptq --hf-dir models/tinyllama --out q4_manifest.json --target-bpw 4.6 --calib tinyllama.calib --plan-text heldout.txt
  iec ptq --hf-dir models/tinyllama --out q4_manifest.json --target-size 600M --dry-run
  iec ptq --hf-dir models/gpt-oss-20b --out q4_manifest.json --rules manifests/gpt-oss-20b.json --json

4 bit is q4_0 with searched scales, 5 and 6 bit are int5 and int6 with a scale per 32 weights, 8 bit is int8 with a scale per
row, unless you say otherwise. Without --include the
matrices of attention, MLP and experts are quantized; MXFP4 experts stay as they are.
A gate on answers (kl, ppl, top1) packs the float model and the quantized one beside --out for as long as it takes to compare
them; with --keep-failing the tensors that hurt most get more bits until it is content.")]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// A pack with float weights to measure instead
    #[arg(long, value_name = "DIR")]
    model_dir: Option<PathBuf>,
    /// The manifest to write; with --report's page the only file written
    #[arg(long, value_name = "MANIFEST")]
    out: PathBuf,
    /// Bits per weight
    #[arg(long, value_name = "4|5|6|8")]
    bits: Option<u32>,
    /// What a code means
    #[arg(long, value_parser = schemes())]
    scheme: Option<Scheme>,
    /// Weights that share a scale: 32, 64, 128, 256, row or tensor [default: 32, row for 8 bit]
    #[arg(long, value_name = "N|row|tensor")]
    group_size: Option<Granularity>,
    /// Codes around zero (the default)
    #[arg(long, conflicts_with = "affine")]
    symmetric: bool,
    /// Codes with a zero point per group; int4 only
    #[arg(long)]
    affine: bool,
    /// Clip weights to this magnitude first
    #[arg(long, value_name = "X")]
    clamp: Option<f32>,
    /// Scale from this percentile of magnitudes instead of the largest (50 < P <= 100; method rtn)
    #[arg(long, value_name = "P")]
    percentile: Option<f32>,
    /// How scales and codes are chosen [default: search, rtn for 8 bit; with --calib the best for each tensor]
    #[arg(long, value_enum)]
    method: Option<MethodName>,
    /// Statistics of the model's inputs from `iec calib`: each tensor gets the method that is best for its outputs, fitted on one
    /// half of the calibration windows and judged on the other; the result is then made with both
    #[arg(long, value_name = "STATS")]
    calib: Option<PathBuf>,
    /// Quantize only the matrices whose name matches this regular expression; repeatable
    #[arg(long, value_name = "RE")]
    include: Vec<String>,
    /// Leave tensors alone whose name matches this regular expression; repeatable
    #[arg(long, value_name = "RE")]
    exclude: Vec<String>,
    /// Take scheme and selection per tensor from this manifest
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
    /// Quantize the output matrix, too
    #[arg(long)]
    include_lm_head: bool,
    /// Refuse (exit 4) below a mean row cosine `cosine=X` or a worst row `cosine-min=Y` [default: 0.995 and 0.98];
    /// above `kl=NATS` of mean divergence or `ppl=+X%` of perplexity; below `top1=X%` equal first choices
    #[arg(long, value_name = "NAME=VALUE")]
    gate: Vec<String>,
    #[command(flatten)]
    budget: BudgetArgs,
    #[command(flatten)]
    answers: AnswerArgs,
    /// Keep tensors the gate refuses in this type instead of refusing the model; what int6 does not help becomes int8
    #[arg(long, value_enum)]
    keep_failing: Option<KeepName>,
    /// Write the manifest even when the gate refuses; it is marked as refused
    #[arg(long)]
    force: bool,
    /// Quantize weights only; activations are quantized as the runtime goes, so 1 is the only value
    #[arg(long, value_name = "1", default_value = "1", action = ArgAction::Set)]
    weights_only: u8,
    /// Print what would be quantized, and how; measure and write nothing. A budget has to be measured all the same; its measurements are
    /// kept beside --out for the next run
    #[arg(long, conflicts_with = "fresh")]
    dry_run: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    keeping: Keeping,
    /// Print the summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
}

fn schemes() -> impl TypedValueParser<Value = Scheme> {
    PossibleValuesParser::new(Scheme::offered().map(Scheme::name)).try_map(|name| name.parse::<Scheme>())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum MethodName {
    /// Round to nearest with the plain scale
    Rtn,
    /// The scale with the least squared error
    Search,
    /// The same, errors weighed with the mean squares of the inputs (needs --calib)
    Imatrix,
    /// Codes that make up for the errors of others (needs --calib from `iec calib --hessian`)
    Gptq,
    /// The codes that the weights already are; found whatever method is asked for, this one refuses other weights
    Lattice,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum KeepName {
    Fp16,
    Bf16,
    Int6,
    Int8,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let target = args.budget.target()?;
    args.report.check(&args.out)?;
    let selection = Selection::new(args.wishes()?, args.rules.as_deref())?;
    // Who gives a budget has said how far tensors may go; they are judged only by what was asked for.
    let mut gate =
        if target.is_some() { Gate { cosine: 0.0, cosine_min: 0.0, ..Gate::default() } } else { Gate::default() };
    for option in &args.gate {
        gate.set(option)?;
    }
    let on_failure = match args.keep_failing {
        None => OnFailure::Refuse,
        Some(KeepName::Fp16) => OnFailure::Keep(Keep::Fp16),
        Some(KeepName::Bf16) => OnFailure::Keep(Keep::Bf16),
        Some(KeepName::Int6) => OnFailure::Quantize(Scheme::Int6),
        Some(KeepName::Int8) => OnFailure::Quantize(Scheme::Int8),
    };
    let calibration = args.calib.as_deref().map(Calibration::open).transpose()?;
    let asked = args.answers.asked(&gate, args.model_dir.is_some(), calibration.as_ref())?;
    let weights = match &args.model_dir {
        Some(dir) => Weights::open_pack(dir).map_err(Error::while_opening_model)?,
        None => Weights::open_checkpoint(&args.source.required()?, args.source.config.as_deref())?,
    };
    let run = Run { args: &args, global, weights: &weights, calibration: calibration.as_ref(), packs: OnceCell::new() };
    let Some(target) = target else {
        if args.dry_run {
            if args.calib.is_some() && args.method.is_none() {
                global.note("note: with --calib each tensor's method is chosen when it is measured; this shows what else it would have");
            }
            return outlook::print(&ptq::outlook(&weights, &selection)?, &args.out, args.json);
        }
        args.report.check_tensor(&ptq::tensors(&weights, &selection)?)?;
        let measured = run.measure(&selection, &Judgement { gate, on_failure })?;
        return run.finish(measured, &gate, on_failure, asked);
    };
    if args.keep_failing.is_some() && !args.answers.has_limit() {
        return Err(Error::usage("--keep-failing with a budget, which is spent already")
            .help("say with --max-bpw how far repairs may go beyond it"));
    }
    run.with_budget(target, selection, &gate, on_failure, asked)
}

/// What one run works with.
struct Run<'a> {
    args: &'a Args,
    global: &'a Global,
    weights: &'a Weights,
    calibration: Option<&'a Calibration>,
    packs: OnceCell<Packs>,
}

impl Run<'_> {
    /// Plans, measures what was planned, and finishes.
    fn with_budget(
        &self,
        target: Target,
        selection: Selection,
        gate: &Gate,
        on_failure: OnFailure,
        asked: bool,
    ) -> Result<()> {
        let &Run { args, global, weights, calibration, .. } = self;
        let question = args.budget.question(&args.source, calibration, &args.answers, global)?;
        budget::tell_yardstick(question.as_ref(), calibration.is_some(), global);
        let packs = || self.packs();
        let planner =
            Planner { weights, selection: &selection, calibration, target, question, packs: &packs, out: &args.out };
        let job = planner.job(&args.keeping.options())?;
        let planned = match planner.plan(&job) {
            Ok(planned) => planned,
            Err(e) => return job.conclude(Err(e)),
        };
        if args.dry_run {
            if args.json {
                println!("{}", json!(planned.record));
            } else {
                print!("{}", budget::table(&planned.record));
                println!(
                    "\nplan: {}; nothing was written but measurements for the next run",
                    budget::in_words(&planned.record)
                );
            }
            return Ok(());
        }
        let chosen = Selection::new(args.wishes()?, None)?.planned(planned.decisions.clone());
        args.report.check_tensor(&ptq::tensors(weights, &chosen)?)?;
        let measured = self.measure(&chosen, &Judgement { gate: *gate, on_failure: OnFailure::Refuse });
        let measured = measured.and_then(|mut measured| {
            let plan = planner.conclude(planned, &mut measured.document)?;
            global.note(format_args!("plan: {}", budget::in_words(&plan)));
            Ok(measured)
        });
        self.finish(job.conclude(measured)?, gate, on_failure, asked)
    }

    fn measure(&self, selection: &Selection, judgement: &Judgement) -> Result<Measured> {
        ptq::measure_for(
            &self.args.out,
            self.weights,
            selection,
            judgement,
            self.calibration,
            &self.args.keeping.options(),
        )
    }

    /// The float model and a quantized one beside the output, packed when somebody first wants them.
    fn packs(&self) -> Result<&Packs> {
        if let Some(packs) = self.packs.get() {
            return Ok(packs);
        }
        let packs = Packs::begin(directory_of(&self.args.out), self.args.origin()?)?;
        Ok(self.packs.get_or_init(|| packs))
    }

    /// Lets the gate judge the whole model, tells what came out, and writes the manifest.
    fn finish(&self, mut measured: Measured, gate: &Gate, on_failure: OnFailure, asked: bool) -> Result<()> {
        let &Run { args, global, weights, calibration, .. } = self;
        let refused = measured.document.refused;
        // What the gate refuses is not packed, unless by force.
        let runs = args.model_dir.is_none() && (!refused || args.force) && (asked || args.report.report.is_some());
        let packs = runs.then(|| self.packs()).transpose()?;
        let mut blame = Vec::new();
        match packs {
            Some(packs) if asked => {
                let promote = |tensor: &Tensor, entry: &TensorEntry| {
                    judge::promote(weights, calibration, tensor, entry, on_failure)
                };
                blame = args.answers.judge(packs, global.threads()?, &mut measured, gate, &promote)?;
            }
            Some(packs) => drop(packs.quantize(&measured.document)?),
            None => (),
        }
        if let Some(path) = &args.report.report {
            let (title, threads) = (args.model_name()?, global.threads()?);
            let report = Report { title, weights, calibration, measured: &measured, blame: &blame, packs, threads };
            write_atomically(path, args.report.page(&report)?.as_bytes())?;
            global.note(format_args!("report: {}", path.display()));
        }
        global.note(summary::table(&measured)?.to_string().trim_end());
        if let Some(evidence) = &measured.document.evidence {
            answers::tell(evidence, global);
        }
        if args.include_lm_head && !measured.tensors.iter().any(|t| t.role == Role::LmHead) {
            global.note("note: no lm_head to include: the model ties it to the embedding, or it is excluded");
        }
        if !args.force && refused {
            return Err(refusal(&measured));
        }
        if let Some(evidence) = measured.document.evidence.as_ref().filter(|e| !args.force && !e.objections.is_empty())
        {
            return Err(answers::refusal(evidence, &blame));
        }
        write_atomically(&args.out, &measured.document.to_json())?;
        global.note(format_args!("wrote {}", args.out.display()));
        if args.json {
            println!("{}", summary::json(&measured, &args.out, &blame)?);
        }
        Ok(())
    }
}

impl Args {
    /// The last part of the model's path.
    fn model_name(&self) -> Result<String> {
        let path = self.model_dir.clone().map_or_else(|| self.source.required(), Ok)?;
        let path = path.canonicalize().unwrap_or(path);
        Ok(path.file_name().unwrap_or_default().to_string_lossy().into_owned())
    }

    /// What the float model and the quantized one are packed from.
    fn origin(&self) -> Result<Origin> {
        let (config, calibration) = (self.source.config.clone(), self.calib.clone());
        Ok(Origin { hf_dir: self.source.required()?, config, calibration })
    }

    fn wishes(&self) -> Result<Wishes> {
        if self.weights_only != 1 {
            return Err(Error::usage("--weights-only 0: activations are never stored quantized")
                .help("the runtime rounds activations as it goes; choose --precision int4 there"));
        }
        if self.bits.is_some_and(|bits| Scheme::of_bits(bits).is_none()) {
            return Err(Error::usage("--bits: expected 4, 5, 6 or 8"));
        }
        let fields = QuantFields {
            scheme: self.scheme,
            bits: self.bits,
            group_size: self.group_size,
            symmetric: if self.affine { Some(false) } else { self.symmetric.then_some(true) },
            scale_dtype: None,
            method: self.method.map(|m| match m {
                MethodName::Rtn => Method::Rtn,
                MethodName::Search => Method::Search,
                MethodName::Imatrix => Method::Imatrix,
                MethodName::Gptq => Method::Gptq,
                MethodName::Lattice => Method::Lattice,
            }),
            clamp: self.clamp,
            percentile: self.percentile,
        };
        if let Some(method) = fields.method.filter(|method| method.needs_inputs() && self.calib.is_none()) {
            return Err(Error::usage(format!("--method {} without --calib", method.name()))
                .help("make statistics of the model's inputs with `iec calib` and name them"));
        }
        Ok(Wishes {
            fields,
            include: self.include.clone(),
            exclude: self.exclude.clone(),
            include_lm_head: self.include_lm_head,
        })
    }
}

/// Where a file is.
fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn refusal(measured: &Measured) -> Error {
    let refused = || measured.tensors.iter().filter(|t| measured.verdict(t) == Some(Verdict::Refused));
    let worst = refused().min_by(|a, b| measured.cosine(a).total_cmp(&measured.cosine(b)));
    let place = worst.map_or(String::new(), |t| {
        format!("; worst: {}, {}", t.name, measured.document.tensors[&t.name].reasons.join(", "))
    });
    Error::refused(format!("the gate refuses {} of {} tensors{place}", refused().count(), measured.tensors.len()))
        .help("try --keep-failing int6 or int8, a smaller --group-size, or --force to write the manifest all the same")
}
