//! Files of a pack beside its weights, such as the tokenizer and the chat template. What a reader uses is recorded.
//!
//! The field `files` of the description holds the SHA-256 of each, and the digest of the description covers them. A
//! file that is not listed was put there later and would decide answers unnoticed, so it is refused. There is one
//! exception: a chat template for a pack that records none, which [`IebinReader::added_template`] tells. A description
//! without a digest promises nothing; files beside it are read as they are.

use super::reader::plain_file_name;
use super::{COMPANIONS, IebinReader, JSON_NAME, TOKENIZER_SOURCES};
use crate::error::{Context, Error, Result};
use crate::{files, sha256, strict_json};
use std::collections::BTreeMap;

/// File of a chat template, which may be added to a pack that records none.
const TEMPLATE: &str = "chat_template.jinja";
/// File that may hold a chat template in its field `chat_template`.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Largest accepted tokenizer configuration in bytes.
const CONFIG_LIMIT: u64 = 64 << 20;

impl IebinReader {
    /// Compares a file that belongs to the pack with its recorded hash, if it is recorded or exists.
    ///
    /// # Errors
    /// The file is missing, cannot be read, has other content, or is not recorded.
    pub fn check_file(&self, name: &str) -> Result<()> {
        let Some(recorded) = &self.description.files else { return Ok(()) };
        let path = self.path(name);
        let Some(expected) = recorded.get(name) else {
            return match self.is_added(name) && (name != TEMPLATE || self.records_template()?) {
                false => Ok(()),
                true => Err(Error::corrupt(format!("found a file that {JSON_NAME} does not record"))
                    .at(&path)
                    .help("remove the file; to answer with another chat template, name it with --chat-template")),
            };
        };
        let found = sha256::of_file(&path, |_| {})?;
        if found == *expected {
            return Ok(());
        }
        Err(Error::corrupt(format!("found the SHA-256 {found}, expected {expected} from {JSON_NAME}")).at(&path).help(
            "restore the file or make the pack again; to keep a deliberate change, delete two things from \
             model.ie.json: the file's entry in `files`, and the last field, `sha256`, with the comma before it",
        ))
    }

    /// Compares every file that belongs to the pack with its recorded hash; returns their number.
    ///
    /// # Errors
    /// The same as those of [`IebinReader::check_file`].
    pub fn check_files(&self) -> Result<usize> {
        let read = COMPANIONS.into_iter().filter(|name| !TOKENIZER_SOURCES.contains(name));
        read.into_iter().try_for_each(|name| self.check_file(name))?;
        let names = self.description.files.iter().flatten();
        names.map(|(name, _)| self.check_file(plain_file_name(name)?)).try_fold(0, |n, checked| checked.map(|()| n + 1))
    }

    /// Returns the name of a chat template that was added to a pack without one. It decides the prompts of
    /// conversations, and the digest of the pack does not cover it.
    pub fn added_template(&self) -> Option<&'static str> {
        self.is_added(TEMPLATE).then_some(TEMPLATE)
    }

    /// Returns the SHA-256 of each file that belongs to the pack, by name; computes them for a pack that does not
    /// record them.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn file_digests(&self) -> Result<BTreeMap<String, String>> {
        if let Some(files) = &self.description.files {
            return Ok(files.clone());
        }
        let mut digests = BTreeMap::new();
        for name in COMPANIONS {
            if let Some(path) = files::first([self.path(name)])? {
                digests.insert(name.to_string(), sha256::of_file(&path, |_| {})?);
            }
        }
        Ok(digests)
    }

    /// Returns true for a file, or a link, that exists and that a description with a digest does not record.
    fn is_added(&self, name: &str) -> bool {
        let is_sealed = self.description.sha256.is_some();
        let recorded = self.description.files.as_ref().filter(|_| is_sealed);
        recorded.is_some_and(|files| !files.contains_key(name)) && self.path(name).symlink_metadata().is_ok()
    }

    /// Returns true if the pack records a chat template within its tokenizer configuration.
    fn records_template(&self) -> Result<bool> {
        if !self.description.files.as_ref().is_some_and(|files| files.contains_key(TOKENIZER_CONFIG)) {
            return Ok(false);
        }
        let path = self.path(TOKENIZER_CONFIG);
        let config = strict_json::parse(&files::read_limited(&path, CONFIG_LIMIT)?).at(&path)?;
        Ok(!config["chat_template"].is_null())
    }
}
