//! Answers of `/api/chat` and `/api/generate`: one JSON object per line, the last with the numbers of tokens and times
//! in nanoseconds.

use crate::api::answer::{Usage, failure, finish_reason};
use crate::api::error::{ApiError, ApiResult};
use crate::api::form::{Events, Form, Framing};
use crate::api::parts::{Change, OutputPart, PartKind, Parts};
use crate::api::prepare::Prepared;
use crate::api::style::Style;
use crate::generate::text::strftime;
use crate::host::reply::{Done, Token};
use serde_json::{Value, json};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Endpoint of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    /// `/api/chat`, whose answers are messages.
    Chat,
    /// `/api/generate`, whose answers are texts.
    Generate,
}

/// Answer of either endpoint.
pub struct OllamaAnswer {
    kind: Endpoint,
    /// Name of the model, as the client wrote it.
    model: String,
    parts: Parts,
    usage: Usage,
    begin: Instant,
    prefill: Duration,
    decode: Duration,
    /// Reason why the text ended; that of a request without a text at first.
    done_reason: &'static str,
}

impl OllamaAnswer {
    /// Creates the answer to a request that was prepared.
    pub fn of(kind: Endpoint, model: String, unloads: bool, prepared: &mut Prepared) -> OllamaAnswer {
        let usage = Usage { prompt: prepared.prompts.first().map_or(0, Vec::len), ..Usage::default() };
        let parts = Parts::new(prepared.parsers.pop());
        let (prefill, decode) = (Duration::ZERO, Duration::ZERO);
        let done_reason = if unloads { "unload" } else { "load" };
        OllamaAnswer { kind, model, parts, usage, begin: Instant::now(), prefill, decode, done_reason }
    }

    /// Builds an object with a text, reasoning and calls.
    fn object(&self, text: &str, thinking: &str, calls: &[Value]) -> Value {
        let mut object = json!({"model": self.model, "created_at": now(), "done": false});
        let mut message = match self.kind {
            Endpoint::Chat => json!({"role": "assistant", "content": text}),
            Endpoint::Generate => json!({"response": text}),
        };
        if !thinking.is_empty() {
            message["thinking"] = json!(thinking);
        }
        if !calls.is_empty() {
            message["tool_calls"] = json!(calls);
        }
        match (self.kind, object.as_object_mut(), message) {
            (Endpoint::Generate, Some(members), Value::Object(message)) => members.extend(message),
            (_, Some(members), message) => _ = members.insert("message".into(), message),
            (_, None, _) => {}
        }
        object
    }

    /// Adds what the end of an answer tells to an object.
    fn finished(&self, mut object: Value) -> Value {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        object["done"] = json!(true);
        object["done_reason"] = json!(self.done_reason);
        object["total_duration"] = json!(nanos(self.begin.elapsed()));
        object["load_duration"] = json!(0);
        if !matches!(self.done_reason, "load" | "unload") {
            object["prompt_eval_count"] = json!(self.usage.prompt);
            object["prompt_eval_duration"] = json!(nanos(self.prefill));
            object["eval_count"] = json!(self.usage.generated);
            object["eval_duration"] = json!(nanos(self.decode));
        }
        object
    }

    /// Takes pieces of the output.
    #[cfg(test)]
    pub fn apply(&mut self, pieces: Vec<crate::api::text::Piece>, events: &mut Events) {
        let changes = self.parts.apply(pieces);
        self.changes(changes, events);
    }

    fn changes(&self, changes: Vec<Change>, events: &mut Events) {
        for change in changes {
            match change {
                Change::Add(part, text) => match self.parts.list()[part].kind {
                    PartKind::Text => events.line(|| self.object(&text, "", &[])),
                    PartKind::Reasoning => events.line(|| self.object("", &text, &[])),
                    PartKind::Call { .. } => {}
                },
                // A call is sent as a whole.
                Change::End(part) => {
                    if let Some(call) = call(&self.parts.list()[part]) {
                        events.line(|| self.object("", "", &[call]));
                    }
                }
                Change::Begin(_) => {}
            }
        }
    }
}

/// Returns the object of a call; `None` for another part. Arguments that were cut are no JSON; the call then has none.
fn call(part: &OutputPart) -> Option<Value> {
    let PartKind::Call { id, name } = &part.kind else { return None };
    let arguments = serde_json::from_str(&part.text).ok().filter(Value::is_object).unwrap_or_else(|| json!({}));
    Some(json!({"id": id, "function": {"name": name, "arguments": arguments}}))
}

/// Returns the present time as a text like `2026-01-31T12:00:00.000000000Z`.
fn now() -> String {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = strftime(time.as_secs(), "%FT%T").unwrap_or_default();
    format!("{seconds}.{:09}Z", time.subsec_nanos())
}

impl Form for OllamaAnswer {
    fn framing(&self) -> Framing {
        Framing::Lines
    }

    fn token(&mut self, token: Token, events: &mut Events) {
        self.usage.generated += 1;
        let changes = self.parts.push(token.id, &token.text);
        self.changes(changes, events);
    }

    fn done(&mut self, done: Done, events: &mut Events) -> ApiResult<()> {
        let completion = done.completion;
        if let Some(error) = failure(&completion) {
            return Err(error);
        }
        let changes = self.parts.finish(finish_reason(completion.finish) == "length");
        self.changes(changes, events);
        self.usage.cached = completion.reused_tokens;
        (self.prefill, self.decode) = (completion.prefill_time(), completion.decode_time());
        self.done_reason = finish_reason(completion.finish);
        Ok(())
    }

    fn end(&mut self, events: &mut Events) {
        events.line(|| self.finished(self.object("", "", &[])));
    }

    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        events.line(|| Style::Ollama.error(error));
    }

    fn body(&mut self) -> Value {
        let joined = |kind: &PartKind| -> String {
            let parts = self.parts.list().iter().filter(|part| part.kind == *kind);
            parts.map(|part| part.text.as_str()).collect()
        };
        let calls: Vec<Value> = self.parts.list().iter().filter_map(call).collect();
        self.finished(self.object(&joined(&PartKind::Text), &joined(&PartKind::Reasoning), &calls))
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn finish(&self) -> &'static str {
        self.done_reason
    }
}
