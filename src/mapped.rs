//! Read-only bytes that tensors borrow for as long as they live: ranges of memory-mapped files, or owned memory.

mod mend;
mod pages;
mod slab;
mod table;

pub use mend::into_huge_pages;
pub use pages::huge_share;
pub use slab::SlabPart;
pub use table::file_at;

use crate::error::{Cause, Context, Error, Result};
use crate::files;
use std::fs::File;
use std::ops::{Deref, Range};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use table::Registered;

/// Smallest page size of any supported system in bytes.
const PAGE: usize = 4096;
/// Size in bytes from which a buffer gets an anonymous mapping of its own: it is backed by huge pages and is returned
/// to the system when it is dropped.
const LARGE: usize = 1 << 20;

/// A file mapped read-only into memory.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    file: File,
    map: memmap2::Mmap,
    _registered: Registered,
}

impl MappedFile {
    /// Maps the whole file, in huge pages where the system supports them for files: data that is read from the disk
    /// through this mapping is then cached in pages of 2 MiB, so that using it causes a 500th of the page faults, in
    /// this process and in later ones.
    ///
    /// # Errors
    /// The file cannot be opened or mapped, or is not a regular file.
    #[allow(unsafe_code)]
    pub fn open(path: &Path) -> Result<Arc<MappedFile>> {
        let file = files::open(path)?;
        // SAFETY: packs and other results are written to a temporary name and renamed, so a mapped file is never
        // changed in place by this program. Reading what another program has truncated raises SIGBUS, which ends the
        // process.
        let map = unsafe { memmap2::Mmap::map(&file) }.at(path)?;
        // This is advice: a system that does not support it for files returns an error, which is ignored.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let addresses = map.as_ptr_range();
        let registered = Registered::new(path, addresses.start as usize..addresses.end as usize);
        Ok(Arc::new(MappedFile { path: path.to_path_buf(), file, map, _registered: registered }))
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fills `out` with the bytes that start at position `at` without mapping them, so that resident memory does not
    /// grow with the bytes that are read.
    ///
    /// # Errors
    /// The range reaches past the end, or reading fails.
    pub fn read_at(&self, at: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, at).at(&self.path)
    }

    /// Advises the system not to read ahead of the pages that are used. Systems without such advice ignore it.
    pub fn stop_read_ahead(&self) {
        #[cfg(unix)]
        let _ = self.map.advise(memmap2::Advice::Random);
    }

    /// Locks the whole file in memory for as long as it is mapped; reads the pages that are not in memory yet.
    ///
    /// # Errors
    /// The system refuses, mostly because of the limit on locked memory (`ulimit -l`).
    pub fn lock(&self) -> Result<()> {
        self.map.lock().at(&self.path)
    }

    /// Releases the pages that this process has read; they are loaded again when they are accessed.
    #[allow(unsafe_code)]
    pub fn release(&self) {
        // SAFETY: the mapping is read-only and backed by a file, so a page that is loaded again has the same bytes.
        #[cfg(unix)]
        let _ = unsafe { self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
    }

    /// Releases the pages that lie wholly inside `range`, like [`MappedFile::release`].
    #[allow(unsafe_code)]
    pub fn release_range(&self, range: Range<usize>) {
        let (start, end) = (range.start.next_multiple_of(PAGE), range.end / PAGE * PAGE);
        if start < end && end <= self.map.len() {
            // SAFETY: the mapping is read-only and backed by a file, so a page that is loaded again has the same
            // bytes.
            #[cfg(unix)]
            let _ = unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, end - start) };
        }
    }

    /// Waits until the file is written to the disk.
    fn sync(&self) -> std::io::Result<()> {
        self.file.sync_data()
    }

    /// Returns true when the file system can cache the file in huge pages.
    fn has_large_folios(&self) -> bool {
        files::has_large_folios(&self.file)
    }

    /// Returns true when all of these bytes are in the page cache; false if the system does not tell. For a file that
    /// the user may not write, Linux says that all of it is. The range begins at a page.
    #[allow(unsafe_code)]
    fn is_cached(&self, range: Range<usize>) -> bool {
        let bytes = &self.map[range];
        // Where pages are larger than the smallest ones, the system writes fewer bytes.
        let mut pages = vec![1u8; bytes.len().div_ceil(PAGE)];
        // SAFETY: the bytes are mapped, and there is a byte for each page of the smallest size.
        #[cfg(target_os = "linux")]
        let known = unsafe { libc::mincore(bytes.as_ptr().cast_mut().cast(), bytes.len(), pages.as_mut_ptr()) } == 0;
        #[cfg(not(target_os = "linux"))]
        let known = false;
        known && pages.iter().all(|page| page & 1 == 1)
    }

    /// Asks the system to drop these bytes from the page cache, except pages that another process has mapped.
    fn evict(&self, range: Range<usize>) {
        let len = std::num::NonZeroU64::new(range.len() as u64);
        #[cfg(target_os = "linux")]
        let _ = rustix::fs::fadvise(&self.file, range.start as u64, len, rustix::fs::Advice::DontNeed);
    }

    /// Returns the bytes of the whole file.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
}

