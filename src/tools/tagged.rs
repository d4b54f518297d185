//! Formats with arguments between tags: Qwen3-Coder and Qwen3.5, Seed-OSS, GLM-4.5, and MiniMax M2.

use super::constrain::value_schema;
use super::events::LONG_IDS;
use super::members::Members;
use super::reader::{Notation, OBJECTS, Style};
use super::row::FormatRow;
use super::rules::{CallRules, SPACE, TextCalls, marker, quoted, spelled};
use super::types::Types;
use super::xml::Xml;
use crate::generate::constraint::{MarkerPlace, Phases};
use serde_json::Value;

const QWEN: Xml = Xml {
    function: "<function=",
    named: ">",
    key: "<parameter=",
    keyed: ">",
    value: "",
    valued: "</parameter>",
    called: "</function>",
    opening: "<tool_call>",
    closing: "</tool_call>",
    lines: true,
};
const SEED: Xml = Xml { opening: "<seed:tool_call>", closing: "</seed:tool_call>", ..QWEN };
const GLM: Xml = Xml {
    function: "",
    named: "",
    key: "<arg_key>",
    keyed: "</arg_key>",
    value: "<arg_value>",
    valued: "</arg_value>",
    called: "",
    opening: "<tool_call>",
    closing: "</tool_call>",
    lines: false,
};
const MINIMAX: Xml = Xml {
    function: "<invoke name=\"",
    named: "\">",
    key: "<parameter name=\"",
    keyed: "\">",
    value: "",
    valued: "</parameter>",
    called: "</invoke>",
    opening: "<minimax:tool_call>",
    closing: "</minimax:tool_call>",
    lines: true,
};

/// Returns the notation of functions within a tag; some models leave the outer tag out.
const fn within(xml: &'static Xml, openings: &'static [&'static str], others: &'static [&'static str]) -> Notation {
    Notation { openings, others, style: Style::Xml(xml), ..OBJECTS }
}

/// The rows of the table of formats.
pub(super) const QWEN3_CODER: FormatRow = FormatRow {
    name: "qwen3-coder",
    detect: |source, _| source.contains(QWEN.function) && source.contains(QWEN.key),
    notation: Some(within(&QWEN, &[QWEN.function], &[QWEN.opening, QWEN.closing, QWEN.valued, QWEN.called])),
    ids: LONG_IDS,
    phases: |rules| phases(rules, &QWEN),
};

pub(super) const SEED_OSS: FormatRow = FormatRow {
    name: "seed-oss",
    detect: |source, _| source.contains(SEED.opening),
    notation: Some(within(&SEED, &[SEED.function], &[SEED.opening, SEED.closing, SEED.valued, SEED.called])),
    ids: LONG_IDS,
    phases: |rules| phases(rules, &SEED),
};

pub(super) const GLM4: FormatRow = FormatRow {
    name: "glm-4.5",
    detect: |source, _| source.contains(GLM.key),
    notation: Some(within(&GLM, &[GLM.opening], &[GLM.closing, GLM.key, GLM.keyed, GLM.value, GLM.valued])),
    ids: LONG_IDS,
    phases: |rules| phases(rules, &GLM),
};

pub(super) const MINIMAX_M2: FormatRow = FormatRow {
    name: "minimax-m2",
    detect: |source, _| source.contains(MINIMAX.opening) && source.contains("<invoke name="),
    notation: Some(within(
        &MINIMAX,
        &[MINIMAX.function],
        &[MINIMAX.opening, MINIMAX.closing, MINIMAX.valued, MINIMAX.called],
    )),
    ids: LONG_IDS,
    phases: |rules| phases(rules, &MINIMAX),
};

fn phases(rules: &CallRules<'_>, xml: &Xml) -> Phases {
    let (tokenizer, space) = (rules.tokenizer, rules.space());
    let tag = |text: &str| spelled(tokenizer, text);
    let valued = tag(xml.valued);
    let text = match valued.starts_with('<') {
        // A special token is no text.
        true => format!("text: /(?s:.+)/? {valued}\n"),
        false => format!("text[suffix={valued}]: /(?s:.*)/\n"),
    };
    let member = |key: Option<&str>, schema: &Value, root: &Value| {
        let name = key.map_or_else(|| r#"/[^<>"\n]{1,64}/"#.into(), quoted);
        let head = format!("{} {name} {}", tag(xml.key), tag(xml.keyed));
        let between = if xml.value.is_empty() { String::new() } else { format!("{space} {}", tag(xml.value)) };
        format!("{head} {between} {}", value(schema, root, &valued))
    };
    let members = Members { separator: space, member: &member };
    let end = if xml.called.is_empty() { String::new() } else { format!("{space} {}", tag(xml.called)) };
    let calls = rules.calls_with_members(&members, |name, members| {
        format!("{} {space} {members} {end}", quoted(&format!("{name}{}", xml.named)))
    });
    let function = if xml.function.is_empty() { String::new() } else { tag(xml.function) };
    let [opening, closing] = [xml.opening, xml.closing].map(tag);
    let at = |text: &str| marker(tokenizer, text, MarkerPlace::Anywhere);
    let mut markers = vec![(at(xml.opening), 0)];
    // Calls within one pair of tags follow one another if the tags are those of a section.
    let more =
        if rules.parallel && !function.is_empty() { format!("({space} {function} call)*") } else { String::new() };
    let mut bodies = vec![format!("start: {space} {function} call {more} {space} {closing}\n{calls}{text}")];
    if !function.is_empty() {
        markers.push((at(xml.function), 1));
        bodies.push(format!("start: call {more} {space} {closing}\n{calls}{text}"));
    }
    rules.text_phases(TextCalls {
        first: markers.clone(),
        later: markers,
        open: opening,
        bodies,
        ..TextCalls::default()
    })
}

/// Returns a value with its closing tag, as a part of a grammar. Values that may be texts are free up to the tag.
fn value(schema: &Value, root: &Value, valued: &str) -> String {
    let types = Types::of(schema, root);
    let texts = schema["enum"].as_array().cloned().or_else(|| schema.get("const").map(|value| vec![value.clone()]));
    match texts {
        Some(texts) if types.is_text() => {
            let texts: Vec<String> = texts.iter().filter_map(Value::as_str).map(quoted).collect();
            format!("\"\\n\"? ({}) \"\\n\"? {valued}", texts.join(" | "))
        }
        _ if types.may_be_text() => "text".into(),
        _ => {
            let json = value_schema(schema, root);
            // Templates print these values of earlier calls as Python does.
            let words = if types.is("boolean") { " | \"True\" | \"False\"" } else { "" };
            let none = if types.may_be_null() { " | \"None\"" } else { "" };
            format!("{SPACE} ({json}{words}{none}) {SPACE} {valued}")
        }
    }
}
