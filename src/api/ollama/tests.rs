//! Tests of the requests and answers of ollama's API.

use super::super::error::ApiError;
use super::form::{Endpoint, OllamaAnswer};
use super::*;
use crate::api::form::{Events, Form};
use crate::api::parts::tests::{any_pieces, done};
use crate::api::prepare::Prepared;
use crate::api::text::Piece;
use crate::generate::Finish;
use crate::generate::constraint::ConstraintSource;
use proptest::prelude::*;
use serde_json::Value;

const LIMITS: Limits = Limits { max_n: 4, max_logprobs: 20, strict_fields: true, unloads: true };

fn read(read: fn(&mut Body, &Limits) -> ApiResult<Job>, value: &Value) -> ApiResult<(Job, Vec<String>)> {
    let mut body = Body::parse(value.to_string().as_bytes())?;
    let job = read(&mut body, &LIMITS)?;
    Ok((job, body.rest(false)?))
}

fn hello() -> Value {
    json!([{"role": "user", "content": "Hi"}])
}

#[test]
fn options_are_those_of_other_endpoints() {
    let options = json!({
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8, "seed": 7, "stop": ["x"],
        "num_predict": 9, "repeat_penalty": 1.1, "repeat_last_n": 5, "presence_penalty": 0.25,
        "frequency_penalty": 0.75, "mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2, "num_ctx": 4096,
        "num_gpu": null,
    });
    let body = json!({"messages": hello(), "options": options, "format": "json", "keep_alive": "5m"});
    let (job, ignored) = read(chat, &body).unwrap();
    let Settings { sampling, seed, stop, constraint, stream, .. } = job.wanted.settings;
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (Some(0.5), Some(3), Some(0.9)));
    assert_eq!((sampling.min_p, sampling.typical_p, sampling.repeat_penalty), (Some(0.1), Some(0.8), Some(1.1)));
    assert_eq!((sampling.repeat_last_n, sampling.presence_penalty), (Some(5), Some(0.25)));
    assert_eq!((sampling.frequency_penalty, sampling.mirostat.is_some()), (Some(0.75), true));
    assert_eq!((seed, stop, job.wanted.max_tokens, stream), (Some(7), vec!["x".to_string()], Some(9), true));
    assert!(matches!(constraint, Some(ConstraintSource::JsonSchema(_))));
    assert_eq!((ignored, job.keep_alive), (vec!["options.num_ctx".to_string()], Some(Some(Duration::from_secs(300)))));

    let unset = json!({"messages": hello(), "options": {"num_predict": -1, "seed": -1}, "format": "", "stream": false});
    let (job, ignored) = read(chat, &unset).unwrap();
    assert_eq!(
        (job.wanted.max_tokens, job.wanted.settings.seed, job.wanted.settings.stream, ignored),
        (None, None, false, vec![])
    );
    assert_eq!(job.wanted.settings.constraint, None);
}

#[test]
fn models_stay_loaded_as_long_as_a_request_says() {
    let seconds = |seconds| Some(Some(Duration::from_secs_f64(seconds)));
    struct Case(Value, Option<Option<Duration>>);
    let cases = [
        Case(Value::Null, None),
        Case(json!(0), seconds(0.0)),
        Case(json!(2.5), seconds(2.5)),
        Case(json!(-1), Some(None)),
        Case(json!("0"), seconds(0.0)),
        Case(json!("10m"), seconds(600.0)),
        Case(json!("-1"), Some(None)),
        Case(json!("-1m"), Some(None)),
    ];
    for Case(value, expected) in cases {
        let body = json!({"messages": hello(), "keep_alive": value});
        assert_eq!(read(chat, &body).unwrap().0.keep_alive, expected, "{body}");
        let mut body = Body::parse(body.to_string().as_bytes()).unwrap();
        let job = chat(&mut body, &Limits { unloads: false, ..LIMITS }).unwrap();
        let named = if value.is_null() { Vec::new() } else { vec!["keep_alive".to_string()] };
        assert_eq!((job.keep_alive, body.rest(false).unwrap()), (None, named), "{value}");
    }
    for wrong in [json!("soon"), json!("-"), json!({}), json!(true)] {
        let error = read(chat, &json!({"messages": hello(), "keep_alive": wrong})).err().unwrap();
        assert_eq!(error.param.as_deref(), Some("keep_alive"), "{wrong}");
    }
}

