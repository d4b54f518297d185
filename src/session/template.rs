//! Renders chat templates in processes of limited memory and time. Templates come from untrusted files, and the engine
//! that runs them cannot bound their memory.
//!
//! The program that uses the library supplies a command line that calls [`answer`]. A [`Renderer`] starts such a
//! process when all that it has are busy, and keeps it for later questions: starting one takes longer than rendering a
//! conversation. Questions and answers are JSON, each after its length in four bytes. A process that dies or takes too
//! long is replaced at the next question; all end when their standard input is closed, also by the death of the parent.

use crate::error::{Cause, Context, Error, Result};
use crate::generate::text::{ChatTemplate, Message, RenderOptions};
use crate::resources::child_refused;
use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage, setrlimit};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum address space of a process in bytes. At its start the process uses some tens of MB; a conversation of a
/// million tokens takes a few MB.
const MEMORY: u64 = 512 << 20;
/// Maximum processor time of a question in seconds; a conversation takes milliseconds.
const SECONDS: u64 = 2;
/// Time after which a process is killed: that of a question, and as much again on a busy machine.
const WALL: Duration = Duration::from_secs(2 * SECONDS);
/// Time that the first question of a process may take in addition, while the program starts.
const START: Duration = Duration::from_secs(6);
/// Number of conversations that one question may hold.
const CONVERSATIONS: usize = 32;
/// Maximum length of an answer in bytes; no context holds longer prompts.
const LONGEST_ANSWER: usize = 256 << 20;
/// Number of questions after which a process is replaced, because its memory may be fragmented.
const QUESTIONS: usize = 10_000;

/// Request to a process.
#[derive(Serialize, Deserialize)]
struct TemplateQuestion<'a> {
    template: Cow<'a, ChatTemplate>,
    options: Cow<'a, RenderOptions>,
    conversations: Cow<'a, [Vec<Message>]>,
    longest: usize,
}

/// Answer of a process: the prompts, or the reason why there are none.
type Answer = std::result::Result<Vec<String>, Refusal>;

/// Error of a rendering.
#[derive(Serialize, Deserialize)]
struct Refusal {
    cause: RefusalCause,
    message: String,
    help: Option<String>,
}

/// Cause of a [`Refusal`]; it determines the kind of the error.
#[derive(Serialize, Deserialize)]
enum RefusalCause {
    Usage,
    Unsupported,
    Corrupt,
}

/// Argument with which the program `iec` calls [`answer`].
pub const RENDER_TEMPLATE: &str = "render-template";

/// The command line of a process that calls [`answer`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderProcess {
    /// Path of the program.
    pub program: PathBuf,
    /// Arguments of the program.
    pub arguments: Vec<String>,
}

impl RenderProcess {
    /// Returns the command line with which the program `iec` renders templates.
    pub fn of_program(program: &Path) -> RenderProcess {
        RenderProcess { program: program.to_path_buf(), arguments: vec![RENDER_TEMPLATE.into()] }
    }
}

/// Processes that render chat templates. It has at most as many processes as threads call it at the same time.
#[derive(Debug)]
pub struct Renderer {
    process: RenderProcess,
    idle: Mutex<Vec<Worker>>,
}

/// A process that waits for a question.
#[derive(Debug)]
struct Worker {
    child: Child,
    input: ChildStdin,
    output: ChildStdout,
    /// Number of questions that it has answered.
    answered: usize,
}

impl Renderer {
    /// Creates a renderer without processes.
    pub fn new(process: RenderProcess) -> Renderer {
        Renderer { process, idle: Mutex::default() }
    }

    /// Renders the prompt of each conversation; a prompt may have `longest` bytes.
    ///
    /// # Errors
    /// The template fails, refuses a conversation, or exceeds the limits of length, memory and time.
    pub fn render(
        &self,
        template: &ChatTemplate,
        conversations: &[Vec<Message>],
        options: &RenderOptions,
        longest: usize,
    ) -> Result<Vec<String>> {
        let mut prompts = Vec::with_capacity(conversations.len());
        for some in conversations.chunks(CONVERSATIONS) {
            let (template, options) = (Cow::Borrowed(template), Cow::Borrowed(options));
            let question = TemplateQuestion { template, options, conversations: Cow::Borrowed(some), longest };
            prompts.extend(self.ask(&question)?);
        }
        Ok(prompts)
    }

