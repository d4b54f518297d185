//! Checks and reserves disk space for output.

use super::dir::resolved;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::units::human_bytes;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

/// Returns the free bytes on the disk of `path`, which need not exist yet.
pub fn free_bytes(path: &Path) -> Result<u64> {
    let place = resolved(path)?;
    let place = files::first(place.ancestors().map(Path::to_path_buf))?.unwrap_or_else(|| ".".into());
    let disk = rustix::fs::statvfs(&place).map_err(std::io::Error::from).at(place)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// Fails if an output of `needed` bytes, of which `already` bytes are written, does not fit on the disk of `path`.
///
/// # Errors
/// There is not enough free disk space.
pub fn require_space(path: &Path, needed: u64, already: u64) -> Result<()> {
    let (free, more) = (free_bytes(path)?, needed.saturating_sub(already));
    if more <= free {
        return Ok(());
    }
    let [more, free, there, all] = [more, free, already, needed].map(human_bytes);
    let done = if already > 0 { format!(" ({there} of {all} are written already)") } else { String::new() };
    let message = format!("needs {more}{done}, the disk has {free} left");
    Err(Error::from(std::io::Error::new(std::io::ErrorKind::StorageFull, message)).at(path))
}

/// Returns the disk space that a file occupies in bytes; 0 if it does not exist.
pub fn occupied(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    // POSIX counts blocks of 512 bytes, independent of the block size of the file system.
    std::fs::metadata(path).map_or(0, |m| m.blocks() * 512)
}

/// Sets a file to its full length, and reserves disk blocks for `ranges` if the file system supports it.
///
/// # Errors
/// The disk is full, or the file would exceed the maximum length.
pub fn reserve(file: &File, len: u64, ranges: impl IntoIterator<Item = Range<u64>>) -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    allocate(ranges, |range| {
        let flags = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(file, flags, range.start, range.end - range.start)
    })?;
    #[cfg(not(target_os = "linux"))]
    drop(ranges.into_iter());
    file.set_len(len)
}

/// Calls `fallocate` for each range that is not empty, and repeats a call that a signal interrupted.
#[cfg(target_os = "linux")]
fn allocate(
    ranges: impl IntoIterator<Item = Range<u64>>,
    fallocate: impl Fn(&Range<u64>) -> rustix::io::Result<()>,
) -> std::io::Result<()> {
    use rustix::io::{Errno, retry_on_intr};
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        match retry_on_intr(|| fallocate(&range)) {
            Ok(()) => {}
            // Some file systems cannot reserve blocks; if the disk becomes full, the write fails.
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => break,
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_that_is_taken_already_counts() {
        let dir = tempfile::tempdir().unwrap();
        assert!(require_space(&dir.path().join("not/there/yet"), 1, 0).is_ok());
        let full = require_space(dir.path(), 1 << 60, 0).unwrap_err();
        assert!(full.to_string().contains("left") && full.help_text().unwrap().contains("disk space"), "{full}");
        assert!(require_space(dir.path(), 1 << 60, 1 << 60).is_ok());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_reservation_that_a_signal_interrupts_is_repeated() {
        use rustix::io::Errno;
        let answers = std::cell::RefCell::new(vec![Ok(()), Err(Errno::INTR), Err(Errno::INTR), Ok(())]);
        allocate([0..1, 1..1, 1..2], |_| answers.borrow_mut().pop().unwrap()).unwrap();
        assert!(answers.borrow().is_empty());
        assert!(allocate([0..1, 1..2], |_| Err(Errno::NOSPC)).is_err());
        allocate([0..1, 1..2], |range| if range.start == 0 { Err(Errno::OPNOTSUPP) } else { Err(Errno::IO) }).unwrap();
    }
}
