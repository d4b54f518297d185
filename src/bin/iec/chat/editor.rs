//! Line editor on the terminal: editing, history, completion, texts of several lines.
//!
//! The editor reads and writes the controlling terminal, so stdout may be a pipe. While it waits, a thread looks for
//! SIGINT, SIGTERM and SIGHUP from elsewhere; it restores the terminal and ends the process with the exit code of the
//! signal.

use super::completion::candidates;
use super::history_file::HistoryFile;
use iec::error::{Error, Result};
use iec::interrupt;
use iec::resources::spawn;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use rustyline::completion::Completer;
use rustyline::config::{Behavior, BellStyle, CompletionType};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::{History, MemHistory};
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Context};
use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Text before the cursor.
const PROMPT: &str = "> ";
/// Marks at both ends of a text of several lines.
const MARKS: &str = "\"\"\"";
/// Number of history entries that are kept.
pub const HISTORY_ENTRIES: usize = 1000;
/// Interval at which the thread looks for signals.
const INTERVAL: Duration = Duration::from_millis(50);

/// True while the editor waits for keys.
static WAITING: AtomicBool = AtomicBool::new(false);

/// Input of the user.
#[derive(Debug, PartialEq, Eq)]
pub enum UserInput {
    /// Line, or lines that are joined by backslashes or were pasted.
    Line(String),
    /// Text between marks, which is never a command.
    Quoted(String),
    /// Ctrl-C; true if nothing was typed.
    Interrupted(bool),
    /// Ctrl-D at an empty prompt, or the terminal was closed.
    End,
}

/// Line editor with its history.
pub struct Editor {
    inner: rustyline::Editor<Helper, MemHistory>,
    file: Option<HistoryFile>,
}

impl Editor {
    /// Opens the editor with the history of `path`; without a path, the history is kept in memory only. `colors`
    /// permits a bold prompt.
    ///
    /// # Errors
    /// The terminal cannot be used.
    pub fn new(path: Option<PathBuf>, colors: bool) -> Result<Editor> {
        let config = Config::builder()
            .max_history_size(HISTORY_ENTRIES)
            .and_then(|config| config.history_ignore_dups(true))
            .map_err(refused)?
            .completion_type(CompletionType::List)
            .completion_show_all_if_ambiguous(true)
            .bell_style(BellStyle::None)
            .behavior(Behavior::PreferTerm)
            .build();
        let history = MemHistory::with_config(&config);
        let mut inner = rustyline::Editor::with_history(config, history).map_err(refused)?;
        inner.set_helper(Some(Helper { colors, ..Helper::default() }));
        let mut file = path.map(HistoryFile::new);
        for entry in file.iter_mut().flat_map(HistoryFile::read) {
            inner.history_mut().add(&entry).map_err(refused)?;
        }
        end_at_signals()?;
        Ok(Editor { inner, file })
    }

    /// Reads the next input.
    ///
    /// # Errors
    /// The terminal fails.
    pub fn read(&mut self) -> Result<UserInput> {
        loop {
            if let Some(helper) = self.inner.helper_mut() {
                helper.is_empty.set(true);
                helper.joined.borrow_mut().clear();
            }
            WAITING.store(true, Ordering::SeqCst);
            let read = self.inner.readline(PROMPT);
            WAITING.store(false, Ordering::SeqCst);
            match read {
                Ok(text) => return Ok(self.accept(&text)),
                Err(ReadlineError::Interrupted) => {
                    return Ok(UserInput::Interrupted(self.inner.helper().is_none_or(|helper| helper.is_empty.get())));
                }
                Err(ReadlineError::Eof) => return Ok(UserInput::End),
                Err(ReadlineError::Signal(_)) => {}
                Err(ReadlineError::Io(e)) if e.kind() == std::io::ErrorKind::InvalidData => {
                    crate::console::note("terminal: found bytes that are not UTF-8, expected text");
                }
                Err(_) => {
                    // The terminal was closed; its SIGHUP may still be on the way.
                    std::thread::sleep(4 * INTERVAL);
                    return interrupt::check().map(|()| UserInput::End);
                }
            }
        }
    }

    /// Adds a text that was written elsewhere to the history.
    ///
    /// # Errors
    /// The history cannot take it.
    pub fn remember(&mut self, text: &str) -> Result<()> {
        if !text.trim().is_empty()
            && self.inner.history_mut().add(text).map_err(refused)?
            && let Some(file) = &mut self.file
        {
            file.append(text);
        }
        Ok(())
    }

    /// Adds a text to the history and removes its marks and backslashes.
    fn accept(&mut self, text: &str) -> UserInput {
        // A text that the history does not take is a message all the same.
        let _ = self.remember(text);
        let joined = self.inner.helper().map(|helper| helper.joined.take()).unwrap_or_default();
        entry(text, &joined)
    }
}

