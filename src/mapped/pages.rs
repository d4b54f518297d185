//! Sizes of the pages in which files are mapped.

use super::table::file_at;
use crate::files;
use std::path::Path;

/// Returns the share, 0 to 1, of the resident bytes of all mapped files of this process that lie in huge pages; `None`
/// if nothing is resident or the system does not tell.
pub fn huge_share() -> Option<f64> {
    let maps = files::read_to_string(Path::new("/proc/self/smaps")).ok()?;
    share(&maps, |address| file_at(address).is_some())
}

/// Computes the share from the text of `smaps` (proc(5)) for the mappings whose first address is `ours`.
fn share(maps: &str, ours: impl Fn(usize) -> bool) -> Option<f64> {
    let (mut resident, mut huge, mut counts) = (0u64, 0u64, false);
    for line in maps.lines() {
        // A mapping begins with a line of its addresses, `55d0c0a0-55d0c0b0 r--p …`; those of its numbers have a colon.
        let mut words = line.split_ascii_whitespace();
        match words.next()? {
            "Rss:" if counts => resident += kilobytes(words.next()),
            "FilePmdMapped:" if counts => huge += kilobytes(words.next()),
            key if key.ends_with(':') => {}
            addresses => {
                let start = addresses.split('-').next().and_then(|start| usize::from_str_radix(start, 16).ok());
                counts = start.is_some_and(&ours);
            }
        }
    }
    (resident > 0).then(|| huge as f64 / resident as f64)
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
        assert_eq!(share(MAPS, |start| start == 0x7f00_0000_0000), Some(0.5));
        assert_eq!(share(MAPS, |start| start != 0x7f10_0000_0000), Some(0.75));
        assert_eq!(share(MAPS, |_| false), None);
        assert_eq!(share("", |_| true), None);
    }
}
