//! The notations of all formats: what each model writes, with what is missing or superfluous now and then, is divided
//! in pieces of any size; and what is right is allowed by the constraint of the format.

use super::tests::{format, tokenizer};
use super::*;
use crate::generate::constraint::{Constraint, Vocabulary};
use crate::generate::text::Tokenizer;
use serde_json::{Value, json};
use std::sync::Arc;

fn tools() -> Vec<Tool> {
    let parameters = json!({
        "type": "object",
        "properties": {
            "s": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"},
            "l": {"type": "array", "items": {"type": "integer"}}, "o": {"type": "object"},
            "e": {"enum": ["red", "blue"]}, "m": {"type": ["string", "null"]},
        },
    });
    let tool = |name: &str, parameters| Tool { name: name.into(), description: None, parameters, strict: None };
    vec![tool("f", Some(parameters)), tool("g", None), tool("get_time", None)]
}

/// Returns what an output is divided into, as `r:`, `c:`, and `f NAME ARGUMENTS` of each call.
fn divided(name: &str, tokenizer: &Tokenizer, text: &str, size: usize) -> Vec<String> {
    let style = OutputStyle::without_template(tokenizer).with(Some(format(name)));
    let mut parser = OutputParser::new(&style, &tools(), tokenizer, &[], 5);
    let mut events = Vec::new();
    let characters: Vec<char> = text.chars().collect();
    for piece in characters.chunks(size) {
        parser.push(u32::MAX, &piece.iter().collect::<String>(), &mut events);
    }
    parser.finish(false, &mut events);
    let mut shown: Vec<String> = Vec::new();
    for event in events {
        let (kind, text) = match event {
            OutputEvent::Content(text) => ("c:", text),
            OutputEvent::Reasoning(text) => ("r:", text),
            OutputEvent::CallBegin { name, .. } => {
                shown.push(format!("f {name} "));
                continue;
            }
            OutputEvent::CallArguments { text, .. } => ("f ", text),
        };
        match shown.last_mut() {
            Some(last) if last.starts_with(kind) => last.push_str(&text),
            _ => shown.push(format!("{kind}{text}")),
        }
    }
    shown
}

struct Case {
    format: &'static str,
    text: &'static str,
    expected: &'static [&'static str],
    /// Whether the constraint of the format allows the text up to its end.
    right: bool,
}

const fn right(format: &'static str, text: &'static str, expected: &'static [&'static str]) -> Case {
    Case { format, text, expected, right: true }
}

/// Returns a text that models should not write, and that is read all the same.
const fn loose(format: &'static str, text: &'static str, expected: &'static [&'static str]) -> Case {
    Case { format, text, expected, right: false }
}

