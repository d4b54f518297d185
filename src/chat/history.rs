//! History of a conversation: its turns, and the JSON file that keeps them.
//!
//! The file is an object with a header and the `messages` array of OpenAI's chat completions:
//! `{"format": "iec_chat_v1", "model": "…", "messages": [{"role": "system", "content": "…"}, …]}`. Roles alternate
//! between `user` and `assistant` after an optional `system`. A message of the assistant may have `reasoning_content`,
//! and `finish_reason` if it did not end by itself. A bare `messages` array is read, too.

use crate::error::{Context, Error, Result};
use crate::files;
use crate::generate::Finish;
use crate::generate::text::Message;
use crate::output::{Inputs, Rules, Target};
use crate::strict_json;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Value of `format` in files.
const FORMAT: &str = "iec_chat_v1";
/// Largest accepted file in bytes.
const FILE_LIMIT: u64 = 64 << 20;
/// Largest accepted number of messages.
const MOST_MESSAGES: usize = 100_000;

/// Message of the user with the answer of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// Text of the user.
    pub message: String,
    /// Answer; `None` in a loaded conversation that ends with a message.
    pub answer: Option<Answer>,
}

/// Answer of the model.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Answer {
    /// Text for the user.
    pub text: String,
    /// Reasoning before the answer; empty if there is none.
    pub reasoning: String,
    /// Reason why the answer was cut; `None` if the model ended it.
    pub cut: Option<Finish>,
}

/// Turns of a conversation with the system text.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct History {
    /// System text at the beginning, if any.
    pub system: Option<String>,
    /// Turns from the oldest to the latest.
    pub turns: Vec<Turn>,
}

impl History {
    /// Returns the messages for the chat template, without the oldest `skipped` turns.
    pub fn messages(&self, skipped: usize) -> Vec<Message> {
        let system = self.system.iter().map(|text| Message::new("system", text));
        let turns = self.turns[skipped.min(self.turns.len())..].iter().flat_map(|turn| {
            let answer = turn.answer.iter().map(|answer| Message {
                reasoning_content: Some(answer.reasoning.clone()).filter(|text| !text.is_empty()),
                ..Message::new("assistant", &answer.text)
            });
            std::iter::once(Message::new("user", &turn.message)).chain(answer)
        });
        system.chain(turns).collect()
    }

    /// Writes the history to a file that only its owner can read.
    ///
    /// # Errors
    /// The file exists and may not be replaced, is an input of the command, or cannot be written.
    pub fn save(&self, path: &Path, model: &str, overwrite: bool, inputs: &Inputs) -> Result<()> {
        use std::io::Write;
        let target = Target::check(path, Rules { inputs, overwrite, stdout: false })?;
        let file = json!({"format": FORMAT, "model": model, "messages": self.to_json()});
        let mut text = serde_json::to_string_pretty(&file).expect("plain data always serializes");
        text.push('\n');
        let mut out = target.create_private()?;
        out.write_all(text.as_bytes()).at(path)?;
        out.commit()
    }

    /// Reads the history of a file.
    ///
    /// # Errors
    /// The file cannot be read, is too long, or is not a conversation.
    pub fn load(path: &Path) -> Result<History> {
        let bytes = files::read_limited(path, FILE_LIMIT).help("name a file that /save wrote")?;
        History::parse(&bytes).at(path).help("expected a file of /save, or an array of messages with role and content")
    }

    /// Parses the content of a file.
    ///
    /// # Errors
    /// The content is not a conversation.
    pub fn parse(bytes: &[u8]) -> Result<History> {
        let messages = match strict_json::parse(bytes)? {
            Value::Array(messages) => messages,
            Value::Object(mut file) => {
                let format = file.get("format").and_then(Value::as_str).unwrap_or_default();
                if format != FORMAT {
                    return Err(Error::corrupt(format!("found format `{format}`, expected `{FORMAT}`")));
                }
                known(&file, &["format", "model", "messages"])?;
                match file.remove("messages") {
                    Some(Value::Array(messages)) => messages,
                    _ => return Err(Error::corrupt("found no array `messages`, expected one")),
                }
            }
            _ => return Err(Error::corrupt("found neither an object nor an array, expected a conversation")),
        };
        if messages.len() > MOST_MESSAGES {
            let found = messages.len();
            return Err(Error::corrupt(format!("found {found} messages, expected at most {MOST_MESSAGES}")));
        }
        let mut history = History::default();
        for (i, message) in messages.iter().enumerate() {
            history.push(message).tensor(&format!("message {i}"))?;
        }
        Ok(history)
    }

    fn push(&mut self, message: &Value) -> Result<()> {
        let object = message.as_object().ok_or_else(|| Error::corrupt("found no object, expected one"))?;
        known(object, &["role", "content", "reasoning_content", "finish_reason"])?;
        let text = |name: &str| match object.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(Error::corrupt(format!("`{name}`: found another type, expected a string"))),
        };
        let content = text("content")?.ok_or_else(|| Error::corrupt("found no `content`, expected a string"))?;
        let unanswered = self.turns.last().is_some_and(|turn| turn.answer.is_none());
        match text("role")?.as_deref() {
            Some("system") if self.system.is_none() && self.turns.is_empty() => self.system = Some(content),
            Some("user") if !unanswered => self.turns.push(Turn { message: content, answer: None }),
            Some("assistant") if unanswered => {
                let answer = Answer {
                    text: content,
                    reasoning: text("reasoning_content")?.unwrap_or_default(),
                    cut: text("finish_reason")?.map(|reason| cut_of(&reason)).transpose()?.flatten(),
                };
                self.turns.last_mut().expect("an unanswered turn").answer = Some(answer);
            }
            role => {
                return Err(Error::corrupt(format!(
                    "found role `{}`, expected {}",
                    role.unwrap_or_default(),
                    if unanswered { "`assistant`" } else { "`user`, after at most one `system`" }
                )));
            }
        }
        Ok(())
    }

    /// Returns the messages in the format of OpenAI.
    pub fn to_json(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        let turns = self.turns.iter().flat_map(|turn| {
            let answer = turn.answer.iter().map(|answer| {
                let mut message = json!({"role": "assistant", "content": answer.text});
                if !answer.reasoning.is_empty() {
                    message["reasoning_content"] = answer.reasoning.clone().into();
                }
                if let Some(cut) = answer.cut {
                    message["finish_reason"] = cut.name().into();
                }
                message
            });
            std::iter::once(json!({"role": "user", "content": turn.message})).chain(answer)
        });
        system.chain(turns).collect()
    }
}

