//! Reads a schema: every keyword is enforced, is an annotation, or is refused or left out by name.

use super::ReadOptions;
use super::keywords::{ANNOTATIONS, DRAFTS, NOT_ENFORCED, TYPED};
use super::multiples::Multiples;
use super::node::Node;
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::collections::{HashMap, HashSet};

/// Largest accepted number of subschemas; one is counted for every reference to it that is followed.
const SCHEMAS: usize = 20_000;
/// Largest magnitude of a bound: below it, every integer is an exact 64-bit float, the type in which they are compiled.
pub(super) const EXACT: f64 = (1u64 << 53) as f64;

/// Members of a schema.
pub(super) type Members = Map<String, Value>;

/// Reads one schema.
pub(super) struct Reader<'a> {
    root: &'a Value,
    pub(super) options: ReadOptions,
    /// Places of what is left out, each once.
    pub(super) ignored: Vec<String>,
    /// The same places, to find them.
    noted: HashSet<String>,
    /// Numbers of the references that were followed, and what they lead to. `None` while it is read.
    refs: HashMap<String, usize>,
    pub(super) defs: Vec<Option<Node>>,
    schemas: usize,
    /// Pairs of nodes that were merged or compared.
    pub(super) pairs: usize,
    pub(super) multiples: Multiples,
}

