//! Routes: further paths, the lists of models in both forms, pages of other origins, and counts of drafts.

use super::client::{Server, story_pack};
use serde_json::{Value, json};

#[test]
fn endpoints_are_there_without_v1_and_with_the_same_checks() {
    let home = story_pack(256);
    let server = Server::spawn(&[&home.path().join("pack").display().to_string()], &[("IEC_API_KEY", "secret")]);
    server.wait_until_ready();
    let hello = json!([{"role": "user", "content": "Once"}]);
    let cases: Vec<(&str, &str, Value)> = vec![
        ("/v1/completions", "/completions", json!({"prompt": "Once", "max_tokens": 2, "temperature": 0})),
        ("/v1/chat/completions", "/chat/completions", json!({"messages": hello, "max_tokens": 2, "temperature": 0})),
        ("/v1/responses", "/responses", json!({"input": "Once", "max_output_tokens": 2, "temperature": 0})),
        ("/v1/messages", "/messages", json!({"messages": hello, "max_tokens": 2, "temperature": 0})),
        ("/v1/messages/count_tokens", "/messages/count_tokens", json!({"messages": hello})),
        ("/v1/embeddings", "/embeddings", json!({"input": "Once"})),
    ];
    for (long, short, body) in cases {
        let ask = |path: &str| server.send("POST", path, &[("x-api-key", "secret")], &body.to_string());
        let (long, alias) = (ask(long), ask(short));
        let without_names = |response: &super::client::Response| {
            let mut object = response.json();
            ["id", "created", "created_at", "completed_at", "output", "usage"]
                .iter()
                .for_each(|name| _ = object.as_object_mut().unwrap().remove(*name));
            object
        };
        assert_eq!((long.status, without_names(&long)), (alias.status, without_names(&alias)), "{short}");
        let refused = server.post(short, &body);
        assert_eq!(refused.status, 401, "{short}");
        assert_eq!(refused.json()["type"] == "error", short.starts_with("/messages"), "{}", refused.body);
    }
    for path in ["/models", "/models/pack"] {
        assert_eq!(server.get(path).status, 401, "{path}");
        assert_eq!(server.send("GET", path, &[("x-api-key", "secret")], "").status, 200, "{path}");
    }
    for path in ["/health", "/v1/health", "/ping"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    assert_eq!(server.get("/nothing").status, 401, "whether a path exists is told with a key only");
    assert_eq!(server.send("DELETE", "/models", &[], "").status, 401);
    assert_eq!(server.send("DELETE", "/models", &[("x-api-key", "secret")], "").status, 405);
}

#[test]
fn clients_of_anthropic_list_models_in_their_form() {
    let server = Server::start(&[]);
    let version = [("anthropic-version", "2023-06-01")];
    let list = server.send("GET", "/v1/models?limit=5", &version, "").json();
    let first = &list["data"][0];
    assert_eq!((&first["type"], first["display_name"] == first["id"]), (&json!("model"), true), "{list}");
    let created = first["created_at"].as_str().unwrap();
    assert!(created.len() == 20 && created.starts_with("20") && created.ends_with('Z'), "{created}");
    assert_eq!((&list["has_more"], &list["first_id"], &list["last_id"]), (&json!(false), &first["id"], &first["id"]));
    let path = format!("/v1/models/{}", first["id"].as_str().unwrap());
    assert_eq!(server.send("GET", &path, &version, "").json(), *first);
    let unknown = server.send("GET", "/v1/models/none", &version, "");
    assert_eq!((unknown.status, &unknown.json()["type"]), (404, &json!("error")));
    assert!(unknown.header("request-id").is_some());
    let own = server.get("/v1/models").json();
    assert_eq!((&own["object"], &own["data"][0]["object"]), (&json!("list"), &json!("model")));
    assert_eq!(server.get("/v1/models/none").json()["error"]["code"], "model_not_found");
}

/// Headers that the SDK of OpenAI sends from a browser.
const SDK: &str = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,\
                   x-stainless-package-version,x-stainless-retry-count,x-stainless-runtime,\
                   x-stainless-runtime-version,x-stainless-timeout";

#[test]
fn an_sdk_in_a_page_of_an_allowed_origin_may_send_its_headers() {
    let origin = "https://chat.example";
    let asked = |server: &Server, origin: &str, path: &str| {
        let headers = [
            ("Origin", origin),
            ("Access-Control-Request-Method", "POST"),
            ("Access-Control-Request-Headers", SDK),
            ("Access-Control-Request-Private-Network", "true"),
        ];
        server.send("OPTIONS", path, &headers, "")
    };
    for allowed in ["*", origin] {
        let server = Server::start(&["--cors-origin", allowed]);
        for path in ["/v1/chat/completions", "/chat/completions", "/v1/messages", "/v1/models/a/b", "/nothing"] {
            let answer = asked(&server, origin, path);
            assert_eq!((answer.status, answer.header("access-control-allow-origin")), (204, Some(origin)), "{path}");
            let named = answer.header("access-control-allow-headers").unwrap_or_default();
            for name in SDK.split(',') {
                assert!(named.split(", ").any(|found| found == name), "{path}: {named} lacks {name}");
            }
            let varies = answer.header("vary").unwrap_or_default().to_ascii_lowercase();
            assert!(varies.contains("origin") && varies.contains("access-control-request-headers"), "{varies}");
            assert_eq!(answer.header("access-control-allow-private-network"), Some("true"));
        }
        let body = json!({"prompt": "Once", "max_tokens": 1}).to_string();
        let answer = server.send("POST", "/v1/completions", &[("Origin", origin)], &body);
        let shown = answer.header("access-control-expose-headers").unwrap_or_default();
        for name in ["x-request-id", "retry-after", "x-should-retry", "x-iec-seed", "x-iec-ignored"] {
            assert!(shown.split(", ").any(|found| found == name), "{shown} lacks {name}");
        }
        assert_eq!(server.get("/v1/models").header("vary"), Some("Origin"), "a cache keeps answers apart");
    }
    for options in [&["--cors-origin", origin][..], &[]] {
        let server = Server::start(options);
        let answer = asked(&server, "https://evil.example", "/v1/chat/completions");
        for name in ["origin", "headers", "methods", "private-network"] {
            let name = format!("access-control-allow-{name}");
            assert_eq!(answer.header(&name), None, "{name}");
        }
    }
}

#[test]
fn drafts_are_counted_in_the_metrics() {
    let server = Server::start(&["--speculate", "ngram"]);
    let text = "Once upon a time there was a little girl. Once upon a time there was a little girl. Once upon";
    let body = json!({"prompt": text, "max_tokens": 60, "temperature": 0, "ignore_eos": true});
    server.ask("/v1/completions", &body);
    let metrics = server.get("/metrics").body;
    let count = |name: &str| {
        let series = format!("vllm:spec_decode_num_{name}_total{{");
        let line = metrics.lines().find(|line| line.starts_with(&series) && line.contains("drafter=\"ngram\""));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).unwrap()
    };
    let (drafts, tokens, accepted) = (count("drafts"), count("draft_tokens"), count("accepted_tokens"));
    assert!(drafts > 0 && tokens >= drafts && accepted <= tokens, "{drafts} {tokens} {accepted}");
}
