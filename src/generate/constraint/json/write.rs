//! Writes the rules of a grammar for what a schema allows.
//!
//! White space belongs to the punctuation: it may stand around `:` and `,`, behind `{` and `[`, and before `}` and `]`.
//! It is bounded, because models that may write any amount write nothing else.

use super::multiples::Multiples;
use super::node::{Array, Node, Number, Object, Property, Text};
use super::text::{self, Spelling};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fmt::Write;
use std::rc::Rc;

/// White space at one place: a space or tab, or a line break with indentation.
const SPACE: &str = r"(?:[\x20\x09]|\x0d?\x0a[\x20\x09]{0,40})?";
/// Any number.
const NUMBER: &str = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][\x2b\x2d]?[0-9]+)?";
/// Any whole number. Zeros behind the point and a positive exponent leave it whole.
const INTEGER: &str = r"-?(?:0|[1-9][0-9]*)(?:\.0{1,3})?(?:[eE]\x2b?[0-9]{1,3})?";
/// Number of characters of all names and constant texts of a schema up to which each of them may be escaped.
const FULLY_SPELLED: usize = 256;
/// Largest number of rules of one object whose properties are counted.
const STATES: usize = 10_000;

/// Writes the rules of one schema.
pub(super) struct Writer<'a> {
    rules: String,
    /// Names of terminals and of rules by what they stand for.
    names: HashMap<String, String>,
    defs: &'a [Option<Node>],
    /// Referenced schemas that have been written or will be.
    wanted: Vec<usize>,
    /// Whether objects that list properties have no others, unless the schema says so.
    closed: bool,
    multiples: Multiples,
    spelling: Spelling,
    count: usize,
}

/// Returns a grammar of texts of a node.
///
/// # Errors
/// An object or a number takes too many rules.
pub(super) fn grammar(root: &Node, defs: &[Option<Node>], closed: bool) -> Result<String> {
    let (rules, names, multiples) = (String::new(), HashMap::new(), Multiples::default());
    let mut characters = constant_characters(root);
    characters += defs.iter().flatten().map(constant_characters).sum::<usize>();
    let spelling = if characters <= FULLY_SPELLED { Spelling::Full } else { Spelling::Short };
    let mut writer = Writer { rules, names, defs, wanted: Vec::new(), closed, multiples, spelling, count: 0 };
    let start = writer.value(root)?;
    let mut written = 0;
    while let Some(number) = writer.wanted.get(written).copied() {
        let node = defs.get(number).and_then(Option::as_ref).unwrap_or(&Node::Any);
        let symbol = writer.value(node)?;
        writer.rule(&format!("ref_{number}"), &symbol);
        written += 1;
    }
    Ok(format!("start: {start}\n{}", writer.rules))
}

