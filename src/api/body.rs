//! Bodies of requests: JSON objects from outside, read field by field.

use super::error::{ApiError, ApiResult};
use super::json_error;
use super::members;
use super::other_fields::{self, Api};
use crate::strict_json;
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// Largest nesting of objects and lists.
const DEPTH: usize = 64;
/// Largest number of prompts of a request.
pub const MOST_PROMPTS: usize = 64;

/// Texts or tokens to continue.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompts {
    /// Texts.
    Texts(Vec<String>),
    /// Lists of token ids.
    Ids(Vec<Vec<u32>>),
}

/// Value of a field that an endpoint may read as prompts.
#[derive(Debug, Clone, PartialEq)]
enum Given {
    Prompts(Prompts),
    /// Something else, in words.
    Wrong(String),
}

/// Names by which the client knows fields, where they differ from those that errors use.
#[derive(Debug, Clone, Default)]
pub struct FieldNames(Vec<(&'static str, String)>);

impl FieldNames {
    /// Records that the client knows `field` as `name`.
    pub fn call(&mut self, field: &'static str, name: impl Into<String>) {
        self.0.push((field, name.into()));
    }

    /// Returns an error in the words of the client.
    pub fn shown(&self, error: ApiError) -> ApiError {
        let Some(param) = &error.param else { return error };
        let within = |rest: &str| rest.is_empty() || rest.starts_with(['.', '[']);
        let name = self.0.iter().find_map(|(field, name)| {
            let rest = param.strip_prefix(field).filter(|rest| within(rest))?;
            Some(format!("{name}{rest}"))
        });
        let Some(name) = name else { return error };
        let message = match error.message.strip_prefix(&format!("`{param}`")) {
            Some(rest) => format!("`{name}`{rest}"),
            None => error.message,
        };
        ApiError { message, param: Some(name), ..error }
    }
}

/// Body of a request. A field is removed when it is read, so that those that remain are unknown.
#[derive(Debug)]
pub struct Body {
    /// Names of fields in the words of the client.
    pub names: FieldNames,
    fields: Map<String, Value>,
    /// Unknown members within fields, and parts of fields without effect.
    unknown: Vec<String>,
    prompts: Option<Given>,
    tokens: Option<Given>,
}

impl Body {
    /// Parses a body.
    ///
    /// # Errors
    /// It is not a JSON object, is nested too deeply, or has a key twice.
    pub fn parse(text: &[u8]) -> ApiResult<Body> {
        if depth(text) > DEPTH {
            return Err(ApiError::invalid(format!("the body is nested more than {DEPTH} levels deep")));
        }
        let mut deserializer = serde_json::Deserializer::from_slice(text);
        let body = BodyReader.deserialize(&mut deserializer).and_then(|body| deserializer.end().map(|()| body));
        body.map_err(|e| json_error::of(text, &e))
    }

    /// Creates the body of a request that came in another form than JSON.
    pub fn of(fields: Map<String, Value>) -> Body {
        Body { names: FieldNames::default(), fields, unknown: Vec::new(), prompts: None, tokens: None }
    }

    /// Takes a field; `None` if it is absent or null.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.shift_remove(name).filter(|value| !value.is_null())
    }

    /// Returns a field without taking it.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.fields.get(name)
    }

    /// Sets a field, in place of one of another API.
    pub fn set(&mut self, name: &str, value: Value) {
        self.fields.insert(name.into(), value);
    }

    /// Takes the field `prompt`.
    ///
    /// # Errors
    /// It is something else.
    pub fn take_prompts(&mut self) -> ApiResult<Option<Prompts>> {
        match self.prompts.take() {
            None => Ok(None),
            Some(Given::Prompts(prompts)) => Ok(Some(prompts)),
            Some(Given::Wrong(found)) => {
                let expected = format!("a text, token ids, or a list of at most {MOST_PROMPTS} of either");
                Err(ApiError::field("prompt", format!("found {found}, expected {expected}")))
            }
        }
    }

    /// Takes the field `prompt` of an endpoint for which it is no prompt; returns whether it was there.
    pub fn drop_prompts(&mut self) -> bool {
        self.prompts.take().is_some()
    }

    /// Takes the field `tokens`: one list of token ids.
    ///
    /// # Errors
    /// It is something else.
    pub fn take_tokens(&mut self) -> ApiResult<Option<Vec<u32>>> {
        match self.tokens.take() {
            None => Ok(None),
            Some(Given::Prompts(Prompts::Ids(mut lists))) if lists.len() == 1 => Ok(lists.pop()),
            Some(Given::Prompts(_)) => Err(ApiError::field("tokens", "expected a list of token ids")),
            Some(Given::Wrong(found)) => {
                Err(ApiError::field("tokens", format!("found {found}, expected a list of token ids")))
            }
        }
    }

    /// Takes a text.
    ///
    /// # Errors
    /// The field is something else.
    pub fn text(&mut self, name: &str) -> ApiResult<Option<String>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(expected(name, "a text", &other)),
        }
    }

    /// Takes a truth value; `otherwise` if it is absent.
    ///
    /// # Errors
    /// The field is something else.
    pub fn flag(&mut self, name: &str, otherwise: bool) -> ApiResult<bool> {
        match self.take(name) {
            None => Ok(otherwise),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(other) => Err(expected(name, "true or false", &other)),
        }
    }

    /// Takes a whole number of `least..=most`.
    ///
    /// # Errors
    /// The field is something else.
    pub fn count(&mut self, name: &str, least: usize, most: usize) -> ApiResult<Option<usize>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
        match number.filter(|number| (least..=most).contains(number)) {
            Some(number) => Ok(Some(number)),
            None if most == usize::MAX => Err(expected(name, &format!("a whole number of at least {least}"), &value)),
            None => Err(expected(name, &format!("a whole number from {least} to {most}"), &value)),
        }
    }

    /// Takes a list of at most `most` token ids.
    ///
    /// # Errors
    /// The field is something else.
    pub fn ids(&mut self, name: &str, most: usize) -> ApiResult<Option<Vec<u32>>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids: Option<Vec<u32>> = value.as_array().and_then(|list| list.iter().map(id).collect());
        match ids.filter(|ids| ids.len() <= most) {
            Some(ids) => Ok(Some(ids)),
            None => Err(expected(name, &format!("a list of at most {most} token ids"), &value)),
        }
    }

    /// Takes an object.
    ///
    /// # Errors
    /// The field is something else.
    pub fn object(&mut self, name: &str) -> ApiResult<Option<Map<String, Value>>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(members)) => Ok(Some(members)),
            Some(other) => Err(expected(name, "an object", &other)),
        }
    }

    /// Begins to read a request to `api`: renames and refuses the fields of other servers, and finds unknown members.
    ///
    /// # Errors
    /// A field would change the answer and cannot be honoured, or it is there by two names.
    pub fn begin(&mut self, api: Api) -> ApiResult<()> {
        other_fields::translate(self, api)?;
        self.unknown.extend(members::unknown(&self.fields, api));
        Ok(())
    }

    /// Gives a field the name by which this server reads it, and the value that this server expects.
    ///
    /// # Errors
    /// The body has another value by that name.
    pub fn rename(
        &mut self,
        name: &'static str,
        field: &'static str,
        value: impl FnOnce(Value) -> Value,
    ) -> ApiResult<()> {
        let Some(value) = self.take(name).map(value) else { return Ok(()) };
        match self.fields.get(field) {
            Some(other) if !other.is_null() && *other != value => {
                Err(ApiError::field(name, format!("found it together with another value of `{field}`")))
            }
            _ => {
                self.fields.insert(field.into(), value);
                self.names.call(field, name);
                Ok(())
            }
        }
    }

    /// Counts a field that was read, or a part of one, as unknown, because it has no effect.
    pub fn ignore(&mut self, name: &str) {
        self.unknown.push(name.into());
    }

    /// Takes a field that would change the answer and that the endpoint cannot honour.
    ///
    /// # Errors
    /// It is neither absent, null, false, empty nor equal to `harmless`.
    pub fn refuse(&mut self, name: &str, harmless: &Value, why: &str) -> ApiResult<()> {
        match self.take(name).filter(|value| !other_fields::is_off(value) && value != harmless) {
            Some(_) => Err(ApiError::field(name, why).code("unsupported_parameter")),
            None => Ok(()),
        }
    }

    /// Checks the fields that were not read. Returns the names of those that are unknown and ignored.
    ///
    /// # Errors
    /// One is unknown and `strict` is set.
    pub fn rest(self, strict: bool) -> ApiResult<Vec<String>> {
        let mut unknown: Vec<String> =
            self.fields.into_iter().filter(|(_, value)| !value.is_null()).map(|(name, _)| name).collect();
        unknown.extend(self.unknown);
        for (name, is_given) in [("prompt", self.prompts.is_some()), ("tokens", self.tokens.is_some())] {
            if is_given {
                unknown.push(name.into());
            }
        }
        match unknown.first().filter(|_| strict) {
            Some(name) => Err(ApiError::field(name, "this endpoint has no such field").code("unknown_parameter")),
            None => Ok(unknown),
        }
    }
}

