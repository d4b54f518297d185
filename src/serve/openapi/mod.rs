//! Description of the API in the format of OpenAPI 3.1, as `/openapi.json` shows it.
//!
//! `fields` has the fields of requests, one row for each; the table of routes of the server has the endpoints;
//! `schemas` has the objects that both refer to. This file turns the rows into the document. Tests compare the rows
//! with the functions that read requests.

mod endpoints;
mod fields;
mod schemas;
#[cfg(test)]
mod tests;

use crate::api::style::Style;
pub use endpoints::{Access, AnswerBody, Endpoint};
use serde_json::{Map, Value, json};

/// Returns the description of these endpoints.
pub fn document(endpoints: impl Iterator<Item = &'static Endpoint>) -> Value {
    let mut paths = Map::new();
    for endpoint in endpoints {
        let path = paths.entry(endpoint.path).or_insert(json!({}));
        path[endpoint.method] = operation(endpoint);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "iec serve",
            "version": env!("CARGO_PKG_VERSION"),
            "summary": "Serves language models, with the API of OpenAI and Anthropic",
            "license": {"name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"api_key": []}, {}],
        "paths": paths,
        "components": {
            "schemas": schemas::all(),
            "responses": responses(),
            "parameters": parameters(),
            "headers": headers(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "An API key of --api-key-file."},
                "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
            },
        },
    })
}

/// Builds the object of an endpoint.
fn operation(endpoint: &Endpoint) -> Value {
    let mut responses = Map::new();
    responses.insert("200".into(), answer(endpoint));
    for status in endpoint.errors {
        responses.insert(status.to_string(), reference("responses", &endpoint.style.response(*status)));
    }
    if matches!(endpoint.answer, AnswerBody::Probe) {
        responses.insert("503".into(), json!({"description": "Requests are not served now."}));
    }
    let mut parameters = vec![reference("parameters", "RequestId")];
    if endpoint.path.ends_with("{id}") {
        parameters.push(reference("parameters", "ModelId"));
    }
    if endpoint.generates() {
        parameters.push(reference("parameters", "Deadline"));
    }
    let mut object = json!({
        "operationId": endpoint.id(),
        "tags": [endpoint.tag],
        "summary": endpoint.summary,
        "parameters": parameters,
        "responses": responses,
    });
    match endpoint.access {
        Access::Probe | Access::Open => object["security"] = json!([]),
        Access::Key(scope) => object["description"] = json!(format!("A key needs the scope `{}`.", scope.name())),
    }
    if let Some(body) = endpoint.body {
        let content = json!({"application/json": {"schema": reference("schemas", body)}});
        object["requestBody"] = json!({"required": true, "content": content});
    }
    object
}

/// Builds the response of an endpoint that succeeded. The schema of a stream is that of the data of its events, because
/// this version of the format has no way to describe the stream itself.
fn answer(endpoint: &Endpoint) -> Value {
    let content = |kind: &str, schema: Value| (kind.to_string(), json!({"schema": schema}));
    let text = || json!({"type": "string"});
    let content: Map<String, Value> = match endpoint.answer {
        AnswerBody::Probe | AnswerBody::Empty => Map::new(),
        AnswerBody::Json(schema) => Map::from_iter([content("application/json", reference("schemas", schema))]),
        AnswerBody::Text(kind) => Map::from_iter([content(kind, text())]),
        AnswerBody::Lines(schema) => Map::from_iter([
            content("application/json", reference("schemas", schema)),
            content("application/x-ndjson", reference("schemas", schema)),
        ]),
        AnswerBody::Generated(whole, event) => Map::from_iter([
            content("application/json", reference("schemas", whole)),
            ("text/event-stream".into(), json!({"schema": reference("schemas", event)})),
        ]),
    };
    let mut object = json!({"description": "Success.", "headers": {"x-request-id": reference("headers", "RequestId")}});
    if !content.is_empty() {
        object["content"] = Value::Object(content);
    }
    if endpoint.generates() {
        object["headers"]["x-iec-seed"] = reference("headers", "Seed");
    }
    if endpoint.body.is_some() {
        object["headers"]["x-iec-ignored"] = reference("headers", "Ignored");
    }
    object
}

/// Builds the responses with errors in all styles.
fn responses() -> Value {
    let mut all = Map::new();
    for style in [Style::OpenAi, Style::Anthropic, Style::Ollama] {
        for (status, about) in endpoints::ERRORS {
            let mut object = json!({
                "description": about,
                "headers": {"x-request-id": reference("headers", "RequestId")},
                "content": {"application/json": {"schema": reference("schemas", style.schema())}},
            });
            if matches!(status, 429 | 503) {
                object["headers"]["retry-after"] = reference("headers", "RetryAfter");
                object["headers"]["x-should-retry"] = reference("headers", "ShouldRetry");
            }
            all.insert(style.response(*status), object);
        }
    }
    Value::Object(all)
}

fn parameters() -> Value {
    json!({
        "RequestId": {
            "name": "x-request-id", "in": "header", "required": false,
            "description": "Name of the request in the log and in the answer, of at most 128 bytes.",
            "schema": {"type": "string", "pattern": "^[!-~]{1,128}$"},
        },
        "Deadline": {
            "name": "x-iec-deadline-ms", "in": "header", "required": false,
            "description": "Milliseconds after which the request ends with the status 504.",
            "schema": {"type": "integer", "minimum": 0, "maximum": 86_400_000},
        },
        "ModelId": {
            "name": "id", "in": "path", "required": true, "description": "Name of a model or an adapter.",
            "schema": {"type": "string", "minLength": 1},
        },
    })
}

fn headers() -> Value {
    let text = json!({"type": "string"});
    json!({
        "RequestId": {"description": "Name of the request.", "schema": text},
        "Seed": {"description": "Seed that was drawn for a request without one.", "schema": text},
        "Ignored": {"description": "Unknown fields of the request, with commas between.", "schema": text},
        "RetryAfter": {
            "description": "Seconds after which the request may succeed.",
            "schema": {"type": "integer", "minimum": 0},
        },
        "ShouldRetry": {
            "description": "`false` if clients must not repeat the request by themselves.",
            "schema": {"const": "false"},
        },
    })
}

/// Builds a reference to a component.
fn reference(kind: &str, name: &str) -> Value {
    json!({"$ref": format!("#/components/{kind}/{name}")})
}
