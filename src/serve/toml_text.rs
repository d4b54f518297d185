//! Access to TOML files with errors that name the line.
//!
//! Errors never show a value: a key file may contain a plain key by mistake, and errors go to logs.

use crate::error::{Error, Result};
use crate::similar::nearest;
use std::ops::RangeInclusive;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Parsed file.
pub(super) struct Document<'a> {
    text: &'a str,
    root: Spanned<DeTable<'a>>,
}

/// Table with the text that it comes from.
#[derive(Clone, Copy)]
pub(super) struct Table<'a> {
    text: &'a str,
    table: &'a DeTable<'a>,
    at: usize,
}

/// Name and value of a line.
#[derive(Clone, Copy)]
pub(super) struct Field<'a> {
    pub name: &'a str,
    pub value: &'a DeValue<'a>,
    text: &'a str,
    at: usize,
}

impl<'a> Document<'a> {
    /// Parses a text.
    ///
    /// # Errors
    /// The text is not UTF-8 or not TOML.
    pub fn parse(bytes: &'a [u8]) -> Result<Document<'a>> {
        let text = std::str::from_utf8(bytes)
            .map_err(|e| Error::usage(format!("found invalid UTF-8 at byte offset {}", e.valid_up_to())))?;
        let root = DeTable::parse(text).map_err(|e| {
            let message = e.message().lines().collect::<Vec<_>>().join("; ");
            error_at(text, e.span().map_or(0, |span| span.start), &message)
        })?;
        Ok(Document { text, root })
    }

    /// Returns the table of the whole file.
    pub fn table(&'a self) -> Table<'a> {
        Table { text: self.text, table: self.root.get_ref(), at: 0 }
    }
}

impl<'a> Table<'a> {
    /// Returns the fields in the order of their names.
    pub fn fields(self) -> impl Iterator<Item = Field<'a>> {
        let field = move |(name, value): (&'a Spanned<_>, &'a Spanned<DeValue<'a>>)| {
            let name: &Spanned<toml::de::DeString<'a>> = name;
            Field { name: name.get_ref(), value: value.get_ref(), text: self.text, at: name.span().start }
        };
        self.table.iter().map(field)
    }

    /// Builds an error for this table.
    pub fn error(self, message: &str) -> Error {
        error_at(self.text, self.at, message)
    }
}

impl<'a> Field<'a> {
    /// Builds an error for this field.
    pub fn error(&self, message: &str) -> Error {
        error_at(self.text, self.at, &format!("`{}`: {message}", self.name))
    }

    /// Builds the error for a name that is none of `known`.
    pub fn unknown(&self, known: &[&str]) -> Error {
        let hint = nearest(self.name, known.iter().copied());
        let hint = hint.map_or_else(|| known.join(", "), |name| format!("perhaps `{name}`"));
        error_at(self.text, self.at, &format!("found the unknown name `{}`, expected {hint}", self.name))
    }

    /// Builds the error for a value of another type.
    pub fn expected(&self, expected: &str) -> Error {
        let found = type_name(self.value);
        self.error(&format!("found {found}, expected {expected}"))
    }

    /// Returns a text.
    pub fn string(&self) -> Result<&'a str> {
        self.value.as_str().ok_or_else(|| self.expected("a text"))
    }

    /// Returns a truth value.
    pub fn boolean(&self) -> Result<bool> {
        self.value.as_bool().ok_or_else(|| self.expected("true or false"))
    }

    /// Returns a whole number within a range.
    pub fn integer(&self, range: RangeInclusive<i64>) -> Result<i64> {
        let (least, most) = (range.start(), range.end());
        let number = integer(self.value);
        number.filter(|number| range.contains(number)).ok_or_else(|| match self.value {
            DeValue::Integer(_) => self.error(&format!("the number is out of range, expected {least} to {most}")),
            _ => self.expected(&format!("a whole number, {least} to {most}")),
        })
    }

    /// Returns a number within a range, whole or not.
    pub fn number(&self, range: RangeInclusive<f64>) -> Result<f64> {
        let number = match self.value {
            DeValue::Float(float) => float.as_str().parse().ok(),
            other => integer(other).map(|n| n as f64),
        };
        number.filter(|number| range.contains(number)).ok_or_else(|| {
            let (least, most) = (range.start(), range.end());
            self.expected(&format!("a number from {least} to {most}"))
        })
    }

