//! Tokenizer: converts text to token ids and back exactly like Hugging Face. The crate `tokenizers` runs the pipeline
//! of `tokenizer.json`.
//!
//! The file is untrusted input, and the crate panics on some hostile pipelines. Therefore every call into it catches
//! panics and returns an [`Error`] that names the file.

use crate::error::{Context, Error, Result};
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Once;
use tokenizers::models::bpe::BPE;
use tokenizers::{
    DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl,
};

/// File name of a tokenizer inside a model directory.
pub const FILE_NAME: &str = "tokenizer.json";
/// Real tokenizers are smaller than 40 MB; a larger file than this limit is rejected before it is read.
const FILE_LIMIT: u64 = 512 << 20;

/// A tokenizer, ready to encode and decode.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
    byte_fallback: bool,
}

impl Tokenizer {
    /// Loads `tokenizer.json`.
    ///
    /// # Errors
    /// The file is missing, too large, or not a tokenizer; the message names it.
    pub fn open(path: &Path) -> Result<Tokenizer> {
        let size = std::fs::metadata(path)
            .at(path)
            .help("pack the model with its tokenizer.json, or name one with --tokenizer FILE")?
            .len();
        if size > FILE_LIMIT {
            return Err(Error::corrupt(format!("found {size} bytes, expected at most {FILE_LIMIT}")).at(path));
        }
        Tokenizer::parse(&std::fs::read(path).at(path)?, path)
    }

    /// Parses the contents of a tokenizer file; `path` is used in messages.
    ///
    /// # Errors
    /// The text is not a valid tokenizer.
    pub fn parse(text: &[u8], path: &Path) -> Result<Tokenizer> {
        let inner = fenced(|| {
            let mut inner = read(text)?;
            // `tokenizer(text)` of Hugging Face also ignores the truncation and padding stored in the file.
            inner.with_truncation(None)?;
            inner.with_padding(None);
            // Dropout of merges is for training; with it, the same text would have other tokens at each call.
            if let ModelWrapper::BPE(bpe) = inner.get_model()
                && bpe.dropout.is_some()
            {
                let mut bpe = bpe.clone();
                bpe.dropout = None;
                inner.with_model(ModelWrapper::BPE(bpe));
            }
            Ok(inner)
        })
        .map_err(|why| Error::corrupt(format!("found a tokenizer that cannot be used: {why}")))
        .at(path)
        .help("copy tokenizer.json from the original checkpoint again")?;
        let decoder = serde_json::to_string(&inner.get_decoder()).unwrap_or_default();
        Ok(Tokenizer { inner, path: path.to_path_buf(), byte_fallback: decoder.contains("\"ByteFallback\"") })
    }

    /// Returns the path of its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the ids of `text`, with the special tokens of the post-processor (usually a BOS).
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, true)
    }

    /// Returns the ids of `text` without adding special tokens, for text that contains them, such as a rendered chat.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, false)
    }

    fn encode_with(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        fenced(|| Ok(self.inner.encode_fast(text, special)?.get_ids().to_vec()))
            .map_err(|why| Error::corrupt(format!("cannot encode a text: {why}")))
            .at(&self.path)
    }

    /// Returns the text of `ids`; unknown ids are skipped.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        fenced(|| self.inner.decode(ids, skip_special))
            .map_err(|why| Error::corrupt(format!("cannot decode {} tokens: {why}", ids.len())))
            .at(&self.path)
    }

    /// Returns true when both tokenizers have the same tokens with the same ids.
    pub fn has_tokens_of(&self, other: &Tokenizer) -> bool {
        fenced(|| Ok(self.inner.get_vocab(true) == other.inner.get_vocab(true))).unwrap_or(false)
    }

    /// Returns the id of the token with exactly this spelling.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Returns the spelling of a token in the vocabulary.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// Returns true for tokens that are hidden from readers, such as BOS.
    pub(super) fn is_special_token(&self, token: &str) -> bool {
        self.inner.get_added_vocabulary().is_special_token(token)
    }

    /// Returns true for a `<0x..>` token of a pipeline with byte fallback.
    pub(super) fn is_fallback_byte(&self, token: &str) -> bool {
        self.byte_fallback && token.len() == 6 && token.starts_with("<0x") && token.ends_with('>')
    }
}

/// A pipeline around byte-pair encoding, the model of nearly all tokenizers.
type BytePairs = TokenizerImpl<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// Parses the file as a byte-pair tokenizer, the usual kind, and falls back to the general parser. The general parser
/// builds two trees of JSON values before it determines the kind of the model, and takes three times as long (41 ms
/// instead of 11 ms for 32 000 tokens).
fn read(text: &[u8]) -> tokenizers::Result<tokenizers::Tokenizer> {
    match serde_json::from_slice::<BytePairs>(text) {
        Ok(tokenizer) => Ok(tokenizer.into()),
        Err(_) => tokenizers::Tokenizer::from_bytes(text),
    }
}

thread_local! {
    static FENCED: Cell<bool> = const { Cell::new(false) };
}

