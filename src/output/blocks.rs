//! Blocks of a file that is written in parts of any size and order, so that the page cache holds it in huge pages.

use crate::files;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

/// Size of a huge page in bytes.
const BLOCK: u64 = 2 << 20;

/// Blocks of [`BLOCK`] bytes of a file of known length.
///
/// Linux chooses the size of a page of the page cache when its first byte is written: a page is as large as that write.
/// Weights are written in smaller parts, by several threads at once. The first one that writes into a block therefore
/// fills the whole block with zeros before, so that processes that map the file afterwards find huge pages. This costs
/// a copy in memory but no access to the disk, because the parts follow before the system writes the page back.
#[derive(Debug)]
pub(super) struct Blocks {
    /// For each whole block, true when no more zeros may be written to it.
    begun: Mutex<Vec<bool>>,
    zeros: Vec<u8>,
}

impl Blocks {
    /// Creates the blocks of a file that has its final length; none on file systems without huge pages.
    pub(super) fn of(file: &File) -> std::io::Result<Blocks> {
        let whole = if files::has_large_folios(file) { file.metadata()?.len() / BLOCK } else { 0 };
        Ok(Blocks::of_length(whole * BLOCK))
    }

    fn of_length(len: u64) -> Blocks {
        let whole = (len / BLOCK) as usize;
        Blocks { begun: Mutex::new(vec![false; whole]), zeros: vec![0; whole.min(1) * BLOCK as usize] }
    }

    /// Writes zeros to the blocks that a write to `range` touches first and does not fill. Data that an earlier run of
    /// the program has left are kept.
    ///
    /// # Errors
    /// A write fails.
    pub(super) fn begin(&self, file: &File, range: Range<u64>) -> std::io::Result<()> {
        for number in range.start / BLOCK..range.end.div_ceil(BLOCK) {
            let block = number * BLOCK..(number + 1) * BLOCK;
            let filled = range.start <= block.start && block.end <= range.end;
            // Held until the zeros are written, because the next thread writes its part right afterwards.
            let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(begun) = begun.get_mut(number as usize).filter(|begun| !**begun) else { continue };
            if !filled && is_hole(file, &block) {
                file.write_all_at(&self.zeros, block.start)?;
            }
            *begun = true;
        }
        Ok(())
    }
}

/// Returns true when a range was never written. A file system that cannot tell says that it was.
fn is_hole(file: &File, range: &Range<u64>) -> bool {
    #[cfg(target_os = "linux")]
    return match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(range.start)) {
        Ok(data) => data >= range.end,
        Err(error) => error == rustix::io::Errno::NXIO,
    };
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (file, range);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_in_any_order_give_the_file_and_keep_what_was_there() {
        let file = tempfile::tempfile().unwrap();
        let len = 3 * BLOCK + 77;
        file.set_len(len).unwrap();
        let byte = |at: u64| (at % 251) as u8 + 1;
        let part = |range: Range<u64>| range.map(byte).collect::<Vec<u8>>();
        // An earlier run has written this.
        file.write_all_at(&part(BLOCK + 5..BLOCK + 9), BLOCK + 5).unwrap();
        let blocks = Blocks::of_length(len);
        let cuts = [0, 10, BLOCK + 5, BLOCK + 9, 2 * BLOCK - 1, 3 * BLOCK + 70, len];
        let parts: Vec<Range<u64>> = cuts.array_windows().map(|[from, to]| *from..*to).collect();
        for i in [3, 0, 4, 1, 5] {
            blocks.begin(&file, parts[i].clone()).unwrap();
            file.write_all_at(&part(parts[i].clone()), parts[i].start).unwrap();
        }
        let mut all = vec![0; len as usize];
        file.read_exact_at(&mut all, 0).unwrap();
        assert!(all == part(0..len));
    }

    #[test]
    fn threads_do_not_overwrite_each_other() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 * BLOCK).unwrap();
        let blocks = Blocks::of_length(4 * BLOCK);
        let step = BLOCK / 8 + 3;
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (blocks, file) = (&blocks, &file);
                scope.spawn(move || {
                    for at in (0..4 * BLOCK).step_by(step as usize).skip(thread).step_by(4) {
                        let range = at..(at + step).min(4 * BLOCK);
                        blocks.begin(file, range.clone()).unwrap();
                        file.write_all_at(&vec![7; (range.end - at) as usize], at).unwrap();
                    }
                });
            }
        });
        let mut all = vec![0; 4 * BLOCK as usize];
        file.read_exact_at(&mut all, 0).unwrap();
        assert!(all.iter().all(|byte| *byte == 7));
    }
}
