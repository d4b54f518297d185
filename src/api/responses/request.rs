//! Fields of a request to `/v1/responses`.

use super::input;
use crate::api::body::{Body, expected};
use crate::api::chat::{Tools, read_tools};
use crate::api::error::{ApiError, ApiResult};
use crate::api::object::{Object, list};
use crate::api::other_fields::Api;
use crate::api::prepare::{Conversation, PromptSource};
use crate::api::settings::{Limits, Settings, of_format};
use crate::generate::text::{RenderOptions, Variables};
use serde_json::{Map, Value, json};

/// Largest number of tools and of entries of `include`.
const MOST_ENTRIES: usize = 1024;

/// Request to continue a conversation.
#[derive(Debug)]
pub struct ResponsesRequest {
    /// The conversation.
    pub source: PromptSource,
    /// Settings.
    pub settings: Settings,
    /// Largest number of tokens of the answer.
    pub max_tokens: Option<usize>,
    /// Number of most likely tokens that are reported with each token of the answer.
    pub logprobs: Option<usize>,
    /// Fields of the request that the answer repeats.
    pub echo: Map<String, Value>,
}

impl ResponsesRequest {
    /// Takes the fields of a body.
    ///
    /// # Errors
    /// A field has a wrong value, or needs something that this server does not have.
    pub fn take(body: &mut Body, limits: &Limits) -> ApiResult<ResponsesRequest> {
        body.begin(Api::Responses)?;
        refuse(body)?;
        let logprobs = take_logprobs(body, limits)?;
        let mut settings = Settings::take(body, limits)?;
        if settings.n != 1 {
            return Err(ApiError::field("n", "this endpoint generates one answer"));
        }
        let mut echo = Map::new();
        let mut variables = body.object("chat_template_kwargs")?.unwrap_or_default();
        take_text(body, &mut settings, &mut echo)?;
        take_reasoning(body, &mut variables, &mut echo)?;
        let most = body.count("max_output_tokens", 1, usize::MAX)?;
        if most.is_some() {
            body.names.call("max_tokens", "max_output_tokens");
        }
        let most = most.or(body.count("max_tokens", 1, usize::MAX)?);
        let (tools, choice, parallel, tools_value) = take_tools(body, &mut echo)?;
        let instructions = body.text("instructions")?;
        echo.insert("instructions".into(), json!(instructions));
        echo.insert("max_output_tokens".into(), json!(most));
        echo.insert("metadata".into(), take_metadata(body)?);
        for name in ["user", "safety_identifier", "prompt_cache_key"] {
            echo.insert(name.into(), json!(body.text(name)?));
        }
        let messages = input::read(instructions, body.take("input"))?;
        let options = RenderOptions { tools: tools_value, variables, ..RenderOptions::default() };
        let chat =
            Conversation { field: "input", schema_field: "parameters", messages, options, tools, choice, parallel };
        echo.insert("top_logprobs".into(), json!(logprobs.unwrap_or(0)));
        Ok(ResponsesRequest { source: PromptSource::Chat(Box::new(chat)), settings, max_tokens: most, logprobs, echo })
    }
}

/// Takes the fields that need a server which keeps conversations or runs tools, and those without effect.
fn refuse(body: &mut Body) -> ApiResult<()> {
    let stateless = "this server keeps no conversations; send all items in `input`";
    body.refuse("previous_response_id", &Value::Null, stateless)?;
    body.refuse("conversation", &Value::Null, stateless)?;
    body.refuse("background", &Value::Null, "this server keeps no responses; leave it out, or stream the answer")?;
    if body.drop_prompts() {
        return Err(ApiError::field("prompt", "this server stores no prompts; use `input` and `instructions`"));
    }
    match body.text("truncation")?.as_deref() {
        None | Some("disabled") => {}
        // A conversation that is too long is refused in any case.
        Some("auto") => body.ignore("truncation"),
        Some(other) => return Err(expected("truncation", "auto or disabled", &json!(other))),
    }
    // The limit is about tools that run in the server.
    body.count("max_tool_calls", 0, usize::MAX).map(|_| ())
}

/// Takes how many most likely tokens are reported with each token; `None` = no probabilities.
fn take_logprobs(body: &mut Body, limits: &Limits) -> ApiResult<Option<usize>> {
    let top = body.count("top_logprobs", 0, limits.max_logprobs)?;
    let include = body.take("include").map(|include| list(include, "include", MOST_ENTRIES)).transpose()?;
    let mut included = false;
    for (i, value) in include.into_iter().flatten().enumerate() {
        match value.as_str() {
            Some(name) => included |= name == "message.output_text.logprobs",
            // All other entries are about parts that no answer of this server has.
            None => return Err(expected(&format!("include[{i}]"), "a text", &value)),
        }
    }
    Ok(top.filter(|top| *top > 0).or(included.then_some(0)))
}

