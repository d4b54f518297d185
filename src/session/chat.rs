//! Multi-turn chat: renders the whole history with the chat template for each turn and reuses the KV cache of earlier
//! turns.

use super::{GenerateOptions, Session};
use crate::error::Result;
use crate::runtime::generate::{CachedPrefix, Completion, Request};
use crate::runtime::text::{ChatTemplate, Message, Tokenizer};

/// Messages of a conversation and the KV cache of the part that the model has already read.
#[derive(Debug)]
pub struct Conversation {
    template: ChatTemplate,
    /// System messages at the beginning of the conversation; [`Conversation::reset`] keeps them.
    system: Vec<Message>,
    messages: Vec<Message>,
    prefix: Option<CachedPrefix>,
}

impl Conversation {
    /// Creates an empty conversation that uses the pack's chat template.
    ///
    /// # Errors
    /// The pack has no chat template.
    pub fn new(session: &Session, system: Option<&str>) -> Result<Conversation> {
        let system: Vec<Message> = system.map(|text| Message::new("system", text)).into_iter().collect();
        Ok(Conversation { template: session.chat_template()?, messages: system.clone(), system, prefix: None })
    }

    /// Removes all messages except the system message.
    pub fn reset(&mut self) {
        self.messages = self.system.clone();
    }

    /// Generates the answer to a message with the length and sampling of `request`, whose tokens are replaced; `sink`
    /// is called with each piece of text as it is generated. If generation fails, the message is removed from the
    /// history.
    ///
    /// # Errors
    /// The same as those of [`Session::encode_chats`] and [`Session::generate`].
    pub fn answer(
        &mut self,
        message: impl Into<String>,
        session: &mut Session,
        request: Request,
        options: &GenerateOptions,
        sink: impl FnMut(Place, &str) -> Result<()>,
    ) -> Result<Completion> {
        self.messages.push(Message::new("user", message));
        let answered = self.next_turn(session, request, options, sink);
        match &answered {
            Ok((_, reply)) => self.messages.push(Message::new("assistant", reply)),
            Err(_) => drop(self.messages.pop()),
        }
        answered.map(|(done, _)| done)
    }

    /// Generates the next turn; returns the completion and the text of it that is kept in the history.
    fn next_turn(
        &mut self,
        session: &mut Session,
        request: Request,
        options: &GenerateOptions,
        mut sink: impl FnMut(Place, &str) -> Result<()>,
    ) -> Result<(Completion, String)> {
        let ids = session.encode_chats(&self.template, std::slice::from_ref(&self.messages))?.concat();
        let stop_tokens = session.end_of_turn(&self.template)?.into_iter().chain(options.stop_tokens.clone()).collect();
        let options = GenerateOptions { batch: 1, keep_prefixes: true, stop_tokens, ..options.clone() };
        let mut channels = Channels::new(session.tokenizer()?);
        let request = Request { ids, prefix: self.prefix.take(), ..request };
        let generation = session.generate(vec![request], &options, |event| {
            let place = channels.place(event.id, event.text);
            sink(place, event.text)
        })?;
        let mut done = generation.outcome.completions.into_iter().next().expect("one completion per request");
        self.prefix = done.prefix.take();
        let reply = reply(&done, session.tokenizer()?)?;
        Ok((done, reply))
    }
}

/// Part of the reply that a piece of generated text belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Answer for the user.
    Answer,
    /// Reasoning of the model, outside of the answer.
    Aside,
    /// Names of roles and channels between the control tokens.
    Header,
}

/// Tracks the channels of replies like `<|channel|>final<|message|>…` (gpt-oss), where only `final` is the answer.
/// The whole output of all other models is the answer.
struct Channels {
    start: Option<u32>,
    channel: Option<u32>,
    message: Option<u32>,
    name: String,
    place: Place,
}

impl Channels {
    fn new(tokenizer: &Tokenizer) -> Channels {
        let [start, channel, message] = ["<|start|>", "<|channel|>", "<|message|>"].map(|token| tokenizer.id(token));
        Channels { start, channel, message, name: String::new(), place: Place::Answer }
    }

    fn place(&mut self, id: u32, text: &str) -> Place {
        let id = Some(id).filter(|_| self.channel.is_some() && self.message.is_some());
        if id.is_some() && (id == self.start || id == self.channel) {
            self.name.clear();
            self.place = Place::Header;
        } else if id.is_some() && id == self.message {
            self.place = if self.name.trim() == "final" { Place::Answer } else { Place::Aside };
        } else if self.place == Place::Header {
            self.name.push_str(text);
        }
        self.place
    }
}

/// Returns the text of a reply that is kept in the history. Of a reply in channels (gpt-oss) this is only the final
/// channel, as its template expects.
fn reply(done: &Completion, tokenizer: &Tokenizer) -> Result<String> {
    let spelled = tokenizer.decode(&done.ids, false)?;
    match spelled.rsplit_once("<|channel|>final<|message|>") {
        Some((_, last)) => Ok(last.split("<|").next().unwrap_or_default().to_string()),
        None => Ok(done.text.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_final_channel_is_the_answer() {
        let (start, channel, message) = (Some(1), Some(2), Some(3));
        let mut channels = Channels { start, channel, message, name: String::new(), place: Place::Answer };
        let tokens =
            [(2, ""), (9, "ana"), (9, "lysis"), (3, ""), (9, "hm"), (1, ""), (9, "assistant"), (2, ""), (9, "final")];
        let places: Vec<Place> = tokens.iter().map(|(id, text)| channels.place(*id, text)).collect();
        assert_eq!(places[4], Place::Aside);
        assert_eq!(places.iter().filter(|place| **place == Place::Header).count(), 7);
        assert_eq!((channels.place(3, ""), channels.place(9, "Hello")), (Place::Answer, Place::Answer));
    }

    #[test]
    fn a_model_without_channels_only_answers() {
        let mut channels =
            Channels { start: None, channel: None, message: None, name: String::new(), place: Place::Answer };
        assert_eq!(channels.place(2, "x"), Place::Answer);
    }
}
