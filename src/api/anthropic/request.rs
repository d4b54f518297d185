//! Fields of a request to `/v1/messages`.

use super::messages;
use crate::api::body::{Body, expected};
use crate::api::chat::{Tools, read_tools};
use crate::api::error::{ApiError, ApiResult};
use crate::api::object::{Object, list};
use crate::api::other_fields::Api;
use crate::api::prepare::{Conversation, PromptSource};
use crate::api::settings::{Limits, Settings, of_format, take_stop};
use crate::generate::text::{RenderOptions, Variables};
use serde_json::{Map, Value, json};

/// Largest number of tools.
const MOST_TOOLS: usize = 1024;

/// Request to continue a conversation.
#[derive(Debug)]
pub struct MessagesRequest {
    /// The conversation.
    pub source: PromptSource,
    /// Settings.
    pub settings: Settings,
    /// Largest number of tokens of the answer.
    pub max_tokens: Option<usize>,
}

impl MessagesRequest {
    /// Takes the fields of a body.
    ///
    /// # Errors
    /// A field has a wrong value, or needs something that this server does not have.
    pub fn take(body: &mut Body, limits: &Limits) -> ApiResult<MessagesRequest> {
        body.begin(Api::Messages)?;
        let why = "this server runs no tools; define tools that the client runs";
        body.refuse("mcp_servers", &Value::Null, why)?;
        body.refuse("container", &Value::Null, why)?;
        // Marks how much of the prompt to cache. The prefix cache of this server needs no marks.
        body.take("cache_control");
        let mut settings = Settings::take(body, limits)?;
        if settings.n != 1 {
            return Err(ApiError::field("n", "this endpoint generates one answer"));
        }
        let stops = take_stop(body, "stop_sequences")?;
        if !stops.is_empty() {
            body.names.call("stop", "stop_sequences");
        }
        settings.stop.extend(stops);
        let max_tokens = body.count("max_tokens", 1, usize::MAX)?;
        let mut variables = body.object("chat_template_kwargs")?.unwrap_or_default();
        take_thinking(body, &mut variables)?;
        take_output(body, &mut settings, &mut variables)?;
        let (tools, choice, parallel, tools_value) = take_tools(body)?;
        let (messages, ending) = messages::read(body.take("system"), body.take("messages"))?;
        let options = RenderOptions { tools: tools_value, ending, variables };
        let chat = Conversation {
            field: "messages",
            schema_field: "input_schema",
            messages,
            options,
            tools,
            choice,
            parallel,
        };
        Ok(MessagesRequest { source: PromptSource::Chat(Box::new(chat)), settings, max_tokens })
    }
}

/// Takes `thinking`: whether the model reasons, as a variable of the template.
fn take_thinking(body: &mut Body, variables: &mut Variables) -> ApiResult<()> {
    let Some(thinking) = body.object("thinking")? else { return Ok(()) };
    let mut thinking = Object::read(Value::Object(thinking), "thinking".into())?;
    let thinks = match thinking.required("type")?.as_str() {
        "enabled" => Some(true),
        "disabled" => Some(false),
        // The model decides.
        "adaptive" | "between_tools" => None,
        other => return Err(expected("thinking.type", "enabled, adaptive or disabled", &json!(other))),
    };
    variables.extend(thinks.map(|thinks| ("enable_thinking".to_string(), json!(thinks))));
    Ok(())
}

/// Takes `output_config`: how much the model reasons, and a schema for its answer.
fn take_output(body: &mut Body, settings: &mut Settings, variables: &mut Variables) -> ApiResult<()> {
    let mut config = Object::read(json!(body.object("output_config")?.unwrap_or_default()), "output_config".into())?;
    if let Some(effort) = config.text("effort")? {
        variables.insert("reasoning_effort".into(), json!(effort));
    }
    let place = config.place("format");
    for (name, schema_field, format) in [
        ("output_format", "output_format.schema", body.take("output_format")),
        (&place, "output_config.format.schema", config.take("format")),
    ] {
        let Some(format) = format else { continue };
        let members = format.as_object().ok_or_else(|| expected(name, "an object", &format))?;
        let found = "expected the type json_schema with a `schema`";
        let constraint = of_format(members).map_err(|_| ApiError::field(name, found))?;
        if settings.constraint.is_some() {
            return Err(ApiError::field(name, "found it together with another constraint"));
        }
        body.names.call("response_format", name);
        settings.constraint = constraint;
        settings.schema_field = schema_field;
    }
    Ok(())
}

fn take_tools(body: &mut Body) -> ApiResult<Tools> {
    let tools = list(body.take("tools").unwrap_or_else(|| json!([])), "tools", MOST_TOOLS)?;
    let tools = tools.into_iter().enumerate().map(|(i, tool)| nested_tool(tool, format!("tools[{i}]")));
    let tools = Value::Array(tools.collect::<ApiResult<_>>()?);
    let Some(choice) = body.take("tool_choice") else { return read_tools(Some(tools), None, true) };
    let mut choice = Object::read(choice, "tool_choice".into())?;
    let parallel = !choice.flag("disable_parallel_tool_use")?;
    let choice = match choice.required("type")?.as_str() {
        "auto" => json!("auto"),
        "any" => json!("required"),
        "none" => json!("none"),
        "tool" => json!({"type": "function", "function": {"name": choice.required("name")?}}),
        kind => return Err(choice.unsupported(kind, "choose auto, any, tool or none")),
    };
    read_tools(Some(tools), Some(choice), parallel)
}

/// Converts a tool to the form of OpenAI's chat completions.
fn nested_tool(tool: Value, place: String) -> ApiResult<Value> {
    let mut tool = Object::read(tool, place)?;
    if let Some(kind) = tool.text("type")?.filter(|kind| kind != "custom") {
        return Err(tool.unsupported(&kind, "leave it out, or define a tool with an `input_schema`"));
    }
    let mut function = Map::from_iter([("name".to_string(), json!(tool.required("name")?))]);
    if let Some(description) = tool.text("description")? {
        function.insert("description".into(), json!(description));
    }
    let place = tool.place("input_schema");
    let schema = tool.take("input_schema");
    let schema = schema.ok_or_else(|| ApiError::field(&place, "found none, expected a JSON schema"))?;
    function.insert("parameters".into(), schema);
    function.extend(tool.take("strict").map(|strict| ("strict".to_string(), strict)));
    Ok(json!({"type": "function", "function": function}))
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
