//! Tests `iec pull` with a local server that imitates the Hub and its failures.

use crate::checkpoint::files;
use crate::common::{fixture, iec};
use crate::hub::{COMMIT, etag};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Failures that the server simulates.
#[derive(Default, Clone)]
struct Faults {
    /// Number of bytes of each answer with weights after which the connection is closed.
    cut_after: Option<usize>,
    /// Number of connections that are closed early.
    cuts: usize,
    /// Whether weights are sent in part and the rest never.
    stalls: bool,
    /// Whether range requests are ignored.
    no_ranges: bool,
    /// Whether a byte of the weights is changed.
    damaged: bool,
    /// Status and `X-Error-Code` with which every request is answered, if any.
    refusal: Option<(u16, &'static str)>,
}

struct Hub {
    url: String,
    log: Arc<Mutex<Vec<String>>>,
    faults: Arc<Mutex<Faults>>,
}

impl Hub {
    fn serve(content: BTreeMap<PathBuf, Vec<u8>>, faults: Faults) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let hub = Hub { url: url.clone(), log: Arc::default(), faults: Arc::new(Mutex::new(faults)) };
        let (log, faults) = (hub.log.clone(), hub.faults.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let _ = answer(stream, &url, &content, &log, &faults);
            }
        });
        hub
    }

    /// Returns the requests whose first line contains `text`.
    fn requests(&self, text: &str) -> Vec<String> {
        self.log.lock().unwrap().iter().filter(|line| line.contains(text)).cloned().collect()
    }

    fn pull(&self, cache: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
        let mut command = iec();
        command.env("HF_ENDPOINT", &self.url).env("HF_HUB_CACHE", cache).args(["pull", "--json"]).args(arguments);
        let output = command.output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    fn pulled(&self, cache: &Path, arguments: &[&str]) -> BTreeMap<String, String> {
        let (code, stdout, stderr) = self.pull(cache, arguments);
        assert_eq!(code, Some(0), "{stderr}");
        let json: Value = serde_json::from_str(&stdout).unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_string();
        json["files"].as_array().unwrap().iter().map(|f| (text(&f["name"]), text(&f["how"]))).collect()
    }
}

