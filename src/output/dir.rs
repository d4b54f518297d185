//! Output directories: checks of their location, and removal of those that stay empty.

use super::atomic::sync_parent;
use super::paths::directory_of;
use crate::error::{Context, Error, Result};
use crate::files;
use std::path::{Component, Path, PathBuf};

/// Output directory. Dropping this value removes the directory if this process created it and it is empty.
#[derive(Debug)]
pub struct OutDir {
    path: PathBuf,
    created: bool,
}

impl OutDir {
    /// Creates the directory as [`make_dir`] does.
    ///
    /// # Errors
    /// The same as for [`make_dir`].
    pub fn make(path: &Path) -> Result<OutDir> {
        Ok(OutDir { path: path.to_path_buf(), created: make_dir(path)? })
    }

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for OutDir {
    fn drop(&mut self) {
        if self.created {
            // The system refuses this if the directory is not empty, as intended.
            let _ = std::fs::remove_dir(&self.path);
        }
    }
}

/// Creates a directory if it is missing, and its missing parents; returns true if it was missing. Each is synced in its
/// own parent, so that a power failure does not lose a complete output with its directory.
///
/// # Errors
/// A directory cannot be created or synced.
pub fn make_dir(path: &Path) -> Result<bool> {
    let mut missing = Vec::new();
    for dir in path.ancestors().take_while(|dir| !dir.as_os_str().is_empty()) {
        if files::exists(dir)? {
            break;
        }
        missing.push(dir);
    }
    std::fs::create_dir_all(path).at(path)?;
    missing.iter().try_for_each(|dir| sync_parent(dir))?;
    Ok(!missing.is_empty())
}

/// Fails if output would go into the checkpoint `source` or below it: converters must not mix their inputs with their
/// outputs. If the checkpoint is a single file, its directory counts. A missing `source` is not an error here;
/// opening it reports the error.
///
/// # Errors
/// `out` is that directory or lies inside it, after links are resolved.
pub fn refuse_within(source: &Path, out: &Path) -> Result<()> {
    let Some(found) = files::find(source)? else { return Ok(()) };
    let dir = resolved(if found.is_dir() { source } else { directory_of(source) })?;
    let found = match resolved(out)?.strip_prefix(&dir) {
        Err(_) => return Ok(()),
        Ok(rest) if rest.as_os_str().is_empty() => "found the directory of the checkpoint itself",
        Ok(_) => "found a place inside the checkpoint",
    };
    Err(Error::usage(format!("{found} ({})", source.display())).at(out))
}

/// Returns the absolute path of an input, so that a process in another current directory can repeat the command. Links
/// are not resolved, because they may lead elsewhere when the command is repeated.
pub fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).at(path)
}

/// Makes the paths of inputs absolute, so that a process in another current directory can repeat the command.
///
/// # Errors
/// The current directory cannot be found.
pub fn make_absolute<'a>(paths: impl IntoIterator<Item = Option<&'a mut PathBuf>>) -> Result<()> {
    for path in paths.into_iter().flatten() {
        *path = absolute(path)?;
    }
    Ok(())
}

/// Returns the absolute path. Links are resolved in the part of the path that exists.
pub(super) fn resolved(path: &Path) -> Result<PathBuf> {
    let absolute = absolute(path)?;
    for ancestor in absolute.ancestors() {
        if let Ok(real) = ancestor.canonicalize() {
            let missing = absolute.strip_prefix(ancestor).unwrap_or(Path::new(""));
            return Ok(missing.components().fold(real, |mut path, part| {
                match part {
                    Component::ParentDir => drop(path.pop()),
                    part => path.push(part),
                }
                path
            }));
        }
    }
    Ok(absolute)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_into_or_below_the_source_is_refused_through_links_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(path("source/original")).unwrap();
        std::fs::write(path("source/weights"), "").unwrap();
        std::os::unix::fs::symlink(path("source"), path("link")).unwrap();
        for (source, out, refused) in [
            ("source", "source", true),
            ("source", "source/pack", true),
            ("source", "source/a/b/c", true),
            ("link", "source", true),
            ("source", "link/pack", true),
            ("source", "x/../source/pack", true),
            ("source/original", "source", false),
            ("source", "source-pack", false),
            ("source", "pack", false),
            ("source/weights", "source/pack", true),
            ("source/weights", "pack", false),
            ("nope", "pack", false),
        ] {
            let answer = refuse_within(&path(source), &path(out));
            assert_eq!(answer.is_err(), refused, "{source} -> {out}: {answer:?}");
        }
    }

    #[test]
    fn a_directory_that_stays_empty_is_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        let (empty, used) = (dir.path().join("empty"), dir.path().join("used"));
        drop(OutDir::make(&empty).unwrap());
        let made = OutDir::make(&used).unwrap();
        std::fs::write(used.join("file"), "x").unwrap();
        drop(made);
        assert!(!empty.exists() && used.exists());
    }
}
