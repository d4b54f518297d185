//! `iec pack`: options, and the summary in words or JSON.

use crate::console;
use crate::dry_run;
use crate::global::Global;
use crate::job::{JobArgs, finished_before, part_of};
use crate::names::{KEPT_OR_FLOAT, KeptOrFloat, Named, named, offering};
use crate::ptq::{ON_FAILURE, OUTER, Outer};
use crate::source::SourceArgs;
use iec::convert::adapter;
use iec::convert::adapter::pack::{AdapterPackOptions, AdapterPackSummary, FactorNumbers, pack as pack_adapter_as};
use iec::convert::pack::{self, PackOptions, PackSummary, PublishedForm};
use iec::convert::quantize::judge::OnFailure;
use iec::error::{Error, Result};
use iec::files;
use iec::manifest::recipes::{self, Recipe};
use iec::provenance::Gate;
use iec::report::quantization;
use iec::trial::one_step::OneStep;
use iec::units::{human_bytes, human_count};
use std::path::{Path, PathBuf};

/// The names of [`PublishedForm`].
const FORMS: &[Named<PublishedForm>] =
    &[(PublishedForm::Published, &["published"], ""), (PublishedForm::Float, &["float"], "")];

/// Arguments of `iec pack`.
#[derive(Debug, clap::Args)]
#[command(override_usage = "iec pack [OPTIONS] <MODEL> --out-dir <DIR>")]
#[command(group = clap::ArgGroup::new("decision").multiple(true).args(["q4_map", "bits", "recipe"]))]
#[command(group = clap::ArgGroup::new("source").required(true).args(["checkpoint", "hf_dir", "hf_repo"]))]
#[command(after_help = "Examples:
  iec pack models/tinyllama --out-dir packs/tinyllama
  iec pack models/tinyllama --bits 4 --out-dir packs/tinyllama-q4
  iec pack models/llama --recipe llama-3 --gate cosine=0.99 --out-dir packs/llama-q4
  iec pack models/tinyllama --q4-map q4_manifest.json --out-dir packs/tinyllama-q4
  iec pack model.gguf --q4-map q4_manifest.json --out-dir packs/model-q4
  iec pack packs/tinyllama-q8 --q4-map q4_manifest.json --out-dir packs/tinyllama-q4
  iec pack adapters/poems --base packs/tinyllama --bits 8 --out-dir packs/poems
  iec pack openai/gpt-oss-20b --out-dir packs/gpt-oss-20b --dry-run
  iec pack models/gpt-oss-20b --out-dir packs/gpt-oss-20b --part 1/4

--bits and --recipe quantize and pack in one step: a gate compares each matrix with its quantized form, as in
`iec ptq`, and nothing is written if it refuses (exit code 4).

A manifest is applied to a GGUF file or a pack as to a checkpoint: tensors that it quantizes are decoded and quantized
again, and a warning says how large the error is that this adds; all others keep their bytes.

