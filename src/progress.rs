//! Progress of long operations and notes on what they do. The library counts; what is shown, and where, is decided by
//! the program: it installs a [`Display`]. Without one nothing is shown.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

static QUIET: AtomicBool = AtomicBool::new(false);
static VERBOSITY: AtomicU8 = AtomicU8::new(0);
static DISPLAY: OnceLock<Display> = OnceLock::new();

/// What a progress bar counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, shown with their rate.
    Bytes,
    /// Things of any other kind.
    Items,
}

/// A change of a progress bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Update<'a> {
    /// So many more are done.
    Advance(u64),
    /// So many must be done again.
    Retreat(u64),
    /// A text to show beside the bar.
    Message(&'a str),
}

/// Shows the changes of one bar, which vanishes when this is dropped.
pub type ShowBar = Box<dyn Fn(Update<'_>) + Send + Sync>;

/// How a program shows progress.
#[derive(Debug, Clone, Copy)]
pub struct Display {
    /// Begins a bar with a label, a total and a unit; `None` where no bar can be seen.
    pub bar: fn(&str, u64, Unit) -> Option<ShowBar>,
    /// Shows a line of text.
    pub line: fn(&str),
}

/// Installs the display of this process. Only the first call has an effect.
pub fn install(display: Display) {
    DISPLAY.get_or_init(|| display);
}

/// Turns all progress output off (`--quiet`).
pub fn set_quiet(quiet: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
}

/// How much [`detail`] tells (`--verbose`, repeated).
pub fn set_verbosity(level: u8) {
    VERBOSITY.store(level, Ordering::Relaxed);
}

/// The display, unless the program wants none or is quiet.
fn display() -> Option<&'static Display> {
    DISPLAY.get().filter(|_| !QUIET.load(Ordering::Relaxed))
}

/// A line for people who asked for at least this much detail: 0 is a note for everyone, 1 tells what is done, 2 tells
/// it tensor by tensor.
pub fn detail(level: u8, line: impl FnOnce() -> String) {
    if let Some(display) = display()
        && VERBOSITY.load(Ordering::Relaxed) >= level
    {
        (display.line)(&line());
    }
}

/// A bar that counts bytes, with rate and remaining time.
pub fn bytes(label: &str, total: u64) -> ProgressBar {
    ProgressBar { show: display().and_then(|display| (display.bar)(label, total, Unit::Bytes)) }
}

/// A bar that counts items.
pub fn items(label: &str, total: u64) -> ProgressBar {
    ProgressBar { show: display().and_then(|display| (display.bar)(label, total, Unit::Items)) }
}

/// Counts the progress of one operation. Threads may share it. Dropped, it removes the bar from the screen.
pub struct ProgressBar {
    /// `None` where nobody looks.
    show: Option<ShowBar>,
}

impl ProgressBar {
    /// A bar that is not shown.
    pub fn hidden() -> ProgressBar {
        ProgressBar { show: None }
    }

    /// True when the bar is not shown.
    pub fn is_hidden(&self) -> bool {
        self.show.is_none()
    }

    /// Counts `n` more.
    pub fn inc(&self, n: u64) {
        self.update(Update::Advance(n));
    }

    /// Counts `n` fewer, because they must be done again.
    pub fn dec(&self, n: u64) {
        self.update(Update::Retreat(n));
    }

    /// Shows a text beside the bar.
    pub fn set_message(&self, message: impl AsRef<str>) {
        self.update(Update::Message(message.as_ref()));
    }

    fn update(&self, update: Update<'_>) {
        if let Some(show) = &self.show {
            show(update);
        }
    }
}

impl std::fmt::Debug for ProgressBar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProgressBar").field("hidden", &self.is_hidden()).finish()
    }
}
