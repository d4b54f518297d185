//! Values that are made from keys, kept for the next request with the same key.

use crate::error::Result;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Largest number of values that are kept.
const KEPT: usize = 64;

/// Values that were made last, with what they were made of.
pub struct Recent<K, V>(Mutex<VecDeque<(K, Arc<V>)>>);

impl<K, V> fmt::Debug for Recent<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recent").finish_non_exhaustive()
    }
}

impl<K, V> Default for Recent<K, V> {
    fn default() -> Recent<K, V> {
        Recent(Mutex::default())
    }
}

impl<K: PartialEq, V> Recent<K, V> {
    /// Returns the value for `key`, made by `make` unless it is known. Several threads may make the same value at the
    /// same time; other keys do not wait for it.
    ///
    /// # Errors
    /// The errors of `make`.
    pub fn get(&self, key: K, make: impl FnOnce(&K) -> Result<Arc<V>>) -> Result<Arc<V>> {
        if let Some((_, value)) = self.state().iter().find(|(known, _)| *known == key) {
            return Ok(value.clone());
        }
        let value = make(&key)?;
        let mut recent = self.state();
        recent.truncate(KEPT - 1);
        recent.push_front((key, value.clone()));
        Ok(value)
    }

    fn state(&self) -> MutexGuard<'_, VecDeque<(K, Arc<V>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_made_once_while_it_is_kept() {
        let recent = Recent::<usize, usize>::default();
        let get = |key: usize| *recent.get(key, |key| Ok(Arc::new(key * 10))).unwrap();
        assert_eq!((get(1), get(2)), (10, 20));
        assert_eq!(*recent.get(1, |_| panic!("the value is known")).unwrap(), 10);
        (10..10 + KEPT).for_each(|key| _ = get(key));
        assert_eq!(*recent.get(1, |_| Ok(Arc::new(0))).unwrap(), 0);
        assert!(recent.get(3, |_| Err(crate::Error::usage("no"))).is_err());
    }
}
