//! Outputs of models in each format are divided in pieces of all sizes; constraints are followed on a tokenizer of the
//! fixtures with the control tokens of the format.

use super::*;
use crate::generate::constraint::{Constraint, ConstraintSource, Vocabulary};
use crate::generate::text::{ChatTemplate, TextStream, Tokenizer};
use crate::rng::Rng;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

/// Returns the tokenizer of a fixture with further tokens, special or not.
pub(super) fn tokenizer(special: &[&str], plain: &[&str]) -> Tokenizer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama3-rope-tied/tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let added = file["added_tokens"].as_array_mut().unwrap();
    let first = added.iter().map(|token| token["id"].as_u64().unwrap()).max().unwrap() + 1;
    let all = special.iter().map(|token| (token, true)).chain(plain.iter().map(|token| (token, false)));
    for (id, (token, special)) in (first..).zip(all) {
        added.push(json!({"id": id, "content": token, "special": special, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false}));
    }
    Tokenizer::parse(file.to_string().as_bytes(), &path).unwrap()
}

const HARMONY: [&str; 7] =
    ["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"];

/// Returns the tokenizer of a format: control tokens are special, as in the tokenizers of the models.
pub(super) fn tokenizer_of(format: &str) -> Tokenizer {
    match format {
        "harmony" => tokenizer(&HARMONY, &[]),
        "hermes" => tokenizer(&[], &["<tool_call>", "</tool_call>", "<think>", "</think>"]),
        "llama3" => tokenizer(&["<|python_tag|>"], &[]),
        "mistral" => tokenizer(&["[TOOL_CALLS]"], &[]),
        _ => tokenizer(&["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"], &[]),
    }
}

pub(super) fn format(name: &str) -> Format {
    let of = |name: &str| Format::all().find(|format| format.name() == name);
    of(name).or_else(|| of(name.trim_end_matches('2'))).unwrap()
}

/// Output in words: `r:` reasoning, `c:` content, `f NAME ARGUMENTS` a call.
fn shown(events: &[OutputEvent]) -> Vec<String> {
    let mut shown: Vec<String> = Vec::new();
    let mut ids = HashSet::new();
    let mut calls = 0;
    for event in events {
        let (kind, text) = match event {
            OutputEvent::Content(text) => ("c:", text.clone()),
            OutputEvent::Reasoning(text) => ("r:", text.clone()),
            OutputEvent::CallBegin { index, id, name } => {
                assert_eq!(*index, calls);
                assert!(
                    ids.insert(id.clone())
                        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte))
                );
                calls += 1;
                shown.push(format!("f {name} "));
                continue;
            }
            OutputEvent::CallArguments { index, text } => {
                assert_eq!(*index + 1, calls);
                ("f ", text.clone())
            }
        };
        match shown.last_mut() {
            Some(last) if last.starts_with(kind) => last.push_str(&text),
            _ => shown.push(format!("{kind}{text}")),
        }
    }
    shown
}

/// Returns functions of these names.
fn functions(names: &[&str]) -> Vec<Tool> {
    let tool = |name: &&str| Tool { name: name.to_string(), description: None, parameters: None, strict: None };
    names.iter().map(tool).collect()
}

/// Divides an output that is given as pieces with their tokens.
fn divided(format: Option<Format>, tokenizer: &Tokenizer, prompt: &[u32], pieces: &[(u32, &str)]) -> Vec<String> {
    let style = OutputStyle::without_template(tokenizer).with(format);
    let tools = if format.is_some() { functions(&["f", "g", "a", "b.c-d"]) } else { Vec::new() };
    let mut parser = OutputParser::new(&style, &tools, tokenizer, prompt, 5);
    let mut events = Vec::new();
    for (id, text) in pieces {
        parser.push(*id, text, &mut events);
    }
    parser.finish(true, &mut events);
    assert_eq!(parser.calls(), events.iter().filter(|event| matches!(event, OutputEvent::CallBegin { .. })).count());
    shown(&events)
}

/// Splits a text into special tokens, whose text is hidden or shown, and pieces of `size` characters of other text.
fn pieces<'a>(tokenizer: &Tokenizer, text: &'a str, size: usize, hidden: bool) -> Vec<(u32, &'a str)> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let special = (1..=rest.len()).filter(|n| rest.is_char_boundary(*n)).find_map(|n| {
            let id = tokenizer.id(&rest[..n]).filter(|id| tokenizer.is_special(*id))?;
            Some((id, n))
        });
        let (id, n) = special.unwrap_or_else(|| {
            let mut ends = rest.char_indices().map(|(at, c)| at + c.len_utf8()).take(size);
            let special = |at: &usize| HARMONY.iter().chain(&MARKERS).any(|token| rest[*at..].starts_with(token));
            let end = ends.find(special).or(rest.char_indices().map(|(at, c)| at + c.len_utf8()).take(size).last());
            (u32::MAX, end.unwrap())
        });
        let shown = if id != u32::MAX && hidden { "" } else { &rest[..n] };
        pieces.push((id, shown));
        rest = &rest[n..];
    }
    pieces
}