/// Immutable bytes, cheap to clone; dereferences to `[u8]`. The start is aligned to 64 bytes if the range starts at a
/// multiple of 64 within the file (mappings start on a page; owned memory is allocated in units of 64 bytes).
#[derive(Debug, Clone)]
pub struct Bytes(Repr);

#[derive(Debug, Clone)]
enum Repr {
    Mapped(Arc<MappedFile>, Range<usize>),
    Owned(Arc<Vec<Line>>, usize),
    Anonymous(Arc<memmap2::MmapMut>, Range<usize>),
}

/// One cache line: the unit of owned buffers, which aligns them to 64 bytes.
#[derive(Debug, Clone, Copy, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl Bytes {
    /// Borrows a range of a mapped file.
    ///
    /// # Errors
    /// The range lies outside the file.
    pub fn mapped(file: &Arc<MappedFile>, range: Range<usize>) -> Result<Bytes> {
        if range.start > range.end || range.end > file.bytes().len() {
            let found = format!(
                "found a range {}..{} outside the file of {} bytes",
                range.start,
                range.end,
                file.bytes().len()
            );
            return Err(Error::corrupt(found).at(&file.path));
        }
        Ok(Bytes(Repr::Mapped(file.clone(), range)))
    }

    /// Copies `bytes` into memory aligned to 64 bytes.
    pub fn copied(bytes: &[u8]) -> Bytes {
        let mut lines = vec![Line([0; 64]); bytes.len().div_ceil(64)];
        bytemuck::cast_slice_mut(&mut lines)[..bytes.len()].copy_from_slice(bytes);
        Bytes(Repr::Owned(Arc::new(lines), bytes.len()))
    }

    /// Allocates `len` bytes in memory aligned to 64 bytes, zeroes them and calls `fill` to write them.
    ///
    /// # Errors
    /// `fill` fails, or there is no memory for a large buffer.
    pub fn build(len: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<Bytes> {
        if len >= LARGE {
            let mut map = memmap2::MmapMut::map_anon(len).map_err(|e| {
                Error::new(Cause::OutOfMemory(format!("no memory for {len} bytes: {e}")))
                    .help("give the process more memory or address space (`ulimit -v`, the limits of the container)")
            })?;
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
            fill(&mut map)?;
            return Ok(Bytes(Repr::Anonymous(Arc::new(map), 0..len)));
        }
        let mut lines = vec![Line([0; 64]); len.div_ceil(64)];
        fill(&mut bytemuck::cast_slice_mut(&mut lines)[..len])?;
        Ok(Bytes(Repr::Owned(Arc::new(lines), len)))
    }

    /// Returns a buffer of `len` bytes with arbitrary contents. Reuses the memory of these bytes if no other value
    /// shares it and it is large enough.
    pub fn reuse(&mut self, len: usize) -> &mut [u8] {
        let unshared = match &mut self.0 {
            Repr::Owned(lines, _) => Arc::get_mut(lines).is_some_and(|lines| lines.len() >= len.div_ceil(64)),
            _ => false,
        };
        if !unshared {
            self.0 = Repr::Owned(Arc::new(vec![Line([0; 64]); len.div_ceil(64)]), len);
        }
        let Repr::Owned(lines, length) = &mut self.0 else { unreachable!("made above") };
        *length = len;
        let lines = Arc::get_mut(lines).expect("the only reference was made above");
        &mut bytemuck::cast_slice_mut(lines)[..len]
    }

    /// Loads `range` of these bytes into memory and into the page table if they are those of a mapped file. Has no
    /// effect on owned memory, which is always loaded.
    pub fn populate(&self, range: Range<usize>) {
        let Repr::Mapped(file, whole) = &self.0 else { return };
        #[cfg(target_os = "linux")]
        if file.map.advise_range(memmap2::Advice::PopulateRead, whole.start + range.start, range.len()).is_ok() {
            return;
        }
        // On systems without that advice, and on Linux before 5.14, reading one byte of every page loads the pages.
        let bytes = &file.bytes()[whole.clone()][range];
        std::hint::black_box(bytes.iter().step_by(PAGE).fold(0u8, |sum, byte| sum ^ byte));
    }

    /// Releases the pages of a mapped file; they are loaded again when they are accessed. Has no effect on owned
    /// memory.
    pub fn release(&self) {
        if let Repr::Mapped(file, range) = &self.0 {
            file.release_range(range.clone());
        }
    }

    /// Locks these bytes in memory so that they are not paged out. For a range of a mapped file, the whole file is
    /// locked. Has no effect on bytes on the heap ([`Bytes::copied`], [`Bytes::reuse`] and small buffers).
    ///
    /// # Errors
    /// The same as those of [`MappedFile::lock`].
    pub fn lock(&self) -> Result<()> {
        match &self.0 {
            Repr::Mapped(file, _) => file.lock(),
            Repr::Anonymous(map, _) => Ok(map.lock()?),
            Repr::Owned(..) => Ok(()),
        }
    }

    /// Returns a part of these bytes. The part shares the memory if it is mapped, from a file or for a large buffer,
    /// and is a copy otherwise.
    ///
    /// # Panics
    /// The range is out of bounds.
    pub fn slice(&self, range: Range<usize>) -> Bytes {
        assert!(range.start <= range.end && range.end <= self.len());
        match &self.0 {
            Repr::Mapped(file, whole) => {
                Bytes(Repr::Mapped(file.clone(), whole.start + range.start..whole.start + range.end))
            }
            Repr::Anonymous(map, whole) => {
                Bytes(Repr::Anonymous(map.clone(), whole.start + range.start..whole.start + range.end))
            }
            Repr::Owned(..) => Bytes::copied(&self[range]),
        }
    }
}

