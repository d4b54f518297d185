//! Output files that appear complete or not at all: written beside under a temporary name, synced, then renamed.

use super::target::Place;
use super::{directory_of, special};
use crate::error::{Context, Error, Result};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use tempfile::{NamedTempFile, TempPath};

/// A file that exists under its final name only after [`AtomicFile::commit`]; dropped earlier, it vanishes, unless it
/// was made to be continued. A device, a pipe or stdout is written to instead ([`super::Target`] makes these).
#[derive(Debug)]
pub struct AtomicFile {
    content: Content,
    path: PathBuf,
}

/// Where the bytes are until the commit.
#[derive(Debug)]
enum Content {
    /// In a temporary file, which is then renamed.
    Renamed(NamedTempFile),
    /// Where they belong already.
    Written(File),
}

impl AtomicFile {
    /// Starts a file that will be `path`; the directory must exist.
    ///
    /// # Errors
    /// Something that is not a regular file has that name.
    pub fn create(path: &Path) -> Result<AtomicFile> {
        AtomicFile::create_in(directory_of(path), path)
    }

    /// The same with its temporary in `dir`, which lies in the same file system.
    ///
    /// # Errors
    /// Something that is not a regular file has that name.
    pub fn create_in(dir: &Path, path: &Path) -> Result<AtomicFile> {
        refuse_special(path)?;
        let temporary = temporaries().tempfile_in(dir).at(path)?;
        Ok(AtomicFile { content: Content::Renamed(temporary), path: path.to_path_buf() })
    }

    /// Wraps `file`, which is open at `temporary`: dropped before it is committed, it stays there.
    ///
    /// # Errors
    /// Something that is not a regular file has the name `path`.
    pub fn resumable(file: File, temporary: &Path, path: &Path) -> Result<AtomicFile> {
        refuse_special(path)?;
        let mut name = TempPath::try_from_path(temporary).at(temporary)?;
        name.disable_cleanup(true);
        let temporary = NamedTempFile::from_parts(file, name);
        Ok(AtomicFile { content: Content::Renamed(temporary), path: path.to_path_buf() })
    }

    /// Writes straight to `place`, which is no regular file.
    pub(super) fn written(place: &Place, path: &Path) -> Result<AtomicFile> {
        Ok(AtomicFile { content: Content::Written(place.open().at(path)?), path: path.to_path_buf() })
    }

    /// The open file, for positioned writes.
    pub fn file(&self) -> &File {
        match &self.content {
            Content::Renamed(temporary) => temporary.as_file(),
            Content::Written(file) => file,
        }
    }

    /// The name it will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Syncs the bytes to disk and gives the file its name, replacing a regular file that was there.
    ///
    /// # Errors
    /// A write, sync or rename fails; the old file is still there then.
    pub fn commit(self) -> Result<()> {
        let path = self.path;
        match self.content {
            Content::Renamed(temporary) => {
                temporary.as_file().sync_all().at(&path)?;
                refuse_special(&path)?;
                temporary.persist(&path).map_err(|e| e.error).at(&path)?;
                sync_parent(&path)
            }
            Content::Written(mut file) => file.flush().at(&path),
        }
    }
}

impl Write for AtomicFile {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        self.file().write(buf)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        self.file().flush()
    }
}

/// Writes a whole small file atomically.
///
/// # Errors
/// As [`AtomicFile::create`] and [`AtomicFile::commit`].
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

/// Refuses to replace what is no regular file: a rename would replace a device, a pipe or a link, not what it stands
/// for.
///
/// # Errors
/// `path` is such a thing.
pub fn refuse_special(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Ok(found) if !found.is_file() => {
            Err(Error::usage(format!("is {}; only a regular file is replaced", special(&found)))
                .at(path)
                .help("remove it, or choose another place for the output"))
        }
        _ => Ok(()),
    }
}

fn temporaries() -> tempfile::Builder<'static, 'static> {
    use std::os::unix::fs::PermissionsExt;
    let mut builder = tempfile::Builder::new();
    // Temporary files default to 0600; artifacts are ordinary files, cut down by the umask as usual.
    builder.prefix(".iec-").suffix(".tmp").permissions(std::fs::Permissions::from_mode(0o666));
    builder
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

    #[test]
    fn what_is_no_regular_file_is_not_renamed_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), "kept").unwrap();
        std::fs::create_dir(path("dir")).unwrap();
        std::os::unix::fs::symlink(path("file"), path("link")).unwrap();
        for (name, found) in [("dir", "a directory"), ("link", "a symbolic link")] {
            let refused = write_atomically(&path(name), b"new").unwrap_err();
            assert!(refused.to_string().contains(found), "{refused}");
        }
        let file = AtomicFile::create(&path("late")).unwrap();
        std::os::unix::fs::symlink(path("file"), path("late")).unwrap();
        file.commit().unwrap_err();
        assert_eq!(std::fs::read(path("file")).unwrap(), b"kept");
    }
}
