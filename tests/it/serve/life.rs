//! Life of a server: start, readiness, draining, signals, and the plan that it prints.

use super::client::{Response, Server, story_pack};
use crate::common::iec;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

fn long(tokens: usize) -> Value {
    json!({"prompt": "Once", "max_tokens": tokens, "ignore_eos": true, "temperature": 0, "stream": true})
}

#[test]
fn requests_that_run_are_finished_at_the_end() {
    let mut server = Server::start(&["--drain-delay", "300ms"]);
    let mut stream = server.begin("POST", "/v1/completions", &[], &long(500).to_string());
    let mut some = [0; 200];
    stream.read_exact(&mut some).unwrap();
    server.signal("TERM");
    server.wait("draining", || server.get("/readyz").status == 503);
    assert_eq!(server.get("/livez").status, 200);
    let during = json!({"prompt": "Once", "max_tokens": 1});
    assert_eq!(server.post("/v1/completions", &during).status, 200, "requests are taken until the delay is over");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("[DONE]"));
    assert_eq!(server.end().code(), Some(0), "{}", server.log());
}

#[test]
fn requests_that_take_too_long_are_cut_with_an_error() {
    let home = story_pack(100_000);
    let pack = home.path().join("pack").display().to_string();
    let mut server = Server::start(&[&pack, "--drain-timeout", "200ms"]);
    let mut stream = server.begin("POST", "/v1/completions", &[], &long(90_000).to_string());
    let mut some = [0; 200];
    stream.read_exact(&mut some).unwrap();
    server.signal("INT");
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("shutting down") && rest.contains("[DONE]"), "{}", &rest[rest.len().saturating_sub(400)..]);
    assert_eq!(server.end().code(), Some(1), "{}", server.log());
}

#[test]
fn a_second_signal_ends_the_server_at_once() {
    let home = story_pack(100_000);
    let pack = home.path().join("pack").display().to_string();
    let mut server = Server::start(&[&pack]);
    let mut stream = server.begin("POST", "/v1/completions", &[], &long(90_000).to_string());
    let mut some = [0; 200];
    stream.read_exact(&mut some).unwrap();
    server.signal("TERM");
    server.wait("draining", || server.get("/readyz").status == 503);
    server.signal("INT");
    assert_eq!(server.end().code(), Some(130));
}

#[test]
fn an_idle_server_ends_at_once() {
    let mut server = Server::start(&[]);
    // A connection without a request does not hold it up.
    let _idle = std::net::TcpStream::connect(&server.address).unwrap();
    let begin = Instant::now();
    server.signal("INT");
    assert_eq!(server.end().code(), Some(0), "{}", server.log());
    assert!(begin.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_model_that_cannot_be_opened_ends_the_server() {
    let empty = tempfile::tempdir().unwrap();
    let mut server = Server::spawn(&["--model", &format!("x={}", empty.path().display())], &[]);
    assert_eq!(server.end().code(), Some(3), "{}", server.log());
}

#[test]
fn a_unix_socket_answers_and_is_removed_at_the_end() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("socket");
    let mut server = Server::start(&["--unix", &path.display().to_string()]);
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.write_all(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    assert_eq!(Response::parse(&bytes).json()["version"], env!("CARGO_PKG_VERSION"));
    server.signal("TERM");
    assert_eq!(server.end().code(), Some(0));
    assert!(!path.exists());
}

#[test]
fn check_prints_settings_and_memory() {
    let ran = iec().args(["serve", "--check", "--max-seqs", "4", "--kv-memory", "64M"]).output().unwrap();
    assert_eq!(ran.status.code(), Some(0), "{}", String::from_utf8_lossy(&ran.stderr));
    let plan: Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!(plan["settings"]["max_seqs"], 4);
    let pool = plan["settings"]["models"][0]["plan"]["kv_pool_bytes"].as_u64().unwrap();
    assert!(pool <= 64 << 20 && pool > 60 << 20, "whole pages of the memory for the KV cache: {pool}");
    assert_eq!(plan["fits"], true);
    let ran = iec().args(["serve", "--check", "--kv-memory", "900T"]).output().unwrap();
    assert_eq!(ran.status.code(), Some(6));
}

#[test]
fn settings_come_from_options_variables_and_a_file() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("serve.toml");
    std::fs::write(&file, "max-seqs = 3\nmax-n = 2\nmax-logprobs = 7\n").unwrap();
    let mut command = iec();
    command.args(["serve", "--check", "--max-n", "5", "--config"]).arg(&file).env("IEC_MAX_N", "4");
    let ran = command.env("IEC_MAX_LOGPROBS", "6").output().unwrap();
    let plan: Value = serde_json::from_slice(&ran.stdout).unwrap_or_else(|_| panic!("{ran:?}"));
    let settings = &plan["settings"];
    assert_eq!(
        (&settings["max_seqs"], &settings["max_n"], &settings["max_logprobs"]),
        (&json!(3), &json!(5), &json!(6))
    );
    std::fs::write(&file, "max-seq = 3\n").unwrap();
    let ran = iec().args(["serve", "--check", "--config"]).arg(&file).output().unwrap();
    assert_eq!(ran.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&ran.stderr).contains("max-seqs"), "the nearest name is proposed");
}

