//! Tests the Hugging Face cache: how it is found, verified and filled.

use crate::checkpoint::{copy_of, files};
use crate::common::{fixture, iec};
use assert_cmd::Command;
use serde_json::Value;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Returns the Hub's ETag of a file: SHA-256 for large files, git's SHA-1 for others.
pub fn etag(name: &str, bytes: &[u8]) -> String {
    if name.ends_with(".safetensors") {
        return hex(&Sha256::digest(bytes));
    }
    hex(&Sha1::digest([format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat()))
}

/// Cache that contains a fixture as `tests/model`.
struct Cache {
    root: TempDir,
}

impl Cache {
    fn of(name: &str) -> Cache {
        let cache = Cache { root: TempDir::new().unwrap() };
        for dir in [cache.blobs(), cache.snapshot(), cache.repo().join("refs")] {
            std::fs::create_dir_all(dir).unwrap();
        }
        std::fs::write(cache.repo().join("refs/main"), COMMIT).unwrap();
        for (file, bytes) in files(&fixture(name)) {
            let hash = etag(file.to_str().unwrap(), &bytes);
            std::fs::write(cache.blobs().join(&hash), &bytes).unwrap();
            symlink(Path::new("../../blobs").join(&hash), cache.snapshot().join(file)).unwrap();
        }
        cache
    }

    fn repo(&self) -> PathBuf {
        self.root.path().join("models--tests--model")
    }

    fn blobs(&self) -> PathBuf {
        self.repo().join("blobs")
    }

    fn snapshot(&self) -> PathBuf {
        self.repo().join("snapshots").join(COMMIT)
    }

    fn iec(&self) -> Command {
        let mut command = iec();
        command.env("HF_HUB_CACHE", self.root.path());
        command
    }
}

fn run(command: &mut Command) -> (Option<i32>, String, String) {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Runs `iec verify-source` and returns its exit code and report.
fn verified(mut iec: Command, source: [&str; 2]) -> (Option<i32>, Value) {
    let (code, stdout, stderr) = run(iec.args(["verify-source", "--json"]).args(source));
    (code, serde_json::from_str(stdout.lines().next().unwrap_or_else(|| panic!("{stderr}"))).unwrap())
}

fn statuses<'r>(report: &'r Value, status: &str) -> Vec<&'r str> {
    let files = report["files"].as_array().unwrap().iter();
    files.filter(|f| f["status"] == status).map(|f| f["name"].as_str().unwrap()).collect()
}

#[test]
fn a_repository_is_packed_from_the_cache_like_its_directory() {
    let cache = Cache::of("llama-gqa");
    let out = TempDir::new().unwrap();
    let pack = |source: &[&str], out: PathBuf| {
        cache.iec().args(["pack", "--out-dir"]).arg(&out).args(source).assert().success();
        out
    };
    let from_dir = pack(&["--hf-dir", fixture("llama-gqa").to_str().unwrap()], out.path().join("a"));
    for (i, repo) in ["tests/model", &format!("tests/model@{COMMIT}"), "tests/model@main"].iter().enumerate() {
        let from_repo = pack(&["--hf-repo", repo], out.path().join(format!("b{i}")));
        let bin = |dir: &Path| std::fs::read(dir.join("model.ie.bin")).unwrap();
        assert!(bin(&from_repo) == bin(&from_dir));
        let json = |dir: &Path| -> Value {
            serde_json::from_slice(&std::fs::read(dir.join("model.ie.json")).unwrap()).unwrap()
        };
        assert_eq!(json(&from_repo)["source"]["repo"], "tests/model");
        assert!(json(&from_dir)["source"]["repo"].is_null());
        assert_eq!(json(&from_repo)["source"]["files"], json(&from_dir)["source"]["files"]);
    }
    let manifest = out.path().join("m.json");
    cache
        .iec()
        .args(["ptq", "--bits", "4", "--hf-repo", "tests/model", "--force", "--out"])
        .arg(&manifest)
        .assert()
        .success();
    cache.iec().args(["q4", "--hf-repo", "tests/model", "--out-dir"]).arg(out.path().join("q4")).assert().success();
    let text = std::fs::read_to_string(manifest).unwrap();
    assert!(text.contains("\"tests/model\""), "{text:.500}");
}

#[test]
fn every_variable_that_names_the_cache_is_obeyed() {
    let cache = Cache::of("stories260k");
    let home = TempDir::new().unwrap();
    for (variable, below) in [
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub"),
    ] {
        let base = home.path().join(variable);
        let hub = base.join(below).components().collect::<PathBuf>();
        let mut command = iec();
        command.env(variable, &base);
        std::fs::create_dir_all(hub.parent().unwrap()).unwrap();
        symlink(cache.root.path(), &hub).unwrap();
        let (code, report) = verified(command, ["--hf-repo", "tests/model"]);
        assert_eq!((code, &report["ok"]), (Some(0), &true.into()), "{variable}: {report}");
    }
}

