//! Reads the zip archive of `torch.save`: stored entries only, found through the directory at the end of the file.
//!
//! Compressed entries are refused, so an archive cannot expand. The sizes of entries or files beyond 4 GiB
//! are in the zip64 records.

use super::stream::{Budget, malformed};
use crate::convert::source::checksum::Checksum;
use crate::convert::source::read_at::ReadAt;
use crate::error::{Context, Error, Result};
use std::collections::HashMap;

const END: [u8; 4] = *b"PK\x05\x06";
const END64: [u8; 4] = *b"PK\x06\x06";
const LOCATOR64: [u8; 4] = *b"PK\x06\x07";
const CENTRAL: [u8; 4] = *b"PK\x01\x02";
pub(super) const LOCAL: [u8; 4] = *b"PK\x03\x04";
const END_BYTES: u64 = 22;
const END64_BYTES: u64 = 56;
const CENTRAL_BYTES: usize = 46;
const LOCAL_BYTES: u64 = 30;

/// A zip archive with a checked directory.
pub(super) struct Archive<'a> {
    file: &'a dyn ReadAt,
    /// Position of the directory; the data of every entry ends before it.
    directory: u64,
    entries: HashMap<String, ZipEntry>,
    /// Folder that contains all entries, with a trailing slash.
    folder: String,
}

#[derive(Debug, Clone, Copy)]
struct ZipEntry {
    stored: bool,
    nbytes: u64,
    crc32: u32,
    header: u64,
}

