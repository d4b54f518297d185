//! A small validator of JSON schemas (draft 2020-12) for the keywords that constraints support. It shares no code with
//! the compiler of constraints: it walks the value, where the compiler makes a grammar.

use regex::Regex;
use serde_json::{Map, Value};

/// Patterns of the formats that the tests use.
const FORMATS: [(&str, &str); 6] = [
    ("date", r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$"),
    ("time", r"^([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)$"),
    (
        "date-time",
        r"^\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])[tT]([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]\d\d:\d\d)$",
    ),
    ("uuid", r"^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"),
    ("ipv4", r"^((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)$"),
    ("email", r"^[^@\s]+@[^@\s]+$"),
];

/// Returns the reason why `value` is not valid against `schema`, a part of `root`.
pub fn problem(root: &Value, schema: &Value, value: &Value) -> Option<String> {
    let Value::Object(keywords) = schema else {
        return (schema == &Value::Bool(false)).then(|| format!("{value} where nothing is valid"));
    };
    keywords.iter().find_map(|(keyword, rule)| {
        let valid = match keyword.as_str() {
            "$ref" => {
                let target = root.pointer(&rule.as_str().unwrap()[1..]).unwrap();
                return problem(root, target, value);
            }
            "properties" | "patternProperties" | "additionalProperties" => {
                return value.as_object().and_then(|members| property(root, keywords, keyword, members));
            }
            "prefixItems" | "items" => {
                return value.as_array().and_then(|items| item(root, keywords, keyword, items));
            }
            "allOf" => return rule.as_array().unwrap().iter().find_map(|part| problem(root, part, value)),
            "anyOf" | "oneOf" => {
                let valid = rule.as_array().unwrap().iter().filter(|part| problem(root, part, value).is_none()).count();
                if keyword == "anyOf" { valid > 0 } else { valid == 1 }
            }
            _ => holds(keyword, rule, value),
        };
        (!valid).then(|| format!("{value}: {keyword} {rule}"))
    })
}

/// Checks a keyword whose rule has no schema.
fn holds(keyword: &str, rule: &Value, value: &Value) -> bool {
    let (text, number) = (value.as_str(), value.as_f64());
    let characters = text.map(|text| text.chars().count());
    let (items, members) = (value.as_array().map(Vec::len), value.as_object().map(Map::len));
    let count = rule.as_u64().unwrap_or(0) as usize;
    let bound = rule.as_f64().unwrap_or(f64::NAN);
    match keyword {
        "type" => match rule {
            Value::Array(kinds) => kinds.iter().any(|kind| is_a(kind.as_str().unwrap(), value)),
            kind => is_a(kind.as_str().unwrap(), value),
        },
        "const" => equal(rule, value),
        "enum" => rule.as_array().unwrap().iter().any(|one| equal(one, value)),
        "required" => {
            let names = rule.as_array().unwrap();
            value
                .as_object()
                .is_none_or(|members| names.iter().all(|name| members.contains_key(name.as_str().unwrap())))
        }
        "minLength" => characters.is_none_or(|n| n >= count),
        "maxLength" => characters.is_none_or(|n| n <= count),
        "minItems" => items.is_none_or(|n| n >= count),
        "maxItems" => items.is_none_or(|n| n <= count),
        "minProperties" => members.is_none_or(|n| n >= count),
        "maxProperties" => members.is_none_or(|n| n <= count),
        "minimum" => number.is_none_or(|n| n >= bound),
        "maximum" => number.is_none_or(|n| n <= bound),
        "exclusiveMinimum" => number.is_none_or(|n| n > bound),
        "exclusiveMaximum" => number.is_none_or(|n| n < bound),
        "multipleOf" => number.is_none_or(|n| ((n / bound).round() * bound - n).abs() < 1e-9 * n.abs().max(1.0)),
        "pattern" => text.is_none_or(|text| Regex::new(rule.as_str().unwrap()).unwrap().is_match(text)),
        "format" => text.is_none_or(|text| {
            let (_, pattern) = FORMATS.iter().find(|(name, _)| rule == name).expect("a format of the tests");
            Regex::new(pattern).unwrap().is_match(text)
        }),
        "$defs" | "definitions" | "title" | "description" | "default" | "examples" | "$schema" | "$comment" => true,
        _ => panic!("the validator does not know {keyword}"),
    }
}

fn is_a(kind: &str, value: &Value) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|n| n.fract() == 0.0),
        _ => panic!("the validator does not know the type {kind}"),
    }
}

