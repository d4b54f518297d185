//! Where may output go, and does it fit there?

use crate::error::{Context, Error, Result};
use std::fs::File;
use std::path::{Component, Path, PathBuf};

/// A directory for output; removed again when this run made it and nothing was put there.
#[derive(Debug)]
pub struct OutDir {
    path: PathBuf,
    created: bool,
}

impl OutDir {
    /// Makes the directory when it is missing.
    pub fn make(path: &Path) -> Result<OutDir> {
        let created = !path.exists();
        std::fs::create_dir_all(path).at(path)?;
        Ok(OutDir { path: path.to_path_buf(), created })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for OutDir {
    fn drop(&mut self) {
        if self.created {
            // Refused by the system when anything lies in it, which is what we want.
            let _ = std::fs::remove_dir(&self.path);
        }
    }
}

/// Refuses output into the source or below it: converters must not mix what they read with what they write.
///
/// # Errors
/// `out` is `source`, or lies inside it, links resolved.
pub fn refuse_within(source: &Path, out: &Path) -> Result<()> {
    let source = if source.is_dir() { source } else { source.parent().unwrap_or(Path::new("")) };
    let (source, target) = (resolved(source)?, resolved(out)?);
    let found = match target.strip_prefix(&source) {
        Err(_) => return Ok(()),
        Ok(rest) if rest.as_os_str().is_empty() => "is the directory of the checkpoint itself",
        Ok(_) => "lies inside the checkpoint",
    };
    Err(Error::usage(found).at(out).help("choose another --out-dir"))
}

/// Bytes that may still be written where `path` is or will be.
pub fn free_bytes(path: &Path) -> Result<u64> {
    let place = resolved(path)?;
    let place = place.ancestors().find(|p| p.exists()).unwrap_or(Path::new("."));
    let disk = rustix::fs::statvfs(place).map_err(std::io::Error::from).at(place)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// Refuses work that will not fit; `already` bytes of it are on the disk.
///
/// # Errors
/// The disk has not enough room.
pub fn require_space(path: &Path, needed: u64, already: u64) -> Result<()> {
    let (free, more) = (free_bytes(path)?, needed.saturating_sub(already));
    if more <= free {
        return Ok(());
    }
    let done = if already > 0 { format!(" ({already} of {needed} are there)") } else { String::new() };
    let message = format!("needs {more} bytes{done}, the disk has {free} left");
    Err(Error::from(std::io::Error::new(std::io::ErrorKind::StorageFull, message)).at(path))
}

/// Bytes of disk that a file occupies; 0 when it does not exist.
pub fn occupied(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    // POSIX counts blocks of 512 bytes, whatever the file system's own.
    std::fs::metadata(path).map_or(0, |m| m.blocks() * 512)
}

/// Gives a file its full length, and the disk blocks of `ranges` where the file system can promise them.
///
/// # Errors
/// The disk is full, or the file may not become that long.
pub fn reserve(file: &File, len: u64, ranges: impl IntoIterator<Item = std::ops::Range<u64>>) -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        use rustix::io::Errno;
        let flags = rustix::fs::FallocateFlags::empty();
        match rustix::fs::fallocate(file, flags, range.start, range.end - range.start) {
            Ok(()) => {}
            // Some file systems cannot reserve; writing will tell.
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => break,
            Err(e) => return Err(e.into()),
        }
    }
    #[cfg(not(target_os = "linux"))]
    drop(ranges.into_iter());
    file.set_len(len)
}

/// The absolute path of an input, wherever a process that repeats the command is started. Links stay: they may be mended.
pub fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).at(path)
}

/// The absolute path with links resolved as far as it exists.
fn resolved(path: &Path) -> Result<PathBuf> {
    let absolute = absolute(path)?;
    for ancestor in absolute.ancestors() {
        if let Ok(real) = ancestor.canonicalize() {
            let missing = absolute.strip_prefix(ancestor).unwrap_or(Path::new(""));
            return Ok(missing.components().fold(real, |mut path, part| {
                match part {
                    Component::ParentDir => drop(path.pop()),
                    part => path.push(part),
                }
                path
            }));
        }
    }
    Ok(absolute)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_into_or_below_the_source_is_refused_through_links_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::create_dir_all(path("source/original")).unwrap();
        std::os::unix::fs::symlink(path("source"), path("link")).unwrap();
        for (source, out, refused) in [
            ("source", "source", true),
            ("source", "source/pack", true),
            ("source", "source/a/b/c", true),
            ("link", "source", true),
            ("source", "link/pack", true),
            ("source", "x/../source/pack", true),
            ("source/original", "source", false),
            ("source", "source-pack", false),
            ("source", "pack", false),
        ] {
            let answer = refuse_within(&path(source), &path(out));
            assert_eq!(answer.is_err(), refused, "{source} -> {out}: {answer:?}");
        }
    }

    #[test]
    fn space_that_is_taken_already_counts() {
        let dir = tempfile::tempdir().unwrap();
        assert!(require_space(&dir.path().join("not/there/yet"), 1, 0).is_ok());
        let full = require_space(dir.path(), 1 << 60, 0).unwrap_err();
        assert!(full.to_string().contains("left") && full.help_text().unwrap().contains("disk space"), "{full}");
        assert!(require_space(dir.path(), 1 << 60, 1 << 60).is_ok());
    }

    #[test]
    fn a_directory_that_stays_empty_is_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        let (empty, used) = (dir.path().join("empty"), dir.path().join("used"));
        drop(OutDir::make(&empty).unwrap());
        let made = OutDir::make(&used).unwrap();
        std::fs::write(used.join("file"), "x").unwrap();
        drop(made);
        assert!(!empty.exists() && used.exists());
    }
}
