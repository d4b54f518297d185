//! Reads the keywords of a schema that are about values of one type.

use super::formats::{self, Format};
use super::merge;
use super::node::{Array, Node, Number, Object, Property, Text};
use super::read::{EXACT, Members, Reader, is_alone};
use super::{regexes, text};
use crate::error::Result;
use serde_json::Value;
use std::rc::Rc;

/// Largest accepted number of properties of an object.
const PROPERTIES: usize = 1000;
/// Largest accepted number of patterns for properties of an object; each is compared with each.
const PATTERNS: usize = 16;
/// Largest number of characters, items and properties that is counted.
const COUNT: u64 = 1 << 20;
/// All types.
const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

impl<'a> Reader<'a> {
    /// Reads the keywords about values of each type.
    pub(super) fn typed(&mut self, members: &'a Members, place: &str, depth: usize) -> Result<Node> {
        let types: Vec<&str> = match members.get("type") {
            None => TYPES.to_vec(),
            Some(Value::String(name)) => vec![name],
            Some(Value::Array(names)) => names.iter().map(|name| name.as_str().unwrap_or_default()).collect(),
            Some(_) => vec![""],
        };
        if let Some(unknown) = types.iter().find(|name| !TYPES.contains(name) && **name != "integer") {
            let expected = format!("the type `{unknown}`, expected integer or one of {}", TYPES.join(", "));
            self.cannot(&format!("{place}/type"), expected)?;
            return Ok(Node::Any);
        }
        let mut options = Vec::with_capacity(types.len());
        for name in &types {
            options.push(match *name {
                "null" => Node::Null,
                "boolean" => Node::Bool(None),
                "integer" if types.contains(&"number") => Node::Never,
                "integer" | "number" => self.number(members, *name == "integer", place)?,
                "string" => self.text(members, place)?,
                "array" => self.array(members, place, depth)?,
                _ => self.object(members, place, depth)?,
            });
        }
        Ok(Node::union(options))
    }

    fn number(&mut self, members: &'a Members, integer: bool, place: &str) -> Result<Node> {
        let mut bounds = [None; 2];
        for (bound, plain, exclusive) in [(0, "minimum", "exclusiveMinimum"), (1, "maximum", "exclusiveMaximum")] {
            // In draft 4, the exclusive bound is a flag of the other one.
            let is_flagged = members.get(exclusive) == Some(&Value::Bool(true));
            let own = self.bound(members, plain, place)?.map(|value| (value, is_flagged));
            let excluded = match members.get(exclusive) {
                Some(Value::Bool(_)) | None => None,
                Some(_) => self.bound(members, exclusive, place)?.map(|value| (value, true)),
            };
            bounds[bound] = match (own, excluded) {
                (Some(own), Some(excluded)) => {
                    let tighter = if bound == 0 { excluded.0 >= own.0 } else { excluded.0 <= own.0 };
                    Some(if tighter { excluded } else { own })
                }
                (own, excluded) => own.or(excluded),
            };
        }
        let mut multiples = Vec::new();
        if let Some(step) = members.get("multipleOf") {
            match self.multiples.add(std::slice::from_ref(step)) {
                Ok(_) => multiples.push(step.clone()),
                Err(why) => self.cannot(&format!("{place}/multipleOf"), why)?,
            }
        }
        Ok(merge::number(Number { integer, constant: None, min: bounds[0], max: bounds[1], multiples }))
    }

    fn bound(&mut self, members: &'a Members, keyword: &str, place: &str) -> Result<Option<f64>> {
        let place = &format!("{place}/{keyword}");
        match members.get(keyword).map(|value| (value, value.as_f64())) {
            None => Ok(None),
            Some((_, Some(value))) if value.abs() <= EXACT => Ok(Some(value)),
            Some((value, Some(_))) => {
                self.cannot(place, format!("the number {value}, expected at most 2^53 = {EXACT}"))?;
                Ok(None)
            }
            Some((_, None)) => self.wrong(place, "a number").map(|()| None),
        }
    }

