//! Tests of the answers of `/v1/responses`.

use super::*;
use crate::api::parts::tests::{any_pieces, done, sse};
use crate::api::text::Piece;
use crate::generate::Finish;
use proptest::prelude::*;
use std::collections::BTreeMap;

fn form() -> Responses {
    let named = Named { id: "resp_12".into(), model: "m".into(), created: 3 };
    Responses::new(named, Map::new(), Parts::new(None), 7)
}

/// Streams pieces, then the end; returns the events and the whole answer.
fn streamed(batches: Vec<Vec<Piece>>, finish: Finish) -> (Vec<(String, Value)>, Value) {
    let (mut form, mut events) = (form(), Events::new(true));
    for pieces in batches {
        form.begin(&mut events);
        let changes = form.parts.apply(pieces);
        form.changes(changes, &mut events);
    }
    form.done(done(finish, None), &mut events).unwrap();
    form.end(&mut events);
    let body = form.body();
    (sse(&events.take()), body)
}

/// Builds the output from the events of a stream.
fn rebuilt(events: &[(String, Value)]) -> Vec<Value> {
    let mut items = BTreeMap::new();
    for (name, event) in events {
        let index = event["output_index"].as_u64();
        let delta = event["delta"].as_str().unwrap_or_default();
        match (name.as_str(), index.and_then(|index| items.get_mut(&index))) {
            ("response.output_item.added", None) => _ = items.insert(index.unwrap(), event["item"].clone()),
            ("response.content_part.added", Some(item)) => item["content"] = json!([event["part"]]),
            ("response.output_text.delta" | "response.reasoning_text.delta", Some(item)) => {
                let text = item["content"][0]["text"].as_str().unwrap().to_string() + delta;
                item["content"][0]["text"] = json!(text);
            }
            ("response.function_call_arguments.delta", Some(item)) => {
                item["arguments"] = json!(item["arguments"].as_str().unwrap().to_string() + delta);
            }
            ("response.output_text.done" | "response.reasoning_text.done", Some(item)) => {
                assert_eq!(item["content"][0]["text"], event["text"]);
            }
            ("response.function_call_arguments.done", Some(item)) => assert_eq!(item["arguments"], event["arguments"]),
            ("response.content_part.done", Some(item)) => assert_eq!(item["content"][0], event["part"]),
            ("response.output_item.done", Some(item)) => {
                item["status"] = event["item"]["status"].clone();
                assert_eq!(*item, event["item"]);
            }
            (other, None) if other.starts_with("response.") && index.is_none() => {}
            other => panic!("found {other:?}"),
        }
    }
    items.into_values().collect()
}

#[test]
fn the_stream_has_the_events_of_each_item() {
    let call = Piece::CallBegin { index: 0, id: "call_1".into(), name: "f".into() };
    let batches = vec![
        vec![Piece::Reasoning("r".into())],
        vec![Piece::Content("a".into())],
        vec![Piece::Content("b".into()), call, Piece::CallArguments { index: 0, text: "{}".into() }],
    ];
    let (events, body) = streamed(batches, Finish::Complete);
    let names: Vec<&str> = events.iter().map(|(name, _)| name.trim_start_matches("response.")).collect();
    let expected = "created in_progress output_item.added content_part.added reasoning_text.delta \
                    reasoning_text.done content_part.done output_item.done output_item.added content_part.added \
                    output_text.delta output_text.delta output_text.done content_part.done output_item.done \
                    output_item.added function_call_arguments.delta function_call_arguments.done output_item.done \
                    completed";
    assert_eq!(names.join(" "), expected);
    for (i, (name, event)) in events.iter().enumerate() {
        assert_eq!((&event["type"], &event["sequence_number"]), (&json!(name), &json!(i)));
    }
    assert_eq!(events.last().unwrap().1["response"], body);
    assert_eq!((&body["status"], &body["store"], &body["error"]), (&json!("completed"), &json!(false), &Value::Null));
    assert_eq!(body["output"][1]["content"][0]["text"], "ab");
    assert_eq!(body["output"][2]["call_id"], "call_1");
    assert_eq!((&body["usage"]["input_tokens"], &body["usage"]["output_tokens"]), (&json!(7), &json!(0)));
    assert_eq!(body["usage"]["input_tokens_details"]["cached_tokens"], 5);
}

#[test]
fn an_answer_that_is_cut_is_incomplete() {
    let (events, body) = streamed(vec![vec![Piece::Content("a".into())]], Finish::Length);
    assert_eq!(events.last().unwrap().0, "response.incomplete");
    assert_eq!(body["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!((&body["status"], &body["output"][0]["status"]), (&json!("incomplete"), &json!("incomplete")));
}

#[test]
fn failures_end_the_stream_with_an_error_and_the_failed_answer() {
    let (mut form, mut events) = (form(), Events::new(true));
    form.token(Token { choice: 0, id: 1, text: "a".into(), likely: None }, &mut events);
    let error = form.done(done(Finish::Deadline, None), &mut events).unwrap_err();
    form.fail(&error, &mut events);
    let events = sse(&events.take());
    let [.., (error, content), (failed, last)] = &events[..] else { panic!("found {events:?}") };
    assert_eq!((error.as_str(), failed.as_str()), ("error", "response.failed"));
    assert_eq!(
        (&content["code"], &content["error"]["code"]),
        (&json!("deadline_exceeded"), &json!("deadline_exceeded"))
    );
    assert_eq!(last["response"]["error"]["code"], "server_error");
    assert_eq!(last["response"]["output"][0]["content"][0]["text"], "a");
}

#[test]
fn an_answer_that_is_not_streamed_builds_no_events() {
    let (mut form, mut events) = (form(), Events::new(false));
    form.token(Token { choice: 0, id: 1, text: "a".into(), likely: None }, &mut events);
    form.done(done(Finish::Eos, None), &mut events).unwrap();
    assert_eq!((events.take(), form.body()["output"][0]["content"][0]["text"].as_str()), (String::new(), Some("a")));
    assert_eq!((form.usage().generated, form.finish()), (1, "stop"));
}

proptest! {
    #[test]
    fn joined_events_are_the_whole_answer(batches in any_pieces()) {
        let (events, body) = streamed(batches, Finish::Eos);
        prop_assert_eq!(json!(rebuilt(&events)), body["output"].clone());
    }
}