An interrupted pack continues when the same command is run again. Parts are put together by `iec merge`.")]
pub struct Args {
    #[command(flatten)]
    source: SourceArgs,
    /// Directory of the new pack; created if it is missing
    #[arg(long, value_name = "DIR")]
    out_dir: PathBuf,
    /// Manifest that says which tensors are quantized and how (from `iec ptq`, `iec q4`, or rules as in manifests/)
    #[arg(long, value_name = "MANIFEST")]
    q4_map: Option<PathBuf>,
    #[command(flatten)]
    one_step: OneStepArgs,
    /// Statistics of `iec calib`: those that the manifest was made with; with --bits or --recipe each tensor gets the
    /// method with the smallest error of its outputs
    #[arg(long, value_name = "STATS", requires = "decision")]
    calib: Option<PathBuf>,
    /// Float type of tensors that are not quantized; keep = the type in the model
    #[arg(long, value_parser = named(KEPT_OR_FLOAT), default_value = "keep")]
    dtype: KeptOrFloat,
    /// Form of matrices that are quantized in the model: their codes where a scheme of packs holds them bit for
    /// bit, or floats with their exact values (fp32, unless --dtype says otherwise)
    #[arg(long = "as", value_name = "FORM", value_parser = named(FORMS), default_value = "published")]
    published: PublishedForm,
    /// Pack of the model that MODEL, an adapter of PEFT, changes. Its factors keep their type, or are stored as
    /// --dtype says or with --bits 8 in int8
    #[arg(
        long,
        value_name = "PACK",
        conflicts_with_all = [
            "q4_map", "recipe", "gate", "keep_failing", "keep", "calib", "tokenizer", "with_mtp", "dry_run", "part",
            "parts", "fresh", "published",
        ]
    )]
    base: Option<PathBuf>,
    /// A tokenizer.json to put into the pack instead of the model's
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Keep the layers of multi-token prediction: `iec run --speculate mtp` drafts with the first one, `iec eval --mtp`
    /// measures them, and `iec unpack` gives them back
    #[arg(long)]
    with_mtp: bool,
    /// Replace a pack that is already there
    #[arg(long)]
    overwrite: bool,
    /// Print the plan: type of each tensor and the reason, sizes, disk space; write nothing
    #[arg(long, conflicts_with_all = ["part", "parts", "fresh"])]
    dry_run: bool,
    /// Print the summary as JSON on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    job: JobArgs,
}

/// Options that quantize in the same step.
#[derive(Debug, clap::Args)]
struct OneStepArgs {
    /// Quantize with the recipe int4, int5, int6 or int8; `iec recipes` describes them
    #[arg(long, value_name = "4|5|6|8", conflicts_with_all = ["q4_map", "recipe", "part", "parts"])]
    #[arg(hide_possible_values = true, value_parser = offering(&["4", "5", "6", "8"], clap::value_parser!(u32)))]
    bits: Option<u32>,
    /// Quantize as a recipe says; `iec recipes` lists them
    #[arg(long, value_name = "NAME", conflicts_with_all = ["q4_map", "part", "parts"])]
    recipe: Option<String>,
    /// Limit that each quantized matrix must meet (exit code 4 if not); repeatable. `cosine=X`: the mean cosine of its
    /// rows is at least X [default: 0.995, in 3 bits 0.98, in 2 bits 0.935]; `cosine-min=Y`: the cosine of every row is
    /// at least Y [default: 0.98, 0.92 and 0.75]
    #[arg(long, value_name = "NAME=VALUE", conflicts_with = "q4_map", requires = "decision")]
    gate: Vec<String>,
    /// Store matrices that fail the gate in this type instead of refusing the model
    #[arg(
        long,
        value_name = "TYPE",
        value_parser = named(ON_FAILURE),
        conflicts_with = "q4_map",
        requires = "decision"
    )]
    keep_failing: Option<OnFailure>,
    /// Do not quantize this matrix, whatever the recipe says; repeatable
    #[arg(
        long,
        value_name = "MATRIX",
        value_parser = named(OUTER),
        conflicts_with = "q4_map",
        requires = "decision"
    )]
    keep: Vec<Outer>,
}

