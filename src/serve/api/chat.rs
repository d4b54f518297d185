//! `/v1/chat/completions`.

use super::answer::{Usage, failure, finish_reason, stop_reason};
use super::body::{Body, expected};
use super::error::{ApiError, ApiResult};
use super::form::{Events, Form};
use super::job::Named;
use super::messages_in;
use super::prepare::{Conversation, Plan, Prepared, Source};
use super::settings::{Limits, Settings};
use super::text::{ChatText, Piece};
use crate::runtime::generate::Likelihood;
use crate::runtime::text::{Ending, RenderOptions};
use crate::serve::model::Facts;
use crate::serve::reply::{Done, Token};
use crate::session::tools::{self, ToolChoice};
use serde_json::{Value, json};
use std::sync::Arc;

/// Request to continue a conversation.
#[derive(Debug)]
pub struct ChatRequest {
    /// The conversation.
    pub source: Source,
    /// Settings.
    pub settings: Settings,
    /// Largest number of tokens of an answer.
    pub max_tokens: Option<usize>,
    /// Number of most likely tokens that are reported with each token.
    pub logprobs: Option<usize>,
}

impl ChatRequest {
    /// Takes the fields of a body.
    ///
    /// # Errors
    /// A field has a wrong value, or two contradict each other.
    pub fn take(body: &mut Body, limits: &Limits) -> ApiResult<ChatRequest> {
        let settings = Settings::take(body, limits)?;
        let messages = body.take("messages").unwrap_or(Value::Null);
        let messages = messages_in::read(messages)?;
        let (tools, choice, parallel, tools_value) = take_tools(body)?;
        let options = RenderOptions { tools: tools_value, ..take_rendering(body)? };
        let most = body.count("max_completion_tokens", 1, usize::MAX)?;
        let max_tokens = most.or(body.count("max_tokens", 1, usize::MAX)?);
        let wanted = body.flag("logprobs", false)?;
        let top = body.count("top_logprobs", 0, limits.max_logprobs)?;
        if top.is_some_and(|top| top > 0) && !wanted {
            return Err(ApiError::field("top_logprobs", "it needs `logprobs`: true"));
        }
        let logprobs = wanted.then_some(top.unwrap_or(0));
        let chat = Conversation {
            field: "messages",
            schema_field: "function.parameters",
            messages,
            options,
            tools,
            choice,
            parallel,
        };
        Ok(ChatRequest { source: Source::Chat(Box::new(chat)), settings, max_tokens, logprobs })
    }
}

/// Takes how the template is rendered.
fn take_rendering(body: &mut Body) -> ApiResult<RenderOptions> {
    let mut variables = body.object("chat_template_kwargs")?.unwrap_or_default();
    if let Some(effort) = body.text("reasoning_effort")? {
        variables.insert("reasoning_effort".into(), json!(effort));
    }
    let continues = body.flag("continue_final_message", false)?;
    let prompts = body.flag("add_generation_prompt", !continues)?;
    let ending = match (prompts, continues) {
        (true, true) => {
            return Err(ApiError::field("continue_final_message", "found it together with `add_generation_prompt`"));
        }
        (true, false) => Ending::GenerationPrompt,
        (false, true) => Ending::ContinueFinal,
        (false, false) => Ending::Plain,
    };
    Ok(RenderOptions { ending, variables, ..RenderOptions::default() })
}

/// Tools of a request: as they are checked, which one is called, whether several may be, and as the client sent them.
pub type Tools = (Vec<tools::Tool>, ToolChoice, bool, Option<Value>);

/// Takes the tools.
fn take_tools(body: &mut Body) -> ApiResult<Tools> {
    let parallel = body.flag("parallel_tool_calls", true)?;
    let choice = body.take("tool_choice");
    read_tools(body.take("tools"), choice, parallel)
}