/// Calls into the crate and converts its errors and panics to a message.
fn fenced<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> std::result::Result<T, String> {
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
        Err(_) => Err("its pipeline is broken".into()),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use serde_json::Value;

    const FIXTURES: [&str; 15] = [
        "assets/stories260k",
        "tests/fixtures/llama-gqa",
        "tests/fixtures/llama3-rope-tied",
        "tests/fixtures/dedup-llama",
        "tests/fixtures/gptoss-bf16",
        "tests/fixtures/gptoss-mxfp4",
        "tests/fixtures/gptoss-trained",
        "tests/fixtures/gemma2",
        "tests/fixtures/gemma3",
        "tests/fixtures/mistral-swa",
        "tests/fixtures/mixtral",
        "tests/fixtures/phi3",
        "tests/fixtures/qwen2",
        "tests/fixtures/qwen3",
        "tests/fixtures/qwen3moe",
    ];

    /// Returns every fixture with its golden values; `IEC_TOKENIZERS` may list further directories, separated by `:`.
    pub fn fixtures() -> Vec<(Tokenizer, Value)> {
        let more = std::env::var("IEC_TOKENIZERS").unwrap_or_default();
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let dirs = FIXTURES.iter().copied().chain(more.split(':').filter(|d| !d.is_empty()));
        dirs.map(|dir| {
            let dir = root.join(dir);
            let golden = std::fs::read_to_string(dir.join("golden.json")).unwrap();
            (Tokenizer::open(&dir.join(FILE_NAME)).unwrap(), serde_json::from_str(&golden).unwrap())
        })
        .collect()
    }

    pub fn ids(value: &Value) -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    }

    #[test]
    fn dropout_of_merges_is_ignored() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama-gqa").join(FILE_NAME);
        let text = std::fs::read(&path).unwrap();
        let mut json: Value = serde_json::from_slice(&text).unwrap();
        assert!(json["model"]["dropout"].is_null());
        json["model"]["dropout"] = 0.9.into();
        let [plain, dropping] =
            [text, json.to_string().into_bytes()].map(|text| Tokenizer::parse(&text, &path).unwrap());
        let words = "Once upon a time there was a little dog who ran through the garden.";
        assert_eq!(dropping.encode(words).unwrap(), plain.encode(words).unwrap());
    }

    #[test]
    fn every_golden_text_gets_the_ids_and_the_text_of_hugging_face() {
        let mut wrong = Vec::new();
        for (tokenizer, golden) in fixtures() {
            for case in golden["tokenization"].as_array().unwrap() {
                let text = case["text"].as_str().unwrap();
                let plain = ids(&case["ids_no_special"]);
                let same = tokenizer.encode(text).unwrap() == ids(&case["ids"])
                    && tokenizer.encode_plain(text).unwrap() == plain
                    && tokenizer.decode(&plain, false).unwrap() == case["decoded"]
                    && tokenizer.decode(&plain, true).unwrap() == case["decoded_skip_special"];
                if !same {
                    wrong.push((tokenizer.path().to_path_buf(), text.to_string()));
                }
            }
            for case in golden["prompts"].as_array().into_iter().flatten() {
                let text = case["text"].as_str().unwrap();
                if tokenizer.encode(text).unwrap() != ids(&case["ids"]) {
                    wrong.push((tokenizer.path().to_path_buf(), text.to_string()));
                }
                if tokenizer.decode(&ids(&case["greedy_ids"]), false).unwrap() != case["greedy_text"] {
                    wrong.push((tokenizer.path().to_path_buf(), case["greedy_text"].to_string()));
                }
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    #[test]
    fn a_broken_tokenizer_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        let good = std::fs::read_to_string(fixtures()[0].0.path()).unwrap();
        let deep = "[".repeat(100_000);
        let cases = ["", "{}", "null", &good[..good.len() / 2], &deep, r#"{"version":"1.0","model":{"type":"BPE"}}"#];
        for case in cases {
            std::fs::write(&path, case).unwrap();
            let error = Tokenizer::open(&path).unwrap_err().to_string();
            assert!(error.contains("tokenizer.json"), "{error}");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(Tokenizer::open(&path).unwrap_err().help_text().unwrap().contains("--tokenizer"));
    }

    #[test]
    fn a_pipeline_that_panics_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        let strip = r#"{"type":"Strip","content":" ","start":0,"stop":3}"#;
        let model = r#"{"type":"BPE","vocab":{" ":0},"merges":[]}"#;
        std::fs::write(&path, format!(r#"{{"version":"1.0","added_tokens":[],"decoder":{strip},"model":{model}}}"#))
            .unwrap();
        let tokenizer = Tokenizer::open(&path).unwrap();
        let error = tokenizer.decode(&[0], false).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json") && error.contains("broken"), "{error}");
    }

    #[test]
    fn truncation_and_padding_of_the_file_are_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        let good = &fixtures()[0].0;
        let mut json: Value = serde_json::from_str(&std::fs::read_to_string(good.path()).unwrap()).unwrap();
        json["truncation"] =
            serde_json::json!({"direction":"Right","max_length":2,"strategy":"LongestFirst","stride":0});
        std::fs::write(&path, json.to_string()).unwrap();
        let text = "Once upon a time there was a dog";
        assert_eq!(Tokenizer::open(&path).unwrap().encode(text).unwrap(), good.encode(text).unwrap());
    }

    #[test]
    fn special_tokens_are_known() {
        let (tokenizer, _) = &fixtures()[0];
        assert!(tokenizer.is_special_token("<s>") && tokenizer.id("<s>").is_some());
        assert!(!tokenizer.is_special_token("▁Once"));
        assert_eq!(tokenizer.token(403).as_deref(), Some("▁Once"));
    }
}
