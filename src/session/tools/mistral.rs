//! The formats of Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {…}}]` with all calls in one list, and the newer
//! `[TOOL_CALLS]f[ARGS]{…}` with a marker per call, for tokenizers that have `[ARGS]`.

use super::events::IdForm;
use super::reader::Notation;
use super::row::Row;
use super::rules::{CallRules, TextCalls, marker, spelled};
use crate::runtime::constraint::{Phases, Place};

const OPENING: &str = "[TOOL_CALLS]";
const ARGUMENTS: &str = "[ARGS]";

/// The row of the table of formats. Templates refuse ids of calls that have not nine letters and digits.
pub(super) const ROW: Row = Row {
    name: "mistral",
    detect: |source, _| source.contains(OPENING),
    notation: Some(Notation {
        openings: &[OPENING],
        others: &[ARGUMENTS, "[CALL_ID]"],
        bare: false,
        between: ",[]",
        named: true,
    }),
    ids: IdForm { prefix: "", random: 9 },
    phases,
};

fn phases(rules: &CallRules<'_>) -> Phases {
    let tokenizer = rules.tokenizer;
    let has_names = tokenizer.id(ARGUMENTS).is_some();
    let body = if has_names {
        let named = |name: &str| format!("\"{name}\" {}", spelled(tokenizer, ARGUMENTS));
        format!("start: call\n{}", rules.calls_behind(named, ""))
    } else {
        let calls = rules.calls(|name| format!("{{\"name\": \"{name}\", \"arguments\": "), "\"}\"");
        let more = if rules.parallel { " (\", \" call)*" } else { "" };
        format!("start: \" \"? \"[\" call{more} \"]\"\n{calls}")
    };
    let open = marker(tokenizer, OPENING, Place::Anywhere);
    rules.text_phases(TextCalls {
        first: vec![open.clone()],
        later: vec![open],
        open: spelled(tokenizer, OPENING),
        body,
        body_is_last: !has_names,
        tag: None,
    })
}
