//! The API of ollama.

use super::client::{Response, Server, story_pack};
use crate::common::packed;
use serde_json::{Value, json};

/// Returns the objects of a stream of lines.
fn lines(response: &Response) -> Vec<Value> {
    assert_eq!((response.status, response.header("content-type")), (200, Some("application/x-ndjson")));
    response.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn clients_of_ollama_chat_and_generate() {
    let home = story_pack(256);
    let server = Server::start(&[&home.path().join("pack").display().to_string()]);
    let options = json!({"temperature": 0, "num_predict": 12});
    let hello = json!([{"role": "user", "content": "Once upon a time"}]);
    let chat = json!({"model": "pack:latest", "messages": hello, "options": options});
    let streamed = lines(&server.post("/api/chat", &chat));
    let mut whole = chat.clone();
    whole["stream"] = json!(false);
    let answer = server.ask("/api/chat", &whole);
    let text: String = streamed.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
    assert_eq!((answer["message"]["content"].as_str(), &answer["model"]), (Some(text.as_str()), &json!("pack:latest")));
    let own = server.ask("/v1/chat/completions", &json!({"messages": hello, "max_tokens": 12, "temperature": 0}));
    assert_eq!(own["choices"][0]["message"]["content"], json!(text), "both endpoints ask the model the same");
    let last = streamed.last().unwrap();
    assert_eq!(
        (&last["done"], &last["done_reason"], &last["eval_count"]),
        (&json!(true), &json!("length"), &json!(12))
    );
    assert!(
        ["total_duration", "prompt_eval_duration", "eval_duration"].iter().all(|name| last[*name].as_u64() > Some(0))
    );

    let of = |more: Value| {
        let mut body = json!({"model": "pack", "prompt": "Once upon a time", "options": options, "stream": false});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.ask("/api/generate", &body)["response"].clone()
    };
    assert_eq!(of(json!({})), json!(text), "a text is the message of a user");
    let own = server.ask("/v1/completions", &json!({"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}));
    assert_eq!(of(json!({"raw": true})), own["choices"][0]["text"]);
    let pieces = lines(&server.post("/api/generate", &json!({"prompt": "Once upon a time", "options": options})));
    let joined: String = pieces.iter().map(|line| line["response"].as_str().unwrap()).collect();
    assert_eq!(joined, text);
    let json = of(
        json!({"options": {"temperature": 0, "num_predict": 60}, "format": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
                                    "additionalProperties": false}}),
    );
    let object: Value = serde_json::from_str(json.as_str().unwrap()).unwrap();
    assert_eq!(object["a"].as_f64(), Some(1.0));
    let loaded = lines(&server.post("/api/generate", &json!({"model": "pack", "keep_alive": "5m"})));
    assert_eq!((loaded.len(), &loaded[0]["done_reason"]), (1, &json!("load")));
}

#[test]
fn a_model_without_a_template_continues_texts() {
    let home = packed("stories260k");
    let server = Server::start(&[&home.path().display().to_string()]);
    let body = json!({"prompt": "Once upon a time", "options": {"temperature": 0, "num_predict": 8}, "stream": false});
    let own = server.ask("/v1/completions", &json!({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}));
    assert_eq!(server.ask("/api/generate", &body)["response"], own["choices"][0]["text"]);
    let refused = server.post("/api/chat", &json!({"messages": [{"role": "user", "content": "x"}]}));
    assert_eq!(refused.status, 400);
    assert!(refused.json()["error"].as_str().is_some_and(|error| error.contains("chat template")), "{}", refused.body);
}

#[test]
fn clients_of_ollama_list_models() {
    let home = story_pack(256);
    let server = Server::start(&[&home.path().join("pack").display().to_string()]);
    let tags = server.get("/api/tags").json();
    let model = &tags["models"][0];
    assert_eq!((&model["name"], &model["model"]), (&json!("pack:latest"), &json!("pack:latest")));
    assert_eq!(model["digest"].as_str().map(str::len), Some(64), "{model}");
    assert!(model["size"].as_u64() > Some(100_000) && model["details"]["parameter_size"].as_str().is_some(), "{model}");
    let running = server.get("/api/ps").json();
    assert_eq!(
        (&running["models"][0]["name"], &running["models"][0]["context_length"]),
        (&json!("pack:latest"), &json!(256))
    );
    for name in ["model", "name"] {
        let shown = server.ask("/api/show", &json!({name: "pack:latest", "verbose": false}));
        assert_eq!(shown["capabilities"], json!(["completion"]), "{shown}");
        assert_eq!(shown["template"], json!(super::client::TEMPLATE));
        let family = shown["details"]["family"].as_str().unwrap();
        assert_eq!(shown["model_info"][format!("{family}.context_length")], json!(256), "{shown}");
    }
    assert!(server.get("/api/version").json()["version"].is_string());
    assert_eq!(server.send("HEAD", "/", &[], "").status, 200, "clients ask whether the server is there");
}

#[test]
fn errors_of_ollama_are_texts() {
    let server = Server::start(&[]);
    let cases = [
        ("POST", "/api/chat", json!({"model": "none", "messages": []}), 404),
        ("POST", "/api/show", json!({"model": "none"}), 404),
        ("POST", "/api/generate", json!({"prompt": "x", "images": ["aGk="]}), 400),
        ("POST", "/api/generate", json!({"prompt": "x", "options": {"top_p": "x"}}), 400),
        ("POST", "/api/embed", json!({"input": "x"}), 501),
        ("POST", "/api/pull", json!({"model": "x"}), 404),
        ("DELETE", "/api/delete", json!({"model": "x"}), 404),
        ("GET", "/api/chat", json!({}), 405),
    ];
    for (method, path, body, status) in cases {
        let response = server.send(method, path, &[], &body.to_string());
        assert_eq!(response.status, status, "{path} {body}: {}", response.body);
        assert!(response.json()["error"].is_string(), "{path}: {}", response.body);
    }
}
