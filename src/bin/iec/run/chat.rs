//! A conversation: each turn is rendered with all before it through the model's template, and what the model has read
//! already is not computed again.

use super::Args;
use crate::global::Global;
use crate::model::Model;
use crate::template;
use iec::error::{Cause, Error, Result};
use iec::interrupt;
use iec::runtime::generate::{Completion, Options, Session, generate};
use iec::runtime::text::{ChatTemplate, Message, Tokenizer};
use std::io::{IsTerminal, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// Talks until the input ends.
pub fn chat(args: &Args, model: &mut Model, global: &Global) -> Result<()> {
    let template = ChatTemplate::open(&model.reader.dir)?;
    let eos = args.eos(model, Some(&template))?;
    let mut talk = Conversation { args, template, eos, messages: args.system_message(), session: None };
    if let Some(prompt) = &args.prompt {
        return talk.answer(prompt.clone(), model, global);
    }
    let interactive = std::io::stdin().is_terminal();
    if interactive {
        global.note("/reset forgets the conversation, /exit or Ctrl-D ends it");
    }
    let lines = lines_of_stdin();
    loop {
        if interactive {
            eprint!("> ");
        }
        let Some(line) = next_line(&lines)? else { break };
        match line.trim() {
            "" => continue,
            "/exit" if interactive => break,
            "/reset" if interactive => talk.messages = args.system_message(),
            _ => match talk.answer(line, model, global) {
                // The conversation has outgrown the context: the user can shorten or reset it.
                Err(e) if interactive && matches!(e.cause(), Cause::Usage(_)) => {
                    eprintln!("error: {e}\nhelp: /reset forgets the conversation");
                    talk.messages.pop();
                }
                answered => answered?,
            },
        }
    }
    Ok(())
}

struct Conversation<'a> {
    args: &'a Args,
    template: ChatTemplate,
    eos: Vec<u32>,
    messages: Vec<Message>,
    session: Option<Session>,
}

impl Conversation<'_> {
    fn answer(&mut self, message: String, model: &mut Model, global: &Global) -> Result<()> {
        self.messages.push(Message::new("user", message));
        let Model { engine, speculator, tokenizer: Some(tokenizer), .. } = model else {
            return model.tokenizer().map(|_| ());
        };
        let text = template::render(&self.template, std::slice::from_ref(&self.messages))?.concat();
        let mut request = self.args.request(tokenizer.encode_plain(&text)?);
        request.session = self.session.take();
        let options = Options {
            tokenizer: Some(tokenizer),
            batch: 1,
            eos: &self.eos,
            show_special: self.args.special,
            keep_sessions: true,
        };
        let mut stdout = std::io::stdout().lock();
        let mut channels = Channels::new(tokenizer);
        let outcome = generate(engine, speculator, vec![request], &options, |event| {
            match channels.place(event.id, event.text) {
                _ if self.args.special => stdout.write_all(event.text.as_bytes())?,
                Place::Answer => stdout.write_all(event.text.as_bytes())?,
                Place::Aside if !global.quiet => eprint!("{}", event.text),
                Place::Aside | Place::Header => {}
            }
            Ok(stdout.flush()?)
        })?;
        writeln!(stdout)?;
        for done in outcome.completions {
            global.note(in_words(&done));
            self.messages.push(Message::new("assistant", reply(&done, tokenizer)?));
            self.session = done.session;
        }
        Ok(())
    }
}

/// Where a piece of text belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// What the user asked for.
    Answer,
    /// The model thinking aloud.
    Aside,
    /// Names of roles and channels.
    Header,
}

/// Follows models that answer in channels, `<|channel|>final<|message|>…` (gpt-oss): only `final` is the answer. For all
/// other models everything is.
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

/// What the history keeps of an answer: of a reply in channels (gpt-oss) only the final one, as its template expects.
fn reply(done: &Completion, tokenizer: &Tokenizer) -> Result<String> {
    let spelled = tokenizer.decode(&done.ids, false)?;
    match spelled.rsplit_once("<|channel|>final<|message|>") {
        Some((_, last)) => Ok(last.split("<|").next().unwrap_or_default().to_string()),
        None => Ok(done.text.clone()),
    }
}

fn in_words(done: &Completion) -> String {
    let seconds = done.decode_time().as_secs_f64();
    let rate = if seconds > 0.0 { (done.ids.len() - 1) as f64 / seconds } else { 0.0 };
    format!(
        "{} prompt tokens ({} reused), {} new, {rate:.1} tokens/s",
        done.prompt_tokens,
        done.reused_tokens,
        done.ids.len()
    )
}

/// Reads on a thread of its own, so that an interrupt is noticed while waiting for input.
fn lines_of_stdin() -> Receiver<std::io::Result<String>> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    receiver
}

fn next_line(lines: &Receiver<std::io::Result<String>>) -> Result<Option<String>> {
    loop {
        match lines.recv_timeout(Duration::from_millis(50)) {
            Ok(line) => return line.map(Some).map_err(|e| Error::from(e).at("standard input")),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => interrupt::check()?,
        }
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
