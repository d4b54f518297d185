//! Keys: scopes, limits, and changes while the server runs.

use super::client::Server;
use iec::serve::keys::digest_of;
use serde_json::json;

fn key(name: &str, more: &str) -> String {
    format!("[[key]]\nname = \"{name}\"\nsha256 = \"{}\"\n{more}\n", digest_of(name))
}

#[test]
fn keys_have_scopes_models_and_limits() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("keys.toml");
    let all = [
        key("alice", "rpm = 2"),
        key("bob", "scopes = [\"metrics\"]"),
        key("carol", "max_tokens = 4\nmodels = [\"other\"]"),
        key("dave", "max_tokens = 4"),
    ];
    std::fs::write(&file, all.concat()).unwrap();
    let server = Server::start(&["--api-key-file", &file.display().to_string()]);
    let ask = |key: &str, tokens: usize| {
        let body = json!({"prompt": "Once", "max_tokens": tokens}).to_string();
        server.send("POST", "/v1/completions", &[("Authorization", &format!("Bearer {key}"))], &body)
    };
    assert_eq!(ask("nobody", 1).status, 401);
    assert_eq!(ask("alice", 1).status, 200);
    assert_eq!(ask("alice", 1).status, 200);
    let limited = ask("alice", 1);
    assert_eq!(limited.status, 429);
    assert!((1..=30).contains(&limited.header("retry-after").unwrap().parse::<u64>().unwrap()));
    assert_eq!(ask("bob", 1).status, 403);
    assert_eq!(server.send("GET", "/metrics", &[("x-api-key", "bob")], "").status, 200);
    assert_eq!(server.send("GET", "/metrics", &[("x-api-key", "alice")], "").status, 403);
    assert_eq!(ask("carol", 1).status, 404, "a model that the key may not use does not exist for it");
    assert_eq!(ask("dave", 5).status, 400);
    assert_eq!(ask("dave", 4).status, 200);

    // SIGHUP reads the file again, as a whole or not at all.
    std::fs::write(&file, "nonsense").unwrap();
    server.signal("HUP");
    server.wait("the refusal", || server.log().contains("stay in use"));
    assert_eq!(ask("dave", 1).status, 200);
    std::fs::write(&file, key("erin", "")).unwrap();
    server.signal("HUP");
    server.wait("the new keys", || server.log().contains("were read again"));
    assert_eq!((ask("dave", 1).status, ask("erin", 1).status), (401, 200));
    assert!(!server.log().contains(&digest_of("erin")), "the log shows no digests");
}

#[test]
fn a_server_that_was_started_with_hang_ups_ignored_reads_keys_again() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("keys.toml");
    std::fs::write(&file, key("alice", "")).unwrap();
    let mut server = Server::start_after("trap '' HUP", &["--api-key-file", &file.display().to_string()]);
    std::fs::write(&file, key("erin", "")).unwrap();
    server.signal("HUP");
    server.wait("the new keys", || server.log().contains("were read again"));
    let models = |key: &str| server.send("GET", "/v1/models", &[("x-api-key", key)], "").status;
    assert_eq!((models("alice"), models("erin")), (401, 200));
    server.signal("TERM");
    assert_eq!(server.end().code(), Some(0), "{}", server.log());
}

#[test]
fn the_use_of_a_day_survives_a_restart() {
    let home = tempfile::tempdir().unwrap();
    let (file, state) = (home.path().join("keys.toml"), home.path().join("state"));
    std::fs::write(&file, key("alice", "tokens_per_day = 60")).unwrap();
    std::fs::create_dir(&state).unwrap();
    let options =
        ["--api-key-file", &file.display().to_string(), "--state-dir", &state.display().to_string()].map(String::from);
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let ask = |server: &Server| {
        let body = json!({"prompt": "Once", "max_tokens": 30, "ignore_eos": true}).to_string();
        server.send("POST", "/v1/completions", &[("x-api-key", "alice")], &body).status
    };
    let mut server = Server::start(&options);
    assert_eq!(ask(&server), 200);
    server.signal("TERM");
    assert_eq!(server.end().code(), Some(0), "{}", server.log());
    let server = Server::start(&options);
    assert_eq!(ask(&server), 429, "half of the day's tokens were used before the restart");
}

#[test]
fn a_network_without_keys_is_refused() {
    let mut command = crate::common::iec();
    let ran = command.args(["serve", "--host", "0.0.0.0", "--port", "0"]).output().unwrap();
    assert_eq!(ran.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&ran.stderr).contains("--api-key-file"));
}