#[test]
fn messages_and_reasoning_are_those_of_chat_completions() {
    let call = json!({"function": {"name": "f", "arguments": {"x": 1}}});
    let body = json!({"messages": [
        {"role": "user", "content": "Hi", "images": []},
        {"role": "assistant", "thinking": "why", "tool_calls": [call]},
        {"role": "tool", "tool_name": "f", "content": "5"},
    ], "think": "low"});
    let (job, _) = read(chat, &body).unwrap();
    let [PromptSource::Chat(chat)] = &job.wanted.sources[..] else { panic!("{:?}", job.wanted.sources) };
    let [_, assistant, tool] = &chat.messages[..] else { panic!("{:?}", chat.messages) };
    assert_eq!((assistant.content.as_str(), assistant.reasoning_content.as_deref()), ("", Some("why")));
    assert_eq!(assistant.tool_calls[0].function.name, "f");
    assert_eq!((tool.name.as_deref(), tool.content.as_str()), (Some("f"), "5"));
    assert_eq!(json!(chat.options.variables), json!({"enable_thinking": true, "reasoning_effort": "low"}));
}

#[test]
fn a_text_is_a_conversation_unless_it_is_raw() {
    struct Case(Value, &'static str);
    let cases = [
        Case(json!({"prompt": "Hi"}), "either"),
        Case(json!({"prompt": "Hi", "raw": true}), "text"),
        Case(json!({"prompt": "Hi", "system": "s"}), "chat"),
        Case(
            json!({"prompt": "Hi", "system": "", "suffix": "", "images": [], "template": "", "context": []}),
            "either",
        ),
        Case(json!({"prompt": "Hi", "suffix": "bye"}), "gap"),
        Case(json!({"suffix": "bye", "raw": true}), "gap"),
        Case(json!({"prompt": ""}), "none"),
        Case(json!({"keep_alive": 0}), "none"),
    ];
    for Case(body, expected) in cases {
        let (job, _) = read(generate, &body).unwrap_or_else(|e| panic!("{body}: {e:?}"));
        let found = match &job.wanted.sources[..] {
            [] => "none",
            [PromptSource::Text(..)] => "text",
            [PromptSource::Chat(_)] => "chat",
            [PromptSource::TextOrChat(..)] => "either",
            [PromptSource::Gap(_)] => "gap",
            _ => "another",
        };
        assert_eq!(found, expected, "{body}");
    }
    assert!(read(chat, &json!({})).unwrap().0.wanted.sources.is_empty(), "a request without messages loads the model");
}

#[test]
fn wrong_requests_are_refused_by_the_name_of_their_field() {
    let with = |name: &str, value: Value| {
        let mut body = json!({"messages": hello()});
        body[name] = value;
        body
    };
    let message = |message: Value| json!({"messages": [message]});
    let call = |call: Value| message(json!({"role": "assistant", "tool_calls": [call]}));
    let cases = [
        (with("format", json!("xml")), "format"),
        (with("think", json!("much")), "think"),
        (with("think", json!(1)), "think"),
        (with("options", json!([])), "options"),
        (with("options", json!({"temperature": "hot"})), "temperature"),
        (with("stream", json!("yes")), "stream"),
        (with("keep_alive", json!([])), "keep_alive"),
        (with("logprobs", json!(true)), "logprobs"),
        (with("messages", json!("x")), "messages"),
        (message(json!("x")), "messages[0]"),
        (message(json!({"role": "user", "content": "x", "images": ["aGk="]})), "messages[0].images"),
        (message(json!({"role": "user", "content": "x", "images": "aGk="})), "messages[0].images"),
        (call(json!({})), "messages[0].tool_calls[0].function"),
        (call(json!({"function": {}})), "messages[0].tool_calls[0].function.name"),
        (call(json!({"function": {"name": "f", "arguments": "{}"}})), "messages[0].tool_calls[0].function.arguments"),
    ];
    for (body, field) in cases {
        let error = read(chat, &body).err().unwrap_or_else(|| panic!("{body}"));
        assert_eq!(error.param.as_deref(), Some(field), "{body}: {error:?}");
    }
    let cases = [
        (json!({"prompt": "x", "images": ["aGk="]}), "images"),
        (json!({"prompt": ["x", "y"]}), "prompt"),
        (json!({"prompt": "x", "template": "{{ .Prompt }}"}), "template"),
        (json!({"prompt": "x", "context": [1]}), "context"),
        (json!({"prompt": "x", "raw": 1}), "raw"),
    ];
    for (body, field) in cases {
        let error = read(generate, &body).err().unwrap_or_else(|| panic!("{body}"));
        assert_eq!(error.param.as_deref(), Some(field), "{body}: {error:?}");
    }
}

/// Streams pieces, then the end; returns the lines and the whole answer.
fn streamed(kind: Endpoint, batches: Vec<Vec<Piece>>, finish: Finish) -> (Vec<Value>, Value) {
    let mut prepared = Prepared { prompts: vec![vec![1; 7]], ..Prepared::default() };
    let (mut form, mut events) = (OllamaAnswer::of(kind, "m".into(), false, &mut prepared), Events::new(true));
    for pieces in batches {
        form.apply(pieces, &mut events);
    }
    form.done(done(finish, None), &mut events).unwrap();
    form.end(&mut events);
    let lines = events.take();
    assert!(lines.ends_with('\n'));
    (lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect(), form.body())
}

/// Joins the texts of lines at a place.
fn joined(lines: &[Value], place: &str) -> String {
    lines.iter().filter_map(|line| line.pointer(place)?.as_str()).collect()
}

#[test]
fn a_call_is_sent_as_a_whole_and_the_last_line_has_the_numbers() {
    let begin = Piece::CallBegin { index: 0, id: "call_1".into(), name: "f".into() };
    let arguments = |text: &str| vec![Piece::CallArguments { index: 0, text: text.into() }];
    let batches = vec![vec![Piece::Reasoning("r".into())], vec![begin], arguments("{\"x\""), arguments(": 1}")];
    let (lines, whole) = streamed(Endpoint::Chat, batches, Finish::Eos);
    let call = json!({"id": "call_1", "function": {"name": "f", "arguments": {"x": 1}}});
    let messages: Vec<&Value> = lines.iter().map(|line| &line["message"]).collect();
    assert_eq!(messages[0], &json!({"role": "assistant", "content": "", "thinking": "r"}));
    assert_eq!(messages[1]["tool_calls"], json!([call]));
    let last = lines.last().unwrap();
    assert_eq!((lines.len(), &last["done"], &last["done_reason"]), (3, &json!(true), &json!("stop")));
    assert_eq!((&last["prompt_eval_count"], &last["load_duration"]), (&json!(7), &json!(0)));
    assert!(lines[..2].iter().all(|line| line["done"] == false && line["model"] == "m"));
    let expected = json!({"role": "assistant", "content": "", "thinking": "r", "tool_calls": [call]});
    assert_eq!(whole["message"], expected);
    let created = whole["created_at"].as_str().unwrap();
    assert!(created.len() == 30 && created.ends_with('Z'), "{created}");
}

#[test]
fn a_request_that_only_loads_says_so() {
    let form = || OllamaAnswer::of(Endpoint::Generate, "m".into(), false, &mut Prepared::default());
    let mut events = Events::new(true);
    form().end(&mut events);
    let line: Value = serde_json::from_str(&events.take()).unwrap();
    for object in [line, form().body()] {
        assert_eq!((&object["response"], &object["done_reason"]), (&json!(""), &json!("load")));
        assert_eq!(object.get("eval_count"), None);
    }
    form().fail(&ApiError::invalid("it broke"), &mut events);
    assert_eq!(events.take(), "{\"error\":\"it broke\"}\n");
}

proptest! {
    #[test]
    fn the_lines_of_a_stream_are_the_whole_answer(batches in any_pieces(), ends: bool) {
        let finish = if ends { Finish::Eos } else { Finish::Length };
        for (kind, text, thinking) in [
            (Endpoint::Chat, "/message/content", "/message/thinking"),
            (Endpoint::Generate, "/response", "/thinking"),
        ] {
            let (lines, whole) = streamed(kind, batches.clone(), finish);
            let found = |place: &str| whole.pointer(place).and_then(Value::as_str).unwrap_or_default().to_string();
            prop_assert_eq!(joined(&lines, text), found(text));
            prop_assert_eq!(joined(&lines, thinking), found(thinking));
            let calls: Vec<&Value> =
                lines.iter().filter_map(|line| line.pointer("/message/tool_calls")?.as_array()).flatten().collect();
            let all = whole.pointer("/message/tool_calls").and_then(Value::as_array);
            if kind == Endpoint::Chat {
                prop_assert_eq!(calls, all.into_iter().flatten().collect::<Vec<_>>());
            }
            prop_assert_eq!(&lines.last().unwrap()["done_reason"], &whole["done_reason"]);
        }
    }
}
