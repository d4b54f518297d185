//! Converts a model of SentencePiece (`tokenizer.model`).
//!
//! The pipeline does what SentencePiece does: a map normalizes characters, runs of spaces become one if the model says
//! so, a space is put before the text, spaces become `▁`, and the model divides the text. The merges of a BPE model
//! follow from the scores of its pieces.
//!
//! Control and user-defined pieces become added tokens, which divide a text before it is normalized. Where the space
//! goes then is the difference between the two versions of the classes of `transformers`: the older one (`legacy`) puts
//! it before each part, the newer one only before a text that does not begin with a space.

use super::proto::{Algorithm, Piece, PieceKind, SentencePieceModel};
use super::settings::{AddedToken, RuleRow, Settings};
use super::vocabulary::Vocabulary;
use crate::convert::merges;
use crate::convert::tokenizer_json::{self, bpe, sentence_piece_decoder};
use crate::error::{Context, Error, Result};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};
use std::collections::HashSet;

/// Rules of a class of tokenizers.
#[derive(Debug)]
struct SentencePieceRules {
    adds_bos: bool,
    adds_eos: bool,
    /// False if the class puts no space before a text, whatever the model says.
    has_prefix: bool,
    /// True to append `<extra_id_0>` and so on in descending order, as many as `extra_ids` says.
    has_sentinels: bool,
}

const LLAMA: SentencePieceRules =
    SentencePieceRules { adds_bos: true, adds_eos: false, has_prefix: true, has_sentinels: false };

const CLASSES: &[RuleRow<SentencePieceRules>] = &[
    RuleRow {
        classes: &["LlamaTokenizer", "CodeLlamaTokenizer"],
        model_types: &["llama", "mistral", "mixtral", "phi3"],
        rules: LLAMA,
    },
    RuleRow {
        classes: &["GemmaTokenizer"],
        model_types: &["gemma", "gemma2", "gemma3", "gemma3_text"],
        rules: SentencePieceRules { has_prefix: false, ..LLAMA },
    },
    RuleRow {
        classes: &["T5Tokenizer"],
        model_types: &[],
        rules: SentencePieceRules { adds_bos: false, adds_eos: true, has_sentinels: true, ..LLAMA },
    },
];

/// Number of sentinels of a class that has some, and the largest accepted one.
const SENTINELS: u64 = 100;
const MOST_SENTINELS: u64 = 1024;

/// Place of the space before a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Prefix {
    None,
    /// Space before each part between added tokens.
    EachPart,
    /// Space before a text that begins neither with a space nor with an added token.
    Text,
}

/// Returns true if the bytes may be a model of SentencePiece: they begin with the tag of a piece.
pub(super) fn is_at(bytes: &[u8]) -> bool {
    bytes.first() == Some(&(1 << 3 | 2))
}

/// Returns the tokenizer.json of a model.
///
/// # Errors
/// The file is damaged, or the model or its class has rules that are not supported.
pub(super) fn tokenizer_json(bytes: &[u8], settings: Settings) -> Result<Vec<u8>> {
    let model = SentencePieceModel::parse(bytes)?;
    let class = settings.row("a model of SentencePiece", CLASSES)?;
    let settings = settings.without_normalized();
    let prefix = prefix(&model, class, &settings)?;
    let mut vocabulary = vocabulary(&model, prefix)?;
    if class.has_sentinels {
        append_sentinels(&mut vocabulary, &settings)?;
    }
    vocabulary.add_listed(&settings, &[])?;
    let control = |id: i32| model.control(id).and_then(|id| vocabulary.text(id));
    let defaults = [control(model.trainer.bos), control(model.trainer.eos)];
    let post_processor = vocabulary.post_processor(&settings, defaults, [class.adds_bos, class.adds_eos])?;
    let pre_tokenizer = match prefix {
        Prefix::Text => json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false}),
        Prefix::None | Prefix::EachPart => Value::Null,
    };
    let decoder = sentence_piece_decoder(prefix != Prefix::None);
    let parts = [normalizer(&model, prefix), pre_tokenizer, post_processor, decoder];
    let algorithm = match model.trainer.algorithm {
        Algorithm::Bpe => bpe_json(&model, &vocabulary)?,
        Algorithm::Unigram => unigram_json(&model, &vocabulary)?,
    };
    Ok(tokenizer_json::file(vocabulary.added_json(), parts, algorithm))
}

