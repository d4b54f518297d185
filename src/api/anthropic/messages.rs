//! System text and messages of `/v1/messages`: lists of content blocks, turned into the messages of a conversation.

use crate::api::body::expected;
use crate::api::dialogue::Dialogue;
use crate::api::error::{ApiError, ApiResult};
use crate::api::messages_in::{MOST_MESSAGES, arguments};
use crate::api::object::{Object, list};
use crate::generate::text::{Ending, Message};
use serde_json::{Value, json};

/// Beginning of a block of the system text in which Claude Code describes its version and the request for accounting.
/// It changes with every request, so the prefix cache could not be used behind it.
const BILLING: &str = "x-anthropic-billing-header:";

/// Reads `system` and `messages`. The model continues a last message of the assistant.
///
/// # Errors
/// A message or block has another form or kind, or there is none.
pub fn read(system: Option<Value>, messages: Option<Value>) -> ApiResult<(Vec<Message>, Ending)> {
    let mut dialogue = Dialogue::joining();
    for text in system.map(|system| texts(system, "system")).transpose()?.unwrap_or_default() {
        if !text.starts_with(BILLING) {
            dialogue.instructions("system", text);
        }
    }
    let messages = messages.ok_or_else(|| ApiError::field("messages", "found none, expected a list of messages"))?;
    let messages = list(messages, "messages", MOST_MESSAGES)?;
    if messages.is_empty() {
        return Err(ApiError::field("messages", "found no message, expected at least one"));
    }
    let last = messages.len() - 1;
    for (i, value) in messages.into_iter().enumerate() {
        message(Object::read(value, format!("messages[{i}]"))?, &mut dialogue)?;
    }
    let ending = match dialogue.last() {
        Some(end) if end.role == "assistant" && !end.tool_calls.is_empty() => {
            let found = "found calls of tools without results, expected a message of the user with a result of each";
            return Err(ApiError::field(&format!("messages[{last}]"), found));
        }
        Some(end) if end.role == "assistant" && end.content.is_empty() => {
            dialogue.remove_last();
            Ending::GenerationPrompt
        }
        Some(end) if end.role == "assistant" => Ending::ContinueFinal,
        _ => Ending::GenerationPrompt,
    };
    Ok((dialogue.finish(), ending))
}

fn message(mut message: Object, dialogue: &mut Dialogue) -> ApiResult<()> {
    let role = message.required("role")?;
    let place = message.place("content");
    let content = message.take("content").ok_or_else(|| ApiError::field(&place, "found none, expected a text"))?;
    match role.as_str() {
        "user" => user(blocks(content, &place)?, dialogue),
        "assistant" => blocks(content, &place)?.into_iter().try_for_each(|block| assistant(block, dialogue)),
        "system" => {
            dialogue.instructions("system", texts(content, &place)?.join("\n"));
            Ok(())
        }
        _ => Err(ApiError::field(&message.place("role"), "expected the role user or assistant")),
    }
}

/// Returns the blocks of a content; a text is one block.
fn blocks(content: Value, place: &str) -> ApiResult<Vec<Object>> {
    let blocks = match content {
        Value::String(text) => vec![json!({"type": "text", "text": text})],
        Value::Array(blocks) => blocks,
        other => return Err(expected(place, "a text or a list of content blocks", &other)),
    };
    blocks.into_iter().enumerate().map(|(i, block)| Object::read(block, format!("{place}[{i}]"))).collect()
}

/// Returns the texts of a content that has only texts.
fn texts(content: Value, place: &str) -> ApiResult<Vec<String>> {
    let text = |mut block: Object| match block.required("type")?.as_str() {
        "text" => block.required("text"),
        kind => Err(no_text(&block, kind)),
    };
    blocks(content, place)?.into_iter().map(text).collect()
}

fn no_text(block: &Object, kind: &str) -> ApiError {
    block.unsupported(kind, "this server takes text only")
}

/// Adds a message of the user: results of tools first, as templates expect them directly behind the calls.
fn user(blocks: Vec<Object>, dialogue: &mut Dialogue) -> ApiResult<()> {
    let mut texts = Vec::new();
    let mut has_results = false;
    for mut block in blocks {
        match block.required("type")?.as_str() {
            "text" => texts.push(block.required("text")?),
            "tool_result" => {
                has_results = true;
                result(block, dialogue)?;
            }
            kind => return Err(no_text(&block, kind)),
        }
    }
    if !has_results || !texts.is_empty() {
        dialogue.user(texts.join("\n"));
    }
    Ok(())
}

fn result(mut block: Object, dialogue: &mut Dialogue) -> ApiResult<()> {
    let id = block.required("tool_use_id")?;
    let place = block.place("content");
    let content = block.take("content").map(|content| texts(content, &place)).transpose()?;
    let text = content.unwrap_or_default().join("\n");
    // No chat template has a mark for failures.
    let text = if block.flag("is_error")? { format!("Error: {text}") } else { text };
    dialogue.result(id, text);
    Ok(())
}

