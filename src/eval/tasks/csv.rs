//! Reader of comma-separated values (RFC 4180): fields may be quoted, and quoted fields may contain commas, line breaks
//! and doubled quotes.

use crate::error::{Error, Result};

/// Largest number of fields of a record; questions have six.
const FIELDS: usize = 64;

/// Record of a file.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct CsvRecord {
    /// Line on which the record begins, from 1.
    pub line: usize,
    /// Fields without their quotes.
    pub fields: Vec<String>,
}

/// Divides a text into records. Blank lines are skipped.
///
/// # Errors
/// A quote is not closed, text follows a closing quote, or a record has too many fields; the error names the line.
pub(super) fn records(text: &str) -> Result<Vec<CsvRecord>> {
    let mut reader = CsvReader { rest: text.strip_prefix('\u{feff}').unwrap_or(text), line: 1 };
    let mut records = Vec::new();
    while let Some(record) = reader.record()? {
        records.push(record);
    }
    Ok(records)
}

/// Returns the first record of a text.
///
/// # Errors
/// The same as those of [`records`].
pub(super) fn first(text: &str) -> Result<Option<CsvRecord>> {
    CsvReader { rest: text.strip_prefix('\u{feff}').unwrap_or(text), line: 1 }.record()
}

/// Text that is not read yet.
struct CsvReader<'a> {
    rest: &'a str,
    line: usize,
}

/// Character behind a field.
#[derive(PartialEq)]
enum FieldEnd {
    Comma,
    Line,
}

impl CsvReader<'_> {
    fn record(&mut self) -> Result<Option<CsvRecord>> {
        while let Some(rest) = self.rest.strip_prefix("\r\n").or_else(|| self.rest.strip_prefix('\n')) {
            self.rest = rest;
            self.line += 1;
        }
        if self.rest.is_empty() {
            return Ok(None);
        }
        let (line, mut fields) = (self.line, Vec::new());
        loop {
            let (field, end) = self.field(line)?;
            fields.push(field);
            if end == FieldEnd::Line {
                return Ok(Some(CsvRecord { line, fields }));
            }
            if fields.len() == FIELDS {
                let found = format!("found more than {FIELDS} fields, expected a record of fewer");
                return Err(Error::corrupt(found).tensor(format!("line {line}")));
            }
        }
    }

    /// Reads a field of the record that begins on line `line`, and the character behind it.
    fn field(&mut self, line: usize) -> Result<(String, FieldEnd)> {
        let field = match self.rest.strip_prefix('"') {
            Some(quoted) => {
                self.rest = quoted;
                self.quoted(line)?
            }
            None => {
                let end = self.rest.find([',', '\n']).unwrap_or(self.rest.len());
                let (field, rest) = self.rest.split_at(end);
                self.rest = rest;
                field.strip_suffix('\r').filter(|_| !rest.starts_with(',')).unwrap_or(field).to_string()
            }
        };
        if let Some(rest) = self.rest.strip_prefix(',') {
            self.rest = rest;
            return Ok((field, FieldEnd::Comma));
        }
        let rest = self.rest.strip_prefix('\r').unwrap_or(self.rest);
        if let Some(rest) = rest.strip_prefix('\n') {
            self.rest = rest;
            self.line += 1;
        } else if rest.is_empty() {
            self.rest = rest;
        } else {
            let found = "found text behind a closing quote, expected a comma or the end of the line";
            return Err(Error::corrupt(found).tensor(format!("line {line}")));
        }
        Ok((field, FieldEnd::Line))
    }

    /// Reads the part of a field behind its opening quote, up to the closing one.
    fn quoted(&mut self, line: usize) -> Result<String> {
        let mut field = String::new();
        loop {
            let Some((part, rest)) = self.rest.split_once('"') else {
                return Err(Error::corrupt("found a quote that is not closed").tensor(format!("line {line}")));
            };
            field.push_str(part);
            self.line += part.matches('\n').count();
            self.rest = rest;
            match rest.strip_prefix('"') {
                Some(rest) => {
                    field.push('"');
                    self.rest = rest;
                }
                None => return Ok(field),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> Vec<(usize, Vec<String>)> {
        records(text).unwrap().into_iter().map(|record| (record.line, record.fields)).collect()
    }

    #[test]
    fn quoted_fields_hold_commas_quotes_and_line_breaks() {
        let text = "\u{feff}a,\"b, \"\"c\"\"\",\r\n\n\"d\ne\",f\n,\"\"";
        let expected = [(1, vec!["a", "b, \"c\"", ""]), (3, vec!["d\ne", "f"]), (5, vec!["", ""])];
        let expected: Vec<(usize, Vec<String>)> =
            expected.into_iter().map(|(n, f)| (n, f.into_iter().map(String::from).collect())).collect();
        assert_eq!(fields(text), expected);
        assert_eq!(first(text).unwrap().unwrap().fields.len(), 3);
        assert!(fields("").is_empty() && fields("\n\r\n").is_empty());
        assert_eq!(fields("a\r,b")[0].1, ["a\r", "b"]);
        assert_eq!(fields("a\"b,c")[0].1, ["a\"b", "c"]);
    }

    #[test]
    fn broken_records_name_their_line() {
        let cases = [
            ("a\n\"b", "line 2: found a quote that is not closed"),
            ("\"a\"b,c", "line 1: found text behind a closing quote"),
            (&format!("\n{}", ",".repeat(70)), "line 2: found more than 64 fields"),
        ];
        for (text, expected) in cases {
            let found = records(text).unwrap_err().to_string();
            assert!(found.contains(expected), "{found}");
        }
    }
}
