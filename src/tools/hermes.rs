//! The format of Hermes, Qwen2.5, Qwen3, Granite 4 and others:
//! `<tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>`, once per call.

use super::events::LONG_IDS;
use super::reader::{Notation, OBJECTS};
use super::row::FormatRow;
use super::rules::{CallRules, TextCalls, marker, spelled};
use crate::generate::constraint::{MarkerPlace, Phases};

const OPENING: &str = "<tool_call>";
const CLOSING: &str = "</tool_call>";

/// The row of the table of formats. Other models write the same tags around other notations, whose rows come before.
pub(super) const ROW: FormatRow = FormatRow {
    name: "hermes",
    detect: |source, _| source.contains(OPENING) && source.contains("arguments"),
    notation: Some(Notation { openings: &[OPENING], others: &[CLOSING], several: true, ..OBJECTS }),
    ids: LONG_IDS,
    phases,
};

fn phases(rules: &CallRules<'_>) -> Phases {
    let tokenizer = rules.tokenizer;
    let space = rules.space();
    let calls = rules.objects("name", &["arguments", "parameters"], "id");
    let open = vec![(marker(tokenizer, OPENING, MarkerPlace::Anywhere), 0)];
    rules.text_phases(TextCalls {
        first: open.clone(),
        later: open,
        open: spelled(tokenizer, OPENING),
        bodies: vec![format!("start: {space} call {space} {}\n{calls}", spelled(tokenizer, CLOSING))],
        ..TextCalls::default()
    })
}