#[test]
fn what_is_not_in_the_cache_is_named_with_what_is() {
    let cache = Cache::of("stories260k");
    let other = "f".repeat(40);
    for (repo, messages) in [
        (
            "tests/other",
            &["tests/other", "which has tests/model", crate::common::download_of("tests/other").as_str()][..],
        ),
        ("tests/model@v2", &["v2", "the cache has", COMMIT, "main", "@REVISION"]),
        (&format!("tests/model@{other}"), &["no snapshot of this commit", COMMIT]),
    ] {
        let mut command = cache.iec();
        let (code, _, stderr) = run(command.args(["verify-source", "--hf-repo", repo]));
        assert_eq!(code, Some(1), "{stderr}");
        for message in messages {
            assert!(stderr.contains(message), "`{message}` is not in: {stderr}");
        }
    }
    for bad in ["../../etc", "a/b/c", "tests/model@../x"] {
        let (code, _, stderr) = run(cache.iec().args(["verify-source", "--hf-repo", bad]));
        assert_eq!(code, Some(2), "{stderr}");
    }
    let (code, _, stderr) = run(cache.iec().args(["verify-source", "--hf-dir", "/nowhere"]));
    assert!(code == Some(1) && stderr.contains("/nowhere") && stderr.contains("help: name the directory"), "{stderr}");
    let both = ["verify-source", "--hf-repo", "tests/model", "--hf-dir", "x"];
    assert_eq!(run(cache.iec().args(both)).0, Some(2));
    assert_eq!(run(cache.iec().args(["pack", "--out-dir", "x"])).0, Some(2));
}

#[test]
fn a_whole_snapshot_is_good_and_each_kind_of_damage_is_named() {
    let cache = Cache::of("llama-gqa");
    let check = || verified(cache.iec(), ["--hf-repo", "tests/model"]);
    let (code, report) = check();
    assert_eq!((code, &report["hashes"]), (Some(0), &"cache-blobs".into()));
    assert_eq!(statuses(&report, "ok").len(), report["files"].as_array().unwrap().len());
    assert!(statuses(&report, "ok").contains(&"config.json"));

    let blob = |name: &str| std::fs::canonicalize(cache.snapshot().join(name)).unwrap();
    let change = |name: &str| {
        let mut bytes = std::fs::read(blob(name)).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(blob(name), bytes).unwrap();
    };
    change("model-00002-of-00002.safetensors");
    change("tokenizer.json");
    let gone = blob("model-00001-of-00002.safetensors");
    std::fs::remove_file(&gone).unwrap();
    let (code, report) = check();
    assert_eq!(code, Some(4), "{report}");
    assert_eq!(statuses(&report, "damaged"), ["model-00002-of-00002.safetensors", "tokenizer.json"]);
    assert_eq!(statuses(&report, "missing"), ["model-00001-of-00002.safetensors"]);
    assert!(report["problems"][0].as_str().unwrap().contains("model-00001-of-00002.safetensors"));

    std::fs::remove_file(cache.snapshot().join("model-00001-of-00002.safetensors")).unwrap();
    let (code, stdout, stderr) = run(cache.iec().args(["verify-source", "--hf-repo", "tests/model"]));
    assert_eq!(code, Some(4));
    assert!(stdout.contains("DAMAGED") && stdout.contains("model-00001-of-00002.safetensors is missing"), "{stdout}");
    assert!(stderr.contains("help: ") && stderr.contains("download"), "{stderr}");
}

#[test]
fn a_download_into_a_directory_is_checked_by_its_metadata() {
    let dir = copy_of("llama3-rope-tied");
    let (code, report) = verified(iec(), ["--hf-dir", dir.path().to_str().unwrap()]);
    assert_eq!((code, &report["hashes"]), (Some(0), &"none".into()));
    assert!(statuses(&report, "unchecked").contains(&"model.safetensors"));

    let metadata = dir.path().join(".cache/huggingface/download");
    std::fs::create_dir_all(&metadata).unwrap();
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        let bytes = std::fs::read(dir.path().join(name)).unwrap();
        let text = format!("{COMMIT}\n{}\n1732190000.5\n", etag(name, &bytes));
        std::fs::write(metadata.join(format!("{name}.metadata")), text).unwrap();
    }
    let (code, report) = verified(iec(), ["--hf-dir", dir.path().to_str().unwrap()]);
    assert_eq!((code, &report["hashes"]), (Some(0), &"download-metadata".into()));
    assert_eq!(statuses(&report, "ok"), ["config.json", "model.safetensors", "tokenizer.json"]);

    std::fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    let weights = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() - 1]).unwrap();
    let (code, report) = verified(iec(), ["--hf-dir", dir.path().to_str().unwrap()]);
    assert_eq!(code, Some(4));
    assert_eq!(
        (statuses(&report, "damaged"), statuses(&report, "missing")),
        (vec!["model.safetensors"], vec!["tokenizer.json"])
    );
    assert!(report["problems"][0].as_str().unwrap().contains("reach past the file"), "{report}");
}

#[cfg(not(feature = "hub"))]
#[test]
fn without_network_code_pull_says_how_to_get_it() {
    let (code, _, stderr) = run(iec().args(["pull", "tests/model"]));
    assert_eq!(code, Some(1));
    assert!(stderr.contains("--features hub") && stderr.contains("hf download tests/model"), "{stderr}");
}
