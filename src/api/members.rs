//! Members of the objects within requests, at every depth: those that this server reads, and those without effect on
//! the answer. All others are unknown, and get the treatment of unknown fields.

use super::other_fields::Api;
use serde_json::{Map, Value};

/// Largest number of unknown members that are named.
const MOST_NAMED: usize = 32;

/// Members of an object, or of the objects of a list.
#[derive(Debug)]
pub struct Members(&'static [Member]);

/// A member, and the members of its value if that is an object or a list of objects. Without them, any value fits.
#[derive(Debug)]
struct Member(&'static str, Option<&'static Members>);

const fn any(name: &'static str) -> Member {
    Member(name, None)
}

const fn of(name: &'static str, members: &'static Members) -> Member {
    Member(name, Some(members))
}

/// Parts of a content in the APIs of OpenAI. Answers have annotations and probabilities, which clients send back.
const PARTS: Members =
    Members(&[any("type"), any("text"), any("refusal"), any("annotations"), any("logprobs"), any("cache_control")]);
const CALL: Members = Members(&[any("id"), any("index"), any("type"), of("function", &CALLED)]);
const CALLED: Members = Members(&[any("name"), any("arguments")]);
const MESSAGE: Members = Members(&[
    any("role"),
    of("content", &PARTS),
    any("name"),
    any("id"),
    any("reasoning"),
    any("reasoning_content"),
    any("refusal"),
    any("annotations"),
    of("tool_calls", &CALL),
    any("tool_call_id"),
    any("cache_control"),
]);
const FUNCTION: Members = Members(&[any("name"), any("description"), any("parameters"), any("strict")]);
const TOOL: Members = Members(&[any("type"), of("function", &FUNCTION), any("cache_control")]);
const NAMED: Members = Members(&[any("name")]);
const STREAM: Members = Members(&[any("include_usage"), any("continuous_usage_stats"), any("include_obfuscation")]);
const SCHEMA: Members = Members(&[any("name"), any("description"), any("schema"), any("strict")]);
const FORMAT: Members = Members(&[
    any("type"),
    of("json_schema", &SCHEMA),
    // Llama.cpp has the schema of `json_object` here, and the Responses API has the members of `json_schema` here.
    any("schema"),
    any("name"),
    any("description"),
    any("strict"),
]);

/// Members of the fields that all APIs have.
const SETTINGS: [Member; 2] = [of("stream_options", &STREAM), of("response_format", &FORMAT)];

const CHAT: [Member; 5] = [
    of("messages", &MESSAGE),
    of("tools", &TOOL),
    of("tool_choice", &Members(&[any("type"), of("function", &NAMED)])),
    of("thinking", &Members(&[any("type")])),
    of("reasoning", &Members(&[any("effort"), any("enabled"), any("exclude")])),
];

const RESPONSES: [Member; 5] = [
    of(
        "input",
        &Members(&[
            any("type"),
            any("id"),
            any("status"),
            any("role"),
            of("content", &PARTS),
            any("phase"),
            any("name"),
            any("arguments"),
            any("call_id"),
            of("output", &PARTS),
            of("summary", &PARTS),
            // Reasoning of other servers, which is not readable.
            any("encrypted_content"),
        ]),
    ),
    of("text", &Members(&[of("format", &FORMAT), any("verbosity")])),
    of("reasoning", &Members(&[any("effort"), any("summary"), any("generate_summary")])),
    of("tools", &Members(&[any("type"), any("name"), any("description"), any("parameters"), any("strict")])),
    of("tool_choice", &Members(&[any("type"), any("name")])),
];

/// Content blocks of the API of Anthropic. Marks for its cache and citations of its answers have no effect here.
const BLOCKS: Members = Members(&[
    any("type"),
    any("text"),
    any("cache_control"),
    any("citations"),
    any("thinking"),
    any("signature"),
    any("data"),
    any("id"),
    any("name"),
    any("input"),
    any("caller"),
    any("tool_use_id"),
    of("content", &RESULT),
    any("is_error"),
]);
const RESULT: Members = Members(&[any("type"), any("text"), any("cache_control"), any("citations")]);

const MESSAGES: [Member; 7] = [
    of("system", &RESULT),
    of("messages", &Members(&[any("role"), of("content", &BLOCKS)])),
    of(
        "tools",
        &Members(&[
            any("type"),
            any("name"),
            any("description"),
            any("input_schema"),
            any("strict"),
            any("cache_control"),
        ]),
    ),
    of("tool_choice", &Members(&[any("type"), any("name"), any("disable_parallel_tool_use")])),
    of("thinking", &Members(&[any("type")])),
    of("output_config", &Members(&[any("effort"), of("format", &FORMAT)])),
    of("output_format", &FORMAT),
];

/// Returns the paths of the unknown members within the fields of a request, such as `messages[0].colour`. Of members
/// that differ in the indices of lists only, the first one is named.
pub fn unknown(fields: &Map<String, Value>, api: Api) -> Vec<String> {
    let own: &[Member] = match api {
        Api::Completions => &[],
        Api::Chat => &CHAT,
        Api::Responses => &RESPONSES,
        Api::Messages => &MESSAGES,
    };
    let mut found = Found::default();
    for Member(name, members) in SETTINGS.iter().chain(own) {
        if let (Some(value), Some(members)) = (fields.get(*name), members) {
            found.walk(value, members, &mut (*name).to_string());
        }
    }
    found.paths
}

#[derive(Default)]
struct Found {
    paths: Vec<String>,
    /// The same without indices.
    kinds: Vec<String>,
}

impl Found {
    fn walk(&mut self, value: &Value, members: &Members, path: &mut String) {
        let length = path.len();
        match value {
            Value::Object(object) => {
                for (name, value) in object.iter().filter(|(_, value)| !value.is_null()) {
                    path.push('.');
                    match members.0.iter().find(|known| known.0 == name) {
                        Some(Member(name, Some(inner))) => {
                            path.push_str(name);
                            self.walk(value, inner, path);
                        }
                        Some(_) => {}
                        None => {
                            path.extend(name.chars().take(80));
                            self.add(path);
                        }
                    }
                    path.truncate(length);
                }
            }
            Value::Array(list) => {
                for (i, value) in list.iter().enumerate() {
                    path.push_str(&format!("[{i}]"));
                    self.walk(value, members, path);
                    path.truncate(length);
                }
            }
            _ => {}
        }
    }

    fn add(&mut self, path: &str) {
        let kind: String = path.chars().filter(|c| !c.is_ascii_digit()).collect();
        if self.paths.len() < MOST_NAMED && !self.kinds.contains(&kind) {
            self.paths.push(path.into());
            self.kinds.push(kind);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn unknown_members_are_found_at_every_depth() {
        struct Case(Api, Value, &'static [&'static str]);
        let message = |more: Value| json!({"messages": [{"role": "user", "content": "x"}, more]});
        let cases = [
            Case(Api::Chat, json!({"stream_options": {"include_usage": true, "x": 1}}), &["stream_options.x"]),
            Case(Api::Completions, json!({"stream_options": {"x": 1, "y": null}}), &["stream_options.x"]),
            Case(Api::Chat, message(json!({"role": "user", "content": "x", "x": 1})), &["messages[1].x"]),
            Case(
                Api::Chat,
                message(json!({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "x": 1}]})),
                &["messages[1].content[1].x"],
            ),
            Case(
                Api::Chat,
                message(json!({"tool_calls": [{"function": {"name": "f", "arguments": "{}", "x": 1}, "y": 1}]})),
                &["messages[1].tool_calls[0].function.x", "messages[1].tool_calls[0].y"],
            ),
            Case(Api::Chat, json!({"messages": [{"x": 1}, {"x": 1}, {"y": 1}]}), &["messages[0].x", "messages[2].y"]),
            Case(
                Api::Chat,
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": 1}, "y": 1}}}),
                &["response_format.json_schema.y"],
            ),
            Case(
                Api::Chat,
                json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": 1}, "y": 1}}]}),
                &["tools[0].function.y"],
            ),
            Case(Api::Chat, json!({"thinking": {"type": "enabled", "budget": 1}}), &["thinking.budget"]),
            Case(Api::Responses, json!({"input": [{"role": "user", "content": "x", "x": 1}]}), &["input[0].x"]),
            Case(Api::Responses, json!({"input": "x", "reasoning": {"x": 1}}), &["reasoning.x"]),
            Case(Api::Responses, json!({"text": {"format": {"type": "text", "x": 1}}}), &["text.format.x"]),
            Case(
                Api::Messages,
                json!({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"x": 1}]}]}]}),
                &["messages[0].content[0].content[0].x"],
            ),
            Case(
                Api::Messages,
                json!({"system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}, "x": 1}],
                       "thinking": {"type": "enabled", "budget_tokens": 5}}),
                &["system[0].x", "thinking.budget_tokens"],
            ),
            Case(Api::Messages, json!({"tools": [{"name": "f", "input_schema": {"x": 1}, "y": 1}]}), &["tools[0].y"]),
        ];
        for Case(api, fields, expected) in cases {
            assert_eq!(unknown(fields.as_object().unwrap(), api), expected, "{fields}");
        }
        let many: Vec<Value> = (0..100).map(|i| json!({ (format!("x{}", "y".repeat(i))): 1 })).collect();
        assert_eq!(unknown(json!({"messages": many}).as_object().unwrap(), Api::Chat).len(), MOST_NAMED);
    }
}
