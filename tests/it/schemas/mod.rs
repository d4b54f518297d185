//! JSON schemas for tests of constraints: some as applications write them, and random ones of the same style. Every
//! text, list and number in them is bounded, so that the answer of a model with random weights ends.

pub mod validate;

use iec::rng::Rng;
use serde_json::{Map, Value, json};

/// Number of schemas of [`all`].
pub const COUNT: usize = 300;

/// Returns schemas of applications, then random ones.
pub fn all() -> Vec<Value> {
    let mut rng = Rng::new(2026);
    let mut schemas = of_applications();
    while schemas.len() < COUNT {
        schemas.push(random(&mut rng));
    }
    schemas
}

fn text(most: usize) -> Value {
    json!({"type": "string", "maxLength": most})
}

fn object(properties: Value, required: &[&str]) -> Value {
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

fn of_applications() -> Vec<Value> {
    let point = json!({"type": "array", "prefixItems": [
        {"type": "number", "minimum": -180, "maximum": 180}, {"type": "number", "minimum": -90, "maximum": 90}],
        "items": false, "minItems": 2});
    vec![
        object(
            json!({"name": {"type": "string", "minLength": 1, "maxLength": 12, "description": "Full name"},
                "age": {"type": "integer", "minimum": 0, "maximum": 130},
                "email": {"anyOf": [{"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.org$"}, {"type": "null"}]}}),
            &["name", "age", "email"],
        ),
        object(
            json!({"location": text(10), "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7, "default": 1}}),
            &["location", "unit"],
        ),
        json!({"$schema": "http://json-schema.org/draft-07/schema#", "title": "Product", "type": "object",
            "properties": {"id": {"type": "string", "format": "uuid"},
                "price": {"type": "number", "exclusiveMinimum": 0, "maximum": 99999},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 3}},
            "required": ["id", "price"], "additionalProperties": false}),
        object(
            json!({"sentiment": {"enum": ["positive", "negative", "neutral"]},
                "confidence": {"type": "number", "minimum": 0, "maximum": 1},
                "reasons": {"type": "array", "items": text(8), "maxItems": 2}}),
            &["sentiment", "confidence"],
        ),
        json!({"type": "object", "properties": {"type": {"const": "Feature"}, "geometry": {"$ref": "#/definitions/any"}},
            "required": ["type", "geometry"], "additionalProperties": false, "definitions": {"any": {"oneOf": [
                object(json!({"type": {"const": "Point"}, "coordinates": point}), &["type", "coordinates"]),
                object(json!({"type": {"const": "LineString"},
                    "coordinates": {"type": "array", "items": point, "minItems": 2, "maxItems": 3}}),
                    &["type", "coordinates"])]}}}),
        json!({"type": "object", "properties": {"value": {"type": "integer", "minimum": -9, "maximum": 9},
                "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["value", "next"], "additionalProperties": false}),
        json!({"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {"label": {"type": "string",
                "maxLength": 3}, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}},
            "required": ["label"], "additionalProperties": false}}}),
        json!({"anyOf": [{"type": "integer", "minimum": 0, "maximum": 1000},
            object(json!({"op": {"enum": ["+", "-"]}, "left": {"type": "integer", "minimum": 0, "maximum": 9},
                "right": {"$ref": "#"}}), &["op", "left", "right"])]}),
        json!({"type": "array", "items": object(json!({"start": {"type": "string", "format": "time"},
            "day": {"type": "string", "format": "date"}, "host": {"type": "string", "format": "ipv4"}}),
            &["start", "day", "host"]), "minItems": 1, "maxItems": 2}),
        json!({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"a": {"minimum": 3, "maximum": 7}, "b": {"type": "boolean"}},
            "additionalProperties": false}]}),
        json!({"type": "object", "patternProperties": {"^x-[a-z]{1,4}$": {"type": ["boolean", "null"]}},
            "additionalProperties": false}),
        json!({"enum": ["ja", "nein \"vielleicht\"", 7, -2.5, null, true, [1, {"a": []}], {"b": "é\n"}]}),
        json!({"type": "string", "pattern": "^(\\([0-9]{3}\\))?[0-9]{3}-[0-9]{4}$"}),
        json!({"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10}),
        json!({"type": "integer", "multipleOf": 7, "minimum": -100, "maximum": 100}),
    ]
}

fn one_of<'a>(rng: &mut Rng, words: &[&'a str]) -> &'a str {
    words[rng.next_u64() as usize % words.len()]
}

