//! Reads the vocabulary of a tokenizer.json as a stream, because its tree would take hundreds of MiB: the length of
//! tokens, their ids, and whether the model has tokens for every text.

use super::{ADDED_BYTES, STRING};
use crate::error::{Context, Error, Result};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

/// Largest accepted `max_input_chars_per_word`. The time of WordPiece is cubic in the length of a word; known models
/// have 100.
const WORD: u64 = 256;

/// Names of the strings of [`Model::longest_string`] in errors.
const AFFIXES: &str = "unk_token, continuing_subword_prefix or end_of_word_suffix";

/// A token that is found in a text before the model sees it.
#[derive(Deserialize)]
pub(super) struct AddedToken<'a> {
    #[serde(default)]
    id: u32,
    #[serde(borrow)]
    content: Cow<'a, str>,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
}

impl AddedToken<'_> {
    /// Returns true when the token swallows the white space beside it.
    pub(super) fn strips(&self) -> bool {
        self.lstrip || self.rstrip
    }
}

/// Limits the length of each added token, and the memory of those that are normalized when the file is opened: the
/// normalizers multiply their length by up to `growth`.
pub(super) fn check_added(tokens: &[AddedToken<'_>], growth: f64) -> Result<()> {
    for (i, token) in tokens.iter().enumerate() {
        super::check_string(&token.content).tensor(&format!("added_tokens[{i}]"))?;
    }
    let normalized = tokens.iter().filter(|token| token.normalized);
    let bytes = normalized.map(|token| token.content.len() as f64).sum::<f64>() * growth;
    if bytes > ADDED_BYTES {
        let found = format!("found tokens that may take {bytes:.3e} bytes, expected at most {ADDED_BYTES}");
        return Err(Error::corrupt(found).tensor("added_tokens"));
    }
    Ok(())
}

/// Properties of the model that decide its cost.
#[derive(Default)]
pub(super) struct Model {
    vocabulary: Vocabulary,
    /// Length of the longest string beside the vocabulary, such as a prefix of subwords.
    longest_string: usize,
    /// Largest number of characters of a word: `max_input_chars_per_word`, or 0.
    longest_word: u64,
    is_bpe: bool,
    has_unknown: bool,
    fuses_unknown: bool,
    byte_fallback: bool,
    has_affix: bool,
}

impl Model {
    /// Returns the largest id that no added token has.
    pub(super) fn highest_id(&self, added: &[AddedToken<'_>]) -> Option<u32> {
        let added: HashSet<u32> = added.iter().map(|token| token.id).collect();
        self.vocabulary.ids.iter().rev().find(|id| !added.contains(id)).copied()
    }

    /// Refuses long tokens, long words, and two tokens with one id.
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |found: String, field: &str| Err(Error::corrupt(found).tensor(format!("model.{field}")));
        let longest = self.vocabulary.longest;
        if longest > STRING {
            return refuse(format!("found a token of {longest} bytes, expected at most {STRING}"), "vocab");
        }
        if self.longest_string > STRING {
            return refuse(format!("found {} bytes, expected at most {STRING}", self.longest_string), AFFIXES);
        }
        if self.longest_word > WORD {
            return refuse(format!("found {}, expected at most {WORD}", self.longest_word), "max_input_chars_per_word");
        }
        match self.vocabulary.ids.array_windows().find(|[a, b]| a == b) {
            Some([id, _]) => {
                refuse(format!("found two tokens with the id {id}, expected an id for each token"), "vocab")
            }
            None => Ok(()),
        }
    }

    /// Returns the largest number of bytes that one token can stand for, or infinity if the model leaves out or joins
    /// what it does not know.
    pub(super) fn bytes_per_token(&self, added: &[AddedToken<'_>], byte_level: bool) -> f64 {
        let every_byte =
            (self.byte_fallback && self.vocabulary.bytes == 256) || (byte_level && self.vocabulary.alphabet == 256);
        let every_character = self.has_unknown && !self.fuses_unknown;
        if !self.is_bpe || self.has_affix || !(every_byte || every_character) {
            return f64::INFINITY;
        }
        let added = added.iter().map(|token| token.content.len());
        // A token for an unknown character stands for up to four bytes.
        added.chain([self.vocabulary.longest, 4]).max().unwrap_or(4) as f64
    }
}

/// Statistics of the tokens of a model.
#[derive(Default)]
struct Vocabulary {
    longest: usize,
    /// Ids in ascending order.
    ids: Vec<u32>,
    /// Number of tokens like `<0x0A>`.
    bytes: usize,
    /// Number of tokens that are one character of the byte-level alphabet.
    alphabet: usize,
}

impl Vocabulary {
    fn add(&mut self, token: Token) {
        self.longest = self.longest.max(token.len);
        self.bytes += usize::from(token.is_byte);
        self.alphabet += usize::from(token.in_alphabet);
    }
}

/// Properties of a token that enter the statistics.
struct Token {
    len: usize,
    is_byte: bool,
    in_alphabet: bool,
}

impl<'de> Deserialize<'de> for Token {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Token, D::Error> {
        struct VocabularyText;
        impl Visitor<'_> for VocabularyText {
            type Value = Token;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a token")
            }
            fn visit_str<E>(self, text: &str) -> std::result::Result<Token, E> {
                let mut chars = text.chars();
                let in_alphabet = matches!(
                    (chars.next(), chars.next()),
                    (Some('!'..='~' | '\u{a1}'..='\u{ac}' | '\u{ae}'..='\u{143}'), None)
                );
                let is_byte = text.len() == 6 && text.starts_with("<0x") && text.ends_with('>');
                Ok(Token { len: text.len(), is_byte, in_alphabet })
            }
        }
        d.deserialize_str(VocabularyText)
    }
}