fn assistant(mut block: Object, dialogue: &mut Dialogue) -> ApiResult<()> {
    match block.required("type")?.as_str() {
        "text" => dialogue.answer(&block.required("text")?),
        "thinking" => dialogue.reasoning(&block.required("thinking")?),
        // Encrypted reasoning of another server.
        "redacted_thinking" => {}
        "tool_use" => {
            let (id, name) = (block.required("id")?, block.required("name")?);
            let input = block.take("input").unwrap_or_default();
            dialogue.call(&id, &name, arguments(&input, &block.place("input"))?);
        }
        kind => return Err(no_text(&block, kind)),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_become_messages() {
        let system = json!([
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1"},
            {"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}},
        ]);
        let messages = json!([
            {"role": "user", "content": "u"},
            {"role": "user", "content": [{"type": "text", "text": "v"}, {"type": "text", "text": "w"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "r", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                {"type": "tool_use", "id": "2", "name": "g", "input": {}},
            ]},
            {"role": "user", "content": [
                {"type": "text", "text": "more"},
                {"type": "tool_result", "tool_use_id": "1", "content": "5"},
                {"type": "tool_result", "tool_use_id": "2", "is_error": true,
                 "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "file"}]},
            ]},
        ]);
        let (messages, ending) = read(Some(system), Some(messages)).unwrap();
        let shown: Vec<(&str, &str)> =
            messages.iter().map(|message| (message.role.as_str(), message.content.as_str())).collect();
        let expected = [
            ("system", "s"),
            ("user", "u\nv\nw"),
            ("assistant", "a"),
            ("tool", "5"),
            ("tool", "Error: no\nfile"),
            ("user", "more"),
        ];
        assert_eq!((shown.as_slice(), ending), (&expected[..], Ending::GenerationPrompt));
        assert_eq!(messages[2].reasoning_content.as_deref(), Some("r"));
        assert_eq!(messages[2].tool_calls[0].function.arguments, json!({"x": 1}));
        assert_eq!((messages[4].name.as_deref(), messages[4].tool_call_id.as_deref()), (Some("g"), Some("2")));
    }

    #[test]
    fn a_last_message_of_the_assistant_is_continued() {
        let last = |content: Value| {
            let messages = json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": content}]);
            read(None, Some(messages))
        };
        let (messages, ending) = last(json!("a")).unwrap();
        assert_eq!((messages.len(), ending), (2, Ending::ContinueFinal));
        for empty in [json!([]), json!("")] {
            let (messages, ending) = last(empty).unwrap();
            assert_eq!((messages.len(), ending), (1, Ending::GenerationPrompt));
        }
        let call = json!([{"type": "tool_use", "id": "1", "name": "f", "input": {}}]);
        assert_eq!(last(call).unwrap_err().param.as_deref(), Some("messages[1]"));
    }

    #[test]
    fn wrong_messages_are_refused_by_their_place() {
        let of = |role: &str, block: Value| json!([{"role": role, "content": [block]}]);
        let cases = [
            (json!([]), "messages"),
            (json!("x"), "messages"),
            (json!(["x"]), "messages[0]"),
            (json!([{"role": "tool", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": 1}]), "messages[0].content"),
            (of("user", json!("x")), "messages[0].content[0]"),
            (of("user", json!({"type": "image", "source": {}})), "messages[0].content[0].type"),
            (of("user", json!({"type": "document"})), "messages[0].content[0].type"),
            (of("user", json!({"type": "text"})), "messages[0].content[0].text"),
            (of("user", json!({"type": "tool_result", "content": "x"})), "messages[0].content[0].tool_use_id"),
            (
                of("user", json!({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]})),
                "messages[0].content[0].content[0].type",
            ),
            (of("assistant", json!({"type": "server_tool_use"})), "messages[0].content[0].type"),
            (of("assistant", json!({"type": "tool_use", "id": "1"})), "messages[0].content[0].name"),
            (
                of("assistant", json!({"type": "tool_use", "id": "1", "name": "f", "input": "{"})),
                "messages[0].content[0].input",
            ),
            (of("assistant", json!({"type": "thinking"})), "messages[0].content[0].thinking"),
        ];
        for (value, place) in cases {
            assert_eq!(read(None, Some(value.clone())).unwrap_err().param.as_deref(), Some(place), "{value}");
        }
        let hi = Some(json!([{"role": "user", "content": "u"}]));
        assert_eq!(read(Some(json!(1)), hi).unwrap_err().param.as_deref(), Some("system"));
        assert_eq!(read(None, None).unwrap_err().param.as_deref(), Some("messages"));
    }
}
