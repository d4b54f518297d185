//! Log-probabilities, token ids and counts in answers and in the events of streams.

use super::client::{Response, Server, story_pack};
use serde_json::{Value, json};

/// Template with a place for tools, over the embedded model.
const TOOLS: &str = include_str!("../../serve/chat_template.jinja");

fn chat_server() -> (tempfile::TempDir, Server) {
    let home = story_pack(512);
    let server = Server::start(&[&home.path().join("pack").display().to_string()]);
    (home, server)
}

fn with(body: &Value, more: &Value) -> Value {
    let mut body = body.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Returns the elements of a list in all values.
fn joined<'a>(values: impl IntoIterator<Item = &'a Value>, pointer: &str) -> Vec<Value> {
    values
        .into_iter()
        .flat_map(|value| value.pointer(pointer).and_then(Value::as_array).cloned().unwrap_or_default())
        .collect()
}

/// Returns the data of named events.
fn data(response: &Response) -> Vec<Value> {
    let lines = response.body.lines().filter_map(|line| line.strip_prefix("data: "));
    lines.map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn token_text(entries: &[Value]) -> String {
    entries.iter().map(|entry| entry["token"].as_str().unwrap()).collect()
}

#[test]
fn each_event_of_a_chat_has_the_probabilities_of_its_own_text() {
    let (_home, server) = chat_server();
    let body = json!({"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 20, "temperature": 0,
                      "logprobs": true, "top_logprobs": 1});
    for fields in [json!({}), json!({"stop": ["little"]}), json!({"return_tokens_as_token_ids": true})] {
        let body = with(&body, &fields);
        let whole = server.ask("/v1/chat/completions", &body);
        let events = server.post("/v1/chat/completions", &with(&body, &json!({"stream": true}))).events();
        assert!(events[0]["choices"][0]["logprobs"].is_null(), "the event of the role has no text");
        let entries = joined(&events, "/choices/0/logprobs/content");
        assert_eq!(json!(entries), whole["choices"][0]["logprobs"]["content"], "{fields}");
        assert!(!entries.is_empty());
        let content = whole["choices"][0]["message"]["content"].as_str().unwrap();
        if fields.get("return_tokens_as_token_ids").is_some() {
            let ids = with(&body, &json!({"return_token_ids": true}));
            let ids = server.ask("/v1/chat/completions", &ids)["choices"][0]["token_ids"].clone();
            let named: Vec<Value> = joined([&ids], "").iter().map(|id| json!(format!("token_id:{id}"))).collect();
            assert_eq!(entries.iter().map(|entry| entry["token"].clone()).collect::<Vec<_>>(), named);
            continue;
        }
        // The last token may have the beginning of the stop text, too.
        assert!(token_text(&entries).trim_start().starts_with(content.trim_start()), "{fields}: {content}");
        for event in &events[1..] {
            let (delta, entries) =
                (&event["choices"][0]["delta"]["content"], joined([event], "/choices/0/logprobs/content"));
            let shown = delta.as_str().unwrap_or_default();
            assert!(token_text(&entries).contains(shown.trim_start()), "{event}");
        }
    }
}

#[test]
fn no_probability_lies_behind_the_end_of_a_text() {
    let server = Server::start(&[]);
    let body = json!({"prompt": "Once upon a time", "max_tokens": 30, "temperature": 0, "logprobs": 1,
                      "return_token_ids": true});
    let whole = server.ask("/v1/completions", &body);
    let ids = whole["choices"][0]["token_ids"].as_array().unwrap().clone();
    let sixth = &ids[5];
    let before = ids.iter().position(|id| id == sixth).unwrap();
    let ended = server.ask("/v1/completions", &with(&body, &json!({"stop_token_ids": [sixth]})));
    let choice = &ended["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), sixth));
    assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), before);
    assert_eq!(choice["token_ids"].as_array().unwrap().len(), before + 1);
    for fields in
        [json!({"stop": ["little"]}), json!({"stop_token_ids": [sixth]}), json!({"echo": true, "stop": "was"})]
    {
        let body = with(&body, &fields);
        let whole = server.ask("/v1/completions", &body);
        let text = whole["choices"][0]["text"].as_str().unwrap().chars().count() as u64;
        let offsets = joined([&whole], "/choices/0/logprobs/text_offset");
        assert!(offsets.iter().all(|offset| offset.as_u64().unwrap() < text), "{fields}: {offsets:?} in {text}");
        let events = server.post("/v1/completions", &with(&body, &json!({"stream": true}))).events();
        assert_eq!(joined(&events, "/choices/0/logprobs/text_offset"), offsets, "{fields}");
    }
}

