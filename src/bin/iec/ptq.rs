//! `iec ptq`: the options of a quantization, its dry run, and its summary.

use crate::console;
use crate::dry_run;
use crate::global::Global;
use crate::job::Keeping;
use crate::names::{Named, named, offering};
use crate::source::SourceArgs;
use clap::ArgAction;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use iec::convert::quantize::judge::OnFailure;
use iec::convert::quantize::select::{OuterStorage, SelectionOptions};
use iec::error::{Error, Result};
use iec::job::remove_over;
use iec::manifest::Keep;
use iec::manifest::plan::AskedTargets;
use iec::output::{Inputs, Rules, Together, directory_of};
use iec::provenance::Gate;
use iec::quant_spec::{Method, QuantFields};
use iec::report::{plan, quantization};
use iec::scheme::{Granularity, ScaleType, Scheme};
use iec::session::prompts;
use iec::trial::ptq::{Budget, Ptq, PtqOptions, Quantized, TextWindows};
use iec::units::parse_size;
use serde_json::json;
use std::path::PathBuf;

/// Arguments of `iec ptq`.
#[derive(Debug, clap::Args)]
#[command(override_usage = "iec ptq [OPTIONS] <MODEL> --out <MANIFEST>")]
#[command(group = clap::ArgGroup::new("source").required(true).args(["checkpoint", "hf_dir", "hf_repo", "model_dir"]))]
#[command(after_help = "Examples:
  iec ptq models/tinyllama --out q4_manifest.json --bits 4
  iec ptq models/tinyllama --out q4_manifest.json --bits 4 --group-size 128 --keep-failing int8
  iec ptq models/tinyllama --out q4_manifest.json --bits 4 --calib tinyllama.calib
  iec ptq models/tinyllama --out manifest.json --target-speed 30 --plan-text text.txt --dry-run --report curve.html
  iec ptq models/tinyllama --out manifest.json --bits 4 --gate kl=0.02 --gate-text heldout.txt --keep-failing int8
  iec ptq models/tinyllama --out manifest.json --bits 4 --gate task=arc_easy.jsonl:-0.5% --gate task=gsm8k.jsonl:-1%
  iec ptq models/tinyllama --out manifest.json --target-bpw 4.6 --calib tinyllama.calib --plan-text heldout.txt
  iec ptq models/tinyllama --out q4_manifest.json --target-size 600M --dry-run
  iec ptq models/gpt-oss-20b --out q4_manifest.json --rules manifests/gpt-oss-20b.json --json
  iec ptq model.gguf --out q4_manifest.json --bits 4

