//! Files that were put beside a pack after it was made.

use crate::common::{iec, packed, packed_with};
use serde_json::json;
use std::path::Path;
use std::process::Output;

const RECORDED: &str = "R {{ messages[0].content }}";
const OTHER: &str = "X {{ messages[0].content }}";

fn run(pack: &Path, args: &[&str]) -> Output {
    iec().args(args).arg("--model-dir").arg(pack).output().unwrap()
}

/// Commands that use the tokenizer, the template and the sampling of a pack, or check all of its files.
const READERS: [&[&str]; 4] = [
    &["verify", "--hashes"],
    &["run", "--check", "-p", "x", "-n", "1"],
    &["run", "--template", "auto", "-p", "x", "-n", "1"],
    &["chat", "--prompt", "x", "--max-new", "1"],
];

#[test]
fn a_file_that_would_decide_answers_and_is_not_recorded_is_refused() {
    struct Case(&'static str, &'static str, &'static [usize]);
    let cases = [Case("chat_template.jinja", OTHER, &[0, 1, 2, 3]), Case("special_tokens_map.json", "{}", &[0, 1])];
    let mut failures = Vec::new();
    for Case(name, text, readers) in cases {
        let home = packed_with("stories260k", "tokenizer_config.json", json!({"chat_template": RECORDED}));
        let pack = home.path().join("pack");

        let description = std::fs::read_to_string(pack.join("model.ie.json")).unwrap();
        assert!(!description.contains(&format!("\"{name}\"")), "{name} is recorded");
        for number in readers {
            let before = run(&pack, READERS[*number]);
            assert!(before.status.success(), "{:?}: {before:?}", READERS[*number]);
        }
        std::fs::write(pack.join(name), text).unwrap();
        for number in readers {
            let args = READERS[*number];
            let ran = run(&pack, args);
            let said = String::from_utf8_lossy(&[&ran.stdout[..], &ran.stderr].concat()).into_owned();
            if ran.status.success() || !said.contains(name) || !said.contains("does not record") {
                failures.push(format!("{name}, {args:?}: {:?} {said}", ran.status.code()));
            }
        }
        // Where the link leads does not matter.
        std::fs::remove_file(pack.join(name)).unwrap();
        std::os::unix::fs::symlink("/nonexistent", pack.join(name)).unwrap();
        let linked = run(&pack, READERS[0]);
        assert!(!linked.status.success(), "{linked:?}");
        // The maker of the description may take responsibility for the file.
        std::fs::remove_file(pack.join(name)).unwrap();
        std::fs::write(pack.join(name), text).unwrap();
        let (body, _) = description.rsplit_once(",\n  \"sha256\"").unwrap();
        std::fs::write(pack.join("model.ie.json"), format!("{body}\n}}\n")).unwrap();
        let kept = run(&pack, READERS[1]);
        assert!(kept.status.success(), "{kept:?}");
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn a_template_added_to_a_pack_without_one_is_used_and_named() {
    let pack = packed("stories260k");
    let before = run(pack.path(), READERS[0]);
    assert!(before.status.success() && !String::from_utf8_lossy(&before.stdout).contains("not recorded"));
    std::fs::write(pack.path().join("chat_template.jinja"), OTHER).unwrap();
    let answered = run(pack.path(), READERS[2]);
    assert!(answered.status.success(), "{answered:?}");
    for args in &READERS[..2] {
        let ran = run(pack.path(), args);
        let said = String::from_utf8_lossy(&[&ran.stdout[..], &ran.stderr].concat()).into_owned();
        assert!(ran.status.success() && said.contains("chat_template.jinja"), "{args:?}: {said}");
    }
}

#[test]
fn a_server_does_not_start_with_another_template_than_the_recorded_one() {
    let home = packed_with("stories260k", "tokenizer_config.json", json!({"chat_template": RECORDED}));
    std::fs::write(home.path().join("pack/chat_template.jinja"), OTHER).unwrap();
    let mut command = iec();
    command.args(["serve", "--port", "0"]).arg(home.path().join("pack"));
    let ran = command.timeout(std::time::Duration::from_secs(60)).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(!ran.status.success() && said.contains("chat_template.jinja"), "{said}");
}
