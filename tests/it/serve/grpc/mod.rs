//! The server over gRPC.

mod client;

use super::client::{Server, story_pack};
use client::smg::grpc::common::{
    FlushCacheRequest, FlushCacheResponse, GetTokenizerChunk, GetTokenizerRequest, KvEventBatch, ProfileResponse,
    StartProfileRequest, SubscribeKvEventsRequest,
};
use client::vllm::grpc::engine::generate_complete::MatchedStop;
use client::vllm::grpc::engine::generate_request::Input;
use client::vllm::grpc::engine::generate_response::Response as Part;
use client::vllm::grpc::engine::sampling_params::Constraint;
use client::vllm::grpc::engine::*;
use client::{Channel, Ended, run};
use prost::Message;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tonic_health::pb::{HealthCheckRequest as ProbeRequest, HealthCheckResponse as ProbeResponse};
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServerReflectionResponse};

/// Codes of gRPC.
const OK: i32 = 0;
const INVALID_ARGUMENT: i32 = 3;
const DEADLINE_EXCEEDED: i32 = 4;
const NOT_FOUND: i32 = 5;
const PERMISSION_DENIED: i32 = 7;
const RESOURCE_EXHAUSTED: i32 = 8;
const FAILED_PRECONDITION: i32 = 9;
const UNIMPLEMENTED: i32 = 12;
const UNAVAILABLE: i32 = 14;
const UNAUTHENTICATED: i32 = 16;

fn start(options: &[&str]) -> Server {
    Server::start(&[&["--grpc-port", "0"], options].concat())
}

fn params(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens: Some(max_tokens), ignore_eos: true, seed: Some(7), ..Default::default() }
}

fn text(prompt: &str, sampling_params: SamplingParams) -> GenerateRequest {
    let input = Some(Input::Text(prompt.into()));
    GenerateRequest { input, sampling_params: Some(sampling_params), ..Default::default() }
}

fn ids(input_ids: Vec<u32>, sampling_params: SamplingParams) -> GenerateRequest {
    let input = Some(Input::Tokenized(TokenizedInput { input_ids, ..Default::default() }));
    GenerateRequest { input, sampling_params: Some(sampling_params), ..Default::default() }
}

fn generate(server: &Server, request: &GenerateRequest) -> (Vec<GenerateStreamChunk>, Vec<GenerateComplete>, Ended) {
    let (messages, ended) =
        run(async { Channel::open(server).await.call::<GenerateResponse>("Generate", &[], request).await });
    let (mut chunks, mut completes) = (Vec::new(), Vec::new());
    for message in messages {
        match message.response.unwrap() {
            Part::Chunk(chunk) => chunks.push(chunk),
            Part::Complete(complete) => completes.push(complete),
        }
    }
    completes.sort_by_key(|complete| complete.index);
    (chunks, completes, ended)
}

/// Generates texts that come without a stream.
fn whole(server: &Server, request: &GenerateRequest) -> Vec<GenerateComplete> {
    let (chunks, completes, ended) = generate(server, request);
    assert_eq!((ended.code, chunks.len()), (OK, 0), "{ended:?}");
    completes
}

fn ask<A: Message + Default>(server: &Server, method: &str, request: &impl Message) -> Result<A, Box<Ended>> {
    ask_with(server, method, &[], request)
}

fn ask_with<A: Message + Default>(
    server: &Server,
    method: &str,
    metadata: &[(&str, &str)],
    request: &impl Message,
) -> Result<A, Box<Ended>> {
    let (mut messages, ended) = run(async { Channel::open(server).await.call(method, metadata, request).await });
    match ended.code {
        OK => Ok(messages.pop().unwrap()),
        _ => Err(Box::new(ended)),
    }
}

/// Returns the tokens of the answer to a request over HTTP.
fn over_http(server: &Server, body: &Value) -> Vec<Vec<u32>> {
    let mut body = body.clone();
    body["return_token_ids"] = json!(true);
    let answer = server.ask("/v1/completions", &body);
    let of = |choice: &Value| serde_json::from_value(choice["token_ids"].clone()).unwrap();
    answer["choices"].as_array().unwrap().iter().map(of).collect()
}