    /// Reads a number of characters, items or properties.
    fn count(&mut self, members: &'a Members, keyword: &str, place: &str) -> Result<Option<usize>> {
        let place = &format!("{place}/{keyword}");
        let Some(value) = members.get(keyword) else { return Ok(None) };
        let whole = value.as_f64().filter(|number| *number >= 0.0 && number.fract() == 0.0);
        match whole {
            Some(count) if count <= COUNT as f64 => Ok(Some(count as usize)),
            Some(_) => self.cannot(place, format!("{value}, expected at most {COUNT}")).map(|()| None),
            None => self.wrong(place, "a whole number").map(|()| None),
        }
    }

    fn text(&mut self, members: &'a Members, place: &str) -> Result<Node> {
        let min = self.count(members, "minLength", place)?.unwrap_or(0);
        let max = self.count(members, "maxLength", place)?;
        let mut known = Text { min, max, ..Text::default() };
        if let Some(pattern) = members.get("pattern") {
            let at = format!("{place}/pattern");
            match pattern.as_str().map(|pattern| (pattern, text::pattern(pattern))) {
                Some(("", _)) => {}
                Some((_, Ok(pattern))) => known.patterns.push(pattern.into()),
                Some((source, Err(why))) => {
                    self.cannot(&at, why.cause().to_string())?;
                    // A hint is followed as far as possible.
                    if let Ok(wider) = text::pattern(&text::without_look_around(source)) {
                        known.patterns.push(wider.into());
                    }
                }
                None => self.wrong(&at, "a text")?,
            }
        }
        if let Some(format) = members.get("format") {
            let at = format!("{place}/format");
            match format.as_str().map(formats::of) {
                Some(Format::Pattern(pattern)) => {
                    let held =
                        Text { patterns: [&known.patterns[..], &[text::format(&pattern)?.into()]].concat(), ..known };
                    // A pattern may describe another form of the value, such as a date without a time.
                    match regexes::are_empty(&held) && self.options.lenient {
                        true => {
                            self.cannot(&at, "")?;
                            known = Text { patterns: held.patterns[..held.patterns.len() - 1].to_vec(), ..held };
                        }
                        false => known = held,
                    }
                }
                Some(Format::Any) => {}
                Some(Format::Unknown) => self.cannot(&at, format!("{format}, which is not known"))?,
                None => self.wrong(&at, "a text")?,
            }
        }
        Ok(merge::text(known))
    }

    fn array(&mut self, members: &'a Members, place: &str, depth: usize) -> Result<Node> {
        let items = members.get("items");
        let (first, rest) = match items {
            Some(Value::Array(_)) => (items.map(|items| (items, "items")), members.get("additionalItems")),
            _ => (members.get("prefixItems").map(|items| (items, "prefixItems")), items),
        };
        let first = match first {
            Some((items, keyword)) => self.list(items, &format!("{place}/{keyword}"), depth)?,
            None => Vec::new(),
        };
        let name = if matches!(items, Some(Value::Array(_))) { "additionalItems" } else { "items" };
        let rest = rest.map(|rest| self.schema(rest, &format!("{place}/{name}"), depth)).transpose()?;
        let rest = rest.map_or(Node::Any, |rest| if self.is_never(&rest) { Node::Never } else { rest });
        let min = self.count(members, "minItems", place)?.unwrap_or(0);
        let max = self.count(members, "maxItems", place)?;
        Ok(merge::array(Array { first, rest, min, max }))
    }

    fn object(&mut self, members: &'a Members, place: &str, depth: usize) -> Result<Node> {
        let own = self.map(members, "properties", PROPERTIES, place, depth)?;
        let mut patterns = Vec::new();
        for (pattern, value) in self.map(members, "patternProperties", PATTERNS, place, depth)? {
            match text::pattern(pattern) {
                Ok(expression) => patterns.push((Rc::from(expression), value)),
                Err(why) => self.cannot(&format!("{place}/patternProperties"), why.cause().to_string())?,
            }
        }
        self.check_disjoint(&patterns, place)?;
        let mut others = match members.get("additionalProperties") {
            Some(schema) => Some(self.schema(schema, &format!("{place}/additionalProperties"), depth)?),
            None => None,
        };
        if members.get("unevaluatedProperties") == Some(&Value::Bool(false)) && is_alone(members) {
            others = others.or(Some(Node::Never));
        }
        let listed = members.contains_key("properties") || !patterns.is_empty();
        let mut object = Object { listed, patterns, others, ..Object::default() };
        for (name, mut value) in own {
            for i in 0..object.patterns.len() {
                if regexes::matches(&object.patterns[i].0, name) {
                    let beside = object.patterns[i].1.clone();
                    value = self.both(value, beside, place, 0)?;
                }
            }
            let value = if self.is_never(&value) { Node::Never } else { value };
            object.properties.push(Property { name: name.into(), value, required: false });
        }
        self.require(members, &mut object, place)?;
        object.names = self.names(members, &object, place, depth)?;
        object.min = self.count(members, "minProperties", place)?.unwrap_or(0);
        object.max = self.count(members, "maxProperties", place)?;
        Ok(merge::object(object))
    }

