//! Divides a text into windows and selects the scored tokens by the rule of llama.cpp's perplexity tool, so that
//! figures are comparable. The text, with its beginning-of-sequence token, is divided into windows, and the remainder
//! is dropped. If the tokenizer adds a beginning-of-sequence token, it replaces the first token of each window. Only
//! the second half of each window is scored.

use crate::error::{Error, Result};
use crate::generate::text::Tokenizer;
use std::ops::Range;

/// Default number of tokens per window.
pub const WINDOW: usize = 512;
/// Smallest accepted number of tokens per window; shorter windows have no useful second half.
const SHORTEST: usize = 4;

/// Text divided into windows of equal length.
#[derive(Debug, Clone)]
pub struct Windows {
    /// Tokens of all windows, one window after the other.
    ids: Vec<u32>,
    /// Tokens that replace the first tokens of each window.
    prefix: Vec<u32>,
    /// Number of tokens per window.
    len: usize,
}

impl Windows {
    /// Divides a text into windows of `len` tokens, and keeps at most `limit` of them.
    ///
    /// # Errors
    /// The text does not fill one window, or windows are shorter than four tokens.
    pub fn of_text(tokenizer: &Tokenizer, text: &str, len: usize, limit: Option<usize>) -> Result<Windows> {
        let prefix = leading_tokens(tokenizer)?;
        let mut ids = prefix.clone();
        ids.extend(tokenizer.encode_plain(text)?);
        ids.truncate(limit.map_or(usize::MAX, |limit| limit.saturating_mul(len)));
        Windows::new(ids, prefix, len)
    }

    /// Divides token ids into windows of `len`; `prefix` replaces the first tokens of each.
    ///
    /// # Errors
    /// The same as for [`Windows::of_text`].
    pub fn new(mut ids: Vec<u32>, prefix: Vec<u32>, len: usize) -> Result<Windows> {
        // The tokens of the prefix are not scored: they lie in the first half of a window.
        let shortest = SHORTEST.max(2 * prefix.len());
        if len < shortest {
            return Err(Error::usage(format!("found windows of {len} tokens, expected at least {shortest}")));
        }
        if ids.len() < len {
            let found = format!("found {} tokens, expected at least a window of {len}", ids.len());
            return Err(
                Error::usage(found).help("choose a longer text; in `iec eval`, --ctx N selects shorter windows")
            );
        }
        ids.truncate(ids.len() / len * len);
        Ok(Windows { ids, prefix, len })
    }

    /// Returns the first windows, at most `count`.
    pub fn first(&self, count: usize) -> Windows {
        let kept = self.ids.len().min(count.saturating_mul(self.len));
        Windows { ids: self.ids[..kept].to_vec(), prefix: self.prefix.clone(), len: self.len }
    }

    /// Returns the windows after the first `count`, or `None` if there are none.
    pub fn behind(&self, count: usize) -> Option<Windows> {
        let rest = self.ids.get(count.saturating_mul(self.len)..).filter(|rest| !rest.is_empty())?;
        Some(Windows { ids: rest.to_vec(), prefix: self.prefix.clone(), len: self.len })
    }

    /// Returns the number of windows.
    pub fn count(&self) -> usize {
        self.ids.len() / self.len
    }

    /// Returns the number of tokens per window.
    pub fn window_len(&self) -> usize {
        self.len
    }

    /// Returns the total number of scored tokens.
    pub fn scored(&self) -> usize {
        self.count() * self.scored_positions().len()
    }

    /// Returns an error if a token is not in the vocabulary of a model.
    ///
    /// # Errors
    /// A token is outside the vocabulary; the error names the first one.
    pub fn check(&self, vocab: usize) -> Result<()> {
        match self.ids.iter().chain(&self.prefix).find(|id| **id as usize >= vocab) {
            Some(id) => Err(Error::corrupt(format!("token {id} is outside the model's vocabulary of {vocab}"))
                .help("the tokenizer does not belong to this model; use the tokenizer.json of its checkpoint")),
            None => Ok(()),
        }
    }

    /// Returns the positions in a window whose logits are scored: each predicts the token at the next position.
    pub fn scored_positions(&self) -> Range<usize> {
        self.len / 2..self.len - 1
    }

    /// Returns all windows in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Vec<u32>> {
        self.ids.chunks_exact(self.len).map(|piece| {
            let mut window = piece.to_vec();
            window[..self.prefix.len()].copy_from_slice(&self.prefix);
            window
        })
    }
}

/// Returns the tokens that the tokenizer puts before every text: usually none or one, two for GLM.
///
/// # Errors
/// The tokenizer fails.
pub fn leading_tokens(tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let (mut full, plain) = (tokenizer.encode("a")?, tokenizer.encode_plain("a")?);
    let leading = (0..full.len()).find(|at| full[*at..].starts_with(&plain)).unwrap_or(0);
    full.truncate(leading);
    Ok(full)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_window_begins_with_the_leading_token_and_the_rest_is_dropped() {
        let windows = Windows::new((0..19).collect(), vec![99], 8).unwrap();
        assert_eq!((windows.count(), windows.scored(), windows.scored_positions()), (2, 6, 4..7));
        let cut: Vec<_> = windows.iter().collect();
        assert_eq!(cut[0], [99, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(cut[1], [99, 9, 10, 11, 12, 13, 14, 15]);
        let plain = Windows::new((0..8).collect(), vec![], 8).unwrap();
        assert_eq!(plain.iter().next().unwrap(), (0..8).collect::<Vec<_>>());
        let two = Windows::new((0..16).collect(), vec![98, 99], 8).unwrap();
        assert_eq!(two.iter().last().unwrap(), [98, 99, 10, 11, 12, 13, 14, 15]);
    }

    #[test]
    fn windows_behind_others_share_no_token_with_them() {
        let windows = Windows::new((0..27).collect(), vec![99], 8).unwrap();
        let rest = windows.behind(1).unwrap();
        assert_eq!((rest.count(), rest.first(1).iter().next().unwrap()), (2, vec![99, 9, 10, 11, 12, 13, 14, 15]));
        assert!(windows.behind(3).is_none() && windows.behind(usize::MAX).is_none());
    }

    #[test]
    fn a_text_shorter_than_a_window_is_refused() {
        assert!(Windows::new(vec![1; 7], vec![], 8).unwrap_err().help_text().unwrap().contains("--ctx"));
        assert!(Windows::new(vec![1; 7], vec![], 3).is_err());
        assert!(Windows::new(vec![1; 7], vec![1; 3], 5).is_err(), "half of a window is scored");
    }
}