#[test]
fn streams_report_token_ids_and_counts() {
    let (_home, server) = chat_server();
    let common = json!({"max_tokens": 9, "temperature": 0, "return_token_ids": true});
    let cases = [
        ("/v1/completions", json!({"prompt": "Once upon a time"}), "/choices/0/prompt_token_ids"),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "Once"}]}), "/prompt_token_ids"),
    ];
    for (path, body, prompt) in cases {
        let body = with(&body, &common);
        let whole = server.ask(path, &body);
        let stream = json!({"stream": true, "stream_options": {"include_usage": true}});
        let mut events = server.post(path, &with(&body, &stream)).events();
        let last = events.pop().unwrap();
        assert_eq!(last["usage"]["completion_tokens"], 9);
        assert!(events.iter().all(|event| event.get("usage") == Some(&Value::Null)), "{path}");
        assert_eq!(events[0].pointer(prompt), whole.pointer(prompt), "{path}");
        assert_eq!(json!(joined(&events, "/choices/0/token_ids")), whole["choices"][0]["token_ids"], "{path}");
        let plain = server.post(path, &with(&body, &json!({"stream": true}))).events();
        assert!(plain.iter().all(|event| event.get("usage").is_none()), "{path}");
    }
}

#[test]
fn an_answer_ends_with_the_context_and_may_be_empty() {
    let server = Server::start(&["--ctx", "64"]);
    let long = json!({"prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": true, "temperature": 0});
    let answer = server.ask("/v1/completions", &long);
    assert_eq!(answer["usage"]["total_tokens"], 64, "{answer}");
    assert_eq!(server.get("/v1/models").json()["data"][0]["max_model_len"], 64);
    let full = vec![5; 64];
    assert_eq!(server.post("/v1/completions", &json!({"prompt": full, "max_tokens": 1})).status, 400);
    let empty = server.ask("/v1/completions", &json!({"prompt": full, "max_tokens": 0}));
    assert_eq!((&empty["choices"][0]["text"], &empty["usage"]["completion_tokens"]), (&json!(""), &json!(0)));
    let cut = json!({"prompt": vec![5; 99], "truncate_prompt_tokens": -1, "max_tokens": 10, "ignore_eos": true});
    let cut = server.ask("/v1/completions", &cut);
    assert_eq!((&cut["usage"]["prompt_tokens"], &cut["usage"]["completion_tokens"]), (&json!(54), &json!(10)));
}

#[test]
fn penalties_of_presence_and_frequency_count_the_answer_only() {
    let server = Server::start(&[]);
    let ids = server.ask("/tokenize", &json!({"prompt": "Once upon a time, there was a little girl named Lily"}));
    let prompt = ids["tokens"].as_array().unwrap().clone();
    let text = server.ask(
        "/v1/completions",
        &json!({"prompt": prompt, "max_tokens": 40, "temperature": 0,
                                                      "return_token_ids": true}),
    );
    let all = [prompt, text["choices"][0]["token_ids"].as_array().unwrap().clone()].concat();
    let (mut repeated, mut changed) = (0, 0);
    for length in 12..all.len() {
        let next = |fields: Value| {
            let body = json!({"prompt": all[..length], "max_tokens": 1, "temperature": 0, "return_token_ids": true});
            server.ask("/v1/completions", &with(&body, &fields))["choices"][0]["token_ids"][0].clone()
        };
        let plain = next(json!({}));
        repeated += usize::from(all[..length].contains(&plain));
        assert_eq!(next(json!({"presence_penalty": 2, "frequency_penalty": 2})), plain, "after {length} tokens");
        changed += usize::from(next(json!({"repetition_penalty": 5})) != plain);
    }
    assert!(repeated > 5 && changed > 5, "{repeated} tokens were in the prompt, {changed} changed");
    // Within the answer, they do count.
    let body = json!({"prompt": "Once", "max_tokens": 40, "temperature": 0, "return_token_ids": true});
    let penalized = server.ask("/v1/completions", &with(&body, &json!({"presence_penalty": 100})));
    let ids = penalized["choices"][0]["token_ids"].as_array().unwrap();
    assert!((1..ids.len()).all(|i| !ids[..i].contains(&ids[i])), "{ids:?}");
}

