//! Reasoning, calls and constrained answers of known models, in every notation and at every endpoint: what the model
//! writes is known, so that every field on the wire is expected, whole and streamed.

use super::client::Server;
use super::known::{GO, KnownModel, serve};
use super::said::{Said, chat, chat_both, messages_both, responses_both};
use serde_json::{Value, json};

/// A text that a model writes, with what an answer then says.
struct Row {
    model: &'static str,
    text: &'static str,
    /// Fields of the request besides the messages.
    fields: Value,
    expected: Said,
}

fn row(model: &'static str, text: &'static str, fields: Value, expected: Said) -> Row {
    Row { model, text, fields, expected }
}

fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}});
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    json!([tool("f"), tool("delete_user")])
}

/// Returns a request for JSON with the integer `a`.
fn format_json() -> Value {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                        "additionalProperties": false});
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}})
}

fn with_tools() -> Value {
    json!({"tools": tools()})
}

/// Parts of a model, as [`MODELS`] lists them.
type About = (&'static str, &'static str, &'static [&'static str], &'static [&'static str], &'static str);

/// Models by their name: what the template writes about calls, special tokens, other tokens, and what it writes behind
/// the trigger.
const MODELS: &[About] = &[
    ("think-open", "", &[], &["<think>", "</think>"], "<think>\n"),
    ("think", "<think></think>", &[], &["<think>", "</think>"], ""),
    ("mistral-think", "", &["[THINK]", "[/THINK]"], &[], ""),
    (
        "harmony",
        "{# <|channel|> #}",
        &["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"],
        &["assistant"],
        "<|start|>assistant",
    ),
    ("llama3", "Environment: ipython {\"name\": n, \"parameters\": p}", &["<|python_tag|>"], &[], ""),
    ("llama4", "Write [func_name1(params_name1=params_value1)]", &["<|python_start|>", "<|python_end|>"], &[], ""),
    ("hermes", "<tool_call>\n{\"name\": n, \"arguments\": a}\n</tool_call>", &[], &["<tool_call>", "</tool_call>"], ""),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=k>", &[], &["<tool_call>", "</tool_call>"], ""),
    (
        "glm",
        "<tool_call>f\n<arg_key>k</arg_key>",
        &[],
        &[
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<think>",
            "</think>",
        ],
        "",
    ),
    ("minimax", "<minimax:tool_call>\n<invoke name=\"f\">", &[], &["<minimax:tool_call>", "</minimax:tool_call>"], ""),
    (
        "deepseek-v3.1",
        "<｜tool▁call▁begin｜>",
        &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ],
        &[],
        "",
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|>",
        &[
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ],
        &[],
        "",
    ),
    (
        "gemma4",
        "<|tool_call>call:f{}<tool_call|>",
        &["<|tool_call>", "<tool_call|>", "<|\"|>", "<|channel>", "<channel|>"],
        &[],
        "",
    ),
    ("granite", "<|tool_call|>[]", &["<|tool_call|>"], &[], ""),
    ("olmo3", "<function_calls>", &[], &[], ""),
    (
        "command",
        "<|START_ACTION|>",
        &[
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
        ],
        &[],
        "",
    ),
    ("functionary", "<function=n>{}</function>", &[], &[], ""),
];

