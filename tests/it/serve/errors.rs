//! Requests that are refused: status, field and name of the error.

use super::client::{Server, story_pack};
use crate::common::packed;
use serde_json::{Value, json};

#[test]
fn wrong_requests_are_refused_by_the_name_of_their_field() {
    let home = packed("stories260k");
    let pack = home.path().display().to_string();
    let server = Server::start(&[&pack, "--max-body", "64K"]);
    let ids: Vec<u32> = vec![1; 600];
    let cases: Vec<(&str, Value, u16, Value, Value)> = vec![
        ("completions", json!({"prompt": "x", "temperature": -1}), 400, json!("temperature"), Value::Null),
        ("completions", json!({"prompt": "x", "n": 99}), 400, json!("n"), Value::Null),
        ("completions", json!({}), 400, json!("prompt"), Value::Null),
        ("completions", json!({"prompt": []}), 400, json!("prompt"), Value::Null),
        ("completions", json!({"prompt": [99999]}), 400, json!("prompt"), Value::Null),
        ("completions", json!({"prompt": ids}), 400, json!("prompt"), json!("context_length_exceeded")),
        ("completions", json!({"prompt": "x".repeat(9000)}), 400, json!("prompt"), json!("context_length_exceeded")),
        ("completions", json!({"prompt": "x", "suffix": "y"}), 400, json!("suffix"), json!("unsupported_parameter")),
        ("completions", json!({"prompt": "x", "model": "y"}), 404, json!("model"), json!("model_not_found")),
        ("completions", json!({"prompt": "x", "adapters": ["y"]}), 400, json!("adapters"), Value::Null),
        ("completions", json!({"prompt": "x", "logprobs": 99}), 400, json!("logprobs"), Value::Null),
        (
            "completions",
            json!({"prompt": "x", "structured_outputs": {"regex": "("}}),
            400,
            json!("structured_outputs.regex"),
            Value::Null,
        ),
        (
            "chat/completions",
            json!({"messages": [{"role": "user", "content": "x"}]}),
            400,
            json!("messages"),
            json!("no_chat_template"),
        ),
        ("embeddings", json!({"input": "x"}), 501, Value::Null, json!("not_implemented")),
        ("nothing", json!({}), 404, Value::Null, json!("not_found")),
    ];
    for (path, body, status, param, code) in cases {
        let response = server.post(&format!("/v1/{path}"), &body);
        let error = &response.json()["error"];
        assert_eq!(
            (response.status, &error["param"], &error["code"]),
            (status, &param, &code),
            "{path} {body}: {error}"
        );
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()));
    }
    for (body, param) in [(r#"{"prompt": "\ud800"}"#, "prompt"), (r#"{"prompt": {}}"#, "prompt")] {
        let response = server.send("POST", "/v1/completions", &[], body);
        assert_eq!((response.status, response.json()["error"]["param"].as_str()), (400, Some(param)), "{body}");
    }
    for body in ["", "{", "[]", "\"x\"", "{\"prompt\": \"x\", \"prompt\": \"y\"}", &"[".repeat(9000)] {
        assert_eq!(server.send("POST", "/v1/completions", &[], body).status, 400, "{body}");
    }
    let long = json!({"prompt": "x".repeat(70_000)});
    assert_eq!(server.post("/v1/completions", &long).status, 413);
    assert_eq!(server.get("/v1/completions").status, 405);
    let header = "x".repeat(40_000);
    assert_eq!(server.send("GET", "/v1/models", &[("x-long", &header)], "").status, 431);
}

#[test]
fn unknown_fields_are_named_or_refused() {
    let body = json!({"prompt": "Once", "max_tokens": 1, "colour": "red", "user": "me"});
    let server = Server::start(&[]);
    let response = server.post("/v1/completions", &body);
    assert_eq!((response.status, response.header("x-iec-ignored")), (200, Some("colour")));
    let counted = server.post("/tokenize", &json!({"prompt": "Once", "colour": "red"}));
    assert_eq!((counted.status, counted.header("x-iec-ignored")), (200, Some("colour")));
    let strict = Server::start(&["--strict-fields"]);
    let response = strict.post("/v1/completions", &body);
    assert_eq!((response.status, response.json()["error"]["param"].as_str()), (400, Some("colour")));
}

#[test]
fn pages_of_other_sites_cannot_use_the_server() {
    let server = Server::start(&["--cors-origin", "https://chat.example"]);
    let body = json!({"prompt": "Once", "max_tokens": 1}).to_string();
    let send = |headers: &[(&str, &str)]| server.send("POST", "/v1/completions", headers, &body);
    assert_eq!(send(&[("Host", "evil.example")]).status, 403);
    assert_eq!(send(&[("Host", "localhost:1234")]).status, 200);
    assert_eq!(send(&[("Origin", "https://evil.example")]).status, 403);
    let allowed = send(&[("Origin", "https://chat.example")]);
    assert_eq!((allowed.status, allowed.header("access-control-allow-origin")), (200, Some("https://chat.example")));
    let own = format!("http://{}", server.address);
    assert_eq!(send(&[("Origin", &own)]).status, 200);
    let asked = server.send("OPTIONS", "/v1/completions", &[("Origin", "https://evil.example")], "");
    assert_eq!(asked.header("access-control-allow-origin"), None);
    let asked = server.send("OPTIONS", "/v1/completions", &[("Origin", "https://chat.example")], "");
    assert_eq!((asked.status, asked.header("access-control-allow-methods")), (204, Some("GET, HEAD, POST, OPTIONS")));
}

#[test]
fn the_page_and_the_probes_need_no_key() {
    let server = Server::spawn(&[], &[("IEC_API_KEY", "secret")]);
    server.wait_until_ready();
    let page = server.get("/");
    assert_eq!(page.status, 200);
    assert!(page.header("content-security-policy").is_some_and(|policy| policy.contains("default-src 'none'")));
    for path in ["/livez", "/readyz", "/version", "/openapi.json"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    for path in ["/v1/models", "/metrics", "/load", "/v1/lora_adapters"] {
        assert_eq!(server.get(path).status, 401, "{path}");
        assert_eq!(server.send("GET", path, &[("Authorization", "Bearer secret")], "").status, 200, "{path}");
        assert_eq!(server.send("GET", path, &[("x-api-key", "secret")], "").status, 200, "{path}");
    }
}

#[test]
fn a_conversation_with_other_things_than_text_is_refused() {
    let home = story_pack(256);
    let server = Server::start(&[&home.path().join("pack").display().to_string()]);
    let image = json!([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}]);
    let response = server.post("/v1/chat/completions", &json!({"messages": [{"role": "user", "content": image}]}));
    assert_eq!((response.status, response.json()["error"]["code"].as_str()), (400, Some("unsupported_content")));
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
    let body = json!({"messages": [{"role": "user", "content": "x"}], "tools": tools});
    let response = server.post("/v1/chat/completions", &body);
    let param = response.json()["error"]["param"].clone();
    assert_eq!((response.status, param), (400, json!("tools")), "a template without a place: {}", response.body);
}
