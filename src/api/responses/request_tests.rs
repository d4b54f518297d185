//! Tests of the fields of `/v1/responses`.

use super::*;
use crate::generate::constraint::ConstraintSource;
use proptest::prelude::*;

const LIMITS: Limits = Limits { max_n: 4, max_logprobs: 20, strict_fields: true, unloads: true };

fn request(text: &str) -> ApiResult<ResponsesRequest> {
    let mut body = Body::parse(text.as_bytes())?;
    let request = ResponsesRequest::take(&mut body, &LIMITS)?;
    body.rest(true).map(|_| request)
}

fn conversation(request: &ResponsesRequest) -> &Conversation {
    match &request.source {
        PromptSource::Chat(chat) => chat,
        other => panic!("found {other:?}"),
    }
}

#[test]
fn fields_become_messages_tools_and_variables() {
    let request = request(
        r#"{"instructions": "be brief", "input": "hi", "tools": [{"type": "function", "name": "shell",
            "description": "runs", "strict": false, "parameters": {"type": "object"}}], "tool_choice": "auto",
            "parallel_tool_calls": false, "reasoning": {"effort": "none"}, "store": true, "stream": true,
            "include": ["reasoning.encrypted_content"], "max_output_tokens": 9, "metadata": {"a": "b"}, "user": "u",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
            "previous_response_id": null, "background": false, "truncation": "disabled", "max_tool_calls": 3}"#,
    )
    .unwrap();
    let chat = conversation(&request);
    assert_eq!(chat.messages.iter().map(|message| message.content.as_str()).collect::<Vec<_>>(), ["be brief", "hi"]);
    let function = json!({"name": "shell", "description": "runs", "parameters": {"type": "object"}, "strict": false});
    assert_eq!(chat.options.tools, Some(json!([{"type": "function", "function": function}])));
    assert_eq!(chat.options.variables["enable_thinking"], json!(false));
    assert!(!chat.parallel && request.settings.stream);
    assert_eq!(request.settings.constraint, Some(ConstraintSource::JsonSchemaHint(r#"{"type":"object"}"#.into())));
    assert_eq!((request.max_tokens, &request.echo["metadata"]), (Some(9), &json!({"a": "b"})));
    assert_eq!(request.echo["tools"][0]["name"], "shell");
}

#[test]
fn wrong_and_unsupported_fields_are_refused_by_name() {
    let cases = [
        (r#""input": 1"#, "input"),
        (r#""instructions": 1"#, "instructions"),
        (r#""previous_response_id": "resp_1""#, "previous_response_id"),
        (r#""conversation": {"id": "x"}"#, "conversation"),
        (r#""background": true"#, "background"),
        (r#""prompt": "x""#, "prompt"),
        (r#""top_logprobs": 21"#, "top_logprobs"),
        (r#""include": [1]"#, "include[0]"),
        (r#""prompt": {"id": "pmpt_1"}"#, "prompt"),
        (r#""prompt": 1"#, "prompt"),
        (r#""include": [1]"#, "include[0]"),
        (r#""truncation": "middle""#, "truncation"),
        (r#""truncation": "auto""#, "truncation"),
        (r#""text": {"verbosity": "low"}"#, "text.verbosity"),
        (r#""text": {"format": {"type": "xml"}}"#, "text.format"),
        (r#""text": {"format": {"type": "json_schema"}}"#, "text.format"),
        (r#""text": {"format": 1}"#, "text.format"),
        (r#""text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}"#, "text.format"),
        (r#""reasoning": {"effort": 1}"#, "reasoning.effort"),
        (r#""reasoning": "high""#, "reasoning"),
        (r#""max_output_tokens": 0"#, "max_output_tokens"),
        (r#""metadata": "x""#, "metadata"),
        (r#""n": 2"#, "n"),
        (r#""tools": {}"#, "tools"),
        (r#""tools": [{"name": "f"}]"#, "tools[0].type"),
        (r#""tools": [{"type": "web_search"}]"#, "tools[0].type"),
        (r#""tools": [{"type": "custom", "name": "apply_patch"}]"#, "tools[0].type"),
        (r#""tools": [{"type": "function"}]"#, "tools[0].name"),
        (r#""tool_choice": "required""#, "tool_choice"),
        (r#""tool_choice": {"type": "mcp"}"#, "tool_choice.type"),
        (r#""tool_choice": {"type": "function"}"#, "tool_choice.name"),
        (r#""surprise": 1"#, "surprise"),
    ];
    for (field, param) in cases {
        let input = if param == "input" { "" } else { r#""input": "x", "# };
        let error = request(&format!("{{{input}{field}}}")).unwrap_err();
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{field}: {error:?}");
    }
}

/// Generates members of the bodies and items of this endpoint with values of any type.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        prop::sample::select(vec!["message", "function_call", "function", "user", "assistant", "json_schema", "none"])
            .prop_map(Value::from),
    ];
    let names = prop::sample::select(vec![
        "type",
        "role",
        "content",
        "text",
        "call_id",
        "name",
        "arguments",
        "output",
        "summary",
        "format",
        "schema",
        "effort",
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
                "input", "instructions", "tools", "tool_choice", "text", "reasoning", "include", "metadata", "stream",
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
