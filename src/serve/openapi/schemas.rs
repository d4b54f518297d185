//! Objects of requests and answers.

use super::fields;
use serde_json::{Map, Value, json};

/// Returns all schemas by name.
pub fn all() -> Value {
    let mut all = Map::new();
    for (name, lists, required, api) in fields::REQUESTS {
        all.insert((*name).into(), fields::schema(lists, required, *api));
    }
    for part in [
        settings(),
        other_servers(),
        conversation(),
        text_answers(),
        chat_answers(),
        other_apis(),
        errors(),
        models(),
        server(),
    ] {
        let Value::Object(part) = part else { continue };
        all.extend(part);
    }
    Value::Object(all)
}

fn to(name: &str) -> Value {
    super::reference("schemas", name)
}

/// Returns the schema of a text or null.
fn text_or_null() -> Value {
    json!({"type": ["string", "null"]})
}

fn whole() -> Value {
    json!({"type": "integer", "minimum": 0})
}

fn list(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

/// Returns the schema of an object in which all members must be present.
fn object(members: Value) -> Value {
    let required: Vec<&String> = members.as_object().into_iter().flat_map(Map::keys).collect();
    json!({"type": "object", "required": required, "properties": members})
}

/// Returns the schema of an object with members of any name.
fn any_object() -> Value {
    json!({"type": "object"})
}

/// Returns the schemas of the parts of requests that generate text.
fn settings() -> Value {
    let id = json!({"type": "integer", "minimum": 0, "maximum": u32::MAX});
    let stop = json!({"type": "string", "minLength": 1, "maxLength": 256});
    let texts = |most: usize| json!({"type": "array", "items": {"type": "string"}, "maxItems": most});
    json!({
        "Prompt": {"anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 64},
            {"type": "array", "items": id, "minItems": 1},
            {"type": "array", "items": {"type": "array", "items": id, "minItems": 1}, "minItems": 1, "maxItems": 64},
        ]},
        "Stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": 16}]},
        "AllowedTokens": {"type": "array", "items": id, "minItems": 1, "maxItems": 1 << 16},
        "UnicodeForm": {"enum": ["nfc", "nfd", "nfkc", "nfkd"]},
        "LogitBias": {
            "type": "object",
            "description": "A key is a token id, or a text of one token.",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": 1024,
        },
        "AdapterScales": {"type": "array", "maxItems": 4, "items": {"anyOf": [
            {"type": "string"},
            {
                "type": "object", "required": ["name"], "additionalProperties": false,
                "properties": {"name": {"type": "string"}, "scale": {"type": "number", "default": 1}},
            },
        ]}},
        "StreamOptions": {"type": "object", "properties": {
            "include_usage": {"type": "boolean", "description": "End with a chunk that has the numbers of tokens."},
            "continuous_usage_stats": {"type": "boolean", "description": "Each chunk has the tokens so far."},
        }},
        "ResponseFormat": {"oneOf": [
            {"type": "object", "required": ["type"], "properties": {
                "type": {"enum": ["text", "json_object"]}, "schema": any_object(),
            }},
            {"type": "object", "required": ["type", "json_schema"], "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {"type": "object", "required": ["schema"], "properties": {
                    "name": {"type": "string"}, "strict": {"type": "boolean"}, "schema": any_object(),
                }},
            }},
        ]},
        "StructuredOutputs": {
            "type": "object",
            "description": "Exactly one constraint.",
            "minProperties": 1, "maxProperties": 1, "additionalProperties": false,
            "properties": {
                "json": {"anyOf": [{"type": "object"}, {"type": "string"}], "description": "A JSON schema."},
                "regex": {"type": "string", "description": "A regular expression that matches the whole answer."},
                "grammar": {"type": "string", "description": "A grammar in the language of Lark."},
                "choice": texts(1 << 16),
            },
        },
    })
}

/// Returns the schemas of fields that other servers have, too.
fn other_servers() -> Value {
    json!({
        "Side": {"enum": ["left", "right"]},
        "SchemaOrText": {"anyOf": [{"type": "object"}, {"type": "string"}], "description": "A JSON schema."},
        "Format": {"anyOf": [{"enum": ["json", ""]}, {"type": "object", "description": "A JSON schema."}]},
        "Thinking": {"type": "object", "required": ["type"], "properties": {
            "type": {"enum": ["enabled", "disabled", "adaptive", "auto"]},
        }},
        "Reasoning": {"type": "object", "properties": {
            "effort": {"type": "string", "description": "Variable `reasoning_effort` of the chat template."},
            "enabled": {"type": "boolean", "description": "Variable `enable_thinking` of the chat template."},
            "exclude": {"type": "boolean", "description": "Do not show the reasoning."},
        }},
    })
}

