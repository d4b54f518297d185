//! Anonymous memory that is mapped at once and handed out in parts of equal size.

use crate::error::{Cause, Error, Result};
use memmap2::{MmapOptions, MmapRaw};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// Size in bytes from which the system is asked for huge pages. Smaller memory would be rounded up by too much.
const HUGE: usize = 4 << 20;
/// Alignment of parts in bytes: a cache line.
const ALIGN: usize = 64;

/// A part of an anonymous mapping: bytes that no other part contains. The mapping lives as long as its parts.
#[derive(Debug)]
pub struct SlabPart {
    map: Arc<MmapRaw>,
    /// First byte of the part.
    start: usize,
    len: usize,
}

impl SlabPart {
    /// Maps memory for `count` parts of `len` bytes each, which are zeros and are aligned to 64 bytes. It takes no
    /// memory of the machine before it is written, unless it is locked. A locked mapping is never paged out.
    ///
    /// # Errors
    /// The address space or the limit of locked memory does not suffice.
    pub fn map(len: usize, count: usize, locked: bool) -> Result<Vec<SlabPart>> {
        let refused = |e: &dyn std::fmt::Display| {
            Error::new(Cause::OutOfMemory(format!("no memory for {count} parts of {len} bytes: {e}")))
                .help("give the process more memory or address space (`ulimit -v`, the limits of the container)")
        };
        let step = len.checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX);
        let whole = step.checked_mul(count).ok_or_else(|| refused(&"more than the address space"))?;
        let map = MmapOptions::new().len(whole.max(1)).no_reserve_swap().map_anon().map_err(|e| refused(&e))?;
        #[cfg(target_os = "linux")]
        if whole >= HUGE {
            // This is advice: a system without huge pages refuses it, and the memory works the same.
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        if locked {
            map.lock()
                .map_err(|e| refused(&e).help("raise the limit of locked memory (`ulimit -l`), or leave out --pin"))?;
        }
        let map = Arc::new(MmapRaw::from(map));
        Ok((0..count).map(|i| SlabPart { map: map.clone(), start: i * step, len }).collect())
    }
}

#[allow(unsafe_code)]
impl Deref for SlabPart {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `map` creates parts of disjoint ranges inside the mapping and nothing else reads or writes it, so the
        // borrow rules of the part are those of its bytes. The mapping is initialized with zeros and lives as long as
        // this part.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(self.start), self.len) }
    }
}

#[allow(unsafe_code)]
impl DerefMut for SlabPart {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; the mapping is writable.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().add(self.start), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_zeros_aligned_and_disjoint_and_outlive_each_other() {
        for (len, count) in [(1, 1), (100, 7), (1 << 20, 5), (64, 0)] {
            let mut parts = SlabPart::map(len, count, false).unwrap();
            assert_eq!(parts.len(), count);
            for (i, part) in parts.iter_mut().enumerate() {
                assert!(part.len() == len && part.as_ptr().addr().is_multiple_of(64) && part.iter().all(|b| *b == 0));
                part.fill(i as u8 + 1);
            }
            for i in (0..count).rev().step_by(2) {
                drop(parts.remove(i));
            }
            assert!(parts.iter().all(|part| part.iter().all(|byte| *byte == part[0] && *byte > 0)));
            let mut firsts: Vec<u8> = parts.iter().map(|part| part[0]).collect();
            firsts.dedup();
            assert_eq!(firsts.len(), parts.len());
        }
    }

    #[test]
    fn sizes_beyond_the_address_space_are_out_of_memory() {
        for (len, count) in [(usize::MAX / 2, 4), (1 << 46, 2)] {
            assert_eq!(SlabPart::map(len, count, false).unwrap_err().cause().exit_code(), 6);
        }
    }
}
