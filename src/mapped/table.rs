//! Table of the mapped files of this process, which a signal handler may read.
//!
//! A file that another program truncates while it is mapped has pages without data; reading one raises SIGBUS at an
//! address from which the handler must find the file. Therefore the table is an append-only list that is read without
//! locks and never freed. An entry keeps its file name for ever and is used again for the next mapping of a file of
//! that name, so for each name the list has as many entries as there were mappings of it at the same time.

use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

static FIRST: OnceLock<Box<MappingEntry>> = OnceLock::new();

#[derive(Debug)]
struct MappingEntry {
    /// Path of the file, with `?` for control characters.
    name: Box<[u8]>,
    /// True while a mapping has this entry.
    used: AtomicBool,
    /// First address of the mapping.
    start: AtomicUsize,
    /// End of the mapping; 0 while there is none.
    end: AtomicUsize,
    next: OnceLock<Box<MappingEntry>>,
}

/// A mapping in the table, which is removed when this value is dropped.
#[derive(Debug)]
pub(super) struct Registered(&'static MappingEntry);

impl Registered {
    /// Adds the mapping of a file at these addresses.
    pub(super) fn new(path: &Path, addresses: Range<usize>) -> Registered {
        // The name is printed, so control characters, which could steer a terminal, are replaced.
        let name: Box<[u8]> =
            path.as_os_str().as_bytes().iter().map(|b| if b.is_ascii_control() { b'?' } else { *b }).collect();
        let mut place = &FIRST;
        loop {
            let entry = place.get_or_init(|| Box::new(MappingEntry::new(name.clone())));
            if entry.name == name && !entry.used.swap(true, Ordering::Acquire) {
                entry.start.store(addresses.start, Ordering::Release);
                entry.end.store(addresses.end, Ordering::Release);
                return Registered(entry);
            }
            place = &entry.next;
        }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.0.end.store(0, Ordering::Release);
        self.0.used.store(false, Ordering::Release);
    }
}

impl MappingEntry {
    fn new(name: Box<[u8]>) -> MappingEntry {
        let (used, start, end, next) = Default::default();
        MappingEntry { name, used, start, end, next }
    }
}

/// Returns the name of the file that is mapped at an address, for messages. May be called in a signal handler.
pub fn file_at(address: usize) -> Option<&'static [u8]> {
    let mut place = &FIRST;
    while let Some(entry) = place.get() {
        if (entry.start.load(Ordering::Acquire)..entry.end.load(Ordering::Acquire)).contains(&address) {
            return Some(&entry.name);
        }
        place = &entry.next;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_found_by_its_addresses_as_long_as_it_is_mapped() {
        // No mapping can have these addresses.
        let high = usize::MAX - 1000;
        let first = Registered::new(Path::new("/a\nb"), high..high + 10);
        let second = Registered::new(Path::new("/a\nb"), high + 20..high + 30);
        assert_eq!(file_at(high + 9), Some(&b"/a?b"[..]));
        assert_eq!(file_at(high + 20), Some(&b"/a?b"[..]));
        assert_eq!(file_at(high + 10), None);
        let entry: *const MappingEntry = first.0;
        drop(first);
        assert_eq!(file_at(high), None);
        let again = Registered::new(Path::new("/a\nb"), high..high + 1);
        assert!(std::ptr::eq(entry, again.0) && file_at(high).is_some());
        drop((second, again));
    }
}