#[test]
fn a_step_has_at_most_the_tokens_of_the_setting() {
    let server = Server::start(&["--max-step-tokens", "16"]);
    server.ask("/v1/completions", &json!({"prompt": vec![5; 200], "max_tokens": 1, "ignore_eos": true}));
    let metrics = server.get("/metrics").body;
    let steps = metrics.lines().find(|line| line.starts_with("vllm:iteration_tokens_total_count")).unwrap();
    let steps: usize = steps.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(steps >= 200 / 16, "{steps} steps");
}

#[test]
fn adapters_beyond_the_limits_are_refused_at_the_start() {
    let pack = crate::common::packed_as("lora-llama-gqa-base", &crate::common::fixture("llama-gqa"), &[]);
    let lora = format!("x={}", crate::common::fixture("lora-llama-gqa").join("r16-all").display());
    let mut command = iec();
    command.arg("serve").arg(&pack).args(["--port", "0", "--lora", &lora, "--max-lora-rank", "8"]);
    let ran = command.output().unwrap();
    assert_eq!(ran.status.code(), Some(2), "{ran:?}");
    assert!(String::from_utf8_lossy(&ran.stderr).contains("--max-lora-rank"));
}

#[test]
fn pages_of_the_prefix_cache_survive_a_server_that_is_killed() {
    let home = story_pack(512);
    let (pack, state) = (home.path().join("pack").display().to_string(), home.path().join("state"));
    let options = [pack.as_str(), "--state-dir", state.to_str().unwrap()];
    let body = json!({"prompt": vec![5; 300], "max_tokens": 1, "ignore_eos": true});
    let mut server = Server::start(&options);
    server.ask("/v1/completions", &body);
    let written = r#"iec_disk_pages_total{model_name="pack",engine="0",result="written"} 2"#;
    server.wait("pages on disk", || server.get("/metrics").body.contains(written));
    assert!(server.get("/metrics").body.contains(r#"engine="0",stage="mlp""#), "stages are measured");
    server.signal("KILL");
    server.end();
    let server = Server::start(&options);
    let answer = server.ask("/v1/completions", &body);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 256);
}

#[test]
fn weights_that_differ_from_their_hashes_are_found_while_they_are_served() {
    let home = story_pack(256);
    let pack = home.path().join("pack");
    let (path, body) = (pack.display().to_string(), json!({"prompt": "Once", "max_tokens": 1}));
    let server = Server::start(&[&path]);
    server.wait("the comparison", || server.log().contains("the weights of `pack` are as recorded"));
    let same = r#"iec_checked_tensors_total{model_name="pack",engine="0",result="same"} "#;
    let metrics = server.get("/metrics").body;
    let tensors = metrics.lines().find_map(|line| line.strip_prefix(same)).unwrap();
    assert!(tensors.parse::<usize>().unwrap() > 10, "{tensors}");
    assert_eq!(server.post("/v1/completions", &body).status, 200);
    drop(server);
    let binary = pack.join("model.ie.bin");
    let mut bytes = std::fs::read(&binary).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&binary, bytes).unwrap();
    let server = Server::spawn(&[&path], &[]);
    server.wait("the comparison", || server.log().contains("`pack` takes no more requests"));
    let refused = server.post("/v1/completions", &body);
    assert_eq!((refused.status, refused.json()["error"]["code"].as_str()), (503, Some("damaged")));
    assert_eq!((server.get("/readyz").status, server.get("/livez").status), (503, 200));
    assert!(server.get("/metrics").body.contains(r#"result="different"} 1"#));
    let off = Server::start(&[&path, "--check-weights", "off"]);
    assert_eq!(off.post("/v1/completions", &body).status, 200);
    assert!(!off.log().contains("recorded"), "{}", off.log());
}

#[test]
fn the_limit_of_open_files_is_raised() {
    let server = Server::start_after("ulimit -Sn 60", &[]);
    let idle: Vec<_> = (0..200).map(|_| std::net::TcpStream::connect(&server.address).unwrap()).collect();
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "Once", "max_tokens": 1})).status, 200);
    drop(idle);
}

#[test]
fn the_memory_plan_respects_the_limit_of_the_address_space() {
    let script = "ulimit -v 1500000; exec \"$@\"";
    let mut command = assert_cmd::Command::new("sh");
    command.args(["-c", script, "sh"]).arg(assert_cmd::cargo::cargo_bin("iec")).args(["serve", "--check"]);
    let ran = command.env("IEC_DEVICE", "cpu").output().unwrap();
    assert!(ran.status.success(), "{ran:?}");
    let plan: Value = serde_json::from_slice(&ran.stdout).unwrap();
    let (left, pool) = (&plan["left_bytes"], &plan["settings"]["models"][0]["plan"]["kv_pool_bytes"]);
    assert!(left.as_u64().unwrap() < 1_500_000 << 10, "{left}");
    assert!(pool.as_u64().unwrap() < 750_000 << 10, "{pool}");
}

#[test]
fn systemd_is_told() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut server = Server::spawn(&[], &[("NOTIFY_SOCKET", &path.display().to_string())]);
    let told = || {
        let mut buffer = [0; 64];
        let count = socket.recv(&mut buffer).unwrap();
        String::from_utf8_lossy(&buffer[..count]).into_owned()
    };
    assert_eq!(told(), "READY=1");
    server.signal("TERM");
    assert_eq!(told(), "STOPPING=1");
    assert_eq!(server.end().code(), Some(0));
}
