//! The directory of `--state-dir`: who uses it, and what happens to files in it that cannot be read.

use crate::error::{Context, Error, Result};
use crate::output::{LockedFile, make_dir};
use std::fs::{File, TryLockError};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// File that a running server keeps locked.
const LOCK: &str = "server.lock";
/// Largest number of damaged files that are kept beside each other.
const MOST_ASIDE: usize = 100;

/// Exclusive use of a state directory, until it is dropped or the process ends in any way.
#[derive(Debug)]
pub struct StateLock {
    _file: LockedFile,
}

impl StateLock {
    /// Takes the directory for this server; creates it if it is missing. On file systems without locks, nothing keeps a
    /// second server out.
    ///
    /// # Errors
    /// Another server uses the directory, or it cannot be written.
    pub fn take(dir: &Path) -> Result<StateLock> {
        make_dir(dir)?;
        let path = dir.join(LOCK);
        let mut options = File::options();
        let file = options.write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NONBLOCK);
        let file = LockedFile::from(file.open(&path).at(&path)?);
        match file.try_lock() {
            Ok(()) | Err(TryLockError::Error(_)) => Ok(StateLock { _file: file }),
            Err(TryLockError::WouldBlock) => Err(Error::usage("state-dir: another server uses this directory")
                .at(dir)
                .help("end the other server, or name another directory with --state-dir")),
        }
    }
}

/// Moves a file that cannot be used out of the way, and logs it; `kept` says how the server goes on.
pub fn set_aside(path: &Path, why: &Error, kept: &str, log: &dyn Fn(&str)) {
    let name = |number: usize| {
        let mut name = path.as_os_str().to_owned();
        name.push(if number == 1 { ".damaged".to_string() } else { format!(".damaged-{number}") });
        std::path::PathBuf::from(name)
    };
    let free = (1..MOST_ASIDE).map(name).find(|path| path.symlink_metadata().is_err());
    let to = free.unwrap_or_else(|| name(MOST_ASIDE));
    match std::fs::rename(path, &to) {
        Ok(()) => log(&format!("{why}; the file was moved to {}, and {kept}", to.display())),
        Err(e) => log(&format!("{why}; the file could not be moved to {} ({e}), and {kept}", to.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_server_uses_a_directory() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("a/state");
        let first = StateLock::take(&dir).unwrap();
        let second = StateLock::take(&dir).unwrap_err();
        assert!(second.to_string().contains("another server") && second.cause().exit_code() == 2, "{second}");
        drop(first);
        StateLock::take(&dir).unwrap();
    }

    #[test]
    fn files_are_moved_to_names_that_are_free() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("usage.json");
        for (content, name) in [("1", "usage.json.damaged"), ("2", "usage.json.damaged-2")] {
            std::fs::write(&path, content).unwrap();
            let lines = std::cell::RefCell::new(String::new());
            set_aside(&path, &Error::corrupt("why"), "go on", &|line| *lines.borrow_mut() = line.into());
            assert_eq!(std::fs::read_to_string(home.path().join(name)).unwrap(), content);
            let line = lines.into_inner();
            assert!(line.contains("why") && line.contains(name) && line.ends_with("go on"), "{line}");
        }
    }
}
