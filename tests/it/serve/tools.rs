//! Calls of tools: the model must call, its arguments follow the schema, and streams have the same calls.

use super::client::Server;
use serde_json::{Value, json};

/// Template of the embedded model with a place for tools, in the format of Hermes.
const TEMPLATE: &str = "{{ bos_token }}{% if tools %}<tools>\
    {% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>\
    <tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>{% endif %}\
    {% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n\
    {\"name\": \"{{ call.function.name }}\", \"arguments\": {{ call.function.arguments | tojson }}}\n</tool_call>\
    {% endfor %}{% endfor %}";

fn server() -> (tempfile::TempDir, Server) {
    let home = super::client::story_pack(2048);
    std::fs::write(home.path().join("pack/chat_template.jinja"), TEMPLATE).unwrap();
    let server = Server::start(&[&home.path().join("pack").display().to_string()]);
    (home, server)
}

fn body(choice: Value) -> Value {
    let parameters = json!({"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
                            "required": ["a", "b"], "additionalProperties": false});
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    json!({"messages": [{"role": "user", "content": "Once"}], "tools": [tool("first"), tool("second")],
           "tool_choice": choice, "parallel_tool_calls": false, "max_tokens": 200, "seed": 3})
}

fn check(call: &Value, name: Option<&str>) {
    let function = &call["function"];
    match name {
        Some(name) => assert_eq!(function["name"], name),
        None => assert!(["first", "second"].contains(&function["name"].as_str().unwrap())),
    }
    let arguments: Value = serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments["a"].as_f64().is_some_and(|a| a == 1.0 || a == 2.0), "{arguments}");
    assert!(arguments["b"].is_boolean() && arguments.as_object().unwrap().len() == 2, "{arguments}");
    assert!(!call["id"].as_str().unwrap().is_empty());
}

#[test]
fn a_call_that_is_asked_for_comes_with_valid_arguments() {
    let (_home, server) = server();
    let named = json!({"type": "function", "function": {"name": "second"}});
    for (choice, name) in [(json!("required"), None), (named, Some("second"))] {
        let whole = server.ask("/v1/chat/completions", &body(choice.clone()));
        let choice_of = &whole["choices"][0];
        assert_eq!(choice_of["finish_reason"], "tool_calls", "{whole}");
        let calls = choice_of["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1);
        check(&calls[0], name);
        let mut stream = body(choice);
        stream["stream"] = json!(true);
        let events = server.post("/v1/chat/completions", &stream).events();
        let (mut call, mut arguments) = (Value::Null, String::new());
        for piece in events.iter().flat_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array()).flatten() {
            if piece["id"].is_string() {
                call = piece.clone();
            }
            arguments += piece["function"]["arguments"].as_str().unwrap();
        }
        assert_eq!(call["function"]["name"], calls[0]["function"]["name"]);
        assert_eq!(arguments, calls[0]["function"]["arguments"].as_str().unwrap());
        assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    }
}

#[test]
fn results_of_calls_reach_the_template() {
    let (_home, server) = server();
    let call = json!({"id": "c1", "type": "function", "function": {"name": "first", "arguments": "{\"a\": 1}"}});
    let messages = json!([{"role": "user", "content": "x"},
                          {"role": "assistant", "content": null, "tool_calls": [call]},
                          {"role": "tool", "tool_call_id": "c1", "content": "42"}]);
    let tokens = server.ask("/tokenize", &json!({"messages": messages}));
    let text = server.ask("/detokenize", &json!({"tokens": tokens["tokens"], "skip_special_tokens": true}));
    let text = text["prompt"].as_str().unwrap();
    assert!(text.contains("\"name\": \"first\", \"arguments\": {\"a\": 1}") && text.ends_with("42"), "{text}");
}

/// A schema with a part that cannot be enforced, and a place for `strict`.
fn tags() -> Value {
    json!({"type": "object", "properties": {"tags": {"type": "array", "items": {"enum": ["x"]}, "maxItems": 1,
           "uniqueItems": true}}, "required": ["tags"], "additionalProperties": false})
}