Defaults: --bits 4 is q4_0 with searched scales, --bits 5 and 6 are int5 and int6 with a scale per 32 weights, --bits
8 is int8 with a scale per row, --bits 2 and 3 are the trellises t2 and t3 with a scale per 128 weights. Without
--include and --rules the matrices of attention, MLP and experts are quantized in this way, the embedding and the output
matrix in int8 with a scale per 32 weights; with 4 bits or fewer, the output projections of gated delta nets and Mamba-2
in int6. Of a GGUF file, a pack, or MXFP4 experts, tensors of codes with no
more bits than that stay as they are; those of more bits are quantized a second time. A gate on outputs (kl, ppl,
top1, task) packs the model as it is and the quantized one into temporary directories next to --out and compares them.
With --keep-failing the tensors with the largest effect get more bits until the gate passes; their effects are measured
on --gate-text. The files of task gates are those of `iec eval --suite`, without HumanEval.")]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// A pack to measure, as an option instead of the first argument
    #[arg(long, value_name = "DIR")]
    model_dir: Option<PathBuf>,
    /// Manifest to write; `-` is stdout
    #[arg(long, value_name = "MANIFEST")]
    out: PathBuf,
    /// Replace the manifest and the page if they are there
    #[arg(long)]
    overwrite: bool,
    /// Bits of each stored code; sets the scheme if --scheme is missing
    #[arg(long, value_name = "2|3|4|5|6|8", hide_possible_values = true)]
    #[arg(value_parser = offering(&["2", "3", "4", "5", "6", "8"], clap::value_parser!(u32)))]
    bits: Option<u32>,
    /// Quantization scheme: meaning of a stored code
    #[arg(long, value_parser = schemes(), ignore_case = true)]
    scheme: Option<NamedScheme>,
    /// Weights that share a scale: 32, 64, 128, 256, row or tensor [default: 32, 128 for t2 and t3, row for 8 bit]
    #[arg(long, value_name = "N|row|tensor", hide_possible_values = true)]
    #[arg(value_parser = offering(&["32", "64", "128", "256", "row", "tensor"], str::parse::<Granularity>))]
    group_size: Option<Granularity>,
    /// Storage of scales: f16, f32, or i8_row, a signed byte that the f32 number of its row multiplies: a quarter of a
    /// bit per weight less than f16 at the same quality, for symmetric groups of 32 of nl4, int4, int5 and int6
    /// [default: f16, i8_row for t2 and t3]
    #[arg(long, value_parser = named(SCALES))]
    scale_type: Option<ScaleType>,
    /// Codes are symmetric around zero, without a zero point (the default)
    #[arg(long, conflicts_with = "affine")]
    symmetric: bool,
    /// Each group has a zero point; int4 only
    #[arg(long)]
    affine: bool,
    /// Clip weights to this magnitude first
    #[arg(long, value_name = "X")]
    clamp: Option<f32>,
    /// Compute scales from this percentile of magnitudes instead of the largest (50 < P <= 100; method rtn)
    #[arg(long, value_name = "P")]
    percentile: Option<f32>,
    /// Method that chooses scales and codes [default: search, rtn for 8 bit; with --calib the best for each tensor]
    #[arg(long, value_parser = named(METHODS))]
    method: Option<Method>,
    /// Statistics of activations from `iec calib`: each tensor gets the method with the smallest error of its outputs.
    /// Methods are fitted on one half of the calibration windows and compared on the other; the final fit uses both
    #[arg(long, value_name = "STATS")]
    calib: Option<PathBuf>,
    /// Quantize only the matrices whose name matches this regular expression; repeatable
    #[arg(long, value_name = "RE")]
    include: Vec<String>,
    /// Do not quantize tensors whose name matches this regular expression; repeatable
    #[arg(long, value_name = "RE")]
    exclude: Vec<String>,
    /// Take the selection and the scheme of each tensor from this manifest
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
    /// Quantize the output matrix like the matrices of the layers. Has no effect on an output matrix that is the
    /// embedding
    #[arg(long)]
    include_lm_head: bool,
    /// Do not quantize this matrix, whatever --rules say; repeatable
    #[arg(long, value_name = "MATRIX", value_parser = named(OUTER))]
    keep: Vec<Outer>,
    /// Limit that the quantized model must meet (exit code 4 if not); repeatable. Of each matrix, `cosine=X`: the mean
    /// cosine of its rows is at least X [default: 0.995, in 3 bits 0.98, in 2 bits 0.935]; `cosine-min=Y`: the cosine
    /// of every row is at least Y [default: 0.98, 0.92 and 0.75]. Of the outputs, largest mean KL divergence `kl=NATS`,
    /// largest increase of perplexity `ppl=+X%`, least agreement of the most likely token `top1=X%`, and
    /// `task=FILE:-X%`: the accuracy on a file of questions is at most X percentage points below that of the float
    /// model
    #[arg(long, value_name = "NAME=VALUE")]
    gate: Vec<String>,
    #[command(flatten)]
    answers: AnswerArgs,
    /// Store tensors that fail the gate in this type instead of refusing the model; tensors that fail as int6, too,
    /// become int8
    #[arg(long, value_name = "TYPE", value_parser = named(ON_FAILURE))]
    keep_failing: Option<OnFailure>,
    /// Write the manifest even if the gate refuses it; it is marked as refused
    #[arg(long)]
    force: bool,
    /// Quantize weights only; 1 is the only value, because the runtime quantizes activations on the fly
    #[arg(long, value_name = "1", default_value = "1", action = ArgAction::Set)]
    weights_only: u8,
    /// Print which tensors would be quantized, and how; write no manifest. Nothing is measured, except with a budget:
    /// then the measurements are kept next to --out for the next run
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