    /// Returns a list of texts, at most `most` of them.
    pub fn strings(&self, most: usize) -> Result<Vec<&'a str>> {
        let list = self.value.as_array().ok_or_else(|| self.expected("a list of texts"))?;
        if list.len() > most {
            return Err(self.error(&format!("found {} values, expected at most {most}", list.len())));
        }
        let texts = list.iter().map(|value| value.get_ref().as_str());
        texts.collect::<Option<_>>().ok_or_else(|| self.error("found another value in the list, expected texts"))
    }

    /// Returns the tables of `[[name]]`, at most `most` of them.
    pub fn tables(&self, most: usize) -> Result<Vec<Table<'a>>> {
        let wanted = format!("tables that begin with a line [[{}]]", self.name);
        let list = self.value.as_array().ok_or_else(|| self.expected(&wanted))?;
        if list.len() > most {
            return Err(self.error(&format!("found {} tables, expected at most {most}", list.len())));
        }
        let table = |value: &'a Spanned<DeValue<'a>>| {
            let table = value.get_ref().as_table()?;
            Some(Table { text: self.text, table, at: value.span().start })
        };
        list.iter().map(table).collect::<Option<_>>().ok_or_else(|| self.expected(&wanted))
    }
}

/// Returns a whole number of any radix.
fn integer(value: &DeValue<'_>) -> Option<i64> {
    let DeValue::Integer(integer) = value else { return None };
    i64::from_str_radix(integer.as_str(), integer.radix()).ok()
}

/// Returns the name of the type of a value for errors.
fn type_name(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a text",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "a truth value",
        DeValue::Datetime(_) => "a date or time",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// Builds an error that names the line of a byte offset.
fn error_at(text: &str, at: usize, message: &str) -> Error {
    let before = &text.as_bytes()[..at.min(text.len())];
    let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
    Error::usage(format!("line {line}: {message}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_line_and_no_value() {
        let text = b"a = 1\nport = \"sk-secret\"\n[[list]]\n[[list]]\nx = 0xff\ny = [\"a\", 1]\nz = 2.5\n";
        let document = Document::parse(text).unwrap();
        let fields: Vec<_> = document.table().fields().collect();
        let field = |name: &str| fields.iter().find(|field| field.name == name).unwrap();
        let error = field("port").integer(0..=9).unwrap_err().to_string();
        assert_eq!(error, "line 2: `port`: found a text, expected a whole number, 0 to 9");
        assert_eq!(field("a").integer(1..=1).unwrap(), 1);
        assert!(field("a").integer(2..=3).unwrap_err().to_string().contains("out of range"));
        let tables = field("list").tables(2).unwrap();
        assert!(field("list").tables(1).is_err() && field("a").tables(9).is_err());
        assert_eq!(tables[1].error("x").to_string(), "line 4: x");
        let inner: Vec<_> = tables[1].fields().collect();
        assert_eq!(inner[0].integer(0..=255).unwrap(), 255);
        assert_eq!(inner[1].strings(2).unwrap_err().to_string().split(':').next(), Some("line 6"));
        assert_eq!(inner[2].number(0.0..=3.0).unwrap(), 2.5);
        let error = Document::parse(b"a = 1\nb = \"sk-secret").map(drop).unwrap_err().to_string();
        assert!(error.starts_with("line 2: ") && !error.contains("secret"), "{error}");
        assert!(Document::parse(b"a = \xff").is_err() && Document::parse(b"a = 1\na = 2").is_err());
    }

    #[test]
    fn an_unknown_name_is_answered_with_a_similar_one() {
        let document = Document::parse(b"prot = 1").unwrap();
        let field = document.table().fields().next().unwrap();
        let error = field.unknown(&["port", "host"]).to_string();
        assert_eq!(error, "line 1: found the unknown name `prot`, expected perhaps `port`");
        assert_eq!(field.unknown(&["x", "y"]).to_string().split("expected ").nth(1), Some("x, y"));
    }
}
