//! Models of the directory that `iec serve --models-dir` names.

use iec::error::{Context, Error, Result};
use iec::models::{Description, Places};
use iec::serve::config::model_name;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Largest number of models of a directory.
const MOST_MODELS: usize = 256;

/// Model of a directory.
#[derive(Debug, PartialEq, Eq)]
pub struct Found {
    /// Name in requests: that of the directory or of the GGUF file.
    pub name: String,
    /// Path of the model.
    pub path: PathBuf,
}

/// Finds the packs, checkpoints and GGUF files directly below a directory, in the order of their names. `note` gets a
/// line for each other entry that is not hidden.
///
/// # Errors
/// The directory cannot be read, or holds no model or too many.
pub fn scan(dir: &Path, places: &Places, mut note: impl FnMut(String)) -> Result<Vec<Found>> {
    let entries: Vec<PathBuf> = (std::fs::read_dir(dir).at(dir)?)
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<std::io::Result<_>>()
        .at(dir)?;
    let mut found = Vec::new();
    for path in entries {
        let Some(file) = path.file_name().map(OsStr::to_string_lossy).filter(|name| !name.starts_with('.')) else {
            continue;
        };
        let name = file.strip_suffix(".gguf").unwrap_or(&file);
        match (Description::of(&path, places), model_name(name)) {
            (Ok(_), Ok(name)) => found.push(Found { name, path: path.clone() }),
            (Ok(_), Err(why)) => note(format!("{} is not served: {why}", path.display())),
            (Err(e), _) => note(format!("{} is not served: {}", path.display(), e.cause())),
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = found.windows(2).find(|pair| pair[0].name == pair[1].name) {
        let [first, second] = [&pair[0].path, &pair[1].path].map(|path| path.display().to_string());
        return Err(Error::usage(format!("found two models with the name `{}`: {first} and {second}", pair[0].name))
            .help("rename one of them"));
    }
    match found.len() {
        0 => Err(Error::usage("found no pack, checkpoint or GGUF file directly below the directory").at(dir)),
        1..=MOST_MODELS => Ok(found),
        count => Err(Error::usage(format!("found {count} models, expected at most {MOST_MODELS}")).at(dir)),
    }
}
