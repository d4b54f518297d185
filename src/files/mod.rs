//! Opens files that are named by users or by other files, and checks whether they exist.
//!
//! Models, descriptions and configurations are regular files. A named pipe, a device, a socket or a directory in the
//! place of one is refused before it is read: a pipe without a writer would block for ever. Texts may come from
//! anything that can be read, such as `/dev/stdin` or `<(command)`; [`Stream`] reads them.
//!
//! A check whether a file exists has three results: it exists, it does not exist, or the system reports another error.
//! Methods such as [`Path::exists`] return false for the third result, too: if the system cannot read a directory, or
//! a link has no target, a checkpoint would seem to have no tokenizer. Therefore `clippy.toml` forbids these methods.

mod stream;

use crate::error::{Context, Error, Result};
use rustix::fs::{Mode, OFlags};
use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};

pub use stream::{Stream, TEXT_LIMIT, read_text};

/// Opens a regular file for reading.
///
/// # Errors
/// The file cannot be opened, or is not a regular file.
pub fn open(path: &Path) -> Result<File> {
    open_with_metadata(path).map(|(file, _)| file)
}

/// Opens a regular file for reading, and returns its size and times as well.
///
/// # Errors
/// The same as those of [`open`].
pub fn open_with_metadata(path: &Path) -> Result<(File, Metadata)> {
    let file = match open_now(path, OFlags::RDONLY) {
        Ok(file) => file,
        Err(e) => {
            // The messages of the system for a socket and for a link without a target are unclear.
            let irregular = find(path)?.filter(|found| found.file_type().is_socket()).map(|found| irregular(&found));
            return Err(irregular.unwrap_or(e)).at(path);
        }
    };
    let found = file.metadata().at(path)?;
    if found.is_file() { Ok((file, found)) } else { Err(irregular(&found)).at(path) }
}

fn irregular(found: &Metadata) -> std::io::Error {
    std::io::Error::new(ErrorKind::InvalidInput, format!("found {}, expected a regular file", special(found)))
}

/// Opens a directory, to lock or to sync it.
///
/// # Errors
/// The directory cannot be opened, or is not a directory.
pub fn open_dir(path: &Path) -> std::io::Result<File> {
    open_now(path, OFlags::RDONLY | OFlags::DIRECTORY)
}

/// Opens a path without waiting for the other end of a pipe.
fn open_now(path: &Path, flags: OFlags) -> std::io::Result<File> {
    loop {
        match rustix::fs::open(path, flags | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty()) {
            Err(rustix::io::Errno::INTR) => {}
            opened => return Ok(opened?.into()),
        }
    }
}

/// Returns true when the file at `path` begins with `magic`.
pub fn begins_with<const N: usize>(path: &Path, magic: &[u8; N]) -> bool {
    let mut start = [0; N];
    open(path).is_ok_and(|file| file.read_exact_at(&mut start, 0).is_ok()) && start == *magic
}

/// Reads a regular file.
///
/// # Errors
/// The file cannot be opened or read, or is not a regular file.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    read_limited(path, u64::MAX)
}

/// Reads a regular file of limited size.
///
/// # Errors
/// The file cannot be opened or read, is not a regular file, or is longer than `most` bytes.
pub fn read_limited(path: &Path, most: u64) -> Result<Vec<u8>> {
    let (mut file, found) = open_with_metadata(path)?;
    if found.len() > most {
        return Err(Error::corrupt(format!("found {} bytes, expected at most {most}", found.len())).at(path));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).at(path)?;
    Ok(bytes)
}

/// Reads a regular file of UTF-8 text.
///
/// # Errors
/// The same as those of [`read`], or the file is not UTF-8.
pub fn read_to_string(path: &Path) -> Result<String> {
    utf8(read(path)?).at(path)
}

/// Converts bytes to text.
///
/// # Errors
/// The bytes are not UTF-8.
pub fn utf8(bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes)
        .map_err(|e| Error::corrupt(format!("found invalid UTF-8 at byte offset {}", e.utf8_error().valid_up_to())))
}