impl Writer<'_> {
    fn rule(&mut self, name: &str, body: &str) {
        // Writing to a text cannot fail.
        let _ = writeln!(self.rules, "{name}: {body}");
    }

    /// Returns the name of a rule or terminal with this body.
    fn named(&mut self, prefix: &str, body: String) -> String {
        if let Some(name) = self.names.get(&body) {
            return name.clone();
        }
        self.count += 1;
        let name = format!("{prefix}{}", self.count);
        self.rule(&name, &body);
        self.names.insert(body, name.clone());
        name
    }

    fn terminal(&mut self, expression: &str) -> String {
        self.named("T", format!("/{expression}/"))
    }

    fn punctuation(&mut self, mark: char) -> String {
        let code = format!("\\x{:02x}", u32::from(mark));
        self.terminal(&match mark {
            '{' | '[' => format!("{code}{SPACE}"),
            '}' | ']' => format!("{SPACE}{code}"),
            _ => format!("{SPACE}{code}{SPACE}"),
        })
    }

    /// Returns true if a node allows nothing.
    fn is_never(&self, node: &Node) -> bool {
        match node {
            Node::Ref(number) => matches!(self.defs.get(*number), Some(Some(Node::Never))),
            Node::Union(options) => options.iter().all(|option| self.is_never(option)),
            node => node.is_never(),
        }
    }

    /// Returns the symbol of the values of a node.
    fn value(&mut self, node: &Node) -> Result<String> {
        let options = match node {
            Node::Any => return Ok(self.any()),
            Node::Array(array) => return self.array(array),
            Node::Object(object) => return self.object(object),
            Node::Ref(number) => {
                if !self.wanted.contains(number) {
                    self.wanted.push(*number);
                }
                return Ok(format!("ref_{number}"));
            }
            Node::Union(options) => options.as_slice(),
            one => std::slice::from_ref(one),
        };
        // Alternatives without structure are one terminal.
        let (mut flat, mut symbols) = (Vec::new(), Vec::new());
        for option in options {
            match option {
                never if self.is_never(never) => {}
                Node::Null => flat.push("null".to_string()),
                Node::Bool(None) => flat.push("true|false".into()),
                Node::Bool(Some(value)) => flat.push(value.to_string()),
                Node::Number(number) => match number_expression(number) {
                    Some(expression) => flat.push(expression),
                    None => {
                        let schema = self.number_schema(number)?;
                        symbols.push(self.named("n", schema));
                    }
                },
                Node::Text(text) => match self.text_expressions(text).as_slice() {
                    [one] => flat.push(one.to_string()),
                    several => symbols.push(self.named("T", joined(several))),
                },
                structured => symbols.push(self.value(structured)?),
            }
        }
        if !flat.is_empty() {
            symbols.push(self.terminal(&format!("(?:{})", flat.join("|"))));
        }
        match symbols.as_slice() {
            [] => Err(Error::unsupported("JSON schema: found a value for which nothing is allowed")),
            [one] => Ok(one.clone()),
            several => Ok(self.named("u", several.join(" | "))),
        }
    }

    /// Returns the body of a rule of numbers with bounds, which the library of the matcher compiles.
    fn number_schema(&mut self, number: &Number) -> Result<String> {
        let mut schema = Map::new();
        schema.insert("type".into(), json!(if number.integer { "integer" } else { "number" }));
        let names = [("minimum", "exclusiveMinimum", number.min), ("maximum", "exclusiveMaximum", number.max)];
        for (plain, exclusive, bound) in names {
            if let Some((value, excluded)) = bound {
                schema.insert(if excluded { exclusive } else { plain }.into(), json!(value));
            }
        }
        if !number.multiples.is_empty() {
            let step = self.multiples.add(&number.multiples);
            let step = step.map_err(|why| Error::unsupported(format!("JSON schema: found `multipleOf` of {why}")))?;
            schema.insert("multipleOf".into(), json!(step));
        }
        schema.insert("x-guidance".into(), json!({"whitespace_flexible": false}));
        Ok(format!("%json {}", Value::Object(schema)))
    }

    /// Returns the expressions that all match a text.
    fn text_expressions(&self, text: &Text) -> Vec<Rc<str>> {
        if let Some(constant) = &text.constant {
            return vec![text::literal(constant, self.spelling).into()];
        }
        let mut expressions = text.patterns.clone();
        if expressions.is_empty() || text.min > 0 || text.max.is_some() {
            expressions.push(text::of_length(text.min, text.max).into());
        }
        expressions
    }

    /// Returns the rule of any JSON.
    fn any(&mut self) -> String {
        if !self.names.contains_key("any") {
            self.names.insert("any".into(), "any".into());
            let text = self.terminal(&text::of_length(0, None));
            let flat = self.terminal(&format!("(?:{NUMBER}|true|false|null)"));
            let [open, close, begin, end, colon, comma] = ['{', '}', '[', ']', ':', ','].map(|c| self.punctuation(c));
            self.rule("any", &format!("{text} | {flat} | any_array | any_object"));
            self.rule("any_array", &format!("{begin} (any ({comma} any)*)? {end}"));
            self.rule("any_object", &format!("{open} (any_pair ({comma} any_pair)*)? {close}"));
            self.rule("any_pair", &format!("{text} {colon} any"));
        }
        "any".into()
    }

    fn array(&mut self, array: &Array) -> Result<String> {
        let Array { first, rest, min, max } = array;
        let [begin, end, comma] = ['[', ']', ','].map(|c| self.punctuation(c));
        let rest = if self.is_never(rest) || *max == Some(first.len()) { None } else { Some(self.value(rest)?) };
        // Items behind those at the beginning: so many at least, and at most.
        let least = min.saturating_sub(first.len());
        let most = max.map(|max| max.saturating_sub(first.len()));
        // From the end: what may follow the item before, with the comma in front.
        let mut tail = match &rest {
            Some(rest) => repeated(&format!("{comma} {rest}"), least, most),
            None => String::new(),
        };
        if first.is_empty() {
            let Some(rest) = rest else { return Ok(self.named("a", format!("{begin} {end}"))) };
            let further =
                repeated(&format!("{comma} {rest}"), least.saturating_sub(1), most.map(|most| most.max(1) - 1));
            let more = format!("{rest} {further}");
            let items = if *min == 0 { format!("({more})?") } else { more };
            return Ok(self.named("a", format!("{begin} {items} {end}")));
        }
        for (i, item) in first.iter().enumerate().rev() {
            if max.is_some_and(|max| i >= max) {
                tail.clear();
                continue;
            }
            let item = self.value(item)?;
            let before = if i == 0 { String::new() } else { format!("{comma} ") };
            let rule = self.named("i", format!("{before}{item} {tail}"));
            tail = if i < *min { rule } else { format!("{rule}?") };
        }
        Ok(self.named("a", format!("{begin} {tail} {end}")))
    }

    fn object(&mut self, object: &Object) -> Result<String> {
        let [open, close, colon, comma] = ['{', '}', ':', ','].map(|c| self.punctuation(c));
        let mut properties = Vec::with_capacity(object.properties.len());
        for property in &object.properties {
            if self.is_never(&property.value) {
                continue;
            }
            let (name, value) =
                (self.terminal(&text::literal(&property.name, self.spelling)), self.value(&property.value)?);
            properties.push((format!("{name} {colon} {value}"), property.required));
        }
        let extra = self.extra(object, &colon)?;
        let body = Body { properties, extra, comma, min: object.min, max: object.max };
        let members = self.members(&body)?;
        Ok(self.named("o", format!("{open} {members} {close}")))
    }

    /// Returns the symbol of one property that is not listed, if there may be some.
    fn extra(&mut self, object: &Object, colon: &str) -> Result<Option<String>> {
        let mut options = Vec::new();
        let spelled = |Property { name, .. }: &Property| text::literal(name, self.spelling);
        let mut taken: Vec<String> = object.properties.iter().map(spelled).collect();
        let listed = taken.clone();
        for (pattern, value) in &object.patterns {
            if !self.is_never(value) {
                let name = self.named("T", without(&[pattern], &listed));
                options.push(format!("{name} {colon} {}", self.value(value)?));
            }
            taken.push(pattern.to_string());
        }
        let others = match &object.others {
            Some(others) => others,
            None if self.closed && object.listed => &Node::Never,
            None => &Node::Any,
        };
        if !self.is_never(others) {
            let value = self.value(others)?;
            let names = match &object.names {
                // A name of the object, spelled in another way, is no other name.
                None => vec![vec![text::any_like(self.spelling).into()]],
                Some(names) => names.iter().map(|name| self.text_expressions(name)).collect(),
            };
            for expressions in names {
                let expressions: Vec<&str> = expressions.iter().map(|expression| &**expression).collect();
                let name = self.named("T", without(&expressions, &taken));
                options.push(format!("{name} {colon} {value}"));
            }
        }
        Ok((!options.is_empty()).then(|| self.named("p", options.join(" | "))))
    }

    /// Returns the symbols of the properties between the braces.
    fn members(&mut self, body: &Body) -> Result<String> {
        let required = body.properties.iter().filter(|(_, required)| *required).count();
        if required == body.properties.len() && body.extra.is_none() {
            let pairs: Vec<&str> = body.properties.iter().map(|(pair, _)| pair.as_str()).collect();
            return Ok(pairs.join(&format!(" {} ", body.comma)));
        }
        // Without bounds, it only matters whether there was a property before.
        let most = body.max.unwrap_or(usize::MAX);
        let counted = if body.max.is_some() { most } else { body.min.max(1) };
        let states = body.properties.len().saturating_mul(counted.min(body.properties.len()) + 1);
        if states > STATES {
            let found = format!("JSON schema: found an object of {} properties with a bound", body.properties.len());
            return Err(Error::unsupported(found).help("leave `minProperties` and `maxProperties` out"));
        }
        let mut known = HashMap::new();
        self.behind(body, 0, 0, counted, &mut known)?.ok_or_else(|| {
            Error::unsupported("JSON schema: found an object that cannot have as many properties as it must")
        })
    }

    /// Returns the symbols of the properties from number `i` on, behind `count` others; `None` if there are none.
    /// Counts from `counted` on count as one.
    fn behind(
        &mut self,
        body: &Body,
        i: usize,
        count: usize,
        counted: usize,
        known: &mut HashMap<(usize, usize), Option<String>>,
    ) -> Result<Option<String>> {
        if let Some(symbols) = known.get(&(i, count)) {
            return Ok(symbols.clone());
        }
        let is_full = body.max.is_some_and(|max| count >= max);
        let comma = if count == 0 { String::new() } else { format!("{} ", body.comma) };
        let symbols = match body.properties.get(i) {
            None => self.last(body, count),
            Some((pair, required)) => {
                let mut options = Vec::new();
                if !is_full {
                    let rest = self.behind(body, i + 1, (count + 1).min(counted), counted, known)?;
                    options.extend(rest.map(|rest| format!("{comma}{pair} {rest}")));
                }
                if !required {
                    options.extend(self.behind(body, i + 1, count, counted, known)?);
                }
                match options.len() {
                    0 => None,
                    // A name of its own, so that the rules stay short.
                    _ => {
                        let shown = options.iter().map(|option| if option.is_empty() { "\"\"" } else { option });
                        let body = shown.collect::<Vec<_>>().join(" | ");
                        Some(self.named("m", body))
                    }
                }
            }
        };
        known.insert((i, count), symbols.clone());
        Ok(symbols)
    }

    /// Returns the symbols of the properties that are not listed, behind `count` others.
    fn last(&mut self, body: &Body, count: usize) -> Option<String> {
        let least = body.min.saturating_sub(count);
        let most = body.max.map(|max| max.saturating_sub(count));
        let extra = match (&body.extra, least) {
            (_, _) if most == Some(0) => return (least == 0).then(String::new),
            (None, 0) => return Some(String::new()),
            (None, _) => return None,
            (Some(extra), _) => extra,
        };
        if count > 0 {
            return Some(repeated(&format!("{} {extra}", body.comma), least, most));
        }
        let further = format!("{} {extra}", body.comma);
        let more = format!("{extra} {}", repeated(&further, least.saturating_sub(1), most.map(|most| most - 1)));
        Some(if least == 0 { format!("({more})?") } else { more })
    }
}

