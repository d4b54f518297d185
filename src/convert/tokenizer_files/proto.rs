//! Reads the model file of SentencePiece: a message in the encoding of protocol buffers.
//!
//! A message is a list of fields. A field is a tag, `number << 3 | kind`, and a value: a number of 7 bits per byte
//! (kind 0), 8 bytes (kind 1), a length and as many bytes (kind 2), or 4 bytes (kind 5). A text, a list of bytes and a
//! message within a message are all of kind 2. Fields that this program does not use are skipped; they describe how
//! the model was trained.

use crate::convert::tokenizer_json::MOST_TOKENS;
use crate::error::{Context, Error, Result};

/// Contents of a model file.
#[derive(Debug)]
pub(super) struct SentencePieceModel<'a> {
    /// All pieces; the position of a piece is its id.
    pub(super) pieces: Vec<Piece<'a>>,
    pub(super) trainer: Trainer,
    pub(super) normalizer: Normalizer<'a>,
}

/// A token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Piece<'a> {
    pub(super) text: &'a str,
    pub(super) score: f32,
    pub(super) kind: PieceKind,
}

/// Kind of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PieceKind {
    Normal,
    Unknown,
    /// Special token such as `<s>`, which no text contains.
    Control,
    /// Token that is found in a text before all others.
    UserDefined,
    /// Token that was removed from the vocabulary but keeps its id.
    Unused,
    /// Token like `<0x0A>`, which stands for a byte of a character that is not in the vocabulary.
    Byte,
}

/// Algorithm of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Algorithm {
    Unigram,
    Bpe,
}

/// The properties of the trained model that change how texts are divided.
#[derive(Debug)]
pub(super) struct Trainer {
    pub(super) algorithm: Algorithm,
    pub(super) byte_fallback: bool,
    /// Ids of the tokens around a text; negative if there is none.
    pub(super) bos: i32,
    pub(super) eos: i32,
}

/// Rules by which texts are normalized.
#[derive(Debug)]
pub(super) struct Normalizer<'a> {
    pub(super) charsmap: &'a [u8],
    pub(super) add_dummy_prefix: bool,
    pub(super) remove_extra_whitespaces: bool,
}

/// Value of a field.
#[derive(Debug)]
enum Value<'a> {
    Number(u64),
    Word([u8; 4]),
    DoubleWord,
    Bytes(&'a [u8]),
}

impl<'a> SentencePieceModel<'a> {
    /// Reads a model file.
    ///
    /// # Errors
    /// The bytes are not a message, or the model has a property that changes texts and is not supported.
    pub(super) fn parse(bytes: &'a [u8]) -> Result<SentencePieceModel<'a>> {
        let trainer = Trainer { algorithm: Algorithm::Unigram, byte_fallback: false, bos: 1, eos: 2 };
        let normalizer = Normalizer { charsmap: &[], add_dummy_prefix: true, remove_extra_whitespaces: true };
        let mut model = SentencePieceModel { pieces: Vec::new(), trainer, normalizer };
        let (mut trained, mut normalized) = (false, false);
        for field in MessageFields::of(bytes) {
            let field = field?;
            trained |= field.0 == 2;
            normalized |= field.0 == 3;
            match field {
                (1, Value::Bytes(piece)) => {
                    if model.pieces.len() == MOST_TOKENS {
                        return Err(Error::unsupported(format!("found more than {MOST_TOKENS} pieces")));
                    }
                    let place = format!("pieces[{}]", model.pieces.len());
                    model.pieces.push(Piece::parse(piece).tensor(&place)?);
                }
                (2, Value::Bytes(trainer)) => model.trainer.read(trainer).tensor("trainer_spec")?,
                (3, Value::Bytes(normalizer)) => model.normalizer.read(normalizer).tensor("normalizer_spec")?,
                (5, Value::Bytes(denormalizer)) => refuse_denormalizer(denormalizer).tensor("denormalizer_spec")?,
                (1..=3 | 5, other) => return Err(wrong_kind("a message", &other)),
                _ => {}
            }
        }
        // These follow the pieces, so a file that was cut between two pieces lacks them.
        for (found, name) in
            [(!model.pieces.is_empty(), "pieces"), (trained, "trainer_spec"), (normalized, "normalizer_spec")]
        {
            if !found {
                return Err(Error::corrupt(format!("found no {name}, expected a whole model file of SentencePiece")));
            }
        }
        Ok(model)
    }

    /// Returns `id` if it is that of a control token.
    pub(super) fn control(&self, id: i32) -> Option<u32> {
        let id = u32::try_from(id).ok()?;
        self.pieces.get(id as usize).filter(|piece| piece.kind == PieceKind::Control).map(|_| id)
    }
}

impl<'a> Piece<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Piece<'a>> {
        let mut piece = Piece { text: "", score: 0.0, kind: PieceKind::Normal };
        for field in MessageFields::of(bytes) {
            match field? {
                (1, value) => piece.text = value.text().tensor("piece")?,
                (2, value) => piece.score = value.float().tensor("score")?,
                (3, value) => piece.kind = PieceKind::of(value.number().tensor("type")?)?,
                _ => {}
            }
        }
        if piece.text.is_empty() {
            return Err(Error::corrupt("found an empty piece, expected at least one character"));
        }
        Ok(piece)
    }
}

impl PieceKind {
    fn of(number: u64) -> Result<PieceKind> {
        Ok(match number {
            1 => PieceKind::Normal,
            2 => PieceKind::Unknown,
            3 => PieceKind::Control,
            4 => PieceKind::UserDefined,
            5 => PieceKind::Unused,
            6 => PieceKind::Byte,
            _ => return Err(Error::unsupported(format!("found the type {number}, expected 1 to 6"))),
        })
    }
}

