//! The format of Hermes, Qwen2.5 and Qwen3: `<tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>`, once per
//! call.

use super::events::LONG_IDS;
use super::reader::Notation;
use super::row::Row;
use super::rules::{CallRules, TextCalls, marker, spelled};
use crate::runtime::constraint::{Phases, Place};

const OPENING: &str = "<tool_call>";
const CLOSING: &str = "</tool_call>";

/// The row of the table of formats. Other models write the same tags around XML, which is another format.
pub(super) const ROW: Row = Row {
    name: "hermes",
    detect: |source, _| {
        let is_xml = ["<function=", "<arg_key>", "<parameter="].iter().any(|tag| source.contains(tag));
        source.contains(OPENING) && source.contains("arguments") && !is_xml
    },
    notation: Some(Notation { openings: &[OPENING], others: &[CLOSING], bare: false, between: "", named: false }),
    ids: LONG_IDS,
    phases,
};

fn phases(rules: &CallRules<'_>) -> Phases {
    let tokenizer = rules.tokenizer;
    let calls = rules.calls(|name| format!("{{\"name\": \"{name}\", \"arguments\": "), "\"}\"");
    let open = marker(tokenizer, OPENING, Place::Anywhere);
    rules.text_phases(TextCalls {
        first: vec![open.clone()],
        later: vec![open],
        open: spelled(tokenizer, OPENING),
        body: format!("start: \"\\n\"? call \"\\n\"? {}\n{calls}", spelled(tokenizer, CLOSING)),
        body_is_last: false,
        tag: None,
    })
}