/// Properties of an object, ready to be put in order.
struct Body {
    /// Each property, and whether it is required.
    properties: Vec<(String, bool)>,
    /// A property that is not listed.
    extra: Option<String>,
    comma: String,
    min: usize,
    max: Option<usize>,
}

/// Returns symbols that are repeated at least and at most so many times.
fn repeated(symbols: &str, least: usize, most: Option<usize>) -> String {
    match (least, most) {
        (_, Some(0)) => String::new(),
        (0, None) => format!("({symbols})*"),
        (least, None) => format!("({symbols}){{{least},}}"),
        (least, Some(most)) => format!("({symbols}){{{least},{most}}}"),
    }
}

/// Returns the body of a terminal of texts that match all of some expressions.
fn joined(expressions: &[Rc<str>]) -> String {
    let each: Vec<String> = expressions.iter().map(|expression| format!("/{expression}/")).collect();
    each.join(" & ")
}

/// Returns the body of a terminal of texts that match all of some expressions and none of others.
fn without(expressions: &[&str], others: &[String]) -> String {
    let mut parts: Vec<String> = expressions.iter().map(|expression| format!("/{expression}/")).collect();
    if !others.is_empty() {
        parts.push(format!("~/(?:{})/", others.join("|")));
    }
    parts.join(" & ")
}

