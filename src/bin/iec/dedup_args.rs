//! The options that say whether a deduplicated pack runs as it is, and what of it is kept in memory.

use crate::global::Global;
use clap::ValueEnum;
use clap::builder::FalseyValueParser;
use iec::dedup::source::{self, Trust};
use iec::dedup::{FILE_NAMES, JSON_NAME};
use iec::error::{Cause, Context, Error, Result};
use iec::iebin::reader::read_description;
use iec::iebin::rebuild::Keep;
use iec::iebin::{Description, IebinReader};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Where weights come from if not from the binary.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Deduplicated packs")]
pub struct DedupArgs {
    /// Run from the files model.dedup.*: auto where the binary is gone, 1 or on always, 0 or off never; or the directory
    /// they lie in, if it is not the pack's
    #[arg(long, value_name = "auto|on|off|DIR", env = "IE_DEDUP", default_value = "auto", hide_default_value = true)]
    dedup: Dedup,
    /// Most MiB of weights that are kept in memory once they are rebuilt; others are rebuilt each time [default: no limit].
    /// Weights that are computed with as they are stored do not count
    #[arg(long, value_name = "N", env = "IE_DEDUP_CACHE_MB")]
    dedup_cache_mb: Option<u64>,
    /// Rebuild so many bytes of weights before the first token, in the order of their use, and keep them
    #[arg(long, value_name = "BYTES", env = "IE_DEDUP_HOT_BYTES", value_parser = iec::units::parse_size)]
    dedup_hot_bytes: Option<u64>,
    /// Rebuild these tensors before the first token and keep them: names with commas between, or @FILE with one per line
    #[arg(long, value_name = "NAMES", env = "IE_DEDUP_HOT_LIST")]
    dedup_hot_list: Option<String>,
    /// Compare every byte that is stored with its checksum before the first token (exit code 3 if one is wrong). Without,
    /// weights are compared when they are rebuilt, and not where they are computed with as they are stored
    #[arg(long, env = "IE_DEDUP_STRICT", value_parser = FalseyValueParser::new())]
    dedup_strict: bool,
    /// What may be run: lossless: all that `iec dedup` writes; none: only binaries, as --dedup off
    #[arg(long, value_enum, value_name = "POLICY", env = "IE_DEDUP_POLICY", default_value = "lossless")]
    dedup_policy: Policy,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Dedup {
    #[default]
    Auto,
    On,
    Off,
    Dir(PathBuf),
}

impl FromStr for Dedup {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> std::result::Result<Dedup, Self::Err> {
        Ok(match text {
            "auto" | "" => Dedup::Auto,
            "1" | "on" => Dedup::On,
            "0" | "off" => Dedup::Off,
            dir => Dedup::Dir(dir.into()),
        })
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Policy {
    #[default]
    Lossless,
    None,
}

impl DedupArgs {
    /// Opens the pack that `json` describes, whose binary is `bin` or what the description says.
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
        let trust = if self.dedup_strict { Trust::Nothing } else { Trust::Files };
        let keep = Keep {
            limit: self.dedup_cache_mb.map(|mb| mb.saturating_mul(1 << 20)),
            hot: self.dedup_hot_list.as_deref().map(hot_list).transpose()?.unwrap_or_default(),
            hot_bytes: self.dedup_hot_bytes.unwrap_or(0),
        };
        IebinReader::open_rebuilt(description, json, source::open(json, &dir, trust)?, keep)
    }

    /// Opens the pack in `dir`.
    ///
    /// # Errors
    /// As [`DedupArgs::open`].
    pub fn open_pack(&self, dir: &Path) -> Result<IebinReader> {
        let json = dir.join(iec::iebin::JSON_NAME);
        self.open(read_description(&json)?, &json, None)
    }

    /// Where the store lies, if it is to be read.
    fn dir(&self, beside: &Path, bin: Option<&Path>, binary: &Path) -> Result<Option<PathBuf>> {
        let dir = match &self.dedup {
            Dedup::Off => None,
            Dedup::Auto => {
                let gone = bin.is_none() && !binary.exists() && beside.join(JSON_NAME).exists();
                Some(beside.to_path_buf()).filter(|_| gone && self.dedup_policy == Policy::Lossless)
            }
            Dedup::On => Some(beside.to_path_buf()),
            Dedup::Dir(dir) => Some(dir.clone()),
        };
        let asked = matches!(self.dedup, Dedup::On | Dedup::Dir(_));
        if asked && self.dedup_policy == Policy::None {
            let found = "--dedup asks for what --dedup-policy none (IE_DEDUP_POLICY) forbids";
            return Err(Error::usage(found).help("leave one of the two out"));
        }
        if asked && bin.is_some() {
            let found = "--dedup and --model-bin both say where the weights are";
            return Err(Error::usage(found).help("leave one of the two out"));
        }
        Ok(dir)
    }

    /// Notes on stderr about what was asked for and changes nothing for this pack.
    pub fn tell_what_is_useless(&self, reader: &IebinReader, global: &Global) {
        if reader.rebuilt().is_some() {
            return;
        }
        let given = [
            ("IE_DEDUP_CACHE_MB", self.dedup_cache_mb.is_some()),
            ("IE_DEDUP_HOT_BYTES", self.dedup_hot_bytes.is_some()),
            ("IE_DEDUP_HOT_LIST", self.dedup_hot_list.is_some()),
            ("IE_DEDUP_STRICT", self.dedup_strict),
        ];
        for (name, _) in given.into_iter().filter(|(_, given)| *given) {
            global
                .note(format!("{name}: no effect, the weights are in the binary (--dedup on runs from model.dedup.*)"));
        }
    }
}

/// A store is four files.
fn refuse_missing(dir: &Path) -> Result<()> {
    let Some(missing) = [JSON_NAME].into_iter().chain(FILE_NAMES).map(|name| dir.join(name)).find(|f| !f.exists())
    else {
        return Ok(());
    };
    Err(Error::new(Cause::Model("missing; a deduplicated pack is model.dedup.json and three files of streams".into()))
        .at(&missing)
        .help("bring it back from a backup, or make all four again from the binary: `iec dedup --model-dir DIR`"))
}

/// Names with commas between, or in a file.
fn hot_list(text: &str) -> Result<Vec<String>> {
    let (text, separator) = match text.strip_prefix('@') {
        Some(path) => (std::fs::read_to_string(path).at(path).tensor("IE_DEDUP_HOT_LIST")?, '\n'),
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
            ("auto", Dedup::Auto),
            ("1", Dedup::On),
            ("on", Dedup::On),
            ("0", Dedup::Off),
            ("off", Dedup::Off),
            ("packs/x", Dedup::Dir("packs/x".into())),
        ] {
            assert_eq!(text.parse::<Dedup>(), Ok(expected), "{text}");
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
