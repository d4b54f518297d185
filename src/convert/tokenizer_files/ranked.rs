//! Converts vocabularies of byte-level BPE whose order gives the merges: the files of `tiktoken` and Mistral's
//! `tekken.json`.
//!
//! A file of `tiktoken` has a line for each token: its bytes in base64 and its rank. It says neither how a text is
//! divided into words nor which special tokens there are; both are known from the class of the tokenizer. A
//! `tekken.json` holds the pattern that divides a text, the tokens in the order of their ranks, and the special tokens,
//! which have the lowest ids.

use super::settings::{AddedToken, RuleRow, Settings};
use super::vocabulary::Vocabulary;
use crate::convert::gguf::pre::{LLAMA3, QWEN2};
use crate::convert::tokenizer_json::{self, MOST_ADDED, MOST_TOKENS, bpe, byte_level, words};
use crate::error::{Context, Error, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Deserialize;
use serde_json::{Value, json};
use std::borrow::Cow;

/// Runs of Han characters, and words as in o200k without Han characters.
const KIMI: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// Rules of a class of tokenizers with a file of `tiktoken`.
#[derive(Debug)]
struct TiktokenRules {
    pattern: &'static str,
    /// True if texts are first brought to Unicode normalization form C.
    nfc: bool,
    adds_bos: bool,
    special: SpecialTokens,
}

/// Special tokens that follow the tokens of the file.
#[derive(Debug)]
enum SpecialTokens {
    /// Special tokens of `tokenizer_config.json`, which must list some.
    Listed,
    /// Number of tokens `<|reserved_token_ID|>`, some of which have another text in `tokenizer_config.json`.
    Reserved(u32),
    /// Texts of the special tokens, and number of tokens `<|extra_0|>` and so on that follow.
    Fixed(&'static [&'static str], u32),
}

const CLASSES: &[RuleRow<TiktokenRules>] = &[
    RuleRow {
        classes: &["TikTokenTokenizer"],
        model_types: &["kimi_k2"],
        rules: TiktokenRules { pattern: KIMI, nfc: false, adds_bos: false, special: SpecialTokens::Reserved(258) },
    },
    RuleRow {
        classes: &["QWenTokenizer"],
        model_types: &["qwen"],
        rules: TiktokenRules {
            pattern: QWEN2,
            nfc: true,
            adds_bos: false,
            special: SpecialTokens::Fixed(&["<|endoftext|>", "<|im_start|>", "<|im_end|>"], 205),
        },
    },
    RuleRow {
        classes: &[],
        model_types: &["llama"],
        rules: TiktokenRules { pattern: LLAMA3, nfc: false, adds_bos: true, special: SpecialTokens::Listed },
    },
];

/// Special tokens of files of tekken that list none.
const TEKKEN_SPECIAL: [&str; 20] = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];

/// Returns the tokenizer.json of a file of `tiktoken`.
///
/// # Errors
/// The file is damaged, or the rules of its class are not known.
pub(super) fn tiktoken(text: &[u8], settings: &Settings) -> Result<Vec<u8>> {
    let tokens = read_tiktoken(text)?;
    let class = settings.row("a file of tiktoken", CLASSES)?;
    let mut vocabulary = Vocabulary::default();
    let merges = vocabulary.insert_ranked(&tokens, 0)?;
    let first = vocabulary.next_id();
    vocabulary.add_listed(settings, &[])?;
    match class.special {
        SpecialTokens::Listed if settings.listed().next().is_none() => {
            let found = "found no special tokens, expected a list of them with their ids";
            return Err(Error::unsupported(found).tensor("added_tokens_decoder"));
        }
        SpecialTokens::Listed => {}
        SpecialTokens::Reserved(count) => {
            for id in first..first.saturating_add(count) {
                if vocabulary.text(id).is_none() {
                    vocabulary.add(id, AddedToken::special(format!("<|reserved_token_{id}|>")))?;
                }
            }
        }
        SpecialTokens::Fixed(texts, extra) => {
            let extra = (0..extra).map(|number| format!("<|extra_{number}|>"));
            for (id, text) in (first..).zip(texts.iter().map(|text| text.to_string()).chain(extra)) {
                vocabulary.add(id, AddedToken::special(text))?;
            }
        }
    }
    let post_processor = vocabulary.post_processor(settings, [None, None], [class.adds_bos, false])?;
    let normalizer = if class.nfc { json!({"type": "NFC"}) } else { Value::Null };
    Ok(file(&vocabulary, merges, normalizer, class.pattern, post_processor))
}

fn file(vocabulary: &Vocabulary, merges: Vec<String>, normalizer: Value, pattern: &str, post: Value) -> Vec<u8> {
    let mut model = bpe(vocabulary.json(), merges);
    // A word that is a token is taken as it is, even if no merges lead to it.
    model["ignore_merges"] = json!(true);
    let parts = [normalizer, words(pattern, false), post, byte_level(true, true)];
    tokenizer_json::file(vocabulary.added_json(), parts, model)
}

