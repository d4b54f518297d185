//! Lists of tools as servers and generators write them: every list has a constraint, and a call of each tool with
//! arguments that are valid against its schema is allowed as it is.

use super::tests::{hermes, tokenizer_of, tokenizer_rows};
use super::*;
use crate::generate::constraint::{Constraint, Vocabulary};
use crate::generate::text::Tokenizer;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Parts of the lists that are left out: the number of a tool, and a place in its schema.
const LEFT_OUT: [(&str, &[(usize, &str)]); 4] = [
    (
        "notion",
        &[(11, "#/$defs/parentRequest/oneOf"), (11, "#/properties/icon/format"), (11, "#/properties/cover/format")],
    ),
    (
        "openapi",
        &[
            (0, "#/properties/id/minimum"),
            (0, "#/properties/id/maximum"),
            (0, "#/properties/photo/format"),
            (0, "#/properties/home/format"),
        ],
    ),
    (
        "pydantic",
        &[
            (0, "#/properties/tags/uniqueItems"),
            (0, "#/properties/price/anyOf/1/pattern"),
            (0, "#/$defs/Dog/properties/friends/uniqueItems"),
            (0, "#/properties/path/format"),
        ],
    ),
    ("zod", &[(0, "#/properties/mail/pattern"), (0, "#/properties/not/not")]),
];

/// Returns all lists by their names.
fn lists() -> BTreeMap<String, Vec<Tool>> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tool-lists");
    let list = |path: PathBuf| {
        let list: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let tool = |tool: &Value| {
            let function = json!({"name": tool["name"], "parameters": tool["inputSchema"]});
            json!({"type": "function", "function": function})
        };
        let tools = Value::Array(list.as_array().unwrap().iter().map(tool).collect());
        (path.file_stem().unwrap().to_str().unwrap().to_string(), parse_tools(&tools).unwrap())
    };
    std::fs::read_dir(dir).unwrap().map(|entry| list(entry.unwrap().path())).collect()
}

/// Returns a value that is valid against a schema, with all properties to a depth.
fn example(schema: &Value, root: &Value, depth: usize) -> Value {
    let again = |schema: &Value| example(schema, root, depth);
    if let Some(reference) = schema["$ref"].as_str() {
        return again(root.pointer(&reference[1..]).unwrap());
    }
    for fixed in [&schema["const"], &schema["enum"][0]] {
        if !fixed.is_null() {
            return fixed.clone();
        }
    }
    for alternatives in ["anyOf", "oneOf"] {
        if let Some(first) = schema[alternatives].get(0) {
            return again(first);
        }
    }
    if let Some(all) = schema["allOf"].as_array() {
        return Value::Object(all.iter().flat_map(|one| again(one).as_object().unwrap().clone()).collect());
    }
    let kind = schema["type"].as_array().map_or(&schema["type"], |kinds| &kinds[0]);
    match kind.as_str() {
        Some("object") => {
            let is_required = |name: &str| schema["required"].as_array().is_some_and(|all| all.contains(&json!(name)));
            let mut members = Map::new();
            for (name, value) in schema["properties"].as_object().into_iter().flatten() {
                if is_required(name) || depth > 0 {
                    members.insert(name.clone(), example(value, root, depth.saturating_sub(1)));
                }
            }
            if let Some(value) = schema.get("additionalProperties").filter(|value| value.is_object()) {
                let name = schema["propertyNames"]["enum"][1].as_str().unwrap_or("more/é");
                members.insert(name.into(), again(value));
            }
            Value::Object(members)
        }
        Some("array") => match (&schema["prefixItems"], &schema["items"]) {
            (Value::Array(items), _) | (_, Value::Array(items)) => items.iter().map(again).collect(),
            (_, item) => json!([again(item)]),
        },
        Some("integer") => json!(schema["minimum"].as_i64().unwrap_or(1).max(1)),
        Some("number") => json!(1.5),
        Some("boolean") => json!(true),
        Some("null") => json!(null),
        Some("string") => json!(match schema["format"].as_str() {
            Some("uri") => "https://example.com/a?b=c",
            Some("email") => "a@example.com",
            Some("uuid") => "123e4567-e89b-42d3-a456-426614174000",
            Some("date-time") => "2024-05-06T07:08:09Z",
            Some("date") => "2024-05-06",
            Some("duration") => "PT1M",
            _ => "a text / \"é\"",
        }),
        _ => json!({"any": [1, "thing"]}),
    }
}

/// Returns the beginning of a text that is allowed.
fn allowed(constraint: &Constraint, tokenizer: &Tokenizer, text: &str) -> String {
    let (mut state, mut allowed) = (constraint.start(), Vec::new());
    for id in tokenizer.encode_plain(text).unwrap() {
        if !state.is_free() && !state.mask().unwrap().allows(id) {
            break;
        }
        state.accept(id).unwrap();
        allowed.push(id);
    }
    tokenizer.decode(&allowed, false).unwrap()
}

#[test]
fn lists_of_tools_of_servers_and_generators_have_calls() {
    let lists = lists();
    assert!(lists.len() >= 16 && LEFT_OUT.iter().all(|(name, _)| lists.contains_key(*name)));
    let tokenizer = tokenizer_of("hermes");
    let vocabulary = Arc::new(Vocabulary::new(tokenizer.spelling(tokenizer_rows(&tokenizer)).unwrap()).unwrap());
    let mut failures = Vec::new();
    for (list, tools) in lists {
        let made = hermes(&tokenizer, &tools, &ToolChoice::Auto, Enforced::All);
        let made = made.unwrap().unwrap();
        let expected = LEFT_OUT.iter().find(|(name, _)| *name == list).map_or(&[][..], |(_, places)| places);
        let expected: Vec<(usize, String)> = expected.iter().map(|(tool, place)| (*tool, place.to_string())).collect();
        if made.ignored != expected {
            failures.push(format!("{list}: {:?} is left out", made.ignored));
        }
        let constraint = Constraint::compile(&made.source, &vocabulary).unwrap();
        for tool in &tools {
            let schema = tool.parameters.clone().unwrap_or_default();
            // Models escape what is not ASCII, or do not; and leave out what is optional, or do not.
            for (depth, escaped) in [(0, false), (2, true)] {
                let arguments = example(&schema, &schema, depth).to_string();
                let arguments =
                    if escaped { arguments.replace('é', "\\u00e9").replace('/', "\\/") } else { arguments };
                let text =
                    format!("<tool_call>\n{{\"name\": \"{}\", \"arguments\": {arguments}}}\n</tool_call>", tool.name);
                let found = allowed(&constraint, &tokenizer, &text);
                if found != text {
                    failures.push(format!("{list}: {text} is stopped behind {found}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
