//! Text from outside (of a model, of files, of paths) does not steer the terminal that shows it.

use crate::common::{iec as piped, packed_with};
use crate::pty::Terminal;
use serde_json::json;
use std::path::Path;
use std::process::Command;

/// Sequence that changes the title of a terminal, in texts from outside.
const TITLE: &str = "\u{1b}]0;T\u{7}";

/// Runs a command on a terminal to its end and returns what it wrote.
fn on_terminal(words: &[&str], dir: &Path) -> String {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin("iec"));
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default()).env("HOME", dir).current_dir(dir);
    command.env("IEC_DEVICE", "cpu").args(words);
    let mut terminal = Terminal::start(command, 24, 200);
    terminal.end();
    String::from_utf8_lossy(&terminal.written).into_owned()
}

#[test]
fn control_characters_of_a_model_reach_a_pipe_and_not_a_terminal() {
    let step =
        |pattern: &str, content: &str| json!({"type": "Replace", "pattern": {"String": pattern}, "content": content});
    let steps = [step("▁", " "), step("e", TITLE), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
    let home =
        packed_with("stories260k", "tokenizer.json", json!({"decoder": {"type": "Sequence", "decoders": steps}}));
    let words = ["run", "--model-dir", "pack", "--prompt", "Once upon", "--max-new", "12", "--ignore-eos"];
    let output = piped().current_dir(home.path()).args(words).assert().success();
    let data = String::from_utf8_lossy(&output.get_output().stdout).into_owned();
    assert!(data.contains(TITLE), "a pipe gets the text of the model: {data:?}");
    let shown = on_terminal(&words, home.path());
    assert!(shown.contains("␛]0;T␇") && !shown.contains("\u{1b}]"), "{shown:?}");
    assert_eq!(shown.matches("␛]0;T␇").count(), data.matches(TITLE).count(), "all of them are shown");
}

#[test]
fn control_characters_of_files_and_paths_are_never_printed() {
    let home = packed_with("stories260k", "config.json", json!({}));
    let path = |name: &str| home.path().join(name);
    let strange = format!("a{TITLE}b");
    for (from, to) in [("pack", strange.as_str()), ("source", "checkpoint\u{9b}31m")] {
        let copied = Command::new("cp").arg("-r").arg(path(from)).arg(path(to)).status();
        assert!(copied.is_ok_and(|status| status.success()));
    }
    std::fs::create_dir(path("adapter")).unwrap();
    let config = json!({"peft_type": "LORA", "r": 2, "base_model_name_or_path": strange, "target_modules": [strange]});
    std::fs::write(path("adapter/adapter_config.json"), config.to_string()).unwrap();
    let (map, report) = (format!("{TITLE}.json"), format!("r{TITLE}.json"));
    let lines: [&[&str]; 9] = [
        &["inspect", &strange],
        &["inspect", "checkpoint\u{9b}31m"],
        &["inspect", "adapter"],
        &["show", &strange],
        &["tensor-map", "--model-dir", &strange, "--out", &map],
        &["verify", "--hashes", "--model-dir", &strange, "--out", &report],
        &["inspect", "no\u{1b}[2Jthing"],
        &["run", "--model-dir", "no\u{1b}[2Jthing", "--prompt", "a"],
        &["run", "--prompt", "a", "--no\u{1b}[2Jthing"],
    ];
    let mut wrong = Vec::new();
    for words in lines {
        let output = piped().current_dir(home.path()).args(words).output().unwrap();
        let said = [&output.stdout[..], &output.stderr[..]].concat();
        let shown = on_terminal(words, home.path());
        let steers = |text: &str| ["\u{1b}]", "\u{1b}[2J", "\u{9b}"].iter().any(|sequence| text.contains(sequence));
        if steers(&String::from_utf8_lossy(&said)) || steers(&shown) || said.is_empty() {
            wrong.push(format!("{words:?}: {shown:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
