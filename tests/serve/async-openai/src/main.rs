//! Checks `iec serve` with the client crate async-openai: endpoints with and without streams, tools, schemas, typed
//! errors, retries after 429, and streams that are dropped. tests/serve/async_openai.py builds and runs it.
//!
//!     iec-async-openai PART URL
//!
//! PART is a function of this file, URL the address of a server whose model is called `story`. A check that does not
//! hold panics. Requests are written as JSON and read into the types of the crate.

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use async_openai::error::OpenAIError;
use async_openai::types::chat::{ChatCompletionMessageToolCalls, CompletionFinishReason, FinishReason};
use async_openai::types::completions::CreateCompletionResponse;
use async_openai::types::responses::{OutputItem, ResponseStreamEvent};
use futures::future::try_join_all;
use futures::{StreamExt, TryStreamExt};
use serde_json::{Value, from_value, json};

type Api = Client<OpenAIConfig>;
type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [part, url] = args.as_slice() else { return Err("usage: iec-async-openai PART URL".into()) };
    match part.as_str() {
        "endpoints" => endpoints(&client(url, "free")).await,
        "errors" => errors(url).await,
        "retries" => retries(&client(url, "free")).await,
        "cancel" => cancel(&client(url, "free")).await,
        _ => Err(format!("there is no part `{part}`").into()),
    }
}

fn client(url: &str, key: &str) -> Api {
    Client::with_config(OpenAIConfig::new().with_api_base(format!("{url}/v1")).with_api_key(key))
}

async fn endpoints(api: &Api) -> Result {
    models(api).await?;
    completions(api).await?;
    chat(api).await?;
    chat_schema(api).await?;
    chat_tools(api).await?;
    responses(api).await?;
    responses_tools_and_schema(api).await
}

async fn models(api: &Api) -> Result {
    let models = api.models().list().await?;
    let ids: Vec<&str> = models.data.iter().map(|model| model.id.as_str()).collect();
    assert_eq!(ids, ["story"]);
    assert_eq!(api.models().retrieve("story").await?.id, "story");
    Ok(())
}

async fn completions(api: &Api) -> Result {
    for temperature in [0, 1] {
        let ask = prompt(json!({"max_tokens": 24, "temperature": temperature, "seed": 7}));
        let whole = api.completions().create(from_value(ask.clone())?).await?;
        assert_eq!(whole.choices[0].finish_reason, Some(CompletionFinishReason::Length));
        assert_eq!(whole.usage.map(|usage| usage.completion_tokens), Some(24));
        let chunks: Vec<_> = api.completions().create_stream(from_value(ask)?).await?.try_collect().await?;
        let streamed: String = chunks.iter().flat_map(|chunk| &chunk.choices).map(|choice| &*choice.text).collect();
        assert_eq!(streamed, whole.choices[0].text, "temperature {temperature}");
    }
    Ok(())
}

async fn chat(api: &Api) -> Result {
    for temperature in [0, 1] {
        let ask = messages(json!({"max_completion_tokens": 24, "temperature": temperature, "seed": 7}));
        let whole = api.chat().create(from_value(ask.clone())?).await?;
        assert_eq!(whole.choices[0].finish_reason, Some(FinishReason::Length));
        let ask = with(ask, json!({"stream_options": {"include_usage": true}}));
        let chunks: Vec<_> = api.chat().create_stream(from_value(ask)?).await?.try_collect().await?;
        let streamed: String = chunks
            .iter()
            .flat_map(|chunk| &chunk.choices)
            .filter_map(|choice| choice.delta.content.as_deref())
            .collect();
        assert_eq!(Some(streamed), whole.choices[0].message.content, "temperature {temperature}");
        assert_eq!(chunks.last().and_then(|chunk| chunk.usage.clone()).map(|usage| usage.completion_tokens), Some(24));
    }
    Ok(())
}