const MARKERS: [&str; 4] = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"];

#[test]
fn outputs_of_all_formats_are_divided_in_pieces_of_any_size() {
    let cases: &[(&str, &str, &[&str])] = &[
        ("hermes", "Hi", &["c:Hi"]),
        (
            "hermes",
            "<think>\nhm <tool_call></think>\n\nI ask.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\"\
             : \"</tool_call>}\"}}\n</tool_call>",
            &["r:\nhm <tool_call>", "c:I ask.", "f f {\"a\": \"</tool_call>}\"}"],
        ),
        (
            "hermes",
            "<tool_call>\n{\"name\":\"a\",\"arguments\":{}}\n</tool_call>\n<tool_call>\n{\"arguments\": {\"\
             b\" :[1, -2e3]}, \"name\": \"b.c-d\"}\n</tool_call>\n",
            &["f a {}", "f b.c-d {\"b\" :[1, -2e3]}"],
        ),
        ("hermes", "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}", &["f f {\"a\": 1}"]),
        ("hermes", "a <tool_call>{\"name\": \"f\", \"arguments\": {\"a", &["c:a", "f f {\"a"]),
        ("hermes", "a <tool_call>{\"name\": \"f\", \"argum", &["c:a{\"name\": \"f\", \"argum"]),
        ("hermes", "<tool_call>\nnothing</tool_call> at all", &["c:\nnothing at all"]),
        (
            "hermes",
            "<tool_call>{\"name\": \"f g\", \"arguments\": {}}</tool_call>",
            &["c:{\"name\": \"f g\", \"arguments\": {}}"],
        ),
        ("hermes", "<tool_call>{\"name\": \"f\"}</tool_call>", &["f f {}"]),
        ("hermes", "<tool_call>{\"name\": \"f\", \"arguments\": null}</tool_call>", &["f f {}"]),
        ("hermes", "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>", &["f f {\"a\": 1}"]),
        (
            "hermes",
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [1}</tool_call> So",
            &["f f {\"a\": [1}", "c:} So"],
        ),
        (
            "hermes",
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}</tool_call> So",
            &["f f {\"a\": 1}", "c: So"],
        ),
        ("hermes", "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": x}}", &["f f {\"a\": ", "c:x}}"]),
        ("hermes", "<tool_ca", &["c:<tool_ca"]),
        ("hermes", "a < b <tool> \n", &["c:a < b <tool> \n"]),
        ("llama3", "{\"name\": \"f\", \"parameters\": {\"a\": \"é\"}}", &["f f {\"a\": \"é\"}"]),
        (
            "llama3",
            "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {}}",
            &["f f {}", "f g {}"],
        ),
        ("llama3", "{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}", &["f f {}"]),
        ("llama3", "{\"city\": \"Rome\"}", &["c:{\"city\": \"Rome\"}"]),
        ("llama3", "{\"name\": \"Rome\", \"age\": 2700}", &["c:{\"name\": \"Rome\", \"age\": 2700}"]),
        (
            "llama3",
            " The object {\"name\": \"f\", \"parameters\": {}}",
            &["c: The object {\"name\": \"f\", \"parameters\": {}}"],
        ),
        ("llama3", "<|python_tag|>print(1)", &["c:print(1)"]),
        ("mistral", "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 1}}]", &["f f {\"a\": 1}"]),
        (
            "mistral",
            "Well. [TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"g\", \"arguments\": {\"\
             l\": []}, \"id\": \"123456789\"}]",
            &["c:Well.", "f f {}", "f g {\"l\": []}"],
        ),
        ("mistral", "[TOOL_CALLS]nothing", &["c:nothing"]),
        (
            "mistral2",
            "[TOOL_CALLS]f[ARGS]{\"a\": {}}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}",
            &["f f {\"a\": {}}", "f g {}"],
        ),
        ("mistral2", "[TOOL_CALLS]f{\"a\": 1}", &["f f {\"a\": 1}"]),
        ("mistral2", "[TOOL_CALLS]two words", &["c:two words"]),
        ("mistral2", "[1] and [TOOL", &["c:[1] and [TOOL"]),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hello <thin\
             k><|return|>",
            &["r:hm", "c:Hello <think>"],
        ),
        (
            "harmony",
            "<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant<|channel|>commentary to=functio\
             ns.f <|constrain|>json<|message|>{\"a\": \"b\"} \n<|call|>",
            &["c:I ask.", "f f {\"a\": \"b\"}"],
        ),
        ("harmony", " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", &["f f {}"]),
        ("harmony", "<|channel|>commentary to=functions.f<|constrain|>json<|message|>none<|call|>", &["c:none"]),
        ("harmony", "<|channel|>commentary to=python<|message|>{}<|call|>", &["c:{}"]),
        ("harmony", "<|channel|>analysis to=python<|message|>1+1<|call|>", &["r:1+1"]),
        ("harmony", "No header", &["c:No header"]),
        ("harmony", "to be", &["c:to be"]),
        ("harmony", "<|channel|>final", &[]),
        ("harmony", "<|channel|>final<|message|>a<|end|><|end|>b<|message|>c<|start|>assistant<|start|>", &["c:abc"]),
    ];
    for (name, text, expected) in cases {
        let tokenizer = tokenizer_of(name);
        let prompt = if *name == "harmony" { tokenizer.encode_plain("<|start|>assistant").unwrap() } else { vec![] };
        for size in 1..=text.chars().count() {
            for hidden in [true, false] {
                let pieces = pieces(&tokenizer, text, size, hidden);
                let found = divided(Some(format(name)), &tokenizer, &prompt, &pieces);
                assert_eq!(found, *expected, "{name}: {text} in pieces of {size}");
            }
        }
    }
}