impl<'a> Archive<'a> {
    /// Reads the directory and checks the byte order.
    pub(super) fn open(file: &'a dyn ReadAt, budget: &Budget) -> Result<Archive<'a>> {
        let (start, nbytes, count) = directory(file)?;
        if count > nbytes / CENTRAL_BYTES as u64 {
            return Err(damaged(format!("{count} entries in a directory of {nbytes} bytes")));
        }
        budget.charge::<u8>(usize::try_from(nbytes).unwrap_or(usize::MAX))?;
        let bytes = file.read_vec(start, nbytes)?;
        let mut entries = HashMap::new();
        let mut rest = bytes.as_slice();
        for _ in 0..count {
            budget.charge::<[(String, ZipEntry); 2]>(1)?;
            let (name, entry, after) = central(rest)?;
            budget.charge::<u8>(name.len())?;
            if entries.insert(name.clone(), entry).is_some() {
                return Err(damaged(format!("two entries named `{name}`")));
            }
            rest = after;
        }
        let folder = folder(&entries)?;
        let archive = Archive { file, directory: start, entries, folder };
        archive.check_byte_order()?;
        Ok(archive)
    }

    fn check_byte_order(&self) -> Result<()> {
        if !self.entries.contains_key(&format!("{}byteorder", self.folder)) {
            // Older versions of PyTorch do not write this entry and support one byte order only.
            return Ok(());
        }
        let (start, nbytes) = self.entry("byteorder")?;
        match self.file.read_vec(start, nbytes.min(16))?.as_slice() {
            b"little" => Ok(()),
            other => Err(Error::unsupported(format!(
                "found byte order `{}`, expected little",
                String::from_utf8_lossy(other)
            ))
            .help("save the weights on a little-endian machine")),
        }
    }

    /// Returns the start and length of the data of an entry of the folder.
    pub(super) fn entry(&self, name: &str) -> Result<(u64, u64)> {
        let name = format!("{}{name}", self.folder);
        let entry = self.entries.get(&name).ok_or_else(|| {
            Error::corrupt(format!("found no entry `{name}` in the archive")).help("the file is damaged; get it again")
        })?;
        if !entry.stored {
            return Err(Error::unsupported(format!("found the compressed or encrypted entry `{name}`"))
                .help("save the weights again with torch.save, which does not compress entries, or as safetensors"));
        }
        self.data(entry).tensor(&name)
    }

    /// Returns the position and the recorded CRC-32 of an entry of the folder. The directory has the checksum of every
    /// entry, also of one whose local header has none because its data was written first.
    pub(super) fn checksum(&self, name: &str) -> Result<Checksum> {
        let (start, nbytes) = self.entry(name)?;
        let name = format!("{}{name}", self.folder);
        Ok(Checksum { crc32: self.entries[&name].crc32, name, range: start..start + nbytes })
    }

    fn data(&self, entry: &ZipEntry) -> Result<(u64, u64)> {
        let header = self.file.read_vec(entry.header, LOCAL_BYTES)?;
        if header[..4] != LOCAL {
            return Err(damaged("no header at the position in the directory"));
        }
        let (name, extra) = (u64::from(u16_at(&header, 26)), u64::from(u16_at(&header, 28)));
        // `read_vec` has read the header from the file, so these sums cannot overflow.
        let start = entry.header + LOCAL_BYTES + name + extra;
        match start.checked_add(entry.nbytes) {
            Some(end) if end <= self.directory => Ok((start, entry.nbytes)),
            _ => Err(damaged(format!("{} bytes from {start} on reach past the data", entry.nbytes))),
        }
    }
}

fn damaged(what: impl std::fmt::Display) -> Error {
    Error::corrupt(format!("damaged zip archive: {what}")).help("the file is truncated or damaged; get it again")
}

/// Returns the start, the length and the number of entries of the directory.
fn directory(file: &dyn ReadAt) -> Result<(u64, u64, u64)> {
    let len = file.nbytes();
    // The end record may be followed by a comment of at most 65535 bytes.
    let tail_start = len.saturating_sub(END_BYTES + 0xffff);
    let tail = file.read_vec(tail_start, len - tail_start)?;
    let at = (0..=tail.len().saturating_sub(END_BYTES as usize)).rev().find(|at| {
        tail[*at..].starts_with(&END)
            && tail.len() - at >= END_BYTES as usize
            && tail.len() - at - END_BYTES as usize == usize::from(u16_at(&tail, at + 20))
    });
    let at = at.ok_or_else(|| damaged("no directory at the end"))?;
    let record = &tail[at..];
    let mut end = tail_start + at as u64;
    let (start, nbytes, count) = match locator(file, end)? {
        Some(at) => {
            let record = file.read_vec(at, END64_BYTES)?;
            if record[..4] != END64 {
                return Err(damaged("no zip64 record at the position in its locator"));
            }
            end = at;
            (u64_at(&record, 48), u64_at(&record, 40), u64_at(&record, 32))
        }
        None => {
            let (start, nbytes, count) = (u32_at(record, 16), u32_at(record, 12), u16_at(record, 10));
            if count == u16::MAX || nbytes == u32::MAX || start == u32::MAX {
                return Err(damaged("no zip64 record"));
            }
            (u64::from(start), u64::from(nbytes), u64::from(count))
        }
    };
    match start.checked_add(nbytes) {
        Some(reached) if reached <= end => Ok((start, nbytes, count)),
        _ => Err(damaged(format!("a directory of {nbytes} bytes at position {start} of {len} bytes"))),
    }
}

/// Returns the position of the zip64 end record, if a locator precedes the end record.
fn locator(file: &dyn ReadAt, end: u64) -> Result<Option<u64>> {
    let Some(at) = end.checked_sub(20) else { return Ok(None) };
    let bytes = file.read_vec(at, 20)?;
    Ok(bytes.starts_with(&LOCATOR64).then(|| u64_at(&bytes, 8)))
}

/// Parses the first entry of the directory; returns its name, the entry, and the remaining bytes.
fn central(bytes: &[u8]) -> Result<(String, ZipEntry, &[u8])> {
    let short = || damaged("the directory ends within an entry");
    let (record, rest) = bytes.split_at_checked(CENTRAL_BYTES).ok_or_else(short)?;
    if record[..4] != CENTRAL {
        return Err(damaged("something else than an entry in the directory"));
    }
    let length = |at: usize| usize::from(u16_at(record, at));
    let (name, rest) = rest.split_at_checked(length(28)).ok_or_else(short)?;
    let (extra, rest) = rest.split_at_checked(length(30)).ok_or_else(short)?;
    let after = rest.get(length(32)..).ok_or_else(short)?;
    let name = std::str::from_utf8(name).map_err(|_| damaged("an entry whose name is not UTF-8"))?;
    let (flags, method) = (u16_at(record, 8), u16_at(record, 10));
    let mut wide = zip64(extra);
    let mut number = |narrow: u32| if narrow == u32::MAX { wide.next() } else { Some(u64::from(narrow)) };
    // The zip64 field lists the numbers that do not fit in 32 bits, in this order.
    let unpacked = number(u32_at(record, 24)).ok_or_else(short)?;
    let packed = number(u32_at(record, 20)).ok_or_else(short)?;
    let header = number(u32_at(record, 42)).ok_or_else(short)?;
    let stored = method == 0 && flags & 1 == 0 && packed == unpacked;
    Ok((name.to_string(), ZipEntry { stored, nbytes: unpacked, crc32: u32_at(record, 16), header }, after))
}

/// Returns the numbers of the zip64 field among the extra fields of an entry.
fn zip64(mut extra: &[u8]) -> impl Iterator<Item = u64> {
    let mut field: &[u8] = &[];
    while extra.len() >= 4 {
        let (id, len) = (u16_at(extra, 0), usize::from(u16_at(extra, 2)));
        let Some(data) = extra.get(4..4 + len) else { break };
        if id == 1 {
            field = data;
        }
        extra = &extra[4 + len..];
    }
    field.chunks_exact(8).map(|word| u64_at(word, 0))
}

/// Returns the folder that contains `data.pkl`.
fn folder(entries: &HashMap<String, ZipEntry>) -> Result<String> {
    let mut folders = entries.keys().filter_map(|name| name.strip_suffix("data.pkl")).filter(|folder| {
        let Some(name) = folder.strip_suffix('/') else { return folder.is_empty() };
        !name.contains('/')
    });
    match (folders.next(), folders.next()) {
        (Some(folder), None) => Ok(folder.to_string()),
        (Some(_), Some(_)) => Err(malformed("two files data.pkl in the archive")),
        (None, _) => {
            Err(Error::unsupported("found a zip archive without data.pkl, expected one that torch.save wrote")
                .help("give weights as safetensors or as written by torch.save"))
        }
    }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

/// Copies `N` bytes of a record whose length was checked before.
fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}
