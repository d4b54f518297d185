//! Replaces a directory as a whole, for outputs whose readers do not follow the link of [`super::swap`], such as
//! checkpoints.
//!
//! The new files are collected in a hidden directory next to the old one, together with hard links to the files of the
//! user that stay. Then the two directories exchange their names in one step, and the old one is removed.

use super::atomic::{AtomicFile, sync_dir};
use super::paths::remove_if_there;
use super::stale;
use crate::error::{Context, Error, Result};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const ADVICE: &str = "choose another --out-dir, or first remove the old checkpoint from this one";

/// Fails if the directory cannot be replaced as a whole: it has subdirectories, is the current directory or a mount
/// point, or cannot be renamed.
///
/// # Errors
/// It cannot be replaced, or it cannot be read.
pub fn refuse_irreplaceable(dir: &Path) -> Result<()> {
    let real = dir.canonicalize().at(dir)?;
    let parent = parent(&real)?;
    stale::remove(parent);
    let refuse = |found: &str| Err(Error::usage(found).at(dir).help(ADVICE));
    let device = |dir: &Path| Ok::<u64, Error>(dir.metadata().at(dir)?.dev());
    if device(&real)? != device(parent)? {
        return refuse("found a mount point, which cannot be replaced as a whole");
    }
    if std::env::current_dir().is_ok_and(|current| current.starts_with(&real)) {
        return refuse("found the current directory, which cannot be replaced as a whole");
    }
    for entry in std::fs::read_dir(dir).at(dir)? {
        let entry = entry.at(dir)?;
        let ours = entry.file_name().to_string_lossy().starts_with(stale::PREFIX);
        if !ours && entry.file_type().at(entry.path())?.is_dir() {
            return Err(Error::usage("found a directory, expected only files in a checkpoint that is replaced")
                .at(entry.path())
                .help("move it elsewhere, or choose another --out-dir"));
        }
    }
    Ok(())
}

/// Replaces the content of `dir` by `files`, whose final paths lie in `dir`, in one step. Other files of `dir` stay if
/// `keep` returns true for their names. A new `dir`, which holds at most its lock file, may be replaced, too.
///
/// # Errors
/// The errors of [`refuse_irreplaceable`], or a file cannot be synced, linked or renamed; `dir` is unchanged then.
pub fn exchange(dir: &Path, files: impl IntoIterator<Item = AtomicFile>, keep: impl Fn(&str) -> bool) -> Result<()> {
    refuse_irreplaceable(dir)?;
    let real = dir.canonicalize().at(dir)?;
    let parent = parent(&real)?;
    let (new, _lock) = stale::directory(parent).at(parent)?;
    std::fs::set_permissions(new.path(), real.metadata().at(dir)?.permissions()).at(new.path())?;
    for file in files {
        let name = file.path().file_name().expect("output files have names").to_owned();
        file.stage(&new.path().join(name))?;
    }
    let mut is_new = true;
    for entry in std::fs::read_dir(&real).at(dir)? {
        let (entry, name) = entry.map(|entry| (entry.path(), entry.file_name())).at(dir)?;
        is_new &= name == stale::LOCK;
        let to = new.path().join(&name);
        let ours = name.to_string_lossy().starts_with(stale::PREFIX);
        if !ours && name.to_str().is_none_or(&keep) && to.symlink_metadata().is_err() {
            link(&entry, &to)?;
        }
    }
    sync_dir(new.path())?;
    match renameat_with(CWD, new.path(), CWD, &real, RenameFlags::EXCHANGE) {
        // Some file systems cannot exchange names, but all replace an empty directory.
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) if is_new => {
            remove_if_there(&real.join(stale::LOCK))?;
            std::fs::rename(new.path(), &real).at(dir)?;
        }
        done => done.map_err(std::io::Error::from).at(dir).help(ADVICE)?,
    }
    // The name now belongs to the old directory, which is removed when `new` is dropped.
    sync_dir(parent)
}

/// Gives the file `from` the second name `to`, as a hard link. Of a symbolic link, a copy is made.
fn link(from: &Path, to: &Path) -> Result<()> {
    match from.read_link() {
        Ok(target) => std::os::unix::fs::symlink(target, to).at(to),
        Err(_) => std::fs::hard_link(from, to).at(from),
    }
}

fn parent(real: &Path) -> Result<&Path> {
    real.parent().ok_or_else(|| Error::usage("found the root directory, which cannot be replaced as a whole").at(real))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file(dir: &Path, name: &str, text: &str) -> AtomicFile {
        let mut file = AtomicFile::create(&dir.join(name)).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn all_files_change_at_once_and_those_of_the_user_stay() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("checkpoint");
        std::fs::create_dir(&dir).unwrap();
        for name in ["config.json", "model.safetensors", "notes.txt"] {
            std::fs::write(dir.join(name), "old").unwrap();
        }
        std::os::unix::fs::symlink("notes.txt", dir.join("link")).unwrap();
        let keep = |name: &str| !["config.json", "model.safetensors"].contains(&name);
        exchange(&dir, [file(&dir, "config.json", "new")], keep).unwrap();
        let read = |name: &str| std::fs::read_to_string(dir.join(name)).ok();
        assert_eq!(
            [read("config.json"), read("notes.txt"), read("link")],
            ["new", "old", "old"].map(|s| Some(s.into()))
        );
        assert_eq!(read("model.safetensors"), None);
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1);

        let refused = file(&dir, "config.json", "newer");
        std::fs::create_dir(dir.join("subdirectory")).unwrap();
        let error = exchange(&dir, [refused], keep).unwrap_err().to_string();
        assert!(error.contains("subdirectory") && read("config.json").as_deref() == Some("new"), "{error}");
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 1);
    }

    #[test]
    fn an_empty_directory_is_replaced_too() {
        let home = tempfile::tempdir().unwrap();
        let (dir, other) = (home.path().join("out"), home.path().join("other"));
        std::fs::create_dir(&dir).unwrap();
        std::fs::create_dir(&other).unwrap();
        exchange(&dir, [file(&other, "config.json", "new")], |_| true).unwrap();
        assert_eq!(std::fs::read_to_string(dir.join("config.json")).unwrap(), "new");
    }
}