    fn map(
        &mut self,
        members: &'a Members,
        keyword: &str,
        most: usize,
        place: &str,
        depth: usize,
    ) -> Result<Vec<(&'a str, Node)>> {
        let place = &format!("{place}/{keyword}");
        let Some(value) = members.get(keyword) else { return Ok(Vec::new()) };
        let Some(schemas) = value.as_object() else {
            self.wrong(place, "an object of schemas")?;
            return Ok(Vec::new());
        };
        if schemas.len() > most {
            self.cannot(place, format!("{} entries of {place}, expected at most {most}", schemas.len()))?;
            return Ok(Vec::new());
        }
        let read = |(name, schema): (&'a String, &'a Value)| {
            let place = format!("{place}/{}", name.replace('~', "~0").replace('/', "~1"));
            Ok((name.as_str(), self.schema(schema, &place, depth)?))
        };
        schemas.iter().map(read).collect()
    }

    /// Marks the required properties, and adds those that are listed nowhere else.
    fn require(&mut self, members: &Members, object: &mut Object, place: &str) -> Result<()> {
        let place = &format!("{place}/required");
        let names = match members.get("required") {
            // In draft 3 and in some tools, a property itself has this flag.
            None => return Ok(()),
            Some(Value::Array(names)) => names,
            Some(_) => return self.wrong(place, "a list of names"),
        };
        for name in names {
            let Some(name) = name.as_str() else {
                self.wrong(place, "a list of names")?;
                continue;
            };
            if let Some(property) = object.properties.iter_mut().find(|property| *property.name == *name) {
                property.required = true;
                continue;
            }
            let pattern = object.patterns.iter().find(|(pattern, _)| regexes::matches(pattern, name));
            let value = pattern.map(|(_, value)| value).or(object.others.as_ref()).cloned().unwrap_or(Node::Any);
            if value.is_never() && self.options.lenient {
                self.cannot(place, "")?;
                continue;
            }
            object.properties.push(Property { name: name.into(), value, required: true });
        }
        Ok(())
    }

    /// Reads `propertyNames`, which limits the names of an object without properties of its own.
    fn names(&mut self, members: &'a Members, object: &Object, place: &str, depth: usize) -> Result<Option<Vec<Text>>> {
        let Some(schema) = members.get("propertyNames") else { return Ok(None) };
        let place = &format!("{place}/propertyNames");
        let options = match self.schema(schema, place, depth)? {
            Node::Any => return Ok(None),
            Node::Union(options) => options,
            one => vec![one],
        };
        let mut names = Vec::new();
        for option in options {
            match option {
                Node::Text(Text { constant: None, patterns, min: 0, max: None }) if patterns.is_empty() => {
                    return Ok(None);
                }
                Node::Text(text) => names.push(text),
                // A name is a text.
                Node::Null | Node::Bool(_) | Node::Number(_) | Node::Array(_) | Node::Object(_) => {}
                _ => return self.cannot(place, "").map(|()| None),
            }
        }
        match names.is_empty() || !object.properties.is_empty() || !object.patterns.is_empty() {
            true => self.cannot(place, "beside named properties").map(|()| None),
            false => Ok(Some(names)),
        }
    }

    /// Checks that no name matches two patterns, as the value of such a property would have to be valid for both.
    pub(super) fn check_disjoint(&mut self, patterns: &[(Rc<str>, Node)], place: &str) -> Result<()> {
        for (i, (one, _)) in patterns.iter().enumerate() {
            for (other, _) in &patterns[i + 1..] {
                if regexes::is_empty(&[one.clone(), other.clone()]) != Some(true) {
                    return self.cannot(&format!("{place}/patternProperties"), "patterns that may match the same name");
                }
            }
        }
        Ok(())
    }
}
