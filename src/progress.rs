//! Reports the progress of long operations. The library counts; the program installs a [`Display`] that decides what
//! is shown and where. Without a display nothing is shown. The progress of a [`Task`] goes to its caller instead.

pub use crate::task::Unit;
use crate::task::{self, Progress, Task};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

static QUIET: AtomicBool = AtomicBool::new(false);
static VERBOSITY: AtomicU8 = AtomicU8::new(0);
static DISPLAY: OnceLock<Display> = OnceLock::new();

/// A change of a progress bar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Update<'a> {
    /// Number of units that were done since the last update.
    Advance(u64),
    /// Number of units that an earlier run has done; they do not count for the rate and the remaining time.
    Skip(u64),
    /// Number of units that were counted but must be done again.
    Retreat(u64),
    /// Text to show next to the bar.
    Message(&'a str),
}

/// Function that shows the changes of one bar; the bar disappears when the function is dropped.
pub type ShowBar = Box<dyn Fn(Update<'_>) + Send + Sync>;

/// Functions with which the program shows progress.
#[derive(Debug, Clone, Copy)]
pub struct Display {
    /// Starts a bar with a label, a total and a unit; `None` if no bar can be shown.
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

/// Sets the highest level of [`detail`] that is shown (`--verbose`, repeated).
pub fn set_verbosity(level: u8) {
    VERBOSITY.store(level, Ordering::Relaxed);
}

/// Returns the display, if one is installed and output is not quiet.
fn display() -> Option<&'static Display> {
    DISPLAY.get().filter(|_| !QUIET.load(Ordering::Relaxed))
}

/// Shows a line if the verbosity is at least `level`. Level 0 is for notes to all users, 1 for the steps of the work,
/// 2 for single tensors.
pub fn detail(level: u8, line: impl FnOnce() -> String) {
    if let Some(task) = task::current() {
        if level == 0 {
            task.report(Progress::Note(&line()));
        }
    } else if let Some(display) = display()
        && VERBOSITY.load(Ordering::Relaxed) >= level
    {
        (display.line)(&line());
    }
}

/// Starts a bar that counts bytes, with rate and remaining time.
pub fn bytes(label: &str, total: u64) -> ProgressBar {
    bar(label, total, Unit::Bytes)
}

/// Starts a bar that counts items.
pub fn items(label: &str, total: u64) -> ProgressBar {
    bar(label, total, Unit::Items)
}

fn bar(label: &str, total: u64, unit: Unit) -> ProgressBar {
    let show = match task::current() {
        Some(task) => Some(bar_of_task(task, label.to_string(), total, unit)),
        None => display().and_then(|display| (display.bar)(label, total, unit)),
    };
    ProgressBar { show }
}

/// Starts a bar whose changes the caller of a task receives.
fn bar_of_task(task: Arc<Task>, label: String, total: u64, unit: Unit) -> ShowBar {
    let done = AtomicU64::new(0);
    let report = move |update: Update<'_>| {
        let done = match update {
            Update::Advance(n) | Update::Skip(n) => done.fetch_add(n, Ordering::Relaxed) + n,
            Update::Retreat(n) => done.fetch_sub(n, Ordering::Relaxed).saturating_sub(n),
            Update::Message(_) => return,
        };
        task.report(Progress::Advanced { label: &label, done, total, unit });
    };
    report(Update::Advance(0));
    Box::new(report)
}

/// Counter of the progress of one operation. Threads may share it. Dropping it removes the bar from the screen.
pub struct ProgressBar {
    /// `None` if the bar is not shown.
    show: Option<ShowBar>,
}

impl ProgressBar {
    /// Creates a bar that is not shown.
    pub fn hidden() -> ProgressBar {
        ProgressBar { show: None }
    }

    /// Returns true when the bar is not shown.
    pub fn is_hidden(&self) -> bool {
        self.show.is_none()
    }

    /// Counts `n` more.
    pub fn inc(&self, n: u64) {
        self.update(Update::Advance(n));
    }

    /// Counts `n` more that an earlier run has done.
    pub fn skip(&self, n: u64) {
        self.update(Update::Skip(n));
    }

    /// Counts `n` fewer, because they must be done again.
    pub fn dec(&self, n: u64) {
        self.update(Update::Retreat(n));
    }

    /// Shows a text next to the bar.
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
