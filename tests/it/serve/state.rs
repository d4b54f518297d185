//! The directory of `--state-dir`: what it keeps, who uses it, and what is wrong with its files.

use super::client::{Server, story_pack};
use crate::common::iec;
use iec::serve::keys::digest_of;
use serde_json::{Value, json};
use std::io::Read;
use std::path::Path;

/// Writes a file of one key, and returns the options of a server that has it and a state directory.
fn options(home: &Path, limits: &str) -> Vec<String> {
    let file = home.join("keys.toml");
    let key = format!("[[key]]\nname = \"alice\"\nsha256 = \"{}\"\n{limits}\n", digest_of("alice"));
    std::fs::write(&file, key).unwrap();
    let state = home.join("state");
    ["--api-key-file", file.to_str().unwrap(), "--state-dir", state.to_str().unwrap()].map(String::from).to_vec()
}

fn start(options: &[String]) -> Server {
    Server::start(&options.iter().map(String::as_str).collect::<Vec<_>>())
}

fn body(tokens: usize, stream: bool) -> Value {
    json!({"prompt": "Once", "max_tokens": tokens, "ignore_eos": true, "stream": stream})
}

fn ask(server: &Server, tokens: usize) -> u16 {
    server.send("POST", "/v1/completions", &[("x-api-key", "alice")], &body(tokens, false).to_string()).status
}

#[test]
fn a_server_that_is_killed_gives_no_used_day_back() {
    let home = tempfile::tempdir().unwrap();
    let options = options(home.path(), "tokens_per_day = 100");
    let mut server = start(&options);
    assert_eq!(ask(&server, 60), 200);
    server.signal("KILL");
    server.end();
    let mut server = start(&options);
    assert_eq!(ask(&server, 60), 429, "most of the day was used before");
    assert_eq!(ask(&server, 10), 200);
    // A request that is killed has used all tokens that it might have used.
    let mut stream = server.begin("POST", "/v1/completions", &[("x-api-key", "alice")], &body(9, true).to_string());
    stream.read_exact(&mut [0; 100]).unwrap();
    server.signal("KILL");
    server.end();
    let mut server = start(&options);
    assert_eq!(ask(&server, 20), 429);
    // The end of a server saves everything once more.
    server.signal("TERM");
    assert_eq!(server.end().code(), Some(0), "{}", server.log());
    assert_eq!(ask(&start(&options), 20), 429);
}

#[test]
fn two_servers_do_not_share_a_directory() {
    let home = tempfile::tempdir().unwrap();
    let options = options(home.path(), "");
    let server = start(&options);
    let mut command = iec();
    command.args(["serve", "--port", "0"]).args(&options).timeout(std::time::Duration::from_secs(60));
    let second = command.output().unwrap();
    assert_eq!(second.status.code(), Some(2), "{second:?}");
    assert!(String::from_utf8_lossy(&second.stderr).contains("another server uses this directory"));
    drop(server);
    start(&options);
}

#[test]
fn damaged_files_are_moved_aside_and_the_server_starts() {
    let pipe = |path: &Path| assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    let write = |text: &'static str| move |path: &Path| std::fs::write(path, text).unwrap();
    type Make<'a> = Box<dyn Fn(&Path) + 'a>;
    let cases: Vec<(&str, Make<'_>)> = vec![
        ("usage.json", Box::new(write("{\"format\": \"iec_us"))),
        ("usage.json", Box::new(write(""))),
        ("usage.json", Box::new(|path: &Path| std::fs::create_dir(path).unwrap())),
        ("usage.json", Box::new(pipe)),
        ("usage.log", Box::new(write("nonsense\n{}\n"))),
        ("usage.log", Box::new(pipe)),
        ("adapters.json", Box::new(write("[]"))),
        ("adapters.json", Box::new(write("{"))),
    ];
    for (name, make) in cases {
        let home = tempfile::tempdir().unwrap();
        let options = options(home.path(), "tokens_per_day = 60");
        let state = home.path().join("state");
        std::fs::create_dir(&state).unwrap();
        make(&state.join(name));
        let mut server = start(&options);
        assert_eq!(ask(&server, 30), 200, "{name}");
        server.wait("the note", || server.log().contains(&format!("{name}.damaged")));
        assert!(state.join(format!("{name}.damaged")).symlink_metadata().is_ok(), "{name}");
        server.signal("TERM");
        assert_eq!(server.end().code(), Some(0), "{name}: {}", server.log());
        let server = start(&options);
        assert_eq!(ask(&server, 30), 429, "{name}: what was used is saved in a new file");
    }
}

#[test]
fn pages_that_cannot_be_saved_are_a_note_at_the_end() {
    let pack = story_pack(512);
    let (pack_dir, state) = (pack.path().join("pack"), pack.path().join("state"));
    let options = [pack_dir.to_str().unwrap(), "--state-dir", state.to_str().unwrap()];
    let body = json!({"prompt": vec![5; 300], "max_tokens": 1, "ignore_eos": true});
    let mut server = Server::start(&options);
    server.ask("/v1/completions", &body);
    server.signal("TERM");
    assert_eq!(server.end().code(), Some(0), "{}", server.log());
    let mut pages = 0;
    for entry in walk(&state).into_iter().filter(|path| path.components().count() > state.components().count() + 2) {
        std::fs::remove_file(&entry).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&entry).status().unwrap().success());
        pages += 1;
    }
    assert!(pages > 0, "{:?}", walk(&state));
    let mut server = Server::start(&options);
    server.ask("/v1/completions", &body);
    server.signal("TERM");
    assert_eq!(server.end().code(), Some(0), "{}", server.log());
    assert!(server.log().contains("not all pages of the prefix cache were saved"), "{}", server.log());
}

/// Returns all files below a directory.
fn walk(dir: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}
