//! What the demo measures of a pack: a story, and how well the model predicts text it never saw.

use iec::error::Result;
use iec::iebin::IebinReader;
use iec::runtime::device::Offload;
use iec::runtime::score::score_text;
use iec::runtime::text::Tokenizer;
use iec::runtime::{Engine, EngineOptions, Precision};
use iec::trial::sample;
use std::path::Path;

/// Tokens of a window, its BOS included.
const WINDOW: usize = 256;
/// Tokens that are scored, in 40 windows.
pub const SCORED_TOKENS: usize = 40 * (WINDOW - 1);

/// A pack opened in one precision.
pub struct Model {
    engine: Engine,
    tokenizer: Tokenizer,
}

impl Model {
    /// Opens the pack in `dir`.
    pub fn open(dir: &Path, precision: Precision, threads: usize, offload: Offload) -> Result<Model> {
        let reader = IebinReader::open(dir)?;
        let options = EngineOptions { precision: Some(precision), threads, offload, ..EngineOptions::default() };
        Ok(Model { engine: Engine::open(&reader, &options)?, tokenizer: Tokenizer::open(&dir.join("tokenizer.json"))? })
    }

    /// Continues `prompt` greedily, as `iec run` does.
    pub fn story(&mut self, prompt: &str, max_new: usize) -> Result<String> {
        sample::continuation(&mut self.engine, &self.tokenizer, prompt, max_new)
    }

    /// Perplexity over the first windows of a text, each of 255 tokens after a BOS: the rule of the fixture's golden
    /// value, which Hugging Face computed.
    pub fn perplexity(&mut self, text: &str) -> Result<f64> {
        let mut ids = self.tokenizer.encode_plain(text)?;
        ids.truncate(SCORED_TOKENS);
        let prefix: Vec<u32> = self.engine.config().bos.into_iter().collect();
        Ok(score_text(&mut self.engine, &ids, &prefix, WINDOW)?.perplexity())
    }
}
