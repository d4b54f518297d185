//! What the demo measures of a pack: a story, its speed, and how well the model predicts text it never saw.

use iec::error::Result;
use iec::iebin::IebinReader;
use iec::runtime::generate::{Options, Request, generate};
use iec::runtime::score::score_text;
use iec::runtime::text::Tokenizer;
use iec::runtime::{Engine, EngineOptions, Precision};
use std::path::Path;

/// Timed generations; the fastest counts, as the others differ from it by what else the machine did.
const ROUNDS: usize = 5;

/// Tokens of a window, its BOS included.
const WINDOW: usize = 256;
/// Windows that are scored.
const WINDOWS: usize = 40;

/// A pack opened in one precision.
pub struct Model {
    engine: Engine,
    tokenizer: Tokenizer,
}

/// A generated text and how fast it came.
pub struct Story {
    /// Without the prompt.
    pub text: String,
    /// Generated tokens.
    pub tokens: usize,
    /// Tokens of the prompt read per second.
    pub prefill_tps: f64,
    /// Tokens generated per second, the first not counted.
    pub decode_tps: f64,
}

impl Model {
    /// Opens the pack in `dir`.
    pub fn open(dir: &Path, precision: Precision, threads: usize) -> Result<Model> {
        let reader = IebinReader::open(dir)?;
        let options = EngineOptions { precision: Some(precision), threads, ..EngineOptions::default() };
        Ok(Model { engine: Engine::open(&reader, &options)?, tokenizer: Tokenizer::open(&dir.join("tokenizer.json"))? })
    }

    /// Continues `prompt` greedily; the text is the same in every round.
    pub fn story(&mut self, prompt: &str, max_new: usize) -> Result<Story> {
        let ids = self.tokenizer.encode(prompt)?;
        let eos = self.engine.config().eos.clone();
        let options = Options {
            tokenizer: Some(&self.tokenizer),
            batch: 1,
            eos: &eos,
            show_special: false,
            keep_sessions: false,
        };
        let mut best = Story { text: String::new(), tokens: 0, prefill_tps: 0.0, decode_tps: 0.0 };
        for _ in 0..ROUNDS {
            let request = Request { ids: ids.clone(), max_new, ..Request::default() };
            let outcome = generate(&mut self.engine, vec![request], &options, |_| Ok(()))?;
            for completion in outcome.completions {
                let decoded = completion.ids.len().saturating_sub(1) as f64;
                best.prefill_tps = best.prefill_tps.max(ids.len() as f64 / completion.prefill_time().as_secs_f64());
                best.decode_tps = best.decode_tps.max(decoded / completion.decode_time().as_secs_f64());
                best.tokens = completion.ids.len();
                best.text = completion.text;
            }
        }
        Ok(best)
    }

    /// Perplexity over the first windows of a text, each of 255 tokens after a BOS: the rule of the fixture's golden
    /// value, which Hugging Face computed.
    pub fn perplexity(&mut self, text: &str) -> Result<f64> {
        let mut ids = self.tokenizer.encode_plain(text)?;
        ids.truncate(WINDOWS * (WINDOW - 1));
        let prefix: Vec<u32> = self.engine.config().bos.into_iter().collect();
        Ok(score_text(&mut self.engine, &ids, &prefix, WINDOW)?.perplexity())
    }
}
