//! Makes a tokenizer.json for checkpoints without one, from the files of the tokenizer that the model was trained with.
//!
//! | files | module |
//! |---|---|
//! | `tekken.json` of Mistral, files of `tiktoken` | `ranked` |
//! | `tokenizer.model` of SentencePiece | `sentence_piece` |
//! | `vocab.json` and `merges.txt` | `listed` |
//!
//! The files are untrusted. What they do not say (the division of a text into words, the tokens around a text) is known
//! from the class of the tokenizer or the type of the model; a class whose rules are not known is refused, because
//! other rules would give other tokens.

mod listed;
mod proto;
mod ranked;
mod sentence_piece;
mod settings;
mod vocabulary;

use super::companions::TOKENIZER;
use super::json::{read_limited, read_object};
use super::source::layout::Layout;
use crate::error::{Context, Error, Result};
use crate::iebin::TOKENIZER_SOURCES;
use crate::tokenizer_limits;
use serde_json::Value;
use settings::{ADDED_TOKENS, CONFIG, SPECIAL_TOKENS, Settings};
use std::path::{Path, PathBuf};

/// Name of the merges that belong to a `vocab.json`.
const MERGES: &str = "merges.txt";
/// Names of the vocabularies, in the order of preference.
const VOCABULARIES: [&str; 5] = ["tekken.json", "tokenizer.model", "tiktoken.model", "qwen.tiktoken", "vocab.json"];

/// A file of a checkpoint, complete in memory.
#[derive(Debug, Clone)]
pub struct SourceFile {
    /// Name of the file.
    pub name: &'static str,
    /// Path of the file, for messages.
    pub path: PathBuf,
    /// Content of the file.
    pub bytes: Vec<u8>,
}

/// A tokenizer.json that was made from other files.
#[derive(Debug)]
pub struct MadeTokenizer {
    /// Content of the tokenizer.json.
    pub json: Vec<u8>,
    /// The files that it was made from, without the settings that every pack has.
    pub sources: Vec<SourceFile>,
}

/// Returns the names of all files that may decide about a tokenizer.
pub fn names() -> impl Iterator<Item = &'static str> {
    TOKENIZER_SOURCES.into_iter().chain([CONFIG, SPECIAL_TOKENS])
}

/// Makes a tokenizer.json from the files of a checkpoint; `config` is its configuration. Returns `None` if it has no
/// vocabulary.
///
/// # Errors
/// A file cannot be read, and the errors of [`make`].
pub fn of_checkpoint(layout: &Layout, config: &Path) -> Result<Option<MadeTokenizer>> {
    let mut files = Vec::new();
    for name in names() {
        if let Some(path) = layout.companion(name)? {
            files.push(SourceFile { name, bytes: read_limited(&path)?, path });
        }
    }
    let config = read_object(config)?;
    let types = [config.get("model_type"), config.get("text_config").map(|part| &part["model_type"])];
    let types: Vec<&str> = types.into_iter().flatten().filter_map(Value::as_str).collect();
    make(files, &types)
}

/// Makes a tokenizer.json from `files`, which are those of [`names`] that a checkpoint has; returns `None` if there is
/// no vocabulary among them. `model_types` are the types of the model as in its config.json.
///
/// # Errors
/// A file is damaged, or the rules of the tokenizer are not known.
pub fn make(files: Vec<SourceFile>, model_types: &[&str]) -> Result<Option<MadeTokenizer>> {
    let find = |name: &str| files.iter().find(|file| file.name == name);
    let Some(vocabulary) = VOCABULARIES.iter().find_map(|name| find(name)) else { return Ok(None) };
    let mut settings = Settings::new(model_types);
    for file in [CONFIG, ADDED_TOKENS, SPECIAL_TOKENS].into_iter().filter_map(find) {
        settings.read(file.name, &file.bytes).at(&file.path)?;
    }
    let mut used = vec![vocabulary.name, ADDED_TOKENS];
    let bytes = &vocabulary.bytes;
    let json = match vocabulary.name {
        _ if bytes.is_empty() => Err(Error::corrupt("found an empty file")),
        "tekken.json" => ranked::tekken(bytes, &settings),
        "tokenizer.model" if sentence_piece::is_at(bytes) => sentence_piece::tokenizer_json(bytes, settings),
        "vocab.json" => {
            used.push(MERGES);
            let merges = find(MERGES).ok_or_else(|| Error::unsupported("found no merges.txt beside this file"));
            merges.and_then(|merges| listed::tokenizer_json(bytes, &merges.bytes, &settings))
        }
        _ => ranked::tiktoken(bytes, &settings),
    };
    let json = json.and_then(parsed).at(&vocabulary.path).help(
        "give the model's tokenizer.json with --tokenizer FILE; AutoTokenizer(...).save_pretrained of transformers \
         writes one",
    )?;
    let sources = files.into_iter().filter(|file| used.contains(&file.name)).collect();
    Ok(Some(MadeTokenizer { json, sources }))
}

/// Refuses a file that the crate which uses it cannot parse, such as one whose merges contradict its vocabulary.
fn parsed(json: Vec<u8>) -> Result<Vec<u8>> {
    tokenizer_limits::open(&json).tensor(TOKENIZER)?;
    Ok(json)
}

#[cfg(test)]
mod tests;
