//! Formats with a name before the arguments and a section of all calls: DeepSeek V3 and V3.1, and Kimi K2.
//!
//! V3 writes `function<｜tool▁sep｜>f` and a code block with the arguments between the tokens of a call, V3.1
//! `f<｜tool▁sep｜>{…}`, Kimi `functions.f:0<|tool_call_argument_begin|>{…}`, where the number counts the calls of the
//! conversation.

use super::events::{IdForm, LONG_IDS};
use super::named::Named;
use super::reader::{Notation, OBJECTS, Style};
use super::row::FormatRow;
use super::rules::{CallRules, TextCalls, marker, quoted, spelled};
use crate::generate::constraint::{MarkerPlace, Phases};

/// Texts around the calls of a section.
struct Section {
    opening: &'static str,
    closing: &'static str,
    /// Around a call.
    call: (&'static str, &'static str),
    /// Between calls.
    between: &'static str,
}

const DEEPSEEK: Section = Section {
    opening: "<｜tool▁calls▁begin｜>",
    closing: "<｜tool▁calls▁end｜>",
    call: ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    between: "\n",
};
const SEPARATOR: &str = "<｜tool▁sep｜>";
const KIMI_SECTION: Section = Section {
    opening: "<|tool_calls_section_begin|>",
    closing: "<|tool_calls_section_end|>",
    call: ("<|tool_call_begin|>", "<|tool_call_end|>"),
    between: "",
};
const KIMI_ARGUMENTS: &str = "<|tool_call_argument_begin|>";

const V3_NAME: Named = Named {
    prefix: "",
    numbered: ' ',
    around: &["function<｜tool▁sep｜>", SEPARATOR, "```json", "```"],
    end: DEEPSEEK.call.1,
};
const V3_1_NAME: Named = Named { prefix: "", numbered: ' ', around: &[SEPARATOR], end: DEEPSEEK.call.1 };
const KIMI_NAME: Named =
    Named { prefix: "functions.", numbered: ':', around: &[KIMI_ARGUMENTS], end: KIMI_SECTION.call.1 };

const DEEPSEEK_CALLS: Notation = Notation {
    openings: &[DEEPSEEK.call.0],
    others: &[DEEPSEEK.opening, DEEPSEEK.closing, DEEPSEEK.call.1, SEPARATOR],
    ..OBJECTS
};

/// The rows of the table of formats.
pub(super) const DEEPSEEK_V3: FormatRow = FormatRow {
    name: "deepseek-v3",
    detect: |source, _| source.contains(DEEPSEEK.call.0) && source.contains("```json"),
    // The end of the code block follows the arguments.
    notation: Some(Notation { between: "`", several: true, style: Style::Named(&V3_NAME), ..DEEPSEEK_CALLS }),
    ids: LONG_IDS,
    phases: |rules| {
        let before = |name: &str| {
            let block = quoted(&format!("{name}\n```json\n"));
            format!("\"function\" {} {block}", spelled(rules.tokenizer, SEPARATOR))
        };
        phases(rules, &DEEPSEEK, before, "\"\\n```\"")
    },
};

pub(super) const DEEPSEEK_V3_1: FormatRow = FormatRow {
    name: "deepseek-v3.1",
    detect: |source, _| source.contains(DEEPSEEK.call.0),
    notation: Some(Notation { style: Style::Named(&V3_1_NAME), ..DEEPSEEK_CALLS }),
    ids: LONG_IDS,
    phases: |rules| {
        let before = |name: &str| format!("{} {}", quoted(name), spelled(rules.tokenizer, SEPARATOR));
        phases(rules, &DEEPSEEK, before, "")
    },
};

pub(super) const KIMI: FormatRow = FormatRow {
    name: "kimi-k2",
    detect: |source, _| source.contains(KIMI_SECTION.opening) || source.contains(KIMI_SECTION.call.0),
    notation: Some(Notation {
        openings: &[KIMI_SECTION.call.0],
        others: &[KIMI_SECTION.opening, KIMI_SECTION.closing, KIMI_SECTION.call.1, KIMI_ARGUMENTS],
        style: Style::Named(&KIMI_NAME),
        ..OBJECTS
    }),
    ids: IdForm::Numbered(KIMI_SECTION.call.0),
    phases: |rules| {
        let arguments = spelled(rules.tokenizer, KIMI_ARGUMENTS);
        let before = |name: &str| format!("{} /[0-9]{{1,6}}/ {arguments}", quoted(&format!("functions.{name}:")));
        phases(rules, &KIMI_SECTION, before, "")
    },
};

/// Returns the phases of an output with a section of calls; some models leave out the tokens around it.
fn phases(rules: &CallRules<'_>, section: &Section, before: impl Fn(&str) -> String, after: &str) -> Phases {
    let tokenizer = rules.tokenizer;
    let [opening, closing, begin, end] =
        [section.opening, section.closing, section.call.0, section.call.1].map(|text| spelled(tokenizer, text));
    let calls = rules.calls(|_, name, arguments| format!("{} {arguments} {after} {end}", before(name)));
    let between = if section.between.is_empty() { String::new() } else { format!("{}?", quoted(section.between)) };
    let more = if rules.parallel { format!("({between} {begin} call)*") } else { String::new() };
    let at = |text: &str| marker(tokenizer, text, MarkerPlace::Anywhere);
    let markers = vec![(at(section.opening), 0), (at(section.call.0), 1)];
    rules.text_phases(TextCalls {
        first: markers.clone(),
        later: markers,
        open: opening,
        bodies: vec![
            format!("start: {between} {begin} call {more} {between} {closing}\n{calls}"),
            format!("start: call {more} ({between} {closing})?\n{calls}"),
        ],
        body_is_last: true,
        ..TextCalls::default()
    })
}
