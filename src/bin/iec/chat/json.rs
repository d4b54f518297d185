//! Line protocol for programs: each line of stdin is a request, each line of stdout an event.
//!
//! A request is `{"message": TEXT}` or `{"command": NAME, …}`; docs/guide/chat.md lists them. The answer to a message
//! is any number of events `text` and `reasoning`, then `done`; to a command it is `ok`. A request that fails is
//! answered by `error`, and the conversation goes on. SIGINT during an answer ends the answer.

use super::talk::{Done, Question, Talk, goes_on};
use crate::{advice, console};
use iec::chat::command::Command;
use iec::chat::{AnswerPart, Reply};
use iec::error::{Cause, Error, Result};
use iec::files::Stream;
use iec::generate::Finish;
use iec::interrupt;
use iec::session::prompt_request::PromptRequest;
use iec::session::prompts;
use iec::strict_json;
use serde_json::{Value, json};
use std::io::BufReader;

/// Advice for every request that is not valid.
const EXPECTED: &str = "expected {\"message\": TEXT} or {\"command\": NAME, …}; docs/guide/chat.md lists the commands";

/// Request of a program.
#[derive(Debug, PartialEq)]
enum ChatLine {
    Message(String),
    Show,
    /// Command with its name.
    Command(&'static str, Command),
}

/// Names of commands, with the fields that each must have and those that it may have.
const COMMANDS: &[(&str, &[&str], &[&str])] = &[
    ("set", &["name", "value"], &[]),
    ("system", &["text"], &[]),
    ("show", &[], &[]),
    ("save", &["path"], &["overwrite"]),
    ("load", &["path"], &[]),
    ("regen", &[], &[]),
    ("undo", &[], &[]),
    ("clear", &[], &[]),
    ("adapter", &["adapters"], &[]),
    ("exit", &[], &[]),
];

/// Answers requests until the input ends.
///
/// # Errors
/// Stdin or stdout fails, or SIGTERM, SIGHUP or, while no answer is generated, SIGINT arrives.
pub fn serve(talk: &mut Talk) -> Result<()> {
    event("ready", talk.state())?;
    let mut input = BufReader::new(Stream::of(std::io::stdin()));
    loop {
        let line = match prompts::read_line(&mut input) {
            Ok(Some(line)) => line,
            Ok(None) => break,
            // A line that is no text.
            Err(e) if matches!(e.cause(), Cause::Corrupt(_)) => {
                failed(&e.at("standard input"))?;
                continue;
            }
            Err(e) => return Err(e.at("standard input")),
        };
        if line.trim().is_empty() {
            continue;
        }
        match request(&line).and_then(|request| respond(request, talk)) {
            Ok(true) => {}
            Ok(false) => break,
            Err(e) if goes_on(&e) => failed(&e)?,
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Parses a request. Fields that the request does not have are refused.
fn request(line: &str) -> Result<ChatLine> {
    let Value::Object(fields) = strict_json::parse(line.as_bytes())? else {
        return Err(Error::usage("request: found no JSON object, expected one").help(EXPECTED));
    };
    let Some(command) = fields.get("command") else {
        return match (fields.get("message"), fields.len()) {
            (Some(Value::String(text)), 1) => Ok(ChatLine::Message(text.clone())),
            _ => Err(Error::usage("request: found neither `message` alone nor `command`, expected one of them")
                .help(EXPECTED)),
        };
    };
    let row = command.as_str().and_then(|name| COMMANDS.iter().find(|row| row.0 == name));
    let Some((name, must, may)) = row else {
        return Err(Error::usage(format!("request: there is no command {command}")).help(EXPECTED));
    };
    let known = |field: &str| field == "command" || must.contains(&field) || may.contains(&field);
    if let Some(wrong) = fields.keys().find(|field| !known(field)) {
        return Err(
            Error::usage(format!("{name}: found the field `{wrong}`, which this command does not have")).help(EXPECTED)
        );
    }
    let text = |field: &str| match fields.get(field) {
        Some(Value::String(text)) => Ok(text.clone()),
        _ => Err(Error::usage(format!("{name}: found no string `{field}`, expected one")).help(EXPECTED)),
    };
    let command = match *name {
        "show" => return Ok(ChatLine::Show),
        "set" if matches!(fields.get("name").and_then(Value::as_str), Some("think" | "stats")) => {
            return Err(Error::usage("set: `think` and `stats` have no effect on events")
                .help("every `done` event has the figures, and reasoning has events of its own"));
        }
        "set" => {
            let value = match fields.get("value") {
                Some(value @ (Value::Number(_) | Value::String(_))) => value,
                _ => return Err(Error::usage("set: found no number or string `value`, expected one").help(EXPECTED)),
            };
            Command::Set(Some((text("name")?, value.as_str().map_or_else(|| value.to_string(), String::from))))
        }
        "system" => Command::System(Some(text("text")?)),
        "save" => {
            let overwrite = match fields.get("overwrite") {
                None => false,
                Some(Value::Bool(overwrite)) => *overwrite,
                Some(other) => {
                    let found = format!("save: `overwrite`: found {other}, expected true or false");
                    return Err(Error::usage(found).help(EXPECTED));
                }
            };
            Command::Save { path: Some(text("path")?.into()), overwrite }
        }
        "adapter" => Command::Adapters(Some(adapters(fields.get("adapters"))?)),
        "load" => Command::Load(text("path")?.into()),
        "regen" => Command::Regenerate,
        "undo" => Command::Undo,
        "clear" => Command::Clear,
        _ => Command::Exit,
    };
    Ok(ChatLine::Command(name, command))
}

/// Reads a list of adapters as in a line of a prompts file.
fn adapters(list: Option<&Value>) -> Result<Vec<(String, f32)>> {
    let prompt: PromptRequest = serde_json::from_value(json!({"prompt": "", "adapters": list}))
        .map_err(|e| Error::usage(format!("adapter: `adapters`: {e}")).help(EXPECTED))?;
    Ok(prompt.adapters.unwrap_or_default())
}

/// Responds to a request; returns false if the conversation ends.
fn respond(request: ChatLine, talk: &mut Talk) -> Result<bool> {
    let (name, command) = match request {
        ChatLine::Message(message) => return answer(Question::Message(message), talk).map(|()| true),
        ChatLine::Show => {
            let mut state = talk.state();
            state["prompt_tokens"] = talk.conversation.prompt_tokens(&talk.host)?.into();
            state["left_out_turns"] = talk.conversation.skipped().into();
            state["messages"] = talk.conversation.history().to_json().into();
            return event("state", state).map(|()| true);
        }
        ChatLine::Command(name, command) => (name, command),
    };
    match talk.execute(command)? {
        Done::Said(_) => event("ok", json!({"command": name})).map(|()| true),
        Done::Regenerate => answer(Question::Again, talk).map(|()| true),
        Done::Exit => Ok(false),
    }
}

fn answer(question: Question, talk: &mut Talk) -> Result<()> {
    let reply = talk.answer(question, |part, text| match part {
        AnswerPart::Answer => event("text", json!({"text": text})),
        AnswerPart::Reasoning => event("reasoning", json!({"text": text})),
    });
    match reply {
        Ok(reply) => done(talk, &reply),
        // An interrupt that came before the failure is not kept for the next answer.
        Err(e) if !e.is_interrupt() && interrupt::take_interrupt() => Err(Error::usage(format!("interrupted: {e}"))),
        Err(e) => Err(e),
    }
}

fn done(talk: &Talk, reply: &Reply) -> Result<()> {
    let completion = &reply.completion;
    let finish = match completion.finish {
        Finish::Eos | Finish::Complete | Finish::Stop => "stop",
        other => other.name(),
    };
    event(
        "done",
        json!({
            "finish": finish,
            "kept": reply.is_kept,
            "left_out_turns": talk.conversation.skipped(),
            "usage": {
                "prompt_tokens": completion.prompt_tokens,
                "reused_tokens": completion.reused_tokens,
                "completion_tokens": completion.ids.len(),
                "prefill_time_s": completion.prefill_time().as_secs_f64(),
                "decode_time_s": completion.decode_time().as_secs_f64(),
            },
        }),
    )
}

fn failed(error: &Error) -> Result<()> {
    let object = json!({
        "kind": error.cause().kind(),
        "message": error.to_string(),
        "help": advice::of(error),
    });
    event("error", json!({"error": object}))
}

/// Prints an event with its fields.
fn event(name: &str, fields: Value) -> Result<()> {
    let mut object = json!({"event": name});
    if let (Some(object), Value::Object(fields)) = (object.as_object_mut(), fields) {
        object.extend(fields);
    }
    console::print_json(&object)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_a_message_or_a_command_with_its_fields() {
        let set = |value: &str| ChatLine::Command("set", Command::Set(Some(("seed".into(), value.into()))));
        let save = |overwrite| ChatLine::Command("save", Command::Save { path: Some("a".into()), overwrite });
        let cases = [
            (r#"{"message": "Hi"}"#, ChatLine::Message("Hi".into())),
            (r#"{"message": "/exit"}"#, ChatLine::Message("/exit".into())),
            (r#"{"command": "show"}"#, ChatLine::Show),
            (r#"{"command": "undo"}"#, ChatLine::Command("undo", Command::Undo)),
            (r#"{"command": "set", "name": "seed", "value": 7}"#, set("7")),
            (r#"{"command": "set", "name": "seed", "value": "7"}"#, set("7")),
            (r#"{"command": "save", "path": "a"}"#, save(false)),
            (r#"{"command": "save", "path": "a", "overwrite": true}"#, save(true)),
            (r#"{"command": "load", "path": "a"}"#, ChatLine::Command("load", Command::Load("a".into()))),
        ];
        for (line, expected) in cases {
            assert_eq!(request(line).unwrap(), expected, "{line}");
        }
    }

    #[test]
    fn other_requests_are_refused() {
        let cases = [
            ("[1]", "no JSON object"),
            ("{", "EOF"),
            ("{}", "neither"),
            (r#"{"message": 3}"#, "neither"),
            (r#"{"message": "a", "temperature": 1}"#, "neither"),
            (r#"{"command": "dance"}"#, "dance"),
            (r#"{"command": 3}"#, "no command 3"),
            (r#"{"command": "undo", "message": "a"}"#, "`message`"),
            (r#"{"command": "set", "name": "seed"}"#, "`value`"),
            (r#"{"command": "set", "value": 1}"#, "`name`"),
            (r#"{"command": "save"}"#, "`path`"),
            (r#"{"command": "save", "path": "a", "overwrite": 1}"#, "overwrite"),
        ];
        for (line, expected) in cases {
            let error = request(line).unwrap_err().to_string();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