fn rows() -> Vec<Row> {
    let json_text = || Said::text("{\"a\": 1}");
    let call = || Said::calls(&[("f", "{\"s\": \"x y\"}")]);
    let regex = json!({"structured_outputs": {"regex": "\\{\"a\": [0-9]+\\}"}});
    let choice = json!({"structured_outputs": {"choice": ["{\"a\": 1}", "none"]}});
    let object = json!({"response_format": {"type": "json_object"}});
    let both = {
        let mut both = format_json();
        both["tools"] = tools();
        both
    };
    let open = "add them up</think>\n\n{\"a\": 1}";
    let itself = "<think>\nadd {them}</think>\n\n{\"a\": 1}";
    let channels =
        "<|channel|>analysis<|message|>add<|end|><|start|>assistant<|channel|>final<|message|>{\"a\": 1}<|return|>";
    vec![
        row("think-open", open, format_json(), json_text().reasoning("add them up")),
        row("think-open", open, object.clone(), json_text().reasoning("add them up")),
        row("think-open", open, regex, json_text().reasoning("add them up")),
        row("think-open", open, choice, json_text().reasoning("add them up")),
        row("think-open", open, json!({}), json_text().reasoning("add them up")),
        row("think", itself, format_json(), json_text().reasoning("\nadd {them}")),
        row("think", "{\"a\": 1}", format_json(), json_text()),
        row("mistral-think", "[THINK]add[/THINK]{\"a\": 1}", format_json(), json_text().reasoning("add")),
        row("harmony", channels, format_json(), json_text().reasoning("add")),
        row("harmony", channels, both.clone(), json_text().reasoning("add")),
        row(
            "harmony",
            "<|channel|>final¦ ¦<|constrain|>json<|message|>{\"a\": ¦1}<|return|>",
            format_json(),
            json_text(),
        ),
        row(
            "harmony",
            "<|channel|>analysis to=functions.f code<|message|>{\"s\": \"x y\"}<|call|>",
            with_tools(),
            call(),
        ),
        row(
            "harmony",
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"s\": \"x y\"}<|call|>",
            with_tools(),
            call(),
        ),
        row(
            "harmony",
            " to=functions.f<|channel|>commentary json<|message|>{\"s\": \"x y\"}<|call|>",
            with_tools(),
            call(),
        ),
        row("harmony", "<|channel|>final to=functions.f<|message|>{\"s\": \"x y\"}<|end|>", with_tools(), call()),
        row("harmony", "<|channel|>commentary to=functions.f<|message|>{\"s\": \"x y\"}", both.clone(), call()),
        row("llama3", "{\"name\": \"Bob\", \"age\": 3}", with_tools(), Said::text("{\"name\": \"Bob\", \"age\": 3}")),
        row(
            "llama3",
            "{\"name\": \"delete\", \"parameters\": {}}",
            with_tools(),
            Said::text("{\"name\": \"delete\", \"parameters\": {}}"),
        ),
        row("llama3", "{\"name\": \"f\", \"parameters\": {\"s\": \"x y\"}}", with_tools(), call()),
        row("llama3", "<|python_tag|>{\"name\": \"f\", \"parameters\": {\"s\": \"x y\"}}", with_tools(), call()),
        row("llama4", "[f(s=\"x y\")]", with_tools(), call()),
        row("llama4", "[f(x) grows]", with_tools(), Said::text("[f(x) grows]")),
        row(
            "hermes",
            "Hm.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"x y\"}}\n</tool_call>",
            with_tools(),
            call().content("Hm."),
        ),
        row(
            "hermes",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"x y\"}}\n</tool_call>",
            both.clone(),
            call(),
        ),
        row("hermes", "{\"a\": 1}", both, json_text()),
        row(
            "qwen3-coder",
            "<tool_call>\n<function=f>\n<parameter=s>\nx y\n</parameter>\n</function>\n</tool_call>",
            with_tools(),
            call(),
        ),
        row(
            "qwen3-coder",
            "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n<parameter=s>\nx\n\ny\n</parameter>\n</funct\
             ion>\n</tool_call>",
            with_tools(),
            Said::calls(&[("f", "{\"n\": 5, \"s\": \"x\\n\\ny\"}")]),
        ),
        row(
            "glm",
            "<think>hm</think>\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x y</arg_value>\n</tool_call>",
            with_tools(),
            call().reasoning("hm"),
        ),
        row(
            "minimax",
            "<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"s\">x y</parameter>\n</invoke>\n</minimax:t\
             ool_call>",
            with_tools(),
            call(),
        ),
        row(
            "deepseek-v3.1",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"s\": \"x y\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            with_tools(),
            call(),
        ),
        row(
            "kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"s\": \"x \
             y\"}<|tool_call_end|><|tool_calls_section_end|>",
            with_tools(),
            call(),
        ),
        row("gemma4", "<|tool_call>call:f{s:<|\"|>x y<|\"|>}<tool_call|>", with_tools(), call()),
        row("gemma4", "<|channel>thought\nadd<channel|>{\"a\": 1}", format_json(), json_text().reasoning("add")),
        row("granite", "<|tool_call|>[{\"name\": \"f\", \"arguments\": {\"s\": \"x y\"}}]", with_tools(), call()),
        row("olmo3", "<function_calls>\nf(s=\"x y\")\n</function_calls>", with_tools(), call()),
        row(
            "command",
            "<|START_ACTION|>[\n    {\"tool_call_id\": \"0\", \"tool_name\": \"f\", \"parameters\": {\"s\": \"x y\"}\
             }\n]<|END_ACTION|>",
            with_tools(),
            call(),
        ),
        row(
            "command",
            "<|START_THINKING|>add<|END_THINKING|><|START_RESPONSE|>{\"a\": 1}<|END_RESPONSE|>",
            format_json(),
            json_text().reasoning("add"),
        ),
        row("functionary", "<function=¦f¦>¦{\"s\": ¦\"x y\"¦}¦</function>", with_tools(), call()),
    ]
}

