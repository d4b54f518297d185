//! Opens packs whose weights are in a binary or, deduplicated, in the files `model.dedup.*`.

use crate::dedup::source::{self, Trust};
use crate::dedup::{FILE_NAMES, JSON_NAME};
use crate::error::{Cause, Context, Error, Result};
use crate::files::{self, TEXT_LIMIT};
use crate::iebin::reader::read_description;
use crate::iebin::rebuild::Keep;
use crate::iebin::{Description, IebinReader};
use crate::progress;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Source of the weights of a deduplicated pack, and the rebuilt weights that stay in memory.
#[derive(Debug, Clone, Default)]
pub struct DedupOptions {
    /// Source of the weights: the binary or the deduplicated files.
    pub store: StoreUse,
    /// Maximum number of bytes of rebuilt weights kept in memory; `None` = 7/8 of the memory that is left.
    pub cache_bytes: Option<u64>,
    /// Number of bytes of weights to rebuild when the pack is opened, in the order of their use, and to keep in
    /// memory.
    pub hot_bytes: Option<u64>,
    /// Tensors to rebuild when the pack is opened and to keep in memory: names separated by commas, or `@FILE` with
    /// one name per line.
    pub hot_list: Option<String>,
    /// Compare every stored byte with its checksum when the pack is opened.
    pub strict: bool,
}

/// Choice between the binary and the deduplicated files as the source of weights.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum StoreUse {
    /// The deduplicated files next to the description if the binary does not exist, else the binary.
    #[default]
    Auto,
    /// Always the deduplicated files next to the description.
    Always,
    /// Always the binary.
    Never,
    /// The deduplicated files in this directory.
    Dir(PathBuf),
}

impl FromStr for StoreUse {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> std::result::Result<StoreUse, Self::Err> {
        Ok(match text {
            "auto" | "" => StoreUse::Auto,
            "1" | "on" => StoreUse::Always,
            "0" | "off" => StoreUse::Never,
            dir => StoreUse::Dir(dir.into()),
        })
    }
}

impl DedupOptions {
    /// Opens the pack that `json` describes, with the binary `bin`; by default the binary that the description names.
    ///
    /// # Errors
    /// Files are missing or invalid, or two options contradict each other.
    pub fn open(&self, description: Description, json: &Path, bin: Option<&Path>) -> Result<IebinReader> {
        let beside = json.parent().unwrap_or(Path::new(""));
        let binary = bin.map_or_else(|| beside.join(&description.weights_bin), Path::to_path_buf);
        let Some(dir) = self.dir(beside, bin, &binary)? else {
            return IebinReader::open_described(description, json, bin);
        };
        refuse_missing(&dir)?;
        let trust = if self.strict { Trust::Nothing } else { Trust::Files };
        let keep = Keep {
            limit: self.cache_bytes,
            hot: self.hot_list.as_deref().map(hot_list).transpose()?.unwrap_or_default(),
            hot_bytes: self.hot_bytes.unwrap_or(0),
        };
        IebinReader::open_rebuilt(description, json, source::open(json, &dir, trust)?, keep)
    }

    /// Opens the pack in `dir`.
    ///
    /// # Errors
    /// The same as those of [`DedupOptions::open`].
    pub fn open_pack(&self, dir: &Path) -> Result<IebinReader> {
        let json = dir.join(crate::iebin::JSON_NAME);
        self.open(read_description(&json)?, &json, None)
    }

    /// Returns the directory of the deduplicated files; `None` if the weights are read from the binary.
    fn dir(&self, beside: &Path, bin: Option<&Path>, binary: &Path) -> Result<Option<PathBuf>> {
        match &self.store {
            StoreUse::Never => Ok(None),
            StoreUse::Auto => {
                let gone = bin.is_none() && !files::exists(binary)? && files::exists(&beside.join(JSON_NAME))?;
                Ok(gone.then(|| beside.to_path_buf()))
            }
            StoreUse::Always | StoreUse::Dir(_) if bin.is_some() => {
                let found = "--dedup cannot be used with --model-bin";
                Err(Error::usage(found).help("leave one of the two out"))
            }
            StoreUse::Always => Ok(Some(beside.to_path_buf())),
            StoreUse::Dir(dir) => Ok(Some(dir.clone())),
        }
    }

    /// Prints a note for each option that has no effect because the weights are read from the binary.
    pub(super) fn note_options_without_effect(&self) {
        let given = [
            ("IE_DEDUP_CACHE_MB", self.cache_bytes.is_some()),
            ("IE_DEDUP_HOT_BYTES", self.hot_bytes.is_some()),
            ("IE_DEDUP_HOT_LIST", self.hot_list.is_some()),
            ("IE_DEDUP_STRICT", self.strict),
        ];
        for (name, _) in given.into_iter().filter(|(_, given)| *given) {
            progress::detail(0, || {
                format!("{name}: no effect, the weights are in the binary (--dedup on runs from model.dedup.*)")
            });
        }
    }
}

/// Fails if one of the four files of a deduplicated pack is missing in `dir`.
fn refuse_missing(dir: &Path) -> Result<()> {
    for path in [JSON_NAME].into_iter().chain(FILE_NAMES).map(|name| dir.join(name)) {
        if !files::exists(&path)? {
            let found = "found no such file, expected it with the other files model.dedup.*";
            return Err(Error::new(Cause::Model(found.into())).at(&path).help(
                "restore it from a backup or, if model.ie.bin is there, write all four files again with \
                 `iec dedup --model-dir DIR`",
            ));
        }
    }
    Ok(())
}

/// Parses tensor names that are separated by commas, or reads them from `@FILE`.
fn hot_list(text: &str) -> Result<Vec<String>> {
    let (text, separator) = match text.strip_prefix('@') {
        Some(path) => (files::read_text(Path::new(path), TEXT_LIMIT).tensor("IE_DEDUP_HOT_LIST")?, '\n'),
        None => (text.to_string(), ','),
    };
    Ok(text.split(separator).map(str::trim).filter(|name| !name.is_empty()).map(String::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_numbers_switch_and_everything_else_is_a_directory() {
        for (text, expected) in [
            ("auto", StoreUse::Auto),
            ("1", StoreUse::Always),
            ("on", StoreUse::Always),
            ("0", StoreUse::Never),
            ("off", StoreUse::Never),
            ("packs/x", StoreUse::Dir("packs/x".into())),
        ] {
            assert_eq!(text.parse::<StoreUse>(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn a_list_of_names_is_text_or_a_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "a.weight\n\n b \n").unwrap();
        let expected = ["a.weight", "b"].map(String::from);
        assert_eq!(hot_list(&format!("@{}", file.path().display())).unwrap(), expected);
        assert_eq!(hot_list("a.weight, b,").unwrap(), expected);
        assert_eq!(hot_list("@/nowhere").unwrap_err().file(), Some(Path::new("/nowhere")));
    }
}
