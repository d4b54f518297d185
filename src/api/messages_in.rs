//! Messages of conversations in requests.

use super::body::expected;
use super::error::{ApiError, ApiResult};
use crate::generate::text::{Message, ToolCall, arguments_object};
use serde_json::{Map, Value};

/// Largest number of messages of a request.
pub const MOST_MESSAGES: usize = 10_000;

/// Reads the messages of OpenAI's API.
///
/// # Errors
/// A message has another form, or holds something else than text.
pub fn read(value: Value) -> ApiResult<Vec<Message>> {
    let Value::Array(list) = value else { return Err(expected("messages", "a list of messages", &value)) };
    if list.is_empty() || list.len() > MOST_MESSAGES {
        let found = format!("found {} messages, expected 1 to {MOST_MESSAGES}", list.len());
        return Err(ApiError::field("messages", found));
    }
    list.into_iter().enumerate().map(|(i, value)| message(value, &format!("messages[{i}]"))).collect()
}

fn message(value: Value, place: &str) -> ApiResult<Message> {
    let Value::Object(mut members) = value else { return Err(expected(place, "an object", &value)) };
    let role = text(&mut members, "role", place)?.unwrap_or_default();
    if !["system", "developer", "user", "assistant", "tool", "function"].contains(&role.as_str()) {
        let found = "expected the role system, developer, user, assistant, tool or function";
        return Err(ApiError::field(&format!("{place}.role"), found));
    }
    let refusal = text(&mut members, "refusal", place)?;
    let content = match members.shift_remove("content") {
        None | Some(Value::Null) if matches!(role.as_str(), "system" | "developer" | "user") => {
            return Err(ApiError::field(&format!("{place}.content"), "found none, expected a text"));
        }
        None | Some(Value::Null) => refusal.unwrap_or_default(),
        Some(content) => content_text(content, &format!("{place}.content"))?,
    };
    let reasoning = text(&mut members, "reasoning_content", place)?;
    let also = text(&mut members, "reasoning", place)?;
    let tool_calls = match members.shift_remove("tool_calls") {
        None | Some(Value::Null) => Vec::new(),
        Some(calls) => read_calls(calls, &format!("{place}.tool_calls"))?,
    };
    let (name, tool_call_id) = (text(&mut members, "name", place)?, text(&mut members, "tool_call_id", place)?);
    for (field, given, fits) in [
        ("tool_calls", !tool_calls.is_empty(), role == "assistant"),
        ("tool_call_id", tool_call_id.is_some(), role == "tool"),
    ] {
        if given && !fits {
            return Err(ApiError::field(&format!("{place}.{field}"), format!("a message of the {role} has none")));
        }
    }
    Ok(Message {
        name,
        tool_calls,
        tool_call_id,
        reasoning_content: reasoning.or(also).filter(|text| !text.is_empty()),
        ..Message::new(&role, content)
    })
}

/// Reads a text, or a list of parts that are texts, which are joined by line breaks.
///
/// # Errors
/// A part is no text.
pub fn content_text(content: Value, place: &str) -> ApiResult<String> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => return Err(expected(place, "a text or a list of parts", &other)),
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (i, part) in parts.into_iter().enumerate() {
        let place = format!("{place}[{i}]");
        match (part["type"].as_str(), part["text"].as_str(), part.as_str()) {
            (Some("text" | "input_text" | "output_text"), Some(text), _) | (None, _, Some(text)) => {
                texts.push(text.to_string());
            }
            (Some("refusal"), ..) => texts.push(part["refusal"].as_str().unwrap_or_default().into()),
            (Some(kind), ..) => {
                let found = format!("found a part of the type `{kind}`; this server takes text only");
                return Err(ApiError::field(&place, found).code("unsupported_content"));
            }
            _ => return Err(expected(&place, "a part with the type text", &part)),
        }
    }
    Ok(texts.join("\n"))
}