fn answer(
    stream: TcpStream,
    url: &str,
    content: &BTreeMap<PathBuf, Vec<u8>>,
    log: &Mutex<Vec<String>>,
    faults: &Mutex<Faults>,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? <= 2 {
            break;
        }
        lines.push(line.trim().to_string());
    }
    let first = lines.first().cloned().unwrap_or_default();
    let header = |name: &str| {
        let line = lines.iter().find(|line| line.to_ascii_lowercase().starts_with(&format!("{name}:")))?;
        Some(line.split_once(':')?.1.trim().to_string())
    };
    let range = header("range");
    let authorization = header("authorization");
    log.lock().unwrap().push(format!("{first} {range:?} {authorization:?}"));
    let mut faults = faults.lock().unwrap();
    let mut words = first.split(' ');
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let mut out = stream;
    if let Some((status, code)) = faults.refusal {
        return write!(
            out,
            "HTTP/1.1 {status} No\r\nX-Error-Code: {code}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
    }
    let mut head = String::from("Connection: close\r\n");
    let mut status = "200 OK";
    let mut body: &[u8] = &[];
    let siblings: Vec<Value> = content.keys().map(|name| json!({"rfilename": name})).collect();
    let list = json!({"sha": COMMIT, "siblings": siblings}).to_string();
    let resolve = format!("/tests/model/resolve/{COMMIT}/");
    let file = |name: &str| content.get(Path::new(name)).map(|bytes| (etag(name, bytes), bytes));
    let mut damaged = Vec::new();
    let mut cut = None;
    if let Some(name) = path.strip_prefix("/old/name/resolve/") {
        status = "307 Moved";
        head += &format!("Location: /tests/model/resolve/{name}\r\n");
    } else if matches!(path, "/api/models/tests/model/revision/main" | "/api/models/old/name/revision/main") {
        body = list.as_bytes();
    } else if let Some((etag, bytes)) = path.strip_prefix(&resolve).and_then(file) {
        if path.ends_with(".safetensors") {
            // Like the Hub, the server redirects to another storage location and sends the hash with the redirect.
            status = "302 Found";
            let to = format!("{url}/storage{path}");
            head += &format!("Location: {to}\r\nX-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: {}\r\n", bytes.len());
        } else {
            head += &format!("ETag: W/\"{etag}\"\r\n");
            body = bytes;
        }
    } else if let Some((_, bytes)) = path.strip_prefix(&format!("/storage{resolve}")).and_then(file) {
        head += "ETag: \"of-the-storage\"\r\n";
        body = bytes;
        if faults.damaged {
            damaged.extend_from_slice(bytes);
            damaged[1000] ^= 1;
            body = &damaged;
        }
        let start = range.and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
        if let Some(start) = start.filter(|_| !faults.no_ranges) {
            status = "206 Partial Content";
            head += &format!("Content-Range: bytes {start}-{}/{}\r\n", body.len() - 1, body.len());
            body = &body[start..];
        }
        if faults.cuts > 0 && method == "GET" {
            faults.cuts -= 1;
            cut = faults.cut_after;
        }
    } else {
        status = "404 Not Found";
        head += "X-Error-Code: RepoNotFound\r\n";
    }
    write!(out, "HTTP/1.1 {status}\r\n{head}Content-Length: {}\r\n\r\n", body.len())?;
    if method == "GET" {
        out.write_all(&body[..cut.unwrap_or(body.len()).min(body.len())])?;
        if faults.stalls && path.starts_with("/storage") {
            out.flush()?;
            // The connection stays open until the client closes it.
            drop(reader.read_line(&mut String::new()));
        }
    }
    out.flush()
}

fn content(name: &str) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut content = files(&fixture(name));
    content.insert("README.md".into(), b"not needed".to_vec());
    content.insert("pytorch_model.bin".into(), b"not needed either".to_vec());
    content
}

/// Asserts that a pack made from a pulled repository has the same weights as a pack of the fixture.
fn packs_like(name: &str, variable: (&str, &Path), source: &[&str]) {
    let out = TempDir::new().unwrap();
    iec().env(variable.0, variable.1).args(["pack", "--out-dir"]).arg(out.path()).args(source).assert().success();
    let expected = crate::common::packed(name);
    let bin = |dir: &Path| std::fs::read(dir.join("model.ie.bin")).unwrap();
    assert!(bin(out.path()) == bin(expected.path()));
}

#[test]
fn what_a_conversion_needs_is_pulled_into_the_cache_once() {
    let hub = Hub::serve(content("llama-gqa"), Faults::default());
    let cache = TempDir::new().unwrap();
    let files = hub.pulled(cache.path(), &["tests/model"]);
    assert!(files.values().all(|how| how == "downloaded"), "{files:?}");
    for name in ["config.json", "tokenizer.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors"] {
        assert!(files.contains_key(name), "{name}: {files:?}");
    }
    assert!(
        !files.contains_key("README.md")
            && !files.contains_key("pytorch_model.bin")
            && !files.contains_key("golden.json")
    );
    packs_like("llama-gqa", ("HF_HUB_CACHE", cache.path()), &["--hf-repo", "tests/model"]);
    let verify = ["verify-source", "--hf-repo", "tests/model"];
    iec().env("HF_HUB_CACHE", cache.path()).args(verify).assert().success();

    let again = hub.pulled(cache.path(), &["tests/model"]);
    assert!(again.values().all(|how| how == "present"), "{again:?}");
    assert_eq!(hub.requests("GET /storage").len(), 2);
    let blobs = cache.path().join("models--tests--model/blobs");
    assert!(std::fs::read_dir(blobs).unwrap().all(|e| !e.unwrap().path().to_string_lossy().contains("incomplete")));
}

