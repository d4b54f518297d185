//! Incremental decoding: returns after each token the text that no later token can change.
//!
//! Decoding token by token is wrong: a character may be spread over several tokens, the first token of a text loses its
//! leading space while others keep it, and consecutive `<0x..>` byte tokens are decoded together (if one byte is wrong,
//! Hugging Face shows a replacement character for each of these bytes). Therefore a short window of recent ids is
//! decoded again with every token. Its text without an incomplete character at the end is *settled*: no later token
//! changes it. The part of the settled text that was not returned before is the new piece. The joined pieces equal
//! `decode` of all ids.

use super::tokenizer::Tokenizer;
use crate::error::Result;

/// Once the window has this many ids, it is shortened as soon as its text does not end with an incomplete character.
const WINDOW: usize = 16;

/// Converts ids to text as they are generated.
#[derive(Debug)]
pub struct TextStream {
    skip_special: bool,
    window: Vec<u32>,
    /// Bytes of the decoded window that were already returned.
    shown: usize,
}

impl TextStream {
    /// Creates a stream for a new text; `skip_special` hides tokens such as EOS.
    pub fn new(skip_special: bool) -> TextStream {
        TextStream { skip_special, window: Vec::with_capacity(2 * WINDOW), shown: 0 }
    }

    /// Creates a stream for a text that continues `before`: its first token keeps the space that is dropped at the
    /// beginning of a text.
    ///
    /// # Errors
    /// The tokens cannot be decoded.
    pub fn after(before: &[u32], tokenizer: &Tokenizer, skip_special: bool) -> Result<TextStream> {
        let mut stream = TextStream::new(skip_special);
        let tail = before.len().saturating_sub(WINDOW / 2);
        before[tail..].iter().try_for_each(|id| stream.push(tokenizer, *id).map(drop))?;
        Ok(stream)
    }

    /// Appends the next id and returns the text that is now settled; often it is empty.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        let Some(token) = tokenizer.token(id) else { return Ok(String::new()) };
        if self.skip_special && tokenizer.is_special_token(&token) {
            return Ok(String::new());
        }
        self.window.push(id);
        if tokenizer.is_fallback_byte(&token) {
            return Ok(String::new());
        }
        let text = tokenizer.decode(&self.window, false)?;
        // An incomplete character is decoded as one replacement character at the end until its other bytes arrive.
        let settled = text.strip_suffix(char::REPLACEMENT_CHARACTER).unwrap_or(&text);
        let piece = self.beyond_shown(settled);
        if self.window.len() >= WINDOW && settled.len() == text.len() {
            self.restart(tokenizer, id)?;
        }
        Ok(piece)
    }

    /// Returns the text that is still held back; an incomplete character becomes a replacement character, as in
    /// `decode`.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String> {
        let text = tokenizer.decode(&self.window, false)?;
        let piece = self.beyond_shown(&text);
        *self = TextStream::new(self.skip_special);
        Ok(piece)
    }

    fn beyond_shown(&mut self, settled: &str) -> String {
        let piece = settled.get(self.shown..).unwrap_or_default().to_string();
        self.shown = self.shown.max(settled.len());
        piece
    }

    /// Shortens the window to the last id, if that id alone decodes to at least one character and to complete
    /// characters only. If its text were empty, rules for the start of a text (such as dropping a leading space) would
    /// apply to the next id.
    fn restart(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<()> {
        let alone = tokenizer.decode(&[id], false)?;
        if !alone.is_empty() && !alone.contains(char::REPLACEMENT_CHARACTER) {
            self.window.clear();
            self.window.push(id);
            self.shown = alone.len();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tokenizer::tests::{fixtures, ids};
    use super::*;
    use crate::rng::Rng;

    fn streamed(tokenizer: &Tokenizer, all: &[u32], skip_special: bool) -> String {
        let mut stream = TextStream::new(skip_special);
        let mut text = String::new();
        for id in all {
            text += &stream.push(tokenizer, *id).unwrap();
        }
        text + &stream.finish(tokenizer).unwrap()
    }

    #[test]
    fn streamed_pieces_of_golden_ids_are_the_decoded_text() {
        for (tokenizer, golden) in fixtures() {
            let prompts = golden["prompts"].as_array().into_iter().flatten();
            let texts = golden["tokenization"].as_array().unwrap().iter();
            let all =
                prompts.flat_map(|p| [ids(&p["ids"]), ids(&p["greedy_ids"])]).chain(texts.map(|t| ids(&t["ids"])));
            for ids in all {
                for skip in [false, true] {
                    assert_eq!(streamed(&tokenizer, &ids, skip), tokenizer.decode(&ids, skip).unwrap(), "{ids:?}");
                }
            }
        }
    }

    #[test]
    fn streamed_pieces_of_random_ids_are_the_decoded_text() {
        let mut rng = Rng::new(7);
        for (tokenizer, golden) in fixtures() {
            // The range includes a few ids beyond the end of the vocabulary.
            let vocab = golden["vocab_size"].as_u64().unwrap() + 3;
            for round in 0..60 {
                let length = 1 + rng.next_u64() % 120;
                // Every other text uses few distinct ids, so that runs of bytes and repeated spaces are common.
                let few = if round % 2 == 0 { vocab } else { vocab.min(260) };
                let ids: Vec<u32> = (0..length).map(|_| (rng.next_u64() % few) as u32).collect();
                for skip in [false, true] {
                    let expected = tokenizer.decode(&ids, skip).unwrap();
                    assert_eq!(streamed(&tokenizer, &ids, skip), expected, "{} {ids:?}", tokenizer.path().display());
                }
            }
        }
    }

    #[test]
    fn text_comes_as_soon_as_it_is_settled() {
        for (tokenizer, _) in fixtures() {
            let ids =
                tokenizer.encode_plain("Once upon a time, there was a cat. It sat on a mat and was happy.").unwrap();
            let mut stream = TextStream::new(true);
            let mut late = 0;
            for id in &ids {
                late += usize::from(stream.push(&tokenizer, *id).unwrap().is_empty());
            }
            // Some pipelines put the leading space of a text into a separate token, which shows nothing.
            assert!(late <= 1, "{}", tokenizer.path().display());
            assert_eq!(stream.finish(&tokenizer).unwrap(), "");
        }
    }

    #[test]
    fn a_text_that_continues_another_one_is_the_rest_of_both() {
        for (tokenizer, _) in fixtures() {
            let ids = tokenizer.encode_plain("Once upon a time there was a cat. It sat on a mat.").unwrap();
            let whole = tokenizer.decode(&ids, false).unwrap();
            for cut in 1..ids.len() {
                let mut stream = TextStream::after(&ids[..cut], &tokenizer, false).unwrap();
                let mut rest = String::new();
                ids[cut..].iter().for_each(|id| rest += &stream.push(&tokenizer, *id).unwrap());
                rest += &stream.finish(&tokenizer).unwrap();
                let before = tokenizer.decode(&ids[..cut], false).unwrap();
                let before = before.strip_suffix(char::REPLACEMENT_CHARACTER).unwrap_or(&before);
                assert_eq!(format!("{before}{rest}"), whole, "{} after {cut} tokens", tokenizer.path().display());
            }
        }
    }

    #[test]
    fn a_long_stream_keeps_a_short_window() {
        let (tokenizer, _) = &fixtures()[0];
        let mut stream = TextStream::new(true);
        for id in tokenizer.encode_plain(&"a cat and a dog ".repeat(200)).unwrap() {
            stream.push(tokenizer, id).unwrap();
            assert!(stream.window.len() <= WINDOW);
        }
    }
}
