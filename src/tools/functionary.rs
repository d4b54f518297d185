//! The formats of Functionary and of functions that Llama 3.1 was given by a prompt: `<function=f>{…}</function>`, and
//! `>>>f\n{…}` with `>>>all\n` before text for the user.

use super::events::LONG_IDS;
use super::named::Named;
use super::reader::{Notation, OBJECTS, Style};
use super::row::FormatRow;
use super::rules::{CallRules, TextCalls, marker, quoted};
use crate::generate::constraint::{MarkerPlace, Phases};

const OPENING: &str = "<function=";
const CLOSING: &str = "</function>";
const ARROWS: &str = ">>>";
const IN_TAGS: Named = Named { prefix: "", numbered: '>', around: &[], end: CLOSING };
const BEHIND_ARROWS: Named = Named { prefix: "", numbered: ' ', around: &[], end: "" };

/// The rows of the table of formats.
pub(super) const FUNCTIONARY_3_1: FormatRow = FormatRow {
    name: "functionary-3.1",
    detect: |source, _| source.contains(OPENING),
    notation: Some(Notation { openings: &[OPENING], others: &[CLOSING], style: Style::Named(&IN_TAGS), ..OBJECTS }),
    ids: LONG_IDS,
    phases: |rules| {
        let calls = rules
            .calls(|_, name, arguments| format!("{} {arguments} {}", quoted(&format!("{name}>")), quoted(CLOSING)));
        let open = vec![(marker(rules.tokenizer, OPENING, MarkerPlace::Anywhere), 0)];
        rules.text_phases(TextCalls {
            first: open.clone(),
            later: open,
            open: quoted(OPENING),
            bodies: vec![format!("start: call\n{calls}")],
            ..TextCalls::default()
        })
    },
};

pub(super) const FUNCTIONARY_3_2: FormatRow = FormatRow {
    name: "functionary-3.2",
    detect: |source, _| source.contains(ARROWS),
    notation: Some(Notation {
        openings: &[ARROWS],
        bare: true,
        ordinary: true,
        user: "all\n",
        style: Style::Named(&BEHIND_ARROWS),
        ..OBJECTS
    }),
    ids: LONG_IDS,
    phases: arrows,
};

/// Returns the phases of an output whose prompt ends with the arrows, so that it begins with the name of a function or
/// of the user. The same text may be an answer: the arguments of a first call follow their schema only if it must come.
fn arrows(rules: &CallRules<'_>) -> Phases {
    let calls = rules.calls_behind(|name| quoted(&format!("{name}\n")));
    let more = if rules.forced && rules.parallel { "(/[ \\n]{1,4}/? \">>>\" call)*" } else { "" };
    let mut bodies = vec![format!("start: call {more}\n{calls}")];
    let mut markers = Vec::new();
    for (i, tool) in rules.tools.iter().enumerate() {
        bodies.push(format!("start: arguments\narguments: {}\n", rules.schemas[i]));
        let text = format!("{ARROWS}{}\n", tool.name);
        markers.push((marker(rules.tokenizer, &text, MarkerPlace::Anywhere), i + 1));
    }
    rules.text_phases(TextCalls {
        first: markers.clone(),
        later: markers,
        ordinary: true,
        body_is_last: rules.forced,
        bodies,
        ..TextCalls::default()
    })
}
