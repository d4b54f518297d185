//! Reads prompts from a file in one of three forms, or returns ten built-in ones.
//!
//! - plain text: one prompt per line, blank lines skipped; `\n`, `\t` and `\\` are a line break, a tab and a backslash
//! - a JSON array of strings, when the file begins with `[`
//! - JSON lines, each a string or an object with `prompt` or `text`, when the file begins with `"` or `{`
//!
//! For `iec run`, an object may also have the settings of its request ([`PromptRequest`]).

use super::prompt_request::PromptRequest;
use crate::error::{Context, Error, Result};
use crate::files;
use crate::progress;
use serde_json::Value;
use std::io::{BufRead, Read};
use std::path::Path;

/// Prompts for measurements, written for this project: `manifests/prompts_10.txt`.
const BUILT_IN: &str = include_str!("../../manifests/prompts_10.txt");
/// Names of the file of the built-in prompts in older guides, with the directories in which these look for it; an empty
/// list stands for any. Where there is no such file, [`read`] returns the built-in prompts.
const OLDER_NAMES: [(&str, &[&str]); 2] = [("prompts_10..txt", &[]), ("prompts_10.txt", &["benchmarks", "manifests"])];
/// Largest accepted prompts file in bytes.
const FILE_LIMIT: u64 = 256 << 20;
/// Largest accepted prompt of standard input, or line of a conversation, in bytes.
const PROMPT_LIMIT: u64 = 64 << 20;

/// Description of the three forms for `--help`.
pub const FILE_HELP: &str = "\
A prompts file holds one prompt per line (blank lines are skipped; \\n, \\t and \\\\ mean line break, tab and backslash),
or, if it begins with `[`, a JSON array of strings,
or, if it begins with `\"` or `{`, JSON lines: strings or objects with `prompt`.";

/// Description of the settings of a request for `--help`.
pub const SETTINGS_HELP: &str = "\
An object may also have settings of its request, which replace those of the options: max_new, stop, seed, priority
(lower values are computed first), temperature, top_k, top_p, min_p, typical_p, repeat_penalty, presence_penalty,
frequency_penalty, logit_bias, bad_words, json_schema, grammar, regex, choice, add_special_tokens, normalize (nfc, nfd,
nfkc, nfkd), raw (no chat template), and messages (a conversation) instead of prompt.";

/// Advice for a prompts file that cannot be read.
const PATH_HELP: &str = "check the path; `iec bench` and `iec verify` have built-in prompts if no file is named";
/// Advice for a prompts file of another form.
const FORM_HELP: &str = "`iec run --help` describes the forms of a prompts file";

/// Returns the built-in prompts.
pub fn built_in() -> Vec<String> {
    lines(BUILT_IN)
}

/// Reads the prompts of a file whose entries have no settings.
///
/// # Errors
/// The file cannot be read, is not UTF-8 text, has an invalid entry, or holds no prompt.
pub fn read(path: &Path) -> Result<Vec<String>> {
    read_as(path, &prompt_of)
}

/// Reads the requests of a file: prompts, and the settings that entries may have.
///
/// # Errors
/// The same as those of [`read`]; the name of an unknown field is in the message.
pub fn read_requests(path: &Path) -> Result<Vec<PromptRequest>> {
    read_as(path, &request_of)
}

fn read_as<T: From<String>>(path: &Path, entry: &dyn Fn(Value) -> Result<T>) -> Result<Vec<T>> {
    if is_older_name(path) && !files::exists(path)? {
        progress::detail(0, || format!("note: {}: no such file; these are the built-in prompts", path.display()));
        return Ok(built_in().into_iter().map(T::from).collect());
    }
    let text = files::read_text(path, FILE_LIMIT).help(PATH_HELP)?;
    let prompts = parse(text.trim_start_matches('\u{feff}'), entry).at(path).help(FORM_HELP)?;
    if prompts.is_empty() { Err(Error::corrupt("found no prompt").at(path).help(FORM_HELP)) } else { Ok(prompts) }
}

/// Returns true if older guides call the file of the built-in prompts by this path.
fn is_older_name(path: &Path) -> bool {
    let lies_in =
        |dirs: &[&str]| path.parent().and_then(Path::file_name).is_some_and(|dir| dirs.iter().any(|d| dir == *d));
    OLDER_NAMES.iter().any(|(name, dirs)| path.ends_with(name) && (dirs.is_empty() || lies_in(dirs)))
}

/// Reads one prompt of at most `PROMPT_LIMIT` bytes to its end, without the line break that `echo` adds.
///
/// # Errors
/// The input is longer, is no text, or cannot be read.
pub fn read_one(input: impl Read) -> Result<String> {
    let mut bytes = Vec::new();
    input.take(PROMPT_LIMIT + 1).read_to_end(&mut bytes)?;
    prompt_of_bytes(bytes)
}

/// Reads one line of at most `PROMPT_LIMIT` bytes, without its line break; `None` at the end of the input.
///
/// # Errors
/// The line is longer, is no text, or the input cannot be read.
pub fn read_line(input: &mut impl BufRead) -> Result<Option<String>> {
    let mut line = Vec::new();
    input.by_ref().take(PROMPT_LIMIT + 1).read_until(b'\n', &mut line)?;
    if line.is_empty() { Ok(None) } else { prompt_of_bytes(line).map(Some) }
}

