//! Lines of the log of a server, and its greeting on a terminal.

use super::client::Server;
use crate::pty::Terminal;
use serde_json::{Value, json};
use std::process::Command;

/// Returns true if a text begins with a time such as 2026-11-27T21:50:43.123Z.
fn begins_with_time(text: &str) -> bool {
    let form = "0000-00-00T00:00:00.000Z";
    let same = |(form, found): (char, char)| if form == '0' { found.is_ascii_digit() } else { form == found };
    text.len() > form.len() && form.chars().zip(text.chars()).all(same)
}

#[test]
fn every_line_of_the_log_has_a_time_and_is_json_on_request() {
    for form in ["text", "json"] {
        let server = Server::start(&["--log", form]);
        server.ask("/v1/completions", &json!({"prompt": "Once", "max_tokens": 1}));
        server.wait("the line of the request", || server.log().contains("/v1/completions"));
        let log = server.log();
        let lines: Vec<&str> = log.lines().collect();
        assert!(lines.len() > 1, "{log}");
        for line in lines {
            if form == "text" {
                assert!(begins_with_time(line), "{line}");
                continue;
            }
            let object: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
            assert!(object["time"].as_str().is_some_and(|time| begins_with_time(&format!("{time} "))), "{line}");
            assert!(object["event"] == "note" || object["event"] == "request", "{line}");
        }
        assert!(log.contains("no model named") && log.contains("/v1/completions"), "{log}");
    }
}

#[test]
fn a_server_greets_with_text_on_a_terminal() {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin("iec"));
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default()).env("IEC_DEVICE", "cpu");
    command.args(["serve", "--port", "0", "--threads", "1", "--kv-memory", "64M"]);
    let mut terminal = Terminal::start(command, 24, 120);
    terminal.wait_for("listening on http://127.0.0.1:");
    terminal.wait_for("Z ready");
    assert!(!terminal.screen().contains("{\"event\""), "{}", terminal.screen());
    terminal.type_keys("\x03");
    assert_eq!(terminal.end(), Some(0), "{}", terminal.screen());
}