/// A matrix before or behind the layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Outer {
    Embedding,
    LmHead,
}

/// The values of --keep.
pub const OUTER: &[Named<Outer>] = &[
    (Outer::Embedding, &["embedding"], ""),
    (Outer::LmHead, &["lm_head", "lm-head", "output"], "The output matrix; also keeps an embedding in its place"),
];

impl Outer {
    /// Returns the storage of this matrix if the matrices `kept` are not to be quantized.
    pub fn storage(self, kept: &[Outer]) -> OuterStorage {
        if kept.contains(&self) { OuterStorage::Kept } else { OuterStorage::Chosen }
    }
}

/// Options of the page.
#[derive(Debug, clap::Args)]
struct ReportArgs {
    /// Write an HTML page: errors by layer, sizes, the results of the gate, the weights of a tensor before and after
    /// quantization, and texts of the model before and after quantization; also written if the gate refuses. With
    /// --dry-run and a budget, the page shows the best packs of all sizes: divergence and speed over bits
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Tensor whose weights the page shows [default: the one with the largest error]
    #[arg(long, value_name = "NAME", requires = "report")]
    report_tensor: Option<String>,
}

/// Options of a gate on outputs.
#[derive(Debug, clap::Args)]
struct AnswerArgs {
    /// Text on which the gates kl, ppl and top1 compare the float model and the quantized one; it must not be part of
    /// the calibration text
    #[arg(long, value_name = "FILE")]
    gate_text: Option<PathBuf>,
    /// Read at most N windows of 512 tokens of --gate-text [default: all of it]
    #[arg(long, value_name = "N", requires = "gate_text", value_parser = clap::value_parser!(u32).range(1..))]
    gate_windows: Option<u32>,
    /// Largest number of bits per weight of the model after --keep-failing [default: no limit]
    #[arg(long, value_name = "X", requires_all = ["gate_text", "keep_failing"])]
    max_bpw: Option<f64>,
}

/// Options that choose the format of tensors. They conflict with a budget, which chooses the formats itself.
const OTHERS: [&str; 11] = [
    "bits",
    "scheme",
    "group_size",
    "scale_type",
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
    /// Choose the scheme of every matrix so that the whole pack has at most X bits per weight and the smallest measured
    /// error. All tensors count: embeddings, the output matrix, and floats
    #[arg(help_heading = "Mixed precision under a budget", long, value_name = "X", conflicts_with_all = OTHERS)]
    target_bpw: Option<f64>,
    /// Like --target-bpw, with the largest number of bytes of model.ie.bin
    #[arg(
        help_heading = "Mixed precision under a budget",
        long,
        value_name = "SIZE",
        value_parser = parse_size,
        conflicts_with_all = OTHERS,
        conflicts_with = "target_bpw"
    )]
    target_size: Option<u64>,
    /// Choose the smallest pack whose expected KL divergence from the model before quantization is at most X nats per
    /// token on --plan-text: the sum of the divergences of its tensors, each quantized alone. The divergence of the
    /// whole pack is measured last, and both are printed
    #[arg(
        help_heading = "Mixed precision under a budget",
        long,
        value_name = "X",
        requires = "plan_text",
        conflicts_with_all = OTHERS,
        conflicts_with_all = ["target_bpw", "target_size"]
    )]
    target_kl: Option<f64>,
    /// Choose the pack with the smallest measured error that decodes at least X tokens per second on this machine, by
    /// the measured speed of the products with each storage. Attention over long texts comes on top
    #[arg(
        help_heading = "Mixed precision under a budget",
        long,
        value_name = "X",
        conflicts_with_all = OTHERS,
        conflicts_with_all = ["target_bpw", "target_size", "target_kl"]
    )]
    target_speed: Option<f64>,
    /// Predict speeds for a machine that reads X GB/s from memory instead of timing the products on this one
    #[arg(help_heading = "Mixed precision under a budget", long, value_name = "X")]
    bandwidth: Option<f64>,
    /// Text on which the model is measured with each tensor quantized alone. Parts of the same file that calibration or
    /// the gate reads are skipped. Without it, errors of outputs (with --calib) or of weights decide
    #[arg(help_heading = "Mixed precision under a budget", long, value_name = "FILE")]
    plan_text: Option<PathBuf>,
    /// Read at most N windows of 512 tokens of --plan-text, once for each tensor
    #[arg(
        help_heading = "Mixed precision under a budget",
        long,
        value_name = "N",
        requires = "plan_text",
        default_value_t = iec::trial::WINDOWS as u32,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    plan_windows: u32,
}

