//! The files that travel with the weights: configuration, tokenizer, chat template.

use crate::convert::Checkpoint;
use crate::convert::json::{Pairs, read_limited};
use crate::error::{Context, Error, Result};
use crate::iebin::COMPANIONS;
use crate::job::Job;
use crate::output::AtomicFile;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::io::Write;
use std::path::Path;

/// Name of the tokenizer in a checkpoint and in a pack.
pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// All files that a pack may carry along.
pub(crate) const NAMES: &[&str] = &COMPANIONS;

/// The companions a checkpoint has, read and checked.
pub(super) struct Companions(Vec<(&'static str, Vec<u8>)>);

/// Reads the companions; `tokenizer` replaces the checkpoint's tokenizer.json.
pub(super) fn collect(checkpoint: &Checkpoint, tokenizer: Option<&Path>) -> Result<Companions> {
    let mut files = Vec::new();
    for name in NAMES {
        let path = match tokenizer {
            Some(path) if *name == TOKENIZER => Some(path.to_path_buf()),
            _ => checkpoint.companion(name)?,
        };
        if let Some(path) = path {
            let bytes = read_limited(&path)?;
            check(name, &bytes).at(&path)?;
            files.push((*name, bytes));
        }
    }
    Ok(Companions(files))
}

#[derive(Deserialize)]
struct TokenizerShape {
    #[serde(rename = "model")]
    _model: Pairs<IgnoredAny>,
}

/// Refuses what cannot be the companion of that name.
pub(crate) fn check(name: &str, bytes: &[u8]) -> Result<()> {
    if name.ends_with(".jinja") {
        return std::str::from_utf8(bytes).map(drop).map_err(|e| Error::corrupt(format!("not UTF-8 text: {e}")));
    }
    let Pairs::<IgnoredAny>(_) =
        serde_json::from_slice(bytes).map_err(|e| Error::corrupt(format!("not a JSON object: {e}")))?;
    if name == TOKENIZER {
        // Values are skipped, not built: the vocabulary of a large tokenizer would take hundreds of MiB.
        serde_json::from_slice::<TokenizerShape>(bytes).map_err(|e| {
            Error::corrupt(format!("not a tokenizer: {e}"))
                .help("expected a tokenizer.json of the Hugging Face `tokenizers` library; give one with --tokenizer")
        })?;
    }
    Ok(())
}

impl Companions {
    pub(super) fn has_tokenizer(&self) -> bool {
        self.0.iter().any(|(name, _)| *name == TOKENIZER)
    }

    /// Writes the files, to be committed with the pack.
    pub(super) fn write(&self, job: &Job) -> Result<Vec<AtomicFile>> {
        let write = |(name, bytes): &(&str, Vec<u8>)| {
            let mut file = job.atomic_file(name)?;
            file.write_all(bytes).at(file.path())?;
            Ok(file)
        };
        self.0.iter().map(write).collect()
    }

    /// Companions that this pack does not have; one that an older pack left behind would be wrong.
    pub(super) fn obsolete(&self) -> Vec<&'static str> {
        NAMES.iter().copied().filter(|name| self.0.iter().all(|(have, _)| have != name)).collect()
    }
}
