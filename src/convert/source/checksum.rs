//! CRC-32 of the entries in an archive of `torch.save`, compared with those that its directory records.
//!
//! The checksums are compared while the whole file is read once, in order (`Comparison`), or by reading the entries
//! alone (`compare`). An archive may record no checksums (`torch.serialization.set_crc32_options(False)`); the
//! directory then has zeros. A checksum of zero is therefore not compared.

use super::read_at::ReadAt;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::progress::ProgressBar;
use std::ops::Range;

/// Bytes read at once.
const CHUNK: u64 = 1 << 20;

/// Recorded checksum of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checksum {
    /// Name of the entry.
    pub name: String,
    /// Position of its data in the file.
    pub range: Range<u64>,
    /// CRC-32 of its data.
    pub crc32: u32,
}

/// Sorts checksums by position and leaves out entries without one.
///
/// # Errors
/// Two entries overlap.
pub(super) fn in_order(mut checksums: Vec<Checksum>) -> Result<Vec<Checksum>> {
    checksums.retain(|checksum| checksum.crc32 != 0);
    checksums.sort_by_key(|checksum| (checksum.range.start, checksum.range.end));
    match checksums.windows(2).find(|pair| pair[0].range.end > pair[1].range.start) {
        Some(pair) => {
            let message = format!("entries `{}` and `{}` overlap", pair[0].name, pair[1].name);
            Err(Error::corrupt(message).help("the file is damaged; get it again"))
        }
        None => Ok(checksums),
    }
}

/// Comparison of recorded checksums with those of a file that is read in order.
pub(in crate::convert) struct Comparison<'a> {
    /// Checksums of the entries that were not read completely yet.
    rest: &'a [Checksum],
    crc32: crc32fast::Hasher,
}

impl<'a> Comparison<'a> {
    /// Begins at the start of the file. `checksums` are in the order of [`in_order`].
    pub(in crate::convert) fn new(checksums: &'a [Checksum]) -> Comparison<'a> {
        Comparison { rest: checksums, crc32: crc32fast::Hasher::new() }
    }

    /// Takes the bytes at position `at` of the file, which must lie after those of the last call, possibly with a gap.
    ///
    /// # Errors
    /// An entry that ends here has another checksum.
    pub(in crate::convert) fn pass(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let end = at + bytes.len() as u64;
        while let [first, rest @ ..] = self.rest {
            let (from, to) = (first.range.start.max(at), first.range.end.min(end));
            if from < to {
                self.crc32.update(&bytes[(from - at) as usize..(to - at) as usize]);
            }
            if first.range.end > end {
                break;
            }
            let found = std::mem::take(&mut self.crc32).finalize();
            if found != first.crc32 {
                let message = format!("found the CRC-32 {found:08x}, expected {:08x} from the archive", first.crc32);
                return Err(Error::refused(message).tensor(&first.name).help("the file is damaged; get it again"));
            }
            self.rest = rest;
        }
        Ok(())
    }
}

/// Reads the entries of `checksums` from a file and compares their CRC-32.
///
/// # Errors
/// A checksum differs, reading fails, or the user interrupts.
pub(super) fn compare(file: &dyn ReadAt, checksums: &[Checksum], bar: &ProgressBar) -> Result<()> {
    let mut comparison = Comparison::new(checksums);
    let mut buffer = Vec::new();
    for Checksum { range, .. } in checksums {
        for at in range.clone().step_by(CHUNK as usize) {
            interrupt::check()?;
            buffer.resize(CHUNK.min(range.end - at) as usize, 0);
            file.read_at(at, &mut buffer)?;
            comparison.pass(at, &buffer)?;
            bar.inc(buffer.len() as u64);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checksum(name: &str, range: Range<u64>, file: &[u8]) -> Checksum {
        let crc32 = crc32fast::hash(&file[range.start as usize..range.end as usize]);
        Checksum { name: name.to_string(), range, crc32 }
    }

    #[test]
    fn every_flipped_bit_in_an_entry_is_found_in_pieces_of_any_size() {
        let file: Vec<u8> = (0..200u8).collect();
        let entries = vec![checksum("b", 90..91, &file), checksum("a", 10..90, &file), checksum("c", 120..200, &file)];
        let entries = in_order(entries).unwrap();
        let pass = |file: &[u8], piece: usize| {
            let mut comparison = Comparison::new(&entries);
            (0..).step_by(piece).zip(file.chunks(piece)).try_for_each(|(at, bytes)| comparison.pass(at, bytes))
        };
        for piece in [1, 7, 64, 1000] {
            pass(&file, piece).unwrap();
            for byte in 0..200 {
                let mut damaged = file.clone();
                damaged[byte] ^= 1;
                let inside = entries.iter().find(|entry| entry.range.contains(&(byte as u64)));
                let found = pass(&damaged, piece).map_err(|e| e.tensor_name().unwrap().to_string());
                assert_eq!(found.err(), inside.map(|entry| entry.name.clone()), "byte {byte}, pieces of {piece}");
                let read = compare(&damaged.as_slice(), &entries, &ProgressBar::hidden());
                assert_eq!(read.is_err(), inside.is_some());
            }
        }
    }

    #[test]
    fn empty_entries_and_entries_without_a_checksum_are_passed() {
        let file = [1, 2, 3];
        let none = Checksum { name: "none".into(), range: 0..3, crc32: 0 };
        let entries = in_order(vec![checksum("empty", 1..1, &file), none]).unwrap();
        assert!(entries.is_empty());
        let wrong = [Checksum { name: "wrong".into(), range: 1..1, crc32: 5 }];
        assert!(Comparison::new(&wrong).pass(0, &file).is_err());
    }

    #[test]
    fn entries_that_overlap_are_refused() {
        let file = [1, 2, 3];
        let entries = vec![checksum("a", 0..2, &file), checksum("b", 1..3, &file)];
        assert!(in_order(entries).unwrap_err().to_string().contains("`a` and `b` overlap"));
    }
}
