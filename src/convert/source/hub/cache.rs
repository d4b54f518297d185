//! Finds the cache of the Hugging Face Hub and a snapshot in it.

use super::{RepoSpec, Variables, id_of, is_hex};
use crate::error::{Error, Result};
use crate::files;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Returns the cache directory of the Hub's tools: `HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE`, or `hub` in their home
/// directory, which is `HF_HOME`, `XDG_CACHE_HOME/huggingface` or `~/.cache/huggingface`.
///
/// # Errors
/// None of the variables is set, not even `HOME`.
pub fn root(variable: &Variables<'_>) -> Result<PathBuf> {
    let path = |name: &str| Some(expand(variable, variable(name)?));
    path("HF_HUB_CACHE")
        .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| home(variable).map(|home| home.join("hub")))
        .ok_or_else(|| {
            Error::usage("found no Hugging Face cache: none of HF_HUB_CACHE, HF_HOME and HOME is set")
                .help("set HF_HUB_CACHE to the directory of the cache")
        })
}

/// Returns the home directory of the Hub's tools: `HF_HOME`, `XDG_CACHE_HOME/huggingface` or `~/.cache/huggingface`,
/// the first one whose variable is set.
pub(super) fn home(variable: &Variables<'_>) -> Option<PathBuf> {
    let path = |name: &str| Some(expand(variable, variable(name)?));
    path("HF_HOME")
        .or_else(|| path("XDG_CACHE_HOME").map(|cache| cache.join("huggingface")))
        .or_else(|| variable("HOME").map(|home| Path::new(&home).join(".cache/huggingface")))
}

/// Expands a leading `~` to the home directory, as Python's `expanduser` does.
fn expand(variable: &Variables<'_>, value: OsString) -> PathBuf {
    match (Path::new(&value).strip_prefix("~"), variable("HOME")) {
        (Ok(rest), Some(home)) => Path::new(&home).join(rest),
        _ => PathBuf::from(value),
    }
}

/// Returns true if the cache at `root` has a revision of the repository.
///
/// # Errors
/// The system cannot tell whether the directory exists.
pub fn holds(root: &Path, spec: &RepoSpec) -> Result<bool> {
    files::is_dir(&root.join(spec.folder()))
}

/// Returns the directory of a snapshot in the cache at `root`, without network access.
///
/// # Errors
/// The repository or the revision was not downloaded; the error lists those that were.
pub fn snapshot(root: &Path, spec: &RepoSpec) -> Result<PathBuf> {
    let repo = root.join(spec.folder());
    if !files::is_dir(&repo)? {
        let found = format!("not found in the Hugging Face cache, which has {}", listed(repos(root)));
        return Err(Error::corrupt(found).at(root).tensor(&spec.id).help(get(spec)));
    }
    let reference = repo.join("refs").join(&spec.revision);
    let commit = if spec.is_commit() {
        spec.revision.clone()
    } else if files::is_file(&reference)? {
        files::read_to_string(&reference)?.trim().to_string()
    } else {
        let found = format!("this revision was not downloaded; the cache has {}", listed(revisions(&repo)));
        return Err(Error::corrupt(found).at(&repo).tensor(&spec.revision).help(choose(spec)));
    };
    if !is_hex(&commit, 40) {
        return Err(Error::corrupt(format!("found `{commit:.60}`, expected a commit hash"))
            .at(&reference)
            .help(get(spec)));
    }
    let snapshot = repo.join("snapshots").join(&commit);
    if files::is_dir(&snapshot)? {
        return Ok(snapshot);
    }
    let found = format!("found no snapshot of this commit; the cache has {}", listed(revisions(&repo)));
    Err(Error::corrupt(found).at(&repo).tensor(&commit).help(choose(spec)))
}

fn get(spec: &RepoSpec) -> String {
    format!("get it with {}, or name a directory with --hf-dir", spec.download_commands())
}

fn choose(spec: &RepoSpec) -> String {
    format!("name a revision of the cache as {}@REVISION, or get this one with {}", spec.id, spec.download_commands())
}

/// Joins names for an error message, at most 12 of them.
fn listed(mut names: Vec<String>) -> String {
    const SHOWN: usize = 12;
    names.sort();
    let more = names.len().saturating_sub(SHOWN);
    names.truncate(SHOWN);
    match (names.is_empty(), more) {
        (true, _) => "none".into(),
        (_, 0) => names.join(", "),
        (_, more) => format!("{} and {more} more", names.join(", ")),
    }
}

fn names_in(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect()
}

fn repos(root: &Path) -> Vec<String> {
    names_in(root).iter().filter_map(|folder| id_of(folder)).collect()
}

/// Lists the branches and tags, then the commits.
fn revisions(repo: &Path) -> Vec<String> {
    [names_in(&repo.join("refs")), names_in(&repo.join("snapshots"))].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_where_the_first_variable_says() {
        let all = [
            ("HF_HUB_CACHE", "/1", "/1"),
            ("HUGGINGFACE_HUB_CACHE", "~/2", "/base/2"),
            ("HF_HOME", "/3", "/3/hub"),
            ("XDG_CACHE_HOME", "/4", "/4/huggingface/hub"),
            ("HOME", "/base", "/base/.cache/huggingface/hub"),
        ];
        for (first, (_, _, expected)) in all.iter().enumerate() {
            let variable = |name: &str| all[first..].iter().find(|(n, ..)| *n == name).map(|(_, v, _)| v.into());
            assert_eq!(root(&variable).unwrap(), Path::new(expected));
        }
        assert!(root(&|_| None).is_err());
    }
}
