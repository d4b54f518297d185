//! Tests of the answers of `/v1/messages`.

use super::*;
use crate::api::parts::tests::{any_pieces, done, sse};
use crate::api::text::Piece;
use proptest::prelude::*;

fn form() -> AnthropicMessage {
    let named = Named { id: "msg_12".into(), model: "m".into(), created: 3 };
    AnthropicMessage::new(named, vec!["END".into()], Parts::new(None), 7)
}

fn call(arguments: &str) -> Vec<Piece> {
    let begin = Piece::CallBegin { index: 0, id: "call_1".into(), name: "f".into() };
    vec![begin, Piece::CallArguments { index: 0, text: arguments.into() }]
}

/// Streams pieces, then the end; returns the events and the whole answer.
fn streamed(batches: Vec<Vec<Piece>>, end: Done) -> (Vec<(String, Value)>, Value) {
    let (mut form, mut events) = (form(), Events::new(true));
    for pieces in batches {
        form.begin(&mut events);
        let changes = form.parts.apply(pieces);
        form.changes(changes, &mut events);
    }
    form.done(end, &mut events).unwrap();
    form.end(&mut events);
    (sse(&events.take()), form.body())
}

/// Builds the message from the events of a stream, as clients do.
fn rebuilt(events: &[(String, Value)]) -> Value {
    let mut message = Value::Null;
    let mut blocks: Vec<Value> = Vec::new();
    let mut json_text = String::new();
    for (name, event) in events {
        assert_eq!(&event["type"], name);
        let index = event["index"].as_u64().unwrap_or_default() as usize;
        match name.as_str() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                assert_eq!(index, blocks.len());
                blocks.push(event["content_block"].clone());
                json_text.clear();
            }
            "content_block_delta" => {
                let delta = &event["delta"];
                let field = match delta["type"].as_str().unwrap() {
                    "text_delta" => "text",
                    "thinking_delta" => "thinking",
                    "signature_delta" => "signature",
                    _ => {
                        json_text += delta["partial_json"].as_str().unwrap();
                        continue;
                    }
                };
                let text = blocks[index][field].as_str().unwrap().to_string() + delta[field].as_str().unwrap();
                blocks[index][field] = json!(text);
            }
            "content_block_stop" if blocks[index]["type"] == "tool_use" => {
                blocks[index]["input"] = serde_json::from_str(&json_text).unwrap_or_else(|_| json!({}));
            }
            "message_delta" => {
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
            }
            _ => {}
        }
    }
    message["content"] = json!(blocks);
    message
}

#[test]
fn the_stream_has_the_events_of_each_block() {
    let batches = vec![
        vec![Piece::Reasoning("r".into())],
        vec![Piece::Content("a".into())],
        vec![Piece::Content("b".into())],
        call("{\"x\": 1}"),
    ];
    let (events, body) = streamed(batches, done(Finish::Complete, None));
    let names: Vec<&str> = events.iter().map(|(name, _)| name.trim_start_matches("content_block_")).collect();
    let expected = "message_start ping start delta delta stop start delta delta stop start delta stop message_delta \
                    message_stop";
    assert_eq!(names.join(" "), expected);
    assert_eq!(rebuilt(&events), body);
    assert_eq!(body["content"][2], json!({"type": "tool_use", "id": "call_1", "name": "f", "input": {"x": 1}}));
    assert_eq!(body["content"][0], json!({"type": "thinking", "thinking": "r", "signature": ""}));
    assert_eq!((&body["stop_reason"], &body["usage"]["input_tokens"]), (&json!("tool_use"), &json!(2)));
    assert_eq!(body["usage"]["cache_read_input_tokens"], 5);
}

#[test]
fn the_reason_of_the_end_is_that_of_the_client() {
    let text = || vec![vec![Piece::Content("a".into())]];
    let cases = [
        (text(), done(Finish::Eos, None), "end_turn", Value::Null),
        (text(), done(Finish::Length, None), "max_tokens", Value::Null),
        (text(), done(Finish::Stop, Some("END")), "stop_sequence", json!("END")),
        (text(), done(Finish::Stop, Some("<|end_of_turn|>")), "end_turn", Value::Null),
        (vec![call("{}")], done(Finish::Eos, None), "tool_use", Value::Null),
        (vec![call("{\"x\": ")], done(Finish::Length, None), "max_tokens", Value::Null),
    ];
    for (pieces, end, reason, sequence) in cases {
        let (_, body) = streamed(pieces, end);
        assert_eq!((&body["stop_reason"], &body["stop_sequence"]), (&json!(reason), &sequence));
    }
}

#[test]
fn failures_end_the_stream_with_an_error() {
    let (mut form, mut events) = (form(), Events::new(true));
    form.token(Token { choice: 0, id: 1, text: "a".into(), likely: None }, &mut events);
    let error = form.done(done(Finish::Deadline, None), &mut events).unwrap_err();
    form.fail(&error, &mut events);
    let events = sse(&events.take());
    let (name, content) = events.last().unwrap();
    assert_eq!((name.as_str(), &content["type"]), ("error", &json!("error")));
    assert_eq!(content["error"]["type"], "timeout_error");
}

proptest! {
    #[test]
    fn joined_events_are_the_whole_answer(batches in any_pieces()) {
        let (events, body) = streamed(batches, done(Finish::Eos, None));
        prop_assert_eq!(rebuilt(&events), body);
    }
}
