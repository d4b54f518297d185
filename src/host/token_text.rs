//! Texts of single tokens in answers with probabilities.

use crate::generate::text::Tokenizer;
use std::fmt::Write;

/// Bytes of each token of a vocabulary.
#[derive(Debug)]
pub struct TokenTexts {
    bytes: Vec<Box<[u8]>>,
}

impl TokenTexts {
    /// Collects the bytes of the tokens with ids below `vocab`. Special tokens have those of their name.
    pub fn new(tokenizer: &Tokenizer, vocab: usize) -> TokenTexts {
        let spelled = tokenizer.spelling(vocab).map(|spelling| spelling.bytes).unwrap_or_default();
        let bytes = |id: u32| match spelled.get(id as usize) {
            Some(bytes) if !bytes.is_empty() => bytes.clone().into_boxed_slice(),
            _ => tokenizer.token(id).unwrap_or_default().into_bytes().into_boxed_slice(),
        };
        TokenTexts { bytes: (0..vocab as u32).map(bytes).collect() }
    }

    /// Returns the bytes of a token; none for an id without a token.
    pub fn bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id as usize).map_or(&[], |bytes| bytes)
    }

    /// Returns the number of bytes of the longest token.
    pub fn longest(&self) -> usize {
        self.bytes.iter().map(|bytes| bytes.len()).max().unwrap_or(0)
    }

    /// Returns the text of a token: as it is if it is valid UTF-8, otherwise `bytes:\x..`, and `token_id:N` if the id
    /// has none. Different tokens may have the same text.
    pub fn text(&self, id: u32) -> String {
        match (self.bytes(id), std::str::from_utf8(self.bytes(id))) {
            ([], _) => format!("token_id:{id}"),
            (_, Ok(text)) => text.to_string(),
            (bytes, Err(_)) => bytes.iter().fold(String::from("bytes:"), |mut text, byte| {
                let _ = write!(text, "\\x{byte:02x}");
                text
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_token_has_a_text() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let tokenizer = Tokenizer::open(&root.join("assets/stories260k/tokenizer.json")).unwrap();
        let texts = TokenTexts::new(&tokenizer, 514);
        let ids = tokenizer.encode_plain("Once").unwrap();
        let joined: Vec<u8> = ids.iter().flat_map(|id| texts.bytes(*id).to_vec()).collect();
        assert_eq!(String::from_utf8(joined).unwrap(), " Once");
        assert_eq!(texts.text(1), "<s>");
        // The tokens of single bytes follow the special ones.
        assert_eq!(texts.text(3 + 0xe2), "bytes:\\xe2");
        assert_eq!(texts.text(3 + u32::from(b'a')), "a");
        assert_eq!(texts.text(513), "token_id:513");
    }
}