fn prefix(model: &SentencePieceModel<'_>, class: &SentencePieceRules, settings: &Settings) -> Result<Prefix> {
    let wanted = settings.flag("add_prefix_space")?.unwrap_or(true);
    Ok(match settings.flag("legacy")?.unwrap_or(true) {
        _ if !(wanted && class.has_prefix && model.normalizer.add_dummy_prefix) => Prefix::None,
        true => Prefix::EachPart,
        false => Prefix::Text,
    })
}

/// Returns the pieces as a vocabulary.
fn vocabulary(model: &SentencePieceModel<'_>, prefix: Prefix) -> Result<Vocabulary> {
    let missing = missing_letters(model)?;
    let mut vocabulary = Vocabulary::default();
    for (id, piece) in (0..).zip(&model.pieces) {
        let text = match letter(piece).filter(|letter| missing.contains(letter)) {
            Some(letter) => letter.to_string(),
            None => piece.text.to_string(),
        };
        vocabulary.insert(id, text).tensor("pieces")?;
        let added = match piece.kind {
            PieceKind::Control | PieceKind::Unknown => AddedToken::special(piece.text.to_string()),
            // SentencePiece finds these in the normalized text. A step that puts a space before each part would put
            // one before the token, too.
            PieceKind::UserDefined => {
                AddedToken { normalized: prefix != Prefix::EachPart, ..AddedToken::visible(piece.text.to_string()) }
            }
            PieceKind::Normal | PieceKind::Byte => continue,
            PieceKind::Unused => {
                let found = format!("found the unused piece `{:.60}`, expected that all pieces are used", piece.text);
                return Err(Error::unsupported(found).tensor("pieces"));
            }
        };
        vocabulary.mark_added(id, added);
    }
    Ok(vocabulary)
}

/// Returns the character of one byte that a piece like `<0x0A>` stands for.
fn letter(piece: &Piece<'_>) -> Option<char> {
    let byte = piece.text.strip_prefix("<0x")?.strip_suffix('>')?;
    let byte = u8::from_str_radix(byte, 16).ok().filter(|byte| piece.kind == PieceKind::Byte && byte.is_ascii())?;
    Some(char::from(byte))
}

/// Returns the characters of one byte that are no pieces of BPE themselves but occur in pieces that are merged. Older
/// models of Gemma lack the tab in this way. Its byte then gets the text of the character, so that it can be merged.
fn missing_letters(model: &SentencePieceModel<'_>) -> Result<HashSet<char>> {
    if model.trainer.algorithm != Algorithm::Bpe {
        return Ok(HashSet::new());
    }
    let known: HashSet<&str> = model.pieces.iter().map(|piece| piece.text).collect();
    let bytes: HashSet<char> = model.pieces.iter().filter_map(letter).collect();
    let mut missing = HashSet::new();
    for piece in model.pieces.iter().filter(|piece| piece.kind == PieceKind::Normal && piece.text.chars().count() > 1) {
        for (at, letter) in piece.text.char_indices() {
            if known.contains(&piece.text[at..at + letter.len_utf8()]) {
                continue;
            }
            if !bytes.contains(&letter) {
                let found = format!("found the piece `{:.60}`, but no piece for its letter `{letter}`", piece.text);
                return Err(Error::unsupported(found).tensor("pieces"));
            }
            missing.insert(letter);
        }
    }
    Ok(missing)
}

fn append_sentinels(vocabulary: &mut Vocabulary, settings: &Settings) -> Result<()> {
    let count = match settings.config("extra_ids") {
        None => SENTINELS,
        Some(value) => value.as_u64().filter(|count| *count <= MOST_SENTINELS).ok_or_else(|| {
            Error::corrupt(format!("found {value:.60}, expected at most {MOST_SENTINELS}")).tensor("extra_ids")
        })?,
    };
    (0..count).rev().try_for_each(|number| vocabulary.append_special(format!("<extra_id_{number}>")))
}

