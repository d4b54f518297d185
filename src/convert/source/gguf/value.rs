//! The metadata of a GGUF file: keys with typed values.

use crate::error::{Error, Result};

/// Type of a number in the metadata; the discriminant is the type number in files.
#[allow(missing_docs)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scalar {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

use Scalar::*;

/// Type number of strings in files.
pub(in crate::convert) const STRING: u32 = 8;
/// Type number of arrays in files.
pub(in crate::convert) const ARRAY: u32 = 9;

impl Scalar {
    /// Returns the type with this number in files.
    pub(super) fn of(id: u32) -> Result<Scalar> {
        let kinds = [U8, I8, U16, I16, U32, I32, F32, Bool, U64, I64, F64];
        let unknown = || Error::corrupt(format!("found value type number {id}, expected 0 to 12"));
        kinds.into_iter().find(|kind| kind.id() == id).ok_or_else(unknown)
    }

    /// Returns the number of the type in files.
    pub(in crate::convert) fn id(self) -> u32 {
        self as u32
    }

    /// Returns the size of one value in bytes.
    pub(in crate::convert) fn size(self) -> usize {
        match self {
            U8 | I8 | Bool => 1,
            U16 | I16 => 2,
            U32 | I32 | F32 => 4,
            U64 | I64 | F64 => 8,
        }
    }
}

/// A number of the metadata, stored as its little-endian bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Number {
    kind: Scalar,
    bytes: [u8; 8],
}

impl Number {
    /// Makes a number from the first `kind.size()` bytes of `raw`.
    pub(super) fn new(kind: Scalar, raw: &[u8]) -> Number {
        let mut bytes = [0; 8];
        bytes[..kind.size()].copy_from_slice(&raw[..kind.size()]);
        Number { kind, bytes }
    }

    /// Returns the type of the number.
    pub(in crate::convert) fn kind(&self) -> Scalar {
        self.kind
    }

    /// Returns the little-endian bytes of the number.
    pub(in crate::convert) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.kind.size()]
    }

    /// Returns the value of a number of any integer type.
    pub fn as_integer(&self) -> Option<i128> {
        let unsigned = u64::from_le_bytes(self.bytes);
        // Number of bits above those of the type; sign extension fills them.
        let spare = 64 - 8 * self.kind.size();
        match self.kind {
            U8 | U16 | U32 | U64 => Some(unsigned.into()),
            I8 | I16 | I32 | I64 => Some(((unsigned << spare) as i64 >> spare).into()),
            F32 | F64 | Bool => None,
        }
    }

    /// Returns the value of a number of any type but bool.
    pub fn as_f64(&self) -> Option<f64> {
        let bits = u64::from_le_bytes(self.bytes);
        match self.kind {
            // The shortest decimal form of the f32 is the number that its writer had: 1e-5, not 9.99999974e-6.
            F32 => f32::from_bits(bits as u32).to_string().parse().ok(),
            F64 => Some(f64::from_bits(bits)),
            _ => self.as_integer().map(|n| n as f64),
        }
    }

    /// Returns the value of a bool.
    pub fn as_bool(&self) -> Option<bool> {
        (self.kind == Bool).then_some(self.bytes[0] != 0)
    }
}

/// Value of a metadata key.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// A number or bool.
    Number(Number),
    /// A string.
    String(String),
    /// A list of strings.
    Strings(Vec<String>),
    /// A list of numbers of one type, packed as in the file.
    Numbers(Scalar, Vec<u8>),
}

impl Value {
    /// Makes a `u32` value.
    pub fn u32(n: u32) -> Value {
        Value::Number(Number::new(U32, &n.to_le_bytes()))
    }

    /// Makes an `f32` value.
    pub fn f32(x: f32) -> Value {
        Value::Number(Number::new(F32, &x.to_le_bytes()))
    }

    /// Makes a bool value.
    pub fn bool(x: bool) -> Value {
        Value::Number(Number::new(Bool, &[u8::from(x)]))
    }

    /// Returns the number, or `None` for strings and lists.
    fn number(&self) -> Option<&Number> {
        match self {
            Value::Number(number) => Some(number),
            _ => None,
        }
    }