#[test]
fn reasoning_is_separated_without_tools_and_calls_are_content() {
    let cases: &[(&str, &[&str])] = &[
        ("<think>\nhm\n</think>\n\nYes", &["r:\nhm\n", "c:Yes"]),
        (" \n<think>a</thin</think>b</think>", &["r:a</thin", "c:b</think>"]),
        ("No <think>x</think>", &["c:No <think>x</think>"]),
        ("<thin", &["c:<thin"]),
        ("<think>never ends </th", &["r:never ends </th"]),
        ("<think></think>", &[]),
        ("", &[]),
        ("{\"name\": \"f\", \"parameters\": {}}", &["c:{\"name\": \"f\", \"parameters\": {}}"]),
    ];
    let plain = tokenizer(&[], &[]);
    for (text, expected) in cases {
        for size in 1..=text.chars().count().max(1) {
            assert_eq!(divided(None, &plain, &[], &pieces(&plain, text, size, true)), *expected, "{text} by {size}");
        }
    }
    let harmony = tokenizer_of("harmony");
    let call = "<|channel|>commentary to=functions.f<|message|>{}<|call|>";
    assert_eq!(divided(None, &harmony, &[], &pieces(&harmony, call, 3, true)), ["c:{}"]);
}

#[test]
fn tags_may_be_hidden_tokens_or_stand_in_the_prompt() {
    let tokenizer = tokenizer(&["<think>", "</think>"], &[]);
    let tags = [tokenizer.id("<think>").unwrap(), tokenizer.id("</think>").unwrap()];
    let expected = ["r:hm", "c:Yes"];
    assert_eq!(divided(None, &tokenizer, &[], &[(tags[0], ""), (9, "hm"), (tags[1], ""), (9, "Yes")]), expected);
    let shown = [(tags[0], "<think>"), (9, "hm"), (tags[1], "</think>"), (9, "Yes")];
    assert_eq!(divided(None, &tokenizer, &[], &shown), expected);
    let prompt = tokenizer.encode_plain("Hi <think>\n").unwrap();
    assert_eq!(divided(None, &tokenizer, &prompt, &[(9, "hm</think>"), (9, "\n\nYes")]), expected);
    // Text that was held back comes with the token that ends the output.
    assert_eq!(divided(None, &tokenizer, &prompt, &[(9, "h"), (tags[1], "m")]), ["r:hm"]);
}

#[test]
fn a_message_of_the_prompt_is_continued() {
    let tokenizer = tokenizer_of("harmony");
    let harmony = Some(format("harmony"));
    let end = tokenizer.id("<|end|>").unwrap();
    for (prompt, expected) in [
        ("<|start|>assistant<|channel|>final<|message|>The sky", "c: is blue"),
        ("<|start|>assistant<|channel|>analysis<|message|>The sky", "r: is blue"),
        ("<|start|>assistant", "c: is blue"),
        ("The sky", "c: is blue"),
    ] {
        let ids = tokenizer.encode_plain(prompt).unwrap();
        assert_eq!(divided(harmony, &tokenizer, &ids, &[(9, " is"), (end, " blue")]), [expected], "{prompt}");
    }
}

