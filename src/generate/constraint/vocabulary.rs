//! Vocabulary of constraints: the tokens of a model as a tree of their bytes.

use super::TokenMask;
use crate::error::{Error, Result};
use crate::generate::text::spelling::{Leading, Spelling};
use llguidance::earley::SlicedBiasComputer;
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{ParserFactory, api::ParserLimits};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// Limits of the parser. A lexer state takes one to two kilobytes; the work per token takes up to 20 ms.
const LIMITS: ParserLimits = ParserLimits {
    max_items_in_row: 5_000,
    initial_lexer_fuel: 1_000_000,
    step_lexer_fuel: 200_000,
    step_max_items: 50_000,
    max_lexer_states: 30_000,
    max_grammar_size: 200_000,
    precompute_large_lexemes: true,
    verbose_errors: false,
};

/// The tokens of a model, prepared for constraints. It is built once per model and shared by its constraints.
pub struct Vocabulary {
    factory: ParserFactory,
    /// Id that stands for the end of a text; it equals the number of tokens.
    end: u32,
    /// Tokens that have bytes, in the order of their bytes.
    sorted: Vec<u32>,
    /// Tokens with a space that is not shown at the beginning of a text, and the token with the rest of their bytes, if
    /// there is one.
    spaced: Vec<(u32, Option<u32>)>,
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary").field("tokens", &self.end).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// Builds the tree of all tokens.
    ///
    /// # Errors
    /// A token is longer than `llguidance` supports.
    pub fn new(spelling: Spelling) -> Result<Vocabulary> {
        let Spelling { mut bytes, leading } = spelling;
        let end = bytes.len() as u32;
        let spaced = spaced(&bytes, leading);
        let mut sorted: Vec<u32> = (0..end).filter(|id| !bytes[*id as usize].is_empty()).collect();
        sorted.sort_by(|a, b| bytes[*a as usize].cmp(&bytes[*b as usize]));
        bytes.push(Vec::new());
        let built = catch_unwind(|| {
            let trie = TokTrie::from(&TokRxInfo::new(end + 1, end), &bytes);
            let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            ParserFactory::new(&tokens, InferenceCapabilities::default(), &SlicedBiasComputer::general_slices())
        });
        let mut factory = built.map_err(|e| {
            Error::corrupt(format!("the vocabulary cannot be used for constraints: {}", super::reason(&e.to_string())))
        })?;
        factory.quiet();
        *factory.limits_mut() = LIMITS;
        Ok(Vocabulary { factory, end, sorted, spaced })
    }

    pub(super) fn factory(&self) -> &ParserFactory {
        &self.factory
    }

    /// Returns the id that stands for the end of a text in the sets of `llguidance`.
    pub(super) fn end(&self) -> u32 {
        self.end
    }

    /// Returns the bytes of a token; special tokens have none.
    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        self.factory.tok_env().tok_trie().token(id)
    }

    /// Returns all tokens with their bytes.
    pub(super) fn tokens(&self) -> impl Iterator<Item = (u32, &[u8])> {
        (0..self.end).map(|id| (id, self.bytes(id)))
    }

    /// Returns the tokens that have bytes, in the order of their bytes.
    pub(super) fn sorted(&self) -> &[u32] {
        &self.sorted
    }

    /// Returns the mask of all tokens but some.
    pub(super) fn all_but(&self, forbidden: Vec<u32>, ends: bool) -> TokenMask {
        let mut words = vec![u32::MAX; self.end.div_ceil(32) as usize];
        forbidden.into_iter().for_each(|id| set(&mut words, id, false));
        TokenMask { words, ends }
    }

    /// Returns the mask of a text that is complete.
    pub(super) fn only_end(&self) -> TokenMask {
        TokenMask { words: vec![0; self.end.div_ceil(32) as usize], ends: true }
    }

    /// Adds tokens to a set.
    pub(super) fn allow(&self, words: &mut [u32], ids: Vec<u32>) {
        ids.into_iter().for_each(|id| set(words, id, true));
    }

    /// Removes [`Vocabulary::end`] from a set.
    pub(super) fn clear_end(&self, words: &mut [u32]) {
        set(words, self.end, false);
    }

    /// Allows, in the set for the first token of a text, tokens with a space that is not shown, where the token
    /// without the space is allowed.
    pub(super) fn allow_spaced(&self, words: &mut [u32]) {
        let before = words.to_vec();
        for (id, rest) in &self.spaced {
            let is_allowed = rest.is_some_and(|rest| before[rest as usize / 32] >> (rest % 32) & 1 == 1);
            set(words, *id, is_allowed);
        }
    }

    /// Returns the token that has the bytes which `id` shows at the beginning of a text.
    pub(super) fn unspaced(&self, id: u32) -> u32 {
        match self.spaced.binary_search_by_key(&id, |(spaced, _)| *spaced) {
            Ok(i) => self.spaced[i].1.unwrap_or(id),
            Err(_) => id,
        }
    }
}

fn set(words: &mut [u32], id: u32, value: bool) {
    if let Some(word) = words.get_mut(id as usize / 32) {
        let bit = 1 << (id % 32);
        *word = if value { *word | bit } else { *word & !bit };
    }
}

/// Returns the tokens that show other bytes at the beginning of a text, in the order of their ids, with the token that
/// has these bytes.
fn spaced(bytes: &[Vec<u8>], leading: Leading) -> Vec<(u32, Option<u32>)> {
    let shown = |token: &[u8]| -> Option<Vec<u8>> {
        match leading {
            Leading::FirstDropped if token.first() == Some(&b' ') => Some(token[1..].to_vec()),
            Leading::AllDropped if token.contains(&b' ') => {
                Some(token.iter().copied().filter(|byte| *byte != b' ').collect())
            }
            _ => None,
        }
    };
    if leading == Leading::Kept {
        return Vec::new();
    }
    let ids: HashMap<&[u8], u32> =
        (0..).zip(bytes).filter(|(_, token)| !token.is_empty()).map(|(id, token)| (token.as_slice(), id)).collect();
    let changed = (0..).zip(bytes).filter_map(|(id, token)| Some((id, shown(token)?)));
    changed.map(|(id, rest)| (id, ids.get(rest.as_slice()).copied())).collect()
}
