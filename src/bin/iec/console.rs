//! Prints data on stdout and notes for people on stderr. No other file writes to either.
//!
//! Text from outside (texts of models, names, paths, values of configurations, errors that quote them) may have control
//! characters, which steer a terminal. Everything for people is printed without them; data keep them where no terminal
//! shows them.
//!
//! If the reader of stdout closes it, as `head` does, printing fails with `BrokenPipe`, the command unwinds, and `main`
//! ends the program with exit code 0 and without a message. Any other failure of stdout, such as a full disk, is an
//! error. Stderr has no data, so a note that cannot be printed is dropped and never ends a command.

use crate::harmless::{Harmless, harmless};
use iec::error::{Error, Result};
use iec::files::Stream;
use iec::generate::text::strftime;
use rustix::termios::tcgetwinsize;
use serde::Serialize;
use serde_json::json;
use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::{LazyLock, Mutex, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Styles of text on a terminal. No other file has such sequences, so that text from outside cannot bring its own.
pub const RED: &str = "\x1b[1;31m";
pub const CYAN: &str = "\x1b[36m";
pub const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";
/// End of a style and of the line.
pub const PLAIN_LINE: &str = "\x1b[0m\n";

/// Style that begins or ends inside a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    Bold,
    BoldEnd,
    Code,
    CodeEnd,
}

impl Style {
    /// Returns the sequence that a terminal takes.
    pub const fn sequence(self) -> &'static str {
        match self {
            Style::Bold => "\x1b[1m",
            Style::BoldEnd => "\x1b[22m",
            Style::Code => CYAN,
            Style::CodeEnd => "\x1b[39m",
        }
    }
}

/// Text with styles, which has no other control characters than line breaks and tabs.
#[derive(Debug, Default)]
pub struct Styled(String);

impl Styled {
    /// Adds a character.
    pub fn push(&mut self, c: char) {
        let shown = matches!(c, '\n' | '\t') || !c.is_control();
        self.0.push(if shown { c } else { char::REPLACEMENT_CHARACTER });
    }

    /// Begins or ends a style.
    pub fn style(&mut self, style: Style) {
        self.0.push_str(style.sequence());
    }

    /// Moves all of `other` behind this text.
    pub fn append(&mut self, other: &mut Styled) {
        self.0.push_str(&std::mem::take(&mut other.0));
    }

