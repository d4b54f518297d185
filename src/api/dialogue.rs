//! Conversations of APIs whose messages consist of parts: reasoning, texts, calls of tools and their results. Chat
//! templates expect one message for each turn of the assistant, and the system message at the beginning.

use crate::generate::text::{Message, ToolCall};
use serde_json::Value;
use std::collections::HashMap;

/// Text between two texts that become one system message.
const PARAGRAPH: &str = "\n\n";

/// Messages of a conversation, built part by part.
#[derive(Debug, Default)]
pub struct Dialogue {
    messages: Vec<Message>,
    /// Whether successive texts of the same author become one message.
    joins: bool,
    /// Function of each call, by its id.
    functions: HashMap<String, String>,
}

impl Dialogue {
    /// Creates an empty conversation in which successive messages of the same author stay apart.
    pub fn new() -> Dialogue {
        Dialogue::default()
    }

    /// Creates an empty conversation in which successive texts of the same author become one message.
    pub fn joining() -> Dialogue {
        Dialogue { joins: true, ..Dialogue::default() }
    }

    /// Adds instructions of the role `system` or `developer`. Those before all other messages become one message,
    /// because
    /// templates read the first only.
    pub fn instructions(&mut self, role: &str, text: String) {
        match &mut self.messages[..] {
            [only] if only.role == "system" || only.role == "developer" => {
                only.content += PARAGRAPH;
                only.content += &text;
            }
            _ => self.messages.push(Message::new(role, text)),
        }
    }

    /// Adds a text of the user.
    pub fn user(&mut self, text: String) {
        match self.messages.last_mut() {
            Some(last) if self.joins && last.role == "user" => {
                last.content.push('\n');
                last.content += &text;
            }
            _ => self.messages.push(Message::new("user", text)),
        }
    }

    /// Adds reasoning of the assistant. It belongs to the text or the call that follows.
    pub fn reasoning(&mut self, text: &str) {
        if !text.is_empty() {
            let message = self.assistant(|last| last.content.is_empty() && last.tool_calls.is_empty());
            message.reasoning_content.get_or_insert_default().push_str(text);
        }
    }

    /// Adds a text of the assistant.
    pub fn answer(&mut self, text: &str) {
        let joins = self.joins;
        let message = self.assistant(|last| last.tool_calls.is_empty() && (joins || last.content.is_empty()));
        message.content += text;
    }

    /// Adds a call of the assistant.
    pub fn call(&mut self, id: &str, name: &str, arguments: Value) {
        self.functions.insert(id.into(), name.into());
        self.assistant(|_| true).tool_calls.push(ToolCall::new(id, name, arguments));
    }

    /// Adds the result of a call, with the name of the function if the call is known.
    pub fn result(&mut self, id: String, text: String) {
        let name = self.functions.get(&id).cloned();
        self.messages.push(Message { name, tool_call_id: Some(id), ..Message::new("tool", text) });
    }

    /// Returns the last message.
    pub fn last(&self) -> Option<&Message> {
        self.messages.last()
    }

    /// Removes the last message.
    pub fn remove_last(&mut self) {
        self.messages.pop();
    }

    /// Returns the messages. Reasoning that no text and no call followed is left out.
    pub fn finish(mut self) -> Vec<Message> {
        let is_empty = |message: &Message| message.content.is_empty() && message.tool_calls.is_empty();
        self.messages.retain(|message| message.reasoning_content.is_none() || !is_empty(message));
        self.messages
    }

    /// Returns the last message if it is one of the assistant that `fits`, otherwise a new one.
    fn assistant(&mut self, fits: impl Fn(&Message) -> bool) -> &mut Message {
        if !self.messages.last().is_some_and(|last| last.role == "assistant" && fits(last)) {
            self.messages.push(Message::new("assistant", ""));
        }
        let last = self.messages.len() - 1;
        &mut self.messages[last]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_turn_are_one_message() {
        let mut dialogue = Dialogue::new();
        dialogue.instructions("system", "s".into());
        dialogue.instructions("developer", "t".into());
        dialogue.user("u".into());
        dialogue.user("v".into());
        dialogue.reasoning("r");
        dialogue.answer("a");
        dialogue.call("1", "f", serde_json::json!({}));
        dialogue.call("2", "g", serde_json::json!({}));
        dialogue.result("2".into(), "5".into());
        dialogue.instructions("system", "later".into());
        dialogue.reasoning("lost");
        let messages = dialogue.finish();
        let roles: Vec<&str> = messages.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "user", "assistant", "tool", "system"]);
        assert_eq!(messages[0].content, "s\n\nt");
        assert_eq!((messages[3].content.as_str(), messages[3].reasoning_content.as_deref()), ("a", Some("r")));
        assert_eq!(messages[3].tool_calls.len(), 2);
        assert_eq!((messages[4].name.as_deref(), messages[4].tool_call_id.as_deref()), (Some("g"), Some("2")));
    }

    #[test]
    fn new_turns_begin_behind_calls_and_texts() {
        let mut dialogue = Dialogue::new();
        dialogue.answer("a");
        dialogue.answer("b");
        dialogue.reasoning("r");
        dialogue.call("1", "f", serde_json::json!({}));
        dialogue.reasoning("s");
        dialogue.call("2", "f", serde_json::json!({}));
        let messages = dialogue.finish();
        assert_eq!(messages.iter().map(|message| message.content.as_str()).collect::<Vec<_>>(), ["a", "b", "", ""]);
        assert_eq!(messages[3].reasoning_content.as_deref(), Some("s"));
    }

    #[test]
    fn successive_texts_are_joined_on_request() {
        let mut dialogue = Dialogue::joining();
        dialogue.user("u".into());
        dialogue.user("v".into());
        dialogue.answer("a");
        dialogue.answer("b");
        let messages = dialogue.finish();
        assert_eq!(messages.iter().map(|message| message.content.as_str()).collect::<Vec<_>>(), ["u\nv", "ab"]);
    }
}
