//! `iec verify`: is the answer the one that Hugging Face gives?

mod report;
mod texts;
mod tokens;

use crate::global::Global;
use crate::model::{Model, ModelArgs, Speculate};
use crate::{prompts, tensor_map};
use iec::atomic_file::write_atomically;
use iec::error::{Error, Result};
use iec::iebin::{IebinReader, Store};
use iec::runtime::Precision;
use iec::scheme::Scheme;
use iec::trial::{Again, Origin, Packs, Question};
use iec::verify::{RefDtype, Rules, Trace};
use report::Report;
use std::path::PathBuf;

/// A quantized model that agrees less often is broken, not rounded.
const QUANTIZED_AGREEMENT: f64 = 50.0;

/// Arguments.
#[derive(Debug, clap::Args)]
#[command(after_help = format!("\
The pack continues each prompt greedily; the checkpoint runs through a reference in float32 that shares no code with the runtime and
says, at each step, which token should come. Ids and logits that are apart by no more than --logits-tol are ties.
A pack of floats must agree everywhere. A quantized pack is another model: it must agree on half of the tokens (--min-agreement).

{}

Examples:
  iec verify --model-dir packs/tinyllama --hf-dir models/tinyllama
  iec verify --model-dir packs/tinyllama --hf-dir models/tinyllama --tokenizer-only --prompts-file prompts.txt
  iec verify --model-dir packs/tinyllama --trace made-by-transformers.jsonl --json
  iec verify --model-dir packs/tinyllama --hashes
  iec verify --model-dir packs/tinyllama-q4 --gate --gate-text heldout.txt --hf-dir models/tinyllama

Exit code 4 when something differs.", prompts::FILE_HELP))]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The original checkpoint
    #[arg(long, value_name = "DIR", env = "HF_DIR")]
    hf_dir: Option<PathBuf>,
    /// Prompts to continue [default: ten built-in ones]
    #[arg(long, value_name = "FILE")]
    prompts_file: Option<PathBuf>,
    /// Tokens to compare per prompt; the end of a text is ignored
    #[arg(long, value_name = "N", default_value_t = 32)]
    max_new: usize,
    /// How many of the most likely tokens are compared by rank
    #[arg(long, value_name = "K", env = "HF_TOPK", default_value_t = 5)]
    topk: usize,
    /// Largest difference of a logit that is noise [default: 0.001 for fp32, 0.03 for fp16, 0.25 for bf16]
    #[arg(long, value_name = "X", env = "HF_LOGITS_TOL")]
    logits_tol: Option<f32>,
    /// What the reference rounds to: fp32, nothing; bf16, as transformers does in bfloat16
    #[arg(long, value_enum, value_name = "TYPE", env = "HF_DTYPE", default_value = "fp32")]
    ref_dtype: RefDtypeArg,
    /// Compare tokenizers only; no weights are read
    #[arg(long, requires = "hf_dir", conflicts_with_all = ["trace", "hashes"])]
    tokenizer_only: bool,
    /// A trace made elsewhere, by transformers or `iec run --trace-ids`: what the pack must say; with --hf-dir what the reference
    /// must confirm, instead of generating
    #[arg(long, value_name = "FILE", conflicts_with = "prompts_file")]
    trace: Option<PathBuf>,
    /// Check every tensor of the pack against its recorded SHA-256
    #[arg(long)]
    hashes: bool,
    /// Measure the evidence of the pack's gate again, on --gate-text and beside the floats of --hf-dir, which are packed into TMPDIR
    #[arg(long, requires_all = ["hf_dir", "gate_text"], conflicts_with_all = ["trace", "tokenizer_only"])]
    gate: bool,
    /// The text that the gate was measured on
    #[arg(long, value_name = "FILE", requires = "gate")]
    gate_text: Option<PathBuf>,
    /// Percent of tokens that must agree [default: 100 for a pack of floats, 50 for a quantized one]
    #[arg(long, value_name = "PERCENT")]
    min_agreement: Option<f64>,
    /// Write the report as JSON to a file, too
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print the report as one JSON line on stdout
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum RefDtypeArg {
    #[value(alias = "float32", alias = "f32")]
    Fp32,
    #[value(alias = "bfloat16")]
    Bf16,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let (out, json) = (args.out.clone(), args.json);
    let report = compare(args, global)?;
    let line = report.json();
    if let Some(out) = &out {
        write_atomically(out, format!("{line}\n").as_bytes())?;
    }
    if json {
        println!("{line}");
    } else {
        print!("{report}");
    }
    report.verdict()
}

