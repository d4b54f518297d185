//! Mutates JSON as a tree that keeps what parsers may refuse: keys that occur twice, and numbers of any size.

use super::{below, edit, edit_text, number, one_in, pick};
use iec::rng::Rng;

/// A value of a JSON text. Leaves and keys are kept as they are written, strings with their quotes.
#[derive(Clone)]
pub(super) enum Node {
    Leaf(String),
    List(Vec<Node>),
    Map(Vec<Member>),
}

/// Key and value of an object.
pub(super) type Member = (String, Node);

/// Values that replace others, separated by spaces; random numbers are used as well.
const VALUES: &str = r#"null true false "" "0" [] {} -1 -0.0 0.5 1e400 -1e400 1e-400 -9223372036854775809 1e19"#;

/// Parts of patterns, paths and escape sequences to insert into strings.
const TEXTS: &[&str] = &[
    "*",
    "+",
    "?",
    ".",
    "(",
    ")",
    "(?:",
    "(?=a)",
    "(?!b)",
    "(a|b)*",
    "{3}",
    "{1000}",
    "[^a]",
    "[",
    r"\\p{L}",
    r"\\s",
    r"\\1",
    r"\\",
    r"\u0000",
    r"\ud83d\ude00",
    r"\ud800",
    r"\n",
    "/",
    "../",
    "a",
    " ",
    "\u{2581}",
    "0123456789",
    "$A",
];

/// Mutates a JSON text, or several in sequence as in a file of JSON lines.
pub(super) fn mutate(input: &[u8], other: &[u8], rng: &mut Rng) -> Option<Vec<u8>> {
    let mut texts = parse(input)?;
    let others = parse(other).unwrap_or_else(|| texts.clone());
    for _ in 0..=below(rng, 4) {
        let at = below(rng, texts.len());
        match texts.get_mut(at) {
            Some(text) if at == 0 || !one_in(4, rng) => change(text, pick(&others, rng), rng),
            _ => edit(&mut texts, &others, rng),
        }
    }
    Some(texts.iter().map(Node::text).collect::<Vec<_>>().join("\n").into_bytes())
}

/// Mutates an object whose closing brace is missing: the target `dedup` appends a hash and the brace.
pub(super) fn mutate_open(input: &[u8], other: &[u8], rng: &mut Rng) -> Option<Vec<u8>> {
    let mut output = mutate(&[input, b"}"].concat(), &[other, b"}"].concat(), rng)?;
    (output.pop() == Some(b'}')).then_some(output)
}

/// Parses all JSON texts of a file; `None` if one is malformed or there is none.
pub(super) fn parse(file: &[u8]) -> Option<Vec<Node>> {
    let mut parser = Parser { rest: std::str::from_utf8(file).ok()? };
    let mut texts = vec![parser.value(0)?];
    while parser.peek().is_some() {
        texts.push(parser.value(0)?);
    }
    Some(texts)
}

/// Changes a random value of a tree, with values and keys of another tree.
pub(super) fn change(root: &mut Node, other: &Node, rng: &mut Rng) {
    let mut known = Vec::new();
    other.members(&mut known);
    let donor = other.clone().random(rng).clone();
    match root.random(rng) {
        node if one_in(6, rng) => *node = edge(rng),
        Node::Leaf(text) => change_leaf(text, &donor, rng),
        Node::List(items) => edit(items, &[donor], rng),
        Node::Map(members) if members.is_empty() || known.is_empty() => members.push(("\"a\"".into(), donor)),
        Node::Map(members) => {
            let (at, to) = (below(rng, members.len()), below(rng, members.len()));
            match below(rng, 6) {
                0 => members[at].0 = pick(&known, rng).0.clone(),
                1 => members.insert(at, (members[to].0.clone(), donor)),
                2 => {
                    let value = members[to].1.clone();
                    members[to].1 = std::mem::replace(&mut members[at].1, value);
                }
                3 => edit(members, &known, rng),
                _ => {
                    known.retain(|(key, _)| *key == members[at].0);
                    members[at].1 = if known.is_empty() { donor } else { pick(&known, rng).1.clone() };
                }
            }
        }
    }
}

/// Returns an edge value: a number, a small value, or nested lists, some of them deeper than parsers allow.
fn edge(rng: &mut Rng) -> Node {
    let depth = 1 << below(rng, 9);
    let values: Vec<&str> = VALUES.split(' ').collect();
    Node::Leaf(match below(rng, 8) {
        0..4 => number(0, rng).to_string(),
        4 => ["[".repeat(depth), "]".repeat(depth)].concat(),
        _ => pick(&values, rng).to_string(),
    })
}

