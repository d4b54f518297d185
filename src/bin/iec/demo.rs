//! `iec demo`: runs the whole pipeline on the model embedded in the program; each step is a command a user would type.

use crate::console;
use crate::device_args::DeviceArgs;
use crate::global::Global;
use crate::{Cli, Command, bench, parse_line, verify};
use iec::dedup::family;
use iec::error::{Context, Result};
use iec::generate::score::score_text;
use iec::iebin::IebinReader;
use iec::manifest::Manifest;
use iec::models::embedded;
use iec::report::agreement;
use iec::report::measurement::MeasurementLine;
use iec::report::table::{Column, Table};
use iec::runtime::device::Offload;
use iec::runtime::{EngineOptions, Precision};
use iec::session::{Session, SessionOptions};
use iec::units::human_bytes;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Prompt of every story.
const PROMPT: &str = "Once upon a time";
/// Length of a story in tokens.
const STORY_TOKENS: usize = 150;
/// Text of the same kind that the model was not trained on, to measure perplexity on.
const HELD_OUT: &str = include_str!("../../../tests/text/tinystories_valid_30k.txt");
/// Tokens of a window, its BOS included.
const WINDOW: usize = 256;
/// Tokens that are scored, in 40 windows.
const SCORED_TOKENS: usize = 40 * (WINDOW - 1);
/// Width at which stories are wrapped.
const COLUMNS: usize = 88;

/// Arguments of `iec demo`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    iec demo\n  \
    iec demo --out-dir demo    keeps the checkpoint, the packs and the manifest to try more commands on")]
pub struct Args {
    /// Keep all files here [default: a temporary directory]
    #[arg(long, value_name = "DIR")]
    out_dir: Option<PathBuf>,
    /// Print the summary as one JSON line on stdout, the steps on stderr
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let dir = args.out_dir.as_deref().unwrap_or(temporary.path());
    std::fs::create_dir_all(dir).at(dir)?;
    let shown = args.out_dir.as_deref();
    let demo = Demo {
        dir,
        shown,
        threads: global.requested_threads().unwrap_or(1),
        offload: args.device.offload()?,
        json: args.json,
        quiet: global.quiet,
    };
    let summary = demo.run()?;
    if args.json {
        console::print_json(&summary)?;
    }
    Ok(())
}

struct Demo<'a> {
    /// Directory that files are written to.
    dir: &'a Path,
    /// Directory to show in printed commands; `None` when it is temporary.
    shown: Option<&'a Path>,
    /// Threads of the engine; one by default, because the model is too small for more.
    threads: usize,
    offload: Offload,
    json: bool,
    quiet: bool,
}

/// One line of the summary.
#[derive(serde::Serialize)]
struct SummaryRow {
    precision: &'static str,
    bytes: u64,
    bits_per_weight: f64,
    cosine: Option<f64>,
    perplexity: f64,
    text: String,
    bench: MeasurementLine,
}

