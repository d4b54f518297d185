//! Reads prompts from a file in one of three forms, or returns ten built-in ones.
//!
//! - plain text: one prompt per line, blank lines skipped; `\n`, `\t` and `\\` are a line break, a tab and a backslash
//! - a JSON array of strings, when the file begins with `[`
//! - JSON lines, each a string or an object with `prompt` or `text`, when the file begins with `"` or `{`

use crate::error::{Context, Error, Result};
use serde_json::Value;
use std::path::Path;

/// Prompts for measurements, written for this project: `manifests/prompts_10.txt`.
const BUILT_IN: &str = include_str!("../../manifests/prompts_10.txt");
/// Name of the file of the built-in prompts in older guides; [`read`] accepts it.
const MISSPELT: &str = "prompts_10..txt";
/// Largest accepted prompts file in bytes.
const FILE_LIMIT: u64 = 256 << 20;

/// Description of the three forms for `--help`.
pub const FILE_HELP: &str = "\
A prompts file holds one prompt per line (blank lines are skipped; \\n, \\t and \\\\ mean line break, tab and backslash),
or, if it begins with `[`, a JSON array of strings,
or, if it begins with `\"` or `{`, JSON lines: strings or objects with `prompt`.";

/// Returns the built-in prompts.
pub fn built_in() -> Vec<String> {
    lines(BUILT_IN)
}

/// Reads the prompts of a file.
///
/// # Errors
/// The file cannot be read, is no text, or holds no prompt.
pub fn read(path: &Path) -> Result<Vec<String>> {
    if path.file_name().is_some_and(|name| name == MISSPELT) && !path.exists() {
        return Ok(built_in());
    }
    let size = std::fs::metadata(path).at(path)?.len();
    if size > FILE_LIMIT {
        return Err(Error::corrupt(format!("found {size} bytes, expected at most {FILE_LIMIT}")).at(path));
    }
    let text = std::fs::read_to_string(path).at(path)?;
    let prompts = parse(text.trim_start_matches('\u{feff}')).at(path)?;
    if prompts.is_empty() { Err(Error::corrupt("found no prompt").at(path)) } else { Ok(prompts) }
}

fn parse(text: &str) -> Result<Vec<String>> {
    match text.trim_start().chars().next() {
        Some('[') => {
            let values: Vec<Value> = serde_json::from_str(text).map_err(no_json)?;
            values.iter().enumerate().map(|(i, value)| prompt_of(value).tensor(&format!("entry {i}"))).collect()
        }
        Some('"' | '{') => {
            let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
            let parsed = lines.map(|(i, line)| {
                let value = serde_json::from_str(line).map_err(no_json);
                value.and_then(|value| prompt_of(&value)).tensor(&format!("line {}", i + 1))
            });
            parsed.collect()
        }
        _ => Ok(lines(text)),
    }
}

fn no_json(e: serde_json::Error) -> Error {
    Error::corrupt(format!("not JSON: {e}"))
}

fn prompt_of(value: &Value) -> Result<String> {
    if let Some(object) = value.as_object()
        && let Some(name) = object.keys().find(|name| !["prompt", "text"].contains(&name.as_str()))
    {
        return Err(Error::corrupt(format!("found the field `{name}`, expected `prompt` or `text`")));
    }
    let text = value.as_str().or_else(|| value["prompt"].as_str()).or_else(|| value["text"].as_str());
    text.map(str::to_string).ok_or_else(|| Error::corrupt("expected a string or an object with `prompt`"))
}

fn lines(text: &str) -> Vec<String> {
    text.lines().filter(|line| !line.trim().is_empty()).map(unescape).collect()
}

fn unescape(line: &str) -> String {
    let mut out = String::new();
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        let next = if c == '\\' { chars.clone().next() } else { None };
        let meant = match next {
            Some('n') => '\n',
            Some('t') => '\t',
            Some('\\') => '\\',
            _ => {
                out.push(c);
                continue;
            }
        };
        chars.next();
        out.push(meant);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_gives_its_prompts() {
        let cases = [
            ("one\n\n  two \r\n", vec!["one", "  two "]),
            ("a\\nb\\tc\\\\n \\x\\", vec!["a\nb\tc\\n \\x\\"]),
            ("[\"a\", \"b\\nc\"]", vec!["a", "b\nc"]),
            ("\"a\"\n{\"prompt\":\"b\"}\n\n{\"text\":\"c\"}\n", vec!["a", "b", "c"]),
        ];
        for (text, expected) in cases {
            assert_eq!(parse(text).unwrap(), expected);
        }
        assert!(parse("[1]").unwrap_err().to_string().contains("entry 0"));
        assert!(parse("{\"a\":1}").unwrap_err().to_string().contains("line 1"));
    }

    #[test]
    fn there_are_ten_built_in_prompts() {
        assert_eq!(built_in().len(), 10);
    }
}
