//! Regular expressions of JSON strings: from the texts that a schema allows to the spellings that JSON has for them.
//!
//! JSON spells each character in up to four ways: by itself, by a short escape (`\n`, `\/`), and by `\u` with four
//! hexadecimal digits, two of these for characters above U+FFFF (RFC 8259, section 7). All spellings of a text are
//! valid, so all are allowed: a pattern is parsed, and each of its characters becomes the set of its spellings. Only
//! halves of surrogate pairs are left out, which spell no character.
//!
//! The expressions hold no character but letters, digits and operators, because they are written into a grammar.

use crate::error::{Error, Result};
use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Class, ClassBytes, Hir, HirKind, Look};
use std::cmp::Ordering;
use std::fmt::Write;

/// Spellings of any one character.
const CHARACTER: &str = concat!(
    r"(?:[^\x22\x5c\x00-\x1f]|\x5c(?:[\x22\x5c\x2fbfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}",
    r"|[dD][89abAB][0-9a-fA-F]{2}\x5cu[dD][c-fC-F][0-9a-fA-F]{2})))"
);

/// Short escapes and the characters that they stand for.
const SHORT: [(char, char); 8] =
    [('"', '"'), ('\\', '\\'), ('/', '/'), ('\u{8}', 'b'), ('\u{c}', 'f'), ('\n', 'n'), ('\r', 'r'), ('\t', 't')];

/// Largest accepted nesting of groups and repetitions of a pattern.
const NESTING: u32 = 64;
/// Largest accepted length of the expression of a pattern in bytes.
const BYTES: usize = 256 << 10;

/// Returns the expression of strings of `min` to `max` characters.
pub(super) fn of_length(min: usize, max: Option<usize>) -> String {
    match (min, max) {
        (0, None) => format!("\\x22{CHARACTER}*\\x22"),
        (_, None) => format!("\\x22{CHARACTER}{{{min},}}\\x22"),
        (_, Some(max)) => format!("\\x22{CHARACTER}{{{min},{max}}}\\x22"),
    }
}

/// Characters that no encoder of JSON escapes. Where a schema has many names and values, they stand for
/// themselves only, as their escapes would take most of the time of the compiler.
fn is_simple(c: char) -> bool {
    c.is_ascii_alphanumeric() || " _.-".contains(c)
}

/// All characters that are not simple.
const NOT_SIMPLE: [(char, char); 7] =
    [('\0', '\u{1f}'), ('!', ','), ('/', '/'), (':', '@'), ('[', '^'), ('`', '`'), ('{', char::MAX)];

/// Spellings of constant texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Every character may be escaped.
    Full,
    /// Simple characters stand for themselves.
    Short,
}

/// Returns the expression of one text.
pub(super) fn literal(text: &str, spelling: Spelling) -> String {
    let mut spelled = String::from("\\x22");
    for c in text.chars() {
        match spelling == Spelling::Short && is_simple(c) {
            true => spelled += &quoted(c),
            false => character(c, &mut spelled),
        }
    }
    spelled + "\\x22"
}

/// Returns the expression of any text that is spelled like the literals from which it must differ.
pub(super) fn any_like(spelling: Spelling) -> String {
    match spelling {
        Spelling::Full => of_length(0, None),
        Spelling::Short => {
            let mut spelled = String::from("\\x22(?:");
            spell_set(&[('\0', char::MAX)], &NOT_SIMPLE, &mut spelled);
            spelled + ")*\\x22"
        }
    }
}

/// Returns the expression of the texts that a pattern matches at any place, in the meaning of JSON schema.
///
/// # Errors
/// The pattern is not a regular expression, or has look-around, back-references or assertions in its middle.
pub(super) fn pattern(pattern: &str) -> Result<String> {
    parsed(pattern)?;
    // `\d` and `\w` are ASCII in schemas.
    let parsed = parsed(&llguidance::regex_to_lark(pattern, "dw"))?;
    let mut spelled = String::from("\\x22");
    search(std::slice::from_ref(&parsed), (true, true), &mut spelled)?;
    spelled += "\\x22";
    match spelled.len() > BYTES {
        true => Err(Error::unsupported(format!("the pattern takes more than {BYTES} bytes with all its escapes"))),
        false => Ok(spelled),
    }
}