#[test]
fn texts_are_those_of_http_for_the_same_seed() {
    let server = start(&[]);
    let sampled = SamplingParams { temperature: Some(0.7), top_p: 0.9, top_k: 40, ..params(24) };
    let body = json!({"prompt": "Once", "max_tokens": 24, "ignore_eos": true, "seed": 7, "temperature": 0.7,
                      "top_p": 0.9, "top_k": 40});
    let expected = over_http(&server, &body);
    let request = text("Once", sampled.clone());
    let [complete] = &whole(&server, &request)[..] else { panic!() };
    assert_eq!(vec![complete.output_ids.clone()], expected);
    assert_eq!((complete.finish_reason.as_str(), complete.completion_tokens), ("length", 24));
    let (chunks, completes, _) = generate(&server, &GenerateRequest { stream: true, ..request });
    let streamed: Vec<u32> = chunks.iter().flat_map(|chunk| chunk.token_ids.clone()).collect();
    assert_eq!((&vec![streamed], &completes[0].output_ids), (&expected, &expected[0]));
    assert!(chunks.iter().all(|chunk| chunk.completion_tokens as usize == chunk.token_ids.len()));
    // Tokens that were ready together come in one chunk, so that one chunk may be all.
    assert!(chunks[0].prompt_tokens == complete.prompt_tokens && complete.prompt_tokens > 0);
    let two = SamplingParams { n: 2, temperature: Some(2.0), top_p: 1.0, top_k: 0, ..sampled };
    let body = json!({"prompt": "Once", "max_tokens": 24, "ignore_eos": true, "seed": 7, "temperature": 2.0, "n": 2});
    let expected = over_http(&server, &body);
    let both: Vec<_> = whole(&server, &text("Once", two.clone())).into_iter().map(|one| one.output_ids).collect();
    assert!(both == expected && both[0] != both[1]);
    let (chunks, completes, _) = generate(&server, &GenerateRequest { stream: true, ..text("Once", two) });
    for (index, expected) in expected.iter().enumerate() {
        let own = chunks.iter().filter(|chunk| chunk.index as usize == index);
        assert_eq!(&own.flat_map(|chunk| chunk.token_ids.clone()).collect::<Vec<_>>(), expected);
        assert_eq!(completes[index].index as usize, index);
    }
}

#[test]
fn a_seed_that_the_server_chose_is_in_the_metadata_and_repeats_the_text() {
    let server = start(&[]);
    let request = text("Once", SamplingParams { seed: None, ..params(8) });
    let (_, completes, ended) = generate(&server, &request);
    let seed: u64 = ended.text("x-iec-seed").parse().unwrap();
    let body = json!({"prompt": "Once", "max_tokens": 8, "ignore_eos": true, "seed": seed, "temperature": 1});
    assert_eq!(over_http(&server, &body), [completes[0].output_ids.clone()]);
    assert!(ended.text("x-request-id").starts_with("req_"));
}

#[test]
fn probabilities_are_those_of_http() {
    let server = start(&[]);
    let asked = SamplingParams { logprobs: Some(2), prompt_logprobs: Some(1), temperature: Some(0.0), ..params(5) };
    let prompt = vec![1, 403, 407, 261];
    let body = json!({"prompt": prompt, "max_tokens": 5, "ignore_eos": true, "temperature": 0, "logprobs": 2,
                      "echo": true});
    let answer = server.ask("/v1/completions", &body);
    let expected: Vec<Option<f64>> =
        serde_json::from_value(answer["choices"][0]["logprobs"]["token_logprobs"].clone()).unwrap();
    let request = ids(prompt.clone(), asked);
    let complete = whole(&server, &request).remove(0);
    let (input, output) = (complete.input_logprobs.unwrap(), complete.output_logprobs.unwrap());
    let values =
        input.token_logprobs.iter().map(|one| one.value).chain(output.token_logprobs.iter().copied().map(Some));
    for (value, expected) in values.zip(&expected) {
        assert_eq!(value, expected.map(|value| value as f32));
    }
    assert_eq!((&input.token_ids, &output.token_ids, expected.len()), (&prompt, &complete.output_ids, 9));
    assert!(input.top_logprobs[0].values.is_empty() && input.top_logprobs[1..].iter().all(|top| top.values.len() == 1));
    assert!(output.top_logprobs.iter().zip(&output.token_ids).all(|(top, id)| top.token_ids[0] == *id));
    assert!(output.top_logprobs.iter().all(|top| top.values.len() == 2 && top.values[0] >= top.values[1]));
    let (chunks, completes, _) = generate(&server, &GenerateRequest { stream: true, ..request.clone() });
    assert_eq!((chunks[0].input_logprobs.as_ref(), chunks[0].output_logprobs.as_ref()), (Some(&input), Some(&output)));
    assert!(completes[0].input_logprobs.is_none() && completes[0].output_logprobs.is_none());
    // Without those of the prompt, tokens come one by one.
    let mut request = GenerateRequest { stream: true, ..request };
    request.sampling_params.as_mut().unwrap().prompt_logprobs = None;
    let (chunks, ..) = generate(&server, &request);
    let values = chunks.iter().flat_map(|chunk| chunk.output_logprobs.as_ref().unwrap().token_logprobs.clone());
    assert_eq!(values.collect::<Vec<_>>(), output.token_logprobs);
    // A prompt without an answer.
    let scored = SamplingParams { prompt_logprobs: Some(0), ..params(0) };
    let complete = whole(&server, &ids(prompt, scored)).remove(0);
    assert_eq!((complete.finish_reason.as_str(), complete.completion_tokens), ("length", 0));
    assert_eq!(complete.input_logprobs.unwrap().token_logprobs, input.token_logprobs);
}

