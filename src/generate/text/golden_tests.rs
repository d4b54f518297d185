//! Compares rendered chat templates with those of `transformers`, which tests/reference/make_templates.py collected.

use super::chat::{ChatTemplate, Ending, RenderOptions};
use super::message::Message;
use serde_json::{Value, json};
use std::path::Path;

/// Limits of bytes and steps, far above what the cases need.
const LONGEST: usize = 1 << 20;
const STEPS: u64 = 2_000_000;

/// Renders a case; returns `None` if the template refuses the conversation.
fn rendered(dir: &Path, source: &str, case: &Value, now: u64) -> Option<String> {
    let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
    let ending = match (&case["add_generation_prompt"], &case["continue_final_message"]) {
        (Value::Bool(true), _) => Ending::GenerationPrompt,
        (_, Value::Bool(true)) => Ending::ContinueFinal,
        _ => Ending::Plain,
    };
    let tools = Some(case["tools"].clone()).filter(|tools| !tools.is_null());
    let options =
        RenderOptions { tools, ending, variables: case["variables"].as_object().cloned().unwrap_or_default() };
    let template = ChatTemplate::with_source(dir, source.to_string(), Path::new("golden")).unwrap();
    template.render_at(&messages, &options, LONGEST, STEPS, now).ok()
}

#[test]
fn templates_render_as_transformers_renders_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let golden = std::fs::read(root.join("tests/fixtures/templates/golden.json.zst")).unwrap();
    let golden: Value = serde_json::from_slice(&zstd::decode_all(&golden[..]).unwrap()).unwrap();
    let (now, dir) = (golden["now"].as_u64().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(dir.path().join(super::chat::CONFIG_NAME), golden["tokens"].to_string()).unwrap();
    let mut failures = Vec::new();
    let mut compare = |name: String, source: &str, case: &Value, expected: &Value| {
        let found = rendered(dir.path(), source, case, now);
        if found.as_deref() != expected.as_str() {
            failures.push(format!("{name}\n  expected {expected}\n  found    {found:?}"));
        }
    };
    for (name, results) in golden["templates"].as_object().unwrap() {
        let source = std::fs::read_to_string(root.join(name)).unwrap();
        let reads_tools = ChatTemplate::from_source(&source).reads_tools();
        for (number, expected) in results.as_array().unwrap().iter().enumerate() {
            let case = &golden["cases"][number];
            let has_thought = |message: &Value| {
                !message["reasoning_content"].is_null() && !message["tool_calls"].is_null() && message["content"] != ""
            };
            // The role `developer` becomes `system` for templates that do not know it.
            let is_developer = |message: &Value| message["role"] == "developer";
            if case["messages"].as_array().unwrap().iter().any(is_developer) && !source.contains("developer") {
                continue;
            }
            // Two cases differ on purpose. Tools without a place in the template are an error here; transformers leaves
            // them out. Templates of harmony refuse a call with both a content and a thought; here they get no thought.
            let expected = match expected {
                _ if !case["tools"].is_null() && !reads_tools => &Value::Null,
                Value::Null if case["messages"].as_array().unwrap().iter().any(has_thought) => continue,
                expected => expected,
            };
            compare(format!("{name}, case {number}"), &source, case, expected);
        }
    }
    let context = json!({"messages": [golden["cases"][0]["messages"][0]], "variables": golden["context"],
        "add_generation_prompt": true});
    for pair in golden["expressions"].as_array().unwrap() {
        let source = pair[0].as_str().unwrap();
        compare(source.to_string(), source, &context, &pair[1]);
    }
    assert!(failures.is_empty(), "{} differ:\n{}", failures.len(), failures.join("\n"));
}
