//! Merges of byte-pair encoding, derived from the order of the tokens for vocabularies that list no merges.

use super::tokenizer_json::MERGES_PER_TOKEN;
use crate::error::{Error, Result};
use std::collections::HashMap;

/// Maximum length in bytes of a piece that is merged from others. No real vocabulary has a longer one; the limit
/// bounds the work on untrusted files.
const LONGEST_PIECE: usize = 512;

/// A token that may be merged from two others.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece<'a> {
    pub(super) id: usize,
    pub(super) text: &'a str,
    /// Rank among the pieces: the pair of neighbours that gives the piece with the highest score is merged first.
    pub(super) score: f32,
}

/// Returns every pair of pieces whose concatenation is a piece, as `LEFT RIGHT`, sorted by descending score of the
/// result; of equal scores, the pair with the longer left part comes first. Pieces with spaces are left out, because
/// spaces are replaced before merging.
///
/// # Errors
/// A piece is longer than any real one, or there are more pairs than any real vocabulary has.
pub(super) fn by_score<'a>(pieces: impl Iterator<Item = Piece<'a>>) -> Result<Vec<String>> {
    let pieces: Vec<Piece<'a>> = pieces.filter(|piece| !piece.text.is_empty() && !piece.text.contains(' ')).collect();
    let ids: HashMap<&str, usize> = pieces.iter().map(|piece| (piece.text, piece.id)).collect();
    let limit = LONGEST_PIECE + MERGES_PER_TOKEN * pieces.len();
    let mut merges: Vec<(f32, &str, &str)> = Vec::new();
    for Piece { text, score, .. } in pieces {
        if text.len() > LONGEST_PIECE {
            let found = format!("found a piece of {} bytes, expected at most {LONGEST_PIECE}", text.len());
            return Err(Error::unsupported(found));
        }
        let halves = text.char_indices().skip(1).map(|(at, _)| text.split_at(at));
        let mut pairs: Vec<(usize, usize, &str, &str)> =
            halves.filter_map(|(l, r)| Some((*ids.get(l)?, *ids.get(r)?, l, r))).collect();
        pairs.sort_unstable();
        merges.extend(pairs.into_iter().map(|(_, _, l, r)| (score, l, r)));
        if merges.len() > limit {
            return Err(Error::unsupported(format!("found more than the limit of {limit} merges")));
        }
    }
    let length = |text: &str| text.chars().count();
    merges.sort_by(|a, b| {
        let by_score = b.0.total_cmp(&a.0);
        by_score.then(length(b.1).cmp(&length(a.1))).then(length(b.2).cmp(&length(a.2)))
    });
    Ok(merges.into_iter().map(|(_, l, r)| format!("{l} {r}")).collect())
}
