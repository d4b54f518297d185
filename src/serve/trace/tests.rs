//! Tests of spans, of the options, and of the thread that sends.

use super::export::Sender;
use super::*;
use crate::generate::speculate::DraftCounts;
use crate::generate::{Completion, Finish};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::time::Duration;

fn options(endpoint: Option<&str>, variables: &[(&str, &str)]) -> Result<Option<TraceOptions>> {
    let variables: Vec<_> = variables.iter().map(|(name, text)| (name.to_string(), OsString::from(text))).collect();
    let find = |name: &str| variables.iter().find(|(found, _)| found == name).map(|(_, text)| text.clone());
    TraceOptions::of(endpoint, &find)
}

fn tracer(endpoint: &str, variables: &[(&str, &str)]) -> Tracer {
    Tracer::new(options(Some(endpoint), variables).unwrap().unwrap())
}

fn done(choice: usize, arrived: Instant, admitted: Option<Instant>, marks: Vec<Instant>) -> Done {
    let completion = Completion {
        index: 0,
        ids: vec![1; marks.len()],
        text: "a text of a user".into(),
        finish: Finish::Eos,
        prompt_tokens: 3,
        reused_tokens: 0,
        started: arrived,
        marks,
        drafts: DraftCounts::default(),
        constraint_met: None,
        stopped_by: None,
        scores: Vec::new(),
        prefix: None,
        error: None,
    };
    Done { choice, completion, arrived, admitted }
}

fn finished(span: Span, status: u16, finish: &str) -> Finished {
    Finished {
        span,
        end: Instant::now(),
        id: "req_1".into(),
        key: "alice".into(),
        endpoint: "/v1/completions".into(),
        model: "tiny".into(),
        status,
        finish: finish.into(),
        usage: Usage { prompt: 3, generated: 2, cached: 1 },
    }
}

fn spans_of(object: &Value) -> &[Value] {
    object["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().unwrap()
}

fn attribute<'a>(span: &'a Value, name: &str) -> Option<&'a Value> {
    span["attributes"].as_array()?.iter().find(|attribute| attribute["key"] == name).map(|found| &found["value"])
}

