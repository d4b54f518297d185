//! Tests the rights of keys to models and adapters, in every field of every endpoint.

use super::client::{Response, Server};
use crate::common::{fixture, packed_as};
use iec::serve::keys::digest_of;
use serde_json::{Value, json};

/// Names that the server has.
const NAMES: [&str; 3] = ["base-model", "kv", "secret"];

/// Key with scopes and, if there are any, the only names that it may use.
struct Tenant(&'static str, &'static str, &'static [&'static str]);

const TENANTS: [Tenant; 6] = [
    Tenant("all", r#""infer", "admin""#, &[]),
    Tenant("adapter", r#""infer""#, &["kv"]),
    Tenant("model", r#""infer""#, &["base-model"]),
    Tenant("both", r#""infer""#, &["base-model", "kv"]),
    Tenant("other", r#""infer""#, &["nothing"]),
    Tenant("operator", r#""infer", "admin""#, &["base-model", "kv"]),
];

/// Starts a server with a model and two adapters.
fn server(home: &std::path::Path) -> Server {
    let pack = packed_as("lora-llama-gqa-base", &fixture("llama-gqa"), &[]);
    let all = fixture("lora-llama-gqa");
    let file = home.join("keys.toml");
    let table = |Tenant(name, scopes, names): &Tenant| {
        let names = if names.is_empty() { String::new() } else { format!("models = {names:?}\n") };
        format!("[[key]]\nname = \"{name}\"\nsha256 = \"{}\"\nscopes = [{scopes}]\n{names}", digest_of(name))
    };
    std::fs::write(&file, TENANTS.iter().map(table).collect::<String>()).unwrap();
    let lora = |name: &str, dir: &str| format!("{name}={}", all.join(dir).display());
    let model = format!("base-model={}", pack.display());
    Server::start(&[
        "--model",
        &model,
        "--precision",
        "fp32",
        "--lora",
        &lora("kv", "r16-all"),
        "--lora",
        &lora("secret", "r8-qv"),
        "--adapter-dir",
        &all.display().to_string(),
        "--api-key-file",
        &file.display().to_string(),
    ])
}

fn send(server: &Server, key: &str, method: &str, path: &str, body: &Value) -> Response {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    server.send(method, path, &[("x-api-key", key)], &body)
}

/// Returns the names of an answer that the request did not have.
fn leaked(response: &Response, request: &Value, may: &[&str]) -> Vec<&'static str> {
    let shown = |name: &&&str| response.body.contains(**name) && !request.to_string().contains(**name);
    NAMES.iter().filter(|name| !may.is_empty() && !may.contains(*name)).filter(shown).copied().collect()
}

#[test]
fn a_key_uses_exactly_the_names_that_it_lists_at_every_endpoint() {
    struct Case {
        key: &'static str,
        model: Option<&'static str>,
        adapters: Value,
        allowed: bool,
    }
    let case = |key, model, adapters, allowed| Case { key, model, adapters, allowed };
    let with = |list: &[(&str, f64)]| -> Value {
        list.iter().map(|(name, scale)| json!({"name": name, "scale": scale})).collect()
    };
    let cases = [
        case("all", Some("base-model"), with(&[("secret", 1.0)]), true),
        case("all", Some("kv"), with(&[("kv", -1.0), ("secret", 1.0)]), true),
        case("all", None, Value::Null, true),
        case("adapter", Some("kv"), Value::Null, true),
        case("adapter", None, Value::Null, true),
        case("adapter", Some("kv"), with(&[("kv", 0.5)]), true),
        case("adapter", Some("kv"), with(&[("kv", -1.0), ("secret", 1.0)]), false),
        case("adapter", Some("kv"), with(&[("kv", -1.0)]), false),
        case("adapter", Some("kv"), with(&[("secret", 1.0)]), false),
        case("adapter", Some("kv"), json!(["secret"]), false),
        case("adapter", Some("kv"), json!(["nothing"]), false),
        case("adapter", Some("base-model"), Value::Null, false),
        case("adapter", Some("base-model"), with(&[("kv", 1.0)]), false),
        case("adapter", Some("secret"), Value::Null, false),
        case("adapter", Some("nothing"), Value::Null, false),
        case("model", Some("base-model"), Value::Null, true),
        case("model", Some("kv"), Value::Null, false),
        case("model", None, with(&[("kv", 1.0)]), false),
        case("both", None, with(&[("kv", -1.0)]), true),
        case("both", Some("base-model"), with(&[("kv", 1.0)]), true),
        case("both", Some("base-model"), with(&[("secret", 0.0)]), false),
        case("other", None, Value::Null, false),
        case("other", Some("base-model"), Value::Null, false),
        case("other", Some("nothing"), Value::Null, false),
    ];
    let text = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1});
    let endpoints = [
        ("/v1/completions", json!({"prompt": [1, 5], "max_tokens": 1})),
        ("/v1/chat/completions", text.clone()),
        ("/v1/responses", json!({"input": "x", "max_output_tokens": 1})),
        ("/v1/messages", text.clone()),
        ("/v1/messages/count_tokens", json!({"messages": text["messages"]})),
        ("/tokenize", json!({"prompt": "x"})),
        ("/detokenize", json!({"tokens": [1]})),
    ];
    let home = tempfile::tempdir().unwrap();
    let server = server(home.path());
    let mut failures = Vec::new();
    for Case { key, model, adapters, allowed } in &cases {
        let may = TENANTS.iter().find(|Tenant(name, ..)| name == key).unwrap().2;
        for (number, (path, body)) in endpoints.iter().enumerate() {
            if number > 3 && !adapters.is_null() {
                continue;
            }
            let mut body = body.clone();
            body["model"] = json!(model);
            if !adapters.is_null() {
                body["adapters"] = adapters.clone();
            }
            let response = send(&server, key, "POST", path, &body);
            let refused = response.status == 404
                || response.status == 400 && ["no adapter", "at least 0"].iter().any(|s| response.body.contains(s));
            // The model has no chat template, which is found out later.
            let answered = response.status == 200 || response.body.contains("chat template");
            if refused == *allowed || refused == answered || !leaked(&response, &body, may).is_empty() {
                failures.push(format!("{key} {path} {body}: {} {}", response.status, response.body));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn lists_show_a_key_exactly_what_it_may_use_and_no_directories() {
    let home = tempfile::tempdir().unwrap();
    let server = server(home.path());
    for Tenant(key, scopes, may) in &TENANTS {
        let expected: Vec<&str> = NAMES.iter().filter(|name| may.is_empty() || may.contains(name)).copied().collect();
        let listed = send(&server, key, "GET", "/v1/models", &Value::Null);
        let data = listed.json()["data"].as_array().unwrap().clone();
        let found: Vec<&str> = data.iter().map(|model| model["id"].as_str().unwrap()).collect();
        assert_eq!(found, expected, "{key}");
        assert_eq!(leaked(&listed, &Value::Null, may), [""; 0], "{key}: {}", listed.body);
        assert!(!listed.body.contains('/'), "{key}: {}", listed.body);
        let parent_is_shown = found.contains(&"base-model");
        for model in data.iter().filter(|model| model["id"] != "base-model") {
            assert_eq!(model["parent"], if parent_is_shown { json!("base-model") } else { Value::Null }, "{key}");
        }
        for name in NAMES {
            let one = send(&server, key, "GET", &format!("/v1/models/{name}"), &Value::Null);
            assert_eq!(one.status, if expected.contains(&name) { 200 } else { 404 }, "{key} {name}");
        }
        let adapters = send(&server, key, "GET", "/v1/lora_adapters", &Value::Null);
        if scopes.contains("admin") {
            let data = adapters.json()["data"].as_array().unwrap().clone();
            let found: Vec<&str> = data.iter().map(|adapter| adapter["name"].as_str().unwrap()).collect();
            assert_eq!(found, &expected[1..], "{key}");
        } else {
            assert_eq!(adapters.status, 403, "{key}");
        }
    }
}

#[test]
fn a_key_loads_and_unloads_only_adapters_that_it_lists() {
    let home = tempfile::tempdir().unwrap();
    let server = server(home.path());
    struct Case(&'static str, &'static str, Value, u16);
    let load = |name: &str, base: Option<&str>, in_place: bool| json!({"lora_name": name, "lora_path": "r8-qv", "base_model_name": base, "load_inplace": in_place});
    let unload = |name: &str| json!({"lora_name": name});
    let cases = [
        Case("adapter", "load", load("kv", None, true), 403),
        Case("operator", "load", load("secret", None, true), 403),
        Case("operator", "load", load("new", None, false), 403),
        Case("operator", "load", load("kv", Some("secret"), true), 404),
        Case("operator", "load", load("kv", Some("kv"), true), 400),
        Case("operator", "load", load("kv", Some("nothing"), true), 404),
        Case("operator", "unload", unload("secret"), 404),
        Case("operator", "unload", unload("nothing"), 404),
        Case("operator", "unload", unload("base-model"), 404),
        Case("operator", "load", load("kv", Some("base-model"), true), 200),
        Case("operator", "unload", unload("kv"), 200),
        Case("operator", "load", json!({"lora_name": "kv", "lora_path": "r8-qv", "model": "base-model"}), 200),
        Case("all", "unload", unload("secret"), 200),
        Case("all", "load", load("new", None, false), 200),
    ];
    let mut failures = Vec::new();
    for Case(key, what, body, status) in &cases {
        let response = send(&server, key, "POST", &format!("/v1/{what}_lora_adapter"), body);
        if response.status != *status {
            failures.push(format!("{key} {what} {body}: {} {}, expected {status}", response.status, response.body));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn an_adapter_for_one_of_two_models_is_loaded_by_the_name_of_its_model() {
    let pack = packed_as("lora-llama-gqa-base", &fixture("llama-gqa"), &[]).display().to_string();
    let all = fixture("lora-llama-gqa").display().to_string();
    let (a, b) = (format!("a={pack}"), format!("b={pack}"));
    let server = Server::start(&["--model", &a, "--model", &b, "--adapter-dir", &all, "--precision", "fp32"]);
    let load = |field: &str, name: &str| {
        let mut body = json!({"lora_name": format!("of-{name}"), "lora_path": "r8-qv"});
        body[field] = json!(name);
        server.post("/v1/load_lora_adapter", &body)
    };
    let unnamed = load("base_model_name", "");
    let error = &unnamed.json()["error"];
    assert_eq!((unnamed.status, &error["param"]), (400, &json!("base_model_name")), "{error}");
    for (field, name) in [("base_model_name", "a"), ("model", "b")] {
        let loaded = load(field, name);
        assert_eq!(loaded.status, 200, "{field}: {}", loaded.body);
        let object = server.get(&format!("/v1/models/of-{name}")).json();
        assert_eq!(object["parent"], name);
    }
}
