//! `iec eval --text`: perplexity, and divergence from a reference.

use super::{Args, about, read_text};
use crate::global::Global;
use crate::model::Model;
use iec::error::{Error, Result};
use iec::eval::stats::Mean;
use iec::eval::windows::WINDOW;
use iec::eval::{Divergence, Perplexity, Windows, divergence, perplexity};
use iec::iebin::IebinReader;
use iec::iebin::reader::NAME_A_PACK;
use iec::report::table::Table;
use iec::runtime::text::{Tokenizer, tokenizer};
use iec::runtime::{Engine, EngineOptions, Precision};
use iec::sha256::{self, Digest, Sha256};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

/// Scores a text and prints the figures.
pub fn run(args: &Args, file: &Path, model: &mut Model, global: &Global) -> Result<()> {
    let text = read_text(file)?;
    let mut reference = args.kl_ref.as_deref().map(|dir| open_reference(args, dir, model, global)).transpose()?;
    let len = args.model.ctx().unwrap_or(WINDOW.min(model.engine.context()));
    let windows = Windows::of_text(model.tokenizer()?, &text, len, args.windows).map_err(|e| e.at(file))?;
    let begin = Instant::now();
    let (own, divergence) = match &mut reference {
        Some(reference) => {
            let found = divergence(&mut model.engine, reference, &windows)?;
            (found.model, Some(found))
        }
        None => (perplexity(&mut model.engine, &windows)?, None),
    };
    let seconds = begin.elapsed().as_secs_f64();
    if args.json {
        let mut line = about(model);
        line["text"] =
            json!({"file": file.display().to_string(), "sha256": sha256::hex(Sha256::new_with_prefix(&text))});
        line["ctx"] = len.into();
        line["windows"] = windows.count().into();
        line["tokens_scored"] = windows.scored().into();
        line["wall_time_s"] = seconds.into();
        line["perplexity"] = json!(own);
        if let (Some(found), Some(reference)) = (&divergence, &reference) {
            line["reference"] = reference_json(args, found, reference);
        }
        println!("{line}");
    } else {
        print!("{}", table(&own, divergence.as_ref()));
    }
    global.note(format_args!(
        "{} windows of {len} tokens, {} scored, in {seconds:.1} s",
        windows.count(),
        windows.scored()
    ));
    Ok(())
}

fn open_reference(args: &Args, dir: &Path, model: &Model, global: &Global) -> Result<Engine> {
    let reader = IebinReader::open(dir).map_err(|e| e.help(NAME_A_PACK).while_opening_model())?;
    let path = dir.join(tokenizer::FILE_NAME);
    if path.exists() && !Tokenizer::open(&path)?.has_tokens_of(model.tokenizer()?) {
        let found = "other tokens than the model's; their probabilities cannot be compared";
        return Err(Error::usage(found).at(&path).help("compare a pack with one of the same checkpoint"));
    }
    let precision = args.ref_precision.or_else(|| Precision::resolve(Some(Precision::Fp32), &reader).ok());
    let (threads, offload) = (global.threads()?, args.model.device.offload()?);
    let options = EngineOptions { precision, threads, offload, ..EngineOptions::default() };
    Engine::open(&reader, &options).map_err(Error::while_opening_model)
}

fn reference_json(args: &Args, found: &Divergence, reference: &Engine) -> Value {
    json!({
        "model": args.kl_ref.as_ref().map(|dir| dir.display().to_string()),
        "precision": reference.precision().name(),
        "perplexity": found.reference,
        "perplexity_ratio": found.perplexity_ratio,
        "kl": {
            "mean": found.kl.value, "stderr": found.kl.stderr, "median": found.kl_spread.median,
            "p90": found.kl_spread.p90, "p95": found.kl_spread.p95, "p99": found.kl_spread.p99,
            "p999": found.kl_spread.p999, "max": found.kl_spread.max,
        },
        "top1_agreement": found.top1_agreement,
        "delta_p": found.delta_p,
        "rms_delta_p": found.rms_delta_p,
    })
}

fn table(own: &Perplexity, divergence: Option<&Divergence>) -> Table {
    let mut table = Table::new(&["figure", ">value", ">± standard error"]);
    let mut row = |name: &str, mean: Mean, digits: usize, unit: &str| {
        table.row([name.into(), format!("{:.digits$}{unit}", mean.value), format!("{:.digits$}{unit}", mean.stderr)]);
    };
    let percent = |mean: Mean| mean.map(|v| 100.0 * v, 100.0);
    row("perplexity", own.perplexity, 4, "");
    if let Some(found) = divergence {
        row("perplexity of the reference", found.reference.perplexity, 4, "");
        row("ratio of perplexities", found.perplexity_ratio, 5, "");
        row("mean KL divergence", found.kl, 6, "");
        row("same most likely token", percent(found.top1_agreement), 2, " %");
        row("mean difference of p", percent(found.delta_p), 3, " %");
        row("root of its mean square", percent(found.rms_delta_p), 3, " %");
        let spread = found.kl_spread;
        for (name, value) in [
            ("median KL divergence", spread.median),
            ("90 % below", spread.p90),
            ("99 % below", spread.p99),
            ("largest", spread.max),
        ] {
            table.row([name.into(), format!("{value:.6}"), String::new()]);
        }
    } else {
        table.row(["95 % interval".into(), format!("{:.4} to {:.4}", own.ci95[0], own.ci95[1]), String::new()]);
    }
    table
}
