//! Tests of the fields of `/v1/messages`.

use super::*;
use crate::generate::constraint::ConstraintSource;
use proptest::prelude::*;

const LIMITS: Limits = Limits { max_n: 4, max_logprobs: 20, strict_fields: true, unloads: true };

fn request(text: &str) -> ApiResult<MessagesRequest> {
    let mut body = Body::parse(text.as_bytes())?;
    let request = MessagesRequest::take(&mut body, &LIMITS)?;
    body.rest(true).map(|_| request)
}

#[test]
fn fields_become_messages_tools_and_variables() {
    let request = request(
        r#"{"max_tokens": 9, "system": "s", "messages": [{"role": "user", "content": "hi"}], "stream": true,
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"},
                       "cache_control": {"type": "ephemeral"}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}, "thinking": {"type": "disabled"},
            "stop_sequences": ["x"], "temperature": 0.5, "top_p": 0.9, "top_k": 4, "metadata": {"user_id": "u"},
            "service_tier": "auto", "cache_control": {"type": "ephemeral"},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}}}"#,
    )
    .unwrap();
    let PromptSource::Chat(chat) = &request.source else { panic!("found {:?}", request.source) };
    let function = json!({"name": "f", "description": "d", "parameters": {"type": "object"}});
    assert_eq!(chat.options.tools, Some(json!([{"type": "function", "function": function}])));
    assert_eq!(json!(chat.options.variables), json!({"enable_thinking": false, "reasoning_effort": "low"}));
    assert!(!chat.parallel && request.settings.stream);
    assert_eq!((request.max_tokens, request.settings.stop.as_slice()), (Some(9), &["x".to_string()][..]));
    assert_eq!((request.settings.sampling.top_k, chat.messages.len()), (Some(4), 2));
    assert_eq!(request.settings.constraint, Some(ConstraintSource::JsonSchemaHint(r#"{"type":"object"}"#.into())));
}

#[test]
fn wrong_and_unsupported_fields_are_refused_by_name() {
    let cases = [
        (r#""messages": 1"#, "messages"),
        (r#""system": 1"#, "system"),
        (r#""max_tokens": 0"#, "max_tokens"),
        (r#""stop_sequences": [1]"#, "stop_sequences"),
        (r#""thinking": {"type": "much"}"#, "thinking.type"),
        (r#""thinking": true"#, "thinking"),
        (r#""thinking": {"type": "enabled", "budget_tokens": 1024}"#, "thinking.budget_tokens"),
        (r#""tools": [{"type": "web_search_20250305", "name": "web_search"}]"#, "tools[0].type"),
        (r#""tools": [{"input_schema": {}}]"#, "tools[0].name"),
        (r#""tools": [{"name": "f"}]"#, "tools[0].input_schema"),
        (r#""tool_choice": {"type": "any"}"#, "tool_choice"),
        (r#""tool_choice": {"type": "some"}"#, "tool_choice.type"),
        (r#""tool_choice": {"type": "tool"}"#, "tool_choice.name"),
        (r#""tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}"#, "tool_choice.disable_parallel_tool_use"),
        (r#""mcp_servers": [{"url": "x"}]"#, "mcp_servers"),
        (r#""container": "x""#, "container"),
        (r#""output_format": {"type": "json_schema"}"#, "output_format"),
        (r#""output_config": {"format": {"type": "x"}}"#, "output_config.format"),
        (r#""output_config": {"effort": 1}"#, "output_config.effort"),
        (r#""n": 2"#, "n"),
        (r#""surprise": 1"#, "surprise"),
    ];
    for (field, param) in cases {
        let messages = if param == "messages" { "" } else { r#""messages": [{"role": "user", "content": "x"}], "# };
        let error = request(&format!("{{{messages}{field}}}")).unwrap_err();
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{field}: {error:?}");
    }
}

/// Generates members of the bodies and blocks of this endpoint with values of any type.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        prop::sample::select(vec![
            "text",
            "tool_use",
            "tool_result",
            "thinking",
            "user",
            "assistant",
            "any",
            "enabled"
        ])
        .prop_map(Value::from),
    ];
    let names = prop::sample::select(vec![
        "type",
        "role",
        "content",
        "text",
        "id",
        "name",
        "input",
        "tool_use_id",
        "thinking",
        "format",
        "is_error",
        "input_schema",
    ]);
    leaf.prop_recursive(4, 24, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(names.clone(), inner, 0..4).prop_map(|members| json!(members)),
        ]
    })
}

proptest! {
    #[test]
    fn any_body_is_a_request_or_an_error_of_the_client(
        fields in prop::collection::btree_map(
            prop::sample::select(vec![
                "messages", "system", "tools", "tool_choice", "thinking", "output_config", "stop_sequences", "stream",
            ]),
            any_value(),
            0..6,
        )
    ) {
        if let Err(error) = request(&json!(fields).to_string()) {
            prop_assert_eq!(error.status.as_u16(), 400);
        }
    }
}
