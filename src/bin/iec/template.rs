//! Chat templates are programs of strangers whose memory their engine cannot bound: they run in a process of their own,
//! the hidden command `render-template`, which limits itself to [`MEMORY`] and [`SECONDS`] before it looks at the template.

use iec::error::{Context, Error, Result};
use iec::runtime::text::{ChatTemplate, Message};
use nix::sys::resource::{Resource, setrlimit};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::process::{Command, Stdio};

/// Name of the command.
pub const COMMAND: &str = "render-template";
/// Address space of the process; it starts with some tens of MB. A conversation of a million tokens takes a few MB.
const MEMORY: u64 = 512 << 20;
/// Processor time of the process; templates take milliseconds.
const SECONDS: u64 = 2;
/// No context holds a longer prompt.
const LONGEST_PROMPT: u64 = 256 << 20;

#[derive(Serialize)]
struct Question<'a> {
    template: &'a ChatTemplate,
    messages: &'a [Message],
}

#[derive(Deserialize)]
struct Asked {
    template: ChatTemplate,
    messages: Vec<Message>,
}

#[derive(Serialize, Deserialize)]
enum Answer {
    Text(String),
    Error(String),
}

/// The prompt that asks for the next turn of a conversation.
///
/// # Errors
/// The template fails, refuses the conversation, or needs more than a template may.
pub fn render(template: &ChatTemplate, messages: &[Message]) -> Result<String> {
    let program = std::env::current_exe()?;
    let mut command = Command::new(&program);
    command.arg(COMMAND).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().at(&program)?;
    let question = serde_json::to_vec(&Question { template, messages }).expect("plain data always serializes");
    let mut answer = Vec::new();
    // The child reads everything before it writes; when it dies early, its status tells more than the broken pipe.
    let _ = child.stdin.take().expect("a pipe was asked for").write_all(&question);
    let read = child.stdout.take().expect("a pipe was asked for").take(LONGEST_PROMPT).read_to_end(&mut answer);
    let status = child.wait()?;
    read?;
    let answer = status.success().then(|| serde_json::from_slice(&answer).ok()).flatten();
    match answer {
        Some(Answer::Text(text)) => Ok(text),
        Some(Answer::Error(why)) => Err(Error::corrupt(why)),
        None => {
            let limits = format!("{} MiB of memory or {SECONDS} s", MEMORY >> 20);
            Err(Error::corrupt(format!("the chat template needs more than {limits} ({status})")))
        }
    }
    .at(template.path())
    .help("the template is damaged or hostile; use --prompt without it, or put another chat_template.jinja into the directory")
}

/// The other side: limits this process, then answers one question.
pub fn answer() -> Result<()> {
    for (what, limit) in [(Resource::RLIMIT_AS, MEMORY), (Resource::RLIMIT_CPU, SECONDS), (Resource::RLIMIT_CORE, 0)] {
        setrlimit(what, limit, limit).map_err(std::io::Error::from)?;
    }
    let mut question = Vec::new();
    std::io::stdin().read_to_end(&mut question)?;
    let asked: Asked = serde_json::from_slice(&question)
        .map_err(|e| Error::usage(format!("{COMMAND} is asked by `iec run` itself: {e}")))?;
    let answer = match asked.template.render(&asked.messages) {
        Ok(text) => Answer::Text(text),
        Err(e) => Answer::Error(e.cause().to_string()),
    };
    serde_json::to_writer(std::io::stdout().lock(), &answer).map_err(|e| Error::from(std::io::Error::from(e)))
}