#[test]
fn a_request_becomes_a_span_with_children_that_lie_within_it() {
    let tracer = tracer("http://localhost:1", &[]);
    let mut headers = HeaderMap::new();
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    headers.insert("traceparent", parent.parse().unwrap());
    let begin = Instant::now() - Duration::from_millis(100);
    let at = |ms: u64| begin + Duration::from_millis(ms);
    let mut span = tracer.begin(&headers, begin).unwrap();
    span.choice(&done(0, at(1), Some(at(10)), vec![at(30), at(40), at(60)]));
    // A choice that ended in the queue, and one without tokens.
    span.choice(&done(1, at(1), None, Vec::new()));
    span.choice(&done(2, at(1), Some(at(10)), Vec::new()));
    let object = otlp::request("name", &[finished(span, 200, "stop")]);
    assert_eq!(object["resourceSpans"][0]["resource"]["attributes"][0]["value"], json!({"stringValue": "name"}));
    let spans = spans_of(&object);
    let names: Vec<&str> = spans.iter().map(|span| span["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["POST /v1/completions", "queue", "prefill", "decode", "queue", "queue", "prefill"]);
    let root = &spans[0];
    assert_eq!((root["kind"].as_u64(), root["flags"].as_u64()), (Some(2), Some(0x301)));
    assert_eq!(root["parentSpanId"], "b7ad6b7169203331");
    let time = |span: &Value, name: &str| span[name].as_str().unwrap().parse::<u64>().unwrap();
    let within = |span: &Value| {
        let (begin, end) = (time(span, "startTimeUnixNano"), time(span, "endTimeUnixNano"));
        time(root, "startTimeUnixNano") <= begin && begin <= end && end <= time(root, "endTimeUnixNano")
    };
    for span in spans {
        assert_eq!(span["traceId"], "0af7651916cd43dd8448eb211c80319c");
        assert!(within(span), "{span} is not in {root}");
    }
    for (child, milliseconds) in spans[1..4].iter().zip([9, 20, 30]) {
        assert_eq!(child["parentSpanId"], root["spanId"]);
        assert_eq!(attribute(child, "iec.choice"), Some(&json!({"intValue": "0"})));
        let length = time(child, "endTimeUnixNano") - time(child, "startTimeUnixNano");
        assert_eq!(length, milliseconds * 1_000_000, "{child}");
    }
    assert_eq!(attribute(root, "gen_ai.request.model"), Some(&json!({"stringValue": "tiny"})));
    assert_eq!(attribute(root, "gen_ai.usage.input_tokens"), Some(&json!({"intValue": "3"})));
    assert!(!object.to_string().contains("a text of a user"));
}

#[test]
fn errors_have_their_code_and_only_those_of_the_server_the_status_of_errors() {
    let tracer = tracer("http://localhost:1", &[]);
    for (status, is_error) in [(429, false), (499, false), (500, true), (504, true)] {
        let span = tracer.begin(&HeaderMap::new(), Instant::now()).unwrap();
        let object = otlp::request("iec", &[finished(span, status, "a_code")]);
        let span = &spans_of(&object)[0];
        assert_eq!(span["status"]["code"] == 2, is_error, "{span}");
        assert_eq!(attribute(span, "error.type"), Some(&json!({"stringValue": "a_code"})));
        assert_eq!((span.get("parentSpanId"), &span["flags"]), (None, &json!(0x101)));
    }
}

#[test]
fn the_flag_of_the_client_wins_over_the_sampler() {
    let traced = |sampler: &str, flags: Option<&str>| {
        let mut headers = HeaderMap::new();
        if let Some(flags) = flags {
            let text = format!("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}");
            headers.insert("traceparent", text.parse().unwrap());
        }
        let tracer = tracer("http://localhost:1", &[("OTEL_TRACES_SAMPLER", sampler)]);
        tracer.begin(&headers, Instant::now()).is_some()
    };
    for sampler in ["always_on", "always_off"] {
        assert!(traced(sampler, Some("01")) && !traced(sampler, Some("00")));
        assert_eq!(traced(sampler, None), sampler == "always_on");
    }
}

#[test]
fn options_come_from_the_setting_and_the_variables_of_open_telemetry() {
    let variable = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://other:4318/");
    assert!(options(None, &[]).unwrap().is_none());
    let all = [
        variable,
        ("OTEL_SERVICE_NAME", "llm"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x-a=b%20c,authorization=Basic%20Zm9v"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
    ];
    let found = options(None, &all).unwrap().unwrap();
    assert_eq!((found.url.as_str(), found.service.as_str()), ("http://other:4318/v1/traces", "llm"));
    assert_eq!(
        (&found.headers["x-a"], &found.headers["authorization"]),
        (&"b c".parse().unwrap(), &"Basic Zm9v".parse().unwrap())
    );
    assert!(!format!("{found:?}").contains("Zm9v"), "{found:?}");
    let found = options(Some("https://one"), &[variable]).unwrap().unwrap();
    assert_eq!((found.url.as_str(), found.service.as_str()), ("https://one/v1/traces", "iec"));
    for (name, text) in [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "other:4318"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "secret"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=secret%0"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=secret%+1"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=secret%0a"),
        ("OTEL_TRACES_SAMPLER", "some"),
    ] {
        let variables = if name == variable.0 { vec![(name, text)] } else { vec![variable, (name, text)] };
        let message = options(None, &variables).unwrap_err().to_string();
        assert!(message.contains(name) && !message.contains("secret"), "{message}");
    }
}

#[test]
fn a_full_queue_drops_requests() {
    let tracer = tracer("http://localhost:1", &[]);
    let span = tracer.begin(&HeaderMap::new(), Instant::now()).unwrap();
    for _ in 0..2050 {
        tracer.end(finished(span.clone(), 200, "stop"));
    }
    tracer.queue.end();
    let (taken, dropped) = tracer.queue.take().unwrap();
    assert_eq!((taken.len(), dropped), (2048, 2));
    assert!(tracer.queue.take().is_none());
}

/// Answers posts with these statuses, one after the other, each on a connection of its own. Returns the bodies.
fn answer(listener: TcpListener, statuses: &[u16]) -> Vec<Value> {
    let mut bodies = Vec::new();
    for status in statuses {
        let (stream, _) = listener.accept().unwrap();
        let mut reader = BufReader::new(stream);
        let (mut line, mut length) = (String::new(), 0);
        while reader.read_line(&mut line).unwrap() > 2 {
            let lower = line.to_ascii_lowercase();
            length = lower.strip_prefix("content-length: ").map_or(length, |n| n.trim().parse().unwrap());
            line.clear();
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        bodies.push(serde_json::from_slice(&body).unwrap());
        let head = format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        reader.get_mut().write_all(head.as_bytes()).unwrap();
    }
    bodies
}

#[test]
fn a_collector_that_fails_is_reported_once_and_loses_only_what_it_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let tracer = tracer(&format!("http://{}", listener.local_addr().unwrap()), &[]);
    let collector = std::thread::spawn(move || answer(listener, &[503, 200, 200]));
    let log = RefCell::new(Vec::new());
    let note = |line: &str| log.borrow_mut().push(line.to_string());
    let span = tracer.begin(&HeaderMap::new(), Instant::now()).unwrap();
    let add = |count: usize| (0..count).for_each(|_| tracer.end(finished(span.clone(), 200, "stop")));
    let mut sender = Sender::new(&tracer, &note);
    // The first of two posts fails, so the second is not tried.
    add(200);
    sender.send_waiting();
    assert!(log.borrow()[0].contains("it answered with status 503"), "{log:?}");
    add(129);
    sender.send_waiting();
    let bodies = collector.join().unwrap();
    assert_eq!(bodies.iter().map(|body| spans_of(body).len()).collect::<Vec<_>>(), [128, 128, 1]);
    assert_eq!(log.borrow()[1..], ["traces of 200 requests were dropped"]);
    // The collector is gone now.
    for _ in 0..2 {
        add(1);
        sender.send_waiting();
    }
    assert_eq!(log.borrow().len(), 3, "{log:?}");
}