/// A scheme, and the group size that its name implies, if it does.
type NamedScheme = (Scheme, Option<Granularity>);

/// GGML's names of types that schemes have under another name.
const GGML_NAMES: [(&str, NamedScheme); 2] =
    [("iq4_nl", (Scheme::Nl4, None)), ("q8_0", (Scheme::Int8, Some(Granularity::Group(32))))];

fn schemes() -> impl TypedValueParser<Value = NamedScheme> {
    let shown = |scheme: Scheme| {
        let ggml = GGML_NAMES.iter().filter(move |(_, (other, _))| *other == scheme).map(|(name, _)| *name);
        PossibleValue::new(scheme.name()).aliases(ggml)
    };
    let named = |name: String| match GGML_NAMES.iter().find(|(ggml, _)| name.eq_ignore_ascii_case(ggml)) {
        Some((_, named)) => Ok(*named),
        None => name.to_ascii_lowercase().parse::<Scheme>().map(|scheme| (scheme, None)),
    };
    PossibleValuesParser::new(Scheme::offered().map(shown)).try_map(named)
}

/// The values of --scale-type.
const SCALES: &[Named<ScaleType>] = &[
    (ScaleType::F16, &["f16"], "Half precision"),
    (ScaleType::F32, &["f32"], "Single precision"),
    (ScaleType::I8Row, &["i8_row"], "A byte per group and an f32 number per row"),
];

/// The values of --method.
const METHODS: &[Named<Method>] = &[
    (Method::Rtn, &["rtn"], "Round to nearest with the scale of the largest magnitude"),
    (Method::Search, &["search"], "Search for the scale with the least squared error"),
    (
        Method::Imatrix,
        &["imatrix"],
        "As search, with errors weighted by the mean squares of the inputs (needs --calib)",
    ),
    (
        Method::Gptq,
        &["gptq"],
        "GPTQ: each code compensates the errors of earlier ones (needs --calib from `iec calib --hessian`)",
    ),
    (
        Method::Exact,
        &["exact", "lattice"],
        "Recover the exact codes of weights that were decoded from 4-bit codes; refuse other weights",
    ),
];

