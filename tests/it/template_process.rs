//! The processes that render chat templates: they are kept, used by several threads, and replaced after a failure.

use iec::generate::text::{ChatTemplate, Ending, Message, RenderOptions};
use iec::session::template::{RenderProcess, Renderer};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn renderer(arguments: &[&str]) -> Renderer {
    let arguments = arguments.iter().map(ToString::to_string).collect();
    Renderer::new(RenderProcess { program: env!("CARGO_BIN_EXE_iec").into(), arguments })
}

fn talk(text: &str) -> Vec<Vec<Message>> {
    vec![vec![Message::new("user", text)]]
}

/// Lists within lists, which take more memory as text than a process may use.
const BOMB: &str = "{% set ns = namespace(l=['x']) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}\
                    {% endfor %}{{ ns.l ~ '' }}";

#[test]
fn several_threads_render_with_kept_processes() {
    let renderer = renderer(&["render-template"]);
    let template = ChatTemplate::from_source("{{ messages[0].content }}{{ 'A:' if add_generation_prompt }}");
    let options = RenderOptions { ending: Ending::Plain, ..RenderOptions::default() };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (renderer, template, options) = (&renderer, &template, &options);
            scope.spawn(move || {
                for i in 0..50 {
                    // Longer than the buffers of pipes, in both directions.
                    let text = format!("{thread}.{i} {}", "é".repeat(if i % 10 == 0 { 200_000 } else { 10 }));
                    let found = renderer.render(template, &talk(&text), options, 1 << 20).unwrap();
                    assert_eq!(found, [text]);
                }
            });
        }
    });
    let begin = Instant::now();
    for _ in 0..100 {
        renderer.render(&template, &talk("x"), &options, 99).unwrap();
    }
    // A hundred starts of the program take longer than that.
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

#[test]
fn a_process_that_dies_is_replaced_and_errors_keep_their_kind() {
    let renderer = renderer(&["render-template"]);
    let plain = ChatTemplate::from_source("{{ messages[0].content }}");
    let options = RenderOptions::default();
    for _ in 0..2 {
        let error = renderer.render(&ChatTemplate::from_source(BOMB), &talk("x"), &options, 999).unwrap_err();
        assert!(error.to_string().contains("exceeded its limits"), "{error}");
        assert_eq!(renderer.render(&plain, &talk("x"), &options, 999).unwrap(), ["x"]);
    }
    let refused = ChatTemplate::from_source("{{ raise_exception('roles must alternate') }}");
    let error = renderer.render(&refused, &talk("x"), &options, 999).unwrap_err();
    assert!(error.to_string().contains("roles must alternate") && error.help_text().is_some(), "{error}");
    let with_tools = RenderOptions { tools: Some(serde_json::json!([])), ..RenderOptions::default() };
    let error = renderer.render(&plain, &talk("x"), &with_tools, 999).unwrap_err();
    assert!(error.to_string().contains("no place for tools"), "{error}");
    assert!(matches!(error.cause(), iec::error::Cause::Unsupported(_)));
}

#[test]
fn a_program_that_answers_something_else_is_an_error() {
    let plain = ChatTemplate::from_source("x");
    for arguments in [&["--version"][..], &["render"][..]] {
        let error = renderer(arguments).render(&plain, &talk("x"), &RenderOptions::default(), 99).unwrap_err();
        assert!(error.to_string().contains("exceeded its limits"), "{error}");
    }
}

#[test]
fn a_process_ends_with_its_input() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_iec"))
        .arg("render-template")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    assert!(child.try_wait().unwrap().is_none());
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}