fn change_leaf(text: &mut String, donor: &Node, rng: &mut Rng) {
    *text = if let Some(inner) = text.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) {
        let (mut inner, donor) = (inner.as_bytes().to_vec(), donor.text());
        let others = [TEXTS, &[donor.trim_matches('"')]];
        edit_text(&mut inner, others[below(rng, 2)], rng);
        format!("\"{}\"", String::from_utf8_lossy(&inner))
    } else if let Ok(n) = text.parse::<i64>() {
        let changed = number(n as u64, rng);
        pick(&[changed.to_string(), changed.to_string(), format!("-{changed}"), format!("{n}.5")], rng).clone()
    } else if let Ok(x) = text.parse::<f64>() {
        format!("{:e}", x * pick(&[-1.0, 0.0, 0.5, 2.0, 1e10, 1e300], rng))
    } else {
        edge(rng).text()
    }
}

impl Node {
    /// Returns a random value of the tree; from each list and object it descends with a chance of 7 in 8.
    fn random(&mut self, rng: &mut Rng) -> &mut Node {
        let children = match self {
            Node::Leaf(_) => 0,
            Node::List(items) => items.len(),
            Node::Map(members) => members.len(),
        };
        let at = below(rng, children);
        match self {
            node if children == 0 || one_in(8, rng) => node,
            Node::List(items) => items[at].random(rng),
            Node::Map(members) => members[at].1.random(rng),
            leaf => leaf,
        }
    }

    /// Collects all members of all objects of the tree.
    fn members(&self, found: &mut Vec<Member>) {
        match self {
            Node::Leaf(_) => {}
            Node::List(items) => items.iter().for_each(|item| item.members(found)),
            Node::Map(members) => {
                found.extend_from_slice(members);
                members.iter().for_each(|(_, value)| value.members(found));
            }
        }
    }

    /// Writes the tree as JSON.
    pub(super) fn text(&self) -> String {
        match self {
            Node::Leaf(text) => text.clone(),
            Node::List(items) => format!("[{}]", items.iter().map(Node::text).collect::<Vec<_>>().join(",")),
            Node::Map(members) => {
                let member = |(key, value): &Member| format!("{key}:{}", value.text());
                format!("{{{}}}", members.iter().map(member).collect::<Vec<_>>().join(","))
            }
        }
    }
}

/// Deepest nesting that is parsed.
const DEEPEST: usize = 64;

struct Parser<'a> {
    rest: &'a str,
}

impl Parser<'_> {
    /// Skips spaces and returns the next character.
    fn peek(&mut self) -> Option<char> {
        self.rest = self.rest.trim_start();
        self.rest.chars().next()
    }

    fn expect(&mut self, sign: char) -> Option<()> {
        self.peek()?;
        self.rest = self.rest.strip_prefix(sign)?;
        Some(())
    }

    fn value(&mut self, depth: usize) -> Option<Node> {
        match self.peek()? {
            _ if depth > DEEPEST => None,
            '[' => self.items(']', |parser| parser.value(depth + 1)).map(Node::List),
            '{' => self.items('}', |parser| parser.member(depth + 1)).map(Node::Map),
            _ => self.leaf().map(Node::Leaf),
        }
    }

    fn member(&mut self, depth: usize) -> Option<Member> {
        self.peek()?;
        let key = self.leaf()?;
        self.expect(':')?;
        Some((key, self.value(depth)?))
    }

    fn items<T>(&mut self, end: char, mut item: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        self.rest = &self.rest[1..];
        let mut items = Vec::new();
        while self.peek()? != end {
            if !items.is_empty() {
                self.expect(',')?;
            }
            items.push(item(self)?);
        }
        self.expect(end).map(|()| items)
    }

    /// Reads a string, or all following characters of which numbers and literals consist.
    fn leaf(&mut self) -> Option<String> {
        let length = match self.rest.strip_prefix('"') {
            Some(inner) => {
                let mut escaped = false;
                let ends = |sign: char| {
                    let ends = sign == '"' && !escaped;
                    escaped = sign == '\\' && !escaped;
                    ends
                };
                inner.find(ends)? + 2
            }
            None => self.rest.find(|c: char| !c.is_alphanumeric() && !"+-.".contains(c)).unwrap_or(self.rest.len()),
        };
        let (leaf, rest) = self.rest.split_at(length);
        self.rest = rest;
        (length > 0).then(|| leaf.to_string())
    }
}
