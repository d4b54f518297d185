//! Messages of a conversation, and the form in which chat templates read them.
//!
//! The fields are those of OpenAI's chat completions. Templates of `transformers` expect two differences: the arguments
//! of a call are an object instead of a text, and reasoning has another name in the templates of harmony.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One message of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    /// Author of the message: `system`, `developer`, `user`, `assistant` or `tool`.
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
    /// Arguments: an object, or a text if the model wrote something else.
    pub arguments: Value,
}

impl Message {
    /// Creates a message of `role`.
    pub fn new(role: &str, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into(), ..Message::default() }
    }
}

impl ToolCall {
    /// Creates the call of a function. `arguments` are JSON text, as in OpenAI's messages; templates get an object if
    /// the text is one.
    pub fn new(id: &str, name: &str, arguments: &str) -> ToolCall {
        let object = serde_json::from_str(arguments).ok().filter(Value::is_object);
        let arguments = object.unwrap_or_else(|| arguments.into());
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn arguments_are_an_object_where_the_text_is_one() {
        let arguments = |text: &str| ToolCall::new("1", "f", text).function.arguments;
        assert_eq!(arguments(r#"{"a": 1}"#), json!({"a": 1}));
        for text in ["", "[1]", "{\"a\"", "3"] {
            assert_eq!(arguments(text), json!(text));
        }
    }

    #[test]
    fn templates_read_reasoning_by_two_names() {
        let mut message = Message { reasoning_content: Some("hm".into()), ..Message::new("assistant", "Yes") };
        let all = json!({"role": "assistant", "content": "Yes", "reasoning_content": "hm",
            "thinking": "hm"});
        assert_eq!(serde_json::to_value(View::new(&message)).unwrap(), all);
        message.tool_calls.push(ToolCall::new("1", "f", "{}"));
        assert_eq!(serde_json::to_value(View::new(&message)).unwrap().get("thinking"), None);
        message.content.clear();
        assert_eq!(serde_json::to_value(View::new(&message)).unwrap()["thinking"], "hm");
    }

    #[test]
    fn messages_are_read_as_they_are_written() {
        let message = Message { tool_calls: vec![ToolCall::new("1", "f", "{}")], ..Message::new("assistant", "") };
        let text = serde_json::to_string(&message).unwrap();
        assert_eq!(serde_json::from_str::<Message>(&text).unwrap(), message);
        assert!(serde_json::from_str::<Message>(r#"{"role":"user","content":"","x":1}"#).is_err());
    }
}
