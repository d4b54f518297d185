//! Compares the description with the functions that read requests.

use super::fields::{self, Field, FieldKind};
use super::*;
use crate::api::body::Body;
use crate::api::chat::ChatRequest;
use crate::api::completions::CompletionRequest;
use crate::api::error::ApiResult;
use crate::api::other_fields::{OTHER_FIELDS, Treatment};
use crate::api::settings::Limits;
use crate::serve::http::endpoints;
use regex::Regex;
use std::collections::BTreeSet;

const LIMITS: Limits = Limits { max_n: 16, max_logprobs: 20, strict_fields: true, unloads: true };

/// Reads the fields of a request.
type Read = fn(&mut Body) -> ApiResult<()>;

/// Returns a value of a field.
fn example(kind: FieldKind) -> Value {
    match kind {
        FieldKind::Text | FieldKind::Name => json!("x"),
        FieldKind::Flag => json!(true),
        FieldKind::Whole(least, _) => json!(least.max(1)),
        FieldKind::Number(..) | FieldKind::Positive(_) => json!(1),
        FieldKind::Ids(_) => json!([1]),
        FieldKind::Texts(_) => json!(["x"]),
        FieldKind::Object => json!({}),
        FieldKind::Objects(name) => json!([example_of(name)]),
        FieldKind::Schema(name) => example_of(name),
    }
}

/// Returns a value of a schema.
fn example_of(schema: &str) -> Value {
    match schema {
        "Prompt" | "Stop" => json!("x"),
        "AllowedTokens" => json!([1]),
        "UnicodeForm" => json!("nfc"),
        "Side" => json!("right"),
        "SchemaOrText" => json!({"type": "object"}),
        "Format" => json!("json"),
        "Thinking" => json!({"type": "enabled"}),
        "Reasoning" => json!({"effort": "low", "exclude": true}),
        "LogitBias" => json!({"1": 2}),
        "AdapterScales" => json!([{"name": "x", "scale": 0.5}]),
        "StreamOptions" => json!({"include_usage": true}),
        "ResponseFormat" => json!({"type": "json_object"}),
        "StructuredOutputs" => json!({"regex": "x"}),
        "ChatMessage" => json!({"role": "user", "content": "x"}),
        "Tool" => json!({"type": "function", "function": {"name": "x"}}),
        "ToolChoice" => json!("none"),
        other => panic!("the schema {other} has no example here"),
    }
}

/// Returns the part of a source before its tests.
fn without_tests(source: &str) -> &str {
    source.split("#[cfg(test)]").next().unwrap_or_default()
}

