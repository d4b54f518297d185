//! Collects the files that belong to the weights: configuration, tokenizer, chat template.

use super::json::Pairs;
use super::tokenizer_files::MadeTokenizer;
use crate::error::{Context, Error, Result};
use crate::iebin::{COMPANIONS, TOKENIZER_SOURCES};
use crate::job::Job;
use crate::output::AtomicFile;
use crate::sha256::{Digest, Sha256, hex};
use crate::strict_json;
use crate::tokenizer_limits;
use serde::de::IgnoredAny;
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Name of the tokenizer in a checkpoint and in a pack.
pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// Names of all companion files that a pack may have.
pub(crate) const NAMES: &[&str] = &COMPANIONS;

/// The companions of one pack, complete in memory.
pub(super) struct Companions {
    files: Vec<(&'static str, Vec<u8>)>,
    /// Names of those from which the tokenizer was made.
    tokenizer_from: Vec<String>,
}

/// Returns the names of the files that every pack gets from its checkpoint, if they exist there.
pub(super) fn always_copied() -> impl Iterator<Item = &'static str> {
    COMPANIONS.into_iter().filter(|name| !TOKENIZER_SOURCES.contains(name))
}

/// Refuses content that is not valid for the companion file called `name` of a model whose embedding has `rows` rows.
pub(crate) fn check(name: &str, bytes: &[u8], rows: usize) -> Result<()> {
    if name.ends_with(".jinja") {
        return std::str::from_utf8(bytes)
            .map(drop)
            .map_err(|e| Error::corrupt(format!("found bytes that are not UTF-8: {e}")));
    }
    let text = if name == TOKENIZER { Cow::Borrowed(bytes) } else { strict_json::from_python(bytes) };
    let Pairs::<IgnoredAny>(_) =
        serde_json::from_slice(&text).map_err(|e| Error::corrupt(format!("expected a JSON object: {e}")))?;
    if name == TOKENIZER {
        // What cannot be opened here could not be opened in the pack either.
        let opened = tokenizer_limits::open(bytes);
        let (_, bounds) =
            opened.help("use the tokenizer.json of the original model, or another one with --tokenizer")?;
        bounds.check_vocabulary(rows)?;
    }
    Ok(())
}

impl Companions {
    /// Creates companions with these names and contents.
    pub(super) fn new(files: Vec<(&'static str, Vec<u8>)>) -> Companions {
        Companions { files, tokenizer_from: Vec::new() }
    }

    /// Creates companions that are copied from a pack, whose tokenizer was made from the files `made_from`.
    pub(super) fn copied(files: Vec<(&'static str, Vec<u8>)>, made_from: Vec<String>) -> Companions {
        Companions { files, tokenizer_from: made_from }
    }

    /// Adds a tokenizer that was made from other files, and these files.
    pub(super) fn add_made(&mut self, tokenizer: MadeTokenizer) {
        self.files.push((TOKENIZER, tokenizer.json));
        self.tokenizer_from = tokenizer.sources.iter().map(|file| file.name.to_string()).collect();
        self.files.extend(tokenizer.sources.into_iter().map(|file| (file.name, file.bytes)));
    }

    /// Returns the name of the tokenizer, if there is one.
    pub(super) fn tokenizer(&self) -> Option<String> {
        self.files.iter().any(|(name, _)| *name == TOKENIZER).then(|| TOKENIZER.to_string())
    }

    /// Returns the names of the files from which the tokenizer was made; empty if it was copied.
    pub(super) fn tokenizer_from(&self) -> Vec<String> {
        self.tokenizer_from.clone()
    }

    /// Writes the files, to be committed with the pack.
    pub(super) fn write(&self, job: &Job) -> Result<Vec<AtomicFile>> {
        self.files.iter().map(|(name, bytes)| job.small_file(name, bytes)).collect()
    }

    /// Returns the SHA-256 of each file in hex, by name.
    pub(super) fn digests(&self) -> BTreeMap<String, String> {
        self.files.iter().map(|(name, bytes)| (name.to_string(), hex(Sha256::new_with_prefix(bytes)))).collect()
    }
}
