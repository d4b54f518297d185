//! Regular expressions: checks them before they are compiled, and builds the one of a list of choices.

use crate::error::{Error, Result};
use regex_syntax::ParserBuilder;

/// Largest accepted length of a pattern, and of all choices together, in bytes.
const BYTES: usize = 64 << 10;
/// Largest accepted nesting of groups and repetitions.
const NESTING: u32 = 64;
/// Largest accepted number of choices.
const CHOICES: usize = 10_000;

/// Checks a pattern. The whole text must match it, so `^` at its beginning and `$` at its end are allowed and change
/// nothing; other assertions have no meaning for a text that is still growing, and the compiler refuses them.
///
/// # Errors
/// The pattern is empty or too long, is not of the syntax of the crate `regex`, or has a group named `stop`.
pub(super) fn check(pattern: &str) -> Result<()> {
    if pattern.is_empty() || pattern.len() > BYTES {
        let found = format!("pattern: found {} bytes, expected 1 to {BYTES}", pattern.len());
        return Err(Error::usage(found));
    }
    let parsed = ParserBuilder::new().nest_limit(NESTING).build().parse(pattern);
    parsed.map_err(|e| {
        let why = match &e {
            regex_syntax::Error::Parse(e) => e.kind().to_string(),
            regex_syntax::Error::Translate(e) => e.kind().to_string(),
            e => e.to_string(),
        };
        Error::usage(format!("pattern `{}`: {why}", shortened(pattern)))
            .help("patterns have the syntax of the Rust crate `regex`: no look-around and no back-references")
    })?;
    if pattern.contains("<stop>") {
        let found = "found a group with the name `stop`, which the compiler would treat as look-ahead";
        return Err(Error::usage(found).help("give the group another name"));
    }
    Ok(())
}

/// Returns the pattern that matches each of the texts and nothing else.
///
/// # Errors
/// There is no choice, a choice is empty, or there are too many.
pub(super) fn of_choices(texts: &[String]) -> Result<String> {
    if texts.is_empty() || texts.len() > CHOICES {
        return Err(Error::usage(format!("found {} choices, expected 1 to {CHOICES}", texts.len())));
    }
    if texts.iter().any(String::is_empty) {
        return Err(Error::usage("found an empty choice, expected at least one character"));
    }
    let bytes: usize = texts.iter().map(String::len).sum();
    if bytes > BYTES {
        return Err(Error::usage(format!("choices: found {bytes} bytes in all, expected at most {BYTES}")));
    }
    let escaped: Vec<String> = texts.iter().map(|text| regex_syntax::escape(text)).collect();
    Ok(format!("(?:{})", escaped.join("|")))
}

fn shortened(pattern: &str) -> String {
    pattern.chars().take(80).collect()
}
