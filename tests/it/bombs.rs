//! Tests small inputs that would cause large costs: memory, time, nesting depth, or output that controls the
//! terminal.

use crate::checkpoint::{copy_of, edit_header};
use crate::common::{fixture, iec, packed};
use iec::convert::Checkpoint;
use iec::convert::source::shards::Shards;
use iec::iebin::IebinReader;
use iec::manifest::Manifest;
use serde_json::{Value, json};
use std::path::Path;

/// Runs `iec run` with a chat template, which must fail with exit code 1, and returns its message.
fn template_is_refused(pack: &Path, template: &str) -> String {
    std::fs::write(pack.join("chat_template.jinja"), template).unwrap();
    let mut run = iec();
    run.args(["run", "--template", "auto", "--prompt", "x", "--max-new", "1", "--model-dir"]).arg(pack);
    let stderr = run.assert().code(1).get_output().stderr.clone();
    String::from_utf8(stderr).unwrap()
}

#[test]
fn templates_that_eat_memory_time_or_stack_are_stopped() {
    let pack = packed("stories260k");
    for (what, template, expected) in [
        (
            "a string that doubles",
            "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
            "steps",
        ),
        (
            "captured output that doubles",
            "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}\
             {% set ns.s = t %}{% endfor %}",
            "steps",
        ),
        (
            "lists within lists",
            "{% set ns = namespace(l=['x']) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
            "steps",
        ),
        (
            "text multiplied while it is compiled",
            &format!("{{{{ {} }}}}", vec!["'a' * 99999999"; 40].join(" ~ ")),
            "steps",
        ),
        ("replacements", "{{ ('a' * 90000000) | replace('a', 'b' * 90000000) }}", "steps"),
        (
            "lists within lists as text",
            "{% set ns = namespace(l=['x']) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}\
             {{ ns.l ~ '' }}",
            "exceeded its limits",
        ),
        (
            "a loop without end",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "the chat template",
        ),
        (
            "60 MB of output",
            "{% for i in range(600) %}{{ 'x' * 100000 }}{% endfor %}",
            "makes a prompt of more than 4608 bytes",
        ),
        ("a macro that calls itself", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template"),
    ] {
        let said = template_is_refused(pack.path(), template);
        assert!(said.contains(expected) && said.contains("chat_template.jinja"), "{what}: {said}");
        assert!(said.len() < 1500 && said.lines().count() <= 2, "{what}: {said}");
    }
}

/// Command line of a shell that limits the address space to 1 GiB.
const WITHIN_1_GIB: [&str; 3] = ["-c", "ulimit -v 1048576; exec \"$@\"", "bash"];

/// Runs `iec` within 1 GiB and 20 seconds; returns its exit code and message, which is an error and a help line.
fn within_1_gib(arguments: &[&str], paths: [(&str, &Path); 2]) -> (i32, String) {
    let mut command = std::process::Command::new("bash");
    command.args(WITHIN_1_GIB).arg(env!("CARGO_BIN_EXE_iec")).args(arguments);
    for (option, path) in paths {
        command.arg(option).arg(path);
    }
    let begin = std::time::Instant::now();
    let output = command.output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(begin.elapsed().as_secs() < 20, "{:?}: {stderr}", begin.elapsed());
    assert!(stderr.lines().count() <= 2 && stderr.len() < 1500, "{stderr}");
    (output.status.code().unwrap_or(-1), stderr)
}

/// Returns a tokenizer.json with these parts instead of its own.
fn tokenizer_with(parts: Value) -> String {
    let mut tokenizer: Value =
        serde_json::from_slice(&std::fs::read(fixture("stories260k").join("tokenizer.json")).unwrap()).unwrap();
    for (key, value) in parts.as_object().unwrap() {
        tokenizer[key] = value.clone();
    }
    tokenizer.to_string()
}

#[test]
fn tokenizers_that_explode_are_refused_when_they_are_packed_and_when_they_are_run() {
    let replace =
        |pattern: &str, content: &str| json!({"type": "Replace", "pattern": {"String": pattern}, "content": content});
    let normalizers =
        |step: Value, count: usize| json!({"normalizer": {"type": "Sequence", "normalizers": vec![step; count]}});
    let decoders = |step: Value, count: usize| json!({"decoder": {"type": "Sequence", "decoders": vec![step; count]}});
    let special = json!({"x": {"id": "x", "ids": vec![1; 10_000], "tokens": vec!["a"; 10_000]}});
    let pieces = vec![json!({"SpecialToken": {"id": "x", "type_id": 0}}); 100_000];
    let template = json!({"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": special});
    let slow = json!({"type": "Split", "pattern": {"Regex": "(a+)+(?!b)"}, "behavior": "Isolated", "invert": false});
    let cases = [
        (normalizers(replace("a", &"a".repeat(3000)), 3), "normalizer.normalizers[0]: found texts that grow"),
        (normalizers(replace("a", "aa"), 24), "normalizer.normalizers[7]: found texts that grow"),
        (
            normalizers(json!({"type": "Prepend", "prepend": "x".repeat(100_000)}), 400),
            "normalizers[0].prepend: found 100000 bytes",
        ),
        (
            json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/".repeat(4000)}}),
            "normalizer.precompiled_charsmap: found a precompiled_charsmap that is not base64 or ends too early",
        ),
        (decoders(replace("e", &"e".repeat(1000)), 4), "decoder.decoders[0]: found texts that grow"),
        (decoders(replace("a", "aa"), 40), "decoder.decoders[4]: found texts that grow"),
        (json!({"post_processor": template}), "too many values"),
        (json!({"pre_tokenizer": slow}), "pre_tokenizer.pattern: found a pattern that backtracks"),
    ];
    let (pack, files) = (packed("stories260k"), tempfile::tempdir().unwrap());
    let checkpoint = copy_of("stories260k");
    let tokenizer = files.path().join("hostile.json");
    for (parts, expected) in cases {
        std::fs::write(&tokenizer, tokenizer_with(parts)).unwrap();
        let run = ["run", "--prompt", "abc", "--max-new", "8", "--ignore-eos"];
        let (code, said) = within_1_gib(&run, [("--model-dir", pack.path()), ("--tokenizer", &tokenizer)]);
        assert!(code == 3 && said.contains(expected) && said.contains("hostile.json"), "run: {code}: {said}");
        std::fs::copy(&tokenizer, checkpoint.path().join("tokenizer.json")).unwrap();
        let out = files.path().join("out");
        let (code, said) = within_1_gib(&["pack"], [("--hf-dir", checkpoint.path()), ("--out-dir", &out)]);
        assert!(code == 1 && said.contains(expected) && said.contains("tokenizer.json"), "pack: {code}: {said}");
        assert!(!out.join("model.ie.json").exists(), "{expected}");
    }
}

#[test]
fn ids_of_two_tokens_and_ids_without_weights_are_refused_when_they_are_packed_and_when_they_are_run() {
    let text = tokenizer_with(json!({}));
    let (pack, files) = (packed("stories260k"), tempfile::tempdir().unwrap());
    let (checkpoint, tokenizer) = (copy_of("stories260k"), files.path().join("hostile.json"));
    for (id, expected) in
        [("303", "model.vocab: found two tokens with the id 303"), ("5000", "model.vocab: found the token id 5000")]
    {
        let ent = text.split("\"ent\":").nth(1).unwrap().split(',').next().unwrap();
        std::fs::write(&tokenizer, text.replace(&format!("\"ent\":{ent},"), &format!("\"ent\":{id},"))).unwrap();
        let run = ["run", "--prompt", "abc", "--max-new", "1"];
        let (code, said) = within_1_gib(&run, [("--model-dir", pack.path()), ("--tokenizer", &tokenizer)]);
        assert!(code == 3 && said.contains(expected), "run: {code}: {said}");
        std::fs::copy(&tokenizer, checkpoint.path().join("tokenizer.json")).unwrap();
        let out = files.path().join("out");
        let (code, said) = within_1_gib(&["pack"], [("--hf-dir", checkpoint.path()), ("--out-dir", &out)]);
        assert!(code == 1 && said.contains(expected), "pack: {code}: {said}");
    }
}

#[test]
fn prompts_and_templates_beyond_the_context_are_refused_before_they_are_tokenized() {
    let (pack, prompts) = (packed("stories260k"), tempfile::NamedTempFile::new().unwrap());
    std::fs::write(prompts.path(), "a".repeat(60_000_000)).unwrap();
    let paths = [("--model-dir", pack.path()), ("--prompts-file", prompts.path())];
    let (code, said) = within_1_gib(&["run", "--max-new", "1"], paths);
    let expected = "found a prompt of 60000000 bytes, expected at most 4608 for the context of 512 tokens";
    assert!(code == 2 && said.contains(expected), "{code}: {said}");
    std::fs::write(pack.path().join("chat_template.jinja"), "{% for i in range(600) %}{{ 'x' * 100000 }}{% endfor %}")
        .unwrap();
    let paths = [("--model-dir", pack.path()), ("--template", Path::new("auto"))];
    let (code, said) = within_1_gib(&["run", "--prompt", "x", "--max-new", "1"], paths);
    assert!(code == 1 && said.contains("makes a prompt of more than 4608 bytes"), "{code}: {said}");
}

#[test]
fn a_template_that_contains_itself_does_not_bring_the_program_down() {
    let pack = packed("stories260k");
    let cycle = "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}{{ ns.a == ns }}{{ ns|tojson }}";
    template_is_refused(pack.path(), cycle);
}

#[test]
fn names_that_steer_terminals_or_never_end_are_shown_short_and_harmless() {
    let name = format!("\\u001b[2J\\r\\nerror: all is well\\u202e{}", "w".repeat(200_000));
    let dir = copy_of("llama3-rope-tied");
    edit_header(&dir.path().join("model.safetensors"), |header| header.replace("model.norm.weight", &name));
    let mut pack = iec();
    let out = tempfile::tempdir().unwrap();
    let output = pack.args(["pack", "--hf-dir"]).arg(dir.path()).arg("--out-dir").arg(out.path()).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.len() < 2000 && stderr.lines().count() <= 2, "{stderr}");
    assert!(!stderr.contains(['\u{1b}', '\r', '\u{202e}']), "{stderr:?}");
}

