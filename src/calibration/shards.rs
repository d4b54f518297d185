//! Shards of the windows of a text: the largest groups of windows whose sums do not depend on other windows.
//!
//! Sums of floats depend on the order of the summands. So that a calibration gives the same bytes on one machine and
//! divided among several, the order does not depend on the number of machines: there are always [`SHARDS`] shards, a
//! shard adds its windows in the order of the text, and a half adds its shards in the order of their numbers. A shard
//! lies within one half, and its windows are consecutive windows of that half.

use super::Half;

/// Number of shards of both halves together, and the largest number of machines that can share a calibration. The sums
/// of parts occupy the disk once per shard, so there are not more.
pub const SHARDS: usize = 16;
const PER_HALF: usize = SHARDS / 2;

/// Returns the half that the windows of a shard belong to: the first half has the first shards.
pub fn half_of(shard: usize) -> Half {
    if shard < PER_HALF { Half::First } else { Half::Second }
}

/// Returns the indices of the windows of a shard, in order, when the texts have `windows` windows.
pub fn windows_of(shard: usize, windows: usize) -> impl ExactSizeIterator<Item = usize> {
    let (half, number) = (half_of(shard) as usize, shard % PER_HALF);
    let in_half = (windows + 1 - half) / 2;
    // The quotient and the remainder are multiplied separately, so that no number of windows overflows.
    let border = |number: usize| in_half / PER_HALF * number + in_half % PER_HALF * number / PER_HALF;
    (border(number)..border(number + 1)).map(move |i| 2 * i + half)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_window_is_in_one_shard_of_its_half_and_shards_are_equally_long() {
        for windows in (0..70).chain([1000, 1001]) {
            let mut found = Vec::new();
            for shard in 0..SHARDS {
                let own: Vec<usize> = windows_of(shard, windows).collect();
                assert!(own.iter().all(|window| window % 2 == half_of(shard) as usize), "{windows}");
                assert!((own.len() * SHARDS).abs_diff(windows) <= 2 * SHARDS, "{windows} {shard} {}", own.len());
                found.extend(own);
            }
            let is_even = |window: &usize| window.is_multiple_of(2);
            let expected: Vec<usize> =
                (0..windows).filter(is_even).chain((0..windows).filter(|window| !is_even(window))).collect();
            assert_eq!(found, expected, "{windows}");
        }
        assert!(windows_of(SHARDS - 1, usize::MAX - 1).len() > 0);
    }
}