/// Returns a pattern without its look-ahead and look-behind, which matches what the pattern matches, and more.
pub(super) fn without_look_around(pattern: &str) -> String {
    const BEGINNINGS: [&str; 4] = ["(?=", "(?!", "(?<=", "(?<!"];
    let (mut out, mut in_class, mut depth, mut rest) = (String::new(), false, 0, pattern);
    while let Some(c) = rest.chars().next() {
        let escaped = if c == '\\' { rest.chars().nth(1).map_or(0, char::len_utf8) } else { 0 };
        let (item, behind) = rest.split_at(c.len_utf8() + escaped);
        match item {
            "[" if !in_class => in_class = true,
            "]" => in_class = false,
            // Groups inside of the one that is left out end before it does.
            "(" if !in_class && (depth > 0 || BEGINNINGS.iter().any(|begin| rest.starts_with(begin))) => depth += 1,
            _ => {}
        }
        if depth == 0 {
            out.push_str(item);
        }
        if item == ")" && !in_class && depth > 0 {
            depth -= 1;
        }
        rest = behind;
    }
    out
}

/// Returns the expression of the texts that one of our own patterns matches from the beginning to the end.
pub(super) fn format(whole: &str) -> Result<String> {
    pattern(&format!("^(?:{whole})$"))
}

fn parsed(pattern: &str) -> Result<Hir> {
    ParserBuilder::new().nest_limit(NESTING).build().parse(pattern).map_err(|e| {
        Error::unsupported(match &e {
            regex_syntax::Error::Parse(e) => e.kind().to_string(),
            regex_syntax::Error::Translate(e) => e.kind().to_string(),
            e => e.to_string(),
        })
    })
}

/// Writes the texts in which parts of an expression follow one another. Any characters may stand before them, or behind
/// them, as `open` says, unless an anchor forbids it.
fn search(parts: &[Hir], open: (bool, bool), out: &mut String) -> Result<()> {
    let has_anchor = |part: &Hir| !part.properties().look_set().is_empty();
    let (before, behind) = open;
    match parts {
        [one] => match one.kind() {
            HirKind::Look(Look::Start) if before => return search(&[], (false, behind), out),
            HirKind::Look(Look::End) if behind => return search(&[], (before, false), out),
            HirKind::Capture(capture) => return search(std::slice::from_ref(&capture.sub), open, out),
            HirKind::Concat(parts) => return search(parts, open, out),
            HirKind::Alternation(options) if has_anchor(one) => {
                for (i, option) in options.iter().enumerate() {
                    out.push_str(if i == 0 { "(?:" } else { "|" });
                    search(std::slice::from_ref(option), open, out)?;
                }
                out.push(')');
                return Ok(());
            }
            _ => {}
        },
        [first, rest @ ..] if before && has_anchor(first) => {
            search(std::slice::from_ref(first), (true, false), out)?;
            return search(rest, (false, behind), out);
        }
        [rest @ .., last] if behind && has_anchor(last) => {
            search(rest, (before, false), out)?;
            return search(std::slice::from_ref(last), (false, true), out);
        }
        _ => {}
    }
    for (is_open, parts) in [(before, parts), (behind, &[])] {
        if is_open {
            let _ = write!(out, "{CHARACTER}*");
        }
        parts.iter().try_for_each(|part| spell(part, out))?;
    }
    Ok(())
}