#[test]
fn ids_of_calls_have_the_form_that_templates_accept() {
    let id = |name: &str, text: &str, seed| {
        let tokenizer = tokenizer_of(name);
        let style = OutputStyle::without_template(&tokenizer).with(Some(format(name)));
        let mut parser = OutputParser::new(&style, &functions(&["f"]), &tokenizer, &[], seed);
        let mut events = Vec::new();
        parser.push(u32::MAX, text, &mut events);
        let OutputEvent::CallBegin { id, .. } = &events[0] else { panic!("{events:?}") };
        id.clone()
    };
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {}}";
    let long = id("hermes", call, 1);
    assert!(long.starts_with("call_") && long.len() == 29, "{long}");
    assert_eq!(long, id("hermes", call, 1));
    assert_ne!(long, id("hermes", call, 2));
    let short = id("mistral2", "[TOOL_CALLS]f{}", 1);
    assert!(short.len() == 9 && short.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{short}");
}

#[test]
fn formats_are_found_by_the_template_and_the_tokenizer() {
    let plain = tokenizer(&[], &[]);
    let found = |source: &str, tokenizer: &Tokenizer| {
        Format::of(&ChatTemplate::from_source(source), tokenizer).map(Format::name)
    };
    let reads = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}";
    let hermes = format!("{reads}<tool_call>{{\"name\": <name>, \"arguments\": <json>}}</tool_call>");
    assert_eq!(found(&hermes, &plain), Some("hermes"));
    assert_eq!(found(&hermes.replace(reads, ""), &plain), None, "it has no place for tools");
    assert_eq!(found(&format!("{hermes}<function=f>"), &plain), Some("functionary-3.1"));
    assert_eq!(found(&format!("{hermes}<function=f><parameter=a>"), &plain), Some("qwen3-coder"));
    let llama = format!("{reads}Environment: ipython {{\"name\": name, \"parameters\": values}}");
    assert_eq!(found(&llama, &plain), Some("llama3"));
    assert_eq!(found(&format!("{reads}[TOOL_CALLS]"), &plain), Some("mistral"));
    let harmony = format!("{reads}<|channel|>");
    assert_eq!(found(&harmony, &tokenizer_of("harmony")), Some("harmony"));
    assert_eq!(found(&harmony, &plain), None, "the tokenizer has no such tokens");
    assert_eq!(found(reads, &plain), None);
}

#[test]
fn tools_that_are_not_functions_are_refused_by_place() {
    let function = |function: Value| json!({"type": "function", "function": function});
    let good = json!([
        function(json!({"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": true})),
        function(json!({"name": "g.h-i_2"}))
    ]);
    let tools = parse_tools(&good).unwrap();
    assert_eq!((tools[0].strict, tools[0].description.as_deref()), (Some(true), Some("d")));
    assert_eq!((tools[1].name.as_str(), &tools[1].parameters), ("g.h-i_2", &None));
    let many: Vec<Value> = (0..129).map(|i| function(json!({"name": format!("f{i}")}))).collect();
    for (bad, expected) in [
        (json!({}), "expected an array"),
        (json!([{"type": "web_search"}]), "tools[0].type"),
        (json!([function(json!({}))]), "tools[0].function.name"),
        (json!([function(json!({"name": "a b"}))]), "\"a b\""),
        (json!([function(json!({"name": "f"})), function(json!({"name": "f"}))]), "tools[1].function.name"),
        (json!([function(json!({"name": "f", "parameters": []}))]), "tools[0].function.parameters"),
        (json!(many), "129 entries"),
    ] {
        let error = parse_tools(&bad).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let parse = |choice: Value| ToolChoice::parse(Some(&choice), &tools);
    assert_eq!(parse(json!("auto")).unwrap(), ToolChoice::Auto);
    assert_eq!(parse(json!(null)).unwrap(), ToolChoice::Auto);
    assert_eq!(parse(json!("none")).unwrap(), ToolChoice::None);
    assert_eq!(parse(json!({"type": "function", "function": {"name": "f"}})).unwrap(), ToolChoice::Named("f".into()));
    assert_eq!(ToolChoice::parse(None, &[]).unwrap(), ToolChoice::None);
    for bad in [json!("any"), json!({"type": "function", "function": {"name": "x"}}), json!(1)] {
        assert!(parse(bad).unwrap_err().to_string().contains("tool_choice"));
    }
    assert!(ToolChoice::parse(Some(&json!("required")), &[]).is_err());
}

fn two_tools() -> Vec<Tool> {
    let city = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
        "additionalProperties": false});
    let tool = |name: &str, parameters| Tool { name: name.into(), description: None, parameters, strict: None };
    vec![tool("weather", Some(city)), tool("weather_now", None)]
}

