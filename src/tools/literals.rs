//! Formats with arguments as literals of another language: calls of Python (OLMo 3, LFM2, Llama 4), and Gemma's.

use super::events::LONG_IDS;
use super::literal::{Dialect, PYTHON};
use super::members::Members;
use super::reader::{Notation, OBJECTS, Style};
use super::row::FormatRow;
use super::rules::{CallRules, TextCalls, marker, quoted, spelled};
use super::types::Types;
use crate::generate::constraint::{Marker, MarkerPlace, Phases};
use regex::Regex;
use serde_json::Value;
use std::sync::LazyLock;

const OLMO: (&str, &str) = ("<function_calls>", "</function_calls>");
const LFM2: (&str, &str) = ("<|tool_call_start|>", "<|tool_call_end|>");
const LLAMA4: (&str, &str) = ("<|python_start|>", "<|python_end|>");
const GEMMA4: (&str, &str) = ("<|tool_call>", "<tool_call|>");
const FUNCTION_GEMMA: (&str, &str) = ("<start_function_call>", "<end_function_call>");

const GEMMA4_DIALECT: Dialect = Dialect { prefix: "call:", brackets: ('{', '}'), assign: ':', mark: "<|\"|>" };
const FUNCTION_GEMMA_DIALECT: Dialect = Dialect { mark: "<escape>", ..GEMMA4_DIALECT };

const PYTHON_CALLS: Notation = Notation { between: ",[]", several: true, style: Style::Literal(&PYTHON), ..OBJECTS };

/// Matches an example of a call in a list, which the template of Llama 4 shows to the model.
static EXAMPLE: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"\[[A-Za-z_]\w*\([A-Za-z_]\w*=").expect("a constant pattern"));

/// The rows of the table of formats.
pub(super) const OLMO3: FormatRow = FormatRow {
    name: "olmo3",
    detect: |source, _| source.contains(OLMO.0),
    notation: Some(Notation { openings: &[OLMO.0], others: &[OLMO.1], ..PYTHON_CALLS }),
    ids: LONG_IDS,
    phases: |rules| python(rules, OLMO, ("", "", "")),
};

pub(super) const LFM: FormatRow = FormatRow {
    name: "lfm2",
    detect: |source, _| source.contains(LFM2.0),
    notation: Some(Notation { openings: &[LFM2.0], others: &[LFM2.1], ..PYTHON_CALLS }),
    ids: LONG_IDS,
    phases: |rules| python(rules, LFM2, LIST),
};

/// Llama 4 begins its output with the list, or writes tokens around it.
pub(super) const LLAMA_4: FormatRow = FormatRow {
    name: "llama4",
    detect: |source, _| EXAMPLE.is_match(source),
    notation: Some(Notation { openings: &[LLAMA4.0], others: &[LLAMA4.1], bare: true, ..PYTHON_CALLS }),
    ids: LONG_IDS,
    phases: bare_python,
};

pub(super) const GEMMA_4: FormatRow = FormatRow {
    name: "gemma4",
    detect: |source, _| source.contains(GEMMA4.0) && source.contains(GEMMA4.1),
    notation: Some(Notation {
        openings: &[GEMMA4.0],
        others: &[GEMMA4.1, GEMMA4_DIALECT.mark],
        style: Style::Literal(&GEMMA4_DIALECT),
        ..OBJECTS
    }),
    ids: LONG_IDS,
    phases: |rules| gemma(rules, GEMMA4, &GEMMA4_DIALECT),
};

pub(super) const FUNCTIONGEMMA: FormatRow = FormatRow {
    name: "functiongemma",
    detect: |source, _| source.contains(FUNCTION_GEMMA.0),
    notation: Some(Notation {
        openings: &[FUNCTION_GEMMA.0],
        others: &[FUNCTION_GEMMA.1, FUNCTION_GEMMA_DIALECT.mark],
        style: Style::Literal(&FUNCTION_GEMMA_DIALECT),
        ..OBJECTS
    }),
    ids: LONG_IDS,
    phases: |rules| gemma(rules, FUNCTION_GEMMA, &FUNCTION_GEMMA_DIALECT),
};

/// Parts of a grammar before, between and behind the calls of a list.
const LIST: (&str, &str, &str) = ("\"[\"", "\",\"", "\"]\"");

/// Rules for literals of Python.
const PYTHON_LITERALS: &str = r#"
string: /"([^"\\\n]|\\.)*"/ | /'([^'\\\n]|\\.)*'/
integer: /-?[0-9]+/
number: /-?[0-9]+(\.[0-9]+)?([eE][+\-]?[0-9]+)?/
boolean: "True" | "False" | "true" | "false"
null: "None" | "null"
list: "[" space (literal (space "," space literal)*)? space "]"
object: "{" space (string space ":" space literal (space "," space string space ":" space literal)*)? space "}"
literal: string | number | boolean | null | list | object
space: (/[ \n\r\t]{1,16}/)?
"#;

fn python_calls(rules: &CallRules<'_>) -> String {
    let member = |key: Option<&str>, schema: &Value, root: &Value| {
        let name = key.map_or_else(|| "/[A-Za-z_][A-Za-z0-9_]{0,63}/".into(), quoted);
        format!("{name} space \"=\" space ({})", literal(schema, root, &python_text))
    };
    let members = Members { separator: "space \",\" space", member: &member };
    let calls = rules.calls_with_members(&members, |name, members| {
        format!("{} space {members} space \")\"", quoted(&format!("{name}(")))
    });
    calls + PYTHON_LITERALS.trim_start()
}

