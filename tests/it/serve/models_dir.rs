//! Models of a directory, which are loaded on request and unloaded when idle.

use super::client::{Server, story_pack};
use iec::serve::keys::digest_of;
use serde_json::{Value, json};
use std::path::Path;

/// Copies the files of a directory.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Returns a directory of models: two packs, a GGUF file, a damaged pack, and entries that are no models.
fn models_dir() -> tempfile::TempDir {
    let home = story_pack(256);
    let (pack, models) = (home.path().join("pack"), home.path().join("models"));
    std::fs::create_dir(&models).unwrap();
    for name in ["a", "b", "broken", ".hidden", "two words"] {
        copy(&pack, &models.join(name));
    }
    let weights = std::fs::read_dir(models.join("broken")).unwrap().map(|entry| entry.unwrap().path());
    let weights = weights.max_by_key(|path| path.metadata().unwrap().len()).unwrap();
    std::fs::File::options().write(true).open(&weights).unwrap().set_len(4096).unwrap();
    std::fs::create_dir(models.join("empty")).unwrap();
    std::fs::write(models.join("notes.txt"), "x").unwrap();
    home
}

/// Returns the states of all models.
fn states(server: &Server) -> Vec<(String, String)> {
    let list = server.get("/v1/models").json();
    let text = |model: &Value, name: &str| model[name].as_str().unwrap().to_string();
    list["data"].as_array().unwrap().iter().map(|model| (text(model, "id"), text(model, "state"))).collect()
}

fn state(server: &Server, name: &str) -> String {
    states(server).into_iter().find(|(id, _)| id == name).unwrap().1
}

fn story(model: &str) -> Value {
    json!({"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0})
}

#[test]
fn models_of_a_directory_are_loaded_on_request() {
    let home = models_dir();
    let models = home.path().join("models").display().to_string();
    let mut server = Server::start(&["--models-dir", &models]);
    let unloaded = ["a", "b", "broken"].map(|name| (name.to_string(), "unloaded".to_string()));
    assert_eq!(states(&server), unloaded);
    for entry in ["two words", "empty", "notes.txt"] {
        server.wait(&format!("the note about {entry}"), || server.log().contains(entry));
    }
    assert_eq!(server.get("/api/ps").json()["models"], json!([]));
    let text = server.ask("/v1/completions", &story("a"))["choices"][0]["text"].clone();
    assert_eq!((state(&server, "a"), state(&server, "b")), ("loaded".into(), "unloaded".into()));
    assert_eq!(server.get("/api/ps").json()["models"][0]["name"], "a:latest");
    let both: Vec<_> = (0..2).map(|_| server.begin("POST", "/v1/completions", &[], &story("b").to_string())).collect();
    for mut stream in both {
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut stream, &mut bytes).unwrap();
        let answer = super::client::Response::parse(&bytes);
        assert_eq!(answer.json()["choices"][0]["text"], text, "{}", answer.body);
    }
    let counted = server.ask("/tokenize", &json!({"model": "b", "prompt": "Once"}));
    assert!(counted["count"].as_u64() > Some(0));

    let failed = server.post("/v1/completions", &story("broken"));
    assert_eq!((failed.status, failed.json()["error"]["code"].as_str()), (503, Some("failed")), "{}", failed.body);
    assert_eq!(state(&server, "broken"), "failed");
    assert_eq!(server.ask("/v1/completions", &story("a"))["choices"][0]["text"], text, "other models answer");
    let hostile =
        ["../pack", "..", ".", ".hidden", "empty", "two words", "a/", "/a", "./a", "a\u{0}", "A", "models/a", ""];
    for name in hostile {
        let response = server.post("/v1/completions", &story(name));
        let expected = if name.is_empty() { 400 } else { 404 };
        assert_eq!(response.status, expected, "{name:?}: {}", response.body);
    }
    server.signal("TERM");
    assert_eq!(server.end().code(), Some(0), "{}", server.log());
}

#[test]
fn idle_models_are_unloaded_and_loaded_again() {
    let home = models_dir();
    let models = home.path().join("models").display().to_string();
    let server = Server::start(&["--models-dir", &models, "--idle-unload", "200ms"]);
    let text = server.ask("/v1/completions", &story("a"))["choices"][0]["text"].clone();
    server.wait("an idle model to be unloaded", || state(&server, "a") == "unloaded");
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.ask("/v1/completions", &story("a"))["choices"][0]["text"], text);
    let loaded = server.ask("/api/generate", &json!({"model": "b", "keep_alive": "1h", "stream": false}));
    assert_eq!(loaded["done_reason"], "load");
    server.wait("an idle model to be unloaded", || state(&server, "a") == "unloaded");
    assert_eq!(state(&server, "b"), "loaded", "the client wants it to stay");
    let unloaded = server.ask("/api/generate", &json!({"model": "b", "keep_alive": 0, "stream": false}));
    assert_eq!(unloaded["done_reason"], "unload");
    server.wait("the end of a model", || state(&server, "b") == "unloaded");
    assert_eq!(server.get("/metrics").status, 200);

    // Models that are loaded at the start are unloaded, too.
    let pack = home.path().join("pack").display().to_string();
    let server = Server::start(&[&pack, "--idle-unload", "100ms"]);
    server.wait("an idle model to be unloaded", || state(&server, "pack") == "unloaded");
    assert_eq!(server.ask("/v1/completions", &story("pack"))["choices"][0]["text"], text);
}

