//! The text of `--help` of the program and of each of its commands, compared with the committed files under
//! tests/snapshots/help.
//!
//! A change of the command line shows in the difference of these files. Where it is meant, write them again with
//! `IEC_UPDATE_SNAPSHOTS=1 cargo test --test it -- help::` and commit them. All lines are wrapped at 200 columns.

use crate::common::iec;
use std::path::Path;

/// Set to any value, this variable makes the test write the snapshots instead of comparing them.
const UPDATE: &str = "IEC_UPDATE_SNAPSHOTS";

/// The standard output of a command line that ends with `--help`.
fn help(words: &[&str]) -> String {
    let output = iec().env("COLUMNS", "200").args(words).arg("--help").assert().success().get_output().stdout.clone();
    String::from_utf8(output).unwrap()
}

/// The names under `Commands:`.
fn commands(help: &str) -> Vec<&str> {
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    lines.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").collect()
}

#[test]
fn help_is_what_the_snapshots_say() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots/help");
    let all = help(&[]);
    let commands = commands(&all);
    assert!(commands.len() >= 20, "{commands:?}");
    let mut texts = vec![("iec".to_string(), all.clone())];
    texts.extend(commands.iter().map(|name| (name.to_string(), help(&[name]))));
    if std::env::var_os(UPDATE).is_some() {
        std::fs::create_dir_all(&dir).unwrap();
        texts.iter().for_each(|(name, text)| std::fs::write(dir.join(format!("{name}.txt")), text).unwrap());
        return;
    }
    let mut failures = Vec::new();
    for (name, text) in &texts {
        let committed = std::fs::read_to_string(dir.join(format!("{name}.txt"))).unwrap_or_default();
        let different = committed.lines().zip(text.lines()).find(|(old, new)| old != new);
        if let Some((old, new)) = different {
            failures.push(format!("{name}: found `{new}`, expected `{old}`"));
        } else if committed != *text {
            failures.push(format!("{name}: {} lines, expected {}", text.lines().count(), committed.lines().count()));
        }
    }
    for file in std::fs::read_dir(&dir).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        if !texts.iter().any(|(command, _)| name == format!("{command}.txt")) {
            failures.push(format!("{name}: no such command"));
        }
    }
    assert!(failures.is_empty(), "write the snapshots again with {UPDATE}=1:\n{}", failures.join("\n"));
}
