//! Lock of a directory whose outputs are changed by one command at a time.

use super::stale::{LOCK, is_at};
use crate::error::{Context, Result};
use crate::interrupt;
use crate::progress;
use std::fs::{File, TryLockError};
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Interval between two attempts to lock.
const POLL: Duration = Duration::from_millis(20);

/// Exclusive right to replace or remove the outputs in a directory, until it is dropped. The system releases it when
/// the process ends in any way. Readers need no lock, because they keep the files that they opened.
///
/// File systems without locks (some network file systems) are not protected against a second command.
#[derive(Debug)]
pub struct DirLock {
    _file: LockedFile,
    path: PathBuf,
}

impl DirLock {
    /// Locks `dir`, which must exist. While another command holds the lock, waits, after a note that says so. Where the
    /// file system has no locks, returns at once.
    ///
    /// # Errors
    /// The lock file cannot be created, or the user interrupts the wait.
    pub fn acquire(dir: &Path) -> Result<DirLock> {
        let path = dir.join(LOCK);
        let mut wait = Wait::default();
        loop {
            let file = File::options().append(true).create(true).custom_flags(libc::O_NONBLOCK).open(&path);
            let file = LockedFile::from(file.at(&path)?);
            match file.try_lock() {
                // The last owner may have removed the file after it was opened here.
                Ok(()) if !is_at(&file, &path) => continue,
                Ok(()) | Err(TryLockError::Error(_)) => return Ok(DirLock { _file: file, path }),
                Err(TryLockError::WouldBlock) => {}
            }
            wait.once(dir)?;
        }
    }
}

/// Locks an open file or directory until it is closed. Waits for its owner like [`DirLock::acquire`].
///
/// # Errors
/// The file system has no locks, or the user interrupts the wait.
pub fn lock(file: &File, path: &Path) -> Result<()> {
    let mut wait = Wait::default();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(e)) => return Err(e).at(path),
            Err(TryLockError::WouldBlock) => wait.once(path)?,
        }
    }
}

/// An open file that is unlocked when it is dropped. Closing the file is not enough in a program with several threads:
/// a process that another thread is starting has copies of all open files until it executes its own program, and they
/// keep the lock.
#[derive(Debug)]
pub struct LockedFile(File);

impl From<File> for LockedFile {
    fn from(file: File) -> LockedFile {
        LockedFile(file)
    }
}

impl Deref for LockedFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

impl DerefMut for LockedFile {
    fn deref_mut(&mut self) -> &mut File {
        &mut self.0
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

/// State of a wait for a lock. An interrupt ends the wait.
#[derive(Default)]
pub(super) struct Wait {
    noted: bool,
}

impl Wait {
    /// Waits for a moment; prints a note the first time.
    ///
    /// # Errors
    /// The user interrupts.
    pub(super) fn once(&mut self, path: &Path) -> Result<()> {
        if !std::mem::replace(&mut self.noted, true) {
            progress::detail(0, || format!("note: {}: waiting for another command that changes it", path.display()));
        }
        interrupt::check()?;
        std::thread::sleep(POLL);
        Ok(())
    }
}

impl Drop for DirLock {
    fn drop(&mut self) {
        // The file is removed while it is locked. A command that waits for the lock then finds that the file has no name
        // any more, and creates a new one.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn the_end_of_a_lock_does_not_wait_for_copies_of_the_open_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || LockedFile::from(File::open(file.path()).unwrap());
        let first = open();
        first.try_lock().unwrap();
        let _copy = first.try_clone().unwrap();
        assert!(matches!(open().try_lock(), Err(TryLockError::WouldBlock)));
        drop(first);
        open().try_lock().unwrap();
    }

    #[test]
    fn one_owner_at_a_time_and_no_file_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let (inside, entered) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..5 {
                        let _lock = DirLock::acquire(dir.path()).unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        std::thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        entered.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(entered.into_inner(), 20);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