    /// Asks a process that is idle, or a new one.
    fn ask(&self, question: &TemplateQuestion<'_>) -> Result<Vec<String>> {
        let mut worker = self.worker()?;
        match worker.ask(&serde_json::to_vec(question).expect("plain data always serializes")) {
            Ok(answer) => {
                if worker.answered < QUESTIONS {
                    self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(worker);
                }
                answer.map_err(|refusal| refusal.into_error(question.template.as_ref()))
            }
            Err(why) => {
                let limits = format!("{} MiB of memory or {SECONDS} s", MEMORY >> 20);
                let found = format!("the chat template exceeded its limits of {limits} ({})", worker.end(&why));
                Err(Error::corrupt(found).at(question.template.path()).help(OTHER_TEMPLATE))
            }
        }
    }

    /// Takes an idle process that is still alive, or starts one.
    fn worker(&self) -> Result<Worker> {
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(mut worker) = idle else { return Worker::start(&self.process) };
            if matches!(worker.child.try_wait(), Ok(None)) {
                return Ok(worker);
            }
        }
    }
}

/// Advice for a template that fails.
const OTHER_TEMPLATE: &str = "name a built-in template or a file with --chat-template";

impl Worker {
    fn start(process: &RenderProcess) -> Result<Worker> {
        let mut command = Command::new(&process.program);
        command.args(&process.arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // An interrupt from the terminal concerns the parent alone: it may end an answer and go on with another.
        command.process_group(0);
        let mut child = command.spawn().map_err(child_refused).at(&process.program)?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let (input, output) = (input.expect("a pipe was asked for"), output.expect("a pipe was asked for"));
        let worker = Worker { child, input, output, answered: 0 };
        rustix::io::ioctl_fionbio(&worker.input, true).map_err(std::io::Error::from)?;
        rustix::io::ioctl_fionbio(&worker.output, true).map_err(std::io::Error::from)?;
        Ok(worker)
    }

    /// Writes a question and reads its answer, within the time limit.
    fn ask(&mut self, question: &[u8]) -> std::io::Result<Answer> {
        let deadline = Instant::now() + WALL + if self.answered == 0 { START } else { Duration::ZERO };
        let length = u32::try_from(question.len()).map_err(|_| ErrorKind::FileTooLarge)?;
        let question = [&length.to_le_bytes(), question].concat();
        let (mut written, mut answer) = (0, Vec::new());
        let mut buffer = vec![0; 64 << 10];
        loop {
            self.wait(written < question.len(), deadline)?;
            if written < question.len() {
                written += ready(self.input.write(&question[written..]))?;
            }
            let read = match self.output.read(&mut buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                read => ready(read)?,
            };
            answer.extend_from_slice(&buffer[..read]);
            let Some((length, body)) = answer.split_first_chunk() else { continue };
            let length = u32::from_le_bytes(*length) as usize;
            if length > LONGEST_ANSWER || body.len() > length {
                return Err(ErrorKind::InvalidData.into());
            }
            if body.len() == length {
                self.answered += 1;
                return serde_json::from_slice(body).map_err(std::io::Error::from);
            }
        }
    }

    /// Waits until the process can be read, or written if `writes`.
    fn wait(&self, writes: bool, deadline: Instant) -> std::io::Result<()> {
        let left = deadline.checked_duration_since(Instant::now()).ok_or(ErrorKind::TimedOut)?;
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut both = [PollFd::new(&self.output, PollFlags::IN), PollFd::new(&self.input, PollFlags::OUT)];
        let polled = poll(if writes { &mut both } else { &mut both[..1] }, Some(&left));
        match polled {
            Ok(0) => Err(ErrorKind::TimedOut.into()),
            Ok(_) => Ok(()),
            Err(e) if e == rustix::io::Errno::INTR => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Ends the process after a failure, and describes how it ended.
    fn end(&mut self, why: &std::io::Error) -> String {
        if why.kind() != ErrorKind::TimedOut {
            // A process that has closed its pipes is about to end by itself.
            for _ in 0..100 {
                if let Ok(Some(status)) = self.child.try_wait() {
                    return status.to_string();
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        why.to_string()
    }
}

/// Processes end with the renderer.
impl Drop for Worker {
    fn drop(&mut self) {
        // Both fail only if the process has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns 0 for a pipe that is not ready.
fn ready(done: std::io::Result<usize>) -> std::io::Result<usize> {
    match done {
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(0),
        done => done,
    }
}

impl Refusal {
    fn new(error: &Error) -> Refusal {
        let cause = match error.cause() {
            Cause::Usage(_) => RefusalCause::Usage,
            Cause::Unsupported(_) => RefusalCause::Unsupported,
            _ => RefusalCause::Corrupt,
        };
        Refusal { cause, message: error.cause().to_string(), help: error.help_text().map(String::from) }
    }

    fn into_error(self, template: &ChatTemplate) -> Error {
        let error = match self.cause {
            RefusalCause::Usage => Error::usage(self.message),
            RefusalCause::Unsupported => Error::unsupported(self.message),
            RefusalCause::Corrupt => Error::corrupt(self.message),
        };
        error.at(template.path()).help(self.help.unwrap_or_else(|| OTHER_TEMPLATE.into()))
    }
}

/// Runs in the process: limits the memory of this process, and answers questions until the input ends, each within its
/// limit of processor time. The limits remain in force, so the process should exit afterwards.
///
/// # Errors
/// The limits cannot be set, or the input has something else than questions of a [`Renderer`].
pub fn answer(mut input: impl Read, mut output: impl Write) -> Result<()> {
    for (what, limit) in [(Resource::RLIMIT_AS, MEMORY), (Resource::RLIMIT_CORE, 0)] {
        setrlimit(what, limit, limit).map_err(std::io::Error::from)?;
    }
    let mut length = [0; 4];
    while read_whole(&mut input, &mut length)? {
        limit_time()?;
        let length = u32::from_le_bytes(length);
        let mut question = Vec::new();
        input.by_ref().take(length.into()).read_to_end(&mut question)?;
        let asked: TemplateQuestion<'_> = serde_json::from_slice(&question)
            .map_err(|e| Error::usage(format!("render-template is an internal command of `iec`: {e}")))?;
        let texts =
            asked.conversations.iter().map(|some| asked.template.render_with(some, &asked.options, asked.longest));
        let answer: Answer = texts.collect::<Result<Vec<String>>>().map_err(|e| Refusal::new(&e));
        let answer = serde_json::to_vec(&answer).expect("plain data always serializes");
        let length = u32::try_from(answer.len()).map_err(|_| Error::corrupt("found prompts of more than 4 GiB"))?;
        output.write_all(&length.to_le_bytes())?;
        output.write_all(&answer)?;
        output.flush()?;
    }
    Ok(())
}

/// Fills a buffer; returns false if the input has ended before.
fn read_whole(input: &mut impl Read, buffer: &mut [u8]) -> Result<bool> {
    match input.read_exact(buffer) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == ErrorKind::UnexpectedEof => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Sets the limit of processor time for the next question. The limit counts all time since the start of the process,
/// in whole seconds.
fn limit_time() -> Result<()> {
    let used = getrusage(UsageWho::RUSAGE_SELF).map_err(std::io::Error::from)?;
    let used = used.user_time().tv_sec() + used.system_time().tv_sec() + 1;
    let (_, most) = getrlimit(Resource::RLIMIT_CPU).map_err(std::io::Error::from)?;
    let limit = u64::try_from(used).unwrap_or(0).saturating_add(SECONDS).min(most);
    setrlimit(Resource::RLIMIT_CPU, limit, most).map_err(std::io::Error::from)?;
    Ok(())
}
