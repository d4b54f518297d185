//! `/v1/chat/completions`.

use super::answer::{Usage, failure, finish_reason, hides_end, likelihood, stop_reason};
use super::body::{Body, expected};
use super::error::{ApiError, ApiResult};
use super::form::{Events, Form};
use super::job::Named;
use super::messages_in;
use super::other_fields::Api;
use super::prepare::{Conversation, Plan, Prepared, PromptSource};
use super::settings::{Limits, Settings};
use super::text::{ChatText, Piece};
use crate::generate::text::{Ending, RenderOptions, Variables};
use crate::host::model::Facts;
use crate::host::reply::{Done, Token};
use crate::tools::{self, ToolChoice};
use serde_json::{Value, json};
use std::sync::Arc;

/// Request to continue a conversation.
#[derive(Debug)]
pub struct ChatRequest {
    /// The conversation.
    pub source: PromptSource,
    /// Settings.
    pub settings: Settings,
    /// Largest number of tokens of an answer.
    pub max_tokens: Option<usize>,
    /// Number of most likely tokens that are reported with each token.
    pub logprobs: Option<usize>,
    /// Whether the answer shows the reasoning.
    pub shows_reasoning: bool,
}

impl ChatRequest {
    /// Takes the fields of a body.
    ///
    /// # Errors
    /// A field has a wrong value, or two contradict each other.
    pub fn take(body: &mut Body, limits: &Limits) -> ApiResult<ChatRequest> {
        body.begin(Api::Chat)?;
        let settings = Settings::take(body, limits)?;
        let messages = body.take("messages").unwrap_or(Value::Null);
        let messages = messages_in::read(messages)?;
        let (tools, choice, parallel, tools_value) = take_tools(body)?;
        let mut options = RenderOptions { tools: tools_value, ..take_rendering(body)? };
        let shows_reasoning = take_reasoning(body, &mut options.variables)?;
        let most = body.count("max_completion_tokens", 1, usize::MAX)?;
        if most.is_some() {
            body.names.call("max_tokens", "max_completion_tokens");
        }
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
        Ok(ChatRequest { source: PromptSource::Chat(Box::new(chat)), settings, max_tokens, logprobs, shows_reasoning })
    }
}

/// Takes whether the model reasons, as variables of the template, in the forms of Qwen, GLM and DeepSeek (`thinking`)
/// and OpenRouter (`reasoning`). Returns whether the answer shows the reasoning.
fn take_reasoning(body: &mut Body, variables: &mut Variables) -> ApiResult<bool> {
    let mut shows = body.flag("include_reasoning", true)?;
    let mut thinks = body.take("enable_thinking").map(|value| flag(&value, "enable_thinking")).transpose()?;
    if let Some(members) = body.object("thinking")? {
        thinks = match members.get("type").and_then(Value::as_str) {
            Some("enabled") => Some(true),
            Some("disabled") => Some(false),
            Some("adaptive" | "auto") => thinks,
            _ => return Err(ApiError::field("thinking.type", "expected enabled, disabled or auto")),
        };
    }
    if let Some(members) = body.object("reasoning")? {
        let of = |name: &str| members.get(name).filter(|value| !value.is_null());
        match of("effort") {
            None => {}
            Some(effort @ Value::String(_)) => _ = variables.insert("reasoning_effort".into(), effort.clone()),
            Some(other) => return Err(expected("reasoning.effort", "a text", other)),
        }
        if let Some(value) = of("enabled") {
            thinks = Some(flag(value, "reasoning.enabled")?);
        }
        if let Some(value) = of("exclude") {
            shows &= !flag(value, "reasoning.exclude")?;
        }
    }
    variables.extend(thinks.map(|thinks| ("enable_thinking".to_string(), json!(thinks))));
    Ok(shows)
}

fn flag(value: &Value, place: &str) -> ApiResult<bool> {
    value.as_bool().ok_or_else(|| expected(place, "true or false", value))
}