#[test]
fn a_key_loads_only_the_models_that_it_may_use() {
    let home = models_dir();
    let (models, keys) = (home.path().join("models"), home.path().join("keys.toml"));
    let key = format!("[[key]]\nname = \"carol\"\nsha256 = \"{}\"\nmodels = [\"a\"]\n", digest_of("carol"));
    std::fs::write(&keys, key).unwrap();
    let server =
        Server::start(&["--models-dir", &models.display().to_string(), "--api-key-file", &keys.display().to_string()]);
    let carol = [("x-api-key", "carol")];
    let list = || server.send("GET", "/v1/models", &carol, "").json()["data"].clone();
    assert_eq!((list().as_array().map(Vec::len), &list()[0]["id"]), (Some(1), &json!("a")));
    let ask = |model: &str| server.send("POST", "/v1/completions", &carol, &story(model).to_string()).status;
    assert_eq!((ask("b"), ask("none"), ask("a")), (404, 404, 200));
    assert_eq!(server.post("/v1/completions", &story("b")).status, 401);
    assert!(!server.log().contains("model b"), "{}", server.log());
}

#[test]
fn a_directory_without_models_is_refused() {
    let home = tempfile::tempdir().unwrap();
    for dir in [home.path().to_path_buf(), home.path().join("missing")] {
        let mut command = crate::common::iec();
        let ran = command.args(["serve", "--port", "0", "--models-dir"]).arg(&dir).output().unwrap();
        assert!(matches!(ran.status.code(), Some(1..=3)), "{:?}", String::from_utf8_lossy(&ran.stderr));
    }
    let home = models_dir();
    let (models, pack) = (home.path().join("models"), home.path().join("pack"));
    let mut command = crate::common::iec();
    command.args(["serve", "--port", "0", "--model"]).arg(format!("a={}", pack.display()));
    let ran = command.arg("--models-dir").arg(&models).output().unwrap();
    assert_eq!(ran.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&ran.stderr).contains("found the name twice"));
    let mut command = crate::common::iec();
    let ran = command.args(["serve", "--check", "--models-dir"]).arg(&models).output().unwrap();
    let checked: Value = serde_json::from_slice(&ran.stdout).unwrap();
    assert_eq!((ran.status.code(), &checked["settings"]["models"][0]["plan"]), (Some(0), &Value::Null), "{checked}");
}
