//! Fields of requests: wrong values, names of other servers, and fields that are unknown, of all endpoints.

use super::client::{Response, Server, story_pack};
use serde_json::{Value, json};

/// Template with a place for tools, over the embedded model.
const TOOLS: &str = include_str!("../../serve/chat_template.jinja");

/// Endpoints that generate text, with the smallest body of a request.
fn endpoints() -> [(&'static str, Value); 4] {
    let messages = json!([{"role": "user", "content": "Once"}]);
    [
        ("/v1/completions", json!({"prompt": "Once", "max_tokens": 2})),
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 2})),
        ("/v1/responses", json!({"input": "Once", "max_output_tokens": 2})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 2})),
    ]
}

/// Starts a server of the embedded model with a chat template that has tools.
fn tool_server(options: &[&str]) -> (tempfile::TempDir, Server) {
    let home = story_pack(512);
    std::fs::write(home.path().join("pack/chat_template.jinja"), TOOLS).unwrap();
    let pack = home.path().join("pack").display().to_string();
    let server = Server::start(&[&[pack.as_str()], options].concat());
    (home, server)
}

/// Returns a body with more fields.
fn with(body: &Value, more: &Value) -> Value {
    let mut body = body.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// Returns the field and the message of an error of either form.
fn fault(response: &Response) -> (Option<String>, String) {
    let error = response.json()["error"].clone();
    (error["param"].as_str().map(String::from), error["message"].as_str().unwrap_or_default().to_string())
}

#[test]
fn every_wrong_value_names_its_field_in_the_words_of_the_api() {
    let (_home, server) = tool_server(&[]);
    let cases = [
        (json!({"temperature": -1}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": 2}), "top_p"),
        (json!({"top_p": -0.1}), "top_p"),
        (json!({"top_k": -2}), "top_k"),
        (json!({"min_p": 1.1}), "min_p"),
        (json!({"typical_p": 0}), "typical_p"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"repetition_penalty": -1}), "repetition_penalty"),
        (json!({"repeat_penalty": 0}), "repeat_penalty"),
        (json!({"presence_penalty": "x"}), "presence_penalty"),
        (json!({"frequency_penalty": []}), "frequency_penalty"),
        (json!({"repeat_last_n": -2}), "repeat_last_n"),
        (json!({"logit_bias": {"99999": 1}}), "logit_bias"),
        (json!({"logit_bias": {"elephants": 1}}), "logit_bias"),
        (json!({"logit_bias": {"": 1}}), "logit_bias"),
        (json!({"logit_bias": {"5": 101}}), "logit_bias"),
        (json!({"logit_bias": [1]}), "logit_bias"),
        (json!({"bad_words": [""]}), "bad_words"),
        (json!({"bad_words": "x"}), "bad_words"),
        (json!({"stop_token_ids": [99999]}), "stop_token_ids"),
        (json!({"stop_token_ids": [-1]}), "stop_token_ids"),
        (json!({"allowed_token_ids": [99999]}), "allowed_token_ids"),
        (json!({"samplers": "top_q"}), "samplers"),
        (json!({"samplers": "mirostat"}), "samplers"),
        (json!({"samplers": "top_n_sigma"}), "samplers"),
        (json!({"samplers": ["top_k", "top_k"]}), "samplers"),
        (json!({"samplers": "top_k", "top_p": 0.5}), "samplers"),
        (json!({"mirostat": 3}), "mirostat"),
        (json!({"mirostat": 2, "top_k": 5}), "mirostat"),
        (json!({"mirostat": 2, "mirostat_tau": -1}), "mirostat_tau"),
        (json!({"mirostat": 2, "mirostat_eta": -1}), "mirostat_eta"),
        (json!({"dry_multiplier": -1}), "dry_multiplier"),
        (json!({"dry_multiplier": 1, "dry_base": 0.5}), "dry_base"),
        (json!({"dry_multiplier": 1, "dry_penalty_last_n": -2}), "dry_penalty_last_n"),
        (json!({"dry_multiplier": 1, "dry_sequence_breakers": [""]}), "dry_sequence_breakers"),
        (json!({"xtc_probability": 2}), "xtc_probability"),
        (json!({"xtc_probability": 0.5, "xtc_threshold": 2}), "xtc_threshold"),
        (json!({"priority": 1e12}), "priority"),
        (json!({"normalize": "nfx"}), "normalize"),
        (json!({"adapters": ["y"]}), "adapters"),
        (json!({"seed": 1.5}), "seed"),
        (json!({"n": 0}), "n"),
        (json!({"stop": [1]}), "stop"),
        (json!({"min_tokens": -1}), "min_tokens"),
        (json!({"min_tokens": 3}), "min_tokens"),
        (json!({"ignore_eos": 1}), "ignore_eos"),
        (json!({"cache_salt": 1}), "cache_salt"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options"),
        (json!({"truncate_prompt_tokens": 0}), "truncate_prompt_tokens"),
        (json!({"truncation_side": "middle"}), "truncation_side"),
        (json!({"response_format": {"type": "xml"}}), "response_format"),
        (json!({"structured_outputs": {"regex": "("}}), "structured_outputs.regex"),
        (json!({"guided_regex": "("}), "guided_regex"),
        (json!({"guided_json": "{"}), "guided_json"),
        (json!({"guided_grammar": "start: ("}), "guided_grammar"),
        (json!({"grammar": "root ::= \"a\" root"}), "grammar"),
        (json!({"json_schema": 1}), "json_schema"),
        (json!({"format": "xml"}), "format"),
        (json!({"prompt_logprobs": 1}), "prompt_logprobs"),
        (json!({"chat_template": "x"}), "chat_template"),
        (json!({"documents": [{"text": "x"}]}), "documents"),
        (json!({"num_beams": 4}), "num_beams"),
        (json!({"functions": [{"name": "f"}]}), "functions"),
    ];
    let mut faults = Vec::new();
    for (path, body) in endpoints() {
        for (fields, param) in &cases {
            let response = server.post(path, &with(&body, fields));
            let (found, message) = fault(&response);
            // The API of Anthropic has the field in the message only.
            let is_named = match path {
                "/v1/messages" => message.contains(&format!("`{param}`")),
                _ => found.as_deref() == Some(*param),
            };
            if response.status != 400 || !is_named || message.contains("--") {
                faults.push(format!("{path} {fields}: {} {}", response.status, response.body));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn fields_of_one_endpoint_are_named_as_it_names_them() {
    let (_home, server) = tool_server(&[]);
    let long = "Once upon a time ".repeat(500);
    let chat = json!([{"role": "user", "content": long}]);
    let cases = [
        ("/v1/completions", json!({"prompt": long}), "prompt"),
        ("/v1/completions", json!({"prompt": {"id": "x"}}), "prompt"),
        ("/v1/completions", json!({"prompt": 1}), "prompt"),
        ("/v1/completions", json!({"prompt": "x", "max_new_tokens": -2}), "max_new_tokens"),
        ("/v1/completions", json!({"prompt": "x", "best_of": 1, "n": 2}), "best_of"),
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 1, "min_tokens": 2}), "min_tokens"),
        ("/v1/chat/completions", json!({"messages": chat}), "messages"),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "x"}], "echo": true}), "echo"),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "x"}], "tool_choice": "auto"}),
            "tool_choice",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "x"}], "thinking": {"type": 1}}),
            "thinking.type",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "x"}],
          "chat_template_kwargs": {"messages": []}}),
            "chat_template_kwargs",
        ),
        ("/v1/responses", json!({"input": long}), "input"),
        ("/v1/responses", json!({"input": "x", "prompt": {"id": "pmpt_1"}}), "prompt"),
        ("/v1/responses", json!({"input": "x", "top_logprobs": 99}), "top_logprobs"),
        (
            "/v1/responses",
            json!({"input": "x", "text": {"format": {"type": "json_schema", "name": "n",
          "strict": true, "schema": {"type": "nothing"}}}}),
            "text.format",
        ),
        ("/tokenize", json!({"messages": chat}), "messages"),
        ("/tokenize", json!({"prompt": 1}), "prompt"),
        ("/detokenize", json!({"tokens": "x"}), "tokens"),
        ("/v1/responses/input_tokens", json!({"input": long}), "input"),
    ];
    for (path, body, param) in cases {
        let response = server.post(path, &body);
        let (found, message) = fault(&response);
        assert_eq!((response.status, found.as_deref()), (400, Some(param)), "{path} {body}: {}", response.body);
        assert!(!message.contains("--"), "{message}");
    }
}

