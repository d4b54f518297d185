//! Earlier texts of the same owner, whose passages are copied as draft tokens.
//!
//! A server often gets similar requests: the same form filled in from other texts, or a file with one more change. The
//! answers repeat what earlier prompts and answers say. Owners are those of the prefix cache, so that no text shows,
//! not even by its speed, what the texts of another tenant say.

use super::lookup::{EarlierPlace, Lookup};
use std::collections::HashMap;

/// Largest number of tokens that are kept of the texts of an owner; half of them go when there are more.
const TOKENS: usize = 1 << 16;
/// Largest number of owners whose texts are kept.
const OWNERS: usize = 64;
/// Ends each text. No vocabulary has so many tokens.
const END: u32 = u32::MAX;

/// Earlier texts by their owner.
#[derive(Debug, Default)]
pub struct EarlierTexts {
    owners: HashMap<Vec<u8>, OwnTexts>,
    /// Number of texts added so far.
    clock: u64,
}

/// Texts of an owner, one behind the other.
#[derive(Debug, Default)]
struct OwnTexts {
    ids: Vec<u32>,
    lookup: Lookup,
    /// Number of the text that was added last.
    last: u64,
}

impl EarlierTexts {
    /// Adds a text of an owner.
    pub fn add(&mut self, owner: &[u8], ids: &[u32]) {
        self.clock += 1;
        if !self.owners.contains_key(owner) && self.owners.len() == OWNERS {
            let oldest = self.owners.iter().min_by_key(|(_, texts)| texts.last).map(|(owner, _)| owner.clone());
            oldest.into_iter().for_each(|owner| _ = self.owners.remove(&owner));
        }
        let texts = self.owners.entry(owner.to_vec()).or_default();
        texts.last = self.clock;
        let ids = &ids[ids.len().saturating_sub(TOKENS / 2 - 1)..];
        if texts.ids.len() + ids.len() >= TOKENS {
            texts.ids.drain(..texts.ids.len().saturating_sub(TOKENS / 2));
            texts.lookup = Lookup::default();
        }
        texts.ids.extend_from_slice(ids);
        texts.ids.push(END);
        texts.lookup.index(&texts.ids);
    }

    /// Returns the best place in the texts of an owner to continue a text from.
    pub fn find(&self, owner: &[u8], ids: &[u32]) -> Option<EarlierPlace> {
        let texts = self.owners.get(owner)?;
        texts.lookup.best(&texts.ids, ids).filter(|place| texts.ids[place.start] != END)
    }

    /// Returns the next tokens, at most `count`, under the assumption that a text continues as it did at this place.
    pub fn copy(&self, owner: &[u8], place: EarlierPlace, count: usize) -> Vec<u32> {
        let ids = self.owners.get(owner).map_or(&[][..], |texts| &texts.ids[place.start..]);
        ids.iter().take(count).take_while(|id| **id != END).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_the_owner_are_copied_up_to_their_end() {
        let mut texts = EarlierTexts::default();
        texts.add(b"a", &[1, 2, 3, 4, 5]);
        texts.add(b"a", &[6, 2, 3, 7]);
        texts.add(b"b", &[2, 3, 9]);
        let copied = |owner: &[u8], ids: &[u32]| texts.find(owner, ids).map(|place| texts.copy(owner, place, 9));
        assert_eq!(copied(b"a", &[8, 2, 3]), Some(vec![7]));
        assert_eq!(copied(b"a", &[1, 2, 3]), Some(vec![4, 5]));
        assert_eq!(copied(b"b", &[1, 2, 3]), Some(vec![9]));
        for (owner, ids) in [(b"a", &[3, 7][..]), (b"a", &[7, 1]), (b"a", &[3]), (b"b", &[1, 2]), (b"c", &[2, 3])] {
            assert_eq!(copied(owner, ids), None, "{ids:?}");
        }
    }

    #[test]
    fn old_texts_and_old_owners_are_forgotten() {
        let mut texts = EarlierTexts::default();
        let of = |n: u32| (0..1000).map(|i| 1000 * n + i).collect::<Vec<_>>();
        (0..200).for_each(|n| texts.add(b"a", &of(n)));
        assert!(texts.owners[&b"a"[..]].ids.len() <= TOKENS);
        assert_eq!(texts.find(b"a", &[500, 501]), None);
        assert!(texts.find(b"a", &[199_500, 199_501]).is_some());
        texts.add(b"a", &vec![7; 3 * TOKENS]);
        assert!(texts.owners[&b"a"[..]].ids.len() <= TOKENS);
        (0..OWNERS as u32).for_each(|n| texts.add(&n.to_le_bytes(), &of(n)));
        assert_eq!((texts.owners.len(), texts.find(b"a", &[7, 7])), (OWNERS, None));
    }
}
