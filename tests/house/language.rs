//! Checks the language of comments, help and documents: how a doc comment may begin, and which words are not used.
//!
//! The rules are mechanical, so they find only the most frequent kinds of unclear sentences: questions and pointers
//! instead of statements, and unusual words for things that have a standard term.

use crate::source::Sources;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Words and phrases that are not used, in small letters, with what to write instead.
const BANNED: &[(&str, &str)] = &[
    ("stranger", "untrusted input"),
    ("strangers", "untrusted input"),
    ("whoever", "a user who, a caller that"),
    ("nobody", "no caller, none"),
    ("let go", "release"),
    ("lets go", "releases"),
    ("letting go", "releasing"),
    ("minds most", "is most sensitive"),
    ("as there.", "the fact itself, or a link"),
    ("the law", "the reference"),
    ("guesses", "draft tokens, estimates"),
    ("guessed", "drafted, estimated"),
    ("in company", "with other sequences in the batch"),
    ("company", "other sequences in the batch"),
    ("looks on", "observes"),
    ("wishes", "options"),
    ("fate", "decision"),
    ("told", "given, reported"),
    ("gives way", "is evicted"),
    ("is content", "passes"),
    ("deserves", "gets"),
];

/// First words of a doc comment that begin a question or a reference instead of a statement.
const OPENINGS: &[&str] = &[
    "What", "Who", "Whom", "Whose", "Whoever", "Whatever", "Where", "How", "Which", "Why", "Of", "As", "Those",
    "These", "Same", "Also",
];

/// Words that end in `s` like a verb but are none. The doc comment of a function must begin with a verb.
const NOUNS: &[&str] = &[
    "As",
    "Bits",
    "Blocks",
    "Bytes",
    "Chunks",
    "Codes",
    "Columns",
    "Elements",
    "Experts",
    "Files",
    "Groups",
    "Heads",
    "Is",
    "Its",
    "Lanes",
    "Layers",
    "Less",
    "Lines",
    "Names",
    "Numbers",
    "Offsets",
    "Options",
    "Panels",
    "Parts",
    "Positions",
    "Products",
    "Ranges",
    "Rotations",
    "Rows",
    "Scales",
    "Seconds",
    "Sizes",
    "Statistics",
    "Sums",
    "Tensors",
    "This",
    "Threads",
    "Tiles",
    "Tokens",
    "Totals",
    "Units",
    "Values",
    "Weights",
    "Words",
];

/// Doc comment with its line.
struct DocComment<'a> {
    line: usize,
    first: &'a str,
    of_function: bool,
}

/// Returns the doc comments of a file.
fn doc_comments(text: &str) -> Vec<DocComment<'_>> {
    let lines: Vec<&str> = text.lines().map(str::trim_start).collect();
    let mark = |line: &str| ["///", "//!"].into_iter().find(|mark| line.starts_with(mark) && !line.starts_with("////"));
    let mut found = Vec::new();
    for (n, line) in lines.iter().enumerate() {
        let Some(this) = mark(line) else { continue };
        if n > 0 && mark(lines[n - 1]) == Some(this) {
            continue;
        }
        let is_item = |line: &&&str| !line.is_empty() && !line.starts_with("//") && !line.starts_with("#[");
        let item = lines[n..].iter().find(is_item).copied().unwrap_or_default();
        let before = item.split("fn ").next().unwrap_or_default();
        let of_function = this == "///"
            && item.contains("fn ")
            && before
                .split_whitespace()
                .all(|word| ["const", "async", "unsafe", "extern", "\"C\""].contains(&word) || word.starts_with("pub"));
        found.push(DocComment { line: n + 1, first: line[3..].trim(), of_function });
    }
    found
}

/// Finds doc comments that begin with a question or a reference, and those of functions that do not begin with a
/// verb.
pub fn openings(sources: &Sources) -> Vec<String> {
    let mut found = Vec::new();
    for file in &sources.files {
        for comment in doc_comments(&file.text) {
            let word = comment.first.split_whitespace().next().unwrap_or_default().trim_matches(['.', ',', ':', ';']);
            let letters = word.chars().all(|c| c.is_alphabetic() || c == '-') && word.starts_with(char::is_uppercase);
            let verb = letters && word.ends_with('s') && !NOUNS.contains(&word);
            let place = format!("{}:{}", file.path, comment.line);
            if OPENINGS.contains(&word) {
                found.push(format!("{place}: begins with `{word}`: {}", comment.first));
            } else if comment.of_function && !verb && word != "#" {
                found.push(format!("{place}: a function's comment begins with its verb: {}", comment.first));
            }
        }
    }
    found
}

/// Collects the files of documents and help texts, except the archive of measurements.
fn documents(folder: &Path, found: &mut Vec<(String, String)>) {
    for entry in fs::read_dir(folder).expect("a folder of the repository") {
        let path = entry.expect("a readable folder").path();
        let name = path.to_str().expect("plain names").trim_start_matches("./").to_string();
        if path.is_dir() {
            if !name.ends_with("archive") {
                documents(&path, found);
            }
        } else if name.ends_with(".md") || name.ends_with(".txt") {
            found.push((name, fs::read_to_string(&path).expect("UTF-8")));
        }
    }
}

/// Finds banned words in sources, documents and help texts, except those that `allowed` lists as (path, words).
pub fn banned_words(sources: &Sources, allowed: &[(&str, &str)]) -> Vec<String> {
    let mut texts: Vec<(String, String)> = sources.files.iter().map(|f| (f.path.clone(), f.text.clone())).collect();
    for name in ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"] {
        texts.push((name.to_string(), fs::read_to_string(name).expect("a document of the repository")));
    }
    ["docs", "tests/snapshots"].iter().for_each(|folder| documents(Path::new(folder), &mut texts));
    let mut used = BTreeSet::new();
    let mut found = Vec::new();
    for (path, text) in &texts {
        for (n, line) in text.lines().enumerate() {
            let line = line.to_lowercase();
            for (words, instead) in BANNED.iter().filter(|(words, _)| crate::has_word(&line, words)) {
                match allowed.iter().position(|(place, allowed)| path == place && words == allowed) {
                    Some(i) => _ = used.insert(i),
                    None => found.push(format!("{path}:{}: `{words}`; write {instead}", n + 1)),
                }
            }
        }
    }
    let idle = (0..allowed.len()).filter(|i| !used.contains(i));
    found.extend(idle.map(|i| format!("the exception {:?} is not needed", allowed[i])));
    found
}
