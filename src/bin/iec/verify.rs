//! `iec verify`: compares a pack with its Hugging Face checkpoint.

use crate::console;
use crate::global::Global;
use crate::model::ModelArgs;
use crate::names::{Named, named};
use crate::{Command, parse_line};
use iec::convert::pack::PackOptions;
use iec::error::{Error, Result};
use iec::iebin::IebinReader;
use iec::iebin::tensor_map::differing_payloads;
use iec::output::{self, Target};
use iec::report::agreement;
use iec::runtime::Precision;
use iec::session::{Session, prompts};
use iec::signature::{self, PublicKey};
use iec::trial::agreement::{Agreement, AgreementOptions, CheckedHashes, Prompts, RunningPack};
use iec::trial::{Again, GateFiles, Packs};
use iec::units::parse_count;
use iec::verify::RefDtype;
use std::path::PathBuf;

/// Arguments of `iec verify`.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("\
The pack continues each prompt greedily. A reference implementation in float32, which shares no code with the runtime,
computes the checkpoint and gives the expected token of each step. Tokens whose logits differ by at most --logits-tol
are ties. A pack of floats must agree on every token. A quantized pack differs from its checkpoint: it must agree on 90 % of
the tokens (--min-agreement). With --lora, the reference adds the adapters to the checkpoint, too.

{}

Examples:
  iec verify packs/tinyllama --hf-dir models/tinyllama
  iec verify packs/tinyllama --hf-dir models/tinyllama --tokenizer-only --prompts-file prompts.txt
  iec verify packs/tinyllama --trace made-by-transformers.jsonl --tokenizer-only
  iec verify packs/tinyllama --lora adapters/poems --hf-dir models/tinyllama
  iec verify packs/tinyllama --trace made-by-transformers.jsonl --json
  iec verify packs/tinyllama --hashes
  iec verify packs/tinyllama --key maker.pem.pub
  iec verify packs/tinyllama-q4 --gate --gate-text heldout.txt --hf-dir models/tinyllama
  iec verify packs/tinyllama-q4 --gate --gate-task arc.jsonl --hf-dir models/tinyllama

Exit code 4 when something differs.", prompts::FILE_HELP))]
pub struct Args {
    /// The original checkpoint
    #[arg(long, value_name = "DIR", env = "IEC_HF_DIR")]
    hf_dir: Option<PathBuf>,
    /// Prompts to continue [default: ten built-in ones]
    #[arg(long, value_name = "FILE")]
    prompts_file: Option<PathBuf>,
    /// Number of tokens to compare per prompt; generation continues after end-of-sequence tokens
    #[arg(long, value_name = "N", value_parser = parse_count, default_value_t = 32)]
    max_new: usize,
    /// Number of most likely tokens whose ranks are compared
    #[arg(long, value_name = "K", env = "HF_TOPK", default_value_t = 5)]
    topk: usize,
    /// Largest difference of logits that counts as rounding [default: 0.001 for fp32, 0.03 for fp16, 0.25 for bf16]
    #[arg(long, value_name = "X", env = "HF_LOGITS_TOL")]
    logits_tol: Option<f32>,
    /// Type in which the reference computes: fp32, fp64 (twice the memory), or bf16, as transformers rounds in bfloat16
    #[arg(long, value_parser = named(REF_DTYPES), value_name = "TYPE", env = "HF_DTYPE", default_value = "fp32")]
    ref_dtype: RefDtype,
    /// The checkpoint of --hf-dir has the adapters of --lora in its weights already, so the reference adds none
    #[arg(long, requires_all = ["lora", "hf_dir"])]
    merged: bool,
    /// Compare the tokens of prompts only, with those of the tokenizer of --hf-dir, of --trace, or of both; no weights
    /// are read
    #[arg(long, conflicts_with = "hashes")]
    tokenizer_only: bool,
    /// Trace with the expected tokens, from transformers or `iec run --trace-ids`, that the pack must generate; with
    /// --hf-dir the reference also computes the tokens of this trace
    #[arg(long, value_name = "FILE", conflicts_with = "prompts_file")]
    trace: Option<PathBuf>,
    /// Check every tensor of the pack against its recorded SHA-256
    #[arg(long)]
    hashes: bool,
    /// Check the signature of the pack with the public key of its maker (PEM), compare every signed file, and check
    /// every tensor against its recorded SHA-256
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Signature file to check [default: model.sig in the directory of the pack]
    #[arg(long, value_name = "FILE", requires = "key")]
    signature: Option<PathBuf>,
    /// Measure the gate of the pack's manifest again on --gate-text and --gate-task, against the float model of
    /// --hf-dir, which is packed into TMPDIR
    #[arg(long, requires = "hf_dir", conflicts_with_all = ["trace", "tokenizer_only"])]
    gate: bool,
    /// The text that the gate was measured on
    #[arg(long, value_name = "FILE", requires = "gate")]
    gate_text: Option<PathBuf>,
    /// File of questions that the gate was measured on; repeatable
    #[arg(long, value_name = "FILE", requires = "gate")]
    gate_task: Vec<PathBuf>,
    /// Percentage of tokens that must agree [default: 100 for a pack of floats, 90 for a quantized one]
    #[arg(long, value_name = "PERCENT")]
    min_agreement: Option<f64>,
    /// Write the report as JSON to a file, too
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace the file of --out if it is there
    #[arg(long, requires = "out")]
    overwrite: bool,
    /// Print the report as one JSON line on stdout
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    model: ModelArgs,
}

