//! Tokenizer: converts text to token ids and back exactly like Hugging Face. The crate `tokenizers` runs the pipeline
//! of `tokenizer.json`.
//!
//! The file is untrusted input. [`tokenizer_limits`] bounds how much longer the steps of the pipeline can make a text.
//! The crate panics on some hostile pipelines; therefore every call into it catches panics and returns an [`Error`]
//! that names the file.

use crate::error::{Context, Error, Result};
use crate::files;
use crate::tokenizer_limits::{self, Bounds, FILE_LIMIT, fenced};
use std::path::{Path, PathBuf};
use tokenizers::{NormalizedString, Normalizer};

/// File name of a tokenizer inside a model directory.
pub const FILE_NAME: &str = "tokenizer.json";
/// Advice for a tokenizer that fails on a text.
const ORIGINAL: &str = "use the tokenizer.json of the original model";

/// Largest size in bytes, after normalizers and pre-tokenizers, that is accepted for every text, however short the text
/// is. The crate needs about 70 bytes of memory for each of these bytes.
const PREPARED: usize = 8 << 20;
/// A text that becomes larger than [`PREPARED`] is accepted if it grows at most by this factor. Only hostile tokenizers
/// exceed it: honest ones replace a space by three bytes at most.
const PREPARED_GROWTH: usize = 8;
/// Number of bytes of a text that are normalized at a time to measure how long the whole text becomes.
const PIECE: usize = 64 << 10;
/// Prompts up to this size in bytes are encoded even if the context is short.
const PROMPT: usize = 1 << 20;
/// Longer prompts are encoded if they have at most this many bytes per token of the context; texts have 3 to 5 bytes
/// per token on average.
const PROMPT_BYTES_PER_TOKEN: usize = 32;

/// A tokenizer, ready to encode and decode.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
    byte_fallback: bool,
    bounds: Bounds,
}

impl Tokenizer {
    /// Loads `tokenizer.json`.
    ///
    /// # Errors
    /// The file is missing, too large, or not a tokenizer; the message names it.
    pub fn open(path: &Path) -> Result<Tokenizer> {
        let text = files::read_limited(path, FILE_LIMIT).help(
            "put the model's tokenizer.json there (AutoTokenizer(...).save_pretrained writes one), or name that of a \
             pack with --tokenizer FILE",
        )?;
        Tokenizer::parse(&text, path)
    }

    /// Parses the contents of a tokenizer file; `path` is used in messages.
    ///
    /// # Errors
    /// The text is not a valid tokenizer, or takes more time or memory than [`tokenizer_limits`] accepts.
    pub fn parse(text: &[u8], path: &Path) -> Result<Tokenizer> {
        let opened = tokenizer_limits::open(text).at(path);
        let (inner, bounds) = opened.help("copy tokenizer.json from the original checkpoint again")?;
        let mut tokenizer = Tokenizer { inner, path: path.to_path_buf(), byte_fallback: false, bounds };
        tokenizer.byte_fallback = tokenizer.decoder().to_string().contains("\"ByteFallback\"");
        Ok(tokenizer)
    }

