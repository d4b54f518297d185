//! Reads answers of all endpoints into one form: reasoning, content and calls, from a whole body and from a stream.

use super::client::Server;
use serde_json::{Value, json};

/// Reasoning, content, calls and the reason of the end.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Said {
    pub reasoning: String,
    pub content: String,
    /// Name and arguments of each call.
    pub calls: Vec<(String, String)>,
    pub finish: String,
}

impl Said {
    /// An answer that ends by itself.
    pub fn text(content: &str) -> Said {
        Said { content: content.into(), finish: "stop".into(), ..Said::default() }
    }

    /// An answer that ends with calls.
    pub fn calls(calls: &[(&str, &str)]) -> Said {
        let calls = calls.iter().map(|(name, arguments)| (name.to_string(), arguments.to_string())).collect();
        Said { calls, finish: "tool_calls".into(), ..Said::default() }
    }

    pub fn reasoning(mut self, text: &str) -> Said {
        self.reasoning = text.into();
        self
    }

    pub fn content(mut self, text: &str) -> Said {
        self.content = text.into();
        self
    }

    /// Reads an answer of `/v1/chat/completions`.
    pub fn of_chat(answer: &Value) -> Said {
        let choice = &answer["choices"][0];
        let message = &choice["message"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        let call = |call: &Value| {
            assert!(call["id"].as_str().is_some_and(|id| !id.is_empty()) && call["type"] == "function", "{call}");
            (text(&call["function"]["name"]), text(&call["function"]["arguments"]))
        };
        Said {
            reasoning: text(&message["reasoning_content"]),
            content: text(&message["content"]),
            calls: message["tool_calls"].as_array().into_iter().flatten().map(call).collect(),
            finish: text(&choice["finish_reason"]),
        }
    }

    /// Joins the events of a stream of `/v1/chat/completions`.
    pub fn of_chunks(events: &[Value]) -> Said {
        let mut said = Said::default();
        for event in events {
            let choice = &event["choices"][0];
            let delta = &choice["delta"];
            said.reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
            said.content += delta["content"].as_str().unwrap_or_default();
            for piece in delta["tool_calls"].as_array().into_iter().flatten() {
                let index = piece["index"].as_u64().unwrap() as usize;
                if let Some(name) = piece["function"]["name"].as_str() {
                    assert!(index == said.calls.len() && piece["id"].is_string(), "{piece}");
                    said.calls.push((name.into(), String::new()));
                }
                said.calls[index].1 += piece["function"]["arguments"].as_str().unwrap_or_default();
            }
            if let Some(finish) = choice["finish_reason"].as_str() {
                assert_eq!(said.finish, "", "nothing follows the end");
                said.finish = finish.into();
            }
        }
        said
    }
}

/// Posts a request to `/v1/chat/completions`, once for a whole answer and once for a stream. The sampling is greedy.
pub fn chat_both(server: &Server, body: &Value) -> (Said, Said) {
    let mut body = body.clone();
    body["temperature"] = json!(0);
    let whole = Said::of_chat(&server.ask("/v1/chat/completions", &body));
    body["stream"] = json!(true);
    let response = server.post("/v1/chat/completions", &body);
    assert_eq!(response.status, 200, "{body}: {}", response.body);
    (whole, Said::of_chunks(&response.events()))
}

/// Posts a request as [`chat_both`] does, and checks that both forms say the same.
pub fn chat(server: &Server, body: &Value) -> Said {
    let (whole, stream) = chat_both(server, body);
    assert_eq!(whole, stream, "the stream says something else: {body}");
    whole
}

/// Returns a request of chat completions in the form of another endpoint.
fn converted(body: &Value, messages: &str, most: &str, tool: impl Fn(&Value) -> Value) -> Value {
    let mut body = body.clone();
    body["temperature"] = json!(0);
    let object = body.as_object_mut().unwrap();
    for (from, to) in [("messages", messages), ("max_tokens", most)] {
        if let Some(value) = object.remove(from) {
            object.insert(to.into(), value);
        }
    }
    if let Some(tools) = object.get_mut("tools") {
        *tools = tools.as_array().unwrap().iter().map(|given| tool(&given["function"])).collect();
    }
    body
}

/// Returns the data of the named events of a stream.
fn named_events(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let response = server.post(path, &body);
    assert_eq!(response.status, 200, "{body}: {}", response.body);
    let data = response.body.split("\n\n").filter_map(|event| Some(event.split_once("data: ")?.1));
    data.filter(|data| data.starts_with('{')).map(|data| serde_json::from_str(data).unwrap()).collect()
}

/// Posts a request of chat completions as one to `/v1/responses`, whole and streamed.
pub fn responses_both(server: &Server, body: &Value) -> (Said, Said) {
    let tool = |function: &Value| {
        let parameters = &function["parameters"];
        json!({"type": "function", "name": function["name"], "parameters": parameters, "strict": false})
    };
    let body = converted(body, "input", "max_output_tokens", tool);
    let of_items = |answer: &Value| {
        let mut said = Said { finish: "stop".into(), ..Said::default() };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        for item in answer["output"].as_array().unwrap() {
            match item["type"].as_str().unwrap() {
                "reasoning" => said.reasoning += &text(&item["content"][0]["text"]),
                "message" => said.content += &text(&item["content"][0]["text"]),
                _ => {
                    said.calls.push((text(&item["name"]), text(&item["arguments"])));
                    said.finish = "tool_calls".into();
                }
            }
        }
        said
    };
    let whole = of_items(&server.ask("/v1/responses", &body));
    let events = named_events(server, "/v1/responses", &body);
    let mut stream = of_items(&events.last().unwrap()["response"]);
    // The pieces are compared with the items at the end.
    let joined = |kind: &str| -> String {
        events.iter().filter(|event| event["type"] == kind).filter_map(|event| event["delta"].as_str()).collect()
    };
    stream.content = joined("response.output_text.delta");
    stream.reasoning = joined("response.reasoning_text.delta");
    let arguments: String = stream.calls.iter().map(|(_, arguments)| arguments.as_str()).collect();
    assert_eq!(joined("response.function_call_arguments.delta"), arguments);
    (whole, stream)
}

/// Posts a request of chat completions as one to `/v1/messages`, whole and streamed. Arguments are objects there.
pub fn messages_both(server: &Server, body: &Value) -> (Said, Said) {
    let tool = |function: &Value| json!({"name": function["name"], "input_schema": function["parameters"]});
    let body = converted(body, "messages", "max_tokens", tool);
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let finish = |reason: &Value| if reason == "tool_use" { "tool_calls" } else { "stop" }.to_string();
    let answer = server.ask("/v1/messages", &body);
    let mut whole = Said { finish: finish(&answer["stop_reason"]), ..Said::default() };
    for block in answer["content"].as_array().unwrap() {
        match block["type"].as_str().unwrap() {
            "thinking" => whole.reasoning += &text(&block["thinking"]),
            "text" => whole.content += &text(&block["text"]),
            _ => whole.calls.push((text(&block["name"]), spaced(&block["input"]))),
        }
    }
    let mut stream = Said::default();
    for event in named_events(server, "/v1/messages", &body) {
        let delta = &event["delta"];
        match event["type"].as_str().unwrap() {
            "content_block_start" if event["content_block"]["type"] == "tool_use" => {
                stream.calls.push((text(&event["content_block"]["name"]), String::new()));
            }
            "content_block_delta" => {
                stream.reasoning += &text(&delta["thinking"]);
                stream.content += &text(&delta["text"]);
                if let Some(piece) = delta["partial_json"].as_str() {
                    stream.calls.last_mut().unwrap().1 += piece;
                }
            }
            "message_delta" => stream.finish = finish(&delta["stop_reason"]),
            _ => {}
        }
    }
    (whole, stream)
}

/// Returns an object of texts and numbers with spaces behind its separators.
fn spaced(object: &Value) -> String {
    let members = object.as_object().unwrap().iter().map(|(key, value)| format!("\"{key}\": {value}"));
    format!("{{{}}}", members.collect::<Vec<_>>().join(", "))
}