/// Returns the schemas of the parts of requests with a conversation.
fn conversation() -> Value {
    let content = json!({"anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "object", "required": ["type", "text"], "properties": {
            "type": {"const": "text"}, "text": {"type": "string"},
        }}},
    ]});
    let name = json!({"type": "string"});
    let message = |role: Value, required: &[&str], more: Value| {
        let mut properties = json!({"role": role, "content": content, "name": name});
        if let (Value::Object(all), Value::Object(more)) = (&mut properties, more) {
            all.extend(more);
        }
        json!({"type": "object", "required": required, "properties": properties})
    };
    json!({
        "ChatMessage": {"oneOf": [
            message(json!({"enum": ["system", "developer", "user"]}), &["role", "content"], json!({})),
            message(json!({"const": "assistant"}), &["role"], json!({
                "content": {"anyOf": [content, {"type": "null"}]},
                "reasoning": text_or_null(), "reasoning_content": text_or_null(),
                "tool_calls": list(to("ToolCall")),
            })),
            message(json!({"const": "tool"}), &["role", "content"], json!({"tool_call_id": name})),
        ]},
        "ToolCall": {"type": "object", "required": ["function"], "properties": {
            "id": name, "type": {"const": "function"},
            "function": object(json!({"name": name, "arguments": {"type": "string", "description": "A JSON object."}})),
        }},
        "Tool": {"type": "object", "required": ["type", "function"], "properties": {
            "type": {"const": "function"},
            "function": {"type": "object", "required": ["name"], "properties": {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object", "description": "A JSON schema."},
                "strict": {"type": "boolean"},
            }},
        }},
        "ToolChoice": {"anyOf": [
            {"enum": ["none", "auto", "required"]},
            {"type": "object", "required": ["type", "function"], "properties": {
                "type": {"const": "function"}, "function": object(json!({"name": name})),
            }},
        ]},
    })
}

/// Returns the schema of an answer of OpenAI's API.
fn answer(kind: &str, choice: &str, has_usage: bool) -> Value {
    let mut schema = object(json!({
        "id": {"type": "string"}, "object": {"const": kind}, "created": whole(), "model": {"type": "string"},
        "system_fingerprint": text_or_null(), "choices": list(to(choice)),
    }));
    schema["properties"]["usage"] =
        if has_usage { to("Usage") } else { json!({"anyOf": [to("Usage"), {"type": "null"}]}) };
    if let Some(required) = schema["required"].as_array_mut().filter(|_| has_usage) {
        required.push(json!("usage"));
    }
    schema
}

/// Returns the schema of a stop text, or of the id of a token that ended an answer.
fn stop_reason() -> Value {
    json!({"type": ["string", "integer", "null"]})
}

fn finish() -> Value {
    json!({"enum": ["stop", "length", "tool_calls", null]})
}

/// Returns the schemas of answers of `/v1/completions`.
fn text_answers() -> Value {
    let ids = list(whole());
    let mut choice = object(json!({
        "index": whole(), "text": {"type": "string"}, "finish_reason": finish(),
        "logprobs": {"anyOf": [to("TextLogprobs"), {"type": "null"}]},
    }));
    choice["properties"]["stop_reason"] = stop_reason();
    choice["properties"]["token_ids"] = ids.clone();
    choice["properties"]["prompt_token_ids"] = ids;
    json!({
        "Usage": object(json!({
            "prompt_tokens": whole(), "completion_tokens": whole(), "total_tokens": whole(),
            "prompt_tokens_details": object(json!({"cached_tokens": whole()})),
        })),
        "TextLogprobs": object(json!({
            "tokens": list(json!({"type": "string"})),
            "token_logprobs": list(json!({"type": ["number", "null"]})),
            "top_logprobs": list(json!({"type": ["object", "null"], "additionalProperties": {"type": "number"}})),
            "text_offset": list(whole()),
        })),
        "CompletionChoice": choice,
        "Completion": answer("text_completion", "CompletionChoice", false),
    })
}

/// Returns the schemas of answers of `/v1/chat/completions`.
fn chat_answers() -> Value {
    let likely = json!({
        "token": {"type": "string"}, "logprob": {"type": "number"},
        "bytes": {"type": ["array", "null"], "items": {"type": "integer", "minimum": 0, "maximum": 255}},
    });
    let mut entry = object(likely.clone());
    entry["properties"]["top_logprobs"] = list(object(likely));
    let logprobs = json!({"anyOf": [
        {"type": "object", "required": ["content"], "properties": {"content": list(entry)}},
        {"type": "null"},
    ]});
    let message = json!({
        "role": {"const": "assistant"}, "content": text_or_null(), "refusal": {"type": "null"},
        "reasoning": {"type": "string"}, "reasoning_content": {"type": "string"}, "tool_calls": list(to("ToolCall")),
    });
    let delta = json!({
        "role": {"const": "assistant"}, "content": text_or_null(),
        "reasoning": {"type": "string"}, "reasoning_content": {"type": "string"},
        "tool_calls": list(json!({"type": "object", "required": ["index"], "properties": {
            "index": whole(), "id": {"type": "string"}, "type": {"const": "function"},
            "function": {"type": "object", "properties": {
                "name": {"type": "string"}, "arguments": {"type": "string"},
            }},
        }})),
    });
    let choice = |name: &str, value: Value| {
        let mut choice = object(json!({"index": whole(), "logprobs": logprobs, "finish_reason": finish()}));
        choice["properties"][name] = value;
        choice["properties"]["stop_reason"] = stop_reason();
        choice["properties"]["token_ids"] = list(whole());
        choice
    };
    let message = json!({"type": "object", "required": ["role", "content"], "properties": message});
    let mut whole_answer = answer("chat.completion", "ChatChoice", true);
    whole_answer["properties"]["prompt_token_ids"] = list(whole());
    json!({
        "ChatChoice": choice("message", message),
        "ChatChunkChoice": choice("delta", json!({"type": "object", "properties": delta})),
        "ChatCompletion": whole_answer,
        "ChatCompletionChunk": answer("chat.completion.chunk", "ChatChunkChoice", false),
    })
}