impl Demo<'_> {
    fn run(&self) -> Result<Value> {
        let start = Instant::now();
        embedded::write_to(&self.dir.join("checkpoint"))?;
        self.print(
            "Converts stories260K, a model embedded in this program, from its checkpoint to 4 bits and runs it.",
        )?;
        self.print("Each step is a command. The stories are generated greedily, so they are the same every time.")?;
        self.command("pack --hf-dir @checkpoint --out-dir @fp32 --overwrite")?;
        self.print_pack("fp32")?;
        self.verify("fp32")?;
        self.command("ptq --hf-dir @checkpoint --bits 4 --gate cosine=0.99 --out @q4_manifest.json --overwrite")?;
        let cosine = self.print_manifest()?;
        self.command("q4 --hf-dir @checkpoint --manifest @q4_manifest.json --out-dir @q4 --overwrite")?;
        self.command(
            "pack --hf-dir @checkpoint --q4-map @q4/q4_manifest.expanded.json --dtype fp16 --out-dir @int4 --overwrite",
        )?;
        self.print_pack("int4")?;
        self.command("tensor-map --model-dir @int4 --strict --overwrite")?;
        self.print("  every hash checked")?;
        self.command("dedup --model-dir @fp32 --codec zstd --verify")?;
        self.print_dedup("fp32")?;
        let variants = [("fp32", Precision::Fp32), ("int4", Precision::Int4w), ("int4", Precision::Int4)];
        let rows = variants
            .into_iter()
            .map(|(pack, precision)| self.measure(pack, precision, (pack == "int4").then_some(cosine)))
            .collect::<Result<Vec<_>>>()?;
        self.summary(&rows, start.elapsed().as_secs_f64())
    }

    /// Shows a command line and runs it in this process. `@` marks files below the demo's directory.
    fn command(&self, line: &str) -> Result<()> {
        let cli = self.announce(line)?;
        cli.command.run(&cli.global)
    }

    fn announce(&self, line: &str) -> Result<Cli> {
        self.print(&format!("\n$ iec {}", self.words(line, self.shown).join(" ")))?;
        let words = self.words(line, Some(self.dir));
        parse_line(words.iter().map(String::as_str).chain(["--quiet"]))
    }

    fn words(&self, line: &str, dir: Option<&Path>) -> Vec<String> {
        let place = |word: &str| match (word.strip_prefix('@'), dir) {
            (Some(file), Some(dir)) => dir.join(file).display().to_string(),
            (Some(file), None) => file.to_string(),
            (None, _) => word.to_string(),
        };
        line.split(' ').map(place).collect()
    }

    fn print_pack(&self, pack: &str) -> Result<()> {
        let reader = IebinReader::open(&self.dir.join(pack))?;
        let (bytes, bits) = size(&reader);
        let tensors = reader.entries().len();
        self.print(&format!("  {tensors} tensors, {}, {bits:.2} bits per weight", human_bytes(bytes)))
    }

    /// Compares a pack with the checkpoint by the independent reference, if this build has one.
    fn verify(&self, pack: &str) -> Result<()> {
        if !cfg!(feature = "reference") {
            return Ok(());
        }
        let cli = self.announce(&format!("verify --model-dir @{pack} --hf-dir @checkpoint --max-new 16"))?;
        let Command::Verify(args) = cli.command else { unreachable!("the line says verify") };
        let found = verify::compare(*args, &cli.global)?;
        self.print(&format!("  {}", agreement::summary(&found)))?;
        agreement::verdict(&found)
    }

    fn print_dedup(&self, pack: &str) -> Result<()> {
        let summary = family::summary(&self.dir.join(pack))?;
        let (before, after) = (human_bytes(summary.original_bytes), human_bytes(summary.stored_bytes));
        self.print(&format!("  {after} of {before} ({:.3}), losslessly: rebuilt and compared", summary.ratio))
    }

    /// Prints the result of the gate; returns the mean cosine over the quantized tensors.
    fn print_manifest(&self) -> Result<f64> {
        let manifest = Manifest::load(&self.dir.join("q4_manifest.json"))?;
        let entries = manifest.document().tensors.values();
        let metrics: Vec<_> = entries.filter(|e| e.quant.is_some()).filter_map(|e| e.metrics).collect();
        let mean = metrics.iter().map(|m| m.cosine_mean).sum::<f64>() / metrics.len().max(1) as f64;
        let worst = metrics.iter().map(|m| m.cosine_min).fold(1.0, f64::min);
        self.print(&format!("  {} matrices pass the gate: cosine {mean:.4}, worst row {worst:.4}", metrics.len()))?;
        Ok(mean)
    }

    fn measure(&self, pack: &str, precision: Precision, cosine: Option<f64>) -> Result<SummaryRow> {
        let dir = self.dir.join(pack);
        let shown = self.words(&format!("@{pack}"), self.shown).join("");
        let command = format!("run --model-dir {shown} --precision {precision} --max-new {STORY_TOKENS}");
        self.print(&format!("\n$ iec {command} --prompt \"{PROMPT}\""))?;
        let engine = EngineOptions {
            precision: Some(precision),
            threads: self.threads,
            offload: self.offload,
            ..EngineOptions::default()
        };
        let mut session = Session::open(&dir, &SessionOptions { engine, ..SessionOptions::default() })?;
        let story = session.complete(PROMPT, STORY_TOKENS)?;
        self.print(&wrap(&format!("{PROMPT}{story}")))?;
        let perplexity = perplexity(&mut session, HELD_OUT)?;
        let (bytes, bits_per_weight) = size(&session.reader);
        let bench = self.bench(pack, precision)?;
        Ok(SummaryRow { precision: precision.name(), bytes, bits_per_weight, cosine, perplexity, text: story, bench })
    }

    fn bench(&self, pack: &str, precision: Precision) -> Result<MeasurementLine> {
        let cli =
            self.announce(&format!("bench --model-dir @{pack} --precision {precision} --threads {}", self.threads))?;
        let Command::Bench(args) = cli.command else { unreachable!("the line says bench") };
        let mut measurement = bench::measure(&args, &cli.global, |_| Ok(()))?;
        let line = measurement.lines.pop().expect("one line per run");
        self.print(&format!(
            "  {} tokens, {:.0} per second, one in {:.2} ms (median)",
            line.metrics.tokens_generated,
            line.metrics.tps_decode,
            line.metrics.latency_p50_ms.unwrap_or(f64::NAN)
        ))?;
        Ok(line)
    }

    fn summary(&self, rows: &[SummaryRow], seconds: f64) -> Result<Value> {
        let columns: [Column<'_, &SummaryRow>; 7] = [
            ("precision", &|row| row.precision.to_string()),
            (">size", &|row| human_bytes(row.bytes)),
            (">bits/weight", &|row| format!("{:.2}", row.bits_per_weight)),
            (">cosine", &|row| row.cosine.map_or("-".into(), |c| format!("{c:.4}"))),
            (">perplexity", &|row| format!("{:.3}", row.perplexity)),
            (">prefill tok/s", &|row| format!("{:.0}", row.bench.metrics.tps_prefill)),
            (">decode tok/s", &|row| format!("{:.0}", row.bench.metrics.tps_decode)),
        ];
        let table = Table::of(rows, &columns);
        self.print(&format!("\n{table}"))?;
        self.print(&format!(
            "Perplexity is over {SCORED_TOKENS} tokens of stories that the model was not trained on. The demo took \
             {seconds:.1} s."
        ))?;
        if let Some(dir) = self.shown {
            self.print(&format!("Checkpoint, packs and manifest are in {}.", dir.display()))?;
        }
        Ok(json!({"model": embedded::NAME, "wall_time_s": seconds, "variants": rows}))
    }

    /// Prints a line for people: to stdout, or to stderr when stdout has JSON.
    fn print(&self, text: &str) -> Result<()> {
        match (self.json, self.quiet) {
            (false, _) => return console::print_line(text),
            (true, false) => console::note(text),
            (true, true) => (),
        }
        Ok(())
    }
}

