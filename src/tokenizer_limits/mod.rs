//! Checks that encoding and decoding with a tokenizer.json take bounded time and memory. The file is an untrusted
//! program: its normalizers can double a text at every step, its post-processor can add millions of tokens, and its
//! patterns can backtrack for hours.
//!
//! [`check`] reads the steps of the file without running them and computes how much longer a text can become. The
//! crate `tokenizers` itself parses the steps, so the checked steps are those that will run. Longer growth, more
//! steps, larger strings and slower patterns than any known tokenizer needs are refused, when a pack is made and when
//! a tokenizer is opened.

mod charsmap;
mod growth;
mod open;
mod patterns;
mod vocabulary;

pub use open::open;

use crate::error::{Context, Error, Result};
use crate::strict_json;
use growth::Growth;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::cell::Cell;
use std::sync::Once;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};
use vocabulary::{AddedToken, Model};

/// Largest accepted tokenizer.json in bytes; real ones are smaller than 40 MB.
pub const FILE_LIMIT: u64 = 256 << 20;
/// Largest accepted growth of a text in the normalizers and pre-tokenizers together. The tokenizers of Llama 2 reach
/// 12 (a text of spaces, with each step at its worst), those of T5 with compatibility normalization 99, and those of
/// Llama 2 with that normalization 132.
const ENCODE_GROWTH: f64 = 144.0;
/// Largest accepted growth of the tokens' spelling in the decoders; the decoders of known models reach 2.
const DECODE_GROWTH: f64 = 16.0;
/// Largest accepted number of steps, sequences included; known tokenizers have up to 10.
const STEPS: usize = 64;
/// Largest accepted length of a token, and of a string in a step, in bytes; known tokens have up to 256.
const STRING: usize = 4096;
/// Largest accepted number of tokens that post-processors add to a text, and of pieces of their templates.
const ADDED: usize = 1024;
/// Largest accepted memory of all added tokens after normalization, in bytes, computed with the worst growth.
const ADDED_BYTES: f64 = (64 << 20) as f64;
/// Advice for all refused files.
const HELP: &str =
    "use the tokenizer.json of the original model; this one is invalid, or could take too much memory or time";

/// Keys under which a sequence lists its steps.
const SEQUENCES: [&str; 4] = ["normalizers", "pretokenizers", "decoders", "processors"];

/// Bounds of a checked tokenizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bounds {
    /// Largest number of bytes after the normalizers and pre-tokenizers per byte of text.
    pub encode_growth: f64,
    /// Largest number of bytes after the pre-tokenizers per byte before them.
    pub pre_tokenizer_growth: f64,
    /// Largest number of decoded bytes per byte of the tokens' spelling, where each token counts as one byte longer
    /// than it is.
    pub decode_growth: f64,
    /// Largest number of bytes of text that one token can stand for; `None` = any number, because
    /// steps remove text, or the model leaves out or joins unknown characters.
    pub bytes_per_token: Option<f64>,
    /// Largest id in the vocabulary of the model that no added token has.
    pub highest_id: Option<u32>,
}

impl Bounds {
    /// Refuses a vocabulary with ids beyond the `rows` of the model's embedding. Added tokens may lie beyond: several
    /// published checkpoints have a token for padding or images there, which no text contains.
    ///
    /// # Errors
    /// The vocabulary has such an id.
    pub fn check_vocabulary(&self, rows: usize) -> Result<()> {
        match self.highest_id {
            Some(id) if id as usize >= rows => {
                let found = format!("found the token id {id}, expected ids below the model's vocabulary of {rows}");
                Err(Error::corrupt(found).tensor("model.vocab").help("use the tokenizer.json of this model"))
            }
            _ => Ok(()),
        }
    }
}

/// The parts of the file that decide its cost.
#[derive(Deserialize)]
struct Parts<'a> {
    #[serde(default, borrow)]
    added_tokens: Vec<AddedToken<'a>>,
    #[serde(default, deserialize_with = "strict_json::small_tree")]
    normalizer: Value,
    #[serde(default, deserialize_with = "strict_json::small_tree")]
    pre_tokenizer: Value,
    #[serde(default, deserialize_with = "strict_json::small_tree")]
    post_processor: Value,
    #[serde(default, deserialize_with = "strict_json::small_tree")]
    decoder: Value,
    model: Model,
}

/// Computes the bounds of a tokenizer.json.
///
/// # Errors
/// The text is not a tokenizer, a bound is beyond its limit, or two tokens of the vocabulary have the same id. The
/// error names the field.
pub fn check(text: &[u8]) -> Result<Bounds> {
    let parts: Parts<'_> = serde_json::from_slice(text)
        .map_err(|e| Error::corrupt(format!("not a tokenizer: {e}")))
        .help("name a tokenizer.json of the Hugging Face `tokenizers` library with --tokenizer")?;
    bounds(&parts).help(HELP)
}