/// Returns the names of the fields that a source takes from a body.
fn taken(source: &str) -> BTreeSet<String> {
    let call =
        Regex::new(r#"(?:body\.(?:take|text|flag|count|ids|object)\(|take_stop\(body, |required\(&mut body, )"(\w+)""#);
    let mut names: BTreeSet<String> =
        call.unwrap().captures_iter(without_tests(source)).map(|found| found[1].to_string()).collect();
    for (call, name) in [("take_prompts()", "prompt"), ("take_tokens()", "tokens")] {
        if source.contains(call) {
            names.insert(name.into());
        }
    }
    names
}

fn names(lists: &[&[Field]]) -> BTreeSet<String> {
    lists.iter().copied().flatten().map(|field| field.name.to_string()).collect()
}

#[test]
fn every_described_field_is_one_that_the_endpoint_takes() {
    let completion: Read = |body| CompletionRequest::take(body, &LIMITS).map(drop);
    let chat: Read = |body| ChatRequest::take(body, &LIMITS).map(drop);
    let mut checked = 0;
    for (request, read) in [("CompletionRequest", completion), ("ChatRequest", chat)] {
        let (_, lists, required, _) = fields::REQUESTS.iter().find(|(name, ..)| *name == request).unwrap();
        for field in lists.iter().copied().flatten() {
            let mut object = json!({});
            for needed in lists.iter().copied().flatten().filter(|needed| required.contains(&needed.name)) {
                object[needed.name] = example(needed.kind);
            }
            let needed = match field.name {
                "top_logprobs" => json!({"logprobs": true}),
                "stream_options" => json!({"stream": true}),
                "tool_choice" => json!({"tools": [example_of("Tool")]}),
                _ => json!({}),
            };
            object.as_object_mut().unwrap().extend(needed.as_object().unwrap().clone());
            object[field.name] = example(field.kind);
            let mut body = Body::parse(object.to_string().as_bytes()).unwrap();
            body.text("model").unwrap();
            read(&mut body).unwrap_or_else(|e| panic!("{request}, {object}: {e:?}"));
            assert_eq!(body.rest(true), Ok(Vec::new()), "{request}, {object}");
            checked += 1;
        }
    }
    assert!(checked > 100, "{checked}");
}

#[test]
fn every_field_that_an_endpoint_takes_is_described() {
    let mut settings = taken(include_str!("../../api/settings.rs"));
    settings.extend(taken(include_str!("../../api/constraint_fields.rs")));
    settings.extend(crate::api::constraint_fields::SHORT.map(|(name, _)| name.to_string()));
    assert!(settings.contains("stop") && settings.contains("return_token_ids"), "{settings:?}");
    assert_eq!(settings, names(&[fields::SETTINGS]));
    assert_eq!(crate::api::settings::SAMPLING.map(String::from), *names_in_order(fields::SAMPLING));
    assert_eq!(taken(include_str!("../../api/completions.rs")), names(&[fields::COMPLETION]));
    assert_eq!(taken(include_str!("../../api/chat.rs")), names(&[fields::CHAT]));
    let infill = taken(include_str!("../../api/infill.rs"));
    let infill: BTreeSet<String> = infill.into_iter().filter(|name| name != "samplers").collect();
    let prefix_and_suffix = ["input_prefix", "input_suffix"].map(String::from);
    assert_eq!(infill.into_iter().chain(prefix_and_suffix).collect::<BTreeSet<_>>(), names(&[fields::INFILL]));
    let tokens = names(&[fields::MODEL, fields::TOKENIZE, fields::DETOKENIZE]);
    assert_eq!(taken(include_str!("../http/tokens.rs")), tokens);
    let adapters = names(&[fields::LOAD_ADAPTER, fields::UNLOAD_ADAPTER]);
    assert_eq!(taken(include_str!("../http/adapters.rs")), adapters);
}

#[test]
fn the_guide_names_every_field_of_other_servers() {
    let guide = include_str!("../../../docs/guide/serve.md");
    for field in OTHER_FIELDS.iter().filter(|field| !matches!(field.treatment, Treatment::Inert)) {
        assert!(guide.contains(&format!("`{}`", field.name)), "{}", field.name);
    }
}

fn names_in_order(fields: &[Field]) -> Vec<String> {
    fields.iter().map(|field| field.name.to_string()).collect()
}

#[test]
fn no_request_has_a_field_twice() {
    for (request, lists, required, api) in fields::REQUESTS {
        let all: Vec<&str> = lists.iter().copied().flatten().map(|field| field.name).collect();
        for other in OTHER_FIELDS.iter().filter(|other| api.is_some_and(|api| other.apis.contains(&api))) {
            let is_tokenize = *request == "TokenizeRequest";
            assert!(is_tokenize || !all.contains(&other.name), "{request} reads {} and translates it", other.name);
        }
        let unique: BTreeSet<&str> = all.iter().copied().collect();
        assert_eq!(all.len(), unique.len(), "{request}: {all:?}");
        assert!(required.iter().all(|name| unique.contains(name)), "{request}");
    }
}

#[test]
fn every_reference_has_its_target() {
    fn walk(value: &Value, found: &mut BTreeSet<String>) {
        match value {
            Value::Object(members) => {
                found.extend(members.get("$ref").and_then(Value::as_str).map(String::from));
                members.values().for_each(|value| walk(value, found));
            }
            Value::Array(list) => list.iter().for_each(|value| walk(value, found)),
            _ => {}
        }
    }
    let document = document(endpoints());
    let mut found = BTreeSet::new();
    walk(&document, &mut found);
    for reference in &found {
        assert!(document.pointer(reference.trim_start_matches('#')).is_some(), "{reference}");
    }
    let schemas = document["components"]["schemas"].as_object().unwrap();
    for name in schemas.keys() {
        assert!(found.contains(&format!("#/components/schemas/{name}")), "nothing refers to the schema {name}");
    }
    let ids: BTreeSet<String> = endpoints().map(Endpoint::id).collect();
    assert_eq!(ids.len(), endpoints().count(), "names of operations are unique");
}
