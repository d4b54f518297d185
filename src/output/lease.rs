//! Lock file of a directory that many processes read and one removes or replaces.

use super::atomic::sync_parent;
use super::lock::{LockedFile, Wait};
use super::stale::is_at;
use crate::error::{Context, Result};
use crate::files;
use std::fs::{File, TryLockError};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::SystemTime;

/// Lock of such a directory until it is dropped. The system releases it when the process ends in any way. On file
/// systems without locks (some network file systems) every request succeeds and nothing is protected.
#[derive(Debug)]
pub struct Lease {
    file: LockedFile,
}

impl Lease {
    /// Takes a shared lock on the file at `path`; waits, with a note, while a writer holds it. Returns `None` if there
    /// is no such file.
    ///
    /// # Errors
    /// The file cannot be opened, or the user interrupts the wait.
    pub fn shared(path: &Path) -> Result<Option<Lease>> {
        let mut wait = Wait::default();
        loop {
            let file = match files::open(path) {
                Err(e) if e.is_not_found() => return Ok(None),
                opened => LockedFile::from(opened?),
            };
            match file.try_lock_shared() {
                // The writer has removed the file after it was opened here.
                Ok(()) if !is_at(&file, path) => continue,
                Ok(()) | Err(TryLockError::Error(_)) => return Ok(Some(Lease { file })),
                Err(TryLockError::WouldBlock) => wait.once(path)?,
            }
        }
    }

    /// Takes an exclusive lock on the file at `path`; waits, with a note, for readers and writers. Creates the file if
    /// it is missing.
    ///
    /// # Errors
    /// The file cannot be created, or the user interrupts the wait.
    pub fn exclusive(path: &Path) -> Result<Lease> {
        let mut wait = Wait::default();
        loop {
            match Lease::attempt(path, true)? {
                Some(lease) => return Ok(lease),
                None => wait.once(path)?,
            }
        }
    }

    /// Takes an exclusive lock on the file at `path` if it is free; returns `None` if it is locked or missing.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn try_exclusive(path: &Path) -> Result<Option<Lease>> {
        match Lease::attempt(path, false) {
            Err(e) if e.is_not_found() => Ok(None),
            lease => lease,
        }
    }

    fn attempt(path: &Path, create: bool) -> Result<Option<Lease>> {
        loop {
            let mut options = File::options();
            options.append(true).create(create).custom_flags(libc::O_NONBLOCK);
            let file = LockedFile::from(options.open(path).at(path)?);
            match file.try_lock() {
                Ok(()) if !is_at(&file, path) => continue,
                Ok(()) | Err(TryLockError::Error(_)) => return Ok(Some(Lease { file })),
                Err(TryLockError::WouldBlock) => return Ok(None),
            }
        }
    }

    /// Writes `text` into the file durably, unless it is there already. The lock must have been taken by
    /// [`Lease::exclusive`] at `path`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn mark(&mut self, path: &Path, text: &str) -> Result<()> {
        if files::read_limited(path, text.len() as u64).is_ok_and(|found| found == text.as_bytes()) {
            return Ok(());
        }
        self.file.set_len(0).and_then(|()| self.file.write_all(text.as_bytes())).at(path)?;
        self.file.sync_all().at(path)?;
        sync_parent(path)
    }

    /// Sets the modification time of the file to now. A failure is ignored: another user may own the file.
    pub fn touch(&self) {
        let _ = self.file.set_modified(SystemTime::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_share_and_a_writer_is_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        assert!(Lease::shared(&path).unwrap().is_none() && Lease::try_exclusive(&path).unwrap().is_none());
        drop(Lease::exclusive(&path).unwrap());
        let (one, two) = (Lease::shared(&path).unwrap().unwrap(), Lease::shared(&path).unwrap().unwrap());
        assert!(Lease::try_exclusive(&path).unwrap().is_none());
        drop((one, two));
        let writer = Lease::try_exclusive(&path).unwrap().unwrap();
        assert!(Lease::try_exclusive(&path).unwrap().is_none());
        std::fs::remove_file(&path).unwrap();
        drop(writer);
        assert!(Lease::shared(&path).unwrap().is_none());
    }

    #[test]
    fn a_mark_is_the_whole_content() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        for mark in ["first", "second, longer", "third"] {
            Lease::exclusive(&path).unwrap().mark(&path, mark).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), mark);
        }
    }

    #[test]
    fn a_touch_sets_the_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let lease = Lease::exclusive(&path).unwrap();
        lease.file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
        lease.touch();
        assert!(path.metadata().unwrap().modified().unwrap() > SystemTime::UNIX_EPOCH);
    }
}
