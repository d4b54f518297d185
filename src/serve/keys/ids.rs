//! Numbers of keys in schedulers, which stay the same while the file of keys changes.
//!
//! A scheduler numbers its keys in the order in which they are added and never forgets one, because requests and
//! counters refer to it. The names of keys are therefore assigned to numbers once. Every scheduler of a server gets the
//! same changes in the same order, so a key has the same number in all of them.

use super::Keys;
use crate::host::KeyChange;
use crate::sched::{KeyId, KeyLimits};
use std::collections::HashMap;

/// Names of the keys that schedulers have.
#[derive(Debug, Clone, Default)]
pub struct KeyIds {
    /// Name and limits of each key; limits are `None` while it is disabled.
    known: Vec<(String, Option<KeyLimits>)>,
    ids: HashMap<String, KeyId>,
}

impl KeyIds {
    /// Returns the changes that give schedulers these keys. The first call adds them all; later ones only return what
    /// has changed.
    pub fn update(&mut self, keys: &Keys) -> Vec<KeyChange> {
        let mut changes = Vec::new();
        let mut listed = vec![false; self.known.len()];
        for key in keys.list() {
            let limits = key.limits.clone();
            match self.ids.get(&key.name) {
                Some(id) => {
                    if let Some(listed) = listed.get_mut(*id) {
                        *listed = true;
                    }
                    if self.known[*id].1.as_ref() != Some(&limits) {
                        self.known[*id].1 = Some(limits.clone());
                        changes.push(KeyChange::Set(*id, limits));
                    }
                }
                None => {
                    self.ids.insert(key.name.clone(), self.known.len());
                    self.known.push((key.name.clone(), Some(limits.clone())));
                    changes.push(KeyChange::Add(limits));
                }
            }
        }
        for (id, _) in listed.iter().enumerate().filter(|(_, listed)| !**listed) {
            if self.known[id].1.take().is_some() {
                changes.push(KeyChange::Disable(id));
            }
        }
        changes
    }

    /// Returns the number of a key by its name, also if it is disabled.
    pub fn id(&self, name: &str) -> Option<KeyId> {
        self.ids.get(name).copied()
    }

    /// Returns the name of a key by its number, also if it is disabled.
    pub fn name(&self, id: KeyId) -> Option<&str> {
        self.known.get(id).map(|(name, _)| name.as_str())
    }

    /// Returns the number of each key in the list of `keys`, with which this was last updated.
    ///
    /// # Panics
    /// A key of the list is unknown here.
    pub fn ids(&self, keys: &Keys) -> Vec<KeyId> {
        keys.list().iter().map(|key| self.ids[&key.name]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::digest_of;
    use super::*;

    fn keys(keys: &[(&str, u64)]) -> Keys {
        let table = |(name, rpm): &(&str, u64)| {
            format!("[[key]]\nname = \"{name}\"\nsha256 = \"{}\"\nrpm = {rpm}\n", digest_of(name))
        };
        Keys::parse(keys.iter().map(table).collect::<String>().as_bytes()).unwrap()
    }

    #[test]
    fn numbers_stay_the_same_while_keys_come_change_and_go() {
        let limits = |rpm| KeyLimits { rpm: Some(rpm), ..KeyLimits::default() };
        let mut ids = KeyIds::default();
        let first = keys(&[("a", 1), ("b", 2)]);
        assert_eq!(ids.update(&first), [KeyChange::Add(limits(1)), KeyChange::Add(limits(2))]);
        assert_eq!(ids.update(&first), []);
        let second = keys(&[("c", 3), ("b", 4)]);
        let changes = [KeyChange::Add(limits(3)), KeyChange::Set(1, limits(4)), KeyChange::Disable(0)];
        assert_eq!(ids.update(&second), changes);
        assert_eq!(ids.ids(&second), [2, 1]);
        assert_eq!(ids.update(&second), []);
        let third = keys(&[("a", 1)]);
        let changes = [KeyChange::Set(0, limits(1)), KeyChange::Disable(1), KeyChange::Disable(2)];
        assert_eq!(ids.update(&third), changes);
        assert_eq!((ids.id("c"), ids.name(2), ids.id("d"), ids.name(3)), (Some(2), Some("c"), None, None));
    }
}
