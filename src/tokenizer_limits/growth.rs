//! Computes how much longer or shorter each step of a pipeline can make a text. The factors of a chain are multiplied.
//!
//! All bounds are factors without a constant, because no step adds anything to an empty piece of text: adding `n`
//! bytes to a piece of at least one byte multiplies its length by at most `1 + n`.

use super::{ADDED, STRING, charsmap, patterns};
use crate::error::{Context, Error, Result};
use serde::Serialize;
use serde_json::Value;
use tokenizers::normalizers::Replace;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};

/// Canonical decomposition: some characters of three bytes become nine.
const CANONICAL: f64 = 3.0;
/// Compatibility decomposition: U+FDFA, three bytes, becomes 33.
const COMPATIBLE: f64 = 11.0;
/// Compatibility mapping turns four bytes into one (mathematical letters), and composition then three into one.
const COMPATIBLE_SHRINK: f64 = 12.0;
/// Lower case: some letters of two bytes become three.
const LOWER: f64 = 1.5;
/// Spaces around a Chinese character of three bytes.
const SPACED: f64 = 5.0 / 3.0;

/// Largest factors by which a step changes the length of a text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Change {
    /// Bytes after the step per byte before it.
    pub(super) grow: f64,
    /// Bytes before the step per byte after it; infinite when the step can remove any text.
    pub(super) shrink: f64,
}

impl Change {
    fn new(grow: f64, shrink: f64) -> Change {
        Change { grow, shrink }
    }

    /// Returns the change of a step that removes text and adds none.
    fn removing() -> Change {
        Change::new(1.0, f64::INFINITY)
    }

    /// Returns the change of a step that only divides a text.
    fn none() -> Change {
        Change::new(1.0, 1.0)
    }

    fn then(self, next: Change) -> Change {
        Change::new(self.grow * next.grow, self.shrink * next.shrink)
    }
}

/// Product of the factors of the steps so far.
pub(super) struct Growth {
    pub(super) total: Change,
    /// True when a step maps each byte to a character of the byte-level alphabet.
    pub(super) byte_level: bool,
    limit: f64,
}

impl Growth {
    pub(super) fn new(limit: f64) -> Growth {
        Growth { total: Change::none(), byte_level: false, limit }
    }

    /// Multiplies the total by the factors of a step; fails if texts may then grow beyond the limit.
    fn step(&mut self, change: Change, field: &str) -> Result<()> {
        self.total = self.total.then(change);
        if self.total.grow > self.limit {
            let found = format!(
                "found texts that grow {:.3e} times up to this step, expected at most {} times",
                self.total.grow, self.limit
            );
            return Err(Error::corrupt(found).tensor(field));
        }
        Ok(())
    }

    pub(super) fn normalizer(&mut self, normalizer: &NormalizerWrapper, field: &str) -> Result<()> {
        use NormalizerWrapper as N;
        let change = match normalizer {
            N::Sequence(steps) => {
                let mut steps = steps.as_ref().iter().enumerate();
                return steps.try_for_each(|(i, step)| self.normalizer(step, &format!("{field}.normalizers[{i}]")));
            }
            N::BertNormalizer(_) => Change::new(SPACED * CANONICAL * LOWER, f64::INFINITY),
            N::StripNormalizer(_) | N::StripAccents(_) | N::Nmt(_) => Change::removing(),
            N::NFC(_) | N::NFD(_) => Change::new(CANONICAL, CANONICAL),
            N::NFKC(_) | N::NFKD(_) => Change::new(COMPATIBLE, COMPATIBLE_SHRINK),
            // The Kelvin sign, three bytes, becomes one.
            N::Lowercase(_) => Change::new(LOWER, 3.0),
            N::Precompiled(step) => {
                let blob = json(step)["precompiled_charsmap"].as_str().unwrap_or_default().to_string();
                Change::new(charsmap::growth(&charsmap::parse(&blob).tensor(field)?), f64::INFINITY)
            }
            N::Replace(step) => replace(step),
            // The crate repeats the first character where the text to prepend is empty.
            N::Prepend(step) => Change::new(1.0 + step.prepend.len().max(1) as f64, 1.0),
            N::ByteLevel(_) => {
                self.byte_level = true;
                Change::new(2.0, 1.0)
            }
        };
        self.step(change, field)
    }

    pub(super) fn pre_tokenizer(&mut self, pre_tokenizer: &PreTokenizerWrapper, field: &str) -> Result<()> {
        use PreTokenizerWrapper as P;
        let change = match pre_tokenizer {
            P::Sequence(steps) => {
                let mut steps = steps.as_ref().iter().enumerate();
                return steps
                    .try_for_each(|(i, step)| self.pre_tokenizer(step, &format!("{field}.pretokenizers[{i}]")));
            }
            P::ByteLevel(step) => {
                self.byte_level = true;
                // A space before each piece, then a character of up to two bytes for each byte.
                Change::new(if step.add_prefix_space { 4.0 } else { 2.0 }, 1.0)
            }
            // Each space becomes the replacement, and each piece gets one more.
            P::Metaspace(step) => Change::new(2.0 * step.get_replacement().len_utf8() as f64, 1.0),
            P::BertPreTokenizer(_)
            | P::Delimiter(_)
            | P::Whitespace(_)
            | P::WhitespaceSplit(_)
            | P::UnicodeScripts(_) => Change::removing(),
            P::Split(_) | P::Punctuation(_) if json(pre_tokenizer)["behavior"] == "Removed" => Change::removing(),
            P::Split(_) | P::Punctuation(_) | P::Digits(_) | P::FixedLength(_) => Change::none(),
        };
        self.step(change, field)
    }