fn read_calls(calls: Value, place: &str) -> ApiResult<Vec<ToolCall>> {
    let Value::Array(list) = calls else { return Err(expected(place, "a list of calls", &calls)) };
    let call = |(i, call): (usize, &Value)| {
        let function = &call["function"];
        let Some(name) = function["name"].as_str() else {
            return Err(expected(&format!("{place}[{i}]"), "a function with a name and arguments", call));
        };
        let arguments = arguments(&function["arguments"], &format!("{place}[{i}].function.arguments"))?;
        Ok(ToolCall::new(call["id"].as_str().unwrap_or_default(), name, arguments))
    };
    list.iter().enumerate().map(call).collect()
}

/// Reads the arguments of an earlier call, which chat templates expect as an object.
///
/// # Errors
/// They are something else than an object, the text of one, or nothing.
pub fn arguments(value: &Value, place: &str) -> ApiResult<Value> {
    arguments_object(value).ok_or_else(|| expected(place, "a JSON object, or its text", value))
}

fn text(members: &mut Map<String, Value>, name: &str, place: &str) -> ApiResult<Option<String>> {
    match members.shift_remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(expected(&format!("{place}.{name}"), "a text", &other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn contents_are_texts_or_parts() {
        let messages = read(json!([
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "reasoning": "r",
             "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
            {"role": "tool", "content": "5", "tool_call_id": "1"},
        ]));
        let messages = messages.unwrap();
        assert_eq!(messages[1].content, "a\nb");
        assert_eq!(messages[2].reasoning_content.as_deref(), Some("r"));
        assert_eq!(messages[2].tool_calls[0].function.name, "f");
        assert_eq!(messages[3].tool_call_id.as_deref(), Some("1"));
    }

    #[test]
    fn wrong_messages_are_refused_by_their_place() {
        let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]);
        let cases = [
            (json!([]), "messages"),
            (json!("x"), "messages"),
            (json!([{"role": "robot", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (image, "messages[0].content[0]"),
            (json!([{"role": "user", "content": "x", "tool_calls": [{}]}]), "messages[0].tool_calls[0]"),
            (json!([{"role": "user", "content": "x", "tool_call_id": "1"}]), "messages[0].tool_call_id"),
            (json!([{"role": "user", "content": "x", "name": 1}]), "messages[0].name"),
            (json!([{"role": "developer", "content": null}]), "messages[0].content"),
        ];
        for (value, place) in cases {
            assert_eq!(read(value.clone()).unwrap_err().param.as_deref(), Some(place), "{value}");
        }
    }

    #[test]
    fn arguments_of_earlier_calls_are_objects_or_errors_that_name_them() {
        let with = |arguments: Value| {
            let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}});
            read(
                json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": null, "tool_calls": [call]}]),
            )
        };
        for (arguments, expected) in [
            (json!(""), json!({})),
            (json!(" "), json!({})),
            (json!("null"), json!({})),
            (json!(null), json!({})),
            (json!("{\"a\": 1}"), json!({"a": 1})),
            (json!({"a": 1}), json!({"a": 1})),
        ] {
            let messages = with(arguments.clone()).unwrap();
            assert_eq!(messages[1].tool_calls[0].function.arguments, expected, "{arguments}");
        }
        for arguments in [json!("{\"a\": "), json!("[1]"), json!([1]), json!("3"), json!(3), json!("x")] {
            let error = with(arguments.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("messages[1].tool_calls[0].function.arguments"), "{arguments}");
        }
    }

    #[test]
    fn other_names_of_roles_and_refusals_are_read() {
        let messages = read(json!([
            {"role": "developer", "content": "d"},
            {"role": "assistant", "content": null, "refusal": "no"},
            {"role": "function", "name": "f", "content": null},
        ]));
        let messages = messages.unwrap();
        let shown: Vec<(&str, &str)> =
            messages.iter().map(|message| (message.role.as_str(), message.content.as_str())).collect();
        assert_eq!(shown, [("developer", "d"), ("assistant", "no"), ("function", "")]);
    }
}