/// Returns the input that a text means; `joined` holds what was typed each time a backslash continued the text.
fn entry(text: &str, joined: &[String]) -> UserInput {
    let trimmed = text.trim();
    let quoted = trimmed.strip_prefix(MARKS).and_then(|rest| rest.strip_suffix(MARKS));
    if let Some(inside) = quoted {
        let inside = inside.strip_prefix('\n').unwrap_or(inside);
        return UserInput::Quoted(inside.strip_suffix('\n').unwrap_or(inside).to_string());
    }
    let mut text = text.to_string();
    for typed in joined.iter().rev() {
        // If the text before the backslash was edited later, `typed` is no prefix any more and the backslash stays.
        if text.strip_prefix(typed.as_str()).is_some_and(|rest| rest.starts_with('\n')) {
            text.remove(typed.len() - 1);
        }
    }
    // A command may have a text between marks.
    if trimmed.starts_with('/') && trimmed.ends_with(MARKS) && text.matches(MARKS).count() == 2 {
        text = text.replace(MARKS, "");
    }
    UserInput::Line(text)
}

/// Returns true if Enter continues the text instead of sending it.
fn is_open(text: &str) -> bool {
    text.matches(MARKS).count() % 2 == 1 && (text.trim_start().starts_with(MARKS) || text.trim_start().starts_with('/'))
}

fn refused(e: ReadlineError) -> Error {
    match e {
        ReadlineError::Io(e) => e.into(),
        e => Error::engine(format!("the terminal cannot be used: {e}"))
            .help("write messages to standard input through a pipe, or use --json"),
    }
}

/// Starts the thread that ends the process at a signal while the editor waits.
fn end_at_signals() -> Result<()> {
    let before = tcgetattr(std::io::stdin()).ok();
    spawn("iec-terminal", move || {
        loop {
            std::thread::sleep(INTERVAL);
            if let Some(signal) = interrupt::requested().filter(|_| WAITING.load(Ordering::SeqCst)) {
                before.iter().for_each(restore);
                std::process::exit(i32::from(signal.exit_code()));
            }
        }
    })
    .map(drop)
}

/// Restores the settings of the terminal and turns off bracketed paste.
fn restore(before: &Termios) {
    let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, before);
    let terminal = std::fs::OpenOptions::new().write(true).open("/dev/tty");
    let _ = terminal.and_then(|mut terminal| terminal.write_all(b"\x1b[?2004l\r\n"));
}

/// Completion, colors, and the decision whether Enter sends a text.
#[derive(Default)]
struct Helper {
    colors: bool,
    /// True if the line is empty.
    is_empty: Cell<bool>,
    /// Texts as they were when a backslash continued them.
    joined: RefCell<Vec<String>>,
}

impl rustyline::Helper for Helper {}

impl Completer for Helper {
    type Candidate = String;

    fn complete(&self, line: &str, pos: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        Ok(candidates(&line[..pos]))
    }
}

impl Hinter for Helper {
    type Hint = String;

    /// Records whether the line is empty; shows nothing.
    fn hint(&self, line: &str, _: usize, _: &Context<'_>) -> Option<String> {
        self.is_empty.set(line.is_empty());
        None
    }
}

impl Highlighter for Helper {
    fn highlight_prompt<'b, 's: 'b, 'p: 'b>(&'s self, prompt: &'p str, _: bool) -> Cow<'b, str> {
        if self.colors { Cow::Owned(format!("\x1b[1m{prompt}\x1b[0m")) } else { Cow::Borrowed(prompt) }
    }
}

impl Validator for Helper {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let text = context.input();
        if is_open(text) {
            return Ok(ValidationResult::Incomplete);
        }
        if text.ends_with('\\') && !text.ends_with("\\\\") {
            self.joined.borrow_mut().push(text.to_string());
            return Ok(ValidationResult::Incomplete);
        }
        Ok(ValidationResult::Valid(None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_several_lines_lose_their_marks() {
        let line = |text: &str| UserInput::Line(text.into());
        let quoted = |text: &str| UserInput::Quoted(text.into());
        let cases = [
            ("Hi", &[][..], line("Hi")),
            ("\"\"\"one\ntwo\"\"\"", &[], quoted("one\ntwo")),
            ("\"\"\"\n/not a command\n\"\"\"", &[], quoted("/not a command")),
            ("one\\\ntwo\\\nthree", &["one\\", "one\\\ntwo\\"], line("one\ntwo\nthree")),
            // A backslash in a pasted text is part of it.
            ("#define A \\\n 1", &[], line("#define A \\\n 1")),
            ("/system \"\"\"one\ntwo\"\"\"", &[], line("/system one\ntwo")),
            ("a \"\"\"b\"\"\"", &[], line("a \"\"\"b\"\"\"")),
            ("\"\"\"", &[], line("\"\"\"")),
        ];
        for (text, joined, expected) in cases {
            let joined: Vec<String> = joined.iter().map(ToString::to_string).collect();
            assert_eq!(entry(text, &joined), expected, "{text}");
        }
    }

    #[test]
    fn open_marks_continue_a_text() {
        for (text, open) in [
            ("\"\"\"", true),
            ("\"\"\"a\nb", true),
            ("\"\"\"a\"\"\"", false),
            ("/system \"\"\"a", true),
            ("what is \"\"\" in Python?", false),
            ("a", false),
        ] {
            assert_eq!(is_open(text), open, "{text}");
        }
    }
}