impl Deref for Bytes {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.0 {
            Repr::Mapped(file, range) => &file.bytes()[range.clone()],
            Repr::Anonymous(map, range) => &map[range.clone()],
            Repr::Owned(lines, len) => &bytemuck::cast_slice(lines)[..*len],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owned_bytes_are_aligned_and_sliceable() {
        let b = Bytes::copied(&(0..200).collect::<Vec<u8>>());
        assert_eq!(b.as_ptr() as usize % 64, 0);
        assert_eq!(&b.slice(100..103)[..], &[100, 101, 102]);
    }

    #[test]
    fn any_range_can_be_populated_and_a_file_locked() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [7; 10_000]).unwrap();
        let map = MappedFile::open(file.path()).unwrap();
        let bytes = Bytes::mapped(&map, 100..9000).unwrap();
        for range in [0..0, 0..8900, 17..4100, 8900..8900] {
            bytes.populate(range);
        }
        Bytes::copied(&[1, 2, 3]).populate(0..3);
        // Three pages are within every limit on locked memory.
        map.lock().unwrap();
        assert_eq!(bytes[8899], 7);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn read_ahead_can_be_stopped() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [7; 10_000]).unwrap();
        let map = MappedFile::open(file.path()).unwrap();
        // "rr" among the flags of a mapping: random reads are advised.
        let flags = || {
            let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let mapping = maps.split(file.path().to_str().unwrap()).nth(1).unwrap();
            mapping.lines().find(|line| line.starts_with("VmFlags:")).unwrap().to_string()
        };
        assert!(!flags().contains(" rr"), "{}", flags());
        map.stop_read_ahead();
        assert!(flags().contains(" rr"), "{}", flags());
    }

    #[test]
    fn a_range_past_the_end_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [1, 2, 3]).unwrap();
        let map = MappedFile::open(file.path()).unwrap();
        assert_eq!(&Bytes::mapped(&map, 1..3).unwrap()[..], &[2, 3]);
        assert!(Bytes::mapped(&map, 1..4).is_err());
    }
}
