//! Reads Rust sources for the style checks and blanks comments, contents of strings, and tests.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// One source file.
pub struct Source {
    /// Path from the root of the repository, with `/`.
    pub path: String,
    /// Original text.
    pub text: String,
    /// The text with comments and tests blanked; same lines, same columns.
    pub code: String,
    /// `code` with the contents of strings blanked, too.
    pub bare: String,
    /// Module path: `["iec", "iebin", "reader"]`; the binary starts with `bin`.
    pub module: Vec<String>,
}

/// All source files of the library and the binary except test files.
pub struct Sources {
    pub files: Vec<Source>,
    /// File of each module path, joined with `::`.
    modules: BTreeMap<String, usize>,
}

impl Source {
    pub fn new(path: &str, text: &str) -> Source {
        let (code, bare) = without_comments(text);
        let tests = tests_in(&bare);
        Source {
            path: path.to_string(),
            text: text.to_string(),
            code: blank(&code, &tests),
            bare: blank(&bare, &tests),
            module: module_of(path),
        }
    }

    /// Counts the lines with code outside tests.
    pub fn code_lines(&self) -> usize {
        self.code.lines().filter(|line| !line.trim().is_empty()).count()
    }

    /// Returns the line number of a byte offset, counted from 1.
    pub fn line_of(&self, offset: usize) -> usize {
        1 + self.bare[..offset].bytes().filter(|b| *b == b'\n').count()
    }

    /// Returns the top-level module: `iebin` for `iec::iebin::reader`, `lib` for the root of the library, `bin` for
    /// the binary.
    pub fn top(&self) -> &str {
        match self.module[0].as_str() {
            "iec" => self.module.get(1).map_or("lib", String::as_str),
            root => root,
        }
    }
}

impl Sources {
    /// Parses sources given as pairs of path and text.
    pub fn of<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Sources {
        let files: Vec<Source> = pairs.into_iter().map(|(path, text)| Source::new(path, text)).collect();
        let modules = files.iter().enumerate().map(|(i, file)| (file.module.join("::"), i)).collect();
        Sources { files, modules }
    }

    /// Reads all sources below `src/` of the current directory.
    pub fn read() -> Sources {
        let mut found = Vec::new();
        collect(Path::new("src"), &mut found);
        found.sort();
        Sources::of(found.iter().map(|(path, text)| (path.as_str(), text.as_str())))
    }

    /// Returns the index of the file that defines the module `path` or its nearest enclosing module.
    pub fn file_of(&self, path: &[String]) -> Option<usize> {
        (1..=path.len()).rev().find_map(|n| self.modules.get(&path[..n].join("::")).copied())
    }

    /// Returns true when `path` is a module with a file of its own.
    pub fn is_module(&self, path: &[String]) -> bool {
        self.modules.contains_key(&path.join("::"))
    }
}

fn collect(dir: &Path, found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(dir).expect("tests run in the root of the repository") {
        let path = entry.expect("a readable directory").path();
        let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        if path.is_dir() {
            // Folders of this name hold what scripts make.
            if name != "generated" {
                collect(&path, found);
            }
        } else if name.ends_with(".rs") && name != "tests.rs" {
            found.push((path.to_str().expect("plain names").to_string(), fs::read_to_string(&path).expect("UTF-8")));
        }
    }
}

fn module_of(path: &str) -> Vec<String> {
    let inner = path.trim_start_matches("src/").trim_end_matches(".rs");
    let (root, inner) = match inner.strip_prefix("bin/iec/") {
        Some(inner) => ("bin", inner),
        None => ("iec", inner),
    };
    let mut parts = vec![root.to_string()];
    parts.extend(inner.split('/').filter(|part| !["mod", "lib", "main"].contains(part)).map(str::to_string));
    parts
}

