//! Renders chat templates in a process of limited memory and time. Templates come from untrusted files, and the engine
//! that runs them cannot bound their memory.
//!
//! The program that uses the library names a command line that calls [`answer`]; [`RenderProcess::render`] starts it,
//! writes the template and the conversations to its standard input and reads the prompts from its standard output.

use crate::error::{Context, Error, Result};
use crate::runtime::text::{ChatTemplate, Message};
use nix::sys::resource::{Resource, setrlimit};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Address space of the process; it starts with some tens of MB. A conversation of a million tokens takes a few MB.
const MEMORY: u64 = 512 << 20;
/// Processor time of the process; a conversation takes milliseconds.
const SECONDS: u64 = 2;
/// So many conversations share a process and its limits.
const CONVERSATIONS: usize = 32;
/// No context holds a longer prompt.
const LONGEST_PROMPT: u64 = 256 << 20;

/// What the child is asked; its answer is the prompts, or why there are none.
#[derive(Serialize, Deserialize)]
struct Question<'a> {
    template: Cow<'a, ChatTemplate>,
    conversations: Cow<'a, [Vec<Message>]>,
}

/// The command line of a process that calls [`answer`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderProcess {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
}

impl RenderProcess {
    /// The prompts that ask for the next turn of each conversation.
    ///
    /// # Errors
    /// The template fails, refuses the conversation, or needs more than a template may.
    pub fn render(&self, template: &ChatTemplate, conversations: &[Vec<Message>]) -> Result<Vec<String>> {
        let chunks = conversations.chunks(CONVERSATIONS);
        Ok(chunks.map(|some| self.ask(template, some)).collect::<Result<Vec<_>>>()?.concat())
    }

    /// Has one process render some conversations.
    fn ask(&self, template: &ChatTemplate, conversations: &[Vec<Message>]) -> Result<Vec<String>> {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().at(&self.program)?;
        let question = Question { template: Cow::Borrowed(template), conversations: Cow::Borrowed(conversations) };
        let question = serde_json::to_vec(&question).expect("plain data always serializes");
        let mut answer = Vec::new();
        // The child reads everything before it writes; when it dies early, its status tells more than the broken pipe.
        let _ = child.stdin.take().expect("a pipe was asked for").write_all(&question);
        let read = child.stdout.take().expect("a pipe was asked for").take(LONGEST_PROMPT).read_to_end(&mut answer);
        let status = child.wait()?;
        read?;
        let answer: Option<std::result::Result<Vec<String>, String>> =
            status.success().then(|| serde_json::from_slice(&answer).ok()).flatten();
        match answer {
            Some(answer) => answer.map_err(Error::corrupt),
            None => {
                let limits = format!("{} MiB of memory or {SECONDS} s", MEMORY >> 20);
                Err(Error::corrupt(format!("the chat template needs more than {limits} ({status})")))
            }
        }
        .at(template.path())
        .help("the template is damaged or hostile; use --prompt without it, or put another chat_template.jinja into the directory")
    }
}

/// The side of the child: limits this process, then answers one question. Both limits stay, so the process should end.
///
/// # Errors
/// The limits cannot be set, or the input is no question of [`RenderProcess::render`].
pub fn answer(mut input: impl Read, output: impl Write) -> Result<()> {
    for (what, limit) in [(Resource::RLIMIT_AS, MEMORY), (Resource::RLIMIT_CPU, SECONDS), (Resource::RLIMIT_CORE, 0)] {
        setrlimit(what, limit, limit).map_err(std::io::Error::from)?;
    }
    let mut question = Vec::new();
    input.read_to_end(&mut question)?;
    let asked: Question<'_> = serde_json::from_slice(&question)
        .map_err(|e| Error::usage(format!("render-template is asked by `iec run` itself: {e}")))?;
    let texts = asked.conversations.iter().map(|messages| asked.template.render(messages));
    let answer = texts.collect::<Result<Vec<String>>>().map_err(|e| e.cause().to_string());
    serde_json::to_writer(output, &answer).map_err(|e| Error::from(std::io::Error::from(e)))
}