/// Compares values as JSON schema does: numbers by their value.
fn equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| equal(a, b)))
        }
        _ => a == b,
    }
}

fn property(
    root: &Value,
    keywords: &Map<String, Value>,
    keyword: &str,
    members: &Map<String, Value>,
) -> Option<String> {
    let named = keywords.get("properties").and_then(Value::as_object);
    let patterns = keywords.get("patternProperties").and_then(Value::as_object);
    let matching = |name: &str| -> Vec<&Value> {
        let all = patterns.into_iter().flatten();
        all.filter(|(pattern, _)| Regex::new(pattern).unwrap().is_match(name)).map(|(_, schema)| schema).collect()
    };
    members.iter().find_map(|(name, value)| match keyword {
        "properties" => named?.get(name).and_then(|schema| problem(root, schema, value)),
        "patternProperties" => matching(name).into_iter().find_map(|schema| problem(root, schema, value)),
        _ if named.is_some_and(|named| named.contains_key(name)) || !matching(name).is_empty() => None,
        _ => problem(root, &keywords[keyword], value),
    })
}

fn item(root: &Value, keywords: &Map<String, Value>, keyword: &str, items: &[Value]) -> Option<String> {
    let first = keywords.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    match keyword {
        "prefixItems" => first.iter().zip(items).find_map(|(schema, value)| problem(root, schema, value)),
        _ => items.iter().skip(first.len()).find_map(|value| problem(root, &keywords[keyword], value)),
    }
}

#[test]
fn the_validator_tells_valid_from_invalid() {
    let cases = [
        (
            r#"{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}"#,
            r#"[{"a":1},{"a":-2.0}]"#,
            r#"[{},{"a":1.5},{"a":1,"b":2},[],"a"]"#,
        ),
        (
            r#"{"type":"array","prefixItems":[{"const":1}],"items":{"type":"string","maxLength":2},"minItems":1,"maxItems":3}"#,
            r#"[[1],[1,"ab","é€"]]"#,
            r#"[[],[2],[1,"abc"],[1,"a","a","a"],[1,2]]"#,
        ),
        (
            r#"{"anyOf":[{"type":"null"},{"type":"number","minimum":0,"exclusiveMaximum":1}]}"#,
            "[null,0,0.5]",
            "[1,-1,true]",
        ),
        (r#"{"oneOf":[{"multipleOf":2},{"multipleOf":3}]}"#, "[2,3,4]", "[6,5]"),
        (
            r##"{"$ref":"#/$defs/list","$defs":{"list":{"type":"object","properties":{"next":{"$ref":"#/$defs/list"}},"maxProperties":1}}}"##,
            r#"[{},{"next":{"next":{}}}]"#,
            r#"[{"next":1},{"a":1,"b":2}]"#,
        ),
        (
            r#"{"patternProperties":{"^x":{"type":"null"}},"additionalProperties":{"enum":["a",1]}}"#,
            r#"[{"x1":null,"y":"a","z":1.0}]"#,
            r#"[{"x1":1},{"y":"b"}]"#,
        ),
        (r#"{"type":"string","format":"date","pattern":"^2"}"#, r#"["2024-01-31"]"#, r#"["1024-01-31","2024-13-01"]"#),
    ];
    for (schema, valid, invalid) in cases {
        let parse = |text: &str| -> Value { serde_json::from_str(text).unwrap() };
        let schema = parse(schema);
        for (values, expected) in [(parse(valid), true), (parse(invalid), false)] {
            for value in values.as_array().unwrap() {
                assert_eq!(problem(&schema, &schema, value).is_none(), expected, "{schema} {value}");
            }
        }
    }
}
