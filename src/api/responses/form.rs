//! Answer of `/v1/responses`: a list of items (reasoning, messages, function calls), and the events that build it.

use crate::api::answer::{Usage, failure, finish_reason, hides_end, likelihood};
use crate::api::error::{ApiError, ApiResult};
use crate::api::form::{Events, Form};
use crate::api::job::Named;
use crate::api::parts::{Change, OutputPart, PartKind, Parts};
use crate::api::prepare::{Plan, Prepared};
use crate::host::model::Facts;
use crate::host::reply::{Done, Token};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Answer of the endpoint.
pub struct Responses {
    named: Named,
    /// Fields of the request that the answer repeats.
    echo: Map<String, Value>,
    parts: Parts,
    probabilities: Probabilities,
    usage: Usage,
    /// Number of events so far.
    sequence: u64,
    /// Reason why the text ended; `None` while it is generated.
    finish: Option<&'static str>,
}

/// Log-probabilities of the tokens of texts.
#[derive(Default)]
struct Probabilities {
    /// Properties of the model; `None` if none are reported.
    facts: Option<Arc<Facts>>,
    /// Whether tokens are named by their ids.
    as_ids: bool,
    /// Entries of tokens whose text is not shown yet.
    waiting: Vec<Value>,
    /// Entries of each part that is a text.
    of_parts: Vec<Vec<Value>>,
}

impl Probabilities {
    fn push(&mut self, token: &Token) {
        if let (Some(facts), Some(likely)) = (&self.facts, &token.likely) {
            self.waiting.push(likelihood(facts, likely, self.as_ids));
        }
    }

    /// Gives the waiting entries to a part, and returns them.
    fn give(&mut self, part: usize) -> Vec<Value> {
        if self.waiting.is_empty() {
            return Vec::new();
        }
        if self.of_parts.len() <= part {
            self.of_parts.resize(part + 1, Vec::new());
        }
        let entries = std::mem::take(&mut self.waiting);
        self.of_parts[part].extend(entries.iter().cloned());
        entries
    }

    /// Returns the entries of a part.
    fn of(&self, part: usize) -> &[Value] {
        self.of_parts.get(part).map_or(&[], |entries| entries)
    }
}

impl Responses {
    /// Creates the answer to a request that was prepared.
    pub fn of(named: Named, mut echo: Map<String, Value>, plan: &Plan, prepared: &mut Prepared) -> Responses {
        let (own, model) = (&plan.settings.sampling, &plan.facts.sampling);
        echo.insert("temperature".into(), json!(own.temperature.unwrap_or(model.temperature)));
        echo.insert("top_p".into(), json!(own.top_p.unwrap_or(model.top_p)));
        let prompt = prepared.prompts.first().map_or(0, Vec::len);
        let mut form = Responses::new(named, echo, Parts::new(prepared.parsers.pop()), prompt);
        form.probabilities.facts = plan.logprobs.map(|_| plan.facts.clone());
        form.probabilities.as_ids = plan.settings.tokens_as_ids;
        form
    }

    fn new(named: Named, echo: Map<String, Value>, parts: Parts, prompt: usize) -> Responses {
        let usage = Usage { prompt, ..Usage::default() };
        Responses { named, echo, parts, probabilities: Probabilities::default(), usage, sequence: 0, finish: None }
    }

    /// Adds an event. `content` gives it the members besides its type and number.
    fn event(&mut self, events: &mut Events, kind: &str, content: impl FnOnce(&Responses) -> Value) {
        let number = self.sequence;
        self.sequence += 1;
        events.named(kind, || {
            let mut object = json!({"type": kind, "sequence_number": number});
            if let (Some(object), Value::Object(content)) = (object.as_object_mut(), content(self)) {
                object.extend(content);
            }
            object
        });
    }

    /// Adds the events at the beginning of the stream, once.
    fn begin(&mut self, events: &mut Events) {
        if self.sequence == 0 {
            for kind in ["response.created", "response.in_progress"] {
                self.event(events, kind, |form| json!({"response": form.response("in_progress", Vec::new())}));
            }
        }
    }

