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
/// Processor time of the process; a conversation takes milliseconds.
const SECONDS: u64 = 2;
/// So many conversations share a process and its limits.
const CONVERSATIONS: usize = 32;
/// No context holds a longer prompt.
const LONGEST_PROMPT: u64 = 256 << 20;

#[derive(Serialize)]
struct Question<'a> {
    template: &'a ChatTemplate,
    conversations: &'a [Vec<Message>],
}

#[derive(Deserialize)]
struct Asked {
    template: ChatTemplate,
    conversations: Vec<Vec<Message>>,
}

#[derive(Serialize, Deserialize)]
enum Answer {
    Texts(Vec<String>),
    Error(String),
}

/// The prompts that ask for the next turn of each conversation.
///
/// # Errors
/// The template fails, refuses the conversation, or needs more than a template may.
pub fn render(template: &ChatTemplate, conversations: &[Vec<Message>]) -> Result<Vec<String>> {
    let texts = conversations.chunks(CONVERSATIONS).map(|some| ask(template, some)).collect::<Result<Vec<_>>>()?;
    Ok(texts.concat())
}

/// Has one process render some conversations.
fn ask(template: &ChatTemplate, conversations: &[Vec<Message>]) -> Result<Vec<String>> {
    let program = std::env::current_exe()?;
    let mut command = Command::new(&program);
    command.arg(COMMAND).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().at(&program)?;
    let question = serde_json::to_vec(&Question { template, conversations }).expect("plain data always serializes");
    let mut answer = Vec::new();
    // The child reads everything before it writes; when it dies early, its status tells more than the broken pipe.
    let _ = child.stdin.take().expect("a pipe was asked for").write_all(&question);
    let read = child.stdout.take().expect("a pipe was asked for").take(LONGEST_PROMPT).read_to_end(&mut answer);
    let status = child.wait()?;
    read?;
    let answer = status.success().then(|| serde_json::from_slice(&answer).ok()).flatten();
    match answer {
        Some(Answer::Texts(texts)) => Ok(texts),
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
    let texts: Result<Vec<String>> =
        asked.conversations.iter().map(|messages| asked.template.render(messages)).collect();
    let answer = match texts {
        Ok(texts) => Answer::Texts(texts),
        Err(e) => Answer::Error(e.cause().to_string()),
    };
    serde_json::to_writer(std::io::stdout().lock(), &answer).map_err(|e| Error::from(std::io::Error::from(e)))
}