#[test]
fn a_directory_gets_the_files_and_notes_of_their_hashes() {
    let hub = Hub::serve(content("llama3-rope-tied"), Faults::default());
    let (cache, dir) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let path = dir.path().to_str().unwrap();
    hub.pulled(cache.path(), &["old/name", "--local-dir", path]);
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0);
    packs_like("llama3-rope-tied", ("HOME", cache.path()), &["--hf-dir", path]);
    let output = iec().args(["verify-source", "--json", "--hf-dir", path]).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["ok"], &report["hashes"]), (&true.into(), &"download-metadata".into()));
    assert!(report["files"].as_array().unwrap().iter().all(|f| f["status"] == "ok"), "{report}");
    assert!(hub.pulled(cache.path(), &["tests/model", "--local-dir", path]).values().all(|how| how == "present"));
}

#[test]
fn a_connection_that_breaks_is_continued() {
    let weights = std::fs::read(fixture("llama3-rope-tied").join("model.safetensors")).unwrap();
    let faults = Faults { cut_after: Some(100_000), cuts: 2, ..Faults::default() };
    let hub = Hub::serve(content("llama3-rope-tied"), faults);
    let cache = TempDir::new().unwrap();
    hub.pulled(cache.path(), &["tests/model"]);
    let gets = hub.requests("GET /storage");
    assert_eq!(gets.len(), 3, "{gets:?}");
    assert!(gets[1].contains("bytes=100000-") && gets[2].contains("bytes=200000-"), "{gets:?}");
    let file = cache.path().join(format!("models--tests--model/snapshots/{COMMIT}/model.safetensors"));
    assert!(std::fs::read(file).unwrap() == weights);
}

#[test]
fn a_later_run_continues_what_an_earlier_one_left() {
    for no_ranges in [false, true] {
        let cuts = if no_ranges { 0 } else { usize::MAX };
        let faults = Faults { cut_after: Some(0), cuts, no_ranges, ..Faults::default() };
        let hub = Hub::serve(content("llama3-rope-tied"), faults);
        let cache = TempDir::new().unwrap();
        let weights = std::fs::read(fixture("llama3-rope-tied").join("model.safetensors")).unwrap();
        let blobs = cache.path().join("models--tests--model/blobs");
        std::fs::create_dir_all(&blobs).unwrap();
        let incomplete = blobs.join(format!("{}.incomplete", etag("model.safetensors", &weights)));
        std::fs::write(&incomplete, &weights[..70_000]).unwrap();
        if !no_ranges {
            let (code, _, stderr) = hub.pull(cache.path(), &["tests/model"]);
            assert_eq!(code, Some(1), "{stderr}");
            assert!(stderr.contains("run the same command again"), "{stderr}");
            assert!(!cache.path().join(format!("models--tests--model/snapshots/{COMMIT}/model.safetensors")).exists());
            assert!(!cache.path().join("models--tests--model/refs/main").exists());
            assert_eq!(std::fs::metadata(&incomplete).unwrap().len(), 70_000);
            hub.faults.lock().unwrap().cuts = 0;
        }
        assert_eq!(hub.pulled(cache.path(), &["tests/model"])["model.safetensors"], "resumed");
        packs_like("llama3-rope-tied", ("HF_HUB_CACHE", cache.path()), &["--hf-repo", "tests/model"]);
    }
}