fn below(rng: &mut Rng, n: u64) -> u64 {
    rng.next_u64() % n
}

/// Returns a random schema; about a third have definitions, which may refer to themselves.
fn random(rng: &mut Rng) -> Value {
    let definitions = if below(rng, 3) == 0 { 1 + below(rng, 2) } else { 0 };
    let mut schema = nested(rng, 3, definitions);
    if definitions > 0 {
        let mut all = Map::new();
        for i in 0..definitions {
            // A definition leads to itself only through a property that may be null or absent.
            let mut properties = Map::new();
            properties.insert("item".into(), scalar(rng));
            let again = json!({"$ref": format!("#/$defs/d{}", below(rng, definitions))});
            properties.insert("more".into(), json!({"anyOf": [{"type": "null"}, again]}));
            all.insert(format!("d{i}"), object(Value::Object(properties), &["item"]));
        }
        if let Some(members) = schema.as_object_mut() {
            members.insert("$defs".into(), Value::Object(all));
        }
    }
    if below(rng, 4) == 0
        && let Some(members) = schema.as_object_mut()
    {
        members.insert("title".into(), json!("Random"));
        members.insert("$schema".into(), json!("https://json-schema.org/draft/2020-12/schema"));
    }
    schema
}

fn nested(rng: &mut Rng, depth: u64, definitions: u64) -> Value {
    match below(rng, if depth == 0 { 2 } else { 7 }) {
        0 if definitions > 0 => json!({"$ref": format!("#/$defs/d{}", below(rng, definitions))}),
        0 | 1 => scalar(rng),
        2 | 3 => members(rng, depth, definitions),
        4 => {
            let least = below(rng, 3);
            let items = nested(rng, depth - 1, definitions);
            json!({"type": "array", "items": items, "minItems": least, "maxItems": least + below(rng, 3)})
        }
        5 => {
            let first: Vec<Value> = (0..1 + below(rng, 3)).map(|_| nested(rng, depth - 1, definitions)).collect();
            json!({"type": "array", "minItems": first.len(), "prefixItems": first, "items": false})
        }
        _ => {
            let kinds: Vec<Value> = (0..2 + below(rng, 2)).map(|_| nested(rng, depth - 1, definitions)).collect();
            json!({"anyOf": kinds})
        }
    }
}

fn members(rng: &mut Rng, depth: u64, definitions: u64) -> Value {
    const NAMES: [&str; 10] =
        ["id", "name", "created_at", "is active", "größe", "quote\"d", "items", "x", "first_name", "metadata"];
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for _ in 0..1 + below(rng, 4) {
        let name = one_of(rng, &NAMES);
        properties.insert(name.into(), nested(rng, depth - 1, definitions));
        if below(rng, 2) == 0 && !required.contains(&name) {
            required.push(name);
        }
    }
    object(Value::Object(properties), &required)
}

fn scalar(rng: &mut Rng) -> Value {
    let low = below(rng, 200) as i64 - 100;
    let high = low + below(rng, 1000) as i64;
    match below(rng, 13) {
        0 => json!({"type": "integer", "minimum": low, "maximum": high}),
        1 => json!({"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 2}),
        2 => json!({"type": "number", "minimum": low as f64 / 8.0, "maximum": high as f64 / 4.0 + 50.0}),
        3 => json!({"type": "boolean"}),
        4 => json!({"type": ["string", "null"], "maxLength": below(rng, 8)}),
        5 => {
            let least = below(rng, 4);
            json!({"type": "string", "minLength": least, "maxLength": least + below(rng, 8)})
        }
        6 => json!({"type": "string", "format": one_of(rng, &["date", "uuid", "ipv4"])}),
        7 => {
            let values = [json!("red"), json!("green"), json!("blue"), json!(low), Value::Null];
            json!({"enum": values[..2 + below(rng, 4) as usize]})
        }
        8 => json!({"const": one_of(rng, &["fixed", "v1.0", "a b", "\\ \" /", "日本"])}),
        9 => {
            json!({"type": "string", "pattern": one_of(rng, &["^[A-Z]{2,3}-\\d{1,4}$", "^(foo|bar)+x$", "^\\w{1,5}$"])})
        }
        10 => json!({"type": "null"}),
        11 => json!({"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": 1 + below(rng, 30)}),
        _ => json!({"type": ["integer", "boolean"], "minimum": 0, "maximum": 50}),
    }
}