/// Builds the error for a field of another type or range.
pub fn expected(name: &str, what: &str, found: &Value) -> ApiError {
    let found: String = found.to_string().chars().take(80).collect();
    ApiError::field(name, format!("found {found}, expected {what}"))
}

/// Returns the deepest nesting of a JSON text.
fn depth(text: &[u8]) -> usize {
    let (mut depth, mut deepest, mut quoted, mut escaped) = (0usize, 0, false, false);
    for byte in text {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'{' | b'[' if !quoted => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' if !quoted => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

/// Reads a body. Lists of token ids become numbers at once: as a tree they would take twenty times the memory.
struct BodyReader;

impl<'de> DeserializeSeed<'de> for BodyReader {
    type Value = Body;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Body, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for BodyReader {
    type Value = Body;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Body, A::Error> {
        let mut body =
            Body { names: FieldNames::default(), fields: Map::new(), unknown: Vec::new(), prompts: None, tokens: None };
        let mut seen = std::collections::HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(A::Error::custom(format_args!("found the key `{name}` twice")));
            }
            match name.as_str() {
                "prompt" => body.prompts = map.next_value_seed(PromptReader)?,
                "tokens" => body.tokens = map.next_value_seed(PromptReader)?,
                _ => _ = body.fields.insert(name, map.next_value_seed(SmallTree)?),
            }
        }
        Ok(body)
    }
}

/// Reads any value into a small tree.
struct SmallTree;

impl<'de> DeserializeSeed<'de> for SmallTree {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Value, D::Error> {
        strict_json::small_tree(d)
    }
}

/// Reads a text, token ids, or a list of either. Another value is described, since the endpoint decides what to say.
struct PromptReader;

impl<'de> DeserializeSeed<'de> for PromptReader {
    type Value = Option<Given>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        Ok(match d.deserialize_any(ElementReader { depth: 0 })? {
            Element::Null => None,
            Element::Text(text) => Some(Given::Prompts(Prompts::Texts(vec![text]))),
            Element::Ids(ids) => Some(Given::Prompts(Prompts::Ids(vec![ids]))),
            Element::Prompts(prompts) => Some(Given::Prompts(prompts)),
            Element::Id(id) => Some(Given::Wrong(format!("the number {id}"))),
            Element::Wrong(found) => Some(Given::Wrong(found)),
        })
    }
}

