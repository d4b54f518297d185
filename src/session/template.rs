//! Renders chat templates in a process of limited memory and time. Templates come from untrusted files, and the engine
//! that runs them cannot bound their memory.
//!
//! The program that uses the library supplies a command line that calls [`answer`]; [`RenderProcess::render`] starts
//! it, writes the template and the conversations to its standard input and reads the prompts from its standard
//! output.

use crate::error::{Context, Error, Result};
use crate::resources::child_refused;
use crate::runtime::text::{ChatTemplate, Message};
use nix::sys::resource::{Resource, setrlimit};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Maximum address space of the process in bytes. At its start the process uses some tens of MB; a conversation of a
/// million tokens takes a few MB.
const MEMORY: u64 = 512 << 20;
/// Maximum processor time of the process in seconds; a conversation takes milliseconds.
const SECONDS: u64 = 2;
/// Number of conversations that one process renders within its limits.
const CONVERSATIONS: usize = 32;
/// Maximum length of the child's answer in bytes; no context holds longer prompts.
const LONGEST_PROMPT: u64 = 256 << 20;

/// Request to the child process. Its answer is the prompts, or the reason why there are none.
#[derive(Serialize, Deserialize)]
struct Question<'a> {
    template: Cow<'a, ChatTemplate>,
    conversations: Cow<'a, [Vec<Message>]>,
    longest: usize,
}

/// The command line of a process that calls [`answer`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderProcess {
    /// Path of the program.
    pub program: PathBuf,
    /// Arguments of the program.
    pub arguments: Vec<String>,
}

impl RenderProcess {
    /// Renders the prompt for the next turn of each conversation; a prompt may have `longest` bytes.
    ///
    /// # Errors
    /// The template fails, refuses a conversation, or exceeds the limits of length, memory and time.
    pub fn render(
        &self,
        template: &ChatTemplate,
        conversations: &[Vec<Message>],
        longest: usize,
    ) -> Result<Vec<String>> {
        let chunks = conversations.chunks(CONVERSATIONS);
        Ok(chunks.map(|some| self.ask(template, some, longest)).collect::<Result<Vec<_>>>()?.concat())
    }

    /// Renders some conversations in one process.
    fn ask(&self, template: &ChatTemplate, conversations: &[Vec<Message>], longest: usize) -> Result<Vec<String>> {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(child_refused).at(&self.program)?;
        let (template_of, conversations) = (Cow::Borrowed(template), Cow::Borrowed(conversations));
        let question = Question { template: template_of, conversations, longest };
        let question = serde_json::to_vec(&question).expect("plain data always serializes");
        let mut answer = Vec::new();
        // The child reads everything before it writes. If it dies early, its exit status is a better reason than the
        // broken pipe.
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
                Err(Error::corrupt(format!("the chat template exceeded its limits of {limits} ({status})")))
            }
        }
        .at(template.path())
        .help(
            "name a built-in template with --chat-template, or put another chat_template.jinja into the directory of \
             the pack",
        )
    }
}

/// Runs in the child process: limits the memory and time of this process, then answers one request. The limits remain
/// in force, so the process should exit afterwards.
///
/// # Errors
/// The limits cannot be set, or the input is not a request of [`RenderProcess::render`].
pub fn answer(mut input: impl Read, output: impl Write) -> Result<()> {
    for (what, limit) in [(Resource::RLIMIT_AS, MEMORY), (Resource::RLIMIT_CPU, SECONDS), (Resource::RLIMIT_CORE, 0)] {
        setrlimit(what, limit, limit).map_err(std::io::Error::from)?;
    }
    let mut question = Vec::new();
    input.read_to_end(&mut question)?;
    let asked: Question<'_> = serde_json::from_slice(&question)
        .map_err(|e| Error::usage(format!("render-template is an internal command of `iec run`: {e}")))?;
    let texts = asked.conversations.iter().map(|messages| asked.template.render(messages, asked.longest));
    let answer = texts.collect::<Result<Vec<String>>>().map_err(|e| e.cause().to_string());
    serde_json::to_writer(output, &answer).map_err(|e| Error::from(std::io::Error::from(e)))
}
