//! Compares the text of `--help` of the program and of each of its commands with the committed files under
//! tests/snapshots/help, and the page docs/guide/options.md with these texts, from which it is generated.
//!
//! A change of the command line appears as a difference of these files. If it is intended, regenerate them with
//! `IEC_UPDATE_SNAPSHOTS=1 cargo test --test it -- help::` and commit them. All lines are wrapped at 200 columns.

use crate::common::iec;
use std::path::Path;

/// Environment variable that, set to any value, makes the test write the snapshots instead of comparing them.
const UPDATE: &str = "IEC_UPDATE_SNAPSHOTS";

/// Returns the standard output of a command line with `--help` appended.
fn help(words: &[&str]) -> String {
    let output = iec().env("COLUMNS", "200").args(words).arg("--help").assert().success().get_output().stdout.clone();
    String::from_utf8(output).unwrap()
}

/// Returns the names of the commands listed under `Commands:`.
fn commands(help: &str) -> Vec<&str> {
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    lines.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help").collect()
}

/// Formats the options of one command as rows of a Markdown table: the option's syntax and the first paragraph of its
/// description.
fn option_rows(help: &str) -> String {
    let mut rows = String::new();
    let mut lines = help.lines().peekable();
    while let Some(line) = lines.next() {
        let indent = line.len() - line.trim_start().len();
        let (written, positional) = (line.trim(), line.starts_with("  <") || line.starts_with("  ["));
        if !(positional || (2..=6).contains(&indent) && written.starts_with('-')) || written.starts_with("-h,") {
            continue;
        }
        // A short description is on the line of the option, separated by at least two spaces.
        let (written, text) = written.split_once("  ").unwrap_or((written, ""));
        let mut about = vec![text.trim()];
        while let Some(text) = lines.next_if(|next| next.starts_with("          ") && !next.trim().is_empty()) {
            about.push(text.trim());
        }
        if written.starts_with("-V,") {
            continue;
        }
        let about = about.join(" ").trim().replace('|', "\\|").replace('<', "&lt;");
        rows.push_str(&format!("| `{}` | {about} |\n", written.replace('|', "\\|")));
    }
    rows
}

/// Generates the page docs/guide/options.md.
fn options_page(texts: &[(String, String)]) -> String {
    let mut page = "# Options\n\nThis page is generated from `iec help COMMAND` (`IEC_UPDATE_SNAPSHOTS=1 cargo test --test it -- \
                    help::`). The help itself\nshows, in addition, environment variables, possible values and examples.\n"
        .to_string();
    for (name, text) in texts.iter().filter(|(name, _)| name != "iec") {
        let about = text.lines().next().unwrap_or_default();
        page.push_str(&format!("\n## iec {name}\n\n{about}\n\n| option | meaning |\n|---|---|\n{}", option_rows(text)));
    }
    page
}

#[test]
fn help_is_what_the_snapshots_say() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots/help");
    let all = help(&[]);
    let commands = commands(&all);
    assert!(commands.len() >= 20, "{commands:?}");
    let mut texts = vec![("iec".to_string(), all.clone())];
    texts.extend(commands.iter().map(|name| (name.to_string(), help(&[name]))));
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guide/options.md");
    if std::env::var_os(UPDATE).is_some() {
        std::fs::create_dir_all(&dir).unwrap();
        texts.iter().for_each(|(name, text)| std::fs::write(dir.join(format!("{name}.txt")), text).unwrap());
        std::fs::write(page, options_page(&texts)).unwrap();
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
    if std::fs::read_to_string(page).unwrap_or_default() != options_page(&texts) {
        failures.push("docs/guide/options.md: not what the help texts make".to_string());
    }
    assert!(failures.is_empty(), "write the snapshots again with {UPDATE}=1:\n{}", failures.join("\n"));
}
