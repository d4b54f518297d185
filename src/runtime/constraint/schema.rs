//! JSON schemas: checks them before they are compiled.
//!
//! The compiler ignores keywords that it does not know, and one option inside a schema makes it ignore those that it
//! cannot enforce. Here every keyword that a text would not be held to is refused by name, so that an answer is always
//! valid. Annotations such as `title` and keywords that begin with `x-` are accepted and have no effect. References are
//! followed in the order of the compiler, so the depth found here is that of its recursion.

use super::multiples::Multiples;
use super::pattern;
use crate::error::{Context, Error, Result};
use crate::strict_json;
use llguidance::JsonCompileOptions;
use serde_json::{Map, Value};
use std::collections::HashSet;

/// Largest accepted size of a schema in bytes.
const BYTES: usize = 256 << 10;
/// Largest accepted depth of subschemas, references included.
const DEPTH: usize = 256;
/// Largest accepted number of subschemas; one is counted for every reference to it that is followed.
const SCHEMAS: usize = 20_000;
/// Largest accepted number of properties of an object.
const PROPERTIES: usize = 1000;
/// Largest accepted number of patterns for properties of an object; the compiler compares each with each.
const PATTERNS: usize = 16;
/// Largest integer below which every integer is an exact 64-bit float, the type in which numbers are compiled.
const EXACT: u64 = 1 << 53;

/// Whitespace between the parts of a text: a space, or a line break with indentation. Unlimited whitespace would let a
/// model write nothing else.
const WHITESPACE: &str = r"\x20|\x0A[\x20\x09]{0,20}";

/// Drafts whose keywords are known; `$schema` names one of them by the end of its path.
const DRAFTS: [&str; 6] = ["draft-04", "draft-06", "draft-07", "2019-09", "2020-12", "json-schema.org/schema"];

/// Keywords that the compiler enforces and whose value holds no schema; it reports invalid values.
const ENFORCED: [&str; 9] =
    ["type", "required", "minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength", "format"];

/// Keywords without effect on what is valid.
const ANNOTATIONS: [&str; 18] = [
    "$schema",
    "$id",
    "id",
    "$anchor",
    "$comment",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "example",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentMediaType",
    "contentEncoding",
    "discriminator",
];

/// Parses and checks a schema, and returns it with the options of the compiler.
///
/// # Errors
/// The text is not JSON, is too large or too deep, or has a keyword or reference that is not supported; the error names
/// the place as a JSON pointer.
pub(super) fn checked(text: &str) -> Result<Value> {
    if text.len() > BYTES {
        let found = format!("JSON schema: found {} bytes, expected at most {BYTES}", text.len());
        return Err(Error::unsupported(found));
    }
    let schema = strict_json::parse(text.as_bytes()).tensor("JSON schema")?;
    with_options(schema)
}

/// Checks a parsed schema up to a depth of subschemas, and returns the text that stands for its JSON in a grammar.
///
/// # Errors
/// The same as those of [`check_within`].
pub fn embedded(schema: &Value, depth: usize) -> Result<String> {
    check_within(schema, depth)?;
    Ok(format!("%json {}", with_options(schema.clone())?))
}

/// Checks a parsed schema, and returns it with the options of the compiler.
fn with_options(schema: Value) -> Result<Value> {
    check(&schema)?;
    let mut schema = match schema {
        Value::Object(members) => members,
        _ => Map::new(),
    };
    // Older drafts know fewer keywords, and the compiler would ignore the others.
    schema.shift_remove("$schema");
    let mut schema = Value::Object(schema);
    let whitespace_pattern = Some(WHITESPACE.to_string());
    JsonCompileOptions { whitespace_pattern, ..JsonCompileOptions::default() }.apply_to(&mut schema);
    Ok(schema)
}

/// Checks a parsed schema.
pub(super) fn check(schema: &Value) -> Result<()> {
    check_within(schema, DEPTH)
}

/// Checks that a parsed schema is supported and has at most this depth of subschemas, references included.
///
/// # Errors
/// The schema is too deep or too large, or has a keyword or reference that is not supported; the error names the place
/// as a JSON pointer.
pub fn check_within(schema: &Value, depth: usize) -> Result<()> {
    match schema {
        Value::Bool(false) => Err(Error::unsupported("JSON schema: found `false`, which no JSON is valid against")),
        Value::Bool(true) | Value::Object(_) => {
            let (most, multiples) = (depth.min(DEPTH), Multiples::default());
            Checker { root: schema, most, followed: HashSet::new(), schemas: 0, multiples }.schema(schema, "#", 0)
        }
        _ => Err(Error::corrupt("JSON schema: found neither an object nor a boolean, expected an object")
            .help("a schema looks like {\"type\": \"object\", \"properties\": …}")),
    }
}

struct Checker<'a> {
    root: &'a Value,
    /// Largest depth of subschemas.
    most: usize,
    /// References that were followed.
    followed: HashSet<&'a str>,
    schemas: usize,
    multiples: Multiples,
}

impl<'a> Checker<'a> {
    fn schema(&mut self, schema: &'a Value, place: &str, depth: usize) -> Result<()> {
        self.schemas += 1;
        for (what, found, most) in [("depth", depth, self.most), ("number of subschemas", self.schemas, SCHEMAS)] {
            if found > most {
                let found = format!("JSON schema: found a {what} of more than {most} at {place}");
                return Err(Error::unsupported(found).help("use a smaller schema"));
            }
        }
        let Value::Object(members) = schema else {
            return if schema.is_boolean() {
                Ok(())
            } else {
                Err(expected(place, "a schema (an object or a boolean)"))
            };
        };
        self.multiples.see(members, place)?;
        members.iter().try_for_each(|(keyword, value)| self.keyword(keyword, value, place, depth + 1))
    }