fn prompt_of_bytes(bytes: Vec<u8>) -> Result<String> {
    if bytes.len() as u64 > PROMPT_LIMIT {
        let found = format!("found more than {} MiB of text, expected at most that", PROMPT_LIMIT >> 20);
        return Err(Error::usage(found).help("give a shorter text"));
    }
    files::utf8(bytes).map(without_line_break)
}

fn without_line_break(mut text: String) -> String {
    let line = text.strip_suffix('\n').map_or(text.as_str(), |line| line.strip_suffix('\r').unwrap_or(line));
    text.truncate(line.len());
    text
}

fn parse<T: From<String>>(text: &str, entry: &dyn Fn(Value) -> Result<T>) -> Result<Vec<T>> {
    match text.trim_start().chars().next() {
        Some('[') => {
            let values: Vec<Value> = serde_json::from_str(text).map_err(no_json)?;
            values.into_iter().enumerate().map(|(i, value)| entry(value).tensor(&format!("entry {i}"))).collect()
        }
        Some('"' | '{') => {
            let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
            let parsed = lines.map(|(i, line)| {
                let value = serde_json::from_str(line).map_err(no_json);
                value.and_then(entry).tensor(&format!("line {}", i + 1))
            });
            parsed.collect()
        }
        _ => Ok(lines(text).into_iter().map(T::from).collect()),
    }
}

fn no_json(e: serde_json::Error) -> Error {
    Error::corrupt(format!("not JSON: {e}"))
}

/// Returns the request of an entry: a text, or an object with settings.
fn request_of(value: Value) -> Result<PromptRequest> {
    if let Value::String(text) = value {
        return Ok(text.into());
    }
    let request: PromptRequest = serde_json::from_value(value).map_err(|e| Error::corrupt(e.to_string()))?;
    request.check()?;
    Ok(request)
}

fn prompt_of(value: Value) -> Result<String> {
    if let Some(object) = value.as_object()
        && let Some(name) = object.keys().find(|name| !["prompt", "text"].contains(&name.as_str()))
    {
        let found = format!("found the field `{name}`, expected `prompt` or `text`");
        return Err(Error::corrupt(found).help("only `iec run` reads the settings of requests"));
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
            assert_eq!(parse(text, &prompt_of).unwrap(), expected);
            let requests: Vec<PromptRequest> = expected.into_iter().map(PromptRequest::new).collect();
            assert_eq!(parse(text, &request_of).unwrap(), requests);
        }
        assert!(parse("[1]", &prompt_of).unwrap_err().to_string().contains("entry 0"));
        assert!(parse("{\"a\":1}", &prompt_of).unwrap_err().to_string().contains("line 1"));
    }

    #[test]
    fn requests_with_unknown_or_contradicting_fields_are_refused_by_name() {
        let cases = [
            ("{\"prompt\":\"a\",\"temprature\":1}", "temprature"),
            ("{\"max_new\":1}", "`prompt` nor `messages`"),
            ("{\"prompt\":\"a\",\"messages\":[{\"role\":\"user\",\"content\":\"b\"}]}", "`prompt` and `messages`"),
            ("{\"messages\":[{\"role\":\"user\",\"content\":\"b\"}],\"raw\":true}", "`raw` with `messages`"),
            ("{\"prompt\":\"a\",\"regex\":\"b\",\"choice\":[\"c\"]}", "several constraints"),
            ("{\"prompt\":\"a\",\"stop\":[\"\"]}", "`stop`"),
            ("{\"prompt\":\"a\",\"stop\":1}", "a text or a list of texts"),
            ("{\"prompt\":\"a\",\"seed\":-1}", "-1"),
            ("{\"prompt\":\"a\",\"normalize\":\"utf8\"}", "nfc"),
        ];
        for (text, said) in cases {
            let message = parse(text, &request_of).unwrap_err().to_string();
            assert!(message.contains(said) && message.contains("line 1"), "{text}: {message}");
        }
    }

    #[test]
    fn a_prompt_ends_at_its_line_break_or_limit() {
        assert_eq!(read_one(&b"one\ntwo\r\n"[..]).unwrap(), "one\ntwo");
        let mut lines = &b"one\r\n\ntwo\r"[..];
        let read: Vec<String> = std::iter::from_fn(|| read_line(&mut lines).unwrap()).collect();
        assert_eq!(read, ["one", "", "two\r"]);
        assert!(read_one(&b"\xff"[..]).unwrap_err().to_string().contains("invalid UTF-8"));
        assert_eq!(read_one(std::io::repeat(b'a')).unwrap_err().cause().exit_code(), 2);
    }

    #[test]
    fn names_of_older_guides_stand_for_the_built_in_prompts() {
        for (name, expected) in [
            ("benchmarks/prompts_10.txt", true),
            ("/opt/engine/benchmarks/prompts_10.txt", true),
            ("manifests/prompts_10.txt", true),
            ("prompts_10..txt", true),
            ("elsewhere/prompts_10..txt", true),
            ("prompts_10.txt", false),
            ("elsewhere/prompts_10.txt", false),
            ("benchmarks/prompts_11.txt", false),
        ] {
            assert_eq!(is_older_name(Path::new(name)), expected, "{name}");
        }
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("benchmarks/prompts_10.txt");
        assert_eq!(read(&own).unwrap(), built_in());
        std::fs::create_dir(own.parent().unwrap()).unwrap();
        std::fs::write(&own, "My prompt\n").unwrap();
        assert_eq!(read(&own).unwrap(), ["My prompt"]);
    }

    #[test]
    fn there_are_ten_built_in_prompts() {
        assert_eq!(built_in().len(), 10);
    }
}
