//! Drafts with a chosen acceptance, to measure what a drafter of that acceptance would save.

use super::TextSoFar;
use crate::rng::Rng;

/// Known texts, from which drafts are made.
#[derive(Debug)]
pub struct Imitation {
    texts: Vec<Vec<u32>>,
    /// Probability that a draft token is the right one.
    acceptance: f64,
    rng: Rng,
}

impl Imitation {
    /// Creates drafts for texts that will be generated again, prompts included.
    pub fn new(texts: Vec<Vec<u32>>, acceptance: f64) -> Imitation {
        Imitation { texts, acceptance, rng: Rng::new(0) }
    }

    /// Returns `count` draft tokens for a text, fewer at the end of the known one; none for an unknown text.
    pub fn draft(&mut self, text: &TextSoFar<'_>, count: usize) -> Vec<u32> {
        let known = self.texts.iter().find_map(|known| known.strip_prefix(text.ids)).unwrap_or_default();
        let known: Vec<u32> = known.iter().copied().take(count).collect();
        let token = |token: u32| if self.rng.next_f64() < self.acceptance { token } else { u32::from(token == 0) };
        known.into_iter().map(token).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Memory;
    use super::*;

    #[test]
    fn as_many_draft_tokens_are_right_as_wanted() {
        let known: Vec<u32> = (0..2000).map(|i| i % 7).collect();
        let mut memory = Memory::default();
        for (acceptance, expected) in [(0.0, 0..=0), (0.7, 1300..=1500), (1.0, 2000..=2000)] {
            let mut imitation = Imitation::new(vec![vec![9, 9], known.clone()], acceptance);
            let text = TextSoFar { ids: &[], room: 0, owner: b"", memory: &mut memory };
            let draft =
                Imitation { texts: vec![known.clone()], ..Imitation::new(Vec::new(), acceptance) }.draft(&text, 3000);
            let right = draft.iter().zip(&known).filter(|(a, b)| a == b).count();
            assert!(draft.len() == 2000 && expected.contains(&right), "{acceptance}: {right}");
            let text = TextSoFar { ids: &known[..10], room: 0, owner: b"", memory: &mut memory };
            assert_eq!(imitation.draft(&text, 3).len(), 3);
            let text = TextSoFar { ids: &[4, 4], room: 0, owner: b"", memory: &mut memory };
            assert!(imitation.draft(&text, 3).is_empty());
        }
    }
}
