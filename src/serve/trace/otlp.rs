//! Requests that have ended as spans in the JSON encoding of OTLP: ids in hexadecimal digits, whole numbers as texts.

use super::context::{SpanId, new_span_id};
use super::{Finished, Interval, Span};
use serde_json::{Value, json};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// Method of all endpoints that generate texts.
const METHOD: &str = "POST";
/// Kind of the span of a step within this process.
const INTERNAL: u32 = 1;
/// Kind of the span of a request that a server answers.
const SERVER: u32 = 2;
/// Status of a span of a request that failed.
const ERROR: u32 = 2;
/// Flags of a span: sampled, and it is known whether its parent is a span of another process.
const LOCAL: u32 = 0x101;
/// Flag of a span whose parent is a span of another process.
const REMOTE: u32 = 0x200;

/// Returns the object that a collector takes.
pub fn request(service: &str, finished: &[Finished]) -> Value {
    let version = env!("CARGO_PKG_VERSION");
    json!({"resourceSpans": [{
        "resource": {"attributes": [text("service.name", service), text("service.version", version)]},
        "scopeSpans": [{
            "scope": {"name": "iec", "version": version},
            "spans": finished.iter().flat_map(spans).collect::<Value>(),
        }],
    }]})
}

/// Returns the spans of a request: its own and those of its choices.
fn spans(finished: &Finished) -> Vec<Value> {
    let span = &finished.span;
    let mut object = span_json(span, (span.begin, finished.end), &span.id);
    object["name"] = format!("{METHOD} {}", finished.endpoint).into();
    object["kind"] = SERVER.into();
    object["flags"] = (LOCAL | span.parent.map_or(0, |_| REMOTE)).into();
    if let Some(parent) = &span.parent {
        object["parentSpanId"] = hex(parent).into();
    }
    object["attributes"] = attributes(finished).into();
    if finished.status >= 500 {
        object["status"] = json!({"code": ERROR});
    }
    let mut objects = vec![object];
    for choice in &span.choices {
        let phases = [("queue", Some(choice.queue)), ("prefill", choice.prefill), ("decode", choice.decode)];
        for (name, interval) in phases {
            let Some(interval) = interval else { continue };
            let mut object = span_json(span, interval, &new_span_id());
            object["name"] = name.into();
            object["kind"] = INTERNAL.into();
            object["flags"] = LOCAL.into();
            object["parentSpanId"] = hex(&span.id).into();
            object["attributes"] = json!([number("iec.choice", choice.number)]);
            objects.push(object);
        }
    }
    objects
}

fn span_json(span: &Span, (begin, end): Interval, id: &SpanId) -> Value {
    let begin = nanoseconds(span, begin);
    json!({
        "traceId": hex(&span.trace),
        "spanId": hex(id),
        "startTimeUnixNano": begin.to_string(),
        "endTimeUnixNano": nanoseconds(span, end).max(begin).to_string(),
    })
}

/// Returns a time of a request in nanoseconds since 1970. It is not before the begin of the request.
fn nanoseconds(span: &Span, time: Instant) -> u128 {
    let begin = span.time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    begin.saturating_add(time.saturating_duration_since(span.begin)).as_nanos()
}

/// Returns the attributes of a request, by the names of OpenTelemetry where it has one.
fn attributes(finished: &Finished) -> Vec<Value> {
    let operation = if finished.endpoint == "/v1/completions" { "text_completion" } else { "chat" };
    let mut attributes = vec![
        text("http.request.method", METHOD),
        text("http.route", &finished.endpoint),
        number("http.response.status_code", usize::from(finished.status)),
        text("gen_ai.operation.name", operation),
        text("gen_ai.provider.name", "iec"),
        text("iec.request.id", &finished.id),
        text("iec.key.name", &finished.key),
    ];
    if !finished.model.is_empty() {
        attributes.push(text("gen_ai.request.model", &finished.model));
    }
    if finished.usage.prompt > 0 {
        attributes.push(number("gen_ai.usage.input_tokens", finished.usage.prompt));
    }
    if finished.status == 200 {
        attributes.push(number("gen_ai.usage.output_tokens", finished.usage.generated));
        attributes.push(number("gen_ai.usage.cache_read.input_tokens", finished.usage.cached));
        let reasons = json!({"arrayValue": {"values": [{"stringValue": finished.finish}]}});
        attributes.push(json!({"key": "gen_ai.response.finish_reasons", "value": reasons}));
    } else {
        attributes.push(text("error.type", &finished.finish));
    }
    attributes
}

fn text(key: &str, value: &str) -> Value {
    json!({"key": key, "value": {"stringValue": value}})
}

fn number(key: &str, value: usize) -> Value {
    json!({"key": key, "value": {"intValue": value.to_string()}})
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
