//! Messages of a conversation, and the form in which chat templates read them.
//!
//! The fields are those of OpenAI's chat completions. Templates of `transformers` expect two differences: the arguments
//! of a call are an object instead of a text, and reasoning has another name in the templates of harmony.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::borrow::Cow;

/// One message of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// Author of the message: `system`, `developer`, `user`, `assistant` or `tool`. A template that
    /// does not know `developer` gets `system`, and `function`, an older name, is `tool`.
    pub role: String,
    /// Text of the message; empty if the message consists of calls only.
    pub content: String,
    /// Reasoning of the model before its answer, which some templates keep for the latest turns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Name of the author, or of the function whose result this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Calls of functions that the model asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Id of the call whose result this message of the role `tool` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
}

/// Call of a function that a model asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolCall {
    /// Id to which the result refers.
    pub id: String,
    /// Kind of the call: `function`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Function with its arguments.
    pub function: FunctionCall,
}

/// Name and arguments of a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FunctionCall {
    /// Name of the function.
    pub name: String,
    /// Arguments: an object.
    #[serde(deserialize_with = "arguments")]
    pub arguments: Value,
}

/// Reads arguments in any form that [`arguments_object`] knows.
fn arguments<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Value, D::Error> {
    let value = Value::deserialize(deserializer)?;
    arguments_object(&value).ok_or_else(|| serde::de::Error::custom("found arguments that are no JSON object"))
}

/// Returns the arguments of a call as an object: they may be one, or the text of one. No text and null stand for no
/// arguments, which several models and libraries write so. `None` for everything else.
pub fn arguments_object(value: &Value) -> Option<Value> {
    match value {
        Value::Null => Some(Value::Object(Map::new())),
        Value::Object(_) => Some(value.clone()),
        Value::String(text) if text.trim().is_empty() => Some(Value::Object(Map::new())),
        Value::String(text) => match serde_json::from_str(text).ok()? {
            Value::String(_) => None,
            inner => arguments_object(&inner),
        },
        _ => None,
    }
}

impl Message {
    /// Creates a message of `role`.
    pub fn new(role: &str, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into(), ..Message::default() }
    }
}

impl ToolCall {
    /// Creates the call of a function. `arguments` are an object, as [`arguments_object`] returns it.
    pub fn new(id: &str, name: &str, arguments: Value) -> ToolCall {
        ToolCall { id: id.into(), kind: "function".into(), function: FunctionCall { name: name.into(), arguments } }
    }
}

/// A message as templates read it.
#[derive(Serialize)]
pub(super) struct View<'a> {
    /// Name of `reasoning_content` in harmony templates. They refuse a call that has both this and a content.
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<&'a str>,
    #[serde(flatten)]
    message: &'a Message,
}

impl View<'_> {
    pub(super) fn new(message: &Message) -> View<'_> {
        let reasoning = message.reasoning_content.as_deref();
        let is_refused = !message.content.is_empty() && !message.tool_calls.is_empty();
        View { message, thinking: reasoning.filter(|_| !is_refused) }
    }
}

/// Text between two texts that become one system message.
const PARAGRAPH: &str = "\n\n";

/// Returns the messages with the roles that the source of a template knows: `developer` is a newer name of `system`,
/// and `function` an older one of `tool`. Instructions at the beginning become one message if they had both names.
pub fn known_roles<'a>(messages: &'a [Message], source: &str) -> Cow<'a, [Message]> {
    let is_other = |message: &Message| match message.role.as_str() {
        "developer" => !source.contains("developer"),
        "function" => true,
        _ => false,
    };
    if !messages.iter().any(is_other) {
        return Cow::Borrowed(messages);
    }
    let mut known: Vec<Message> = Vec::with_capacity(messages.len());
    for message in messages {
        let mut message = message.clone();
        let is_developer = message.role == "developer" && is_other(&message);
        if is_developer {
            message.role = "system".into();
        } else if message.role == "function" {
            message.role = "tool".into();
        }
        match &mut known[..] {
            [first] if first.role == "system" && message.role == "system" => {
                first.content += PARAGRAPH;
                first.content += &message.content;
            }
            _ => known.push(message),
        }
    }
    Cow::Owned(known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn arguments_are_an_object() {
        for (value, expected) in [
            (json!(r#" {"a": 1}"#), Some(json!({"a": 1}))),
            (json!({"a": 1}), Some(json!({"a": 1}))),
            (json!(""), Some(json!({}))),
            (json!(" \n"), Some(json!({}))),
            (json!("null"), Some(json!({}))),
            (json!(null), Some(json!({}))),
            (json!("[1]"), None),
            (json!("{\"a\""), None),
            (json!("3"), None),
            (json!("\"{}\""), None),
            (json!([1]), None),
            (json!(true), None),
        ] {
            assert_eq!(arguments_object(&value), expected, "{value}");
        }
        let text = r#"{"id": "1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}"#;
        let read = |arguments: &str| serde_json::from_str::<ToolCall>(&text.replace("ARGUMENTS", arguments));
        assert_eq!(read("\"\"").unwrap().function.arguments, json!({}));
        assert!(read("\"{\"").unwrap_err().to_string().contains("no JSON object"));
    }

    #[test]
    fn templates_read_reasoning_by_two_names() {
        let mut message = Message { reasoning_content: Some("hm".into()), ..Message::new("assistant", "Yes") };
        let all = json!({"role": "assistant", "content": "Yes", "reasoning_content": "hm",
            "thinking": "hm"});
        assert_eq!(serde_json::to_value(View::new(&message)).unwrap(), all);
        message.tool_calls.push(ToolCall::new("1", "f", json!({})));
        assert_eq!(serde_json::to_value(View::new(&message)).unwrap().get("thinking"), None);
        message.content.clear();
        assert_eq!(serde_json::to_value(View::new(&message)).unwrap()["thinking"], "hm");
    }

    #[test]
    fn messages_are_read_as_they_are_written() {
        let message = Message { tool_calls: vec![ToolCall::new("1", "f", json!({}))], ..Message::new("assistant", "") };
        let text = serde_json::to_string(&message).unwrap();
        assert_eq!(serde_json::from_str::<Message>(&text).unwrap(), message);
        assert!(serde_json::from_str::<Message>(r#"{"role":"user","content":"","x":1}"#).is_err());
    }

    #[test]
    fn roles_are_those_that_the_template_knows() {
        let conversation =
            |roles: &[&str]| -> Vec<Message> { roles.iter().map(|role| Message::new(role, *role)).collect() };
        let roles = |messages: &[Message], source: &str| -> Vec<String> {
            known_roles(messages, source)
                .iter()
                .map(|message| format!("{}:{}", message.role, message.content))
                .collect()
        };
        let cases: [(&[&str], &str, &[&str]); 5] = [
            (&["developer", "user"], "", &["system:developer", "user:user"]),
            (&["developer", "user"], "{{ 'developer' }}", &["developer:developer", "user:user"]),
            (&["system", "developer", "user"], "", &["system:system\n\ndeveloper", "user:user"]),
            (&["user", "function", "developer"], "", &["user:user", "tool:function", "system:developer"]),
            (&["system", "system", "user"], "", &["system:system", "system:system", "user:user"]),
        ];
        for (messages, source, expected) in cases {
            assert_eq!(roles(&conversation(messages), source), expected, "{messages:?}");
        }
    }
}