/// Builds all models, each with the texts of its rows and a text whose reasoning has no opening tag.
fn start(home: &std::path::Path, rows: &[Row]) -> Server {
    let model = |(name, about, special, plain, opening): &About| {
        let before = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}";
        let opening_source = serde_json::to_string(opening).unwrap();
        let template = format!(
            "{{% if tools %}}{{{{ tools | tojson }}}}{about}{{% endif %}}{before}{GO}{{{{ {opening_source} }}}}"
        );
        let about = if about.contains("think") { format!("{{# {about} #}}") } else { String::new() };
        let model = KnownModel::new(&(about + &template)).special(special).plain(plain).opening(opening);
        (*name, texts(name, rows).iter().fold(model, |model, text| model.text(text)))
    };
    serve(home, &MODELS.iter().map(model).collect::<Vec<_>>(), &[])
}

/// Text of the model `think` whose reasoning has no opening tag.
const UNOPENED: &str = "It says hi.\n</think>\n\nHello!";

/// Returns the different texts of a model.
fn texts(name: &str, rows: &[Row]) -> Vec<&'static str> {
    let mut texts: Vec<&str> = if name == "think" { vec![UNOPENED] } else { Vec::new() };
    for row in rows.iter().filter(|row| row.model == name) {
        if !texts.contains(&row.text) {
            texts.push(row.text);
        }
    }
    texts
}

#[test]
fn what_a_model_writes_arrives_in_its_fields_at_every_endpoint() {
    let (home, rows) = (tempfile::tempdir().unwrap(), rows());
    let server = start(home.path(), &rows);
    let mut failures = Vec::new();
    for Row { model, text, fields, expected } in &rows {
        let number = 1 + texts(model, &rows).iter().position(|known| known == text).unwrap();
        let mut body = json!({"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200,
                              "chat_template_kwargs": KnownModel::go(number)});
        fields.as_object().unwrap().iter().for_each(|(name, value)| body[name] = value.clone());
        let mut found = vec![("chat", chat_both(&server, &body))];
        let no_format = fields.get("response_format").is_none() && fields.get("structured_outputs").is_none();
        if no_format {
            found.push(("responses", responses_both(&server, &body)));
            found.push(("messages", messages_both(&server, &body)));
        }
        for (endpoint, (whole, stream)) in found {
            for (form, said) in [("whole", whole), ("stream", stream)] {
                if said != *expected {
                    failures.push(format!("{model}, {endpoint}, {form}, {fields}\n  {text:?}\n  {said:?}"));
                }
            }
        }
    }
    // Reasoning without an opening tag: what was streamed as content cannot be taken back.
    let body = json!({"model": "think", "messages": [{"role": "user", "content": "hi"}]});
    let (whole, stream) = chat_both(&server, &body);
    assert_eq!(whole, Said::text("Hello!").reasoning("It says hi.\n"));
    assert_eq!(stream, Said::text("It says hi.\nHello!"));
    assert!(failures.is_empty(), "{} of {}\n{}", failures.len(), rows.len(), failures.join("\n"));
}

/// Template that knows the roles system, user, assistant and tool only, and writes calls of the assistant.
const STRICT: &str = "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}\
    {{ raise_exception('Unexpected message role.') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}\
    {% for c in m.tool_calls or [] %}<call>{{ c.function.arguments }}|{{ c.function.arguments | tojson }}</call>\
    {% endfor %}<|im_end|>\n{% endfor %}";

