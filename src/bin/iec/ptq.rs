//! `iec ptq`: the options of a quantization, its dry run, and its summary.

use crate::console;
use crate::dry_run;
use crate::global::Global;
use crate::job::Keeping;
use crate::names::{Named, named};
use crate::source::SourceArgs;
use clap::ArgAction;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use iec::convert::quantize::judge::OnFailure;
use iec::convert::quantize::select::SelectionOptions;
use iec::error::{Error, Result};
use iec::iebin;
use iec::manifest::Keep;
use iec::manifest::plan::Target;
use iec::output::{self, Inputs, Rules};
use iec::provenance::Gate;
use iec::quant_spec::{Method, QuantFields};
use iec::report::{plan, quantization};
use iec::role::Role;
use iec::scheme::{Granularity, Scheme};
use iec::session::prompts;
use iec::trial::ptq::{Budget, Ptq, PtqOptions, Quantized, TextWindows};
use iec::units::parse_size;
use serde_json::json;
use std::path::PathBuf;

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
    /// The manifest to write; with --report's page the only file written; `-` is stdout
    #[arg(long, value_name = "MANIFEST")]
    out: PathBuf,
    /// Replace a manifest and a page that are already there
    #[arg(long)]
    overwrite: bool,
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
    #[arg(long, value_parser = named(METHODS))]
    method: Option<Method>,
    /// Statistics of the model's inputs from `iec calib`: each tensor gets the method that is best for its outputs,
    /// fitted on one half of the calibration windows and judged on the other; the result is then made with both
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
    answers: AnswerArgs,
    /// Keep tensors the gate refuses in this type instead of refusing the model; what int6 does not help becomes int8
    #[arg(long, value_parser = named(ON_FAILURE))]
    keep_failing: Option<OnFailure>,
    /// Write the manifest even when the gate refuses; it is marked as refused
    #[arg(long)]
    force: bool,
    /// Quantize weights only; activations are quantized as the runtime goes, so 1 is the only value
    #[arg(long, value_name = "1", default_value = "1", action = ArgAction::Set)]
    weights_only: u8,
    /// Print what would be quantized, and how; measure and write nothing. A budget has to be measured all the same; its
    /// measurements are kept beside --out for the next run
    #[arg(long, conflicts_with = "fresh")]
    dry_run: bool,
    #[command(flatten)]
    report: ReportArgs,
    /// Print the summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    budget: BudgetArgs,
    #[command(flatten)]
    keeping: Keeping,
}

/// Options of the page.
#[derive(Debug, clap::Args)]
struct ReportArgs {
    /// Write a page for a browser: errors by layer, sizes, what the gate said, the weights of a tensor before and
    /// after, and, with --hf-dir, texts of both models; also when the gate refuses
    #[arg(long, value_name = "FILE.html", conflicts_with = "dry_run")]
    report: Option<PathBuf>,
    /// The tensor whose weights the page shows [default: the one with the largest error]
    #[arg(long, value_name = "NAME", requires = "report")]
    report_tensor: Option<String>,
}

/// Options of a gate on answers.
#[derive(Debug, clap::Args)]
struct AnswerArgs {
    /// Text that the float model and the quantized one read for the gates kl, ppl and top1; calibration must not have
    /// seen it
    #[arg(long, value_name = "FILE")]
    gate_text: Option<PathBuf>,
    /// Read at most N windows of 512 tokens of it [default: all of it]
    #[arg(long, value_name = "N", requires = "gate_text", value_parser = clap::value_parser!(u32).range(1..))]
    gate_windows: Option<u32>,
    /// Most bits per weight that repairs (--keep-failing) may bring the model to [default: no limit]
    #[arg(long, value_name = "X", requires_all = ["gate_text", "keep_failing"])]
    max_bpw: Option<f64>,
}

/// Options that decide what a tensor is stored as, which a budget does instead.
const OTHERS: [&str; 10] = [
    "bits",
    "scheme",
    "group_size",
    "symmetric",
    "affine",
    "clamp",
    "percentile",
    "method",
    "rules",
    "include_lm_head",
];