/// Compares what the arguments name.
///
/// # Errors
/// Something cannot be read or run; a difference is none.
pub fn compare(mut args: Args, global: &Global) -> Result<Report> {
    if args.hf_dir.is_none() && args.trace.is_none() && !args.hashes {
        return Err(Error::usage("nothing to verify against")
            .help("name the original checkpoint with --hf-dir, or give --trace FILE or --hashes"));
    }
    if args.max_new == 0 || args.topk == 0 {
        return Err(Error::usage("--max-new and --topk must be at least 1"));
    }
    let mut report = Report::default();
    if args.hashes {
        let reader = args.model.open_reader()?;
        report.hashes(&reader, &tensor_map::differing_payloads(&reader)?);
    }
    if args.tokenizer_only {
        tokens::run(&args, &mut report)?;
    } else if args.gate {
        report.gate(args.measure_again(global)?);
    } else if args.hf_dir.is_some() || args.trace.is_some() {
        args.model.prefer(Precision::Fp32)?;
        let mut model = args.model.open(global, Speculate::Off)?;
        let trace = args.trace.as_deref().map(Trace::read).transpose()?;
        texts::run(&args, &mut model, trace, &mut report)?;
    }
    Ok(report)
}

impl Args {
    /// Measures what the pack says of its answers.
    fn measure_again(&self, global: &Global) -> Result<Again> {
        let reader = self.model.open_reader()?;
        let dir = tempfile::tempdir()?;
        let hf_dir = self.hf_dir.clone().unwrap_or_default();
        let packs = Packs::begin(dir.path(), Origin { hf_dir, config: None, calibration: None })?;
        let text = self.gate_text.clone().unwrap_or_default();
        Again::measure(&reader, &packs, Question { text, skip: 0, windows: None, threads: global.threads()? })
    }

    fn ref_dtype(&self) -> RefDtype {
        match self.ref_dtype {
            RefDtypeArg::Fp32 => RefDtype::F32,
            RefDtypeArg::Bf16 => RefDtype::Bf16,
        }
    }

    fn prompts(&self) -> Result<Vec<String>> {
        self.prompts_file.as_deref().map_or_else(|| Ok(prompts::built_in()), prompts::read)
    }

    fn rules(&self, model: &Model) -> Result<Rules> {
        let rounded = match self.ref_dtype {
            RefDtypeArg::Bf16 => Precision::Bf16,
            RefDtypeArg::Fp32 => model.engine.precision(),
        };
        // 128 units of the type's rounding, what the golden checkpoints of the tests need at most (docs/DECISIONS.md, 65).
        let usual = match rounded {
            Precision::Fp32 => 1e-3,
            Precision::Fp16 => 0.03,
            _ => 0.25,
        };
        let logits_tol = self.logits_tol.unwrap_or(usual);
        if !(logits_tol.is_finite() && logits_tol >= 0.0) {
            return Err(Error::usage(format!("--logits-tol {logits_tol}; expected a number from 0 on")));
        }
        Ok(Rules { topk: self.topk, logits_tol })
    }

    /// How often a pack must agree, in percent, and whether every logit must, too.
    fn agreement(&self, model: &Model) -> Result<(f64, bool)> {
        let exact = !is_quantized(&model.reader);
        let percent = self.min_agreement.unwrap_or(if exact { 100.0 } else { QUANTIZED_AGREEMENT });
        if !(0.0..=100.0).contains(&percent) {
            return Err(Error::usage(format!("--min-agreement {percent}; expected 0 to 100")));
        }
        Ok((percent, exact && self.min_agreement.is_none()))
    }
}

/// True when weights were rounded to codes by `pack`; MXFP4 is how gpt-oss is published.
fn is_quantized(reader: &IebinReader) -> bool {
    let rounded = |store: &Store| matches!(store, Store::Tiled(spec) if spec.scheme != Scheme::Mxfp4);
    reader.entries().iter().any(|entry| rounded(&entry.store))
}