impl<'a> Reader<'a> {
    pub(super) fn new(root: &'a Value, options: ReadOptions) -> Reader<'a> {
        Reader {
            root,
            options,
            ignored: Vec::new(),
            noted: HashSet::new(),
            refs: HashMap::new(),
            defs: Vec::new(),
            schemas: 0,
            pairs: 0,
            multiples: Multiples::default(),
        }
    }

    /// Reads the whole schema.
    ///
    /// # Errors
    /// It is too large, allows nothing, or has something that cannot be enforced and is not left out.
    pub(super) fn whole(&mut self) -> Result<Node> {
        let root = self.root;
        let node = self.schema(root, "#", 0)?;
        for number in 0..self.defs.len() {
            if self.begins_with_itself(number) {
                self.cannot("#/$ref", "a schema that refers to itself without any content")?;
                self.defs[number] = Some(Node::Any);
            }
        }
        match self.is_never(&node) {
            true => {
                Err(Error::unsupported("JSON schema: found a schema that no JSON is valid against, such as `false`")
                    .help("remove contradictory keywords"))
            }
            false => Ok(node),
        }
    }

    /// Returns true if a value of the reference of this number can begin with a value of the same reference.
    fn begins_with_itself(&self, number: usize) -> bool {
        let reference = Node::Ref(number);
        let (mut seen, mut open) = (HashSet::new(), vec![&reference]);
        while let Some(node) = open.pop() {
            match node {
                Node::Union(options) => open.extend(options.iter()),
                Node::Ref(next) if seen.insert(*next) => open.extend(self.defs.get(*next).and_then(Option::as_ref)),
                Node::Ref(next) if *next == number => return true,
                _ => {}
            }
        }
        false
    }

    /// Returns true if a node allows nothing.
    pub(super) fn is_never(&self, node: &Node) -> bool {
        match node {
            Node::Ref(number) => matches!(self.defs.get(*number), Some(Some(Node::Never))),
            node => node.is_never(),
        }
    }

    /// Leaves out what cannot be enforced, and notes its place.
    ///
    /// # Errors
    /// Everything must be enforced.
    pub(super) fn cannot(&mut self, place: &str, what: impl Into<String>) -> Result<()> {
        if self.options.lenient {
            if self.noted.insert(place.to_string()) {
                self.ignored.push(place.to_string());
            }
            return Ok(());
        }
        let (parent, keyword) = place.rsplit_once('/').unwrap_or((place, ""));
        let what = what.into();
        let what = if what.is_empty() { "which is not supported".into() } else { what };
        Err(Error::unsupported(format!("JSON schema: found `{keyword}` at {parent}: {what}"))
            .help("remove the keyword; annotations of your own may begin with `x-` (docs/guide/structured-output.md)"))
    }

    /// Reads a subschema.
    pub(super) fn schema(&mut self, schema: &'a Value, place: &str, depth: usize) -> Result<Node> {
        self.schemas += 1;
        if self.schemas > SCHEMAS {
            let found = format!("JSON schema: found a number of subschemas of more than {SCHEMAS} at {place}");
            return Err(Error::unsupported(found).help("use a smaller schema"));
        }
        if depth > self.options.depth {
            self.cannot(place, format!("a depth of more than {}", self.options.depth))?;
            return Ok(Node::Any);
        }
        let members = match schema {
            Value::Bool(true) => return Ok(Node::Any),
            Value::Bool(false) => return Ok(Node::Never),
            Value::Object(members) => members,
            _ => {
                self.wrong(place, "a schema (an object or a boolean)")?;
                return Ok(Node::Any);
            }
        };
        let (mut parts, mut typed, mut nullable) = (Vec::new(), None, false);
        for (keyword, value) in members {
            let place = &format!("{place}/{keyword}");
            match keyword.as_str() {
                "$ref" => parts.push(self.reference(value, place, depth + 1)?),
                "const" => parts.push(self.constants(std::slice::from_ref(value), place)?),
                "enum" => match value.as_array().filter(|values| !values.is_empty()) {
                    Some(values) => parts.push(self.constants(values, place)?),
                    None => self.wrong(place, "a list of values")?,
                },
                "allOf" => parts.extend(self.list(value, place, depth + 1)?),
                "anyOf" => parts.push(Node::union(self.list(value, place, depth + 1)?)),
                "oneOf" => parts.push(self.one_of(value, place, depth + 1)?),
                "nullable" => nullable = value == &Value::Bool(true),
                _ if TYPED.contains(&keyword.as_str()) && typed.is_none() => {
                    typed = Some(parts.len());
                    parts.push(Node::Any);
                }
                _ => self.other(keyword, value, members, place)?,
            }
        }
        if let Some(at) = typed {
            parts[at] = self.typed(members, place, depth + 1)?;
        }
        let mut node = Node::Any;
        for part in parts {
            node = self.both(node, part, place, 0)?;
        }
        Ok(if nullable { Node::union(vec![node, Node::Null]) } else { node })
    }

    /// Reads a keyword that says nothing about values, or nothing that can be enforced.
    fn other(&mut self, keyword: &str, value: &Value, members: &Members, place: &str) -> Result<()> {
        let is_empty = |value: &Value| matches!(value, Value::Bool(true)) || *value == Value::Object(Map::new());
        match keyword {
            "unevaluatedProperties" if value == &Value::Bool(false) && is_alone(members) => Ok(()),
            "$id" if place != "#/$id" => self.cannot(place, "which changes what references lead to"),
            _ if TYPED.contains(&keyword) || ANNOTATIONS.contains(&keyword) || keyword.starts_with("x-") => Ok(()),
            "$schema" => match value.as_str() {
                Some(name) if DRAFTS.iter().any(|draft| name.contains(draft)) => Ok(()),
                _ => self.cannot(place, format!("{value}, expected draft 4 to 2020-12")),
            },
            "uniqueItems" if value == &Value::Bool(false) => Ok(()),
            "unevaluatedProperties" | "unevaluatedItems" if is_empty(value) => Ok(()),
            // Conditions without effect.
            "then" | "else" if !members.contains_key("if") => Ok(()),
            "minContains" | "maxContains" if !members.contains_key("contains") => Ok(()),
            _ if NOT_ENFORCED.contains(&keyword) => self.cannot(place, ""),
            _ => self.cannot(place, "which is not known"),
        }
    }

    pub(super) fn wrong(&mut self, place: &str, expected: &str) -> Result<()> {
        match self.options.lenient {
            true => self.cannot(place, ""),
            false => Err(Error::corrupt(format!(
                "JSON schema: found a value of another type at {place}, expected {expected}"
            ))),
        }
    }

    pub(super) fn list(&mut self, value: &'a Value, place: &str, depth: usize) -> Result<Vec<Node>> {
        let Some(items) = value.as_array() else {
            self.wrong(place, "a list of schemas")?;
            return Ok(vec![Node::Any]);
        };
        items.iter().enumerate().map(|(i, item)| self.schema(item, &format!("{place}/{i}"), depth)).collect()
    }

    fn one_of(&mut self, value: &'a Value, place: &str, depth: usize) -> Result<Node> {
        let options = self.list(value, place, depth)?;
        let overlap =
            (0..options.len()).any(|i| (i + 1..options.len()).any(|j| !self.are_disjoint(&options[i], &options[j], 0)));
        if overlap {
            let help = "alternatives that may overlap; use `anyOf`, or give each a required property with a `const` \
                        of its own, so that they differ";
            self.cannot(place, help)?;
        }
        Ok(Node::union(options))
    }

    /// Returns what a reference leads to, if it has been read.
    pub(super) fn resolved(&mut self, number: usize, place: &str) -> Result<Option<Node>> {
        match self.defs.get(number).cloned().flatten() {
            Some(node) => Ok(Some(node)),
            None => {
                self.cannot(&format!("{place}/$ref"), "other keywords beside a reference to a schema around it")?;
                Ok(None)
            }
        }
    }

    fn reference(&mut self, value: &'a Value, place: &str, depth: usize) -> Result<Node> {
        let Some(target) = value.as_str() else {
            self.wrong(place, "a text")?;
            return Ok(Node::Any);
        };
        if let Some(number) = self.refs.get(target) {
            return Ok(Node::Ref(*number));
        }
        let path = match target {
            "#" | "#/" => Some(String::new()),
            _ => target.strip_prefix('#').filter(|path| path.starts_with('/')).and_then(unescaped),
        };
        let Some(path) = path else {
            let help =
                "expected one like `#/$defs/NAME`; copy the schema into `$defs`, nothing is loaded from elsewhere";
            self.cannot(place, format!("`{target}`, {help}"))?;
            return Ok(Node::Any);
        };
        let root = self.root;
        let Some(schema) = root.pointer(&path) else {
            self.cannot(place, format!("`{target}`, which leads nowhere"))?;
            return Ok(Node::Any);
        };
        let number = self.defs.len();
        self.refs.insert(target.to_string(), number);
        self.defs.push(None);
        let node = self.schema(schema, target, depth)?;
        self.defs[number] = Some(node);
        Ok(Node::Ref(number))
    }

    fn constants(&mut self, values: &[Value], place: &str) -> Result<Node> {
        if let Some(number) = values.iter().find_map(inexact) {
            let found = format!("the number {number}, expected at most 2^64 for an integer; use a text instead");
            self.cannot(place, found)?;
            return Ok(Node::Any);
        }
        Ok(Node::union(values.iter().map(Node::constant).collect()))
    }
}

/// Returns true if no other schema describes the same value.
pub(super) fn is_alone(members: &Members) -> bool {
    !["allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"].iter().any(|keyword| members.contains_key(*keyword))
}

/// Returns a JSON pointer without the escapes of a URI.
fn unescaped(path: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.as_bytes();
    while let Some((first, behind)) = rest.split_first() {
        rest = behind;
        match first {
            b'%' => {
                let hex = std::str::from_utf8(rest.get(..2)?).ok()?;
                bytes.push(u8::from_str_radix(hex, 16).ok()?);
                rest = &rest[2..];
            }
            byte => bytes.push(*byte),
        }
    }
    String::from_utf8(bytes).ok()
}

/// Returns a number that has lost digits when it was parsed.
fn inexact(value: &Value) -> Option<&serde_json::Number> {
    match value {
        Value::Number(number) if number.is_f64() && number.as_f64().is_none_or(|value| value.abs() > EXACT) => {
            Some(number)
        }
        Value::Array(items) => items.iter().find_map(inexact),
        Value::Object(members) => members.values().find_map(inexact),
        _ => None,
    }
}
