//! Prompt lookup: drafts the next tokens of a text by copying what followed an earlier occurrence of its last n-gram.
//!
//! Each pair of tokens leads to its earlier occurrences, latest first, as in an LZ77 compressor. The draft is copied
//! from the occurrence that agrees with the end of the text over the most tokens. Copying may continue into tokens that
//! were just copied, so a text that repeats itself can be drafted to any length.

/// Largest number of occurrences that are compared.
const PLACES: usize = 32;
/// Number of agreeing tokens beyond which the comparison stops.
const LONGEST: usize = 16;

/// Marks the absence of a place.
const NOWHERE: u32 = u32::MAX;

/// Index of the token pairs of a growing text.
#[derive(Debug, Default)]
pub struct Lookup {
    /// For each hash of a pair, the position of the token after its last occurrence. At least as long as the text.
    last: Vec<u32>,
    /// For each position, the previous position whose pair has the same hash.
    previous: Vec<u32>,
}

/// An earlier place in the text whose preceding tokens agree with the end of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EarlierPlace {
    /// Position of the first token to copy.
    pub start: usize,
    /// Number of tokens before it that agree with the end of the text: 2 to 16.
    pub agreement: usize,
}

impl Lookup {
    /// Returns the best place in `ids` to continue them from. They may only have grown since the last call.
    pub fn find(&mut self, ids: &[u32]) -> Option<EarlierPlace> {
        self.index(ids);
        self.best(ids, ids)
    }

    /// Adds the tokens of `ids` that are new since the last call.
    pub fn index(&mut self, ids: &[u32]) {
        if self.last.len() < ids.len() {
            self.last = vec![NOWHERE; (2 * ids.len()).next_power_of_two().max(1024)];
            self.previous.clear();
        }
        for position in self.previous.len()..ids.len() {
            let before = match self.slot(&ids[..position]) {
                Some(slot) => std::mem::replace(&mut self.last[slot], position as u32),
                None => NOWHERE,
            };
            self.previous.push(before);
        }
    }

    /// Returns the best place in the indexed tokens `ids` to continue `text` from.
    pub fn best(&self, ids: &[u32], text: &[u32]) -> Option<EarlierPlace> {
        let mut place = self.last[self.slot(text)?];
        let mut best = EarlierPlace { start: 0, agreement: 1 };
        for _ in 0..PLACES {
            if place == NOWHERE || best.agreement == LONGEST {
                break;
            }
            let pairs = ids[..place as usize].iter().rev().zip(text.iter().rev());
            let agreement = pairs.take(LONGEST).take_while(|(a, b)| a == b).count();
            if agreement > best.agreement {
                best = EarlierPlace { start: place as usize, agreement };
            }
            place = self.previous[place as usize];
        }
        Some(best).filter(|best| best.agreement > 1)
    }

    /// Returns the slot of the last two tokens in the hash table.
    fn slot(&self, ids: &[u32]) -> Option<usize> {
        let [.., a, b] = *ids else { return None };
        if self.last.is_empty() {
            return None;
        }
        let hash = (u64::from(a) << 32 | u64::from(b)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Some((hash >> 32) as usize & (self.last.len() - 1))
    }
}

impl EarlierPlace {
    /// Returns the next `count` tokens under the assumption that the text continues as it did at this place.
    pub fn copy(&self, ids: &[u32], count: usize) -> Vec<u32> {
        let period = ids.len() - self.start;
        (0..count).map(|i| ids[self.start + i % period]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_that_agrees_longest_wins_and_the_latest_of_equals() {
        let mut lookup = Lookup::default();
        let ids = [7, 1, 2, 3, 50, 9, 2, 3, 60, 8, 2, 3, 70, 7, 1, 2, 3];
        assert_eq!(lookup.find(&ids), Some(EarlierPlace { start: 4, agreement: 4 }));
        let ids = [&ids[..], &[51, 2, 3]].concat();
        assert_eq!(lookup.find(&ids), Some(EarlierPlace { start: 17, agreement: 2 }));
    }

    #[test]
    fn a_text_without_repetition_has_no_place() {
        let mut lookup = Lookup::default();
        for ids in [&[][..], &[1], &[1, 1], &[1, 1, 2]] {
            assert_eq!(Lookup::default().find(ids), None, "{ids:?}");
        }
        assert_eq!(lookup.find(&(0..1000).collect::<Vec<_>>()), None);
    }

    #[test]
    fn circles_are_followed_beyond_the_end_of_the_text() {
        let ids = [9, 1, 2, 3, 1, 2, 3, 1, 2];
        let place = Lookup::default().find(&ids).unwrap();
        assert_eq!((place.agreement, place.copy(&ids, 7)), (5, vec![3, 1, 2, 3, 1, 2, 3]));
    }

    #[test]
    fn a_text_indexed_token_by_token_gives_the_same_places() {
        let mut rng = crate::rng::Rng::new(3);
        let ids: Vec<u32> = (0..400).map(|_| (rng.next_u64() % 5) as u32).collect();
        let mut growing = Lookup::default();
        for len in 0..ids.len() {
            assert_eq!(growing.find(&ids[..len]), Lookup::default().find(&ids[..len]));
        }
    }
}
