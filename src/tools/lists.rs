//! Formats with all calls in one list behind a marker: Granite 3 (`<|tool_call|>[{"name": "f", "arguments": {…}}]`) and
//! Command R7B and A (`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {…}}]<|END_ACTION|>`).

use super::events::LONG_IDS;
use super::reader::{Notation, OBJECTS};
use super::row::FormatRow;
use super::rules::{CallRules, TextCalls, marker, spelled};
use crate::generate::constraint::{MarkerPlace, Phases};

const GRANITE_OPENING: &str = "<|tool_call|>";
const ACTION: &str = "<|START_ACTION|>";
const END_OF_ACTION: &str = "<|END_ACTION|>";

/// The rows of the table of formats.
pub(super) const GRANITE: FormatRow = FormatRow {
    name: "granite",
    detect: |source, _| source.contains(GRANITE_OPENING),
    notation: Some(Notation {
        openings: &[GRANITE_OPENING, "<tool_call>"],
        others: &["</tool_call>"],
        between: ",[]",
        several: true,
        ..OBJECTS
    }),
    ids: LONG_IDS,
    phases: |rules| {
        let calls = rules.objects("name", &["arguments", "parameters"], "id");
        phases(rules, GRANITE_OPENING, list(rules, &calls, ""))
    },
};

pub(super) const COMMAND: FormatRow = FormatRow {
    name: "command-r",
    detect: |source, _| source.contains(ACTION),
    notation: Some(Notation {
        openings: &[ACTION],
        others: &[END_OF_ACTION],
        between: ",[]",
        several: true,
        ..OBJECTS
    }),
    ids: LONG_IDS,
    phases: |rules| {
        let calls = rules.objects("tool_name", &["parameters"], "tool_call_id");
        phases(rules, ACTION, list(rules, &calls, &spelled(rules.tokenizer, END_OF_ACTION)))
    },
};

/// Returns the grammar of a list of calls and of what follows it.
pub(super) fn list(rules: &CallRules<'_>, calls: &str, end: &str) -> String {
    let space = rules.space();
    let more = if rules.parallel { format!(" ({space} \",\" {space} call)*") } else { String::new() };
    format!("start: {space} \"[\" {space} call{more} {space} \"]\" {end}\n{calls}")
}

fn phases(rules: &CallRules<'_>, opening: &str, body: String) -> Phases {
    let open = vec![(marker(rules.tokenizer, opening, MarkerPlace::Anywhere), 0)];
    rules.text_phases(TextCalls {
        first: open.clone(),
        later: open,
        open: spelled(rules.tokenizer, opening),
        bodies: vec![body],
        body_is_last: true,
        ..TextCalls::default()
    })
}