async fn chat_schema(api: &Api) -> Result {
    let format = json!({"type": "json_schema", "json_schema": {"name": "w", "strict": true, "schema": weather()}});
    let ask = messages(json!({"max_completion_tokens": 300, "temperature": 1, "seed": 3, "response_format": format}));
    let answer = api.chat().create(from_value(ask)?).await?;
    check_weather(answer.choices[0].message.content.as_deref().unwrap_or_default())
}

/// Calls a function that the request names, then sends its result.
async fn chat_tools(api: &Api) -> Result {
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": weather()}});
    let ask = messages(json!({"max_completion_tokens": 300, "seed": 3, "tools": [tool], "parallel_tool_calls": false}));
    let named = with(ask.clone(), json!({"tool_choice": {"type": "function", "function": {"name": "weather"}}}));
    let whole = api.chat().create(from_value(named.clone())?).await?.choices.remove(0);
    assert_eq!(whole.finish_reason, Some(FinishReason::ToolCalls));
    let calls = whole.message.tool_calls.unwrap_or_default();
    let [ChatCompletionMessageToolCalls::Function(call)] = &calls[..] else {
        panic!("found {calls:?}, expected one call")
    };
    assert_eq!(call.function.name, "weather");
    check_weather(&call.function.arguments)?;

    let chunks: Vec<_> = api.chat().create_stream(from_value(named)?).await?.try_collect().await?;
    let parts =
        chunks.iter().flat_map(|chunk| &chunk.choices).flat_map(|choice| choice.delta.tool_calls.iter().flatten());
    let (mut name, mut arguments) = (String::new(), String::new());
    for part in parts.filter_map(|part| part.function.as_ref()) {
        name += part.name.as_deref().unwrap_or_default();
        arguments += part.arguments.as_deref().unwrap_or_default();
    }
    assert_eq!((&name, &arguments), (&call.function.name, &call.function.arguments));

    let history = json!([
        {"role": "user", "content": "Once upon a time"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.id, "content": "It rains."},
    ]);
    let ask = with(ask, json!({"messages": history, "tool_choice": "none", "max_completion_tokens": 8}));
    let after = api.chat().create(from_value(ask)?).await?.choices.remove(0).message;
    assert!(after.content.is_some() && after.tool_calls.is_none(), "found {after:?}, expected a text");
    Ok(())
}

async fn responses(api: &Api) -> Result {
    let ask = input(json!({"max_output_tokens": 24}));
    let whole = api.responses().create(from_value(ask.clone())?).await?;
    assert_eq!(whole.usage.as_ref().map(|usage| usage.output_tokens), Some(24));
    let events: Vec<_> = api.responses().create_stream(from_value(ask)?).await?.try_collect().await?;
    let deltas = events.iter().filter_map(|event| match event {
        ResponseStreamEvent::ResponseOutputTextDelta(event) => Some(event.delta.as_str()),
        _ => None,
    });
    assert_eq!(Some(deltas.collect()), whole.output_text());
    let Some(ResponseStreamEvent::ResponseIncomplete(end)) = events.last() else {
        panic!("found {:?}, expected response.incomplete", events.last())
    };
    assert_eq!(end.response.output_text(), whole.output_text());
    Ok(())
}

async fn responses_tools_and_schema(api: &Api) -> Result {
    let tool = json!({"type": "function", "name": "weather", "parameters": weather(), "strict": true});
    let choice = json!({"type": "function", "name": "weather"});
    let named = json!({"tools": [tool], "tool_choice": choice, "parallel_tool_calls": false, "max_output_tokens": 300});
    let output = api.responses().create(from_value(input(named))?).await?.output;
    let [OutputItem::FunctionCall(call)] = &output[..] else { panic!("found {output:?}, expected one call") };
    check_weather(&call.arguments)?;

    let format = json!({"type": "json_schema", "name": "w", "strict": true, "schema": weather()});
    let ask = input(json!({"text": {"format": format}, "max_output_tokens": 300}));
    check_weather(&api.responses().create(from_value(ask)?).await?.output_text().unwrap_or_default())
}