/// Returns the perplexity over the first windows of a text, each of 255 tokens after a BOS. The fixture's golden value,
/// computed by Hugging Face transformers, uses the same windows.
fn perplexity(session: &mut Session, text: &str) -> Result<f64> {
    let mut ids = session.tokenizer()?.encode_plain(text)?;
    ids.truncate(SCORED_TOKENS);
    let prefix: Vec<u32> = session.engine.config().bos.into_iter().collect();
    Ok(score_text(&mut session.engine, &ids, &prefix, WINDOW)?.perplexity())
}

/// Returns the bytes of all payloads, and the bits per weight.
fn size(reader: &IebinReader) -> (u64, f64) {
    let bytes: usize = reader.entries().iter().map(|e| e.nbytes).sum();
    let weights: usize = reader.entries().iter().map(|e| e.elements()).sum();
    (bytes as u64, bytes as f64 * 8.0 / weights.max(1) as f64)
}

/// Breaks a text into indented lines.
fn wrap(text: &str) -> String {
    let mut lines = Vec::new();
    for paragraph in text.split('\n') {
        let mut line = String::from(" ");
        for word in paragraph.split_whitespace() {
            if line.chars().count() + word.chars().count() >= COLUMNS {
                lines.push(std::mem::replace(&mut line, String::from(" ")));
            }
            line.push(' ');
            line.push_str(word);
        }
        lines.push(line);
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stories_are_wrapped_between_words() {
        let text = wrap(&"word ".repeat(40));
        assert!(text.lines().count() > 2);
        assert!(text.lines().all(|line| line.len() <= COLUMNS + 2 && line.starts_with("  word")), "{text}");
    }
}
