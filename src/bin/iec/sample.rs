//! Short greedy texts, to see what a pack writes.

use iec::error::Result;
use iec::iebin::IebinReader;
use iec::runtime::generate::{Options, Request, generate};
use iec::runtime::speculate::Speculator;
use iec::runtime::text::{Tokenizer, tokenizer};
use iec::runtime::{Engine, EngineOptions, Precision};
use std::path::Path;

/// Continues `prompt` with the most likely tokens, as `iec run` does.
pub fn continuation(engine: &mut Engine, tokenizer: &Tokenizer, prompt: &str, max_new: usize) -> Result<String> {
    let ids = tokenizer.encode(prompt)?;
    let eos = engine.config().eos.clone();
    let options =
        Options { tokenizer: Some(tokenizer), batch: 1, eos: &eos, show_special: false, keep_sessions: false };
    let request = Request { ids, max_new, ..Request::default() };
    let outcome = generate(engine, &mut Speculator::off(), vec![request], &options, |_| Ok(()))?;
    Ok(outcome.completions.into_iter().map(|completion| completion.text).collect())
}

/// What the pack in `dir` writes behind each prompt; `None` if it has no tokenizer.
pub fn continuations(
    dir: &Path,
    precision: Option<Precision>,
    threads: usize,
    prompts: &[String],
    max_new: usize,
) -> Result<Option<Vec<String>>> {
    let path = dir.join(tokenizer::FILE_NAME);
    if !path.exists() {
        return Ok(None);
    }
    let tokenizer = Tokenizer::open(&path)?;
    let options = EngineOptions { precision, threads, ..EngineOptions::default() };
    let mut engine = Engine::open(&IebinReader::open(dir)?, &options)?;
    prompts.iter().map(|prompt| continuation(&mut engine, &tokenizer, prompt, max_new)).collect::<Result<_>>().map(Some)
}
