//! The format of Llama 3.1 to 3.3: the output is a call, `{"name": "f", "parameters": {…}}`, perhaps behind
//! `<|python_tag|>`; `;` stands between several calls.
//!
//! An answer may be such an object, too: it is a call once it has the name of a tool and the key of its arguments.

use super::events::LONG_IDS;
use super::reader::{Notation, OBJECTS};
use super::row::FormatRow;
use super::rules::{CallRules, TextCalls, marker};
use crate::generate::constraint::{Marker, MarkerPlace, Phases};

const TAG: &str = "<|python_tag|>";
/// Beginnings of a call before the name, without white space.
const FIRST: [&str; 2] = ["{\"name\":\"", "{\"type\":\"function\",\"name\":\""];
/// Keys of the arguments.
const KEYS: [&str; 2] = ["parameters", "arguments"];

/// The row of the table of formats.
pub(super) const ROW: FormatRow = FormatRow {
    name: "llama3",
    detect: |source, _| source.contains("ipython") && source.contains("parameters"),
    notation: Some(Notation {
        openings: &[TAG],
        others: &["<|python_start|>", "<|python_end|>"],
        bare: true,
        between: ";,",
        several: true,
        ..OBJECTS
    }),
    ids: LONG_IDS,
    phases,
};

fn phases(rules: &CallRules<'_>) -> Phases {
    let tokenizer = rules.tokenizer;
    let space = rules.space();
    // A call that must come, or that stands behind the tag, is a call from its first character on.
    let calls = rules.objects("name", &KEYS, "id");
    // A call that was required is followed by nothing but others.
    let more = match rules.forced && rules.parallel {
        true => format!("({space} /[;,]/ {space} call)*"),
        false => String::new(),
    };
    let mut bodies = vec![format!("start: {space} call {more}\n{calls}")];
    let mut first = Vec::new();
    for (i, tool) in rules.tools.iter().enumerate() {
        bodies.push(format!("start: {space} arguments {space} \"}}\"\narguments: {}\n", rules.schemas[i]));
        for (begin, key) in FIRST.iter().flat_map(|begin| KEYS.map(|key| (begin, key))) {
            first.push((marker(tokenizer, &format!("{begin}{}\",\"{key}\":", tool.name), MarkerPlace::Start), i + 1));
        }
    }
    let later = first.iter().map(|(marker, body)| {
        let text = format!(";{}", marker.text);
        (Marker { text, ..marker.clone() }, *body)
    });
    rules.text_phases(TextCalls {
        later: first.iter().cloned().chain(later).collect(),
        first: first.clone(),
        ordinary: true,
        body_is_last: rules.forced,
        bodies,
        tag: Some(marker(tokenizer, TAG, MarkerPlace::Anywhere)),
        ..TextCalls::default()
    })
}