#[test]
fn schemas_are_hints_unless_they_are_strict() {
    let (_home, server) = server();
    let message = json!([{"role": "user", "content": "Once"}]);
    let function = |strict: Value| json!({"name": "f", "parameters": tags(), "strict": strict});
    let tool = |strict: Value| json!({"type": "function", "function": function(strict)});
    let plain = json!({"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}});
    let chat = |strict: Value| {
        json!({"messages": message, "tools": [plain, tool(strict)], "max_tokens": 200,
        "tool_choice": {"type": "function", "function": {"name": "f"}}})
    };
    let flat = |strict: Value| {
        json!({"input": "Once", "max_output_tokens": 200,
        "tools": [{"type": "function", "name": "f", "parameters": tags(), "strict": strict}],
        "tool_choice": {"type": "function", "name": "f"}})
    };
    let messages = |strict: Value| {
        json!({"messages": message, "max_tokens": 200, "tool_choice": {"type": "tool", "name": "f"},
        "tools": [{"name": "f", "input_schema": tags(), "strict": strict}]})
    };
    let format = |strict: Value| {
        json!({"messages": message, "max_tokens": 200, "response_format":
        {"type": "json_schema", "json_schema": {"name": "n", "schema": tags(), "strict": strict}}})
    };
    struct Case<'a>(&'a str, &'a dyn Fn(Value) -> Value, &'a str, &'a str);
    let cases = [
        Case("chat/completions", &chat, "tools[1].function.parameters", "tools[1].function.parameters"),
        Case("responses", &flat, "tools[0].parameters", "tools[0].parameters"),
        Case("messages", &messages, "tools[0].input_schema", "tools[0].input_schema"),
        Case("chat/completions", &format, "response_format", "response_format.json_schema.schema"),
    ];
    for Case(path, body, param, schema) in cases {
        let path = format!("/v1/{path}");
        for lax in [Value::Null, json!(false)] {
            let answer = server.post(&path, &body(lax));
            let left_out = format!("{schema}.properties.tags.uniqueItems");
            assert_eq!((answer.status, answer.header("x-iec-ignored")), (200, Some(left_out.as_str())), "{path}");
            assert!(answer.json().to_string().contains("tags"), "{path}: {}", answer.json());
        }
        let refused = server.post(&path, &body(json!(true)));
        let message = refused.json()["error"]["message"].to_string();
        assert_eq!(refused.status, 400, "{path}: {message}");
        assert!(message.contains("`uniqueItems` at #/properties/tags") && !message.contains("grammar"), "{message}");
        if path != "/v1/messages" {
            assert_eq!(refused.json()["error"]["param"], param, "{path}");
        }
        if path != "/v1/chat/completions" || schema.starts_with("tools") {
            assert!(message.contains(schema), "{message}");
        }
    }
}

#[test]
fn answers_end_behind_calls_that_are_required() {
    let (_home, server) = server();
    for parallel in [true, false] {
        let mut required = body(json!("required"));
        required["parallel_tool_calls"] = json!(parallel);
        // The model writes stories: nothing else would end its answer.
        required["temperature"] = json!(0);
        let answer = server.ask("/v1/chat/completions", &required);
        let choice = &answer["choices"][0];
        let calls = choice["message"]["tool_calls"].as_array().unwrap();
        // The largest number of tokens may end the beginning of another call.
        let content = choice["message"]["content"].as_str().unwrap_or("").trim();
        assert!(!calls.is_empty() && "<tool_call>".starts_with(content), "{choice}");
        calls.iter().for_each(|call| check(call, None));
        if !parallel {
            assert_eq!((choice["finish_reason"].as_str(), calls.len()), (Some("tool_calls"), 1), "{choice}");
        }
    }
}

#[test]
fn texts_with_slow_masks_and_others_are_generated_side_by_side() {
    let (_home, server) = server();
    let ambiguous = json!({"prompt": "Once", "max_tokens": 40, "temperature": 0,
        "structured_outputs": {"grammar": "start: e\ne: e e e | e e | \"a\" | \"b\""}});
    let plain = json!({"prompt": "Once", "max_tokens": 40, "temperature": 0});
    let [slow, quick] =
        [&ambiguous, &plain].map(|body| server.ask("/v1/completions", body)["choices"][0]["text"].clone());
    assert_eq!(slow.as_str().unwrap().trim_matches(['a', 'b']), "", "{slow}");
    std::thread::scope(|scope| {
        let all: Vec<_> = [&ambiguous, &plain, &ambiguous, &plain]
            .map(|body| scope.spawn(|| server.ask("/v1/completions", body)["choices"][0]["text"].clone()))
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect();
        assert_eq!(all, [slow.clone(), quick.clone(), slow.clone(), quick.clone()]);
    });
}
