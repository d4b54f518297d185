//! Counts of the code structure: sizes, import cycles, repeated passages, names, and the places that name a scheme or
//! a family.

use super::graph::{self, tokens};
use super::source::{Source, Sources, end_of_item};
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

/// Number of lines of code in a passage.
const PASSAGE: usize = 6;

/// Function and its number of lines of code.
pub struct Function {
    pub path: String,
    pub line: usize,
    pub name: String,
    pub lines: usize,
}

/// Returns all functions with a body.
pub fn functions(sources: &Sources) -> Vec<Function> {
    let mut found = Vec::new();
    for file in &sources.files {
        let tokens = tokens(&file.bare);
        for pair in tokens.windows(2).filter(|pair| pair[0].1 == "fn") {
            let (at, name) = (pair[0].0, pair[1].1);
            let end = end_of_item(file.bare.as_bytes(), at);
            let item = &file.code[at..end];
            if name.starts_with(|c: char| c.is_alphabetic() || c == '_') && item.ends_with('}') {
                let lines = item.lines().filter(|line| !line.trim().is_empty()).count();
                found.push(Function { path: file.path.clone(), line: file.line_of(at), name: name.to_string(), lines });
            }
        }
    }
    found
}

/// Returns the names of types and the files that define each.
pub fn types(sources: &Sources) -> BTreeMap<&str, Vec<&str>> {
    let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for file in &sources.files {
        let tokens = tokens(&file.bare);
        for pair in tokens.windows(2) {
            let word = pair[1].1;
            if ["struct", "enum", "trait", "union"].contains(&pair[0].1) && word.starts_with(char::is_uppercase) {
                found.entry(word).or_default().push(&file.path);
            }
        }
    }
    found
}

/// Finds pairs of equal passages of [`PASSAGE`] lines of code, with white space folded, without imports and lines of
/// mere punctuation. A longer repeated passage counts once; a passage with more than eight occurrences is too
/// common to count.
pub fn repeated(sources: &Sources) -> Vec<(String, String)> {
    let lines: Vec<Vec<(usize, String)>> = sources.files.iter().map(significant).collect();
    let mut places: HashMap<Vec<&str>, Vec<(usize, usize)>> = HashMap::new();
    for (file, lines) in lines.iter().enumerate() {
        for (at, window) in lines.windows(PASSAGE).enumerate() {
            places.entry(window.iter().map(|(_, line)| line.as_str()).collect()).or_default().push((file, at));
        }
    }
    let before = |(file, at): (usize, usize)| Some(&lines[file][at.checked_sub(1)?].1);
    let name = |(file, at): (usize, usize)| format!("{}:{}", sources.files[file].path, lines[file][at].0);
    let mut found = Vec::new();
    for places in places.values().filter(|places| places.len() <= 8) {
        for (n, a) in places.iter().enumerate() {
            let starts = |b: &&(usize, usize)| before(*a) != before(**b) || before(*a).is_none();
            let apart = |b: &&(usize, usize)| a.0 != b.0 || a.1.abs_diff(b.1) >= PASSAGE;
            found.extend(places[n + 1..].iter().filter(starts).filter(apart).map(|b| (name(*a), name(*b))));
        }
    }
    found.sort();
    found
}

fn significant(file: &Source) -> Vec<(usize, String)> {
    let folded = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let counts = |(_, line): &(usize, String)| {
        line.chars().filter(|c| c.is_alphanumeric()).count() >= 2
            && !line.starts_with("use ")
            && !line.starts_with("#[")
    };
    file.code.lines().enumerate().map(|(n, line)| (n + 1, folded(line))).filter(counts).collect()
}

/// Returns the files whose code contains `word`, in any case, also inside a longer name.
pub fn naming<'a>(sources: &'a Sources, word: &str) -> Vec<&'a str> {
    let names = |file: &&Source| file.code.to_lowercase().contains(word);
    sources.files.iter().filter(names).map(|file| file.path.as_str()).collect()
}

/// Formats the table of all counts in Markdown.
pub fn table(sources: &Sources) -> String {
    let mut text = String::from("| module | files | lines | code |\n|---|---|---|---|\n");
    let mut modules: BTreeMap<&str, [usize; 3]> = BTreeMap::new();
    for file in &sources.files {
        let row = [1, file.text.lines().count(), file.code_lines()];
        for name in [file.top(), "all"] {
            modules.entry(name).or_default().iter_mut().zip(row).for_each(|(sum, n)| *sum += n);
        }
    }
    let mut rows: Vec<_> = modules.into_iter().collect();
    rows.sort_by_key(|(_, [.., code])| std::cmp::Reverse(*code));
    for (name, [files, lines, code]) in rows {
        let _ = writeln!(text, "| {name} | {files} | {lines} | {code} |");
    }
    text.push_str("\n| count | value |\n|---|---|\n");
    for (name, value) in values(sources) {
        let _ = writeln!(text, "| {name} | {value} |");
    }
    text
}

fn values(sources: &Sources) -> Vec<(&'static str, String)> {
    let arrows: Vec<(usize, usize)> = graph::imports(sources).iter().map(|i| (i.from, i.to)).collect();
    let sizes = |circles: Vec<Vec<usize>>| circles.iter().map(|c| c.len().to_string()).collect::<Vec<_>>().join(", ");
    let mut functions: Vec<usize> = functions(sources).iter().map(|f| f.lines).collect();
    functions.sort_unstable();
    let at = |percent: usize| functions[(functions.len() - 1) * percent / 100];
    let types = types(sources);
    let shared: Vec<usize> = types.values().map(Vec::len).filter(|n| *n > 1).collect();
    let naming = |word| naming(sources, word).len().to_string();
    vec![
        ("circles of files", sizes(graph::circles(sources.files.len(), &arrows))),
        ("files over 450 lines of code", sources.files.iter().filter(|f| f.code_lines() > 450).count().to_string()),
        ("lines over 120 columns", sources.files.iter().map(long_lines).sum::<usize>().to_string()),
        ("functions", functions.len().to_string()),
        (
            "lines of a function: median, 90 %, 99 %, largest",
            format!("{}, {}, {}, {}", at(50), at(90), at(99), at(100)),
        ),
        ("types", types.values().map(Vec::len).sum::<usize>().to_string()),
        ("types that share their name", format!("{} with {} names", shared.iter().sum::<usize>(), shared.len())),
        ("types with the commonest name", shared.iter().max().unwrap_or(&1).to_string()),
        ("pairs of equal passages", repeated(sources).len().to_string()),
        ("files that name the scheme nl4", naming("nl4")),
        ("files that name the family phi3", naming("phi3")),
    ]
}

/// Counts the lines of a file over 120 columns, except rows of tables in comments.
pub fn long_lines(file: &Source) -> usize {
    let is_row = |line: &str| line.trim_start_matches(['/', '!', ' ']).starts_with('|');
    file.text.lines().filter(|line| line.chars().count() > 120 && !is_row(line)).count()
}