    /// Multiplies by the factors of a decoder, which works on a list of at least one token. Each token
    /// counts as one byte longer than it is, so that a step that adds a space to each token has a factor, too.
    pub(super) fn decoder(&mut self, decoder: &DecoderWrapper, field: &str) -> Result<()> {
        use DecoderWrapper as D;
        let change = match decoder {
            D::Sequence(steps) => {
                let mut steps = steps.get_decoders().iter().enumerate();
                return steps.try_for_each(|(i, step)| self.decoder(step, &format!("{field}.decoders[{i}]")));
            }
            D::BPE(step) => Change::new(spaces_for(&step.suffix), 1.0),
            // A character of two bytes stands for a byte; alone it may become a replacement character of three.
            D::ByteLevel(_) => Change::new(1.5, 1.0),
            D::WordPiece(_) => Change::new(2.0, 1.0),
            D::CTC(step) => Change::new(spaces_for(&step.word_delimiter_token), 1.0),
            D::Replace(step) => replace(step),
            D::Metaspace(_) | D::Fuse(_) | D::Strip(_) | D::ByteFallback(_) => Change::none(),
        };
        self.step(change, field)
    }
}

/// Returns the growth of a text in which `pattern` becomes a space. An empty pattern is found before each character.
fn spaces_for(pattern: &str) -> f64 {
    if pattern.is_empty() { 2.0 } else { 1.0 }
}

fn replace(step: &Replace) -> Change {
    let pattern = json(step)["pattern"].take();
    let content = step.content.len() as f64;
    let (shortest, longest) = match pattern["String"].as_str() {
        Some(text) => (text.len(), text.len() as f64),
        None => (pattern["Regex"].as_str().map_or(0, patterns::shortest_match), f64::INFINITY),
    };
    let grow = match shortest {
        // An empty match is found before each byte and at the end.
        0 => 1.0 + 2.0 * content,
        _ => (content / shortest as f64).max(1.0),
    };
    Change::new(grow, (longest / content).max(1.0))
}

/// Limits the number and length of the tokens that post-processors add, and refuses templates that repeat the text.
/// `added` counts the tokens of the steps before.
pub(super) fn check_post_processor(step: &PostProcessorWrapper, field: &str, added: &mut usize) -> Result<()> {
    use PostProcessorWrapper as P;
    let (pieces, tokens, longest) = match step {
        P::Sequence(steps) => {
            let mut steps = steps.as_ref().iter().enumerate();
            return steps
                .try_for_each(|(i, step)| check_post_processor(step, &format!("{field}.processors[{i}]"), added));
        }
        P::Roberta(step) => (4, 4, step.sep.0.len().max(step.cls.0.len())),
        P::Bert(step) => (4, 4, step.sep.0.len().max(step.cls.0.len())),
        P::ByteLevel(_) => (0, 0, 0),
        P::Template(_) => {
            let json = json(step);
            let templates = [&json["single"], &json["pair"]];
            for template in templates {
                check_copies(template).tensor(field)?;
            }
            let lists = templates.map(|template| template.as_array().map_or(&[][..], Vec::as_slice));
            let added = |pieces: &[Value]| {
                let ids = pieces.iter().filter_map(|piece| piece["SpecialToken"]["id"].as_str());
                ids.map(|id| json["special_tokens"][id]["ids"].as_array().map_or(0, Vec::len)).sum::<usize>()
            };
            let tokens = json["special_tokens"].as_object().into_iter().flat_map(|tokens| tokens.values());
            let spellings = tokens.flat_map(|token| token["tokens"].as_array().into_iter().flatten());
            let longest = spellings.filter_map(Value::as_str).map(str::len).max().unwrap_or(0);
            (lists[0].len().max(lists[1].len()), added(lists[0]).max(added(lists[1])), longest)
        }
    };
    *added += tokens;
    for (what, found, limit) in [
        ("pieces", pieces, ADDED),
        ("tokens added to each text", *added, ADDED),
        ("bytes in one token", longest, STRING),
    ] {
        if found > limit {
            return Err(Error::corrupt(format!("found {found} {what}, expected at most {limit}")).tensor(field));
        }
    }
    Ok(())
}

/// Refuses a template that repeats a text: in a sequence of templates, each would multiply the tokens.
fn check_copies(template: &Value) -> Result<()> {
    for text in ["A", "B"] {
        let pieces = template.as_array().into_iter().flatten();
        let copies = pieces.filter(|piece| piece["Sequence"]["id"] == text).count();
        if copies > 1 {
            return Err(Error::corrupt(format!(
                "found sequence {text} {copies} times in a template, expected at most once"
            )));
        }
    }
    Ok(())
}

/// Returns the JSON of a step, some of whose fields are private.
fn json(step: &impl Serialize) -> Value {
    serde_json::to_value(step).unwrap_or_default()
}