    /// Returns true if there is neither a character nor a style.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the text with the sequences of its styles.
    #[cfg(test)]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Version of the names and meanings of fields in the JSON output of all commands.
const SCHEMA_VERSION: u32 = 1;
/// Text of the field of that version in an object, up to the number.
const SCHEMA_FIELD: &str = "\"schema_version\":";

/// Prints text for people on stdout, at once, without control characters of names and values in it.
///
/// # Errors
/// Stdout is closed or cannot be written to.
pub fn print(text: impl Display) -> Result<()> {
    Ok(Stdout.write_all(harmless(&text.to_string()).as_bytes())?)
}

/// Prints data on stdout, at once: the text of a model, JSON, a script. A file or a pipe gets it as it is; on a
/// terminal, control characters are replaced.
///
/// # Errors
/// Stdout is closed or cannot be written to.
pub fn print_data(text: impl Display) -> Result<()> {
    static TERMINAL: LazyLock<Option<Mutex<Harmless>>> =
        LazyLock::new(|| io::stdout().is_terminal().then(Mutex::default));
    let text = text.to_string();
    let shown = match &*TERMINAL {
        Some(filter) => filter.lock().unwrap_or_else(PoisonError::into_inner).push(&text),
        None => text,
    };
    Ok(Stdout.write_all(shown.as_bytes())?)
}

/// Prints a text with styles on stdout, which is a terminal, at once.
///
/// # Errors
/// Stdout is closed or cannot be written to.
pub fn print_styled(text: &Styled) -> Result<()> {
    Ok(Stdout.write_all(text.0.as_bytes())?)
}

/// Prints `text` and a line end on stdout, at once.
///
/// # Errors
/// Stdout is closed or cannot be written to.
pub fn print_line(text: impl Display) -> Result<()> {
    print(format_args!("{text}\n"))
}

/// Prints an object as one line of JSON on stdout, with the version of the schema as its first field.
///
/// # Errors
/// Stdout is closed or cannot be written to.
pub fn print_json(object: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(object)
        .map_err(|e| Error::corrupt(format!("the result cannot be written as JSON: {e}")))?;
    match text.strip_prefix('{') {
        Some(fields) if !fields.starts_with(SCHEMA_FIELD) => {
            let separator = if fields == "}" { "" } else { "," };
            print_data(format_args!("{{{SCHEMA_FIELD}{SCHEMA_VERSION}{separator}{fields}\n"))
        }
        _ => print_data(format_args!("{text}\n")),
    }
}

/// Form of the lines of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
// Only the server uses it.
#[cfg_attr(not(feature = "serve"), allow(dead_code))]
pub enum LogForm {
    /// The time and the text.
    Text,
    /// A JSON object.
    Json,
}

/// Form of all notes once they are lines of a log.
static LOG: OnceLock<LogForm> = OnceLock::new();

/// Makes all further notes of the process lines of a log, with the time at which they are printed.
// Only the server uses it.
#[cfg_attr(not(feature = "serve"), allow(dead_code))]
pub fn log_notes(form: LogForm) {
    let _ = LOG.set(form);
}

impl LogForm {
    /// Returns the line about `text`, which is a JSON object or a note, at this time.
    fn line(self, text: &str, now: SystemTime) -> String {
        let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let seconds = strftime(since.as_secs(), "%Y-%m-%dT%H:%M:%S").unwrap_or_default();
        let time = format!("{seconds}.{:03}Z", since.subsec_millis());
        match (self, text.strip_prefix('{')) {
            (LogForm::Text, _) => format!("{time} {text}"),
            (LogForm::Json, Some(members)) => format!("{{\"time\":\"{time}\",{members}"),
            (LogForm::Json, None) => json!({"time": time, "event": "note", "message": text}).to_string(),
        }
    }
}

/// Prints `text` and a line end on stderr, if it can be written to.
pub fn note(text: impl Display) {
    match LOG.get() {
        None => note_part(format_args!("{text}\n")),
        Some(form) => note_part(format_args!("{}\n", form.line(&text.to_string(), SystemTime::now()))),
    }
}

/// Prints `text` on stderr, if it can be written to.
pub fn note_part(text: impl Display) {
    write_note(&harmless(&text.to_string()));
}

/// Prints a text with styles on stderr, which is a terminal.
pub fn note_styled(text: &Styled) {
    write_note(&text.0);
}

/// Prints a line on stderr that begins with a word in a color: `error:`, `help:`. `color` is empty for none.
pub fn note_with_label(color: &'static str, label: &'static str, text: impl Display) {
    if LOG.get().is_some() {
        return note(format_args!("{label} {text}"));
    }
    let end = if color.is_empty() { "" } else { PLAIN };
    write_note(&format!("{color}{label}{end} {}\n", harmless(&text.to_string())));
}

/// Changes the style of what is printed on stderr next, by a sequence of this program.
pub fn note_style(sequence: &'static str) {
    write_note(sequence);
}

fn write_note(text: &str) {
    // One call per note: stderr has no buffer, and lines of several threads must not mix.
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Prints the message of the parser of arguments: help and version on stdout, errors on stderr.
pub fn parser_answer(answer: &clap::Error) -> ExitCode {
    // A program that asked for JSON gets the error as JSON, like every other error.
    if answer.use_stderr() && std::env::args_os().any(|word| word == "--json") {
        let (message, help) = parser_words(answer);
        let _ = print_json(&json!({"error": {
            "kind": "usage", "message": message, "file": null, "tensor": null, "help": help,
        }}));
    }
    // Arguments may be names of files that others chose. The parser would print their control characters.
    if std::env::args_os().any(|word| word.to_string_lossy().chars().any(char::is_control)) {
        let text = answer.render().to_string();
        if answer.use_stderr() {
            note_part(text);
        } else {
            let _ = print(text);
        }
        return ExitCode::from(answer.exit_code().clamp(0, 255) as u8);
    }
    match answer.print() {
        Err(e) if !answer.use_stderr() && e.kind() != ErrorKind::BrokenPipe => {
            note(format_args!("error: {}", named(e)));
            ExitCode::FAILURE
        }
        _ => ExitCode::from(answer.exit_code().clamp(0, 255) as u8),
    }
}

/// Returns the message of an error of the parser, without `error:`, and the text that follows it.
pub fn parser_words(error: &clap::Error) -> (String, String) {
    let text = error.render().to_string();
    let (message, help) = text.split_once("\n\n").unwrap_or((&text, ""));
    (message.trim_start_matches("error: ").trim().into(), help.trim().into())
}

/// Columns of tables for a reader without a terminal.
const COLUMNS: usize = 80;

/// Returns the columns of the terminal on stderr, and those of a usual one if there is none.
pub fn columns() -> usize {
    columns_of(io::stderr()).unwrap_or(COLUMNS)
}

/// Returns the columns of a terminal; `None` if `stream` is none.
pub fn columns_of(stream: impl AsFd) -> Option<usize> {
    tcgetwinsize(stream).ok().map(|size| usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

/// Stdout for functions that take a [`Write`]. It has no buffer; code that prints many small pieces wraps it in one.
/// Waiting for a reader that is slow ends with an interrupt.
pub struct Stdout;

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Stream::of(io::stdout()).write(bytes).map_err(named)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Adds `stdout:` to an error of the system. The error of a closed pipe is returned unchanged, because it is never
/// shown.
fn named(e: io::Error) -> io::Error {
    match e.kind() {
        ErrorKind::BrokenPipe => e,
        _ if e.raw_os_error().is_none() => e,
        kind => io::Error::new(kind, format!("stdout: {e}")),
    }
}