/// Returns the schemas of the Responses API, of Anthropic's API and of ollama's, whose documentation has the details.
fn other_apis() -> Value {
    let described = |text: &str| json!({"type": "object", "description": text});
    json!({
        "ResponsesRequest": described("As `POST /responses` of OpenAI's API takes it, without stored state."),
        "Response": described("As OpenAI's API returns it."),
        "ResponseEvent": described("An event of the Responses API."),
        "MessagesRequest": described("As `POST /v1/messages` of Anthropic's API takes it."),
        "Message": described("As Anthropic's API returns it."),
        "MessageEvent": described("An event of Anthropic's API."),
        "CountTokensRequest": described("As `POST /v1/messages/count_tokens` of Anthropic's API takes it."),
        "TokenCount": object(json!({"input_tokens": whole()})),
        "InputTokens": object(json!({"object": {"const": "response.input_tokens"}, "input_tokens": whole()})),
        "OllamaChatRequest": described("As `POST /api/chat` of ollama's API takes it."),
        "OllamaGenerateRequest": described("As `POST /api/generate` of ollama's API takes it."),
        "OllamaShowRequest": described("As `POST /api/show` of ollama's API takes it."),
        "OllamaChat": described("As ollama's API returns it."),
        "OllamaText": described("As ollama's API returns it."),
        "OllamaModel": described("As ollama's API returns it."),
        "OllamaModels": object(json!({"models": list(any_object())})),
    })
}

fn errors() -> Value {
    json!({
        "Error": object(json!({"error": object(json!({
            "message": {"type": "string", "minLength": 1},
            "type": {"type": "string"},
            "param": {"type": ["string", "null"], "description": "The field that is wrong."},
            "code": {"type": ["string", "null"], "description": "Name of the error for programs, if it has one."},
        }))})),
        "AnthropicError": object(json!({
            "type": {"const": "error"},
            "error": object(json!({"type": {"type": "string"}, "message": {"type": "string", "minLength": 1}})),
        })),
        "OllamaError": object(json!({"error": {"type": "string", "minLength": 1}})),
    })
}

fn models() -> Value {
    json!({
        "Model": object(json!({
            "id": {"type": "string"}, "object": {"const": "model"}, "created": whole(), "owned_by": {"type": "string"},
            "root": text_or_null(),
            "parent": {"type": ["string", "null"], "description": "Model of an adapter."},
            "max_model_len": {"type": ["integer", "null"], "description": "Tokens of the context; null unless loaded."},
            "state": {"enum": ["loading", "loaded", "unloaded", "failed"]},
        })),
        "Models": object(json!({"object": {"const": "list"}, "data": list(to("Model"))})),
        "Adapters": object(json!({
            "object": {"const": "list"},
            "data": list(object(json!({
                "name": {"type": "string"}, "path": {"type": "string"}, "scale": {"type": "number"},
                "model": text_or_null(), "created": whole(),
            }))),
        })),
    })
}

fn server() -> Value {
    let mut tokens = object(json!({"count": whole(), "max_model_len": whole(), "tokens": list(whole())}));
    tokens["properties"]["token_strs"] = list(json!({"type": "string"}));
    json!({
        "Tokens": tokens,
        "Text": object(json!({"prompt": {"type": "string"}})),
        "TokenizerInfo": {"type": "object", "required": ["tokenizer_class", "max_chars_per_token"], "properties": {
            "tokenizer_class": {"type": "string"},
            "max_chars_per_token": whole(),
            "chat_template": {"type": "string"},
        }},
        "InfillContext": {"type": "object", "required": ["text"], "properties": {
            "filename": {"type": "string"}, "text": {"type": "string"},
        }},
        "InfillAnswer": {"type": "object", "required": ["content", "stop"], "properties": {
            "content": {"type": "string"}, "stop": {"type": "boolean"},
            "stop_type": {"enum": ["none", "eos", "limit", "word"]},
        }},
        "Props": any_object(),
        "Slots": list(object(json!({"id": whole(), "is_processing": {"type": "boolean"}, "n_ctx": whole()}))),
        "Version": object(json!({"version": {"type": "string"}})),
        "Load": object(json!({"server_load": whole()})),
        "Document": {"type": "object", "description": "A description in the format of OpenAPI 3.1."},
    })
}