    /// Returns the numbers of a list, or `None` for any other value.
    pub fn numbers(&self) -> Option<impl Iterator<Item = Number>> {
        match self {
            Value::Numbers(kind, bytes) => Some(bytes.chunks_exact(kind.size()).map(|raw| Number::new(*kind, raw))),
            _ => None,
        }
    }

    /// Returns the number of elements of a list, or `None` for any other value.
    pub fn list_len(&self) -> Option<usize> {
        match self {
            Value::Strings(list) => Some(list.len()),
            Value::Numbers(kind, bytes) => Some(bytes.len() / kind.size()),
            _ => None,
        }
    }
}

/// All metadata keys of a file in the order of the file.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    /// Indices into `entries`, sorted by key.
    sorted: Vec<u32>,
}

impl Metadata {
    /// Makes the metadata from entries in file order; refuses keys that occur twice.
    pub(in crate::convert) fn new(entries: Vec<(String, Value)>) -> Result<Metadata> {
        let mut sorted: Vec<u32> = (0..entries.len() as u32).collect();
        let key = |i: &u32| entries[*i as usize].0.as_str();
        sorted.sort_unstable_by(|a, b| key(a).cmp(key(b)));
        match sorted.windows(2).find(|pair| key(&pair[0]) == key(&pair[1])) {
            Some(pair) => Err(Error::corrupt("found this key twice").tensor(key(&pair[0]))),
            None => Ok(Metadata { entries, sorted }),
        }
    }

    /// Returns all keys and values in the order of the file.
    pub fn entries(&self) -> &[(String, Value)] {
        &self.entries
    }

    /// Returns the value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let found = self.sorted.binary_search_by(|i| self.entries[*i as usize].0.as_str().cmp(key)).ok()?;
        Some(&self.entries[self.sorted[found] as usize].1)
    }

    fn typed<'a, T>(&'a self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value)
            .map(Some)
            .ok_or_else(|| Error::corrupt(format!("found another type or value, expected {expected}")).tensor(key))
    }

    /// Returns the value of a key that holds a count; `None` when the key is absent.
    pub fn count_opt(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a whole number", |v| usize::try_from(v.number()?.as_integer()?).ok())
    }

    /// Returns the value of a key that holds a finite number; `None` when the key is absent.
    pub fn number_opt(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", |v| v.number()?.as_f64().filter(|x| x.is_finite()))
    }

    /// Returns the value of a key that holds a bool; `None` when the key is absent.
    pub fn flag_opt(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", |v| v.number()?.as_bool())
    }

    /// Returns the value of a key that holds a string; `None` when the key is absent.
    pub fn text_opt(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a text", |v| match v {
            Value::String(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// Returns the value of a key that holds a list of strings; `None` when the key is absent.
    pub fn texts_opt(&self, key: &str) -> Result<Option<&[String]>> {
        self.typed(key, "a list of texts", |v| match v {
            Value::Strings(list) => Some(list.as_slice()),
            _ => None,
        })
    }

    /// Returns the value of a key that holds a list of numbers as f32; `None` when the key is absent.
    pub fn floats_opt(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.typed(key, "a list of numbers", |v| v.numbers()?.map(|n| n.as_f64().map(|x| x as f32)).collect())
    }

    /// Returns the value of a key that holds a list of integers; `None` when the key is absent.
    pub fn integers_opt(&self, key: &str) -> Result<Option<Vec<i64>>> {
        self.typed(key, "a list of whole numbers", |v| {
            v.numbers()?.map(|n| i64::try_from(n.as_integer()?).ok()).collect()
        })
    }

    /// Returns the value of a required key that holds a count.
    pub fn count(&self, key: &str) -> Result<usize> {
        required(key, self.count_opt(key)?)
    }

    /// Returns the value of a required key that holds a string.
    pub fn text(&self, key: &str) -> Result<&str> {
        required(key, self.text_opt(key)?)
    }
}

/// Returns the value of a required key, or an error that names the missing key.
pub(in crate::convert) fn required<T>(key: &str, value: Option<T>) -> Result<T> {
    value.ok_or_else(|| Error::corrupt("missing from the metadata").tensor(key))
}