/// The values of --keep-failing.
pub const ON_FAILURE: &[Named<OnFailure>] = &[
    (OnFailure::Keep(Keep::Fp16), &["fp16", "f16"], ""),
    (OnFailure::Keep(Keep::Bf16), &["bf16"], ""),
    (OnFailure::Quantize(Scheme::Int6), &["int6"], ""),
    (OnFailure::Quantize(Scheme::Int8), &["int8"], ""),
];

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let inputs = args.inputs()?;
    // A dry run does not write the manifest.
    let rules = Rules { inputs: &inputs, overwrite: args.overwrite || args.dry_run, stdout: !args.json };
    let page_rules = Rules { stdout: false, overwrite: args.overwrite, ..rules };
    let page = args.report.report.as_deref().map(|page| (page, page_rules));
    let paths: Vec<_> = page.into_iter().chain([(args.out.as_path(), rules)]).collect();
    let outputs = Together::check(&paths).inspect_err(|_| remove_over(directory_of(&args.out)))?;
    let out = outputs.target(paths.len() - 1);
    let options = PtqOptions { out: out.work_path(), ..args.options(global)? };
    let (budgeted, calibrated) = (options.budget.clone(), options.calibration.is_some());
    let ptq = Ptq::open(options)?;
    if let Some(Budget { text: None, .. }) = budgeted {
        let errors = if calibrated { "the errors of outputs" } else { "the errors of weights" };
        global.note(format_args!(
            "note: without --plan-text {errors} decide which tensors get more bits; they count equally in all tensors, \
             except in the output matrix, where they count {} times",
            iec::trial::budget::HEAD_COUNTS
        ));
    }
    match (args.dry_run, &budgeted) {
        (false, _) => finish(&args, &outputs, &ptq.quantize()?, global),
        (true, Some(budget)) => {
            let found = ptq.outlook(budget)?;
            if args.report.report.is_some() {
                let page = plan::page(&ptq.options.model.name(), &found);
                outputs.target(0).write(page.as_bytes())?;
                global.note(format_args!("report: {}", outputs.target(0).path().display()));
            }
            if args.json {
                return console::print_json(&json!(found));
            }
            plan::warnings(&found).iter().for_each(|warning| global.note(warning));
            let (table, text) = (plan::table(&found.plan), plan::describe(&found.plan));
            let speed = found.tokens_per_second;
            console::print_line(format_args!(
                "{table}\nplan: {text}; {speed:.1} tokens per second expected; only the measurements for the next run \
                 were written"
            ))
        }
        (true, None) if args.report.report.is_some() => {
            Err(Error::usage("found --dry-run and --report without a budget, which leaves nothing to show")
                .help("add --target-bpw X, or leave out one of the two"))
        }
        (true, None) => {
            if calibrated && args.method.is_none() {
                global.note(
                    "note: with --calib each tensor's method is chosen when it is measured; this plan does not show it",
                );
            }
            dry_run::print(&ptq.dry_run()?, &out.work_path(), args.json)
        }
    }
}

/// Writes the page and the manifest, and prints the summary. If the gate refuses the manifest, only the page is
/// written.
fn finish(args: &Args, outputs: &Together, quantized: &Quantized<'_>, global: &Global) -> Result<()> {
    let measured = &quantized.measured;
    if let Some(found) = &measured.document.plan {
        global.note(format_args!("plan: {}", plan::describe(found)));
    }
    let page = args.report.report.as_ref().map(|_| quantization::page(quantized, &prompts::built_in())).transpose()?;
    let page = page.map(String::into_bytes);
    let manifest = quantized.manifest();
    match (&page, &manifest) {
        (Some(page), Err(_)) => outputs.target(0).write(page)?,
        (_, Ok(manifest)) => outputs.write(&page.iter().chain([manifest]).cloned().collect::<Vec<_>>())?,
        (None, Err(_)) => {}
    }
    if page.is_some() {
        global.note(format_args!("report: {}", outputs.target(0).path().display()));
    }
    global.note(quantization::table(measured, console::columns())?.to_string().trim_end());
    if let Some(evidence) = &measured.document.evidence {
        global.note(quantization::answers(evidence).to_string().trim_end());
        for promotion in &evidence.promoted {
            global.note(format_args!("{}: {} instead of {}", promotion.tensor, promotion.to, promotion.from));
        }
    }
    if !measured.document.task_evidence.is_empty() {
        global.note(quantization::tasks(&measured.document.task_evidence).to_string().trim_end());
    }
    if let Some(requantized) = measured.requantized() {
        global.note(requantized.warning());
    }
    manifest?;
    global.note(format_args!("wrote {}", args.out.display()));
    if args.json {
        console::print_json(&quantization::json(measured, &args.out, &quantized.blame)?)?;
    }
    Ok(())
}

