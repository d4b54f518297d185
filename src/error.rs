//! Error type of the crate: cause, place, and advice for the user.
//!
//! An [`Error`] has a [`Cause`] (which decides the exit code), a place (file, tensor or field) and a help text. Code
//! that reads invalid bytes reports what it found and what it expected; callers add the place with [`Context::at`]
//! and [`Context::tensor`] as the error propagates.

use std::fmt;
use std::path::{Path, PathBuf};

/// The crate's result type.
pub type Result<T> = std::result::Result<T, Error>;

/// Cause of an error. The variant decides the process exit code.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    /// The operating system refused: missing file, permissions, full disk.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// Bytes from outside break the rules of their format.
    #[error("{0}")]
    Corrupt(String),
    /// Well-formed input that this version cannot process exactly.
    #[error("{0}")]
    Unsupported(String),
    /// The caller asked for something contradictory or out of range.
    #[error("{0}")]
    Usage(String),
    /// A model was required and is missing, unreadable or invalid.
    #[error("{0}")]
    Model(String),
    /// Negative result: a quality gate refused, or a verification found a difference.
    #[error("{0}")]
    Refused(String),
    /// The engine cannot be created as asked: architecture, precision or device.
    #[error("{0}")]
    Engine(String),
    /// The system refused memory, address space, a thread or a process.
    #[error("{0}")]
    OutOfMemory(String),
    /// A signal stopped the work. No incomplete output is left; partial work may be kept for the next run.
    #[error("interrupted; {}", if *.resumable { "run the same command again to continue" } else { "nothing was left half-written" })]
    Interrupted {
        /// Signal that was received.
        signal: Signal,
        /// True when the same command continues the work.
        resumable: bool,
    },
}

/// Signal that asked the process to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// SIGINT: the user pressed Ctrl-C.
    Interrupt,
    /// SIGTERM: sent by the system or by a scheduler.
    Terminate,
    /// SIGHUP: the terminal was closed.
    HangUp,
}

impl Signal {
    /// Returns the exit code of the process: 128 + the number of the signal, the convention of shells.
    pub fn exit_code(self) -> u8 {
        match self {
            Signal::HangUp => 129,
            Signal::Interrupt => 130,
            Signal::Terminate => 143,
        }
    }
}

impl Cause {
    /// Returns the stable machine-readable name, used in `--json` error objects, and the process exit code, both as
    /// documented in docs/guide/scripts-and-errors.md.
    fn kind_and_exit_code(&self) -> (&'static str, u8) {
        match self {
            Cause::Io(_) => ("io", 1),
            Cause::Corrupt(_) => ("corrupt", 1),
            Cause::Unsupported(_) => ("unsupported", 1),
            Cause::Usage(_) => ("usage", 2),
            Cause::Model(_) => ("model", 3),
            Cause::Refused(_) => ("refused", 4),
            Cause::Engine(_) => ("engine", 5),
            Cause::OutOfMemory(_) => ("out_of_memory", 6),
            Cause::Interrupted { signal, .. } => ("interrupted", signal.exit_code()),
        }
    }

    /// Returns the stable machine-readable name, used in `--json` error objects.
    pub fn kind(&self) -> &'static str {
        self.kind_and_exit_code().0
    }

    /// Returns the process exit code, as documented in docs/guide/scripts-and-errors.md.
    pub fn exit_code(&self) -> u8 {
        self.kind_and_exit_code().1
    }
}

/// Error with its place and advice for the user. [`Debug`](fmt::Debug) shows message and advice, as a program whose
/// `main` returns a [`Result`] prints them.
pub struct Error {
    inner: Box<Inner>,
}

struct Inner {
    cause: Cause,
    file: Option<PathBuf>,
    tensor: Option<String>,
    setting: Option<String>,
    help: Option<String>,
}

impl Error {
    /// Creates an error with a cause and no place.
    pub fn new(cause: Cause) -> Self {
        Error { inner: Box::new(Inner { cause, file: None, tensor: None, setting: None, help: None }) }
    }

    /// Creates a [`Cause::Corrupt`] error.
    pub fn corrupt(message: impl Into<String>) -> Self {
        Error::new(Cause::Corrupt(message.into()))
    }

