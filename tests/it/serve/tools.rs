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
    assert!(arguments["a"] == 1 || arguments["a"] == 2, "{arguments}");
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