#[test]
fn history_reaches_the_template_in_one_form() {
    let home = tempfile::tempdir().unwrap();
    let model = |template: &str| KnownModel::new(&format!("{template}{GO}")).text("Hello!");
    let knowing = STRICT.replace("'user',", "'user', 'developer',");
    let server = serve(home.path(), &[("strict", model(STRICT)), ("knowing", model(&knowing))], &[]);
    let prompt = |model: &str, messages: Value| {
        let tokens = server.ask("/tokenize", &json!({"model": model, "messages": messages}));
        let text = json!({"model": model, "tokens": tokens["tokens"], "skip_special_tokens": false});
        server.ask("/detokenize", &text)["prompt"].as_str().unwrap().to_string()
    };
    let as_role = |role: &str| json!([{"role": role, "content": "Be brief."}, {"role": "user", "content": "hi"}]);
    assert_eq!(prompt("strict", as_role("developer")), prompt("strict", as_role("system")));
    assert!(prompt("knowing", as_role("developer")).contains("<|im_start|>developer\nBe brief."));
    let result = |role: &str| json!([{"role": "user", "content": "hi"}, {"role": role, "name": "f", "content": "5"}]);
    assert_eq!(prompt("strict", result("function")), prompt("strict", result("tool")));
    let calling = |arguments: Value| {
        let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
        json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": null, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c", "content": "5"}])
    };
    for (given, expected) in [
        (json!(""), "{}|{}"),
        (json!(" \n"), "{}|{}"),
        (json!(null), "{}|{}"),
        (json!("{\"a\": [1.0, null]}"), "{'a': [1.0, None]}|{\"a\": [1.0, null]}"),
        (json!({"a": "b"}), "{'a': 'b'}|{\"a\": \"b\"}"),
    ] {
        let found = prompt("strict", calling(given.clone()));
        assert!(found.contains(&format!("<call>{expected}</call>")), "{given}: {found}");
    }
    for given in [json!("{\"a\": "), json!("[1]"), json!([1]), json!("3"), json!(3)] {
        let body = json!({"model": "strict", "messages": calling(given.clone())});
        let response = server.post("/v1/chat/completions", &body);
        let place = "messages[1].tool_calls[0].function.arguments";
        assert_eq!((response.status, &response.json()["error"]["param"]), (400, &json!(place)), "{given}");
    }
    let said = chat(&server, &json!({"model": "strict", "messages": as_role("developer")}));
    assert_eq!(said, Said::text("Hello!"));
    let input = json!([{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]);
    let answer = server.ask("/v1/responses", &json!({"model": "strict", "input": input, "temperature": 0}));
    assert_eq!(answer["output"][0]["content"][0]["text"], "Hello!");
}

#[test]
fn a_template_for_tools_in_a_file_of_its_own_is_used_for_them() {
    let home = tempfile::tempdir().unwrap();
    let plain = format!("{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{GO}");
    let for_tools = "{{ tools | tojson }}<tool_call>{\"name\": n, \"arguments\": a}</tool_call>\
                     {% for m in messages %}{{ m.content }}{% endfor %}<|g2|>";
    let checkpoint = home.path().join("checkpoint");
    let model = KnownModel::new(&plain).plain(&["<tool_call>", "</tool_call>"]).text("No tools.");
    model.text("<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"x\"}}</tool_call>").write(&checkpoint);
    std::fs::write(checkpoint.join("chat_template.jinja"), &plain).unwrap();
    std::fs::create_dir(checkpoint.join("additional_chat_templates")).unwrap();
    std::fs::write(checkpoint.join("additional_chat_templates/tool_use.jinja"), for_tools).unwrap();
    let pack = home.path().join("pack");
    let packed = crate::common::iec().arg("pack").arg(&checkpoint).arg("-o").arg(&pack).output().unwrap();
    assert!(packed.status.success(), "{}", String::from_utf8_lossy(&packed.stderr));
    let listed = std::fs::read_to_string(pack.join("model.ie.json")).unwrap();
    assert!(listed.contains("chat_template.tool_use.jinja"), "the file is recorded with its hash");
    let [a, b] = [("a", &checkpoint), ("b", &pack)].map(|(name, path)| format!("{name}={}", path.display()));
    let cache = home.path().join("cache").display().to_string();
    let server = Server::spawn(&["--model", &a, "--model", &b, "--precision", "bf16"], &[("IEC_CACHE", &cache)]);
    server.wait_until_ready();
    for model in ["a", "b"] {
        let mut body = json!({"model": model, "messages": [{"role": "user", "content": "hi"}]});
        assert_eq!(chat(&server, &body), Said::text("No tools."), "{model}");
        body["tools"] = tools();
        assert_eq!(chat(&server, &body), Said::calls(&[("f", "{\"s\": \"x\"}")]), "{model}");
    }
}