fn normalizer(model: &SentencePieceModel<'_>, prefix: Prefix) -> Value {
    let replace = |pattern: Value, content: &str| json!({"type": "Replace", "pattern": pattern, "content": content});
    let mut steps = Vec::new();
    if !model.normalizer.charsmap.is_empty() {
        let map = BASE64.encode(model.normalizer.charsmap);
        steps.push(json!({"type": "Precompiled", "precompiled_charsmap": map}));
    }
    if model.normalizer.remove_extra_whitespaces {
        // `^` and `$` are the ends of lines in the regular expressions of other programs.
        steps.push(replace(json!({"Regex": r"\A +|[ ▁]+\z"}), ""));
        steps.push(replace(json!({"Regex": " {2,}"}), " "));
    }
    if prefix == Prefix::EachPart {
        steps.push(json!({"type": "Prepend", "prepend": "▁"}));
    }
    // The pre-tokenizer of `Prefix::Text` replaces spaces, too, but after the user-defined pieces were found.
    let is_spaced = |piece: &Piece<'_>| piece.kind == PieceKind::UserDefined && piece.text.contains('▁');
    if prefix != Prefix::Text || model.pieces.iter().any(is_spaced) {
        steps.push(replace(json!({"String": " "}), "▁"));
    }
    match steps.len() {
        0 | 1 => steps.pop().unwrap_or_default(),
        _ => json!({"type": "Sequence", "normalizers": steps}),
    }
}

fn unknown(model: &SentencePieceModel<'_>) -> Result<usize> {
    let mut unknown = model.pieces.iter().enumerate().filter(|(_, piece)| piece.kind == PieceKind::Unknown);
    match (unknown.next(), unknown.next()) {
        (Some((id, _)), None) => Ok(id),
        (found, _) => {
            let found = found.map_or("no", |_| "more than one");
            Err(Error::corrupt(format!("found {found} piece for unknown characters, expected one")).tensor("pieces"))
        }
    }
}

fn bpe_json(model: &SentencePieceModel<'_>, vocabulary: &Vocabulary) -> Result<Value> {
    let bytes = model.pieces.iter().filter(|piece| piece.kind == PieceKind::Byte).count();
    if model.trainer.byte_fallback && bytes != 256 {
        return Err(Error::corrupt(format!("found {bytes} pieces for bytes, expected 256")).tensor("pieces"));
    }
    let is_merged = |piece: &Piece<'_>| matches!(piece.kind, PieceKind::Normal | PieceKind::UserDefined);
    let lacking = |id: usize, piece: &Piece<'_>| vocabulary.text(id as u32).is_some_and(|text| text != piece.text);
    let merged = model.pieces.iter().enumerate().filter(|(id, piece)| is_merged(piece) || lacking(*id, piece));
    let texts = merged.filter_map(|(id, piece)| Some((id, vocabulary.text(id as u32)?, piece.score)));
    let merges = merges::by_score(texts.map(|(id, text, score)| merges::Piece { id, text, score })).tensor("pieces")?;
    let mut json = bpe(vocabulary.json(), merges);
    json["unk_token"] = json!(vocabulary.text(unknown(model)? as u32));
    json["fuse_unk"] = json!(true);
    json["byte_fallback"] = json!(model.trainer.byte_fallback);
    Ok(json)
}

fn unigram_json(model: &SentencePieceModel<'_>, vocabulary: &Vocabulary) -> Result<Value> {
    let score = |id: u32| model.pieces.get(id as usize).map_or(0.0, |piece| piece.score);
    let (unk_id, byte_fallback) = (unknown(model)?, model.trainer.byte_fallback);
    let mut json = json!({"type": "Unigram", "unk_id": unk_id, "vocab": null, "byte_fallback": byte_fallback});
    json["vocab"] = vocabulary.scored_json(score)?;
    Ok(json)
}