    /// Returns the path of the tokenizer file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns how much longer the steps of the tokenizer can make a text.
    pub fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    /// Returns the ids of `text`, with the special tokens of the post-processor (usually a BOS).
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, true)
    }

    /// Returns the ids of `text` without adding special tokens, for text that contains them, such as a rendered chat.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, false)
    }

    /// Returns the largest size in bytes of a prompt that is worth encoding for a context of `context` tokens. A longer
    /// one certainly has more tokens than that, or would take more memory than any honest prompt.
    pub fn longest_prompt(&self, context: usize) -> usize {
        let most = PROMPT.max(context.saturating_mul(PROMPT_BYTES_PER_TOKEN));
        self.bounds.bytes_per_token.map_or(most, |bytes| most.min((bytes * context as f64) as usize))
    }

    /// Refuses a text that the normalizers and pre-tokenizers make much longer. If the bounds of the tokenizer do not
    /// rule that out, the text is normalized piece by piece to measure its length.
    fn check_growth(&self, text: &str) -> Result<()> {
        let limit = PREPARED.max(text.len().saturating_mul(PREPARED_GROWTH)) as f64;
        if text.len() as f64 * self.bounds.encode_growth <= limit {
            return Ok(());
        }
        let mut rest = text;
        let mut prepared = 0.0;
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.ceil_char_boundary(rest.len().min(PIECE)));
            let mut normalized = NormalizedString::from(piece);
            if let Some(normalizer) = self.inner.get_normalizer() {
                fenced(|| normalizer.normalize(&mut normalized)).map_err(Error::corrupt)?;
            }
            prepared += normalized.get().len() as f64 * self.bounds.pre_tokenizer_growth;
            if prepared > limit {
                let found = format!("this tokenizer makes more than {limit} bytes of a text of {} bytes", text.len());
                return Err(Error::corrupt(found).help(ORIGINAL));
            }
            rest = after;
        }
        Ok(())
    }

    fn encode_with(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        self.check_growth(text).at(&self.path)?;
        fenced(|| Ok(self.inner.encode_fast(text, special)?.get_ids().to_vec()))
            .map_err(|why| Error::corrupt(format!("cannot encode a text: {why}")))
            .at(&self.path)
            .help(ORIGINAL)
    }

    /// Returns the text of `ids`; unknown ids are skipped.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        fenced(|| self.inner.decode(ids, skip_special))
            .map_err(|why| Error::corrupt(format!("cannot decode {} tokens: {why}", ids.len())))
            .at(&self.path)
            .help(ORIGINAL)
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

    /// Returns true for a special token, which is hidden from readers, such as BOS.
    pub fn is_special(&self, id: u32) -> bool {
        self.token(id).is_some_and(|token| self.is_special_token(&token))
    }

    /// Returns the decoder as in the file; null if there is none.
    pub(super) fn decoder(&self) -> serde_json::Value {
        serde_json::to_value(self.inner.get_decoder()).unwrap_or_default()
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
        let dirs = FIXTURES.iter().copied().chain(more.split(':').filter(|d| !d.is_empty())).map(|dir| root.join(dir));
        let families = std::fs::read_dir(root.join("tests/fixtures/families")).unwrap();
        let families = families.map(|entry| entry.unwrap().path());
        dirs.chain(families).map(|dir| read(&dir)).collect()
    }

    /// Reads a fixture whose files may be compressed.
    fn read(dir: &Path) -> (Tokenizer, Value) {
        let content = |name: &str| match std::fs::read(dir.join(name)) {
            Ok(plain) => plain,
            Err(_) => zstd::decode_all(&std::fs::read(dir.join(format!("{name}.zst"))).unwrap()[..]).unwrap(),
        };
        let tokenizer = Tokenizer::parse(&content(FILE_NAME), &dir.join(FILE_NAME)).unwrap();
        (tokenizer, serde_json::from_slice(&content("golden.json")).unwrap())
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
    fn no_token_stands_for_more_bytes_than_the_bound() {
        let mut bounded = 0;
        for (tokenizer, golden) in fixtures() {
            let Some(bytes) = tokenizer.bounds().bytes_per_token else { continue };
            bounded += 1;
            let golden = golden["tokenization"].as_array().unwrap();
            let texts = golden.iter().map(|case| case["text"].as_str().unwrap());
            for text in texts.chain(["\u{0}\u{1}", "ａｂｃ", "e\u{301}가\u{1f600}", &"<s>  a".repeat(99)]) {
                let ids = tokenizer.encode_plain(text).unwrap();
                assert!(text.len() as f64 <= bytes * ids.len() as f64, "{}: {text:?}", tokenizer.path().display());
            }
        }
        assert!(bounded >= 12, "{bounded} of {}", fixtures().len());
    }

    #[test]
    fn a_tokenizer_that_makes_texts_longer_than_honest_ones_is_refused_with_long_texts() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama-gqa").join(FILE_NAME);
        let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let content = "a".repeat(30);
        json["normalizer"] = serde_json::json!({"type": "Replace", "pattern": {"String": "a"}, "content": content});
        let tokenizer = Tokenizer::parse(json.to_string().as_bytes(), &path).unwrap();
        assert!(tokenizer.encode("a little cat").is_ok());
        let error = tokenizer.encode(&"a".repeat(500_000)).unwrap_err().to_string();
        assert!(error.contains("makes more than 8388608 bytes of a text of 500000 bytes"), "{error}");
        assert!(tokenizer.check_growth(&"b".repeat(500_000)).is_ok(), "the steps leave this text as it is");
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
        assert!(error.contains("tokenizer.json") && error.contains("cannot process"), "{error}");
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