#[test]
fn constraints_and_ends_are_honoured() {
    let server = start(&[]);
    let limited = SamplingParams { max_tokens: Some(60), seed: Some(3), ..Default::default() };
    let of = |constraint: Constraint| {
        let params = SamplingParams { constraint: Some(constraint), ..limited.clone() };
        let complete = whole(&server, &text("Once", params)).remove(0);
        let ids = json!({"tokens": complete.output_ids});
        (server.ask("/detokenize", &ids)["prompt"].as_str().unwrap().trim_end_matches("</s>").to_string(), complete)
    };
    let schema = r#"{"type": "object", "properties": {"a": {"enum": ["x", "yz"]}}, "required": ["a"],
                     "additionalProperties": false}"#;
    let found: Value = serde_json::from_str(&of(Constraint::JsonSchema(schema.into())).0).unwrap();
    assert!(found == json!({"a": "x"}) || found == json!({"a": "yz"}), "{found}");
    let (found, complete) = of(Constraint::Regex("[ab]{3}".into()));
    assert!(found.len() == 3 && found.bytes().all(|byte| byte == b'a' || byte == b'b'), "{found}");
    assert_eq!(complete.finish_reason, "stop");
    let choices = ChoiceConstraint { choices: vec!["left".into(), "right".into()] };
    assert!(["left", "right"].contains(&of(Constraint::Choice(choices)).0.as_str()));
    assert_eq!(of(Constraint::Grammar("root ::= \"yes\"".into())).0, "yes");
    let stop = SamplingParams { stop: vec!["e".into()], temperature: Some(0.0), ..params(50) };
    let complete = whole(&server, &text("Once upon", stop)).remove(0);
    assert_eq!(complete.matched_stop, Some(MatchedStop::MatchedStopStr("e".into())));
    let first = whole(&server, &text("Once upon", SamplingParams { temperature: Some(0.0), ..params(1) })).remove(0);
    let id = first.output_ids[0];
    let stop = SamplingParams { stop_token_ids: vec![id], temperature: Some(0.0), ..params(50) };
    let complete = whole(&server, &text("Once upon", stop)).remove(0);
    assert_eq!(
        (complete.matched_stop, complete.finish_reason.as_str()),
        (Some(MatchedStop::MatchedTokenId(id)), "stop")
    );
}