fn bounds(parts: &Parts<'_>) -> Result<Bounds> {
    let mut steps = 0;
    for (value, field) in [
        (&parts.normalizer, "normalizer"),
        (&parts.pre_tokenizer, "pre_tokenizer"),
        (&parts.post_processor, "post_processor"),
        (&parts.decoder, "decoder"),
    ] {
        check_step(value, field, &mut steps)?;
    }
    parts.model.check()?;
    let mut encode = Growth::new(ENCODE_GROWTH);
    if let Some(step) = typed::<NormalizerWrapper>(&parts.normalizer, "normalizer")? {
        encode.normalizer(&step, "normalizer")?;
    }
    let normalizer_growth = encode.total.grow;
    vocabulary::check_added(&parts.added_tokens, normalizer_growth)?;
    if let Some(step) = typed::<PreTokenizerWrapper>(&parts.pre_tokenizer, "pre_tokenizer")? {
        encode.pre_tokenizer(&step, "pre_tokenizer")?;
    }
    let mut decode = Growth::new(DECODE_GROWTH);
    if let Some(step) = typed::<DecoderWrapper>(&parts.decoder, "decoder")? {
        decode.decoder(&step, "decoder")?;
    }
    if let Some(step) = typed::<PostProcessorWrapper>(&parts.post_processor, "post_processor")? {
        growth::check_post_processor(&step, "post_processor", &mut 0)?;
    }
    let removes = parts.added_tokens.iter().any(AddedToken::strips);
    let shrink = if removes { f64::INFINITY } else { encode.total.shrink };
    let bytes_per_token = parts.model.bytes_per_token(&parts.added_tokens, encode.byte_level) * shrink;
    Ok(Bounds {
        encode_growth: encode.total.grow,
        pre_tokenizer_growth: encode.total.grow / normalizer_growth,
        decode_growth: decode.total.grow,
        bytes_per_token: bytes_per_token.is_finite().then_some(bytes_per_token),
        highest_id: parts.model.highest_id(&parts.added_tokens),
    })
}

/// Checks what can be seen before the crate parses a step, because parsing compiles its patterns: the number of steps,
/// the length of strings, the patterns, and the character maps.
fn check_step(step: &Value, field: &str, steps: &mut usize) -> Result<()> {
    let Some(object) = step.as_object() else { return Ok(()) };
    *steps += 1;
    if *steps > STEPS {
        return Err(Error::corrupt(format!("found more than {STEPS} steps, expected at most {STEPS}")).tensor(field));
    }
    for (key, value) in object {
        match value {
            Value::Array(list) if SEQUENCES.contains(&key.as_str()) => {
                for (i, step) in list.iter().enumerate() {
                    check_step(step, &format!("{field}.{key}[{i}]"), steps)?;
                }
            }
            Value::Object(pattern) if key == "pattern" => {
                for text in pattern.values().filter_map(Value::as_str) {
                    check_string(text).tensor(&format!("{field}.{key}"))?;
                }
                if let Some(regex) = pattern.get("Regex").and_then(Value::as_str) {
                    patterns::check(regex).tensor(&format!("{field}.{key}"))?;
                }
            }
            // The crate would allocate whatever size the map states.
            Value::String(map) if key == "precompiled_charsmap" => {
                charsmap::parse(map).tensor(&format!("{field}.{key}"))?;
            }
            Value::String(text) => {
                check_string(text).tensor(&format!("{field}.{key}"))?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// Refuses a string that is longer than [`STRING`].
fn check_string(text: &str) -> Result<()> {
    if text.len() > STRING {
        return Err(Error::corrupt(format!("found {} bytes, expected at most {STRING}", text.len())));
    }
    Ok(())
}

/// Parses a step with the crate that will run it.
fn typed<T: DeserializeOwned>(value: &Value, field: &str) -> Result<Option<T>> {
    if value.is_null() {
        return Ok(None);
    }
    let parsed = fenced(|| Ok(T::deserialize(value)?));
    parsed.map(Some).map_err(|why| Error::corrupt(format!("found a step that cannot be used: {why}"))).tensor(field)
}

thread_local! {
    /// True while this thread is inside [`fenced`].
    static FENCED: Cell<bool> = const { Cell::new(false) };
}

/// Calls a function of the crate `tokenizers`, which panics on some hostile files, and converts its errors and panics
/// to a message.
pub(crate) fn fenced<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> std::result::Result<T, String> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        // Caught panics are reported as errors; only other panics print their message.
        let previous = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !FENCED.get() {
                previous(info);
            }
        }));
    });
    FENCED.set(true);
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
    FENCED.set(false);
    match outcome {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(e)) => Err(e.to_string()),
        Err(_) => Err("the library `tokenizers` cannot process it".into()),
    }
}

#[cfg(test)]
mod tests;