#[test]
fn an_interrupt_ends_a_download_that_the_server_does_not_continue() {
    let faults = Faults { cut_after: Some(70_000), cuts: 1, stalls: true, ..Faults::default() };
    let hub = Hub::serve(content("llama3-rope-tied"), faults);
    let cache = TempDir::new().unwrap();
    let mut command = Command::new(assert_cmd::cargo::cargo_bin("iec"));
    command.env("HF_ENDPOINT", &hub.url).env("HF_HUB_CACHE", cache.path()).args(["pull", "tests/model"]);
    let mut child = command.stderr(Stdio::null()).spawn().unwrap();
    let weights = std::fs::read(fixture("llama3-rope-tied").join("model.safetensors")).unwrap();
    let incomplete = format!("models--tests--model/blobs/{}.incomplete", etag("model.safetensors", &weights));
    let received = || cache.path().join(&incomplete).metadata().is_ok_and(|file| file.len() == 70_000);
    let begin = Instant::now();
    while !received() {
        assert!(begin.elapsed() < Duration::from_secs(60) && child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(10));
    }
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // A server that is silent for a minute counts as a broken connection, which would be tried again.
    assert_eq!(hub.requests("GET /storage").len(), 1);
    hub.faults.lock().unwrap().stalls = false;
    assert_eq!(hub.pulled(cache.path(), &["tests/model"])["model.safetensors"], "resumed");
}

#[test]
fn what_has_another_hash_than_promised_is_refused_and_removed() {
    let hub = Hub::serve(content("llama3-rope-tied"), Faults { damaged: true, ..Faults::default() });
    let cache = TempDir::new().unwrap();
    let (code, _, stderr) = hub.pull(cache.path(), &["tests/model"]);
    assert_eq!(code, Some(4), "{stderr}");
    assert!(stderr.contains("model.safetensors") && stderr.contains("hash"), "{stderr}");
    assert!(!cache.path().join(format!("models--tests--model/snapshots/{COMMIT}/model.safetensors")).exists());
    let blobs = cache.path().join("models--tests--model/blobs");
    assert!(std::fs::read_dir(blobs).unwrap().all(|e| e.unwrap().metadata().unwrap().len() < 100_000));
}

#[test]
fn refusals_of_the_hub_are_told_in_words() {
    let cache = TempDir::new().unwrap();
    for (refusal, messages) in [
        ((401, "RepoNotFound"), ["does not exist, or is private", "HF_TOKEN"]),
        ((401, "GatedRepo"), ["access is restricted", "accept the terms"]),
        ((403, ""), ["access is restricted", "accept the terms"]),
        ((404, "RevisionNotFound"), ["no such revision", "branches"]),
        ((404, "RepoNotFound"), ["does not exist", "spelling"]),
        ((418, ""), ["418", "again later"]),
    ] {
        let hub = Hub::serve(BTreeMap::new(), Faults { refusal: Some(refusal), ..Faults::default() });
        let (code, stdout, stderr) = hub.pull(cache.path(), &["tests/model"]);
        assert_eq!(code, Some(1), "{stderr}");
        assert!(messages.iter().all(|m| stderr.contains(m)) && stdout.contains("\"error\""), "{refusal:?}: {stderr}");
    }
    let hub = Hub::serve(BTreeMap::from([("config.json".into(), b"{}".to_vec())]), Faults::default());
    let (_, _, stderr) = hub.pull(cache.path(), &["tests/model"]);
    assert!(stderr.contains("no weights in a supported format"), "{stderr}");
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0);
}

#[test]
fn the_token_is_sent_to_the_hub() {
    let hub = Hub::serve(content("llama3-rope-tied"), Faults::default());
    let cache = TempDir::new().unwrap();
    let pull = |name: &str, value: &str| {
        let mut command = iec();
        command.env("HF_ENDPOINT", &hub.url).env("HF_HUB_CACHE", cache.path()).env(name, value);
        command.args(["pull", "tests/model"]).assert().success();
    };
    pull("HF_TOKEN", "secret-1");
    let home = cache.path().join("home");
    std::fs::create_dir(&home).unwrap();
    std::fs::write(home.join("token"), "secret-2\n").unwrap();
    pull("HF_HOME", home.to_str().unwrap());
    for token in ["secret-1", "secret-2"] {
        assert!(!hub.requests(&format!("Bearer {token}")).is_empty(), "{token}");
    }
}