/// Parts of a request that decide about the form of the answer.
#[derive(Debug, Clone, Copy)]
pub struct ChatForm {
    /// Whether log-probabilities are reported.
    pub logprobs: bool,
    /// Whether the answer shows the reasoning.
    pub shows_reasoning: bool,
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
    let is_listed = tools.is_some();
    let Some(value) = tools.filter(|tools| tools.as_array().is_none_or(|list| !list.is_empty())) else {
        // An empty list of tools is one that no tool was added to; such clients leave their choice as it is.
        let is_idle = |choice: &Value| is_listed && (*choice == json!("none") || *choice == json!("auto"));
        return match choice.filter(|choice| !is_idle(choice)) {
            None => Ok((Vec::new(), ToolChoice::None, parallel, None)),
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
    shows_reasoning: bool,
    /// Tokens of the request that end an answer.
    stop_ids: Vec<u32>,
    prompt_ids: Vec<u32>,
    texts: Vec<ChatAnswer>,
    usage: Usage,
}

/// An answer that is generated.
struct ChatAnswer {
    chat: ChatText,
    /// Entries of the list of tokens.
    logprobs: Vec<Value>,
    ids: Vec<u32>,
    waiting: Waiting,
    begun: bool,
    finish: Option<&'static str>,
    stop_reason: Value,
}

/// Tokens whose text is not shown yet.
#[derive(Default)]
struct Waiting {
    /// Entries of the list of tokens.
    logprobs: Vec<Value>,
    ids: Vec<u32>,
}

impl Chat {
    /// Creates the answer to a request that was prepared.
    pub fn new(named: Named, request: &ChatForm, plan: &Plan, prepared: &mut Prepared) -> Chat {
        let text = |parser| ChatAnswer {
            chat: ChatText::new(parser),
            logprobs: Vec::new(),
            ids: Vec::new(),
            waiting: Waiting::default(),
            begun: false,
            finish: None,
            stop_reason: Value::Null,
        };
        let prompt_ids = prepared.prompts.first().cloned().unwrap_or_default();
        Chat {
            named,
            facts: plan.facts.clone(),
            settings: plan.settings.clone(),
            logprobs: request.logprobs,
            shows_reasoning: request.shows_reasoning,
            stop_ids: plan.stop_ids(),
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

    /// Adds an event with the change of an answer, and with the tokens whose text it shows.
    fn delta(&self, choice: usize, delta: Value, tokens: Waiting, events: &mut Events) {
        let logprobs = match tokens.logprobs {
            entries if entries.is_empty() => Value::Null,
            entries => json!({"content": entries}),
        };
        let text = &self.texts[choice];
        let mut part = json!({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": text.finish});
        if text.finish.is_some() {
            part["stop_reason"] = text.stop_reason.clone();
        }
        let mut object = self.object("chat.completion.chunk", Value::Null);
        if self.settings.return_token_ids {
            part["token_ids"] = json!(tokens.ids);
            if delta_begins(&part) {
                object["prompt_token_ids"] = json!(self.prompt_ids);
            }
        }
        object["choices"] = json!([part]);
        if self.settings.continuous_usage {
            object["usage"] = self.usage.to_json();
        } else if self.settings.include_usage {
            object["usage"] = Value::Null;
        }
        events.data(|| object);
    }

    /// Adds the event with which an answer begins, once.
    fn begin(&mut self, choice: usize, events: &mut Events) {
        if !std::mem::replace(&mut self.texts[choice].begun, true) {
            self.delta(choice, json!({"role": "assistant", "content": ""}), Waiting::default(), events);
        }
    }

    /// Takes new pieces of an answer, which show the text of all tokens that waited.
    fn pieces(&mut self, choice: usize, mut pieces: Vec<Piece>, events: &mut Events) {
        let had_pieces = !pieces.is_empty();
        if !self.shows_reasoning {
            pieces.retain(|piece| !matches!(piece, Piece::Reasoning(_)));
        }
        let text = &mut self.texts[choice];
        if pieces.is_empty() && had_pieces {
            text.waiting.logprobs.clear();
        } else if !self.settings.stream && had_pieces {
            text.logprobs.append(&mut text.waiting.logprobs);
        }
        if !self.settings.stream {
            return;
        }
        for piece in pieces {
            self.begin(choice, events);
            let tokens = std::mem::take(&mut self.texts[choice].waiting);
            self.delta(choice, delta_of(piece), tokens, events);
        }
    }
}

/// Returns true for the first event of an answer.
fn delta_begins(part: &Value) -> bool {
    part["delta"].get("role").is_some()
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
        let text = &mut self.texts[choice];
        if let Some(likely) = token.likely.as_ref().filter(|_| self.logprobs) {
            text.waiting.logprobs.push(likelihood(&self.facts, likely, self.settings.tokens_as_ids));
        }
        text.waiting.ids.push(token.id);
        text.ids.push(token.id);
        let pieces = text.chat.push(token.id, &token.text);
        self.pieces(choice, pieces, events);
    }

    fn done(&mut self, done: Done, events: &mut Events) -> ApiResult<()> {
        let (choice, completion) = (done.choice, done.completion);
        if let Some(error) = failure(&completion) {
            return Err(error);
        }
        if choice == 0 {
            self.usage.cached = completion.reused_tokens;
        }
        let pieces = self.texts[choice].chat.finish(finish_reason(completion.finish) == "length");
        self.pieces(choice, pieces, events);
        if self.settings.stream {
            self.begin(choice, events);
        }
        let text = &mut self.texts[choice];
        text.finish = Some(match finish_reason(completion.finish) {
            "stop" if !text.chat.calls.is_empty() => "tool_calls",
            reason => reason,
        });
        text.stop_reason = stop_reason(&completion, &self.stop_ids);
        let mut last = std::mem::take(&mut text.waiting);
        if hides_end(completion.finish) {
            last.logprobs.clear();
        }
        if self.settings.stream {
            self.delta(choice, json!({}), last, events);
        } else {
            text.logprobs.append(&mut last.logprobs);
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
            if !text.chat.reasoning.is_empty() && self.shows_reasoning {
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
