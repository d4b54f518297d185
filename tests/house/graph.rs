//! Finds the imports between source files, and cycles among them.

use super::source::{Source, Sources};

/// Path to an item of another file.
#[derive(Debug)]
pub struct Import {
    /// Index of the file that contains the path.
    pub from: usize,
    /// Index of the file that defines the module of the path.
    pub to: usize,
    /// Line in the file that contains the path.
    pub line: usize,
    /// Path from the root of its crate: `["iec", "quant", "block", "nl4"]`.
    pub path: Vec<String>,
}

/// Offset and text of a token: a word, `::`, or another character.
type Token<'a> = (usize, &'a str);

/// Returns all paths into the crate in `use` items and code.
pub fn imports(sources: &Sources) -> Vec<Import> {
    let of = |from: usize| {
        let file = &sources.files[from];
        paths(sources, file).into_iter().filter_map(move |(at, path)| {
            let to = sources.file_of(&path)?;
            (to != from).then(|| Import { from, to, line: file.line_of(at), path })
        })
    };
    (0..sources.files.len()).flat_map(of).collect()
}

/// Splits code without comments and contents of strings into tokens.
pub fn tokens(bare: &str) -> Vec<Token<'_>> {
    let s = bare.as_bytes();
    let is_word = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_' || *b >= 128;
    let mut found = Vec::new();
    let mut i = 0;
    while i < s.len() {
        let len = match s[i] {
            b if is_word(&b) => s[i..].iter().take_while(|b| is_word(b)).count(),
            b':' if s.get(i + 1) == Some(&b':') => 2,
            _ => 1,
        };
        if !s[i].is_ascii_whitespace() {
            found.push((i, &bare[i..i + len]));
        }
        i += len;
    }
    found
}

/// Returns the absolute paths in a file, with the offset of each.
fn paths(sources: &Sources, file: &Source) -> Vec<(usize, Vec<String>)> {
    let tokens = tokens(&file.bare);
    let mut found = Vec::new();
    let mut inside: Vec<(usize, String)> = Vec::new(); // inline modules and the depth of their braces
    let (mut depth, mut i) = (0, 0);
    while i < tokens.len() {
        let (at, word) = tokens[i];
        let next = |n: usize| tokens.get(i + n).map_or("", |(_, word)| *word);
        let mut here = file.module.clone();
        here.extend(inside.iter().map(|(_, name)| name.clone()));
        match word {
            "{" => depth += 1,
            "}" => {
                depth -= 1;
                inside.pop_if(|(outer, _)| *outer == depth);
            }
            "mod" if next(2) == "{" => inside.push((depth, next(1).to_string())),
            "use" if next(1) != "<" => {
                let mut leaves = Vec::new();
                i = tree(&tokens, i + 1, &[], &mut leaves);
                found.extend(leaves.iter().filter_map(|path| Some((at, absolute(sources, &here, path)?))));
                continue;
            }
            // Excluded: a word inside a path, and the scope of `pub(in ...)`.
            word if next(1) == "::"
                && !["::", "in"].contains(&before(&tokens, i))
                && (["crate", "super", "self", "iec"].contains(&word) || sources.is_module(&child(&here, word))) =>
            {
                let mut path = vec![word];
                while let [(_, "::"), (_, part), ..] = tokens[i + 1..]
                    && part.starts_with(|c: char| c.is_alphanumeric() || c == '_')
                {
                    path.push(part);
                    i += 2;
                }
                found.extend(absolute(sources, &here, &path).map(|path| (at, path)));
            }
            _ => {}
        }
        i += 1;
    }
    found
}

fn before<'a>(tokens: &[Token<'a>], i: usize) -> &'a str {
    i.checked_sub(1).map_or("", |i| tokens[i].1)
}

/// Reads a `use` tree from token `i` on, appends all its paths to `leaves` and returns the index of the next token.
fn tree<'a>(tokens: &[Token<'a>], mut i: usize, prefix: &[&'a str], leaves: &mut Vec<Vec<&'a str>>) -> usize {
    let mut path = prefix.to_vec();
    while let Some((_, word)) = tokens.get(i) {
        i += 1;
        match *word {
            "{" => {
                while tokens.get(i).is_some_and(|t| t.1 != "}") {
                    i = tree(tokens, i, &path, leaves);
                    i += usize::from(tokens.get(i).is_some_and(|t| t.1 == ","));
                }
                return i + 1;
            }
            "}" | "," | ";" => {
                i -= 1;
                break;
            }
            "as" => i += 1,
            "::" => {}
            word => path.push(word),
        }
    }
    if path.len() > prefix.len() {
        leaves.push(path);
    }
    i
}

/// Returns the path of a child of a module.
fn child(module: &[String], name: &str) -> Vec<String> {
    [module, &[name.to_string()]].concat()
}

/// Resolves a path to one from the root of its crate; returns `None` for other crates.
fn absolute(sources: &Sources, here: &[String], path: &[&str]) -> Option<Vec<String>> {
    let (first, rest) = path.split_first()?;
    let mut base = match *first {
        "crate" => vec![here[0].clone()],
        "iec" if here[0] == "bin" => vec!["iec".to_string()],
        "self" => here.to_vec(),
        "super" => here[..here.len() - 1].to_vec(),
        name => {
            let child = child(here, name);
            return sources.is_module(&child).then(|| [child, rest.iter().map(|s| s.to_string()).collect()].concat());
        }
    };
    for part in rest {
        match *part {
            "super" => drop(base.pop()),
            "self" => {}
            part => base.push(part.to_string()),
        }
    }
    Some(base)
}

/// Finds the cycles among `count` nodes: strongly connected components of at least two nodes, largest first.
pub fn circles(count: usize, arrows: &[(usize, usize)]) -> Vec<Vec<usize>> {
    let mut next = vec![Vec::new(); count];
    arrows.iter().for_each(|(from, to)| next[*from].push(*to));
    let mut search =
        Tarjan { next, index: vec![None; count], low: vec![0; count], stack: Vec::new(), found: Vec::new() };
    (0..count).for_each(|node| search.visit(node));
    search.found.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
    search.found
}

struct Tarjan {
    next: Vec<Vec<usize>>,
    index: Vec<Option<usize>>,
    low: Vec<usize>,
    stack: Vec<usize>,
    found: Vec<Vec<usize>>,
}

impl Tarjan {
    fn visit(&mut self, node: usize) {
        if self.index[node].is_some() {
            return;
        }
        let index = self.index.iter().flatten().count();
        (self.index[node], self.low[node]) = (Some(index), index);
        self.stack.push(node);
        for to in self.next[node].clone() {
            self.visit(to);
            if self.stack.contains(&to) {
                self.low[node] = self.low[node].min(self.low[to]);
            }
        }
        if self.low[node] == index {
            let start = self.stack.iter().position(|n| *n == node).expect("it was pushed");
            let circle = self.stack.split_off(start);
            if circle.len() > 1 {
                self.found.push(circle);
            }
        }
    }
}