fn spell(hir: &Hir, out: &mut String) -> Result<()> {
    if out.len() > BYTES {
        // The caller refuses it by its length.
        return Ok(());
    }
    match hir.kind() {
        HirKind::Empty => Ok(()),
        HirKind::Literal(literal) => {
            let text = std::str::from_utf8(&literal.0).map_err(|_| Error::unsupported("found bytes that are no text"));
            text.map(|text| text.chars().for_each(|c| character(c, out)))
        }
        HirKind::Class(Class::Unicode(class)) => {
            let ranges: Vec<(char, char)> = class.iter().map(|range| (range.start(), range.end())).collect();
            set(&ranges, out);
            Ok(())
        }
        HirKind::Class(Class::Bytes(class)) => bytes(class, out),
        HirKind::Look(_) => Err(Error::unsupported("found an assertion such as `^` or `\\b` within the pattern")),
        HirKind::Repetition(repetition) => {
            out.push_str("(?:");
            spell(&repetition.sub, out)?;
            let _ = match repetition.max {
                Some(max) => write!(out, "){{{},{max}}}", repetition.min),
                None => write!(out, "){{{},}}", repetition.min),
            };
            Ok(())
        }
        HirKind::Capture(capture) => spell(&capture.sub, out),
        HirKind::Concat(parts) => parts.iter().try_for_each(|part| spell(part, out)),
        HirKind::Alternation(options) => {
            for (i, option) in options.iter().enumerate() {
                out.push_str(if i == 0 { "(?:" } else { "|" });
                spell(option, out)?;
            }
            out.push(')');
            Ok(())
        }
    }
}

fn bytes(class: &ClassBytes, out: &mut String) -> Result<()> {
    if class.iter().any(|range| !range.end().is_ascii()) {
        return Err(Error::unsupported("found bytes that are no text"));
    }
    let ranges: Vec<(char, char)> = class.iter().map(|range| (range.start().into(), range.end().into())).collect();
    set(&ranges, out);
    Ok(())
}

/// Writes the spellings of a character.
fn character(c: char, out: &mut String) {
    out.push_str("(?:");
    if c >= ' ' && c != '"' && c != '\\' {
        out.push_str(&quoted(c));
        out.push('|');
    }
    if let Some((_, letter)) = SHORT.iter().find(|(short, _)| *short == c) {
        let _ = write!(out, "\\x5c{}|", quoted(*letter));
    }
    for unit in c.encode_utf16(&mut [0; 2]) {
        out.push_str("\\x5cu");
        for shift in [12, 8, 4, 0] {
            let value = char::from_digit(u32::from(*unit >> shift & 15), 16).unwrap_or('0');
            match value.is_ascii_digit() {
                true => out.push(value),
                false => out.extend(['[', value, value.to_ascii_uppercase(), ']']),
            }
        }
    }
    out.push(')');
}

/// Writes the spellings of one character of a set.
fn set(ranges: &[(char, char)], out: &mut String) {
    match ranges == [('\0', char::MAX)] {
        true => out.push_str(CHARACTER),
        false => spell_set(ranges, ranges, out),
    }
}

/// Writes the spellings of one character of a set, of which some may be written with four digits.
fn spell_set(ranges: &[(char, char)], numbered: &[(char, char)], out: &mut String) {
    let has = |c: char| ranges.iter().any(|(first, last)| (*first..=*last).contains(&c));
    let mut options = Vec::new();
    let raw = raw_ranges(ranges);
    if !raw.is_empty() {
        options.push(raw);
    }
    let short: String = SHORT.iter().filter(|(c, _)| has(*c)).map(|(_, letter)| quoted(*letter)).collect();
    if !short.is_empty() {
        options.push(format!("\\x5c[{short}]"));
    }
    let mut hexadecimal = Vec::new();
    for (first, last) in numbered {
        let (first, last) = (u32::from(*first), u32::from(*last));
        // No character lies between the two halves of surrogates.
        for (low, high) in [(0, 0xd7ff), (0xe000, 0xffff)] {
            let (first, last) = (first.max(low), last.min(high));
            if first <= last {
                hexadecimal.push(digits(first, last, 4));
            }
        }
        if last > 0xffff {
            pairs(first.max(0x1_0000) - 0x1_0000, last - 0x1_0000, &mut hexadecimal);
        }
    }
    if !hexadecimal.is_empty() {
        options.push(format!("\\x5cu(?:{})", hexadecimal.join("|")));
    }
    let _ = write!(out, "(?:{})", options.join("|"));
}