    /// Creates a [`Cause::Unsupported`] error.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Error::new(Cause::Unsupported(message.into()))
    }

    /// Creates a [`Cause::Usage`] error.
    pub fn usage(message: impl Into<String>) -> Self {
        Error::new(Cause::Usage(message.into()))
    }

    /// Creates a [`Cause::Engine`] error.
    pub fn engine(message: impl Into<String>) -> Self {
        Error::new(Cause::Engine(message.into()))
    }

    /// Creates a [`Cause::Refused`] error.
    pub fn refused(message: impl Into<String>) -> Self {
        Error::new(Cause::Refused(message.into()))
    }

    /// Adds the file that the error concerns; the innermost call wins. Has no effect on an interrupt.
    pub fn at(mut self, path: impl AsRef<Path>) -> Self {
        if !self.is_interrupt() {
            self.inner.file.get_or_insert_with(|| path.as_ref().to_path_buf());
        }
        self
    }

    /// Adds the tensor or field that the error concerns; the innermost call wins. Has no effect on an interrupt.
    pub fn tensor(mut self, name: impl Into<String>) -> Self {
        if !self.is_interrupt() {
            self.inner.tensor.get_or_insert_with(|| name.into());
        }
        self
    }

    /// Adds the setting of the caller that the error concerns, such as an option; the innermost call wins. Has no
    /// effect on an interrupt.
    pub fn setting(mut self, name: impl Into<String>) -> Self {
        if !self.is_interrupt() {
            self.inner.setting.get_or_insert_with(|| name.into());
        }
        self
    }

    /// Returns true when a signal stopped the work.
    pub fn is_interrupt(&self) -> bool {
        matches!(self.inner.cause, Cause::Interrupted { .. })
    }

    /// Returns true when SIGINT (Ctrl-C) stopped the work.
    pub fn is_sigint(&self) -> bool {
        matches!(self.inner.cause, Cause::Interrupted { signal: Signal::Interrupt, .. })
    }

    /// Returns true when a file does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(&self.inner.cause, Cause::Io(e) if e.kind() == std::io::ErrorKind::NotFound)
    }

    /// Adds advice for the user; the innermost call wins. Has no effect on an interrupt.
    pub fn help(mut self, help: impl Into<String>) -> Self {
        if !self.is_interrupt() {
            self.inner.help.get_or_insert_with(|| help.into());
        }
        self
    }

    /// Turns an I/O error or corrupt input into [`Cause::Model`], which has exit code 3 instead of 1.
    pub fn while_opening_model(mut self) -> Self {
        if matches!(self.inner.cause, Cause::Io(_) | Cause::Corrupt(_)) {
            self.inner.cause = Cause::Model(self.inner.cause.to_string());
        }
        self
    }

    /// Marks the work as resumable: the message says that the same command continues it.
    pub fn resumable(mut self) -> Self {
        if let Cause::Interrupted { resumable, .. } = &mut self.inner.cause {
            *resumable = true;
            return self;
        }
        self.help("run the same command again; it keeps the finished work and continues")
    }

    /// Returns the cause.
    pub fn cause(&self) -> &Cause {
        &self.inner.cause
    }

    /// Returns the file that the error concerns, if known.
    pub fn file(&self) -> Option<&Path> {
        self.inner.file.as_deref()
    }

    /// Returns the tensor or field that the error concerns, if known.
    pub fn tensor_name(&self) -> Option<&str> {
        self.inner.tensor.as_deref()
    }

    /// Returns the setting that the error concerns, if known.
    pub fn setting_name(&self) -> Option<&str> {
        self.inner.setting.as_deref()
    }

    /// Returns the advice for the user, if there is any.
    pub fn help_text(&self) -> Option<&str> {
        self.inner.help.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(file) = &self.inner.file {
            write!(f, "{}: ", printable(&file.display().to_string(), LONGEST_PATH))?;
        }
        if let Some(tensor) = &self.inner.tensor {
            write!(f, "{}: ", printable(tensor, LONGEST_NAME))?;
        }
        if let Some(setting) = &self.inner.setting {
            write!(f, "{}: ", printable(setting, LONGEST_NAME))?;
        }
        f.write_str(&printable(&self.inner.cause.to_string(), LONGEST_MESSAGE))
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")?;
        self.help_text().map_or(Ok(()), |help| write!(f, "\nhelp: {help}"))
    }
}

/// Longest path that systems allow, in bytes; longer ones only occur as file names inside untrusted files.
const LONGEST_PATH: usize = 4096;
/// Longest printed tensor name in bytes; names of real tensors stay below 100 characters.
const LONGEST_NAME: usize = 160;
/// Longest printed message in bytes, without path and tensor name.
const LONGEST_MESSAGE: usize = 800;

/// Escapes and shortens text to one line of bounded length: names and values in messages come from untrusted input,
/// which may contain line breaks, terminal sequences, characters that reverse the direction of text, or a megabyte of
/// text.
pub fn printable(text: &str, longest: usize) -> String {
    let mut out = String::with_capacity(text.len().min(longest));
    for c in text.chars() {
        let steers =
            matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}');
        if c.is_control() || steers {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
        if out.len() > longest {
            out.truncate(out.floor_char_boundary(longest));
            out.push('…');
            break;
        }
    }
    out
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.inner.cause {
            Cause::Io(e) => Some(e),
            _ => None,
        }
    }
}