/// Options of a plan under a budget.
#[derive(Debug, clap::Args)]
struct BudgetArgs {
    /// Choose the scheme of every matrix so that the whole pack has at most X bits per weight and is as near to the
    /// float model as possible. Everything counts: embeddings, the output matrix, and what stays float
    #[arg(help_heading = "Mixed precision under a budget", long, value_name = "X", conflicts_with_all = OTHERS)]
    target_bpw: Option<f64>,
    /// The same for the bytes of the whole pack (its model.ie.bin)
    #[arg(help_heading = "Mixed precision under a budget", long, value_name = "SIZE", value_parser = parse_size, conflicts_with_all = OTHERS, conflicts_with = "target_bpw")]
    target_size: Option<u64>,
    /// Text on which each tensor, quantized alone, is measured. What calibration or the gate has read of the same file
    /// is passed over. Without it, errors of outputs (with --calib) or of weights decide
    #[arg(help_heading = "Mixed precision under a budget", long, value_name = "FILE")]
    plan_text: Option<PathBuf>,
    /// Read at most N windows of 512 tokens of it, once for each tensor
    #[arg(help_heading = "Mixed precision under a budget", long, value_name = "N", requires = "plan_text", default_value_t = iec::trial::WINDOWS as u32, value_parser = clap::value_parser!(u32).range(1..))]
    plan_windows: u32,
}

fn schemes() -> impl TypedValueParser<Value = Scheme> {
    let shown = |scheme: Scheme| {
        let ggml = (scheme == Scheme::Nl4).then_some("iq4_nl");
        PossibleValue::new(scheme.name()).aliases(ggml)
    };
    let named = |name: String| if name == "iq4_nl" { Ok(Scheme::Nl4) } else { name.parse::<Scheme>() };
    PossibleValuesParser::new(Scheme::offered().map(shown)).try_map(named)
}

/// The values of --method.
const METHODS: &[Named<Method>] = &[
    (Method::Rtn, &["rtn"], "Round to nearest with the plain scale"),
    (Method::Search, &["search"], "The scale with the least squared error"),
    (Method::Imatrix, &["imatrix"], "The same, errors weighed with the mean squares of the inputs (needs --calib)"),
    (Method::Gptq, &["gptq"], "Codes that make up for the errors of others (needs --calib from `iec calib --hessian`)"),
    (
        Method::Exact,
        &["exact", "lattice"],
        "The codes that the weights already are; found whatever method is asked for, this one refuses other weights",
    ),
];

/// The values of --keep-failing.
const ON_FAILURE: &[Named<OnFailure>] = &[
    (OnFailure::Keep(Keep::Fp16), &["fp16", "f16"], ""),
    (OnFailure::Keep(Keep::Bf16), &["bf16"], ""),
    (OnFailure::Quantize(Scheme::Int6), &["int6"], ""),
    (OnFailure::Quantize(Scheme::Int8), &["int8"], ""),
];

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let inputs = args.inputs()?;
    // A dry run writes neither.
    let rules = Rules { inputs: &inputs, overwrite: args.overwrite || args.dry_run, stdout: !args.json };
    let out = output::Target::check(&args.out, rules)?;
    let page_rules = Rules { stdout: false, ..rules };
    let page = args.report.report.as_deref().map(|page| output::Target::check(page, page_rules)).transpose()?;
    if let Some(page) = page.as_ref().filter(|page| page.is_same(&out)) {
        return Err(Error::usage("--report and --out name the same file").at(page.path()));
    }
    let options = PtqOptions { out: out.work_path(), ..args.options(global)? };
    let (budgeted, calibrated) = (options.budget.clone(), options.calibration.is_some());
    let ptq = Ptq::open(options)?;
    if let Some(Budget { text: None, .. }) = budgeted {
        let errors = if calibrated { "the errors of outputs" } else { "the errors of weights" };
        global.note(format_args!(
            "note: without --plan-text {errors} decide, as if the model minded them alike in all its tensors but the \
             output matrix, where they count {} times",
            iec::trial::budget::HEAD_COUNTS
        ));
    }
    match (args.dry_run, &budgeted) {
        (false, _) => finish(&args, &out, page.as_ref(), &ptq.quantize()?, global),
        (true, Some(budget)) => {
            let found = ptq.plan(budget)?;
            if args.json {
                return console::print_json(&json!(found));
            }
            let (table, text) = (plan::table(&found), plan::describe(&found));
            let end = "nothing was written but measurements for the next run";
            console::print_line(format_args!("{table}\nplan: {text}; {end}"))
        }
        (true, None) => {
            if calibrated && args.method.is_none() {
                global.note("note: with --calib each tensor's method is chosen when it is measured; this shows what else it would have");
            }
            dry_run::print(&ptq.dry_run()?, &out.work_path(), args.json)
        }
    }
}