fn python(rules: &CallRules<'_>, tags: (&str, &str), around: (&str, &str, &str)) -> Phases {
    let (before, between, after) = around;
    let more = if rules.parallel { format!("(space {between} space call)*") } else { String::new() };
    let closing = spelled(rules.tokenizer, tags.1);
    let body =
        format!("start: space {before} space call {more} space {after} space {closing}\n{}", python_calls(rules));
    let open = vec![(marker(rules.tokenizer, tags.0, MarkerPlace::Anywhere), 0)];
    rules.text_phases(TextCalls {
        first: open.clone(),
        later: open,
        open: spelled(rules.tokenizer, tags.0),
        bodies: vec![body],
        body_is_last: true,
        ..TextCalls::default()
    })
}

/// Returns the phases of an output that may begin with a list of calls. It is one once it has the name of a tool and
/// the key of an argument: the marker ends there, and other arguments and calls follow with any values.
fn bare_python(rules: &CallRules<'_>) -> Phases {
    let tokenizer = rules.tokenizer;
    let (before, between, after) = LIST;
    let more = if rules.parallel { format!("(space {between} space call)*") } else { String::new() };
    let mut bodies = vec![format!("start: space {before} space call {more} space {after}\n{}", python_calls(rules))];
    let names: Vec<String> = rules.tools.iter().map(|tool| quoted(&format!("{}(", tool.name))).collect();
    let rest = format!(
        "call: ({}) (space argument (space \",\" space argument)*)? space \")\"\nargument: \
         /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ space \"=\" space literal\n{}",
        names.join(" | "),
        PYTHON_LITERALS.trim_start()
    );
    let mut first: Vec<(Marker, usize)> = Vec::new();
    for tool in &rules.tools {
        let root = tool.parameters.as_ref().unwrap_or(&Value::Null);
        for (key, schema) in root["properties"].as_object().into_iter().flatten() {
            let value = literal(schema, root, &python_text);
            let body = format!(
                "start: space ({value}) (space \",\" space argument)* space \")\" {more} space {after}\n{rest}"
            );
            let known = bodies.iter().position(|known| *known == body).unwrap_or(bodies.len());
            if known == bodies.len() {
                bodies.push(body);
            }
            first.push((marker(tokenizer, &format!("[{}({key}=", tool.name), MarkerPlace::Start), known));
        }
    }
    rules.text_phases(TextCalls {
        first,
        ordinary: true,
        bodies,
        body_is_last: true,
        tag: Some(marker(tokenizer, LLAMA4.0, MarkerPlace::Anywhere)),
        ..TextCalls::default()
    })
}

/// Returns a text as Python writes it.
fn python_text(text: &str) -> String {
    [format!("\"{text}\""), format!("'{text}'")].map(|text| quoted(&text)).join(" | ")
}

fn gemma(rules: &CallRules<'_>, tags: (&str, &str), dialect: &Dialect) -> Phases {
    let tokenizer = rules.tokenizer;
    let mark = spelled(tokenizer, dialect.mark);
    let string = match mark.starts_with('<') {
        // A special token is no text.
        true => format!("{mark} /(?s:.+)/? {mark}"),
        false => format!("{mark} text\ntext[suffix={mark}]: /(?s:.*)/"),
    };
    let literals = format!(
        r#"string: {string}
integer: /-?[0-9]+/
number: /-?[0-9]+(\.[0-9]+)?([eE][+\-]?[0-9]+)?/
boolean: "true" | "false"
null: "null" | "None"
list: "[" space (literal (space "," space literal)*)? space "]"
object: "{{" space (key space ":" space literal (space "," space key space ":" space literal)*)? space "}}"
key: /[A-Za-z0-9_.\-]{{1,64}}/
literal: string | number | boolean | null | list | object
space: (/[ \n\r\t]{{1,16}}/)?
"#
    );
    let member = |key: Option<&str>, schema: &Value, root: &Value| {
        let name = key.map_or_else(|| "key".into(), quoted);
        let text = |text: &str| format!("{mark} {} {mark}", quoted(text));
        format!("{name} space \":\" space ({})", literal(schema, root, &text))
    };
    let members = Members { separator: "space \",\" space", member: &member };
    let calls = rules.calls_with_members(&members, |name, members| {
        format!("{} space {members} space \"}}\"", quoted(&format!("call:{name}{{")))
    });
    let [opening, closing] = [tags.0, tags.1].map(|tag| spelled(tokenizer, tag));
    let open = vec![(marker(tokenizer, tags.0, MarkerPlace::Anywhere), 0)];
    rules.text_phases(TextCalls {
        first: open.clone(),
        later: open,
        open: opening,
        bodies: vec![format!("start: space call space {closing}\n{calls}{literals}")],
        ..TextCalls::default()
    })
}

/// Returns the literals that a schema allows, as a part of a grammar; `text` returns those of a text.
fn literal(schema: &Value, root: &Value, text: &dyn Fn(&str) -> String) -> String {
    let types = Types::of(schema, root);
    let texts = schema["enum"].as_array().filter(|_| types.is_text());
    if let Some(texts) = texts {
        let plain = |value: &&str| !value.contains(['"', '\'', '\\', '\n']);
        let texts: Vec<String> = texts.iter().filter_map(Value::as_str).filter(plain).map(text).collect();
        if !texts.is_empty() {
            return texts.join(" | ");
        }
    }
    if types == Types::ANY {
        return "literal".into();
    }
    let number = if schema["type"] == "integer" { "integer" } else { "number" };
    let rules = [
        ("string", "string"),
        ("number", number),
        ("boolean", "boolean"),
        ("null", "null"),
        ("array", "list"),
        ("object", "object"),
    ];
    rules.iter().filter(|(name, _)| types.may_be(name)).map(|(_, rule)| *rule).collect::<Vec<_>>().join(" | ")
}
