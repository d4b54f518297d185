//! Cache of the rebuilt weights of a pack without `model.ie.bin`, such as a deduplicated pack: matrices are rebuilt at
//! first use and kept within a limit.
//!
//! A token passes through all layers in order, so among the weights that are not in use, the one used last is needed
//! again last. That one is evicted first. Hot weights are never evicted.

use crate::error::{Error, Result};
use crate::resources::memory_left;
use crate::runtime::cpu::Matrix;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Identifies a matrix: the index of its tensor in the pack, and the index of the matrix in that tensor (the expert; 0
/// for a tensor that is a single matrix).
pub type Key = (usize, usize);

/// A cache of rebuilt matrices with a limit in bytes.
#[derive(Debug)]
pub struct Cache {
    /// Limit that the user has set, which is never exceeded.
    limit: Option<u64>,
    /// Limit if the user has set none: 7/8 of the memory that was left when the cache was created. Matrices that are in
    /// use at the same time, and hot ones, may exceed it.
    default_limit: Option<u64>,
    state: Mutex<CacheState>,
}

/// Counters of rebuilt weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rebuilds {
    /// Number of matrices rebuilt; a matrix that was rebuilt several times counts each time.
    pub matrices: u64,
    /// Bytes of these matrices.
    pub bytes: u64,
    /// Number of matrices evicted to make room for others.
    pub evicted: u64,
    /// Bytes in the cache now.
    pub kept_bytes: u64,
    /// Largest number of bytes that were ever in the cache.
    pub peak_bytes: u64,
}

#[derive(Debug, Default)]
struct CacheState {
    slots: HashMap<Key, Slot>,
    /// Number of requests so far.
    clock: u64,
    rebuilds: Rebuilds,
}

#[derive(Debug)]
struct Slot {
    matrix: Arc<Matrix>,
    /// Value of `CacheState::clock` at the last use.
    used: u64,
    hot: bool,
}

impl Cache {
    /// Creates an empty cache of at most `limit` bytes; `None` means 7/8 of the memory that is left.
    pub fn new(limit: Option<u64>) -> Cache {
        Cache { limit, default_limit: memory_left().map(|left| left / 8 * 7), state: Mutex::default() }
    }

    /// Returns true when the user has set a limit.
    pub fn is_bounded(&self) -> bool {
        self.limit.is_some()
    }

    /// Returns the largest number of bytes that the cache keeps.
    pub fn limit(&self) -> u64 {
        self.limit.or(self.default_limit).unwrap_or(u64::MAX)
    }

    /// Returns the matrix, from the cache or from `build`. The matrix takes `bytes` in the cache and is never evicted
    /// once it was requested as `hot`.
    ///
    /// # Errors
    /// The matrix cannot be rebuilt, or the matrices in use and the hot ones leave no room for it under the user's
    /// limit.
    pub fn get(
        &self,
        key: Key,
        bytes: usize,
        hot: bool,
        build: impl FnOnce() -> Result<Matrix>,
    ) -> Result<Arc<Matrix>> {
        // A poisoned lock is safe to use: a builder that panics leaves no half-done changes.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = &mut *state;
        state.clock += 1;
        if let Some(slot) = state.slots.get_mut(&key) {
            (slot.used, slot.hot) = (state.clock, slot.hot || hot);
            return Ok(slot.matrix.clone());
        }
        self.make_room(state, bytes as u64)?;
        let matrix = Arc::new(build()?);
        let slot = Slot { matrix: matrix.clone(), used: state.clock, hot };
        state.slots.insert(key, slot);
        let rebuilds = &mut state.rebuilds;
        rebuilds.matrices += 1;
        rebuilds.bytes += bytes as u64;
        rebuilds.kept_bytes += bytes as u64;
        rebuilds.peak_bytes = rebuilds.peak_bytes.max(rebuilds.kept_bytes);
        Ok(matrix)
    }

