//! Converts `vocab.json` and `merges.txt`, the files of byte-level BPE of GPT-2 and Qwen.
//!
//! The first holds the id of each token, the second a merge on each line, the most important one first. How a text is
//! divided into words is known from the class of the tokenizer.

use super::settings::{RuleRow, Settings};
use super::vocabulary::Vocabulary;
use crate::convert::gguf::pre::QWEN2;
use crate::convert::json::Pairs;
use crate::convert::tokenizer_json::{self, MERGES_PER_TOKEN, bpe, byte_level, words};
use crate::error::{Context, Error, Result};
use serde_json::{Value, json};

/// Like that of Qwen 2, but marks belong to letters.
const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// Rules of a class of tokenizers.
#[derive(Debug)]
struct WordRules {
    /// Pattern of words; `None` for that of GPT-2, which is built into the byte-level step.
    pattern: Option<&'static str>,
    /// True if texts are first brought to Unicode normalization form C.
    nfc: bool,
    /// Special tokens that the class has where the settings name none.
    special: &'static [&'static str],
}

const END_OF_TEXT: &[&str] = &["<|endoftext|>"];

const CLASSES: &[RuleRow<WordRules>] = &[
    RuleRow {
        classes: &["GPT2Tokenizer"],
        model_types: &["gpt2"],
        rules: WordRules { pattern: None, nfc: false, special: END_OF_TEXT },
    },
    RuleRow {
        classes: &["Qwen2Tokenizer"],
        model_types: &[
            "qwen2",
            "qwen2_moe",
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen3",
            "qwen3_moe",
            "qwen3_next",
            "qwen3_vl",
            "qwen3_vl_moe",
        ],
        rules: WordRules { pattern: Some(QWEN2), nfc: true, special: END_OF_TEXT },
    },
    RuleRow {
        classes: &["Qwen3_5Tokenizer"],
        model_types: &["qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"],
        rules: WordRules { pattern: Some(QWEN35), nfc: true, special: END_OF_TEXT },
    },
];

/// Returns the tokenizer.json of these two files.
///
/// # Errors
/// A file is damaged, they contradict each other, or the rules of their class are not known.
pub(super) fn tokenizer_json(vocab: &[u8], merges: &[u8], settings: &Settings) -> Result<Vec<u8>> {
    let class = settings.row("vocab.json and merges.txt", CLASSES)?;
    let Pairs::<u32>(tokens) =
        serde_json::from_slice(vocab).map_err(|e| Error::corrupt(format!("not a vocabulary: {e}")))?;
    let mut vocabulary = Vocabulary::default();
    for (text, id) in tokens {
        vocabulary.insert(id, text)?;
    }
    let merges = read_merges(merges, &vocabulary).tensor("merges.txt")?;
    vocabulary.add_listed(settings, class.special)?;
    let add_prefix_space = settings.flag("add_prefix_space")?.unwrap_or(false);
    let pre_tokenizer = match class.pattern {
        Some(pattern) => words(pattern, add_prefix_space),
        None => byte_level(add_prefix_space, true),
    };
    let normalizer = if class.nfc { json!({"type": "NFC"}) } else { Value::Null };
    let post_processor = vocabulary.post_processor(settings, [class.special.first().copied(); 2], [false, false])?;
    let parts = [normalizer, pre_tokenizer, post_processor, byte_level(true, true)];
    Ok(tokenizer_json::file(vocabulary.added_json(), parts, bpe(vocabulary.json(), merges)))
}

/// Reads the merges: two tokens on each line, whose concatenation is a token, too. The first line may be a comment.
fn read_merges(text: &[u8], vocabulary: &Vocabulary) -> Result<Vec<String>> {
    let text = std::str::from_utf8(text).map_err(|e| Error::corrupt(format!("found bytes that are not UTF-8: {e}")))?;
    let limit = MERGES_PER_TOKEN * vocabulary.len();
    let mut merges = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.is_empty() || number == 1 && line.starts_with("#version") {
            continue;
        }
        let known = |(left, right): &(&str, &str)| {
            [left, right, &&*[*left, *right].concat()].iter().all(|text| vocabulary.id(text).is_some())
        };
        if line.split_once(' ').filter(known).is_none() {
            let found = format!("line {number}: found `{line:.60}`, expected two tokens that make another");
            return Err(Error::corrupt(found));
        }
        if merges.len() == limit {
            return Err(Error::unsupported(format!("found more than the limit of {limit} merges")));
        }
        merges.push(line.to_string());
    }
    Ok(merges)
}