/// Returns the text without comments, and the same without the contents of strings. Removed characters are replaced
/// by blanks.
fn without_comments(text: &str) -> (String, String) {
    let s = text.as_bytes();
    let (mut code, mut bare) = (s.to_vec(), s.to_vec());
    let hide = |target: &mut Vec<u8>, from: usize, to: usize| {
        target[from..to].iter_mut().filter(|b| **b != b'\n').for_each(|b| *b = b' ');
    };
    let mut i = 0;
    while i < s.len() {
        let (end, comment) = match (s[i], s.get(i + 1)) {
            (b'/', Some(b'/')) => (find(s, i, b"\n"), true),
            (b'/', Some(b'*')) => (end_of_comment(s, i), true),
            (b'"', _) => (end_of_string(s, i), false),
            (b'r', Some(b'"' | b'#')) if starts_word(s, i) => (end_of_raw_string(s, i), false),
            (b'\'', _) => (end_of_char(s, i), false),
            _ => (i + 1, false),
        };
        if comment {
            hide(&mut code, i, end);
            hide(&mut bare, i, end);
        } else if end > i + 2 {
            hide(&mut bare, i + 1, end - 1);
        }
        i = end;
    }
    let text = |bytes| String::from_utf8(bytes).expect("whole characters were blanked");
    (text(code), text(bare))
}

fn find(s: &[u8], from: usize, what: &[u8]) -> usize {
    s[from..].windows(what.len()).position(|w| w == what).map_or(s.len(), |n| from + n)
}

fn is_word(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b == b'_'
}

/// Returns true when the `r` of a raw string starts a token, alone or after `b` or `c`.
fn starts_word(s: &[u8], i: usize) -> bool {
    let before = |n: usize| i.checked_sub(n).map_or(b' ', |at| s[at]);
    !is_word(before(1)) || (matches!(before(1), b'b' | b'c') && !is_word(before(2)))
}

fn end_of_comment(s: &[u8], start: usize) -> usize {
    let (mut depth, mut i) = (1, start + 2);
    while i < s.len() && depth > 0 {
        match &s[i..(i + 2).min(s.len())] {
            b"/*" => (depth, i) = (depth + 1, i + 2),
            b"*/" => (depth, i) = (depth - 1, i + 2),
            _ => i += 1,
        }
    }
    i
}

fn end_of_string(s: &[u8], start: usize) -> usize {
    let mut i = start + 1;
    while i < s.len() && s[i] != b'"' {
        i += if s[i] == b'\\' { 2 } else { 1 };
    }
    (i + 1).min(s.len())
}

fn end_of_raw_string(s: &[u8], start: usize) -> usize {
    let hashes = s[start + 1..].iter().take_while(|b| **b == b'#').count();
    if s.get(start + 1 + hashes) != Some(&b'"') {
        return start + 1; // a raw identifier
    }
    let close = [b"\"".as_slice(), &b"#".repeat(hashes)].concat();
    (find(s, start + 2 + hashes, &close) + close.len()).min(s.len())
}

/// Returns the offset after a character literal, or after the quote of a lifetime.
fn end_of_char(s: &[u8], start: usize) -> usize {
    if s.get(start + 1) == Some(&b'\\') {
        return (find(s, start + 3, b"'") + 1).min(s.len());
    }
    let wide = s.get(start + 1).map_or(1, |b| b.leading_ones().max(1) as usize);
    if s.get(start + 1 + wide) == Some(&b'\'') { start + 2 + wide } else { start + 1 }
}

/// Returns the byte ranges of the items with `#[cfg(test)]`.
fn tests_in(bare: &str) -> Vec<(usize, usize)> {
    let mark = "#[cfg(test)]";
    let starts = bare.match_indices(mark).map(|(at, _)| at);
    starts.map(|at| (at, end_of_item(bare.as_bytes(), at + mark.len()))).collect()
}

/// Returns the offset after the item that starts at `from`, that is, after its closing brace or semicolon.
pub fn end_of_item(s: &[u8], from: usize) -> usize {
    let mut depth = 0usize;
    for (i, b) in s.iter().enumerate().skip(from) {
        match b {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' => depth = depth.saturating_sub(1),
            b'}' if depth == 1 => return i + 1,
            b'}' => depth = depth.saturating_sub(1),
            b';' if depth == 0 => return i + 1,
            _ => {}
        }
    }
    s.len()
}

fn blank(text: &str, ranges: &[(usize, usize)]) -> String {
    let mut bytes = text.as_bytes().to_vec();
    for (from, to) in ranges {
        bytes[*from..*to].iter_mut().filter(|b| **b != b'\n').for_each(|b| *b = b' ');
    }
    String::from_utf8(bytes).expect("whole characters were blanked")
}