#[test]
fn the_responses_api_reports_probabilities_and_counts_its_input() {
    let (_home, server) = chat_server();
    let body = json!({"input": "Once upon a time", "max_output_tokens": 8, "temperature": 0});
    for (fields, top) in [
        (json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2}), 2),
        (json!({"include": ["message.output_text.logprobs"]}), 0),
        (json!({"top_logprobs": 1}), 1),
    ] {
        let body = with(&body, &fields);
        let whole = server.ask("/v1/responses", &body);
        let entries = joined([&whole], "/output/0/content/0/logprobs");
        assert_eq!(entries.len(), 8, "{fields}: {whole}");
        assert!(entries.iter().all(|entry| entry["top_logprobs"].as_array().unwrap().len() == top), "{fields}");
        let events = data(&server.post("/v1/responses", &with(&body, &json!({"stream": true}))));
        let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
        assert_eq!(joined(deltas, "/logprobs"), entries, "{fields}");
        let done = events.iter().find(|event| event["type"] == "response.output_text.done").unwrap();
        assert_eq!(done["logprobs"], json!(entries), "{fields}");
        assert_eq!(joined(&events[events.len() - 1..], "/response/output/0/content/0/logprobs"), entries, "{fields}");
    }
    let plain = server.ask("/v1/responses", &body);
    assert_eq!(plain["output"][0]["content"][0]["logprobs"], json!([]));
    let counted = server.ask("/v1/responses/input_tokens", &json!({"input": "Once upon a time"}));
    let expected = json!({"object": "response.input_tokens", "input_tokens": plain["usage"]["input_tokens"]});
    assert_eq!(counted, expected);
}

#[test]
fn a_call_that_must_come_needs_no_form_of_the_text() {
    let home = story_pack(2048);
    std::fs::write(home.path().join("pack/chat_template.jinja"), TOOLS).unwrap();
    let server = Server::start(&[&home.path().join("pack").display().to_string()]);
    let schema = json!({"type": "object", "properties": {"day": {"enum": [1, 2]}}, "required": ["day"],
                        "additionalProperties": false});
    let messages = json!([{"role": "user", "content": "x"}]);
    let form = json!({"type": "json_schema", "name": "n", "schema": {"enum": ["a"]}});
    let function = json!({"name": "plan", "parameters": schema});
    let cases = [
        (
            "/v1/chat/completions",
            json!({"messages": messages, "max_tokens": 200, "tool_choice": "required",
          "tools": [{"type": "function", "function": function}], "parallel_tool_calls": false,
          "response_format": {"type": "json_schema", "json_schema": form}}),
            "/choices/0/message/tool_calls/0/function/name",
        ),
        (
            "/v1/responses",
            json!({"input": "x", "max_output_tokens": 200, "text": {"format": form},
          "tools": [{"type": "function", "name": "plan", "parameters": schema}], "parallel_tool_calls": false,
          "tool_choice": {"type": "function", "name": "plan"}}),
            "/output/0/name",
        ),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 200, "tools": [{"name": "plan", "input_schema": schema}],
          "tool_choice": {"type": "any", "disable_parallel_tool_use": true}, "output_config": {"format": form}}),
            "/content/0/name",
        ),
    ];
    for (path, body, name) in cases {
        let answer = server.ask(path, &with(&body, &json!({"temperature": 1, "seed": 1})));
        assert_eq!(answer.pointer(name), Some(&json!("plan")), "{path}: {answer}");
    }
}

#[test]
fn reasoning_is_left_out_on_request() {
    let home = story_pack(512);
    std::fs::write(home.path().join("pack/chat_template.jinja"), TOOLS).unwrap();
    let server = Server::start(&[&home.path().join("pack").display().to_string()]);
    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 12, "temperature": 0,
                      "thinking": {"type": "enabled"}, "logprobs": true});
    let shown = server.ask("/v1/chat/completions", &body);
    assert!(shown["choices"][0]["message"]["reasoning_content"].is_string(), "{shown}");
    for fields in [json!({"include_reasoning": false}), json!({"reasoning": {"exclude": true}})] {
        let body = with(&body, &fields);
        let hidden = server.ask("/v1/chat/completions", &body);
        assert_eq!(hidden["choices"][0]["message"].get("reasoning_content"), None, "{fields}: {hidden}");
        assert_eq!(hidden["usage"]["completion_tokens"], shown["usage"]["completion_tokens"]);
        let events = server.post("/v1/chat/completions", &with(&body, &json!({"stream": true}))).events();
        let text = json!(events).to_string();
        assert!(!text.contains("reasoning") && joined(&events, "/choices/0/logprobs/content").is_empty(), "{text}");
    }
}