/// Refuses fields that are not known: a program that wrote them expects them to have an effect.
fn known(object: &Map<String, Value>, names: &[&str]) -> Result<()> {
    match object.keys().find(|name| !names.contains(&name.as_str())) {
        Some(name) => Err(Error::corrupt(format!("found the field `{name}`, expected {}", names.join(", ")))),
        None => Ok(()),
    }
}

/// Returns the reason why an answer was cut; `None` if it ended by itself.
fn cut_of(reason: &str) -> Result<Option<Finish>> {
    let cuts = [Finish::Length, Finish::Context, Finish::Interrupted];
    match cuts.into_iter().find(|cut| cut.name() == reason) {
        None if reason == "stop" => Ok(None),
        None => Err(Error::corrupt(format!(
            "`finish_reason`: found `{reason}`, expected stop, length, context or interrupted"
        ))),
        cut => Ok(cut),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn history() -> History {
        let answer = Answer { text: "Yes?".into(), reasoning: "hm".into(), cut: Some(Finish::Interrupted) };
        let turns = [Some(answer), Some(Answer { text: "2".into(), ..Answer::default() }), None]
            .map(|answer| Turn { message: "Hi\n\u{1b}é".into(), answer });
        History { system: Some("Be brief.".into()), turns: turns.into() }
    }

    #[test]
    fn a_saved_conversation_is_loaded_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("talk.json");
        let save = |overwrite| history().save(&path, "m", overwrite, &Inputs::default());
        save(false).unwrap();
        assert_eq!(History::load(&path).unwrap(), history());
        assert!(save(false).unwrap_err().to_string().contains("exists"));
        save(true).unwrap();
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let bare = serde_json::to_vec(&history().to_json()).unwrap();
        assert_eq!(History::parse(&bare).unwrap(), history());
        assert_eq!(History::parse(b"[]").unwrap(), History::default());
    }

    #[test]
    fn templates_get_reasoning_beside_the_answer() {
        let messages = history().messages(0);
        assert_eq!(messages.len(), 6);
        assert_eq!(messages[2].reasoning_content.as_deref(), Some("hm"));
        assert_eq!(serde_json::to_value(&messages[4]).unwrap(), json!({"role": "assistant", "content": "2"}));
        let later = history().messages(2);
        assert_eq!(later.iter().map(|m| m.role.as_str()).collect::<Vec<_>>(), ["system", "user"]);
    }

    #[test]
    fn other_files_are_refused_with_the_place() {
        let cases = [
            ("{}", "format"),
            ("3", "neither"),
            ("[", "EOF"),
            (r#"{"format":"iec_chat_v2","messages":[]}"#, "iec_chat_v2"),
            (r#"{"format":"iec_chat_v1"}"#, "messages"),
            (r#"{"format":"iec_chat_v1","messages":[],"tools":[]}"#, "`tools`"),
            (r#"[{"role":"assistant","content":"a"}]"#, "message 0"),
            (r#"[{"role":"user","content":"a"},{"role":"user","content":"a"}]"#, "message 1"),
            (r#"[{"role":"user","content":"a"},{"role":"system","content":"a"}]"#, "message 1"),
            (r#"[{"role":"system","content":"a"},{"role":"system","content":"a"}]"#, "message 1"),
            (r#"[{"role":"user"}]"#, "no `content`"),
            (r#"[{"role":"user","content":[{"type":"text"}]}]"#, "expected a string"),
            (r#"[{"role":"user","content":"a","content":"b"}]"#, "twice"),
            (r#"[{"role":"user","content":"a","tool_calls":[]}]"#, "`tool_calls`"),
            (r#"[{"role":"user","content":"a"},{"role":"assistant","content":"a","finish_reason":"x"}]"#, "`x`"),
        ];
        for (text, expected) in cases {
            let error = History::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let many = format!("[{}]", vec!["0"; MOST_MESSAGES + 1].join(","));
        assert!(History::parse(many.as_bytes()).is_err());
    }

    proptest! {
        #[test]
        fn any_text_survives_the_file(texts in proptest::collection::vec(".*", 0..6), text in ".*") {
            let system = Some(text).filter(|text| text.len() % 2 == 0);
            let answer = |text: &String| Answer { text: text.clone(), reasoning: text.clone(), cut: None };
            let turns = texts.iter().map(|text| Turn { message: text.clone(), answer: Some(answer(text)) }).collect();
            let history = History { system, turns };
            let text = serde_json::to_vec(&history.to_json()).unwrap();
            prop_assert_eq!(History::parse(&text).unwrap(), history);
        }

        #[test]
        fn bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = History::parse(&bytes);
        }
    }
}
