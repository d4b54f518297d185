//! Values as Python prints them, for templates that print an object: `{'a': 1e+22, 'b': [True, None], 'c': 'x\u2028'}`.

use super::jinja::{Counted, Result};
use super::tojson::number;
use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Error, ErrorKind, State};
use regex::Regex;
use std::io::Write;
use std::sync::LazyLock;

/// Largest number of values within values.
const DEPTH: usize = 256;

/// Characters that Python's `repr` escapes: all but letters, marks, numbers, punctuation, symbols, and the space.
static ESCAPED: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"[\p{C}\p{Z}--\ ]").expect("a constant pattern"));

/// Returns what Python's `str` returns.
pub(super) fn text(state: &State, value: &Value) -> Result<String> {
    match value.kind() {
        ValueKind::Number => Ok(shown_number(value)),
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            let mut out = Counted { text: Vec::new(), state };
            let written = representation(value, 0, &mut out);
            // An error because of too many steps takes precedence over the write error that it caused.
            state.consume_fuel(0)?;
            written?;
            Ok(String::from_utf8_lossy(&out.text).into_owned())
        }
        _ => Ok(value.to_string()),
    }
}

fn shown_number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() && float.is_nan() => "nan".into(),
        Ok(float) if !value.is_integer() && float.is_infinite() => if float > 0.0 { "inf" } else { "-inf" }.into(),
        _ => number(value),
    }
}

fn failed(error: std::io::Error) -> Error {
    Error::new(ErrorKind::InvalidOperation, error.to_string())
}

/// Writes what Python's `repr` returns.
fn representation(value: &Value, depth: usize, out: &mut Counted) -> Result<()> {
    if depth > DEPTH {
        let found = format!("found more than {DEPTH} values within values, which cannot be printed");
        return Err(Error::new(ErrorKind::InvalidOperation, found));
    }
    match value.kind() {
        ValueKind::String => quoted(value.as_str().unwrap_or_default(), out),
        ValueKind::Number => out.write_all(shown_number(value).as_bytes()).map_err(failed),
        ValueKind::Undefined => out.write_all(b"Undefined").map_err(failed),
        ValueKind::Map => {
            out.write_all(b"{").map_err(failed)?;
            for (i, key) in value.try_iter()?.enumerate() {
                separated(i, out)?;
                representation(&key, depth + 1, out)?;
                out.write_all(b": ").map_err(failed)?;
                representation(&value.get_item(&key)?, depth + 1, out)?;
            }
            out.write_all(b"}").map_err(failed)
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let is_tuple = value.downcast_object_ref::<Tuple>().is_some();
            let mut count = 0;
            out.write_all(if is_tuple { b"(" } else { b"[" }).map_err(failed)?;
            for item in value.try_iter()? {
                separated(count, out)?;
                representation(&item, depth + 1, out)?;
                count += 1;
            }
            let end: &[u8] = match (is_tuple, count) {
                (true, 1) => b",)",
                (true, _) => b")",
                (false, _) => b"]",
            };
            out.write_all(end).map_err(failed)
        }
        _ => write!(out, "{value}").map_err(failed),
    }
}

fn separated(index: usize, out: &mut Counted) -> Result<()> {
    if index > 0 { out.write_all(b", ").map_err(failed) } else { Ok(()) }
}

