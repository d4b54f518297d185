//! Output files that appear complete or not at all: written beside under a temporary name, synced, then renamed.

use crate::error::{Context, Result};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use tempfile::{NamedTempFile, TempPath};

/// A file that exists under its final name only after [`AtomicFile::commit`]; dropped earlier, it vanishes, unless it was
/// made to be continued.
#[derive(Debug)]
pub struct AtomicFile {
    temporary: NamedTempFile,
    path: PathBuf,
}

impl AtomicFile {
    /// Starts a file that will be `path`; the directory must exist.
    pub fn create(path: &Path) -> Result<AtomicFile> {
        AtomicFile::create_in(directory_of(path), path)
    }

    /// The same with its temporary in `dir`, which lies in the same file system.
    pub fn create_in(dir: &Path, path: &Path) -> Result<AtomicFile> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(".iec-").suffix(".tmp").permissions(permissions());
        Ok(AtomicFile { temporary: builder.tempfile_in(dir).at(path)?, path: path.to_path_buf() })
    }

    /// Wraps `file`, which is open at `temporary`: dropped before it is committed, it stays there.
    pub fn resumable(file: File, temporary: &Path, path: &Path) -> Result<AtomicFile> {
        let mut name = TempPath::try_from_path(temporary).at(temporary)?;
        name.disable_cleanup(true);
        Ok(AtomicFile { temporary: NamedTempFile::from_parts(file, name), path: path.to_path_buf() })
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
    let dir = directory_of(path);
    File::open(dir).and_then(|d| d.sync_all()).at(dir)
}

/// The directory that a file lies in; `.` for a bare name.
pub fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
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
    fn a_resumable_file_stays_until_it_is_committed() {
        let dir = tempfile::tempdir().unwrap();
        let (partial, path) = (dir.path().join("partial"), dir.path().join("out"));
        let open = |text: &str| {
            let file = File::options().append(true).create(true).open(&partial).unwrap();
            let mut file = AtomicFile::resumable(file, &partial, &path).unwrap();
            file.write_all(text.as_bytes()).unwrap();
            file
        };
        drop(open("one "));
        assert!(partial.exists() && !path.exists());
        open("two").commit().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"one two");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
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