    fn changes(&mut self, changes: Vec<Change>, events: &mut Events) {
        for change in changes {
            match change {
                Change::Begin(part) => self.begin_item(part, events),
                Change::Add(part, text) => {
                    let kind = match self.parts.list()[part].kind {
                        PartKind::Reasoning => "response.reasoning_text.delta",
                        PartKind::Text => "response.output_text.delta",
                        PartKind::Call { .. } => "response.function_call_arguments.delta",
                    };
                    let entries = match self.parts.list()[part].kind {
                        PartKind::Text => self.probabilities.give(part),
                        PartKind::Reasoning | PartKind::Call { .. } => {
                            self.probabilities.waiting.clear();
                            Vec::new()
                        }
                    };
                    self.event(events, kind, |form| form.text_event(part, "delta", &text, &entries));
                }
                Change::End(part) => self.end_item(part, events),
            }
        }
    }

    fn begin_item(&mut self, part: usize, events: &mut Events) {
        let empty = OutputPart { text: String::new(), ..self.parts.list()[part].clone() };
        self.event(events, "response.output_item.added", |form| {
            let mut item = form.item(part, &empty, "in_progress");
            if empty.content_kind().is_some() {
                item["content"] = json!([]);
            }
            json!({"output_index": part, "item": item})
        });
        if empty.content_kind().is_some() {
            self.event(events, "response.content_part.added", |form| form.content_event(part, &empty));
        }
    }

    fn end_item(&mut self, part: usize, events: &mut Events) {
        let whole = self.parts.list()[part].clone();
        let (kind, name) = match whole.kind {
            PartKind::Reasoning => ("response.reasoning_text.done", "text"),
            PartKind::Text => ("response.output_text.done", "text"),
            PartKind::Call { .. } => ("response.function_call_arguments.done", "arguments"),
        };
        self.event(events, kind, |form| form.text_event(part, name, &whole.text, form.probabilities.of(part)));
        if whole.content_kind().is_some() {
            self.event(events, "response.content_part.done", |form| form.content_event(part, &whole));
        }
        self.event(
            events,
            "response.output_item.done",
            |form| json!({"output_index": part, "item": form.item(part, &whole, form.item_status(part))}),
        );
    }

    /// Returns the members of an event about the text of an item, which is the member `name`, with the entries of its
    /// tokens.
    fn text_event(&self, part: usize, name: &str, text: &str, entries: &[Value]) -> Value {
        let mut object = json!({"item_id": self.item_id(part), "output_index": part, name: text});
        let kind = &self.parts.list()[part].kind;
        match kind {
            PartKind::Call { name: function, .. } if name == "arguments" => object["name"] = json!(function),
            PartKind::Call { .. } => {}
            PartKind::Reasoning | PartKind::Text => object["content_index"] = json!(0),
        }
        if *kind == PartKind::Text {
            object["logprobs"] = json!(entries);
        }
        object
    }

    /// Returns the members of an event about the content of an item.
    fn content_event(&self, part: usize, state: &OutputPart) -> Value {
        let id = self.item_id(part);
        json!({"item_id": id, "output_index": part, "content_index": 0, "part": self.content(part, state)})
    }

    fn item_id(&self, part: usize) -> String {
        let prefix = match self.parts.list()[part].kind {
            PartKind::Reasoning => "rs",
            PartKind::Text => "msg",
            PartKind::Call { .. } => "fc",
        };
        format!("{prefix}_{}{part:04x}", self.named.id.trim_start_matches("resp_"))
    }