/// Returns the constraint of an output in the format of Hermes.
pub(super) fn hermes(
    tokenizer: &Tokenizer,
    tools: &[Tool],
    choice: &ToolChoice,
    enforced: Enforced,
) -> crate::error::Result<Option<CallConstraint>> {
    let style = OutputStyle::without_template(tokenizer).with(Some(format("hermes")));
    constraint(&style, tokenizer, &[], tools, Wanted { choice, parallel: true, answer: None, enforced })
}

/// A constraint with its tokenizer.
struct Constrained {
    tokenizer: Tokenizer,
    prompt: Vec<u32>,
    format: Format,
    constraint: Constraint,
}

impl Constrained {
    fn new(name: &str, prompt: &str, choice: &ToolChoice, parallel: bool) -> Constrained {
        let tokenizer = tokenizer_of(name);
        let prompt = tokenizer.encode_plain(prompt).unwrap();
        let format = format(name);
        let style = OutputStyle::without_template(&tokenizer).with(Some(format));
        let wanted = Wanted { choice, parallel, answer: None, enforced: Enforced::All };
        let calls = constraint(&style, &tokenizer, &prompt, &two_tools(), wanted);
        let source = calls.unwrap().unwrap().source;
        let vocabulary = Arc::new(Vocabulary::new(tokenizer.spelling(tokenizer_rows(&tokenizer)).unwrap()).unwrap());
        let constraint = Constraint::compile(&source, &vocabulary).unwrap();
        Constrained { tokenizer, prompt, format, constraint }
    }

    /// Returns the text that is allowed, and whether it may end there.
    fn follow(&self, text: &str) -> (String, bool) {
        let mut state = self.constraint.start();
        let mut allowed = Vec::new();
        for id in self.tokenizer.encode_plain(text).unwrap() {
            if !state.is_free() && !state.mask().unwrap().allows(id) {
                return (self.tokenizer.decode(&allowed, false).unwrap(), false);
            }
            state.accept(id).unwrap();
            allowed.push(id);
            if state.is_complete() {
                break;
            }
        }
        let ends = state.is_free() || state.mask().unwrap().ends();
        (self.tokenizer.decode(&allowed, false).unwrap(), ends)
    }
}

pub(super) fn tokenizer_rows(tokenizer: &Tokenizer) -> usize {
    (0..).take_while(|id| tokenizer.token(*id).is_some()).count()
}

