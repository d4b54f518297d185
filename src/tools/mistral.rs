//! The formats of Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {…}}]` with all calls in one list, and the newer
//! `[TOOL_CALLS]f[ARGS]{…}` with a marker per call, for tokenizers that have `[ARGS]`.

use super::events::IdForm;
use super::named::Named;
use super::reader::{Notation, OBJECTS, Style};
use super::row::FormatRow;
use super::rules::{CallRules, TextCalls, marker, quoted, spelled};
use crate::generate::constraint::{MarkerPlace, Phases};

const OPENING: &str = "[TOOL_CALLS]";
const ARGUMENTS: &str = "[ARGS]";
/// An id may stand between the name and the arguments: `f[CALL_ID]x[ARGS]{…}`.
const NAMED: Named = Named { prefix: "", numbered: '[', around: &[], end: "" };

/// The row of the table of formats. Templates refuse ids of calls that have not nine letters and digits.
pub(super) const ROW: FormatRow = FormatRow {
    name: "mistral",
    detect: |source, _| source.contains(OPENING),
    notation: Some(Notation {
        openings: &[OPENING],
        others: &[ARGUMENTS, "[CALL_ID]"],
        between: ",[]",
        several: true,
        style: Style::Named(&NAMED),
        ..OBJECTS
    }),
    ids: IdForm::Random("", 9),
    phases,
};

fn phases(rules: &CallRules<'_>) -> Phases {
    let tokenizer = rules.tokenizer;
    let has_names = tokenizer.id(ARGUMENTS).is_some();
    let body = match has_names {
        true => {
            let named = |name: &str| format!("{} {}", quoted(name), spelled(tokenizer, ARGUMENTS));
            format!("start: call\n{}", rules.calls_behind(named))
        }
        false => super::lists::list(rules, &rules.objects("name", &["arguments", "parameters"], "id"), ""),
    };
    let open = vec![(marker(tokenizer, OPENING, MarkerPlace::Anywhere), 0)];
    rules.text_phases(TextCalls {
        first: open.clone(),
        later: open,
        open: spelled(tokenizer, OPENING),
        bodies: vec![body],
        body_is_last: !has_names,
        ..TextCalls::default()
    })
}
