//! Output files that appear complete or not at all: written beside under a temporary name, synced, then renamed.

use crate::error::{Context, Result};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A file that exists under its final name only after [`AtomicFile::commit`]; dropped earlier, it vanishes.
#[derive(Debug)]
pub struct AtomicFile {
    temporary: NamedTempFile,
    path: PathBuf,
}

impl AtomicFile {
    /// Starts a file that will be `path`; the directory must exist.
    pub fn create(path: &Path) -> Result<AtomicFile> {
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        let temporary = tempfile::Builder::new()
            .prefix(".iec-")
            .suffix(".tmp")
            .permissions(permissions())
            .tempfile_in(dir)
            .at(path)?;
        Ok(AtomicFile { temporary, path: path.to_path_buf() })
    }

    /// The open temporary, for positioned writes.
    pub fn file(&self) -> &File {
        self.temporary.as_file()
    }

    /// The name it will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Syncs the bytes to disk and gives the file its name, replacing what was there.
    pub fn commit(self) -> Result<()> {
        let path = self.path;
        self.temporary.as_file().sync_all().at(&path)?;
        self.temporary.persist(&path).map_err(|e| e.error).at(&path)?;
        sync_parent(&path)
    }
}

impl Write for AtomicFile {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        self.temporary.write(buf)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        self.temporary.flush()
    }
}

/// Writes a whole small file atomically.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes).at(path)?;
    file.commit()
}

/// Makes a rename in this directory durable.
pub fn sync_parent(path: &Path) -> Result<()> {
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    File::open(dir).and_then(|d| d.sync_all()).at(dir)
}

#[cfg(unix)]
fn permissions() -> std::fs::Permissions {
    use std::os::unix::fs::PermissionsExt;
    // Temporary files default to 0600; artifacts are ordinary files, cut down by the umask as usual.
    std::fs::Permissions::from_mode(0o666)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_uncommitted_file_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let mut file = AtomicFile::create(&dir.path().join("out")).unwrap();
        file.write_all(b"half").unwrap();
        drop(file);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_committed_file_replaces_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        write_atomically(&path, b"old").unwrap();
        write_atomically(&path, b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
