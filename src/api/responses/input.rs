//! Input of `/v1/responses`: a text or a list of items, turned into the messages of a conversation.

use crate::api::body::expected;
use crate::api::dialogue::Dialogue;
use crate::api::error::{ApiError, ApiResult};
use crate::api::messages_in::{MOST_MESSAGES, arguments, content_text};
use crate::api::object::{Object, list};
use crate::generate::text::Message;
use serde_json::Value;

/// Kinds of items that belong to the state of a conversation which a server keeps.
const STORED: [&str; 2] = ["item_reference", "compaction"];

/// Reads `instructions` and `input`.
///
/// # Errors
/// An item has another form or kind, or there is none.
pub fn read(instructions: Option<String>, input: Option<Value>) -> ApiResult<Vec<Message>> {
    let mut dialogue = Dialogue::new();
    if let Some(text) = instructions {
        dialogue.instructions("system", text);
    }
    match input {
        None => return Err(ApiError::field("input", "found none, expected a text or a list of items")),
        Some(Value::String(text)) => dialogue.user(text),
        Some(items @ Value::Array(_)) => {
            for (i, value) in list(items, "input", MOST_MESSAGES)?.into_iter().enumerate() {
                item(Object::read(value, format!("input[{i}]"))?, &mut dialogue)?;
            }
        }
        Some(other) => return Err(expected("input", "a text or a list of items", &other)),
    }
    let messages = dialogue.finish();
    match messages.is_empty() {
        true => Err(ApiError::field("input", "found no message, expected at least one")),
        false => Ok(messages),
    }
}

fn item(mut item: Object, dialogue: &mut Dialogue) -> ApiResult<()> {
    // The short form of a message has no type.
    let kind = item.text("type")?.unwrap_or_else(|| "message".into());
    match kind.as_str() {
        "message" => message(item, dialogue)?,
        "reasoning" => dialogue.reasoning(&reasoning(item)?),
        "function_call" => {
            let name = item.required("name")?;
            let place = item.place("arguments");
            let given = item.take("arguments").unwrap_or_default();
            dialogue.call(&item.required("call_id")?, &name, arguments(&given, &place)?);
        }
        "function_call_output" => {
            let id = item.required("call_id")?;
            dialogue.result(id, content(&mut item, "output")?);
        }
        kind if STORED.contains(&kind) => {
            return Err(item.unsupported(kind, "this server keeps no conversations; send the items themselves"));
        }
        kind => return Err(item.unsupported(kind, "send messages, function calls and their outputs")),
    }
    Ok(())
}

fn message(mut item: Object, dialogue: &mut Dialogue) -> ApiResult<()> {
    let role = item.required("role")?;
    let text = content(&mut item, "content")?;
    match role.as_str() {
        "system" | "developer" => dialogue.instructions(&role, text),
        "user" => dialogue.user(text),
        "assistant" => dialogue.answer(&text),
        _ => {
            let found = "expected the role system, developer, user or assistant";
            return Err(ApiError::field(&item.place("role"), found));
        }
    }
    Ok(())
}

fn content(item: &mut Object, name: &str) -> ApiResult<String> {
    let place = item.place(name);
    let content = item.take(name).ok_or_else(|| ApiError::field(&place, "found none, expected a text"))?;
    content_text(content, &place)
}

/// Returns the text of a reasoning item: the reasoning itself, or else its summary. Encrypted reasoning of other
/// servers has neither.
fn reasoning(mut item: Object) -> ApiResult<String> {
    let mut texts = Vec::new();
    for name in ["content", "summary"] {
        let Some(parts) = item.take(name) else { continue };
        let place = item.place(name);
        for (i, part) in list(parts, &place, MOST_MESSAGES)?.into_iter().enumerate() {
            texts.push(Object::read(part, format!("{place}[{i}]"))?.required("text")?);
        }
        if !texts.is_empty() {
            break;
        }
    }
    Ok(texts.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn items_become_messages() {
        let input = json!([
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
            {"role": "user", "content": "u"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "short"}],
             "content": [{"type": "reasoning_text", "text": "r"}], "encrypted_content": null},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "a", "annotations": []}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{\"x\": 1}", "id": "fc_1"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "xyz"},
            {"type": "function_call", "call_id": "d", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "d", "output": "p"},
        ]);
        let messages = read(Some("i".into()), Some(input)).unwrap();
        let roles: Vec<&str> = messages.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "assistant", "tool"]);
        assert_eq!(messages[0].content, "i\n\nd");
        assert_eq!((messages[2].content.as_str(), messages[2].reasoning_content.as_deref()), ("a", Some("r")));
        assert_eq!(messages[2].tool_calls[0].function.arguments, json!({"x": 1}));
        assert_eq!((messages[3].content.as_str(), messages[3].name.as_deref()), ("o", Some("f")));
        assert_eq!(messages[4].reasoning_content.as_deref(), Some("s"));
    }

    #[test]
    fn wrong_items_are_refused_by_their_place() {
        let image = json!([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]);
        let cases = [
            (json!(1), "input"),
            (json!([]), "input"),
            (json!(["x"]), "input[0]"),
            (json!([{"type": 1}]), "input[0].type"),
            (json!([{"type": "item_reference", "id": "x"}]), "input[0].type"),
            (json!([{"type": "web_search_call"}]), "input[0].type"),
            (json!([{"role": "robot", "content": "x"}]), "input[0].role"),
            (json!([{"role": "user"}]), "input[0].content"),
            (image, "input[0].content[0]"),
            (json!([{"type": "function_call", "name": "f", "arguments": "{}"}]), "input[0].call_id"),
            (json!([{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[1]"}]), "input[0].arguments"),
            (json!([{"type": "function_call_output", "call_id": "c"}]), "input[0].output"),
            (json!([{"type": "reasoning", "content": [{"text": 1}]}]), "input[0].content[0].text"),
            (json!([{"type": "reasoning", "summary": []}]), "input"),
        ];
        for (value, place) in cases {
            assert_eq!(read(None, Some(value.clone())).unwrap_err().param.as_deref(), Some(place), "{value}");
        }
        assert_eq!(read(Some("i".into()), None).unwrap_err().param.as_deref(), Some("input"));
    }
}
