//! Types that a JSON schema allows for a value, to read values that are written without quotation marks.

use super::quoted::escaped;
use serde_json::Value;

/// Largest number of schemas that are looked at for a value. Alternatives and references may be many.
const SCHEMAS: usize = 256;

/// A set of JSON types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Types(u8);

const TEXT: u8 = 1;
const NUMBER: u8 = 2;
const BOOL: u8 = 4;
const NULL: u8 = 8;
const LIST: u8 = 16;
const OBJECT: u8 = 32;

impl Types {
    /// All types.
    pub(super) const ANY: Types = Types(63);

    /// Returns the types that a schema allows; `root` has its definitions.
    pub(super) fn of(schema: &Value, root: &Value) -> Types {
        Types(allowed(schema, root, &mut SCHEMAS.clone()))
    }

    /// Returns true if a value is a text.
    pub(super) fn is_text(self) -> bool {
        self.0 == TEXT
    }

    /// Returns true if the only type but perhaps null is this one: `boolean`, `number`, `null`, `array` or `object`.
    pub(super) fn is(self, name: &str) -> bool {
        self.0 & !NULL == one(name)
    }

    /// Returns true if a value may be a text.
    pub(super) fn may_be_text(self) -> bool {
        self.has(TEXT)
    }

    /// Returns true if a value may be null.
    pub(super) fn may_be_null(self) -> bool {
        self.has(NULL)
    }

    /// Returns true if a value may be of this type.
    pub(super) fn may_be(self, name: &str) -> bool {
        self.has(one(name))
    }

    fn has(self, bits: u8) -> bool {
        self.0 & bits != 0
    }

    /// Returns a value that was written as text as JSON.
    pub(super) fn value(self, text: &str) -> String {
        let trimmed = text.trim();
        let constant = match trimmed {
            "True" | "true" if self.has(BOOL) => Some("true"),
            "False" | "false" if self.has(BOOL) => Some("false"),
            "None" | "null" if self.has(NULL) => Some("null"),
            _ => None,
        };
        if let Some(constant) = constant {
            return constant.into();
        }
        let parsed = serde_json::from_str::<Value>(trimmed).ok();
        // A text that looks like another value stays a text if there may be no such value.
        match parsed.filter(|value| self.has(kind(value)) && !value.is_string()) {
            Some(_) => trimmed.into(),
            None => {
                let line = text.strip_prefix('\n').and_then(|text| text.strip_suffix('\n').or(Some(text)));
                format!("\"{}\"", escaped(line.unwrap_or(text)))
            }
        }
    }
}

fn one(name: &str) -> u8 {
    match name {
        "string" => TEXT,
        "number" | "integer" => NUMBER,
        "boolean" => BOOL,
        "null" => NULL,
        "array" => LIST,
        "object" => OBJECT,
        _ => 0,
    }
}

fn kind(value: &Value) -> u8 {
    match value {
        Value::Null => NULL,
        Value::Bool(_) => BOOL,
        Value::Number(_) => NUMBER,
        Value::String(_) => TEXT,
        Value::Array(_) => LIST,
        Value::Object(_) => OBJECT,
    }
}

fn allowed(schema: &Value, root: &Value, left: &mut usize) -> u8 {
    *left = left.saturating_sub(1);
    let Some(object) = schema.as_object().filter(|_| *left > 0) else { return Types::ANY.0 };
    let mut types = match object.get("type") {
        Some(Value::String(name)) => one(name),
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).map(one).fold(0, |all, one| all | one),
        _ => Types::ANY.0,
    };
    if object.get("nullable") == Some(&Value::Bool(true)) {
        types |= NULL;
    }
    let list = |name: &str| object.get(name).and_then(Value::as_array);
    if let Some(values) = list("enum") {
        types &= values.iter().map(kind).fold(0, |all, one| all | one);
    }
    if let Some(value) = object.get("const") {
        types &= kind(value);
    }
    for parts in ["anyOf", "oneOf"].into_iter().filter_map(list) {
        types &= parts.iter().map(|part| allowed(part, root, left)).fold(0, |all, one| all | one);
    }
    for part in list("allOf").into_iter().flatten() {
        types &= allowed(part, root, left);
    }
    if let Some(pointer) = object.get("$ref").and_then(Value::as_str).and_then(|name| name.strip_prefix('#')) {
        types &= root.pointer(pointer).map_or(Types::ANY.0, |target| allowed(target, root, left));
    }
    if types == 0 { Types::ANY.0 } else { types }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_without_quotation_marks_are_read_by_their_schema() {
        struct Case(Value, &'static str, &'static str);
        let cases = [
            Case(json!({"type": "string"}), "5", "\"5\""),
            Case(json!({"type": "string"}), " a\"b ", "\" a\\\"b \""),
            Case(json!({"type": "integer"}), " 5\n", "5"),
            Case(json!({"type": "integer"}), "five", "\"five\""),
            Case(json!({"type": "boolean"}), "True", "true"),
            Case(json!({"type": ["string", "null"]}), "None", "null"),
            Case(json!({"type": ["string", "null"]}), "none", "\"none\""),
            Case(json!({"type": "string", "nullable": true}), "null", "null"),
            Case(json!({"type": "array", "items": {}}), "[1, \"a\"]", "[1, \"a\"]"),
            Case(json!({"enum": ["1", "2"]}), "1", "\"1\""),
            Case(json!({"enum": [1, 2]}), "1", "1"),
            Case(json!({"anyOf": [{"type": "string"}, {"type": "number"}]}), "1.5", "1.5"),
            Case(json!({"$ref": "#/$defs/text"}), "1", "\"1\""),
            Case(json!({"$ref": "#/$defs/loop"}), "1", "1"),
            Case(json!({}), "{\"a\": 1}", "{\"a\": 1}"),
            Case(json!({}), "plain text", "\"plain text\""),
            Case(json!({}), "\nplain text\n", "\"plain text\""),
            Case(json!({}), "\"quoted\"", "\"\\\"quoted\\\"\""),
        ];
        let root = json!({"$defs": {"text": {"type": "string"},
                                    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]}}});
        for Case(schema, text, expected) in cases {
            assert_eq!(Types::of(&schema, &root).value(text), expected, "{schema} {text:?}");
        }
    }
}