/// Replaces the file `name` of a pack or checkpoint by `text` and returns the error of opening it.
fn opened_with(name: &str, text: &str) -> String {
    let dir = if name == "model.ie.json" { packed("stories260k") } else { copy_of("llama-gqa") };
    std::fs::write(dir.path().join(name), text).unwrap();
    let error = match name {
        "model.ie.json" => IebinReader::open(dir.path()).map(drop),
        "manifest.json" => Manifest::load(&dir.path().join(name)).map(drop),
        "model.safetensors.index.json" => Shards::open(dir.path()).map(drop),
        _ => Checkpoint::open(dir.path()).map(drop),
    };
    error.expect_err(name).to_string()
}

const JSON: [&str; 5] =
    ["model.ie.json", "manifest.json", "model.safetensors.index.json", "config.json", "generation_config.json"];

#[test]
fn deep_nesting_is_refused_in_every_file() {
    for name in JSON {
        for text in [
            "[".repeat(1_000_000),
            "{\"a\":".repeat(1_000_000),
            "{\"tensors\":{\"a\":".to_string() + &"[".repeat(100_000),
        ] {
            let said = opened_with(name, &text);
            assert!(said.contains(name), "{said}");
        }
    }
}

#[test]
fn a_key_that_occurs_twice_is_refused_in_every_file() {
    for (name, text) in [
        ("config.json", r#"{"hidden_size": 96, "hidden_size": 64}"#),
        ("generation_config.json", r#"{"eos_token_id": 1, "eos_token_id": 2}"#),
        ("manifest.json", r#"{"version": 1, "version": 1}"#),
        ("manifest.json", r#"{"version": 1, "tensors": {"a": {}, "a": {}}}"#),
        ("model.ie.json", r#"{"version": 1, "version": 1, "tensors": []}"#),
        (
            "model.safetensors.index.json",
            r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "a": "model-00001-of-00002.safetensors"}}"#,
        ),
    ] {
        let said = opened_with(name, text);
        assert!(said.contains("twice") || said.contains("duplicate"), "{name}: {said}");
    }
}

#[test]
fn lists_that_grow_in_memory_are_refused() {
    let zeros = "0,".repeat(2_000_000);
    for (name, text, expected) in [
        ("config.json", format!("{{\"a\":[{zeros}0]}}"), "too many values"),
        ("manifest.json", format!("{{\"version\":1,\"a\":[{zeros}0]}}"), "too many values"),
        (
            "model.ie.json",
            format!(
                "{{\"tensors\":[{{\"name\":\"a\",\"dtype\":\"U8\",\"shape\":[{zeros}0],\"nbytes\":0,\"offset\":0}}]}}"
            ),
            "more than 8 dimensions",
        ),
    ] {
        let said = opened_with(name, &text);
        assert!(said.contains(expected), "{name}: {said}");
    }
    let dir = copy_of("llama3-rope-tied");
    edit_header(&dir.path().join("model.safetensors"), |header| {
        header.replacen("\"shape\":[", &format!("\"shape\":[{zeros}"), 1)
    });
    let said = Shards::open(dir.path()).unwrap_err().to_string();
    assert!(said.contains("more than 8 dimensions"), "{said}");
}

#[test]
fn numbers_below_zero_or_beyond_64_bits_are_refused() {
    for number in ["-1", "18446744073709551616", "1e30", "0.5", "\"7\""] {
        for (name, text) in [
            (
                "config.json",
                std::fs::read_to_string(copy_of("llama-gqa").path().join("config.json"))
                    .unwrap()
                    .replace("\"hidden_size\": 96", &format!("\"hidden_size\": {number}")),
            ),
            (
                "model.ie.json",
                format!(r#"{{"tensors":[{{"name":"a","dtype":"U8","shape":[{number}],"nbytes":1,"offset":0}}]}}"#),
            ),
            (
                "model.ie.json",
                format!(r#"{{"tensors":[{{"name":"a","dtype":"U8","shape":[1],"nbytes":1,"offset":{number}}}]}}"#),
            ),
            (
                "manifest.json",
                format!(
                    r#"{{"version":1,"tensors":{{"a":{{"rows":{number},"cols":32,"count":1,"keep":"bf16","verdict":"kept"}}}}}}"#
                ),
            ),
            ("manifest.json", format!(r#"{{"w":{{"rows":{number},"cols":32,"packed_bin":"a","scale_bin":"b"}}}}"#)),
        ] {
            let said = opened_with(name, &text);
            assert!(said.contains(name), "{number} in {name}: {said}");
        }
    }
}