/// Writes a text between quotation marks: single ones, unless it has only such marks itself.
fn quoted(text: &str, out: &mut Counted) -> Result<()> {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut shown = String::with_capacity(text.len() + 2);
    shown.push(quote);
    let mut buffer = [0; 4];
    for c in text.chars() {
        let code = u32::from(c);
        match c {
            '\\' => shown.push_str("\\\\"),
            '\n' => shown.push_str("\\n"),
            '\r' => shown.push_str("\\r"),
            '\t' => shown.push_str("\\t"),
            c if c == quote => shown.extend(['\\', c]),
            ' '..='~' => shown.push(c),
            c if !ESCAPED.is_match(c.encode_utf8(&mut buffer)) => shown.push(c),
            _ if code <= 0xff => shown.push_str(&format!("\\x{code:02x}")),
            _ if code <= 0xffff => shown.push_str(&format!("\\u{code:04x}")),
            _ => shown.push_str(&format!("\\U{code:08x}")),
        }
    }
    shown.push(quote);
    out.write_all(shown.as_bytes()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use crate::generate::text::{ChatTemplate, RenderOptions};
    use serde_json::json;

    fn render(source: &str) -> String {
        let values = json!({"o": {"a": 1e22, "b": [2.5e-7, 1e16, -0.0, 1.0, 1e15], "s": "x\u{2028}y"},
                            "t": ["it's", "\"", "'\"", "\u{7f}\\\n\t", "é\u{ad}\u{e000}\u{1f600}\u{10ffff} ", "\u{a0}"],
                            "n": {"k": {"l": [true, null, {}]}, "m": []}, "w": "one, two-three  4"});
        let variables = values.as_object().unwrap().clone();
        let options = RenderOptions { variables, ..RenderOptions::default() };
        ChatTemplate::from_source(source).render_with(&[], &options, 9999).unwrap_or_else(|e| e.to_string())
    }

    #[test]
    fn objects_are_printed_as_python_prints_them() {
        let cases = [
            ("{{ o }}", r"{'a': 1e+22, 'b': [2.5e-07, 1e+16, -0.0, 1.0, 1000000000000000.0], 's': 'x\u2028y'}"),
            ("{{ t }}", r#"["it's", '"', '\'"', '\x7f\\\n\t', 'é\xad\ue000😀\U0010ffff ', '\xa0']"#),
            ("{{ n }}", "{'k': {'l': [True, None, {}]}, 'm': []}"),
            ("{{ (1, 'a') }}{{ (1,) }}{{ () }}", "(1, 'a')(1,)()"),
            ("{{ [1e999, -1e999] }}{{ 1e999 }}", "[inf, -inf]inf"),
            ("{{ t[0] }}{{ t[0] | string }}{{ n.m | string }}", "it'sit's[]"),
            ("{{ 1e22 }} {{ 2.5e-7 }} {{ 0.1 }} {{ 3 }}", "1e+22 2.5e-07 0.1 3"),
            ("{{ [undefined_name] }}", "[Undefined]"),
        ];
        for (source, expected) in cases {
            assert_eq!(render(source), expected, "{source}");
        }
    }

    #[test]
    fn filters_and_tests_of_jinja_are_known() {
        let cases = [
            ("{{ 'ab' | center(5) }}|{{ 'ab' | center(6) }}|", "  ab |  ab  |"),
            ("{{ w | wordcount }}", "4"),
            ("{{ range is callable }}{{ w is callable }}{{ n is callable }}", "TrueFalseFalse"),
            ("{% macro m() %}{% endmacro %}{{ m is callable }}", "True"),
            ("{{ 'foo bar baz qux' | truncate(9) }}", "foo..."),
            ("{{ 'foo bar baz qux' | truncate(9, true) }}", "foo ba..."),
            ("{{ 'foo bar baz qux' | truncate(11) }}", "foo bar baz qux"),
            ("{{ 'foo bar baz qux' | truncate(length=11, leeway=0, end='!') }}", "foo bar!"),
            ("{{ 'one two three' | wordwrap(7) }}", "one two\nthree"),
            ("{{ '<p>a  <b>b</b></p>' | striptags }}", "a b"),
            ("{{ 'a b/ü' | urlencode }}", "a%20b/%C3%BC"),
            ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}", "aba"),
            ("{% set j = joiner('; ') %}{{ j() }}a{{ j() }}b", "a; b"),
        ];
        for (source, expected) in cases {
            assert_eq!(render(source), expected, "{source}");
        }
        assert!(render("{{ w | xmlattr }}").contains("xmlattr"));
    }
}
