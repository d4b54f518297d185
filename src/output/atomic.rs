//! Atomic output files, which appear complete or not at all: they are written under a temporary name in the same
//! directory, synced, then renamed.

use super::blocks::Blocks;
use super::paths::directory_of;
use super::stale;
use super::target::TargetPlace;
use crate::error::{Context, Error, Result};
use crate::files::{self, Stream};
use std::fs::{File, Permissions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tempfile::{NamedTempFile, TempPath};

/// File that exists under its final name only after [`AtomicFile::commit`]. If it is dropped earlier, it is removed,
/// unless it was created with [`AtomicFile::resumable`]. A device, a pipe or stdout is written directly
/// ([`super::Target::create`]).
#[derive(Debug)]
pub struct AtomicFile {
    content: Content,
    path: PathBuf,
    overwrite: bool,
    /// Set by the first positioned write.
    blocks: OnceLock<Blocks>,
}

/// Destination of the bytes until the commit.
#[derive(Debug)]
enum Content {
    /// Temporary file, which is renamed at the commit.
    Renamed(NamedTempFile),
    /// Device, pipe or stdout, which is written directly.
    Written(Stream),
}

impl AtomicFile {
    /// Creates a temporary file that becomes `path`; the directory must exist.
    ///
    /// # Errors
    /// `path` exists and is not a regular file, or the temporary file cannot be created.
    pub fn create(path: &Path) -> Result<AtomicFile> {
        AtomicFile::create_in(directory_of(path), path)
    }

    /// Creates a file like [`AtomicFile::create`] with its temporary file in `dir`, which must be in the same file
    /// system.
    ///
    /// # Errors
    /// `path` exists and is not a regular file, or the temporary file cannot be created.
    pub fn create_in(dir: &Path, path: &Path) -> Result<AtomicFile> {
        // Output files have the mode 0666 reduced by the umask, like those of other programs.
        AtomicFile::create_with(0o666, dir, path)
    }

    /// Creates a file like [`AtomicFile::create`] that only its owner can read, from its first byte on.
    ///
    /// # Errors
    /// `path` exists and is not a regular file, or the temporary file cannot be created.
    pub fn create_private(path: &Path) -> Result<AtomicFile> {
        AtomicFile::create_with(0o600, directory_of(path), path)
    }

    fn create_with(mode: u32, dir: &Path, path: &Path) -> Result<AtomicFile> {
        refuse_special(path)?;
        stale::remove(dir);
        let mut builder = tempfile::Builder::new();
        builder.prefix(stale::PREFIX).suffix(stale::TEMPORARY).permissions(Permissions::from_mode(mode));
        let temporary = stale::lock_new(|| builder.tempfile_in(dir)).at(path)?;
        Ok(AtomicFile::new(Content::Renamed(temporary), path))
    }

    /// Wraps `file`, which is open at `temporary` and becomes `path` at the commit. If it is dropped before that, the
    /// temporary file remains, so that a later process can continue it.
    ///
    /// # Errors
    /// `path` exists and is not a regular file.
    pub fn resumable(file: File, temporary: &Path, path: &Path) -> Result<AtomicFile> {
        refuse_special(path)?;
        let mut name = TempPath::try_from_path(temporary).at(temporary)?;
        name.disable_cleanup(true);
        let temporary = NamedTempFile::from_parts(file, name);
        Ok(AtomicFile::new(Content::Renamed(temporary), path))
    }

    /// Opens `place`, a device, pipe or stdout, for direct writes; `path` is its name in errors.
    pub(super) fn written(place: &TargetPlace, path: &Path) -> Result<AtomicFile> {
        Ok(AtomicFile::new(Content::Written(place.open().at(path)?), path))
    }

    fn new(content: Content, path: &Path) -> AtomicFile {
        AtomicFile { content, path: path.to_path_buf(), overwrite: true, blocks: OnceLock::new() }
    }

    /// Sets whether the commit may replace a file that exists at that time. The default is true.
    pub fn overwrite(self, overwrite: bool) -> AtomicFile {
        AtomicFile { overwrite, ..self }
    }

    /// Writes bytes at a position. Files whose length was set before lie in huge pages of the page cache afterwards,
    /// where the system has them.
    ///
    /// # Errors
    /// A write fails.
    pub fn write_at(&self, bytes: &[u8], at: u64) -> Result<()> {
        let file = self.file();
        let write = || {
            let blocks = match self.blocks.get() {
                Some(blocks) => blocks,
                None => {
                    let blocks = Blocks::of(file)?;
                    self.blocks.get_or_init(|| blocks)
                }
            };
            blocks.begin(file, at..at + bytes.len() as u64)?;
            file.write_all_at(bytes, at)
        };
        write().at(&self.path)
    }

    /// Returns the open file.
    pub fn file(&self) -> &File {
        match &self.content {
            Content::Renamed(temporary) => temporary.as_file(),
            Content::Written(stream) => stream.file(),
        }
    }

    /// Returns the final path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Syncs the bytes to disk and renames the file to `staged`. From there, the modules `swap` and `exchange` move it
    /// to its final path.
    ///
    /// # Errors
    /// A write, sync or rename fails.
    pub fn stage(self, staged: &Path) -> Result<()> {
        let Content::Renamed(temporary) = self.content else {
            return Err(Error::usage("found a device or pipe, expected a regular file").at(&self.path));
        };
        temporary.as_file().sync_all().at(&self.path)?;
        temporary.persist(staged).map(drop).map_err(|e| e.error).at(staged)
    }

    /// Syncs the bytes to disk and renames the file to its final path, replacing a regular file that exists there.
    ///
    /// # Errors
    /// A write, sync or rename fails, or a file exists that may not be replaced ([`AtomicFile::overwrite`]); an
    /// existing file is unchanged then.
    pub fn commit(self) -> Result<()> {
        let AtomicFile { content, path, overwrite, .. } = self;
        match content {
            Content::Renamed(temporary) => {
                temporary.as_file().sync_all().at(&path)?;
                refuse_special(&path)?;
                let renamed = if overwrite { temporary.persist(&path) } else { temporary.persist_noclobber(&path) };
                renamed.map_err(|e| match e.error.kind() {
                    ErrorKind::AlreadyExists => exists(&path),
                    _ => Error::from(e.error).at(&path),
                })?;
                sync_parent(&path)
            }
            Content::Written(mut stream) => stream.flush().at(&path),
        }
    }
}

impl Write for AtomicFile {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        match &mut self.content {
            Content::Renamed(temporary) => temporary.as_file().write(buf),
            Content::Written(stream) => stream.write(buf),
        }
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Builds the error for an output that exists and may not be replaced.
pub(super) fn exists(path: &Path) -> Error {
    Error::usage("exists already").at(path).help("add --overwrite or choose another name")
}

/// Writes a whole small file atomically.
///
/// # Errors
/// The same as those of [`AtomicFile::create`] and [`AtomicFile::commit`].
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.write_all(bytes).at(path)?;
    file.commit()
}

/// Syncs the directory of `path`, so that a rename in it is durable.
pub fn sync_parent(path: &Path) -> Result<()> {
    sync_dir(directory_of(path))
}

/// Syncs a directory, so that names that were created, renamed or removed in it are durable.
pub fn sync_dir(dir: &Path) -> Result<()> {
    files::open_dir(dir).and_then(|d| d.sync_all()).at(dir)
}

/// Fails if something other than a regular file is at `path`: a rename would replace a device, a pipe or a symbolic
/// link itself instead of its target.
///
/// # Errors
/// `path` exists and is not a regular file.
pub fn refuse_special(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Ok(found) if !found.is_file() => {
            Err(Error::usage(format!("found {}, expected a regular file to replace", files::special(&found)))
                .at(path)
                .help("move it away, or choose another place for the output"))
        }
        _ => Ok(()),
    }
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
    fn a_file_that_appears_before_the_commit_is_replaced_only_when_allowed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let commit = |overwrite| {
            let mut file = AtomicFile::create(&path).unwrap().overwrite(overwrite);
            file.write_all(b"new").unwrap();
            std::fs::write(&path, "appeared").unwrap();
            file.commit()
        };
        assert_eq!(commit(false).unwrap_err().cause().exit_code(), 2);
        assert_eq!(std::fs::read(&path).unwrap(), b"appeared");
        commit(true).unwrap();
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