const CASES: &[Case] = &[
    right(
        "qwen3-coder",
        "Well.\n<tool_call>\n<function=f>\n<parameter=s>\nx y\n</parameter>\n<parameter=n>\n5\n</parameter>\n</funct\
         ion>\n</tool_call>",
        &["c:Well.", "f f {\"s\": \"x y\", \"n\": 5}"],
    ),
    right("qwen3-coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>", &["f g {}"]),
    right(
        "qwen3-coder",
        "<tool_call>\n<function=f>\n<parameter=b>\nTrue\n</parameter>\n<parameter=s>\n<a>\n  1 < 2 & \"q\"\n\n</para\
         meter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        &["f f {\"b\": true, \"s\": \"<a>\\n  1 < 2 & \\\"q\\\"\\n\"}", "f g {}"],
    ),
    right(
        "qwen3-coder",
        "<function=f>\n<parameter=s>123</parameter><parameter=l>[1, 2]</parameter></function>\n</tool_call>",
        &["f f {\"s\": \"123\", \"l\": [1, 2]}"],
    ),
    loose(
        "qwen3-coder",
        "<tool_call>\n<function=f>\n<parameter=s>\nx\n<parameter=n>\n5\n</function>\n</tool_call> end",
        &["f f {\"s\": \"x\", \"n\": 5}", "c:\n end"],
    ),
    loose("qwen3-coder", "<tool_call><function=f><parameter=s>\nx", &["f f {\"s\": \"x\"}"]),
    loose(
        "qwen3-coder",
        "<tool_call>\n<function=f>\n<parameter=n>\nfive\n</parameter>\n</tool_call>",
        &["f f {\"n\": \"five\"}"],
    ),
    loose("qwen3-coder", "a <tool_call> b <functio", &["c:a  b <functio"]),
    right("qwen3-coder", "a < b <c> d", &["c:a < b <c> d"]),
    right(
        "seed-oss",
        "<seed:tool_call>\n<function=f>\n<parameter=s>x</parameter>\n</function>\n</seed:tool_call>",
        &["f f {\"s\": \"x\"}"],
    ),
    right(
        "glm-4.5",
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x y</arg_value>\n<arg_key>o</arg_key>\n<arg_value>{\"a\": [1\
         ]}</arg_value>\n</tool_call>",
        &["f f {\"s\": \"x y\", \"o\": {\"a\": [1]}}"],
    ),
    right(
        "glm-4.5",
        "<tool_call>f<arg_key>n</arg_key><arg_value>5</arg_value></tool_call><tool_call>g</tool_call>",
        &["f f {\"n\": 5}", "f g {}"],
    ),
    loose("glm-4.5", "<tool_call>g", &["f g {}"]),
    loose("glm-4.5", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>\nx", &["f f {\"s\": \"\\nx\"}"]),
    loose("glm-4.5", "<tool_call>two words</tool_call>", &["c:two words"]),
    right(
        "minimax-m2",
        "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"s\">x</parameter>\n<parameter name=\"m\">null</\
         parameter>\n</invoke>\n<invoke name=\"g\">\n</invoke>\n</minimax:tool_call>",
        &["f f {\"s\": \"x\", \"m\": null}", "f g {}"],
    ),
    right(
        "deepseek-v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"s\": \"x\"}\n```<｜tool▁call▁end｜\
         >\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        &["f f {\"s\": \"x\"}", "f g {}"],
    ),
    right(
        "deepseek-v3.1",
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"n\": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜too\
         l▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        &["c:Hm.", "f f {\"n\": 1}", "f g {}"],
    ),
    loose("deepseek-v3.1", "<｜tool▁call▁begin｜>g<｜tool▁sep｜><｜tool▁call▁end｜>", &["f g {}"]),
    right(
        "kimi-k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"s\": \"x\"}<|too\
         l_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_sec\
         tion_end|>",
        &["f f {\"s\": \"x\"}", "f g {}"],
    ),
    loose("kimi-k2", "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{\"n\": 1", &["f f {\"n\": 1}"]),
    right(
        "gemma4",
        "<|tool_call>call:f{s:<|\"|>a \"b\"\n<|\"|>,n:5,l:[1,2],o:{k:<|\"|>v<|\"|>,x:null},b:true}<tool_call|>",
        &["f f {\"s\": \"a \\\"b\\\"\\n\", \"n\": 5, \"l\": [1, 2], \"o\": {\"k\": \"v\", \"x\": null}, \"b\": true}"],
    ),
    right("gemma4", "<|tool_call>call:g{}<tool_call|><|tool_call>call:g{}<tool_call|>", &["f g {}", "f g {}"]),
    loose("gemma4", "<|tool_call>call: f { s: \"x\\n\", n : 5 ", &["f f {\"s\": \"x\\n\", \"n\": 5 }"]),
    loose("gemma4", "<|tool_call>call:f{s:New York}<tool_call|>", &["f f {\"s\": \"New York\"}"]),
    right(
        "functiongemma",
        "<start_function_call>call:f{s:<escape>x<escape>,n:1}<end_function_call>",
        &["f f {\"s\": \"x\", \"n\": 1}"],
    ),
    right(
        "granite",
        "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"s\": \"x\"}}, {\"name\": \"g\", \"arguments\": {}}]",
        &["f f {\"s\": \"x\"}", "f g {}"],
    ),
    loose(
        "granite",
        "<tool_call>[{\"name\": \"f\", \"arguments\": {\"s\": \"x\"}}]</tool_call>",
        &["f f {\"s\": \"x\"}"],
    ),
    right(
        "command-r",
        "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"s\": \"x\"}}\n]<|\
         END_ACTION|>",
        &["f f {\"s\": \"x\"}"],
    ),
    right(
        "olmo3",
        "<function_calls>\nf(s=\"x\", n=5)\ng()\n</function_calls>",
        &["f f {\"s\": \"x\", \"n\": 5}", "f g {}"],
    ),
    right(
        "lfm2",
        "<|tool_call_start|>[f(s='it\\'s', b=True, m=None, l=[1, 2], o={\"k\": 'v'}), g()]<|tool_call_end|>",
        &["f f {\"s\": \"it's\", \"b\": true, \"m\": null, \"l\": [1, 2], \"o\": {\"k\": \"v\"}}", "f g {}"],
    ),
    loose(
        "lfm2",
        "<|tool_call_start|>[f(s=\"\"\"a\nb\"\"\", n=+1_000)]<|tool_call_end|>",
        &["f f {\"s\": \"a\\nb\", \"n\": 1000}"],
    ),
    loose(
        "lfm2",
        "<|tool_call_start|>[f(s=r\"\\d\", l=(1, 2,), n=.5",
        &["f f {\"s\": \"\\\\d\", \"l\": [1, 2], \"n\": 0.5}"],
    ),
    right("llama4", "[f(s=\"x\"), g()]", &["f f {\"s\": \"x\"}", "f g {}"]),
    loose("llama4", "<|python_start|>[g()]<|python_end|>", &["f g {}"]),
    right("llama4", "[f(x) is a function]", &["c:[f(x) is a function]"]),
    right("llama4", "[1, 2] and [get_ti", &["c:[1, 2] and [get_ti"]),
    right("llama4", "[h(s=\"x\")]", &["c:[h(s=\"x\")]"]),
    right("llama4", "[g() is one]", &["c:[g() is one]"]),
    right("llama3", "{\"name\": \"Bob\", \"age\": 3}", &["c:{\"name\": \"Bob\", \"age\": 3}"]),
    right("llama3", "{\"name\": \"get_ti\", \"parameters\": {}}", &["c:{\"name\": \"get_ti\", \"parameters\": {}}"]),
    right("llama3", "{\"name\": \"get_time\", \"at\": 5}", &["c:{\"name\": \"get_time\", \"at\": 5}"]),
    right("llama3", "{\"name\": \"get_time\", \"parameters\": {}}", &["f get_time {}"]),
    right(
        "functionary-3.1",
        "So <function=f>{\"s\": \"x\"}</function><function=g>{}</function>",
        &["c:So", "f f {\"s\": \"x\"}", "f g {}"],
    ),
    right("functionary-3.2", "f\n{\"s\": \"x\"}>>>g\n{}", &["f f {\"s\": \"x\"}", "f g {}"]),
    right("functionary-3.2", "all\nHi >>> there\n>>>f\n{\"n\": 1}", &["c:Hi >>> there", "f f {\"n\": 1}"]),
    right("functionary-3.2", "f is a letter", &["c:f is a letter"]),
    right("hermes", "<tool_call>\n{\"name\":\"f\",\"arguments\":{\"s\":\"x\"}}\n</tool_call>", &["f f {\"s\":\"x\"}"]),
    right("hermes", "<tool_call>{\"arguments\": {\"s\": \"x\"}, \"name\": \"f\"}</tool_call>", &["f f {\"s\": \"x\"}"]),
];

/// Tokens that the vocabularies of the models have.
const TOKENS: &[&str] = &["<tool_call>", "</tool_call>", "<｜tool▁sep｜>", "<|tool_call>", "<tool_call|>"];

#[test]
fn calls_of_all_notations_are_divided_in_pieces_of_any_size() {
    let tokenizer = tokenizer(&[], TOKENS);
    let mut failures = Vec::new();
    for Case { format, text, expected, .. } in CASES {
        for size in 1..=text.chars().count() {
            let found = divided(format, &tokenizer, text, size);
            if found != *expected {
                failures.push(format!("{format} by {size}: {text}\n  found    {found:?}\n  expected {expected:?}"));
                break;
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    let named: Vec<&str> = CASES.iter().map(|case| case.format).collect();
    let missing: Vec<&str> = Format::all()
        .map(Format::name)
        .filter(|name| !named.contains(name) && !["harmony", "mistral"].contains(name))
        .collect();
    assert!(missing.is_empty(), "{missing:?}: add a case");
}

/// Returns the part of a text that a constraint allows, and whether the text may end there.
fn allowed(constraint: &Constraint, tokenizer: &Tokenizer, text: &str) -> (String, bool) {
    let mut state = constraint.start();
    let mut ids = Vec::new();
    for id in tokenizer.encode_plain(text).unwrap() {
        if state.is_complete() || !state.is_free() && !state.mask().unwrap().allows(id) {
            return (tokenizer.decode(&ids, false).unwrap(), false);
        }
        state.accept(id).unwrap();
        ids.push(id);
    }
    let ends = state.is_complete() || state.is_free() || state.mask().unwrap().ends();
    (tokenizer.decode(&ids, false).unwrap(), ends)
}

fn vocabulary(tokenizer: &Tokenizer) -> Arc<Vocabulary> {
    let rows = (0..).take_while(|id| tokenizer.token(*id).is_some()).count();
    Arc::new(Vocabulary::new(tokenizer.spelling(rows).unwrap()).unwrap())
}

#[test]
fn constraints_allow_what_models_write_and_end_where_it_ends() {
    let mut failures = Vec::new();
    for special in [&[][..], TOKENS] {
        let tokenizer = if special.is_empty() { tokenizer(&[], TOKENS) } else { tokenizer(special, &[]) };
        let vocabulary = vocabulary(&tokenizer);
        for Case { format: name, text, right, .. } in CASES.iter().filter(|case| case.right) {
            let style = OutputStyle::without_template(&tokenizer).with(Some(format(name)));
            let wanted = Wanted { choice: &ToolChoice::Auto, parallel: true, answer: None, enforced: Enforced::All };
            let source = constraint(&style, &tokenizer, &[], &tools(), wanted).unwrap().unwrap().source;
            let constraint = match Constraint::compile(&source, &vocabulary) {
                Ok(constraint) => constraint,
                Err(e) => {
                    failures.push(format!("{name}: {e}"));
                    continue;
                }
            };
            let found = allowed(&constraint, &tokenizer, text);
            if found != (text.to_string(), *right) {
                failures.push(format!("{name} ({} special): {text}\n  allows {found:?}", special.len()));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn forced_calls_of_all_formats_begin_at_once_and_name_a_function() {
    let tokenizer = tokenizer(&[], TOKENS);
    let vocabulary = vocabulary(&tokenizer);
    let mut failures = Vec::new();
    for name in Format::all().map(Format::name).filter(|name| *name != "harmony") {
        let style = OutputStyle::without_template(&tokenizer).with(Some(format(name)));
        let wanted = Wanted { choice: &ToolChoice::Required, parallel: true, answer: None, enforced: Enforced::All };
        let source = constraint(&style, &tokenizer, &[], &tools(), wanted).unwrap().unwrap().source;
        match Constraint::compile(&source, &vocabulary) {
            Ok(constraint) => {
                let found = allowed(&constraint, &tokenizer, "The weather is fine");
                if !found.0.is_empty() || found.1 {
                    failures.push(format!("{name}: allows {found:?}"));
                }
            }
            Err(e) => failures.push(format!("{name}: {e}")),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn an_answer_follows_its_constraint_behind_reasoning_of_all_kinds() {
    struct Case(&'static [&'static str], &'static str, &'static str, bool);
    let json = "{\"a\": 1}";
    let cases = [
        // Special tokens, prompt, output, whether it is allowed.
        Case(&[], "", "{\"a\": 1}", true),
        Case(&[], "", "<think>x", false),
        Case(&["<think>", "</think>"], "", "<think>add {</think>\n\n{\"a\": 1}", true),
        Case(&["<think>", "</think>"], "", "{\"a\": 1}", true),
        Case(&["<think>", "</think>"], "", "So {\"a\": 1}", false),
        Case(&["<think>", "</think>"], "<think>\n", "add them up</think>{\"a\": 1}", true),
        Case(&["<think>", "</think>"], "<think>\n", "add them up</think>So", false),
        Case(&["<think>", "</think>"], "<think>\n\n</think>\n\n", "{\"a\": 1}", true),
        Case(&["<think>", "</think>"], "<think>\n\n</think>\n\n", "<think>", false),
        Case(&["[THINK]", "[/THINK]"], "", "[THINK]x[/THINK]{\"a\": 1}", true),
        Case(&["<seed:think>", "</seed:think>"], "", "<seed:think>x</seed:think>{\"a\": 1}", true),
        Case(&["<|channel>", "<channel|>"], "", "<|channel>thought\nx<channel|>{\"a\": 1}", true),
        Case(
            &["<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"],
            "",
            "<|START_THINKING|>x<|END_THINKING|><|START_RESPONSE|>{\"a\": 1}",
            true,
        ),
    ];
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                        "additionalProperties": false});
    let sources = [
        crate::generate::constraint::ConstraintSource::JsonSchema(schema.to_string()),
        crate::generate::constraint::ConstraintSource::Regex(r#"\{"a": [0-9]\}"#.into()),
        crate::generate::constraint::ConstraintSource::Choice(vec![json.into(), "no".into()]),
        crate::generate::constraint::ConstraintSource::Grammar("start: \"{\\\"a\\\": 1}\"".into()),
    ];
    let mut failures = Vec::new();
    for Case(tokens, prompt, output, expected) in cases {
        for are_special in [true, false] {
            let tokenizer = if are_special { tokenizer(tokens, &[]) } else { tokenizer(&[], tokens) };
            let vocabulary = vocabulary(&tokenizer);
            let style = OutputStyle::without_template(&tokenizer);
            let prompt = tokenizer.encode_plain(prompt).unwrap();
            for source in &sources {
                let constraint = answer_constraint(&style, &tokenizer, &prompt, source);
                let constraint = Constraint::compile(&constraint, &vocabulary).unwrap();
                let found = allowed(&constraint, &tokenizer, output);
                if (found.0 == output && found.1) != expected {
                    failures.push(format!("{output:?} with {source:?}: allows {found:?}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn values_of_any_kind_are_valid_json() {
    for text in [
        "<function=f><parameter=s>\u{1}\"\\\u{2028}</parameter>",
        "<function=f><parameter=zz>{\"a\"",
        "<function=f><parameter=n></parameter>",
    ] {
        let found = divided("qwen3-coder", &tokenizer(&[], &[]), text, 3);
        let arguments = found[0].strip_prefix("f f ").unwrap();
        assert!(serde_json::from_str::<Value>(arguments).unwrap().is_object(), "{arguments}");
    }
}