/// A value that may be a prompt, a list of prompts, or an element of one.
enum Element {
    Null,
    Id(u32),
    Text(String),
    Ids(Vec<u32>),
    Prompts(Prompts),
    /// Something else, in words.
    Wrong(String),
}

/// Reads a value. Lists of token ids become numbers at once: as a tree they would take twenty times the memory.
#[derive(Clone, Copy)]
struct ElementReader {
    /// Number of lists around the value.
    depth: usize,
}

impl<'de> DeserializeSeed<'de> for ElementReader {
    type Value = Element;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Element, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ElementReader {
    type Value = Element;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a text, a token id, or a list of them")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Element, E> {
        Ok(if self.depth == 0 { Element::Null } else { Element::Wrong("null".into()) })
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<Element, E> {
        Ok(Element::Wrong(value.to_string()))
    }

    fn visit_u64<E: serde::de::Error>(self, id: u64) -> Result<Element, E> {
        Ok(u32::try_from(id).map_or_else(|_| Element::Wrong(format!("the number {id}")), Element::Id))
    }

    fn visit_i64<E: serde::de::Error>(self, id: i64) -> Result<Element, E> {
        Ok(Element::Wrong(format!("the number {id}")))
    }

    fn visit_f64<E: serde::de::Error>(self, number: f64) -> Result<Element, E> {
        Ok(Element::Wrong(format!("the number {number}")))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Element, E> {
        Ok(Element::Text(text.into()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Element, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Element::Wrong("an object".into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Element, A::Error> {
        let mut list = PromptList::Empty;
        let inner = ElementReader { depth: self.depth + 1 };
        while let Some(element) = seq.next_element_seed(inner)? {
            list.add(element, self.depth);
        }
        Ok(match list {
            PromptList::Empty => Element::Ids(Vec::new()),
            PromptList::Ids(ids) => Element::Ids(ids),
            PromptList::Prompts(prompts) => Element::Prompts(prompts),
            PromptList::Wrong(found) => Element::Wrong(found),
        })
    }
}

/// List of token ids or of prompts while it is read.
enum PromptList {
    Empty,
    Ids(Vec<u32>),
    Prompts(Prompts),
    Wrong(String),
}

impl PromptList {
    /// Adds an element of a list that lies in `depth` others.
    fn add(&mut self, element: Element, depth: usize) {
        match (&mut *self, element) {
            (PromptList::Wrong(_), _) => {}
            (PromptList::Empty, Element::Id(id)) => *self = PromptList::Ids(vec![id]),
            (PromptList::Ids(ids), Element::Id(id)) => ids.push(id),
            (PromptList::Empty, Element::Text(text)) if depth == 0 => {
                *self = PromptList::Prompts(Prompts::Texts(vec![text]));
            }
            (PromptList::Empty, Element::Ids(ids)) if depth == 0 => {
                *self = PromptList::Prompts(Prompts::Ids(vec![ids]));
            }
            (PromptList::Prompts(Prompts::Texts(texts)), Element::Text(text)) if texts.len() < MOST_PROMPTS => {
                texts.push(text);
            }
            (PromptList::Prompts(Prompts::Ids(lists)), Element::Ids(ids)) if lists.len() < MOST_PROMPTS => {
                lists.push(ids);
            }
            (_, Element::Wrong(found)) => *self = PromptList::Wrong(format!("a list with {found}")),
            _ => *self = PromptList::Wrong("a list of different or too many values".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn prompts(text: &str) -> ApiResult<Option<Prompts>> {
        Body::parse(format!("{{\"prompt\": {text}}}").as_bytes()).and_then(|mut body| body.take_prompts())
    }

    #[test]
    fn a_prompt_is_a_text_ids_or_a_list_of_either() {
        let texts = |texts: &[&str]| Some(Prompts::Texts(texts.iter().map(|text| text.to_string()).collect()));
        assert_eq!(prompts("\"a\"").unwrap(), texts(&["a"]));
        assert_eq!(prompts("[\"a\", \"b\"]").unwrap(), texts(&["a", "b"]));
        assert_eq!(prompts("[1, 2]").unwrap(), Some(Prompts::Ids(vec![vec![1, 2]])));
        assert_eq!(prompts("[[1], [], [2, 3]]").unwrap(), Some(Prompts::Ids(vec![vec![1], vec![], vec![2, 3]])));
        assert_eq!(prompts("null").unwrap(), None);
        let many = format!("[{}\"x\"]", "\"x\",".repeat(MOST_PROMPTS));
        for wrong in [
            "1",
            "[1, \"a\"]",
            "[\"a\", [1]]",
            "[[1], 2]",
            "[-1]",
            "[4294967296]",
            "[[[1]]]",
            "{}",
            "1.5",
            "true",
            "[null]",
            &many,
        ] {
            assert_eq!(prompts(wrong).unwrap_err().param.as_deref(), Some("prompt"), "{wrong}");
        }
    }

    #[test]
    fn fields_that_are_left_are_unknown() {
        let rest = |text: &str, strict| {
            let mut body = Body::parse(text.as_bytes()).unwrap();
            body.begin(Api::Chat).and_then(|()| body.rest(strict))
        };
        assert_eq!(rest(r#"{"user": "x", "store": true, "suffix": null, "functions": []}"#, true), Ok(vec![]));
        assert_eq!(rest(r#"{"messages": [{"x": 1}]}"#, false).unwrap(), ["messages", "messages[0].x"]);
        assert_eq!(rest(r#"{"x": 1, "y": null, "prompt": "a"}"#, false).unwrap(), ["x", "prompt"]);
        assert_eq!(rest(r#"{"x": 1}"#, true).unwrap_err().param.as_deref(), Some("x"));
        assert_eq!(rest(r#"{"suffix": "x"}"#, false).unwrap_err().param.as_deref(), Some("suffix"));
    }

    #[test]
    fn fields_may_be_refused_or_counted_as_unknown() {
        let body = |text: &str| Body::parse(text.as_bytes()).unwrap();
        for harmless in ["{}", r#"{"x": null}"#, r#"{"x": false}"#, r#"{"x": []}"#, r#"{"x": 0}"#] {
            assert_eq!(body(harmless).refuse("x", &Value::from(0), "why"), Ok(()), "{harmless}");
        }
        let error = body(r#"{"x": 1}"#).refuse("x", &Value::from(0), "why").unwrap_err();
        assert_eq!((error.param.as_deref(), error.message.as_str()), (Some("x"), "`x`: why"));
        let mut read = body("{}");
        read.ignore("text.verbosity");
        assert_eq!(read.rest(false).unwrap(), ["text.verbosity"]);
    }

    #[test]
    fn errors_name_fields_as_the_client_does() {
        let mut names = FieldNames::default();
        names.call("max_tokens", "max_output_tokens");
        names.call("response_format", "text.format");
        struct Case(&'static str, &'static str, &'static str);
        let cases = [
            Case("max_tokens", "max_output_tokens", "`max_output_tokens`: found x"),
            Case("response_format.json_schema", "text.format.json_schema", "`text.format.json_schema`: found x"),
            Case("max_tokens_of_another", "max_tokens_of_another", "`max_tokens_of_another`: found x"),
        ];
        for Case(field, param, message) in cases {
            let error = names.shown(ApiError::field(field, "found x"));
            assert_eq!((error.param.as_deref(), error.message.as_str()), (Some(param), message));
        }
        let plain = names.shown(ApiError { message: "too many".into(), ..ApiError::field("max_tokens", "") });
        assert_eq!((plain.param.as_deref(), plain.message.as_str()), (Some("max_output_tokens"), "too many"));
        assert_eq!(names.shown(ApiError::invalid("x")), ApiError::invalid("x"));
    }

    #[test]
    fn deep_repeated_and_broken_bodies_are_refused() {
        let nested = |depth: usize| format!("{{\"a\": {}{}}}", "[".repeat(depth), "]".repeat(depth));
        assert!(Body::parse(nested(DEPTH - 1).as_bytes()).is_ok());
        for text in
            [nested(DEPTH).as_str(), "{\"a\": 1, \"a\": 2}", "[]", "", "{", "{} x", "{\"a\": {\"b\": 1, \"b\": 2}}"]
        {
            assert_eq!(Body::parse(text.as_bytes()).unwrap_err().status.as_u16(), 400, "{text}");
        }
        assert!(Body::parse(format!("{{\"a\": \"{}\"}}", "[".repeat(100)).as_bytes()).is_ok());
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_body_or_an_error(text in "[\\[\\]{}\":,a0\\\\ promtk]{0,60}") {
            let _ = Body::parse(text.as_bytes());
        }
    }
}
