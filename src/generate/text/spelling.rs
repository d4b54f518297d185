//! Bytes that each token adds to a text. A constraint works on bytes, so it needs them for the whole vocabulary.
//!
//! The bytes follow from the decoder of `tokenizer.json`. Three kinds are known, which cover byte-pair tokenizers:
//! `ByteLevel` writes each byte as one character (the table of GPT-2), `Metaspace` and the sequence of `Replace`,
//! `ByteFallback` and `Fuse` write a space as `▁`, and the latter has tokens `<0x00>` to `<0xFF>` for bytes. Some
//! decoders drop the space with which a text begins; [`Spelling::leading`] says so.

use super::tokenizer::Tokenizer;
use crate::error::{Error, Result};
use serde_json::Value;
use std::collections::HashMap;

/// Spaces at the beginning of a text that a decoder does not show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leading {
    /// All spaces are shown.
    Kept,
    /// The first space of the text is dropped.
    FirstDropped,
    /// All spaces of the first token are dropped.
    AllDropped,
}

/// Bytes of every token of a vocabulary.
#[derive(Debug)]
pub struct Spelling {
    /// Bytes of each token; empty for special tokens and for ids without a token.
    pub bytes: Vec<Vec<u8>>,
    /// Spaces of the first token of a text that are not shown.
    pub leading: Leading,
}

/// Rules by which a decoder converts the spelling of a token to bytes.
struct Rules {
    /// Byte of each character of the byte-level alphabet, if the decoder is of this kind.
    alphabet: Option<HashMap<char, u8>>,
    /// Character that stands for a space.
    space: Option<String>,
    leading: Leading,
}

impl Tokenizer {
    /// Returns the bytes of the tokens with ids below `rows`, the number of logits of the model.
    ///
    /// # Errors
    /// The decoder is of an unknown kind.
    pub fn spelling(&self, rows: usize) -> Result<Spelling> {
        let decoder = self.decoder();
        let Some(rules) = rules(&decoder) else {
            let found = format!("found the decoder {}, whose tokens have no fixed bytes", shortened(&decoder));
            return Err(Error::unsupported(found)
                .at(self.path())
                .help("constraints work with byte-level and byte-fallback tokenizers; leave the constraint out"));
        };
        let bytes = (0..rows as u32).map(|id| match self.token(id) {
            Some(token) if !self.is_special_token(&token) => self.bytes_of(&token, &rules),
            _ => Vec::new(),
        });
        Ok(Spelling { bytes: bytes.collect(), leading: rules.leading })
    }

    fn bytes_of(&self, token: &str, rules: &Rules) -> Vec<u8> {
        if let Some(alphabet) = &rules.alphabet {
            let mapped: Option<Vec<u8>> = token.chars().map(|c| alphabet.get(&c).copied()).collect();
            return mapped.unwrap_or_else(|| token.as_bytes().to_vec());
        }
        if self.is_fallback_byte(token)
            && let Some(byte) = token.get(3..5).and_then(|digits| u8::from_str_radix(digits, 16).ok())
        {
            return vec![byte];
        }
        match &rules.space {
            Some(space) => token.replace(space.as_str(), " ").into_bytes(),
            None => token.as_bytes().to_vec(),
        }
    }
}

/// Returns the rules of a decoder in JSON; `None` if it is of an unknown kind.
fn rules(decoder: &Value) -> Option<Rules> {
    match decoder["type"].as_str()? {
        "ByteLevel" => Some(Rules { alphabet: Some(byte_alphabet()), space: None, leading: Leading::Kept }),
        "Metaspace" => {
            let leading = if decoder["prepend_scheme"] == "never" { Leading::Kept } else { Leading::AllDropped };
            Some(Rules { alphabet: None, space: Some(decoder["replacement"].as_str()?.to_string()), leading })
        }
        "Sequence" => sequence(decoder["decoders"].as_array()?),
        _ => None,
    }
}

/// Returns the rules of a sequence of decoders: a single one, or `Replace`, `ByteFallback`, `Fuse` and perhaps `Strip`.
fn sequence(steps: &[Value]) -> Option<Rules> {
    if let [only] = steps {
        return rules(only);
    }
    let (mut space, mut leading, mut fused) = (None, Leading::Kept, false);
    for step in steps {
        match step["type"].as_str()? {
            "Replace" if space.is_none() && !fused && step["content"] == " " => {
                space = Some(step["pattern"]["String"].as_str().filter(|text| !text.is_empty())?.to_string());
            }
            "ByteFallback" if !fused => {}
            "Fuse" => fused = true,
            "Strip" if fused && step["content"] == " " && step["stop"] == 0 => match step["start"].as_u64()? {
                0 => {}
                1 => leading = Leading::FirstDropped,
                _ => return None,
            },
            _ => return None,
        }
    }
    fused.then_some(Rules { alphabet: None, space, leading })
}

/// Returns the byte of each character of the byte-level alphabet: printable bytes stand for themselves, the others for
/// the characters from U+0100 on, in the order of the bytes.
fn byte_alphabet() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut others = (0x100u32..).filter_map(char::from_u32);
    let pair = |byte: u8| (if printable(byte) { Some(char::from(byte)) } else { others.next() }, byte);
    (0..=u8::MAX).map(pair).filter_map(|(c, byte)| Some((c?, byte))).collect()
}

fn shortened(decoder: &Value) -> String {
    decoder.to_string().chars().take(120).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tokenizer::tests::fixtures;
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn the_bytes_of_random_ids_are_their_decoded_text() {
        let mut rng = Rng::new(11);
        for (tokenizer, golden) in fixtures() {
            let rows = golden["vocab_size"].as_u64().unwrap() as usize;
            let spelling = tokenizer.spelling(rows).unwrap();
            let known: Vec<u32> = (0..rows as u32).filter(|id| !spelling.bytes[*id as usize].is_empty()).collect();
            assert!(known.len() > rows * 9 / 10, "{}", tokenizer.path().display());
            for _ in 0..300 {
                let length = 1 + rng.next_u64() % 12;
                let ids: Vec<u32> =
                    (0..length).map(|_| known[(rng.next_u64() % known.len() as u64) as usize]).collect();
                let bytes: Vec<u8> = ids.iter().flat_map(|id| spelling.bytes[*id as usize].clone()).collect();
                // Decoders replace invalid UTF-8 in different ways; a constraint never allows it.
                let Ok(text) = String::from_utf8(bytes) else { continue };
                let shown = match spelling.leading {
                    Leading::Kept => &text,
                    _ => text.strip_prefix(' ').unwrap_or(&text),
                };
                assert_eq!(tokenizer.decode(&ids, false).unwrap(), shown, "{ids:?}");
            }
        }
    }

    #[test]
    fn unknown_decoders_are_refused() {
        for decoder in [
            serde_json::json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
            serde_json::json!({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "CTC"}]}),
            serde_json::json!({"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1}]}),
            Value::Null,
        ] {
            assert!(rules(&decoder).is_none(), "{decoder}");
        }
        let metaspace = serde_json::json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"});
        assert_eq!(rules(&metaspace).unwrap().leading, Leading::AllDropped);
    }
}