#[test]
fn calls_that_a_model_decides_on_follow_the_schemas_of_the_tools() {
    let good: &[(&str, &str)] = &[
        ("hermes", "It is {\"a\": 1} <tool> and"),
        (
            "hermes",
            "<think>I <tool_call>x</think>I ask.<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"cit\
             y\": \"Rome\"}}\n</tool_call>",
        ),
        (
            "hermes",
            "<tool_call>\n{\"name\": \"weather_now\", \"arguments\": {}}\n</tool_call> and <tool_call>\n{\"n\
             ame\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>",
        ),
        (
            "llama3",
            "{\"name\": \"weather\", \"parameters\": {\"city\": \"Rome\"}}; {\"name\": \"weather_now\", \"pa\
             rameters\": {}}",
        ),
        ("llama3", "{\"name\": \"Bob\", \"age\": 3}"),
        ("llama3", "{\"name\": \"weather_no"),
        ("llama3", "{\"city\": \"Paris\"} <|python_tag|>{\"name\": \"weather_now\", \"parameters\": {}}"),
        (
            "mistral",
            "Well [1] [TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}, {\"name\"\
             : \"weather_now\", \"arguments\": {}}]",
        ),
        ("mistral2", "[TOOL_CALLS]weather[ARGS]{\"city\": \"Rome\"}[TOOL_CALLS]weather_now[ARGS]{}"),
        (
            "harmony",
            "<|channel|>analysis<|message|>x to=functions.y<|end|><|start|>assistant<|channel|>commentary to\
             =functions.weather <|constrain|>json<|message|>{\"city\": \"Rome\"}",
        ),
        ("harmony", " to=functions.weather_now<|channel|>commentary <|constrain|>json<|message|>{}"),
        ("harmony", "<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant<|channel|>final<|message|>Hi"),
    ];
    for (name, text) in good {
        let constrained = Constrained::new(name, "", &ToolChoice::Auto, true);
        assert_eq!(constrained.follow(text), (text.to_string(), true), "{name}");
    }
    let bad: &[(&str, &str, &str)] = &[
        ("hermes", "So <tool_call>\n{\"name\": \"", "other"),
        ("hermes", "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"", "Paris"),
        ("hermes", "<tool_call>\n{\"name\": \"weather_now\", \"arguments\": {", "\"a\": 1}"),
        ("llama3", "{\"name\":\"weather_now\", \"parameters\": {", "\"a\""),
        ("llama3", "x <|python_tag|>", "print"),
        ("mistral", "[TOOL_CALLS][{\"name\": \"", "x"),
        ("mistral2", "[TOOL_CALLS]weather", "x"),
        ("harmony", "<|channel|>", "other"),
        ("harmony", "<|channel|>commentary to=functions.weather", "x"),
        ("harmony", "<|channel|>analysis<|message|>hm<|end|><|start|>", "user"),
    ];
    for (name, before, after) in bad {
        let constrained = Constrained::new(name, "", &ToolChoice::Auto, true);
        let (found, _) = constrained.follow(&format!("{before}{after}"));
        assert!(found.len() < before.len() + after.len() && found.len() + 4 >= before.len(), "{name}: {found}");
    }
}

#[test]
fn required_calls_come_first_but_for_reasoning() {
    let named = ToolChoice::Named("weather_now".into());
    let rome = "\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
    let now = "\"name\": \"weather_now\", \"arguments\": {}}\n</tool_call>";
    let (rome, now) = (&format!("<tool_call>\n{{{rome}"), &format!("<tool_call>\n{{{now}"));
    let good: &[(&str, &str, &ToolChoice, bool, &str)] = &[
        ("hermes", "", &ToolChoice::Required, false, rome),
        ("hermes", "", &ToolChoice::Required, true, &format!("{rome}\n{now}")),
        ("hermes", "", &named, true, now),
        ("hermes", "", &named, true, &format!("<think>hm</think>\n\n{now}")),
        ("hermes", "Hi <think>\n", &named, true, &format!("hm</think>\n\n{now}")),
        ("hermes", "Hi <think>\n\n</think>\n\n", &named, true, now),
        ("llama3", "", &named, false, "{\"name\": \"weather_now\", \"parameters\": {}}"),
        ("mistral", "", &named, false, "[TOOL_CALLS][{\"name\": \"weather_now\", \"arguments\": {}}]"),
        ("mistral2", "", &named, false, "[TOOL_CALLS]weather_now[ARGS]{}"),
        (
            "harmony",
            "",
            &named,
            false,
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.weat\
             her_now <|constrain|>json<|message|>{}",
        ),
    ];
    for (name, prompt, choice, parallel, text) in good {
        let constrained = Constrained::new(name, prompt, choice, *parallel);
        assert_eq!(constrained.follow(text), (text.to_string(), true), "{name} {choice:?}");
    }
    let bad: &[(&str, &str, &ToolChoice, bool, &str, &str)] = &[
        ("hermes", "", &ToolChoice::Required, true, "", "I ask"),
        ("hermes", "", &named, true, "<tool_call>\n{\"name\": \"weather", "\","),
        ("hermes", "", &named, false, now, "<tool_call>"),
        ("hermes", "", &named, true, "<think>hm</think>\n", "No"),
        ("hermes", "<think>\n\n</think>\n\n", &named, true, "", "<think>"),
        ("llama3", "", &named, false, "", "The"),
        ("mistral2", "", &named, false, "[TOOL_CALLS]weather_now[ARGS]{}", "[TOOL_CALLS]"),
        ("harmony", "", &named, false, "<|channel|>", "final"),
    ];
    for (name, prompt, choice, parallel, before, after) in bad {
        let constrained = Constrained::new(name, prompt, choice, *parallel);
        let (found, ends) = constrained.follow(&format!("{before}{after}"));
        assert!(found.len() < before.len() + after.len(), "{name}: {found}");
        assert!(!ends || before.contains("{}"), "{name}: {before}");
    }
    for (name, text) in [("hermes", "<think>hm"), ("harmony", "<|channel|>analysis<|message|>a")] {
        assert_eq!(Constrained::new(name, "", &named, true).follow(text), (text.into(), false), "it has no call");
    }
}

#[test]
fn random_tokens_under_a_constraint_are_calls_that_the_parser_finds() {
    let mut rng = Rng::new(3);
    for name in ["hermes", "llama3", "mistral", "mistral2"] {
        let constrained = Constrained::new(name, "", &ToolChoice::Required, false);
        let rows = tokenizer_rows(&constrained.tokenizer) as u32;
        let mut calls = 0;
        for _ in 0..40 {
            let (mut state, mut stream) = (constrained.constraint.start(), TextStream::new(true));
            let style = OutputStyle::without_template(&constrained.tokenizer).with(Some(constrained.format));
            let mut parser = OutputParser::new(&style, &two_tools(), &constrained.tokenizer, &constrained.prompt, 1);
            let mut events = Vec::new();
            for _ in 0..200 {
                let mask = state.mask().unwrap();
                let allowed: Vec<u32> = (0..rows).filter(|id| mask.allows(*id)).collect();
                let Some(id) = allowed.get(rng.next_u64() as usize % allowed.len().max(1)).copied() else { break };
                state.accept(id).unwrap();
                parser.push(id, &stream.push(&constrained.tokenizer, id).unwrap(), &mut events);
                if state.is_complete() {
                    break;
                }
            }
            parser.finish(false, &mut events);
            if !state.is_complete() {
                continue;
            }
            let shown = shown(&events);
            // Reasoning may come before the call.
            let (call, before) = shown.split_last().unwrap();
            assert!(before.iter().all(|part| part.starts_with("r:")), "{name}: {shown:?}");
            let valid = ["f weather {", "f weather_now {"].iter().any(|begin| call.starts_with(begin));
            let arguments: Value = serde_json::from_str(&call[call.find('{').unwrap()..]).unwrap();
            let of_weather = call.starts_with("f weather {");
            assert!(valid && (arguments["city"].is_string() == of_weather), "{name}: {call}");
            calls += 1;
        }
        assert!(calls > 5, "{name}: {calls}");
    }
}

#[test]
fn free_text_needs_no_mask() {
    for name in ["hermes", "llama3", "mistral", "mistral2", "harmony"] {
        let constrained = Constrained::new(name, "", &ToolChoice::Auto, true);
        let mut state = constrained.constraint.start();
        let header = if name == "harmony" { "<|channel|>final<|message|>" } else { "" };
        for id in constrained.tokenizer.encode_plain(header).unwrap() {
            state.accept(id).unwrap();
        }
        for id in constrained.tokenizer.encode_plain("The sky is [1] {blue} <b>today</b>.").unwrap() {
            assert!(state.is_free(), "{name}");
            state.accept(id).unwrap();
        }
    }
}

#[test]
fn schemas_that_cannot_be_enforced_are_left_out_or_refused_by_the_name_of_the_tool() {
    let tokenizer = tokenizer_of("hermes");
    let mut deep = json!({"type": "string"});
    for _ in 0..70 {
        deep = json!({"type": "array", "items": deep});
    }
    for (parameters, expected, left_out) in [
        (json!({"type": "array"}), "\"array\"", "#"),
        (json!({"type": "object", "not": {}}), "`not`", "#/not"),
        (json!({"type": "object", "properties": {"a": deep}}), "depth of more than 64", "#/properties/a/items"),
        (json!({"$ref": "http://example.com"}), "example.com", "#/$ref"),
        (json!({"type": "object", "description": "x".repeat(300_000)}), "bytes", "#"),
    ] {
        let made = |strict| {
            let tool = |name: &str, parameters| Tool { name: name.into(), description: None, parameters, strict };
            let tools = [tool("other", None), tool("f", Some(parameters.clone()))];
            hermes(&tokenizer, &tools, &ToolChoice::Auto, Enforced::All)
        };
        let error = made(Some(true)).unwrap_err();
        assert_eq!(error.tensor_name(), Some("tools[1]"));
        assert!(error.to_string().contains(expected), "{error}");
        for strict in [None, Some(false)] {
            let ignored = made(strict).unwrap().unwrap().ignored;
            let [(1, place)] = ignored.as_slice() else { panic!("{ignored:?}") };
            assert!(place.starts_with(left_out), "{place}");
        }
    }
    let made = |choice| hermes(&tokenizer, &two_tools(), &choice, Enforced::All).unwrap();
    assert_eq!(made(ToolChoice::None), None);
    let auto = made(ToolChoice::Auto).unwrap();
    assert!(matches!(auto.source, ConstraintSource::Phases(_)) && auto.ignored.is_empty());
}

#[test]
fn long_lists_of_tools_lose_the_largest_schemas_that_are_not_strict() {
    let tokenizer = tokenizer_of("hermes");
    let tool = |i: usize| {
        let properties: serde_json::Map<String, Value> = (0..60 * i)
            .map(|p| {
                (format!("a name of many words {} {p}", "x ".repeat(12)), json!({"type": "string", "description": "d"}))
            })
            .collect();
        let parameters = Some(json!({"type": "object", "properties": properties}));
        Tool { name: format!("f{i}"), description: None, parameters, strict: Some(i == 14) }
    };
    let tools: Vec<Tool> = (0..16).map(tool).collect();
    let made = |tools: &[Tool], enforced| hermes(&tokenizer, tools, &ToolChoice::Auto, enforced);
    let ignored = made(&tools, Enforced::All).unwrap().unwrap().ignored;
    assert!(ignored.iter().any(|(tool, _)| *tool == 15) && !ignored.iter().any(|(tool, _)| *tool == 14 || *tool < 8));
    let free = made(&tools, Enforced::Strict).unwrap().unwrap().ignored;
    assert_eq!(free.len(), 15);
    let strict: Vec<Tool> = tools.into_iter().map(|tool| Tool { strict: Some(true), ..tool }).collect();
    assert!(made(&strict, Enforced::All).unwrap_err().to_string().contains("bytes of rules"));
}

#[test]
fn the_output_ends_behind_a_call_that_was_required() {
    struct Case(&'static str, &'static str, &'static str);
    // The format, a complete call, and the beginning of another one behind it.
    let cases = [
        Case(
            "hermes",
            "<tool_call>\n{\"name\": \"weather_now\", \"arguments\": {}}\n</tool_call>",
            "\n<tool_call>\n{\"name\": \"weather_now\", \"arguments\": {}}\n</tool_call>",
        ),
        Case(
            "llama3",
            "{\"name\": \"weather_now\", \"parameters\": {}}",
            "; {\"name\": \"weather_now\", \"parameters\": {}}",
        ),
        Case(
            "mistral",
            "[TOOL_CALLS][{\"name\": \"weather_now\", \"arguments\": {}}",
            ", {\"name\": \"weather_now\", \"arguments\": {}}",
        ),
        Case("mistral2", "[TOOL_CALLS]weather_now[ARGS]{}", "[TOOL_CALLS]weather_now[ARGS]{}"),
        Case("harmony", "<|channel|>commentary to=functions.weather_now<|message|>{}", ""),
    ];
    let named = ToolChoice::Named("weather_now".into());
    for Case(name, call, other) in cases {
        let list = if name == "mistral" { "]" } else { "" };
        for (choice, parallel) in [(&ToolChoice::Required, true), (&ToolChoice::Required, false), (&named, true)] {
            let constrained = Constrained::new(name, "", choice, parallel);
            let one = format!("{call}{list}");
            assert_eq!(constrained.follow(&one), (one.clone(), true), "{name}");
            // No other text follows.
            let chatty = constrained.follow(&format!("{one} It is done."));
            assert!(chatty.0.trim_end() == one, "{name}: {chatty:?}");
            let several = format!("{call}{other}{list}");
            let allowed = constrained.follow(&several).0;
            let expected = if parallel && *choice == ToolChoice::Required { &several } else { &one };
            assert!(allowed == *expected || name == "mistral" && allowed == call, "{name}: {allowed}");
        }
    }
}

proptest! {
    #[test]
    fn any_pieces_are_accepted_and_no_marker_is_content(
        name in proptest::sample::select(vec!["hermes", "llama3", "mistral", "mistral2", "harmony"]),
        with_tools in any::<bool>(),
        hidden in any::<bool>(),
        words in proptest::collection::vec(0..26usize, 0..30),
        size in 1..40usize,
    ) {
        const WORDS: [&str; 26] = [
            "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|start|>",
            "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "assistant",
            " to=functions.f", "commentary", "analysis", "{\"name\": \"f\", ", "\"arguments\": ", "{}", "}", "{", "\"",
            ",", " ", "é",
        ];
        let tokenizer = tokenizer_of(name);
        let text: String = words.iter().map(|word| WORDS[*word]).collect();
        let pieces = pieces(&tokenizer, &text, size, hidden);
        let format = Some(format(name)).filter(|_| with_tools);
        let found = divided(format, &tokenizer, &[], &pieces);
        let markers = match name {
            "harmony" => &HARMONY[..],
            "hermes" => &["<tool_call>", "</tool_call>"],
            "llama3" => &MARKERS[..1],
            "mistral" | "mistral2" => &MARKERS[1..],
            _ => &[],
        };
        for content in found.iter().filter(|part| part.starts_with("c:") && (with_tools || name == "harmony")) {
            prop_assert!(!markers.iter().any(|marker| content.contains(marker)), "{name}: {text}: {found:?}");
        }
        // Pieces of another size are divided in the same way.
        let hides = hidden != with_tools;
        let whole = divided(format, &tokenizer, &[], &self::pieces(&tokenizer, &text, usize::MAX, hides));
        prop_assert_eq!(found, whole, "{}: {}", name, text);
    }

    #[test]
    fn any_tokens_are_accepted(ids in proptest::collection::vec(0..700u32, 0..60), name in 0..5usize) {
        let name = ["hermes", "llama3", "mistral", "mistral2", "harmony"][name];
        let tokenizer = tokenizer_of(name);
        let mut stream = TextStream::new(true);
        let pieces: Vec<(u32, String)> =
            ids.iter().map(|id| (*id, stream.push(&tokenizer, *id).unwrap())).collect();
        let pieces: Vec<(u32, &str)> = pieces.iter().map(|(id, text)| (*id, text.as_str())).collect();
        divided(Some(format(name)), &tokenizer, &[], &pieces);
    }
}