/// Returns the number of characters of all names and constant texts.
fn constant_characters(node: &Node) -> usize {
    match node {
        Node::Text(text) => text.constant.as_ref().map_or(0, |constant| constant.len()),
        Node::Array(array) => {
            array.first.iter().map(constant_characters).sum::<usize>() + constant_characters(&array.rest)
        }
        Node::Object(object) => {
            let own =
                object.properties.iter().map(|property| property.name.len() + constant_characters(&property.value));
            let patterns = object.patterns.iter().map(|(_, value)| constant_characters(value));
            own.chain(patterns).sum::<usize>() + object.others.as_ref().map_or(0, constant_characters)
        }
        Node::Union(options) => options.iter().map(constant_characters).sum(),
        _ => 0,
    }
}

/// Returns the expression of numbers; `None` for those with bounds.
fn number_expression(number: &Number) -> Option<String> {
    match &number.constant {
        Some(constant) => Some(constant_expression(constant)),
        None if number.min.is_some() || number.max.is_some() || !number.multiples.is_empty() => None,
        None if number.integer => Some(INTEGER.into()),
        None => Some(NUMBER.into()),
    }
}

/// Returns the expression of one number, with zeros at the end of its fraction.
fn constant_expression(number: &serde_json::Number) -> String {
    let shown = number.to_string();
    let plain = shown.strip_suffix(".0").unwrap_or(&shown);
    let escaped = plain.replace('.', "\\.").replace('-', "\\x2d").replace('+', "\\x2b");
    match plain {
        "0" | "-0" => r"-?0(?:\.0{1,3})?".into(),
        _ if plain.contains('e') => escaped.replace('e', "[eE]"),
        _ if plain.contains('.') => format!("{escaped}0{{0,3}}"),
        _ => format!(r"{escaped}(?:\.0{{1,3}})?"),
    }
}
