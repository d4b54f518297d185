//! Lock of a directory whose outputs are changed by one command at a time.

use super::stale::is_at;
use crate::error::{Context, Result};
use crate::interrupt;
use crate::progress;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name of the lock file; it exists while a command changes the directory or waits for it.
const NAME: &str = ".iec-lock";
/// Interval between two attempts to lock.
const POLL: Duration = Duration::from_millis(20);

/// Exclusive right to replace or remove the outputs in a directory, until it is dropped. The system releases it when
/// the process ends in any way. Readers need no lock, because they keep the files that they opened.
///
/// File systems without locks (some network file systems) are not protected against a second command.
#[derive(Debug)]
pub struct DirLock {
    /// The open lock file and its path.
    held: Option<(File, PathBuf)>,
}

impl DirLock {
    /// Locks `dir`, which must exist. Waits for another command that changes it, and prints a note that it waits.
    ///
    /// # Errors
    /// The lock file cannot be created, or the user interrupts the wait.
    pub fn acquire(dir: &Path) -> Result<DirLock> {
        let path = dir.join(NAME);
        let mut noted = false;
        loop {
            let file = File::options().append(true).create(true).open(&path).at(&path)?;
            match file.try_lock() {
                // The last owner may have removed the file after it was opened here.
                Ok(()) if is_at(&file, &path) => return Ok(DirLock { held: Some((file, path)) }),
                Ok(()) => continue,
                Err(TryLockError::Error(_)) => return Ok(DirLock { held: None }),
                Err(TryLockError::WouldBlock) => {}
            }
            if !std::mem::replace(&mut noted, true) {
                progress::detail(0, || format!("note: {}: waiting for another command that changes it", dir.display()));
            }
            interrupt::check()?;
            std::thread::sleep(POLL);
        }
    }
}

impl Drop for DirLock {
    fn drop(&mut self) {
        if let Some((_file, path)) = &self.held {
            // Removed while it is locked: a command that waits for it finds that it has no name any more, and creates a
            // new one.
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

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