/// Reads the tools and the choice of one in the form of chat completions.
///
/// # Errors
/// One of them has another form, or a call is required and there is no tool.
pub fn read_tools(tools: Option<Value>, choice: Option<Value>, parallel: bool) -> ApiResult<Tools> {
    let Some(value) = tools.filter(|tools| tools.as_array().is_none_or(|list| !list.is_empty())) else {
        return match choice {
            None => Ok((Vec::new(), ToolChoice::None, parallel, None)),
            Some(choice) if choice == json!("none") || choice == json!("auto") => {
                Ok((Vec::new(), ToolChoice::None, parallel, None))
            }
            Some(choice) => Err(expected("tool_choice", "`tools` with it", &choice)),
        };
    };
    let tools = tools::parse_tools(&value).map_err(|e| ApiError::of_field("tools", &e))?;
    let choice = ToolChoice::parse(choice.as_ref(), &tools).map_err(|e| ApiError::of_field("tool_choice", &e))?;
    Ok((tools, choice, parallel, Some(value)))
}

/// Answer of the endpoint.
pub struct Chat {
    named: Named,
    facts: Arc<Facts>,
    settings: Settings,
    logprobs: bool,
    prompt_ids: Vec<u32>,
    texts: Vec<Text>,
    usage: Usage,
}

/// An answer that is generated.
struct Text {
    chat: ChatText,
    /// Entries of the list of tokens, those that were not streamed yet.
    logprobs: Vec<Value>,
    ids: Vec<u32>,
    begun: bool,
    finish: Option<&'static str>,
    stop_reason: Value,
}

impl Chat {
    /// Creates the answer to a request that was prepared.
    pub fn new(named: Named, logprobs: bool, plan: &Plan, prepared: &mut Prepared) -> Chat {
        let text = |parser| Text {
            chat: ChatText::new(parser),
            logprobs: Vec::new(),
            ids: Vec::new(),
            begun: false,
            finish: None,
            stop_reason: Value::Null,
        };
        let prompt_ids = prepared.prompts.first().cloned().unwrap_or_default();
        Chat {
            named,
            facts: plan.facts.clone(),
            settings: plan.settings.clone(),
            logprobs,
            usage: Usage { prompt: prompt_ids.len(), ..Usage::default() },
            prompt_ids,
            texts: std::mem::take(&mut prepared.parsers).into_iter().map(text).collect(),
        }
    }

    fn object(&self, kind: &str, choices: Value) -> Value {
        json!({
            "id": self.named.id,
            "object": kind,
            "created": self.named.created,
            "model": self.named.model,
            "system_fingerprint": self.facts.fingerprint,
            "choices": choices,
        })
    }

    fn likelihood(&self, likely: &Likelihood) -> Value {
        let one = |candidate: &crate::runtime::sampler::Candidate| {
            let (id, logprob) = (candidate.id, candidate.logprob.max(super::completions::LOWEST));
            json!({"token": self.facts.tokens.text(id), "logprob": logprob, "bytes": self.facts.tokens.bytes(id)})
        };
        let mut object = one(&likely.0);
        object["top_logprobs"] = likely.1.iter().map(one).collect();
        object
    }

