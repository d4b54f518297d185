//! What an answer of any endpoint says: reasoning, content and calls, from the whole body and from a stream.

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