#[test]
fn wrong_values_are_refused_by_the_names_of_their_fields() {
    let server = start(&[]);
    let with = |change: fn(&mut SamplingParams)| {
        let mut params = params(4);
        change(&mut params);
        text("Once", params)
    };
    let cases = [
        (ids(vec![1, 512], params(4)), "tokenized.input_ids"),
        (ids(vec![u32::MAX], params(4)), "tokenized.input_ids"),
        (ids(Vec::new(), params(4)), "tokenized.input_ids"),
        (ids(vec![5; 5000], params(4)), "tokenized.input_ids"),
        (GenerateRequest { input: None, ..with(|_| {}) }, "input"),
        (GenerateRequest { mm_inputs: Some(MultimodalInputs::default()), ..with(|_| {}) }, "mm_inputs"),
        (GenerateRequest { request_id: "x".repeat(300), ..with(|_| {}) }, "request_id"),
        (with(|params| params.temperature = Some(f32::NAN)), "temperature"),
        (with(|params| params.temperature = Some(-1.0)), "temperature"),
        (with(|params| params.n = 17), "n"),
        (with(|params| params.logprobs = Some(-1)), "logprobs"),
        (with(|params| params.stop_token_ids = vec![600]), "stop_token_ids"),
        (with(|params| params.logit_bias = [(-3, 1.0)].into()), "logit_bias"),
        (with(|params| params.min_tokens = 9), "min_tokens"),
        (with(|params| params.constraint = Some(Constraint::StructuralTag("{}".into()))), "structural_tag"),
        (with(|params| params.constraint = Some(Constraint::JsonSchema("{".into()))), "json_schema"),
        (with(|params| params.constraint = Some(Constraint::Regex("(".into()))), "regex"),
        (with(|params| params.constraint = Some(Constraint::Choice(ChoiceConstraint::default()))), "choice"),
    ];
    let mut wrong = Vec::new();
    for (request, field) in cases {
        let (_, _, ended) = generate(&server, &request);
        if ended.code != INVALID_ARGUMENT || !ended.message.contains(&format!("`{field}")) {
            wrong.push(format!("{field}: {} {}", ended.code, ended.message));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    // A length that no context holds is that of the context.
    let huge = SamplingParams { max_tokens: Some(u32::MAX), temperature: Some(0.0), ..Default::default() };
    assert!(!whole(&server, &text("Once", huge)).is_empty());
    // Bytes that are no message.
    let (path, garbage) = (format!("{}/Generate", client::ENGINE), client::framed(&[0xff; 40]));
    let ended = run(async {
        let stream = Channel::open(&server).await.begin_raw::<GenerateResponse>(&path, &[], garbage).await;
        stream.end().await
    });
    assert_ne!(ended.code, OK);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn calls_end_when_they_are_aborted_late_or_left() {
    let home = story_pack(100_000);
    let pack = home.path().join("pack").display().to_string();
    let server = start(&[&pack]);
    let endless = |id: &str| GenerateRequest { request_id: id.into(), stream: true, ..text("Once", params(90_000)) };
    let path = format!("{}/Generate", client::ENGINE);
    run(async {
        let channel = Channel::open(&server).await;
        let mut stream = channel.begin::<GenerateResponse>(&path, &[], &endless("a")).await;
        stream.next().await.unwrap();
        let (_, ended) = channel.call::<GenerateResponse>("Generate", &[], &endless("a")).await;
        assert_eq!(ended.code, FAILED_PRECONDITION, "{ended:?}");
        let abort = AbortRequest { request_ids: vec!["none".into(), "a".into()] };
        let (_, ended) = channel.call::<AbortResponse>("Abort", &[], &abort).await;
        assert_eq!(ended.code, OK);
        let mut last = None;
        while let Some(message) = stream.next().await {
            last = message.response;
        }
        let Some(Part::Complete(complete)) = last else { panic!("{last:?}") };
        assert_eq!((complete.finish_reason.as_str(), complete.output_ids.is_empty()), ("abort", false));
        assert_eq!(stream.end().await.code, OK);
        let (messages, ended) =
            channel.call::<GenerateResponse>("Generate", &[("grpc-timeout", "300m")], &endless("b")).await;
        assert_eq!((ended.code, messages.is_empty()), (DEADLINE_EXCEEDED, false), "{ended:?}");
        // A client that leaves.
        let mut stream = channel.begin::<GenerateResponse>(&path, &[], &endless("c")).await;
        stream.next().await.unwrap();
        drop(stream);
    });
    server.wait("idle", || server.get("/load").json()["server_load"] == 0);
    server.wait("the end of both calls in the log", || {
        let log = server.log();
        log.contains("abort") && log.contains("disconnected")
    });
}

#[test]
fn keys_open_what_they_open_over_http() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("keys.toml");
    let key = |name: &str, secret: &str, rest: &str| {
        let digest = iec::sha256::hex(iec::sha256::Digest::new_with_prefix(secret));
        format!("[[key]]\nname = \"{name}\"\nsha256 = \"{digest}\"\n{rest}\n")
    };
    let keys = key("a", "one", "scopes = [\"infer\"]\nrpm = 2")
        + &key("b", "two", "scopes = [\"metrics\", \"admin\"]")
        + &key("c", "three", "models = [\"other\"]");
    std::fs::write(&file, keys).unwrap();
    let server = start(&["--api-key-file", file.to_str().unwrap()]);
    let request = text("Once", params(1));
    let code = |metadata: &[(&str, &str)]| match ask_with::<GenerateResponse>(&server, "Generate", metadata, &request) {
        Ok(_) => (OK, String::new(), String::new()),
        Err(ended) => (ended.code, ended.text("x-iec-code").to_string(), ended.text("retry-after").to_string()),
    };
    assert_eq!(code(&[]).0, UNAUTHENTICATED);
    assert_eq!(code(&[("authorization", "Bearer four")]).0, UNAUTHENTICATED);
    assert_eq!(code(&[("x-api-key", "two")]).0, PERMISSION_DENIED);
    assert_eq!(code(&[("x-api-key", "three")]).0, NOT_FOUND);
    assert_eq!(code(&[("x-api-key", "one"), ("x-iec-model", "none")]).0, NOT_FOUND);
    assert_eq!(code(&[("authorization", "Bearer one"), ("authorization", "Bearer two")]).0, INVALID_ARGUMENT);
    assert_eq!(code(&[("authorization", "Bearer one")]).0, OK);
    assert_eq!(code(&[("x-api-key", "one")]).0, OK);
    let (refused, name, seconds) = code(&[("x-api-key", "one")]);
    assert_eq!((refused, name.as_str()), (RESOURCE_EXHAUSTED, "rate_limit_exceeded"));
    assert!(seconds.parse::<u64>().is_ok_and(|seconds| (1..=60).contains(&seconds)), "{seconds}");
    let loads = |key: &str| {
        ask_with::<GetLoadsResponse>(&server, "GetLoads", &[("x-api-key", key)], &GetLoadsRequest::default())
    };
    assert_eq!((loads("one").unwrap_err().code, loads("two").is_ok()), (PERMISSION_DENIED, true));
    assert!(ask::<HealthCheckResponse>(&server, "HealthCheck", &HealthCheckRequest {}).unwrap().healthy);
}

#[test]
fn health_follows_readiness_and_requests_finish_at_the_end() {
    let mut server = start(&["--drain-delay", "400ms"]);
    let path = format!("{}/Generate", client::ENGINE);
    let probe = |service: &str| ProbeRequest { service: service.into() };
    run(async {
        let channel = Channel::open(&server).await;
        for service in ["", "vllm.grpc.engine.VllmEngine"] {
            let mut stream = channel.begin::<ProbeResponse>("/grpc.health.v1.Health/Check", &[], &probe(service)).await;
            assert_eq!(stream.next().await.unwrap().status, 1, "{service}");
        }
        let unknown = channel.begin::<ProbeResponse>("/grpc.health.v1.Health/Check", &[], &probe("none")).await;
        assert_eq!(unknown.end().await.code, NOT_FOUND);
        let mut watch = channel.begin::<ProbeResponse>("/grpc.health.v1.Health/Watch", &[], &probe("")).await;
        assert_eq!(watch.next().await.unwrap().status, 1);
        let request = GenerateRequest { stream: true, ..text("Once", params(500)) };
        let mut stream = channel.begin::<GenerateResponse>(&path, &[], &request).await;
        stream.next().await.unwrap();
        server.signal("TERM");
        assert_eq!(watch.next().await.unwrap().status, 2);
        let (answers, _) = channel.call::<HealthCheckResponse>("HealthCheck", &[], &HealthCheckRequest {}).await;
        assert!(!answers[0].healthy);
        let (_, during) = channel.call::<GenerateResponse>("Generate", &[], &text("Once", params(1))).await;
        assert_eq!(during.code, OK, "requests are taken until the delay is over");
        let mut last = None;
        while let Some(message) = stream.next().await {
            last = message.response;
        }
        assert!(matches!(last, Some(Part::Complete(complete)) if complete.completion_tokens == 500));
        assert_eq!(stream.end().await.code, OK);
        assert!(watch.next().await.is_none());
    });
    assert_eq!(server.end().code(), Some(0), "{}", server.log());
}

#[test]
fn a_server_that_ends_refuses_calls() {
    let home = story_pack(100_000);
    let pack = home.path().join("pack").display().to_string();
    let server = start(&[&pack]);
    let path = format!("{}/Generate", client::ENGINE);
    run(async {
        let channel = Channel::open(&server).await;
        let request = GenerateRequest { stream: true, ..text("Once", params(90_000)) };
        let mut stream = channel.begin::<GenerateResponse>(&path, &[], &request).await;
        stream.next().await.unwrap();
        server.signal("TERM");
        let begin = Instant::now();
        loop {
            let (_, ended) = channel.call::<GenerateResponse>("Generate", &[], &text("Once", params(1))).await;
            if ended.code == UNAVAILABLE {
                assert_eq!((ended.text("x-iec-code"), ended.text("retry-after")), ("draining", "30"));
                break;
            }
            assert!(begin.elapsed() < Duration::from_secs(20), "{ended:?}");
        }
    });
}

#[test]
fn models_servers_and_loads_are_described() {
    let server = start(&["--max-seqs", "3"]);
    let model: GetModelInfoResponse = ask(&server, "GetModelInfo", &GetModelInfoRequest {}).unwrap();
    assert_eq!((model.vocab_size, model.max_context_length, model.is_generation), (512, 512, true));
    assert_eq!((model.architectures, model.bos_token_id), (vec!["LlamaForCausalLM".to_string()], 1));
    assert_eq!((model.eos_token_ids, model.model_path == model.served_model_name), (vec![2], true));
    let about: GetServerInfoResponse = ask(&server, "GetServerInfo", &GetServerInfoRequest {}).unwrap();
    assert_eq!((about.server_type.as_str(), about.max_num_seqs, about.is_paused), ("vllm-grpc", 3, false));
    whole(&server, &text("Once", params(4)));
    let loads: GetLoadsResponse = ask(&server, "GetLoads", &GetLoadsRequest::default()).unwrap();
    assert_eq!((loads.loads.len(), loads.loads[0].max_running_requests, loads.loads[0].num_waiting_reqs), (1, 3, 0));
    assert!(loads.loads[0].max_total_num_tokens > 0 && loads.timestamp.ends_with('Z'), "{loads:?}");
}

#[test]
fn the_prefix_cache_is_flushed_when_no_request_uses_it() {
    let home = story_pack(100_000);
    let (pack, state) = (home.path().join("pack").display().to_string(), home.path().join("state"));
    let server = start(&[&pack, "--state-dir", state.to_str().unwrap()]);
    let request = ids(vec![5; 300], params(1));
    let cached = || whole(&server, &request)[0].cached_tokens;
    assert_eq!(cached(), 0);
    assert!(cached() >= 256);
    let written = |server: &Server| server.get("/metrics").body.contains(r#"result="written"} 2"#);
    server.wait("pages on disk", || written(&server));
    let flush =
        |seconds: f32| ask::<FlushCacheResponse>(&server, "FlushCache", &FlushCacheRequest { timeout_s: seconds });
    assert!(flush(0.0).unwrap().success);
    assert_eq!(cached(), 0, "neither memory nor disk has the pages");
    assert_eq!(flush(-1.0).unwrap_err().code, INVALID_ARGUMENT);
    assert_eq!(flush(f32::NAN).unwrap_err().code, INVALID_ARGUMENT);
    let path = format!("{}/Generate", client::ENGINE);
    run(async {
        let channel = Channel::open(&server).await;
        let endless = GenerateRequest { stream: true, ..text("Once", params(90_000)) };
        let mut stream = channel.begin::<GenerateResponse>(&path, &[], &endless).await;
        stream.next().await.unwrap();
        for seconds in [0.0, 0.1] {
            let request = FlushCacheRequest { timeout_s: seconds };
            let (answers, _) = channel.call::<FlushCacheResponse>("FlushCache", &[], &request).await;
            assert!(!answers[0].success);
        }
    });
}

#[test]
fn the_files_of_the_tokenizer_come_as_an_archive() {
    let home = story_pack(256);
    let server = start(&[&home.path().join("pack").display().to_string()]);
    let (chunks, ended) = run(async {
        Channel::open(&server).await.call::<GetTokenizerChunk>("GetTokenizer", &[], &GetTokenizerRequest {}).await
    });
    assert_eq!(ended.code, OK);
    let archive: Vec<u8> = chunks.iter().flat_map(|chunk| chunk.data.clone()).collect();
    let digest = iec::sha256::hex(iec::sha256::Digest::new_with_prefix(&archive));
    assert_eq!(chunks.iter().map(|chunk| chunk.sha256.as_str()).collect::<String>(), digest);
    let path = home.path().join("tokenizer.zip");
    std::fs::write(&path, &archive).unwrap();
    // Another reader of archives, where there is one.
    let script = "import sys, zipfile; z = zipfile.ZipFile(sys.argv[1]); assert z.testzip() is None; \
                  print(z.read('chat_template.jinja').decode(), sorted(z.namelist()))";
    let Ok(ran) = std::process::Command::new("python3").args(["-c", script]).arg(&path).output() else { return };
    let listed = String::from_utf8_lossy(&ran.stdout);
    assert!(listed.starts_with(super::client::TEMPLATE) && listed.contains("'tokenizer.json'"), "{ran:?}");
}

#[test]
fn reflection_lists_the_services_and_methods_that_are_missing_say_so() {
    let server = start(&[]);
    let ask_for = |asked: MessageRequest| ServerReflectionRequest { host: String::new(), message_request: Some(asked) };
    run(async {
        let channel = Channel::open(&server).await;
        for version in ["v1", "v1alpha"] {
            let path = format!("/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo");
            let request = ask_for(MessageRequest::ListServices(String::new()));
            let mut stream = channel.begin::<ServerReflectionResponse>(&path, &[], &request).await;
            let answer = stream.next().await.unwrap().message_response;
            let Some(MessageResponse::ListServicesResponse(list)) = answer else { panic!("{answer:?}") };
            let names: Vec<&str> = list.service.iter().map(|service| service.name.as_str()).collect();
            for name in ["vllm.grpc.engine.VllmEngine", "grpc.health.v1.Health"] {
                assert!(names.contains(&name), "{names:?}");
            }
            let request = ask_for(MessageRequest::FileContainingSymbol("vllm.grpc.engine.GenerateRequest".into()));
            let mut stream = channel.begin::<ServerReflectionResponse>(&path, &[], &request).await;
            let answer = stream.next().await.unwrap().message_response;
            assert!(matches!(answer, Some(MessageResponse::FileDescriptorResponse(_))), "{answer:?}");
        }
        let (_, ended) = channel.call::<EmbedResponse>("Embed", &[], &EmbedRequest::default()).await;
        assert!(ended.code == UNIMPLEMENTED && ended.message.contains("embeddings"), "{ended:?}");
        let (_, ended) = channel.call::<ProfileResponse>("StartProfile", &[], &StartProfileRequest::default()).await;
        assert!(ended.code == UNIMPLEMENTED && ended.message.contains("profiler"), "{ended:?}");
        let (_, ended) =
            channel.call::<KvEventBatch>("SubscribeKvEvents", &[], &SubscribeKvEventsRequest::default()).await;
        assert!(ended.code == UNIMPLEMENTED && !ended.message.is_empty(), "{ended:?}");
        let (_, ended) = channel.call::<EmbedResponse>("None", &[], &EmbedRequest::default()).await;
        assert_eq!(ended.code, UNIMPLEMENTED);
        let stream = channel.begin::<EmbedResponse>("/no.Service/None", &[], &EmbedRequest::default()).await;
        let ended = stream.end().await;
        assert!(ended.code == UNIMPLEMENTED && ended.message.contains("reflection"), "{ended:?}");
    });
}

#[test]
fn models_are_loaded_on_request() {
    let home = story_pack(256);
    let models = home.path().join("models");
    std::fs::create_dir(&models).unwrap();
    std::fs::rename(home.path().join("pack"), models.join("story")).unwrap();
    let server = start(&["--models-dir", models.to_str().unwrap()]);
    let request = text("Once", params(2));
    assert!(ask_with::<GenerateResponse>(&server, "Generate", &[("x-iec-model", "story")], &request).is_ok());
    let error = ask_with::<GenerateResponse>(&server, "Generate", &[("x-iec-model", "tale")], &request).unwrap_err();
    assert!(error.code == NOT_FOUND && error.message.starts_with("`x-iec-model`"), "{error:?}");
}