impl BudgetArgs {
    /// Returns the budget, if one is given.
    ///
    /// # Errors
    /// The budget is not a valid number of bits or bytes, or options are given that need a budget.
    fn budget(&self) -> Result<Option<Budget>> {
        let asked = AskedTargets {
            bits_per_weight: self.target_bpw,
            bytes: self.target_size,
            divergence: self.target_kl,
            speed: self.target_speed,
        };
        let Some(target) = asked.target(|name| format!("--{name}"))? else {
            return match self.plan_text {
                Some(_) => Err(Error::usage("--plan-text without a budget")
                    .help("add --target-bpw, --target-size, --target-kl or --target-speed")),
                None => Ok(None),
            };
        };
        if let Some(found) = self.bandwidth.filter(|found| !(*found > 0.0 && *found <= 1e6)) {
            return Err(Error::usage(format!("--bandwidth: found {found}, expected 10^9 bytes per second, like 40")));
        }
        let text = text_windows(&self.plan_text, Some(self.plan_windows));
        Ok(Some(Budget { target, text, bandwidth: self.bandwidth }))
    }
}

fn text_windows(text: &Option<PathBuf>, windows: Option<u32>) -> Option<TextWindows> {
    text.clone().map(|text| TextWindows { text, windows: windows.map(|n| n as usize) })
}

impl Args {
    /// Returns the files that the command reads, which outputs must not replace.
    fn inputs(&self) -> Result<Inputs> {
        let files = [&self.rules, &self.calib, &self.answers.gate_text, &self.budget.plan_text, &self.source.config];
        let tasks = self.thresholds(Gate::default())?.tasks.into_iter().map(|task| task.path).collect::<Vec<_>>();
        let files = files.into_iter().flatten().chain(&tasks);
        self.source.add_to(Inputs::default().files(files), self.model_dir.as_ref())
    }

    /// Adds the thresholds of --gate to others.
    fn thresholds(&self, mut gate: Gate) -> Result<Gate> {
        self.gate.iter().try_for_each(|option| gate.set(option)).map(|()| gate)
    }

    fn options(&self, global: &Global) -> Result<PtqOptions> {
        let budget = self.budget.budget()?;
        let selection = self.selection()?;
        // With a budget, the bounds on the cosine of each tensor apply only if the user sets them.
        let gate = self.thresholds(if budget.is_some() { Gate::WITHOUT_COSINES } else { Gate::default() })?;
        Ok(PtqOptions {
            model: self.source.model(self.model_dir.as_ref())?,
            out: self.out.clone(),
            selection,
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
            let found = self.weights_only;
            return Err(Error::usage(format!(
                "--weights-only: found {found}, expected 1, because activations are never stored quantized"
            ))
            .help("leave --weights-only out; `iec run --precision int4` quantizes activations while it runs"));
        }
        let fields = QuantFields {
            scheme: self.scheme.map(|(scheme, _)| scheme),
            bits: self.bits,
            group_size: self.group_size.or(self.scheme.and_then(|(_, group_size)| group_size)),
            symmetric: if self.affine { Some(false) } else { self.symmetric.then_some(true) },
            scale_dtype: self.scale_type,
            method: self.method,
            clamp: self.clamp,
            percentile: self.percentile,
        };
        if let Some(method) = fields.method.filter(|method| method.needs_inputs() && self.calib.is_none()) {
            return Err(Error::usage(format!("--method {} without --calib", method.name()))
                .help("collect activation statistics with `iec calib` and give them with --calib"));
        }
        let lm_head = match (Outer::LmHead.storage(&self.keep), self.include_lm_head) {
            (OuterStorage::Kept, true) => {
                return Err(Error::usage("found --include-lm-head together with --keep lm_head, expected one of them"));
            }
            (_, true) => OuterStorage::LikeLayers,
            (storage, false) => storage,
        };
        Ok(SelectionOptions {
            fields,
            include: self.include.clone(),
            exclude: self.exclude.clone(),
            embedding: Outer::Embedding.storage(&self.keep),
            lm_head,
        })
    }
}
