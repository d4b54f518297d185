//! Work stealing: divides the units of work of a parallel region (see [`super::region`]) among threads. Each thread has
//! a contiguous piece of the units and takes chunks from its front; when its piece is empty, it takes chunks from the
//! back of the longest piece that is left.
//!
//! Without stealing, equal pieces would end at the same time only if all cores were equally fast, which they are not on
//! a shared machine or when other programs run. A chunk is a quarter of what is left of its piece, so a long piece is
//! cut into few chunks, and the last chunks are short.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// A chunk is one in `PART` of the units that are left of its piece.
const PART: u32 = 4;

/// Remaining units of each thread's piece.
pub(super) struct Pieces {
    left: Vec<Left>,
    /// Chunks are multiples of this many units, except the last one of a piece.
    grain: u32,
}

/// Range of units: the first one in the upper 32 bits, the end in the lower 32 bits. Each has cache lines of its own.
#[repr(align(128))]
struct Left(AtomicU64);

fn pack(units: Range<u32>) -> u64 {
    u64::from(units.start) << 32 | u64::from(units.end)
}

fn unpack(bits: u64) -> Range<u32> {
    (bits >> 32) as u32..bits as u32
}

impl Pieces {
    /// Makes one piece for each thread.
    pub(super) fn new(pieces: impl Iterator<Item = Range<u32>>, grain: u32) -> Pieces {
        Pieces { left: pieces.map(|units| Left(AtomicU64::new(pack(units)))).collect(), grain }
    }

    /// Returns the units that thread `t` computes next, or `None` when all units are taken. No unit is returned
    /// twice.
    pub(super) fn next(&self, t: usize) -> Option<Range<u32>> {
        self.take(t, |left, n| (left.start..left.start + n, left.start + n..left.end)).or_else(|| {
            loop {
                let length = |other: &usize| unpack(self.left[*other].0.load(Ordering::Relaxed)).len();
                let longest = (0..self.left.len()).max_by_key(length).filter(|other| length(other) > 0)?;
                let chunk = self.take(longest, |left, n| (left.end - n..left.end, left.start..left.end - n));
                if chunk.is_some() {
                    return chunk;
                }
            }
        })
    }

    /// Takes a chunk from a piece. `split(left, n)` cuts `n` units from `left` and returns the taken range and the
    /// rest.
    fn take(&self, piece: usize, split: impl Fn(Range<u32>, u32) -> (Range<u32>, Range<u32>)) -> Option<Range<u32>> {
        let cut = |bits| {
            let left = unpack(bits);
            let len = left.len() as u32;
            (len > 0).then(|| split(left, (len / PART).next_multiple_of(self.grain).clamp(self.grain.min(len), len)))
        };
        // Relaxed ordering suffices: only the range itself is passed between threads, and everything written before
        // the region started is visible to all of them.
        let stay = |bits| cut(bits).map(|(_, stays)| pack(stays));
        let before = self.left[piece].0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, stay).ok()?;
        cut(before).map(|(taken, _)| taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    /// Counts how often each unit is taken when all threads take at the same time, thread `t` at most `most[t]`
    /// chunks.
    fn taken(pieces: &Pieces, units: usize, most: &[usize]) -> Vec<usize> {
        let counts: Vec<AtomicUsize> = (0..units).map(|_| AtomicUsize::new(0)).collect();
        std::thread::scope(|scope| {
            for (t, most) in most.iter().enumerate() {
                let counts = &counts;
                scope.spawn(move || {
                    for unit in std::iter::from_fn(|| pieces.next(t)).take(*most).flatten() {
                        counts[unit as usize].fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        counts.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn every_unit_is_taken_once_whoever_takes_it() {
        for (units, threads, grain) in
            [(1000u32, 4u32, 1), (1000, 4, 8), (7, 3, 8), (3, 4, 1), (0, 2, 1), (100_000, 2, 1)]
        {
            let pieces = || Pieces::new((0..threads).map(|t| units * t / threads..units * (t + 1) / threads), grain);
            let all = vec![usize::MAX; threads as usize];
            assert_eq!(taken(&pieces(), units as usize, &all), vec![1; units as usize]);
            // A single thread takes all units, including those of other pieces.
            let mut one = vec![0; threads as usize];
            one[threads as usize - 1] = usize::MAX;
            assert_eq!(taken(&pieces(), units as usize, &one), vec![1; units as usize]);
        }
    }

    #[test]
    fn a_thread_reads_its_own_piece_forwards_and_helps_from_the_back() {
        let pieces = Pieces::new([0..8, 8..100].into_iter(), 2);
        let own: Vec<_> = (0..4).map(|_| pieces.next(0).unwrap()).collect();
        assert_eq!(own, [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(pieces.next(0), Some(76..100));
        assert_eq!(pieces.next(1), Some(8..26));
    }
}
