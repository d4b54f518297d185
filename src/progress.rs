//! Progress bars and details on stderr; bars are silent when stderr is no terminal, both when the user asked for quiet.

pub use indicatif::ProgressBar;
use indicatif::{ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

static QUIET: AtomicBool = AtomicBool::new(false);
static VERBOSITY: AtomicU8 = AtomicU8::new(0);

/// Turns all progress output off (`--quiet`).
pub fn set_quiet(quiet: bool) {
    QUIET.store(quiet, Ordering::Relaxed);
}

/// How much [`detail`] tells (`--verbose`, repeated).
pub fn set_verbosity(level: u8) {
    VERBOSITY.store(level, Ordering::Relaxed);
}

/// A line for people who asked for at least this much detail: 1 tells what is done, 2 tells it tensor by tensor.
pub fn detail(level: u8, line: impl FnOnce() -> String) {
    if VERBOSITY.load(Ordering::Relaxed) >= level && !QUIET.load(Ordering::Relaxed) {
        eprintln!("{}", line());
    }
}

/// A bar that counts bytes, with rate and remaining time.
pub fn bytes(label: &str, total: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix:>12} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} ETA {eta}");
    bar(label, total, style)
}

/// A bar that counts items.
pub fn items(label: &str, total: u64) -> ProgressBar {
    bar(label, total, ProgressStyle::with_template("{prefix:>12} {wide_bar} {pos}/{len} ETA {eta} {msg}"))
}

fn bar(label: &str, total: u64, style: Result<ProgressStyle, indicatif::style::TemplateError>) -> ProgressBar {
    let visible = std::io::stderr().is_terminal() && !QUIET.load(Ordering::Relaxed);
    let target = if visible { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
    let bar = ProgressBar::with_draw_target(Some(total), target).with_prefix(label.to_string());
    match style {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
