//! Moves weights from small pages of the page cache to huge ones while the model runs.
//!
//! A file that another program has copied or downloaded lies in small pages, which stay as they are until they are
//! evicted, and products then read it up to a third more slowly. When it is read again through a mapping that asks for
//! huge pages, it lies in huge pages for all later processes, too (Linux with ext4 since 6.16, or XFS). A background
//! thread does that, a segment at a time: it evicts and reads again what lies in memory. The bytes do not change, and
//! other threads may read them meanwhile; at worst they wait for a segment to be read. Files of network file systems
//! are left alone, because what was evicted might not come back.

use super::pages::pages_of;
use super::{Bytes, MappedFile};
use crate::progress;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Time after which the thread begins: shorter runs would not profit.
const WAIT: Duration = Duration::from_secs(10);
/// Smallest file that is worth it.
const LEAST_BYTES: usize = 64 << 20;
/// Bytes that are evicted and read at a time, a multiple of the size of a huge page.
const SEGMENT: usize = 16 << 20;
/// Number of segments after which there must be more huge pages than before.
const TRIAL: usize = 4;
/// Rate in bytes per second below which the disk is too slow.
const LEAST_RATE: f64 = 300e6;

/// Starts a thread that moves these files to huge pages if they lie in small ones, and if that helps. It ends when the
/// files are closed.
pub fn into_huge_pages(files: &[Arc<MappedFile>]) {
    let large = files.iter().filter(|file| file.bytes().len() >= LEAST_BYTES && file.has_large_folios());
    let files: Vec<Weak<MappedFile>> = large.map(Arc::downgrade).collect();
    if files.is_empty() {
        return;
    }
    // Without the thread, everything works as before, only more slowly.
    let _ = std::thread::Builder::new().name("iec-pages".to_string()).spawn(move || {
        std::thread::sleep(WAIT);
        for file in files {
            if let Some(note) = mend(&file, SEGMENT) {
                progress::detail(1, || note);
            }
        }
    });
}

/// Moves a file to huge pages, `segment` bytes at a time, and returns a note about it; `None` if nothing was to be done
/// or the file was closed meanwhile.
fn mend(file: &Weak<MappedFile>, segment: usize) -> Option<String> {
    let (before, name, len) = {
        let file = file.upgrade()?;
        (pages_of(&file)?, file.path().display().to_string(), file.bytes().len())
    };
    // Only what is written to the disk can be evicted.
    if before.huge >= before.resident / 10 * 9 || file.upgrade()?.sync().is_err() {
        return None;
    }
    let (mut read, start) = (0, Instant::now());
    for from in (0..len).step_by(segment) {
        let file = file.upgrade()?;
        let range = from..(from + segment).min(len);
        // Reading what the run does not need would take memory.
        if !file.is_cached(range.clone()) {
            continue;
        }
        read += range.len();
        file.release_range(range.clone());
        file.evict(range.clone());
        Bytes::mapped(&file, 0..len).ok()?.populate(range);
        if read == TRIAL * segment && pages_of(&file)?.huge <= before.huge {
            return Some(format!("{name} lies in small pages, which this system does not make larger"));
        }
        if (read as f64) < LEAST_RATE * start.elapsed().as_secs_f64() {
            return Some(format!("{name} lies in small pages; the disk is too slow to read it again"));
        }
    }
    let after = pages_of(&*file.upgrade()?)?;
    Some(format!("{name}: {} of {} MB lie in huge pages, {} before", after.huge >> 20, len >> 20, before.huge >> 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_keeps_its_bytes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..5_000_001u32).map(|i| (i * 7 / 8) as u8).collect();
        std::fs::write(file.path(), &bytes).unwrap();
        let map = MappedFile::open(file.path()).unwrap();
        assert_eq!(map.bytes(), bytes);
        // Whether there are huge pages afterwards depends on the system.
        mend(&Arc::downgrade(&map), 2 << 20);
        assert_eq!(map.bytes(), bytes);
    }

    #[test]
    fn a_closed_file_is_left_alone() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [1; 10]).unwrap();
        let map = MappedFile::open(file.path()).unwrap();
        let weak = Arc::downgrade(&map);
        drop(map);
        assert_eq!(mend(&weak, 2 << 20), None);
    }
}