/// The values of --ref-dtype.
const REF_DTYPES: &[Named<RefDtype>] = &[
    (RefDtype::F32, &["fp32", "float32", "f32"], ""),
    (RefDtype::F64, &["fp64", "float64", "f64"], ""),
    (RefDtype::Bf16, &["bf16", "bfloat16"], ""),
];

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let inputs = args
        .model
        .inputs()
        .checkpoints(&args.hf_dir)
        .files([&args.prompts_file, &args.trace, &args.key, &args.signature].into_iter().flatten());
    let rules = output::Rules { inputs: &inputs, overwrite: args.overwrite, stdout: false };
    let out = args.out.as_deref().map(|path| Target::check(path, rules)).transpose()?;
    let json = args.json;
    let found = compare(args, global)?;
    let line = agreement::json(&found);
    if let Some(out) = &out {
        out.write(format!("{line}\n").as_bytes())?;
    }
    if json {
        console::print_json(&line)?;
    } else {
        console::print(agreement::text(&found))?;
    }
    agreement::verdict(&found)
}

/// Reads the options of the comparison after a measurement, `iec bench --verify`, from their variables, and checks
/// them before the measurement.
///
/// # Errors
/// A variable has an invalid value, or the checkpoint cannot be read or is not one that the reference computes.
pub fn before_bench(model: &ModelArgs, hf_dir: PathBuf) -> Result<AgreementOptions> {
    let Command::Verify(args) = parse_line(["verify"].into_iter())?.command else { unreachable!("parsed as `verify`") };
    let options = AgreementOptions {
        hf_dir: Some(hf_dir),
        adapters: model.lora.iter().map(|source| (source.dir.clone(), source.scale)).collect(),
        ..args.options()?
    };
    options.check()?;
    options.check_reference()?;
    Ok(options)
}

/// Compares the texts of a measurement with the checkpoint. The result is a note, because stdout has the measurements.
///
/// # Errors
/// Something cannot be read or run, or the pack differs.
pub fn after_bench(session: &mut Session, options: &AgreementOptions, global: &Global) -> Result<()> {
    let mut found = Agreement { hashes: recorded_hashes(&session.reader)?, ..Agreement::default() };
    compare_texts(&mut found, session, options)?;
    global.note(agreement::text(&found).trim_end());
    agreement::verdict(&found)
}

fn compare_texts(found: &mut Agreement, session: &mut Session, options: &AgreementOptions) -> Result<()> {
    session.tokenizer()?;
    let tokenizer = session.tokenizer.as_ref().expect("just found");
    let engine = &mut session.engine;
    found.texts(&mut RunningPack { engine, tokenizer, reader: &session.reader, name: &session.name }, options)
}

/// Compares every tensor with its recorded hash: the compared tokens may not depend on a byte that was changed.
/// `None` if the pack records none.
fn recorded_hashes(reader: &IebinReader) -> Result<Option<CheckedHashes>> {
    let recorded = reader.entries().iter().all(|entry| entry.sha256.is_some());
    recorded.then(|| hashes(reader)).transpose()
}

fn hashes(reader: &IebinReader) -> Result<CheckedHashes> {
    let differing = differing_payloads(reader)?.iter().map(ToString::to_string).collect();
    Ok(CheckedHashes { tensors: reader.entries().len(), differing, added_template: reader.added_template() })
}