    fn keyword(&mut self, keyword: &str, value: &'a Value, parent: &str, depth: usize) -> Result<()> {
        let place = &format!("{parent}/{keyword}");
        match keyword {
            "$ref" => self.reference(value, place, depth),
            "$schema" => draft(value, place),
            "$id" if depth > 1 => {
                Err(refused(keyword, parent).help("remove it, and refer to schemas by `#/$defs/NAME`"))
            }
            "allOf" | "anyOf" | "oneOf" | "prefixItems" => self.list(value, place, depth),
            "items" if value.is_array() => self.list(value, place, depth),
            "items" | "additionalItems" | "additionalProperties" => self.schema(value, place, depth),
            "properties" => self.map(value, place, depth, PROPERTIES),
            "patternProperties" => {
                let patterns = value.as_object().into_iter().flat_map(Map::keys);
                patterns.clone().try_for_each(|text| pattern::check(text).tensor(place))?;
                self.map(value, place, depth, PATTERNS)
            }
            "pattern" => {
                value.as_str().map_or(Err(expected(place, "a text")), |text| pattern::check(text).tensor(place))
            }
            "multipleOf" => self.multiples.add(value, place),
            "const" | "enum" | "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => exact(value, place),
            _ if ENFORCED.contains(&keyword) || ANNOTATIONS.contains(&keyword) => Ok(()),
            // The options of the compiler.
            "x-guidance" => Err(refused(keyword, parent)),
            _ if keyword.starts_with("x-") => Ok(()),
            _ => Err(refused(keyword, parent).help(
                "remove the keyword; annotations of your own may begin with `x-` (docs/guide/structured-output.md)",
            )),
        }
    }

    fn list(&mut self, value: &'a Value, place: &str, depth: usize) -> Result<()> {
        let items = value.as_array().ok_or_else(|| expected(place, "a list of schemas"))?;
        items.iter().enumerate().try_for_each(|(i, item)| self.schema(item, &format!("{place}/{i}"), depth))
    }

    fn map(&mut self, value: &'a Value, place: &str, depth: usize, most: usize) -> Result<()> {
        let members = value.as_object().ok_or_else(|| expected(place, "an object of schemas"))?;
        if members.len() > most {
            let found = format!("JSON schema: found {} entries of {place}, expected at most {most}", members.len());
            return Err(Error::unsupported(found).help("use a smaller schema"));
        }
        members.iter().try_for_each(|(name, schema)| self.schema(schema, &format!("{place}/{name}"), depth))
    }

    /// Checks a reference, and the schema to which it leads when it is followed for the first time.
    fn reference(&mut self, value: &'a Value, place: &str, depth: usize) -> Result<()> {
        let target = value.as_str().ok_or_else(|| expected(place, "a text"))?;
        if !self.followed.insert(target) {
            return Ok(());
        }
        let path = match target {
            "#" | "#/" => "",
            _ => target.strip_prefix('#').filter(|path| path.starts_with('/')).ok_or_else(|| {
                let found =
                    format!("JSON schema: found the reference `{target}` at {place}, expected one like `#/$defs/NAME`");
                Error::unsupported(found).help("copy the schema into `$defs`; nothing is loaded from elsewhere")
            })?,
        };
        if path.contains(['~', '%']) {
            let found = format!("JSON schema: found the escaped reference `{target}` at {place}, expected plain names");
            return Err(Error::unsupported(found).help("rename the definition"));
        }
        let schema = self.root.pointer(path).ok_or_else(|| {
            Error::corrupt(format!("JSON schema: found the reference `{target}` at {place}, which leads nowhere"))
        })?;
        self.schema(schema, target, depth)
    }
}

fn expected(place: &str, what: &str) -> Error {
    Error::corrupt(format!("JSON schema: found a value of another type at {place}, expected {what}"))
}

fn refused(keyword: &str, place: &str) -> Error {
    Error::unsupported(format!("JSON schema: found the keyword `{keyword}` at {place}, which is not supported"))
}

fn draft(value: &Value, place: &str) -> Result<()> {
    match value.as_str() {
        Some(name) if DRAFTS.iter().any(|draft| name.contains(draft)) => Ok(()),
        _ => Err(Error::unsupported(format!("JSON schema: found {value} at {place}, expected draft 4 to 2020-12"))
            .help("remove `$schema`")),
    }
}

/// Refuses numbers that the compiler would round.
fn exact(value: &Value, place: &str) -> Result<()> {
    match value {
        Value::Number(number) => {
            let whole = number.as_i64().map(i64::unsigned_abs).or(number.as_u64());
            let is_exact = match whole {
                Some(magnitude) => magnitude <= EXACT,
                // A larger integer than 64 bits hold was parsed as a float.
                None => number.as_f64().is_some_and(|value| value.abs() <= EXACT as f64),
            };
            if is_exact {
                return Ok(());
            }
            let found = format!("JSON schema: found the number {number} at {place}, expected at most 2^53 = {EXACT}");
            Err(Error::unsupported(found).help("use a string instead of the number"))
        }
        Value::Array(items) => items.iter().try_for_each(|item| exact(item, place)),
        Value::Object(members) => members.values().try_for_each(|member| exact(member, place)),
        _ => Ok(()),
    }
}