#[test]
fn halves_of_surrogate_pairs_are_refused_with_the_place_of_the_text() {
    let (_home, server) = tool_server(&[]);
    let cases = [
        ("/v1/completions", r#"{"prompt": "a\ud83d"}"#, "prompt"),
        ("/v1/chat/completions", r#"{"messages": [{"role": "user", "content": "\ude00"}]}"#, "messages[0].content"),
        ("/v1/responses", r#"{"input": "\ud800"}"#, "input"),
        ("/tokenize", r#"{"prompt": "\ud800"}"#, "prompt"),
    ];
    for (path, body, param) in cases {
        let response = server.send("POST", path, &[], body);
        let (found, message) = fault(&response);
        assert_eq!((response.status, found.as_deref()), (400, Some(param)), "{path}: {}", response.body);
        assert!(message.contains("surrogate pair") && message.contains("column"), "{message}");
    }
}

#[test]
fn names_of_other_servers_have_the_effect_of_the_fields_here() {
    let (_home, server) = tool_server(&[]);
    let schema = json!({"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
                        "additionalProperties": false});
    let text = |fields: &Value| {
        let body = json!({"prompt": "Once upon a time", "temperature": 0});
        server.ask("/v1/completions", &with(&body, fields))["choices"][0]["text"].clone()
    };
    let same = [
        (json!({"max_new_tokens": 3}), json!({"max_tokens": 3})),
        (json!({"n_predict": 3}), json!({"max_tokens": 3})),
        (json!({"max_tokens": 9, "stop_sequences": [" a"]}), json!({"max_tokens": 9, "stop": " a"})),
        (json!({"max_tokens": 9, "repeat_penalty": 1.5}), json!({"max_tokens": 9, "repetition_penalty": 1.5})),
        (json!({"max_tokens": 9, "top_p": 0, "temperature": 1, "seed": 1}), json!({"max_tokens": 9})),
        (
            json!({"max_tokens": 9, "temperature": 1, "seed": 4, "random_seed": 4}),
            json!({"max_tokens": 9, "temperature": 1, "seed": 4}),
        ),
        (json!({"max_tokens": 9, "logit_bias": [[5, 1.5]]}), json!({"max_tokens": 9, "logit_bias": {"5": 1.5}})),
        (
            json!({"max_tokens": 9, "truncate_prompt_tokens": 2, "truncation_side": "right"}),
            json!({"max_tokens": 9, "prompt": "Once"}),
        ),
        // Parameters of steps that are off have no effect.
        (
            json!({"max_tokens": 9, "repeat_last_n": 64, "dry_base": 1.75, "xtc_threshold": 0.1, "mirostat_tau": 5}),
            json!({"max_tokens": 9}),
        ),
    ];
    for (other, own) in same {
        assert_eq!(text(&other), text(&own), "{other}");
    }
    for fields in [
        json!({"guided_json": schema}),
        json!({"guided_json": schema.to_string()}),
        json!({"json_schema": schema}),
        json!({"format": schema}),
        json!({"response_format": {"type": "json_object", "schema": schema}}),
        json!({"guided_choice": [r#"{"a":1}"#]}),
        json!({"guided_regex": r#"\{"a": ?1\}"#}),
        json!({"guided_grammar": r#"start: "{\"a\":1}""#}),
        json!({"grammar": r#"start: "{\"a\":1}""#}),
        json!({"grammar": r#"root ::= "{" pair "}"
            pair ::= "\"a\":" [1]"#}),
    ] {
        for (path, body) in endpoints() {
            let most = if path == "/v1/responses" { "max_output_tokens" } else { "max_tokens" };
            let answer = server.ask(path, &with(&with(&body, &json!({ (most): 200, "temperature": 0 })), &fields));
            // The model may reason before its answer, and this one does so without an end now and then.
            let reasons =
                |pointer: &str| answer.pointer(pointer).is_some_and(|kind| kind == "reasoning" || kind == "thinking");
            if answer.pointer("/choices/0/message/reasoning").is_some()
                || reasons("/output/0/type")
                || reasons("/content/0/type")
            {
                continue;
            }
            let text = ["/choices/0/text", "/choices/0/message/content", "/output/0/content/0/text", "/content/0/text"];
            let text = text.iter().find_map(|pointer| answer.pointer(pointer)?.as_str());
            let value: Option<Value> = text.and_then(|text| serde_json::from_str(text).ok());
            assert_eq!(value.and_then(|value| value["a"].as_f64()), Some(1.0), "{path} {fields}: {answer}");
        }
    }
}

#[test]
fn unknown_members_are_named_or_refused_at_every_depth() {
    let (_home, server) = tool_server(&[]);
    let (_strict_home, strict) = tool_server(&["--strict-fields"]);
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "colour": 1}});
    let chat = |message: Value, more: Value| with(&json!({"messages": [message], "max_tokens": 1}), &more);
    let user = json!({"role": "user", "content": "x"});
    let cases = [
        (
            "/v1/chat/completions",
            chat(json!({"role": "user", "content": "x", "colour": 1}), json!({})),
            "messages[0].colour",
        ),
        (
            "/v1/chat/completions",
            chat(json!({"role": "user", "content": [{"type": "text", "text": "x", "colour": 1}]}), json!({})),
            "messages[0].content[0].colour",
        ),
        (
            "/v1/chat/completions",
            chat(user.clone(), json!({"stream": true, "stream_options": {"colour": 1}})),
            "stream_options.colour",
        ),
        (
            "/v1/chat/completions",
            chat(user.clone(), json!({"tools": [tool], "tool_choice": "none"})),
            "tools[0].function.colour",
        ),
        (
            "/v1/chat/completions",
            chat(user.clone(), json!({"thinking": {"type": "enabled", "colour": 1}})),
            "thinking.colour",
        ),
        (
            "/v1/chat/completions",
            chat(
                user.clone(),
                json!({"response_format": {"type": "json_schema", "json_schema":
             {"name": "n", "schema": {"enum": [1]}, "colour": 1}}}),
            ),
            "response_format.json_schema.colour",
        ),
        (
            "/v1/responses",
            json!({"input": [{"role": "user", "content": "x", "colour": 1}], "max_output_tokens": 1}),
            "input[0].colour",
        ),
        (
            "/v1/messages",
            chat(user.clone(), json!({"thinking": {"type": "enabled", "budget_tokens": 1024}})),
            "thinking.budget_tokens",
        ),
        (
            "/v1/messages",
            chat(json!({"role": "user", "content": [{"type": "text", "text": "x", "colour": 1}]}), json!({})),
            "messages[0].content[0].colour",
        ),
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 1, "colour": 1}), "colour"),
    ];
    for (path, body, name) in cases {
        let response = server.post(path, &body);
        assert_eq!((response.status, response.header("x-iec-ignored")), (200, Some(name)), "{path}: {}", response.body);
        let refused = strict.post(path, &body);
        let (param, message) = fault(&refused);
        let is_named = if path == "/v1/messages" { message.contains(name) } else { param.as_deref() == Some(name) };
        assert!(refused.status == 400 && is_named, "{path}: {}", refused.body);
    }
    // Marks of clients without effect on the answer, and what an answer of this server had, are no surprise.
    let sent_back = json!({"role": "assistant", "content": "a", "refusal": null, "annotations": []});
    let body = json!({"messages": [user, sent_back, {"role": "user", "content": "y"}], "max_tokens": 1,
                      "user": "u", "store": true, "metadata": {}, "service_tier": "auto", "suffix": null});
    let response = strict.post("/v1/chat/completions", &body);
    assert_eq!((response.status, response.header("x-iec-ignored")), (200, None), "{}", response.body);
}
