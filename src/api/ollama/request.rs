//! Fields of requests of ollama, translated to those of `/v1/chat/completions`.

use crate::api::body::{Body, Prompts, expected};
use crate::api::error::{ApiError, ApiResult};
use crate::api::messages_in::MOST_MESSAGES;
use crate::api::object::{Object, list};
use crate::api::settings::Limits;
use crate::units::parse_duration;
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Idle time after which the model is unloaded; the inner `None` = never, the outer one = that of the settings.
pub type KeepAlive = Option<Option<Duration>>;

/// Options that decide about the answer, with the fields that they stand for. Others, such as `num_gpu`, are settings
/// of a runner; they are named in `x-iec-ignored`.
const OPTIONS: [(&str, &str); 15] = [
    ("temperature", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("typical_p", "typical_p"),
    ("seed", "seed"),
    ("stop", "stop"),
    ("num_predict", "max_tokens"),
    ("repeat_penalty", "repetition_penalty"),
    ("repeat_last_n", "repeat_last_n"),
    ("presence_penalty", "presence_penalty"),
    ("frequency_penalty", "frequency_penalty"),
    ("mirostat", "mirostat"),
    ("mirostat_tau", "mirostat_tau"),
    ("mirostat_eta", "mirostat_eta"),
];

/// Translates the fields that `/api/chat` and `/api/generate` share.
///
/// # Errors
/// A field has a wrong value, or needs something that this server does not have.
pub fn translate(body: &mut Body, limits: &Limits) -> ApiResult<KeepAlive> {
    let stream = body.flag("stream", true)?;
    body.set("stream", json!(stream));
    body.refuse("images", &Value::Null, "this server takes text only")?;
    for name in ["logprobs", "top_logprobs"] {
        body.refuse(name, &json!(0), "this endpoint shows no log-probabilities; use /v1/chat/completions")?;
    }
    take_options(body)?;
    take_format(body)?;
    take_think(body)?;
    take_keep_alive(body, limits)
}

fn take_options(body: &mut Body) -> ApiResult<()> {
    let options = body.object("options")?.unwrap_or_default();
    for (name, value) in options.into_iter().filter(|(_, value)| !value.is_null()) {
        // Numbers that stand for no value.
        let is_unset = match name.as_str() {
            "num_predict" => value.as_i64().is_some_and(|number| number <= 0),
            "seed" => value == json!(-1),
            _ => false,
        };
        match OPTIONS.iter().find(|(known, _)| *known == name) {
            Some(_) if is_unset => {}
            Some((_, field)) => body.set(field, value),
            None => body.ignore(&format!("options.{name}")),
        }
    }
    Ok(())
}

/// Takes `format`: `json`, or a schema.
fn take_format(body: &mut Body) -> ApiResult<()> {
    let format = match body.take("format") {
        None => return Ok(()),
        Some(Value::String(text)) if text.is_empty() => return Ok(()),
        Some(Value::String(text)) if text == "json" => json!({"type": "json_object"}),
        Some(Value::Object(schema)) => {
            json!({"type": "json_schema", "json_schema": {"name": "format", "schema": schema}})
        }
        Some(other) => return Err(expected("format", "`json` or a JSON schema", &other)),
    };
    body.set("response_format", format);
    Ok(())
}

/// Takes `think`: whether, or how much, the model reasons.
fn take_think(body: &mut Body) -> ApiResult<()> {
    let variables = match body.take("think") {
        None => return Ok(()),
        Some(Value::Bool(thinks)) => json!({"enable_thinking": thinks}),
        Some(Value::String(level)) if ["low", "medium", "high"].contains(&level.as_str()) => {
            json!({"enable_thinking": true, "reasoning_effort": level})
        }
        Some(other) => return Err(expected("think", "true, false, low, medium or high", &other)),
    };
    body.set("chat_template_kwargs", variables);
    Ok(())
}

/// Takes `keep_alive`: seconds, or a text with a unit. A negative time is endless. It has no effect if models stay
/// loaded anyway.
fn take_keep_alive(body: &mut Body, limits: &Limits) -> ApiResult<KeepAlive> {
    let Some(value) = body.take("keep_alive") else { return Ok(None) };
    let positive = |seconds: f64| Duration::try_from_secs_f64(seconds).ok();
    let time = match &value {
        Value::Number(seconds) => seconds.as_f64().map(positive),
        Value::String(text) => match (text.parse::<f64>(), text.strip_prefix('-')) {
            (Ok(seconds), _) => Some(seconds).filter(|seconds| seconds.is_finite()).map(positive),
            (Err(_), Some(text)) => parse_duration(text).ok().map(|_| None),
            (Err(_), None) => parse_duration(text).ok().map(Some),
        },
        _ => None,
    };
    let time = time.ok_or_else(|| expected("keep_alive", "a number of seconds or a time like 5m", &value))?;
    if !limits.unloads {
        body.ignore("keep_alive");
        return Ok(None);
    }
    Ok(Some(time))
}

/// Takes the prompt of `/api/generate`, which is one text.
///
/// # Errors
/// It is something else.
pub fn prompt(body: &mut Body) -> ApiResult<String> {
    match body.take_prompts()? {
        None => Ok(String::new()),
        Some(Prompts::Texts(mut texts)) if texts.len() == 1 => Ok(texts.swap_remove(0)),
        Some(_) => Err(ApiError::field("prompt", "expected one text")),
    }
}

/// Takes the messages of `/api/chat` in the form of OpenAI's API. An absent list is empty.
///
/// # Errors
/// A message has another form, or holds something else than text.
pub fn messages(body: &mut Body) -> ApiResult<Vec<Value>> {
    let messages = list(body.take("messages").unwrap_or_else(|| json!([])), "messages", MOST_MESSAGES)?;
    messages.into_iter().enumerate().map(|(i, value)| message(value, format!("messages[{i}]"))).collect()
}

fn message(value: Value, place: String) -> ApiResult<Value> {
    let Value::Object(mut members) = value else { return Err(expected(&place, "an object", &value)) };
    members.retain(|_, value| !value.is_null());
    if members.shift_remove("images").is_some_and(|images| images.as_array().is_none_or(|list| !list.is_empty())) {
        let error = ApiError::field(&format!("{place}.images"), "this server takes text only");
        return Err(error.code("unsupported_content"));
    }
    members.entry("content").or_insert(json!(""));
    for (theirs, ours) in [("thinking", "reasoning_content"), ("tool_name", "name")] {
        if let Some(value) = members.shift_remove(theirs) {
            members.insert(ours.into(), value);
        }
    }
    if let Some(calls) = members.shift_remove("tool_calls") {
        let place = format!("{place}.tool_calls");
        let calls = list(calls, &place, MOST_MESSAGES)?.into_iter().enumerate();
        let calls: ApiResult<Vec<Value>> = calls.map(|(i, value)| call(value, format!("{place}[{i}]"))).collect();
        members.insert("tool_calls".into(), json!(calls?));
    }
    Ok(Value::Object(members))
}

/// Converts a call, whose arguments are an object here and a text there.
fn call(value: Value, place: String) -> ApiResult<Value> {
    let mut call = Object::read(value, place)?;
    let id = call.text("id")?.unwrap_or_default();
    let place = call.place("function");
    let mut function = Object::read(call.take("function").unwrap_or_default(), place)?;
    let name = function.required("name")?;
    let arguments = match function.take("arguments") {
        None => Value::Object(Map::new()),
        Some(arguments @ Value::Object(_)) => arguments,
        Some(other) => return Err(expected(&function.place("arguments"), "an object", &other)),
    };
    Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments.to_string()}}))
}
