//! A conversation: each turn is rendered with all before it through the model's template, and what the model has read
//! already is not computed again.

use super::Args;
use crate::global::Global;
use crate::model::Model;
use iec::error::{Error, Result};
use iec::interrupt;
use iec::runtime::generate::{Completion, Options, Session, generate};
use iec::runtime::text::{ChatTemplate, Message, Tokenizer};
use std::io::{IsTerminal, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// Talks until the input ends.
pub fn chat(args: &Args, model: &mut Model, global: &Global) -> Result<()> {
    let template = ChatTemplate::open(&model.reader.dir)?;
    let mut eos = if args.ignore_eos { Vec::new() } else { model.engine.config().eos.clone() };
    if let (false, Some(token)) = (args.ignore_eos, template.eos_token()) {
        eos.extend(model.tokenizer()?.id(token));
    }
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
            _ => talk.answer(line, model, global)?,
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
        let Model { engine, tokenizer: Some(tokenizer), .. } = model else {
            return model.tokenizer().map(|_| ());
        };
        let mut request = self.args.request(tokenizer.encode_plain(&self.template.render(&self.messages)?)?);
        request.session = self.session.take();
        let options = Options {
            tokenizer: Some(tokenizer),
            batch: 1,
            eos: &self.eos,
            show_special: self.args.special,
            keep_sessions: true,
        };
        let mut stdout = std::io::stdout().lock();
        let outcome = generate(engine, vec![request], &options, |event| {
            stdout.write_all(event.text.as_bytes())?;
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
