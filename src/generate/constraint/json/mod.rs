//! JSON schemas: from a schema to the rules of a grammar of the texts that are valid against it.
//!
//! [`read`] and [`typed`] turn a schema into nodes that say what is allowed, [`merge`] intersects them where
//! several schemas apply to one value, and [`write`] writes them as rules. Every keyword is enforced, or is an
//! annotation such as `title`, or is refused by name; where the client asked for no more than a hint, it is left
//! out and its place is noted instead.
//!
//! All spellings of a value are allowed, such as the escapes of a text. What a schema does not determine and a text
//! must have is decided here: properties come in the order of the schema, and white space is bounded.

mod formats;
mod keywords;
mod merge;
mod multiples;
mod node;
mod read;
mod regexes;
#[cfg(test)]
mod tests;
mod text;
mod typed;
mod write;

use crate::error::{Error, Result};
use crate::strict_json;
use serde_json::Value;

/// Largest accepted size of a schema in bytes.
const BYTES: usize = 256 << 10;
/// Largest accepted depth of subschemas, references included.
pub(super) const DEPTH: usize = 256;

/// Rules for the application of a schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadOptions {
    /// Largest depth of subschemas, references included, which the stack must hold.
    pub depth: usize,
    /// Whether what cannot be enforced is left out.
    pub lenient: bool,
    /// Whether objects that list properties have no others, unless the schema says so.
    pub closed: bool,
}

impl ReadOptions {
    /// Returns the options that enforce everything, and leave objects as open as the schema says.
    pub fn strict(depth: usize) -> ReadOptions {
        ReadOptions { depth, lenient: false, closed: false }
    }
}

/// Rules of a grammar, and the places of what they do not enforce.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaRules {
    /// Grammar of the valid texts.
    pub lark: String,
    /// JSON pointers to what was left out, such as `#/properties/a/uniqueItems`.
    pub ignored: Vec<String>,
}

impl SchemaRules {
    /// Returns the rules as a part of another grammar.
    pub fn embedded(&self) -> String {
        format!("%lark {{\n{}}}", self.lark)
    }
}

/// Parses a schema.
///
/// # Errors
/// The text is too large, or is not JSON.
pub(super) fn parsed(text: &str) -> Result<Value> {
    if text.len() > BYTES {
        return Err(Error::unsupported(format!("JSON schema: found {} bytes, expected at most {BYTES}", text.len())));
    }
    strict_json::parse(text.as_bytes()).map_err(|e| e.tensor("JSON schema"))
}

/// Returns the rules of the texts that are valid against a schema.
///
/// # Errors
/// The schema is too large or allows nothing, or something in it cannot be enforced and is not left out; the error
/// names the place as a JSON pointer.
pub fn rules(schema: &Value, options: ReadOptions) -> Result<SchemaRules> {
    if !schema.is_object() && !schema.is_boolean() {
        return Err(Error::corrupt("JSON schema: found neither an object nor a boolean, expected an object")
            .help("a schema looks like {\"type\": \"object\", \"properties\": …}"));
    }
    let mut reader = read::Reader::new(schema, options);
    let root = reader.whole()?;
    let lark = write::grammar(&root, &reader.defs, options.closed)?;
    Ok(SchemaRules { lark, ignored: reader.ignored })
}