impl OneStepArgs {
    /// Returns the recipe, if one is asked for.
    fn recipe(&self) -> Result<Option<&'static Recipe>> {
        match (&self.recipe, self.bits) {
            (Some(name), _) => recipes::named(name).map(Some),
            (None, Some(bits)) => recipes::of_bits(bits).map(Some),
            (None, None) => Ok(None),
        }
    }

    /// Returns the options of the library, if a recipe is asked for.
    fn options(&self, pack: &PackOptions, global: &Global) -> Result<Option<OneStep>> {
        let Some(recipe) = self.recipe()? else { return Ok(None) };
        let mut gate = Gate::default();
        self.gate.iter().try_for_each(|option| gate.set(option))?;
        let on_failure = self.keep_failing.unwrap_or(OnFailure::Refuse);
        Ok(Some(OneStep {
            pack: pack.clone(),
            recipe,
            embedding: Outer::Embedding.storage(&self.keep),
            lm_head: Outer::LmHead.storage(&self.keep),
            gate,
            on_failure,
            threads: global.threads(),
        }))
    }
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    if let Some(base) = &args.base {
        return pack_adapter(&args, base, global);
    }
    let hf_dir = args.source.required()?;
    if adapter::is_at(&hf_dir)? && !files::exists(&hf_dir.join("config.json"))? {
        return Err(Error::usage("found an adapter of PEFT, expected a checkpoint")
            .at(hf_dir)
            .help("name a pack of its model with --base"));
    }
    let options = PackOptions {
        config: args.source.config.clone(),
        hf_dir,
        out_dir: args.out_dir,
        manifest: args.q4_map,
        calibration: args.calib,
        dtype: args.dtype,
        published: args.published,
        tokenizer: args.tokenizer,
        with_mtp: args.with_mtp,
        overwrite: args.overwrite,
        run: args.job.options()?,
    };
    let one_step = args.one_step.options(&options, global)?;
    if args.dry_run {
        let plan = one_step.map_or_else(|| pack::dry_run(&options), |step| step.dry_run())?;
        return dry_run::print(&plan, &options.out_dir, args.json);
    }
    let summary = match one_step {
        Some(step) => step.run(|measured| {
            global.note(quantization::table(measured, console::columns())?.to_string().trim_end());
            Ok(())
        })?,
        None => pack::pack(&options)?,
    };
    warn(&summary, global);
    global.summarize(describe(&summary), args.json, &summary)
}

/// Packs an adapter for the model of the pack `base`.
fn pack_adapter(args: &Args, base: &Path, global: &Global) -> Result<()> {
    let numbers = match (args.one_step.bits, args.dtype) {
        (Some(8), None) => FactorNumbers::Int8,
        (None, None) => FactorNumbers::Keep,
        (None, Some(dtype)) => FactorNumbers::Float(dtype),
        _ => return Err(Error::usage("--base: expected --bits 8, --dtype or neither")),
    };
    let summary = pack_adapter_as(&AdapterPackOptions {
        adapter: args.source.required()?,
        base: base.to_path_buf(),
        out_dir: args.out_dir.clone(),
        numbers,
        overwrite: args.overwrite,
    })?;
    let [before, after] = [summary.bytes_in, summary.bytes].map(human_bytes);
    let AdapterPackSummary { method, architecture, matrices, rank, .. } = &summary;
    let note = adapter::left_out(&summary.unused).map_or_else(String::new, |text| format!("\nnote: {text}"));
    let text = format!(
        "packed an adapter ({method}) of {architecture}: {matrices} matrices, rank {rank}, {before} -> {after}{note}"
    );
    global.summarize(text, args.json, &summary)
}

/// Warns of tensors that are quantized twice.
pub fn warn(summary: &PackSummary, global: &Global) {
    summary.requantized.iter().for_each(|found| global.note(found.warning()));
}

/// Describes in words what was packed.
pub fn describe(s: &PackSummary) -> String {
    let PackSummary { architecture, tensors, quantized_tensors, bits_per_weight, wall_time_s, .. } = s;
    let (part, finished) = (part_of(&s.part), finished_before(s.resumed_tensors));
    let [before, after] = [s.bytes_in, s.bytes].map(human_bytes);
    let (weights, rate) = (human_count(s.weights), human_bytes((s.bytes_in as f64 / wall_time_s) as u64));
    format!(
        "packed {part}{architecture}: {tensors} tensors ({quantized_tensors} quantized{finished}), {weights} weights, \
         {before} -> {after}, {bits_per_weight:.2} bits per weight, {wall_time_s:.1} s, {rate}/s{}{}{}",
        dry_run::published(s.published.as_ref()),
        dry_run::left_out(&s.left_out),
        dry_run::made_tokenizer(&s.tokenizer_from)
    )
}
