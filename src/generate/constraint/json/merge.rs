//! Intersections of schemas: what `allOf`, and keywords beside a reference or an alternative, allow together.

use super::node::{Array, Node, Number, Object, Property, Text};
use super::read::Reader;
use super::regexes;
use crate::error::{Error, Result};
use std::rc::Rc;

/// Largest depth of nodes that are merged.
const DEPTH: usize = 128;
/// Largest number of pairs of nodes that are merged or compared for a schema.
const PAIRS: usize = 50_000;

impl Reader<'_> {
    /// Returns what two nodes allow both.
    ///
    /// # Errors
    /// There are too many pairs, or a reference is followed within itself.
    pub(super) fn both(&mut self, a: Node, b: Node, place: &str, depth: usize) -> Result<Node> {
        self.pairs += 1;
        if self.pairs > PAIRS || depth > DEPTH {
            let found = format!("JSON schema: found too many schemas that apply to the same value at {place}");
            return Err(Error::unsupported(found).help("use a smaller schema"));
        }
        Ok(match (a, b) {
            (Node::Any, other) | (other, Node::Any) => other,
            (Node::Never, _) | (_, Node::Never) => Node::Never,
            (Node::Ref(a), Node::Ref(b)) if a == b => Node::Ref(a),
            (Node::Ref(number), other) => match self.resolved(number, place)? {
                Some(node) => self.both(node, other, place, depth + 1)?,
                None => Node::Ref(number),
            },
            (other, Node::Ref(number)) => match self.resolved(number, place)? {
                Some(node) => self.both(other, node, place, depth + 1)?,
                None => Node::Ref(number),
            },
            (Node::Union(options), other) => {
                let each = options.into_iter().map(|option| self.both(option, other.clone(), place, depth + 1));
                Node::union(each.collect::<Result<_>>()?)
            }
            (other, Node::Union(options)) => {
                let each = options.into_iter().map(|option| self.both(other.clone(), option, place, depth + 1));
                Node::union(each.collect::<Result<_>>()?)
            }
            (Node::Null, Node::Null) => Node::Null,
            (Node::Bool(a), Node::Bool(b)) => match (a, b) {
                (None, value) | (value, None) => Node::Bool(value),
                (Some(a), Some(b)) if a == b => Node::Bool(Some(a)),
                _ => Node::Never,
            },
            (Node::Number(a), Node::Number(b)) => numbers(a, b),
            (Node::Text(a), Node::Text(b)) => texts(a, b),
            (Node::Array(a), Node::Array(b)) => self.arrays(&a, &b, place, depth)?,
            (Node::Object(a), Node::Object(b)) => self.objects(&a, &b, place, depth)?,
            _ => Node::Never,
        })
    }

    fn arrays(&mut self, a: &Array, b: &Array, place: &str, depth: usize) -> Result<Node> {
        let at = |array: &Array, i: usize| array.first.get(i).unwrap_or(&array.rest).clone();
        let count = a.first.len().max(b.first.len());
        let first = (0..count).map(|i| self.both(at(a, i), at(b, i), place, depth + 1)).collect::<Result<_>>()?;
        let rest = self.both(a.rest.clone(), b.rest.clone(), place, depth + 1)?;
        Ok(array(Array { first, rest, min: a.min.max(b.min), max: smaller(a.max, b.max) }))
    }

    fn objects(&mut self, a: &Object, b: &Object, place: &str, depth: usize) -> Result<Node> {
        let mut properties = Vec::with_capacity(a.properties.len() + b.properties.len());
        for (own, other) in [(a, b), (b, a)] {
            for property in &own.properties {
                let twin = other.properties.iter().find(|twin| twin.name == property.name);
                if twin.is_some() && std::ptr::eq(own, b) {
                    continue;
                }
                let (value, beside) = (property.value.clone(), value_of(other, &property.name));
                let value = self.both(value, beside, place, depth + 1)?;
                let required = property.required || twin.is_some_and(|twin| twin.required);
                properties.push(Property { name: property.name.clone(), value, required });
            }
        }
        let mut patterns: Vec<(Rc<str>, Node)> = Vec::new();
        for (own, other) in [(a, b), (b, a)] {
            for (pattern, value) in &own.patterns {
                if patterns.iter().any(|(known, _)| known == pattern) {
                    continue;
                }
                let twin = other.patterns.iter().find(|(known, _)| known == pattern).map(|(_, value)| value.clone());
                let beside = twin.or(other.others.clone()).unwrap_or(Node::Any);
                patterns.push((pattern.clone(), self.both(value.clone(), beside, place, depth + 1)?));
            }
        }
        if !a.patterns.is_empty() && !b.patterns.is_empty() {
            self.check_disjoint(&patterns, place)?;
        }
        let others = match (&a.others, &b.others) {
            (Some(a), Some(b)) => Some(self.both(a.clone(), b.clone(), place, depth + 1)?),
            (Some(one), None) | (None, Some(one)) => Some(one.clone()),
            (None, None) => None,
        };
        let names = match (&a.names, &b.names) {
            (Some(_), Some(_)) => {
                self.cannot(&format!("{place}/propertyNames"), "several of them for one object")?;
                a.names.clone()
            }
            (names, None) | (None, names) => names.clone(),
        };
        let (min, max) = (a.min.max(b.min), smaller(a.max, b.max));
        let listed = a.listed || b.listed;
        Ok(object(Object { listed, properties, patterns, others, names, min, max }))
    }

    /// Returns true if no value is allowed by both nodes. Where that is hard to see, it returns false.
    pub(super) fn are_disjoint(&mut self, a: &Node, b: &Node, depth: usize) -> bool {
        self.pairs += 1;
        if self.pairs > PAIRS || depth > DEPTH {
            return false;
        }
        match (a, b) {
            (Node::Never, _) | (_, Node::Never) => true,
            (Node::Any, _) | (_, Node::Any) => false,
            (Node::Ref(number), other) | (other, Node::Ref(number)) => {
                let node = self.defs.get(*number).cloned().flatten();
                node.is_some_and(|node| self.are_disjoint(&node, other, depth + 1))
            }
            (Node::Union(options), other) | (other, Node::Union(options)) => {
                options.iter().all(|option| self.are_disjoint(option, other, depth + 1))
            }
            (Node::Bool(Some(a)), Node::Bool(Some(b))) => a != b,
            (Node::Number(a), Node::Number(b)) => matches!(numbers(a.clone(), b.clone()), Node::Never),
            (Node::Text(a), Node::Text(b)) => matches!(texts(a.clone(), b.clone()), Node::Never),
            (Node::Object(a), Node::Object(b)) => {
                let required = a.properties.iter().chain(&b.properties).filter(|property| property.required);
                let names: Vec<Rc<str>> = required.map(|property| property.name.clone()).collect();
                names.iter().any(|name| self.are_disjoint(&value_of(a, name), &value_of(b, name), depth + 1))
            }
            (Node::Array(_), Node::Array(_)) => false,
            _ => std::mem::discriminant(a) != std::mem::discriminant(b),
        }
    }
}