    /// Adds an event with the change of an answer.
    fn delta(&mut self, choice: usize, delta: Value, ids: &[u32], events: &mut Events) {
        let logprobs = match (self.logprobs, std::mem::take(&mut self.texts[choice].logprobs)) {
            (true, entries) if !entries.is_empty() => json!({"content": entries}),
            _ => Value::Null,
        };
        let text = &self.texts[choice];
        let mut part = json!({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": text.finish});
        if text.finish.is_some() {
            part["stop_reason"] = text.stop_reason.clone();
        }
        if self.settings.return_token_ids {
            part["token_ids"] = json!(ids);
        }
        let mut object = self.object("chat.completion.chunk", json!([part]));
        if self.settings.continuous_usage {
            object["usage"] = self.usage.to_json();
        }
        events.data(|| object);
    }

    /// Adds events for new pieces of an answer.
    fn pieces(&mut self, choice: usize, pieces: Vec<Piece>, ids: &[u32], events: &mut Events) {
        if !self.settings.stream {
            return;
        }
        let mut ids = ids;
        for piece in pieces {
            let mut delta = delta_of(piece);
            if !std::mem::replace(&mut self.texts[choice].begun, true) {
                self.delta(choice, json!({"role": "assistant", "content": ""}), &[], events);
            }
            self.delta(choice, delta.take(), ids, events);
            ids = &[];
        }
    }
}

fn delta_of(piece: Piece) -> Value {
    match piece {
        Piece::Content(text) => json!({"content": text}),
        Piece::Reasoning(text) => json!({"reasoning": text, "reasoning_content": text}),
        Piece::CallBegin { index, id, name } => json!({"tool_calls": [
            {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
        ]}),
        Piece::CallArguments { index, text } => {
            json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        }
    }
}

impl Form for Chat {
    fn token(&mut self, token: Token, events: &mut Events) {
        let choice = token.choice;
        self.usage.generated += 1;
        if self.logprobs
            && let Some(likely) = &token.likely
        {
            let entry = self.likelihood(likely);
            self.texts[choice].logprobs.push(entry);
        }
        let text = &mut self.texts[choice];
        text.ids.push(token.id);
        let pieces = text.chat.push(token.id, &token.text);
        self.pieces(choice, pieces, &[token.id], events);
    }

    fn done(&mut self, done: Done, events: &mut Events) -> ApiResult<()> {
        let (choice, completion) = (done.choice, done.completion);
        if let Some(error) = failure(&completion) {
            return Err(error);
        }
        if choice == 0 {
            self.usage.cached = completion.reused_tokens;
        }
        let pieces = self.texts[choice].chat.finish();
        self.pieces(choice, pieces, &[], events);
        let text = &mut self.texts[choice];
        text.finish = Some(match finish_reason(completion.finish) {
            "stop" if !text.chat.calls.is_empty() => "tool_calls",
            reason => reason,
        });
        text.stop_reason = stop_reason(&completion);
        if self.settings.stream {
            if !std::mem::replace(&mut self.texts[choice].begun, true) {
                self.delta(choice, json!({"role": "assistant", "content": ""}), &[], events);
            }
            self.delta(choice, json!({}), &[], events);
        }
        Ok(())
    }

    fn end(&mut self, events: &mut Events) {
        if self.settings.include_usage {
            events.data(|| {
                let mut object = self.object("chat.completion.chunk", json!([]));
                object["usage"] = self.usage.to_json();
                object
            });
        }
        events.done();
    }

    fn body(&mut self) -> Value {
        let mut choices = Vec::new();
        for (index, text) in self.texts.iter_mut().enumerate() {
            let mut message = json!({"role": "assistant", "content": text.chat.content_or_null(), "refusal": null});
            if !text.chat.reasoning.is_empty() {
                message["reasoning"] = json!(text.chat.reasoning);
                message["reasoning_content"] = json!(text.chat.reasoning);
            }
            if !text.chat.calls.is_empty() {
                message["tool_calls"] = text.chat.calls.iter().map(super::text::Call::to_json).collect();
            }
            let logprobs = match self.logprobs {
                true => json!({"content": std::mem::take(&mut text.logprobs), "refusal": null}),
                false => Value::Null,
            };
            let mut object = json!({
                "index": index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": text.finish,
                "stop_reason": text.stop_reason,
            });
            if self.settings.return_token_ids {
                object["token_ids"] = json!(text.ids);
            }
            choices.push(object);
        }
        let mut object = self.object("chat.completion", Value::Array(choices));
        object["usage"] = self.usage.to_json();
        if self.settings.return_token_ids {
            object["prompt_token_ids"] = json!(self.prompt_ids);
        }
        object
    }

    fn usage(&self) -> Usage {
        self.usage
    }

    fn finish(&self) -> &'static str {
        self.texts.first().and_then(|text| text.finish).unwrap_or("none")
    }
}