/// Returns the tokens of a file of `tiktoken` with their ranks.
fn read_tiktoken(text: &[u8]) -> Result<Vec<(Vec<u8>, u32)>> {
    let mut tokens = Vec::new();
    for (number, line) in (1..).zip(text.split(|byte| *byte == b'\n')) {
        let line = line.trim_ascii();
        if line.is_empty() {
            continue;
        }
        if tokens.len() == MOST_TOKENS {
            return Err(Error::unsupported(format!("found more than {MOST_TOKENS} tokens")));
        }
        let wrong = || {
            let found = String::from_utf8_lossy(&line[..line.len().min(60)]).into_owned();
            Error::corrupt(format!("line {number}: found `{found}`, expected a token in base64 and its rank"))
        };
        let space = line.iter().position(|byte| *byte == b' ').ok_or_else(wrong)?;
        let (token, rank) = (&line[..space], line[space..].trim_ascii());
        let token = BASE64.decode(token).ok().filter(|token| !token.is_empty()).ok_or_else(wrong)?;
        let rank = std::str::from_utf8(rank).ok().and_then(|rank| rank.parse().ok()).ok_or_else(wrong)?;
        tokens.push((token, rank));
    }
    Ok(tokens)
}

/// A `tekken.json`. Its parts for images and sound are of no use to a language model.
#[derive(Deserialize)]
struct Tekken<'a> {
    config: TekkenConfig,
    #[serde(borrow)]
    vocab: Vec<TekkenToken<'a>>,
    #[serde(borrow)]
    special_tokens: Option<Vec<TekkenSpecial<'a>>>,
}

#[derive(Deserialize)]
struct TekkenConfig {
    pattern: String,
    default_vocab_size: Option<usize>,
    default_num_special_tokens: Option<usize>,
}

#[derive(Deserialize)]
struct TekkenToken<'a> {
    rank: u32,
    #[serde(borrow)]
    token_bytes: Cow<'a, str>,
}

#[derive(Deserialize)]
struct TekkenSpecial<'a> {
    rank: usize,
    #[serde(borrow)]
    token_str: Cow<'a, str>,
}

/// Returns the tokenizer.json of a `tekken.json`.
///
/// # Errors
/// The file is damaged.
pub(super) fn tekken(text: &[u8], settings: &Settings) -> Result<Vec<u8>> {
    let tekken: Tekken<'_> =
        serde_json::from_slice(text).map_err(|e| Error::corrupt(format!("not a tekken.json: {e}")))?;
    let special = tekken.special_tokens()?;
    let most = tekken.config.default_vocab_size.map_or(Ok(usize::MAX), |all| {
        let found = || format!("found {all}, expected at least the {} special tokens", special.len());
        all.checked_sub(special.len()).ok_or_else(|| Error::corrupt(found()).tensor("config.default_vocab_size"))
    })?;
    let mut tokens = Vec::new();
    for (rank, token) in (0..).zip(tekken.vocab.iter().take(most)) {
        let place = || format!("vocab[{rank}]");
        if token.rank != rank {
            return Err(Error::corrupt(format!("found the rank {}, expected {rank}", token.rank)).tensor(place()));
        }
        let bytes = BASE64.decode(&*token.token_bytes).ok().filter(|bytes| !bytes.is_empty());
        let wrong = || Error::corrupt(format!("found `{:.60}`, expected base64", token.token_bytes)).tensor(place());
        tokens.push((bytes.ok_or_else(wrong)?, rank));
    }
    let mut vocabulary = Vocabulary::default();
    let merges = vocabulary.insert_ranked(&tokens, special.len() as u32).tensor("vocab")?;
    for (id, text) in (0..).zip(special) {
        vocabulary.add(id, AddedToken::special(text)).tensor("special_tokens")?;
    }
    vocabulary.add_listed(settings, &[])?;
    let post_processor = vocabulary.post_processor(settings, [Some("<s>"), Some("</s>")], [true, false])?;
    Ok(file(&vocabulary, merges, Value::Null, &tekken.config.pattern, post_processor))
}

impl Tekken<'_> {
    /// Returns the texts of the special tokens by id. Ids without a text have a placeholder.
    fn special_tokens(&self) -> Result<Vec<String>> {
        let mut texts: Vec<String> = match &self.special_tokens {
            None => TEKKEN_SPECIAL.map(String::from).to_vec(),
            Some(tokens) => {
                let mut tokens: Vec<_> = tokens.iter().collect();
                tokens.sort_by_key(|token| token.rank);
                if let Some((expected, token)) = (0..).zip(&tokens).find(|(expected, token)| token.rank != *expected) {
                    let found = format!("found the rank {}, expected {expected}", token.rank);
                    return Err(Error::corrupt(found).tensor("special_tokens"));
                }
                tokens.iter().map(|token| token.token_str.clone().into_owned()).collect()
            }
        };
        let count = self.config.default_num_special_tokens.unwrap_or(texts.len());
        if count < texts.len() || count > MOST_ADDED {
            let found = format!("found {count}, expected {} to {MOST_ADDED}", texts.len());
            return Err(Error::corrupt(found).tensor("config.default_num_special_tokens"));
        }
        texts.extend((texts.len()..count).map(|id| format!("<SPECIAL_{id}>")));
        Ok(texts)
    }
}
