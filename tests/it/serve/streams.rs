//! Streams: the joined pieces are the whole answer, and readers do not disturb each other.

use super::client::{Server, story_pack};
use serde_json::{Value, json};
use std::io::Read;
use std::time::{Duration, Instant};

/// Joins the texts of the choices of a stream, and collects the reasons of their ends.
fn joined(events: &[Value], pointer: &str, n: usize) -> Vec<(String, Value)> {
    let mut all = vec![(String::new(), Value::Null); n];
    for choice in events.iter().flat_map(|event| event["choices"].as_array().unwrap()) {
        let (text, finish) = &mut all[choice["index"].as_u64().unwrap() as usize];
        assert!(finish.is_null(), "nothing follows the end of a choice");
        *text += choice.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        *finish = choice["finish_reason"].clone();
    }
    all
}

#[test]
fn joined_pieces_of_a_completion_are_the_answer() {
    let server = Server::start(&[]);
    for fields in [
        json!({}),
        json!({"echo": true}),
        json!({"echo": true, "logprobs": 2}),
        json!({"logprobs": 1}),
        json!({"stop": ["little"]}),
        json!({"n": 3, "temperature": 1.0, "seed": 4}),
        json!({"max_tokens": 0, "echo": true, "logprobs": 0}),
    ] {
        let mut body = json!({"prompt": ["Once upon a time", "One day"], "max_tokens": 20, "temperature": 0});
        fields.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
        let whole = server.ask("/v1/completions", &body);
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let response = server.post("/v1/completions", &body);
        assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
        let mut events = response.events();
        let mut usage = events.pop().unwrap();
        assert_eq!(usage["choices"], json!([]));
        // What is cached depends on the requests before.
        usage["usage"]["prompt_tokens_details"] = whole["usage"]["prompt_tokens_details"].clone();
        assert_eq!(usage["usage"], whole["usage"]);
        let choices = whole["choices"].as_array().unwrap();
        let expected: Vec<(String, Value)> = choices
            .iter()
            .map(|choice| (choice["text"].as_str().unwrap().to_string(), choice["finish_reason"].clone()))
            .collect();
        assert_eq!(joined(&events, "/text", choices.len()), expected, "{fields}");
        for (i, choice) in choices.iter().enumerate() {
            for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                let of_events = events.iter().flat_map(|event| event["choices"].as_array().unwrap());
                let pieces = of_events.filter(|piece| piece["index"] == json!(i));
                let parts = pieces.flat_map(|piece| piece["logprobs"][list].as_array().cloned().unwrap_or_default());
                let whole = choice["logprobs"][list].as_array().cloned().unwrap_or_default();
                assert_eq!(parts.collect::<Vec<_>>(), whole, "{fields} {list}");
            }
        }
    }
}

#[test]
fn joined_pieces_of_a_chat_are_the_answer() {
    let home = story_pack(512);
    let server = Server::start(&[&home.path().join("pack").display().to_string()]);
    let mut body = json!({"messages": [{"role": "user", "content": "Once upon a time"}], "max_tokens": 20,
                          "temperature": 1.0, "seed": 2, "n": 2});
    let whole = server.ask("/v1/chat/completions", &body);
    body["stream"] = json!(true);
    let events = server.post("/v1/chat/completions", &body).events();
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(events[0]["object"], "chat.completion.chunk");
    let choices = whole["choices"].as_array().unwrap().iter();
    let expected: Vec<(String, Value)> = choices
        .map(|choice| (choice["message"]["content"].as_str().unwrap().to_string(), choice["finish_reason"].clone()))
        .collect();
    assert_eq!(joined(&events, "/delta/content", 2), expected);
}

#[test]
fn a_client_that_leaves_ends_its_request_and_no_other() {
    let server = Server::start(&["--ctx", "512"]);
    let long = json!({"prompt": "Once", "max_tokens": 500, "ignore_eos": true, "n": 4, "stream": true});
    let other = std::thread::scope(|scope| {
        let server = &server;
        let other = scope.spawn(move || {
            let body = json!({"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": true});
            server.ask("/v1/completions", &body)["usage"]["completion_tokens"].clone()
        });
        for is_stream in [true, false] {
            let mut body = long.clone();
            body["stream"] = json!(is_stream);
            let mut stream = server.begin("POST", "/v1/completions", &[], &body.to_string());
            if is_stream {
                let mut some = [0; 100];
                stream.read_exact(&mut some).unwrap();
            } else {
                server.wait("the request", || server.get("/load").json()["server_load"].as_u64() >= Some(4));
            }
            drop(stream);
        }
        other.join().unwrap()
    });
    assert_eq!(other, 200);
    server.wait("the end of all requests", || server.get("/load").json()["server_load"] == 0);
    let metrics = server.get("/metrics").body;
    let decoding = metrics.lines().find(|line| line.starts_with("iec_cancelled_total") && line.contains("decode"));
    assert!(decoding.is_some_and(|line| !line.ends_with(" 0")), "{decoding:?}");
}

#[test]
fn a_slow_reader_pauses_only_its_own_text() {
    let server = Server::start(&["--max-seqs", "2"]);
    // Long events fill the buffers of the socket, then those of the server.
    let slow = json!({"prompt": "Once", "max_tokens": 500, "ignore_eos": true, "stream": true, "logprobs": 20,
                      "return_token_ids": true, "n": 1});
    let mut readers: Vec<_> = (0..1).map(|_| server.begin("POST", "/v1/completions", &[], &slow.to_string())).collect();
    let begin = Instant::now();
    for _ in 0..5 {
        let body = json!({"prompt": "Once upon a time", "max_tokens": 50, "temperature": 0});
        server.ask("/v1/completions", &body);
    }
    assert!(begin.elapsed() < Duration::from_secs(20));
    let mut all = String::new();
    readers[0].read_to_string(&mut all).unwrap();
    assert!(all.contains("[DONE]"), "the slow reader gets its whole text when it reads on");
}

#[test]
fn a_deadline_ends_a_request() {
    let server = Server::start(&[]);
    let body = json!({"prompt": "Once", "max_tokens": 500, "ignore_eos": true, "n": 16, "best_of": 16});
    let late = [("x-iec-deadline-ms", "30")];
    let response = server.send("POST", "/v1/completions", &late, &body.to_string());
    assert_eq!(response.status, 504, "{}", response.body);
    assert_eq!(response.json()["error"]["code"], "deadline_exceeded");
    let mut stream = body.clone();
    stream["stream"] = json!(true);
    let response = server.send("POST", "/v1/completions", &late, &stream.to_string());
    let events = response.events();
    assert_eq!(events.last().unwrap()["error"]["code"], "deadline_exceeded");
    assert_eq!(server.send("POST", "/v1/completions", &[("x-iec-deadline-ms", "x")], "{}").status, 400);
}
