//! Answer of `/v1/messages`: a message of content blocks (thinking, text, calls of tools), and the events that build
//! it.

use crate::api::answer::{Usage, failure, finish_reason};
use crate::api::error::{ApiError, ApiResult};
use crate::api::form::{Events, Form};
use crate::api::job::Named;
use crate::api::parts::{Change, OutputPart, PartKind, Parts};
use crate::api::prepare::{Plan, Prepared};
use crate::generate::Finish;
use crate::host::reply::{Done, Token};
use serde_json::{Value, json};

/// Answer of the endpoint.
pub struct AnthropicMessage {
    named: Named,
    /// Stop texts of the client. The template may have further ones.
    stops: Vec<String>,
    parts: Parts,
    usage: Usage,
    begun: bool,
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
}

impl AnthropicMessage {
    /// Creates the answer to a request that was prepared.
    pub fn of(named: Named, plan: &Plan, prepared: &mut Prepared) -> AnthropicMessage {
        let prompt = prepared.prompts.first().map_or(0, Vec::len);
        AnthropicMessage::new(named, plan.settings.stop.clone(), Parts::new(prepared.parsers.pop()), prompt)
    }

    fn new(named: Named, stops: Vec<String>, parts: Parts, prompt: usize) -> AnthropicMessage {
        let usage = Usage { prompt, ..Usage::default() };
        AnthropicMessage { named, stops, parts, usage, begun: false, stop_reason: None, stop_sequence: None }
    }

    fn message(&self, content: Vec<Value>) -> Value {
        json!({
            "id": self.named.id,
            "type": "message",
            "role": "assistant",
            "model": self.named.model,
            "content": content,
            "stop_reason": self.stop_reason,
            "stop_sequence": self.stop_sequence,
            "usage": self.usage_json(),
        })
    }

    /// Returns the number of tokens. Those of the prompt that came from the prefix cache are counted apart.
    fn usage_json(&self) -> Value {
        let Usage { prompt, generated, cached } = self.usage;
        json!({
            "input_tokens": prompt.saturating_sub(cached),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": generated,
            "output_tokens_details": {"thinking_tokens": self.parts.reasoning_tokens()},
        })
    }

    /// Adds the events at the beginning of the stream, once.
    fn begin(&mut self, events: &mut Events) {
        if !std::mem::replace(&mut self.begun, true) {
            event(events, "message_start", || json!({"message": self.message(Vec::new())}));
            event(events, "ping", || json!({}));
        }
    }

    fn changes(&self, changes: Vec<Change>, events: &mut Events) {
        for change in changes {
            match change {
                Change::Begin(part) => {
                    let empty = OutputPart { text: String::new(), ..self.parts.list()[part].clone() };
                    event(events, "content_block_start", || json!({"index": part, "content_block": block(&empty)}));
                }
                Change::Add(part, text) => self.delta(part, &text, events),
                Change::End(part) => {
                    // Clients keep a thinking block for the next request when its signature has come.
                    if self.parts.list()[part].kind == PartKind::Reasoning {
                        let delta = json!({"type": "signature_delta", "signature": ""});
                        event(events, "content_block_delta", || json!({"index": part, "delta": delta}));
                    }
                    event(events, "content_block_stop", || json!({"index": part}));
                }
            }
        }
    }

    fn delta(&self, part: usize, text: &str, events: &mut Events) {
        let delta = match self.parts.list()[part].kind {
            PartKind::Reasoning => json!({"type": "thinking_delta", "thinking": text}),
            PartKind::Text => json!({"type": "text_delta", "text": text}),
            PartKind::Call { .. } => json!({"type": "input_json_delta", "partial_json": text}),
        };
        event(events, "content_block_delta", || json!({"index": part, "delta": delta}));
    }
}

/// Adds an event whose object has the name of the event as its type.
fn event(events: &mut Events, name: &str, content: impl FnOnce() -> Value) {
    events.named(name, || {
        let mut object = json!({"type": name});
        if let (Some(object), Value::Object(content)) = (object.as_object_mut(), content()) {
            object.extend(content);
        }
        object
    });
}

/// Returns a content block. Arguments that were cut are no JSON; the block then has none.
fn block(part: &OutputPart) -> Value {
    match &part.kind {
        PartKind::Reasoning => json!({"type": "thinking", "thinking": part.text, "signature": ""}),
        PartKind::Text => json!({"type": "text", "text": part.text}),
        PartKind::Call { id, name } => {
            let input = serde_json::from_str(&part.text).ok().filter(Value::is_object).unwrap_or_else(|| json!({}));
            json!({"type": "tool_use", "id": id, "name": name, "input": input})
        }
    }
}

impl Form for AnthropicMessage {
    fn token(&mut self, token: Token, events: &mut Events) {
        self.begin(events);
        self.usage.generated += 1;
        let changes = self.parts.push(token.id, &token.text);
        self.changes(changes, events);
    }

    fn done(&mut self, done: Done, events: &mut Events) -> ApiResult<()> {
        let completion = done.completion;
        if let Some(error) = failure(&completion) {
            return Err(error);
        }
        self.begin(events);
        let changes = self.parts.finish(finish_reason(completion.finish) == "length");
        self.changes(changes, events);
        self.usage.cached = completion.reused_tokens;
        self.stop_sequence = completion.stopped_by.filter(|stop| self.stops.contains(stop));
        self.stop_reason = Some(match completion.finish {
            finish if finish_reason(finish) == "length" => "max_tokens",
            Finish::Stop if self.stop_sequence.is_some() => "stop_sequence",
            _ if self.parts.has_calls() => "tool_use",
            _ => "end_turn",
        });
        Ok(())
    }

    fn end(&mut self, events: &mut Events) {
        let delta = json!({"stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence});
        event(events, "message_delta", || json!({"delta": delta, "usage": self.usage_json()}));
        event(events, "message_stop", || json!({}));
    }

    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        events.named("error", || error.to_anthropic());
    }

    fn body(&mut self) -> Value {
        self.message(self.parts.list().iter().map(block).collect())
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn finish(&self) -> &'static str {
        self.stop_reason.unwrap_or("none")
    }
}

#[cfg(test)]
#[path = "form_tests.rs"]
mod tests;