impl<'de> Deserialize<'de> for Vocabulary {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Vocabulary, D::Error> {
        struct Tokens;
        impl<'de> Visitor<'de> for Tokens {
            type Value = Vocabulary;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a vocabulary")
            }
            /// Reads tokens with their ids.
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Vocabulary, A::Error> {
                let mut vocabulary = Vocabulary::default();
                while let Some((token, id)) = map.next_entry::<Token, u32>()? {
                    vocabulary.add(token);
                    vocabulary.ids.push(id);
                }
                vocabulary.ids.sort_unstable();
                Ok(vocabulary)
            }
            /// Reads tokens with their scores, in the order of their ids.
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Vocabulary, A::Error> {
                let mut vocabulary = Vocabulary::default();
                while let Some((token, IgnoredAny)) = seq.next_element::<(Token, IgnoredAny)>()? {
                    vocabulary.add(token);
                    vocabulary.ids.push(vocabulary.ids.len() as u32);
                }
                Ok(vocabulary)
            }
        }
        d.deserialize_any(Tokens)
    }
}

impl<'de> Deserialize<'de> for Model {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Model, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Model;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("the model of a tokenizer")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Model, A::Error> {
                let mut model = Model::default();
                let mut seen = Vec::new();
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "vocab" => model.vocabulary = map.next_value()?,
                        "max_input_chars_per_word" => {
                            model.longest_word = map.next_value::<Option<u64>>()?.unwrap_or(0);
                        }
                        "fuse_unk" => model.fuses_unknown = map.next_value::<Option<bool>>()?.unwrap_or(false),
                        "byte_fallback" => model.byte_fallback = map.next_value::<Option<bool>>()?.unwrap_or(false),
                        "unk_token" | "continuing_subword_prefix" | "end_of_word_suffix" => {
                            let text: Option<Cow<'de, str>> = map.next_value()?;
                            let len = text.map_or(0, |text| text.len());
                            model.longest_string = model.longest_string.max(len);
                            model.has_unknown |= key == "unk_token" && len > 0;
                            model.has_affix |= key != "unk_token" && len > 0;
                        }
                        _ => {
                            map.next_value::<IgnoredAny>()?;
                            model.is_bpe |= key == "merges";
                        }
                    }
                    if seen.contains(&key) {
                        return Err(A::Error::custom(format_args!("`{key}` occurs twice in one object")));
                    }
                    seen.push(key);
                }
                Ok(model)
            }
        }
        d.deserialize_map(Fields)
    }
}
