//! Sizes of the pages in which files are mapped.

use super::MappedFile;
use super::table::file_at;
use crate::files;
use std::path::Path;

/// Bytes of mappings that are in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Pages {
    /// Bytes in pages of any size.
    pub resident: u64,
    /// Bytes in huge pages.
    pub huge: u64,
}

/// Counts the pages of a mapped file; `None` if the system does not tell.
pub(super) fn pages_of(file: &MappedFile) -> Option<Pages> {
    let addresses = file.bytes().as_ptr_range();
    let addresses = addresses.start as usize..addresses.end as usize;
    Some(count(&smaps()?, |start| addresses.contains(&start)))
}

fn smaps() -> Option<String> {
    files::read_to_string(Path::new("/proc/self/smaps")).ok()
}

/// Returns the share, 0 to 1, of the resident bytes of all mapped files of this process that lie in huge pages; `None`
/// if nothing is resident or the system does not tell.
pub fn huge_share() -> Option<f64> {
    let pages = count(&smaps()?, |address| file_at(address).is_some());
    (pages.resident > 0).then(|| pages.huge as f64 / pages.resident as f64)
}

/// Counts the pages in the text of `smaps` (proc(5)) of the mappings whose first address is `ours`.
fn count(maps: &str, ours: impl Fn(usize) -> bool) -> Pages {
    let (mut pages, mut counts) = (Pages::default(), false);
    for line in maps.lines() {
        // A mapping begins with a line of its addresses, `55d0c0a0-55d0c0b0 r--p …`; those of its numbers have a colon.
        let mut words = line.split_ascii_whitespace();
        match words.next().unwrap_or_default() {
            "Rss:" if counts => pages.resident += 1024 * kilobytes(words.next()),
            "FilePmdMapped:" if counts => pages.huge += 1024 * kilobytes(words.next()),
            key if key.ends_with(':') => {}
            addresses => {
                let start = addresses.split('-').next().and_then(|start| usize::from_str_radix(start, 16).ok());
                counts = start.is_some_and(&ours);
            }
        }
    }
    pages
}

fn kilobytes(word: Option<&str>) -> u64 {
    word.and_then(|word| word.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0040000000 r--s 00000000 fe:00 12 /models/a b: c/model.ie.bin
Size:            1048576 kB
Rss:                4096 kB
FilePmdMapped:      2048 kB
VmFlags: rd sh mr mw me ms hg
7f1000000000-7f1000200000 rw-p 00000000 00:00 0
Rss:                2048 kB
FilePmdMapped:         0 kB
7f2000000000-7f2000200000 r--s 00000000 fe:00 13 /models/other
Rss:                4096 kB
FilePmdMapped:      4096 kB
";

    #[test]
    fn only_mapped_files_count() {
        let pages = |resident: u64, huge: u64| Pages { resident: resident << 20, huge: huge << 20 };
        assert_eq!(count(MAPS, |start| start == 0x7f00_0000_0000), pages(4, 2));
        assert_eq!(count(MAPS, |start| start != 0x7f10_0000_0000), pages(8, 6));
        assert_eq!(count(MAPS, |_| false), pages(0, 0));
        assert_eq!(count("", |_| true), pages(0, 0));
    }
}