/// Provokes errors on a server whose only key is `free`.
async fn errors(url: &str) -> Result {
    let api = client(url, "free");
    refused(complete(&api, json!({"model": "none"})).await, 404, "model_not_found", Some("model"));
    refused(complete(&api, json!({"prompt": vec![1; 3000]})).await, 400, "context_length_exceeded", Some("prompt"));
    refused(complete(&api, json!({"suffix": "x"})).await, 400, "unsupported_parameter", Some("suffix"));
    let ask = messages(json!({"model": "none"}));
    refused(api.chat().create_stream(from_value(ask)?).await, 404, "model_not_found", Some("model"));
    let ask = input(json!({"previous_response_id": "resp_1"}));
    refused(api.responses().create(from_value(ask)?).await, 400, "unsupported_parameter", Some("previous_response_id"));
    refused(client(url, "wrong").models().list().await, 401, "invalid_api_key", None);
    Ok(())
}

fn refused<T>(answer: std::result::Result<T, OpenAIError>, status: u16, code: &str, param: Option<&str>) {
    match answer {
        Err(OpenAIError::ApiError(e)) => {
            let found = (e.status_code.as_u16(), e.api_error.code.as_deref(), e.api_error.param.as_deref());
            assert_eq!(found, (status, Some(code), param), "{e}");
        }
        Err(e) => panic!("found {e:?}, expected {code}"),
        Ok(_) => panic!("found an answer, expected {code}"),
    }
}

/// Sends more requests than the server admits at a time; by default the client repeats a refused one three times.
async fn retries(api: &Api) -> Result {
    let answers = try_join_all((0..4).map(|_| complete(api, endless(400)))).await?;
    let choice = &answers[0].choices[0];
    assert_eq!(choice.finish_reason, Some(CompletionFinishReason::Length));
    assert!(answers.iter().all(|answer| answer.choices[0].text == choice.text), "answers differ");
    Ok(())
}

/// Drops streams early, prints a line, and keeps the process alive until stdin ends: only the drops can have cancelled
/// the requests.
async fn cancel(api: &Api) -> Result {
    for _ in 0..4 {
        let ask = prompt(endless(1900));
        let mut stream = api.completions().create_stream(from_value(ask)?).await?;
        stream.next().await.ok_or("the stream is empty")??;
    }
    println!("dropped");
    tokio::task::spawn_blocking(|| std::io::read_to_string(std::io::stdin())).await??;
    Ok(())
}

async fn complete(api: &Api, more: Value) -> std::result::Result<CreateCompletionResponse, OpenAIError> {
    api.completions().create(from_value(prompt(more)).expect("the crate knows the members")).await
}

/// Members of a request whose answer has this many tokens: the tokens 1 and 2 would end it.
fn endless(tokens: u32) -> Value {
    json!({"max_tokens": tokens, "logit_bias": {"1": -100, "2": -100}})
}

fn prompt(more: Value) -> Value {
    with(json!({"model": "story", "prompt": "Once upon a time", "temperature": 0}), more)
}

fn messages(more: Value) -> Value {
    with(json!({"model": "story", "messages": [{"role": "user", "content": "Once upon a time"}]}), more)
}

fn input(more: Value) -> Value {
    with(json!({"model": "story", "input": "Once upon a time", "temperature": 0}), more)
}

/// Adds the members of an object to another one.
fn with(mut object: Value, more: Value) -> Value {
    let (Value::Object(members), Value::Object(more)) = (&mut object, more) else { panic!("expected two objects") };
    members.extend(more);
    object
}

fn weather() -> Value {
    json!({
        "type": "object",
        "required": ["city", "days"],
        "additionalProperties": false,
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    })
}

/// Checks that a text is an object as [`weather`] describes it.
fn check_weather(text: &str) -> Result {
    let value: Value = serde_json::from_str(text)?;
    let city = value["city"].as_str().is_some_and(|city| ["Oslo", "Rome"].contains(&city));
    let days = value["days"].as_u64().is_some_and(|days| (1..=9).contains(&days));
    assert!(city && days && value.as_object().is_some_and(|members| members.len() == 2), "found {text}");
    Ok(())
}