/// Takes `text`: the form of the answer.
fn take_text(body: &mut Body, settings: &mut Settings, echo: &mut Map<String, Value>) -> ApiResult<()> {
    let mut format = None;
    if let Some(text) = body.object("text")? {
        let mut text = Object::read(Value::Object(text), "text".into())?;
        format = text.take("format");
        if text.text("verbosity")?.is_some() {
            body.ignore("text.verbosity");
        }
    }
    if let Some(value) = &format {
        let members = value.as_object().ok_or_else(|| expected("text.format", "an object", value))?;
        let constraint = of_format(members).map_err(|_| {
            let found = "expected the type text, json_object, or json_schema with a `schema`";
            ApiError::field("text.format", found)
        })?;
        if constraint.is_some() && settings.constraint.is_none() {
            body.names.call("response_format", "text.format");
        }
        if constraint.is_some() && settings.constraint.is_some() {
            return Err(ApiError::field("text.format", "found it together with another constraint"));
        }
        if constraint.is_some() {
            settings.schema_field = "text.format.schema";
        }
        settings.constraint = constraint.or(settings.constraint.take());
    }
    echo.insert("text".into(), json!({"format": format.unwrap_or_else(|| json!({"type": "text"}))}));
    Ok(())
}

/// Takes `reasoning`: how much the model reasons, as variables of the template.
fn take_reasoning(body: &mut Body, variables: &mut Variables, echo: &mut Map<String, Value>) -> ApiResult<()> {
    let mut reasoning = Object::read(json!(body.object("reasoning")?.unwrap_or_default()), "reasoning".into())?;
    let (effort, summary) = (reasoning.text("effort")?, reasoning.text("summary")?);
    if let Some(effort) = &effort {
        variables.insert("reasoning_effort".into(), json!(effort));
        if effort == "none" {
            variables.insert("enable_thinking".into(), json!(false));
        }
    }
    echo.insert("reasoning".into(), json!({"effort": effort, "summary": summary}));
    Ok(())
}

fn take_metadata(body: &mut Body) -> ApiResult<Value> {
    Ok(Value::Object(body.object("metadata")?.unwrap_or_default()))
}

/// Takes the tools, whose form is flat here.
fn take_tools(body: &mut Body, echo: &mut Map<String, Value>) -> ApiResult<Tools> {
    let parallel = body.flag("parallel_tool_calls", true)?;
    let choice = body.take("tool_choice");
    let tools = list(body.take("tools").unwrap_or_else(|| json!([])), "tools", MOST_ENTRIES)?;
    echo.insert("parallel_tool_calls".into(), json!(parallel));
    echo.insert("tool_choice".into(), choice.clone().unwrap_or_else(|| json!("auto")));
    echo.insert("tools".into(), json!(tools));
    let tools = tools.into_iter().enumerate().map(|(i, tool)| nested_tool(tool, format!("tools[{i}]")));
    let tools = Value::Array(tools.collect::<ApiResult<_>>()?);
    read_tools(Some(tools), choice.map(nested_choice).transpose()?, parallel)
}

/// Converts a tool to the form of chat completions.
fn nested_tool(tool: Value, place: String) -> ApiResult<Value> {
    let mut tool = Object::read(tool, place)?;
    let kind = tool.required("type")?;
    if kind != "function" {
        return Err(tool.unsupported(&kind, "leave it out, or define a tool of the type `function`"));
    }
    let mut function = Map::from_iter([("name".to_string(), json!(tool.required("name")?))]);
    if let Some(description) = tool.text("description")? {
        function.insert("description".into(), json!(description));
    }
    for name in ["parameters", "strict"] {
        function.extend(tool.take(name).map(|value| (name.to_string(), value)));
    }
    Ok(json!({"type": "function", "function": function}))
}

/// Converts the choice of a tool to the form of chat completions.
fn nested_choice(choice: Value) -> ApiResult<Value> {
    if choice.is_string() {
        return Ok(choice);
    }
    let mut choice = Object::read(choice, "tool_choice".into())?;
    match choice.required("type")?.as_str() {
        "function" => Ok(json!({"type": "function", "function": {"name": choice.required("name")?}})),
        kind => Err(choice.unsupported(kind, "choose none, auto, required or a function")),
    }
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
