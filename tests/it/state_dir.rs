//! Tests `iec run --state-dir`: later runs reuse the pages of earlier ones, and no page in the wrong place.

use crate::common::{iec, packed_with};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Prompt of more than two pages of 128 tokens.
fn prompt(end: &str) -> String {
    "Once upon a time there was a big dog who lived in a small house. ".repeat(14) + end
}

fn run(pack: &Path, prompt: &str, options: &[&str]) -> (Value, String) {
    let mut command = iec();
    command.args(["run", "--json", "--max-new", "8", "--ctx", "512", "--prompt", prompt]).args(options).arg(pack);
    let output = command.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{stderr}");
    (serde_json::from_slice(&output.stdout).unwrap(), stderr)
}

/// Returns all files of pages.
fn pages(state: &Path) -> Vec<PathBuf> {
    let list = |dir: PathBuf| std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    list(state.join("prefix")).flat_map(list).collect()
}

#[test]
fn a_later_run_reuses_pages_of_an_earlier_one() {
    let dir = packed_with("stories260k", "config.json", json!({}));
    let (pack, state) = (dir.path().join("pack"), dir.path().join("state"));
    let directory = state.to_str().unwrap();
    let kept = |line: &Value| line["kv_hits"].as_u64().unwrap();
    let text = |line: &Value| line["prompts"][0]["tokens"].clone();
    let (plain, _) = run(&pack, &prompt("The cat"), &[]);
    let (first, stderr) = run(&pack, &prompt("The dog"), &["--state-dir", directory]);
    assert!(kept(&first) == 0 && stderr.contains("pages of the prefix cache"), "{stderr}");
    let count = pages(&state).len();
    assert!(count >= 2, "{count} pages");

    // Another end of the prompt, other threads and chunks: the same bits as without the cache.
    let (second, stderr) = run(&pack, &prompt("The cat"), &["--state-dir", directory, "--threads", "3"]);
    assert!(kept(&second) >= 256 && text(&second) == text(&plain), "{second} {stderr}");
    assert_eq!(kept(&second) + second["kv_misses"].as_u64().unwrap(), plain["kv_misses"].as_u64().unwrap());

    // What keys and values depend on is part of the name of a page.
    for options in [&["--kv", "int8"][..], &["--precision", "bf16"]] {
        let (other, _) = run(&pack, &prompt("The dog"), &[options, &["--state-dir", directory]].concat());
        assert_eq!(kept(&other), 0, "{options:?}");
    }
    let changed = packed_with("stories260k", "config.json", json!({"rope_theta": 20000.0}));
    let (other, _) = run(&changed.path().join("pack"), &prompt("The dog"), &["--state-dir", directory]);
    assert_eq!(kept(&other), 0);

    // Damaged pages are computed again, removed and written anew.
    for path in pages(&state) {
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(path, bytes).unwrap();
    }
    let (third, _) = run(&pack, &prompt("The cat"), &["--state-dir", directory]);
    assert!(kept(&third) == 0 && text(&third) == text(&plain), "{third}");
    let (fourth, _) = run(&pack, &prompt("The cat"), &["--state-dir", directory]);
    assert!(kept(&fourth) >= 256 && text(&fourth) == text(&plain), "{fourth}");

    // A budget that holds only the text itself, and a limit of the directory that holds one page.
    let (small, _) = run(&pack, &prompt("The cat"), &["--state-dir", directory, "--kv-memory", "960K"]);
    assert_eq!(text(&small), text(&plain));
    let sizes = pages(&state).into_iter().map(|page| std::fs::metadata(page).unwrap().len());
    let single = sizes.max().unwrap().to_string();
    let other = "One day a cat went to the park to play with a red ball. ".repeat(12);
    let (_, stderr) = run(&pack, &other, &["--state-dir", directory, "--state-disk", &single]);
    assert!(pages(&state).len() <= 1, "{stderr}");
}

#[test]
fn a_directory_that_cannot_be_used_is_named() {
    let dir = packed_with("stories260k", "config.json", json!({}));
    let pack = dir.path().join("pack");
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let fails = |options: &[&str]| {
        let output = iec().args(["run", "--prompt", "a", "--max-new", "1"]).args(options).arg(&pack).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, stderr) = fails(&["--state-dir", file.to_str().unwrap()]);
    assert!(code == 1 && stderr.contains("file/prefix"), "{code} {stderr}");
    let (code, stderr) = fails(&["--state-dir", "x", "--prefix-cache", "off"]);
    assert!(code == 2 && stderr.contains("without a prefix cache"), "{code} {stderr}");
    let (code, stderr) = fails(&["--state-disk", "1G"]);
    assert!(code == 2 && stderr.contains("--state-dir"), "{code} {stderr}");
}