    fn make_room(&self, state: &mut CacheState, bytes: u64) -> Result<()> {
        let limit = self.limit();
        while state.rebuilds.kept_bytes + bytes > limit {
            let idle = state.slots.iter().filter(|(_, slot)| !slot.hot && Arc::strong_count(&slot.matrix) == 1);
            let Some((key, _)) = idle.max_by_key(|(_, slot)| slot.used) else {
                let needed = state.rebuilds.kept_bytes + bytes;
                return if self.is_bounded() { Err(too_small(limit, needed)) } else { Ok(()) };
            };
            let key = *key;
            let slot = state.slots.remove(&key).expect("it was just found");
            state.rebuilds.kept_bytes -= slot.matrix.data.len() as u64;
            state.rebuilds.evicted += 1;
        }
        Ok(())
    }

    /// Returns the counters so far.
    pub fn rebuilds(&self) -> Rebuilds {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).rebuilds
    }
}

/// Creates the error for a limit below the memory that is needed at once.
pub fn too_small(limit: u64, needed: u64) -> Error {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    Error::usage(format!(
        "found a limit of {} MiB for rebuilt weights, expected at least the {} MiB needed at once",
        limit >> 20,
        mib(needed)
    ))
    .tensor("IE_DEDUP_CACHE_MB")
    .help(format!(
        "set --dedup-cache-mb to at least {}, or lower --dedup-hot-bytes or shorten --dedup-hot-list",
        mib(needed)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::mapped::Bytes;
    use crate::runtime::cpu::MatrixStore;

    fn matrix(rows: usize) -> Result<Matrix> {
        Matrix::new(rows, 1, MatrixStore::Plain(DType::F32), Bytes::copied(&vec![0; 4 * rows]))
    }

    fn get(cache: &Cache, tensor: usize, hot: bool) -> Result<Arc<Matrix>> {
        cache.get((tensor, 0), 40, hot, || matrix(10))
    }

    #[test]
    fn the_limit_is_kept_by_evicting_the_matrix_that_was_used_last() {
        let cache = Cache::new(Some(100));
        for tensor in [0, 1, 2, 0, 2, 1] {
            get(&cache, tensor, false).unwrap();
        }
        // Tensor 2 evicted 1, and later 1 evicted 2; 0 stayed.
        let expected = Rebuilds { matrices: 4, bytes: 160, evicted: 2, kept_bytes: 80, peak_bytes: 80 };
        assert_eq!(cache.rebuilds(), expected);
    }

    #[test]
    fn hot_weights_and_those_in_use_stay() {
        let cache = Cache::new(Some(100));
        get(&cache, 0, true).unwrap();
        let held = get(&cache, 1, false).unwrap();
        assert_eq!(get(&cache, 2, false).unwrap_err().cause().kind(), "usage");
        drop(held);
        get(&cache, 2, false).unwrap();
        get(&cache, 0, false).unwrap();
        assert_eq!(cache.rebuilds().matrices, 3);
    }

    #[test]
    fn the_default_limit_evicts_but_refuses_nothing() {
        let mut cache = Cache::new(None);
        assert!(cache.limit() < u64::MAX, "the memory of this machine is known");
        cache.default_limit = Some(60);
        let held = get(&cache, 0, false).unwrap();
        get(&cache, 1, true).unwrap();
        get(&cache, 2, false).unwrap();
        assert_eq!(cache.rebuilds().kept_bytes, 120);
        drop(held);
        get(&cache, 3, false).unwrap();
        assert_eq!((cache.rebuilds().evicted, cache.rebuilds().kept_bytes), (2, 80));
    }

    #[test]
    fn what_cannot_be_rebuilt_takes_no_room() {
        let cache = Cache::new(Some(40));
        assert!(cache.get((0, 0), 40, false, || Err(Error::corrupt("gone"))).is_err());
        get(&cache, 0, false).unwrap();
    }
}