/// Runs the comparison of the arguments.
///
/// # Errors
/// Something cannot be read or run. A difference is no error.
pub fn compare(args: Args, global: &Global) -> Result<Agreement> {
    if args.hf_dir.is_none() && args.trace.is_none() && args.key.is_none() && !args.hashes {
        return Err(Error::usage("found no reference to compare with")
            .help("name the original checkpoint with --hf-dir, or give --trace FILE, --key FILE or --hashes"));
    }
    if args.tokenizer_only && args.hf_dir.is_none() && args.trace.is_none() {
        return Err(Error::usage("--tokenizer-only: found no tokens to compare with")
            .help("name the original checkpoint with --hf-dir, or give --trace FILE"));
    }
    if !args.model.lora.is_empty()
        && (args.tokenizer_only || args.gate || args.hf_dir.is_none() && args.trace.is_none())
    {
        return Err(Error::usage("--lora: found no comparison of texts, which adapters would change")
            .help("leave --lora out, or compare with --hf-dir or --trace, without --tokenizer-only and --gate"));
    }
    let options = args.options()?;
    options.check()?;
    let mut found = Agreement::default();
    if let Some(key) = &args.key {
        let (reader, key) = (args.model.open_reader()?, PublicKey::open(key)?);
        let path = args.signature.clone().unwrap_or_else(|| reader.path(signature::FILE_NAME));
        found.signature = Some(signature::verify(&reader, &key, &path)?);
    }
    // With a checkpoint, hashes are checked, too: the compared tokens may not depend on a byte that was changed. A
    // signature says who made the pack; the weights may have been damaged before it was signed.
    let with_checkpoint = args.hf_dir.is_some() && !args.tokenizer_only && !args.gate;
    if args.hashes {
        found.hashes = Some(hashes(&args.model.open_reader()?)?);
    } else if with_checkpoint || args.key.is_some() {
        found.hashes = recorded_hashes(&args.model.open_reader()?)?;
    }
    match &args.hf_dir {
        hf_dir if args.tokenizer_only && (hf_dir.is_some() || args.trace.is_some()) => {
            let prompts = if args.trace.is_some() { Vec::new() } else { args.prompts()? };
            let prompts = args.trace.as_deref().map_or(Prompts::Given(&prompts), Prompts::Traced);
            found.tokenizers(&args.model.open_tokenizer()?, hf_dir.as_deref(), prompts)?;
        }
        Some(hf_dir) if args.gate => found.gate = Some(args.measure_again(hf_dir.clone(), global)?),
        None if args.trace.is_none() => (),
        _ => {
            options.check_reference()?;
            compare_texts(&mut found, &mut args.model.open_preferring(Precision::Fp32, global)?, &options)?;
        }
    }
    Ok(found)
}

impl Args {
    /// Measures the gate of the pack's manifest again.
    fn measure_again(&self, hf_dir: PathBuf, global: &Global) -> Result<Again> {
        let reader = self.model.open_reader()?;
        let dir = tempfile::tempdir()?;
        let packs = Packs::begin(dir.path(), PackOptions { hf_dir, ..PackOptions::default() })?;
        let (text, tasks) = (self.gate_text.clone(), self.gate_task.clone());
        Again::measure(&reader, &packs, &GateFiles { text, tasks, threads: global.threads() })
    }

    fn prompts(&self) -> Result<Vec<String>> {
        self.prompts_file.as_deref().map_or_else(|| Ok(prompts::built_in()), prompts::read)
    }

    /// Returns the adapters that the reference adds to the checkpoint.
    fn reference_adapters(&self) -> Vec<(PathBuf, f32)> {
        let added = self.model.lora.iter().filter(|_| !self.merged);
        added.map(|source| (source.dir.clone(), source.scale)).collect()
    }

    fn options(&self) -> Result<AgreementOptions> {
        Ok(AgreementOptions {
            hf_dir: self.hf_dir.clone(),
            prompts: if self.trace.is_some() { Vec::new() } else { self.prompts()? },
            max_new: self.max_new,
            topk: self.topk,
            logits_tol: self.logits_tol,
            ref_dtype: self.ref_dtype,
            trace: self.trace.clone(),
            generated: Vec::new(),
            min_agreement: self.min_agreement,
            adapters: self.reference_adapters(),
        })
    }
}