/// Returns the metadata of what `path` leads to; `None` if nothing has this name.
///
/// # Errors
/// The system reports an error, or the path is a symbolic link to a file that does not exist.
pub fn find(path: &Path) -> Result<Option<Metadata>> {
    match std::fs::metadata(path) {
        Ok(found) => Ok(Some(found)),
        Err(e) if e.kind() != ErrorKind::NotFound => Err(e).at(path),
        Err(_) => match std::fs::read_link(path) {
            Ok(target) => {
                let message = format!(
                    "found a link to {}, which does not exist; restore that file or change the link",
                    target.display()
                );
                Err(std::io::Error::new(ErrorKind::InvalidInput, message)).at(path)
            }
            Err(_) => Ok(None),
        },
    }
}

/// Returns true if the path exists.
///
/// # Errors
/// The same as those of [`find`].
pub fn exists(path: &Path) -> Result<bool> {
    Ok(find(path)?.is_some())
}

/// Returns true if the path exists and is a regular file.
///
/// # Errors
/// The same as those of [`find`].
pub fn is_file(path: &Path) -> Result<bool> {
    Ok(find(path)?.is_some_and(|found| found.is_file()))
}

/// Returns true if the path exists and is a directory.
///
/// # Errors
/// The same as those of [`find`].
pub fn is_dir(path: &Path) -> Result<bool> {
    Ok(find(path)?.is_some_and(|found| found.is_dir()))
}

/// Returns the first of `paths` that exists.
///
/// # Errors
/// The same as those of [`find`].
pub fn first(paths: impl IntoIterator<Item = PathBuf>) -> Result<Option<PathBuf>> {
    for path in paths {
        if exists(&path)? {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// Returns the kind of a directory entry that is not a regular file, such as `a directory`, for messages.
pub fn special(found: &Metadata) -> &'static str {
    let kind = found.file_type();
    match () {
        () if kind.is_dir() => "a directory",
        () if kind.is_symlink() => "a symbolic link",
        () if kind.is_fifo() => "a named pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    }
}

/// Returns true for a file of ext4 or XFS, which Linux caches in huge pages. Network file systems do not have them.
pub fn has_large_folios(file: &File) -> bool {
    #[cfg(target_os = "linux")]
    // The numbers of both in linux/magic.h.
    return rustix::fs::fstatfs(file).is_ok_and(|fs| matches!(fs.f_type, 0xEF53 | 0x5846_5342));
    #[cfg(not(target_os = "linux"))]
    {
        let _ = file;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, mknodat};

    #[test]
    fn only_regular_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        mknodat(CWD, path("pipe"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        std::os::unix::fs::symlink("pipe", path("link")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
        for (path, expected) in [
            (path("pipe"), "found a named pipe, expected a regular file"),
            (path("link"), "found a named pipe, expected a regular file"),
            (dir.path().into(), "found a directory, expected a regular file"),
            ("/dev/null".into(), "found a device, expected a regular file"),
            (path("socket"), "found a socket, expected a regular file"),
        ] {
            let refused = read(&path).unwrap_err();
            assert!(refused.to_string().contains(expected) && refused.file() == Some(&path), "{refused}");
        }
        std::fs::write(path("file"), "text").unwrap();
        assert_eq!(read_to_string(&path("file")).unwrap(), "text");
        assert!(read_limited(&path("file"), 3).unwrap_err().to_string().contains("found 4 bytes"));
    }

    #[test]
    fn only_a_missing_file_does_not_exist() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), "text").unwrap();
        std::os::unix::fs::symlink("/nonexistent", path("dangling")).unwrap();
        std::os::unix::fs::symlink("file", path("link")).unwrap();
        assert!(exists(&path("file")).unwrap() && is_file(&path("link")).unwrap() && is_dir(dir.path()).unwrap());
        assert!(!exists(&path("none")).unwrap() && !exists(&path("none/below")).unwrap());
        assert!(!is_dir(&path("file")).unwrap() && !is_file(dir.path()).unwrap());
        assert_eq!(first([path("none"), path("link")]).unwrap(), Some(path("link")));
        for (name, expected) in [
            ("file/below", "Not a directory"),
            ("dangling", "found a link to /nonexistent, which does not exist"),
            (&"n".repeat(300), "too long"),
        ] {
            let unknown = exists(&path(name)).unwrap_err();
            assert!(unknown.to_string().contains(expected) && unknown.file() == Some(&path(name)), "{unknown}");
        }
    }
}