/// Returns the characters of a set that may stand for themselves.
fn raw_ranges(ranges: &[(char, char)]) -> String {
    const RAW: [(char, char); 3] = [(' ', '!'), ('#', '['), (']', char::MAX)];
    let mut shown = String::new();
    for (first, last) in ranges {
        for (low, high) in RAW {
            let (first, last) = (u32::from(low.max(*first)), u32::from(high.min(*last)));
            let _ = match first.cmp(&last) {
                Ordering::Less => write!(shown, "\\x{{{first:x}}}-\\x{{{last:x}}}"),
                Ordering::Equal => write!(shown, "\\x{{{first:x}}}"),
                Ordering::Greater => Ok(()),
            };
        }
    }
    if shown.is_empty() { shown } else { format!("[{shown}]") }
}

fn quoted(c: char) -> String {
    if c.is_ascii_alphanumeric() { c.to_string() } else { format!("\\x{{{:x}}}", u32::from(c)) }
}

/// Adds the pairs of surrogates of characters, which are numbered from U+10000.
fn pairs(first: u32, last: u32, out: &mut Vec<String>) {
    const LOW: u32 = 0x3ff;
    let mut add = |high: (u32, u32), low: (u32, u32)| {
        let high = digits(0xd800 + high.0, 0xd800 + high.1, 4);
        out.push(format!("{high}\\x5cu{}", digits(0xdc00 + low.0, 0xdc00 + low.1, 4)));
    };
    let (mut begin, mut end) = (first >> 10, last >> 10);
    if begin == end {
        return add((begin, end), (first & LOW, last & LOW));
    }
    if first & LOW != 0 {
        add((begin, begin), (first & LOW, LOW));
        begin += 1;
    }
    if last & LOW != LOW {
        add((end, end), (0, last & LOW));
        end -= 1;
    }
    if begin <= end {
        add((begin, end), (0, LOW));
    }
}

/// Returns the expression of the numbers from `first` to `last` in `count` hexadecimal digits.
fn digits(first: u32, last: u32, count: u32) -> String {
    if count == 0 {
        return String::new();
    }
    let unit = 16u32.pow(count - 1);
    let (mut begin, mut end) = (first / unit, last / unit);
    if begin == end {
        return digit(begin, end) + &digits(first % unit, last % unit, count - 1);
    }
    let mut options = Vec::new();
    if !first.is_multiple_of(unit) {
        options.push(digit(begin, begin) + &digits(first % unit, unit - 1, count - 1));
        begin += 1;
    }
    if last % unit != unit - 1 {
        options.push(digit(end, end) + &digits(0, last % unit, count - 1));
        end -= 1;
    }
    if begin <= end {
        let any = if count > 1 { format!("[0-9a-fA-F]{{{}}}", count - 1) } else { String::new() };
        options.push(digit(begin, end) + &any);
    }
    format!("(?:{})", options.join("|"))
}

/// Returns the expression of one hexadecimal digit, in small or capital letters.
fn digit(first: u32, last: u32) -> String {
    let shown: String = (first..=last)
        .flat_map(|value| {
            let small = char::from_digit(value, 16).unwrap_or('0');
            [Some(small), small.is_ascii_alphabetic().then(|| small.to_ascii_uppercase())]
        })
        .flatten()
        .collect();
    if shown.len() == 1 { shown } else { format!("[{shown}]") }
}