/// Returns what an object allows as the value of a property.
fn value_of(object: &Object, name: &str) -> Node {
    let own = object.properties.iter().find(|property| *property.name == *name);
    let pattern = || object.patterns.iter().find(|(pattern, _)| regexes::matches(pattern, name)).map(|(_, node)| node);
    own.map(|property| &property.value).or_else(pattern).or(object.others.as_ref()).cloned().unwrap_or(Node::Any)
}

/// Returns the node of an array; [`Node::Never`] if there is none.
pub(super) fn array(mut array: Array) -> Node {
    if let Some(never) = array.first.iter().position(Node::is_never) {
        array.first.truncate(never);
        array.rest = Node::Never;
    }
    if array.rest.is_never() {
        let most = array.first.len();
        array.max = Some(array.max.map_or(most, |max| max.min(most)));
    }
    match array.max.is_some_and(|max| max < array.min) {
        true => Node::Never,
        false => Node::Array(Rc::new(array)),
    }
}

/// Returns the node of an object; [`Node::Never`] if there is none.
pub(super) fn object(object: Object) -> Node {
    let required = object.properties.iter().filter(|property| property.required);
    let never = required.clone().any(|property| property.value.is_never());
    let least = object.min.max(required.count());
    match never || object.max.is_some_and(|max| max < least) {
        true => Node::Never,
        false => Node::Object(Rc::new(object)),
    }
}

/// Returns the node of numbers; [`Node::Never`] if there are none.
pub(super) fn number(number: Number) -> Node {
    let is_empty = match (&number.constant, number.min, number.max) {
        (Some(constant), ..) => !number.allows(constant),
        (None, Some((min, min_excluded)), Some((max, max_excluded))) => {
            min > max || min == max && (min_excluded || max_excluded)
        }
        _ => false,
    };
    if is_empty { Node::Never } else { Node::Number(number) }
}

fn numbers(a: Number, b: Number) -> Node {
    let constant = match (&a.constant, &b.constant) {
        (Some(a), Some(b)) if a.as_f64() != b.as_f64() => return Node::Never,
        (Some(one), _) | (None, Some(one)) => Some(one.clone()),
        (None, None) => None,
    };
    // Of two equal bounds, the one counts that excludes its value.
    let min = match (a.min, b.min) {
        (Some(a), Some(b)) => Some(if a.0 > b.0 || a.0 == b.0 && a.1 { a } else { b }),
        (a, b) => a.or(b),
    };
    let max = match (a.max, b.max) {
        (Some(a), Some(b)) => Some(if a.0 < b.0 || a.0 == b.0 && a.1 { a } else { b }),
        (a, b) => a.or(b),
    };
    let mut multiples = a.multiples;
    let more = b.multiples.into_iter().filter(|step| !multiples.contains(step)).collect::<Vec<_>>();
    multiples.extend(more);
    number(Number { integer: a.integer || b.integer, constant, min, max, multiples })
}

/// Returns the node of texts; [`Node::Never`] if there are none.
pub(super) fn text(text: Text) -> Node {
    let is_empty = match &text.constant {
        Some(constant) => {
            let length = constant.chars().count();
            let fits = length >= text.min && text.max.is_none_or(|max| length <= max);
            !fits || text.patterns.iter().any(|pattern| !regexes::matches(pattern, constant))
        }
        None => text.max.is_some_and(|max| max < text.min) || regexes::are_empty(&text),
    };
    if is_empty { Node::Never } else { Node::Text(text) }
}

fn texts(a: Text, b: Text) -> Node {
    let constant = match (&a.constant, &b.constant) {
        (Some(a), Some(b)) if a != b => return Node::Never,
        (Some(one), _) | (None, Some(one)) => Some(one.clone()),
        (None, None) => None,
    };
    let mut patterns = a.patterns;
    let more = b.patterns.into_iter().filter(|pattern| !patterns.contains(pattern)).collect::<Vec<_>>();
    patterns.extend(more);
    text(Text { constant, patterns, min: a.min.max(b.min), max: smaller(a.max, b.max) })
}

fn smaller(a: Option<usize>, b: Option<usize>) -> Option<usize> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
