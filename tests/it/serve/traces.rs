//! OpenTelemetry traces, as a collector gets them.

use super::client::Server;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// A collector that keeps all spans.
struct Collector {
    address: String,
    spans: Arc<Mutex<Vec<Value>>>,
}

impl Collector {
    fn start() -> Collector {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let spans = Arc::<Mutex<Vec<Value>>>::default();
        let kept = spans.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let kept = kept.clone();
                std::thread::spawn(move || take(stream.unwrap(), &kept));
            }
        });
        Collector { address, spans }
    }

    fn spans(&self) -> Vec<Value> {
        self.spans.lock().unwrap().clone()
    }
}

/// Takes the posts of a connection.
fn take(stream: TcpStream, kept: &Mutex<Vec<Value>>) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).unwrap_or(0) == 0 {
                return;
            }
        }
        assert!(head.starts_with("POST /v1/traces HTTP/1.1\r\n"), "{head}");
        let head = head.to_ascii_lowercase();
        assert!(head.contains("content-type: application/json\r\n"), "{head}");
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
        let mut body = vec![0; length.parse().unwrap()];
        reader.read_exact(&mut body).unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        let resource = &body["resourceSpans"][0];
        assert_eq!(
            resource["resource"]["attributes"][0],
            json!({"key": "service.name", "value": {"stringValue": "iec"}})
        );
        kept.lock().unwrap().extend(resource["scopeSpans"][0]["spans"].as_array().unwrap().iter().cloned());
        reader.get_mut().write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}").unwrap();
    }
}

fn attribute(span: &Value, name: &str) -> Value {
    let all = span["attributes"].as_array().unwrap();
    let found = all.iter().find(|attribute| attribute["key"] == name);
    found.and_then(|found| found["value"].as_object()?.values().next().cloned()).unwrap_or_default()
}

fn time(span: &Value, name: &str) -> u64 {
    span[name].as_str().unwrap().parse().unwrap()
}

#[test]
fn a_request_becomes_a_span_of_the_trace_of_its_client_with_children_within_it() {
    let collector = Collector::start();
    let mut server = Server::spawn(&["--otlp-endpoint", &collector.address], &[("IEC_API_KEY", "a-secret-key")]);
    let key = ("x-api-key", "a-secret-key");
    server.wait("readiness", || server.get("/health").status == 200);
    let ask = |trace: &str, flags: &str, more: Value| {
        let parent = format!("00-{trace}-00f067aa0ba902b7-{flags}");
        let mut body = json!({"prompt": "Grandma", "max_tokens": 4, "ignore_eos": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let headers = [key, ("traceparent", parent.as_str()), ("x-request-id", "my-request")];
        server.send("POST", "/v1/completions", &headers, &body.to_string()).status
    };
    let (whole, streamed, silent) = ("1".repeat(32), "2".repeat(32), "3".repeat(32));
    assert_eq!(ask(&silent, "00", json!({})), 200);
    assert_eq!(ask(&whole, "01", json!({})), 200);
    assert_eq!(ask(&streamed, "01", json!({"stream": true, "n": 2})), 200);
    assert_eq!(ask(&"4".repeat(32), "01", json!({"model": "none"})), 404);
    // The last spans are sent before the server ends.
    server.signal("TERM");
    assert_eq!(server.end().code(), Some(0), "{}", server.log());
    let spans = collector.spans();
    let of = |trace: &str| spans.iter().filter(|span| span["traceId"] == trace).collect::<Vec<_>>();
    assert_eq!(of(&silent).len(), 0, "the client does not want it");
    for (trace, choices) in [(&whole, 1), (&streamed, 2)] {
        let spans = of(trace);
        assert_eq!(spans.len(), 1 + 3 * choices, "{spans:?}");
        let root = spans[0];
        assert_eq!(
            (&root["name"], &root["parentSpanId"]),
            (&json!("POST /v1/completions"), &json!("00f067aa0ba902b7"))
        );
        for (name, value) in [
            ("iec.request.id", json!("my-request")),
            ("gen_ai.usage.output_tokens", json!((4 * choices).to_string())),
            ("gen_ai.operation.name", json!("text_completion")),
            ("http.response.status_code", json!("200")),
        ] {
            assert_eq!(attribute(root, name), value, "{name}");
        }
        let (begin, end) = (time(root, "startTimeUnixNano"), time(root, "endTimeUnixNano"));
        for (i, child) in spans[1..].iter().enumerate() {
            assert_eq!(
                (&child["name"], &child["parentSpanId"]),
                (&json!(["queue", "prefill", "decode"][i % 3]), &root["spanId"])
            );
            let (from, to) = (time(child, "startTimeUnixNano"), time(child, "endTimeUnixNano"));
            assert!(begin <= from && from <= to && to <= end, "{child} is not in {root}");
            assert!(from < to, "{child} takes time");
        }
    }
    let refused = of(&"4".repeat(32));
    assert_eq!(refused.len(), 1);
    assert_eq!(attribute(refused[0], "error.type"), "model_not_found");
    let all = json!(spans).to_string();
    assert!(!all.contains("Grandma") && !all.contains("a-secret-key"), "{all}");
}

#[test]
fn requests_do_not_wait_for_a_collector_that_is_away() {
    // A port that was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("http://127.0.0.1:{port}");
    let mut server = Server::spawn(&[], &[("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)]);
    server.wait_until_ready();
    server.ask("/v1/completions", &json!({"prompt": "Once", "max_tokens": 1}));
    server.wait("the note", || server.log().contains("traces are dropped until"));
    server.ask("/v1/completions", &json!({"prompt": "Once", "max_tokens": 1}));
    server.signal("TERM");
    assert_eq!(server.end().code(), Some(0), "{}", server.log());
    assert_eq!(server.log().matches("traces are dropped").count(), 1, "{}", server.log());
}
