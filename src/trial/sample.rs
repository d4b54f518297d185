//! Generates short greedy continuations with a pack.

use crate::error::Result;
use crate::files;
use crate::generate::speculate::Speculator;
use crate::generate::text::{Tokenizer, tokenizer};
use crate::generate::{Options, Request, generate};
use crate::iebin::IebinReader;
use crate::runtime::{Engine, EngineOptions, Precision};
use std::path::Path;

/// Continues `prompt` with the most likely tokens, as `iec run` does.
///
/// # Errors
/// The prompt cannot be encoded, or the engine fails.
pub fn continuation(engine: &mut Engine, tokenizer: &Tokenizer, prompt: &str, max_new: usize) -> Result<String> {
    let ids = tokenizer.encode(prompt)?;
    let eos = engine.config().eos.clone();
    let options = Options { tokenizer: Some(tokenizer), batch: 1, eos: &eos, ..Options::default() };
    let request = Request { ids, max_new, ..Request::default() };
    let outcome = generate(engine, None, &mut Speculator::off(), vec![request], &options, |_| Ok(()))?;
    Ok(outcome.completions.into_iter().map(|completion| completion.text).collect())
}

/// Continues each prompt greedily with the pack in `dir`; `None` if it has no tokenizer.
///
/// # Errors
/// The pack cannot be opened or run.
pub fn continuations(
    dir: &Path,
    precision: Option<Precision>,
    threads: usize,
    prompts: &[String],
    max_new: usize,
) -> Result<Option<Vec<String>>> {
    let path = dir.join(tokenizer::FILE_NAME);
    if !files::exists(&path)? {
        return Ok(None);
    }
    let tokenizer = Tokenizer::open(&path)?;
    let options = EngineOptions { precision, threads, ..EngineOptions::default() };
    let mut engine = Engine::open(&IebinReader::open(dir)?, &options)?;
    prompts.iter().map(|prompt| continuation(&mut engine, &tokenizer, prompt, max_new)).collect::<Result<_>>().map(Some)
}
