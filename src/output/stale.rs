//! Removes the remains of killed processes: temporary files, and directories of partial work that were given up.
//!
//! A temporary file or directory is locked (`flock`) as long as the process that writes it is alive. One that is not
//! locked is therefore a remainder, and the next command that writes into the directory removes it.

use super::atomic::sync_parent;
use crate::error::{Context, Result};
use crate::files;
use std::collections::HashSet;
use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};
use tempfile::{NamedTempFile, TempDir};

/// Beginning of the names of all hidden files and directories of this program.
pub const PREFIX: &str = ".iec-";
/// End of the names of temporary files and directories.
pub const TEMPORARY: &str = ".tmp";
/// End of the names of directories of partial work that is not needed any more and is being removed.
const GIVEN_UP: &str = ".removed";
/// Name of the lock file of a directory; it exists while a command changes the directory or waits for it.
pub const LOCK: &str = ".iec-lock";
/// Number of attempts to create a temporary file that no other process takes for a remainder.
const ATTEMPTS: usize = 16;

/// Removes the remains of killed processes from `dir`, once per process and directory. Failures are ignored: the
/// remains only take space.
pub fn remove(dir: &Path) {
    static DONE: LazyLock<Mutex<HashSet<PathBuf>>> = LazyLock::new(Mutex::default);
    if DONE.lock().unwrap_or_else(PoisonError::into_inner).insert(dir.to_path_buf()) {
        remove_now(dir);
    }
}

fn remove_now(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|name| name.starts_with(PREFIX)) else { continue };
        let Ok(kind) = entry.file_type() else { continue };
        let path = entry.path();
        if name.ends_with(GIVEN_UP) && kind.is_dir() {
            let _ = std::fs::remove_dir_all(path);
        } else if (name.ends_with(TEMPORARY) || name == LOCK) && (kind.is_dir() || kind.is_file()) {
            // It is removed while it is locked: a process that opened it meanwhile finds that it has no name any more.
            let opened = if kind.is_dir() { files::open_dir(&path).ok() } else { files::open(&path).ok() };
            let Some(_locked) = opened.filter(|opened| has_no_owner(opened, &path)) else { continue };
            let _ = if kind.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
        }
    }
}

/// Locks an open file or directory. Returns false if another process has locked it, or if `path` no longer names it.
fn has_no_owner(file: &File, path: &Path) -> bool {
    file.try_lock().is_ok() && is_at(file, path)
}

/// Creates a temporary directory in `parent`, which is removed when it is dropped. It is locked until the file that is
/// returned with it is closed.
///
/// # Errors
/// `parent` cannot be written.
pub fn directory(parent: &Path) -> io::Result<(TempDir, File)> {
    for attempt in 1.. {
        let dir = tempfile::Builder::new().prefix(PREFIX).suffix(TEMPORARY).tempdir_in(parent)?;
        let lock = files::open_dir(dir.path())?;
        let is_taken = matches!(lock.try_lock(), Err(TryLockError::WouldBlock)) || !is_at(&lock, dir.path());
        if !is_taken || attempt == ATTEMPTS {
            return Ok((dir, lock));
        }
    }
    unreachable!("the last attempt returns")
}

/// Creates a temporary file and locks it. Another process may take a file that is not locked yet for a remainder and
/// remove it; then this function creates another one.
pub(super) fn lock_new(create: impl Fn() -> io::Result<NamedTempFile>) -> io::Result<NamedTempFile> {
    for _ in 1..ATTEMPTS {
        let file = create()?;
        match file.as_file().try_lock() {
            Err(TryLockError::WouldBlock) => {}
            Ok(()) if !is_at(file.as_file(), file.path()) => {}
            // Without locks, other processes cannot lock the file either, so they do not remove it.
            Ok(()) | Err(TryLockError::Error(_)) => return Ok(file),
        }
    }
    create()
}

/// Removes a directory of partial work that is not needed any more. It is renamed first, so that no command continues a
/// part of it if the process is killed meanwhile. Failures are ignored.
pub fn give_up(dir: &Path) {
    let renamed = dir.with_extension(&GIVEN_UP[1..]);
    // An earlier run of the same command may have left a directory of this name.
    let _ = std::fs::remove_dir_all(&renamed);
    let place = if std::fs::rename(dir, &renamed).is_ok() { &renamed } else { dir };
    // After a power failure, no command must find a part of the files under the old name.
    let _ = sync_parent(&renamed);
    let _ = std::fs::remove_dir_all(place);
}

/// Removes a directory as a whole: at any moment it is complete or has no longer its name. If the process is killed
/// meanwhile, the next command that calls [`remove`] for the directory above finishes the removal.
///
/// # Errors
/// The directory cannot be renamed or removed.
pub fn remove_whole(dir: &Path) -> Result<()> {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let renamed = dir.with_file_name(format!("{PREFIX}{name}{GIVEN_UP}"));
    match std::fs::remove_dir_all(&renamed) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e).at(&renamed),
        _ => std::fs::rename(dir, &renamed).at(dir)?,
    }
    sync_parent(&renamed)?;
    std::fs::remove_dir_all(&renamed).at(&renamed)
}

/// Returns true if `path` is still a name of the open file.
pub(super) fn is_at(file: &File, path: &Path) -> bool {
    let id = |found: std::fs::Metadata| (found.dev(), found.ino());
    let named = path.symlink_metadata().map(id).ok();
    named.is_some() && named == file.metadata().map(id).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_remains_without_a_living_owner_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let living = crate::output::AtomicFile::create(&path("out")).unwrap();
        for name in [".iec-AbCdEf.tmp", "notes.tmp", ".iec-0123456789abcdef.partial"] {
            std::fs::write(path(name), "x").unwrap();
        }
        for name in [".iec-0123456789abcdef.removed", ".iec-aBcDeF.tmp"] {
            std::fs::create_dir(path(name)).unwrap();
            std::fs::write(path(name).join("journal"), "x").unwrap();
        }
        std::fs::write(path(LOCK), "").unwrap();
        let (used, _lock) = directory(dir.path()).unwrap();
        remove_now(dir.path());
        assert!(used.path().exists());
        drop(used);
        let mut names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.retain(|name| name.to_str() != Some("notes.tmp"));
        assert_eq!(names.len(), 2, "{names:?}");
        assert!(path(".iec-0123456789abcdef.partial").exists() && path("notes.tmp").exists());
        living.commit().unwrap();
        assert!(path("out").exists());
    }
}