/// Writes the page and the manifest, and prints the summary.
fn finish(
    args: &Args,
    out: &output::Target,
    page: Option<&output::Target>,
    quantized: &Quantized<'_>,
    global: &Global,
) -> Result<()> {
    let measured = &quantized.measured;
    if let Some(found) = &measured.document.plan {
        global.note(format_args!("plan: {}", plan::describe(found)));
    }
    if let Some(page) = page {
        page.write(quantization::page(quantized, &prompts::built_in())?.as_bytes())?;
        global.note(format_args!("report: {}", page.path().display()));
    }
    global.note(quantization::table(measured)?.to_string().trim_end());
    if let Some(evidence) = &measured.document.evidence {
        global.note(quantization::answers(evidence).to_string().trim_end());
        for promotion in &evidence.promoted {
            global.note(format_args!("{}: {} instead of {}", promotion.tensor, promotion.to, promotion.from));
        }
    }
    if args.include_lm_head && !measured.tensors.iter().any(|t| t.role == Role::LmHead) {
        global.note("note: no lm_head to include: the model ties it to the embedding, or it is excluded");
    }
    quantized.write()?;
    out.deliver()?;
    global.note(format_args!("wrote {}", args.out.display()));
    if args.json {
        console::print_json(&quantization::json(measured, &args.out, &quantized.blame)?)?;
    }
    Ok(())
}

impl BudgetArgs {
    /// The budget, if there is one.
    ///
    /// # Errors
    /// It is no amount of bits, or options need a budget that is not given.
    fn budget(&self) -> Result<Option<Budget>> {
        let target = match (self.target_bpw, self.target_size) {
            (Some(bits), _) if !(bits > 0.0 && bits <= 64.0) => {
                return Err(Error::usage(format!("--target-bpw {bits}; expected bits per weight, like 4.5")));
            }
            (Some(bits), _) => Target::BitsPerWeight(bits),
            (None, Some(bytes)) => Target::Bytes(bytes),
            (None, None) if self.plan_text.is_some() => {
                return Err(Error::usage("--plan-text without a budget").help("add --target-bpw or --target-size"));
            }
            (None, None) => return Ok(None),
        };
        Ok(Some(Budget { target, text: text_windows(&self.plan_text, Some(self.plan_windows)) }))
    }
}

fn text_windows(text: &Option<PathBuf>, windows: Option<u32>) -> Option<TextWindows> {
    text.clone().map(|text| TextWindows { text, windows: windows.map(|n| n as usize) })
}

impl Args {
    /// What is read, and so is not written over.
    fn inputs(&self) -> Result<Inputs> {
        let files = [&self.rules, &self.calib, &self.answers.gate_text, &self.budget.plan_text, &self.source.config];
        let inputs = Inputs::default().files(files.into_iter().flatten()).packs(&self.model_dir, &iebin::members());
        Ok(inputs.checkpoints(self.source.path()?))
    }

    fn options(&self, global: &Global) -> Result<PtqOptions> {
        let budget = self.budget.budget()?;
        // A budget already says how far tensors may go; they are judged only by gates that the user names.
        let mut gate = match budget {
            Some(_) => Gate { cosine: 0.0, cosine_min: 0.0, ..Gate::default() },
            None => Gate::default(),
        };
        self.gate.iter().try_for_each(|option| gate.set(option))?;
        Ok(PtqOptions {
            model: self.source.model(self.model_dir.as_ref())?,
            out: self.out.clone(),
            selection: self.selection()?,
            rules: self.rules.clone(),
            calibration: self.calib.clone(),
            gate,
            gate_text: text_windows(&self.answers.gate_text, self.answers.gate_windows),
            on_failure: self.keep_failing.unwrap_or(OnFailure::Refuse),
            max_bits: self.answers.max_bpw,
            budget,
            force: self.force,
            pack: self.report.report.is_some(),
            shown_tensor: self.report.report_tensor.clone(),
            threads: global.threads(),
            run: self.keeping.options(),
        })
    }

    fn selection(&self) -> Result<SelectionOptions> {
        if self.weights_only != 1 {
            return Err(Error::usage("--weights-only 0: activations are never stored quantized")
                .help("the runtime rounds activations as it goes; choose --precision int4 there"));
        }
        let fields = QuantFields {
            scheme: self.scheme,
            bits: self.bits,
            group_size: self.group_size,
            symmetric: if self.affine { Some(false) } else { self.symmetric.then_some(true) },
            scale_dtype: None,
            method: self.method,
            clamp: self.clamp,
            percentile: self.percentile,
        };
        if let Some(method) = fields.method.filter(|method| method.needs_inputs() && self.calib.is_none()) {
            return Err(Error::usage(format!("--method {} without --calib", method.name()))
                .help("make statistics of the model's inputs with `iec calib` and name them"));
        }
        Ok(SelectionOptions {
            fields,
            include: self.include.clone(),
            exclude: self.exclude.clone(),
            include_lm_head: self.include_lm_head,
        })
    }
}
