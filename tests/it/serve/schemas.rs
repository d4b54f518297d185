//! Documents that a known model writes arrive unchanged under the schemas for which they are valid, and so do calls of
//! tools whose schemas have parts that cannot be enforced.

use super::known::{GO, KnownModel, serve};
use super::said::{Said, chat};
use serde_json::{Value, json};

/// A document, and schemas for which it is valid.
fn documents() -> Vec<(&'static str, Vec<Value>)> {
    let text = |more: Value| {
        let mut schema = json!({"type": "string"});
        schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"type": "object", "properties": {"name": schema}, "required": ["name"]})
    };
    vec![
        (
            r#"{"name": "caf\u00e9 au lait"}"#,
            vec![
                text(json!({})),
                text(json!({"minLength": 12, "maxLength": 12})),
                text(json!({"pattern": "^café [a-z ]+$"})),
                text(json!({"const": "café au lait"})),
                text(json!({"enum": ["tea", "café au lait"]})),
                json!({"type": "object", "additionalProperties": {"type": "string"}}),
                json!({}),
            ],
        ),
        (
            r#"{"n\u00e4me\/1": [1.50, -0, 2E+3], "x": null}"#,
            vec![
                json!({"type": "object", "properties": {"näme/1": {
            "type": "array", "items": {"type": "number"}}, "x": {"type": ["string", "null"]}}}),
                json!({}),
            ],
        ),
        (r#"["\ud83d\ude00", "\\ \" \/ \b\f\n\r\t"]"#, vec![json!({"type": "array", "items": {"type": "string"}})]),
    ]
}

#[test]
fn documents_of_a_known_model_arrive_unchanged_under_their_schemas() {
    let home = tempfile::tempdir().unwrap();
    let template = format!("{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{GO}");
    let documents = documents();
    let model = documents.iter().fold(KnownModel::new(&template), |model, (text, _)| model.text(text));
    let server = serve(home.path(), &[("model", model)], &[]);
    for (i, (text, schemas)) in documents.iter().enumerate() {
        let schema = |schema: &Value| json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
        let mut formats: Vec<Value> = schemas.iter().map(schema).collect();
        formats.extend(text.starts_with('{').then(|| json!({"type": "json_object"})));
        for format in formats {
            let body = json!({"messages": [{"role": "user", "content": "x"}], "response_format": format,
                              "max_tokens": 200, "chat_template_kwargs": KnownModel::go(i + 1)});
            assert_eq!(chat(&server, &body), Said::text(text), "{format}");
        }
    }
}

#[test]
fn calls_of_a_known_model_arrive_with_any_list_of_tools() {
    let home = tempfile::tempdir().unwrap();
    let template = format!(
        "{{% if tools %}}<tool_call>\n{{\"name\": f, \"arguments\": {{}}}}\n</tool_call>{{% endif %}}\
         {{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{GO}"
    );
    let arguments = r#"{"s": "caf\u00e9 \/ x"}"#;
    let call = format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {arguments}}}\n</tool_call>");
    let model = KnownModel::new(&template).plain(&["<tool_call>", "</tool_call>"]).text(&call);
    let server = serve(home.path(), &[("model", model)], &[]);
    let known = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object",
        "properties": {"s": {"type": "string", "format": "x", "nullable": true}}, "required": ["s"]}}});
    let mut lists = vec![Vec::new()];
    for name in ["openapi", "pydantic", "zod"] {
        let path = format!("{}/tests/fixtures/tool-lists/{name}.json", env!("CARGO_MANIFEST_DIR"));
        let list: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let tool = |tool: &Value| {
            json!({"type": "function", "function":
            {"name": tool["name"], "parameters": tool["inputSchema"]}})
        };
        lists.push(list.as_array().unwrap().iter().map(tool).collect());
    }
    for (i, mut tools) in lists.into_iter().enumerate() {
        tools.push(known.clone());
        let choices = [json!("auto"), json!("required"), json!({"type": "function", "function": {"name": "f"}})];
        for choice in &choices[..if i == 0 { 3 } else { 1 }] {
            let body = json!({"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice,
                              "max_tokens": 200});
            assert_eq!(chat(&server, &body), Said::calls(&[("f", arguments)]), "{choice} of {}", body["tools"]);
        }
    }
}
