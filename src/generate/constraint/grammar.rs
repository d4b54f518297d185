//! Grammars: checks the text before it is compiled.
//!
//! The dialect is that of `llguidance`: rules in small letters, terminals in capitals, the first rule `start`. Some
//! parts of the dialect steer a sampler or name special tokens; they would have no effect here or leave the text
//! unchecked, so they are refused by name. `%json` with a schema is replaced by the rules of the schema.

use super::json;
use crate::error::{Error, Result};
use crate::strict_json;
use serde_json::Value;

/// Largest accepted size of a grammar in bytes.
const BYTES: usize = 64 << 10;
/// Largest accepted number of rules and terminals; the compiler follows them recursively.
const RULES: usize = 1000;
/// Attributes of rules that the matcher applies.
const ATTRIBUTES: [&str; 3] = ["max_tokens", "suffix", "lazy"];

/// Checks a grammar, and returns it with the rules of its schemas.
///
/// # Errors
/// The grammar is too large, is in the format GBNF, or has a part that is not supported.
pub(super) fn checked(text: &str) -> Result<String> {
    if text.trim().is_empty() || text.len() > BYTES {
        let found = format!("grammar: found {} bytes, expected 1 to {BYTES}", text.trim().len());
        return Err(Error::unsupported(found));
    }
    let mut scanner = Scanner { rest: text, line: 1, rules: 0, done: String::with_capacity(text.len()) };
    while !scanner.rest.is_empty() {
        scanner.step()?;
    }
    Ok(scanner.done)
}

/// Reads the grammar from the beginning: texts, patterns and comments are skipped, everything else is looked at.
struct Scanner<'a> {
    rest: &'a str,
    /// Number of the current line, from 1.
    line: usize,
    rules: usize,
    /// Text that was read, with the rules of schemas in their place.
    done: String,
}

impl<'a> Scanner<'a> {
    fn step(&mut self) -> Result<()> {
        let rest = self.rest;
        let first = rest.chars().next().unwrap_or_default();
        let length = match first {
            '"' => quoted(rest, '"'),
            '/' if rest.starts_with("//") => comment(rest),
            '/' => quoted(rest, '/'),
            '#' => comment(rest),
            '%' => return self.directive(),
            '<' => return Err(self.refused("a special token", "special tokens are never part of the text; remove it")),
            '@' => return Err(self.refused("a reference to another grammar", "write its rules into this grammar")),
            ':' if rest.starts_with("::=") => {
                let help = "this is GBNF: write `name: …` for `name ::= …`, `start` for `root`, and patterns such as \
                            /[a-z]+/ for [a-z]+ (docs/guide/structured-output.md)";
                return Err(self.refused("`::=`", help));
            }
            ':' if rest.starts_with("::") => 2,
            ':' => {
                self.rules += 1;
                if self.rules > RULES {
                    return Err(Error::unsupported(format!(
                        "grammar: found more than {RULES} rules and terminals, expected at most that"
                    ))
                    .help("use a smaller grammar"));
                }
                1
            }
            c if c.is_ascii_alphabetic() || c == '_' => return self.name(),
            c => c.len_utf8(),
        };
        self.skip(length);
        Ok(())
    }

    /// Skips a name; refuses attributes of rules without effect.
    fn name(&mut self) -> Result<()> {
        let rest = self.rest;
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '-').unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        if after.trim_start().starts_with('=') && !ATTRIBUTES.contains(&name) {
            let help =
                format!("supported attributes are {}; set sampling by options of the command", ATTRIBUTES.join(", "));
            return Err(self.refused(&format!("the attribute `{name}`"), &help));
        }
        self.skip(end);
        Ok(())
    }

    /// Skips the JSON of a directive, and checks it if it is a schema or options.
    fn directive(&mut self) -> Result<()> {
        let rest = &self.rest[1..];
        let end = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        let length = match name {
            "json" | "llguidance" | "regex" => {
                let mut values = serde_json::Deserializer::from_str(after).into_iter::<Value>();
                let Some(Ok(_)) = values.next() else {
                    return Err(self.refused(&format!("`%{name}` without JSON"), "write a JSON object after it"));
                };
                let length = values.byte_offset();
                let value = strict_json::parse(&after.as_bytes()[..length])?;
                if name == "json" {
                    let rules = json::rules(&value, json::ReadOptions::strict(json::DEPTH))?.embedded();
                    let done = self.done.len();
                    self.skip(1 + end + length);
                    self.done.truncate(done);
                    self.done += &rules;
                    return Ok(());
                } else if name == "llguidance" && value.get("allow_invalid_utf8").is_some() {
                    return Err(self.refused("`allow_invalid_utf8`", "texts are UTF-8; remove it"));
                }
                length
            }
            _ => 0,
        };
        self.skip(1 + end + length);
        Ok(())
    }

    fn skip(&mut self, bytes: usize) {
        let (skipped, rest) = self.rest.split_at(bytes);
        self.line += skipped.matches('\n').count();
        self.done += skipped;
        self.rest = rest;
    }

    fn refused(&self, found: &str, help: &str) -> Error {
        Error::unsupported(format!("grammar: found {found} in line {}, which is not supported", self.line)).help(help)
    }
}

/// Returns the length of a text or pattern that begins and ends with `mark`, on one line.
fn quoted(rest: &str, mark: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            '\n' => return at,
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == mark => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

fn comment(rest: &str) -> usize {
    rest.find('\n').unwrap_or(rest.len())
}