impl Trainer {
    fn read(&mut self, bytes: &[u8]) -> Result<()> {
        for field in MessageFields::of(bytes) {
            match field? {
                (3, value) => {
                    self.algorithm = match value.number().tensor("model_type")? {
                        1 => Algorithm::Unigram,
                        2 => Algorithm::Bpe,
                        other => {
                            let found = format!("found {other}, expected 1 (unigram) or 2 (BPE)");
                            return Err(Error::unsupported(found).tensor("model_type"));
                        }
                    }
                }
                (24, value) => expect_flag(false, &value).tensor("treat_whitespace_as_suffix")?,
                (35, value) => self.byte_fallback = value.number().tensor("byte_fallback")? != 0,
                // Negative numbers are stored with 64 bits.
                (41, value) => self.bos = value.number().tensor("bos_id")? as i32,
                (42, value) => self.eos = value.number().tensor("eos_id")? as i32,
                _ => {}
            }
        }
        Ok(())
    }
}

impl<'a> Normalizer<'a> {
    fn read(&mut self, bytes: &'a [u8]) -> Result<()> {
        for field in MessageFields::of(bytes) {
            match field? {
                (2, value) => self.charsmap = value.bytes().tensor("precompiled_charsmap")?,
                (3, value) => self.add_dummy_prefix = value.number().tensor("add_dummy_prefix")? != 0,
                (4, value) => self.remove_extra_whitespaces = value.number().tensor("remove_extra_whitespaces")? != 0,
                (5, value) => expect_flag(true, &value).tensor("escape_whitespaces")?,
                _ => {}
            }
        }
        Ok(())
    }
}

/// Refuses a map by which decoded texts would be changed.
fn refuse_denormalizer(bytes: &[u8]) -> Result<()> {
    for field in MessageFields::of(bytes) {
        if let (2, value) = field?
            && !value.bytes()?.is_empty()
        {
            return Err(
                Error::unsupported("found a map for decoded texts, expected none").tensor("precompiled_charsmap")
            );
        }
    }
    Ok(())
}

/// Refuses a flag with another value than the only supported one.
fn expect_flag(expected: bool, value: &Value<'_>) -> Result<()> {
    match value.number()? != 0 {
        found if found == expected => Ok(()),
        found => Err(Error::unsupported(format!("found {found}, expected {expected}"))),
    }
}

fn wrong_kind(expected: &str, found: &Value<'_>) -> Error {
    let found = match found {
        Value::Number(_) => "a number",
        Value::Word(_) => "a value of 4 bytes",
        Value::DoubleWord => "a value of 8 bytes",
        Value::Bytes(_) => "bytes",
    };
    Error::corrupt(format!("found {found}, expected {expected}"))
}

impl<'a> Value<'a> {
    fn number(&self) -> Result<u64> {
        match self {
            Value::Number(number) => Ok(*number),
            other => Err(wrong_kind("a number", other)),
        }
    }

    fn float(&self) -> Result<f32> {
        let float = match self {
            Value::Word(word) => f32::from_le_bytes(*word),
            other => return Err(wrong_kind("a value of 4 bytes", other)),
        };
        match float.is_finite() {
            true => Ok(float),
            false => Err(Error::corrupt(format!("found {float}, expected a finite number"))),
        }
    }

    fn bytes(&self) -> Result<&'a [u8]> {
        match self {
            Value::Bytes(bytes) => Ok(bytes),
            other => Err(wrong_kind("bytes", other)),
        }
    }

    fn text(&self) -> Result<&'a str> {
        std::str::from_utf8(self.bytes()?)
            .map_err(|e| Error::corrupt(format!("found bytes that are not UTF-8: {e}, expected a text")))
    }
}

/// The fields of a message, in the order of the file.
struct MessageFields<'a> {
    rest: &'a [u8],
}

impl<'a> MessageFields<'a> {
    fn of(message: &'a [u8]) -> MessageFields<'a> {
        MessageFields { rest: message }
    }

    /// Reads a number of up to 64 bits: 7 bits per byte, the lowest first; the highest bit marks that more follow.
    fn number(&mut self) -> Result<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let [byte] = self.take::<1>()?;
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            number |= bits << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(Error::corrupt("found a number of more than 64 bits"))
    }

    fn take<const LENGTH: usize>(&mut self) -> Result<[u8; LENGTH]> {
        let (word, rest) = self.rest.split_first_chunk::<LENGTH>().ok_or_else(|| self.ends_early(LENGTH as u64))?;
        self.rest = rest;
        Ok(*word)
    }

    fn ends_early(&self, needed: u64) -> Error {
        Error::corrupt(format!("found {} bytes at the end of a message, expected {needed}", self.rest.len()))
    }

    fn field(&mut self) -> Result<(u64, Value<'a>)> {
        let tag = self.number()?;
        let value = match tag & 7 {
            0 => Value::Number(self.number()?),
            1 => self.take::<8>().map(|_| Value::DoubleWord)?,
            2 => {
                let length = self.number()?;
                let at = usize::try_from(length).map_err(|_| self.ends_early(length))?;
                let (bytes, rest) = self.rest.split_at_checked(at).ok_or_else(|| self.ends_early(length))?;
                self.rest = rest;
                Value::Bytes(bytes)
            }
            5 => Value::Word(self.take()?),
            kind => return Err(Error::corrupt(format!("found a field of kind {kind}, expected 0, 1, 2 or 5"))),
        };
        Ok((tag >> 3, value))
    }
}

impl<'a> Iterator for MessageFields<'a> {
    type Item = Result<(u64, Value<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.rest = &[];
        }
        Some(field)
    }
}