impl From<std::io::Error> for Error {
    fn from(e: std::io::Error) -> Self {
        // `files::Stream` wraps an interrupt in an `io::Error`, because functions of the standard library pass on no
        // other errors.
        let e = match e.downcast::<Error>() {
            Ok(error) => return error,
            Err(e) => e,
        };
        match e.kind() {
            std::io::ErrorKind::OutOfMemory => Error::new(Cause::OutOfMemory(e.to_string()))
                .help("give the process more memory or address space (`ulimit -v`, the limits of the container)"),
            std::io::ErrorKind::StorageFull => Error::new(Cause::Io(e))
                .help("free some disk space, or choose a place on another disk, and run the command again"),
            _ => Error::new(Cause::Io(e)),
        }
    }
}

/// Adds a place or advice to the error of a `Result`.
pub trait Context<T> {
    /// Adds the file that the error concerns.
    fn at(self, path: impl AsRef<Path>) -> Result<T>;
    /// Adds the tensor or field that the error concerns.
    fn tensor(self, name: &str) -> Result<T>;
    /// Adds advice for the user.
    fn help(self, help: &str) -> Result<T>;
}

impl<T, E: Into<Error>> Context<T> for std::result::Result<T, E> {
    fn at(self, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|e| e.into().at(path))
    }
    fn tensor(self, name: &str) -> Result<T> {
        self.map_err(|e| e.into().tensor(name))
    }
    fn help(self, help: &str) -> Result<T> {
        self.map_err(|e| e.into().help(help))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_place_wins_and_shows_in_the_message() {
        let e = Error::corrupt("length 5, expected 4").at("inner.bin").tensor("w").at("outer.bin");
        assert_eq!(e.to_string(), "inner.bin: w: length 5, expected 4");
        let setting = Error::usage("found 2").setting("top-p").tensor("prompt 1");
        assert_eq!((setting.to_string().as_str(), setting.setting_name()), ("prompt 1: top-p: found 2", Some("top-p")));
        assert_eq!(e.cause().exit_code(), 1);
        assert_eq!(e.while_opening_model().cause().exit_code(), 3);
    }

    #[test]
    fn a_program_that_returns_an_error_prints_message_and_advice() {
        let e = Error::usage("--x: found 1, expected 2").at("model").help("leave --x out");
        assert_eq!(format!("{e:?}"), "model: --x: found 1, expected 2\nhelp: leave --x out");
        assert_eq!(format!("{:?}", Error::usage("found 1")), "found 1");
    }

    #[test]
    fn a_message_stays_one_short_line_whatever_files_put_into_it() {
        let name = "\x1b[2Jw\r\n\u{202e}".to_string() + &"é".repeat(100_000);
        let e = Error::corrupt(format!("`{name}` is unknown")).at("a\nb").tensor(&name);
        let message = e.to_string();
        assert!(message.len() < 1200 && message.chars().all(|c| !c.is_control() && c != '\u{202e}'), "{message}");
        assert!(message.starts_with("a\\nb: \\u{1b}[2Jw\\r\\n\\u{202e}éé"), "{message}");
        let plain = Error::corrupt("größer als „erlaubt“").to_string();
        assert_eq!(plain, "größer als „erlaubt“");
    }

    #[test]
    fn an_interrupt_has_no_place_but_a_way_on() {
        let e = Error::new(Cause::Interrupted { signal: Signal::Terminate, resumable: false }).at("f").tensor("w");
        assert_eq!(e.to_string(), "interrupted; nothing was left half-written");
        let e = e.resumable();
        assert_eq!(e.to_string(), "interrupted; run the same command again to continue");
        assert_eq!((e.cause().exit_code(), e.help_text()), (143, None));
    }

    #[test]
    fn refused_memory_has_its_own_exit_code_also_where_models_are_opened() {
        let e = Error::from(std::io::Error::from_raw_os_error(12)).at("model.ie.bin").while_opening_model();
        assert_eq!(e.cause().exit_code(), 6);
        assert!(e.to_string().starts_with("model.ie.bin: Cannot allocate memory"), "{e}");
    }

    #[test]
    fn a_full_disk_says_what_to_do() {
        let e = Error::from(std::io::Error::from(std::io::ErrorKind::StorageFull));
        assert!(e.help_text().unwrap().contains("disk space"));
    }
}
