//! Bodies of requests: JSON objects from outside, read field by field.

use super::error::{ApiError, ApiResult};
use crate::strict_json;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// Largest nesting of objects and lists.
const DEPTH: usize = 64;
/// Largest number of prompts of a request.
pub const MOST_PROMPTS: usize = 64;

/// Fields that are accepted and have no effect on the answer.
pub(super) const INERT: [&str; 7] =
    ["user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"];

/// Fields that would change the answer and that this server cannot honour.
const REFUSED: [&str; 10] = [
    "suffix",
    "audio",
    "modalities",
    "prediction",
    "web_search_options",
    "functions",
    "function_call",
    "use_beam_search",
    "prompt_embeds",
    "echo_prompt_embeds",
];

/// Texts or tokens to continue.
#[derive(Debug, Clone, PartialEq)]
pub enum Prompts {
    /// Texts.
    Texts(Vec<String>),
    /// Lists of token ids.
    Ids(Vec<Vec<u32>>),
}

/// Body of a request. A field is removed when it is read, so that those that remain are unknown.
#[derive(Debug)]
pub struct Body {
    fields: Map<String, Value>,
    prompts: Option<Prompts>,
    tokens: Option<Prompts>,
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
        let body = Reader.deserialize(&mut deserializer).and_then(|body| deserializer.end().map(|()| body));
        body.map_err(|e| ApiError::invalid(format!("the body is not a valid JSON object: {e}")))
    }

    /// Takes a field; `None` if it is absent or null.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.shift_remove(name).filter(|value| !value.is_null())
    }

    /// Takes the field `prompt`.
    pub fn take_prompts(&mut self) -> Option<Prompts> {
        self.prompts.take()
    }

    /// Takes the field `tokens`: one list of token ids.
    ///
    /// # Errors
    /// It is something else.
    pub fn take_tokens(&mut self) -> ApiResult<Option<Vec<u32>>> {
        match self.tokens.take() {
            None => Ok(None),
            Some(Prompts::Ids(mut lists)) if lists.len() == 1 => Ok(lists.pop()),
            Some(_) => Err(ApiError::field("tokens", "expected a list of token ids")),
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

    /// Counts a field that was read, or a part of one, as unknown, because it has no effect.
    pub fn ignore(&mut self, name: &str) {
        self.fields.insert(name.into(), Value::Bool(true));
    }

    /// Takes a field that would change the answer and that the endpoint cannot honour.
    ///
    /// # Errors
    /// It is neither absent, null, false, empty nor equal to `harmless`.
    pub fn refuse(&mut self, name: &str, harmless: &Value, why: &str) -> ApiResult<()> {
        let is_off = |value: &Value| *value == Value::Bool(false) || value.as_array().is_some_and(Vec::is_empty);
        match self.take(name).filter(|value| !is_off(value) && value != harmless) {
            Some(_) => Err(ApiError::field(name, why).code("unsupported_parameter")),
            None => Ok(()),
        }
    }

    /// Checks the fields that were not read. Returns the names of those that are unknown and ignored.
    ///
    /// # Errors
    /// A field would change the answer and cannot be honoured, or it is unknown and `strict` is set.
    pub fn rest(self, strict: bool) -> ApiResult<Vec<String>> {
        let mut unknown = Vec::new();
        let members = self.fields.into_iter().filter(|(_, value)| !value.is_null());
        for (name, value) in members {
            let is_off = matches!(&value, Value::Bool(false)) || value.as_array().is_some_and(Vec::is_empty);
            if REFUSED.contains(&name.as_str()) && !is_off {
                return Err(ApiError::field(&name, "this server does not support it").code("unsupported_parameter"));
            }
            if !INERT.contains(&name.as_str()) && !REFUSED.contains(&name.as_str()) {
                unknown.push(name);
            }
        }
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
struct Reader;

impl<'de> DeserializeSeed<'de> for Reader {
    type Value = Body;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Body, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Reader {
    type Value = Body;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Body, A::Error> {
        let mut body = Body { fields: Map::new(), prompts: None, tokens: None };
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

/// Reads a text, token ids, or a list of either.
struct PromptReader;

impl<'de> DeserializeSeed<'de> for PromptReader {
    type Value = Option<Prompts>;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for PromptReader {
    type Value = Option<Prompts>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "a text, token ids, or a list of at most {MOST_PROMPTS} of either")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Some(Prompts::Texts(vec![text.into()])))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let mut list: Option<Prompts> = None;
        // A list of numbers is one prompt.
        let mut ids: Vec<u32> = Vec::new();
        while let Some(element) = seq.next_element_seed(ElementReader)? {
            match (element, &mut list) {
                (Element::Id(id), None) => ids.push(id),
                (Element::Text(text), None) if ids.is_empty() => list = Some(Prompts::Texts(vec![text])),
                (Element::Ids(more), None) if ids.is_empty() => list = Some(Prompts::Ids(vec![more])),
                (Element::Text(text), Some(Prompts::Texts(texts))) if texts.len() < MOST_PROMPTS => texts.push(text),
                (Element::Ids(more), Some(Prompts::Ids(lists))) if lists.len() < MOST_PROMPTS => lists.push(more),
                _ => return Err(A::Error::invalid_value(serde::de::Unexpected::Seq, &self)),
            }
        }
        Ok(Some(list.unwrap_or_else(|| Prompts::Ids(vec![ids]))))
    }
}

/// Element of a list of prompts.
enum Element {
    Id(u32),
    Text(String),
    Ids(Vec<u32>),
}

struct ElementReader;

impl<'de> DeserializeSeed<'de> for ElementReader {
    type Value = Element;

    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Element, D::Error> {
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ElementReader {
    type Value = Element;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a text, a token id, or a list of token ids")
    }

    fn visit_u64<E: serde::de::Error>(self, id: u64) -> Result<Element, E> {
        u32::try_from(id).map(Element::Id).map_err(|_| E::custom(format_args!("found the token id {id}")))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Element, E> {
        Ok(Element::Text(text.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Element, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = seq.next_element::<u32>()? {
            ids.push(id);
        }
        Ok(Element::Ids(ids))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn prompts(text: &str) -> ApiResult<Option<Prompts>> {
        Body::parse(format!("{{\"prompt\": {text}}}").as_bytes()).map(|mut body| body.take_prompts())
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
        for wrong in ["1", "[1, \"a\"]", "[\"a\", [1]]", "[[1], 2]", "[-1]", "[4294967296]", "[[[1]]]", "{}", &many] {
            assert!(prompts(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn fields_that_are_left_are_inert_refused_or_unknown() {
        let rest = |text: &str, strict| Body::parse(text.as_bytes()).unwrap().rest(strict);
        assert_eq!(rest(r#"{"user": "x", "store": true, "suffix": null, "functions": []}"#, true), Ok(vec![]));
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