    /// Returns the status of an item that ended: the last one is incomplete if the answer was cut.
    fn item_status(&self, part: usize) -> &'static str {
        let is_last = part + 1 == self.parts.list().len();
        if is_last && self.finish == Some("length") { "incomplete" } else { "completed" }
    }

    /// Returns the only element of the content of an item.
    fn content(&self, part: usize, state: &OutputPart) -> Value {
        let mut content = json!({"type": state.content_kind(), "text": state.text});
        if state.kind == PartKind::Text {
            content["annotations"] = json!([]);
            // A part that begins has no text and no tokens yet.
            let entries = if state.text.is_empty() { &[] } else { self.probabilities.of(part) };
            content["logprobs"] = json!(entries);
        }
        content
    }

    fn item(&self, part: usize, state: &OutputPart, status: &str) -> Value {
        let id = self.item_id(part);
        match &state.kind {
            PartKind::Reasoning => json!({
                "id": id,
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": [self.content(part, state)],
                "encrypted_content": null,
            }),
            PartKind::Text => json!({
                "id": id,
                "type": "message",
                "status": status,
                "role": "assistant",
                "content": [self.content(part, state)],
            }),
            PartKind::Call { id: call_id, name } => json!({
                "id": id,
                "type": "function_call",
                "status": status,
                "call_id": call_id,
                "name": name,
                "arguments": state.text,
            }),
        }
    }

    fn items(&self) -> Vec<Value> {
        let item = |(i, part)| self.item(i, part, self.item_status(i));
        self.parts.list().iter().enumerate().map(item).collect()
    }

    fn response(&self, status: &str, output: Vec<Value>) -> Value {
        let mut object = json!({
            "id": self.named.id,
            "object": "response",
            "created_at": self.named.created,
            "status": status,
            "background": false,
            "error": null,
            "incomplete_details": null,
            "model": self.named.model,
            "output": output,
            "previous_response_id": null,
            "service_tier": "default",
            "store": false,
            "truncation": "disabled",
            "usage": null,
        });
        if let Some(object) = object.as_object_mut() {
            object.extend(self.echo.clone());
        }
        object
    }

    /// Returns the status of the whole answer and the answer.
    fn whole(&self) -> (&'static str, Value) {
        let is_cut = self.finish == Some("length");
        let status = if is_cut { "incomplete" } else { "completed" };
        let mut response = self.response(status, self.items());
        if is_cut {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        let Usage { prompt, generated, cached } = self.usage;
        response["usage"] = json!({
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": self.parts.reasoning_tokens()},
            "total_tokens": prompt + generated,
        });
        (status, response)
    }
}

impl OutputPart {
    /// Returns the type of the content of the item; a call has none.
    fn content_kind(&self) -> Option<&'static str> {
        match self.kind {
            PartKind::Reasoning => Some("reasoning_text"),
            PartKind::Text => Some("output_text"),
            PartKind::Call { .. } => None,
        }
    }
}

/// Returns the name of an error within an answer.
fn error_code(error: &ApiError) -> &'static str {
    match (error.status.as_u16(), error.code) {
        (429, _) => "rate_limit_exceeded",
        (400, Some(code)) => code,
        (400, None) => "invalid_prompt",
        _ => "server_error",
    }
}

impl Form for Responses {
    fn token(&mut self, token: Token, events: &mut Events) {
        self.begin(events);
        self.usage.generated += 1;
        self.probabilities.push(&token);
        let changes = self.parts.push(token.id, &token.text);
        self.changes(changes, events);
    }

    fn done(&mut self, done: Done, events: &mut Events) -> ApiResult<()> {
        if let Some(error) = failure(&done.completion) {
            return Err(error);
        }
        self.begin(events);
        self.usage.cached = done.completion.reused_tokens;
        if hides_end(done.completion.finish) {
            self.probabilities.waiting.clear();
        }
        self.finish = Some(finish_reason(done.completion.finish));
        let changes = self.parts.finish(self.finish == Some("length"));
        self.changes(changes, events);
        Ok(())
    }

    fn end(&mut self, events: &mut Events) {
        let (status, response) = self.whole();
        self.event(events, &format!("response.{status}"), |_| json!({"response": response}));
    }

    /// Ends the stream with the event `error`, which has the members of this API and the object from which clients of
    /// OpenAI make an exception, and with `response.failed`.
    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        self.begin(events);
        self.event(events, "error", |_| {
            let mut object = error.to_json();
            for name in ["code", "message", "param"] {
                object[name] = object["error"][name].clone();
            }
            object
        });
        self.event(events, "response.failed", |form| {
            let mut response = form.response("failed", form.items());
            response["error"] = json!({"code": error_code(error), "message": error.message});
            json!({"response": response})
        });
    }

    fn body(&mut self) -> Value {
        self.whole().1
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn finish(&self) -> &'static str {
        match self.finish {
            Some("stop") if self.parts.has_calls() => "tool_calls",
            other => other.unwrap_or("none"),
        }
    }
}

#[cfg(test)]
#[path = "form_tests.rs"]
mod tests;
