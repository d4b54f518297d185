//! `/v1/responses` and `/v1/messages`, whose answers are lists of items or blocks.

use super::client::{Response, Server};
use crate::common::packed;
use serde_json::{Value, json};

/// Template with tools in the format of Hermes, over the embedded model.
const TOOLS: &str = include_str!("../../serve/chat_template.jinja");

/// Starts a server of the embedded model with a chat template that has tools.
fn tool_server() -> (tempfile::TempDir, Server) {
    let fields = json!({"max_position_embeddings": 2048});
    let home = crate::common::packed_with("stories260k", "config.json", fields);
    let pack = home.path().join("pack");
    std::fs::write(pack.join("chat_template.jinja"), TOOLS).unwrap();
    let server = Server::start(&[&pack.display().to_string()]);
    (home, server)
}

fn schema() -> Value {
    json!({"type": "object", "properties": {"day": {"enum": [1, 2]}}, "required": ["day"],
           "additionalProperties": false})
}

/// Returns the named events of a stream that has no `[DONE]`.
fn named_events(response: &Response) -> Vec<Value> {
    let event = |event: &str| {
        let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        data
    };
    response.body.split_terminator("\n\n").map(event).collect()
}

/// Joins the pieces of the events of a type.
fn joined(events: &[Value], kind: &str, pointer: &str) -> String {
    let events = events.iter().filter(|event| event["type"] == kind);
    events.filter_map(|event| event.pointer(pointer)?.as_str()).collect()
}

#[test]
fn streamed_items_are_the_whole_answer() {
    let (_home, server) = tool_server();
    let mut body = json!({"input": "Once upon a time", "max_output_tokens": 16, "temperature": 0});
    let whole = server.ask("/v1/responses", &body);
    assert_eq!((&whole["object"], &whole["store"]), (&json!("response"), &json!(false)));
    assert!(whole["usage"]["output_tokens"].as_u64().is_some_and(|tokens| (1..=16).contains(&tokens)));
    body["stream"] = json!(true);
    let events = named_events(&server.post("/v1/responses", &body));
    let text = joined(&events, "response.output_text.delta", "/delta");
    assert_eq!(json!(text), whole["output"][0]["content"][0]["text"]);
    assert_eq!(events.last().unwrap()["response"]["status"], whole["status"]);
    let numbers: Vec<u64> = events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());

    let messages = json!([{"role": "user", "content": "Once upon a time"}]);
    let mut body = json!({"messages": messages, "max_tokens": 16, "temperature": 0});
    let whole = server.ask("/v1/messages", &body);
    assert_eq!(whole["content"][0]["text"], json!(text), "both endpoints ask the model the same");
    let counted = server.ask("/v1/messages/count_tokens", &json!({"messages": messages}));
    let prompt = |usage: &Value| {
        ["input_tokens", "cache_read_input_tokens"].iter().filter_map(|name| usage[name].as_u64()).sum::<u64>()
    };
    assert_eq!(counted["input_tokens"], prompt(&whole["usage"]));
    body["stream"] = json!(true);
    let events = named_events(&server.post("/v1/messages", &body));
    assert_eq!(json!(joined(&events, "content_block_delta", "/delta/text")), whole["content"][0]["text"]);
    assert_eq!(events[events.len() - 2]["delta"]["stop_reason"], whole["stop_reason"]);
    assert_eq!(events.last().unwrap()["type"], "message_stop");
}

fn is_day(value: &Value) -> bool {
    value.as_f64().is_some_and(|day| day == 1.0 || day == 2.0)
}

#[test]
fn required_calls_have_the_arguments_of_their_schema() {
    let (_home, server) = tool_server();
    let tool = json!({"type": "function", "name": "plan", "parameters": schema()});
    let body = json!({"input": "x", "tools": [tool], "tool_choice": "required", "temperature": 1, "seed": 1,
                      "parallel_tool_calls": false, "max_output_tokens": 200});
    let answer = server.ask("/v1/responses", &body);
    let call = answer["output"].as_array().unwrap().last().unwrap();
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(call["name"] == "plan" && is_day(&arguments["day"]), "{answer}");

    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "temperature": 1, "seed": 1,
                      "tools": [{"name": "plan", "input_schema": schema()}],
                      "tool_choice": {"type": "tool", "name": "plan", "disable_parallel_tool_use": true}});
    let answer = server.ask("/v1/messages", &body);
    assert_eq!(answer["stop_reason"], "tool_use");
    let call = answer["content"].as_array().unwrap().last().unwrap();
    assert!(call["name"] == "plan" && is_day(&call["input"]["day"]), "{answer}");
}

#[test]
fn errors_have_the_form_of_their_api() {
    let home = packed("stories260k");
    let pack = home.path().display().to_string();
    let server = Server::start(&[&pack, "--max-body", "64K"]);
    let cases = [
        ("POST", "/v1/messages", "{", 400, "invalid_request_error"),
        ("POST", "/v1/messages", r#"{"messages": [{"role": "user", "content": "x"}]}"#, 400, "invalid_request_error"),
        ("POST", "/v1/messages/count_tokens", "{}", 400, "invalid_request_error"),
        ("POST", "/v1/messages/other", "{}", 404, "not_found_error"),
        ("GET", "/v1/messages", "", 405, "invalid_request_error"),
        ("POST", "/v1/messages", &"x".repeat(70_000), 413, "request_too_large"),
    ];
    for (method, path, body, status, kind) in cases {
        let response = server.send(method, path, &[("anthropic-version", "2023-06-01")], body);
        let object = response.json();
        assert_eq!(
            (response.status, &object["type"], &object["error"]["type"]),
            (status, &json!("error"), &json!(kind))
        );
        assert!(response.header("request-id").is_some());
    }
    let stored = server.post("/v1/responses", &json!({"input": "x", "previous_response_id": "resp_1"}));
    assert_eq!((stored.status, &stored.json()["error"]["param"]), (400, &json!("previous_response_id")));
    let plain = server.post("/v1/responses", &json!({"input": "x"}));
    assert_eq!((plain.status, &plain.json()["error"]["code"]), (400, &json!("no_chat_template")));
}
