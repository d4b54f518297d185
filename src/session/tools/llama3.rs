//! The format of Llama 3.1 to 3.3: the output is a call, `{"name": "f", "parameters": {…}}`, perhaps behind
//! `<|python_tag|>`; `;` stands between several calls.

use super::events::LONG_IDS;
use super::reader::Notation;
use super::row::Row;
use super::rules::{CallRules, TextCalls, marker};
use crate::runtime::constraint::{Phases, Place};

const TAG: &str = "<|python_tag|>";
/// Beginnings of a call, without white space.
const FIRST: [&str; 2] = ["{\"name\":\"", "{\"type\":\"function\",\"name\":\""];
/// Beginning of a call behind another one.
const LATER: &str = ";{\"name\":\"";

/// The row of the table of formats.
pub(super) const ROW: Row = Row {
    name: "llama3",
    detect: |source, _| source.contains("ipython") && source.contains("parameters"),
    notation: Some(Notation { openings: &[TAG], others: &[], bare: true, between: ";,", named: false }),
    ids: LONG_IDS,
    phases,
};

fn phases(rules: &CallRules<'_>) -> Phases {
    let tokenizer = rules.tokenizer;
    // The marker ends within the quotation marks of the name.
    let calls = rules.calls(|name| format!("{name}\", \"parameters\": "), "\"}\"");
    let open = "\"{\\\"name\\\": \\\"\"";
    let first = FIRST.map(|text| marker(tokenizer, text, Place::Start));
    let later = first.iter().cloned().chain([marker(tokenizer, LATER, Place::Start)]);
    rules.text_phases(TextCalls {
        later: later.collect(),
        first: first.into(),
        open: open.into(),
        // A call that was required is followed by nothing but others.
        body: match rules.forced && rules.parallel {
            true => format!("start: call (/[ \\n]{{0,2}}[;,][ \\n]{{0,2}}/ {open} call)*\n{calls}"),
            false => format!("start: call\n{calls}"),
        },
        body_is_last: rules.forced,
        tag: Some(marker(tokenizer, TAG, Place::Anywhere)),
    })
}
