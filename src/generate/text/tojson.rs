//! The filter `tojson` of chat templates: text as that of Python's `json.dumps`, whose options it has.

use super::jinja::{Counted, Result};
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use std::io::Write;

/// Largest number of values within values.
const DEPTH: usize = 256;
/// Largest indent of a level.
const INDENT: usize = 16;

/// Options of the filter.
struct Style {
    ascii: bool,
    indent: Option<usize>,
    /// Texts between items, and between a key and its value.
    separators: [String; 2],
    sorted: bool,
}

/// Formats a value; the arguments are `ensure_ascii`, `indent`, `separators` and `sort_keys`, by position or name.
pub(super) fn tojson(state: &State, value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<Value> {
    let style = Style::read(&positional, &named)?;
    let mut out = Counted { text: Vec::new(), state };
    let written = style.value(value, 0, &mut out);
    // An error because of too many steps takes precedence over the write error that it caused.
    state.consume_fuel(0)?;
    written?;
    Ok(Value::from_safe_string(String::from_utf8_lossy(&out.text).into_owned()))
}

fn refused(why: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson fails, {why}"))
}

fn failed(error: std::io::Error) -> Error {
    refused(error.to_string())
}

impl Style {
    fn read(positional: &[Value], named: &Kwargs) -> Result<Style> {
        if positional.len() > 4 {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
        let option = |position: usize, name: &str| -> Result<Option<Value>> {
            let named: Option<Value> = named.get(name)?;
            Ok(positional.get(position).cloned().or(named).filter(|value| !value.is_none()))
        };
        let ascii = option(0, "ensure_ascii")?.is_some_and(|value| value.is_true());
        let indent = option(1, "indent")?.map(usize::try_from).transpose()?;
        if let Some(width) = indent.filter(|width| *width > INDENT) {
            return Err(refused(format!("found an indent of {width}, expected at most {INDENT}")));
        }
        let separators = match option(2, "separators")? {
            None => [if indent.is_some() { "," } else { ", " }, ": "].map(String::from),
            Some(pair) => {
                let texts: Vec<String> = pair.try_iter()?.map(|text| text.to_string()).collect();
                texts.try_into().map_err(|_| refused("found other separators than two".into()))?
            }
        };
        let sorted = option(3, "sort_keys")?.is_some_and(|value| value.is_true());
        named.assert_all_used()?;
        Ok(Style { ascii, indent, separators, sorted })
    }

    fn value(&self, value: &Value, depth: usize, out: &mut Counted) -> Result<()> {
        if depth > DEPTH {
            return Err(refused(format!("found more than {DEPTH} values within values")));
        }
        match value.kind() {
            ValueKind::None => out.write_all(b"null").map_err(failed),
            ValueKind::Bool => write!(out, "{}", value.is_true()).map_err(failed),
            ValueKind::Number => out.write_all(number(value).as_bytes()).map_err(failed),
            ValueKind::String => self.text(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item));
                self.list(b"[]", items, depth, out)
            }
            ValueKind::Map => {
                let mut entries: Vec<(Option<String>, Value)> = Vec::new();
                for key in value.try_iter()? {
                    entries.push((Some(key_text(&key)?), value.get_item(&key)?));
                }
                if self.sorted {
                    entries.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.list(b"{}", entries.into_iter(), depth, out)
            }
            other => Err(refused(format!("found a value of type {other}"))),
        }
    }

    /// Writes a list, or an object if the items have keys.
    fn list(
        &self,
        brackets: &[u8; 2],
        items: impl Iterator<Item = (Option<String>, Value)>,
        depth: usize,
        out: &mut Counted,
    ) -> Result<()> {
        out.write_all(&brackets[..1]).map_err(failed)?;
        let mut is_empty = true;
        for (key, item) in items {
            if !is_empty {
                out.write_all(self.separators[0].as_bytes()).map_err(failed)?;
            }
            is_empty = false;
            self.line(depth + 1, out)?;
            if let Some(key) = key {
                self.text(&key, out)?;
                out.write_all(self.separators[1].as_bytes()).map_err(failed)?;
            }
            self.value(&item, depth + 1, out)?;
        }
        if !is_empty {
            self.line(depth, out)?;
        }
        out.write_all(&brackets[1..]).map_err(failed)
    }

    /// Begins a line of the level, if there are lines.
    fn line(&self, depth: usize, out: &mut Counted) -> Result<()> {
        match self.indent {
            Some(width) => write!(out, "\n{}", " ".repeat(width * depth)).map_err(failed),
            None => Ok(()),
        }
    }

    fn text(&self, text: &str, out: &mut Counted) -> Result<()> {
        let mut quoted = String::with_capacity(text.len() + 2);
        quoted.push('"');
        for c in text.chars() {
            match c {
                '"' => quoted.push_str("\\\""),
                '\\' => quoted.push_str("\\\\"),
                '\n' => quoted.push_str("\\n"),
                '\r' => quoted.push_str("\\r"),
                '\t' => quoted.push_str("\\t"),
                '\u{8}' => quoted.push_str("\\b"),
                '\u{c}' => quoted.push_str("\\f"),
                c if c < ' ' || self.ascii && !(' '..='~').contains(&c) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        quoted.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => quoted.push(c),
            }
        }
        quoted.push('"');
        out.write_all(quoted.as_bytes()).map_err(failed)
    }
}

/// Returns the text of a key.
fn key_text(key: &Value) -> Result<String> {
    Ok(match key.kind() {
        ValueKind::String => key.to_string(),
        ValueKind::None => "null".into(),
        ValueKind::Bool => key.is_true().to_string(),
        ValueKind::Number => number(key),
        other => return Err(refused(format!("found a key of type {other}"))),
    })
}

/// Returns a number as Python writes it: a float has the fewest digits that determine it, with an exponent if it is
/// below 10^-4 or at least 10^16.
pub(super) fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else { return value.to_string() };
    if !float.is_finite() {
        return if float.is_nan() {
            "NaN"
        } else if float > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .into();
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(exponent) if float != 0.0 && !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{float:?}"),
    }
}
